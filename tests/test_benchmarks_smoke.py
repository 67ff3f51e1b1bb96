"""Every benchmark runs at a tiny size, so that none rots; where a peer is installed its results are compared with ours on the way. Nothing is timed.

The peers are imported in processes of their own: what torch brings along (threads, warnings) is none of this suite's business.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import numpy as np
import pytest

import aiograd as ag
from tests.benchmarks import NAMES
from tests.benchmarks.harness import (
    OURS,
    DisagreementError,
    Settings,
    Side,
    Table,
    Timing,
    Workload,
    check_agreement,
    compare,
    goal_cells,
    installed_peers,
    interleave,
)
from tests.support import assert_awaiting_raises
from tests.sweeps import swept

ALONE = Settings(tiny=True, peers=())
#: the comparisons run each benchmark of ours as well, so where there are peers one without them is enough
RUN_ALONE = NAMES[-1:] if installed_peers() else NAMES


def run_benchmark(name: str, *flags: str) -> str:
    command = [sys.executable, "-m", "tests.benchmarks", name, "--tiny", *flags]
    done = subprocess.run(command, check=False, capture_output=True, text=True)
    assert done.returncode == 0, f"{name} {flags}:\n{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.mark.proc
@pytest.mark.parametrize("name", swept(RUN_ALONE))
def test_a_benchmark_runs_alone(name: str) -> None:
    out = run_benchmark(name, "--alone")
    assert out.startswith(f"== {name}")
    assert "missed" not in out  # a verdict on a tiny run would mean nothing


@pytest.mark.proc
@pytest.mark.slow
@pytest.mark.parametrize("name", swept(NAMES, keep=3) if installed_peers() else ())
def test_a_benchmark_agrees_with_the_peers_that_are_installed(name: str) -> None:
    out = run_benchmark(name)
    assert out.startswith(f"== {name}") and f"({name}:" in out
    assert "missed" not in out


@pytest.mark.proc
def test_an_unknown_benchmark_is_refused_by_name() -> None:
    done = subprocess.run([sys.executable, "-m", "tests.benchmarks", "large_tensor"], check=False, capture_output=True, text=True, timeout=110)
    assert done.returncode == 2
    assert "large_tensor" in done.stderr and "large_tensors" in done.stderr


# -------------------------------------------------------------------- the harness


def side(step: object, *values: object) -> Side:
    return Side(lambda: step, lambda: list(values))


async def test_sides_that_disagree_are_not_timed() -> None:
    timed: list[str] = []

    def workload(theirs: object) -> Workload:
        ours = Side(lambda: timed.append(OURS), lambda: [np.ones(3)])
        return Workload("w", {OURS: ours, "torch": Side(lambda: timed.append("torch"), lambda: [theirs])})

    for wrong in (np.array([1.0, 1.0, 1.01]), np.ones(2), np.array([1.0, 1.0, np.nan])):
        await assert_awaiting_raises(DisagreementError, "torch", compare("t", [workload(wrong)], ALONE))
    assert not timed
    await compare("t", [workload(np.ones(3) * (1 + 1e-6))], ALONE)
    assert sorted(timed) == [OURS, "torch"]


async def test_a_result_that_is_not_finite_is_an_error_even_alone() -> None:
    await assert_awaiting_raises(DisagreementError, "finite", check_agreement(Workload("w", {OURS: side(None, np.array([np.inf]))})))


async def test_steps_are_interleaved_and_awaited() -> None:
    order: list[str] = []

    async def ours() -> None:
        order.append("ours before")
        await asyncio.sleep(0)
        order.append("ours after")

    timings = await interleave({"ours": ours, "theirs": lambda: order.append("theirs")}, rounds=2, repeats=1, warm=0, pause=0)
    assert order == ["ours before", "ours after", "theirs"] * 2
    assert [len(timing.seconds) for timing in timings.values()] == [2, 2]


def test_verdicts() -> None:
    assert goal_cells(0.5, 0.6, 0.4)[2] == "met"
    assert goal_cells(0.4, 0.6, 0.4)[2] == "beyond"
    assert goal_cells(0.61, 0.6, 0.4)[2] == "missed"
    assert goal_cells(0.61, 0.6, None, higher=True)[2] == "met"
    assert goal_cells(None, 0.6, 0.4)[2] == goal_cells(0.5, None, None)[2] == ""


def test_tables_are_aligned() -> None:
    table = Table("title", ["a", "b"])
    table.add("row", 10)
    table.add("longer row", "5/6")
    assert table.text().splitlines()[2:] == ["a             b", "row          10", "longer row  5/6"]


def test_timings() -> None:
    timing = Timing([3.0, 1.0, 2.0])
    assert (timing.minimum, timing.median) == (1.0, 2.0)


# -------------------------------------------------------------------- what the benchmarks found


async def test_a_wide_graph_too_large_for_the_fast_path_adds_up_every_contribution() -> None:
    """The benchmark of size found a gradient that was one contribution of many."""
    leaf, factor = ag.tensor([1.0], dtype="float64", requires_grad=True), ag.tensor([0.5], dtype="float64")
    total = leaf * factor
    for _ in range(10_500):
        total = total + leaf * factor
    await total.sum().backward()
    assert leaf.grad is not None
    np.testing.assert_allclose(leaf.grad.numpy(), [0.5 * 10_501])
