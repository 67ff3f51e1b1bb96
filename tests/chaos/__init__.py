"""Distributed backward passes under faults that seeds draw, against the same graph in one process, bit for bit.

``python -m tests.chaos`` (``make chaos``) runs many seeds and prints a table; ``tests/distributed/test_chaos.py`` runs some in the suite.
"""
