"""The profiler: what is recorded and where, the sums of the table, and traces that a viewer can draw."""

from __future__ import annotations

import asyncio
import gc
import itertools
import json
import threading
import weakref
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.run import aclose_default_engine
from aiograd.errors import ArgumentError, ArgumentTypeError, LoopError, ModeError
from aiograd.ops import ROWS
from aiograd.profiler import Event, merge_traces, profile, profiling, read_trace, recorder, scope, summarize_trace
from aiograd.profiler.chrome_trace import Origin, build_trace
from aiograd.profiler.table import records_of, rows_of
from aiograd.running.modes import current_mode
from aiograd.testing.virtual_clock import VirtualClock
from tests.support import assert_awaiting_raises, assert_raises, cancel, custom_function
from tests.toy_device import ToyDevice


def named(events: Any, category: str) -> list[str]:
    return [event.name for event in events if event.category == category]


@custom_function(lambda x: x * 2)
def Twice(ctx: Any, g: Any) -> Any:
    return g * 2


class Later(ag.Function):
    """Both ways suspend."""

    @staticmethod
    async def forward(ctx: Any, x: Any) -> Any:
        await asyncio.sleep(0)
        return x * 3

    @staticmethod
    async def backward(ctx: Any, g: Any) -> Any:
        await asyncio.sleep(0)
        return g * 3


async def work(scale: float = 1.0) -> Any:
    """A pass with rows, a custom function that runs on the executor, and one that suspends."""
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    with scope("forward of work"):
        y = np.tanh(x * scale)
        y = Twice.apply(y)
        y = await Later.apply(y)
        loss = (y[0] + y.sum()).reshape(1).sum()
    await loss.backward()
    return x.grad


# -------------------------------------------------------------------- what is recorded


async def test_operations_and_rules_are_recorded_and_correlated() -> None:
    with profile(shapes=True, memory=True) as prof:
        await work()
    events = prof.events
    before = next(event.start for event in events if event.category == "pass")
    operations = [event.name for event in events if event.category == "forward" and event.start < before]
    assert operations == ["mul", "tanh", "Twice", "mul", "Later", "mul", "getitem", "sum", "add", "reshape", "sum"], "each within what called it"
    assert named(events, "forward")[len(operations) :] == ["mul", "mul"], "operations of the two custom rules"
    made = {event.sequence_nr: event for event in events if event.category == "forward" and event.sequence_nr is not None}
    ran = [event for event in events if event.category == "backward" and event.sequence_nr is not None]
    assert {event.name for event in ran} == {
        "MulBackward", "TanhBackward", "TwiceBackward", "LaterBackward", "GetitemBackward", "SumBackward", "AddBackward", "ReshapeBackward"
    }  # fmt: skip
    for event in ran:
        assert made[event.sequence_nr].operation == event.operation and made[event.sequence_nr].end <= event.start
        assert event.graph_task is not None and made[event.sequence_nr].graph_task is None
    assert named(events, "backward").count("AccumulateGrad") == 1
    assert named(events, "pass") == [f"backward pass {ran[0].graph_task}"] and named(events, "scope") == ["forward of work"]
    sizes = {event.name: (event.shapes, event.nbytes) for event in events if event.category == "forward"}
    assert sizes["tanh"] == (((2,),), 8) and sizes["add"] == (((),), 4)
    assert [event.start for event in events] == sorted(event.start for event in events)
    assert isinstance(events, tuple) and all(event.duration >= 0 for event in events)


async def test_nothing_is_recorded_outside_of_the_block() -> None:
    prof = profile()
    assert_raises(ModeError, None, prof.__exit__, None, None, None)
    await work()
    assert prof.events == () and current_mode().profiler is None and current_mode().plain
    with prof:
        ag.tensor([1.0]) * 2
    count = len(prof.events)
    await work()
    assert len(prof.events) == count == 1
    async with prof:
        ag.tensor([1.0]) * 2
    assert len(prof.events) == 2


async def test_a_profile_belongs_to_its_task() -> None:
    started, over = asyncio.Event(), asyncio.Event()

    async def profiled() -> Any:
        with profile() as prof:
            started.set()
            await over.wait()
            await asyncio.create_task(work())
        return prof

    task = asyncio.create_task(profiled())
    await started.wait()
    await work()
    over.set()
    prof = await task
    assert len({event.graph_task for event in prof.events} - {None}) == 1, "the other task's pass is not in it, that of its own child is"


async def test_operations_without_a_graph_are_recorded_too() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    with profile() as prof, ag.no_grad():
        _ = np.exp(x) + 1
        _ = x[0]
        _ = np.concatenate([x, x])
        _ = x.detach() @ x.detach()
        _ = ROWS["eigh"](ag.tensor(np.eye(2)))
    assert named(prof.events, "forward") == ["exp", "add", "getitem", "cat", "matmul", "eigh"]
    assert all(event.sequence_nr is None for event in prof.events)


async def test_gradients_are_the_same_to_the_bit() -> None:
    plain = await work(0.7)
    with profile():
        profiled = await work(0.7)
    assert plain.numpy().tobytes() == profiled.numpy().tobytes()


async def test_where_things_ran() -> None:
    with ToyDevice(), profile() as prof:
        await work()
        x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
        await np.tanh(x).sum().backward()
    threads = {event.name: event.thread_name for event in prof.events}
    assert threads["TwiceBackward"].startswith("aiograd-compute")
    assert "aiograd-toy:0" in {event.thread_name for event in prof.events if event.name == "TanhBackward"}
    here = threading.current_thread().name
    assert threads["Twice"] == threads["LaterBackward"] == here
    task = asyncio.current_task()
    assert task is not None
    assert {event.task_name for event in prof.events if event.name == "tanh"} == {task.get_name()}
    assert {event.task for event in prof.events if event.name == "TwiceBackward"} == {0}


async def test_nested_passes_and_second_derivatives() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    with profile() as prof:
        (g,) = await ag.grad((x**3).sum(), x, create_graph=True)
        await g.sum().backward()
    passes = [event for event in prof.events if event.category == "pass"]
    assert len(passes) == 2
    made_in_backward = {
        event.sequence_nr for event in prof.events if event.category == "forward" and passes[0].start <= event.start < passes[0].end
    } - {None}
    assert made_in_backward & {event.sequence_nr for event in prof.events if event.graph_task == passes[1].graph_task}


async def test_a_pass_that_fails_or_is_cancelled_leaves_its_events() -> None:
    @custom_function()
    def Broken(ctx: Any, g: Any) -> Any:
        raise ValueError("no")

    class Stuck(Broken):
        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            await asyncio.Event().wait()

    x = ag.tensor([1.0], requires_grad=True)
    with profile() as prof:
        await assert_awaiting_raises(ValueError, "no", Broken.apply(x).backward())
        task = asyncio.create_task(Stuck.apply(x).backward())
        for _ in range(10):
            await asyncio.sleep(0)
        await cancel(task)
    assert named(prof.events, "backward") == ["BrokenBackward"]
    assert len(named(prof.events, "pass")) == 2


async def test_scopes() -> None:
    with scope("nobody listens"):
        pass
    with profile() as prof:
        with scope("outer"):
            async with scope("inner"):
                await asyncio.sleep(0)
        with pytest.raises(KeyError), scope("fails"):
            raise KeyError
    with prof.scope("afterwards"), profile() as other, prof.scope("bound"), scope("free"):
        pass
    assert named(prof.events, "scope") == ["outer", "inner", "fails", "afterwards", "bound"]
    assert named(other.events, "scope") == ["free"]
    for make in (scope, prof.scope):
        assert_raises(ArgumentTypeError, "expected a name", make, None)
    outer, inner = prof.events[:2]
    assert outer.start <= inner.start and inner.end <= outer.end and outer.track == inner.track


async def test_a_profile_decorates() -> None:
    prof = profile()

    @prof
    async def decorated() -> None:
        await work()

    await decorated()
    assert "tanh" in named(prof.events, "forward") and current_mode().profiler is None


async def test_a_profile_is_freed_without_the_garbage_collector() -> None:
    gc.collect()
    gc.disable()
    try:
        prof = profile()
        with prof:
            await work()
        gone = weakref.ref(prof)
        del prof
        assert gone() is None
    finally:
        gc.enable()


# -------------------------------------------------------------------- how long things took


@pytest.fixture
def ticks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A clock that shows the sum of the list, in µs."""
    now = [0]
    monkeypatch.setattr(recorder, "perf_counter_ns", lambda: sum(now) * 1000)
    return now


async def test_a_rule_that_suspends_counts_until_it_is_done(ticks: list[int]) -> None:
    class Slow(ag.Function):
        @staticmethod
        async def forward(ctx: Any, x: Any) -> Any:
            ticks.append(100)
            await asyncio.sleep(0)
            return x * 1

        @staticmethod
        async def backward(ctx: Any, g: Any) -> Any:
            await asyncio.sleep(0)
            ticks.append(250)
            return g

    class Waits(Slow):
        @staticmethod
        def backward(ctx: Any, g: Any) -> Any:
            future = asyncio.get_running_loop().create_future()

            def done() -> None:
                ticks.append(150)
                future.set_result(g)

            asyncio.get_running_loop().call_soon(done)
            return future

        inline = True

    with profile() as prof:
        y = await Slow.apply(ag.tensor([1.0], requires_grad=True))
        await y.backward()
        y = await Waits.apply(ag.tensor([1.0], requires_grad=True))
        await y.backward()
    spans = {event.name: (event.start // 1000, event.duration // 1000) for event in prof.events if event.operation in ("Slow", "Waits")}
    assert spans == {"Slow": (0, 100), "SlowBackward": (100, 250), "Waits": (350, 100), "WaitsBackward": (450, 150)}
    waits = [event for event in prof.events if event.name in ("SlowBackward", "WaitsBackward")]
    assert len({event.task for event in waits}) == 2, "a track of its own each"


async def test_the_lag_of_the_loop(virtual_clock: VirtualClock) -> None:

    loop: Any = asyncio.get_running_loop()
    clock = lambda: int(loop.time() * 1e9)  # noqa: E731
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(profiling.time, "perf_counter_ns", clock)
        async with profile(loop_lag=0.01) as prof:
            await asyncio.sleep(0.025)
            loop.advance(0.5)
            await asyncio.sleep(0.011)
        await asyncio.sleep(1.0)
        text = prof.table()
        lags = [round(event.duration / 1e6) for event in prof.events if event.category == "lag"]
        assert lags == [0, 0, 495, 0], "samples end with the block"
        counters = [event for event in prof.chrome_trace()["traceEvents"] if event["ph"] == "C"]
        assert [round(event["args"]["ms"]) for event in counters] == lags
    assert "loop lag: median 0.00 ms, p99 495.00 ms, max 495.00 ms, 4 samples" in text


def test_lag_needs_a_loop() -> None:
    assert_raises(ArgumentError, "above 0", profile, loop_lag=0.0)
    with pytest.raises(LoopError, match="no loop"), profile(loop_lag=1.0):
        pass
    assert current_mode().profiler is None


# -------------------------------------------------------------------- the table


def event(name: str, category: Any, start: int, duration: int, *, thread: int = 1, task: int = 0, **rest: Any) -> Event:
    operation = rest.pop("operation", name)
    return Event(name, category, operation, start * 1000, duration * 1000, thread, f"thread-{thread}", task, f"task-{task}" if task else None, **rest)


#: 1 ms of a scope on one track, with two operations inside; a pass with two rules inside on another, one more on a third
SYNTHETIC = (
    event("step", "scope", 0, 1000),
    event("mul", "forward", 100, 200, sequence_nr=1, nbytes=2048),
    event("F", "forward", 400, 500, sequence_nr=2, nbytes=10),
    event("mul", "forward", 450, 100, sequence_nr=None),
    event("backward pass 0", "pass", 2000, 1000, task=7, operation="(backward pass)", graph_task=0),
    event("FBackward", "backward", 2100, 300, task=7, operation="F", sequence_nr=2, graph_task=0),
    event("MulBackward", "backward", 2150, 800, thread=2, operation="mul", sequence_nr=1, graph_task=0),
)


def test_sums_of_the_table() -> None:
    rows = {row.name: row for row in rows_of(records_of(SYNTHETIC))}
    figures = {name: (row.calls, row.forward, row.forward_self, row.backward, row.backward_self) for name, row in rows.items()}
    assert {name: (calls, *(time / 1e3 for time in times)) for name, (calls, *times) in figures.items()} == {
        "step": (1, 1000.0, 300.0, 0.0, 0.0),
        "mul": (2, 300.0, 300.0, 800.0, 800.0),
        "F": (1, 500.0, 400.0, 300.0, 300.0),
        "(backward pass)": (1, 0.0, 0.0, 1000.0, 700.0),
    }
    assert rows["mul"].nbytes == 2048


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("self", ["mul", "(backward pass)", "F", "step"]),
        ("total", ["mul", "(backward pass)", "step", "F"]),
        ("forward", ["step", "F", "mul", "(backward pass)"]),
        ("backward", ["(backward pass)", "mul", "F", "step"]),
        ("calls", ["mul", "(backward pass)", "F", "step"]),
        ("mean", ["(backward pass)", "step", "F", "mul"]),
        ("memory", ["mul", "F", "(backward pass)", "step"]),
        ("name", ["(backward pass)", "F", "mul", "step"]),
    ],
)
def test_orders_of_the_table(order: Any, expected: list[str]) -> None:
    trace = build_trace(SYNTHETIC, Origin(0, 0), pid=1, process_name="p", clock_offset=0.0)
    lines = summarize_trace(trace, sort_by=order).splitlines()
    assert [line.split("  ")[0].strip() for line in lines[2:6]] == expected
    assert len({len(line) for line in lines[:7]}) == 1, "columns are aligned"


async def test_the_table_as_text() -> None:
    with profile(memory=True) as prof:
        await work()
    text = prof.table(sort_by="calls", limit=2)
    lines = text.splitlines()
    assert lines[0].split() == ["name", "calls", "forward", "fwd", "self", "backward", "bwd", "self", "mean", "share", "output"]
    assert len(lines) == 6 and "more rows" in lines[-1] and "forward and" in lines[-1]
    assert "%" in lines[2] and (" B" in lines[2] or "KiB" in lines[2])
    assert len(prof.table(limit=None).splitlines()) > 8
    assert_raises(ArgumentError, r"'speed'.*expected one of name, calls", prof.table, sort_by="speed")
    assert profile().table().splitlines()[-1] == "- in 0 forward and 0 backward events"


# -------------------------------------------------------------------- traces


def check_trace(trace: Any) -> dict[int, list[Any]]:
    """Check that a viewer can draw it: fields and their types, order, nesting, arrows. Returns the slices by tid."""
    assert set(trace) == {"traceEvents", "displayTimeUnit", "otherData"}
    events = trace["traceEvents"]
    metadata = list(itertools.takewhile(lambda event: event["ph"] == "M", events))
    rest = events[len(metadata) :]
    slices: defaultdict[Any, list[Any]] = defaultdict(list)
    arrows: defaultdict[Any, list[Any]] = defaultdict(list)
    for event in events:
        assert event["ph"] in "MXCsf" and type(event["pid"]) is int and type(event["tid"]) is int and isinstance(event["name"], str)
        if event["ph"] == "M":
            assert event in metadata and event["name"] in ("process_name", "thread_name", "thread_sort_index") and "args" in event
            continue
        assert isinstance(event["ts"], (int, float)) and event["ts"] >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["cat"] in ("forward", "backward", "pass", "scope") and "operation" in event["args"]
            slices[event["pid"], event["tid"]].append(event)
        if event["ph"] in "sf":
            assert event["ph"] == "s" or event["bp"] == "e"
            arrows[event["id"], event["cat"]].append(event)
    assert [event["ts"] for event in rest] == sorted(event["ts"] for event in rest)
    named = {(event["pid"], event["tid"]) for event in metadata if event["name"] == "thread_name"}
    assert named == set(slices)
    for lane in slices.values():
        open_: list[Any] = []
        for event in lane:  # in order of start, the outer one first
            while open_ and open_[-1]["ts"] + open_[-1]["dur"] <= event["ts"] + 1e-6:
                open_.pop()
            assert not open_ or event["ts"] + event["dur"] <= open_[-1]["ts"] + open_[-1]["dur"] + 1e-3, "slices of a lane nest"
            open_.append(event)
    for pair in arrows.values():
        start, finish = sorted(pair, key=lambda event: event["ph"], reverse=True)
        assert (start["ph"], finish["ph"], len(pair)) == ("s", "f", 2) and start["ts"] <= finish["ts"] and start["name"] == finish["name"]
        for end, category in ((start, "forward"), (finish, "backward")):
            there = [event for event in slices[end["pid"], end["tid"]] if event["ts"] == end["ts"] and event["cat"] == category]
            assert any(event["args"]["operation"] == end["name"] for event in there)
    return slices  # type: ignore[return-value]


async def test_a_trace_of_everything_at_once(tmp_path: Path) -> None:
    with ToyDevice(), profile(shapes=True) as prof:
        x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)
        with scope("together"):
            await asyncio.gather(*(work(i + 1.0) for i in range(4)), np.tanh(x).sum().backward())
        await work()
    path = tmp_path / "trace.json"
    trace = prof.chrome_trace(path, process_name="worker 1", clock_offset=0.25)
    assert json.loads(path.read_text()) == trace == read_trace(path)
    slices = check_trace(trace)
    assert len(slices) >= 6, "tasks of one thread have rows of their own"
    names = {event["args"]["name"] for event in trace["traceEvents"] if event["name"] in ("process_name", "thread_name")}
    assert "worker 1" in names and "aiograd-toy:0" in names and any(name.startswith("aiograd-compute") for name in names)
    correlated = [event for event in prof.events if event.category == "backward" and event.sequence_nr is not None]
    assert sum(event["ph"] == "f" for event in trace["traceEvents"]) == len(correlated) > 30
    whole = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert [(event["name"], event["dur"]) for event in whole if event["name"] == "together"] == [
        (event.name, event.duration / 1000) for event in prof.events if event.name == "together"
    ]
    assert {event["args"]["sequence_nr"] for event in whole if event["name"] == "TanhBackward"} == {
        event.sequence_nr for event in prof.events if event.name == "TanhBackward"
    }
    assert [event["args"]["shapes"] for event in whole if event["name"] == "tanh"] == [[[2]]] * 6


def test_a_trace_in_detail() -> None:
    trace = build_trace(SYNTHETIC, Origin(0, 5_000_000), pid=42, process_name="p", clock_offset=1.5)
    check_trace(trace)
    lanes = {event["args"]["name"]: event["tid"] for event in trace["traceEvents"] if event["name"] == "thread_name"}
    assert lanes == {"thread-1": 1, "thread-2": 2}, "the task begins when the rest of its thread is over, so it shares the row"
    assert trace["otherData"] == {"clock_origin_unix_us": 5000.0, "clock_offset_us": 1.5e6}
    arrows = [(event["ph"], event["name"], event["ts"], event["tid"], event["id"]) for event in trace["traceEvents"] if event["ph"] in "sf"]
    assert sorted(arrows, key=lambda arrow: (arrow[-1], arrow[0] == "f")) == [
        ("s", "F", 400.0, 1, 1), ("f", "F", 2100.0, 1, 1), ("s", "mul", 100.0, 1, 2), ("f", "mul", 2150.0, 2, 2)
    ]  # fmt: skip


def test_tasks_that_overlap_get_lanes() -> None:
    events = [event(f"t{task}", "scope", start, 100, task=task) for task, start in ((1, 0), (2, 50), (3, 100), (4, 120), (5, 160))]
    trace = build_trace(events, Origin(0, 0), pid=1, process_name="p", clock_offset=0.0)
    check_trace(trace)
    assert {event["name"]: event["tid"] for event in trace["traceEvents"] if event["ph"] == "X"} == {"t1": 1, "t2": 2, "t3": 1, "t4": 3, "t5": 2}
    names = [event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"]
    assert names == ["thread-1", "thread-1 (2)", "thread-1 / task-4"]


def test_merging_traces_of_several_workers(tmp_path: Path) -> None:
    first = build_trace(SYNTHETIC, Origin(0, 1_000_000_000), pid=7, process_name="a", clock_offset=0.0)
    second = build_trace(SYNTHETIC, Origin(0, 3_000_000_000), pid=7, process_name="b", clock_offset=-1.0)
    (tmp_path / "b.json").write_text(json.dumps(second["traceEvents"]))
    merged = merge_traces([first, second], tmp_path / "all.json")
    assert read_trace(tmp_path / "all.json") == merged
    check_trace(merged)
    names = {event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event["name"] == "process_name"}
    assert names == {7: "a", 8: "b"}, "workers on two machines may have one number"
    steps = {event["pid"]: event["ts"] for event in merged["traceEvents"] if event["name"] == "step"}
    assert steps == {7: 0.0, 8: 1e6}, "two seconds later on a clock that is one second fast"
    shifted = merge_traces([first, second], clock_offsets=[0.0, -2.5])
    assert {event["pid"]: event["ts"] for event in shifted["traceEvents"] if event["name"] == "step"} == {7: 5e5, 8: 0.0}
    assert merge_traces([merged, first])["traceEvents"][0]["ph"] == "M"
    bare = merge_traces([tmp_path / "b.json"])
    assert len([event for event in bare["traceEvents"] if event["ph"] == "X"]) == len(SYNTHETIC)
    alone, both = (summarize_trace(trace, limit=None).splitlines() for trace in (first, merged))
    assert [line.split()[-1] for line in alone[2:6]] == [line.split()[-1] for line in both[2:6]], "twice the time, the same shares"
    assert merge_traces([])["traceEvents"] == []
    assert first["traceEvents"][0]["pid"] == 7 and second["traceEvents"][0]["pid"] == 7, "the traces given are left alone"


def test_arrows_between_workers_survive_merging() -> None:
    sends = {"ph": "s", "name": "send", "cat": "rpc", "id": "message-1", "pid": 1, "tid": 1, "ts": 1.0}
    arrives = {"ph": "f", "bp": "e", "name": "send", "cat": "rpc", "id": "message-1", "pid": 2, "tid": 1, "ts": 2.0}
    merged = merge_traces([{"traceEvents": [sends]}, {"traceEvents": [arrives]}])
    assert [event["id"] for event in merged["traceEvents"]] == ["message-1"] * 2


@pytest.mark.parametrize(
    "text",
    ["", "{", '{"events": []}', "3", '[{"ph": "X"}]', '[{"ph": "X", "pid": 1, "tid": 1}]', '[{"ph": "X", "pid": 1.5, "tid": 1, "ts": 1}]', "[7]",
     '[{"ph": "X", "pid": 1, "tid": 1, "ts": 1, "dur": "long"}]', "[" * 100_000],
)  # fmt: skip
def test_what_is_no_trace_is_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    assert_raises(ArgumentError, r"bad\.json", merge_traces, [path])


def test_wrong_calls_of_merge(tmp_path: Path) -> None:
    assert_raises(ArgumentError, "nowhere", lambda: merge_traces([tmp_path / "nowhere.json"]))
    assert_raises(ArgumentError, "1 traces and 2 clock offsets", merge_traces, [{"traceEvents": []}], clock_offsets=[0.0, 1.0])


def test_a_profile_of_a_whole_program() -> None:
    async def main() -> Any:
        with profile() as prof:
            await work()
        await aclose_default_engine()
        return prof

    prof = asyncio.run(main())
    check_trace(prof.chrome_trace())
    assert "tanh" in prof.table()
