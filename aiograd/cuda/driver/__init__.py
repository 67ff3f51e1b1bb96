"""Drivers: what talks to a device, and what stands in for one where there is none.

==================  ================================================================================================================
`hardware`          a CUDA device through cuda-bindings and numba-cuda
`simulator`         numba's simulator: every kernel runs, thread by thread, in Python; for tiny shapes, in a process of its own
==================  ================================================================================================================

Both obey `aiograd.cuda.driver.protocol.Driver`; nothing above this folder knows which one it has. `make ptx` has a third, which compiles each
kernel that would be launched and runs none.
"""
