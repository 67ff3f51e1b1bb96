"""StagedOptimizer: an optimizer step that is computed beside the parameters, so that it can be written in one moment, or dropped.

Note [Two optimizers]
    The class of an optimizer knows only how to update parameters in place. So it works on copies of them, and there are two optimizers over these
    copies: `current` has the state after the last step that was committed, and the other takes the next step, from the same values. A commit writes
    the new parameters and makes that one the current. Both keep their memory, so a step costs a copy of the state and of the parameters and
    allocates nothing.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore, counter_of, make


class StagedOptimizer:
    """An optimizer of the parameters of a replica.

    Args:
        optimizer: the optimizer, over the parameters themselves; it is copied.
        parameters: the parameters that get gradients.

    Attributes:
        current: the optimizer after the last step that was committed; its parameters are copies.

    Raises:
        ArgumentTypeError: its class is not derived from ``ag.optim.Optimizer``.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any]) -> None:
        if not isinstance(getattr(optimizer, "state", None), dict) or not isinstance(getattr(optimizer, "param_groups", None), list):
            raise ArgumentTypeError(
                f"data-parallel replicas need an optimizer that is derived from ag.optim.Optimizer, found {type(optimizer).__name__}: its steps are "
                "computed on copies"
            )
        memo: dict[int, Any] = {}
        self.current = copy.deepcopy(optimizer, memo)
        self._parameters = list(parameters)
        self._copies: list[Any] = [memo[id(parameter)] for parameter in self._parameters]
        self._next = copy.deepcopy(self.current, {id(each): each for each in memo.values() if isinstance(each, TensorCore)})
        #: by parameter the version in which its copy has the same values
        self._versions: list[int | None] = [None] * len(self._parameters)
        #: the parameters that the step updates
        self._updated: list[int] = []
        self._lock = threading.Lock()

    def compute(self, grads: Sequence[Array | None], withdrawn: Sequence[Any] = ()) -> None:
        """Take the next step beside the current one. It may take long, on any thread; nothing that others see changes.

        Args:
            grads: by parameter; None: it is not updated.
            withdrawn: not empty if the step is not wanted any more by the time that it begins.

        Raises:
            ArgumentError: a parameter cannot be written to. Exceptions of the optimizer.
        """
        with self._lock:
            if withdrawn:
                return
            self._updated = [index for index, grad in enumerate(grads) if grad is not None]
            given: dict[Any, Any] = {}
            for index in self._updated:
                parameter, mine = self._parameters[index], self._copies[index]
                data = parameter._data
                if isinstance(data, np.ndarray) and not data.flags.writeable:
                    raise ArgumentError(f"a parameter of shape {list(data.shape)} is read-only, so no optimizer step can update it")
                if self._versions[index] != counter_of(parameter)[0]:
                    mine._data[...] = data
                self._versions[index] = None
                given[mine] = grads[index]
            self._copy_state()
            self._next.step(given)

    def _copy_state(self) -> None:
        """Put the next optimizer where the current one is."""
        have, into = self.current, self._next
        for theirs, mine in zip(have.param_groups, into.param_groups, strict=True):
            mine.update({name: value for name, value in theirs.items() if name != "params"})
        for parameter in [each for each in into.state if each not in have.state]:
            del into.state[parameter]
        for parameter, values in have.state.items():
            state = into.state.setdefault(parameter, {})
            for name in [each for each in state if each not in values]:
                del state[name]
            for name, value in values.items():
                if not isinstance(value, TensorCore):
                    state[name] = copy.copy(value)
                elif isinstance(state.get(name), TensorCore):
                    state[name]._data[...] = value._data
                else:
                    state[name] = make(value._data.copy())

    def staged(self, index: int) -> Array:
        """The new values of a parameter that the computed step updates."""
        values: Array = self._copies[index]._data
        return values

    def commit(self) -> None:
        """Write the parameters, and go on from here."""
        for index in self._updated:
            parameter = self._parameters[index]
            inplace.write(parameter, self._copies[index]._data)
            self._versions[index] = counter_of(parameter)[0]
        self.current, self._next = self._next, self.current

    def swap(self) -> None:
        """As `commit`, for parameters whose memory nothing else uses: they change places with their copies, which copies no values."""
        for index in self._updated:
            parameter, mine = self._parameters[index], self._copies[index]
            parameter._data, mine._data = mine._data, parameter._data
        self.current, self._next = self._next, self.current
