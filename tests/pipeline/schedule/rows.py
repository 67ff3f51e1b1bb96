"""Schedules written as text, and schedules of all kinds and sizes."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import strategies as st

from aiograd.pipeline.schedule.action import Action
from aiograd.pipeline.schedule.named import FAMILIES, build_named
from aiograd.pipeline.schedule.named.row import Size
from aiograd.pipeline.schedule.schedule import Schedule

#: the grid of PyTorch's tests: stages per rank, microbatches, ranks
GRID = (
    (2, 2, 2), (2, 4, 4), (2, 8, 2), (2, 8, 4), (2, 8, 8), (4, 4, 4), (4, 8, 4), (4, 8, 8), (4, 16, 4), (4, 32, 4), (4, 64, 4), (4, 16, 16),
    (4, 32, 32), (4, 128, 64), (3, 2, 2), (3, 8, 2), (3, 12, 4), (4, 6, 3), (4, 10, 5), (2, 3, 4), (2, 10, 4), (2, 15, 4),
)  # fmt: skip


def row(text: str) -> list[Action | None]:
    """``"0F0 . 0B0"``: cells between spaces, a dot for an idle one."""
    return [None if cell == "." else Action.parse(cell) for cell in text.split()]


def rows(text: str) -> list[list[Action | None]]:
    """``"0F0 0B0 / 1F0 1B0"``: rows between slashes."""
    return [row(part) for part in text.split("/")]


def schedule(text: str, **options: object) -> Schedule:
    return Schedule(rows(text), **options)


def written(ranks: Sequence[Sequence[Action | None]], idle: bool = False) -> str:
    """The inverse of `rows`; idle cells are left out unless asked for."""
    return " / ".join(" ".join("." if action is None else str(action) for action in part if idle or action) for part in ranks)


@st.composite
def named_schedules(draw: st.DrawFn, ranks: int = 6, microbatches: int = 13, chunks: int = 4) -> Schedule:
    """A named schedule of a size that it exists in."""
    family = draw(st.sampled_from(FAMILIES))
    sizes = st.builds(Size, st.integers(1, ranks), st.integers(1, microbatches), st.integers(1, chunks))
    size = draw(sizes.filter(lambda size: not family.check(size)))
    return build_named(family.name, *size)
