"""DistributedOptimizer: one optimizer per worker that has parameters, stepped together with the gradients of one context."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import math
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from itertools import count
from typing import Any

import numpy as np

from aiograd.coordination.message_form import WireMessage
from aiograd.distributed.messages.library import CreateOptimizer, GradientSizes, LoadOptimizer, ReadOptimizer, ScaleGradients, SetOptions, ask_library
from aiograd.distributed.objects.module import RemoteModule
from aiograd.distributed.objects.optimizer_step import OptimizerStep, StepNumbers, check_certain
from aiograd.distributed.objects.parameter_stream import fetch, store
from aiograd.distributed.objects.references import RemoteRef
from aiograd.distributed.worker import Worker
from aiograd.errors import ArgumentError, ArgumentTypeError, CommitUnknown, DistributedError, GradientError, NoContextError
from aiograd.running import tracing
from aiograd.running.log_fields import structured_logger
from aiograd.tensors.core import TensorCore, make
from aiograd.tensors.norms import check_limits, factor_for, norm_of, sum_of

logger = structured_logger("aiograd.distributed")

#: stands for the worker in a context's notes of doubt that is not about a pass
CLIPPING = ""
_clippings = count()
_UPDATED = "RemoteRefs, RemoteModules, parameters or modules"


class DistributedOptimizer:
    """Updates parameters that live on several workers, where they live.

    A pipeline leaves the gradients in ``grad`` of each worker's parameters instead: ``await pipe.step(x, target)``, ``await optimizer.step()``.

    A step is numbered, and taken at most once on each worker however often it is asked for. After a `StepError` the same step, in its context, ends
    on the workers that lack it; any other one is refused until all workers agree again.

    Args:
        worker: this worker.
        optimizer: class of the optimizer: one of ``ag.optim``, or one that the other workers' services expose.
        refs: the parameters to update: RemoteRefs to parameters or modules, RemoteModules, and parameters or modules of this worker.
        options: of the optimizer, such as ``lr``; the same on every worker.

    Raises:
        ArgumentError, ArgumentTypeError: nothing to update, or not of these kinds.

    >>> async with driver.context() as ctx:
    ...     await ctx.backward((await model(ag.ones(1, 2))).sum())
    ...     await optimizer.step(ctx)
    >>> await model.state_dict()
    {'weight': tensor([[0.9, 0.9]])}
    """

    def __init__(self, worker: Worker, optimizer: Any, refs: Iterable[Any], **options: Any) -> None:
        self.worker = worker
        self.options = options
        self._class = getattr(optimizer, "__name__", optimizer)
        if not isinstance(self._class, str):
            raise ArgumentTypeError(f"DistributedOptimizer: expected a class such as ag.optim.SGD, found {type(optimizer).__name__}")
        #: references that this object has made, to objects of this worker
        self._own: list[RemoteRef] = []
        self._refs = self._by_owner(refs)
        self._optimizers: dict[str, RemoteRef] = {}
        self._steps = StepNumbers()
        #: name of the method that has not restored all workers; "": there is none
        self._half_restored = ""
        self._lock = asyncio.Lock()

    def _by_owner(self, refs: Iterable[Any]) -> dict[str, list[RemoteRef]]:
        if isinstance(refs, (str, bytes, TensorCore)) or not isinstance(refs, Iterable):
            raise ArgumentTypeError(f"DistributedOptimizer: expected a list of {_UPDATED}, found {type(refs).__name__}")
        items = list(refs)
        for item in items:
            if not isinstance(item, (RemoteRef, RemoteModule, TensorCore)) and not hasattr(item, "parameters"):
                raise ArgumentTypeError(f"DistributedOptimizer: expected {_UPDATED}, found {type(item).__name__}")
        if not items:
            raise ArgumentError("DistributedOptimizer: got an empty list of parameters")
        by_owner: dict[str, list[RemoteRef]] = {}
        for item in items:
            ref = self._reference(item)
            by_owner.setdefault(ref.owner, []).append(ref)
        return by_owner

    def _reference(self, item: Any) -> RemoteRef:
        if isinstance(item, RemoteRef):
            return item
        if isinstance(item, RemoteModule):
            return item.ref
        ref = self.worker.refer(item)
        self._own.append(ref)
        return ref

    @property
    def steps(self) -> int:
        """Number of the last step."""
        return self._steps.last

    async def _prepare(self, restoring: str = "") -> None:
        if self._half_restored and restoring != self._half_restored:
            text = f"DistributedOptimizer: {self._half_restored}() did not get to its end, so some workers lack its state; call it again"
            raise DistributedError(text)
        await self._make_missing(None)

    async def _make_missing(self, timeout: float | None) -> None:
        missing = [owner for owner in self._refs if owner not in self._optimizers]
        for error in await asyncio.gather(*(self._make(owner, timeout) for owner in missing), return_exceptions=True):
            if error is not None:
                raise error

    async def _make(self, owner: str, timeout: float | None) -> None:
        message = CreateOptimizer(self._class, self._refs[owner], self.options)
        self._optimizers[owner] = await ask_library(self.worker, owner, message, timeout)

    async def step(self, ctx: Any = None, *, timeout: float | None = None) -> None:
        """Update every parameter that has a gradient in `ctx`, on every worker.

        Steps of one optimizer are taken one after the other. Cancelling one that waits for its turn withdraws it. One that has begun is
        carried out on all workers: cancelling only stops the waiting, and the next step waits for it.

        Args:
            ctx: the context with the gradients to use, open on this worker. None: the ``grad`` of the parameters, which are forgotten then.
            timeout: seconds for the whole step.

        Raises:
            StepError: some workers have not taken the step or could not confirm it; says which have. In the same context, before a further pass
            or clipping, it may be asked for again: workers that have taken it do not repeat it. Any other step, `clip_grad_norm_`, `state_dict` and
            `add` raise a StepError, too, until all workers are restored from one checkpoint (`load_state_dict`; `restore`, where one was lost) or
            lost ones are dropped (`remove`). ContextReleasedError,
            ContextError: the context cannot be used. CommitUnknown: its gradients may not be complete, or, without a context, a step of a
            pipeline is in doubt on a worker that has parameters: no worker has taken the step.

        >>> async with driver.context() as ctx:
        ...     await ctx.backward((await model(ag.ones(1, 2))).sum())
        ...     await optimizer.step(ctx)
        >>> optimizer.steps
        1
        """
        if ctx is not None:
            check_certain(ctx)
        with tracing.span("optimizer step", attributes={"aiograd.workers": len(self._refs)}):
            await self._carry_out(self._step(ctx, timeout), "step")

    async def clip_grad_norm_(
        self, ctx: Any, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False, *, timeout: float | None = None
    ) -> Any:
        """Scale the gradients in `ctx` of all parameters, on every worker, so that their norm, taken together, is at most `max_norm`.

        The norm has the bits of `aiograd.optim.clip_grad_norm_` in one process: the sum goes over workers in the order in which the references
        were given, and over the parameters of each in order. No pass of the context may run meanwhile. Cancelled, it is carried out all the
        same, as a step is.

        Args:
            ctx: the context with the gradients to scale, open on this worker.
            max_norm, norm_type, error_if_nonfinite: as of `aiograd.optim.clip_grad_norm_`.
            timeout: seconds for each of: asking for sizes, scaling.

        Returns:
            The norm before scaling, a 0-d Tensor.

        Raises:
            GradientError: the norm is not finite. CommitUnknown: a worker could not confirm to have scaled its gradients, or they were in doubt
            before; steps with this context are refused from then on. With any other error (`ContextReleasedError`, `WorkerLostError`,
            `RemoteError`) nothing has been scaled.
            ArgumentError, ArgumentTypeError: no such norm or limit.
            NoContextError: `ctx` is no context of this worker.

        >>> async with driver.context() as ctx:
        ...     await ctx.backward((await model(ag.ones(1, 2))).sum())
        ...     await optimizer.clip_grad_norm_(ctx, 1.0)
        tensor(1.4142135)
        """
        check_limits("clip_grad_norm_", max_norm, norm_type)
        if ctx is None:
            raise NoContextError("a distributed optimizer scales the gradients of a context: `await optimizer.clip_grad_norm_(ctx, 1.0)`")
        check_certain(ctx)
        return await self._carry_out(self._clip(ctx, float(max_norm), float(norm_type), error_if_nonfinite, timeout), "clipping")

    async def _clip(self, ctx: Any, max_norm: float, norm_type: float, error_if_nonfinite: bool, timeout: float | None) -> Any:
        with self.worker.within(ctx):
            await self._prepare()
            self._steps.check_whole(self._refs, "would scale gradients")
            owners = [owner for owner in self._refs if owner in self._optimizers]
            ask = functools.partial(self._ask, owners, timeout)
            answers = await ask(GradientSizes, norm_type)
            for answer in answers:
                if isinstance(answer, BaseException):
                    raise answer
            sizes = [size._data[()] for answer in answers for size in answer]
            if not sizes:
                return make(np.zeros((), np.float32))
            norm = norm_of(sum_of(sizes, norm_type), norm_type)
            if error_if_nonfinite and not math.isfinite(norm):
                raise GradientError(
                    f"clip_grad_norm_: the norm of order {norm_type} of the gradients is {norm}; pass error_if_nonfinite=False to go on"
                )
            factor = factor_for(norm, max_norm)
            if factor != 1.0:
                self._steps.scaled(ctx)
                answers = await ask(ScaleGradients, make(np.asarray(factor)))
                failed = {owner: answer for owner, answer in zip(owners, answers, strict=True) if isinstance(answer, BaseException)}
                if failed:
                    ctx.in_doubt.add((CLIPPING, next(_clippings)))
                    first = next(iter(failed.values()))
                    raise CommitUnknown(
                        f"clip_grad_norm_: {', '.join(failed)} could not confirm to have scaled the gradients of context {ctx.id} ({first}), and "
                        "others may have. Do not step with them: restore a lost worker from a checkpoint and run the pass again in a new context.",
                        workers=tuple(failed),
                    ) from first
            return make(np.asarray(norm))

    async def _ask(self, owners: Sequence[str], timeout: float | None, request: Callable[[RemoteRef, Any], WireMessage], value: Any) -> list[Any]:
        """The answer of each of these workers, or its error."""
        calls = [ask_library(self.worker, owner, request(self._optimizers[owner], value), timeout) for owner in owners]
        return await asyncio.gather(*calls, return_exceptions=True)

    async def _carry_out(self, work: Coroutine[Any, Any, Any], what: str) -> Any:
        """Carry out work on all workers, after earlier work; once it has begun, cancelling stops the waiting only."""
        try:
            await self._lock.acquire()
        except BaseException:
            work.close()
            raise
        taking = asyncio.get_running_loop().create_task(work, name=f"aiograd:{self.worker.name}:optimizer {what}")
        taking.add_done_callback(self._taken)
        return await asyncio.shield(taking)

    def _taken(self, taking: asyncio.Task[Any]) -> None:
        self._lock.release()
        if not taking.cancelled() and (error := taking.exception()) is not None:  # its caller may have gone
            logger.info("worker %s: %s", self.worker.name, error)

    async def _step(self, ctx: Any, timeout: float | None) -> None:
        with contextlib.nullcontext() if ctx is None else self.worker.within(ctx):
            await self._prepare()
            if ctx is None:
                self.worker._objects.check_certain(owners=self._optimizers)
            number = self._steps.begin(ctx, self._refs)
            step = OptimizerStep(self.worker, self._optimizers, number, None if ctx is not None else self._steps.attempts, timeout)
            try:
                await step.take()
            finally:
                if step.confirmed is not None:
                    self._steps.ended(ctx, step.confirmed, step.failed)

    async def set_options(self, **options: Any) -> None:
        """Change options on every worker, for the steps to come.

        Cancelled or failed midway, some workers may have the new options and others the old ones.

        Args:
            **options: options by name, as of the optimizer's class.

        >>> await optimizer.set_options(lr=1e-4)
        """
        async with self._lock:
            await self._prepare()
            await asyncio.gather(*(ask_library(self.worker, owner, SetOptions(ref, options), None) for owner, ref in self._optimizers.items()))
            self.options.update(options)

    async def delete(self) -> None:
        """Let every worker forget its optimizer; a later step begins with new ones.

        Cancelled or failed midway, some workers may keep theirs until the reference's lease ends.

        >>> await optimizer.delete()
        """
        async with self._lock:
            optimizers, self._optimizers, self._steps = self._optimizers, {}, StepNumbers()
            await asyncio.gather(*(ref.delete() for ref in optimizers.values()))

    async def state_dict(self, *, timeout: float | None = None) -> dict[str, Any]:
        """The number of the last step, and the state of every worker's optimizer, by worker. Cancelling leaves everything as it is.

        Args:
            timeout: seconds, as of `Worker.call`.

        Returns:
            A dict for `restore` and `load_state_dict`.

        >>> list(await optimizer.state_dict())
        ['steps', 'workers']
        """
        async with self._lock:
            await self._prepare()
            self._steps.check_whole(self._refs, "would read states of different steps")
            states = await asyncio.gather(*(self._state_of(ref, timeout) for ref in self._optimizers.values()))
            return {"steps": self._steps.last, "workers": dict(zip(self._optimizers, states, strict=True))}

    async def _state_of(self, ref: RemoteRef, timeout: float | None) -> dict[str, Any]:
        head, state = await fetch(self.worker, ref, ReadOptimizer, timeout)
        return {**head, "state": [[number, values] for number, values in state.items()]}

    async def load_state_dict(self, state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Continue from a `state_dict`, on every worker. After a step without a context that failed, its gradients in ``grad`` are forgotten.

        Cancelled or failed midway, some workers may have been restored and others not: load again before stepping.

        Args:
            state: the result of `state_dict`.
            timeout: seconds, as of `Worker.call`.

        Raises:
            ArgumentError: it is of other workers.

        >>> await optimizer.load_state_dict(await optimizer.state_dict())
        """
        states = _checked(state, self._refs)
        async with self._lock:
            await self._prepare("load_state_dict")
            self._half_restored = "load_state_dict"
            await self._load(states, timeout, forgets=self._steps.has_left_gradients)
            self._restored(state)

    async def restore(self, refs: Iterable[Any], state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Begin anew from a checkpoint with other references, after workers were lost and their objects were made again.

        ::

            await cluster.restart("left")
            layer = await driver.remote_module("left", "Layer")
            await layer.load_state_dict(saved_layer)
            await optimizer.restore([layer], saved_optimizer)

        Optimizers that were made before are deleted on the workers that can be reached; gradients are forgotten as by `load_state_dict`.
        Cancelled or failed midway, steps are refused until it is called again and succeeds.

        Args:
            refs: as of the constructor; on the same workers, with parameters in the same order.
            state: the result of `state_dict`.
            timeout: seconds for each of: deleting, making, loading; as of `Worker.call`.

        Raises:
            ArgumentError, ArgumentTypeError: `refs` are of other workers than `state`, or not of the right kinds; nothing has changed.

        >>> await optimizer.restore([model], await optimizer.state_dict())
        """
        own, self._own = self._own, []
        try:
            by_owner = self._by_owner(refs)
            states = _checked(state, by_owner)
        except BaseException:
            made, self._own = self._own, own
            await self._let_go(made, timeout)
            raise
        async with self._lock:
            self._half_restored = "restore"
            old, self._optimizers, self._refs = self._optimizers, {}, by_owner
            await self._let_go([*old.values(), *own], timeout)
            await self._make_missing(timeout)
            await self._load(states, timeout, forgets=self._steps.has_left_gradients)
            self._restored(state)

    async def remove(self, name: str) -> None:
        """Drop the parameters on a worker, which may be lost: of a replica that `Pipeline.remove` has removed, for instance.

        Cancelled, they are removed all the same, but the worker may keep its optimizer until the reference's lease ends.

        Args:
            name: of the worker.

        Raises:
            ArgumentError: there are none on this worker, or none on others.

        >>> await optimizer.add([await driver.remote_module("right", "Linear", 2, 1)], like="left")
        >>> await optimizer.remove("left")
        """
        async with self._lock:
            if not isinstance(name, str) or name not in self._refs or len(self._refs) == 1:
                raise ArgumentError(f"DistributedOptimizer.remove({name!r}): there are parameters on {', '.join(self._refs)}; one has to stay")
            del self._refs[name]
            optimizer = self._optimizers.pop(name, None)
            if optimizer is not None and optimizer.is_connected:
                await self._let_go([optimizer], None)

    async def add(self, refs: Iterable[Any], like: str, *, timeout: float | None = None) -> None:
        """Update parameters on a further worker as well, beginning with the optimizer's state of the same parameters on another one.

        Cancelled or failed, everything is as it was.

        Args:
            refs: as of the constructor, all on one worker: with as many parameters as on `like`, in the same order.
            like: name of the worker with the optimizer that has the state.
            timeout: seconds for each of: reading the state, making an optimizer, loading.

        Raises:
            ArgumentError, ArgumentTypeError: `refs` are on several workers or on one that has parameters already, or there are none on `like`.
            WorkerLostError: a worker is lost.

        >>> await optimizer.add([await driver.remote_module("right", "Linear", 2, 1)], like="left")
        """
        added = self._by_owner(refs)
        async with self._lock:
            if len(added) != 1 or not self._refs.keys().isdisjoint(added) or not isinstance(like, str) or like not in self._refs:
                raise ArgumentError(
                    f"DistributedOptimizer.add(): expected parameters on one further worker, found {', '.join(added)} beside "
                    f"{', '.join(self._refs)}; and one of the latter as like={like!r}"
                )
            await self._prepare()
            self._steps.check_whole(self._refs, "would read the state of one worker for another")
            (owner,) = added
            state = await self._state_of(self._optimizers[like], timeout)
            self._refs |= added
            try:
                await self._make(owner, timeout)
                await self._load({owner: state}, timeout)
            except BaseException:
                del self._refs[owner]
                made = self._optimizers.pop(owner, None)
                if made is not None:
                    await self._let_go([made], timeout)
                raise

    async def _let_go(self, refs: Iterable[RemoteRef], timeout: float | None) -> None:
        for error in await asyncio.gather(*(ref.delete(timeout=timeout) for ref in refs), return_exceptions=True):
            if isinstance(error, BaseException) and not isinstance(error, DistributedError):
                raise error

    async def _load(self, states: Mapping[str, Any], timeout: float | None, *, forgets: bool = False) -> None:
        loading = []
        for owner, ref in [(owner, self._optimizers[owner]) for owner in states]:
            head = {**states[owner], "forgets": forgets}
            loading.append(store(self.worker, ref, LoadOptimizer, dict(head.pop("state")), timeout, head))
        await asyncio.gather(*loading)

    def _restored(self, state: Mapping[str, Any]) -> None:
        self._steps.restored(state["steps"])
        self._half_restored = ""


def _checked(state: Any, refs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The states of the workers."""
    states = state.get("workers") if isinstance(state, Mapping) else None
    if not isinstance(states, Mapping) or set(states) != set(refs) or state.get("steps").__class__ is not int:
        raise ArgumentError(f"load_state_dict: expected a state of the workers {sorted(refs)}, as state_dict() returned it")
    for owner, each in states.items():
        is_whole = isinstance(each, Mapping) and {"taken", "groups", "state"} <= each.keys() and isinstance(each["state"], Sequence)
        is_whole = is_whole and each["taken"].__class__ is int
        if not is_whole or not all(isinstance(entry, Sequence) and len(entry) == 2 and isinstance(entry[0], int | str) for entry in each["state"]):
            raise ArgumentError(f"load_state_dict: the state of worker {owner!r} is not what state_dict() of a DistributedOptimizer returned")
    return states
