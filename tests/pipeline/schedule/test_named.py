"""The named schedules: their timetables as their docstrings draw them, their orders and costs as published, their sizes."""

from __future__ import annotations

import hashlib
import inspect
import re

import pytest
from hypothesis import given

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline import ActionKind, tick_count
from aiograd.pipeline.schedule.named import ALIASES, FAMILIES, build_named
from aiograd.pipeline.schedule.named.row import Size
from tests.pipeline.schedule.drawing import cost, draw
from tests.pipeline.schedule.rows import GRID, named_schedules, written

K = ActionKind
BY_NAME = {family.name: family for family in FAMILIES}
#: orders as published, for 2 ranks and 4 microbatches
ORDERS = {
    ("1F1B", 1): "0F0 0F1 0B0 0F2 0B1 0F3 0B2 0B3 / 1F0 1B0 1F1 1B1 1F2 1B2 1F3 1B3",
    ("ZB-H1", 1): "0F0 0F1 0I0 0W0 0F2 0I1 0W1 0F3 0I2 0W2 0I3 0W3 / 1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1F3 1I3 1W2 1W3",
    ("Interleaved1F1B", 2): (
        "0F0 0F1 2F0 2F1 0F2 2B0 0F3 2B1 2F2 0B0 2F3 0B1 2B2 2B3 0B2 0B3 / 1F0 1F1 3F0 3B0 3F1 3B1 1F2 1B0 1F3 1B1 3F2 3B2 3F3 3B3 1B2 1B3"
    ),
}
#: digest of PyTorch's artifacts/dualpipev_4rank_10mb.csv
PUBLISHED_DUAL_PIPE_V = "16ce4a29936e4c5ad774098add32489b4937942e3f5ab0108f17d2826b184529"
#: cost in units of a rank's F = I = W, for 2 ranks and 4 microbatches, and for 4 and 8
COSTS = {
    ("GPipe", 1): (15, 33), ("1F1B", 1): (15, 33), ("ZB-H1", 1): (13, 27), ("ZB-H2", 1): (12, 24), ("Interleaved1F1B", 2): (13.5, 28.5),
    ("LoopedBFS", 2): (13.5, 28.5), ("ZB1P", 2): (12.5, 25.5), ("ZB-V", 2): (12, 24), ("DualPipeV", 2): (13, 27),
}  # fmt: skip


def drawn_case(family) -> tuple[Size, list[str]]:
    """The size and the lines of the timetable in the docstring of a generator."""
    text = inspect.getdoc(family.row)
    ranks, microbatches, chunks = re.search(r"^(\d+) ranks, (\d+) microbatches(?:, (\d+) stages per rank)?::$", text, re.MULTILINE).groups()
    return Size(int(ranks), int(microbatches), int(chunks or 1)), [line.strip() for line in text.splitlines() if line.startswith("    rank ")]


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_the_drawn_timetable(family):
    size, lines = drawn_case(family)
    assert draw(build_named(family.name, *size)) == lines


@pytest.mark.parametrize(("name", "chunks"), ORDERS)
def test_published_orders(name, chunks):
    assert written(build_named(name, 2, 4, chunks).ranks) == ORDERS[name, chunks]


def test_the_published_order_of_dual_pipe_v():
    assert hashlib.sha256(build_named("DualPipeV", 4, 10, 2).to_csv().encode()).hexdigest() == PUBLISHED_DUAL_PIPE_V


@pytest.mark.parametrize(("name", "chunks"), COSTS)
def test_published_costs(name, chunks):
    found = tuple(cost(build_named(name, ranks, microbatches, chunks)) / chunks for ranks, microbatches in ((2, 4), (4, 8)))
    assert found == COSTS[name, chunks]


@pytest.mark.parametrize(("times", "bubble"), [((2, 2, 1), 3.0), ((1, 1.2, 0.8), 1.2), ((1, 2, 1), 3.0), ((3, 1, 1), 6.0), ((1, 1, 1.5), 0.5)])
def test_published_bubbles_of_zb_v(times, bubble):
    chunk = dict(zip((K.F, K.I, K.W), (time / 2 for time in times), strict=True))
    assert cost(build_named("ZBV", 4, 12, 2), chunk) - 12 * sum(times) == pytest.approx(bubble)


@pytest.mark.parametrize("ranks", range(1, 6))
@pytest.mark.parametrize("microbatches", [1, 2, 4, 5, 8, 11])
def test_zb_h1_is_zb1p_with_one_stage(ranks, microbatches):
    try:
        interleaved = build_named("ZB1P", ranks, microbatches)
    except ArgumentError:
        return
    assert interleaved == build_named("ZB-H1", ranks, microbatches)


@pytest.mark.parametrize(("ranks", "microbatches"), [(2, 3), (3, 5), (4, 7), (4, 12), (6, 11)])
def test_schedules_without_bubble(ranks, microbatches):
    """At equal times and enough microbatches."""
    assert cost(build_named("ZB-H2", ranks, microbatches)) == 3 * microbatches
    assert cost(build_named("ZBV", ranks, microbatches, 2)) / 2 == 3 * microbatches


@pytest.mark.parametrize("name", ["GPipe", "1F1B"])
def test_idle_cells_show_the_bubble(name):
    for rank, cells in enumerate(build_named(name, 4, 6).ranks):
        assert cells[: rank + 1].count(None) == rank
        assert cells.count(None) == rank + 3 * (3 - rank)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize(("chunks", "microbatches", "ranks"), GRID)
def test_the_grid_of_sizes(family, chunks, microbatches, ranks):
    if ranks == 64 and family.name not in ("Interleaved1F1B", "LoopedBFS"):
        return  # seconds each, and nothing that the others do not show
    if family.check(Size(ranks, microbatches, chunks)):
        with pytest.raises(ArgumentError, match=family.name):
            build_named(family.name, ranks, microbatches, chunks)
        return
    one = build_named(family.name, ranks, microbatches, chunks).validate()
    assert (one.num_ranks, one.num_microbatches, one.num_stages, one.name) == (ranks, microbatches, ranks * chunks, family.name)
    if ranks < 64:
        assert tick_count(one.merge().lower()) > 0


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
@pytest.mark.parametrize("microbatches", [1, 2, 3, 8])
def test_a_single_rank(family, microbatches):
    chunks = 2 if family.layout == "v" else 1
    if family.name == "DualPipeV" and microbatches < 2:
        return
    one = build_named(family.name, 1, microbatches, chunks).validate()
    assert not one.lower().is_lowered
    assert tick_count(one) == len(one.ranks[0])


@given(named_schedules())
def test_each_rank_does_everything_once(one):
    for stage, home in enumerate(one.stage_to_rank):
        done = [part for action in one.ranks[home] if action for part in action.computations if part.stage == stage]
        for kind in (K.F, K.I, K.W, K.B):
            found = [part.microbatch for part in done if part.kind is kind]
            assert found == sorted(found, reverse=kind is K.B and one.name == "LoopedBFS")
        assert sorted(part.microbatch for part in done if part.kind is K.F) == list(range(one.num_microbatches))
        backwards = sorted(part.microbatch for part in done if part.kind in (K.B, K.W))
        assert backwards == ([] if one.is_forward_only else list(range(one.num_microbatches)))


@pytest.mark.parametrize("name", [*BY_NAME, *ALIASES])
def test_names_are_taken_in_any_case(name):
    chunks = 2 if (ALIASES.get(name) or BY_NAME[name]).layout == "v" else 1
    assert build_named(name.lower(), 2, 4, chunks) == build_named(name.upper(), 2, 4, chunks) == build_named(name, 2, 4, chunks)


@pytest.mark.parametrize("name", ["ScheduleThatDoesNotExist", "", "1F1B ", "auto"])
def test_unknown_names_are_told(name):
    with pytest.raises(ArgumentError, match=f"{name!r}.*GPipe, 1F1B"):
        build_named(name, 2, 4)


@pytest.mark.parametrize(
    ("name", "size", "reason"),
    [
        ("1F1B", (4, 3, 1), "at least as many microbatches as ranks"),
        ("1F1B", (2, 4, 2), "one stage per rank, not 2"),
        ("GPipe", (2, 4, 2), "one stage per rank"),
        ("ZB-H1", (2, 4, 2), "one stage per rank"),
        ("ZB-H2", (2, 4, 2), "one stage per rank"),
        ("ZBVZeroBubble", (2, 4, 1), "stages_per_rank=2"),
        ("ZBVZeroBubble", (2, 4, 3), "exactly two stages per rank"),
        ("DualPipeV", (2, 4, 1), "exactly two stages per rank"),
        ("DualPipeV", (2, 3, 2), "twice as many microbatches as ranks"),
        *(("Interleaved1F1B", (4, microbatches, 2), "a multiple of") for microbatches in (9, 11, 13)),
        *(("InterleavedZeroBubble", (4, microbatches, 2), "a multiple of") for microbatches in (9, 11, 13)),
        ("GPipe", (0, 4, 1), "ranks .* at least 1, not 0"),
        ("GPipe", (2, 0, 1), "microbatches .* at least 1, not 0"),
        ("GPipe", (2, 4, -1), "stages_per_rank .* at least 1, not -1"),
    ],
)
def test_sizes_without_such_a_schedule_are_refused(name, size, reason):
    with pytest.raises(ArgumentError, match=reason):
        build_named(name, *size)


@pytest.mark.parametrize("microbatches", [3, 10, 12, 15])
def test_rounds_need_not_be_as_long_as_ranks(microbatches):
    for name in ("Interleaved1F1B", "InterleavedZeroBubble"):
        build_named(name, 4, microbatches, 2).validate()


@pytest.mark.parametrize("arguments", [("GPipe", 2.0, 4), ("GPipe", 2, "4"), ("GPipe", 2, 4, None), ("GPipe", True, 4), (None, 2, 4)])
def test_types_are_checked(arguments):
    with pytest.raises(ArgumentTypeError):
        build_named(*arguments)
