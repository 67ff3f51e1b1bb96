"""ShardedOptimizer: the part of a replica's optimizer that has the state of some elements of the parameters; the replicas together have all.

Note [Two copies of each shard]
    The elements are divided into as many shards as there are replicas (`ParameterLine`), and a replica has its own shard and the one of the rank
    before, so each shard is there twice: when one replica is lost, the others still have the whole state. All have the reduced gradients. Both owners
    of a shard compute the same bits from them, so the copy costs arithmetic and no messages. The new values of each replica's own shard go to all
    others, and wait there until the step is committed.

Note [Dividing anew]
    When the replicas are others than before, some that have all shards of one division between them send their shards to all, and each picks its new
    part out of them. The new part waits beside the old one until all have theirs and join for the next step, and the old one goes when that is
    committed, so a failure in between loses nothing. A part is known by its `stamp`.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.message_form import encode, parse
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.data_parallel.parameter_pieces import (
    ParameterLine,
    ParameterPiece,
    PieceState,
    assembled,
    assembled_whole,
    pack,
    states_of,
    unpack,
)
from aiograd.distributed.data_parallel.replica_messages import PartStamp
from aiograd.distributed.data_parallel.staged_optimizer import StagedOptimizer
from aiograd.errors import ArgumentError, ArgumentTypeError, ProtocolError
from aiograd.running.types import Array
from aiograd.tensors import inplace
from aiograd.tensors.core import TensorCore
from aiograd.tensors.tensor import Tensor

#: replicas that have the state of a shard
SHARD_COPIES = 2
#: loads of the optimizer's state and steps taken when it has this state; number of shards of the division; the shards that are here
ShardStamp = tuple[int, int, int, tuple[int, ...]]


def shards_of(rank: int, size: int) -> tuple[int, ...]:
    """The shards of a replica, its own first. See Note [Two copies of each shard]."""
    return tuple((rank - back) % size for back in range(min(SHARD_COPIES, size)))


def stamp_of(wire: Any) -> ShardStamp:
    """A stamp that was sent.

    Raises:
        ProtocolError: it is none.
    """
    stamp = parse(PartStamp, wire)
    return stamp.loads, stamp.taken, stamp.size, tuple(stamp.shards)


def sent_stamp(stamp: ShardStamp) -> list[Any]:
    """A stamp as it is sent."""
    return encode(PartStamp(*stamp[:3], list(stamp[3])))  # type: ignore[no-any-return]


def covering(held: Sequence[Sequence[ShardStamp]], taken: int) -> list[tuple[int, ShardStamp]]:
    """Replicas that have all shards of one division between them, with the parts that they are to send; none if there are no such.

    Args:
        held: by rank the stamps of the parts there.
        taken: steps; parts of another number are out of date.
    """
    for loads, size in sorted({stamp[::2][:2] for each in held for stamp in each if stamp[1] == taken and stamp[2]}, reverse=True):
        missing, found = set(range(size)), []
        for rank, stamps in enumerate(held):
            for stamp in stamps:
                if stamp[:3] == (loads, taken, size) and missing.intersection(stamp[3]):
                    missing.difference_update(stamp[3])
                    found.append((rank, stamp))
        if not missing:
            return found
    return []


def whole_state(parts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The ``state_dict`` of an optimizer that is not divided, from the ``state_dict`` of each `ShardedOptimizer`, which together have all shards."""
    shapes = {n: tuple(shape) for group in parts[0]["param_groups"] for n, shape in zip(group["numbers"], group["shapes"], strict=True)}
    groups = [
        {**{name: value for name, value in group.items() if name not in ("numbers", "shapes")}, "params": group["numbers"]}
        for group in parts[0]["param_groups"]
    ]
    return {"state": assembled_whole(shapes, (state for part in parts for state in _states(part))), "param_groups": groups}


def _states(part: Mapping[str, Any]) -> list[PieceState]:
    """The state of a `ShardedOptimizer.state_dict`, value by value."""
    return states_of([ParameterPiece(*each) for group in part["param_groups"] for each in group["params"]], part["state"])


class ShardedOptimizer:
    """An optimizer of the parameters of a replica, with the state of some shards. See Note [Two copies of each shard].

    Args:
        optimizer: the optimizer, over the parameters themselves and without any state.
        parameters: the parameters that get gradients.
        size: shards of the division; 0: none, the replica has no part yet.
        shards: the shards that are here, the replica's own first.

    Raises:
        ArgumentTypeError: its class needs whole parameters. ArgumentError: a parameter that is not floating, contiguous and of the host.
    """

    def __init__(self, optimizer: Any, parameters: Sequence[Any], size: int = 0, shards: Sequence[int] = ()) -> None:
        if not getattr(optimizer, "is_elementwise", False):
            raise ArgumentTypeError(
                f"shard_optimizer=True: {type(optimizer).__name__} cannot be divided: a step of it needs whole parameters; expected SGD, Adam, "
                "AdamW, RMSprop, Adagrad, NAdam or RAdam"
            )
        for each in parameters:
            if each.device != "cpu" or each.dtype.kind not in "fcV" or not each._data.flags.c_contiguous:
                raise ArgumentError(
                    f"shard_optimizer=True: a parameter of shape {list(each.shape)} and dtype {each.dtype} on {each.device}; expected contiguous "
                    "floating ones of the host"
                )
        self._template = optimizer
        self._parameters = list(parameters)
        self.size = size
        self.shards = tuple(shards)
        #: see `ShardStamp`
        self.loads, self.taken = 0, -1
        self._whole: list[Any] = [each for group in optimizer.param_groups for each in group["params"]]
        number_of = {id(each): number for number, each in enumerate(self._whole)}
        self._numbers = [number_of[id(each)] for each in self._parameters]
        counts, dtypes = [each.size for each in parameters], [np.dtype(each.dtype) for each in parameters]
        lines = [ParameterLine([i for i, each in enumerate(dtypes) if each == dtype], counts, dtype, size) for dtype in dict.fromkeys(dtypes) if size]
        self._pieces: list[list[ParameterPiece]] = [[piece for line in lines for piece in line.pieces[shard]] for shard in range(size)]
        self._views: dict[ParameterPiece, Any] = {
            piece: self._parameters[piece.parameter].detach().reshape(-1)[piece.start : piece.stop] for pieces in self._pieces for piece in pieces
        }
        groups = []
        #: the pieces that are here, in the order in which the inner optimizer has them
        self._mine: list[ParameterPiece] = []
        for group in optimizer.param_groups:
            ids = {id(each) for each in group["params"]}
            mine = [piece for shard in self.shards for piece in self._pieces[shard] if id(self._parameters[piece.parameter]) in ids]
            self._mine += mine
            groups.append({**group, "params": [self._views[piece] for piece in mine]})
        inner = copy.copy(optimizer)
        inner.param_groups, inner.state = groups, {}
        self._inner = StagedOptimizer(inner, [self._views[piece] for piece in self._mine])
        self._updated: set[int] = set()
        self._received: list[tuple[ParameterPiece, Array]] = []

    def divided(self, size: int, shards: Sequence[int]) -> ShardedOptimizer:
        """Other shards of the same parameters, without any state."""
        return ShardedOptimizer(self._template, self._parameters, size, shards)

    @property
    def stamp(self) -> ShardStamp:
        """The state that this is a part of."""
        return self.loads, self.taken, self.size, self.shards

    @property
    def current(self) -> ShardedOptimizer:
        """The optimizer as its state is read: this."""
        return self

    @property
    def nbytes(self) -> int:
        """Bytes of the state here, as it is after the last step that was committed."""
        return sum(value._data.nbytes for values in self._inner.current.state.values() for value in values.values() if isinstance(value, TensorCore))

    # ---------------------------------------------------------------- steps

    def compute(self, grads: Sequence[Array | None], withdrawn: Sequence[Any] = ()) -> None:
        """As `StagedOptimizer.compute`, for the shards here; `exchange` has to follow."""
        self._updated = {index for index, grad in enumerate(grads) if grad is not None}
        for index in self._updated:
            data = self._parameters[index]._data
            if not data.flags.writeable:
                raise ArgumentError(f"a parameter of shape {list(data.shape)} is read-only, so no optimizer step can update it")
        given = [None if (grad := grads[each.parameter]) is None else grad.reshape(-1)[each.start : each.stop] for each in self._mine]
        if any(each is not None for each in given):
            self._inner.compute(given, withdrawn)

    async def exchange(self, group: Group) -> None:
        """Send the new values of the own shard, and get the values of the others. Cancelling makes the group fail.

        Raises:
            ProtocolError: a replica sent the values of other elements.
        """
        own = [self._inner.staged(self._mine.index(piece)) for piece in self._updated_pieces(self.shards[0])]
        parts = await group.all_gather(np.concatenate([each.view(np.uint8) for each in own]) if own else np.empty(0, np.uint8))
        self._received = []
        for shard, part in enumerate(parts):
            pieces = self._updated_pieces(shard)
            sizes = [self._views[piece]._data.nbytes for piece in pieces]
            if part.nbytes != sum(sizes):
                raise ProtocolError(f"replica {shard} sent {part.nbytes} bytes of new parameters, expected {sum(sizes)}", code="replica")
            if shard in self.shards:
                continue
            begin = 0
            for piece, size in zip(pieces, sizes, strict=True):
                self._received.append((piece, part[begin : begin + size].view(self._views[piece].dtype)))
                begin += size

    def _updated_pieces(self, shard: int) -> list[ParameterPiece]:
        return [piece for piece in self._pieces[shard] if piece.parameter in self._updated]

    def commit(self) -> None:
        """Write the parameters, and go on from here."""
        if any(piece.parameter in self._updated for piece in self._mine):
            self._inner.commit()
        for piece, values in self._received:
            inplace.write(self._views[piece], values)
        self._received = []

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """The state of the pieces here by their index; groups list these, the numbers and the shapes of whole parameters. See `whole_state`."""
        found: dict[str, Any] = self._inner.current.state_dict()
        pieces = [[self._numbers[each.parameter], each.start, each.stop] for each in self._mine]
        number_of = {id(each): number for number, each in enumerate(self._whole)}
        for group, whole in zip(found["param_groups"], self._template.param_groups, strict=True):
            group["params"] = [pieces[index] for index in group["params"]]
            group["numbers"] = [number_of[id(each)] for each in whole["params"]]
            group["shapes"] = [list(each.shape) for each in whole["params"]]
        return found

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Take the pieces here out of a state of an optimizer that is not divided.

        Args:
            state_dict: the state.

        Raises:
            ArgumentError: groups, parameters or shapes do not fit; nothing has changed.
        """
        groups = state_dict["param_groups"]
        counts, found = [len(group["params"]) for group in self._template.param_groups], [len(group["params"]) for group in groups]
        if counts != found:
            raise ArgumentError(f"load_optimizer_state_dict: found groups of {found} parameters, expected {counts}")
        number_of = {theirs: number for number, theirs in enumerate(number for group in groups for number in group["params"])}
        entries: list[PieceState] = []
        for theirs, values in state_dict["state"].items():
            number = number_of.get(theirs)
            if number is None:
                raise ArgumentError(f"load_optimizer_state_dict: there is state for parameter {theirs!r}, which is in no group")
            p = self._whole[number]
            for name, value in values.items():
                if isinstance(value, Tensor) and name not in self._template._numbers:
                    if tuple(value.shape) != p.shape:
                        raise ArgumentError(
                            f"load_optimizer_state_dict: {name} of parameter {number} has shape {list(value.shape)}, expected {list(p.shape)}"
                        )
                    value = value.detach().cpu().numpy().reshape(-1)
                entries.append((number, 0, p.size, name, value))
        self._load(entries, groups)

    def _load(self, entries: Iterable[PieceState], groups: Sequence[Mapping[str, Any]]) -> None:
        """Take the pieces here out of others; options come from groups."""
        pieces = [each._replace(parameter=self._numbers[each.parameter]) for each in self._mine]
        current = self._inner.current
        numbers = iter(range(len(pieces)))
        taken = [{**theirs, "params": [next(numbers) for _ in mine["params"]]} for theirs, mine in zip(groups, current.param_groups, strict=True)]
        current.load_state_dict({"state": assembled(pieces, entries), "param_groups": taken})

    def flatten(self) -> Array:
        """The part as bytes, for `load_parts`."""
        found = self.state_dict()
        return pack(found["param_groups"], _states(found))

    def load_parts(self, parts: Sequence[Array]) -> None:
        """Take the pieces here out of parts that others have sent.

        Args:
            parts: as from `flatten`, of all shards of a division; none: no optimizer has any state yet.

        Raises:
            ProtocolError: they make no sense.
        """
        groups, states = unpack(parts, [each.dtype for each in self._whole])
        try:
            if groups:
                self._load(states, groups)
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise ProtocolError(f"the state of an optimizer of replicas: {type(error).__name__}: {error}", code="replica") from error
