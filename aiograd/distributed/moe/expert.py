"""RemoteExpert: an expert on another worker, called like a function; and what makes a service of experts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.array_functions import public as af
from aiograd.distributed.moe.runtime.backend import ExpertBackend
from aiograd.distributed.moe.uid import parse_uid
from aiograd.distributed.service import Service
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, ArgumentTypeError, NotExposedError
from aiograd.functional.function import Function, once_differentiable
from aiograd.serving.batcher import TaskPool
from aiograd.tensors.core import TensorCore, make


class RemoteExpert:
    """An expert that another worker serves: ``y = await expert(x)``.

    Backward asks it for the gradients of its inputs, also where no input needs one, since that is how it learns: it takes an optimizer step of
    its own for every backward, which no failure elsewhere takes back. May be used with plain ``loss.backward()``; no context is needed.

    Args:
        worker: this worker.
        peer: name of the worker that serves the expert.
        uid: its name, such as ``"ffn.3.14"``.
        timeout: seconds per request.

    Raises:
        ArgumentTypeError: `worker` is none. ArgumentError: such a uid.

    >>> expert = dist.moe.RemoteExpert(driver, "left", "ffn.0")
    >>> (await expert(ag.ones(1, 2))).detach()
    tensor([[2., 2.]])
    """

    def __init__(self, worker: Worker, peer: str, uid: str, *, timeout: float | None = None) -> None:
        if not isinstance(worker, Worker):
            raise ArgumentTypeError(f"RemoteExpert: expected this process's dist.Worker, found {type(worker).__name__}")
        self.worker = worker
        self.peer = peer
        self.uid: str = str(parse_uid(uid))
        self.timeout = timeout

    def __repr__(self) -> str:
        return f"RemoteExpert({self.uid} on {self.peer})"

    async def __call__(self, *inputs: Any) -> Any:
        """The expert's outputs. Cancelling cancels the request.

        Raises:
            ArgumentTypeError: an input is no Tensor. NotExposedError: there is no such expert. As `Worker.call`.
        """
        for i, tensor in enumerate(inputs):
            if not isinstance(tensor, TensorCore):
                raise ArgumentTypeError(f"{self!r}: input {i} is a {type(tensor).__name__}; expected a Tensor")
        return await _RemoteCall.apply(self, make(np.zeros((), np.float32)).requires_grad_(), *inputs)


class _RemoteCall(Function):
    """The expert's node; its second argument keeps it in the graph where no input needs a gradient."""

    @staticmethod
    async def forward(ctx: Any, expert: RemoteExpert, anchor: Any, *inputs: Any) -> Any:
        """Ask the expert."""
        ctx.expert = expert
        ctx.save_for_backward(*inputs)
        outputs = await expert.worker.call(expert.peer, "moe.forward", expert.uid, [tensor.detach() for tensor in inputs], timeout=expert.timeout)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    @staticmethod
    @once_differentiable
    async def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:
        """Ask the expert for the gradients of its inputs."""
        expert = ctx.expert
        inputs = [tensor.detach() for tensor in ctx.saved_tensors]
        found = await expert.worker.call(expert.peer, "moe.backward", expert.uid, inputs, list(grads), timeout=expert.timeout)
        return None, None, *found


class _Pools:
    """One expert and its two pools."""

    def __init__(self, backend: ExpertBackend, max_batch_size: int) -> None:
        self.backend = backend
        self.forward = TaskPool(backend.forward, max_batch_size)
        self.backward: dict[int, TaskPool] = {}
        self._size = max_batch_size

    def backward_pool(self, count: int) -> TaskPool:
        """The pool for requests of `count` inputs followed by their gradients."""
        pool = self.backward.get(count)
        if pool is None:

            async def run(*rows: Any) -> tuple[Any, ...]:
                found = await self.backend.backward(rows[:count], rows[count:])
                return tuple(make(np.zeros((rows[i].shape[0], 0), np.float32)) if g is None else g for i, g in enumerate(found))

            pool = self.backward[count] = TaskPool(run, self._size)
        return pool


async def _in_batches(pool: TaskPool, columns: Sequence[Any]) -> list[Any]:
    """The outputs of a pool for these rows, submitted in tasks of at most the pool's batch size."""
    rows = max((column.shape[0] for column in columns if isinstance(column, TensorCore) and column.ndim), default=0)
    if rows <= pool.max_batch_size:
        return _as_list(await pool.submit(tuple(columns)))
    if not all(isinstance(column, TensorCore) and column.ndim and column.shape[0] == rows for column in columns):
        raise ArgumentError(f"a request of {rows} rows to an expert: expected Tensors with the same number of rows")
    size = pool.max_batch_size
    parts = [_as_list(await pool.submit(tuple(column[start : start + size] for column in columns))) for start in range(0, rows, size)]
    return [af.concat(list(outputs), axis=0) for outputs in zip(*parts, strict=True)]


def _as_list(result: Any) -> list[Any]:
    return list(result) if isinstance(result, tuple) else [result]


def serve_experts(service: Service, experts: Mapping[str, ExpertBackend], *, max_batch_size: int = 4096) -> None:
    """Expose experts: requests of several callers run in one batch where they meet.

    An expert takes an optimizer step per batch of gradients. A request of more rows than a batch holds runs as several batches, one after the
    other; if one of them fails, so does the request, and the steps of those before it stay taken.

    Args:
        service: of the worker.
        experts: by uid.
        max_batch_size: most rows per batch.

    Raises:
        ArgumentError: a uid is malformed, or the service has experts already. ArgumentTypeError: no dict of ExpertBackends.
        NotExposedError: raised in a call of an expert that is not served.
    """
    if not isinstance(experts, Mapping) or not all(isinstance(backend, ExpertBackend) for backend in experts.values()):
        raise ArgumentTypeError(f"serve_experts: expected a dict of ExpertBackends by uid, found {type(experts).__name__}")
    pools = {str(parse_uid(uid)): _Pools(backend, max_batch_size) for uid, backend in experts.items()}
    if not pools:
        raise ArgumentError("serve_experts: got no experts")

    def find(uid: str) -> _Pools:
        if uid not in pools:
            raise NotExposedError(f"no expert {uid[:80]!r} is served here")
        return pools[uid]

    async def forward(uid: str, inputs: list) -> list:  # type: ignore[type-arg]
        return await _in_batches(find(uid).forward, inputs)

    async def backward(uid: str, inputs: list, grads: list) -> list:  # type: ignore[type-arg]
        found = await _in_batches(find(uid).backward_pool(len(inputs)), [*inputs, *grads])
        return [None if tensor.dtype.kind not in "fc" else g for tensor, g in zip(inputs, found, strict=True)]

    async def names() -> list:  # type: ignore[type-arg]
        return sorted(pools)

    service.function("moe.forward")(forward)
    service.function("moe.backward")(backward)
    service.function("moe.names")(names)


async def find_experts(worker: Worker, peers: Any, *, timeout: float | None = None) -> dict[str, RemoteExpert]:
    """The experts that some workers serve, by uid.

    Args:
        peers: names of workers.
        worker: this process's worker.
        timeout: seconds that each call of an expert may take later; None: the worker's default.

    Returns:
        The experts by uid.

    Raises:
        As `Worker.call`. ArgumentTypeError: `peers` is no list.

    Cancelling changes nothing.

    >>> await dist.moe.find_experts(driver, ["left"])
    {'ffn.0': RemoteExpert(ffn.0 on left), 'ffn.1': RemoteExpert(ffn.1 on left)}
    """
    if isinstance(peers, str) or not isinstance(peers, Iterable):
        raise ArgumentTypeError(f"find_experts: expected a list of names of workers, found {type(peers).__name__}")
    found: dict[str, RemoteExpert] = {}
    for peer in peers:
        for uid in await worker.call(peer, "moe.names"):
            found[uid] = RemoteExpert(worker, peer, uid, timeout=timeout)
    return found
