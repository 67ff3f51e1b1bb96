"""Results of a function: their structure, leaves that are no Tensors, and views, which a run makes again."""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.compiler.lines import defined_at
from aiograd.errors import TraceError
from aiograd.running.trees import leaves_of, map_tree
from aiograd.tensors.core import TensorCore, View, base_of, counter_of, extra_of, view_of

#: per view: its place among the Tensors of a run, the place of its base, and the function that makes it
Views = tuple[tuple[int, int, View], ...]


class _Place:
    """Stands for a Tensor in the structure of a result."""

    __slots__ = ()


def shape_of(result: Any, outputs: list[Any], function: Callable[..., Any], name: str, *, needs_outputs: bool) -> Callable[[list[Any]], Any]:
    """Collect the Tensors of a result in `outputs`.

    Args:
        result: the result of `function`.
        outputs: filled with the Tensors of the result.
        function: the function that is compiled.
        name: of the function, for errors.
        needs_outputs: True if a result without a Tensor is an error.

    Returns:
        A function from other Tensors, one for each of `outputs`, to a result of the same structure.

    Raises:
        TraceError: the result has a leaf that a program cannot compute, or no Tensor.
    """
    if isinstance(result, TensorCore):
        outputs.append(result)
        return only
    try:
        others = others_in(result)
        structure = None if others else map_tree(lambda tensor: _Place(), result, TensorCore)
    except RecursionError:
        raise TraceError(
            f"{defined_at(function)}: the compiled function {name} returned a result that is nested too deep, or contains itself; expected a Tensor, "
            "or nested tuples, lists and dicts of Tensors"
        ) from None
    for other in others:
        if inspect.iscoroutine(other):
            other.close()
            raise TraceError(
                f"{defined_at(function)}: the compiled function {name} returned a coroutine; compile the `async def` itself, or make this function "
                "an `async def` that awaits it"
            )
        raise TraceError(
            f"{defined_at(function)}: the compiled function {name} returned something of type {type(other).__name__}; expected a Tensor, or nested "
            "tuples, lists and dicts of Tensors, since nothing else is computed anew by a program"
        )
    outputs += leaves_of(result, TensorCore)
    if needs_outputs and not outputs:
        raise TraceError(f"{defined_at(function)}: the compiled function {name} returned no Tensor: a program would have nothing to do")
    return functools.partial(_filled, structure)


def others_in(result: Any) -> list[Any]:
    """The leaves of a result that are neither Tensors nor None."""
    if isinstance(result, (tuple, list, dict)):
        return [other for item in (result.values() if isinstance(result, dict) else result) for other in others_in(item)]
    return [] if result is None or isinstance(result, TensorCore) else [result]


def only(outputs: list[Any]) -> Any:
    """The result of a function that returns one Tensor."""
    return outputs[0]


def _filled(structure: Any, outputs: list[Any]) -> Any:
    left = iter(outputs)
    return map_tree(lambda place: next(left), structure, _Place)


def chain_of(tensor: TensorCore, known: list[TensorCore]) -> list[TensorCore]:
    """The Tensors that lie between a view and the first known one that it is a view of; empty where there is none."""
    found: list[TensorCore] = []
    view = view_of(tensor)
    while view is not None:
        if any(view.parent is each for each in known):
            return found
        found.append(view.parent)
        view = view_of(view.parent)
    return []


def views_among(tensors: list[TensorCore], count: int) -> tuple[Views, bool]:
    """The views among the first `count` of some Tensors of others of them, and True if some share memory in another way."""
    places = {id(tensor): place for place, tensor in enumerate(tensors)}
    found: list[tuple[int, int, View]] = []
    for place, tensor in enumerate(tensors[:count]):
        view = view_of(tensor)
        if view is not None and id(view.parent) in places:
            found.append((place, places[id(view.parent)], view))
    related = {(place, parent) for place, parent, _ in found}
    bases = [base_of(tensor) for tensor in tensors]
    given = {id(base) for base in bases[count:]}
    for place in range(count):
        for other in (*range(place), *range(count, len(tensors))):
            if bases[place] is bases[other] and (id(bases[place]) in given or (place, other) in related or (other, place) in related):
                continue  # the version counter of an argument, or of the other one, tells of changes
            if _share_memory(tensors[place]._data, tensors[other]._data):
                return tuple(found), True
    return tuple(found), False


def relate(tensors: list[Any], views: Views) -> None:
    """Make Tensors of a run views of others, as they were while recording."""
    for place, parent, view in views:
        again = copy.copy(view)
        again.parent, again.version = tensors[parent], counter_of(tensors[parent])[0]
        tensors[place]._vc = tensors[parent]._vc
        extra_of(tensors[place]).view = again


def returned(returns: tuple[tuple[int, bool], ...], tensors: list[Any]) -> list[Any]:
    """The Tensors of a result, by their places in a run; detached where the recorded ones were."""
    return [tensors[place].detach() if is_detached else tensors[place] for place, is_detached in returns]


def _share_memory(one: Any, other: Any) -> bool:
    """True if two arrays may have an element in common; of those on a device views are known by how they were made."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    try:
        return bool(np.may_share_memory(one, other)) and np.shares_memory(one, other, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
