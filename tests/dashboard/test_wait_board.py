"""Waits on the dashboard and in the metrics: read on each worker, checked on the board, drawn as a graph."""

from __future__ import annotations

import asyncio
import json
import threading
from typing import Any

import pytest

from aiograd import distributed as dist
from aiograd.dashboard import reporter
from aiograd.dashboard.board import Board
from aiograd.dashboard.wait_board import LEAST, LETTERS, MOST_BOXES, MOST_ROWS, WaitBoard, wait_rows
from aiograd.distributed import asking
from tests.dashboard.test_metrics import families, value
from tests.dashboard.test_watching import watching
from tests.distributed.workers import exposing, simulate, workers
from tests.support import run_by

in_time = run_by(lambda test: simulate(test), given=0)
HELD = dist.HeldLoop("third", 3.5, "slow.py:9")


def board_of(*waits: dist.Wait, held: tuple[dist.HeldLoop, ...] = ()) -> WaitBoard:
    board = WaitBoard()
    for name in dict.fromkeys(wait.worker for wait in waits):
        mine = dist.WaitReport(tuple(wait for wait in waits if wait.worker == name), held)
        board.arrived(name, json.loads(json.dumps(wait_rows(mine))))
    return board


def stand(*, begun: asyncio.Event, end: asyncio.Event) -> dist.Service:
    async def stuck() -> None:
        begun.set()
        await end.wait()

    return exposing(stuck)


@in_time
async def test_waits_of_all_workers_are_in_the_data_of_the_page(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = asyncio.Event(), asyncio.Event()
    async with workers("driver", "left", service=stand(begun=begun, end=end)) as (driver, left):
        with watching(driver, left) as (collector, _):
            call = asyncio.ensure_future(driver.call("left", "stuck"))
            await begun.wait()
            await collector.ask_round()
            waits = json.loads(collector.board.answer(0, 0, 0, 1.0))["waits"]
            assert waits["rows"] == waits["held"] == [], "what waits for a moment only is not shown"
            await asyncio.sleep(2 * LEAST)
            monkeypatch.setattr(asking, "held_loops", lambda core, principal: (HELD,) if core.name == "left" else ())
            await collector.ask_round()
            waits = json.loads(collector.board.answer(0, 0, 0, 1.0))["waits"]
            assert [row[0] for row in waits["rows"]] == ["driver", "left"] and all(row[6] >= LEAST for row in waits["rows"]), waits
            assert waits["rows"][0][2:4] == waits["rows"][1][:2] and waits["cycles"] == 0 and waits["waits"] == 2
            assert [frame["worker"] for frame in waits["frames"]] == ["driver", "left"] and waits["held"] == [["third", 3.5, "slow.py:9"]]
            (arrow,) = waits["arrows"]
            assert [waits["boxes"][arrow[end]]["worker"] for end in ("from", "to")] == ["driver", "left"] and arrow["place"] == 0
            end.set()
            await call
            await collector.ask_round()
            assert json.loads(collector.board.answer(0, 0, 0, 1.0))["waits"]["rows"] == []


@in_time
async def test_metrics_have_the_longest_wait_by_kind_and_ask_no_peer(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = asyncio.Event(), asyncio.Event()
    async with workers("driver", "left", service=stand(begun=begun, end=end)) as (driver, left):
        found = families(left._core)["aiograd_waiting_seconds"]
        assert {(each.labels["kind"], each.value) for each in found.samples} == {
            (kind, 0.0) for kind in ("pass", "step", "call", "collective", "commit", "other")
        }
        call = asyncio.ensure_future(driver.call("left", "stuck"))
        await begun.wait()
        await asyncio.sleep(5.0)
        calls = driver._core.meter.histograms["call"].count
        monkeypatch.setattr(asking, "held_loops", lambda core, principal: (HELD,))
        found = families(left._core)
        assert value(found["aiograd_waiting_seconds"], "aiograd_waiting_seconds", worker="left", kind="call") == pytest.approx(5.0, abs=0.1)
        assert value(found["aiograd_waiting_seconds"], "aiograd_waiting_seconds", worker="left", kind="pass") == 0
        of_driver = families(driver._core)["aiograd_waiting_seconds"]  # its task belongs to no call of its own
        assert {each.labels["kind"]: each.value for each in of_driver.samples if each.value} == {"call": pytest.approx(5.0, abs=0.1)}
        assert value(found["aiograd_loop_held_seconds"], "aiograd_loop_held_seconds", worker="left", peer="third") == 3.5
        assert driver._core.meter.histograms["call"].count == calls
        end.set()
        await call


async def test_metrics_may_be_asked_for_in_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, end = asyncio.Event(), asyncio.Event()
    async with workers("driver", "left", service=stand(begun=begun, end=end)) as (driver, left):
        call = asyncio.ensure_future(driver.call("left", "stuck"))
        await begun.wait()
        loops = []
        monkeypatch.setattr(asking, "held_loops", lambda core, principal: loops.append(threading.get_ident()) or ())
        assert len((await asyncio.to_thread(reporter.waits_here, left._core)).waits) == 1
        assert loops == [threading.get_ident()], "the tables are read where they are written"
        end.set()
        await call
    assert await asyncio.to_thread(reporter.waits_here, left._core) is not None


def test_a_loop_that_does_not_answer_another_thread_has_no_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reporter, "LOOP_SECONDS", 0.0)
    loop: Any = type("Loop", (), {"call_soon_threadsafe": lambda self, call: None})()
    core: Any = type("Core", (), {"loop": loop})()
    assert reporter.waits_here(core) == dist.WaitReport()


def test_a_worker_tells_of_its_own_waits_and_malformed_rows_are_left_out() -> None:
    board = WaitBoard()
    good = ["pass 1", "b", "pass 1", "SendNode", "x.py:1", 2.0, "gradient"]
    for rows in (None, 5, [], {"waits": 5, "held": {}}, {"waits": [5, [], [1] * 7, [*good, 1, 2], [*good[:5], "2", ""], [*good[:5], -1.0, ""]]}):
        board.arrived("a", rows)
        assert board.picture()["rows"] == []
    board.arrived("a", {"waits": [good, None], "held": [["c", 1.5, "y.py:2"], ["c", float("nan"), ""], "c"]})
    assert board.picture()["rows"] == [["a", *good[:5], 2.0, "gradient"]] and board.picture()["held"] == [["c", 1.5, "y.py:2"]]
    board.arrived("a", {"waits": [good] * 10_000})
    assert board.picture()["waits"] == MOST_ROWS
    board.forget("a")
    assert board.picture()["rows"] == []


def test_a_worker_that_is_lost_waits_for_nothing() -> None:
    board = Board("driver")
    rows = wait_rows(dist.WaitReport((dist.Wait("left", "t", "driver", "t", seconds=2.0),)))
    for end in (lambda: board.failed("left", "lost", "gone", 2.0), lambda: board.forget("left")):
        board.arrived("left", {"now": 0, "state": {"pid": 1}, "waits": rows}, 1.0, 1.0)
        assert len(json.loads(board.answer(0, 0, 0, 1.0))["waits"]["rows"]) == 1
        end()
        assert json.loads(board.answer(0, 0, 0, 1.0))["waits"]["rows"] == []


def test_cycles_are_marked_and_come_first() -> None:
    picture = board_of(
        dist.Wait("a", "s", "b", "t", seconds=9.0),
        dist.Wait("b", "t", "c", "u", seconds=2.0),
        dist.Wait("c", "u", "b", "t", seconds=3.0),
        dist.Wait("c", "v", seconds=4.0, what="executor"),
        held=(HELD,),
    ).picture()
    assert [row[:2] for row in picture["rows"]] == [["c", "u"], ["b", "t"], ["a", "s"], ["c", "v"]] and picture["cycles"] == 1
    names = [(box["worker"], box["name"], box["cycle"]) for box in picture["boxes"]]
    assert {*names} == {("a", "s", False), ("b", "t", True), ("c", "u", True), ("c", "v", False)}
    arrows = {(picture["boxes"][each["from"]]["name"], picture["boxes"][each["to"]]["name"]): each["cycle"] for each in picture["arrows"]}
    assert arrows == {("s", "t"): False, ("t", "u"): True, ("u", "t"): True} and picture["held"] == [["third", 3.5, "slow.py:9"]]


def test_boxes_lie_in_the_frames_of_their_workers_and_apart() -> None:
    waits = [dist.Wait(f"w{i % 7}", f"pass {i} " + "x" * i, f"w{(i + 1) % 7}", f"pass {i + 1} " + "x" * (i + 1), seconds=1.0 + i) for i in range(40)]
    picture = board_of(*waits).picture()
    assert len(picture["boxes"]) <= MOST_BOXES and picture["waits"] == 40 > len(picture["rows"]) > 10
    frames = {frame["worker"]: frame for frame in picture["frames"]}
    sides = []
    for box in picture["boxes"]:
        frame = frames[box["worker"]]
        left, right, top, bottom = box["x"] - box["w"] / 2, box["x"] + box["w"] / 2, box["y"] - box["h"] / 2, box["y"] + box["h"] / 2
        assert frame["x"] < left and right < frame["x"] + frame["w"] and 0 < top and bottom < frame["h"] and len(box["name"]) <= LETTERS
        assert all(right < other[0] or other[1] < left or bottom < other[2] or other[3] < top for other in sides)
        sides.append((left, right, top, bottom))
