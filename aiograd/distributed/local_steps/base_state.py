"""BaseState: the state that rounds change: base parameters, buffers, and the outer optimizer; the next one waits beside it until it is committed."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from aiograd.coordination.buckets import ParameterSpec
from aiograd.distributed.data_parallel.staged_optimizer import StagedOptimizer
from aiograd.running.digest import state_digest
from aiograd.running.types import Array
from aiograd.tensors.core import make


class BaseState:
    """The state of all after some number of rounds.

    Args:
        parameters, buffers: by path, in the order of the module; kept.
        trained: paths of the parameters that get gradients.
        make_outer: makes the outer optimizer of all parameters.
        version: the number of rounds.
    """

    def __init__(
        self,
        parameters: Mapping[str, Array],
        buffers: Mapping[str, Array],
        trained: Iterable[str],
        make_outer: Callable[[list[Any]], Any],
        version: int,
    ) -> None:
        self.parameters: dict[str, Any] = {path: make(values) for path, values in parameters.items()}
        self.buffers: dict[str, Array] = dict(buffers)
        self.trained: list[str] = list(trained)
        self.version: int = version
        self._tensors = [self.parameters[path] for path in self.trained]
        self._outer = StagedOptimizer(make_outer(list(self.parameters.values())), self._tensors)
        self._next_buffers: dict[str, Array] = {}

    @property
    def specs(self) -> dict[str, ParameterSpec]:
        """Shapes and dtypes of the trained parameters, by path."""
        return {path: ParameterSpec(tuple(each.shape), each._data.dtype) for path, each in zip(self.trained, self._tensors, strict=True)}

    @property
    def outer(self) -> Any:
        """The outer optimizer."""
        return self._outer.current

    @property
    def arrays(self) -> list[Array]:
        """The values of the trained parameters."""
        return [each._data for each in self._tensors]

    def stage(self, means: Sequence[Array], buffers: Mapping[str, Array], withdrawn: Sequence[Any] = ()) -> str:
        """Compute the next state beside this one. It may take long, on any thread; nothing that others see changes.

        Args:
            means: the gradients of the outer optimizer, by trained parameter.
            buffers: with other values than before, by path.
            withdrawn: see `StagedOptimizer.compute`.

        Returns:
            The digest of the next state.
        """
        self._outer.compute(means, withdrawn)
        if withdrawn:
            return ""
        self._next_buffers = {**self.buffers, **buffers}
        staged = {path: self._outer.staged(index) for index, path in enumerate(self.trained)}
        values = {path: staged.get(path, tensor._data) for path, tensor in self.parameters.items()}
        return state_digest(values | self._next_buffers)

    def commit(self) -> None:
        """Go on to the state that was staged last. No values are copied: arrays of before may be written to by the next `stage`."""
        self._outer.swap()
        self.buffers = self._next_buffers
        self.version += 1

    def values(self) -> dict[str, Array]:
        """Parameters and buffers by path; they share memory with the state."""
        return {path: tensor._data for path, tensor in self.parameters.items()} | self.buffers

    def digest(self) -> str:
        """See `state_digest`."""
        return state_digest(self.values())
