"""Trainer: learns inside of a service, from the examples that it is given, and publishes versions.

Note [Rollbacks]
    After a rollback, by the gate or by hand, the model goes on from the version that serves and the optimizer's state is cleared: at once, or at the
    end of the step that runs, which is then not published. A version that is promoted, rolled back or published by hand ends the gate's comparison.

Note [Requests first]
    Forward, the slices of backward and the optimizer's step are stops of the loop. Before each the step lets the loop run a few rounds, in
    which requests arrive, and waits while rows are queued, but never longer than `patience` at a stop, so that neither side starves.

Note [A step is taken whole or not at all]
    The forward changes buffers, backward commits gradients as a whole, the optimizer steps in one section. Where a step fails or is cancelled before
    that section, buffers and gradients are put back. A loss or a gradient that is not finite fails the step. Where parameters are not finite
    after the section, the model goes on from the version that serves and the optimizer's state is cleared. After the section the step is taken: a
    publication that fails is made up for by the next step. Random draws, of rows and in the model, are not taken back, so that rows which make
    a step fail are not drawn at once again. A function that the loss has offloaded runs on when the step is cancelled: buffers are put back once more
    when it has ended, and the next step waits for that.
"""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Self

from aiograd.coordination.module_calls import BufferSnapshot, ModuleCalls
from aiograd.engine.loop_budget import ROUNDS
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, GradientError, ModeError, RejectedVersionError, ServingError
from aiograd.optim.optimizer import Optimizer
from aiograd.running import tracing
from aiograd.running.log_fields import structured_logger
from aiograd.running.offloading import STEP_CALLS
from aiograd.serving.answers import rows_of
from aiograd.serving.arguments import checked_count, checked_real
from aiograd.serving.buffer import ReplayBuffer
from aiograd.serving.gate import Gate, GateComparison, Verdict
from aiograd.serving.server import Server
from aiograd.serving.versions import Version, is_finite
from aiograd.tensors.core import host_array, make
from aiograd.tensors.tensor import Tensor

#: seconds by which a trainer that is late may be faster than its rate
CATCH_UP = 0.1
#: seconds until an empty buffer is looked at again
EMPTY_PAUSE = 0.01

log = structured_logger("aiograd.serving")


class Trainer:
    """Trains a server's model on the rows that arrive, and publishes versions; entered, it runs as a task.

    The loss runs on the model as it is: modes of its modules are not touched. See Note [A step is taken whole or not at all] for failures.

    Args:
        server: an entered server; its model is trained in place.
        optimizer: of the model's parameters; its ``step`` takes no closure.
        loss: called as ``loss(model, *columns)`` with the columns of a batch, ``def`` or ``async def``; returns a Tensor of one number.
        buffer: rows to draw batches from.
        batch: rows per step.
        rate: the most steps per second; None for no limit.
        publish_every: steps per version.
        gate: judges candidates before they serve; None: every version serves at once.
        inputs: the number of columns that go into the model when a version is judged; the others are targets.
        max_failures: failures in a row after which it stops and logs an error; the server goes on.
        patience: the most seconds that one part of a step waits for requests.

    Attributes:
        steps: the number of steps that were taken.
        failures: the number of steps and publications that failed, or were cancelled otherwise than by leaving the block.
        error: the exception of the last failure, None after a step that succeeded.
        rejected: the number of candidates that were dropped, and of states that were not finite.
        rollbacks: the number of promotions that the gate took back.

    Raises:
        ArgumentError, ArgumentTypeError: settings that cannot be. ServingError: the server is a `Follower`; on entry, it is not open. ModeError: on
            entry, another trainer trains the server.

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
        self, server: Server, optimizer: Optimizer, loss: Callable[..., Any], *, buffer: ReplayBuffer, batch: int = 32, rate: float | None = None,
        publish_every: int = 1, gate: Gate | None = None, inputs: int = 1, max_failures: int = 10, patience: float = 0.05,
    ) -> None:  # fmt: skip
        settings = {"server": server, "optimizer": optimizer, "buffer": buffer, "gate": gate}
        for (name, value), cls in zip(settings.items(), (Server, Optimizer, ReplayBuffer, Gate), strict=True):
            if not isinstance(value, cls) and not (name == "gate" and value is None):
                raise ArgumentTypeError(f"Trainer({name}=): expected a {cls.__name__}, found {type(value).__name__}")
        server._require_own_versions("Trainer")
        if inspect.iscoroutinefunction(optimizer.step):
            raise ArgumentTypeError(f"Trainer(optimizer=): {type(optimizer).__name__}.step needs a closure; expected an optimizer such as AdamW")
        if not callable(loss):
            raise ArgumentTypeError(f"Trainer(loss=): expected a function of the model and columns, found {type(loss).__name__}")
        self.server: Server = server
        self.optimizer: Optimizer = optimizer
        self.loss: Callable[..., Any] = loss
        self.buffer: ReplayBuffer = buffer
        self.gate: Gate | None = gate
        self.batch: int = checked_count("Trainer(batch=)", batch)
        per_second = "steps per second above 0, or None"
        self.rate: float | None = None if rate is None else checked_real("Trainer(rate=)", rate, per_second, is_positive=True)
        self.publish_every: int = checked_count("Trainer(publish_every=)", publish_every)
        self.inputs: int = checked_count("Trainer(inputs=)", inputs)
        self.max_failures: int = checked_count("Trainer(max_failures=)", max_failures)
        self.patience: float = checked_real("Trainer(patience=)", patience)
        self.steps: int = 0
        self.failures: int = 0
        self.rejected: int = 0
        self.rollbacks: int = 0
        self.error: Exception | None = None
        self._comparison: GateComparison | None = None
        self._since_publication = 0
        #: rollbacks of the server after which the model has gone on from the version that serves
        self._followed_rollbacks = server._rollbacks
        self._stepping = asyncio.Lock()
        self._calls = ModuleCalls()
        self._may_run = asyncio.Event()
        self._may_run.set()
        self._task: asyncio.Task[None] | None = None
        #: the task that takes a step
        self._stepper: asyncio.Task[Any] | None = None

    def __repr__(self) -> str:
        return f"<Trainer of {self.server!r}, {self.steps} steps, {'running' if self.is_running else 'not running'}>"

    @property
    def is_running(self) -> bool:
        """True between entering and leaving, unless it has stopped after `max_failures`."""
        return self._task is not None and not self._task.done()

    async def __aenter__(self) -> Self:
        if self._task is not None:
            raise ServingError("a Trainer is entered once; make a new one")
        self.server._check_open()
        self._take_over()
        self._task = asyncio.get_running_loop().create_task(self._train(), name="aiograd:trainer")
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])
        self._end_comparison()

    def _take_over(self) -> None:
        """Be the trainer of the server: two would mix their gradients. A trainer that does not train any more ends its comparison."""
        other = self.server._trainer
        if other is self:
            return
        if other is not None:
            if other.is_running or other._stepping.locked():
                raise ModeError(
                    f"{self!r} was to train, but {other!r} trains that server: leave its `async with` block first, or add the loss to its loss"
                )
            other._end_comparison()
        self.server._trainer = self

    def pause(self) -> None:
        """Take no step before `resume`; the step that runs ends."""
        self._may_run.clear()

    def resume(self) -> None:
        """Go on after `pause`."""
        self._may_run.set()

    async def learn(self, *columns: Any) -> None:
        """Take examples: the gate judges versions by them first, then they go into the buffer.

        Cancelling while they are judged leaves them out of the buffer.

        Args:
            columns: Tensors or arrays with the same number of rows, as the loss takes them after the model.

        Raises:
            ArgumentError, ArgumentTypeError: columns that are no rows, do not fit together, or are not as those before. Exceptions of the gate's
            metric and of the server's forward; the examples are left out.

        >>> await trainer.learn(x, x[:, :1])
        >>> len(trainer.buffer)
        8
        """
        self.server._check_loop()
        rows = rows_of(columns, "learn")
        if len(rows) < self.inputs:
            raise ArgumentError(f"learn: {len(rows)} columns; expected at least the {self.inputs} that go into the model")
        if self.gate is not None:
            await self._judge(self.gate, rows)
        self.buffer.add(*[host_array(column) for column in rows])

    async def step(self) -> float:
        """Take one step: draw a batch, compute the loss, await backward, step, and publish every `publish_every` steps.

        Steps run one after the other. Where one fails or is cancelled, see Note [A step is taken whole or not at all].

        Returns:
            The loss.

        Raises:
            ServingError: the buffer has no rows, the loss was cancelled by itself, or the server is not open. ModeError: another trainer trains the
            server, or it is called within a step.
            GradientError: a loss or gradient that is not finite. RejectedVersionError: parameters that are not finite after the step. Exceptions of
            the loss, of its rules and of the publication.

        >>> await trainer.learn(x, x[:, :1])
        >>> loss = await trainer.step()
        >>> trainer.server.current.metrics["loss"] == loss
        True
        """
        task = asyncio.current_task()
        if task is not None and task is self._stepper:
            raise ModeError("Trainer.step: this task is within a step of this Trainer already, which would wait for itself")
        self.server._check_loop()
        async with self._stepping:
            self.server._check_open()
            self._take_over()
            await self._calls.settled()
            self._follow_rollback()
            if not len(self.buffer):
                raise ServingError("Trainer.step: the buffer has no rows; give it some with `learn`")
            columns = [make(column) for column in self.buffer.sample(self.batch)]
            cancellations = 0 if task is None else task.cancelling()
            self._stepper = task
            try:
                with tracing.span("train"):
                    loss = await self._take_step(columns)
                self.steps += 1
                self._since_publication += 1
                await asyncio.sleep(0)  # other tasks run between the optimizer's step and the copy
                if not self._follow_rollback():
                    await self._publish(loss)
            except asyncio.CancelledError as error:
                if task is None or task.cancelling() > cancellations:
                    self.failures += task is not self._task  # leaving the block is no failure
                    raise
                self.failures += 1
                self.error = ServingError("Trainer: the loss was cancelled, by itself or by something it waits for; no step was taken")
                raise self.error from error
            except BaseException as error:
                self.failures += 1
                self.error = error if isinstance(error, Exception) else ServingError(f"Trainer: a step was ended by {type(error).__name__}: {error}")
                if isinstance(error, RejectedVersionError):
                    self.rejected += 1
                    self._go_on_from_serving()
                raise
            finally:
                self._stepper = None
            self.error = None
            return loss

    async def _train(self) -> None:
        """Take steps until cancelled or `max_failures` in a row."""
        loop = asyncio.get_running_loop()
        due, in_a_row, seconds = loop.time(), 0, 0.0 if self.rate is None else 1.0 / self.rate
        while in_a_row < self.max_failures:
            await asyncio.sleep(max(0.0, due - loop.time()))
            if not (self._may_run.is_set() and len(self.buffer)):
                await self._may_run.wait()
                due = loop.time() + (0.0 if len(self.buffer) else EMPTY_PAUSE)
                continue
            due = max(due, loop.time() - CATCH_UP) + seconds
            try:
                await self.step()
                in_a_row = 0
            except Exception as error:
                in_a_row += 1
                log.warning("a step of a Trainer failed (%s: %s); %d in a row", type(error).__name__, error, in_a_row)
        log.error("a Trainer has stopped after %d failures in a row; the server goes on", in_a_row)

    async def _take_step(self, columns: Sequence[Any]) -> float:
        """Take a step on these rows, see Note [A step is taken whole or not at all]; returns the loss."""
        stepped = [parameter for group in self.optimizer.param_groups for parameter in group["params"]]
        parameters = dict.fromkeys([*self.server.model.parameters(), *stepped])
        grads = [parameter.grad for parameter in parameters]
        buffers = BufferSnapshot([self.server.model])
        try:
            self.optimizer.zero_grad()
            await self._turn()
            token = STEP_CALLS.set(self._calls)
            try:
                loss = self.loss(self.server.model, *columns)
                if inspect.isawaitable(loss):
                    loss = await loss
            finally:
                STEP_CALLS.reset(token)
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
            gradients = [parameter.grad for parameter in stepped if parameter.grad is not None]
            if not gradients:
                raise GradientError("Trainer: no parameter of the optimizer has a gradient; expected a loss that depends on the model")
            if not _are_finite(gradients):
                raise GradientError("Trainer: a gradient is not finite; no step was taken")
            await self._turn()
        except BaseException:
            buffers.restore()
            self._calls.release(buffers.restore)
            for parameter, grad in zip(parameters, grads, strict=True):
                parameter.grad = grad
            raise
        try:
            self.optimizer.step()
        except Exception as error:
            raise RejectedVersionError("Trainer: the optimizer failed within its step; the model goes on from the version that serves") from error
        if not _are_finite(stepped):
            raise RejectedVersionError("Trainer: parameters are not finite after the step; the model goes on from the version that serves")
        return value

    def _go_on_from_serving(self) -> None:
        """Load the version that serves into the model, and clear the optimizer's state."""
        self.server.model.load_state_dict(self.server.current.state)
        self.optimizer.load_state_dict({**self.optimizer.state_dict(), "state": {}})

    def _seconds_to_wait(self) -> float:
        """A gate of passes: rows that wait go first."""
        return self.patience if self.server._batcher.queued else 0.0

    async def _turn(self) -> None:
        """Let the loop run its rounds, and wait while rows are queued, at most `patience`."""
        for _ in range(ROUNDS):
            await asyncio.sleep(0)
        if self.server._batcher.queued:
            await self.server._batcher.idle(self.patience)

    async def _publish(self, loss: float) -> None:
        """Publish the model if that is due, with a gate as a candidate unless the gate compares others."""
        if self._since_publication < self.publish_every or self._running_comparison() is not None:
            return
        metrics = {"loss": loss, "step": self.steps}
        version = await self.server._publish(None, metrics, lambda: self.gate is None and self._followed_rollbacks == self.server._rollbacks)
        if self._follow_rollback():  # it came while the version was copied or written, which is a candidate
            return
        if not version.is_finite:
            raise RejectedVersionError(f"Trainer: version {version.number} is not finite; the model goes on from the version that serves")
        self._since_publication = 0
        if self.gate is not None:
            self._comparison = GateComparison(self.gate, version, self.server.current)
            self.server._pin(version.number, self.server.current.number)

    async def _judge(self, gate: Gate, rows: tuple[Any, ...]) -> None:
        """Let the gate judge two versions by these rows, and act on its verdict."""
        comparison = self._running_comparison()
        if comparison is None:
            return
        newer, older = comparison.newer, comparison.older
        inputs, targets = rows[: self.inputs], [host_array(column) for column in rows[self.inputs :]]
        outputs = [await self._outputs(version, inputs) for version in (newer, older)]
        if self._running_comparison() is not comparison:
            return  # decided meanwhile
        verdict = comparison.judge(outputs, targets, rows[0].shape[0])
        if verdict is Verdict.PROMOTE:
            self.server.promote(newer.number)
            self._comparison = GateComparison(gate, newer, older, is_probation=True)
        elif verdict is not Verdict.WAIT:
            self.rejected += verdict is Verdict.DROP
            if verdict is Verdict.ROLLBACK:
                self.rollbacks += 1
                self.server.rollback(older.number)
            self._end_comparison()
            async with self._stepping:
                await self._calls.settled()
                self._follow_rollback()

    async def _outputs(self, version: Version, columns: tuple[Any, ...]) -> Any:
        """The outputs of a version, apart from batches, statistics and limits of the server."""
        self.server._check_open()
        return await self.server._forward(self.server._bind(version), [columns], columns[0].shape[0])

    def _running_comparison(self) -> GateComparison | None:
        """The comparison of the gate; none any more where a version was made to serve by hand."""
        if self._comparison is not None and self.server.current is not self._comparison.serving:
            self._end_comparison()
        return self._comparison

    def _end_comparison(self) -> None:
        if self._comparison is not None:
            self._comparison = None
            self.server._pin()

    def _follow_rollback(self) -> bool:
        """Go on from the version that serves if the server was rolled back since the last call; True if so."""
        if self._followed_rollbacks == self.server._rollbacks:
            return False
        self._followed_rollbacks = self.server._rollbacks
        self._go_on_from_serving()
        return True


def _are_finite(tensors: Sequence[Any]) -> bool:
    return all(is_finite(host_array(tensor)) for tensor in tensors)
