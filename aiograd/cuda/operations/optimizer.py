"""Optimizer steps: one launch updates up to `MAX_MEMBERS` parameters with their state, in place.

Note [Many small arrays]
    A model's parameters are many and mostly small, so launches would take longer than the arithmetic. A kernel takes a list of arrays, and each block
    looks up which of them it works on: its number against where each array's blocks end. Every element is computed alone, with single
    roundings (`aiograd.cuda.kernels.scalar`), so the bits do not depend on what is updated together, and are those of the operators.

Source: the multi-tensor kernels of NVIDIA's apex and of PyTorch's ``_foreach`` functions.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.cuda import tables
from aiograd.cuda.array import CudaArray
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.generate import compile_text
from aiograd.cuda.launching import launch

#: arrays that one launch takes: (parameter, gradient, state) of so many members at most
MAX_MEMBERS = 16
#: elements of a block, in threads
_PER_THREAD = 4

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


def update(device: CudaDevice, kind: str, members: Sequence[Member], options: Mapping[str, Any]) -> bool:
    """Update parameters and their state in place; see `aiograd.devices.UpdatesParameters`."""
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
    threads = device.properties.threads
    span = threads * _PER_THREAD
    for low in range(0, len(members), MAX_MEMBERS):
        part = members[low : low + MAX_MEMBERS]
        count = 1 << (len(part) - 1).bit_length()
        kernel = _kernel(kind, lines, tuple(scalars), states, count, f"{dtype.kind}{dtype.itemsize}")
        blocks = [math.ceil(member[0].size / span) for member in part]
        ends = list(itertools.accumulate(blocks))
        ends += [ends[-1]] * (count - len(part))
        arrays = [[member[0], member[1].contiguous(), *member[2]] for member in part]
        arrays += [arrays[-1]] * (count - len(part))
        sizes = [row[0].size for row in arrays]
        writes = [array for row in arrays for place, array in enumerate(row) if place != 1]
        launch(kernel, ends[-1], threads, *itertools.chain.from_iterable(arrays), *sizes, *ends, span, *values, writes=writes)
    return True


def _fits(device: CudaDevice, member: Member) -> bool:
    """Whether a kernel can update a parameter where it lies."""
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
    parameters = [f"{role}_{member}" for member in range(count) for role in roles]
    parameters += [f"n_{member}" for member in range(count)] + [f"e_{member}" for member in range(count)] + ["span", *scalars]
    body = ["block = i8(cuda.blockIdx.x)", *(f"{role}_ = {role}_0" for role in roles), "n = n_0", "before = i8(0)"]
    for member in range(1, count):
        body.append(f"if block >= e_{member - 1}:")
        body += [f"    {role}_ = {role}_{member}" for role in roles] + [f"    n = n_{member}", f"    before = e_{member - 1}"]
    body += ["start = (block - before) * span", "for i in range(start + cuda.threadIdx.x, min(n, start + span), cuda.blockDim.x):"]
    inner = [f"p = {precision}(p_[i])", f"d = {precision}(g_[i])", *(f"s{i} = {precision}(s{i}_[i])" for i in range(states))]
    inner += [line.replace("mul(", f"mul_{precision}(").replace("sqrt(", f"sqrt_{precision}(") for line in lines]
    inner += [f"p_[i] = {letters}(p)", *(f"s{i}_[i] = {letters}(s{i})" for i in range(states))]
    body += [f"    {line}" for line in inner]
    name = f"{kind}_{count}"
    return compile_text(name, f"def {name}({', '.join(parameters)}):\n" + "".join(f"    {line}\n" for line in body))


tables.FUNCTIONS["update_parameters"] = update
