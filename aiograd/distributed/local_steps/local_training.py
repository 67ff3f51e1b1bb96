"""LocalTraining: the module of a member with its inner optimizer, which takes local steps away from the base.

Note [Local steps]
    A local computation begins at the base. Its result, the pseudo-gradient, is kept as a contribution until a round has it: a round that fails
    is taken again with the same contributions. The inner optimizer goes on from one computation to the next. After one that has failed, or has
    lost its contribution, it begins anew.

Note [Overlap]
    With overlap the next computation begins where the last has ended, while the contribution of the last is in exchange. After `overlap` local
    steps, neither earlier nor later, the base of that round takes the place of the values that were sent; the steps since are kept. Where fewer are
    taken, this happens after the last one. Buffers then have the values of the base.
"""

from __future__ import annotations

import asyncio
import copy
import functools
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

from aiograd.coordination.compression import Compressor
from aiograd.distributed.data_parallel.loss_module import LossModule, own_errors
from aiograd.distributed.local_steps.base_state import BaseState
from aiograd.distributed.local_steps.batch_order import order_of
from aiograd.distributed.local_steps.payload_form import PayloadForm
from aiograd.distributed.local_steps.round_messages import ChangedBuffer, LocalResult, MemberProgress
from aiograd.errors import ArgumentTypeError, DistributedError
from aiograd.running.offloading import offload
from aiograd.running.random import Generator, drawing_from
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import make
from aiograd.tensors.creation import asarray
from aiograd.tensors.passes import grad

#: of pseudo-gradients and of answers; None: they are sent as they are
Compressors: TypeAlias = tuple[Compressor | None, Compressor | None]


class Contribution:
    """The result of local steps.

    Args:
        number: of the computation.
        payload: a Tensor of bytes.
        buffers: of the module after it, by path.
        residuals: by parameter the values that the compressor has left out, from the round on that has it.

    Attributes:
        exchanged: set when a round that has it is committed.
    """

    def __init__(self, number: int, payload: Any, buffers: Mapping[str, Array], residuals: list[Array | None]) -> None:
        self.number = number
        self.payload = payload
        self.buffers = buffers
        self.residuals = residuals
        self.exchanged = asyncio.Event()


class LocalTraining(LossModule):
    """The state of a member.

    Args:
        module: the module.
        inner, outer: holders of its optimizers: objects with `optimizer`.
        method, data: names of methods of the module: of the loss, and of the loader.
        clip_norm: as of `LossModule`.
        compressors: of pseudo-gradients and of answers.

    Attributes:
        base: the state of all members; None before `adopt`.

    Raises:
        ArgumentError, ArgumentTypeError: the module has no such methods, or no such loader.
    """

    def __init__(self, module: Any, inner: Any, outer: Any, method: str, data: str, clip_norm: float | None, compressors: Compressors) -> None:
        super().__init__(module, method, clip_norm)
        load = getattr(module, data, None)
        what = f"{type(module).__name__}.{data}()"
        if not callable(load):
            raise ArgumentTypeError(f"{type(module).__name__} has no method {data!r}: it returns an ag.data.DataLoader over the whole data set")
        self.loader = load()
        self.order = order_of(self.loader, what)
        self._inner, self._outer = inner.optimizer, outer
        self._compressors = compressors
        self._fresh = copy.deepcopy(self._inner.state_dict())
        self._seed: tuple[int, ...] = ()
        self._base: BaseState | None = None
        self._last: Contribution | None = None
        #: by parameter the values that the compressor has left out of the contributions that were in a round
        self._residuals: list[Array | None] = []
        #: the last computation has failed
        self._is_broken = False

    @property
    def base(self) -> BaseState:
        """The state of all members.

        Raises:
            DistributedError: there is none yet.
        """
        if self._base is None:
            raise DistributedError("this member has no base yet")
        return self._base

    def adopt(self, version: int, seed: Sequence[int], buffers: Mapping[str, Array], *, is_new: bool) -> str:
        """Take the state of the module, and of the outer optimizer, as the base. May run on any thread.

        Args:
            version: of the base.
            seed: of the random numbers of all batches.
            buffers: all of them.
            is_new: nothing of the member's own state is kept.

        Returns:
            The digest of the base.
        """
        parameters = dict(self.module.named_parameters())
        trained = [path for path, each in parameters.items() if each.requires_grad]

        def make_outer(tensors: list[Any]) -> Any:
            return copy.deepcopy(self._outer.optimizer, {id(mine): each for mine, each in zip(parameters.values(), tensors, strict=True)})

        arrays = {path: _host(each).copy() for path, each in parameters.items()}
        base = BaseState(arrays, dict(buffers), trained, make_outer, version)
        self._base, self.form, self._seed = base, PayloadForm(base.specs, *self._compressors), tuple(seed)
        if is_new:
            self._last, self._residuals = None, []
            self._inner.load_state_dict(copy.deepcopy(self._fresh))
        return base.digest()

    # ---------------------------------------------------------------- local steps

    async def compute(self, number: int, batches: Sequence[tuple[int, int]], *, is_fresh: bool, carried: int | None, overlap: int) -> LocalResult:
        """Take a local step for each of some batches; see Note [Local steps]. Cancelled or failed, nothing is left of it.

        Args:
            number: of this computation.
            batches: epoch and number of each.
            is_fresh: the inner optimizer begins anew.
            carried: the number of the contribution that is in exchange meanwhile; None: there is none.
            overlap: local steps after which its round is applied.

        Returns:
            The result.

        Raises:
            ArgumentError, ArgumentTypeError: the loss is none, or a pseudo-gradient is not finite. Exceptions of the loss and of the data.
        """
        begin = asyncio.get_running_loop().time()
        if carried is not None and (self._last is None or self._last.number != carried or self._is_broken):
            raise DistributedError(f"computation {number} goes on from the contribution {carried}, which is not here")
        begin_at = functools.partial(self._reset, is_fresh or self._is_broken) if carried is None else self._copies
        if carried is None:
            self._last = None
        self._is_broken = True
        self.module.train()
        found = [self.order.indices(*batch) for batch in batches]
        losses = waited = 0.0
        try:
            sent = await self._calls.offload(begin_at)
            for step, (batch, indices) in enumerate(zip(batches, found, strict=True)):
                if step == overlap and sent is not None:
                    waited += await self._apply(sent)
                    sent = None
                generator = Generator((*self._seed, *batch))  # draws belong to the batch, on every member
                with drawing_from(generator.fork()), own_errors(f"the data of {type(self.module).__name__}"):
                    rows_of_batch = await self.loader.read(indices)
                with drawing_from(generator):
                    losses += len(indices) * await self._step(rows_of_batch)
            if sent is not None:
                waited += await self._apply(sent)
        finally:
            self.release(lambda: None)
        began, arrays, residuals, form = self.base.version, self.base.arrays, self._residuals, self.form
        deltas = (mine - _host(each) for mine, each in zip(arrays, self.parameters, strict=True))  # one at a time, as it is packed
        payload, rest = await offload(form.pack, deltas, residuals, form.compress)
        self._is_broken, self._last = False, Contribution(number, make(payload), self.buffers, rest)
        rows = sum(map(len, found))
        epochs = sorted({epoch for epoch, _ in batches})
        drawn = (found, [self.order.digest(epoch) for epoch in epochs]) if self.order.outline.sampler else (None, None)
        seconds = asyncio.get_running_loop().time() - begin - waited
        return LocalResult(began, rows, losses / rows, seconds, self._last.payload, *drawn)

    async def _apply(self, sent: Sequence[Array]) -> float:
        """Go on from the base of the round in exchange, which is awaited, with the steps since: ``local = base + (local - sent)``.

        Returns:
            The seconds that this waited.
        """
        begin = asyncio.get_running_loop().time()
        if self._last is not None:
            await self._last.exchanged.wait()
        waited = asyncio.get_running_loop().time() - begin
        await self._calls.offload(functools.partial(self._shift, sent))
        return waited

    def _shift(self, sent: Sequence[Array]) -> None:
        for parameter, values, before in zip(self.parameters, self.base.arrays, sent, strict=True):
            inplace.write(parameter, asarray(values + (_host(parameter) - before)).to(parameter.device)._data)
        self._write_buffers()

    def _copies(self) -> list[Array]:
        """Copies of the values of the parameters."""
        return [_host(each).copy() for each in self.parameters]

    # ---------------------------------------------------------------- the contribution

    def contribution(self, number: int) -> Contribution:
        """The result of a computation, which waits for a round.

        Raises:
            DistributedError: it is not here, or was in a round.
        """
        last = self._last
        if last is None or last.number != number or last.exchanged.is_set():
            raise DistributedError(f"the contribution {number} to a round is not here any more")
        return last

    def go_on(self, contribution: Contribution | None) -> None:
        """Go on to the base that is staged, of a round that has the contribution, or none."""
        self.base.commit()
        if contribution is not None:
            self._residuals = contribution.residuals
            contribution.exchanged.set()

    def _reset(self, is_fresh: bool) -> None:
        """Begin at the base."""
        if is_fresh:
            self._inner.load_state_dict(copy.deepcopy(self._fresh))
        base = self.base
        for parameter, values in zip(self.parameters, base.arrays, strict=True):
            inplace.write(parameter, asarray(values).to(parameter.device)._data)
        self._write_buffers()

    def _write_buffers(self) -> None:
        for path, buffer in self.module.named_buffers():
            inplace.write(buffer, asarray(self.base.buffers[path]).to(buffer.device)._data)

    async def _step(self, batch: Any) -> float:
        """One local step; returns the loss."""
        loss = await self.loss(batch if isinstance(batch, (tuple, list)) else (batch,))
        with own_errors(f"the gradients of {type(self.module).__name__}.{self.method}"):
            grads = await grad(loss, self.parameters, allow_unused=True)
        arrays = self.clipped([None if each is None else each.detach()._data for each in grads])
        given = {parameter: each for parameter, each in zip(self.parameters, arrays, strict=True) if each is not None}
        await self._calls.offload(functools.partial(self._inner.step, given))
        return float(loss.detach().item())

    def progress(self) -> MemberProgress:
        """The state beside the base and the inner optimizer."""
        last = None if self._last is None or self._last.exchanged.is_set() else self._last

        def packed(values: Sequence[Array | None]) -> Any:
            return make(self.form.pack([each for each in values if each is not None])[0]) if values else None

        if last is None:
            return MemberProgress(None, None, [], packed(self._residuals), None)
        buffers = [ChangedBuffer(path, make(values)) for path, values in last.buffers.items()]
        return MemberProgress(last.number, None, buffers, packed(self._residuals), packed(last.residuals))

    def resume(self, progress: MemberProgress, buffers: Mapping[str, Array]) -> None:
        """Go on with the state of an earlier member.

        Args:
            progress: as from `progress`.
            buffers: the buffers in `progress`.
        """

        def unpacked(payload: Any) -> list[Array | None]:
            return [] if payload is None else [each.copy() for each in self.form.unpack(payload)]

        self._residuals, self._is_broken = unpacked(progress.residuals), False
        self._last = None if progress.number is None else Contribution(progress.number, progress.payload, buffers, unpacked(progress.rest))

    @property
    def buffers(self) -> dict[str, Array]:
        """Copies of the buffers of the module by path."""
        return {path: _host(each).copy() for path, each in self.module.named_buffers()}

    def changed_buffers(self) -> dict[str, Array]:
        """The buffers as the contribution has left them, where they differ from the base."""
        left = {} if self._last is None else self._last.buffers
        return {path: values for path, values in left.items() if values.tobytes() != self.base.buffers[path].tobytes()}


def _host(tensor: Any) -> Array:
    """The values of a Tensor in the memory of the host."""
    return np.asarray(tensor.detach().to("cpu")._data)
