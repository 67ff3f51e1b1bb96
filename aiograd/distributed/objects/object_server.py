"""ObjectServer: what a worker holds for others, and the library's own functions that reach it: references, modules, optimizers, adapters.

Note [Adapters]
    Other parts of the library have objects of their own that live on workers, such as the host of a pipeline's stages. They know nothing of this
    package, nor this one of them: the top of the package registers their classes by name, a closed table. An adapter is made around objects that
    the caller holds references to and could call itself; it is used through a reference, by its public methods, as any object. For work on
    its own account it uses its `AdapterHost`. Gradients that it keeps back may be in doubt, like those of a context: see `Adapter`.

Note [Optimizer steps]
    A step of an optimizer over several workers is a transaction in one phase: a request to take it says that it is decided, and a worker has nothing
    to prepare. So it is not atomic over workers, but each takes it at most once: steps are numbered, and one that arrives a second time is answered
    without being taken again. One that leaves a gap is refused, for then this worker has missed one and has to be restored; and so is one whose
    number was taken with the gradients of another context: its sender never heard of that, so other workers may not have taken it. A step that has
    begun is carried out to its end whatever becomes of the request and the context.
"""

from __future__ import annotations

import asyncio
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np

from aiograd.distributed.autograd.context import Context
from aiograd.distributed.calls import Calls
from aiograd.distributed.messages.calls import Post
from aiograd.distributed.messages.fields import NO_TRACE
from aiograd.distributed.objects.adapter_host import AdapterHost
from aiograd.distributed.objects.chunks import Chunk, flatten, join, unflatten
from aiograd.distributed.objects.reference_table import Held
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.objects.state_transfer import Transfers
from aiograd.distributed.payload import Unpacking
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.scope import current_context
from aiograd.distributed.service import Exposed, ExposedClass
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.run import current_engine
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommitUnknown,
    DistributedError,
    NoContextError,
    NotExposedError,
    ReferenceLostError,
)
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.norms import scaled, size_of
from aiograd.transaction import Applied, Apply, ApplyFailed, CommitDecided, Participant

#: optimizers that may be made on request, by name
OPTIMIZERS: dict[str, Callable[..., Any]] = {}


def register_optimizers(*classes: type[Any]) -> None:
    """Let `DistributedOptimizer` make these on other workers.

    They take parameters and options, have ``step(gradients)`` (or ``async def astep(gradients)``, where a step takes long) and, for
    checkpoints, ``state_dict`` and ``load_state_dict``, as those of ``ag.optim``. A class that a worker's service exposes needs this not.

    Args:
        *classes: the classes, known by their names.
    """
    for cls in classes:
        OPTIMIZERS[cls.__name__] = cls


@runtime_checkable
class Adapter(Protocol):
    """The methods of an adapter that its worker calls; peers cannot call them, since they are private.

    One that takes values as they come (`RemoteRef.post`) has also ``_take(value)``. The value comes from the peer that had the adapter made, or from
    one that this peer has told of it, and may be anything.
    """

    def _doubt(self, leaves: Iterable[Any], owners: Iterable[str]) -> CommitUnknown | None:
        """The error if gradients are in doubt: those of some leaves of this worker (given by their nodes), or those on some workers; else None."""

    def _leave(self) -> None:
        """Release everything: the last reference has been deleted."""


#: classes of adapters that may be made on request, by name, each loaded when it is called for; see Note [Adapters]
ADAPTERS: dict[str, Callable[[], ExposedClass]] = {}


def register_adapter(name: str, load: Callable[[], type[Any]]) -> None:
    """Let `RemoteRef.adapt` make adapters of a class on other workers.

    ``cls(values, options, host)`` takes the objects behind the references, a dict of plain values, and the worker as an `AdapterHost`; it makes
    an `Adapter`. Its public methods may then be called by whoever had it made; they are ``async def``.

    Args:
        name: the name by which peers request it.
        load: returns the class. Called once, for the first adapter: most workers never make one, and need not import it.
    """
    ADAPTERS[name] = functools.cache(lambda: ExposedClass(name, load()))


@functools.cache
def _exposed_adapter(cls: type[Any]) -> ExposedClass:
    """The methods of an adapter that this process has made itself, for the peers that it gives a reference to."""
    return ExposedClass(cls.__name__, cls)


class SteppedOptimizer:
    """An optimizer of one worker's parameters, driven from another worker."""

    def __init__(self, optimizer: Any, parameters: Sequence[Any] = ()) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        #: number of the last step that was taken
        self.taken = 0
        #: the last step that was asked for, by number and the context whose gradients to take; None after a restore
        self._step: tuple[int, bytes] | None = None
        self._transaction = Participant("", lease=math.inf, pause=math.inf, votes=False)
        self.lock = asyncio.Lock()

    def restored(self, taken: int) -> None:
        """Go on after step `taken`, with another state."""
        self.taken = taken
        self._step = None

    async def step(self, number: int, key: bytes, grads: Mapping[Any, Any] | None) -> None:
        """Take step `number` with the gradients of the context `key`; see Note [Optimizer steps].

        Args:
            grads: by parameter; None: those in ``grad``, which are forgotten then.
        """
        async with self.lock:
            transaction = self._transaction_of(number, key)
            if Apply() not in transaction.handle(CommitDecided(), 0.0):
                return  # it was taken before
            try:
                await self._apply(grads)
            except BaseException:
                transaction.handle(ApplyFailed(), 0.0)
                raise
            transaction.handle(Applied(), 0.0)
            self.taken = number

    def _transaction_of(self, number: int, key: bytes) -> Participant:
        if self._step == (number, key):
            return self._transaction
        if number <= self.taken:
            raise DistributedError(
                f"step {number} of an optimizer that has taken {self.taken}, with the gradients of another context: its confirmation must have "
                "been lost. Restore all workers from a checkpoint."
            )
        if number != self.taken + 1:
            raise DistributedError(
                f"step {number} of an optimizer that has taken {self.taken}: this worker has missed one. Restore all workers from a checkpoint."
            )
        self._step = number, key
        self._transaction = Participant("", lease=math.inf, pause=math.inf, votes=False)
        return self._transaction

    async def _apply(self, grads: Mapping[Any, Any] | None) -> None:
        if hasattr(self.optimizer, "astep"):
            await self.optimizer.astep(grads)
        else:
            await current_engine().offload(functools.partial(self.optimizer.step, grads))
        if grads is None and hasattr(self.optimizer, "zero_grad"):
            self.optimizer.zero_grad()


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
        self.transfers = Transfers(core.limits)
        calls.register(
            {
                "aiograd.reference.create": self._create,
                "aiograd.reference.call": self._call,
                "aiograd.reference.get": self._get,
                "aiograd.reference.delete": self._delete,
                "aiograd.adapter.create": self._create_adapter,
                "aiograd.transfer.more": self.transfers.more,
                "aiograd.transfer.put": self._put,
                "aiograd.transfer.end": self.transfers.end,
                "aiograd.module.parameters": self._parameters,
                "aiograd.module.state_dict": self._state_dict,
                "aiograd.module.load_state_dict": self._load_state_dict,
                "aiograd.module.train": self._train,
                "aiograd.optimizer.create": self._create_optimizer,
                "aiograd.optimizer.step": self._step,
                "aiograd.optimizer.gradient_sizes": self._gradient_sizes,
                "aiograd.optimizer.scale_gradients": self._scale_gradients,
                "aiograd.optimizer.set_options": self._set_options,
                "aiograd.optimizer.state_dict": self._optimizer_state,
                "aiograd.optimizer.load_state_dict": self._load_optimizer_state,
            }
        )
        core.serve_promptly(Post, self._on_post)
        core.on_lost.append(lambda identity, error: self.transfers.forget(identity))

    def clear(self) -> None:
        """Let go of all objects; the worker closes."""
        self.table.clear()
        self.adapters.clear()
        self.transfers.clear()

    # ---------------------------------------------------------------- on the side that holds a reference

    def refer(self, value: Any) -> RemoteRef:
        """A reference to an object of this worker's own code; it belongs to whom that code serves."""
        exposed, adapter = self.core.service.class_of(value), None
        if exposed is None and isinstance(value, Adapter):
            exposed, adapter = _exposed_adapter(type(value)), value
        wire = self.table.add(value, exposed, self.core.acting_principal(), self.core.name)
        if adapter is not None:
            self.adapters[wire.id] = adapter
        return self.calls.reference(wire)

    def check_certain(self, *, leaves: Iterable[Any] = (), owners: Iterable[str] = ()) -> None:
        """Raise if an adapter keeps back gradients of these leaves of this worker, or of leaves on those workers, and they are in doubt.

        The workers are those that the principal knows by these names on whose behalf the running code acts.

        Raises:
            CommitUnknown: they are.
        """
        leaves, owners, principal = list(leaves), list(owners), self.core.acting_principal()
        for key, adapter in list(self.adapters.items()):
            doubt = adapter._doubt(leaves, owners if self.table.principal_of(key) == principal else ())
            if doubt is not None:
                raise doubt

    # ---------------------------------------------------------------- references

    def _find(self, caller: PeerIdentity, ref: Any) -> Held:
        if not isinstance(ref, RemoteRef):
            raise ArgumentTypeError(f"expected a RemoteRef, found {type(ref).__name__}")
        if ref.owner != self.core.name:
            raise ReferenceLostError(f"{ref!r} leads to another worker than {self.core.name}")
        return self.table.find(ref.key, ref.epoch, caller.principal)

    async def _create(self, caller: PeerIdentity, name: str, args: list[Any], kwargs: dict[str, Any]) -> RemoteRef:
        _check(name=(name, str), args=(args, list), kwargs=(kwargs, dict))
        exposed = self.core.service.find_class(name)
        value = await self.calls.invoke(Exposed(name, exposed.cls, exposed.schema), args, kwargs)
        return self.calls.reference(self.table.add(value, exposed, caller.principal, caller.name))

    async def _call(self, caller: PeerIdentity, ref: RemoteRef, method: str, args: list[Any], kwargs: dict[str, Any]) -> Any:
        _check(method=(method, str), args=(args, list), kwargs=(kwargs, dict))
        held = self._find(caller, ref)
        if held.exposed is None:
            raise NotExposedError(f"{ref!r} has no methods that others may call: its class is not exposed with @service.reference")
        return await self.calls.invoke(held.exposed.method(held.value, method), args, kwargs)

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

    async def _get(self, caller: PeerIdentity, ref: RemoteRef) -> Any:
        return self._find(caller, ref).value

    async def _delete(self, caller: PeerIdentity, ref: RemoteRef) -> bool:
        if not isinstance(ref, RemoteRef):
            raise ArgumentTypeError(f"expected a RemoteRef, found {type(ref).__name__}")
        is_removed = self.table.remove(ref.key, ref.epoch, caller.principal)
        if is_removed:
            self.transfers.drop(ref.key)
            adapter = self.adapters.pop(ref.key, None)
            if adapter is not None:
                adapter._leave()
        return is_removed

    async def _create_adapter(self, caller: PeerIdentity, ref: RemoteRef, name: str, others: list[RemoteRef], options: dict[str, Any]) -> RemoteRef:
        _check(name=(name, str), others=(others, list), options=(options, dict))
        if name not in ADAPTERS:
            raise NotExposedError(f"there is no adapter {name[:80]!r}; this worker may have another version of the library")
        exposed = ADAPTERS[name]()
        values: list[Any] = []
        for each in (ref, *others):
            held = self._find(caller, each)
            if held.exposed is None:
                raise NotExposedError(f"{each!r} cannot be called by others: its class is not exposed with @service.reference")
            held.exposed.method(held.value, "__call__")
            values.append(held.value)
        adapter = exposed.cls(values, options, AdapterHost(self.core, caller.principal))
        wire = self.table.add(adapter, exposed, caller.principal, caller.name)
        self.adapters[wire.id] = adapter
        return self.calls.reference(wire)

    async def _put(self, caller: PeerIdentity, ref: RemoteRef, number: bytes, is_first: bool, chunks: list[Any]) -> bool:
        self._find(caller, ref)
        return self.transfers.put(caller, ref, number, is_first, chunks)

    # ---------------------------------------------------------------- modules

    def _module(self, caller: PeerIdentity, ref: RemoteRef) -> Any:
        value = self._find(caller, ref).value
        if not hasattr(value, "state_dict") or not hasattr(value, "named_parameters"):
            raise ArgumentTypeError(f"{ref!r} is no module: it has no parameters and state")
        return value

    async def _parameters(self, caller: PeerIdentity, ref: RemoteRef) -> dict[str, RemoteRef]:
        module = self._module(caller, ref)
        named = dict(module.named_parameters())
        share = self.table.share  # asking again takes no more room
        return {name: self.calls.reference(share(value, caller.principal, caller.name)) for name, value in named.items()}

    async def _state_dict(
        self, caller: PeerIdentity, ref: RemoteRef, number: bytes, capacity: tuple[int, int, int]
    ) -> tuple[None, list[Chunk], bool]:
        state = self._module(caller, ref).state_dict()
        items = [(name, _plain(value)) for name, value in state.items()]
        return None, *self.transfers.send(caller, ref, items, number, capacity)

    async def _load_state_dict(self, caller: PeerIdentity, ref: RemoteRef, number: bytes, is_first: bool, chunks: list[Any]) -> bool:
        module = self._module(caller, ref)
        state = dict(join(self.transfers.finish(caller, ref, number, is_first, chunks)))
        try:
            await current_engine().offload(functools.partial(module.load_state_dict, state))
        except ArgumentError as error:  # what does not fit is told in further lines, and only the first would cross
            raise type(error)("; ".join(line.strip() for line in str(error).splitlines())) from error
        return True

    async def _train(self, caller: PeerIdentity, ref: RemoteRef, mode: bool) -> bool:
        _check(mode=(mode, bool))
        self._module(caller, ref).train(mode)
        return True

    # ---------------------------------------------------------------- optimizers

    async def _create_optimizer(self, caller: PeerIdentity, name: str, refs: list[RemoteRef], options: dict[str, Any]) -> RemoteRef:
        _check(name=(name, str), refs=(refs, list), options=(options, dict))
        make = OPTIMIZERS.get(name) or self.core.service.find_class(name).cls
        if not hasattr(make, "step") and not hasattr(make, "astep"):
            raise ArgumentTypeError(f"{name} is no optimizer: it has no step(gradients)")
        parameters: list[Any] = []
        for ref in refs:
            value = self._find(caller, ref).value
            if isinstance(value, TensorCore):
                parameters.append(value)
            elif hasattr(value, "parameters"):
                parameters.extend(value.parameters())
            else:
                raise ArgumentTypeError(f"{ref!r} is neither a parameter nor a module")
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        return self.calls.reference(self.table.add(SteppedOptimizer(make(unique, **options), unique), None, caller.principal, caller.name))

    def _optimizer(self, caller: PeerIdentity, ref: RemoteRef) -> SteppedOptimizer:
        value = self._find(caller, ref).value
        if not isinstance(value, SteppedOptimizer):
            raise ArgumentTypeError(f"{ref!r} is no optimizer")
        return value

    async def _step(self, caller: PeerIdentity, ref: RemoteRef, number: int, attempt: int | None = None) -> int:
        _check(number=(number, int))
        stepped = self._optimizer(caller, ref)
        context = current_context()
        if attempt is not None:  # with the gradients that are in ``grad``
            _check(attempt=(attempt, int))
            groups = [group for group in getattr(stepped.optimizer, "param_groups", ()) if isinstance(group, Mapping)]
            self.check_certain(leaves=[getattr(each, "_node", None) for group in groups for each in group.get("params", ())])
            await asyncio.shield(self.core.spawn(stepped.step(number, f"attempt {attempt}".encode(), None), "step"))
            return stepped.taken
        context = self._decided(context)
        context.calls.pop(asyncio.current_task(), None)  # leaving the context no longer ends it
        stepping = self.core.spawn(stepped.step(number, context.key, context.grads), "step")
        await asyncio.shield(stepping)
        return stepped.taken

    def _decided(self, context: Context | None) -> Context:
        """The context, if its gradients here are known to be complete."""
        if context is None:
            raise NoContextError("a distributed optimizer uses the gradients of a context: `await optimizer.step(ctx)`")
        parts = [(key, part) for key, part in context.parts.items() if not part.is_selective]
        undecided = [*context.in_doubt, *(key for key, part in parts if part.transaction.is_prepared or part.is_decided)]
        if undecided:
            raise CommitUnknown(
                f"worker {self.core.name} does not know whether the gradients of context {context.id} are complete: a pass is undecided. Restore "
                "from a checkpoint and run it again in a new context.",
                workers=(self.core.name,),
            )
        return context

    def _with_gradients(self, caller: PeerIdentity, ref: RemoteRef) -> tuple[Any, list[Any], list[Any]]:
        """The gradients of the context, those parameters of an optimizer that have one, and these as arrays."""
        grads = self._decided(current_context()).grads
        owners = [parameter for parameter in self._optimizer(caller, ref).parameters if parameter in grads]
        return grads, owners, [grads[parameter].detach()._data for parameter in owners]

    async def _gradient_sizes(self, caller: PeerIdentity, ref: RemoteRef, norm_type: float) -> list[Any]:
        _check(norm_type=(norm_type, float))
        _, _, arrays = self._with_gradients(caller, ref)
        sizes = await current_engine().offload(lambda: [size_of(array, norm_type) for array in arrays])
        return [make(np.asarray(size) if isinstance(size, np.generic) else size) for size in sizes]

    async def _scale_gradients(self, caller: PeerIdentity, ref: RemoteRef, factor: Any) -> bool:
        if not isinstance(factor, TensorCore) or factor.ndim:
            raise ArgumentTypeError(f"the factor of gradients is a {type(factor).__name__}; expected a Tensor of one element")
        grads, owners, arrays = self._with_gradients(caller, ref)
        clipped = await current_engine().offload(functools.partial(scaled, arrays, factor.detach()._data[()]))
        for parameter, array in zip(owners, clipped, strict=True):
            grads[parameter] = make(array)
        return True

    async def _set_options(self, caller: PeerIdentity, ref: RemoteRef, options: dict[str, Any]) -> bool:
        stepped = self._optimizer(caller, ref)
        unknown = [name for name in options for group in stepped.optimizer.param_groups if name not in group or name == "params"]
        if unknown:
            raise ArgumentError(f"{type(stepped.optimizer).__name__} has no option {unknown[0]!r}")
        async with stepped.lock:
            for group in stepped.optimizer.param_groups:
                group.update(options)
        return True

    async def _optimizer_state(
        self, caller: PeerIdentity, ref: RemoteRef, number: bytes, capacity: tuple[int, int, int]
    ) -> tuple[dict[str, Any], list[Chunk], bool]:
        stepped = self._optimizer(caller, ref)
        async with stepped.lock:
            state = stepped.optimizer.state_dict()
            items = [(name, _plain(value)) for name, value in state["state"].items()]
            head = {"taken": stepped.taken, "groups": _plain(state["param_groups"])}
        return head, *self.transfers.send(caller, ref, flatten(items), number, capacity)

    async def _load_optimizer_state(
        self, caller: PeerIdentity, ref: RemoteRef, number: bytes, is_first: bool, chunks: list[Any], head: dict[str, Any]
    ) -> bool:
        _check(head=(head, dict))
        stepped = self._optimizer(caller, ref)
        values = dict(unflatten(join(self.transfers.finish(caller, ref, number, is_first, chunks))))
        if "groups" not in head or head.get("taken").__class__ is not int:
            raise ArgumentError("load_state_dict: expected what state_dict() of a DistributedOptimizer returned")
        async with stepped.lock:
            stepped.optimizer.load_state_dict({"param_groups": head["groups"], "state": values})
            stepped.restored(head["taken"])
        return True


def _check(**arguments: tuple[Any, type]) -> None:
    """Raise where a peer has sent something else than this library would."""
    for name, (value, expected) in arguments.items():
        if value.__class__ is not expected:
            raise ArgumentTypeError(f"{name} is {type(value).__name__}; expected {expected.__name__}")


def _plain(value: Any) -> Any:
    """Copies of Tensors, and containers of the types that can be sent."""
    if isinstance(value, TensorCore):
        return make(value._data.copy())
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return tuple(_plain(item) for item in value)
    if isinstance(value, Sequence) and not isinstance(value, (str, bytes)):
        return [_plain(item) for item in value]
    return value
