"""OptimizerServer: the optimizers that a worker holds for others, and the library's own functions that reach them.

Note [Optimizer steps]
    A step of an optimizer over several workers is a transaction in one phase: a request to take it says that it is decided, and a worker has nothing
    to prepare, to ask or to doubt. So it is not atomic over workers, but each takes it at most once: steps are numbered, and a request that arrives
    a second time is answered without another step. One that leaves a gap is refused, because this worker has missed a step and has to be restored.
    So is one with a number that was taken with the gradients of another context: its sender never heard of that step, so other workers may not have
    taken it. A step that has begun is carried out to its end, even if the request is cancelled or the context ends. One that fails before it has
    updated a parameter may be asked for again; after one that fails midway none is taken before a restore.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.distributed.autograd.context import Context
from aiograd.distributed.calls import Calls
from aiograd.distributed.messages.library import (
    CreateOptimizer,
    GradientSizes,
    LoadOptimizer,
    ReadOptimizer,
    ScaleGradients,
    SetOptions,
    StatePart,
    StepOptimizer,
)
from aiograd.distributed.objects.object_server import ObjectServer, plain
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.rpc.identity import PeerIdentity
from aiograd.distributed.scope import current_context
from aiograd.distributed.worker_core import WorkerCore
from aiograd.engine.run import current_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, CommitUnknown, DistributedError, NoContextError
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.norms import scaled, size_of

#: optimizers that may be made on request, by name
OPTIMIZERS: dict[str, Callable[..., Any]] = {}


def register_optimizers(*classes: type[Any]) -> None:
    """Let `DistributedOptimizer` make these on other workers.

    They take parameters and options, have ``step(gradients)`` (or ``async def astep(gradients)``, where a step takes long) and, for
    checkpoints, ``state_dict`` and ``load_state_dict``, like the optimizers of ``ag.optim``. A class that a worker's service exposes needs this not.

    Args:
        *classes: the classes, known by their names.
    """
    for cls in classes:
        OPTIMIZERS[cls.__name__] = cls


class SteppedOptimizer:
    """An optimizer of one worker's parameters; another worker requests its steps.

    Args:
        optimizer: the optimizer.
        parameters: its parameters.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any] = ()) -> None:
        self.optimizer = optimizer
        self.parameters = parameters
        #: number of the last step that was taken, and the context of its gradients; None after a restore
        self.taken = 0
        self._key: bytes | None = None
        #: a step has failed after it had updated some parameters
        self._is_torn = False
        self.lock = asyncio.Lock()

    def restored(self, taken: int) -> None:
        """Take note of another state.

        Args:
            taken: number of the last step in it.
        """
        self.taken, self._key, self._is_torn = taken, None, False

    async def step(self, number: int, key: bytes, grads: Mapping[Any, Any] | None) -> None:
        """Take a step, unless it was taken before; see Note [Optimizer steps].

        Args:
            number: of the step.
            key: of the context of its gradients.
            grads: by parameter; None: the gradients in ``grad``, which are cleared then.

        Raises:
            DistributedError: another step is due, or one has failed midway.
        """
        async with self.lock:
            if self._is_torn:
                raise DistributedError(
                    f"step {number} of an optimizer whose step {self.taken + 1} has failed when some parameters were updated: they would be updated "
                    "twice. Restore all workers from a checkpoint."
                )
            if (number, key) == (self.taken, self._key):
                return
            if number != self.taken + 1:
                other = ", with the gradients of another context: its confirmation must have been lost"
                why = ": this worker has missed one" if number > self.taken else other
                raise DistributedError(f"step {number} of an optimizer that has taken {self.taken}{why}. Restore all workers from a checkpoint.")
            await self._apply(grads)
            self.taken, self._key = number, key

    async def _apply(self, grads: Mapping[Any, Any] | None) -> None:
        before = [each.version for each in self.parameters]
        try:
            if hasattr(self.optimizer, "astep"):
                await self.optimizer.astep(grads)
            else:
                await current_engine().offload(functools.partial(self.optimizer.step, grads))
        except BaseException:
            ahead = getattr(self.optimizer, "_counted_ahead", 0)
            self._is_torn = any(each.version > version + ahead for each, version in zip(self.parameters, before, strict=True))
            raise
        if grads is None and hasattr(self.optimizer, "zero_grad"):
            self.optimizer.zero_grad()


class OptimizerServer:
    """The optimizers of one worker.

    Args:
        core: the worker.
        calls: the `Calls` of the worker.
        objects: the objects of the worker.
    """

    def __init__(self, core: WorkerCore, calls: Calls, objects: ObjectServer) -> None:
        self.core = core
        self.calls = calls
        self.objects = objects
        calls.register(
            {
                CreateOptimizer: self._create,
                StepOptimizer: self._step,
                GradientSizes: self._gradient_sizes,
                ScaleGradients: self._scale_gradients,
                SetOptions: self._set_options,
                ReadOptimizer: self._read,
                LoadOptimizer: self._load,
            }
        )

    async def _create(self, caller: PeerIdentity, message: CreateOptimizer) -> RemoteRef:
        name = message.class_name
        make = OPTIMIZERS.get(name) or self.core.service.find_class(name).cls
        if not hasattr(make, "step") and not hasattr(make, "astep"):
            raise ArgumentTypeError(f"{name} is no optimizer: it has no step(gradients)")
        parameters: list[Any] = []
        for ref in message.refs:
            value = self.objects.find(caller, ref).value
            if isinstance(value, TensorCore):
                parameters.append(value)
            elif hasattr(value, "parameters"):
                parameters.extend(value.parameters())
            else:
                raise ArgumentTypeError(f"{ref!r} is neither a parameter nor a module")
        unique = list({id(parameter): parameter for parameter in parameters}.values())
        stepped = SteppedOptimizer(make(unique, **message.options), unique)
        return self.calls.reference(self.objects.table.add(stepped, None, caller.principal, caller.name))

    def _optimizer(self, caller: PeerIdentity, ref: RemoteRef) -> SteppedOptimizer:
        value = self.objects.find(caller, ref).value
        if not isinstance(value, SteppedOptimizer):
            raise ArgumentTypeError(f"{ref!r} is no optimizer")
        return value

    async def _step(self, caller: PeerIdentity, message: StepOptimizer) -> int:
        number, attempt = message.number, message.attempt
        stepped = self._optimizer(caller, message.ref)
        context = current_context()
        if attempt is not None:  # with the gradients that are in ``grad``
            groups = [group for group in getattr(stepped.optimizer, "param_groups", ()) if isinstance(group, Mapping)]
            self.objects.check_certain(leaves=[getattr(each, "_node", None) for group in groups for each in group.get("params", ())])
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
        participants = [(key, each) for key, each in context.participants.items() if not each.is_selective]
        undecided = [*context.in_doubt, *(key for key, each in participants if each.transaction.is_prepared or each.is_decided)]
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

    async def _gradient_sizes(self, caller: PeerIdentity, message: GradientSizes) -> list[Any]:
        _, _, arrays = self._with_gradients(caller, message.ref)
        sizes = await current_engine().offload(lambda: [size_of(array, message.norm_type) for array in arrays])
        return [make(np.asarray(size) if isinstance(size, np.generic) else size) for size in sizes]

    async def _scale_gradients(self, caller: PeerIdentity, message: ScaleGradients) -> bool:
        factor = message.factor
        if not isinstance(factor, TensorCore) or factor.ndim:
            raise ArgumentTypeError(f"the factor of gradients is a {type(factor).__name__}; expected a Tensor of one element")
        grads, owners, arrays = self._with_gradients(caller, message.ref)
        clipped = await current_engine().offload(functools.partial(scaled, arrays, factor.detach()._data[()]))
        for parameter, array in zip(owners, clipped, strict=True):
            grads[parameter] = make(array)
        return True

    async def _set_options(self, caller: PeerIdentity, message: SetOptions) -> bool:
        stepped, options = self._optimizer(caller, message.ref), message.options
        unknown = [name for name in options for group in stepped.optimizer.param_groups if name not in group or name == "params"]
        if unknown:
            raise ArgumentError(f"{type(stepped.optimizer).__name__} has no option {unknown[0]!r}")
        async with stepped.lock:
            for group in stepped.optimizer.param_groups:
                group.update(options)
        return True

    async def _read(self, caller: PeerIdentity, message: ReadOptimizer) -> StatePart:
        stepped = self._optimizer(caller, message.ref)
        async with stepped.lock:
            state = stepped.optimizer.state_dict()
            values = {name: plain(value) for name, value in state["state"].items()}
            head = {"taken": stepped.taken, "groups": plain(state["param_groups"])}
        return self.objects.streams.send(caller, message, head, values)

    async def _load(self, caller: PeerIdentity, message: LoadOptimizer) -> bool:
        stepped, head = self._optimizer(caller, message.ref), message.head
        values = self.objects.streams.finish(caller, message)
        if "groups" not in head or head.get("taken").__class__ is not int:
            raise ArgumentError("load_state_dict: expected what state_dict() of a DistributedOptimizer returned")
        async with stepped.lock:
            stepped.optimizer.load_state_dict({"param_groups": head["groups"], "state": values})
            stepped.restored(head["taken"])
            if head.get("forgets") is True and hasattr(stepped.optimizer, "zero_grad"):
                stepped.optimizer.zero_grad()
        return True
