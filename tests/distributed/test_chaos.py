"""The promises under faults: many seeds, every fault at every point, every protection missed, real processes.

``AIOGRAD_SEEDS`` says how many seeds; ``make chaos`` runs more of everything.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest

from aiograd.testing import Faults
from tests.chaos import batches
from tests.chaos.__main__ import CHAOS
from tests.chaos.ablations import SCENARIOS, catch_by_scenario, catch_by_seeds, run_scenario
from tests.chaos.broken import PROTECTIONS
from tests.chaos.cancel import cancel_everywhere
from tests.chaos.cells import CELLS, FAULTS, POINTS, Fault, run_cells
from tests.chaos.mix import Mix
from tests.chaos.processes import IMPOSSIBLE, ROLES, trial
from tests.chaos.proxied import run_proxied
from tests.chaos.proxy import FATES, Plan, Proxy
from tests.chaos.shrink import Failure, shrink
from tests.chaos.world import run_seed
from tests.sweeps import swept

#: random runs, and how many of them make one test
SEEDS = int(os.environ.get("AIOGRAD_SEEDS", "2000"))
PIECE = 25
#: runs per kind of fault, each of which makes the fault once at every point; and how many of them make one test
CELL_RUNS, CELL_PIECE = 60, 5
#: the first seeds that notice that a protection is missing, where there are many before it
NOTICED = {"tombstone": 32, "epoch_fence": 7}
#: a point is not always come to: a cell is met at least so often by one test
LEAST = CELL_PIECE // 2


@pytest.fixture(autouse=True, scope="module")
def _quiet() -> Iterator[None]:
    """Workers log nothing of the failures that are made here, and what other tests have left in memory is not looked through after every run."""
    batches.quietly()
    yield
    logging.disable(logging.NOTSET)


# -------------------------------------------------------------------- the simulator


@pytest.mark.sim
@pytest.mark.parametrize("first", swept(range(0, SEEDS, PIECE)))
def test_whatever_a_seed_does(first: int) -> None:
    for seed in range(first, first + PIECE):
        run_seed(seed)


@pytest.mark.sim
@pytest.mark.parametrize("first", swept(range(0, CELL_RUNS, CELL_PIECE)))
@pytest.mark.parametrize("fault", swept(FAULTS))
def test_every_fault_at_every_point(fault: Fault, first: int) -> None:
    met = sum((run_cells(fault, seed)[0] for seed in range(first, first + CELL_PIECE)), Counter())
    assert {cell for cell in CELLS if cell.fault == fault and met[cell] < LEAST} == set()


@pytest.mark.sim
@pytest.mark.parametrize(("order", "every"), swept([("permuted", 4), ("permuted", 1), ("fifo", 1)]))
def test_a_pass_that_is_cancelled_before_each_of_its_steps(order: str, every: int) -> None:
    steps, committed = cancel_everywhere(order=order, every=every)  # type: ignore[arg-type]
    assert steps > 100 and 0 < committed < steps


@pytest.mark.sim
@pytest.mark.parametrize("name", SCENARIOS)
def test_moments_made_on_purpose(name: str) -> None:
    for seed in range(10):
        run_scenario(SCENARIOS[name], seed=seed)


@pytest.mark.sim
@pytest.mark.parametrize("protection", PROTECTIONS)
def test_a_protection_that_is_missing_is_missed(protection: str) -> None:
    catch = catch_by_scenario(protection) if protection in SCENARIOS else catch_by_seeds(protection, 1000, NOTICED.get(protection, 0))
    assert catch.by is not None, f"nothing goes wrong without {protection}"


@pytest.mark.proc
def test_a_seed_runs_the_same_in_every_process() -> None:
    command = [sys.executable, "-m", "tests.chaos", "--hashes", "0", "20"]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONHASHSEED": str(seed)}) for seed in (0, 1)
    ]
    answers = [json.loads(process.communicate(timeout=100)[0]) for process in running]
    assert len(answers[0]) == 20
    assert answers[0] == answers[1]


def test_a_failure_is_shrunk_to_what_it_needs() -> None:
    mix = next(mix for mix in map(Mix.drawn, range(1000)) if mix.faults.reset and mix.troubles > 1 and mix.tenant and mix.order == "permuted")
    needed = Mix(faults=Faults(reset=mix.faults.reset))

    def fails(smaller: Mix) -> Failure | None:
        return Failure(smaller, "it fails", []) if smaller.faults.reset and smaller.tenant else None

    told: list[str] = []
    smallest = shrink(Failure(mix, "it fails", []), fails, told.append).mix
    assert smallest.faults.reset == needed.faults.reset and smallest.tenant
    assert smallest.faults.kinds == ("reset",) and (smallest.order, smallest.troubles, smallest.rounds, smallest.workers) == ("fifo", 0, (), 1)
    assert any("permuted" in line for line in told)


def test_a_tenth_is_a_tenth_of_everything() -> None:
    tenth = CHAOS.scaled(0.1)
    assert (tenth.seeds, tenth.cells, tenth.least, tenth.replay, tenth.proxied, tenth.ends) == (2000, 20, 2, 2, 2, 2)
    assert tenth.kills == tenth.cancel == tenth.stops == 1 and tenth.ablations == CHAOS.ablations and CHAOS.scaled(1.0) == CHAOS


def test_a_run_that_computes_for_ever_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """Measured in time of the processor: a machine that is busy with something else makes no hang."""

    def for_ever(seed: int) -> object:
        while True:
            pass

    monkeypatch.setattr(batches, "run_seed", for_ever)
    monkeypatch.setattr(batches, "PATIENCE", 0.05)
    (failure,) = batches.seeds(7, 8).failures
    assert "a hang: seeds 7 computes for more than 0.05 s (again: python -m tests.chaos --seed 7)" in failure


def test_a_batch_goes_on_after_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    real = batches.run_seed

    def sometimes(seed: int) -> object:
        if seed == 1:
            raise AssertionError("it fails")
        return real(seed, mix=Mix(rounds=()))

    monkeypatch.setattr(batches, "run_seed", sometimes)
    batch = batches.seeds(0, 3)
    assert batch.failures == ["seeds 1: AssertionError: it fails (again: python -m tests.chaos --seed 1)"] and list(batch.hashes) == [0, 2]


# -------------------------------------------------------------------- real processes and sockets


@pytest.mark.proc
@pytest.mark.parametrize("role", swept(ROLES))
async def test_workers_that_are_killed(role: str) -> None:
    """Each point once, in one of the roles in turn."""
    async with trial() as made:
        for number, point in enumerate(POINTS):
            turn = next(r for r in (*ROLES[number % 3 :], *ROLES) if (r, point) not in IMPOSSIBLE)
            if turn == role:
                await made.kill_at(role, point)
        await made.rest()
    assert made.findings.wrong == []
    assert made.findings.counts["kills"] > 2


@pytest.mark.proc
async def test_workers_that_are_stopped_and_ended() -> None:
    async with trial() as made:
        await made.freeze("middle", 2.5)
        await made.end("last")
        await made.rest()
    assert made.findings.wrong == []
    assert "error" not in made.findings.counts and made.findings.times["SIGTERM to exit"][0] < 5


@pytest.mark.net
def test_workers_behind_proxies_that_do_harm() -> None:
    counts, hits = run_proxied(0)
    assert counts["fresh pass"] == 2 and counts["backward committed"] and hits.total()


@pytest.mark.net
@pytest.mark.parametrize("fate", FATES)
async def test_what_a_proxy_does(fate: str) -> None:
    """100 bytes go through a proxy that strikes after 40 of them, and come back."""

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(1000):
            writer.write(data)
        writer.close()

    hits: Counter[str] = Counter()
    async with contextlib.AsyncExitStack() as stack:
        server = await asyncio.start_server(echo, "127.0.0.1", 0)
        stack.callback(server.close)
        proxy = Proxy(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", Random(0), 0.0, hits)
        stack.push_async_callback(proxy.aclose)
        plans = [Plan(fate, 40, 0.1), Plan()]  # type: ignore[arg-type]
        proxy.draw = lambda: plans.pop(0)  # type: ignore[method-assign]
        url = await proxy.open()
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        stack.callback(writer.close)
        sent = bytes(range(100))
        writer.write(sent)
        came: bytes | None
        try:
            async with asyncio.timeout(0.5 if fate in ("blackhole", "lose") else 5.0):
                came = await reader.readexactly(100)
        except TimeoutError:
            came = None
        except asyncio.IncompleteReadError as error:
            came = error.partial
        except ConnectionResetError:
            came = b"reset"
        expected = {
            "flip": sent[:40] + bytes([sent[40] ^ 1 << 2]) + sent[41:],
            "half-close": sent[:40],
            "reset": b"reset",
            "lose": None,
            "blackhole": None,
        }
        if fate == "truncate":
            assert came is not None and sent[:40].startswith(came), "what was passed on may come back before the end, or not"
        else:
            assert came == expected.get(fate, sent)
        assert hits == ({} if fate == "fine" else {fate: 1})
        if fate == "blackhole":
            proxy.heal()
            assert await reader.readexactly(100) == sent


def test_mixes_cover_what_they_can() -> None:
    mixes = [Mix.drawn(seed) for seed in range(300)]
    assert {kind for mix in mixes for kind in mix.faults.kinds} == {"reset", "stall", "slow"}
    assert {mix.order for mix in mixes} == {"fifo", "permuted"} and {mix.troubles for mix in mixes} == {0, 1, 2, 3}
    assert {activity for mix in mixes for activities in mix.rounds for activity in activities} == {"context", "echo", "tally", "steps", "nap"}
    assert sum(mix.tenant for mix in mixes) > 30 and 10 < sum(not mix.faults.kinds and not mix.troubles for mix in mixes) < 150
    assert all(dataclasses.replace(mix) == mix for mix in mixes)
