"""Calls: remote function calls, on the worker that makes one and on the one that serves it.

Inside a context a call is an ordinary operation of the graph: its differentiable arguments leave through a SendNode and its differentiable
results arrive at a RecvNode. Outside of one, values may be sent that need no gradient; a call that would silently cut a graph is an error.

Note [Numbers of a call]
    The caller reserves two sequence numbers when it makes a call: one is the place of the call (see Note [Places] in `context`), the other
    belongs to the results. So the order in which gradients are summed does not depend on the order of the answers.

Note [Waiting for the executor]
    At most `Limits.executor_queue` functions are handed to the executor at a time, so that the worker's own passes need not wait for all
    functions that peers call. Further calls wait in the order in which they came. They keep their requests' bytes in memory, and the limit on
    running requests per peer bounds their number. A function on a thread calls no other worker, so there are no deadlocks.

Note [Functions that never return]
    A thread cannot be stopped. When a call is given up, its function goes on, its result is dropped, and the executor starts
    another thread in place of the one that is stuck. To bound the number of threads, calls are refused while `Limits.executor_queue`
    such functions run; `WorkerStatistics.stuck` counts them.

Source: PyTorch ``distributed/autograd/utils.cpp`` for the autograd metadata of messages; unlike there, grad mode is sent with the call.
"""

from __future__ import annotations

import asyncio
import contextlib
import inspect
import weakref
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any

from aiograd.coordination.device_copies import LevelArrayError
from aiograd.coordination.malformed import malformed
from aiograd.coordination.message_form import WireMessage, encode, encode_answer, parse, parse_answer
from aiograd.distributed import failpoints
from aiograd.distributed.autograd.context import Context
from aiograd.distributed.autograd.context_table import ContextTable
from aiograd.distributed.autograd.discovery import predict_edges
from aiograd.distributed.autograd.leases import ContextLeases
from aiograd.distributed.call_names import label, late, named
from aiograd.distributed.messages.calls import CallHeader, CallResult, FunctionCall, Post
from aiograd.distributed.messages.fields import NESTED, NO_TRACE
from aiograd.distributed.messages.library import LIBRARY, CallMethod, CreateAdapter
from aiograd.distributed.meter import Meter
from aiograd.distributed.objects.reference_table import ReferenceTable
from aiograd.distributed.objects.references import Contact, RemoteRef
from aiograd.distributed.observing import observe, trace_context
from aiograd.distributed.payload import Unpacking, UnsendableError, explain
from aiograd.distributed.rpc.codec import WireReference
from aiograd.distributed.rpc.encodings import Encoding
from aiograd.distributed.rpc.identity import PeerId, PeerIdentity
from aiograd.distributed.scope import SCOPE, Scope
from aiograd.distributed.service import Exposed
from aiograd.distributed.tangents import DeferredCallError, call_later, new_levels, pack, unpack_tangents
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.run import current_engine
from aiograd.errors import (
    ArgumentTypeError,
    ContextReleasedError,
    DeadlineError,
    LimitError,
    NoContextError,
    Overloaded,
    ProtocolError,
    ReferenceLostError,
    RemoteError,
)
from aiograd.forward.dual import ForwardLevel
from aiograd.graph.edge_edits import EDGE_EDITS
from aiograd.graph.node import _next_sequence
from aiograd.running.modes import ModeScope, current_mode
from aiograd.running.offloading import ready
from aiograd.running.tracing import SpanKindName
from aiograd.tensors.core import TensorCore

#: functions with results in full precision, with any encoding of the worker: states of modules and optimizers
EXACT = ("aiograd.module.", "aiograd.optimizer.", "aiograd.transfer.")
#: functions that are not counted, recorded or traced: the questions of dashboards
UNOBSERVED = "aiograd.dashboard."
#: serves a function of the library itself: called with the caller's identity and the message
Builtin = Callable[[PeerIdentity, Any], Coroutine[Any, Any, Any]]


class Calls:
    """The calls that a worker makes and serves.

    Args:
        core: the worker.
        contexts: the contexts of the worker.
        leases: the leases of these contexts.
        references: the worker's objects to which peers hold references.
    """

    def __init__(self, core: WorkerCore, contexts: ContextTable, leases: ContextLeases, references: ReferenceTable) -> None:
        self.core = core
        self.contexts = contexts
        self.leases = leases
        self.references = references
        #: the library's own functions by name; names begin with "aiograd."
        self.builtins: dict[str, Builtin] = {}
        #: the number of functions that run on the executor or wait for it, and the queue for it; see Note [Waiting for the executor]
        self._on_executor = 0
        self._room: asyncio.Semaphore | None = None
        #: functions of abandoned calls; see Note [Functions that never return]
        self._given_up: weakref.WeakSet[_ExecutorCall] = weakref.WeakSet()
        core.serve({FunctionCall: self.on_call})
        core.multicast.register(FunctionCall, self._on_relayed_call)

    def register(self, functions: Mapping[type[WireMessage], Builtin]) -> None:
        """Serve functions of the library itself, by the messages of `messages.library`; each returns the answer to its message."""
        self.builtins.update((request.form.name, function) for request, function in functions.items())

    # ---------------------------------------------------------------- making calls

    async def ask(self, peer: str, message: WireMessage, timeout: float | None) -> Any:
        """Call a function of the library itself; returns the answer to the message."""
        return parse_answer(type(message), await self.call(peer, message.form.name, list(encode(message)), {}, timeout), peer)

    async def call(self, peer: str, function: str, args: list[Any], kwargs: dict[str, Any], timeout: float | None) -> Any:
        """See `Worker.call`."""
        core = self.core
        for name in (peer, function):
            if not isinstance(name, str):
                raise ArgumentTypeError(f"a remote call takes names of a worker and of a function that it exposes, found {type(name).__name__}")
        scope = SCOPE.get()
        if scope is not None and scope.worker is not core.worker:
            scope = None  # of another worker in this process
        context = None if scope is None else scope.context
        if context is not None:
            context.check_open()
        seconds = core.time_for(timeout)
        number, answer_number = _next_sequence(), _next_sequence()
        mode = current_mode()
        grad, profiler = mode.grad, mode.profiler
        try:
            packing, (wire_args, wire_kwargs) = await pack((args, kwargs), grad, self._encoding(function), None, crosses=True)
        except (UnsendableError, RecursionError) as error:
            raise explain(error, f"calling {label(function, args)} on {peer}", named(function, args, kwargs)) from None
        except DeferredCallError as deferred:
            return await call_later(lambda value: self.call(peer, function, value[0], value[1], timeout), (args, kwargs), deferred.level)
        sent = packing.differentiable
        if packing.tangents is not None:
            if grad and context is not None and not packing.records:
                raise LevelArrayError(
                    f"calling {label(function, args)} on {peer} in a context, with tangents and while gradients are recorded: a backward pass within "
                    "forward mode cannot go on on another worker. Take the remote call out of the part that is differentiated twice."
                )
            grad = packing.records
        if context is None:
            if sent:
                raise NoContextError(
                    f"calling {label(function, args)} on {peer} with arguments that require grad outside of any context: their gradients could "
                    "never come back. Call inside `async with worker.context()`, or under no_grad() if none are wanted, or detach() the arguments."
                )
            principal = None if scope is None else scope.principal
            try:
                with self.observe("call", function, label(function, args), peer, profiler, "CLIENT", **{"server.address": peer}):
                    trace = trace_context(None if function.startswith(UNOBSERVED) else profiler)
                    message = FunctionCall(function, wire_args, wire_kwargs, grad, None, trace, packing.tangents)
                    answer: CallResult = await core.ask(peer, message, seconds, principal)
            except DeadlineError as error:
                raise late(error, f"calling {label(function, args)} on {peer}") from None
            unpacking = Unpacking(self.reference)
            return unpack_tangents(unpacking, unpacking.unpack(answer.value), answer.tangents, packing.levels, packing.inputs)()
        context.check_open()
        place = (*(scope.place if scope is not None else ()), -number)
        if len(place) > NESTED:
            what = f"calling {label(function, args)} on {peer}"
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
        header = CallHeader(context.key, context.origin, tuple(map(int, place)), 0 if send is None else send.edge, peer not in context.opened_at)
        context.known_workers.add(peer)
        try:
            about = {"server.address": peer, "aiograd.context": context.id}
            with self.observe("call", function, label(function, args), peer, profiler, "CLIENT", **about) as seen:
                seen.nbytes = sum(tensor.size * tensor.dtype.itemsize for tensor in sent)
                call = FunctionCall(function, wire_args, wire_kwargs, grad, header, trace_context(profiler), packing.tangents)
                answer = await core.ask(peer, call, seconds, context.principal)
        except BaseException as error:
            if send is not None:
                context.send_nodes.pop(send.edge, None)  # the edge has no other half, or none that is used
            what = f"calling {label(function, args)} on {peer}"
            if error.__class__ is DeadlineError:
                raise late(error, what) from None
            if context.is_released and isinstance(error, RemoteError) and error.code == "cancelled":
                raise ContextReleasedError(f"{what} was cancelled: context {context.id} has been released meanwhile") from error
            raise
        context.opened_at.add(peer)
        edge = answer.edge
        unpacking = Unpacking(self.reference)
        whole = unpack_tangents(unpacking, unpacking.unpack(answer.value), answer.tangents, packing.levels, packing.inputs)
        if unpacking.differentiable:
            context.check_open()
            if not grad or edge == 0 or edge in context.recv_nodes:
                raise ProtocolError(f"worker {peer} answered with values that claim gradients that were not asked for", code="edge")
            recv = context.add_recv(unpacking.differentiable, edge, peer, answer_number, answer.behind)
            collect = current_mode().collect
            if collect is not None:
                collect(recv)
        return whole()

    def observe(
        self, category: str, function: str, label: str, peer: str, profiler: Any, kind: SpanKindName, parent: str | None = None, **about: Any
    ) -> observe:
        """A ``with`` block around an exchange."""
        if function.startswith(UNOBSERVED):
            return observe(Meter(), category, label, peer, None)
        return observe(self.core.meter, category, label, peer, profiler, kind, parent, **about)

    def _encoding(self, function: str) -> Encoding:
        """The wire encoding of the tensors of a call."""
        return Encoding.PLAIN if function.startswith(EXACT) else self.core.encoding

    # ---------------------------------------------------------------- references in values

    def reference(self, wire: WireReference) -> RemoteRef:
        """A reference that came in a message, or was made here."""
        return RemoteRef(wire, self._ask_owner, self._local, self._contact)

    def _ask_owner(self, ref: RemoteRef, what: str, values: tuple[Any, ...], timeout: float | None) -> Coroutine[Any, Any, Any]:
        if what == "call_all":
            refs, method, args = values
            return self._call_all(refs, method, args, timeout)
        if what == "post":
            posted, waits = values
            return self._post(ref, posted, waits, timeout)
        function = CreateAdapter.form.name if what == "adapt" else f"aiograd.reference.{what}"
        return self.call(ref.owner, function, [ref, *values], {}, timeout)

    def _contact(self, ref: RemoteRef) -> Contact:
        endpoint, peer = self.core.endpoint, PeerId(self.core.acting_principal(), ref.owner)
        return Contact(ref.owner == self.core.name or endpoint.is_connected(peer), endpoint.silence_left(peer))

    async def _post(self, ref: RemoteRef, posted: list[Any], waits: bool, timeout: float | None) -> None:
        """See `RemoteRef.post`."""
        core = self.core
        what = f"{ref.type_name}.post"
        try:
            _, values = await pack(posted, False, core.encoding)
        except (UnsendableError, RecursionError) as error:
            raise explain(error, f"sending to {what} on {ref.owner}", [("values", posted)]) from None
        profiler = current_mode().profiler
        with self.observe("call", "aiograd.post", what, ref.owner, profiler, "CLIENT", **{"server.address": ref.owner}):
            try:
                post = Post(ref.to_wire(), values, waits, trace_context(profiler))
                await core.ask(ref.owner, post, core.time_for(timeout), core.acting_principal())
            except DeadlineError as error:
                raise late(error, f"sending to {what} on {ref.owner}") from None

    async def _call_all(self, refs: Sequence[RemoteRef], method: str, args: list[Any], timeout: float | None) -> list[Any]:
        """See `RemoteRef.call_all`."""
        core = self.core
        messages: dict[str, FunctionCall] = {}
        for ref in refs:
            if ref.owner != core.name and ref.owner not in messages:
                try:
                    _, packed = await pack([ref, method, args, {}], False, core.encoding)
                except (UnsendableError, RecursionError) as error:
                    raise explain(error, f"calling {ref.type_name}.{method} on {ref.owner}", named("", args, {})) from None
                messages[ref.owner] = FunctionCall(CallMethod.form.name, packed, {}, False, None)
        found = await core.multicast.spread(messages, core.time_for(timeout), core.acting_principal())
        results: list[Any] = []
        for ref in refs:
            answer = found.pop(ref.owner, None)
            if isinstance(answer, CallResult):
                answer = Unpacking(self.reference).unpack(answer.value)
            results.append(answer)
        return results

    async def _on_relayed_call(self, caller: PeerIdentity, call: FunctionCall, timeout: float) -> CallResult:
        """Serve a call that has come by way of another worker: of methods only, outside of any context."""
        if call.function != CallMethod.form.name or call.grad or call.header is not None:
            raise ProtocolError("by way of another worker only methods are called, and outside of any context", code="call")
        return await self.on_call(caller, call, timeout)

    def _local(self, ref: RemoteRef) -> Any:
        if ref.owner != self.core.name:
            raise ReferenceLostError(
                f"the object behind {ref!r} lives on {ref.owner}, not on {self.core.name}: use `await ref.call(...)` or `ref.get()`"
            )
        return self.references.find(ref.key, ref.epoch, self.core.acting_principal()).value

    # ---------------------------------------------------------------- serving calls

    async def on_call(self, caller: PeerIdentity, call: FunctionCall, timeout: float) -> CallResult:
        """Serve a `FunctionCall`."""
        failpoints.reach("fwd.before_receive")
        core = self.core
        function, grad, header, trace = call.function, call.grad, call.header, call.trace or NO_TRACE
        target = LIBRARY[function] if function in self.builtins else core.service.find_function(function)
        context: Context | None = None
        place: tuple[float, ...] = ()
        edge = 0
        if header is not None:
            place, edge = header.place, header.edge
            context = self.contexts.enter(caller, header, core.now())
            self.leases.watch()
        # the function's own requests expire a little before the function is cancelled, so that their error can be returned to the caller
        deadline = asyncio.get_running_loop().time() + timeout - min(0.02, timeout * 0.1)
        SCOPE.set(Scope(core.worker, context, caller.principal, deadline, place))
        profiler = None if function.startswith(UNOBSERVED) else core.recorder(caller, trace)
        modes: dict[str, Any] = {"grad": grad, "profiler": profiler}
        about: dict[str, Any] = {"client.address": caller.name} if context is None else {"client.address": caller.name, "aiograd.context": context.id}
        serving = self.observe("serve", function, label(function, call.args), caller.name, profiler, "SERVER", trace.parent, **about)
        if context is None:
            with ModeScope(**modes), serving:
                return await self._serve(caller, target, call, None, 0)
        task = asyncio.current_task()
        context.calls[task] = None
        try:
            if grad:
                modes["collect"] = context.recorder(place)
            with ModeScope(**modes), serving:
                return await self._serve(caller, target, call, context, edge)
        except asyncio.CancelledError:
            if core.is_closing:
                raise core.closed_error("CALL") from None
            raise
        finally:
            context.calls.pop(task, None)
            del task  # an error's traceback keeps this frame, and a task that is cancelled keeps the error

    async def _serve(
        self, caller: PeerIdentity, target: Exposed | type[WireMessage], call: FunctionCall, context: Context | None, edge: int
    ) -> CallResult:
        if not call.tangents:
            return await self._run(caller, target, call, context, edge, ())
        with contextlib.ExitStack() as stack, ModeScope(grad=False):  # see Note [Recorded tangents] in `tangents`
            return await self._run(caller, target, call, context, edge, new_levels(call.tangents, call.grad, stack))

    async def _run(
        self, caller: PeerIdentity, target: Exposed | type[WireMessage], call: FunctionCall, context: Context | None, edge: int,
        levels: Sequence[ForwardLevel],
    ) -> CallResult:  # fmt: skip
        grad = call.grad
        unpacking = Unpacking(self.reference)
        args, kwargs = unpacking.unpack(call.args), unpacking.unpack(call.kwargs)
        whole = unpack_tangents(unpacking, (args, kwargs), call.tangents, levels, {}) if levels else None
        received = unpacking.differentiable
        if received:
            if context is None or edge == 0 or not grad:
                raise ProtocolError("arguments that claim gradients outside of a context", code="edge")
            if edge in context.recv_nodes:
                raise ProtocolError(f"arguments that claim gradients as message {edge}, which has come before", code="edge")
            context.add_recv(received, edge, caller.name)
        if whole is not None:
            args, kwargs = whole()
        failpoints.reach("fwd.after_receive")
        if isinstance(target, Exposed):
            running: Coroutine[Any, Any, Any] = self.invoke(target, args, kwargs)
        else:
            if kwargs:
                raise malformed(target.form, f"with arguments {', '.join(kwargs):.40}", "arguments by position")
            running = self.builtins[target.form.name](caller, parse(target, tuple(args)))
        result = await (failpoints.reach_within("fwd.in_compute", running) if failpoints.is_watched() else running)
        if not isinstance(target, Exposed):
            result = encode_answer(target, result)
        await ready(result)
        failpoints.reach("fwd.before_reply")
        try:
            encoding = self._encoding(call.function)
            packing, wire = await pack(result, grad and context is not None, encoding, levels, crosses=bool(levels))
        except (UnsendableError, RecursionError) as error:
            raise explain(error, "sending a result", [("it", result)]) from None
        sent = packing.differentiable
        if not sent or context is None:
            return CallResult(wire, 0, None, packing.tangents)
        context.check_open()
        context.known_workers.add(caller.name)
        send = context.add_send(sent, caller.name)
        scope = SCOPE.get()
        if scope is not None:
            context.recorder(scope.place)(send)
        send.behind, send.edits = predict_edges(send, context), EDGE_EDITS.count
        return CallResult(wire, send.edge, send.behind, packing.tangents)

    @property
    def stuck(self) -> int:
        """The number of functions that still run although their calls were given up."""
        return sum(job.is_running for job in self._given_up) if self._given_up else 0

    async def invoke(self, exposed: Exposed, args: list[Any], kwargs: dict[str, Any]) -> Any:
        """Call an exposed function with arguments that came from a peer: on the loop if it is ``async def``, else on the executor."""
        exposed.schema.check(args, kwargs)
        if exposed.is_async:
            return await exposed.function(*args, **kwargs)
        engine = current_engine()
        most = self.core.limits.executor_queue * engine.executor.threads
        if self._room is None:
            self._room = asyncio.Semaphore(most)
        async with self._room:
            if (stuck := self.stuck) >= most:
                raise Overloaded(
                    f"worker {self.core.name} has {stuck} functions that were given up and have not ended, which is its limit "
                    f"(Limits.executor_queue={self.core.limits.executor_queue} for each of {engine.executor.threads} threads)"
                )
            job = _ExecutorCall(exposed.function, args, kwargs)
            self._on_executor += 1
            try:
                result = await engine.offload(job)
            except asyncio.CancelledError:
                self._given_up.add(job)
                raise
            finally:
                self._on_executor -= 1
        if inspect.isawaitable(result) and not isinstance(result, TensorCore):
            result = await result  # a module with an async forward, called through a plain method
        return result


class _ExecutorCall:
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
