"""Engine: owns the executor and the limits of the passes on one event loop; each loop has a default one.

Note [A pass that waits is not made yet]
    A loop runs every task that is ready before it looks at its timers. So a thousand passes that are started together all begin in one round of
    the loop, and each step of theirs before the wait for a turn holds the loop up a thousand times. Therefore `Engine.run_new` makes a pass only
    when its turn has come; until then there is its place in the queue.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from numbers import Integral, Real
from types import TracebackType
from typing import Any, Self

from aiograd.engine.executors import ComputeExecutor
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.loop_budget import LoopBudget
from aiograd.engine.placement import INLINE_NS, RulePlacement
from aiograd.engine.run.failures import clear_frames, mark_committed
from aiograd.engine.run.loop import not_none
from aiograd.engine.run.new_task import new_graph_task
from aiograd.engine.run.runner import PassRunner
from aiograd.engine.run.short_passes import ShortPasses
from aiograd.engine.run.started_passes import StartedPasses
from aiograd.engine.run.statistics import EngineStatistics
from aiograd.errors import ArgumentError, EngineClosedError, LoopError
from aiograd.graph.current import CURRENT
from aiograd.graph.node import Node
from aiograd.running import tracing
from aiograd.running.types import Array

#: default seconds of computation on the loop between two pauses
BUDGET = 0.0015


class Engine(ShortPasses):
    """Owns the executor and the limits of backward passes on one event loop.

    ``async with Engine(concurrency=1) as engine:`` makes it the engine of the passes started in the block (by the running task and those it
    starts). Where no such block is entered, passes run on the default engine of their loop: the engine of the innermost block with
    ``default=True``, entered in any task (the lifespan of a web application, say, for its handlers), else one that is made on first use.

    Args:
        threads: number of threads of the executor; one per core by default.
        concurrency: how many nodes of one pass may be in flight at once; None for no limit. 1 makes the order of execution exactly the order
            of priority, even if a node suspends.
        budget: seconds of computation on the loop between two pauses.
        cancel_grace: seconds that cancelled coroutines of a pass get to finish.
        inline_ns: rules estimated above this many nanoseconds run on the executor; ``inf`` keeps rows on the loop.
        clock: measures `budget`; ``time.perf_counter`` by default, and the loop's own time on a simulated loop, so that a run can be repeated.
        blas_threads: number of BLAS threads inside the block; None leaves BLAS as the process has it. It changes bits, so it is fixed for
            the life of the engine. Needs the package threadpoolctl, which ``pip install 'aiograd[kernels]'`` brings.
        default: inside the block this is also the default engine of the loop; leaving the block restores the one before.

    Raises:
        ArgumentError: a number below what makes sense.

    >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
    >>> async with ag.Engine(threads=2) as engine:
    ...     await (x * x).sum().backward()
    >>> engine.statistics().committed
    1
    >>> x.grad
    tensor([2., 4.])
    """

    def __init__(
        self,
        *,
        threads: int | None = None,
        concurrency: int | None = None,
        budget: float = BUDGET,
        cancel_grace: float = 1.0,
        inline_ns: float = INLINE_NS,
        clock: Callable[[], float] | None = None,
        blas_threads: int | None = None,
        default: bool = False,
    ) -> None:
        for name, value in (("threads", threads), ("concurrency", concurrency), ("blas_threads", blas_threads)):
            if value is not None and (isinstance(value, bool) or not isinstance(value, Integral) or value < 1):
                raise ArgumentError(f"Engine({name}={value!r}): expected an int of at least 1, or None")
        for name, number in (("budget", budget), ("cancel_grace", cancel_grace), ("inline_ns", inline_ns)):
            if not isinstance(number, Real) or not number > 0:
                raise ArgumentError(f"Engine({name}={number!r}): expected a number above 0")
        self.concurrency = concurrency
        self.cancel_grace = cancel_grace
        self.placement: RulePlacement = RulePlacement(inline_ns)
        self._threads = threads
        self._budget = budget
        self._clock = clock
        self._blas_threads = blas_threads
        self._blas: Any = None
        self._is_default = default
        #: the loop's default engine before this one became it
        self._replaced: Engine | None = None
        #: a weak reference, so that a loop's default engine does not keep the loop alive
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._executor: ComputeExecutor | None = None
        self._loop_budget: LoopBudget | None = None
        self._started = StartedPasses()
        #: all running passes; a dict, which keeps its order, so that a simulated run can be repeated
        self._runners: dict[PassRunner, None] = {}
        self._committed = self._failed = self._cancelled = 0
        self._closed = False
        self._token: contextvars.Token[Engine | None] | None = None

    # ---------------------------------------------------------------- lifetime

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._bind(loop)
        if self._blas_threads is not None:
            try:
                from threadpoolctl import threadpool_limits
            except ImportError:
                raise ArgumentError(
                    f"Engine(blas_threads={self._blas_threads}): threadpoolctl, which sets the number of BLAS threads, is not installed. "
                    "Install it with: pip install 'aiograd[kernels]', or set OPENBLAS_NUM_THREADS before the process starts"
                ) from None

            self._blas = threadpool_limits(self._blas_threads, user_api="blas")
        if self._is_default:
            self._replaced = DEFAULT_ENGINES.get(loop)
            DEFAULT_ENGINES[loop] = self
        self._token = ENTERED_ENGINE.set(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token, self._token = self._token, None
        if token is not None:
            with contextlib.suppress(ValueError):  # left in another task: the other task has an engine of its own, and a closed engine is never used
                ENTERED_ENGINE.reset(token)
        if self._is_default:
            self._step_down(asyncio.get_running_loop())
        await self.aclose()

    def _step_down(self, loop: asyncio.AbstractEventLoop) -> None:
        """Restore the default engine that this one replaced, unless another engine has become the default since."""
        if DEFAULT_ENGINES.get(loop) is self:
            before = self._replaced
            while before is not None and before._closed:
                before = before._replaced
            if before is None:
                del DEFAULT_ENGINES[loop]
            else:
                DEFAULT_ENGINES[loop] = before

    async def aclose(self) -> None:
        """Close the engine: passes started with `execute` are cancelled, passes that are being awaited raise `EngineClosedError`, threads end.

        The pass that this is called from, if any, goes on until it needs the engine again. Idempotent.

        >>> engine = ag.Engine(threads=1)
        >>> await engine.aclose()
        """
        self._closed = True
        current = asyncio.current_task()
        waiting: list[asyncio.Future[Any]] = [*self._started.cancel(current)]
        runners = [runner for runner in self._runners if runner.asyncio_task is not current and runner.asyncio_task not in self._started]
        waiting.extend([runner.interrupt() for runner in runners])
        if waiting:
            await asyncio.wait(waiting)
        if self._blas is not None:
            self._blas.restore_original_limits()
            self._blas = None
        executor, self._executor = self._executor, None
        if executor is not None:
            alive = executor.close()
            deadline = asyncio.get_running_loop().time() + self.cancel_grace
            while any(thread.is_alive() for thread in alive) and asyncio.get_running_loop().time() < deadline:  # noqa: ASYNC110 - threads set no event
                await asyncio.sleep(0.0005)

    def _bind(self, loop: asyncio.AbstractEventLoop) -> None:
        if self._closed:
            raise EngineClosedError("this Engine has been closed; make a new one")
        if self._loop is None:
            self._loop = weakref.ref(loop)
            by_default = _time_of(self._loop) if hasattr(loop, "aiograd_submit") else time.perf_counter
            self._loop_budget = LoopBudget(self._loop, self._budget, self._clock or by_default)
            with ENGINES_LOCK:
                ENGINES.add(self)
        elif self._loop() is not loop:
            raise LoopError("this Engine belongs to another event loop; make one per loop, or use the default one")

    @property
    def executor(self) -> ComputeExecutor:
        """The executor, made on first use."""
        if self._executor is None:
            if self._closed:
                raise EngineClosedError("this Engine has been closed; make a new one")
            self._executor = ComputeExecutor(self._threads)
        return self._executor

    @property
    def pass_gates(self) -> list[Callable[[], float]]:
        """Functions that return for how many seconds passes may be kept waiting, see Note [One budget for all passes]. Add and remove your own."""
        self._bind(asyncio.get_running_loop())
        budget: LoopBudget = not_none(self._loop_budget)
        return budget.gates

    def statistics(self) -> EngineStatistics:
        """Counts of passes and the lag of the loop, also after the engine was closed: numbers for a ``/metrics`` page.

        Returns:
            An `EngineStatistics`: passes begun, committed, failed, cancelled and in flight; the last and the longest lag of the loop in seconds.
        """
        begun = self._committed + self._failed + self._cancelled + len(self._runners)
        lag, longest = (0.0, 0.0) if self._loop_budget is None else (self._loop_budget.lag, self._loop_budget.longest_lag)
        return EngineStatistics(
            begun=begun,
            committed=self._committed,
            failed=self._failed,
            cancelled=self._cancelled,
            in_flight=len(self._runners),
            lag=lag,
            longest_lag=longest,
        )

    # ---------------------------------------------------------------- passes

    def execute(
        self,
        roots: Sequence[tuple[Node, int]],
        grads: Sequence[Array],
        *,
        inputs: Sequence[tuple[Node, int]] | None = None,
        accumulate: bool = False,
        keep_graph: bool = False,
        create_graph: bool = False,
    ) -> GraphTask:
        """Start a pass in a task of its own and return at once.

        Args:
            roots: gradient edges to start from, with `grads`, one array each (Tensors with `create_graph`).
            inputs: gradient edges, the wanted gradients; None accumulates into every leaf.
            accumulate: accumulate into `inputs` instead of returning their gradients.
            grads: for each root its gradient, of the root's shape.
            keep_graph: keep saved values, so that another pass can run over the graph.
            create_graph: record the pass, for second derivatives.

        Returns:
            The GraphTask; ``await task.future`` gives the captured gradients. Several tasks may await it. Cancelling the task that called
            `execute` while it awaits the future cancels the pass, and so does `aclose`; other tasks that are cancelled only stop waiting.
        """
        loop = asyncio.get_running_loop()
        self._bind(loop)
        task = new_graph_task(roots, grads, inputs=inputs, accumulate=accumulate, keep_graph=keep_graph, create_graph=create_graph)
        task.loop = loop
        self._started.start(task, self._run)
        return task

    async def run_new(self, roots: Sequence[tuple[Node, int]], grads: Sequence[Array], **options: Any) -> list[Any]:
        """Make a pass when its turn on the loop has come, and run it. See Note [A pass that waits is not made yet].

        Args:
            roots, grads, options: as of `new_graph_task`.

        Returns:
            As `run`; cancelling has the same effect.

        >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
        >>> y = (x * x).sum()
        >>> async with ag.Engine(threads=1) as engine:
        ...     await engine.run_new([(y.grad_fn, 0)], [np.float32(1.0)])
        []
        >>> x.grad
        tensor([2., 4.])
        """
        self._bind(asyncio.get_running_loop())
        turns = not_none(self._loop_budget)
        runner = None
        if turns.is_taken() and CURRENT.get() is None:
            runner = PassRunner(self, turns)
            self._runners[runner] = None
            await runner.queue()
        try:
            running = self.run(new_graph_task(roots, grads, **options), runner)
        except BaseException:
            if runner is not None:
                self._leave(runner)
            raise
        del roots, grads, options, runner
        return await running

    async def run(self, task: GraphTask, runner: PassRunner | None = None) -> list[Any]:
        """Run a pass and return the captured gradients.

        Cancelling stops it: no further node starts, coroutines in flight are cancelled and awaited, results of running kernels are dropped,
        and no gradient changes unless the pass had been committed.

        Args:
            task: the pass, which has not begun.
            runner: the runner that has waited for the pass's first turn, if there is one.

        Returns:
            One gradient for each captured edge, in their order; an empty list for a pass that accumulates.

        >>> x = ag.tensor([1.0, 2.0], requires_grad=True)
        >>> y = (x * x).sum()
        >>> task = ag.GraphTask([(y.grad_fn, 0)], [np.float32(1.0)])
        >>> async with ag.Engine(threads=1) as engine:
        ...     await engine.run(task)
        []
        >>> task.completed, x.grad
        (True, tensor([2., 4.]))
        """
        loop = asyncio.get_running_loop()
        if runner is None:
            self._bind(loop)
        task.loop = loop
        try:
            if task.reentrant_depth:
                await loop.create_task(self._run(task), name=f"aiograd:graph-task-{task.id}")
            else:
                await self._run(task, runner)
        except BaseException as error:
            with contextlib.suppress(Warning):  # where a filter makes an exception of a warning, the error of the pass still wins
                task.issue_warnings()
            clear_frames(error)
            del task
            raise
        if task.warnings:
            try:
                task.issue_warnings()
            except Warning as error:
                mark_committed(error)
                raise
        return task.result

    async def offload(self, function: Callable[[], Any]) -> Any:
        """Run a synchronous function on the executor, in a copy of the caller's context, and return its result.

        Cancelling stops the waiting; the function runs to its end and its result is dropped.

        Args:
            function: called without arguments on a thread.

        Returns:
            Its result.

        >>> async with ag.Engine(threads=1) as engine:
        ...     await engine.offload(lambda: 1 + 1)
        2
        """
        loop = asyncio.get_running_loop()
        self._bind(loop)
        return await self.executor.submit(loop, contextvars.copy_context(), function)

    async def _run(self, task: GraphTask, runner: PassRunner | None = None) -> None:
        if runner is None:
            runner = PassRunner(self, not_none(self._loop_budget))
            self._runners[runner] = None
        runner.task = task
        profiler = task.profiler
        began = None if profiler is None else profiler.begin_pass()
        try:
            with tracing.span("backward pass", attributes={"aiograd.pass": task.id}):
                await runner.run()
        except BaseException as error:
            instead = await runner.fail(error)
            if instead is not None:
                raise instead from error
            raise
        else:
            task.finish()
        finally:
            self._count(task)
            self._leave(runner)
            if profiler is not None:
                profiler.end_pass(began, task)

    def _leave(self, runner: PassRunner) -> None:
        runner.close()
        self._runners.pop(runner, None)
        if runner.ended is not None:
            runner.ended.set_result(None)

    def _count(self, task: GraphTask) -> None:
        """Count a pass that has ended in the statistics."""
        if task.committed:
            self._committed += 1
        elif isinstance(task.error, asyncio.CancelledError):
            self._cancelled += 1
        else:
            self._failed += 1


ENTERED_ENGINE: contextvars.ContextVar[Engine | None] = contextvars.ContextVar("aiograd_engine", default=None)
DEFAULT_ENGINES: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = weakref.WeakKeyDictionary()
#: the engines of all loops and threads that have been used
ENGINES: weakref.WeakSet[Engine] = weakref.WeakSet()
ENGINES_LOCK = threading.Lock()


def _time_of(loop: weakref.ref[asyncio.AbstractEventLoop]) -> Callable[[], float]:
    return lambda: float(not_none(loop()).time())
