"""``python -m tests.ptx`` (``make ptx``): compiles every CUDA kernel to PTX, which needs NVIDIA's compiler and no device."""
