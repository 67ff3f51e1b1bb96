"""PassRunner: runs one GraphTask on the caller's event loop.

Note [A coroutine per node, a task only for what waits]
    One coroutine per pass pops ready nodes and runs their rules inline. Only nodes that wait become concurrent: a rule on the
    executor or a device is a future, a coroutine gets an asyncio Task, unless nothing else could run meanwhile; then it is
    awaited in the runner itself. A parent never awaits its child, so the depth of a graph costs no stack.

Note [How a pass ends]
    `PassRunner.fail` returns only when no coroutine of the pass is running any more: on an error or a cancellation those in flight are
    cancelled and waited for (at most `cancel_grace` seconds each time). Kernels already running in threads are abandoned: rules are pure, so
    their results can simply be dropped.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
from collections.abc import Callable, Generator
from typing import Any

from aiograd.engine.evaluate import Await, Evaluation, Run, annotate, evaluate, final_callback, is_simple, post_accumulate, run_node
from aiograd.engine.input_buffer import InputBuffer
from aiograd.engine.interruptible import Interruptible
from aiograd.engine.run.dispatch import RuleDispatch
from aiograd.engine.run.ending import outlast
from aiograd.engine.run.failures import mark_committed
from aiograd.engine.run.in_flight import FuturesInFlight
from aiograd.engine.run.loop import not_none
from aiograd.engine.run.paced_collector import LARGE_TABLE, PROCESS_COLLECTOR
from aiograd.engine.run.pass_jobs import PassJobs
from aiograd.engine.run.turns import PassTurns
from aiograd.engine.walk import GraphWalk, can_walk
from aiograd.errors import EngineClosedError
from aiograd.graph.accumulate_grad import AccumulateGrad
from aiograd.graph.current import CURRENT, Current
from aiograd.graph.node import Node
from aiograd.running.modes import ModeScope, current_mode, restore_mode


class PassRunner(PassTurns):
    """The loop that runs one pass; arguments as of `PassTurns`."""

    #: made by `general`, as a pass that is walked waits for no futures and dispatches no rule
    in_flight: FuturesInFlight | None = None
    dispatch: RuleDispatch
    #: True if a coroutine of the pass has been given a task and has not begun yet
    is_fresh: bool = False
    #: an evaluation that waits for an awaitable while nothing else can run
    current: tuple[Node, Evaluation, Any] | None = None
    #: task of the rest of a coroutine that went on after it had been cancelled
    rest: asyncio.Task[Any] | None = None
    #: jobs that run simple nodes on the executor; made for the first of them
    jobs: PassJobs | None = None

    async def run(self) -> None:
        task, turns = self.task, self.turns
        if self.stopped is not None:
            try:
                raise self.stopped
            finally:
                self.stopped: BaseException | None = None  # its traceback leads back here
        if not self.holds_turn:
            await self.take_turn()
        walk = None
        if can_walk(task):
            walk = GraphWalk(task, self.engine.placement, turns.over)
            for _ in walk.run():
                await self.pause()
            if walk.is_complete:
                if len(task.staged.gradients) + len(task.staged.firsts) >= LARGE_TABLE:
                    PROCESS_COLLECTOR.skip_next()
                task.commit()
                return
        for _ in task.discover(self.engine.placement):
            if turns.over():
                await self.pause()
        if len(task.plan.dependencies) >= LARGE_TABLE:
            PROCESS_COLLECTOR.skip_next()
        if task.plan.crossings:
            self.close()
            if await task.plan.crossings[0].carry(task):  # type: ignore[attr-defined]
                return
            task.plan.check_used()
            await self.take_turn()
        if task.plan.is_plain:
            recorded = task.recorded
            if recorded is None:
                await self.walk()
            else:
                outer = current_mode().collect
                with ModeScope(grad=True, collect=lambda node: recorded.add(node, None, task.plan.dependencies)):
                    await self.walk()
                recorded.renumber(outer)
            task.commit()
            return
        outer = current_mode().collect
        with ModeScope(grad=task.create_graph, collect=task.collect if task.create_graph else None):
            await self.general(walk)
            if task.recorded is not None:
                task.recorded.renumber(outer)
            for guard in task.guards:
                self.close()
                await guard.finish()
            await self.arrive()
            await self.restage()
            hooks = task.hooks
            leaves: list[AccumulateGrad] = []
            if hooks is None or hooks.runs_post_accumulate_hooks:
                leaves = [leaf for leaf in task.staged.gradients if leaf.post_accumulate_hooks]
            if hooks is not None and not hooks.is_local:
                self.close()
                await hooks.before_commit()
            for guard in task.guards:
                self.close()
                await guard.commit()
            if not task.committed:
                task.commit()
            await self.after_commit(leaves)

    async def walk(self) -> None:
        """Walk the part of a graph that has been discovered."""
        for _ in GraphWalk(self.task, self.engine.placement, self.turns.over).run():
            await self.pause()

    # ---------------------------------------------------------------- the general path

    async def general(self, walk: GraphWalk | None) -> None:
        task, turns = self.task, self.turns
        limit = self.engine.concurrency or (1 << 60)
        in_flight = self.in_flight = FuturesInFlight()
        done, waits_for = in_flight.done, in_flight.callbacks
        self.dispatch = RuleDispatch(self.engine)
        ledger = task.begin(self, begins=walk is None or not walk.has_begun)
        if walk is not None and walk.has_begun:
            for _ in ledger.resume(walk.sums, walk.last):
                if turns.over():
                    await self.pause()
        while True:
            if task.external_error is not None:
                raise task.external_error
            if done:
                in_flight.settle()
            elif ledger.folds:
                self.fold(*ledger.folds.popleft())
            elif self.current is not None:
                await self.await_here()
            elif ledger.has_ready() and len(waits_for) < limit:
                self.start(*ledger.pop())
                if self.is_fresh:
                    self.is_fresh = False
                    await asyncio.sleep(0)  # the last coroutine begins before anything less urgent: a request goes out before local work
            elif waits_for or ledger.waiting:
                await self.wait(in_flight)
            else:
                ledger.check_complete()
                return
            if turns.over():
                await self.pause()

    async def arrive(self) -> None:
        """Wait until the gradients that the pass delivers are computed: a device may still be working, and may only fail before the commit."""
        pending = [(node, array) for node, array in self.task.delivered() if hasattr(array, "__aiograd_wait__")]
        for _, array in pending:
            array.__aiograd_is_ready__()  # starts the operations that a device has only noted: all of it, before the first wait
        for node, array in pending:
            wait = array.__aiograd_wait__
            self.close()
            try:
                await wait()
            except Exception as error:
                annotate(error, self.task, node)
                raise
        await self.take_turn()

    async def restage(self) -> None:
        """Recompute large stale sums (another pass has committed to the same leaf) off the loop, so that the commit stays short.

        Done once: a sum that gets stale again is recomputed in the commit.
        """
        for staged in self.task.staged.stale():
            self.close()
            await self.dispatch.offload(staged.add_up)
        await self.take_turn()

    def start(self, node: Node, grads: list[Any]) -> None:
        task = self.task
        if is_simple(task, node) and task.profiler is None:
            where = None if node.is_cheap and self.engine.placement.is_small(node) else self.dispatch.where(node, grads)
            if where is None:
                try:
                    outputs = run_node(task, node, grads, None)
                except BaseException as error:
                    annotate(error, task, node)
                    raise
                task.complete(node, outputs)
            elif where == self.dispatch.offload:
                if self.jobs is None:
                    self.jobs = PassJobs(task, not_none(task.ledger), self.engine.placement, self.engine.executor)
                self.watch(self.dispatch.offload(functools.partial(self.jobs.run, node, grads)), functools.partial(self.jobs_ended, node))
            else:
                self.watch(where(functools.partial(run_node, task, node, grads, None)), functools.partial(self.completed, node))
            return
        self.advance(node, evaluate(task, node, grads), None, None)

    def advance(self, node: Node, evaluation: Evaluation, value: Any, error: BaseException | None) -> None:
        """Run an evaluation until it waits for something or has ended."""
        task = self.task
        try:
            while True:
                command = evaluation.send(value) if error is None else evaluation.throw(error)
                value = error = None
                if isinstance(command, Run):
                    function = functools.partial(run_node, task, command.node, command.grads, command.values)
                    if task.profiler is not None:
                        function = functools.partial(task.profiler.run_backward, task, node, function)
                    where = self.dispatch.where(node, command.grads)
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
        """True if nothing else of this pass runs or could run while a node waits."""
        task = self.task
        if task.hooks is not None and not task.hooks.is_local:
            return False  # something may come from elsewhere
        ledger = not_none(task.ledger)
        return not not_none(self.in_flight).callbacks and not ledger.folds and (self.engine.concurrency == 1 or not ledger.has_ready())

    def spawn(self, node: Node, command: Await) -> asyncio.Future[Any]:
        awaitable = command.awaitable
        if not asyncio.iscoroutine(awaitable):
            awaitable = _result_of(awaitable)  # several nodes may wait for one future
        context = contextvars.copy_context()
        context.run(CURRENT.set, Current(self.task, node))
        return asyncio.get_running_loop().create_task(awaitable, name=f"aiograd:{node.name}", context=context)

    async def await_here(self) -> None:
        node, evaluation, awaitable = not_none(self.current)
        self.current = None
        value, error = None, None
        try:
            value = await self.result_of(node, awaitable)
        except Exception as raised:
            error = raised
        await self.take_turn()
        self.advance(node, evaluation, value, error)

    async def result_of(self, node: Node | None, awaitable: Any) -> Any:
        """Wait for an awaitable of user code, in this task and without a turn. See Note [Cancelled while awaited inline]."""
        self.close()
        token = CURRENT.set(Current(self.task, node))
        mode = current_mode()
        try:
            if not asyncio.iscoroutine(awaitable):
                return await awaitable
            inline = Interruptible(awaitable, self.is_cancelled)
            try:
                return await inline
            finally:
                if inline.rest is not None:
                    self.rest = asyncio.get_running_loop().create_task(inline.rest, name=f"aiograd:{'callback' if node is None else node.name}")
                    restore_mode(mode)  # modes that the rest has entered stay with it
        except BaseException as raised:
            annotate(raised, self.task, node)
            raise
        finally:
            CURRENT.reset(token)

    def fold(self, node: Node, buffer: InputBuffer) -> None:
        self.watch(self.dispatch.offload(buffer.fold), functools.partial(self.folded, node, buffer))

    def folded(self, node: Node, buffer: InputBuffer, future: asyncio.Future[None]) -> None:
        try:
            future.result()
        except BaseException as error:
            annotate(error, self.task, node)
            raise
        not_none(self.task.ledger).fold_done(node, buffer)

    # ---------------------------------------------------------------- futures in flight

    def watch(self, future: asyncio.Future[Any], then: Callable[[asyncio.Future[Any]], None]) -> None:
        not_none(self.in_flight).watch(future, then)

    def wake(self) -> None:
        """Wake the runner if it waits."""
        if self.in_flight is not None:
            self.in_flight.wake()

    def busy(self) -> list[Node]:
        """The nodes that are in flight."""
        return [] if self.in_flight is None else self.in_flight.nodes()

    async def wait(self, in_flight: FuturesInFlight) -> None:
        if in_flight.done:
            return
        if self.task.hooks is not None:
            self.task.hooks.on_wait()
        self.close()
        jobs = self.jobs if len(in_flight.callbacks) == 1 else None
        try:
            if jobs is not None:
                jobs.open()
            await in_flight.wait()
        finally:
            if jobs is not None:
                jobs.close()
        await self.take_turn()

    def completed(self, node: Node, future: asyncio.Future[Any]) -> None:
        try:
            outputs = future.result()
        except BaseException as error:
            annotate(error, self.task, node)
            raise
        self.task.complete(node, outputs)

    def jobs_ended(self, node: Node, future: asyncio.Future[Any]) -> None:
        try:
            rest = future.result()
        except BaseException as error:
            annotate(error, self.task, node)
            raise
        if rest is not None:
            rest()

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

    async def fail(self, error: BaseException) -> BaseException | None:
        """End the pass with an error.

        Returns:
            The exception to raise instead of it, or None.
        """
        task = self.task
        instead: BaseException | None = None
        if self.was_interrupted() and isinstance(error, asyncio.CancelledError):
            instead = EngineClosedError("the Engine was closed while a pass was running on it: await passes before leaving its block")
        task.fail(instead or error, is_cancelled=instead is None and isinstance(error, asyncio.CancelledError))
        task.tell_reducers()
        try:
            cancelled = await self.abort()
        finally:
            task.finish()
        if not self.was_interrupted() and cancelled is not None and not isinstance(instead or error, asyncio.CancelledError):
            instead = cancelled
        if task.committed:
            mark_committed(instead or error)
        return instead

    async def abort(self) -> asyncio.CancelledError | None:
        """Cancel everything in flight, wait for coroutines, abandon jobs in threads, and release the saved values of the graph.

        Returns:
            A cancellation that came meanwhile; it does not cut any of this short.
        """
        self.close()
        futures = [] if self.in_flight is None else self.in_flight.drop()
        if self.current is not None:
            awaitable = self.current[2]
            self.current = None
            if asyncio.iscoroutine(awaitable):
                awaitable.close()
        for future in futures:
            future.cancel()  # the error of one that has failed counts as read by this: only the first error matters
        coroutines = [future for future in futures if isinstance(future, asyncio.Task)]
        if self.rest is not None:
            coroutines.append(self.rest)
        cancelled = await outlast(coroutines, self.engine.cancel_grace) if coroutines else None
        for _ in self.task.release_graph():
            if cancelled is None and self.turns.over():
                try:
                    await self.pause()
                except asyncio.CancelledError as error:
                    cancelled = error
        self.close()
        return cancelled

    # ---------------------------------------------------------------- after the commit

    async def after_commit(self, leaves: list[AccumulateGrad]) -> None:
        task = self.task
        for leaf in leaves:
            await self.perform(leaf, post_accumulate(task, leaf))
        for callback in task.callbacks:
            await self.perform(None, final_callback(task, callback))

    async def perform(self, node: Node | None, steps: Generator[Await, Any, None]) -> None:
        """Run `steps` to their end, awaiting their commands."""
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


async def _result_of(future: Any) -> Any:
    return await future
