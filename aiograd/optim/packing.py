"""Pack: small parameters with their gradients and state in one line each, so that one call updates them all."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.tensors.core import make

#: up to how many elements a parameter is packed; above, copying it costs more than the call it saves
PACKED_SIZE = 8192


class Pack:
    """A line of parameters of one dtype. State arrays move into it for good; parameters and gradients are copied at each step.

    Args:
        members: (parameter, gradient, state) of each.
        names: of the state's arrays.
    """

    __slots__ = ("parameter", "gradient", "state", "_names", "_tensors", "places", "_arrays")

    def __init__(self, members: list[Any], names: tuple[str, ...]) -> None:
        dtype = members[0][0]._data.dtype
        total = sum(p.size for p, _, _ in members)
        self.parameter = np.empty(total, dtype)
        self.gradient = np.empty(total, dtype)
        self.state = [np.empty(total, dtype) for _ in names]
        self._names = names
        #: per member: the parameter, and the Tensors of its state
        self._tensors: list[tuple[Any, ...]] = []
        #: per member: where its values and its gradient are in the lines
        self.places: list[tuple[Any, Any]] = []
        self._arrays: list[Any] = []
        start = 0
        for p, _, state in members:
            part = slice(start, start + p.size)
            start += p.size
            for name, line in zip(names, self.state, strict=True):
                place = line[part].reshape(p.shape)
                place[...] = state[name]._data
                state[name] = make(place)
            self._tensors.append((p, *(state[name] for name in names)))
            self.places.append((self.parameter[part].reshape(p.shape), self.gradient[part].reshape(p.shape)))

    def holds(self, members: list[Any], names: tuple[str, ...]) -> bool:
        """True if the pack is of exactly these members, and their state is still in its place."""
        if len(members) != len(self._tensors) or names != self._names:
            return False
        for (p, _, state), tensors in zip(members, self._tensors, strict=True):
            if p is not tensors[0]:
                return False
            for name, tensor in zip(names, tensors[1:], strict=True):
                if state[name] is not tensor:
                    return False
        return True

    def load(self, members: list[Any]) -> None:
        """Copy parameters and gradients in."""
        copy = np.copyto
        self._arrays = arrays = []
        for (p, grad, _), (place, gradient_place) in zip(members, self.places, strict=True):
            data = p._data
            arrays.append(data)
            copy(place, data)
            copy(gradient_place, grad)

    def unload(self) -> None:
        """Copy the parameters back."""
        copy = np.copyto
        for data, (place, _) in zip(self._arrays, self.places, strict=True):
            copy(data, place)
        self._arrays = []
