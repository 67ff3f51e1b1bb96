"""Each state of a transaction meets each fault: made to happen, all that always holds holds; and it is counted."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from typing import Any

import pytest

from aiograd.coordination.client import TransactionClient
from aiograd.coordination.drive import TransactionDrive
from aiograd.distributed import failpoints
from aiograd.errors import AiogradError, ArgumentError
from aiograd.testing import SimulatedNetwork, simulated_run
from aiograd.testing.network.link import SimulatedLink
from aiograd.transaction import Coordinator, Participant, TransactionEvent, TransactionState
from tests.chaos import batches
from tests.chaos.batches import Piece
from tests.chaos.coverage import FAULTS, IMPOSSIBLE, ROLES, Coverage, Machine, counted, names_of
from tests.chaos.report import Report, judge_states
from tests.coordination.faults import COORDINATOR, LEASE, NAMES, Moment, Scene
from tests.coordination.faults import FAULTS as STRIKES
from tests.coordination.scenes import SCENES, PipelineScene
from tests.coordination.test_fault_matrix import OUTCOMES, outcome_of

ACTIVE, COMMITTING, IN_DOUBT = TransactionState.ACTIVE, TransactionState.COMMITTING, TransactionState.IN_DOUBT
MEMBER = "b"
#: the first message of a step
BEGUN = Moment("sent", "run", COORDINATOR)
#: by state, the moment and the trouble that lead to it; others belong to a step that nothing else disturbs
WAYS: dict[TransactionState, tuple[str, str]] = {
    TransactionState.UNCERTAIN: ("all are prepared", "the coordinator is frozen for longer than a lease"),
    IN_DOUBT: ("decided", "a member is cut off for longer than its lease"),
    TransactionState.ABORTED: ("all are prepared", "the caller is cancelled"),
}


def strike(scene: Scene, host: str, fault: str) -> None:
    """A fault of a host, or of its links. A frame is sent, so that the fault of a link does not wait for the next state."""
    network, others = scene.network, tuple(name for name in NAMES if name != host)
    match fault:
        case "kill":
            scene.disturb(0.0)
            network.kill(host)
        case "freeze":
            scene.freeze(host, LEASE / 2)
        case "cut":
            scene.part(host, others, LEASE / 2)
        case _:
            scene.disturb(LEASE / 2)
            network.heal_all()  # over a link that is cut nothing passes that could be struck
            for other in others:
                network.force(host, other, fault)  # type: ignore[arg-type]
    if fault in ("cut", "reset", "stall"):
        for other in others:
            scene.servers.append(network.spawn(host, poke(scene, host, other)))


async def poke(scene: Scene, host: str, other: str) -> None:
    with contextlib.suppress(AiogradError):
        await scene.workers[host].call(other, "poke", timeout=1.0)


def forced(role: str, state: TransactionState, fault: str) -> tuple[str, Coverage]:
    """A step in which a fault strikes when a transaction comes to a state; how it has ended, and what was met."""
    scene, coverage = PipelineScene(), Coverage()
    host = COORDINATOR if role == "coordinator" else MEMBER
    moment, trouble = WAYS.get(state, ("", ""))
    is_armed = False

    def entered(name: str, found: str, now: TransactionState) -> None:
        nonlocal is_armed
        if is_armed and (name, found, now) == (host, role, state):
            is_armed = False
            strike(scene, host, fault)

    def begin(scene: Scene) -> None:
        nonlocal is_armed
        is_armed = True
        if trouble:
            STRIKES[trouble](scene)
        elif (role, state) == ("coordinator", ACTIVE):
            entered(host, role, state)  # it has been so since before the first message: when members answer, it decides before it sends

    with counted(coverage, entered):
        run = simulated_run(lambda: outcome_of(scene, scene.moments[moment] if trouble else BEGUN, begin))
    assert not run.leftover_tasks and not is_armed
    return run.value, coverage


def cells() -> list[Any]:
    """All are sweeps but one of each role and state, with faults in turn."""
    possible = [cell for cell in Coverage().cells if cell[1] not in IMPOSSIBLE]
    places = [*dict.fromkeys(cell[:2] for cell in possible)]
    faults = [*dict.fromkeys(cell[2] for cell in possible)]
    kept = {(*place, faults[number % len(faults)]) for number, place in enumerate(places)}
    return [pytest.param(*cell, id="-".join(cell), marks=[] if cell in kept else pytest.mark.sweep) for cell in possible]


@pytest.mark.sim
@pytest.mark.parametrize(("role", "state", "fault"), cells())
def test_a_fault_in_a_state(role: str, state: TransactionState, fault: str) -> None:
    ended, coverage = forced(role, state, fault)
    assert ended in OUTCOMES.values()
    assert coverage.counts[role, state, fault] and not coverage.contradictions


@pytest.mark.sim
@pytest.mark.parametrize("protocol", SCENES)
def test_nothing_can_strike_while_work_is_applied(protocol: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reason of `IMPOSSIBLE`: between the decision and its end no step of the loop ends, no frame leaves and no protocol point is reached."""
    seen: Counter[str] = Counter()
    applying: dict[Machine, tuple[int, ...]] = {}
    carry = SimulatedLink.carry

    def carrying(link: SimulatedLink, *args: Any) -> None:
        seen["frames"] += 1
        carry(link, *args)

    def reached(point: str) -> None:
        seen["points"] += 1

    def watch(kind: type[Machine]) -> None:
        handle = kind.handle

        def watching(machine: Machine, event: TransactionEvent, now: float) -> Any:
            commands = handle(machine, event, now)  # type: ignore[arg-type]
            moment = asyncio.get_running_loop().steps, seen["frames"], seen["points"]  # type: ignore[attr-defined]
            if machine.state == COMMITTING:
                applying[machine] = moment
            elif machine in applying:
                assert applying.pop(machine) == moment
                seen[kind.__name__] += 1
            return commands

        monkeypatch.setattr(kind, "handle", watching)

    monkeypatch.setattr(SimulatedLink, "carry", carrying)
    watch(Coordinator)
    watch(Participant)
    stop = failpoints.observe(reached)
    try:
        scene = SCENES[protocol]()
        run = simulated_run(lambda: outcome_of(scene, next(iter(scene.moments.values())), lambda _: None))
    finally:
        stop()
    assert run.value == OUTCOMES["done", "all"] and not applying and seen["frames"]
    assert seen["points"] or protocol in ("agreement", "gradients"), "which call nothing"
    assert seen["Coordinator"] >= 2, "a step, and another one"
    assert seen["Participant"] or protocol == "optimizer", "whose members are told, and do not vote"


# -------------------------------------------------------------------- the counts


def test_a_cell_that_is_empty_is_named() -> None:
    coverage = Coverage(ROLES, FAULTS)
    possible = [cell for cell in coverage.cells if cell[1] not in IMPOSSIBLE]
    assert coverage.unseen == possible and len(possible) == 5 * (len(ROLES["coordinator"]) + len(ROLES["participant"]) - 2)
    for cell in possible[1:]:
        coverage.met(*cell, count=3)
    assert coverage.unseen == possible[:1] and names_of(coverage.unseen) == "coordinator active × kill"
    again = Coverage.of(coverage.named() | {"fault: kill": 7})
    assert again.counts == coverage.counts
    lines = list(coverage.lines())
    assert len(lines) == 1 + len(ROLES["coordinator"]) + len(ROLES["participant"])
    assert sum(reason in line for line in lines for reason in IMPOSSIBLE.values()) == 2
    assert lines[1].split() == ["coordinator", "active", "0", "3", "3", "3", "3"]
    assert coverage.contradictions == []
    coverage.met("participant", COMMITTING, "cut")
    assert coverage.contradictions == [("participant", COMMITTING, "cut")] and any(line.split()[-3:] == ["1", "0", "0"] for line in coverage.lines())


@pytest.mark.parametrize("cell", ["coordinator, uncertain, kill", "participant, lost, kill", "caller, active, kill", "participant, active, fire"])
def test_a_cell_that_is_not_there_is_refused(cell: str) -> None:
    role, state, fault = cell.split(", ")
    with pytest.raises(ArgumentError, match=f"no cell {cell}; expected"):
        Coverage().met(role, state, fault)  # type: ignore[arg-type]


class Client(TransactionClient):
    """A client that can be referred to weakly."""


@pytest.mark.sim
def test_both_ends_of_a_link_are_struck_and_the_dead_are_not() -> None:
    coverage = Coverage({"coordinator": [ACTIVE], "participant": [ACTIVE]}, FAULTS)

    async def main() -> None:
        network = SimulatedNetwork(1)
        clients = []

        async def begin(machine: Machine) -> None:
            clients.append(Client())
            TransactionDrive(machine, clients[-1])

        await network.spawn("a", begin(Coordinator("a", pause=1.0)))
        for name in ("b", "c"):
            await network.spawn(name, begin(Participant("a", lease=1.0, pause=1.0)))
        network.link("a", "b").hit("cut")
        network.link("c", "b").hit("slow")
        network.reset("a", "b")  # there is no connection
        network.freeze("c", 1.0)
        network.kill("a")
        network.link("b", "a").hit("stall")
        del clients[1]
        network.link("b", "a").hit("stall")

    with counted(coverage):
        simulated_run(main)
    found = [f"{role}: {fault}" for role, _, fault in coverage.counts.elements()]
    assert found == ["coordinator: cut", "participant: cut", "participant: freeze", "coordinator: kill", "participant: stall"]


# -------------------------------------------------------------------- a long run


def judged(counts: Counter[str], *, is_whole: bool = True) -> list[str]:
    report = Report()
    judge_states(report, counts, is_whole=is_whole)
    return report.failures


def test_an_empty_cell_fails_a_run_before_a_release(capsys: pytest.CaptureFixture[str]) -> None:
    coverage = Coverage()
    for cell in coverage.cells:
        if cell[1] not in IMPOSSIBLE:
            coverage.met(*cell)
    assert judged(coverage.named()) == []
    del coverage.counts["participant", IN_DOUBT, "freeze"]
    (failure,) = judged(coverage.named())
    assert failure == "no fault has met these states: participant in doubt × freeze" and "participant aborted" in capsys.readouterr().out
    assert judged(coverage.named(), is_whole=False) == []
    coverage.met("coordinator", COMMITTING, "kill")
    (failure,) = judged(coverage.named(), is_whole=False)
    assert "coordinator committing × kill" in failure


@pytest.mark.sim
def test_the_parts_of_a_run_count_it() -> None:
    """And ablations do not: what is met without a protection says nothing of the package."""
    counts = batches.carry_out(Piece("cells", 0, 2, "kill")).counts
    assert Coverage.of(counts).counts.total() > 5
    (line,) = [line for line in Report(counts).lines() if line.startswith("states met by faults")]
    assert "not yet: " in line and "participant in doubt × stall" in line
    assert not Coverage.of(batches.carry_out(Piece("ablations", 0, 1, "commit_idempotent")).counts).counts
