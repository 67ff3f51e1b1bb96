"""Optimizer steps: one launch updates up to `MAX_MEMBERS` parameters with their state, in place; and what clipping gradients needs, likewise.

Note [Many small arrays]
    A model's parameters are many and mostly small, so launches would take longer than the arithmetic. A kernel takes a list of arrays, and each block
    looks up which of them it works on: its number against where each array's blocks end. Every element is computed alone, with single
    roundings (`aiograd.cuda.kernels.scalar`), so the bits do not depend on the grouping of parameters, and equal the operators'.

Source: the multi-tensor kernels of NVIDIA's apex and of PyTorch's ``_foreach`` functions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.cuda.array import CudaArray, empty, zeros
from aiograd.cuda.core import DeviceCore
from aiograd.cuda.generate import compile_text
from aiograd.cuda.launching import launch

#: arrays that one launch takes: (parameter, gradient, state) of so many members at most
MAX_MEMBERS = 16
#: elements of a block, in threads, where they are written and where they are summed
_PER_THREAD, _PER_THREAD_SUMMED = 4, 16

Member = tuple[Any, Any, Sequence[Any]]
#: lines of a kernel that turn ``p``, ``d`` and ``s0, s1, ...`` of an element into their new values; and scalars by name
Rule = tuple[tuple[str, ...], dict[str, float]]


def _sgd(states: int, o: Mapping[str, Any]) -> Rule:
    lines = ["d = -d"] if o["maximize"] else []
    scalars = {"lr": o["lr"]}
    if o["weight_decay"]:
        lines.append("d = d + mul(decay, p)")
        scalars["decay"] = o["weight_decay"]
    if states:
        scalars["momentum"] = o["momentum"]
        if o["first"]:
            lines.append("s0 = d")
        else:
            lines.append("s0 = mul(momentum, s0) + mul(kept, d)")
            scalars["kept"] = 1.0 - o["dampening"]
        lines.append("d = d + mul(momentum, s0)" if o["nesterov"] else "d = s0")
    return (*lines, "p = p - mul(lr, d)"), scalars


def _adam(states: int, o: Mapping[str, Any]) -> Rule:
    lr, decay, beta1, beta2, step = o["lr"], o["weight_decay"], o["beta1"], o["beta2"], o["step"]
    scalars = {"beta1": beta1, "rest1": 1.0 - beta1, "beta2": beta2, "rest2": 1.0 - beta2, "eps": o["eps"]}
    scalars |= {"correction": math.sqrt(1.0 - beta2**step), "rate": lr / (1.0 - beta1**step)}
    lines = ["d = -d"] if o["maximize"] else []
    if decay and o["decoupled"]:
        lines.append("p = mul(p, kept)")
        scalars["kept"] = 1.0 - lr * decay
    elif decay:
        lines.append("d = d + mul(decay, p)")
        scalars["decay"] = decay
    lines += ["s0 = mul(beta1, s0) + mul(rest1, d)", "s1 = mul(beta2, s1) + mul(rest2, mul(d, d))"]
    if states == 3:
        lines.append("s2 = s2 if (s2 >= s1 or s2 != s2) else s1")
    lines += [f"root = sqrt({'s2' if states == 3 else 's1'}) / correction + eps", "p = p - mul(rate, s0 / root)"]
    return tuple(lines), scalars


_RULES: dict[str, Callable[[int, Mapping[str, Any]], Rule]] = {"sgd": _sgd, "adam": _adam}


def update(device: DeviceCore, kind: str, members: Sequence[Member], options: Mapping[str, Any]) -> bool:
    """Update parameters and their state in place; see `aiograd.running.devices.UpdatesParameters`."""
    if kind not in _RULES or not all(_fits(device, member) for member in members):
        return False
    members = [member for member in members if member[0].size]
    if not members:
        return True
    states = len(members[0][2])
    lines, scalars = _RULES[kind](states, options)
    dtype = members[0][0].dtype
    compute = np.dtype(np.float32) if dtype == np.float16 else dtype
    values = [compute.type(value) for value in scalars.values()]
    span = device.properties.threads * _PER_THREAD
    for part, ends in _parts([(member[0], member[1].contiguous(), *member[2]) for member in members], span):
        kernel = _kernel(kind, lines, tuple(scalars), states, len(part), f"{dtype.kind}{dtype.itemsize}")
        sizes = [row[0].size for row in part]
        writes = [array for row in part for place, array in enumerate(row) if place != 1]
        args = (*itertools.chain.from_iterable(part), *sizes, *ends, span, *values)
        launch(kernel, ends[-1], device.properties.threads, *args, writes=writes)
    return True


def sum_of_squares(device: DeviceCore, arrays: Sequence[Any]) -> CudaArray | None:
    """See `aiograd.running.devices.ScalesGradients`: sums of blocks, in an order that follows from the sizes, then their sum."""
    if not _alike(device, arrays):
        return None
    letters = f"{arrays[0].dtype.kind}{arrays[0].itemsize}"
    compute = np.dtype(np.float64 if letters == "f8" else np.float32)
    threads = device.properties.threads
    span = threads * _PER_THREAD_SUMMED
    parts = list(_parts([(array.contiguous(),) for array in arrays if array.size], span))
    if not parts:
        return zeros(device, (), compute)
    sums = empty(device, (sum(ends[-1] for _, ends in parts),), compute)
    first = 0
    for part, ends in parts:
        args = (*[row[0] for row in part], *[row[0].size for row in part], *ends, span, first)
        launch(_squares(len(part), letters, threads), ends[-1], threads, sums, *args, writes=(sums,))
        first += ends[-1]
    return np.sum(sums)  # type: ignore[return-value,call-overload,no-any-return,unused-ignore]


def scaled(device: DeviceCore, arrays: Sequence[Any], scale: Any) -> Sequence[CudaArray] | None:
    """See `aiograd.running.devices.ScalesGradients`."""
    if not _alike(device, arrays) or not isinstance(scale, CudaArray) or scale.device is not device:
        return None
    letters = f"{arrays[0].dtype.kind}{arrays[0].itemsize}"
    results = [empty(device, array.shape, array.dtype) for array in arrays]
    rows = [(result, array.contiguous()) for result, array in zip(results, arrays, strict=True) if array.size]
    span = device.properties.threads * _PER_THREAD
    for part, ends in _parts(rows, span):
        writes = [row[0] for row in part]
        args = (*itertools.chain.from_iterable(part), *[row[0].size for row in part], *ends, span, scale)
        launch(_scaled(len(part), letters), ends[-1], device.properties.threads, *args, writes=writes)
    return results


def _alike(device: DeviceCore, arrays: Sequence[Any]) -> bool:
    """True if arrays are floating ones of this device, of one dtype."""
    return all(
        isinstance(array, CudaArray) and array.device is device and array.dtype.kind == "f" and array.dtype == arrays[0].dtype for array in arrays
    )


def _parts(rows: list[tuple[Any, ...]], span: int) -> Iterator[tuple[list[tuple[Any, ...]], list[int]]]:
    """Rows of arrays of one size, in parts that a launch takes, with where the blocks of each end.

    A part is filled to a power of two with its last row, which then has no blocks: so there are few kernels.
    """
    for low in range(0, len(rows), MAX_MEMBERS):
        part = rows[low : low + MAX_MEMBERS]
        missing = (1 << (len(part) - 1).bit_length()) - len(part)
        ends = list(itertools.accumulate(math.ceil(row[0].size / span) for row in part))
        yield part + part[-1:] * missing, ends + ends[-1:] * missing


def _fits(device: DeviceCore, member: Member) -> bool:
    """True if a kernel can update a parameter where it lies."""
    parameter, gradient, states = member
    if not isinstance(parameter, CudaArray) or parameter.device is not device or parameter.dtype.kind != "f":
        return False
    if not isinstance(gradient, CudaArray) or gradient.device is not device or (gradient.dtype, gradient.shape) != (parameter.dtype, parameter.shape):
        return False
    held = (parameter, *states)
    return all(isinstance(each, CudaArray) and each.is_contiguous and each.dtype == parameter.dtype for each in held)


@functools.lru_cache(maxsize=256)
def _kernel(kind: str, lines: tuple[str, ...], scalars: tuple[str, ...], states: int, count: int, letters: str) -> Callable[..., None]:
    """A kernel for `count` members of a dtype."""
    precision = "f8" if letters == "f8" else "f4"
    roles = ["p", "g", *(f"s{i}" for i in range(states))]
    inner = [f"p = {precision}(p_[i])", f"d = {precision}(g_[i])", *(f"s{i} = {precision}(s{i}_[i])" for i in range(states))]
    inner += [line.replace("mul(", f"mul_{precision}(").replace("sqrt(", f"sqrt_{precision}(") for line in lines]
    inner += [f"p_[i] = {letters}(p)", *(f"s{i}_[i] = {letters}(s{i})" for i in range(states))]
    return _compiled(f"{kind}_{count}", (), roles, count, scalars, (), inner, ())


@functools.lru_cache(maxsize=64)
def _squares(count: int, letters: str, threads: int) -> Callable[..., None]:
    """A kernel that writes each block's sum of squares, a tree over its threads."""
    T = "f8" if letters == "f8" else "f4"
    before = (f"tree = cuda.shared.array({threads}, {T})", "me = cuda.threadIdx.x", f"total = {T}(0)")
    each = (f"x = {T}(g_[i])", f"total += mul_{T}(x, x)")
    after = (
        "tree[me] = total", "cuda.syncthreads()", f"half = {threads // 2}", "while half > 0:", "    if me < half:",
        "        tree[me] += tree[me + half]", "    cuda.syncthreads()", "    half = half // 2", "if me == 0:", "    out[first + block] = tree[0]",
    )  # fmt: skip
    return _compiled(f"squares_{count}", ("out",), ("g",), count, ("first",), before, each, after)


@functools.lru_cache(maxsize=64)
def _scaled(count: int, letters: str) -> Callable[..., None]:
    """A kernel that multiplies by one number, which is on the device."""
    T = "f8" if letters == "f8" else "f4"
    each = (f"o_[i] = {letters}(mul_{T}({T}(g_[i]), factor))",)
    return _compiled(f"scaled_{count}", (), ("o", "g"), count, ("scale",), (f"factor = {T}(scale[0])",), each, ())


def _compiled(
    name: str, shared: Sequence[str], roles: Sequence[str], count: int, others: Sequence[str],
    before: Sequence[str], each: Sequence[str], after: Sequence[str],
) -> Callable[..., None]:  # fmt: skip
    """A kernel on `count` members with an array in each role, which a block sees as ``<role>_``; `each` is done for every element i of its span."""
    parameters = [*shared, *(f"{role}_{member}" for member in range(count) for role in roles)]
    parameters += [f"n_{member}" for member in range(count)] + [f"e_{member}" for member in range(count)] + ["span", *others]
    body = ["block = i8(cuda.blockIdx.x)", *(f"{role}_ = {role}_0" for role in roles), "n = n_0", "skipped = i8(0)"]
    for member in range(1, count):
        body.append(f"if block >= e_{member - 1}:")
        body += [f"    {role}_ = {role}_{member}" for role in roles] + [f"    n = n_{member}", f"    skipped = e_{member - 1}"]
    body += [*before, "start = (block - skipped) * span", "for i in range(start + cuda.threadIdx.x, min(n, start + span), cuda.blockDim.x):"]
    body += [*(f"    {line}" for line in each), *after]
    return compile_text(name, f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in body))

