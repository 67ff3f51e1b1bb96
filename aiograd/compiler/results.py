"""Results of a function: what is no Tensor among them, which are views of others, and how those of a run become so too."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from aiograd.tensors.core import TensorCore, View, counter_of, extra_of, view_of

#: per result that is a view of another one: its place, that of the other, and how it is made
Views = tuple[tuple[int, int, View], ...]


def others_in(result: Any) -> list[Any]:
    """The leaves of a result that are neither Tensors nor None."""
    if isinstance(result, (tuple, list, dict)):
        return [other for item in (result.values() if isinstance(result, dict) else result) for other in others_in(item)]
    return [] if result is None or isinstance(result, TensorCore) else [result]


def views_among(outputs: list[TensorCore]) -> tuple[Views, bool]:
    """The results that are views of others, and True if some share memory in another way."""
    places = {id(output): place for place, output in enumerate(outputs)}
    found: dict[int, tuple[int, int, View]] = {}
    for place, output in enumerate(outputs):
        view = view_of(output)
        if view is not None and id(view.parent) in places:
            found[place] = place, places[id(view.parent)], view
    pairs = [(place, other) for place in range(len(outputs)) for other in range(place)]
    parents = {(place, parent) for place, parent, _ in found.values()}
    others = [pair for pair in pairs if pair not in parents and pair[::-1] not in parents]
    return tuple(found.values()), any(_share_memory(outputs[one]._data, outputs[other]._data) for one, other in others)


def relate(outputs: list[Any], views: Views) -> None:
    """Make results views of others, as they were while recording."""
    for place, parent, view in views:
        again = copy.copy(view)
        again.parent, again.version = outputs[parent], counter_of(outputs[parent])[0]
        outputs[place]._vc = outputs[parent]._vc
        extra_of(outputs[place]).view = again


def _share_memory(one: Any, other: Any) -> bool:
    """True if two arrays may have an element in common; of those on a device views are known by how they were made."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return False
    try:
        return bool(np.may_share_memory(one, other)) and np.shares_memory(one, other, max_work=10_000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
