"""States of replicas: as an outline of plain values and a list of arrays, which a group of workers can broadcast. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.message_json import from_json, to_json
from aiograd.coordination.outline import tensors_of
from aiograd.distributed.data_parallel.replica_messages import ReplicaOutline, ReplicaVersion, StateEntry
from aiograd.errors import ProtocolError
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
    states: list[StateEntry] = []
    for number, name, value in _items(optimizer["state"]):
        if isinstance(value, TensorCore):
            arrays.append(value._data)
            states.append(StateEntry(number, name, True, None))
        else:
            states.append(StateEntry(number, name, value is None, value))
    present = [index for index, each in enumerate(running) if each is not None]
    arrays += [running[index] for index in present]
    outline = ReplicaOutline(list(tensors_of(module)), optimizer["param_groups"], states, present, ReplicaVersion(*version))
    return np.frombuffer(to_json(outline), np.uint8), arrays


def _items(state: Mapping[int, Mapping[str, Any]]) -> Iterator[tuple[int, str, Any]]:
    for number, values in state.items():
        for name, value in values.items():
            yield number, name, value


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
        told = from_json(ReplicaOutline, outline)
        try:
            rest = iter(arrays[len(self._targets) :])
            self._values = list(arrays[: len(self._targets)])
            fits = told.names == list(self._targets)
            fits = fits and all(value.shape == each.shape for value, each in zip(self._values, self._targets.values(), strict=True))
            state: dict[int, dict[str, Any]] = {}
            for each in told.states:
                state.setdefault(each.number, {})[each.name] = make(next(rest)) if each.is_array else each.value
            self.optimizer = {"state": state, "param_groups": told.groups}
            self.running: list[Array | None] = [None] * count
            for index in told.running:
                self.running[index] = next(rest)
            self.version = (told.version.loads, told.version.taken)
        except (TypeError, ValueError, IndexError, StopIteration) as error:
            text = f"the state of a data-parallel replica: its {len(arrays)} arrays do not fit its outline: {type(error).__name__}: {error}"
            raise ProtocolError(text, code="replica") from error
        if not fits:
            raise ProtocolError("the state of a data-parallel replica of another model", code="replica")

    def write(self) -> None:
        """Write parameters and buffers."""
        for target, value in zip(self._targets.values(), self._values, strict=True):
            inplace.write(target, asarray(value).to(target.device)._data)
