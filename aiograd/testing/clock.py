"""An event loop with a virtual clock: time jumps to the next timer, a seed decides the order, and every run can be repeated.

`SimulatedLoop` is asyncio's own loop with three things replaced. Its selector does not wait: it moves the clock to the next timer, and
raises `DeadlockError` when there is none. Its ready queue pops first-in first-out, or in an order drawn from a seed. Its executor runs
jobs inline at a drawn virtual time, or hands them to real threads. Each step is folded into a hash, so two runs can be compared.

Note [Which private names]
    asyncio has no public seam for a clock or a queue. The loop leans on the names of ``BaseEventLoop`` and ``Handle`` that are declared
    at the top of the class and on nothing else; a test lists them, so that a Python that changes one is noticed at once. They are the
    same in Python 3.11 to 3.13.

Note [Owners]
    Every handle, task, future and asynchronous generator belongs to the `HandleOwner` that the ContextVar `OWNER` names where it was made, or to
    none. `kill` and `freeze` stop all that belongs to one owner, as SIGKILL and SIGSTOP stop a process; a simulated network makes hosts
    of this. Handles are sorted out when they come up to be run; handles of a stopped owner are no step and are not in the hash.

Note [Both orders]
    asyncio documents that ``call_soon`` is first-in first-out, so under ``order="fifo"`` every failure is real. ``order="permuted"``
    explores more: a failure found only there rests on the documented order, and is to be judged, not ignored.

Note [Time and real threads]
    With ``executor="threads"`` a job takes no virtual time: while one runs and nothing else is ready, the loop really waits for it
    before it moves the clock, so a timeout never fires merely because a thread is slow. A job that needs a later virtual time to end
    therefore never ends; after `patience` real seconds that is a `DeadlockError`. Threads that the loop knows nothing of are announced
    with `external_work`. The hash is reproducible only as far as the threads are.

Rejected: patching ``time.monotonic`` (reaches every thread and library of the process); a loop written from scratch on
``AbstractEventLoop`` (the same few private names, and all of run_forever, asyncgen and exception handling written again); a subclass of
``SelectorEventLoop`` (opens real sockets, which a simulation has no use for).

Source: the deterministic loops of FoundationDB's simulator and of simloop; trio's ``MockClock`` with ``autojump``.
"""

from __future__ import annotations

import asyncio
import contextvars
import functools
import math
import threading
import weakref
from collections.abc import Callable, Coroutine, Generator, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from random import Random
from typing import Any, Literal, TypeVar, TypeVarTuple

from aiograd.errors import AiogradError, ArgumentError
from aiograd.testing.jobs import InlineJobs, JobRunner
from aiograd.testing.owner import OWNER, HandleOwner, Killed
from aiograd.testing.refused_calls import REFUSED, refused
from aiograd.testing.steps import HandleQueue, StepTrace
from aiograd.testing.suspension import describe_task

T = TypeVar("T")
Ts = TypeVarTuple("Ts")

Order = Literal["fifo", "permuted"]
ExecutorKind = Literal["inline", "threads"]


class DeadlockError(AiogradError, RuntimeError):
    """Tasks wait, and nothing that could wake one will ever happen."""


class SimulatedLoop(asyncio.BaseEventLoop):
    """asyncio's event loop on a virtual clock that starts at 0.

    Args:
        seed: decides everything that is drawn. None draws nothing: first-in first-out, and jobs take no virtual time.
        order: how ready callbacks are popped: ``"fifo"`` as asyncio documents, ``"permuted"`` at random from `seed`.
        executor: ``"inline"`` runs jobs on the loop's thread at a drawn virtual time, ``"threads"`` on real threads; or a function
            that makes a `JobRunner` for the loop.
        patience: how long a real thread may keep an idle loop waiting, in real seconds.

    Raises:
        ArgumentError: an unknown `order` or `executor`, or a permuted order without a seed.

    >>> loop = ag.testing.SimulatedLoop(seed=1)
    >>> loop.run_until_complete(asyncio.sleep(3600, result="done"))
    'done'
    >>> loop.time()
    3600.0
    >>> loop.close()
    """

    # Note [Which private names]
    _ready: HandleQueue
    _scheduled: list[asyncio.TimerHandle]
    _selector: _VirtualSelector
    _clock_resolution: float
    _asyncgens: weakref.WeakSet[Any]

    def __init__(
        self,
        seed: int | str | None = None,
        *,
        order: Order = "fifo",
        executor: ExecutorKind | Callable[[SimulatedLoop], JobRunner] = "inline",
        patience: float = 30.0,
    ) -> None:
        super().__init__()
        self._dead: list[HandleOwner] = []
        self._at_close: list[Callable[[], object]] = []
        try:
            _check(seed, order, executor)
        except ArgumentError:
            self.close()  # a loop that was never usable is not one that was forgotten open
            raise
        self.seed = seed
        self.order: Order = order
        self._now = 0.0
        self._trace = StepTrace()
        self._expected = 0
        self._selector = _VirtualSelector(self, patience)
        self._ready = HandleQueue(self, self._step, self.stream("sched") if order == "permuted" else None)
        self._clock_resolution = math.ulp(0.0)
        self._jobs: JobRunner | None
        if callable(executor):
            self._jobs = executor(self)
        elif executor == "inline":
            self._jobs = InlineJobs(self, None if seed is None else self.stream("exec"))
        else:
            self._jobs = None

    # ---- time

    def time(self) -> float:
        """The virtual time, in seconds since the loop was made.

        Returns:
            Seconds.
        """
        return self._now

    def advance(self, seconds: float) -> None:
        """Move the clock without running anything, as a machine does that was frozen for a while.

        Args:
            seconds: how far, at least 0.

        Raises:
            ArgumentError: `seconds` is negative or not finite.
        """
        if not 0 <= seconds < math.inf:
            raise ArgumentError(f"advance({seconds!r}): time only moves forward; expected a finite number of seconds, at least 0")
        self._set_time(self._now + seconds)

    def _set_time(self, now: float) -> None:
        self._now = now
        # BaseEventLoop runs the timers strictly before `time() + resolution`: exactly the timers that are due
        self._clock_resolution = math.ulp(now)

    # ---- draws and records

    def stream(self, name: str) -> Random:
        """A source of random numbers of its own for one purpose, so that one more draw elsewhere changes nothing here.

        Args:
            name: the purpose. Every call starts the same sequence again.

        Returns:
            A `random.Random`.

        Raises:
            ArgumentError: the loop has no seed.
        """
        if self.seed is None:
            raise ArgumentError(f"stream({name!r}): this loop draws nothing, since it was made without a seed; use SimulatedLoop(seed=...)")
        return Random(f"{self.seed}:{name}")  # noqa: S311 - reproducible draws, not secrets

    @property
    def trace_hash(self) -> str:
        """Hash of every step so far and of its virtual time. Equal seeds give equal hashes on one minor version of Python."""
        return self._trace.digest()

    @property
    def steps(self) -> int:
        """The number of steps that have begun."""
        return self._trace.steps

    def at_step(self, step: int, callback: Callable[[], object]) -> None:
        """Call `callback` right before step number `step` runs, for instance to cancel a task at every point where it can be.

        Args:
            step: counted from 1; `steps` is the number of the one that runs now.
            callback: called between two steps, on the loop's thread.

        Raises:
            ArgumentError: that step has begun already.
        """
        self._trace.at_step(step, callback)

    def _step(self, handle: asyncio.Handle) -> None:
        self._trace.record(handle, self._now)

    # ---- stopped owners: Note [Owners]

    def kill(self, owner: HandleOwner) -> None:
        """Never run anything of `owner` again, not even ``finally`` blocks. Idempotent.

        Args:
            owner: the owner.

        Raises:
            Killed: the caller belongs to `owner`; the code after the call is not run.
        """
        if not owner.is_dead:
            owner.is_dead = owner.is_stopped = True
            self._dead.append(owner)
            for generator in owner.bury():
                self._asyncgens.discard(generator)
        if OWNER.get() is owner:
            raise Killed(owner.name)

    def freeze(self, owner: HandleOwner) -> None:
        """Hold back everything of `owner` until `thaw`; its timers run out meanwhile. The caller's own step still runs to its end.

        Args:
            owner: the owner.
        """
        owner.is_stopped = True

    def thaw(self, owner: HandleOwner) -> None:
        """Let `owner` go on, in the order in which things were held back. No effect on one that is not frozen.

        Args:
            owner: the owner.
        """
        if not owner.is_dead:
            owner.is_stopped = False
            self._ready.extend(owner.release())

    def at_close(self, callback: Callable[[], object]) -> None:
        """Call `callback` when the loop is closed.

        Args:
            callback: called without arguments.
        """
        self._at_close.append(callback)

    def close(self) -> None:
        """Close the loop, then let go of what killed owners left behind."""
        super().close()
        callbacks, self._at_close = self._at_close, []
        for callback in callbacks:
            callback()
        dead, self._dead = self._dead, []
        outer: asyncio.AbstractEventLoop | None
        try:
            outer = asyncio.get_running_loop()
        except RuntimeError:
            outer = None
        asyncio.events._set_running_loop(self)  # cleanup that asks for a loop must not be given a new one
        try:
            for owner in dead:
                owner.dispose()
        finally:
            asyncio.events._set_running_loop(outer)

    def create_future(self) -> asyncio.Future[Any]:
        """A future that belongs to the current owner.

        Returns:
            The future. Cancelling it is as on any loop.
        """
        future = super().create_future()
        owner = OWNER.get()
        if owner is not None:
            owner.adopt_future(future)
        return future

    def create_task(self, coro: Generator[Any, None, T] | Coroutine[Any, Any, T], **options: Any) -> asyncio.Task[T]:
        """A task that belongs to the owner in its context.

        Args:
            coro: the coroutine.
            **options: name and context, as of asyncio's loops.

        Returns:
            The task.
        """
        context: contextvars.Context | None = options.get("context")
        owner = OWNER.get() if context is None else context.get(OWNER)
        if owner is not None and owner.is_dead and self.is_closed():
            coro.close()  # the cleanup of a dead owner has no effect
        task: asyncio.Task[T] = super().create_task(coro, **options)
        if owner is not None:
            owner.adopt_task(task)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Report an uncaught error, unless it belongs to a killed owner, which can catch nothing.

        Args:
            context: the description of the error, as of asyncio's loops.
        """
        handle = context.get("handle")
        owner = None if handle is None else handle._context.get(OWNER)
        if owner is None or not owner.is_dead:
            super().call_exception_handler(context)

    def _asyncgen_firstiter_hook(self, agen: Any) -> None:
        super()._asyncgen_firstiter_hook(agen)  # type: ignore[misc]
        owner = OWNER.get()
        if owner is not None:
            owner.adopt_generator(agen)

    # ---- jobs

    def aiograd_submit(self, job: Callable[[], T]) -> asyncio.Future[T]:
        """Run a kernel of aiograd's engine, which hands kernels to a loop that has this method instead of to threads of its own.

        Args:
            job: takes no argument and carries its context with it.

        Returns:
            A future of this loop.

        Cancelling the future drops the result; a job that has begun runs to its end.
        """
        return self.run_in_executor(None, job)

    def run_in_executor(self, executor: Executor | None, func: Callable[[*Ts], T], *args: *Ts) -> asyncio.Future[T]:
        """Run ``func(*args)`` as the loop's `executor` argument says. Unless jobs run on threads, which `executor` is asked for has no effect.

        Args:
            executor: where the call runs if jobs run on threads; None: the default executor.
            func: the function.
            *args: its arguments.

        Returns:
            A future of its result. Cancelling it drops the result; a call that has begun runs to its end.
        """
        if self._jobs is not None:
            return self._jobs.submit(functools.partial(func, *args))
        future: asyncio.Future[T] = super().run_in_executor(executor, func, *args)
        self._expected += 1
        future.add_done_callback(self._job_ended, context=contextvars.Context())
        return future

    def _job_ended(self, _: asyncio.Future[Any]) -> None:
        self._expected -= 1

    @contextmanager
    def external_work(self) -> Iterator[None]:
        """While this is open, something outside the loop will call ``call_soon_threadsafe``: idle, the loop really waits for it.

        Returns:
            A context manager.
        """
        self._expected += 1
        try:
            yield
        finally:
            self._expected -= 1

    async def shutdown_default_executor(self, *timeout: Any) -> None:
        """Join the threads of the default executor, in real time. Cancelling it leaves them to end by themselves.

        Args:
            *timeout: seconds, as of asyncio's loops.

        >>> loop = ag.testing.SimulatedLoop()
        >>> loop.run_until_complete(loop.shutdown_default_executor())
        >>> loop.close()
        """
        with self.external_work():
            await super().shutdown_default_executor(*timeout)

    # ---- the seams of BaseEventLoop

    def _process_events(self, event_list: list[Any]) -> None:
        """There are no file events."""

    def _write_to_self(self) -> None:
        self._selector.wake()


class _VirtualSelector:
    """Instead of waiting for file events, moves the loop's clock; waits in real time only for threads that are expected to call."""

    def __init__(self, loop: SimulatedLoop, patience: float) -> None:
        self._loop = weakref.proxy(loop)
        self._patience = patience
        self._woken = threading.Event()

    def wake(self) -> None:
        """Called from any thread after it put a handle into the ready queue."""
        self._woken.set()

    def select(self, timeout: float | None) -> list[Any]:
        """Called by the loop with 0 when something is ready, else with the time to the next timer, None without one."""
        if timeout == 0:
            return []
        loop = self._loop
        if self._woken.is_set():
            self._woken.clear()
        elif loop._expected:
            if not self._woken.wait(self._patience):
                silent = f"threads outside the loop did not answer within {self._patience:g} s of real time ({loop._expected} expected)"
                raise DeadlockError(self._story(silent))
            self._woken.clear()
        elif timeout is None or loop._scheduled[0].when() == math.inf:
            raise DeadlockError(self._story("nothing is ready and no timer is set, so nothing can ever run again"))
        else:
            loop._set_time(loop._scheduled[0].when())
        return []

    def _story(self, reason: str) -> str:
        loop = self._loop
        waiting = sorted(describe_task(task) for task in loop._trace.labels if not task.done() and not any(owner.owns(task) for owner in loop._dead))
        lines = "".join(f"\n  {line}" for line in waiting) or " none"
        made = f"seed={loop.seed!r}, order={loop.order!r}"
        return f"deadlock at virtual time {loop.time():g} s after {loop.steps} steps ({made}): {reason}. Tasks:{lines}"


def _check(seed: object, order: object, executor: object) -> None:
    if order not in ("fifo", "permuted"):
        raise ArgumentError(f"SimulatedLoop(order={order!r}): expected 'fifo' or 'permuted'")
    if order == "permuted" and seed is None:
        raise ArgumentError("SimulatedLoop(order='permuted'): a permuted order is drawn from a seed; give one, as in seed=0")
    if not (executor in ("inline", "threads") or callable(executor)):
        raise ArgumentError(f"SimulatedLoop(executor={executor!r}): expected 'inline', 'threads' or a function of the loop")


for _name in REFUSED:
    setattr(SimulatedLoop, _name, refused(_name))
