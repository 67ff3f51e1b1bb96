"""Matrix products by cuBLAS, through its C interface.

Note [The same bits each time]
    cuBLAS promises equal results for equal calls on one kind of device where the caller provides its workspace, one stream uses it at a time and
    atomics are off. So each stream has a handle and a workspace of its own, from the device's pool, and atomics are not allowed. Single
    precision is single precision (`allow_tf32` permits TF32), half precision is summed in single.

Note [Rows and columns]
    cuBLAS has matrices by columns. A matrix by rows is, to it, the transposed one; ``(A B)ᵀ = Bᵀ Aᵀ``, so the operands change places and nothing
    is copied.

Rejected: nvmath-python (a package for one call); cublasLt (its epilogues pay where kernels are not fused otherwise; its choice of algorithms
needs a cache of its own to stay the same).

Source: cuBLAS library reference, sections on results reproducibility and cublasGemmStridedBatchedEx.
"""

from __future__ import annotations

import ctypes
import os
from typing import Any, Protocol

import numpy as np

from aiograd.cuda.driver.protocol import Pointer
from aiograd.errors import DeviceError, DeviceMemoryError

_STATUS = {
    1: "not initialised", 3: "no memory left", 7: "invalid value", 8: "the device is too old for it", 11: "memory could not be mapped",
    13: "a kernel failed", 14: "internal error", 15: "not supported",
}  # fmt: skip
_NO_MEMORY = 3
#: letter of a dtype -> number of cudaDataType
_TYPES = {"f": 0, "d": 1, "e": 2}
#: letter of a dtype -> number of cublasComputeType_t
_COMPUTE = {"f": 68, "d": 70, "e": 68}
_COMPUTE_TF32 = 77
_ATOMICS_NOT_ALLOWED = 0
#: half precision is not summed in half precision on the way either
_MATH_MODE = 16
_DEFAULT_ALGORITHM = -1
_WORKSPACE = 32 << 20

_POINTER, _INT, _LONG = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
_SIGNATURES: dict[str, tuple[Any, ...]] = {
    "cublasCreate_v2": (_POINTER,),
    "cublasDestroy_v2": (_POINTER,),
    "cublasSetStream_v2": (_POINTER, _POINTER),
    "cublasSetWorkspace_v2": (_POINTER, _POINTER, ctypes.c_size_t),
    "cublasSetAtomicsMode": (_POINTER, _INT),
    "cublasSetMathMode": (_POINTER, _INT),
    "cublasGemmStridedBatchedEx_64": (
        _POINTER, _INT, _INT, _LONG, _LONG, _LONG, _POINTER,
        _POINTER, _INT, _LONG, _LONG, _POINTER, _INT, _LONG, _LONG, _POINTER,
        _POINTER, _INT, _LONG, _LONG, _LONG, _INT, _INT,
    ),
}  # fmt: skip


class WorkspaceAllocator(Protocol):
    """The source of workspaces: allocates and frees memory of a device."""

    def allocate(self, nbytes: int, stream: Any) -> Any: ...
    def free(self, memory: Any, stream: Any) -> None: ...


class Cublas:
    """The library, with a handle for each stream. On the device's thread only.

    Args:
        library: the library as loaded by ctypes.
        memory: the driver of the device.
        allow_tf32: let single precision be multiplied with eleven bits on tensor cores; None takes AIOGRAD_CUDA_TF32.

    Raises:
        AttributeError: the library is too old (before version 12).
    """

    def __init__(self, library: Any, memory: WorkspaceAllocator, *, allow_tf32: bool | None = None) -> None:
        for name, types in _SIGNATURES.items():
            function = getattr(library, name)
            function.argtypes = types
            function.restype = _INT
        self._library = library
        self._memory = memory
        self.allow_tf32 = os.environ.get("AIOGRAD_CUDA_TF32", "0") not in ("", "0") if allow_tf32 is None else allow_tf32
        #: address of a stream -> handle, workspace and the stream itself
        self._handles: dict[int, tuple[int, Any, Any]] = {}

    def gemm(
        self,
        out: Pointer, a: Pointer, b: Pointer, m: int, n: int, k: int, batch: int,
        layout_a: tuple[int, bool, int], layout_b: tuple[int, bool, int], layout_out: tuple[int, int],
        alpha: float, beta: float, stream: Any,
    ) -> None:  # fmt: skip
        """``out[i] = alpha · op(a[i]) @ op(b[i]) + beta · out[i]`` for `batch` matrices by rows.

        Args:
            out, a, b: first elements; of one dtype: float32, float64 or float16.
            m, n, k: ``op(a)`` is m×k, ``op(b)`` k×n, `out` m×n.
            layout_a, layout_b: elements from a row to the next, whether what lies there is transposed, elements from a matrix to the next.
            layout_out: elements from a row to the next, and from a matrix to the next.
            stream: the driver's handle.

        Raises:
            DeviceError: another dtype, or cuBLAS refused. DeviceMemoryError: no memory for its workspace.
        """
        if m == 0 or n == 0 or batch == 0:
            return
        kind = out.dtype.char
        if kind not in _TYPES or a.dtype != out.dtype or b.dtype != out.dtype:
            raise DeviceError(f"multiplying matrices of {a.dtype} and {b.dtype} into {out.dtype}: cuBLAS takes one of float32, float64, float16")
        scalar = ctypes.c_double if kind == "d" else ctypes.c_float
        one, other = scalar(alpha), scalar(beta)
        code = _TYPES[kind]
        compute = _COMPUTE_TF32 if self.allow_tf32 and kind == "f" else _COMPUTE[kind]
        (lda, trans_a, stride_a), (ldb, trans_b, stride_b), (ldc, stride_c) = layout_a, layout_b, layout_out
        self._call(
            "cublasGemmStridedBatchedEx_64", self._handle(stream), int(trans_b), int(trans_a), n, m, k, ctypes.addressof(one),
            _address(b), code, ldb, stride_b, _address(a), code, lda, stride_a, ctypes.addressof(other),
            _address(out), code, ldc, stride_c, batch, compute, _DEFAULT_ALGORITHM,
        )  # fmt: skip

    def forget(self, stream: Any) -> None:
        """Destroy the handle and free the workspace of a finished stream."""
        found = self._handles.pop(int(stream), None)
        if found is not None:
            self._call("cublasDestroy_v2", found[0])
            self._memory.free(found[1], stream)

    def close(self) -> None:
        """Destroy all handles and free all workspaces. Idempotent."""
        for _, _, stream in list(self._handles.values()):
            self.forget(stream)

    def _handle(self, stream: Any) -> int:
        found = self._handles.get(int(stream))
        if found is not None:
            return found[0]
        handle = ctypes.c_void_p()
        self._call("cublasCreate_v2", ctypes.addressof(handle))
        value = handle.value or 0
        try:
            workspace = self._memory.allocate(_WORKSPACE, stream)
            self._handles[int(stream)] = (value, workspace, stream)
            self._call("cublasSetStream_v2", value, int(stream))
            self._call("cublasSetWorkspace_v2", value, workspace.address, _WORKSPACE)
            self._call("cublasSetAtomicsMode", value, _ATOMICS_NOT_ALLOWED)
            self._call("cublasSetMathMode", value, _MATH_MODE)
        except BaseException:
            if int(stream) in self._handles:
                self.forget(stream)
            else:
                self._call("cublasDestroy_v2", value)
            raise
        return value

    def _call(self, name: str, *args: Any) -> None:
        status = getattr(self._library, name)(*args)
        if status == _NO_MEMORY:
            raise DeviceMemoryError(f"{name}: cuBLAS found no memory left on the device")
        if status:
            raise DeviceError(f"{name}: {_STATUS.get(status, 'failed')} ({status})")


def _address(pointer: Pointer) -> int:
    address: int = pointer.memory.address + pointer.offset
    return address


def supports(dtype: np.dtype[Any]) -> bool:
    """True if `Cublas.gemm` multiplies matrices of this dtype."""
    return dtype.char in _TYPES
