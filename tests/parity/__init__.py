"""Comparison with PyTorch: ``python -m tests.parity`` compares values, gradients and second gradients of every row that has a counterpart
there, over the arguments the tests draw, and layers and optimizers over several steps.

Needs the extra `parity`. It is no part of the test suite, which checks every rule by finite differences without any peer.
"""
