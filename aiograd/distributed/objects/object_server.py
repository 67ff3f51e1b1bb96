"""ObjectServer: the objects that a worker holds for others, and the library's own functions that reach them: references, modules, adapters.

Note [Adapters]
    Other parts of the library have objects of their own that live on workers, such as the member of a pipeline. They know nothing of this
    package, nor this one of them: the top of the package registers their classes by name, a closed table. An adapter is made around objects that
    the caller holds references to and could call itself; it is used through a reference, by its public methods, as any object. For work on
    its own account it uses its `AdapterWorker`. Gradients that it keeps back may be in doubt, like a context's: see `Adapter`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from aiograd.distributed.calls import Calls
from aiograd.distributed.messages.calls import Post
from aiograd.distributed.messages.fields import NO_TRACE
from aiograd.distributed.messages.library import (
    CallMethod,
    CreateAdapter,
    CreateObject,
    DeleteObject,
    EndTransfer,
    LoadModule,
    ModuleParameters,
    PutChunks,
    ReadModule,
    ReadMore,
    ReadObject,
    StatePart,
    TrainModule,
)
from aiograd.distributed.objects.adapter_worker import AdapterWorker
from aiograd.distributed.objects.parameter_stream import ParameterStreams
from aiograd.distributed.objects.reference_table import Held
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.payload import Unpacking
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.service import Exposed, ExposedClass
from aiograd.distributed.wait_tables import Awaited, OpenWork, WaitEdge, WaitEntry
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.run import current_engine
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommitUnknown,
    NotExposedError,
    ReferenceLostError,
)
from aiograd.tensors.core import TensorCore, make


@runtime_checkable
class Adapter(Protocol):
    """The methods of an adapter that its worker calls; peers cannot call them, since they are private.

    One that takes values as they come (`RemoteRef.post`) has also ``_take(value)``. The value comes from the peer that had the adapter made, or from
    one that this peer has told of it, and may be anything.
    """

    def _doubt(self, leaves: Iterable[Any], owners: Iterable[str]) -> CommitUnknown | None:
        """The error if gradients are in doubt, of some leaves of this worker (given by their nodes) or on some workers; else None."""

    def _leave(self) -> None:
        """Release everything: the last reference has been deleted."""


#: classes of adapters that may be made on request, by name, each loaded when it is called for; see Note [Adapters]
ADAPTERS: dict[str, Callable[[], ExposedClass]] = {}


def register_adapter(name: str, load: Callable[[], type[Any]]) -> None:
    """Let `RemoteRef.adapt` make adapters of a class on other workers.

    ``cls(values, options, worker)`` takes the objects behind the references, a dict of plain values, and the worker as an `AdapterWorker`; it makes
    an `Adapter`. Its public methods may then be called by the principal that made it; they are ``async def``.

    Args:
        name: the name by which peers request it.
        load: returns the class. Called once, for the first adapter: most workers never make one, and need not import it.
    """
    ADAPTERS[name] = functools.cache(lambda: ExposedClass(name, load()))


@functools.cache
def _exposed_adapter(cls: type[Any]) -> ExposedClass:
    """The methods of an adapter that this process has made itself, for the peers that it gives a reference to."""
    return ExposedClass(cls.__name__, cls)


class ObjectServer:
    """The objects of one worker.

    Args:
        core: the worker.
        calls: the `Calls` of the worker, which serve calls of the objects.
    """

    def __init__(self, core: WorkerCore, calls: Calls) -> None:
        self.core = core
        self.calls = calls
        self.table = calls.references
        #: those objects that are adapters, by key
        self.adapters: dict[bytes, Adapter] = {}
        #: states that are under way in several messages
        self.streams = ParameterStreams(core.limits)
        calls.register(
            {
                CreateObject: self._create,
                CallMethod: self._call,
                ReadObject: self._read,
                DeleteObject: self._delete,
                CreateAdapter: self._create_adapter,
                ReadMore: self.streams.more,
                PutChunks: self._put,
                EndTransfer: self.streams.end,
                ModuleParameters: self._parameters,
                ReadModule: self._read_module,
                LoadModule: self._load_module,
                TrainModule: self._train,
            }
        )
        core.serve_promptly(Post, self._on_post)
        core.on_lost.append(lambda identity, error: self.streams.forget(identity))
        core.wait_tables.append(self.waits)

    def waits(self) -> Iterator[WaitEntry]:
        """The steps that are under way, of members and of coordinating processes, for a report of what waits."""
        for key, adapter in list(self.adapters.items()):
            step, principal = getattr(adapter, "_open_step", lambda: None)(), self.table.principal_of(key)
            if step is None or principal is None:
                continue
            of = key if step.key is None else step.key
            name = f"step {step.step} of {step.subject}" + (f" ({of.hex()[:8]})" if of else "")
            edges = [WaitEdge(step.decided_by, name, "commit", message="decision")] if step.decided_by else []
            yield OpenWork(name, principal, step.tasks, None, edges, f"step {step.step}", step.members)
            for future, sender, message in step.messages:
                yield Awaited(future, WaitEdge(sender or self.core.name, f"{name}: {message}", message, message=message), principal, needs_row=False)

    def clear(self) -> None:
        """Let go of all objects; the worker closes."""
        self.table.clear()
        self.adapters.clear()
        self.streams.clear()

    # ---------------------------------------------------------------- on the side that holds a reference

    def refer(self, value: Any) -> RemoteRef:
        """A reference to an object of this worker's own code; it belongs to the principal that the code serves."""
        exposed, adapter = self.core.service.class_of(value), None
        if exposed is None and isinstance(value, Adapter):
            exposed, adapter = _exposed_adapter(type(value)), value
        wire = self.table.add(value, exposed, self.core.acting_principal(), self.core.name)
        if adapter is not None:
            self.adapters[wire.id] = adapter
        return self.calls.reference(wire)

    def check_certain(self, *, leaves: Iterable[Any] = (), owners: Iterable[str] = ()) -> None:
        """Raise if an adapter keeps back gradients of these leaves of this worker, or of leaves on those workers, and they are in doubt.

        The workers are the ones with these names in the view of the principal that the running code acts for.

        Raises:
            CommitUnknown: they are.
        """
        leaves, owners, principal = list(leaves), list(owners), self.core.acting_principal()
        for key, adapter in list(self.adapters.items()):
            doubt = adapter._doubt(leaves, owners if self.table.principal_of(key) == principal else ())
            if doubt is not None:
                raise doubt

    # ---------------------------------------------------------------- references

    def find(self, caller: PeerIdentity, ref: RemoteRef) -> Held:
        """The object of this worker behind a reference of a caller.

        Raises:
            ReferenceLostError: there is none for this caller.
        """
        if ref.owner != self.core.name:
            raise ReferenceLostError(f"{ref!r} leads to another worker than {self.core.name}")
        return self.table.find(ref.key, ref.epoch, caller.principal)

    async def _create(self, caller: PeerIdentity, message: CreateObject) -> RemoteRef:
        exposed = self.core.service.find_class(message.class_name)
        value = await self.calls.invoke(Exposed(message.class_name, exposed.cls, exposed.schema), message.args, message.kwargs)
        return self.calls.reference(self.table.add(value, exposed, caller.principal, caller.name))

    async def _call(self, caller: PeerIdentity, message: CallMethod) -> Any:
        held = self.find(caller, message.ref)
        if held.exposed is None:
            raise NotExposedError(f"{message.ref!r} has no methods that others may call: its class is not exposed with @service.reference")
        return await self.calls.invoke(held.exposed.method(held.value, message.method), message.args, message.kwargs)

    def _on_post(self, caller: PeerIdentity, post: Post) -> bool:
        """Serve a `Post`."""
        ref, trace = post.reference, post.trace or NO_TRACE
        self.table.find(ref.id, ref.epoch, caller.principal)
        take = getattr(self.adapters.get(ref.id), "_take", None)
        if take is None:
            raise NotExposedError(f"a {ref.type_name:.80} takes no values in this way; call its methods")
        profiler = self.core.recorder(caller, trace)
        what, about = f"{ref.type_name:.80}.post", {"client.address": caller.name}
        with self.calls.observe("serve", "aiograd.post", what, caller.name, profiler, "SERVER", trace.parent, **about):
            unpacking = Unpacking(self.calls.reference)
            for value in post.values:
                take(unpacking.unpack(value))
        return post.waits

    async def _read(self, caller: PeerIdentity, message: ReadObject) -> Any:
        return self.find(caller, message.ref).value

    async def _delete(self, caller: PeerIdentity, message: DeleteObject) -> bool:
        ref = message.ref
        is_removed = self.table.remove(ref.key, ref.epoch, caller.principal)
        if is_removed:
            self.streams.drop(ref.key)
            adapter = self.adapters.pop(ref.key, None)
            if adapter is not None:
                adapter._leave()
        return is_removed

    async def _create_adapter(self, caller: PeerIdentity, message: CreateAdapter) -> RemoteRef:
        name = message.name
        if name not in ADAPTERS:
            raise NotExposedError(f"there is no adapter {name[:80]!r}; this worker may have another version of the library")
        exposed = ADAPTERS[name]()
        values: list[Any] = []
        for each in (message.ref, *message.others):
            held = self.find(caller, each)
            if held.exposed is None:
                raise NotExposedError(f"{each!r} cannot be called by others: its class is not exposed with @service.reference")
            held.exposed.method(held.value, "__call__")
            values.append(held.value)
        adapter = exposed.cls(values, message.options, AdapterWorker(self.core, caller.principal))
        wire = self.table.add(adapter, exposed, caller.principal, caller.name)
        self.adapters[wire.id] = adapter
        return self.calls.reference(wire)

    async def _put(self, caller: PeerIdentity, message: PutChunks) -> bool:
        self.find(caller, message.ref)
        return self.streams.put(caller, message)

    # ---------------------------------------------------------------- modules

    def _module(self, caller: PeerIdentity, ref: RemoteRef) -> Any:
        value = self.find(caller, ref).value
        if not hasattr(value, "state_dict") or not hasattr(value, "named_parameters"):
            raise ArgumentTypeError(f"{ref!r} is no module: it has no parameters and state")
        return value

    async def _parameters(self, caller: PeerIdentity, message: ModuleParameters) -> dict[str, RemoteRef]:
        module = self._module(caller, message.ref)
        named = dict(module.named_parameters())
        share = self.table.share  # asking again takes no more room
        return {name: self.calls.reference(share(value, caller.principal, caller.name)) for name, value in named.items()}

    async def _read_module(self, caller: PeerIdentity, message: ReadModule) -> StatePart:
        """Serve a `ReadModule`, for any object with a ``state_dict``."""
        value = self.find(caller, message.ref).value
        if not hasattr(value, "state_dict"):
            raise ArgumentTypeError(f"{message.ref!r} is no module: it has no parameters and state")
        return self.streams.send(caller, message, None, plain(value.state_dict()))

    async def _load_module(self, caller: PeerIdentity, message: LoadModule) -> bool:
        module = self._module(caller, message.ref)
        state = self.streams.finish(caller, message)
        try:
            await current_engine().offload(functools.partial(module.load_state_dict, state))
        except ArgumentError as error:  # what does not fit is told in further lines, and only the first would cross
            raise type(error)("; ".join(line.strip() for line in str(error).splitlines())) from error
        return True

    async def _train(self, caller: PeerIdentity, message: TrainModule) -> bool:
        self._module(caller, message.ref).train(message.mode)
        return True


def plain(value: Any) -> Any:
    """Copies of Tensors, and containers of the types that can be sent."""
    if isinstance(value, TensorCore):
        return make(value._data.copy())
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [plain(item) for item in value]
    return value
