"""The compiled kernels, by family. Importing this package imports numba; `aiograd.kernels.selection` does it on demand."""

from __future__ import annotations

from aiograd.kernels.compiled import (
    activation,
    attention,
    compression,
    convolution,
    depthwise,
    depthwise_3x3,
    gemm,
    layout,
    normalization,
    optimizer,
    recurrent,
    reduction,
    softmax,
    window,
)
from aiograd.kernels.compiled import gemm_microkernel as gemm_microkernel
from aiograd.kernels.compiled.jit import compile_all

__all__ = [
    "activation", "attention", "compile_all", "compression", "convolution", "depthwise", "depthwise_3x3", "gemm", "layout", "normalization",
    "optimizer", "recurrent", "reduction", "softmax", "gemm_microkernel", "window",
]  # fmt: skip
