"""Tests of the network and of processes many times over on a busy machine: which of them fail now and then; ``make flaky``.

`runs`   the pieces of a run, the busy processes beside it, and the table
"""
