"""Every protocol, at every moment of its transaction, meets every fault: the living agree, nothing is half done, and the next transaction works."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from aiograd.testing import HostKilledError, simulated_run
from tests.coordination.faults import COORDINATOR, FAULTS, LIMITS, MOMENT, Moment, Scene, Strike, ending, named
from tests.coordination.scenes import SCENES, PassScene

#: how a transaction ends for its caller, and which of the living have its work in the end, as a letter
OUTCOMES = {
    ("done", "all"): "C",
    ("failed", "none"): "A",
    ("cancelled", "none"): "X",
    ("cancelled after the commit", "all"): "Y",
    ("cancelled", "all"): "Z",  # of groups and optimizers, where a cancellation says nothing of the transaction
    ("in doubt", "all"): "U",
    ("in doubt", "all but b"): "L",  # which knows that it lacks it, or is named by the error
    ("done", "all but b"): "R",  # which gets the state of another replica, or whose group fails
    ("done", "some"): "O",  # of absorbing replicas: b is left out
    ("killed", "all"): "K",
    ("killed", "all but b"): "H",  # which knows that it lacks it
    ("killed", "none"): "D",
    ("killed", "none, in doubt"): "?",
    ("killed", "some"): "P",  # of optimizers, which take a step in one phase
}

#: a letter for each moment of a protocol; a dot where the fault has nothing to meet
TABLE = """
protocol                                          | pass   | pipeline | replicas | absorbing | replicated pipeline | agreement | gradients | optimizer
the caller is cancelled                           | XXXYYY | XXXYYY   | XXXYYY   | XXXYYY    | XXXYYY              | XXZCC     | XXXYCC    | ZZZ
all connections break                             | CCCCCC | CCCCCC   | CCCCCC   | CCCCCC    | CCCCCC              | CCCCC     | CCCCCC    | CCC
a member is short of memory                       | AACCC. | AACCC.   | ACCCC.   | ACCCC.    | AAACC.              | .....     | A.....    | CC.
a member is cut off for a moment                  | CCCCCC | CCCCCC   | CCCCCC   | CCCCCC    | CCCCCC              | CCCCC     | CCCCCC    | CCC
a member is cut off from the coordinator          | CCCUUU | AAAUUU   | AACCCC   | OOCCCC    | AACUUU              | AACCC     | AAACCC    | LLU
a member is cut off                               | AAAUUU | AAAUUU   | AACCCC   | OOCCCC    | AACUUU              | AACCC     | AAACCC    | LLU
a member is cut off for longer than its lease     | AAALLU | AAALLU   | AARRRC   | ORRRRC    | AAALLU              | AARRC     | AAARRC    | LLU
a member is frozen for a moment                   | CCCCCC | CCCCCC   | CCCCCC   | CCCCCC    | CCCCCC              | CCCCC     | CCCCCC    | CCC
a member is frozen for longer than its lease      | AAAUUC | AAAUUC   | AACCCC   | OOCCCC    | AAAUUC              | CACCC     | ACACCC    | LLC
a member is killed                                | AAAUUU | AAAUUU   | AACCCC   | CCCCCC    | AAAUUU              | AACCC     | AAACCC    | UUU
a member is killed silently                       | AAAUUU | AAAUUU   | AACCCC   | CCCCCC    | AAAUUU              | AACCC     | AAACCC    | UUU
the coordinator is frozen for a moment            | CCCCCC | CCCCCC   | CCCCCC   | CCCCCC    | CCCCCC              | CCCCC     | CCCCCC    | CCC
the coordinator is frozen for longer than a lease | AAAUUC | AAACCC   | AAACCC   | AAACCC    | AAACCC              | AACCC     | AAACCC    | CCC
the coordinator is killed                         | DDD?KK | DD??KK   | D???KK   | D???KK    | D???KK              | ???KK     | D???KK    | DPK
the coordinator is killed silently                | DDD?KK | DD??KK   | D???KK   | D???KK    | D???KK              | ???KK     | D???KK    | DPK
"""


async def outcome_of(scene: Scene, moment: Moment, strike: Strike) -> str:
    """The letter of a transaction that a fault strikes at a moment; everything that always holds has been checked."""
    loop, network = asyncio.get_running_loop(), scene.network
    scene.start()
    driving = network.spawn(COORDINATOR, scene.drive(moment, strike))
    while not scene.struck.is_set():
        assert not driving.done() and loop.time() < LIMITS.default_deadline, f"the moment has come ({driving})"
        await asyncio.sleep(0.01)
    while not driving.done() and not scene.stepping.done():
        await asyncio.sleep(0.1)
        assert loop.time() < scene.calm + LIMITS.default_deadline, "every await ends"
    if strike is FAULTS["the caller is cancelled"] and moment.message != "Vote":
        await asyncio.sleep(MOMENT)
        assert not any(map(scene.left, scene.living)), "all are told"
    while loop.time() < scene.calm:
        await asyncio.sleep(0.1)
    holds = any(map(scene.left, scene.living))
    while loop.time() < scene.calm or any(map(scene.left, scene.living)):
        await asyncio.sleep(0.1)
        assert loop.time() < scene.calm + LIMITS.default_deadline + LIMITS.lease_seconds, "nothing stays prepared"
    ended, seen = ending(scene.stepping) if COORDINATOR in scene.living else "killed", scene.seen
    assert not (holds and isinstance(scene, PassScene) and (ended, seen) == ("killed", "none")), "members give up as soon as the loss is noticed"
    if ended == "killed":
        with pytest.raises(HostKilledError):
            await driving
        network.restart(COORDINATOR)
        driving = network.spawn(COORDINATOR, scene.drive_anew())
    scene.rested.set()
    await asyncio.wait_for(driving, LIMITS.default_deadline)
    scene.over.set()
    await asyncio.gather(*scene.servers, return_exceptions=True)
    return OUTCOMES.get((ended, seen), f"{ended}, {seen}")


def cells() -> Iterator[tuple[str, str, str, str]]:
    """The cells of the table: protocol, moment, fault and letter."""
    (_, *protocols), *rows = ([cell.strip() for cell in line.split("|")] for line in TABLE.strip().splitlines())
    assert protocols == [*SCENES] and [row[0] for row in rows] == [*FAULTS]
    for fault, *row in rows:
        for protocol, letters in zip(protocols, row, strict=True):
            for moment, letter in zip(SCENES[protocol].moments, letters, strict=True):
                if letter != ".":
                    yield protocol, moment, fault, letter


def cases() -> list[Any]:
    """The cells of the table. All are sweeps but some in which each protocol has each of its moments, faults and letters once."""
    listed = list(cells())
    alone = [cell for cell in listed if not cell[2].endswith(("silently", "for a moment"))]
    shown = {cell: {("moment", cell[1]), ("fault", cell[2]), ("letter", cell[3])} for cell in alone}
    kept = set()
    for protocol in SCENES:
        own = {cell: features for cell, features in shown.items() if cell[0] == protocol}
        missing = set().union(*own.values())
        while missing:
            best = max(own, key=lambda cell: len(own[cell] & missing))
            missing -= own[best]
            kept.add(best)
    return [pytest.param(*cell, marks=[] if cell in kept else pytest.mark.sweep) for cell in listed]


@pytest.mark.sim
@pytest.mark.parametrize(("protocol", "moment", "fault", "expected"), cases())
def test_a_fault_at_a_moment(protocol: str, moment: str, fault: str, expected: str) -> None:
    scene = SCENES[protocol]()
    run = simulated_run(lambda: outcome_of(scene, scene.moments[moment], FAULTS[fault]))
    assert run.value == expected and not run.leftover_tasks and not scene.unmet
    assert expected not in "LU" or named(scene.stepping.exception()) == ("b",)  # type: ignore[arg-type]


@pytest.mark.sim
@pytest.mark.parametrize("protocol", SCENES)
@pytest.mark.parametrize("seed", range(40))
def test_two_faults(protocol: str, seed: int) -> None:
    """The second may strike while the first lasts; then more may end in doubt, and nothing else ends otherwise."""
    scene, random = SCENES[protocol](), Random(f"{protocol}:{seed}")
    (moment, fault), second = ((random.choice([*scene.moments.values()]), random.choice([*FAULTS.values()])) for _ in range(2))

    def strike(scene: Scene) -> None:
        scene.arm(*second)
        fault(scene)

    run = simulated_run(lambda: outcome_of(scene, moment, strike))
    letters = {letter for name, _, _, letter in cells() if name == protocol}
    assert run.value in letters | {"L", "H", "?"} and not run.leftover_tasks
