"""Kernels to machine code, where numba-cuda and the toolkit's libraries are installed; no device is needed."""

from __future__ import annotations

import re
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from aiograd.cuda.driver.protocol import Pointer
from aiograd.errors import DeviceError
from tests.cuda_driver.toolkit import is_missing

pytestmark = pytest.mark.skipif(is_missing(), reason="needs numba-cuda with its compiler: pip install 'aiograd[cuda]'")

if not is_missing():
    from numba import cuda, types

    from aiograd.cuda.driver import compiling
    from aiograd.cuda.driver.compiling import compile_kernel


def pointer(dtype: Any) -> Pointer:
    return Pointer(SimpleNamespace(address=4096), 0, np.dtype(dtype), 8)


def scale(n: Any, out: Any, x: Any, y: Any, factor: Any) -> None:
    for i in range(cuda.grid(1), n, cuda.gridsize(1)):
        out[i] = x[i] * factor + y[i]


def wrong(n: Any, out: Any) -> None:
    out[0] = n.nonsense


def half(out: Any, x: Any) -> None:
    out[0] = x[0] * x[1] + x[2]


ARGS = (7, pointer("f4"), pointer("f4"), pointer("f4"), np.float32(2))


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0), (10, 0), (12, 0)])
def test_one_kernel_comes_out_for_each_kind_of_device(capability: tuple[int, int]) -> None:
    code = compile_kernel(scale, ARGS, capability)
    assert code.cubin.startswith(b"\x7fELF") and "scale" in code.name and code.name.encode() in code.cubin


def test_scalars_and_half_precision() -> None:
    assert compile_kernel(scale, (7, *[pointer("f8")] * 3, 2.0), (9, 0)).cubin
    assert compile_kernel(half, (pointer("f2"), pointer("f2")), (9, 0)).cubin, "half precision needs code of the toolkit's headers"


def test_what_cannot_be_compiled_says_so() -> None:
    with pytest.raises(DeviceError, match=r"kernel wrong could not be compiled for \(int64, float32\*\) on sm_90"):
        compile_kernel(wrong, (7, pointer("f4")), (9, 0))


@pytest.mark.parametrize("contract", [True, False])
def test_multiply_and_add_are_put_together_only_where_allowed(contract: bool) -> None:
    parts, _ = cuda.compile_all(
        scale, types.void(*compiling.signature_of(ARGS)), device=False, abi="numba", output="ltoir", cc=(9, 0)
    )  # fmt: skip
    options = ["-arch=sm_90", "-lto", "-ptx", f"-fma={int(contract)}"]
    handle = compiling.nvjitlink.create(len(options), options)
    compiling.nvjitlink.add_data(handle, compiling.nvjitlink.InputType.LTOIR, parts[0], len(parts[0]), "k")
    compiling.nvjitlink.complete(handle)
    text = bytearray(compiling.nvjitlink.get_linked_ptx_size(handle))
    compiling.nvjitlink.get_linked_ptx(handle, text)
    compiling.nvjitlink.destroy(handle)
    assert bool(re.search(rb"fma\.rn\.f32", text)) is contract
    assert compiling.link(parts, (9, 0), contract=contract).startswith(b"\x7fELF")


def _kernels() -> dict[str, tuple[Any, tuple[Any, ...]]]:
    """Kernels that call device functions, as they are launched on large devices, with arguments."""
    from aiograd.cuda.kernels import attention, convolution, gemm, loss, sorting
    from aiograd.cuda.kernels.scalar import TYPES, function

    f4, exp, log, tile = TYPES["f4"], function("exp", "f4"), function("log", "f4"), (64, 64, 16, 4, 4)
    floats, ints = [pointer("f4")] * 8, (1,) * 64
    return {
        "gemm": (gemm.tiled(f4, f4, *tile, True, False, False), (*floats[:4], *ints[:23])),
        "convolve": (convolution.convolved(f4, f4, TYPES["u4"], *tile, 3, 3, False), (*floats[:4], *ints[:34])),
        "attention": (attention.attended(f4, f4, exp, log, 32, 32, 8, 16, 32, 32, ""), (*floats[:6], np.float32(1), *ints[:6], True, *ints[:20])),
        "cross entropy": (
            loss.cross_entropy("f4", 1, 256, True, True, True),
            (*floats[:4], pointer("i8"), pointer("f4"), *ints[:4], np.float32(1), np.float32(1)),
        ),
        "sort": (sorting.block_sort(1024), (pointer("u8"), pointer("i4"), pointer("u8"), *ints[:3])),
    }


@pytest.mark.parametrize("name", ["gemm", "convolve", "attention", "cross entropy", "sort"])
def test_device_functions_become_part_of_the_kernel(name: str) -> None:
    kernel, args = _kernels()[name]
    ptx, _ = cuda.compile_ptx(kernel, compiling.signature_of(args), cc=(9, 0))
    assert "call" not in ptx, "nothing is called"
    assert "__local_depot" not in ptx, "what a thread keeps is in registers"
    assert "bar.sync" in ptx and "ld.shared" in ptx
