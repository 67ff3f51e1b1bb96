"""Trainer: learns inside of a service, from the examples that it is given, and publishes versions.

Note [Requests first]
    Forward, the slices of backward and the optimizer's step are stops of the loop. Between them the trainer waits while rows are queued,
    never longer than `patience` at a time, so that neither side starves.

Note [A step leaves everything or nothing]
    The forward changes buffers, backward commits gradients as a whole, the optimizer steps in one section. Where a step fails or is cancelled before
    the optimizer's step, buffers and gradients are put back. A loss or a gradient that is not finite fails the step. Where the parameters are not
    finite after a step, the model goes on from the version that serves and the optimizer's state is cleared.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

import numpy as np

from aiograd.coordination.module_calls import BufferSnapshot
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, GradientError, RejectedVersionError, ServingError
from aiograd.optim.optimizer import Optimizer
from aiograd.running import tracing
from aiograd.running.caller import warn_caller
from aiograd.serving.answers import rows_of
from aiograd.serving.buffer import ReplayBuffer
from aiograd.serving.gate import Gate, Verdict
from aiograd.serving.registry import REGISTRY
from aiograd.serving.server import Server
from aiograd.serving.versions import Version
from aiograd.tensors.core import host_array, make
from aiograd.tensors.tensor import Tensor


class _RequestsFirst:
    """A gate for passes: True while rows are queued, for at most `patience` seconds at a time."""

    def __init__(self, server: Server, patience: float) -> None:
        self._server = server
        self._patience = patience
        self._until: float | None = None

    def __call__(self) -> bool:
        if not self._server.queued:
            self._until = None
            return False
        now = asyncio.get_running_loop().time()
        if self._until is None:
            self._until = now + self._patience
        is_patient = now < self._until
        if not is_patient:
            self._until = None
        return is_patient


class Trainer:
    """Trains a server's model on the rows that arrive, and publishes versions; entered, it runs as a task.

    Args:
        server: an entered server; its model is trained in place.
        optimizer: of the model's parameters.
        loss: called as ``loss(model, *columns)`` with the columns of a batch, ``def`` or ``async def``; returns a Tensor of one number.
        buffer: rows to draw batches from.
        batch: rows per step.
        rate: the most steps per second; None for no limit.
        publish_every: steps per version.
        gate: judges candidates before they serve; None: every version serves at once.
        inputs: the number of columns that go into the model when a version is judged; the others are targets.
        max_failures: failures in a row after which it stops; the server goes on.
        patience: the most seconds that one part of a step waits for requests.

    Attributes:
        steps: the number of steps that were taken.
        failures: the number of steps that failed.
        error: the exception of the last failure, None after a step that succeeded.
        rejected: the number of candidates that were dropped.
        rollbacks: the number of promotions that were taken back.

    Raises:
        ArgumentError, ArgumentTypeError: settings that cannot be.

    >>> model, x = ag.nn.Linear(2, 1), np.ones((8, 2), np.float32)
    >>> async with ag.serving.Server(model) as server:
    ...     loss = lambda model, x, y: ((model(x) - y) ** 2).mean()
    ...     trainer = ag.serving.Trainer(server, ag.optim.SGD(model.parameters(), 0.1), loss, buffer=ag.serving.ReplayBuffer(100))
    ...     await trainer.learn(x, x[:, :1])
    ...     first = await trainer.step()
    ...     server.current.number, await trainer.step() < first
    (2, True)
    """

    def __init__(
        self,
        server: Server,
        optimizer: Optimizer,
        loss: Callable[..., Any],
        *,
        buffer: ReplayBuffer,
        batch: int = 32,
        rate: float | None = None,
        publish_every: int = 1,
        gate: Gate | None = None,
        inputs: int = 1,
        max_failures: int = 10,
        patience: float = 0.05,
    ) -> None:
        for name, value, cls in (("server", server, Server), ("optimizer", optimizer, Optimizer), ("buffer", buffer, ReplayBuffer)):
            if not isinstance(value, cls):
                raise ArgumentTypeError(f"Trainer({name}=): expected a {cls.__name__}, found {type(value).__name__}")
        if not callable(loss):
            raise ArgumentTypeError(f"Trainer(loss=): expected a function of the model and columns, found {type(loss).__name__}")
        for name, count in (("batch", batch), ("publish_every", publish_every), ("inputs", inputs), ("max_failures", max_failures)):
            if type(count) is not int or count < 1:
                raise ArgumentError(f"Trainer({name}={count!r}): expected an int of at least 1")
        if rate is not None and not 0.0 < rate < math.inf:
            raise ArgumentError(f"Trainer(rate={rate!r}): expected steps per second above 0, or None")
        if not 0.0 <= patience < math.inf:
            raise ArgumentError(f"Trainer(patience={patience!r}): expected seconds, 0 or more")
        self.server = server
        self.optimizer = optimizer
        self.loss = loss
        self.buffer = buffer
        self.batch = batch
        self.rate = rate
        self.publish_every = publish_every
        self.gate = gate
        self.inputs = inputs
        self.max_failures = max_failures
        self.patience = patience
        self._turns = _RequestsFirst(server, patience)
        self.steps = self.failures = self.rejected = self.rollbacks = 0
        self.error: BaseException | None = None
        #: versions that the gate judges: the candidate or the promoted one, and the one to compare it with
        self._judged: tuple[Version, Version] | None = None
        self._since_publication = 0
        self._stepping = asyncio.Lock()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._has_rows = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        REGISTRY.add_trainer(self)

    def __repr__(self) -> str:
        return f"<Trainer of {self.server!r}, {self.steps} steps, {'running' if self.is_running else 'not running'}>"

    @property
    def is_running(self) -> bool:
        """True between entering and leaving, unless it has stopped after `max_failures`."""
        return self._task is not None and not self._task.done()

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ServingError("a Trainer is entered once; make a new one")
        self._task = asyncio.get_running_loop().create_task(self._train(), name="aiograd:trainer")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def pause(self) -> None:
        """Take no step before `resume`; the step that runs ends."""
        self._may_run.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._may_run.set()

    # ---------------------------------------------------------------- learning

    async def learn(self, *columns: Any) -> None:
        """Take examples: the gate judges versions by them first, then they go into the buffer.

        Cancelling while they are judged leaves them out of the buffer.

        Args:
            columns: Tensors or arrays with the same number of rows, as the loss takes them after the model.

        Raises:
            ArgumentError, ArgumentTypeError: columns that are no rows, do not fit together, or are not as those before.
        """
        rows = rows_of(columns)
        if len(rows) < self.inputs:
            raise ArgumentError(f"learn: {len(rows)} columns; expected at least the {self.inputs} that go into the model")
        if self._judged is not None:
            await self._judge(rows)
        self.buffer.add(*[host_array(column) for column in rows])
        self._has_rows.set()

    async def step(self) -> float:
        """Take one step: draw a batch, compute the loss, await backward, step, and publish every `publish_every` steps.

        Where it fails or is cancelled, see Note [A step leaves everything or nothing].

        Returns:
            The loss.

        Raises:
            ServingError: the buffer has no rows. GradientError: a loss or gradient that is not finite. RejectedVersionError: parameters that are not
            finite after the step. Exceptions of the loss and of its rules.
        """
        async with self._stepping:
            if not len(self.buffer):
                raise ServingError("Trainer.step: the buffer has no rows; give it some with `learn`")
            columns = [make(column) for column in self.buffer.sample(self.batch)]
            with tracing.span("train"):
                value = await self._step(columns)
            self.steps += 1
            self._since_publication += 1
            if self._since_publication >= self.publish_every:
                await self._publish(value)
            return value

    async def _step(self, columns: list[Any]) -> float:
        """One step of the optimizer on these rows, or none."""
        model = self.server.model
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        grads = [p.grad for p in parameters]
        buffers = BufferSnapshot([model])
        model.train()
        try:
            self.optimizer.zero_grad()
            await self._turn()
            loss = self.loss(model, *columns)
            if inspect.isawaitable(loss) and not isinstance(loss, Tensor):
                loss = await loss
            if not isinstance(loss, Tensor) or loss.shape != ():
                found = f"a Tensor of shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
                raise ArgumentTypeError(f"Trainer: the loss returned {found}; expected a Tensor of one number, such as a mean")
            value = float(loss.detach().item())
            if not math.isfinite(value):
                raise GradientError(f"Trainer: the loss is {value}; no step was taken")
            await self._turn()
            gates = current_engine().pass_gates
            gates.append(self._turns)
            try:
                await loss.backward()
            finally:
                gates.remove(self._turns)
            if not all(np.isfinite(host_array(p.grad)).all() for p in parameters if p.grad is not None):
                raise GradientError("Trainer: a gradient is not finite; no step was taken")
            await self._turn()
        except BaseException:
            buffers.restore()
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            raise
        self.optimizer.step()
        return value

    async def _turn(self) -> None:
        """Wait while rows are queued, at most `patience`."""
        if self._turns():
            await self.server.idle(self.patience)

    async def _train(self) -> None:
        """Take steps until cancelled or `max_failures` in a row."""
        loop = asyncio.get_running_loop()
        due, in_a_row = loop.time(), 0
        while in_a_row < self.max_failures:
            await self._may_run.wait()
            if not len(self.buffer):
                self._has_rows.clear()
                await self._has_rows.wait()
            if (rest := due - loop.time()) > 0:
                await asyncio.sleep(rest)
            due = max(due, loop.time() - 1.0) + (0.0 if self.rate is None else 1.0 / self.rate)
            try:
                await self.step()
                in_a_row, self.error = 0, None
            except Exception as error:
                in_a_row += 1
                self.failures += 1
                self.error = error
            await asyncio.sleep(0)
        warn_caller(f"a Trainer stopped after {in_a_row} failures in a row, the server goes on: {self.error}")

    # ---------------------------------------------------------------- versions

    async def _publish(self, loss: float) -> None:
        """Publish the model, as a candidate where there is a gate that is free."""
        if self.gate is not None and self._judged is not None:
            return
        serving = self.server.current
        try:
            version = await self.server.publish(metrics={"loss": loss, "step": self.steps}, promote=self.gate is None)
            if not version.is_finite:
                raise RejectedVersionError(f"Trainer: version {version.number} is not finite after the step; the model goes on from what serves")
        except RejectedVersionError:
            self.rejected += 1
            self._go_on_from_serving()
            raise
        self._since_publication = 0
        if self.gate is not None:
            self._judged = version, serving
            self.gate.begin()

    async def _judge(self, rows: tuple[Any, ...]) -> None:
        """Let the gate judge two versions by these rows, and act on its verdict."""
        judged = self._judged
        if self.gate is None or judged is None:
            return
        inputs, targets = rows[: self.inputs], [host_array(column) for column in rows[self.inputs :]]
        values = []
        for version in judged:
            outputs = await self.server.compute(version, *inputs)
            values.append(self.gate.measure(outputs, *targets, rows=rows[0].shape[0]))
        if self._judged is not judged:
            return  # another call has decided meanwhile
        version, other = judged
        verdict = self.gate.judge(*values).verdict
        if verdict is Verdict.PROMOTE:
            self.server.promote(version.number)
        elif verdict is Verdict.DROP:
            self.rejected += 1
            self._judged = None
        elif verdict is Verdict.KEEP:
            self._judged = None
        elif verdict is Verdict.ROLLBACK:
            self._judged = None
            self.rollbacks += 1
            self.server.rollback(other.number)
            self._go_on_from_serving()

    def _go_on_from_serving(self) -> None:
        """Load the version that serves into the model and clear the optimizer's state."""
        self.server.load_model(self.server.current)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": {}})
