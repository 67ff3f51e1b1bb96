"""Matrix products, on a library that does with matrices by columns what cuBLAS says it does."""

from __future__ import annotations

import ctypes
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.cuda.driver.cublas import Cublas
from aiograd.cuda.driver.protocol import Pointer
from aiograd.errors import DeviceError, DeviceMemoryError
from tests.support import assert_raises


class Function:
    """Stands for a function of a library: takes the types it is told, and insists on them."""

    def __init__(self, run: Any) -> None:
        self.run = run
        self.argtypes: tuple[Any, ...] = ()
        self.restype: Any = None

    def __call__(self, *args: Any) -> int:
        assert len(args) == len(self.argtypes)
        for value, kind in zip(args, self.argtypes, strict=True):
            kind(value)  # raises where ctypes would
        return int(self.run(*args) or 0)


class Library:
    """cuBLAS over host memory."""

    def __init__(self) -> None:
        self.log: list[tuple[Any, ...]] = []
        self.failures: dict[str, int] = {}
        self.handles = 0
        for name in ("cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSetAtomicsMode", "cublasSetMathMode"):
            setattr(self, name, Function(self._logged(name)))
        self.cublasCreate_v2 = Function(self._create)
        self.cublasDestroy_v2 = Function(self._destroy)
        self.cublasGemmStridedBatchedEx_64 = Function(self._gemm)

    def _logged(self, name: str) -> Any:
        def run(*args: Any) -> int:
            self.log.append((name, *args))
            return self.failures.pop(name, 0)

        return run

    def _create(self, address: int) -> int:
        self.handles += 1
        ctypes.c_void_p.from_address(address).value = 7000 + self.handles
        return self.failures.pop("cublasCreate_v2", 0)

    def _destroy(self, handle: int) -> None:
        self.log.append(("cublasDestroy_v2", handle))
        self.handles -= 1

    def _gemm(
        self, handle: int, trans_a: int, trans_b: int, m: int, n: int, k: int, alpha: int, a: int, type_a: int, lda: int, stride_a: int,
        b: int, type_b: int, ldb: int, stride_b: int, beta: int, c: int, type_c: int, ldc: int, stride_c: int, batch: int,
        compute: int, algorithm: int,
    ) -> int:  # fmt: skip
        self.log.append(("gemm", handle, type_c, compute, algorithm))
        dtype = {0: np.float32, 1: np.float64, 2: np.float16}[type_c]
        scalar = ctypes.c_double if type_c == 1 else ctypes.c_float
        one, other = scalar.from_address(alpha).value, scalar.from_address(beta).value

        def columns(address: int, rows: int, cols: int, ld: int) -> Any:
            """A view of a matrix by columns."""
            itemsize = np.dtype(dtype).itemsize
            raw = (ctypes.c_byte * (((cols - 1) * ld + rows) * itemsize)).from_address(address)
            return np.ndarray((rows, cols), dtype, raw, 0, (itemsize, ld * itemsize))  # type: ignore[call-overload]

        size = np.dtype(dtype).itemsize
        for i in range(batch):
            left = columns(a + i * stride_a * size, *((k, m) if trans_a else (m, k)), lda)
            right = columns(b + i * stride_b * size, *((n, k) if trans_b else (k, n)), ldb)
            out = columns(c + i * stride_c * size, m, n, ldc)
            product = (left.T if trans_a else left).astype(np.float64) @ (right.T if trans_b else right).astype(np.float64)
            out[...] = one * product + (other * out if other else 0)
        return self.failures.pop("gemm", 0)


class Memory:
    """Counts workspaces."""

    def __init__(self) -> None:
        self.live = 0
        self.full = False

    def allocate(self, nbytes: int, stream: Any) -> Any:
        if self.full:
            raise DeviceMemoryError("full")
        self.live += 1
        return SimpleNamespace(address=1 << 20)

    def free(self, memory: Any, stream: Any) -> None:
        self.live -= 1


@pytest.fixture
def made() -> tuple[Cublas, Library, Memory]:
    library, memory = Library(), Memory()
    return Cublas(library, memory, allow_tf32=False), library, memory


def pointer(array: np.ndarray[Any, Any]) -> Pointer:
    return Pointer(SimpleNamespace(address=array.ctypes.data - 16), 16, array.dtype, array.size)


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("trans_a", [False, True])
@pytest.mark.parametrize("trans_b", [False, True])
def test_products_of_matrices_by_rows(made: tuple[Cublas, Library, Memory], dtype: Any, trans_a: bool, trans_b: bool) -> None:
    """Parts of larger matrices, in batches, scaled and added to what is there."""
    blas, _, _ = made
    m, n, k, batch = 3, 5, 4, 2
    random = np.random.default_rng(0)
    a = random.standard_normal((batch, 7, 8)).astype(dtype)
    b = random.standard_normal((batch, 7, 9)).astype(dtype)
    out = random.standard_normal((batch, 4, 6)).astype(dtype)
    left = a[:, :k, :m].swapaxes(1, 2) if trans_a else a[:, :m, :k]
    right = b[:, :n, :k].swapaxes(1, 2) if trans_b else b[:, :k, :n]
    expected = 0.5 * left.astype(np.float64) @ right.astype(np.float64) + 2 * out[:, :m, :n].astype(np.float64)
    untouched = out.copy()
    blas.gemm(pointer(out), pointer(a), pointer(b), m, n, k, batch, (8, trans_a, 56), (9, trans_b, 63), (6, 24), 0.5, 2.0, 100)
    tolerance = {2: 4e-3, 4: 1e-6, 8: 1e-14}[np.dtype(dtype).itemsize]
    np.testing.assert_allclose(out[:, :m, :n].astype(np.float64), expected, rtol=tolerance, atol=tolerance)
    assert np.array_equal(out[:, m:], untouched[:, m:]) and np.array_equal(out[:, :, n:], untouched[:, :, n:])


def product(blas: Cublas, stream: int = 100, dtype: Any = np.float32) -> None:
    a = np.ones((2, 2), dtype)
    blas.gemm(pointer(a.copy()), pointer(a), pointer(a), 2, 2, 2, 1, (2, False, 0), (2, False, 0), (2, 0), 1.0, 0.0, stream)


def test_each_stream_has_a_handle_with_a_workspace_and_no_atomics(made: tuple[Cublas, Library, Memory]) -> None:
    blas, library, memory = made
    for stream in (100, 200, 100):
        product(blas, stream)
    assert [entry for entry in library.log if entry[1] == 7001] == [
        ("cublasSetStream_v2", 7001, 100), ("cublasSetWorkspace_v2", 7001, 1 << 20, 32 << 20), ("cublasSetAtomicsMode", 7001, 0),
        ("cublasSetMathMode", 7001, 16), ("gemm", 7001, 0, 68, -1), ("gemm", 7001, 0, 68, -1),
    ]  # fmt: skip
    assert memory.live == library.handles == 2
    blas.forget(100)
    blas.forget(300)
    assert memory.live == library.handles == 1
    blas.close()
    blas.close()
    assert memory.live == library.handles == 0


@pytest.mark.parametrize(("dtype", "allow_tf32", "compute"), [("f4", False, 68), ("f4", True, 77), ("f8", True, 70), ("f2", True, 68)])
def test_what_is_computed_in(dtype: str, allow_tf32: bool, compute: int) -> None:
    library = Library()
    product(Cublas(library, Memory(), allow_tf32=allow_tf32), dtype=dtype)
    assert library.log[-1][3] == compute


def test_nothing_is_asked_for_empty_products(made: tuple[Cublas, Library, Memory]) -> None:
    blas, library, _ = made
    a = pointer(np.ones((2, 2), np.float32))
    for m, n, batch in ((0, 2, 1), (2, 0, 1), (2, 2, 0)):
        blas.gemm(a, a, a, m, n, 2, batch, (2, False, 0), (2, False, 0), (2, 0), 1.0, 0.0, 100)
    assert library.log == []


def test_other_dtypes_are_refused(made: tuple[Cublas, Library, Memory]) -> None:
    blas, _, _ = made
    assert_raises(DeviceError, "matrices of int64 and int64 into int64", product, blas, dtype=np.int64)
    single, double = pointer(np.ones(4, np.float32)), pointer(np.ones(4))
    with pytest.raises(DeviceError, match="matrices of float32 and float64 into float32"):
        blas.gemm(single, single, double, 2, 2, 2, 1, (2, False, 0), (2, False, 0), (2, 0), 1.0, 0.0, 100)


@pytest.mark.parametrize("name", ["cublasSetStream_v2", "cublasSetWorkspace_v2", "cublasSetAtomicsMode", "cublasSetMathMode"])
def test_a_handle_that_cannot_be_set_up_is_let_go(made: tuple[Cublas, Library, Memory], name: str) -> None:
    blas, library, memory = made
    library.failures[name] = 7
    assert_raises(DeviceError, f"{name}: invalid value \\(7\\)", product, blas)
    assert memory.live == library.handles == 0
    product(blas)


def test_no_memory_for_the_workspace(made: tuple[Cublas, Library, Memory]) -> None:
    blas, library, memory = made
    memory.full = True
    assert_raises(DeviceMemoryError, None, product, blas)
    assert library.handles == 0


def test_failures_are_named(made: tuple[Cublas, Library, Memory]) -> None:
    blas, library, _ = made
    library.failures["gemm"] = 15
    assert_raises(DeviceError, "cublasGemmStridedBatchedEx_64: not supported", product, blas)
    library.failures["gemm"] = 3
    assert_raises(DeviceMemoryError, None, product, blas)
