"""Rows of the op tables on a device and on the host, over their drawn arguments: forward and every rule."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.errors import DeviceError
from aiograd.ops.op import ROWS, Op
from aiograd.ops.slice_gradient import SliceGradient, dense
from tests.cuda.samples import DOMAINS, LONG_AS_VALUES_SAY, SAMPLES, UNWRITTEN, domain_of
from tests.support import assert_raises

__all__ = ["DOMAINS", "TOLERANCES", "assert_close", "convert", "download", "row_agrees", "upload"]

#: the complex numbers beside real ones of a dtype
COMPLEX = {"float16": "complex64", "float32": "complex64", "float64": "complex128"}
#: relative error, in the norm, against float64 on the host
TOLERANCES = {"float16": 4e-3, "float32": 2e-5, "float64": 1e-12}


def convert(value: Any, dtype: str) -> Any:
    """Floating arrays in another dtype; complex arrays in the one of its precision, and of single precision beside half."""
    if isinstance(value, tuple):
        return tuple(convert(each, dtype) for each in value)
    kind = value.dtype.kind if isinstance(value, (np.ndarray, np.generic)) else ""
    return value.astype(dtype if kind == "f" else COMPLEX[dtype]) if kind in ("f", "c") else value


def upload(device: CudaDevice, value: Any, kinds: str = "fbc") -> Any:
    """Arrays of some kinds of numbers (and those inside tuples) on the device; integers, which may be indices, only where asked."""
    if isinstance(value, tuple):
        return tuple(upload(device, each, kinds) for each in value)
    return device.from_host(np.asarray(value)) if isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind in kinds else value


def download(device: CudaDevice, value: Any) -> Any:
    """The values of device arrays; whatever is not one is a mistake, save None."""
    if isinstance(value, (tuple, list)):
        return tuple(download(device, each) for each in value)
    if value is None:
        return None
    if not isinstance(value, CudaArray):
        raise TypeError(f"expected an array of the device, found {type(value).__name__}")
    return device.to_host(value)


def assert_close(found: Any, wanted: Any, tolerance: float, what: str) -> None:
    """Shapes are equal and the values close, relative to the norm of what is wanted."""
    if isinstance(wanted, tuple):
        assert isinstance(found, tuple) and len(found) == len(wanted), what
        for one, other in zip(found, wanted, strict=True):
            assert_close(one, other, tolerance, what)
        return
    if wanted is None or found is None:
        assert found is None and wanted is None, what
        return
    wanted = np.asarray(dense(wanted) if isinstance(wanted, SliceGradient) else wanted)
    assert found.shape == wanted.shape, f"{what}: found the shape {found.shape}, expected {wanted.shape}"
    if wanted.dtype.kind not in "fc":
        np.testing.assert_array_equal(found, wanted, err_msg=what)
        return
    assert found.dtype.kind == wanted.dtype.kind, f"{what}: found {found.dtype}, expected {wanted.dtype}"
    np.testing.assert_array_equal(np.isnan(found), np.isnan(wanted), err_msg=what)
    found, wanted = np.nan_to_num(found.astype(wanted.dtype)), np.nan_to_num(wanted)
    error = np.linalg.norm((found - wanted).ravel()) / (1 + np.linalg.norm(wanted.ravel()))
    assert error <= tolerance, f"{what}: relative error {error:.2e}, expected at most {tolerance:.0e}; found {found}, expected {wanted}"


def row_agrees(device: CudaDevice, name: str, variety: int, dtype: str) -> None:
    """The forward and every rule of a row give on the device what they give on the host in float64.

    A dtype that numpy has no such function for (half precision in its linear algebra) is refused on the device in the same words.
    """
    row, domain = ROWS[name], domain_of(name)
    rng = np.random.default_rng([variety, 5])
    drawn, statics = domain.draw(rng, variety)
    prepared = tuple(drawn) if domain.prepare is None else domain.prepare(*drawn)
    args = convert(convert(prepared, dtype), "float64")  # the same numbers on both sides
    here = upload(device, convert(args, dtype), "fbciu" if name in SAMPLES else "fbc")
    try:
        row(*convert(args, dtype), **statics)
    except TypeError as refusal:
        assert_raises(TypeError, str(refusal), lambda: row(*here, **statics))
        return
    if name in LONG_AS_VALUES_SAY:
        assert_raises(DeviceError, "depends on values", lambda: download(device, row(*here, **statics)))
        return
    wanted = row(*args, **statics)
    found = row(*here, **statics)
    what = f"{name}, case {variety}, {dtype}"
    if name in UNWRITTEN:
        assert (found.shape, found.dtype) == (wanted.shape, convert(wanted, dtype).dtype if "dtype" not in statics else statics["dtype"]), what
        return
    assert_close(download(device, found), wanted, TOLERANCES[dtype], what)
    if not row.differentiable:
        return
    g = _gradients(rng, row, wanted, dtype)
    for arguments, rule, names in row.rule_plan(row.rules, row.joint):
        if not all(_is_array(args[i]) for i in range(len(args)) if row.variadic is None and row.arrays[i] in arguments):
            continue
        values = _named(row, args, statics, wanted, names, lambda value: value)
        values_here = _named(row, here, statics, found, names, lambda value: value)
        expected = rule(convert(g, "float64"), *values)
        got = rule(upload(device, g), *values_here)
        assert_close(download(device, got), expected, 4 * TOLERANCES[dtype], f"{what}, gradient of {', '.join(arguments)}")


def _is_array(value: Any) -> bool:
    return isinstance(value, (np.ndarray, np.generic)) and value.dtype.kind == "f"


def _gradients(rng: np.random.Generator, row: Op, out: Any, dtype: str) -> Any:
    if not isinstance(out, tuple):
        return rng.standard_normal(np.shape(out)).astype(dtype)
    which = range(len(out)) if row.differentiable_outputs is None else row.differentiable_outputs
    return tuple(rng.standard_normal(np.shape(each)).astype(dtype) if i in which else None for i, each in enumerate(out))


def _named(row: Op, args: Any, statics: dict[str, Any], out: Any, names: tuple[str, ...], _: Callable[[Any], Any]) -> list[Any]:
    known: dict[str, Any] = {**row.defaults, **statics, "out": out, "needs": (True,) * 8}
    given = {row.variadic: tuple(args)} if row.variadic else dict(zip(row.arrays, args, strict=False))
    for name, value in given.items():
        known[name] = value
        if isinstance(value, tuple):
            known[f"{name}_shape"], known[f"{name}_dtype"] = tuple(np.shape(v) for v in value), tuple(v.dtype for v in value)
        else:
            known[f"{name}_shape"], known[f"{name}_dtype"] = tuple(np.shape(value)), getattr(value, "dtype", None)
    for name, value in zip(row.statics, args[len(row.arrays) :] if row.variadic is None else (), strict=False):
        known[name] = value
    return [known[name] for name in names]
