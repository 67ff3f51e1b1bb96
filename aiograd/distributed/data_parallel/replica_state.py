"""States of replicas: as an outline of plain values and a list of arrays, which a group of workers can broadcast. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.outline import tensors_of
from aiograd.errors import ArgumentError, ProtocolError
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.creation import asarray


def flatten_state(
    module: Any, optimizer: Mapping[str, Any], running: Sequence[Array | None], version: Sequence[int]
) -> tuple[Array, list[Any]]:
    """The outline of a state as bytes, and its arrays.

    Args:
        module: with its parameters and buffers.
        optimizer: the ``state_dict`` of the optimizer.
        running: gradients of steps that are still to be followed by others before the optimizer takes a step, by parameter.
        version: of the state.
    """
    arrays: list[Any] = [each._data for each in tensors_of(module).values()]
    states: list[tuple[int, str, Any]] = []
    for number, name, value in _items(optimizer["state"]):
        if isinstance(value, TensorCore):
            arrays.append(value._data)
            states.append((number, name, None))
        else:
            states.append((number, name, value))
    present = [index for index, each in enumerate(running) if each is not None]
    arrays += [running[index] for index in present]
    outline = {
        "names": list(tensors_of(module)),
        "groups": optimizer["param_groups"],
        "states": [[number, name, value is None, value] for number, name, value in states],
        "running": present,
        "version": list(version),
    }
    return np.frombuffer(json.dumps(outline, default=plain_number).encode(), np.uint8), arrays


def _items(state: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    for number, values in state.items():
        for name, value in values.items():
            yield number, name, value


def plain_number(value: Any) -> Any:
    """A number of numpy's as one of Python's."""
    if isinstance(value, np.generic):
        return value.item()
    raise ArgumentError(f"the state of an optimizer has a {type(value).__name__}, which cannot be sent to another replica")


class ReceivedState:
    """A state that has come from another replica, checked against this one's.

    Args:
        outline, arrays: as from `flatten_state`.
        module: the module that is to have it.
        count: of the parameters that get gradients.

    Attributes:
        optimizer: the ``state_dict`` of the optimizer.
        running, version: as of `flatten_state`.

    Raises:
        ProtocolError: the state makes no sense, or belongs to another model.
    """

    def __init__(self, outline: Array, arrays: Sequence[Array], module: Any, count: int) -> None:
        self._targets = tensors_of(module)
        try:
            told = json.loads(outline.tobytes())
            rest = iter(arrays[len(self._targets) :])
            self._values = list(arrays[: len(self._targets)])
            fits = told["names"] == list(self._targets)
            fits = fits and all(value.shape == each.shape for value, each in zip(self._values, self._targets.values(), strict=True))
            state: dict[int, dict[str, Any]] = {}
            for number, name, is_array, value in told["states"]:
                state.setdefault(number, {})[name] = make(next(rest)) if is_array else value
            self.optimizer = {"state": state, "param_groups": told["groups"]}
            self.running: list[Array | None] = [None] * count
            for index in told["running"]:
                self.running[index] = next(rest)
            loads, taken = map(int, told["version"])
            self.version = (loads, taken)
        except (KeyError, TypeError, ValueError, IndexError, StopIteration) as error:
            raise ProtocolError(f"a malformed state of a data-parallel replica: {type(error).__name__}: {error}", code="replica") from error
        if not fits:
            raise ProtocolError("the state of a data-parallel replica of another model", code="replica")

    def write(self) -> None:
        """Write parameters and buffers."""
        for target, value in zip(self._targets.values(), self._values, strict=True):
            inplace.write(target, asarray(value).to(target.device)._data)
