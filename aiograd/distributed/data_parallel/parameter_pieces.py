"""Pieces of parameters: their division among the members of a group, and the states of optimizers of pieces on their way between members. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from aiograd.coordination.message_json import from_json, to_json
from aiograd.distributed.data_parallel.replica_messages import PartEntry, PartOutline
from aiograd.errors import ProtocolError
from aiograd.running.types import Array
from aiograd.tensors.core import TensorCore, make

#: number of the parameter, first element, behind the last one, name in the state, value: a flat array or a number
PieceState: TypeAlias = tuple[int, int, int, str, Any]


class ParameterPiece(NamedTuple):
    """Elements ``[start, stop)`` of a parameter."""

    parameter: int
    start: int
    stop: int


class ParameterLine:
    """The parameters of one dtype, one after the other. See Note [Shards] in `zero_redundancy_optimizer`.

    Args:
        indices: of the parameters.
        counts: of the elements of all parameters.
        dtype: of these.
        size: members.
    """

    def __init__(self, indices: Sequence[int], counts: Sequence[int], dtype: np.dtype, size: int) -> None:
        self.indices = indices
        self.dtype = dtype
        total = sum(counts[index] for index in indices)
        even, longer = divmod(total, size)
        #: by rank its pieces
        self.pieces: list[list[ParameterPiece]] = []
        begins = np.cumsum([0, *(counts[index] for index in indices)]).tolist()
        for rank in range(size):
            first = even * rank + min(rank, longer)
            last = first + even + (rank < longer)
            found = []
            for index, begin in zip(indices, begins, strict=False):
                start, stop = max(first - begin, 0), min(last - begin, counts[index])
                if start < stop:
                    found.append(ParameterPiece(index, start, stop))
            self.pieces.append(found)


def states_of(pieces: Sequence[ParameterPiece], state: Mapping[int, Mapping[str, Any]]) -> list[PieceState]:
    """The state of an optimizer of pieces, value by value; it is by the index of a piece."""
    found = [(pieces[index], name, value) for index, values in state.items() for name, value in values.items()]
    return [(*piece, name, value._data.reshape(-1) if isinstance(value, TensorCore) else value) for piece, name, value in found]


def pack(groups: Iterable[Mapping[str, Any]], states: Iterable[PieceState]) -> Array:
    """Parameter groups and states of pieces as bytes: the length of the outline, the outline, and the elements of the arrays."""
    entries, arrays = [], []
    for number, start, stop, name, value in states:
        is_array = isinstance(value, np.ndarray)
        entries.append(PartEntry(number, start, stop, name, is_array, None if is_array else value))
        arrays += [value.view(np.uint8)] if is_array else []
    told = to_json(PartOutline([*map(dict, groups)], entries))
    return np.concatenate([np.frombuffer(len(told).to_bytes(8, "little") + told, np.uint8), *arrays])


def unpack(parts: Iterable[Array], dtypes: Sequence[np.dtype]) -> tuple[list[dict[str, Any]], list[PieceState]]:
    """The parameter groups of the last part that `pack` has made, and the states of all parts, by the dtypes of the parameters.

    Raises:
        ProtocolError: a part makes no sense.
    """
    groups: list[dict[str, Any]] = []
    states: list[PieceState] = []
    for part in parts:
        begin = 8 + int.from_bytes(part[:8].tobytes(), "little")
        outline = from_json(PartOutline, part[8:begin])
        groups = outline.groups
        try:
            for each in outline.entries:
                value = each.value
                if each.is_array:
                    dtype = dtypes[each.number]
                    end = begin + (each.stop - each.start) * dtype.itemsize
                    value, begin = part[begin:end].view(dtype), end
                states.append((each.number, each.start, each.stop, each.name, value))
        except (ValueError, IndexError) as error:
            text = f"the state of an optimizer: its arrays do not fit its outline: {type(error).__name__}: {error}"
            raise ProtocolError(text, code="optimizer") from error
    return groups, states


def assembled_whole(shapes: Mapping[int, tuple[int, ...]], states: Iterable[PieceState]) -> dict[int, dict[str, Any]]:
    """The state of whole parameters by number, from the states of pieces; see `assembled`."""
    pieces = [ParameterPiece(number, 0, math.prod(shapes[number])) for number in sorted(shapes)]
    state = {pieces[index].parameter: values for index, values in sorted(assembled(pieces, states).items())}
    for number, values in state.items():
        values.update({name: make(value._data.reshape(shapes[number])) for name, value in values.items() if isinstance(value, TensorCore)})
    return state


def assembled(pieces: Sequence[ParameterPiece], entries: Iterable[PieceState]) -> dict[int, dict[str, Any]]:
    """The state of pieces by their index, from the state of other pieces that cover them.

    Raises:
        ProtocolError: they do not cover one of them.
    """
    at: dict[int, list[int]] = {}
    for index, piece in enumerate(pieces):
        at.setdefault(piece.parameter, []).append(index)
    state: dict[int, dict[str, Any]] = {}
    covered: dict[tuple[int, str], set[tuple[int, int]]] = {}
    for number, start, stop, name, value in entries:
        for index in at.get(number, ()):
            piece = pieces[index]
            low, high = max(start, piece.start), min(stop, piece.stop)
            if low >= high:
                continue
            mine = state.setdefault(index, {})
            if not isinstance(value, np.ndarray):
                mine[name] = value
                continue
            if name not in mine:
                mine[name] = make(np.empty(piece.stop - piece.start, value.dtype))
            mine[name]._data[low - piece.start : high - piece.start] = value[low - start : high - start]
            covered.setdefault((index, name), set()).add((low, high))  # the copies of a shard have the same limits
    for (index, name), ranges in covered.items():
        piece = pieces[index]
        if sum(high - low for low, high in ranges) != piece.stop - piece.start:
            text = f"{name} of parameter {piece.parameter} is there for {sorted(ranges)} of elements {piece.start} to {piece.stop} only"
            raise ProtocolError(text, code="optimizer")
    return state
