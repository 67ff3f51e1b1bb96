"""DistributedOptimizer: one optimizer per worker that has parameters, stepped together with the gradients of one context."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from typing import Any

from aiograd.distributed.module import RemoteModule
from aiograd.distributed.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, ArgumentTypeError, CommitUnknown, StepError
from aiograd.tensors.core import TensorCore

logger = logging.getLogger("aiograd.distributed")


class DistributedOptimizer:
    """Updates parameters that live on several workers, where they live.

    ::

        optimizer = dist.DistributedOptimizer(worker, ag.optim.Adam, [stage0, stage1, head], lr=1e-3)
        async with worker.context() as ctx:
            loss = ...
            await ctx.backward(loss)
            await optimizer.step(ctx)

    A step is numbered, and taken at most once on each worker however often it is asked for.

    Args:
        worker: this worker.
        optimizer: class of the optimizer: one of ``ag.optim``, or one that the other workers' services expose.
        refs: what to update: RemoteRefs to parameters or modules, RemoteModules, and parameters or modules of this worker.
        options: of the optimizer, such as ``lr``; the same on every worker.

    Raises:
        ArgumentError, ArgumentTypeError: nothing to update, or not of these kinds.
    """

    def __init__(self, worker: Worker, optimizer: Any, refs: Iterable[Any], **options: Any) -> None:
        self.worker = worker
        self.options = options
        self._class = getattr(optimizer, "__name__", optimizer)
        if not isinstance(self._class, str):
            raise ArgumentTypeError(f"DistributedOptimizer: expected a class such as ag.optim.SGD, found {type(optimizer).__name__}")
        by_owner: dict[str, list[RemoteRef]] = {}
        for item in refs:
            ref = self._reference(item)
            by_owner.setdefault(ref.owner, []).append(ref)
        if not by_owner:
            raise ArgumentError("DistributedOptimizer: got an empty list of parameters")
        self._refs = by_owner
        self._optimizers: dict[str, RemoteRef] = {}
        self._steps = 0
        self._lock = asyncio.Lock()

    def _reference(self, item: Any) -> RemoteRef:
        if isinstance(item, RemoteRef):
            return item
        if isinstance(item, RemoteModule):
            return item.ref
        if isinstance(item, TensorCore) or hasattr(item, "parameters"):
            return self.worker.refer(item)
        raise ArgumentTypeError(f"DistributedOptimizer: expected RemoteRefs, RemoteModules, parameters or modules, found {type(item).__name__}")

    @property
    def steps(self) -> int:
        """Number of the last step."""
        return self._steps

    async def _prepare(self) -> None:
        missing = [owner for owner in self._refs if owner not in self._optimizers]
        outcomes = await asyncio.gather(*map(self._make, missing), return_exceptions=True)
        for error in outcomes:
            if error is not None:
                raise error

    async def _make(self, owner: str) -> None:
        self._optimizers[owner] = await self.worker.call(owner, "aiograd.optimizer.create", self._class, self._refs[owner], self.options)

    async def step(self, ctx: Any, *, timeout: float | None = None) -> None:
        """Update every parameter that has a gradient in `ctx`, on every worker.

        Steps of one optimizer are taken one after the other. Cancelling one that waits for its turn withdraws it. One that has begun is
        carried out on all workers: cancelling only stops the waiting, and the next step waits for it.

        Args:
            ctx: the context whose gradients to use, open on this worker.
            timeout: seconds for the whole step.

        Raises:
            StepError: some workers have not taken the step or could not confirm it; says which have. Restore all of them from one
            checkpoint (`load_state_dict`) before going on. ContextReleasedError, ContextError: the context cannot be used. CommitUnknown: its
            gradients may not be complete.
        """
        ctx.check_open()
        if ctx.in_doubt:
            raise CommitUnknown(
                f"a step with the gradients of context {ctx.id}: a pass of it is not known to be committed on every worker, so they may not be complete. "
                "Restore from a checkpoint and run it again in a new context."
            )
        await self._lock.acquire()
        taking = asyncio.get_running_loop().create_task(self._step(ctx, timeout), name=f"aiograd:{self.worker.name}:optimizer step")
        taking.add_done_callback(self._taken)
        await asyncio.shield(taking)

    def _taken(self, taking: asyncio.Task[None]) -> None:
        self._lock.release()
        if not taking.cancelled() and (error := taking.exception()) is not None:  # who asked for it may have gone
            logger.info("worker %s: %s", self.worker.name, error)

    async def _step(self, ctx: Any, timeout: float | None) -> None:
        with self.worker.within(ctx):
            await self._prepare()
            self._steps += 1
            number = self._steps
            owners = list(self._optimizers)
            results = await asyncio.gather(
                *(self.worker.call(owner, "aiograd.optimizer.step", ref, number, timeout=timeout) for owner, ref in self._optimizers.items()),
                return_exceptions=True,
            )
        failures = {owner: result for owner, result in zip(owners, results, strict=True) if isinstance(result, BaseException)}
        if not failures:
            return
        first = next(iter(failures.values()))
        applied = tuple(owner for owner in owners if owner not in failures)
        if not applied:
            self._steps -= 1  # nobody has taken it, as far as is known: it may be tried again under its number
        if not isinstance(first, Exception):
            raise first
        raise StepError(
            f"optimizer step {number} was taken on {', '.join(applied) or 'no worker'} and not confirmed by {', '.join(failures)} ({first})",
            step=number,
            applied=applied,
            failed=tuple(failures),
        ) from first

    async def set_options(self, **options: Any) -> None:
        """Change options on every worker, for the steps to come: ``await optimizer.set_options(lr=1e-4)``.

        Cancelled or failed midway, some workers may have the new options and others the old ones.
        """
        async with self._lock:
            await self._prepare()
            await asyncio.gather(
                *(self.worker.call(owner, "aiograd.optimizer.set_options", ref, options) for owner, ref in self._optimizers.items())
            )
            self.options.update(options)

    async def delete(self) -> None:
        """Let every worker forget its optimizer; a later step begins with new ones."""
        async with self._lock:
            optimizers, self._optimizers, self._steps = self._optimizers, {}, 0
            await asyncio.gather(*(ref.delete() for ref in optimizers.values()))

    async def state_dict(self) -> dict[str, Any]:
        """The number of the last step, and the state of every worker's optimizer, by worker. Cancelling leaves everything as it is."""
        async with self._lock:
            await self._prepare()
            states = await asyncio.gather(*(self.worker.call(owner, "aiograd.optimizer.state_dict", ref) for owner, ref in self._optimizers.items()))
            return {"steps": self._steps, "workers": dict(zip(self._optimizers, states, strict=True))}

    async def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a `state_dict`, on every worker.

        Cancelled or failed midway, some workers may have been restored and others not: load again before stepping.

        Raises:
            ArgumentError: it is of other workers.
        """
        states = state.get("workers") if isinstance(state, Mapping) else None
        if not isinstance(states, Mapping) or set(states) != set(self._refs) or not isinstance(state.get("steps"), int):
            raise ArgumentError(f"load_state_dict: expected a state of the workers {sorted(self._refs)}, as state_dict() returned it")
        async with self._lock:
            await self._prepare()
            await asyncio.gather(
                *(self.worker.call(owner, "aiograd.optimizer.load_state_dict", ref, states[owner]) for owner, ref in self._optimizers.items())
            )
            self._steps = state["steps"]
