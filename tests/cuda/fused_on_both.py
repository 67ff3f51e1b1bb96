"""Fused kernels of a row on a device against the row's own forward and rules on the host in float64."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.device import CudaDevice
from aiograd.ops.op import ROWS
from tests.cuda.on_both import TOLERANCES, assert_close, convert, download, upload

Arrays = tuple[Any, ...]


def fused_agrees(device: CudaDevice, name: str, args: Arrays, statics: dict[str, Any], dtype: str) -> None:
    """Forward and every gradient of the fused kernels, and of the row's forward on the device, agree with the host; nothing falls back to it.

    Args:
        args: host arrays, or None for an argument that is absent.
    """
    row, fused = ROWS[name], tables.FUSED[name]
    statics = {name: value for name, value in row.defaults.items() if name in row.statics} | statics
    args = convert(convert(tuple(args), dtype), "float64")
    here = tuple(None if each is None else upload(device, each) for each in convert(args, dtype))
    what = f"{name} {[getattr(each, 'shape', None) for each in args]} {dtype}"
    wanted = row.forward(*args, **statics)
    found, *residuals = fused.forward(*here, **statics)
    assert_close(download(device, found), wanted, TOLERANCES[dtype], what)
    assert_close(download(device, row(*here, **statics)), wanted, TOLERANCES[dtype], f"{what}, without what is kept")
    rng = np.random.default_rng(7)
    g = _gradients(rng, row.differentiable_outputs, wanted, dtype)
    expected: dict[str, Any] = {}
    needs = tuple(each is not None for each in args)
    known = {**statics, "out": wanted, "needs": needs} | _of_arguments(row.arrays, args)
    for arguments, rule, names in row.rule_plan(row.rules, row.joint):
        if any(known[argument] is not None for argument in arguments):
            result = rule(convert(g, "float64"), *[known[each] for each in names])
            expected |= dict(zip(arguments, result if len(arguments) > 1 else (result,), strict=True))
    known = {**statics, "out": found, "needs": needs} | _of_arguments(row.arrays, here) | dict(zip(fused.residuals, residuals, strict=True))
    for arguments, rule, names in row.rule_plan(fused.rules, fused.joint):
        result = rule(upload(device, g), *[known[each] for each in names])
        for argument, gradient in zip(arguments, result if len(arguments) > 1 else (result,), strict=True):
            if known[argument] is None:
                continue
            target = np.asarray(expected[argument])
            target = target.sum(axis=tuple(range(target.ndim - known[argument].ndim)))  # as the engine undoes broadcasting
            assert_close(download(device, gradient), target, 6 * TOLERANCES[dtype], f"{what}, gradient of {argument}")
    assert device.statistics().fallbacks == {}, what


def _of_arguments(names: tuple[str, ...], values: Arrays) -> dict[str, Any]:
    known: dict[str, Any] = dict(zip(names, values, strict=True))
    for name, value in zip(names, values, strict=True):
        known[f"{name}_shape"], known[f"{name}_dtype"] = (None, None) if value is None else (tuple(value.shape), value.dtype)
    return known


def _gradients(rng: np.random.Generator, differentiable: Any, out: Any, dtype: str) -> Any:
    if not isinstance(out, tuple):
        return rng.standard_normal(np.shape(out)).astype(dtype)
    which = range(len(out)) if differentiable is None else differentiable
    return tuple(rng.standard_normal(np.shape(each)).astype(dtype) if i in which else None for i, each in enumerate(out))
