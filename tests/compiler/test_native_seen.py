"""Native programs from outside: marks, figures, the compiling thread, and simulated loops, which give it nothing to do."""

from __future__ import annotations

import functools
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.compiler.native import machine, tiers, turns
from aiograd.testing import LeakCheck, simulated_run

pytestmark = pytest.mark.skipif(tiers.native_problem() is not None, reason=str(tiers.native_problem()))

MARKS = """\
value   row                 runs as   shape             dtype       live bytes          ns
v0      mul                 fused 1   [3, 4]            float64             96           7
v1      add                 fused 1   [3, 4]            float64            192           6
v2      matmul              product   [3, 5]            float64            216           4
v3      permute             view      [5, 3]            float64            240           2
v4      softmax             Python    [5, 3]            float64            360          45
v5      sum                 loop      []                float64            248           2
v6      exp                 loop      [3, 5]            float64            248          15
v7      mul                           [3, 5]            float64            368           9
v8      add                 loop      [3, 5]            float64            248           8"""


def test_each_statement_says_how_it_runs() -> None:
    def function(x: Any, w: Any) -> Any:
        y = (x * 2.0 + 1.0) @ w
        total = y.T.softmax(0).sum()
        other = y.exp()
        y * 3.0
        return other + total

    compiled = ag.compile(function, tier="native")
    x, w = ag.tensor(np.ones((3, 4))), ag.tensor(np.ones((4, 5)))
    compiled(x, w)
    (program,) = compiled.programs
    assert "\n".join([line.partition("  test_")[0].removesuffix("  line") for line in str(program).splitlines()[1:]]) == MARKS
    assert "fused 1" in program.dot() and "fused 1" in program.svg() and program.dot().count("product") == 1
    plain = ag.compile(function, tier="numpy")
    plain(x, w)
    assert "runs as" not in str(plain.programs[0]) and "fused" not in plain.programs[0].dot()
    assert (plain.programs[0].tier, plain.programs[0].native, program.tier) == ("numpy", None, "native")


async def test_a_step_is_native_where_its_parts_are() -> None:
    model = nn.Linear(4, 1)
    optimizer = ag.optim.SGD(model.parameters(), lr=0.1)

    @ag.compile(tier="native")
    async def step(x: Any) -> Any:
        optimizer.zero_grad()
        loss = ((model(x) * 2.0 + 1.0) ** 2).mean()
        await loss.backward()
        optimizer.step()
        return loss

    x = np.ones((3, 4), np.float32)
    for _ in range(3):
        await step(x)
    (program,) = step.programs
    statistics = step.statistics()
    assert program.tier == "native" and program.native.source.count("define") >= 1
    assert (statistics.runs, statistics.native_runs, statistics.native_programs) == (2, 2, 1)
    lines = str(program).splitlines()
    assert any(["backward" in line and "Python" in line for line in lines]) and any(["fused 1" in line for line in lines])
    step.clear()
    assert step.statistics().native_programs == 0 and step.statistics().native_runs == 2  # of programs that are forgotten too
    assert step.statistics().compile_seconds == statistics.compile_seconds


def hot() -> Any:
    """A function that has been called often enough."""

    @ag.compile(tier="auto")
    def function(x: Any) -> Any:
        return ((x * 2.0 + 1.0) * x).sum()

    for _ in range(3 * tiers.HOT):
        function(ag.ones(3))
    return function


def finish() -> None:
    """Wait for the thread."""
    for thread in tiers.compiler.threads():
        thread.join()


async def test_runs_are_counted_by_tier() -> None:
    function = hot()
    finish()
    before = function.statistics()
    assert before.native_programs == 1 and before.compile_seconds > 0.0
    for _ in range(5):
        function(ag.ones(3))
    after = function.statistics()
    assert after.native_runs - before.native_runs == 5 == after.runs - before.runs


async def test_the_thread_is_no_leak_and_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with ag.testing.LeakCheck(grace=0.0):
        tiers.compiler.submit(functools.partial(go_on.wait, 10.0))
        (thread,) = tiers.compiler.threads()
        assert thread.name == "aiograd-compiler"
    go_on.set()
    finish()
    assert tiers.compiler.threads() == [] and not thread.is_alive()


def test_a_job_that_fails_takes_no_other_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", told.append)
    compiler, begun, done = tiers.NativeCompiler(), threading.Event(), threading.Event()

    def fail() -> None:
        begun.wait(10.0)
        raise RuntimeError("a defect")

    compiler.submit(fail)
    compiler.submit(done.set)
    begun.set()
    assert done.wait(10.0)
    compiler.stop()
    assert [str(each.exc_value) for each in told] == ["a defect"]


def test_a_simulated_run_makes_nothing_native_by_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    submitted: list[Any] = []
    monkeypatch.setattr(tiers.compiler, "submit", submitted.append)

    async def main() -> tuple[str, str]:
        await hot().warm_up(ag.ones(3))
        function = hot()
        await function.warm_up(ag.ones(3))

        @ag.compile(tier="native")
        def other(x: Any) -> Any:
            return x * 2.0 + 1.0

        other(ag.ones(3))
        return function.programs[0].tier, other.programs[0].tier

    assert simulated_run(main).value == ("numpy", "native") and not submitted


def test_the_compiling_thread_lets_others_go_first(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(turns.time, "sleep", pauses.append)
    assert [*turns.in_turns(range(3 * turns.ITEMS + 1))] == [*range(3 * turns.ITEMS + 1)] and pauses == [0] * 3

    @ag.compile(tier="native")
    def chain(x: Any) -> Any:
        for _ in range(4 * turns.ITEMS):
            x = x * 2.0
        return x

    pauses.clear()
    chain(ag.ones(3))
    assert chain.programs[0].tier == "native" and len(pauses) >= 8  # while calls are lowered and emitted


def test_an_llvm_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    binding = pytest.importorskip("llvmlite.binding")
    assert machine.llvm_problem.__wrapped__() is None
    monkeypatch.setattr(binding, "llvm_version_info", (15, 0, 7))
    assert str(machine.llvm_problem.__wrapped__()).endswith("does not know pointers without types; expected 0.45 or later, which numba 0.62 brings")


def test_a_file_of_the_compiling_thread_is_no_leak(tmp_path: Path) -> None:
    opened, go_on = threading.Event(), threading.Event()

    def work() -> None:
        with (tmp_path / "entry").open("w"):
            opened.set()
            assert go_on.wait(60)

    with LeakCheck():
        tiers.compiler.submit(work)
        assert opened.wait(60)
        threading.Timer(0.05, go_on.set).start()


def test_a_pass_of_another_thread_may_add_its_code_meanwhile() -> None:
    target = np.arange(64)

    @ag.compile(tier="auto")
    def loss(x: Any, w: Any) -> Any:
        return nn.functional.cross_entropy(x + w, target) * 2.0

    async def passes() -> None:
        for _ in range(2):
            await loss(*[ag.ones((64, 128), requires_grad=True) for _ in range(2)]).backward()

    ag.run(passes())
    code: Any = loss._all()[0]
    set_backward, seen = code.set_backward, []

    def interrupted(*arguments: Any) -> None:
        seen.append(code.shared.setdefault(f"another {len(seen)}", {"x"}))
        set_backward(*arguments)

    code.set_backward = interrupted
    code.native.begin()
    assert seen and not code.native.report.failed and loss.programs[0].tier == "native"
