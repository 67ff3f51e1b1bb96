"""Kernels in numba's CUDA language, by family.

Modules here hold kernels and nothing else: the simulator exchanges their global ``cuda`` while one runs.
"""
