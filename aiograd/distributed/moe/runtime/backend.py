"""ExpertBackend: an expert on the worker that has it. Stateless between requests, and it learns from each backward.

Source: hivemind ``module_backend.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.modes import enable_grad, no_grad
from aiograd.serving.batcher import call
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.creation import asarray
from aiograd.tensors.passes import grad


class ExpertBackend:
    """Serves a module: forward without a graph, backward by running forward again, and an optimizer step for every backward.

    Requests are served one after the other, as on one device. Randomness has to be an argument, so that both runs agree.

    Args:
        module: takes and returns Tensors with rows along the first dimension.
        optimizer: of the module's parameters; None for an expert that does not learn.
        scheduler: ``step()`` is called after each step of the optimizer.

    Raises:
        ArgumentTypeError: no module, optimizer or scheduler.

    >>> backend = dist.moe.ExpertBackend(ag.nn.ReLU())
    >>> await backend.forward(ag.tensor([[-1.0, 2.0]]))
    tensor([[0., 2.]])
    """

    def __init__(self, module: Any, optimizer: Any = None, scheduler: Any = None) -> None:
        if not callable(module):
            raise ArgumentTypeError(f"ExpertBackend: expected a module, found {type(module).__name__}")
        for what, given, name in (("optimizer", optimizer, "astep"), ("scheduler", scheduler, "step")):
            if given is not None and not callable(getattr(given, name, None)):
                raise ArgumentTypeError(f"ExpertBackend({what}=...): expected one with {name}(), or None, found {type(given).__name__}")
        self.module = module
        self.optimizer = optimizer
        self.scheduler = scheduler
        #: batches of backward requests that have been served, each of them a step of the optimizer
        self.updates: int = 0
        self._lock: asyncio.Lock | None = None
        #: an update that goes on, though its request was cancelled
        self._updating: asyncio.Future[None] | None = None

    @contextlib.asynccontextmanager
    async def _turn(self) -> AsyncIterator[None]:
        if self._lock is None:
            self._lock = asyncio.Lock()
        async with self._lock:
            if self._updating is not None:
                await asyncio.wait([self._updating])
            yield

    async def forward(self, *inputs: Any) -> Any:
        """The module's outputs. Cancelling drops them.

        Args:
            *inputs: Tensors with one row for each sample.

        Returns:
            A Tensor, or several nested, recorded nowhere.

        >>> backend = dist.moe.ExpertBackend(ag.nn.ReLU())
        >>> await backend.forward(ag.tensor([[-1.0, 2.0]]))
        tensor([[0., 2.]])
        """
        async with self._turn():
            with no_grad():
                return await call(self.module, *inputs)

    async def backward(self, inputs: Sequence[Any], grads: Any) -> tuple[Any, ...]:
        """Gradients of the inputs; updates the module's parameters once, unless there are no rows to learn from.

        Cancelled before the update has begun, nothing has changed.

        Args:
            inputs: the inputs of the forward.
            grads: gradients of the outputs, a Tensor or one (or None) per output.

        Returns:
            One Tensor per input, zeros where there is no gradient, None for inputs that are not floating point.

        Raises:
            ArgumentError: not one gradient per output. Exceptions of the module.

        >>> backend = dist.moe.ExpertBackend(ag.nn.ReLU())
        >>> await backend.backward([ag.tensor([[-1.0, 2.0]])], [ag.ones(1, 2)])
        (tensor([[0., 1.]]),)
        """
        async with self._turn():
            leaves = [asarray(tensor).detach().requires_grad_(tensor.dtype.kind in "fc") for tensor in inputs]
            with enable_grad():
                result = await call(self.module, *leaves)
            outputs = list(result) if isinstance(result, (tuple, list)) else [result]
            given = list(grads) if isinstance(grads, (tuple, list)) else [grads]
            if len(given) != len(outputs):
                raise ArgumentError(f"ExpertBackend.backward: got {len(given)} gradients for {len(outputs)} outputs")
            pairs = [(o, g) for o, g in zip(outputs, given, strict=True) if g is not None and isinstance(o, TensorCore) and o.requires_grad]
            wanted = [leaf for leaf in leaves if leaf.requires_grad]
            parameters = [] if self.optimizer is None else [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
            found: tuple[Any, ...] = (None,) * (len(wanted) + len(parameters))
            if pairs and wanted + parameters:
                found = await grad([o for o, _ in pairs], wanted + parameters, [g for _, g in pairs], allow_unused=True)
            is_empty = bool(pairs) and not any(g.size for _, g in pairs)
            if self.optimizer is not None and not is_empty:
                updates = {p: g for p, g in zip(parameters, found[len(wanted) :], strict=True) if g is not None}
                self._updating = asyncio.ensure_future(self._update(updates))
                await asyncio.shield(self._updating)
            of_leaf = iter(found[: len(wanted)])
            results: list[Any] = []
            for leaf in leaves:
                if not leaf.requires_grad:
                    results.append(None)
                    continue
                value = next(of_leaf)
                results.append(make(np.zeros(leaf.shape, leaf.dtype)) if value is None else value)
            return tuple(results)

    async def _update(self, updates: dict[Any, Any]) -> None:
        await self.optimizer.astep(updates)
        self.updates += 1
        if self.scheduler is not None:
            self.scheduler.step()

    def state_dict(self) -> dict[str, Any]:
        """Everything that is needed to go on: module, optimizer, scheduler, number of updates.

        Returns:
            A dict for `load_state_dict`.
        """
        state = {"module": self.module.state_dict(), "updates": self.updates}
        if self.optimizer is not None:
            state["optimizer"] = self.optimizer.state_dict()
        if hasattr(self.scheduler, "state_dict"):
            state["scheduler"] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from a `state_dict`.

        Args:
            state: the state.

        Raises:
            ArgumentError: it is no such state.
        """
        names = {"module", "updates"} if self.optimizer is None else {"module", "optimizer", "updates"}
        if not isinstance(state, Mapping) or not names <= state.keys():
            raise ArgumentError(f"ExpertBackend.load_state_dict: expected a dict with {sorted(names)}, as state_dict() returns it")
        self.module.load_state_dict(state["module"])
        if self.optimizer is not None:
            self.optimizer.load_state_dict(state["optimizer"])
        if "scheduler" in state and hasattr(self.scheduler, "load_state_dict"):  # states of earlier releases have none
            self.scheduler.load_state_dict(state["scheduler"])
        self.updates = int(state["updates"])
