"""TrainingState: everything that a training run consists of, in one file.

Note [The same bits]
    A run that goes on from a file continues to the same bits if all that changes is in it: parameters and buffers, the optimizer's state,
    schedules, the place in the epoch, averages, and the generators that numbers are drawn from. The default generator of the running task is
    always in the file; others are parts like the rest. Files are written atomically (`aiograd.saving.serialization`), so a run that is killed while
    it writes finds the file before.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.offloading import offload
from aiograd.running.random import default_generator
from aiograd.running.trees import map_tree
from aiograd.saving.serialization import SaveTurn, load, save, save_in_turn
from aiograd.tensors.core import TensorCore

#: the part that is always there
_RANDOM = "default_generator"


class TrainingState:
    """Parts of a training run that are saved and restored together.

    ::

        state = ag.TrainingState(model=model, optimizer=optimizer, schedule=schedule, loader=loader)
        state.restore("run.safetensors") if os.path.exists("run.safetensors") else None
        async for x, y in loader:
            ...
            state.save("run.safetensors")

    Args:
        parts: by name, objects with ``state_dict()`` and ``load_state_dict()``: modules, optimizers, schedules, loaders, averages, generators.

    Raises:
        ArgumentTypeError: a part without these methods.

    >>> import os, tempfile
    >>> model = ag.nn.Linear(1, 1, bias=False)
    >>> state = ag.TrainingState(model=model)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = os.path.join(folder, "run.safetensors")
    ...     state.save(path)
    ...     _ = ag.nn.init.zeros_(model.weight)
    ...     state.restore(path)
    >>> (model.weight == 0).item()
    False
    """

    def __init__(self, **parts: Any) -> None:
        for name, part in parts.items():
            if not hasattr(part, "state_dict") or not hasattr(part, "load_state_dict") or name == _RANDOM:
                raise ArgumentTypeError(f"TrainingState({name}={type(part).__name__}): expected something with state_dict() and load_state_dict()")
        self.parts = parts

    def state_dict(self) -> dict[str, Any]:
        """The states of all parts, and of the default generator; they share memory with the parts.

        Returns:
            A dict for `load_state_dict`: the states by name.
        """
        return {**{name: part.state_dict() for name, part in self.parts.items()}, _RANDOM: default_generator().state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put all parts, and the default generator, into their states.

        Args:
            state: the states by name.

        Raises:
            ArgumentError: parts are missing or unexpected, or a state does not fit its part; all parts are as they were.
        """
        expected = {*self.parts, _RANDOM}
        if not isinstance(state, Mapping) or state.keys() != expected:
            found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
            raise ArgumentError(f"TrainingState: found {found}, expected the parts {sorted(expected)}")
        changes = {name: part._change_to(state[name]) for name, part in self.parts.items() if hasattr(part, "_change_to")}
        before = map_tree(lambda tensor: tensor.clone(), self.state_dict(), TensorCore)
        done: list[Any] = []
        try:
            for name, part in [*self.parts.items(), (_RANDOM, default_generator())]:
                if name in changes:
                    continue
                done.append((name, part))
                part.load_state_dict(state[name])
        except BaseException:
            for name, part in done:
                part.load_state_dict(before[name])
            raise
        for change in changes.values():  # of loaders, which cannot be put back to a stream's place or into a loop that runs
            change()

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file, replacing an older one atomically. Blocks while it writes; see `asave`.

        Args:
            path: path of the file.
        """
        save(self.state_dict(), path)

    async def asave(self, path: str | os.PathLike[str]) -> None:
        """Write everything to a file on the engine's executor: the states of the moment of the call.

        Cancelled, it waits no longer; the file is the old one or the new one. A file of a later `save` or `asave` to the same path stays in place,
        also where this one is written after it.

        Args:
            path: path of the file.

        >>> import os, tempfile
        >>> state = ag.TrainingState(model=ag.nn.Linear(2, 1))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     await state.asave(os.path.join(folder, "run.safetensors"))
        ...     state.restore(os.path.join(folder, "run.safetensors"))
        """
        await offload(save_in_turn, map_tree(lambda tensor: tensor.clone(), self.state_dict(), TensorCore), SaveTurn(path))

    def restore(self, path: str | os.PathLike[str]) -> None:
        """Read a file that `save` wrote, and put everything into that state.

        Args:
            path: path of the file.

        Raises:
            FileNotFoundError, ArgumentError: as of `aiograd.load`, or the state does not fit; everything is as it was.
        """
        self.load_state_dict(load(path))
