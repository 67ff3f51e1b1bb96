"""Replica: a module with its optimizer on one worker, equal to the others after every step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from aiograd.coordination.buckets import GradientBuckets, ParameterSpec
from aiograd.coordination.compressed_pass import CompressedPass, check_compressible
from aiograd.coordination.compression import Compressor
from aiograd.coordination.reduced_pass import ReducedPass
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.data_parallel.loss_module import LossModule
from aiograd.distributed.data_parallel.replica_state import ReceivedState
from aiograd.distributed.data_parallel.shard_gradients import ShardGradients
from aiograd.distributed.data_parallel.sharded_optimizer import ShardedOptimizer, ShardStamp
from aiograd.distributed.data_parallel.staged_optimizer import StagedOptimizer
from aiograd.errors import DistributedError
from aiograd.running.modes import no_grad
from aiograd.running.types import Array


class HoldsOptimizer(Protocol):
    """The holder of the optimizer, through which its state is read and loaded."""

    optimizer: Any


class Replica(LossModule):
    """A module with its optimizer.

    Args:
        module: the module.
        holder: of the optimizer.
        method: name of the method that computes the loss of a shard.
        clip_norm: the largest norm of all gradients together; None: any.
        accumulate: steps of which the gradients are summed before the optimizer takes a step.
        bucket_bytes: see `GradientBuckets`.
        shard_optimizer: True: the replicas divide the state of the optimizer.
        compress: gradients travel as its payloads, see `aiograd.coordination.compressed_pass`; None: as they are.
        absorb: True: losses and gradients of a step are kept until one is committed.

    Raises:
        ArgumentError: no parameters that require grad. ArgumentTypeError: the module has no such method, another kind of optimizer is needed, or a
            parameter cannot be compressed.
    """

    def __init__(
        self,
        module: Any,
        holder: HoldsOptimizer,
        method: str,
        clip_norm: float | None,
        accumulate: int,
        bucket_bytes: int,
        shard_optimizer: bool = False,
        compress: Compressor | None = None,
        absorb: bool = False,
    ) -> None:
        super().__init__(module, method, clip_norm)
        self.absorb = absorb
        #: the kept losses and gradients, with the number of the call and the version of the state to which they belong
        self._kept: tuple[tuple[int, ...], ShardGradients] | None = None
        self.accumulate = accumulate
        specs = [ParameterSpec(tuple(each.shape), np.dtype(each.dtype)) for each in self.parameters]
        names = [name for name, each in module.named_parameters() if each.requires_grad]
        check_compressible("DataParallel", compress, zip(names, specs, strict=True))
        self.buckets = GradientBuckets(specs, bucket_bytes)
        self.compress = compress
        #: by parameter the values that `compress` has left out in committed steps of this replica
        self.residuals: list[Array | None] = [None] * len(self.parameters)
        self._holder = holder
        kind = ShardedOptimizer if shard_optimizer else StagedOptimizer
        self.optimizer: StagedOptimizer | ShardedOptimizer = kind(holder.optimizer, self.parameters)
        #: the shards of another division, see Note [Dividing anew]; and a state that is being loaded from outside
        self._divided: ShardedOptimizer | None = None
        self._loading: ShardedOptimizer | None = None
        holder.optimizer = self.optimizer.current
        #: the sum of gradients of steps since the optimizer's last, by parameter
        self.running: list[Array | None] = [None] * len(self.parameters)
        #: how often a state was loaded, and the number of steps taken
        self.loads = self.taken = 0

    @property
    def version(self) -> tuple[int, int]:
        """Grows with every change of the state; of two replicas the one with the greater version is ahead."""
        return self.loads, self.taken

    def shard_gradients(self, call: int) -> ShardGradients:
        """The losses and gradients of a step, with what earlier attempts have computed.

        Args:
            call: the number that these attempts have in common.
        """
        key = (call, *self.version)
        if self._kept is not None and self._kept[0] == key:
            return self._kept[1]
        made = ShardGradients(self.running if self.compress is None else [None] * len(self.parameters))
        self._kept = (key, made) if self.absorb else None
        return made

    def reduced_pass(self, group: Group, addends: int | None) -> ReducedPass:
        """The gradients of a step that begins.

        Args:
            group: this replica and the others.
            addends: see `ReducedPass`; compressed gradients are always one.
        """
        if self.compress is None:
            return ReducedPass(group, self.buckets, "sum", addends=addends)
        return CompressedPass(group, self.buckets, self.compress, self.residuals, "sum")

    def forget_residuals(self) -> None:
        """Drop the residuals: they do not belong to a state that comes from another replica, or from a checkpoint."""
        self.residuals = [None] * len(self.parameters)

    def committed(self, running: list[Array | None] | None, sums: ReducedPass) -> None:
        """Take note of a step that is written.

        Args:
            running: the new sum of gradients; None: the optimizer has taken its step.
            sums: the gradients of the step.
        """
        self.taken += 1
        self._kept = None
        if isinstance(sums, CompressedPass):
            self.residuals = sums.residuals
        if isinstance(self.optimizer, ShardedOptimizer):
            self.optimizer.taken = self.taken
            self._divided = None
        if running is None:
            self._holder.optimizer = self.optimizer.current
            running = [None] * len(self.parameters)
        self.running = running

    def load(self, state: ReceivedState) -> None:
        """Take the state of another replica; without the optimizer's, if that is divided.

        Raises:
            ArgumentError: the state of its optimizer does not fit.
        """
        if isinstance(self.optimizer, StagedOptimizer):
            self.optimizer.current.load_state_dict(state.optimizer)
        state.write()
        self.forget_residuals()
        self.running = state.running
        self.loads, self.taken = state.version

    # ---------------------------------------------------------------- a state that is divided

    @property
    def is_sharded(self) -> bool:
        """The replicas divide the state of the optimizer."""
        return isinstance(self.optimizer, ShardedOptimizer)

    @property
    def sharded(self) -> ShardedOptimizer:
        """The optimizer, which is divided.

        Raises:
            DistributedError: it is not.
        """
        if not isinstance(self.optimizer, ShardedOptimizer):
            raise DistributedError("the state of this replica's optimizer is not divided")
        return self.optimizer

    def parts(self) -> list[ShardedOptimizer]:
        """The parts of the optimizer's state that are here."""
        return [self.sharded] if self._divided is None else [self._divided, self.sharded]

    def part(self, stamp: ShardStamp) -> ShardedOptimizer:
        """One of them.

        Raises:
            DistributedError: it is not here.
        """
        found = next((each for each in self.parts() if each.stamp == stamp), None)
        if found is None:
            raise DistributedError(f"a replica has no shards {stamp} of the optimizer's state; it has {[each.stamp for each in self.parts()]}")
        return found

    def divide(self, divided: ShardedOptimizer) -> None:
        """Keep shards until all replicas have theirs."""
        self._divided = divided

    def use(self, stamp: ShardStamp) -> None:
        """Go on with one of the parts that are here. The other is kept until the next step is committed: not all may come to use theirs."""
        before, part = self.sharded, self.part(stamp)
        if part is not before:
            self._divided = before
        self.optimizer = self._holder.optimizer = part
        self._loading = None

    def begin_load(self) -> None:
        """A whole state of the optimizer is to be loaded, beside the one that is here."""
        self._loading = self._holder.optimizer = self.sharded.divided(1, (0,))

    def drop_load(self) -> None:
        """A state that was being loaded, if there is one, will not be."""
        if self._loading is not None:
            self._loading, self._holder.optimizer = None, self.optimizer

    def end_load(self, loads: int) -> None:
        """It has been loaded, as the state with this number.

        Raises:
            DistributedError: something has come between.
        """
        if self._loading is None:
            raise DistributedError("no state of the optimizer is being loaded")
        self._loading.loads, self._loading.taken = loads, self.taken
        self._divided, self._loading, self._holder.optimizer = self._loading, None, self.optimizer

    async def evaluate(self, shard: Sequence[Any]) -> Any:
        """The output of the module for a shard, without gradients and in evaluation mode; the mode is then as it was. Cancelling stops waiting."""
        modes = [(each, each.training) for each in self.module.modules()]

        def undo() -> None:
            for each, training in modes:
                each.training = training

        self.module.eval()
        try:
            with no_grad():
                return await self.call(self.module, shard)
        finally:
            self.release(undo)
