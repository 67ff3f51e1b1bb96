"""How rows run on dual arrays: the forward on the values, and the tangent that the row's declaration makes; see Note [Tangents] in `aiograd.ops.op`.

Note [One forward]
    Values are computed by the row that an eager call runs, with its fused kernels where it has them, bit by bit as in the plain forward.
    The tangent then takes saved values and residuals as a backward would, and the same kernels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from aiograd.errors import NoRuleError
from aiograd.forward.dual import KEEP, RUN, DualArray, ForwardLevel, Pending, Step
from aiograd.forward.transposing import transposed
from aiograd.ops.elementwise import zero
from aiograd.ops.op import Fused, Op, Rule, nothing, rule_names
from aiograd.ops.slice_gradient import dense
from aiograd.running import devices
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.trees import map_tree
from aiograd.tensors.attach import has_rule
from aiograd.tensors.core import TensorCore
from aiograd.tensors.levels import split_arguments

_HOST = (np.ndarray, np.generic, int, float, complex, type(None))


class RowCall(NamedTuple):
    """A row that has run on values of the caller."""

    op: Op
    arrays: list[Any]
    statics: Mapping[str, Any]
    out: Any
    residuals: Mapping[str, Any]
    fused: Fused | None

    def named(self, name: str) -> Any:
        """The value of a name in a rule; see Note [Names in a rule] in `aiograd.ops.op`."""
        op = self.op
        if name == "out":
            return self.out
        if name in self.residuals:
            return self.residuals[name]
        if name == op.variadic:
            return tuple(self.arrays)
        if name in op.arrays:
            i = op.arrays.index(name)
            return self.arrays[i] if i < len(self.arrays) else None
        for suffix, attribute in (("_shape", "shape"), ("_dtype", "dtype")):
            base = name.removesuffix(suffix)
            if base == name or (base not in op.arrays and base != op.variadic):
                continue
            value = self.named(base)
            if op.variadic:
                return tuple([getattr(x, attribute) for x in value])
            return None if value is None else getattr(value, attribute, () if suffix == "_shape" else np.asarray(value).dtype)
        return self.statics[name] if name in self.statics else op.defaults[name]


def run(level: ForwardLevel, op: Op, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The row on arrays of which some are duals of the level."""
    level.check()
    given, statics = split_arguments(op, args, kwargs)
    arrays: list[Any] = []
    tangents: list[Any] = []
    inputs = 0
    for x in given:
        if isinstance(x, DualArray) and x.level is level:
            arrays.append(x.primal)
            tangents.append(x.tangent)
            inputs |= x.inputs
        else:
            arrays.append(x)
            tangents.append(None)
    if op.name == "to_device":
        device = devices.device_name_of(arrays[0]._data if isinstance(arrays[0], TensorCore) else arrays[0])
        statics = {"source": device, "device": device if statics["device"] == level.name else statics["device"]}
    if "index" in statics:
        statics = {**statics, "index": map_tree(_value_in_index, statics["index"], DualArray)}
    call = _forward(level, op, arrays, statics)
    outs = (call.out,) if op.outputs == 1 else call.out
    made: Any = (None,) * len(outs)
    if op.differentiable and any(t is not None for t in tangents) and current_mode().tangents:
        able = range(len(outs)) if op.differentiable_outputs is None else op.differentiable_outputs
        carriers = [i for i in able if outs[i].dtype.kind in "fc"]
        if carriers:
            made = _push_or_defer(level, call, tangents, carriers)
    results = [DualArray(level, out, t, inputs if t is not None else 0) for out, t in zip(outs, made, strict=True)]
    return results[0] if op.outputs == 1 else tuple(results)


def _value_in_index(array: DualArray) -> Any:
    """The value of an array of integers that an index has; it may be needed after the level has ended."""
    return array.primal._data if isinstance(array.primal, TensorCore) else array.primal


def _forward(level: ForwardLevel, op: Op, arrays: list[Any], statics: Mapping[str, Any]) -> RowCall:
    """Run the row on values of the caller."""
    if level.records:
        with ModeScope(grad=True):
            return RowCall(op, arrays, statics, op(*arrays, **statics), {}, None)
    fused = None
    is_host = True
    for x in arrays:
        if x.__class__ is not np.ndarray and not isinstance(x, _HOST):
            is_host = False
            break
    if is_host:
        fused = op.fused
        if fused is None:
            result = op.forward(*arrays, **statics)
    else:
        name = next(name for name in map(devices.device_name_of, arrays) if name != "cpu")
        fused = devices.device(name).fused(op.name)  # type: ignore[union-attr]
        if fused is None:
            result = op(*arrays, **statics)
    residuals: Mapping[str, Any] = {}
    if fused is not None:
        result, *rest = fused.forward(*arrays, **statics)
        residuals = dict(zip(fused.residuals, rest, strict=True))
    if op.outputs != 1:
        result = tuple([np.asarray(each) if isinstance(each, np.generic) else each for each in result])
    elif isinstance(result, np.generic):
        result = np.asarray(result)
    return RowCall(op, arrays, statics, result, residuals, fused)


def _push_or_defer(level: ForwardLevel, call: RowCall, tangents: list[Any], carriers: Sequence[int]) -> list[Any]:
    """The tangents of the outputs; None for an output without one."""
    if level.deferred or any(t.__class__ is Pending for t in tangents):
        return defer(level, functools.partial(push, level, call, carriers), tangents, len(_outs(call)), carriers)
    return push(level, call, carriers, tangents)


def defer(
    level: ForwardLevel, function: Callable[[list[Any]], Any], tangents: Sequence[Any], outputs: int, carriers: Sequence[int]
) -> list[Any]:
    """Append a step to the level.

    Args:
        level: the level.
        function: computes tangents, or an awaitable of them, from `tangents`.
        tangents: those it is given, None for zeros.
        outputs: how many it makes.
        carriers: numbers of the results that are kept.

    Returns:
        The place of each output's tangent, None for one that is not wanted.
    """
    takes: list[int | None] = []
    for t in tangents:
        if t is not None and t.__class__ is not Pending:
            place = level.later()
            level.steps.append(Step(functools.partial(_known, t), (), (place.number,)))
            t = place
        takes.append(None if t is None else t.number)
    places = [level.later() if i in carriers else None for i in range(outputs)]
    level.steps.append(Step(function, tuple(takes), tuple([None if place is None else place.number for place in places])))
    return places


def _known(tangent: Any, _: list[Any]) -> tuple[Any]:
    return (tangent,)


def keep(level: ForwardLevel, *written: Any) -> None:
    """Give the steps of a level, which run later, copies of the values that they have saved of arrays that may be written before that."""

    def kept(x: Any) -> Any:
        if isinstance(x, np.ndarray):
            return x.copy() if any(isinstance(array, np.ndarray) and np.may_share_memory(x, array) for array in written) else x
        return np.copy(x) if hasattr(x, "__aiograd_device__") else x

    for i, step in enumerate(level.steps):
        if isinstance(step.push, functools.partial) and step.push.func is push:
            _, call, carriers = step.push.args
            saved = call._replace(
                arrays=[kept(x) for x in call.arrays],
                out=kept(call.out) if call.op.outputs == 1 else tuple([kept(x) for x in call.out]),
                residuals={name: kept(x) for name, x in call.residuals.items()},
            )
            level.steps[i] = step._replace(push=functools.partial(push, level, saved, carriers))


def _outs(call: RowCall) -> Sequence[Any]:
    return (call.out,) if call.op.outputs == 1 else call.out


def push(level: ForwardLevel, call: RowCall, carriers: Sequence[int], tangents: Sequence[Any]) -> list[Any]:
    """The tangents of a row's outputs.

    Args:
        level: on which it runs.
        call: the row on values.
        carriers: numbers of the outputs that have tangents.
        tangents: of its array arguments, None for zeros.
    """
    if all(t is None for t in tangents):
        return [None] * len(_outs(call))
    if not level.records:
        return tangents_of(call, carriers, tangents)
    with ModeScope(grad=True):
        return tangents_of(call, carriers, tangents)


def tangents_of(call: RowCall, carriers: Sequence[int], tangents: Sequence[Any]) -> list[Any]:
    """As `push`, for tangents of which one at least is none of zeros, on arrays of any kind; nothing is recorded for the caller."""
    made = _tangents(call, tangents)
    outs = _outs(call)
    results: list[Any] = [None] * len(outs)
    for i in carriers:
        t = made if call.op.outputs == 1 else None if made is None else made[i]
        results[i] = None if t is None else fitted(t, outs[i])
    return results


def fitted(tangent: Any, out: Any) -> Any:
    """A tangent in shape and dtype of its value."""
    tangent = dense(tangent)
    if tangent.shape != out.shape:
        tangent = np.broadcast_to(tangent, out.shape)
    if tangent.dtype != out.dtype:
        if tangent.dtype.kind == "c" and out.dtype.kind != "c":
            tangent = np.real(tangent)
        if tangent.dtype != out.dtype:
            tangent = np.astype(tangent, out.dtype)
    return tangent


def _tangents(call: RowCall, tangents: Sequence[Any]) -> Any:
    op = call.op
    _check_rules(op, tangents)
    way = op.jvp
    if way is None:
        return transposed(call, tangents)
    if callable(way):
        plain = len(op.arrays) == 1 and not op.variadic
        names = op.pushers.get("names")
        if names is None:
            names = op.pushers["names"] = rule_names(way)
        return way(tangents[0] if plain else tuple(tangents), *map(call.named, names))
    if way == "linear":
        filled = [np.zeros_like(x) if t is None and x is not None else t for x, t in zip(call.arrays, tangents, strict=True)]
        return op(*filled, **call.statics)
    total: Any = None
    for i, tangent in enumerate(tangents):
        if tangent is None:
            continue
        one = way if isinstance(way, str) else way[op.arrays[i]]
        part = _part(call, i, tangent, one)
        if part is not None:
            total = part if total is None else _sum(total, part)
    return total


def _sum(a: Any, b: Any) -> Any:
    return tuple(x + y for x, y in zip(a, b, strict=True)) if isinstance(a, tuple) else a + b


def _part(call: RowCall, i: int, tangent: Any, way: Any) -> Any:
    """The part of the output's tangent that comes from argument `i`."""
    op = call.op
    if callable(way):
        return way(tangent, *map(call.named, rule_names(way)))
    if way == "forward":
        return op(*call.arrays[:i], tangent, *call.arrays[i + 1 :], **call.statics)
    rule, names, place = _rule_of(op, None if call.fused is None or not _is_plain(tangent) else call.fused, i)
    if rule is nothing or rule is zero:
        return None
    if tangent.shape != call.out.shape:
        tangent = np.broadcast_to(tangent, call.out.shape)
    if place is None:
        return rule(tangent, *map(call.named, names))
    arguments, position = place
    needs = tuple(k == position for k in range(len(arguments)))
    return rule(tangent, *[needs if name == "needs" else call.named(name) for name in names])[position]


def _is_plain(tangent: Any) -> bool:
    return isinstance(tangent, np.ndarray)


def _rule_of(op: Op, fused: Fused | None, i: int) -> tuple[Rule, tuple[str, ...], tuple[tuple[str, ...], int] | None]:
    """The rule of argument `i`, the names it takes, and where a joint rule has it."""
    key = (fused is not None, i)
    found: Any = op.pushers.get(key)
    if found is None:
        rules, joint = (op.rules, op.joint) if fused is None else (fused.rules, fused.joint)
        name = op.arrays[i]
        if name in rules:
            found = rules[name], rule_names(rules[name]), None
        else:
            arguments = next(arguments for arguments in joint if name in arguments)
            found = joint[arguments], rule_names(joint[arguments]), (arguments, arguments.index(name))
        if fused is None or fused is op.fused:
            op.pushers[key] = found
    return found  # type: ignore[no-any-return]


def _check_rules(op: Op, tangents: Sequence[Any]) -> None:
    """Raise where an argument has a tangent and the row no derivative by it."""
    if op.variadic:
        return
    for name, tangent in zip(op.arrays, tangents, strict=False):
        if tangent is not None and name not in op.rules and not has_rule(op, name):
            raise NoRuleError(f"{op.name}: its argument {name!r} has a tangent, and the row has no derivative by it. Use detach() of it.")


RUN.append(run)
KEEP.append(keep)
