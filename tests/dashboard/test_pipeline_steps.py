"""Steps of pipelines on the dashboard: whole ones only, with the figures that the pipeline's own timeline has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.dashboard import pipeline_steps
from aiograd.dashboard.board import Board
from aiograd.dashboard.pipeline_steps import PipelineSteps, last_step, read_steps
from aiograd.dashboard.sampling import Sampler
from aiograd.pipeline import Action, Costs, Pipeline, Timeline, make_schedule, simulate
from tests.dashboard.test_board import answer, report
from tests.dashboard.test_watching import watching
from tests.distributed.workers import workers

KEY = (7, 8)


@pytest.fixture
def sampler() -> Iterator[Sampler]:
    made = Sampler(100, 40)
    yield made
    made.close()


def rows_of(timeline: Timeline, ranks: tuple[int, ...], ended: bool = False, key: tuple[int, int] = KEY, at: float = 0.0) -> dict[str, Any]:
    """The report of a worker with some of the ranks of a step; times of the timeline in milliseconds."""
    steps = PipelineSteps()
    for rank, action, start, end in timeline.events:
        if rank in ranks:
            steps.acted(key, rank, action, round((at + start) * 1e6), round((at + end) * 1e6))
    if ended:
        steps.ended(key, "1F1B", "20 % by the schedule", [counts_of(timeline)], round(at * 1e6), round((at + timeline.duration) * 1e6))
    rows: dict[str, Any] = json.loads(json.dumps(steps.rows(0)))
    return rows


def counts_of(timeline: Timeline) -> dict[int, int]:
    return {rank: sum(event.rank == rank and event.action.kind.is_compute for event in timeline.events) for rank in range(timeline.ranks)}


TIMELINE = simulate(make_schedule("1F1B", ranks=2, microbatches=4), Costs(2, 3, 1, 0.5))


def shown(board: Board) -> Any:
    board.draw_step()
    return answer(board)["pipeline"]


def test_a_step_is_drawn_when_every_action_of_every_rank_is_there() -> None:
    board = Board("driver")
    assert answer(board)["pipeline"] is None
    board.arrived("driver", report(steps=rows_of(TIMELINE, (0,), ended=True)), 1.0, 1.0)
    assert shown(board) is None, "one rank of two"
    board.arrived("left", report(now=1_000_000, steps=rows_of(TIMELINE, (1,))), 1.0, 1.0)
    drawn = shown(board)
    assert drawn["bubble"] == pytest.approx(TIMELINE.bubble_rate, abs=1e-4), "as the timeline of the pipeline says"
    assert drawn["us"] == pytest.approx(TIMELINE.duration * 1e3, abs=1)
    assert [row["label"] for row in drawn["ranks"]] == ["rank 0", "rank 1"] and [row["worker"] for row in drawn["ranks"]] == ["driver", "left"]
    boxes = {(row, f"{stage}{kind}{microbatch}"): (begin, length) for row, _, _, kind, microbatch, stage, begin, length in drawn["boxes"]}
    assert len(boxes) == len(drawn["boxes"]) == 16
    for event in TIMELINE.events:
        if event.action.kind.is_compute:
            begin, length = boxes[event.rank, str(event.action)]
            assert begin == pytest.approx(event.start * 1e3, abs=1) and length == pytest.approx((event.end - event.start) * 1e3, abs=1)


def test_a_fragment_never_takes_the_place_of_a_whole_step() -> None:
    board = Board("driver")
    board.arrived("driver", report(steps=rows_of(TIMELINE, (0, 1), ended=True)), 1.0, 1.0)
    whole = shown(board)
    assert whole["version"] == 1
    fragment = rows_of(TIMELINE, (0, 1), ended=True, key=(9, 9), at=50.0)
    fragment["actions"][0][1].pop()
    board.arrived("driver", report(steps=fragment), 2.0, 2.0)
    assert shown(board) == whole
    board.arrived("driver", report(steps=rows_of(TIMELINE, (0, 1), ended=True, key=(10, 10), at=90.0)), 3.0, 3.0)
    assert shown(board)["version"] == 2
    assert json.loads(board.answer(0, 0, 0, 1.0, pipeline=2))["pipeline"] is None, "what the page has is not sent again"


def test_an_action_that_was_done_again_counts_once() -> None:
    rows = rows_of(TIMELINE, (0, 1), ended=True)
    again = rows_of(TIMELINE, (1,), at=30.0)
    step = last_step({"driver": read_steps(rows, 0.0), "right": read_steps(again, 0.0)})
    assert step is not None and len(step.events) == 16


def test_replicas_have_ranks_of_their_own() -> None:
    steps = PipelineSteps()
    for first in (0, 2):
        for rank, action, start, end in TIMELINE.events:
            steps.acted(KEY, first + rank, action, round(start * 1e6), round(end * 1e6 * (1 + first)))
    steps.ended(KEY, "1F1B", None, [counts_of(TIMELINE), {rank + 2: count for rank, count in counts_of(TIMELINE).items()}], 0, 10**9)
    board = Board("driver")
    board.arrived("driver", report(steps=steps.rows(0)), 1.0, 1.0)
    drawn = shown(board)
    assert [row["label"] for row in drawn["ranks"]] == ["rank 0", "rank 1", "rank 2", "rank 3"] and len(drawn["boxes"]) == 32


@pytest.mark.parametrize(
    "rows",
    [
        None, [], "x", {"actions": 5, "ended": 5}, {"actions": [[1]], "ended": [["k", "n", None, [[[0, 1]]], 0, 1]]},
        {"actions": [["k", [[0, "0F0", 0, 5], [0, "?", 0, 5], ["a"], [0, "0F0", None, 5], [0, "1F0", 5, -9], [10**9, "0F0", 5, 9]]]], "ended": []},
        {"actions": [["k", [[0, "0F0", 0, 5], [1, "0B0", 0, 5]]]], "ended": [["k", "n", None, [[[0, 1], [1, 1]]], 0, 1]]},
        {"actions": [["k", []]], "ended": [["k", "n", None, [[]], 0, 1], ["k", "n", None, [], 0, 1], ["k", 3], ["k", "n", 5, [[[0, 1]]], 0, 1]]},
    ],
)  # fmt: skip
def test_rows_that_make_no_step_draw_nothing(rows: Any) -> None:
    board = Board("driver")
    board.arrived("left", report(steps=rows), 1.0, 1.0)
    assert shown(board) is None


def test_only_so_much_is_kept_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pipeline_steps, "MOST_ACTIONS", 10)
    steps = PipelineSteps()
    for number in range(50):
        for microbatch in range(4):
            steps.acted((number, 0), 0, Action(0, ag.pipeline.ActionKind.F, microbatch), 0, 1)
        steps.ended((number, 0), "x", None, [{0: 4}], 0, 1)
    for microbatch in range(40):
        steps.acted((99, 0), 0, Action(0, ag.pipeline.ActionKind.F, microbatch), 0, 1)
    rows = steps.rows(0)
    assert sum(len(actions) for _, actions in rows["actions"]) <= 10
    assert [key for key, *_ in rows["ended"]][-1] == [key for key, _ in rows["actions"]][-1], "the latest, whole or not at all"


def pipeline(ranks: int, microbatches: int) -> Pipeline:
    return Pipeline([ag.nn.Linear(4, 4) for _ in range(ranks)], make_schedule("1F1B", ranks=ranks, microbatches=microbatches), loss_fn=squares)


def squares(output: Any, target: Any) -> Any:
    return ((output - target) ** 2).mean()


async def test_steps_that_outlast_a_window_are_recorded_whole(sampler: Sampler) -> None:
    """A window is closed by the first events of a step, and another opens in the middle of the next."""
    data = ag.tensor(np.ones((8, 4), np.float32))
    board = Board("driver")
    async with pipeline(2, 8) as pipe:
        for number in range(6):
            sampler.tick(number * 0.6)
            assert sampler.is_open or number
            await pipe.step(data, data)
            assert not sampler.is_open, "a step makes more events than are allowed"
        await pipe.step(data, data)
        board.arrived("driver", report(steps=sampler.steps.rows(0)), 1.0, 1.0)
        drawn = shown(board)
        assert len(drawn["boxes"]) == 2 * 8 * 2 and 0 <= drawn["bubble"] < 1
        assert drawn["name"] == "1F1B" and "by the schedule" in drawn["promise"]
        assert not drawn["version"] > 1


async def test_a_step_that_began_before_the_window_is_not_recorded(sampler: Sampler) -> None:
    data = ag.tensor(np.ones((8, 4), np.float32))

    def late(output: Any, target: Any) -> Any:
        sampler.tick(0.0)
        return squares(output, target)

    stages = [ag.nn.Linear(4, 4), ag.nn.Linear(4, 4)]
    async with Pipeline(stages, make_schedule("1F1B", ranks=2, microbatches=4), loss_fn=late) as pipe:
        await pipe.step(data, data)
    rows = sampler.steps.rows(0)
    assert rows == {"actions": [], "ended": []} and last_step({"driver": read_steps(rows, 0.0)}) is None


service = dist.Service()
service.reference(ag.nn.Linear)


async def test_a_step_of_several_workers_is_put_together() -> None:
    async with workers("driver", "left", "right", service=service) as (driver, left, right):
        with watching(driver, left, right) as (collector, _):
            await collector.ask_round()
            stages = [await driver.remote_module(name, "Linear", 4, 4) for name in ("left", "right")]
            data = ag.tensor(np.ones((8, 4), np.float32))
            async with Pipeline(stages, make_schedule("1F1B", ranks=2, microbatches=4), loss_fn=squares, worker=driver) as pipe:
                await pipe.step(data, data)
                collector._rounds = 0
                await collector.ask_round()
            drawn = json.loads(collector.board.answer(0, 0, 0, 1.0))["pipeline"]
            assert [row["worker"] for row in drawn["ranks"]] == ["left", "right", "driver"], "and the loss, which is computed here"
            assert len(drawn["boxes"]) == 3 * 4 * 2
