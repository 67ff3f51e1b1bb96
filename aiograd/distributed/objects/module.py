"""RemoteModule: a module that lives on another worker, called as if it were here."""

from __future__ import annotations

from collections.abc import Coroutine, Mapping
from typing import Any, Protocol

from aiograd.distributed.messages.library import LoadModule, ModuleParameters, ReadModule, TrainModule, ask_library
from aiograd.distributed.objects.parameter_stream import checked_state, fetch, store
from aiograd.distributed.objects.references import RemoteRef
from aiograd.errors import ArgumentTypeError


class RemoteCaller(Protocol):
    """Calls functions of other workers: a `Worker`, which makes RemoteModules and so cannot be imported here."""

    def call(self, peer: str, function: str, /, *args: Any, timeout: float | None = None, **kwargs: Any) -> Coroutine[Any, Any, Any]:
        """See `Worker.call`."""


class RemoteModule:
    """A module on the worker `peer`: ``y = await module(x)``; inside a context gradients flow through it.

    ::

        model = await worker.remote_module("left", "Model", 64)
        optimizer = dist.DistributedOptimizer(worker, ag.optim.Adam, [model], lr=1e-3)
        async with worker.context() as ctx:
            await ctx.backward((await model(x)).sum())
            await optimizer.step(ctx)

    ``await worker.remote_module(peer, cls, ...)`` is short for ``RemoteModule(worker, peer, await worker.remote(peer, cls, ...))``. Each awaited
    method takes a `timeout` in seconds and raises errors like `Worker.call`, and `ReferenceLostError` if the module is gone: deleted, or its worker
    restarted.

    Args:
        worker: this worker.
        peer: name of the worker that has the module.
        ref: the module; what ``await worker.remote(peer, "MyModule", ...)`` gave. Its class is one that the peer's service exposes.

    Raises:
        ArgumentTypeError: `ref` is no reference, or one to an object of another worker.

    >>> await model(ag.ones(1, 2))
    tensor([[2.]])
    """

    def __init__(self, worker: RemoteCaller, peer: str, ref: RemoteRef) -> None:
        if not isinstance(ref, RemoteRef):
            raise ArgumentTypeError(f"RemoteModule: expected what `await worker.remote(peer, cls, ...)` returns, found {type(ref).__name__}")
        if ref.owner != peer:
            raise ArgumentTypeError(f"RemoteModule: the object lives on {ref.owner}, not on {peer}")
        self.worker = worker
        self.peer = peer
        self.ref = ref

    def __repr__(self) -> str:
        return f"RemoteModule({self.ref.type_name} on {self.peer})"

    async def __call__(self, *args: Any, timeout: float | None = None, **kwargs: Any) -> Any:
        """Run the module on its worker. Cancelling cancels it there. Raises as `Worker.call`.

        Args:
            *args: the inputs, which can be sent.
            timeout: seconds; None: the worker's default.
            **kwargs: inputs by name.

        Returns:
            The result of the module's forward.

        >>> await model.forward(ag.ones(1, 2))
        tensor([[2.]])
        """
        return await self.ref.call("__call__", *args, timeout=timeout, **kwargs)

    forward = __call__

    async def parameters(self, *, timeout: float | None = None) -> list[RemoteRef]:
        """References to the module's parameters, for a `DistributedOptimizer` of some of them. Cancelling changes nothing.

        Args:
            timeout: seconds.

        Returns:
            The references.

        >>> [ref.owner for ref in await model.parameters()]
        ['left']
        """
        return list((await self.named_parameters(timeout=timeout)).values())

    async def named_parameters(self, *, timeout: float | None = None) -> dict[str, RemoteRef]:
        """References to the module's parameters by name. Cancelling changes nothing.

        Args:
            timeout: seconds.

        Returns:
            The references by name.

        >>> list(await model.named_parameters())
        ['weight']
        """
        named: dict[str, RemoteRef] = await ask_library(self.worker, self.peer, ModuleParameters(self.ref), timeout)
        return named

    async def state_dict(self, *, timeout: float | None = None) -> dict[str, Any]:
        """A copy, in this process, of the module's parameters and buffers by name: a checkpoint, of one moment. Cancelling changes nothing.

        One that is too large for a message (`Limits.message_bytes`, `Limits.tensors`) comes in several; `timeout` is for all of them.

        Args:
            timeout: seconds.

        Returns:
            Tensors by name.

        >>> await model.state_dict()
        {'weight': tensor([[1., 1.]])}
        """
        _, state = await fetch(self.worker, self.ref, ReadModule, timeout)
        return state

    async def load_state_dict(self, state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Put the module into a state that was read before; either all of it is loaded or nothing changes.

        Cancelled, or where the answer is lost, it may have been loaded. It goes in several messages where it is too large for one.

        Args:
            state: Tensors or arrays by name.
            timeout: seconds, for all of it.

        Raises:
            RemoteError: names or shapes do not fit. ArgumentTypeError: it is no dict.

        >>> await model.load_state_dict({"weight": ag.tensor([[1.0, 2.0]])})
        >>> await model(ag.ones(1, 2))
        tensor([[3.]])
        """
        checked_state(state)
        await store(self.worker, self.ref, LoadModule, state, timeout)

    async def train(self, mode: bool = True, *, timeout: float | None = None) -> RemoteModule:
        """Switch the module to training, or evaluation; returns the module. Cancelled, it may have been switched.

        Args:
            mode: True for training.
            timeout: seconds.

        Returns:
            The module itself.

        >>> await model.train()
        RemoteModule(Linear on left)
        """
        await ask_library(self.worker, self.peer, TrainModule(self.ref, mode), timeout)
        return self

    async def eval(self, *, timeout: float | None = None) -> RemoteModule:
        """Switch the module to evaluation; as `train`.

        Args:
            timeout: seconds.

        Returns:
            The module itself.

        Cancelled, it may have been switched.

        >>> await model.eval()
        RemoteModule(Linear on left)
        """
        return await self.train(False, timeout=timeout)

    async def delete(self, *, timeout: float | None = None) -> None:
        """Let the worker forget the module. Deleting it again does nothing; cancelled, it may have been deleted.

        Args:
            timeout: seconds.

        >>> await model.delete()
        """
        await self.ref.delete(timeout=timeout)
