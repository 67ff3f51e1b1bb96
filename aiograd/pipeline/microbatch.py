"""Microbatches: a batch in pieces for the pipeline, and results put together again.

Every Tensor (or array) of nested arguments is split along its first axis, as evenly as it goes; everything else is the same for each microbatch. A
spec asks for another way: one for an argument as a whole, or nested as the argument is.

Source: PyTorch ``distributed/pipelining/microbatch.py``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError, MicrobatchError
from aiograd.ops.joining import concat
from aiograd.running.caller import warn_caller
from aiograd.tensors.core import TensorCore

#: arguments of one microbatch
Call = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Split:
    """Tensors are split, or put together, along this axis.

    Args:
        axis: the axis; negative ones count from the end.

    Raises:
        ArgumentTypeError: no int.

    >>> calls = ag.pipeline.split_microbatches((ag.ones(2, 4),), None, 2, arg_specs=[ag.pipeline.Split(axis=1)])
    >>> ag.pipeline.merge_microbatches([args[0] for args, _ in calls], ag.pipeline.Split(axis=1)).shape
    (2, 4)
    """

    axis: int = 0

    def __post_init__(self) -> None:
        if isinstance(self.axis, bool) or not isinstance(self.axis, (int, np.integer)):
            raise ArgumentTypeError(f"Split(axis={self.axis!r}): expected an int")


@dataclass(frozen=True, slots=True)
class Replicate:
    """The value is the same for every microbatch; of results, the first microbatch's is taken."""


@dataclass(frozen=True, slots=True)
class Reduce:
    """Results are folded: ``function(function(initial, first), second)`` and so on.

    Args:
        function: takes two results and returns one.
        initial: the first argument of the first call.

    Raises:
        ArgumentTypeError: no callable.

    >>> ag.pipeline.merge_microbatches([1, 2, 3], ag.pipeline.Reduce(lambda a, b: a + b, 0))
    6
    """

    function: Callable[[Any, Any], Any]
    initial: Any

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise ArgumentTypeError(f"Reduce({self.function!r}, ...): expected a function of two results")


REPLICATE = Replicate()
_SPECS = (Split, Replicate, Reduce)


def split_microbatches(
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    count: int,
    *,
    arg_specs: Sequence[Any] | None = None,
    kwarg_specs: Mapping[str, Any] | None = None,
) -> list[Call]:
    """Split the arguments of a call into arguments for microbatches; pieces of Tensors are views of them.

    Args:
        args, kwargs: the arguments of the whole batch: nested tuples, lists and dicts.
        count: the number of microbatches. The first n mod count get one row more than the others.
        arg_specs, kwarg_specs: per argument None, `Split`, `REPLICATE`, or nested as the argument is.

    Returns:
        ``(args, kwargs)`` of each microbatch. There are fewer than `count`, with a warning, where the first Tensor has fewer rows than that.

    Raises:
        MicrobatchError: a later Tensor has fewer rows than there are microbatches. ArgumentError, ArgumentTypeError: a spec does not fit.
    """
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise ArgumentError(f"splitting into {count!r} microbatches: expected a number of at least 1")
    if not isinstance(args, (tuple, list)) or not isinstance(kwargs, (Mapping, type(None))):
        found = f"{type(args).__name__} and {type(kwargs).__name__}"
        raise ArgumentTypeError(f"splitting into microbatches: expected a tuple of arguments, such as (x,), and a dict of others, found {found}")
    parts = _batch(tuple(args), dict(kwargs or {}), arg_specs, kwarg_specs)
    rows = _rows(parts)
    if rows and 0 < rows[0][1] < count:
        place, first = rows[0]
        warn_caller(
            f"splitting into {count} microbatches: {place} has {first} rows only, so there will be {first} microbatches. Use a larger batch, or "
            "fewer microbatches."
        )
        count = first
    _check_rows(rows, count)
    return [(args_piece, kwargs_piece) for args_piece, kwargs_piece in _split(parts, count)]


def microbatches_of(
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    target: Any,
    count: int,
    *,
    arg_mbs: Any = None,
    kwarg_mbs: Any = None,
    target_mbs: Any = None,
    arg_specs: Sequence[Any] | None = None,
    kwarg_specs: Mapping[str, Any] | None = None,
) -> tuple[list[Call], list[Any] | None]:
    """The `count` microbatches of a step: split here, or given as ``*_mbs`` and checked.

    Args:
        args, kwargs, target: the arguments and target of the whole batch; `target` is None if there is none.
        arg_mbs: a list of tuples; kwarg_mbs: a list of dicts; target_mbs: a list. One entry per microbatch, in place of the whole batch.
        arg_specs, kwarg_specs: see `split_microbatches`.

    Returns:
        The arguments of each microbatch, and its target (None: there are no targets).

    Raises:
        ArgumentError: the batch was given whole and in pieces, or not in `count` pieces. ArgumentTypeError: a wrong container.
        MicrobatchError: a Tensor has fewer rows than there are microbatches, or a number of rows that does not go with the others': a target has as
            many as an argument, and arguments with different numbers of them all split evenly.
    """
    for given, is_whole, name, what in (
        (arg_mbs, bool(args), "arg_mbs", "positional arguments of the whole batch"),
        (kwarg_mbs, bool(kwargs), "kwarg_mbs", "keyword arguments of the whole batch"),
        (target_mbs, target is not None, "target_mbs", "a target of the whole batch"),
    ):
        if given is not None and is_whole:
            raise ArgumentError(f"{name} cannot be combined with {what}: pass the batch, or its microbatches")
    is_split = arg_mbs is not None or kwarg_mbs is not None
    if is_split and (args or kwargs):
        raise ArgumentError("arg_mbs and kwarg_mbs cannot be combined with arguments of the whole batch: split all of them, or none")
    if is_split and target is not None:
        raise ArgumentError("the arguments are given in microbatches and the target is not: pass target_mbs")
    if target_mbs is not None and (args or kwargs):
        raise ArgumentError("the target is given in microbatches and the arguments are not: pass arg_mbs and kwarg_mbs")
    _check_given("arg_mbs", arg_mbs, tuple, "a tuple of positional arguments", count)
    _check_given("kwarg_mbs", kwarg_mbs, dict, "a dict of keyword arguments", count)
    _check_given("target_mbs", target_mbs, object, "a target", count)
    if is_split or target_mbs is not None:
        calls = zip(arg_mbs or [()] * count, kwarg_mbs or [{}] * count, strict=True)
        return [(given_args, dict(given_kwargs)) for given_args, given_kwargs in calls], None if target_mbs is None else list(target_mbs)
    parts = [*_batch(args, dict(kwargs), arg_specs, kwarg_specs), (target, None, "the target")]
    of_batch, of_target = _rows(parts[:2]), _rows(parts[2:])
    _check_rows(of_batch + of_target, count)
    _check_alike(of_batch, of_target, count)
    pieces = _split(parts, count)
    return [(piece[0], piece[1]) for piece in pieces], None if target is None else [piece[2] for piece in pieces]


def merge_microbatches(results: Sequence[Any], spec: Any = None) -> Any:
    """Put the results of microbatches together again; joining is recorded.

    Args:
        results: one per microbatch, all nested in the same way.
        spec: None (Tensors are joined along their first axis), `Split`, `REPLICATE`, `Reduce`, or nested as a result is.

    Returns:
        The whole, nested as a result is.

    Raises:
        MicrobatchError: a value that is no Tensor differs between microbatches, or they are nested differently. ArgumentError: there are none, or a
            spec does not fit.
    """
    if not results:
        raise ArgumentError("merging the results of microbatches: there are none")
    return _merged(list(results), spec, "the result")


# -------------------------------------------------------------------- nested values

#: a value, its spec, and its name in messages
_Part = tuple[Any, Any, str]


def _batch(args: tuple[Any, ...], kwargs: dict[str, Any], arg_specs: Any, kwarg_specs: Any) -> list[_Part]:
    if not isinstance(arg_specs, (tuple, list, type(None))):
        raise ArgumentTypeError(f"arg_specs is a {type(arg_specs).__name__}; expected a tuple with a spec for each positional argument, or None")
    if not isinstance(kwarg_specs, (Mapping, type(None))):
        raise ArgumentTypeError(f"kwarg_specs is a {type(kwarg_specs).__name__}; expected a dict of specs by the names of arguments, or None")
    return [(args, None if arg_specs is None else tuple(arg_specs), "args"), (kwargs, None if kwarg_specs is None else dict(kwarg_specs), "kwargs")]


def _is_array(value: Any) -> bool:
    return isinstance(value, (TensorCore, np.ndarray))


def _parts_of(value: Any, spec: Any, place: str) -> list[_Part]:
    """The entries of a tuple, list or dict, each with its spec.

    Raises:
        ArgumentError: the spec is nested in another way.
    """
    keys: Sequence[Any] = list(value) if isinstance(value, Mapping) else range(len(value))
    if spec is None or isinstance(spec, _SPECS):
        specs: Any = dict.fromkeys(keys, spec)
    elif isinstance(value, Mapping) and isinstance(spec, Mapping) and spec.keys() <= value.keys():
        specs = {key: spec.get(key) for key in keys}
    elif not isinstance(value, Mapping) and isinstance(spec, (tuple, list)) and len(spec) == len(value):
        specs = spec
    else:
        raise ArgumentError(
            f"microbatches: the spec of {place}, which is {_outline(value)}, is {_outline(spec)}; expected it nested as the value is, or one spec "
            "for all of it"
        )
    return [(value[key], specs[key], f"{place}[{key!r}]") for key in keys]


def _check_leaf(value: Any, spec: Any, place: str, *, merging: bool) -> None:
    allowed = (*_SPECS, type(None)) if merging else (Split, Replicate, type(None))
    if not isinstance(spec, allowed):
        expected = "None, Split(axis), REPLICATE" + (" or Reduce(...)" if merging else "")
        raise ArgumentTypeError(f"microbatches: the spec of {place} is {_outline(spec)}; expected {expected}")
    if isinstance(spec, Split) and not _is_array(value):
        found = type(value).__name__
        raise ArgumentTypeError(f"microbatches: the spec of {place} is {spec!r}, and it is a {found}; only Tensors and arrays have axes")
    if _is_array(value) and not isinstance(spec, (Replicate, Reduce)):
        axis = 0 if spec is None else spec.axis
        if not -value.ndim <= axis < value.ndim:
            advice = "REPLICATE or Reduce(...)" if merging else "REPLICATE"
            raise ArgumentError(
                f"microbatches: {place} has shape {list(value.shape)}, so no axis {axis}. Add an axis, or give it {advice} as its spec"
            )


def _rebuilt(value: Any, items: list[Any]) -> Any:
    """A container like `value` with other entries."""
    if isinstance(value, Mapping):
        return dict(zip(value, items, strict=True))
    return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)


# -------------------------------------------------------------------- splitting


def _rows(parts: list[_Part]) -> list[tuple[str, int]]:
    """Everything that is split, in order: its name in messages, and its number of rows."""
    found: list[tuple[str, int]] = []
    for value, spec, place in parts:
        if isinstance(value, (tuple, list, Mapping)):
            found += _rows(_parts_of(value, spec, place))
            continue
        _check_leaf(value, spec, place, merging=False)
        if _is_array(value) and not isinstance(spec, Replicate):
            found.append((place, value.shape[0 if spec is None else spec.axis]))
    return found


def _check_rows(rows: list[tuple[str, int]], count: int) -> None:
    for place, length in rows:
        if length < count:
            others = max(rows, key=lambda entry: entry[1])
            raise MicrobatchError(
                f"splitting into {count} microbatches: {place} has {length} rows ({others[0]} has {others[1]}). Use fewer microbatches or a larger "
                "batch, or give what all of them share REPLICATE as its spec."
            )


def _check_alike(given: list[tuple[str, int]], wanted: list[tuple[str, int]], count: int) -> None:
    """Raise where rows that belong together would get into different microbatches, to be broadcast against others there.

    Raises:
        MicrobatchError
    """
    lengths = {length for _, length in given}
    for place, length in given:
        if len(lengths) > 1 and length % count:
            others = next(entry for entry in given if entry[1] != length)
            raise MicrobatchError(
                f"splitting into {count} microbatches: {place} has {length} rows and {others[0]} has {others[1]}, so rows with one number would get "
                "into different microbatches. Give both the same number of rows, or split them yourself and pass arg_mbs and kwarg_mbs."
            )
    for place, length in wanted:
        if given and length not in lengths:
            raise MicrobatchError(
                f"splitting into {count} microbatches: {place} has {length} rows and {given[0][0]} has {given[0][1]}. Give a target a row for each "
                "row of the batch, or split both yourself and pass arg_mbs and target_mbs."
            )


def _split(parts: list[_Part], count: int) -> list[list[Any]]:
    """Per microbatch the pieces of all parts."""
    return [[_piece(value, spec, place, i, count) for value, spec, place in parts] for i in range(count)]


def _piece(value: Any, spec: Any, place: str, i: int, count: int) -> Any:
    if isinstance(value, (tuple, list, Mapping)):
        return _rebuilt(value, [_piece(*part, i, count) for part in _parts_of(value, spec, place)])
    if not _is_array(value) or isinstance(spec, Replicate):
        return value
    axis = (0 if spec is None else spec.axis) % value.ndim
    size, more = divmod(value.shape[axis], count)
    begin = i * size + min(i, more)
    return value[(slice(None),) * axis + (slice(begin, begin + size + (i < more)),)]


def _check_given(name: str, given: Any, kind: type[Any], what: str, count: int) -> None:
    """Raise unless `given` is None or a list of `count` entries of this kind.

    Raises:
        ArgumentTypeError, ArgumentError
    """
    if given is None:
        return
    if not isinstance(given, list):
        raise ArgumentTypeError(f"{name} is a {type(given).__name__}; expected a list with {what} for each microbatch")
    if len(given) != count:
        raise ArgumentError(f"{name} has {len(given)} entries; expected one for each of the {count} microbatches")
    for i, entry in enumerate(given):
        if not isinstance(entry, kind):
            raise ArgumentTypeError(f"{name}[{i}] is a {type(entry).__name__}; expected {what}")


# -------------------------------------------------------------------- merging


def _merged(results: list[Any], spec: Any, place: str) -> Any:
    first = results[0]
    if isinstance(spec, Reduce):
        total = spec.initial
        for result in results:
            total = spec.function(total, result)
        return total
    if isinstance(first, (tuple, list, Mapping)):
        for i, result in enumerate(results):
            if not _is_alike(first, result):
                raise MicrobatchError(f"merging microbatches: {place} is {_outline(first)} in microbatch 0 and {_outline(result)} in microbatch {i}")
        keys = first if isinstance(first, Mapping) else range(len(first))
        parts = zip(keys, _parts_of(first, spec, place), strict=True)
        return _rebuilt(first, [_merged([result[key] for result in results], inner, inner_place) for key, (_, inner, inner_place) in parts])
    _check_leaf(first, spec, place, merging=True)
    if isinstance(spec, Replicate):
        return first
    for i, result in enumerate(results):
        if _is_array(first) != _is_array(result) or not (_is_array(first) or _is_same(first, result)):
            raise MicrobatchError(
                f"merging microbatches: {place} is {_outline(first)} in microbatch 0 and {_outline(result)} in microbatch {i}; what is no Tensor "
                "must be equal in all of them. Give it REPLICATE or Reduce(...) as its spec."
            )
    if not _is_array(first):
        return first
    return first if len(results) == 1 else concat(results, axis=0 if spec is None else spec.axis)


def _is_alike(first: Any, other: Any) -> bool:
    """True if two containers have the same places."""
    if isinstance(first, Mapping):
        return isinstance(other, Mapping) and other.keys() == first.keys()
    return isinstance(other, (tuple, list)) and len(other) == len(first)


def _is_same(first: Any, other: Any) -> bool:
    return first is other or bool(first == other) or bool(first != first and other != other)


def _outline(value: Any) -> str:
    if isinstance(value, Mapping):
        return f"a dict with the keys {sorted(map(str, value))}"
    if isinstance(value, (tuple, list)):
        return f"a {type(value).__name__} of {len(value)}"
    return f"a Tensor of shape {list(value.shape)}" if _is_array(value) else repr(value)[:80]
