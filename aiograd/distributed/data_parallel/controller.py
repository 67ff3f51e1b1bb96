"""DataParallel: replicas of one module on several workers, driven by one process."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, Self

from aiograd.coordination.buckets import BUCKET_BYTES
from aiograd.coordination.compressed_pass import checked_compressor
from aiograd.coordination.compression import Compressor
from aiograd.coordination.compressor_message import sent_form
from aiograd.distributed.data_parallel.controller_arguments import (
    checked_count,
    checked_method,
    checked_optimizer_state,
    checked_options,
    checked_workers,
    name_of_optimizer,
    sendable,
)
from aiograd.distributed.data_parallel.coordinator import ReplicaCoordinator
from aiograd.distributed.data_parallel.sharded_optimizer import whole_state
from aiograd.distributed.messages.library import ReadOptimizer
from aiograd.distributed.objects.module import RemoteModule
from aiograd.distributed.objects.parameter_stream import checked_state, fetch, store_optimizer
from aiograd.distributed.rpc.keyring import check_name
from aiograd.distributed.worker import Worker
from aiograd.engine.run import check_can_run
from aiograd.engine.run.failures import clear_frames
from aiograd.errors import ArgumentError, ArgumentTypeError, EngineClosedError, ModeError
from aiograd.running import tracing
from aiograd.running.modes import current_mode, no_grad
from aiograd.running.random import forked_seed
from aiograd.tensors.core import TensorCore
from aiograd.tensors.norms import checked_norm


class DataParallel:
    """Replicas of one module on several workers, which train on a shard of each batch and stay equal to the bit. Made by `create`.

    ::

        async with await dist.DataParallel.create(driver, names, Net, optimizer=ag.optim.AdamW, optimizer_options={"lr": 1e-3}) as replicas:
            for x, target in batches:
                shards = list(zip(np.array_split(x, 12), np.array_split(target, 12)))
                losses = await replicas.step(shards)
            state = await replicas.state_dict()

    A step computes the loss of each shard on one of the replicas, adds up the gradients between the workers, in the order of the shards, and lets the
    optimizer of each replica take the same step. All replicas have taken it, or none. The result has the bits of one process that adds up the
    gradients of the shards in that order. So the shards decide the bits, and the number of workers does not (EasyScale, SC 2023), unless gradients
    are compressed.

    A worker that is lost makes the step fail on all replicas; then `remove` it, or wait until it runs again and `add` it, and take the step again.
    The state of a new replica comes from one that is there. With ``absorb=True`` the step goes on without the worker instead, and has the same bits.

    Args:
        coordinator, seed: as `create` makes them.

    >>> await replicas.step([(ag.ones(1, 2), ag.zeros(1, 1)), (ag.ones(1, 2), ag.ones(1, 1))])
    [tensor(4.), tensor(1.)]
    """

    def __init__(self, coordinator: ReplicaCoordinator, seed: Sequence[int]) -> None:
        self._coordinator = coordinator
        self._seed = tuple(seed)
        self._turn = asyncio.Lock()
        self._is_closed = False

    @classmethod
    async def create(
        cls,
        driver: Worker,
        names: Sequence[str],
        module: type[Any] | str,
        /,
        *args: Any,
        optimizer: Any = "AdamW",
        optimizer_options: Mapping[str, Any] | None = None,
        method: str = "loss",
        clip_norm: float | None = None,
        accumulate: int = 1,
        bucket_bytes: int = BUCKET_BYTES,
        shard_optimizer: bool = False,
        compress: Compressor | None = None,
        absorb: bool = False,
        timeout: float | None = None,
    ) -> Self:
        """Make replicas on workers; all begin with the state of the first.

        Cancelled or failed, no replica is left on workers that can be reached.

        Args:
            driver: this process's worker, which knows the others; these know each other.
            names: of the workers; the first shards of a step go to the first of them.
            module: the class, or its name: a module that the workers' service exposes with ``@service.reference``.
            *args: of the class.
            optimizer: class of the optimizer, or its name: one of ``ag.optim``, or one that the workers' services expose and that is derived from
                ``ag.optim.Optimizer``; ``ag.optim.AdamW`` if none is given.
            optimizer_options: of the optimizer, such as ``{"lr": 1e-3}``.
            method: name of the method that computes the loss, ``module.loss(*shard)``: a 0-d Tensor, the mean over the rows of the shard.
                ``def`` runs on the executor, ``async def`` on the loop.
            clip_norm: gradients are scaled so that their norm, over all parameters, is at most this; None: they are not.
            accumulate: number of steps; their gradients, each divided by this number, are added up before the optimizer takes a step.
            bucket_bytes: gradients are sent in buckets of so many bytes or a little more, each as soon as it is complete.
            shard_optimizer: True: the replicas divide the state of the optimizer. Of n replicas each has 2/n of it, as each shard is on two of them,
                and computes that part of a step; the bits are the same. For optimizers that update each element by itself (SGD, Adam, AdamW, RMSprop,
                Adagrad, NAdam, RAdam), and contiguous parameters of the host. When one replica is lost the others have the whole state, and the next
                step divides it anew. When both replicas that have a shard are lost before that, steps raise a DistributedError until
                `load_optimizer_state_dict` loads the state of a checkpoint; load the module's after it.
            compress: `TopK` or `Blockwise`: gradients travel between the workers as its payloads; None: as they are. Each replica keeps the
                values that its payloads have left out and adds them to its next gradients; a step that fails leaves them as they were. A replica
                that is made anew, or that gets another state, begins without.
            absorb: True: a replica that is lost before a step is decided is left out, and the others compute its shards in the same call of `step`;
                see `lost`. Replicas keep the gradients of each of their shards until a step is committed.
            timeout: seconds for each request to a worker; None: the worker's default.

        Returns:
            The replicas; leave them with ``async with`` or `aclose`.

        Raises:
            ArgumentError, ArgumentTypeError: the arguments cannot be used, the optimizer cannot be divided, or models are not alike. WorkerLostError,
            UnknownPeerError: a worker cannot be reached. RemoteError: a model or an optimizer could not be made.

        >>> replicas = await dist.DataParallel.create(driver, ["left", "right"], "Linear", 2, 1, optimizer=ag.optim.SGD)
        >>> replicas.names
        ('left', 'right')
        """
        given = checked_workers("DataParallel", driver, names)
        optimizer_name = name_of_optimizer("DataParallel", "optimizer", optimizer)
        given_options = checked_options("DataParallel", "optimizer_options", optimizer_options)
        options = {
            "absorb": _checked_absorb(absorb, given),
            "method": checked_method("DataParallel", "method", method),
            "clip_norm": checked_norm("DataParallel", clip_norm),
            "accumulate": checked_count("DataParallel", "accumulate", accumulate),
            "bucket_bytes": checked_count("DataParallel", "bucket_bytes", bucket_bytes),
            "shard_optimizer": _checked_sharding(shard_optimizer, optimizer),
            "compress": sent_form(checked_compressor("DataParallel", "compress", compress)),
        }
        coordinator = ReplicaCoordinator(driver, module, args, optimizer_name, given_options, options, timeout)
        seed = forked_seed()
        try:
            coordinator.remotes = await coordinator.make(given)
            await coordinator.check_equal(coordinator.remotes)
            if len(given) > 1:
                await coordinator.synchronise(coordinator.remotes)
            await coordinator.get_ready()
        except BaseException:
            await coordinator.aclose()
            raise
        return cls(coordinator, seed)

    def __repr__(self) -> str:
        return f"<DataParallel: replicas on {', '.join(self.names)}>"

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Let the workers forget the replicas. Waits for a step that is under way. Idempotent; cancelled, some may keep theirs.

        >>> await replicas.aclose()
        """
        async with self._turn:
            self._is_closed = True
            await self._coordinator.aclose()

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the workers, in the order of their shards."""
        return tuple(each.owner for each in self._coordinator.remotes)

    @property
    def lost(self) -> tuple[str, ...]:
        """With ``absorb=True``: names of the workers that were lost and left out, and not taken in again with `add` or given up with `remove`.

        Where the last one is lost too, or only one that was left out may have the newest state, all are in `names` again.
        """
        return tuple(self._coordinator.lost)

    # ---------------------------------------------------------------- training

    async def step(self, shards: Sequence[Any]) -> list[Any]:
        """Forward, backward and a step of the optimizer, for one batch.

        Either all replicas have taken the step, or it raises and none has: parameters, optimizer and buffers are as they were. No ``grad`` is
        touched. Steps run one after the other. Cancelling withdraws the step, unless it is decided already: then it is carried out, and the error
        that is raised has ``committed`` True.

        Shards are dealt to the replicas in contiguous runs, as evenly as possible. A replica computes its shards in turn, and one without a shard
        takes the step of the others. Each shard begins with the same buffers, such as running statistics; all replicas have the values of the first
        shard afterwards. Random numbers, as for dropout, are drawn by shard and step, the same when a step is taken again. A replica other than
        the first keeps the gradients of its shards apart until they are added up: memory for as many gradients of the parameters.

        Args:
            shards: at least one; each a tuple of arrays, the arguments of the loss. A shard weighs by the rows of its first array, so it is the
                gradient of the mean over all rows. One without rows takes no part.

        Returns:
            The loss of each shard, the mean over its rows: 0-d Tensors, NaN where there are none.

        Raises:
            WorkerLostError: the replica on `worker` is lost; nothing has changed on the others: `remove` it, or `add` it anew. With ``absorb=True``:
            all are lost, or all that may have the newest state, and all are in `names` again, since one that is reached again can take the step.
            DistributedError: all that had the newest state are lost for good. RemoteError: the loss failed on a replica, or wrote to parameters
            there. DeadlineError: it took too long. CommitUnknown: the step was decided, and no replica could be reached to confirm it (``committed``
            is True). ArgumentError, ArgumentTypeError: no such shards. ModeError: grad mode is off.

        >>> await replicas.step([(ag.ones(1, 2), ag.zeros(1, 1)), (ag.ones(1, 2), ag.ones(1, 1))])
        [tensor(4.), tensor(1.)]
        """
        check_can_run("DataParallel.step()")
        if not current_mode().grad:
            raise ModeError("DataParallel.step() computes gradients, but grad mode is off; call eval() for the forward alone")
        try:
            async with self._turn:
                coordinator = self._open()
                given = self._checked_shards("step", shards)
                rows = [_rows_of(index, shard) for index, shard in enumerate(given)]
                if not sum(rows):
                    raise ArgumentError("DataParallel.step: no shard has any rows")
                weights = [count / sum(rows) / self._coordinator.accumulate for count in rows]
                with tracing.span("data-parallel step", attributes={"aiograd.replicas": len(self.names), "aiograd.shards": len(given)}):
                    return await coordinator.step(given, weights, self._seed)
        except BaseException as error:
            clear_frames(error, "aiograd.distributed.data_parallel.")
            raise

    async def eval(self, shards: Sequence[Any]) -> list[Any]:
        """Forward of a batch in evaluation mode, without gradients: ``module(*shard)`` for each shard. Cancelling stops it on all replicas.

        Args:
            shards: as of `step`, with the arguments of the module's ``forward``.

        Returns:
            The output for each shard.

        Raises:
            As `step`.

        >>> await replicas.eval([(ag.ones(1, 2),), (ag.zeros(1, 2),)])
        [tensor([[2.]]), tensor([[0.]])]
        """
        check_can_run("DataParallel.eval()")
        with no_grad():
            async with self._turn:
                coordinator = self._open()
                given = self._checked_shards("eval", shards)
                return await coordinator.evaluate(given)

    # ---------------------------------------------------------------- states

    async def state_dict(self, *, timeout: float | None = None) -> dict[str, Any]:
        """A copy, in this process, of the parameters and buffers of a replica by name. It needs one replica that can be reached.

        Cancelling changes nothing.

        Args:
            timeout: seconds.

        Returns:
            Tensors by name.

        Raises:
            WorkerLostError: a replica that may have the state of the last step cannot be reached. DistributedError: all that had it are lost.

        >>> await replicas.state_dict()
        {'weight': tensor([[1., 1.]])}
        """
        async with self._turn:
            replica = await self._open().source()
            return await RemoteModule(self._coordinator.worker, replica.owner, replica.module).state_dict(timeout=timeout)

    async def load_state_dict(self, state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Put all replicas into a state that was read before.

        With ``accumulate`` the gradients of steps since the optimizer's last one stay, as ``.grad`` does when a module's state is loaded.
        Cancelled or failed, either no replica has it, or all have before the next step.

        Args:
            state: Tensors or arrays by name.
            timeout: seconds for sending it.

        Raises:
            RemoteError: names or shapes do not fit; nothing has changed. ArgumentTypeError: it is no dict. WorkerLostError: a replica is lost.

        >>> await replicas.load_state_dict({"weight": ag.zeros(1, 2)})
        """
        checked_state(state)
        async with self._turn:
            coordinator = self._open()
            first = await coordinator.begin_load()
            await RemoteModule(coordinator.worker, first.owner, first.module).load_state_dict(state, timeout=timeout)
            await coordinator.end_load()

    async def optimizer_state_dict(self, *, timeout: float | None = None) -> dict[str, Any]:
        """A copy, in this process, of the whole state of the optimizer, as its ``state_dict`` gives it, also where the replicas divide it.

        Cancelling changes nothing.

        Args:
            timeout: seconds.

        Returns:
            A dict for `load_optimizer_state_dict`, or for ``load_state_dict`` of an optimizer of this process.

        Raises:
            WorkerLostError: replicas that may have the state, or a shard of it, cannot be reached. DistributedError: all that had it are lost.

        >>> (await replicas.optimizer_state_dict())["param_groups"][0]["lr"]
        0.1
        """
        async with self._turn:
            coordinator = self._open()
            sources = await coordinator.shard_sources() if coordinator.is_sharded else [await coordinator.source()]
            parts = []
            for replica in sources:
                head, values = await fetch(coordinator.worker, replica.optimizer, ReadOptimizer, timeout)
                parts.append({"state": values, "param_groups": head["groups"]})
            return whole_state(parts) if coordinator.is_sharded else parts[0]

    async def load_optimizer_state_dict(self, state: Mapping[str, Any], *, timeout: float | None = None) -> None:
        """Put the optimizers of all replicas into a state that was read before.

        Cancelled or failed, either no replica has it, or all have before the next step.

        Args:
            state: as from `optimizer_state_dict`. Where the replicas divide the state, all of it is on the first for a moment.
            timeout: seconds for sending it.

        Raises:
            ArgumentError: it is no such state. RemoteError: it does not fit; nothing has changed. WorkerLostError: a replica is lost.

        >>> await replicas.load_optimizer_state_dict(await replicas.optimizer_state_dict())
        """
        given = checked_optimizer_state(state)
        async with self._turn:
            coordinator = self._open()
            first = await (coordinator.begin_optimizer_load() if coordinator.is_sharded else coordinator.begin_load())
            await store_optimizer(coordinator.worker, first.optimizer, given, timeout)
            await (coordinator.end_optimizer_load() if coordinator.is_sharded else coordinator.end_load())

    # ---------------------------------------------------------------- membership

    async def remove(self, name: str) -> None:
        """Go on without the replica on a worker, which may be lost. The others keep their order, and no other worker has to act.

        With ``shard_optimizer`` the others divide the state of the optimizer anew, at once if all of them can be reached. Remove lost replicas before
        others.

        A name in `lost` is taken out of there. Cancelled, the replica is removed all the same, but its worker may not know.

        Args:
            name: of the worker.

        Raises:
            ArgumentError: there is no such replica, or no other.

        >>> await replicas.remove("right")
        >>> replicas.names
        ('left',)
        """
        async with self._turn:
            coordinator = self._open()
            await coordinator.leave(coordinator.lost.get(name) or coordinator.find_removable("DataParallel", "replica", name))

    async def add(self, name: str) -> None:
        """Take in another replica, with the state of one that is there. Its rank is the last.

        Where there was one on this worker, and it is lost, the new one takes its place and its rank; if it is not lost, nothing happens.
        Cancelled or failed, the replicas are the same as before.

        Args:
            name: of the worker, which this process and the other workers know.

        Raises:
            ArgumentError: the model there is not like the others. WorkerLostError: the worker cannot be reached. DistributedError: no replica is left
            that has the state.

        >>> await replicas.remove("left")
        >>> await replicas.add("left")
        >>> replicas.names
        ('right', 'left')
        """
        check_name("DataParallel.add", name)
        async with self._turn:
            await self._open().enter(name)

    # ---------------------------------------------------------------- checks

    def _open(self) -> ReplicaCoordinator:
        if self._is_closed:
            raise EngineClosedError("these DataParallel replicas have been closed; make new ones")
        return self._coordinator

    def _checked_shards(self, what: str, shards: Any) -> list[list[Any]]:
        if not isinstance(shards, Sequence) or isinstance(shards, str):
            raise ArgumentTypeError(f"DataParallel.{what}: expected a list of shards, each a tuple of arrays, found {type(shards).__name__}")
        if not shards:
            raise ArgumentError(f"DataParallel.{what}: got no shards; expected at least one")
        given = [[sendable(value) for value in (shard if isinstance(shard, (tuple, list)) else (shard,))] for shard in shards]
        for index, each in enumerate(given):
            if len(each) != len(given[0]):
                raise ArgumentError(f"DataParallel.{what}: shard {index} has {len(each)} arrays, shard 0 has {len(given[0])}; expected equally many")
        return given


def _rows_of(index: int, shard: Sequence[Any]) -> int:
    first = shard[0] if shard else None
    if not isinstance(first, TensorCore) or not first.ndim:
        found = "nothing" if not shard else "a 0-d Tensor" if isinstance(first, TensorCore) else f"a {type(first).__name__}"
        raise ArgumentError(f"DataParallel.step: shard {index} begins with {found}; expected an array with rows along its first axis")
    return int(first.shape[0])


def _checked_absorb(absorb: Any, names: Sequence[str]) -> bool:
    if not isinstance(absorb, bool):
        raise ArgumentTypeError(f"DataParallel(absorb={absorb!r}): expected True or False")
    if absorb and len(names) == 1:
        raise ArgumentError(f"DataParallel(absorb=True): {names[0]} is the only replica, so no other can compute its shards; name at least two")
    return absorb


def _checked_sharding(shard_optimizer: Any, optimizer: Any) -> bool:
    if not isinstance(shard_optimizer, bool):
        raise ArgumentTypeError(f"DataParallel(shard_optimizer={shard_optimizer!r}): expected True or False")
    if shard_optimizer and not isinstance(optimizer, str) and not getattr(optimizer, "is_elementwise", False):
        raise ArgumentTypeError(
            f"DataParallel(shard_optimizer=True): {optimizer.__name__} cannot be divided: a step of it needs whole parameters; expected SGD, Adam, "
            "AdamW, RMSprop, Adagrad, NAdam or RAdam"
        )
    return shard_optimizer
