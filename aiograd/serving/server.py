"""Server: answers requests in batches, each by one committed version of a model's weights.

See Note [One reference] in `publisher`, Note [Batches] in `batching`, Note [A module for every version] in `forward`.

Note [Whose fault]
    An `ArgumentError` of the forward may be the fault of the request, such as rows of another width, or of the model. So the forward is called again
    with a row that it has answered before: where that fails too, the error is a `ForwardError`. Otherwise, and before anything has been answered, the
    request is at fault, and the error stays as it is.
"""

from __future__ import annotations

import asyncio
import contextvars
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable
from os import PathLike
from types import TracebackType
from typing import Any, Literal, Self

from aiograd.engine.run import clock_of
from aiograd.errors import ArgumentError, ArgumentTypeError, ForwardError, ServingError
from aiograd.nn.module import Module
from aiograd.running import tracing
from aiograd.serving.answers import Answer, joined, own, rows_of
from aiograd.serving.arguments import checked_count, checked_deadline, checked_number, checked_real, checked_timeout
from aiograd.serving.batcher import Batcher
from aiograd.serving.batching import Task, TaskBatch
from aiograd.serving.forward import BoundVersion, VersionedForward
from aiograd.serving.log import VersionLog
from aiograd.serving.publisher import Publisher, uninterrupted
from aiograd.serving.registry import REGISTRY
from aiograd.serving.statistics import BOUNDS, MOST_COUNTED, ServingStatistics
from aiograd.tensors.core import host_array, make


class Server(Publisher):
    """Serves a model: batches the requests that meet, and answers each with a committed version of the weights.

    The model itself stays free to be trained: answers come from snapshots of it. Entering publishes the first version from the model, or
    loads the last promoted version of the log into it.

    Args:
        model: the module; its parameters and persistent buffers make a version. All of them must be finite on entry.
        forward: called as ``forward(module, *columns)`` with a module that holds the version's weights in evaluation mode, ``def`` or
            ``async def``; by default ``module(*columns)``. Returns a Tensor or a tuple of Tensors with one row per row of the columns.
        max_batch: the most rows that run together. With 1 an answer has the bits of the forward on its rows alone.
        max_delay: seconds that a batch with room left waits for more rows.
        max_queue: the most rows that wait; requests beyond are refused.
        deadline: seconds within which a request is answered; None for no limit.
        keep: the number of versions to keep, besides the serving one and the versions of a split or a shadow.
        precision: "exact", or "bfloat16" to round published float32 arrays so that followers need fewer bytes.
        log: folder or `VersionLog` that keeps versions over restarts.

    Raises:
        ArgumentError, ArgumentTypeError: settings that cannot be. On entry: RejectedVersionError, a model that is not finite. VersionLogError: the
            log cannot be used. LoopError: of its methods, on another event loop than the one in which it was entered, or in another thread.

    >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
    ...     answer = await server.predict(ag.ones(3, 2))
    >>> answer.value.shape, answer.version
    ((3, 1), 1)
    """

    def __init__(
        self, model: Module, *, forward: Callable[..., Any] | None = None, max_batch: int = 64, max_delay: float = 0.0, max_queue: int = 1024,
        deadline: float | None = None, keep: int = 10, precision: Literal["exact", "bfloat16"] = "exact",
        log: str | PathLike[str] | VersionLog | None = None,
    ) -> None:  # fmt: skip
        if not isinstance(model, Module):
            raise ArgumentTypeError(f"Server: expected a Module, found {type(model).__name__}")
        if forward is not None and not callable(forward):
            raise ArgumentTypeError(f"Server(forward=): expected a function of a module and columns, found {type(forward).__name__}")
        if log is not None and not isinstance(log, (str, PathLike, VersionLog)):
            raise ArgumentTypeError(f"Server(log=): expected a folder or a VersionLog, found {type(log).__name__}")
        if precision not in ("exact", "bfloat16"):
            raise ArgumentError(f"Server(precision={precision!r}): expected 'exact' or 'bfloat16'")
        kept = checked_count("Server(keep=)", keep)
        version_log = log if isinstance(log, VersionLog) or log is None else VersionLog(log, keep=kept)
        super().__init__(model, kept, precision, version_log)
        self.deadline: float | None = checked_deadline(deadline)
        self.max_batch: int = checked_count("Server(max_batch=)", max_batch)
        self.max_queue: int = checked_count("Server(max_queue=)", max_queue)
        delay = checked_real("Server(max_delay=)", max_delay)
        self._forward = VersionedForward(model, forward, self.max_batch)
        context = contextvars.copy_context()
        self._batcher = Batcher(
            self._run, max_batch=self.max_batch, max_rows=self.max_queue, max_delay=delay, name="server", output_error=ForwardError, context=context,
            isolates=True,
        )  # fmt: skip
        #: the first row that the forward has answered, see Note [Whose fault]
        self._known_row: tuple[Any, ...] | None = None
        self._answered = 0
        self._answers: Counter[int] = Counter()
        self._latency = dict.fromkeys(BOUNDS, 0)
        self._latency_sum = 0.0

    def __repr__(self) -> str:
        version = f", version {self.current.number}" if self._serving else ""
        return f"<Server of {type(self.model).__name__}, {self._state}{version}>"

    # ---------------------------------------------------------------- entering and leaving

    async def __aenter__(self) -> Self:
        if self._state != "new":
            raise ServingError("a Server is entered once; make a new one")
        self._state, self._loop = "entering", asyncio.get_running_loop()
        try:
            await self._begin()
        except BaseException:
            self._state = "closed"
            await uninterrupted(self._close_versions())
            raise
        self._state = "open"
        REGISTRY.add(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        try:
            if kind is None and self._state == "open":
                await self.drain()
        finally:
            await self.aclose()

    async def drain(self, timeout: float | None = None) -> bool:
        """Answer the requests that have been admitted and refuse others with `DrainingError`.

        Args:
            timeout: seconds to wait; None for no limit.

        Returns:
            True if all were answered, False if the time was up before; `aclose` fails the rest.

        Cancelling stops the waiting; the server stays closed for new requests.

        >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
        ...     await server.drain(timeout=1.0)
        True
        """
        self._check_open()
        return await self._batcher.drain(checked_timeout("drain", timeout))

    async def aclose(self) -> None:
        """Refuse new requests, fail the waiting ones with `DrainingError`, and close the log. Idempotent.

        Cancelling it skips waiting for the batch that runs; everything is closed even then.

        >>> server = await ag.serving.Server(ag.nn.Linear(2, 1)).__aenter__()
        >>> await server.aclose()
        """
        if self._state in ("closed", "new"):
            self._state = "closed"
            return
        self._check_loop()
        self._state = "closed"
        REGISTRY.remove(self)
        try:
            await self._batcher.aclose()
            if self._shadow is not None:
                await self._shadow.aclose()
        finally:
            await uninterrupted(self._close_versions())

    # ---------------------------------------------------------------- answers

    async def predict(
        self, *columns: Any, deadline: float | None = None, version: int | None = None, key: Any = None, at_least: int | None = None
    ) -> Answer:
        """Answer a request: the outputs of one version for these rows.

        Requests that wait at the same time run as one batch, so values agree with separate answers to rounding. A request of more rows than
        a batch runs as several, all of one version. Cancelling takes the rows out.

        Args:
            columns: Tensors, arrays or lists with the same number of rows, at least one, as the forward takes them. A list of ints is an array of
                int64, as a model of tokens needs; with float32 weights it gives float64, as in numpy.
            deadline: seconds until the answer is given up; None for the server's.
            version: number of the version to ask; None for the one that serves, or one of the split.
            key: text, bytes or an integer that chooses the same version of a split every time.
            at_least: wait until this or a later version serves, and ask that one; it goes before a split.

        Returns:
            The answer with the version's number and digest.

        Raises:
            ArgumentError, ArgumentTypeError: columns that are no rows or do not fit together. QueueFullError: too many rows wait. DrainingError: the
            server closes. DeadlineError: no answer in time. VersionNotFoundError: `version` is not kept. ForwardError: the forward fails
            for this request and for one that it has answered before, or returns other than rows. Other exceptions of the forward.

        >>> async with ag.serving.Server(ag.nn.Linear(2, 1)) as server:
        ...     answer = await server.predict([[1.0, 2.0]], deadline=1.0)
        >>> sorted(answer.headers)
        ['X-Model-Digest', 'X-Model-Version']
        """
        self._check_open()
        rows = rows_of(columns)
        size = rows[0].shape[0]
        with tracing.span("predict", attributes={"aiograd.rows": size}) as span:
            loop = asyncio.get_running_loop()
            clock = clock_of(loop)  # a loop's own has milliseconds only
            began = clock()
            limit = self.deadline if deadline is None else checked_deadline(deadline)
            until = None if limit is None else loop.time() + limit
            if at_least is not None:
                await self._reached(checked_number("predict(at_least=)", at_least), until)
            # a split may choose an earlier version, and a rollback may come before the batch
            group = self._serving if at_least is not None and version is None else self._group_of(version, key)
            if size <= self.max_batch:
                task = self._batcher.admit(rows, group=group, deadline=until)
                value = own(await self._batcher.wait(task))
            else:
                task, value = await self._in_parts(rows, size, self._bound_of(group), until)
            batch: Any = task.batch
            answering = batch.served.version
            number = answering.number
            if span is not None:
                span.set_attribute("aiograd.version", number)
            seconds = clock() - began
            self._answered += 1
            self._answers[number] += 1
            if len(self._answers) > MOST_COUNTED:
                del self._answers[min(self._answers)]
            self._latency[BOUNDS[bisect_left(BOUNDS, seconds)]] += 1
            self._latency_sum += seconds
            return Answer(value, number, answering.digest, batch.size, batch.began - began)

    async def _in_parts(self, rows: tuple[Any, ...], size: int, bound: BoundVersion, until: float | None) -> tuple[Task, Any]:
        """Run a request of more rows than a batch as several batches of one version."""
        self._batcher.require_room(size)
        tasks: list[Task] = []
        try:
            for start in range(0, size, self.max_batch):
                part = tuple([column[start : start + self.max_batch] for column in rows])
                tasks.append(self._batcher.admit(part, group=bound, deadline=until))
            return tasks[0], joined([await self._batcher.wait(task) for task in tasks])
        finally:
            for task in tasks:
                self._batcher.cancel(task)

    async def _run(self, batch: TaskBatch) -> Any:
        """Compute a batch by one version, see Note [One reference]."""
        group: Any = batch.group
        bound = self._bound_of(group)
        batch.served, batch.began = bound, clock_of(asyncio.get_running_loop())()
        try:
            outputs = await self._forward(bound, [task.rows for task in batch.tasks], batch.size)
        except ArgumentError as error:
            if len(batch.tasks) > 1 or await self._answers_known_row(bound):  # several tasks run again, each alone
                raise
            shapes = ", ".join([str(list(column.shape)) for column in batch.tasks[0].rows])
            raise ForwardError(f"the forward of {type(self.model).__name__} failed for columns of shapes {shapes}: {error}") from error
        if self._known_row is None:
            self._known_row = tuple([make(host_array(column)[:1].copy()) for column in batch.tasks[0].rows])
        if self._shadow is not None and bound is not self._shadow.bound:
            self._shadow.add(batch, outputs)
        return outputs

    async def _answers_known_row(self, bound: BoundVersion) -> bool:
        """True if the version answers a row that was answered before, or there is none, see Note [Whose fault]."""
        if self._known_row is None:
            return True
        try:
            await self._forward(bound, [self._known_row], 1)
        except Exception:
            return False
        return True

    def statistics(self) -> ServingStatistics:
        """Figures of the server so far.

        Returns:
            A `ServingStatistics`.
        """
        of_batcher = ("batches", "rows", "queued", "refused", "expired", "cancelled", "failed")
        return ServingStatistics(
            version=self.current.number,
            versions=len(self.versions),
            states=self._states(),
            published=self._published,
            promoted=self._promoted,
            rollbacks=self._rollbacks,
            answers=self._answered,
            answers_by_version=dict(self._answers),
            latency=dict(self._latency),
            latency_sum=self._latency_sum,
            comparisons={number: total.comparison for number, total in self._difference_sums.items()},
            **{name: getattr(self._batcher, name) for name in of_batcher},
        )
