"""Calls: remote function calls, on the worker that makes one and on the one that serves it.

Inside a context a call is an ordinary operation of the graph: its differentiable arguments leave through a SendNode and its differentiable
results arrive at a RecvNode. Outside of one, values may be sent that need no gradient; whatever would silently cut a graph is an error.

Note [Numbers of a call]
    The caller reserves two sequence numbers when it makes a call, whatever the time at which the answer comes: one is the place of the call
    (see Note [Places] in `context`), the other belongs to the results. Sums of gradients so do not depend on which answer came first.

Note [Waiting for the executor]
    As many functions are handed to the executor as `Limits.executor_queue` says, so that the worker's own passes need not wait behind all
    that peers ask for. The others wait for their turn, in the order in which they came: they hold their requests' bytes, and are among the
    requests that a peer may have running, which is what bounds them. A function on a thread calls no other worker, so no two wait for each
    other.

Note [Functions that never return]
    A thread cannot be stopped. When a call is given up, its function goes on by itself, its result is dropped, and the executor starts
    another thread in place of the one that is stuck. So that threads do not become more and more, calls are refused while there are as many
    such functions as `Limits.executor_queue` allows; the statistics of a worker tell how many there are.

Source: PyTorch ``distributed/autograd/utils.cpp`` for what is attached to which message; unlike there, grad mode travels with the call.
"""

from __future__ import annotations

import asyncio
import inspect
import weakref
from collections.abc import Callable, Coroutine
from typing import TYPE_CHECKING, Any

from aiograd.distributed import failpoints
from aiograd.distributed.context import Context
from aiograd.distributed.contexts import NESTED, Caller, Heading
from aiograd.distributed.driver.gradients import on_host
from aiograd.distributed.encodings import Encoding
from aiograd.distributed.kinds import Kind
from aiograd.distributed.payload import Packing, Unpacking, UnsendableError, device_tensors, explain
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.distributed.service import Exposed
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentTypeError, ContextReleasedError, DeadlineError, LimitError, NoContextError, Overloaded, ProtocolError, RemoteError
from aiograd.graph.node import _next_sequence
from aiograd.modes import ModeScope, current_mode
from aiograd.offloading import ready
from aiograd.tensors.core import TensorCore

if TYPE_CHECKING:
    from aiograd.distributed.driver.office import Office

#: states of modules and optimizers travel as they are, whatever the encoding
EXACT = ("aiograd.module.", "aiograd.optimizer.", "aiograd.transfer.")
#: a function of the library's own, which is told who calls
Builtin = Callable[..., Coroutine[Any, Any, Any]]


class Calls:
    """The calls that a worker makes and serves.

    Args:
        office: the worker.
    """

    def __init__(self, office: Office) -> None:
        self.office = office
        #: by name, which begins with "aiograd."
        self.builtins: dict[str, Builtin] = {}
        #: those of them whose results travel exactly
        self.exact: set[Builtin] = set()
        #: functions that run on the executor or wait for it, and those for whom there is room there; see Note [Waiting for the executor]
        self._on_executor = 0
        self._room: asyncio.Semaphore | None = None
        #: those that are not waited for any more; see Note [Functions that never return]
        self._given_up: weakref.WeakSet[_Job] = weakref.WeakSet()

    # ---------------------------------------------------------------- making one

    async def call(self, peer: str, function: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> Any:
        """See `Worker.call`."""
        office = self.office
        for name in (peer, function):
            if not isinstance(name, str):
                raise ArgumentTypeError(f"a remote call takes names of a worker and of a function that it exposes, found {type(name).__name__}")
        scope = SCOPE.get()
        if scope is not None and scope.worker is not office.worker:
            scope = None  # of another worker in this process
        context = None if scope is None else scope.context
        if context is not None:
            context.check_open()
        seconds = office.time_for(timeout)
        number, answer_number = _next_sequence(), _next_sequence()
        grad = current_mode().grad
        try:
            packing = await self._packing((args, kwargs), grad, function.startswith(EXACT))
            wire_args, wire_kwargs = packing.pack(args), packing.pack(kwargs)
        except (UnsendableError, RecursionError) as error:
            raise explain(error, f"calling {_label(function, args)} on {peer}", _named(function, args, kwargs)) from None
        sent = packing.differentiable
        if context is None:
            if sent:
                raise NoContextError(
                    f"calling {_label(function, args)} on {peer} with arguments that require grad outside of any context: their gradients could "
                    "never come back. Call inside `async with worker.context()`, or under no_grad() if none are wanted, or detach() the arguments."
                )
            principal = None if scope is None else scope.principal
            try:
                answer = await office.request(peer, Kind.CALL, (function, wire_args, wire_kwargs, grad, None), seconds, principal)
            except DeadlineError as error:
                raise _late(error, f"calling {_label(function, args)} on {peer}") from None
            return Unpacking(office.reference).unpack(self._parse_answer(answer, peer)[0])
        context.check_open()
        place = (*(scope.place if scope is not None else ()), -number)
        if len(place) > NESTED:
            what = f"calling {_label(function, args)} on {peer}"
            raise LimitError(f"{what}: calls are nested {NESTED} deep already; do functions call each other for ever?")
        send = None
        if sent:
            send = context.add_send(sent, peer)
            send._seq = number
            if scope is not None and scope.place:
                context.recorder(scope.place)(send)
            collect = current_mode().collect
            if collect is not None:
                collect(send)
        heading = (context.key, context.origin, tuple(map(int, place)), 0 if send is None else send.edge, peer not in context.opened_at)
        context.known_workers.add(peer)
        try:
            answer = await office.request(peer, Kind.CALL, (function, wire_args, wire_kwargs, grad, heading), seconds, context.principal)
        except BaseException as error:
            if send is not None:
                context.send_nodes.pop(send.edge, None)  # nobody has the other half of the edge, or nobody will use it
            what = f"calling {_label(function, args)} on {peer}"
            if error.__class__ is DeadlineError:
                raise _late(error, what) from None
            if context.is_released and isinstance(error, RemoteError) and error.code == "cancelled":
                raise ContextReleasedError(f"{what} was cancelled: context {context.id} has been released meanwhile") from error
            raise
        context.opened_at.add(peer)
        value, edge = self._parse_answer(answer, peer)
        unpacking = Unpacking(office.reference)
        result = unpacking.unpack(value)
        if unpacking.differentiable:
            context.check_open()
            if not grad or edge == 0 or edge in context.recv_nodes:
                raise ProtocolError(f"worker {peer} answered with values that claim gradients nobody asked for", code="edge")
            recv = context.add_recv(unpacking.differentiable, edge, peer, answer_number)
            collect = current_mode().collect
            if collect is not None:
                collect(recv)
        return result

    async def _packing(self, value: Any, records: bool, is_exact: bool) -> Packing:
        hosted = {}
        for tensor in device_tensors(value):
            hosted[id(tensor)] = await on_host(tensor._data)
        return Packing(records, Encoding.PLAIN if is_exact else self.office.encoding, hosted)

    @staticmethod
    def _parse_answer(answer: Any, peer: str) -> tuple[Any, int]:
        if not (isinstance(answer, tuple) and len(answer) == 2 and answer[1].__class__ is int):
            raise ProtocolError(f"worker {peer} gave a malformed answer to a call", code="answer")
        return answer

    # ---------------------------------------------------------------- serving one

    async def on_call(self, caller: Caller, value: Any, timeout: float) -> tuple[Any, int]:
        """See `Kind.CALL`."""
        failpoints.reach("fwd.before_receive")
        office = self.office
        if not (isinstance(value, tuple) and len(value) == 5):
            raise ProtocolError("a malformed call", code="call")
        function, args, kwargs, grad, heading = value
        if not (function.__class__ is str and args.__class__ is list and kwargs.__class__ is dict and grad.__class__ is bool):
            raise ProtocolError("a malformed call", code="call")
        target = self.builtins.get(function) or office.service.find_function(function)
        context: Context | None = None
        place: tuple[float, ...] = ()
        if heading is not None:
            heading = Heading.parse(heading)
            place = heading.place
            context = office.contexts.enter(caller, heading, office.now())
            office.context_entered()
        # what the function asks of others expires a little before the function is cancelled, so that the reason can travel back
        deadline = asyncio.get_running_loop().time() + timeout - min(0.02, timeout * 0.1)
        SCOPE.set(Scope(office.worker, context, caller.principal, deadline, place))
        modes: dict[str, Any] = {"grad": grad, "profiler": office.profiler}
        if context is None:
            with ModeScope(**modes):
                return await self._serve(caller, target, args, kwargs, None, 0, grad)
        task = asyncio.current_task()
        context.calls[task] = None
        try:
            if grad:
                modes["collect"] = context.recorder(place)
            with ModeScope(**modes):
                return await self._serve(caller, target, args, kwargs, context, heading.edge, grad)
        except asyncio.CancelledError:
            if office.is_closing:
                raise office.leaving("CALL") from None
            raise
        finally:
            context.calls.pop(task, None)

    async def _serve(
        self, caller: Caller, target: Exposed | Builtin, args: list[Any], kwargs: dict[str, Any], context: Context | None, edge: int, grad: bool
    ) -> tuple[Any, int]:
        office = self.office
        unpacking = Unpacking(office.reference)
        args, kwargs = unpacking.unpack(args), unpacking.unpack(kwargs)
        received = unpacking.differentiable
        if received:
            if context is None or edge == 0 or edge in context.recv_nodes or not grad:
                raise ProtocolError("arguments that claim gradients outside of a context", code="edge")
            context.add_recv(received, edge, caller.name)
        failpoints.reach("fwd.after_receive")
        if isinstance(target, Exposed):
            running: Coroutine[Any, Any, Any] = self.invoke(target, args, kwargs)
        else:
            try:
                running = target(caller, *args, **kwargs)
            except TypeError as error:  # of the arguments: what a coroutine function itself raises comes when it is awaited
                raise ArgumentTypeError(f"a malformed call of one of the library's own functions: {error}") from error
        result = await (failpoints.reach_within("fwd.in_compute", running) if failpoints.is_watched() else running)
        await ready(result)
        failpoints.reach("fwd.before_reply")
        try:
            packing = await self._packing(result, grad and context is not None, not isinstance(target, Exposed) and target in self.exact)
            wire = packing.pack(result)
        except (UnsendableError, RecursionError) as error:
            raise explain(error, "sending a result", [("it", result)]) from None
        sent = packing.differentiable
        if not sent or context is None:
            return wire, 0
        context.check_open()
        context.known_workers.add(caller.name)
        send = context.add_send(sent, caller.name)
        scope = SCOPE.get()
        if scope is not None:
            context.recorder(scope.place)(send)
        return wire, send.edge

    @property
    def stuck(self) -> int:
        """Functions that were given up and run all the same."""
        return sum(job.is_running for job in self._given_up) if self._given_up else 0

    async def invoke(self, exposed: Exposed, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call an exposed function with arguments that came from a peer: on the loop if it is ``async def``, else on the executor."""
        exposed.schema.check(args, kwargs)
        if exposed.is_async:
            return await exposed.function(*args, **kwargs)
        engine = current_engine()
        most = self.office.limits.executor_queue * engine.executor.threads
        if self._room is None:
            self._room = asyncio.Semaphore(most)
        async with self._room:
            if (stuck := self.stuck) >= most:
                raise Overloaded(
                    f"worker {self.office.name} has {stuck} functions that were given up and have not ended, which is its limit "
                    f"(Limits.executor_queue={self.office.limits.executor_queue} for each of {engine.executor.threads} threads)"
                )
            job = _Job(exposed.function, args, kwargs)
            self._on_executor += 1
            try:
                result = await engine.offload(job)
            except asyncio.CancelledError:
                self._given_up.add(job)
                raise
            finally:
                self._on_executor -= 1
        if inspect.isawaitable(result) and not isinstance(result, TensorCore):
            result = await result  # a module whose forward is async, called through a plain method
        return result


class _Job:
    """A call of a function on a thread of the executor."""

    __slots__ = ("function", "args", "kwargs", "is_running", "__weakref__")

    def __init__(self, function: Callable[..., Any], args: list[Any], kwargs: dict[str, Any]) -> None:
        self.function = function
        self.args = args
        self.kwargs = kwargs
        self.is_running = False

    def __call__(self) -> Any:
        self.is_running = True
        args, kwargs, self.args, self.kwargs = self.args, self.kwargs, [], {}  # nothing is kept alive for longer than it takes
        try:
            return self.function(*args, **kwargs)
        except (KeyboardInterrupt, SystemExit) as error:  # on a thread they end the thread by convention, so here the request and nothing else
            kind = type(error).__name__
            raise RemoteError(f"{kind} in a function that ran on a thread: {error}", type_name=kind) from error
        finally:
            self.is_running = False


def _late(error: DeadlineError, what: str) -> DeadlineError:
    """The same, with the name of the function; an error of the function's own stays as it is."""
    return error if error.path else DeadlineError(f"{what}: {error}")


def _label(function: str, args: list[Any]) -> str:
    """What is called, for people: the functions of references stand for a class or a method."""
    if function == "aiograd.reference.create":
        return str(args[0])
    if function.startswith("aiograd.reference."):
        method = args[1] if function == "aiograd.reference.call" else function.rpartition(".")[2]
        return f"{args[0].type_name}.{method}"
    return function


def _named(function: str, args: list[Any], kwargs: dict[str, Any]) -> list[tuple[str, Any]]:
    """The arguments as the caller knows them."""
    if function in ("aiograd.reference.create", "aiograd.reference.call"):
        args, kwargs = args[-2:]
    return [*((f"argument {i}", arg) for i, arg in enumerate(args)), *((f"argument {name!r}", arg) for name, arg in kwargs.items())]
