"""Checkpoints of a training with local steps: the state that all members share, as a dict that can be saved."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from aiograd.data.ledger import BatchLedger
from aiograd.distributed.local_steps.base_coordinator import BaseCoordinator
from aiograd.distributed.local_steps.base_state import BaseState
from aiograd.distributed.objects.object_server import plain
from aiograd.errors import ArgumentError
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make

#: the parts of a checkpoint
PARTS = ("version", "seed", "parameters", "buffers", "outer", "answer", "data", "order")


def checkpoint_of(coordinator: BaseCoordinator) -> dict[str, Any]:
    """The checkpoint of a training.

    Args:
        coordinator: of the training.

    Returns:
        Copies of arrays as Tensors, numbers, texts, and dicts and lists of them.
    """
    base, loader = coordinator.base, coordinator.outline.loader
    return {
        "version": base.version,
        "seed": list(coordinator.seed),
        "parameters": {path: make(each._data.copy()) for path, each in base.parameters.items()},
        "buffers": {path: make(values.copy()) for path, values in base.buffers.items()},
        "outer": {name: _by_text(value) for name, value in plain(base.outer.state_dict()).items()},
        "answer": {path: make(each.copy()) for path, each in zip(base.trained, coordinator.residuals, strict=False) if each is not None},
        "data": coordinator.ledger.state_dict(),
        "order": {name: getattr(loader, name) for name in loader.form.names},
    }


def restored(coordinator: BaseCoordinator, state: Any) -> tuple[BaseState, str, BatchLedger, tuple[int, ...], list[Array | None]]:
    """The state of a checkpoint, checked against the training that is to go on from it.

    Args:
        coordinator: of the training, which is not changed.
        state: a checkpoint.

    Returns:
        The base, its digest, the place in the data, the seed of random numbers, and the residuals of answers.

    Raises:
        ArgumentError: it is no checkpoint of this model and this data set.
    """
    if not isinstance(state, Mapping) or state.keys() != set(PARTS):
        found = sorted(map(str, state)) if isinstance(state, Mapping) else type(state).__name__
        raise ArgumentError(f"LocalSteps.restore: expected a state with {', '.join(PARTS)}, as checkpoint() returns it; found {found}")
    base, loader = coordinator.base, coordinator.outline.loader
    parameters = _arrays("parameters", state["parameters"], {path: each._data for path, each in base.parameters.items()})
    buffers = _arrays("buffers", state["buffers"], base.buffers)
    sums = {path: each._data.astype(np.float64) for path, each in base.parameters.items() if path in base.trained}
    answer = _arrays("residuals of answers", state["answer"], sums) if state["answer"] else {}
    order = state["order"]
    for name in loader.form.names:
        if not isinstance(order, Mapping) or order.get(name) != getattr(loader, name):
            raise ArgumentError(f"LocalSteps.restore: the data set or the order of its batches is another one ({name} differs)")
    try:
        version, seed = int(state["version"]), tuple(int(each) for each in state["seed"])
        ledger = BatchLedger(loader.batches, state["data"])
        made = BaseState(parameters, buffers, base.trained, coordinator.make_outer, version)
        outer = {"state": {int(number): each for number, each in state["outer"]["state"].items()}, "param_groups": state["outer"]["param_groups"]}
        made.outer.load_state_dict(outer)
    except (KeyError, TypeError, ValueError) as error:
        raise ArgumentError(f"LocalSteps.restore: the state makes no sense: {type(error).__name__}: {error}") from error
    if version < 0:
        raise ArgumentError(f"LocalSteps.restore: version {version}; expected a number from 0 on")
    return made, made.digest(), ledger, seed, list(answer.values())


def _by_text(value: Any) -> Any:
    """The same with texts as names of dicts."""
    return {str(name): each for name, each in value.items()} if isinstance(value, Mapping) else value


def _arrays(what: str, given: Any, expected: Mapping[str, Array]) -> dict[str, Array]:
    """Copies of arrays by path, in the order of the expected ones, which they are like."""
    if not isinstance(given, Mapping) or given.keys() != expected.keys():
        found = ", ".join(map(str, given)) if isinstance(given, Mapping) else type(given).__name__
        raise ArgumentError(f"LocalSteps.restore: {what} {found or 'none'}; expected {', '.join(expected) or 'none'}")
    arrays = {}
    for path, like in expected.items():
        values = np.asarray(given[path]._data if isinstance(given[path], TensorCore) else given[path])
        if (values.shape, values.dtype) != (like.shape, like.dtype):
            found = f"{values.dtype}{list(values.shape)}"
            raise ArgumentError(f"LocalSteps.restore: {path} is {found}; expected {like.dtype}{list(like.shape)}")
        arrays[path] = values.copy()
    return arrays
