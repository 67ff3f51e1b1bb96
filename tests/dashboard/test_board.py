"""The board: what comes in from workers, however odd, and what the page gets."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiograd.dashboard import board as board_module
from aiograd.dashboard.board import Board, read_report
from aiograd.dashboard.pass_graph import PassPart, RanNode, last_pass, picture, read_rows
from aiograd.serving.statistics import BOUNDS

STATE = {"pid": 1, "contexts": 2, "committed": 3, "memory": 1000, "peers": [["driver", True, 100, 50, 1.5, 0]]}
EVENT = ["mul", "forward", "mul", 1_000_000, 12.5, "MainThread", 1, 7, None, "2×3", 24, "a.py:3", None]


def report(**changes: Any) -> dict[str, Any]:
    return {"now": 5_000_000, "cursor": 1, "dropped": 0, "state": STATE, "events": [EVENT], "scalars": [], "graphs": None, "windows": [], **changes}


def answer(board: Board, after: int = 0, scalars: int = 0, graph: int = 0) -> dict[str, Any]:
    data: dict[str, Any] = json.loads(board.answer(after, scalars, graph, 10.0))
    return data


def test_a_report_is_shown_once() -> None:
    board = Board("driver")
    board.arrived("left", report(), 9.9, 10.1)
    data = answer(board)
    (worker,) = data["workers"]
    assert (worker["name"], worker["state"], worker["committed"], worker["memory"]) == ("left", "running", 3, 1000)
    assert data["links"] == [["left", "driver", True, 0, 0, 1.5, 0]]
    (event,) = data["events"]
    assert event[:4] == ["left", "mul", "forward", "mul"] and event[10:] == ["2×3", 24, "a.py:3", None]
    assert answer(board, after=data["cursor"])["events"] == []


def test_times_are_moved_to_one_clock_by_the_narrowest_round_trip() -> None:
    board = Board("driver")
    board.arrived("left", report(now=5_000_000), 9.0, 11.0)
    assert answer(board)["events"][0][4] == 1_000_000 + 5_000_000
    board.arrived("left", report(now=6_000_000), 10.9, 11.1)
    assert answer(board)["events"][1][4] == 1_000_000 + 5_000_000, "the middle of the question is the moment of the answer"
    board.arrived("left", report(now=9_000_000), 11.0, 15.0)
    assert answer(board)["events"][2][4] == 6_000_000, "a wider one tells less"
    board.arrived("left", report(now=1_000_000, state={**STATE, "pid": 2}), 20.0, 22.0)
    assert answer(board)["events"][3][4] == 1_000_000 + 20_000_000, "another process has another clock"


def test_a_state_keeps_since_when_it_holds() -> None:
    board = Board("driver")
    board.arrived("left", report(cursor=40), 0.9, 1.0)
    board.arrived("left", report(cursor=41), 1.9, 2.0)
    assert (board.worker("left").since, board.worker("left").cursor) == (1.0, 41)
    board.failed("left", "lost", "it crashed", 3.0)
    board.failed("left", "lost", "it crashed", 4.0)
    (worker,) = answer(board)["workers"]
    assert (worker["state"], worker["since"], worker["why"]) == ("lost", 3.0, "it crashed")
    assert board.worker("left").cursor == 0, "who comes back counts anew"
    board.arrived("left", report(), 4.9, 5.0)
    assert (board.worker("left").state, board.worker("left").since) == ("running", 5.0)


def test_a_round_trip_is_one_number_wherever_it_is_shown() -> None:
    board = Board("driver")

    def peers(**trips: float | None) -> dict[str, Any]:
        return report(state={**STATE, "peers": [[name, True, 1, 1, trip, 0] for name, trip in trips.items()]})

    board.arrived("driver", peers(left=42.0, right=1.5), 1.0, 1.0)
    board.arrived("left", peers(driver=1098.0, right=7.0), 1.0, 3.5)
    board.arrived("right", peers(driver=None, left=9.0), 1.0, 1.25)
    data = answer(board)
    by_link = {(row[0], row[1]): row[5] for row in data["links"]}
    assert by_link["driver", "left"] == by_link["left", "driver"] == 42.0, "as this worker's own statistics and metrics say"
    assert by_link["left", "right"] == by_link["right", "left"] == 7.0, "of others the lesser of what both ends measured"
    assert {worker["name"]: worker["round_trip"] for worker in data["workers"]} == {"driver": None, "left": 42.0, "right": 1.5}
    board.failed("left", "lost", "it crashed", 4.0)
    board.arrived("driver", peers(right=None), 5.0, 5.0)
    assert {worker["name"]: worker["round_trip"] for worker in answer(board)["workers"]} == {"driver": None, "left": None, "right": None}


def test_bytes_become_rates() -> None:
    board = Board("driver")
    board.arrived("left", report(), 1.0, 1.0)
    board.arrived("left", report(state={**STATE, "peers": [["driver", True, 300, 50, 1.5, 0]]}), 3.0, 3.0)
    assert answer(board)["links"][0][3:5] == [100, 0]


def test_only_so_much_is_kept_and_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "MOST_EVENTS", 5)
    board = Board("driver")
    for number in range(20):
        board.arrived("left", report(events=[[f"op{number}", *EVENT[1:]]] * 9), 1.0, 1.0)
    data = answer(board)
    assert [event[1] for event in data["events"]] == ["op19"] * 5 and data["cursor"] == 100
    assert board._events.maxlen == board_module.EVENTS


def test_scalars_belong_to_a_worker_and_odd_values_are_null() -> None:
    board = Board("driver")
    rows = [[1, None, "loss", 0, 0.5, 9.0], [2, "other", "loss", 1, float("inf"), 9.0], [3, None, "loss", 2, "x", 9.0]]
    board.arrived("left", report(scalars=rows), 1.0, 1.0)
    assert [row[:4] for row in answer(board)["scalars"]] == [["left", "loss", 0, 0.5], ["other", "loss", 1, None], ["left", "loss", 2, None]]
    assert board.worker("left").scalar_cursor == 3


@pytest.mark.parametrize("text", ["", "[", "[]", "null", "1" * 10, "[" * 100_000, '{"a":' * 50_000, None, b"{}", "{}" * 500_000])
def test_what_is_no_report_is_an_empty_one(text: Any) -> None:
    assert read_report(text) == {}
    board = Board("driver")
    board.arrived("left", read_report(text), 1.0, 1.0)
    assert board.worker("left").state == "silent"


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=14) | st.dictionaries(st.sampled_from([*STATE, "now", "events", "a"]), inner, max_size=5),
    max_leaves=25,
)


@settings(max_examples=30)
@given(fields=st.dictionaries(st.sampled_from([*report(), "x"]), JSON, max_size=8), row=st.lists(JSON, min_size=13, max_size=13))
def test_no_report_can_break_the_board(fields: dict[str, Any], row: list[Any]) -> None:
    board = Board("driver")
    steps = {"steps": {"actions": [["k", [row[:4]]]], "ended": [["k", "n", None, [[row[:2]]], 0, 1], row[:6]]}}
    server = {**dict.fromkeys(("version", "queued", "versions", "trainer", "follower"), row[0]), "name": "s", "latency": [row[1]] * len(BOUNDS)}
    servers = {"servers": [row[0], server, {**server, "versions": [row[:6], [1, "kept", *row[:4]], [1, "kept", 1, 1, 1, row]]}]}
    rows = [row[:7], ["t", "b", "t", "", "", *row[:2]], ["t", "left", "t", "", "", 1e300, ""], ["t", "left", "t", "", "", 2.0, ""]]
    waits = {"waits": {"waits": rows, "held": [row[:3], ["c", *row[:2]]]}}
    graphs = {"graphs": [[0, [row[:8]]], row[:2]]}
    for changes in (fields, {"events": [row]}, {"scalars": [row[:6]]}, {"windows": [row[:2]]}, graphs, steps, servers, waits):
        for now in (1.0, 2.0):
            board.arrived("left", read_report(json.dumps({**report(), **changes})), now, now)
    board.draw_graph(1.0)
    board.draw_step()
    answer(board)


# -------------------------------------------------------------------- the graph of a pass


def node(key: int, name: str, *following: int, edge: int = 0, peer: str = "", out: bool = False) -> RanNode:
    return RanNode(key, name, 1000 * key, 8, following, edge, peer, out)


DRIVER = PassPart({1: node(1, "SumBackward", 2), 2: node(2, "RecvNode", edge=7, peer="left", out=True)}, 0)
LEFT = PassPart({1: node(1, "SendNode", 2, edge=7, peer="driver"), 2: node(2, "MulBackward")}, 0)


def test_the_parts_of_a_pass_are_found_by_its_messages() -> None:
    other = PassPart({1: node(1, "SendNode", edge=9, peer="driver")}, 0)
    local = PassPart({1: node(1, "ExpBackward")}, 0)
    found = last_pass("driver", {"driver": [DRIVER, local], "left": [LEFT, other], "right": [LEFT]})
    assert found.parts == {"driver": DRIVER, "left": LEFT} and not found.missing
    assert last_pass("driver", {"driver": [local]}).parts == {"driver": local}
    assert last_pass("driver", {"left": [other]}).parts == {"left": other} and not last_pass("driver", {}).parts


def test_of_the_last_passes_the_latest_whole_one_is_drawn() -> None:
    later = PassPart({1: node(1, "RecvNode", edge=8, peer="left", out=True), 2: node(2, "SendNode", edge=5, peer="right")}, 0)
    found = last_pass("driver", {"driver": [DRIVER, later], "left": [LEFT]})
    assert found.parts == {"driver": DRIVER, "left": LEFT} and not found.missing
    alone = last_pass("driver", {"driver": [later], "left": [LEFT]})
    assert alone.parts == {"driver": later} and alone.missing == {"left", "right"}, "where gradients went, and where they came from"


def test_a_fragment_of_a_pass_never_takes_the_place_of_a_whole_one() -> None:
    def rows(part: PassPart) -> list[Any]:
        return [[part.left_out, [[*node[:4], list(node.next), *node[5:]] for node in part.nodes.values()]]]

    board = Board("driver")
    board.arrived("driver", report(graphs=rows(DRIVER)), 1.0, 1.0)
    board.draw_graph(1.0)
    assert answer(board)["graph"]["missing"] == ["left"], "better than nothing, and it says what is missing"
    board.arrived("left", report(graphs=rows(LEFT)), 2.0, 2.0)
    board.draw_graph(2.0)
    whole = answer(board)["graph"]
    assert whole["missing"] == [] and whole["version"] == 2 and whole["at"] == 2.0
    other = PassPart({1: node(1, "RecvNode", edge=99, peer="left", out=True)}, 0)
    board.arrived("driver", report(graphs=rows(other)), 3.0, 3.0)
    board.draw_graph(3.0)
    assert answer(board)["graph"] == whole
    board.arrived("driver", report(graphs=rows(PassPart({1: node(1, "ExpBackward")}, 7))), 4.0, 4.0)
    board.draw_graph(4.0)
    assert (answer(board)["graph"]["nodes"], answer(board)["graph"]["left_out"]) == (1, 7), "a pass without messages is whole; nodes beyond the most"


def test_a_picture_has_a_frame_per_worker_and_arrows_that_cross() -> None:
    drawn = picture({"driver": DRIVER, "left": LEFT})
    assert [box["name"] for box in drawn["boxes"]] == ["Sum", "to left", "from driver", "Mul"]
    assert [(arrow["from"], arrow["to"], arrow["crosses"], arrow["bytes"]) for arrow in drawn["arrows"]] == [
        (0, 1, False, 8), (2, 3, False, 8), (1, 2, True, 8),
    ]  # fmt: skip
    one, two = drawn["frames"]
    assert one["x"] + one["w"] < two["x"]
    for box in drawn["boxes"]:
        frame = one if box["worker"] == "driver" else two
        assert frame["x"] < box["x"] - box["w"] / 2 and box["x"] + box["w"] / 2 < frame["x"] + frame["w"]


def test_a_large_pass_is_drawn_by_names() -> None:
    chain = {i: node(i, ("Mul", "Add")[i % 2] + "Backward", i + 1) for i in range(300)}
    drawn = picture({"driver": PassPart(chain, 0)})
    assert sorted(box["name"] for box in drawn["boxes"]) == ["Add ×150", "Mul ×150"] and drawn["nodes"] == 300
    assert len(drawn["arrows"]) == 1, "no circle is drawn"


def test_rows_that_are_none_are_left_out() -> None:
    good = [1, "MulBackward", 5, 8, [2], 0, "", False]
    assert read_rows([[3, [good, [1], None, ["a"] * 8]]]) == [PassPart({1: RanNode(1, "MulBackward", 5, 8, (2,), 0, "", False)}, 3)]
    assert read_rows(None) == read_rows([None]) == read_rows([[]]) == read_rows([[0, []]]) == read_rows([["x", [good]]]) == []
