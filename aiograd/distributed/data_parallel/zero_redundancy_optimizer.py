"""ZeroRedundancyOptimizer: an optimizer with a state that is divided among the members of a group.

Note [Shards]
    The parameters of one dtype are one line of elements, which is divided evenly among the members, wherever parameters begin and end. Each member
    has an ordinary optimizer over its pieces of the parameters, computes the new values of these, and gets the others from the other members.
    Formulas that work element by element give the same bits as over whole parameters; others are refused.

    New values are written on all members at once, when all have them, and a step that fails puts the optimizer's state back.

Source: Rajbhandari et al., ZeRO: memory optimizations toward training trillion parameter models (2020), the first stage.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from aiograd.coordination.buckets import nothing
from aiograd.distributed.data_parallel.controller_arguments import checked_optimizer_state
from aiograd.distributed.data_parallel.parameter_pieces import ParameterLine, ParameterPiece, assembled_whole, pack, states_of, unpack
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.offloading import offload
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore, host_array, make
from aiograd.tensors.norms import factor_for, norm_of, size_of, sum_of


class ShardingGroup(Protocol):
    """The part of a `Group` that the optimizer uses."""

    rank: int
    size: int

    def all_reduce(self, arrays: Any, op: str = "sum", *, timeout: float | None = None) -> Coroutine[Any, Any, Any]:
        """See `Group.all_reduce`."""

    def reduce_scatter(self, array: Any, op: str = "sum", *, timeout: float | None = None) -> Coroutine[Any, Any, Array]:
        """See `Group.reduce_scatter`."""

    def all_gather(self, array: Any, *, timeout: float | None = None) -> Coroutine[Any, Any, list[Array]]:
        """See `Group.all_gather`."""

    def abandon(self, what: str, error: BaseException) -> None:
        """See `Group.abandon`."""

    def commit(self, apply: Callable[[], None], *, timeout: float | None = None) -> Coroutine[Any, Any, None]:
        """See `Group.commit`."""


class ZeroRedundancyOptimizer:
    """An optimizer with a state that is divided among the members of a group: each keeps ``1 / size`` of it.

    ::

        ddp = dist.DistributedDataParallel(Net(), group)
        optimizer = dist.ZeroRedundancyOptimizer(ddp.parameters(), ag.optim.AdamW, group, lr=1e-3)
        ...
        await loss.backward()
        await optimizer.step()                  # on all members

    After a step the parameters have the bits that the whole optimizer would give them, the same on every member.

    Args:
        params: parameters, or groups of them with options, as an optimizer takes them; of the host, in the same order on every member.
        optimizer_class: a class of `aiograd.optim` that updates each element by itself: SGD, Adam, AdamW, RMSprop, Adagrad, NAdam, RAdam.
        group: the members.
        clip_norm: scale gradients so that their norm, taken together, is at most this; None: as they are. The members add the norm up, so the last
            bits of a step that is scaled depend on their number.
        reduce_gradients: True if each member has a ``grad`` of its own, from passes that were not reduced; the step then averages them and sends half
            as much. False if they are the same on all members already.
        timeout: seconds that members may be apart in a step; None: `Limits.default_deadline`.
        **options: of the optimizer.

    Attributes:
        param_groups: options by group, for schedules; their ``params`` are this member's pieces.

    Raises:
        ArgumentTypeError: a class with a formula that needs whole parameters; no group. ArgumentError: parameters of a device; as the class raises.

    >>> x = [ag.ones(4, requires_grad=True) for group in groups]
    >>> optimizers = [dist.ZeroRedundancyOptimizer([p], ag.optim.SGD, group, lr=0.1) for p, group in zip(x, groups)]
    >>> await asyncio.gather(*(p.sum().backward() for p in x))
    [None, None]
    >>> await asyncio.gather(*(each.step() for each in optimizers))
    [None, None]
    >>> x[0]
    tensor([0.9, 0.9, 0.9, 0.9], requires_grad=True)
    """

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[Any],
        group: ShardingGroup,
        *,
        clip_norm: float | None = None,
        reduce_gradients: bool = False,
        timeout: float | None = None,
        **options: Any,
    ) -> None:
        if not getattr(optimizer_class, "is_elementwise", False):
            raise ArgumentTypeError(
                f"ZeroRedundancyOptimizer: {getattr(optimizer_class, '__name__', optimizer_class)} cannot be divided: a step of it needs whole "
                "parameters; expected SGD, Adam, AdamW, RMSprop, Adagrad, NAdam or RAdam"
            )
        if clip_norm is not None and not (isinstance(clip_norm, (int, float, np.number)) and clip_norm >= 0):
            raise ArgumentError(f"ZeroRedundancyOptimizer(clip_norm={clip_norm!r}): expected a limit of at least 0")
        if not callable(getattr(group, "all_reduce", None)):
            raise ArgumentTypeError(f"ZeroRedundancyOptimizer: expected what `await dist.join_group(...)` returns, found {type(group).__name__}")
        self._group = group
        self._clip_norm = clip_norm
        self._reduces = reduce_gradients
        self._timeout = timeout
        optimizer = optimizer_class(params, **options)  # checks them; it has no state yet
        self._parameters: list[Any] = [p for each in optimizer.param_groups for p in each["params"]]
        for p in self._parameters:
            if p.device != "cpu" or p.dtype.kind not in "fc":
                raise ArgumentError(f"ZeroRedundancyOptimizer: a parameter of dtype {p.dtype} on {p.device}; expected floating ones of the host")
        counts = [p.size for p in self._parameters]
        dtypes = dict.fromkeys(np.dtype(p.dtype) for p in self._parameters)
        self._lines = [
            ParameterLine([i for i, p in enumerate(self._parameters) if p.dtype == dtype], counts, dtype, group.size) for dtype in dtypes
        ]
        self._pieces: dict[ParameterPiece, Any] = {
            piece: make(np.empty(piece.stop - piece.start, line.dtype)) for line in self._lines for piece in line.pieces[group.rank]
        }
        #: the number of whole parameters in each group
        self._counts = [len(each["params"]) for each in optimizer.param_groups]
        number = 0
        for each in optimizer.param_groups:
            numbers = range(number, number + len(each["params"]))
            each["params"] = [tensor for piece, tensor in self._pieces.items() if piece.parameter in numbers]
            number = numbers.stop
        self._optimizer = optimizer
        self._is_stepping = False

    def __repr__(self) -> str:
        return f"ZeroRedundancyOptimizer({self._optimizer!r}, {self._group!r})"

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Options by group."""
        groups: list[dict[str, Any]] = self._optimizer.param_groups
        return groups

    @property
    def nbytes(self) -> int:
        """Bytes of the optimizer's state on this member."""
        return sum(each._data.nbytes for state in self._optimizer.state.values() for each in state.values() if isinstance(each, TensorCore))

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients of all parameters, or fill them with zeros.

        Args:
            set_to_none: False: fill with zeros.
        """
        for p in self._parameters:
            p.grad = None if set_to_none or p.grad is None else make(np.zeros(p.shape, p.dtype))

    # ---------------------------------------------------------------- a step

    async def step(self) -> None:
        """Update every parameter that has a gradient. All members call it; either all take the step, or it raises on all and nothing has changed.

        Raises:
            ArgumentError: another step is under way. Otherwise as `Group.all_reduce` and `Group.commit`.

        Cancelling makes the group fail on every member.

        >>> optimizers = [dist.ZeroRedundancyOptimizer([ag.ones(4, requires_grad=True)], ag.optim.SGD, group, lr=0.1) for group in groups]
        >>> _ = await asyncio.gather(*(each.step() for each in optimizers))
        """
        if self._is_stepping:
            raise ArgumentError("ZeroRedundancyOptimizer: a step is under way; await it before the next one")
        self._is_stepping = True
        before = {p: dict(state) for p, state in self._optimizer.state.items()}
        arrays = [(each, each._data.copy()) for state in before.values() for each in state.values() if isinstance(each, TensorCore)]
        try:
            grads = await self._shard([None if p.grad is None else p.grad.detach().numpy() for p in self._parameters])
            if self._clip_norm is not None:
                await self._clip(grads, self._clip_norm)
            await offload(self._update, grads)
            values = await self._gather()
            await self._group.commit(lambda: self._write(values), timeout=self._timeout)
        except BaseException as error:
            if not getattr(error, "committed", False):
                self._optimizer.state = before
                for tensor, array in arrays:
                    tensor._data[...] = array
                self._group.abandon("a step of the optimizer", error)
            raise
        finally:
            self._is_stepping = False

    async def _shard(self, grads: Sequence[Array | None]) -> dict[ParameterPiece, Array]:
        """The gradients of this member's pieces, of those parameters that have one on some member."""
        group, mine = self._group, self._group.rank
        if not self._reduces:
            return {piece: whole.reshape(-1)[piece.start : piece.stop] for piece in self._pieces if (whole := grads[piece.parameter]) is not None}
        running = [group.all_reduce(np.array([grad is not None for grad in grads]), "max", timeout=self._timeout)]
        for line in self._lines:
            flat = [nothing(self._parameters[i].shape, line.dtype) if (each := grads[i]) is None else each for i in line.indices]
            running.append(group.reduce_scatter(np.concatenate([each.reshape(-1) for each in flat]), "mean", timeout=self._timeout))
        used, *parts = await asyncio.gather(*running)
        found = {}
        for line, part in zip(self._lines, parts, strict=True):
            begin = 0
            for piece in line.pieces[mine]:
                end = begin + piece.stop - piece.start
                if used[piece.parameter]:
                    found[piece] = part[begin:end]
                begin = end
        return found

    async def _clip(self, grads: dict[ParameterPiece, Array], limit: float) -> None:
        size = sum_of((size_of(each, 2) for each in grads.values()), 2)
        total = await self._group.all_reduce(np.asarray(0.0 if size is None else size, np.float64), timeout=self._timeout)
        factor = factor_for(norm_of(total, 2), limit)
        if factor != 1.0:
            for piece, grad in grads.items():
                grads[piece] = (grad * factor).astype(grad.dtype, copy=False)

    def _update(self, grads: Mapping[ParameterPiece, Array]) -> None:
        """Compute the new values of this member's pieces, beside the parameters."""
        for piece, tensor in self._pieces.items():
            tensor._data[...] = self._parameters[piece.parameter]._data.reshape(-1)[piece.start : piece.stop]
        self._optimizer.step({self._pieces[piece]: make(grad) for piece, grad in grads.items()})

    async def _gather(self) -> list[list[Array]]:
        """New values by line and rank."""
        running = []
        for line in self._lines:
            pieces = [self._pieces[piece]._data for piece in line.pieces[self._group.rank]]
            running.append(self._group.all_gather(np.concatenate(pieces) if pieces else np.empty(0, line.dtype), timeout=self._timeout))
        return list(await asyncio.gather(*running))

    def _write(self, values: Sequence[Sequence[Array]]) -> None:
        for line, parts in zip(self._lines, values, strict=True):
            begin = 0
            flat = np.concatenate(parts)
            for index in line.indices:
                p = self._parameters[index]
                inplace.write(p, flat[begin : begin + p.size].reshape(p.shape))
                begin += p.size

    # ---------------------------------------------------------------- state

    async def state_dict(self) -> dict[str, Any]:
        """The whole state, as the ``state_dict`` of an optimizer that is not divided. All members call it.

        Returns:
            ``state`` by number of the parameter and ``param_groups``, the same on every member.

        Raises:
            As `Group.all_reduce`. Cancelling makes the group fail on every member.

        >>> optimizers = [dist.ZeroRedundancyOptimizer([ag.ones(4, requires_grad=True)], ag.optim.SGD, group, lr=0.1) for group in groups]
        >>> state, _ = await asyncio.gather(*(each.state_dict() for each in optimizers))
        >>> state["param_groups"][0]["lr"]
        0.1
        """
        own = {index: self._optimizer.state.get(tensor, {}) for index, tensor in enumerate(self._pieces.values())}
        part = pack((), states_of([*self._pieces], own))
        _, states = unpack(await self._group.all_gather(part, timeout=self._timeout), [p.dtype for p in self._parameters])
        groups: list[dict[str, Any]] = self._optimizer.state_dict()["param_groups"]
        number = 0
        for group, count in zip(groups, self._counts, strict=True):
            group["params"] = list(range(number, number + count))
            number += count
        return {"state": assembled_whole({index: p.shape for index, p in enumerate(self._parameters)}, states), "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Continue from the whole state of an optimizer, divided or not; every member loads the same. Each takes its pieces.

        Args:
            state_dict: the state.

        Raises:
            ArgumentError: groups, parameters or shapes do not fit; nothing has changed.
        """
        what = "ZeroRedundancyOptimizer.load_state_dict"
        given = checked_optimizer_state(state_dict, "state_dict")
        states, saved = given["state"], given["param_groups"]
        listed = [group.get("params") for group in saved]
        if not all(isinstance(each, (list, tuple)) for each in listed):
            raise ArgumentError(f"{what}: expected a list of dicts with lists of 'params' as 'param_groups', as state_dict() returns it")
        if self._counts != [len(each) for each in listed]:
            raise ArgumentError(f"{what}: found groups of {[len(each) for each in listed]} parameters, expected {self._counts}")
        order = [number for each in listed for number in each]
        for number in states:
            if number not in order:
                raise ArgumentError(f"{what}: there is state for parameter {number!r}, which is in no group")
        mine: dict[int, dict[str, Any]] = {}
        numbers = {id(p): n for n, p in enumerate(p for group in self._optimizer.param_groups for p in group["params"])}
        for piece, tensor in self._pieces.items():
            p = self._parameters[piece.parameter]
            values = states.get(order[piece.parameter])
            if values is None:
                continue
            taken = mine[numbers[id(tensor)]] = {}
            for name, value in values.items():
                if isinstance(value, (TensorCore, np.ndarray)) and name not in self._optimizer._numbers:
                    if tuple(value.shape) != p.shape:
                        raise ArgumentError(f"{what}: {name} of parameter {piece.parameter} has shape {list(value.shape)}, expected {list(p.shape)}")
                    whole = host_array(value) if isinstance(value, TensorCore) else value
                    value = whole.reshape(-1)[piece.start : piece.stop]
                taken[name] = value
        groups = [
            {**theirs, "params": [numbers[id(p)] for p in group["params"]]}
            for theirs, group in zip(saved, self._optimizer.param_groups, strict=True)
        ]
        self._optimizer.load_state_dict({"state": mine, "param_groups": groups})
