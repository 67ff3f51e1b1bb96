"""Drivers: what talks to a device, and the two that stand in for one where there is none.

==================  ================================================================================================================
`hardware`          a CUDA device through cuda.core and numba-cuda
`simulator`         numba's simulator: every kernel runs, thread by thread, in Python; for tiny shapes, in a process of its own
`compile_only`      compiles each kernel that would be launched to PTX and runs none: what a machine without a device can check
==================  ================================================================================================================

All three obey `aiograd.cuda.driver.protocol.Driver`; nothing above this folder knows which one it has.
"""
