"""Coverage: how often each state of a transaction was current, on a host, when each fault struck the host or its link.

Note [What is counted]
    The simulated network says when a fault strikes: a host is killed or frozen, a connection breaks or goes silent, a frame meets a cut. The first
    two strike the transactions of one host, the others those of both ends. The transaction and its drive are the package's, and know nothing of
    this: drives are noted as they are made, each for the incarnation of a host that makes it. A transaction counts for as long as its client is
    there: members of steps keep the last one, so that faults meet its end as well.

Note [Cells that cannot be met]
    Work is applied in one call that awaits nothing, sends nothing and passes no protocol point, and `COMMITTING` ends in that call. The tests watch
    every frame and every point of each protocol for it, and a run in which such a cell is met fails.
"""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from aiograd.coordination.client import TransactionClient
from aiograd.coordination.drive import TransactionDrive
from aiograd.errors import ArgumentError
from aiograd.testing import SimulatedNetwork
from aiograd.testing.network.link import SimulatedLink
from aiograd.testing.owner import OWNER, HandleOwner
from aiograd.transaction import Coordinator, Participant, TransactionEvent, TransactionState
from aiograd.transaction.states import COORDINATOR_TRANSITIONS, TRANSITIONS

#: the table of each role
ROLES: Mapping[str, Mapping[TransactionState, Any]] = {"coordinator": COORDINATOR_TRANSITIONS, "participant": TRANSITIONS}
#: faults of hosts and of the connections between them, as the simulated network names them
FAULTS = ("kill", "freeze", "cut", "reset", "stall")
#: states in which no fault can strike, with the reason
IMPOSSIBLE: Mapping[TransactionState, str] = {
    TransactionState.COMMITTING: "cannot be met: work is applied in one call that awaits and sends nothing",
}
PREFIX = "state: "
Cell = tuple[str, TransactionState, str]
Machine = Coordinator | Participant


class Coverage:
    """How often each fault has met each state of each role.

    Args:
        roles: by role, its states.
        faults: names of faults.

    Attributes:
        counts: by (role, state, fault).
    """

    def __init__(self, roles: Mapping[str, Iterable[TransactionState]] = ROLES, faults: Iterable[str] = FAULTS) -> None:
        self.roles = {role: tuple(states) for role, states in roles.items()}
        self.faults = tuple(faults)
        self.counts: Counter[Cell] = Counter()

    @property
    def cells(self) -> list[Cell]:
        """All cells, in the order of the tables."""
        return [(role, state, fault) for role, states in self.roles.items() for state in states for fault in self.faults]

    def met(self, role: str, state: TransactionState, fault: str, count: int = 1) -> None:
        """A fault has met a state.

        Args:
            role, state, fault: the cell.
            count: times.

        Raises:
            ArgumentError: no such cell.
        """
        if state not in self.roles.get(role, ()) or fault not in self.faults:
            raise ArgumentError(
                f"coverage has no cell {role}, {state}, {fault}; expected a role of {', '.join(self.roles)} with one of its states, "
                f"and a fault of {', '.join(self.faults)}"
            )
        self.counts[role, state, fault] += count

    @property
    def unseen(self) -> list[Cell]:
        """The cells that can be met and were not, in the order of the tables."""
        return [cell for cell in self.cells if not self.counts[cell] and cell[1] not in IMPOSSIBLE]

    @property
    def contradictions(self) -> list[Cell]:
        """The cells that were met, although it is said that they cannot be."""
        return [cell for cell in self.cells if self.counts[cell] and cell[1] in IMPOSSIBLE]

    def lines(self) -> Iterator[str]:
        """The table: a line for each state, and the reason where no fault can meet it."""
        names = [(role, state) for role, states in self.roles.items() for state in states]
        width = max((len(f"{role} {state}") for role, state in names), default=0)
        rows = {(role, state): [f"{self.counts[role, state, fault]:,}" for fault in self.faults] for role, state in names}
        columns = [max(map(len, column)) for column in zip(self.faults, *rows.values(), strict=True)]
        yield " ".join((" " * width, *map(str.rjust, self.faults, columns)))
        for (role, state), cells in rows.items():
            is_reason = state in IMPOSSIBLE and not any(self.counts[role, state, fault] for fault in self.faults)
            yield " ".join((f"{role} {state}".ljust(width), *([IMPOSSIBLE[state]] if is_reason else map(str.rjust, cells, columns))))

    # ---- as counts under names

    def named(self) -> Counter[str]:
        """The counts under names, for the ledger."""
        return Counter({f"{PREFIX}{role}, {state}, {fault}": count for (role, state, fault), count in self.counts.items()})

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Coverage:
        """Coverage with counts under names; names of other things are passed over."""
        coverage = cls()
        for name, count in counts.items():
            if name.startswith(PREFIX):
                role, state, fault = name.removeprefix(PREFIX).split(", ")
                coverage.met(role, TransactionState(state), fault, count)
        return coverage


def names_of(cells: Iterable[Cell]) -> str:
    """Cells in words."""
    return "; ".join(f"{role} {state} × {fault}" for role, state, fault in cells) or "none"


@contextmanager
def counted(coverage: Coverage, entered: Callable[[str, str, TransactionState], None] | None = None) -> Iterator[None]:
    """Count what happens on simulated networks. See Note [What is counted].

    Args:
        coverage: gets the counts.
        entered: called with a host, a role and the state that a transaction has there, each time that it begins or has handled an event.
    """
    #: by host and client: the incarnation, its loop and the transaction
    machines: defaultdict[str, WeakKeyDictionary[TransactionClient, tuple[HandleOwner, Any, Machine]]] = defaultdict(WeakKeyDictionary)
    begin, handle, hit_link, hit_host, reset = (
        TransactionDrive.__init__, TransactionDrive.handle, SimulatedLink.hit, SimulatedNetwork._hit, SimulatedNetwork.reset,
    )  # fmt: skip

    def note(drive: TransactionDrive[Any]) -> None:
        if entered is not None and (owner := OWNER.get()) is not None:
            entered(_host(owner), _role(drive.machine), drive.state)

    def noting_begin(drive: TransactionDrive[Any], machine: Any, client: TransactionClient) -> None:
        begin(drive, machine, client)
        if (owner := OWNER.get()) is not None:
            machines[_host(owner)][client] = owner, asyncio.get_running_loop(), machine
        note(drive)

    def noting_handle(drive: TransactionDrive[Any], event: TransactionEvent) -> Any:
        after_commit = handle(drive, event)
        note(drive)
        return after_commit

    def current(*names: str) -> list[tuple[str, TransactionState]]:
        loop = asyncio.get_running_loop()
        entries = [entry for name in names if name in machines for entry in machines[name].values()]
        return [(_role(machine), machine.state) for owner, of, machine in entries if of is loop and not owner.is_dead]

    def met(fault: str, found: list[tuple[str, TransactionState]]) -> None:
        for role, state in found:
            coverage.met(role, state, fault)

    def counting_link(link: SimulatedLink, kind: str, frame: bytes | None = None) -> None:
        if kind in coverage.faults:
            met(kind, current(link.source, link.target))
        hit_link(link, kind, frame)

    def counting_host(network: SimulatedNetwork, name: str, kind: str) -> None:
        if kind in coverage.faults and kind != "reset":
            met(kind, current(name))
        hit_host(network, name, kind)

    def counting_reset(network: SimulatedNetwork, a: str, b: str) -> None:
        found, before = current(a, b), network.coverage["reset", None]
        reset(network, a, b)  # of each connection one end is told
        if "reset" in coverage.faults and network.coverage["reset", None] > before:
            met("reset", found)

    with (
        mock.patch.object(TransactionDrive, "__init__", noting_begin),
        mock.patch.object(TransactionDrive, "handle", noting_handle if entered is not None else handle),
        mock.patch.object(SimulatedLink, "hit", counting_link),
        mock.patch.object(SimulatedNetwork, "_hit", counting_host),
        mock.patch.object(SimulatedNetwork, "reset", counting_reset),
    ):
        yield


def _host(owner: HandleOwner) -> str:
    return owner.name.partition("#")[0]


def _role(machine: Machine) -> str:
    return "coordinator" if isinstance(machine, Coordinator) else "participant"
