"""Tests that need a GPU: correctness on hardware (pytest, marker ``gpu``) and speed (``python -m tests.gpu``, ``make gpu``).

Elsewhere the tests are skipped, with what `aiograd.cuda.why_not` says; ``--tiny`` runs the benchmarks in numba's simulator, to see that they run.
"""
