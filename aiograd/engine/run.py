"""The asyncio driver: runs a GraphTask on the caller's event loop.

Note [A coroutine per node, a task only for what waits]
    One driver coroutine per pass pops ready nodes and runs their rules inline. Only what really waits becomes concurrent: a rule on the
    executor or a device is a future, a coroutine gets an asyncio Task, unless nothing else could run meanwhile, in which case it is
    awaited right here. A parent never awaits its child, so the depth of a graph costs no stack.

Note [How a pass ends]
    The driver leaves `drive` only when no coroutine of the pass is running any more: on an error or a cancellation those in flight are
    cancelled and waited for (at most `cancel_grace` seconds each time). Kernels already running in threads are abandoned: rules are pure, so
    their results can simply be dropped.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import functools
import time
import weakref
from collections import deque
from collections.abc import Callable, Coroutine, Generator, Sequence
from types import TracebackType
from typing import Any, Self

from aiograd import devices
from aiograd.engine.evaluate import Await, Evaluation, Run, annotate, evaluate, final_callback, is_simple, post_accumulate, run_node
from aiograd.engine.executors import ComputeExecutor
from aiograd.engine.graph_task import GraphTask
from aiograd.engine.input_buffer import InputBuffer
from aiograd.engine.interruptible import Interruptible
from aiograd.engine.placement import INLINE_NS, Placement
from aiograd.engine.sweep import sweep
from aiograd.engine.turns import Turns
from aiograd.errors import ArgumentError, CancelGraceError, EngineClosedError, LoopError, NestedPassError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.current import CURRENT, Current
from aiograd.graph.node import Node
from aiograd.modes import ModeScope, current_mode
from aiograd.types import Array

try:
    import uvloop
except ImportError:  # it does not exist for every platform
    uvloop = None  # type: ignore[assignment]

#: default seconds of computation on the loop between two pauses
BUDGET = 0.0015


class Engine:
    """Owns the executor and the limits of backward passes on one event loop.

    ``async with Engine(concurrency=1) as engine:`` makes it the engine of the passes started in the block (by the running task and those it
    starts). Without one, a default engine is made per loop on first use.

    Args:
        threads: of the executor; one per core by default.
        concurrency: how many nodes of one pass may be in flight at once; None for no limit. 1 makes the order of execution exactly the order
            of priority, whatever suspends.
        budget: seconds of computation on the loop between two pauses.
        cancel_grace: seconds that cancelled coroutines of a pass get to finish.
        inline_ns: rules estimated above this many nanoseconds run on the executor; ``inf`` keeps rows on the loop.
        clock: measures `budget`; ``time.perf_counter`` by default, and the loop's own time on a simulated loop, so that a run can be repeated.
        blas_threads: number of BLAS threads inside the block; None leaves BLAS as the process has it. It changes bits, so it is fixed for
            the life of the engine. Needs the package threadpoolctl.
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
    ) -> None:
        for name, value in (("threads", threads), ("concurrency", concurrency), ("blas_threads", blas_threads)):
            if value is not None and value < 1:
                raise ArgumentError(f"Engine({name}={value}): expected at least 1, or None")
        for name, number in (("budget", budget), ("cancel_grace", cancel_grace), ("inline_ns", inline_ns)):
            if not number > 0:
                raise ArgumentError(f"Engine({name}={number}): expected a number above 0")
        self.concurrency = concurrency
        self.cancel_grace = cancel_grace
        self.placement = Placement(inline_ns)
        self._threads = threads
        self._budget = budget
        self._clock = clock
        self._blas_threads = blas_threads
        self._blas: Any = None
        #: weak, so that a loop's default engine does not keep the loop alive
        self._loop: weakref.ref[asyncio.AbstractEventLoop] | None = None
        self._executor: ComputeExecutor | None = None
        self._turns: Turns | None = None
        #: the tasks of passes started with `execute`, and every pass there is
        self._running: set[asyncio.Task[Any]] = set()
        self._drivers: set[_Driver] = set()
        self._closed = False
        self._token: contextvars.Token[Engine | None] | None = None

    # ---------------------------------------------------------------- lifetime

    async def __aenter__(self) -> Self:
        self._bind(asyncio.get_running_loop())
        if self._blas_threads is not None:
            from threadpoolctl import threadpool_limits

            self._blas = threadpool_limits(self._blas_threads, user_api="blas")
        self._token = _engine.set(self)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        token, self._token = self._token, None
        if token is not None:
            with contextlib.suppress(ValueError):  # left in another task: what is set there is none of ours, and a closed engine is never used
                _engine.reset(token)
        await self.aclose()

    async def aclose(self) -> None:
        """End everything: passes started with `execute` are cancelled, passes that somebody awaits raise `EngineClosedError`, threads end.

        The pass that this is called from, if any, goes on until it needs the engine again. Idempotent.
        """
        self._closed = True
        current = asyncio.current_task()
        for runner in self._running:
            if runner is not current:
                runner.cancel()
        waiting: list[asyncio.Future[Any]] = [runner for runner in self._running if runner is not current]
        waiting.extend([driver.interrupt() for driver in self._drivers if driver.runner is not current and driver.runner not in self._running])
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
            self._turns = Turns(self._loop, self._budget, self._clock or by_default)
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
            inputs: gradient edges whose gradients are wanted; None accumulates into every leaf.
            accumulate: accumulate into `inputs` instead of returning their gradients.

        Returns:
            The GraphTask; ``await task.future`` gives the captured gradients. Several may await it. Cancelling the one who called this while
            he awaits it cancels the pass, and so does `aclose`; others only stop waiting.
        """
        loop = asyncio.get_running_loop()
        self._bind(loop)
        task = new_graph_task(roots, grads, inputs=inputs, accumulate=accumulate, keep_graph=keep_graph, create_graph=create_graph)
        task.loop = loop
        task.delivered_by_future = True
        runner = loop.create_task(self._execute(task), name=f"aiograd:graph-task-{task.id}")
        task.on_future = functools.partial(_stop_with_starter, asyncio.current_task(), runner)
        self._running.add(runner)
        runner.add_done_callback(functools.partial(self._executed, task))
        return task

    async def _execute(self, task: GraphTask) -> None:
        try:
            await self._drive(task)
        except Exception as error:  # delivered through task.future
            _clear_frames(error)
            del task

    def _executed(self, task: GraphTask, runner: asyncio.Task[None]) -> None:
        self._running.discard(runner)
        task.on_future = None
        if not task.completed:  # cancelled before it could begin
            task.cancelled()
            task.fail(asyncio.CancelledError())
            task.finish()
        elif not runner.cancelled():
            runner.exception()
        with contextlib.suppress(Warning):
            task.issue_warnings(stacklevel=2)

    async def run(self, task: GraphTask) -> list[Any]:
        """Run a pass and return the captured gradients.

        Cancelling stops it: no further node starts, coroutines in flight are cancelled and awaited, results of running kernels are dropped,
        and no gradient changes unless the pass had been committed.
        """
        loop = asyncio.get_running_loop()
        self._bind(loop)
        task.loop = loop
        try:
            if task.reentrant_depth:
                await loop.create_task(self._drive(task), name=f"aiograd:graph-task-{task.id}")
            else:
                await self._drive(task)
        except BaseException as error:
            with contextlib.suppress(Warning):  # where a filter makes an exception of a warning, the error of the pass still wins
                task.issue_warnings(stacklevel=4)
            _clear_frames(error)
            del task
            raise
        if task.warnings:
            try:
                task.issue_warnings(stacklevel=4)
            except Warning as error:
                _mark_committed(error)
                raise
        return task.result

    async def offload(self, function: Callable[[], Any]) -> Any:
        """Run a synchronous function on the executor, in a copy of the caller's context, and return what it returns.

        Cancelling stops the waiting; the function runs to its end and its result is dropped.
        """
        loop = asyncio.get_running_loop()
        self._bind(loop)
        return await self.executor.submit(loop, contextvars.copy_context(), function)

    async def _drive(self, task: GraphTask) -> None:
        driver = _Driver(self, task, _not_none(self._turns))
        self._drivers.add(driver)
        profiler = task.profiler
        began = None if profiler is None else profiler.begin_pass()
        try:
            await driver.run()
        except BaseException as error:
            instead = await driver.fail(error)
            if instead is not None:
                raise instead from error
            raise
        else:
            task.finish()
        finally:
            driver.close()
            self._drivers.discard(driver)
            if driver.ended is not None:
                driver.ended.set_result(None)
            if profiler is not None:
                profiler.end_pass(began, task)


class _Driver:
    """The state of one running pass."""

    __slots__ = (
        "engine", "task", "turns", "runner", "cancellations", "is_interrupted", "is_fresh", "ended",
        "holds_turn", "in_flight", "done", "waker", "current", "rest",
    )  # fmt: skip

    def __init__(self, engine: Engine, task: GraphTask, turns: Turns) -> None:
        self.engine = engine
        self.task = task
        self.turns = turns
        #: the asyncio task that awaits the pass, and how often it had been cancelled before
        self.runner: asyncio.Task[Any] = _not_none(asyncio.current_task())
        self.cancellations = self.runner.cancelling()
        #: whether closing the engine has cancelled the runner
        self.is_interrupted = False
        #: a coroutine of the pass has been given a task and has not begun yet
        self.is_fresh = False
        #: resolves when the pass is over; made by whoever waits for that
        self.ended: asyncio.Future[None] | None = None
        self.holds_turn = False
        #: future -> what to do with its result
        self.in_flight: dict[asyncio.Future[Any], Callable[[asyncio.Future[Any]], None]] = {}
        self.done: deque[asyncio.Future[Any]] = deque()
        self.waker: asyncio.Future[None] | None = None
        #: an evaluation that waits for an awaitable while nothing else can run
        self.current: tuple[Node, Evaluation, Any] | None = None
        #: what was left of a coroutine that went on after it had been cancelled
        self.rest: asyncio.Task[Any] | None = None

    async def take_turn(self) -> None:
        if not self.holds_turn:
            if not self.turns.take():
                await self.turns.wait()
            self.holds_turn = True

    async def pause(self) -> None:
        self.holds_turn = False
        await self.turns.pause()
        self.holds_turn = True

    def close(self) -> None:
        if self.holds_turn:
            self.holds_turn = False
            self.turns.release()

    async def run(self) -> None:
        task, turns = self.task, self.turns
        walk = task.discover(self.engine.placement)
        await self.take_turn()
        for _ in walk:
            if turns.over():
                await self.pause()
        if task.is_plain:
            failed_at: list[Node] = []
            try:
                for _ in sweep(task, turns.over, failed_at):
                    await self.pause()
            except BaseException as error:
                if failed_at:
                    annotate(error, task, failed_at[0])
                raise
            task.commit()
            return
        outer = current_mode().collect
        with ModeScope(grad=task.create_graph, collect=task.collect if task.create_graph else None):
            await self.general()
            task.check_complete()
            task.renumber(outer)
            await self.arrive()
            await self.restage()
            leaves = [leaf for leaf in task.staged if leaf.post_accumulate_hooks]
            task.commit()
            await self.after_commit(leaves)

    # ---------------------------------------------------------------- the general path

    async def general(self) -> None:
        task, turns = self.task, self.turns
        limit = self.engine.concurrency or (1 << 60)
        task.begin()
        while True:
            if self.done:
                self.settle(self.done.popleft())
            elif task.folds:
                self.fold(*task.folds.popleft())
            elif self.current is not None:
                await self.await_here()
            elif task.has_ready() and len(self.in_flight) < limit:
                self.start(*task.pop())
                if self.is_fresh:
                    self.is_fresh = False
                    await asyncio.sleep(0)  # what was started last begins before anything less urgent: a request goes out before local work
            elif self.in_flight:
                await self.wait()
            else:
                return
            if turns.over():
                await self.pause()

    async def arrive(self) -> None:
        """Wait for the data of what the pass delivers: a device may still be computing it, and may fail, which has to come before the commit."""
        for node, array in self.task.delivered():
            wait = getattr(array, "__aiograd_wait__", None)
            if wait is None:
                continue
            self.close()
            try:
                await wait()
            except Exception as error:
                annotate(error, self.task, node)
                raise
        await self.take_turn()

    async def restage(self) -> None:
        """Make large sums that other passes have overtaken again off the loop, so that the commit stays short.

        Once: whoever is overtaken again adds up in the commit.
        """
        for staged in self.task.stale():
            self.close()
            await self.offload(staged.add_up)
        await self.take_turn()

    def start(self, node: Node, grads: list[Any]) -> None:
        task = self.task
        if is_simple(task, node) and task.profiler is None:
            placement = self.engine.placement
            if node.is_cheap and (node.shape in placement.small_shapes or placement.shape_is_small(node.shape)):  # type: ignore[attr-defined]
                where = None
            else:
                where = self.where(node, grads)
            if where is None:
                try:
                    outputs = run_node(task, node, grads, None)
                except BaseException as error:
                    annotate(error, task, node)
                    raise
                task.complete(node, outputs)
            else:
                self.watch(where(functools.partial(run_node, task, node, grads, None)), functools.partial(self.completed, node))
            return
        self.advance(node, evaluate(task, node, grads), None, None)

    def where(self, node: Node, grads: list[Any]) -> Callable[[Callable[[], Any]], asyncio.Future[Any]] | None:
        """None for here, else what submits a function to where the node's rule runs."""
        placement = self.engine.placement
        name = placement.device_of(node)
        if name != "cpu":
            device = _not_none(devices.device(name))
            if device.launches_ahead and placement.stays_on(node, name):
                return None
            return lambda function: asyncio.wrap_future(device.submit(functools.partial(contextvars.copy_context().run, function)))
        if placement.leaves_loop(node, grads):
            return self.offload
        return None

    def offload(self, function: Callable[[], Any]) -> asyncio.Future[Any]:
        return self.engine.executor.submit(asyncio.get_running_loop(), contextvars.copy_context(), function)

    def advance(self, node: Node, evaluation: Evaluation, value: Any, error: BaseException | None) -> None:
        """Run an evaluation until it waits for something or is done."""
        task = self.task
        try:
            while True:
                command = evaluation.send(value) if error is None else evaluation.throw(error)
                value = error = None
                if isinstance(command, Run):
                    function = functools.partial(run_node, task, command.node, command.grads, command.values)
                    if task.profiler is not None:
                        function = functools.partial(task.profiler.run_backward, task, node, function)
                    where = self.where(node, command.grads)
                    if where is not None:
                        self.watch(where(function), functools.partial(self.resume, node, evaluation))
                        return
                    try:
                        value = function()
                    except Exception as raised:
                        error = raised
                elif self.alone():
                    self.current = (node, evaluation, command.awaitable)
                    return
                else:
                    self.watch(self.spawn(node, command), functools.partial(self.resume, node, evaluation))
                    self.is_fresh = True
                    return
        except StopIteration as stop:
            task.complete(node, stop.value)
        except BaseException as raised:
            annotate(raised, task, node)
            raise

    def alone(self) -> bool:
        """Whether nothing else of this pass runs or could run while a node waits."""
        return not self.in_flight and not self.task.folds and (self.engine.concurrency == 1 or not self.task.has_ready())

    def spawn(self, node: Node, command: Await) -> asyncio.Future[Any]:
        awaitable = command.awaitable
        if not asyncio.iscoroutine(awaitable):
            awaitable = _result_of(awaitable)  # several nodes may wait for one future
        context = contextvars.copy_context()
        context.run(CURRENT.set, Current(self.task, node))
        return asyncio.get_running_loop().create_task(awaitable, name=f"aiograd:{node.name}", context=context)

    async def await_here(self) -> None:
        node, evaluation, awaitable = _not_none(self.current)
        self.current = None
        value, error = None, None
        try:
            value = await self.result_of(node, awaitable)
        except Exception as raised:
            error = raised
        await self.take_turn()
        self.advance(node, evaluation, value, error)

    async def result_of(self, node: Node | None, awaitable: Any) -> Any:
        """Wait for what user code returned, in this task and without a turn. See Note [Cancelled while awaited inline]."""
        self.close()
        token = CURRENT.set(Current(self.task, node))
        try:
            if not asyncio.iscoroutine(awaitable):
                return await awaitable
            inline = Interruptible(awaitable, self.is_cancelled)
            try:
                return await inline
            finally:
                if inline.rest is not None:
                    self.rest = asyncio.get_running_loop().create_task(inline.rest, name=f"aiograd:{'callback' if node is None else node.name}")
        except BaseException as raised:
            annotate(raised, self.task, node)
            raise
        finally:
            CURRENT.reset(token)

    def is_cancelled(self) -> bool:
        """Whether the pass has been cancelled."""
        return bool(self.runner.cancelling() > self.cancellations)

    def fold(self, node: Node, buffer: InputBuffer) -> None:
        self.watch(self.offload(buffer.fold), functools.partial(self.folded, node, buffer))

    def folded(self, node: Node, buffer: InputBuffer, future: asyncio.Future[None]) -> None:
        try:
            future.result()
        except BaseException as error:
            annotate(error, self.task, node)
            raise
        self.task.fold_done(node, buffer)

    # ---------------------------------------------------------------- what is in flight

    def watch(self, future: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        self.in_flight[future] = then
        future.add_done_callback(self.on_done)

    def on_done(self, future: asyncio.Future[Any]) -> None:
        self.done.append(future)
        if self.waker is not None and not self.waker.done():
            self.waker.set_result(None)

    async def wait(self) -> None:
        if self.done:
            return
        self.close()
        self.waker = asyncio.get_running_loop().create_future()
        try:
            await self.waker
        finally:
            self.waker = None
        await self.take_turn()

    def settle(self, future: asyncio.Future[Any]) -> None:
        then = self.in_flight.pop(future, None)
        if then is not None:
            then(future)

    def completed(self, node: Node, future: asyncio.Future[Any]) -> None:
        try:
            outputs = future.result()
        except BaseException as error:
            annotate(error, self.task, node)
            raise
        self.task.complete(node, outputs)

    def resume(self, node: Node, evaluation: Evaluation, future: asyncio.Future[Any]) -> None:
        if future.cancelled():
            error: BaseException | None = asyncio.CancelledError(f"the coroutine of {node.name} was cancelled")
            self.advance(node, evaluation, None, error)
            return
        error = future.exception()
        if error is not None and not isinstance(error, Exception):
            annotate(error, self.task, node)
            raise error
        self.advance(node, evaluation, None if error is not None else future.result(), error)

    def interrupt(self) -> asyncio.Future[None]:
        """Make the pass fail because its engine is being closed; the future resolves when it has."""
        self.is_interrupted = True
        self.runner.cancel()
        self.ended = asyncio.get_running_loop().create_future()
        return self.ended

    def was_interrupted(self) -> bool:
        """Whether closing the engine, and nobody else, has cancelled the runner; takes that cancellation back."""
        if not self.is_interrupted:
            return False
        self.is_interrupted = False
        return bool(self.runner.uncancel() <= self.cancellations)

    async def fail(self, error: BaseException) -> BaseException | None:
        """End the pass with an error.

        Returns:
            What to raise instead of it, or None.
        """
        task = self.task
        instead: BaseException | None = None
        if self.was_interrupted() and isinstance(error, asyncio.CancelledError):
            instead = EngineClosedError("the Engine was closed while a pass was running on it: await passes before leaving its block")
        if instead is None and isinstance(error, asyncio.CancelledError):
            task.cancelled()
        task.fail(instead or error)
        try:
            cancelled = await self.abort()
        finally:
            task.finish()
        if not self.was_interrupted() and cancelled is not None and not isinstance(instead or error, asyncio.CancelledError):
            instead = cancelled
        if task.committed:
            _mark_committed(instead or error)
        return instead

    async def abort(self) -> asyncio.CancelledError | None:
        """Cancel what is in flight; wait for coroutines, abandon threads; release what the graph saved.

        Returns:
            A cancellation that came meanwhile; it does not cut any of this short.
        """
        self.close()
        futures = list(self.in_flight)
        self.in_flight.clear()
        self.done.clear()
        if self.current is not None:
            awaitable = self.current[2]
            self.current = None
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
        for future in futures:
            future.cancel()
            if future.done() and not future.cancelled():
                future.exception()  # the first error is the one that counts
        coroutines = [future for future in futures if isinstance(future, asyncio.Task)]
        if self.rest is not None:
            coroutines.append(self.rest)
        cancelled = await self.outlast(coroutines) if coroutines else None
        for _ in self.task.spend():
            if cancelled is None and self.turns.over():
                try:
                    await self.pause()
                except asyncio.CancelledError as error:
                    cancelled = error
        self.close()
        return cancelled

    async def outlast(self, coroutines: list[asyncio.Task[Any]]) -> asyncio.CancelledError | None:
        """Wait until cancelled coroutines have ended, or the grace period has."""
        loop = asyncio.get_running_loop()
        grace = self.engine.cancel_grace
        deadline = loop.time() + grace
        cancelled = None
        pending = coroutines
        while pending and (left := deadline - loop.time()) > 0:
            try:
                await asyncio.wait(pending, timeout=left)
            except asyncio.CancelledError as error:
                cancelled = error
            pending = [task for task in pending if not task.done()]
        for task in coroutines:
            if task.done() and not task.cancelled():
                task.exception()
        if pending:
            names = ", ".join(sorted(task.get_name() for task in pending))
            message = f"aiograd: {names} did not stop within {grace} s of being cancelled and was left running"
            loop.call_exception_handler({"message": message, "exception": CancelGraceError(message)})
        return cancelled

    # ---------------------------------------------------------------- after the commit

    async def after_commit(self, leaves: list[AccumulateGrad]) -> None:
        task = self.task
        for leaf in leaves:
            await self.perform(leaf, post_accumulate(task, leaf))
        for callback in task.callbacks:
            await self.perform(None, final_callback(task, callback))

    async def perform(self, node: Node | None, steps: Generator[Await, Any, None]) -> None:
        """Run `steps` to their end, waiting for whatever they wait for."""
        value, error = None, None
        if self.turns.over() and self.holds_turn:
            await self.pause()
        try:
            while True:
                await self.take_turn()
                command = steps.send(value) if error is None else steps.throw(error)
                value = error = None
                try:
                    value = await self.result_of(node, command.awaitable)
                except Exception as raised:
                    error = raised
        except StopIteration:
            return
        except BaseException as raised:
            annotate(raised, self.task, node)
            raise


# -------------------------------------------------------------------- starting a pass


def new_graph_task(roots: Sequence[tuple[Node, int]], grads: Sequence[Array], **options: Any) -> GraphTask:
    """A GraphTask for the running code: its nesting depth, anomaly mode and profiler are the caller's."""
    current = CURRENT.get()
    mode = current_mode()
    depth = 0 if current is None else current.task.reentrant_depth + 1
    return GraphTask(roots, grads, reentrant_depth=depth, anomaly=mode.anomaly, profiler=mode.profiler, **options)


def check_can_run(what: str) -> None:
    """Raise unless a pass can be awaited by the running code.

    Raises:
        NestedPassError: in a synchronous rule; LoopError: without a running event loop.
    """
    current = CURRENT.get()
    if current is not None and current.in_sync_rule:
        raise NestedPassError(
            f"{what} inside the synchronous rule of {current.node.name if current.node else 'a node'}: a `def` rule cannot await a nested pass. "
            "Make it `async def`."
        )
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        raise LoopError(
            f"{what} without a running event loop: await it inside a coroutine, started with aiograd.run(main()) or asyncio.run(main())"
        ) from None


_engine: contextvars.ContextVar[Engine | None] = contextvars.ContextVar("aiograd_engine", default=None)
_default_engines: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, Engine] = weakref.WeakKeyDictionary()


def current_engine() -> Engine:
    """The engine of the innermost ``async with Engine()`` on this loop, else the loop's default one."""
    loop = asyncio.get_running_loop()
    engine = _engine.get()
    if engine is not None and engine._loop is not None and engine._loop() is loop and not engine._closed:
        return engine
    engine = _default_engines.get(loop)
    if engine is None or engine._closed:
        engine = _default_engines[loop] = Engine()
    return engine


async def aclose_default_engine() -> None:
    """Close the running loop's default engine, if it has one; the next pass makes another."""
    engine = _default_engines.pop(asyncio.get_running_loop(), None)
    if engine is not None:
        await engine.aclose()


def _stop_with_starter(starter: asyncio.Task[Any] | None, runner: asyncio.Task[Any], future: asyncio.Future[Any]) -> None:
    """Cancel a pass when the task that started it is cancelled while it awaits `future`."""
    if starter is not None and asyncio.current_task() is starter:
        future.add_done_callback(lambda future: runner.cancel() if future.cancelled() else None)


def _clear_frames(error: BaseException) -> None:
    """Let an exception hold on to the user's frames only.

    The engine's frames refer to the pass, which refers to the error: a cycle that would keep the graph until the garbage collector runs.
    """
    chain: list[BaseException] = [error]
    for link in chain:
        trace = link.__traceback__
        while trace is not None:
            if trace.tb_frame.f_globals.get("__name__", "").startswith("aiograd.engine."):
                with contextlib.suppress(RuntimeError):  # still running
                    trace.tb_frame.clear()
            trace = trace.tb_next
        chain.extend(other for other in (link.__cause__, link.__context__) if other is not None and other not in chain)


def _mark_committed(error: BaseException) -> None:
    try:
        error.committed = True  # type: ignore[attr-defined]
    except AttributeError:
        error.add_note("raised after the gradients had been committed")


async def _result_of(future: Any) -> Any:
    return await future


def _not_none(value: Any) -> Any:
    return value


def _time_of(loop: weakref.ref[asyncio.AbstractEventLoop]) -> Callable[[], float]:
    return lambda: float(_not_none(loop()).time())


def run(main: Coroutine[Any, Any, Any], *, debug: bool | None = None) -> Any:
    """Run a coroutine to its end on a fresh event loop, uvloop's where it is installed, and close the default engine.

    Args:
        main: the coroutine.
        debug: asyncio's debug mode.
    """
    with asyncio.Runner(debug=debug, loop_factory=_loop_factory()) as runner:
        return runner.run(_main(main))


async def _main(main: Coroutine[Any, Any, Any]) -> Any:
    try:
        return await main
    finally:
        await aclose_default_engine()


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop] | None:
    return None if uvloop is None else uvloop.new_event_loop


def loop_is_running() -> bool:
    """Whether the calling thread is inside a running event loop."""
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def running_loop() -> asyncio.AbstractEventLoop | None:
    """The event loop that the calling thread is inside of, None outside of one."""
    return asyncio._get_running_loop()


def running_task() -> asyncio.Task[Any] | None:
    """The running asyncio task, None outside of one."""
    return None if asyncio._get_running_loop() is None else asyncio.current_task()


def current_task_name() -> str | None:
    """Name of the running asyncio task, None outside of one."""
    task = running_task()
    return None if task is None else task.get_name()
