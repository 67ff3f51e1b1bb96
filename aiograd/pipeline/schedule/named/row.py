"""Common parts of the generators of named schedules.

Note [Generators]
    A named schedule is a function of a rank and the size of the pipeline that yields the rank's row, in the words of the paper it is from.
    Its docstring draws the timetable of a small case, which the tests compare with its rows: in the drawings F, I and W take one
    column and B two, and an action starts as soon as its rank is free and its inputs are there.

    Generators may count on a size that `check` of their family has let through.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple, TypeAlias

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.layout import Layout


class Size(NamedTuple):
    """The size of a pipeline.

    Attributes:
        ranks: number of ranks.
        microbatches: number of microbatches.
        chunks: stages per rank.
    """

    ranks: int
    microbatches: int
    chunks: int

    @classmethod
    def checked(cls, ranks: int, microbatches: int, stages_per_rank: int) -> Size:
        """The size of a pipeline that a user asks for.

        Raises:
            ArgumentTypeError: a number is no int. ArgumentError: one is below 1.
        """
        for field, value in {"ranks": ranks, "microbatches": microbatches, "stages_per_rank": stages_per_rank}.items():
            if isinstance(value, bool) or not isinstance(value, int):
                raise ArgumentTypeError(f"{field} of a pipeline schedule is an int, not {type(value).__name__}")
            if value < 1:
                raise ArgumentError(f"{field} of a pipeline schedule is at least 1, not {value}")
        return cls(ranks, microbatches, stages_per_rank)

    @property
    def stages(self) -> int:
        """Number of stages."""
        return self.ranks * self.chunks

    @property
    def round(self) -> int:
        """Microbatches that an interleaved schedule passes through one chunk before it turns to the next: as many as ranks, or a few more."""
        return self.microbatches // max(1, self.microbatches // self.ranks)


Row: TypeAlias = Iterator[Action | None]


class Family(NamedTuple):
    """A named schedule.

    Attributes:
        name: the name as the literature writes it.
        row: yields the row of a rank; see Note [Generators].
        layout: the layout of its stages on ranks.
        check: says why there is no such schedule of a size; empty if there is.
    """

    name: str
    row: Callable[[int, Size], Row]
    layout: Layout
    check: Callable[[Size], str]


class Chunk:
    """One stage of a rank, which gives out its next action of each kind: microbatches are taken in order, each once per kind."""

    __slots__ = ("stage", "_counts")

    def __init__(self, stage: int) -> None:
        self.stage = stage
        self._counts: dict[ActionKind, int] = {}

    def count(self, kind: ActionKind) -> int:
        """The number of actions of a kind so far, which is the microbatch of the next one."""
        return self._counts.get(kind, 0)

    def next(self, kind: ActionKind) -> Action:
        """The next action of a kind. B counts as I, so that a stage may change from one to the other."""
        counted = ActionKind.I if kind is ActionKind.B else kind
        microbatch = self._counts.get(counted, 0)
        self._counts[counted] = microbatch + 1
        return Action(self.stage, kind, microbatch)


def any_size(size: Size) -> str:
    """The requirement of schedules of every size: none."""
    return ""


def one_chunk(size: Size) -> str:
    """The requirement of schedules with one stage per rank; empty if `size` meets it."""
    return "" if size.chunks == 1 else f"takes one stage per rank, not {size.chunks}"


def two_chunks(size: Size) -> str:
    """The requirement of schedules with stages that go to the last rank and back; empty if `size` meets it."""
    return "" if size.chunks == 2 else f"takes exactly two stages per rank (stages_per_rank=2), not {size.chunks}"


def even_rounds(size: Size) -> str:
    """The requirement of interleaved schedules, rounds of equal length; empty if `size` meets it."""
    rounds = max(1, size.microbatches // size.ranks)
    if size.microbatches % rounds == 0:
        return ""
    return f"needs a number of microbatches that makes {rounds} equal rounds (a multiple of {rounds}), not {size.microbatches}"
