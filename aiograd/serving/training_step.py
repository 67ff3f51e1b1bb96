"""TrainingStep: one step of an optimizer beside requests, whole or not at all.

Note [Requests first]
    Forward, the slices of backward and the optimizer's step are stops of the loop. Before each the step lets the loop run a few rounds, in
    which requests arrive, and waits while rows are queued, but never longer than `patience` at a stop, so that neither side starves.

Note [A step is taken whole or not at all]
    The forward changes buffers, backward commits gradients as a whole, the optimizer steps in one section. Where a step fails or is cancelled before
    that section, buffers and gradients are put back. A loss or a gradient that is not finite fails the step. Where parameters are not finite
    after the section, the model goes on from the version that serves and the optimizer's state is cleared. After the section the step is taken: a
    publication that fails is made up for by the next step. Random draws, of rows and in the model, are not taken back, so that rows which make
    a step fail are not drawn at once again. Modes are the user's: the loss runs on the model as it is, in training or evaluation mode. A forward
    that the loss runs in a thread goes on when the step is cancelled, and may change buffers once more.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.module_calls import BufferSnapshot
from aiograd.engine.loop_budget import ROUNDS
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError, GradientError, RejectedVersionError
from aiograd.optim.optimizer import Optimizer
from aiograd.serving.server import Server
from aiograd.tensors.core import host_array
from aiograd.tensors.tensor import Tensor


class TrainingStep:
    """Steps of a server's model, with the settings of a `Trainer`."""

    def __init__(self, server: Server, optimizer: Optimizer, loss: Callable[..., Any], patience: float) -> None:
        self._server, self._optimizer, self._loss, self._patience = server, optimizer, loss, patience

    async def take(self, columns: Sequence[Any]) -> float:
        """Take a step on these rows; returns the loss. After a RejectedVersionError call `go_on_from_serving`."""
        stepped = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        parameters = dict.fromkeys([*self._server.model.parameters(), *stepped])
        grads = [parameter.grad for parameter in parameters]
        buffers = BufferSnapshot([self._server.model])
        try:
            value = await self._backward(columns)
            found = [parameter.grad for parameter in stepped if parameter.grad is not None]
            if not found:
                raise GradientError("Trainer: no parameter of the optimizer has a gradient; expected a loss that depends on the model")
            if not _are_finite(found):
                raise GradientError("Trainer: a gradient is not finite; no step was taken")
            await self._turn()
        except BaseException:
            buffers.restore()
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            raise
        try:
            self._optimizer.step()
        except Exception as error:
            raise RejectedVersionError("Trainer: the optimizer failed within its step; the model goes on from the version that serves") from error
        if not _are_finite(stepped):
            raise RejectedVersionError("Trainer: parameters are not finite after the step; the model goes on from the version that serves")
        return value

    def go_on_from_serving(self) -> None:
        """Load the version that serves into the model, and clear the optimizer's state."""
        self._server.load_model(self._server.current)
        self._optimizer.load_state_dict({**self._optimizer.state_dict(), "state": {}})

    async def _backward(self, columns: Sequence[Any]) -> float:
        """Compute the loss and gradients."""
        self._optimizer.zero_grad()
        await self._turn()
        loss = self._loss(self._server.model, *columns)
        if inspect.isawaitable(loss):
            loss = await loss
        if not isinstance(loss, Tensor) or loss.shape != () or loss.dtype.kind == "c":
            found = f"a {loss.dtype} Tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else f"a {type(loss).__name__}"
            raise ArgumentTypeError(f"Trainer: the loss returned {found}; expected a Tensor of one real number, such as a mean")
        value = float(loss.detach().item())
        if not math.isfinite(value):
            raise GradientError(f"Trainer: the loss is {value}; no step was taken")
        await self._turn()
        gates = current_engine().pass_gates
        gates.append(self._seconds_to_wait)
        try:
            await loss.backward()
        finally:
            gates.remove(self._seconds_to_wait)
        return value

    def _seconds_to_wait(self) -> float:
        """A gate of passes: rows that wait go first."""
        return self._patience if self._server.queued else 0.0

    async def _turn(self) -> None:
        """Let the loop run its rounds, and wait while rows are queued, at most `patience`."""
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        if self._server.queued:
            await self._server.idle(self._patience)


def _are_finite(tensors: Sequence[Any]) -> bool:
    return all(np.isfinite(host_array(tensor)).all() for tensor in tensors)
