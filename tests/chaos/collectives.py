"""Collectives in trouble: every result is right to the bit, or there is a typed error on every member, in time.

A run is a group of 2 to 20 members that carry out operations while a seed breaks connections, freezes and kills. The promises:

- a result, wherever there is one, has the bits of a sum in the order of ranks: nothing lost, doubled or half added;
- gradients of a pass that travel as payloads have the bits of one process that compresses those of all ranks, and so have the residuals;
- who has no result has a typed error, and then every member that lives has one, unless it had nothing left to do;
- if nothing happens but that members die, all others know it when the time after which a silent peer counts as lost is over, and a moment; also
  those that have yet to form the group, once anybody who lives has met the member that died (nobody can tell one that was never there from one that
  has not started, which is waited for until the deadline);
- if nothing happens at all, all operations succeed.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from contextlib import ExitStack
from random import Random
from typing import Any
from unittest import mock

import numpy as np

from aiograd import distributed as dist
from aiograd.coordination.buckets import GradientBuckets, ParameterSpec
from aiograd.coordination.compressed_pass import CompressedPass
from aiograd.distributed.collectives.exchange import OrderedSum
from aiograd.distributed.collectives.forming import GroupForming
from aiograd.distributed.collectives.group import Group
from aiograd.distributed.collectives.ring import RingExchange
from aiograd.distributed.rpc.identity import PeerId
from aiograd.errors import CollectiveError, DeadlineError, WorkerLostError
from aiograd.testing import simulated_run
from aiograd.testing.network import Faults, HostKilledError, SimulatedNetwork
from tests.chaos.promises import Broken
from tests.distributed.data_parallel.compressing import Ranks

TYPED = (CollectiveError, WorkerLostError, DeadlineError)
SECRET = b"members of one group have one...."[:32]
OPERATIONS, SECONDS = 12, 8.0
#: operations of one member at a time
TOGETHER = 3
#: seconds beyond that after which a silent peer counts as lost, until all members know it
MOMENT = 1.0
#: values of the gradient that is compressed after every `TOGETHER` operations, and what compresses it
COMPRESSED, COMPRESSORS = 3000, (None, None, dist.TopK(1 / 4, bits=4, block=64), dist.Blockwise(4, block=64))
KINDS = ("all_reduce", "reduce_scatter", "all_gather", "broadcast", "barrier")


class GroupRun:
    """One seed."""

    def __init__(self, seed: int) -> None:
        self.seed = seed
        self.random = random = Random(f"{seed}:group")
        self.is_calm = seed % 4 == 0
        #: members die, and nothing else happens
        self.is_deadly = seed % 4 == 1
        gentle = Faults(latency=(1e-4, 1e-2), jitter=3e-3)
        self.network = SimulatedNetwork(seed, faults=gentle if self.is_calm or self.is_deadly else Faults.drawn(Random(f"{seed}:faults")))
        self.names = tuple(f"w{i}" for i in range(random.choice((2, 3, 4, 5, 5, 17, 20))))
        self.shapes = [random.choice((1, 7, 3000, 20_000)) for _ in range(OPERATIONS)]
        self.kinds = [random.choice(KINDS) for _ in range(OPERATIONS)]
        #: a member that takes one operation for another
        self.odd = random.choice(self.names) if not self.is_calm and not self.is_deadly and random.random() < 0.2 else ""
        self.compressor = Random(f"{seed}:compressor").choice(COMPRESSORS)
        #: the mean of each compressed pass, and the residuals after it
        self.compressed: list[tuple[bytes, list[list[bytes]]]] = []
        #: seconds until a member starts
        delays = Random(f"{seed}:starts")
        self.starts = {name: delays.choice((0.0, 0.0, delays.uniform(0, 1.0))) for name in self.names}
        self.outcomes: dict[str, str] = {}
        self.done: Counter[str] = Counter()
        self.killed: dict[str, float] = {}
        self.workers: dict[str, dist.Worker] = {}
        #: who had met a member when it was killed, and lived
        self.met: dict[str, set[str]] = {}
        self.ended: dict[str, float] = {}
        self.all_have_ended = asyncio.Event()

    def values(self, rank: int, number: int) -> Any:
        """The array that a rank brings to an operation."""
        return np.random.default_rng([rank, number]).standard_normal(self.shapes[number]).astype(np.float32)

    def total(self, number: int) -> Any:
        """The sum in the order of ranks."""
        total = self.values(0, number)
        for rank in range(1, len(self.names)):
            total = total + self.values(rank, number)
        return total

    def operate(self, group: dist.Group, number: int) -> Coroutine[Any, Any, None]:
        """Begin an operation now; returns what waits for its result and checks it."""
        mine = self.values(group.rank, number)
        waiting: Coroutine[Any, Any, Any]
        expected: list[Any]
        kind = self.kinds[number]
        if self.odd == group.names[group.rank] and number == OPERATIONS // 2:
            kind = "barrier" if kind != "barrier" else "all_reduce"
        match kind:
            case "all_reduce":
                waiting, expected = group.all_reduce([mine], timeout=SECONDS), [self.total(number)]
            case "reduce_scatter":
                waiting, expected = group.reduce_scatter(mine, timeout=SECONDS), [np.array_split(self.total(number), group.size)[group.rank]]
            case "all_gather":
                waiting, expected = group.all_gather(mine, timeout=SECONDS), [self.values(rank, number) for rank in range(group.size)]
            case "broadcast":
                root = number % group.size
                waiting = group.broadcast([mine] if group.rank == root else None, root, timeout=SECONDS)
                expected = [self.values(root, number)]
            case _:
                waiting, expected = group.barrier(timeout=SECONDS), []
        return self.check(waiting, expected, f"{kind} (operation {number}) on {group.names[group.rank]} of {group.size}")

    async def compress(self, group: dist.Group, number: int, residuals: list[Any]) -> list[Any]:
        """Let a gradient travel as a payload, and check the mean and the residuals; returns these."""
        if self.compressor is None:
            return residuals
        if not self.compressed:
            ranks = Ranks(self.compressor, range(group.size))
            for each in range(TOGETHER, OPERATIONS + 1, TOGETHER):
                (mean,) = ranks.combined({rank: [self.gradient(rank, each)] for rank in range(group.size)})
                self.compressed.append((mean.tobytes(), [ranks.bits(rank) for rank in range(group.size)]))
        buckets = GradientBuckets([ParameterSpec((COMPRESSED,), np.dtype(np.float32))])
        reduced = CompressedPass(group, buckets, self.compressor, residuals, timeout=SECONDS)
        reduced.take(0, self.gradient(group.rank, number))
        (found,) = await reduced.results()
        mean, rests = self.compressed[number // TOGETHER - 1]
        if found is None or found.tobytes() != mean:
            raise Broken(f"the compressed gradient after operation {number} of {group.names[group.rank]} has other bits than one process finds")
        if [each.tobytes() for each in reduced.residuals if each is not None] != rests[group.rank]:
            raise Broken(f"the residuals after operation {number} of {group.names[group.rank]} have other bits than one process finds")
        return reduced.residuals

    def gradient(self, rank: int, number: int) -> Any:
        """The gradient of a rank that is compressed after so many operations."""
        return np.random.default_rng([rank, number, COMPRESSED]).standard_normal(COMPRESSED).astype(np.float32)

    async def check(self, waiting: Coroutine[Any, Any, Any], expected: list[Any], what: str) -> None:
        """Await a result and look at its bits."""
        found = await waiting
        found = [] if found is None else found if isinstance(found, list) else [found]
        if [array.tobytes() for array in found] != [array.tobytes() for array in expected]:
            raise Broken(f"{what} gave other bits than a sum in the order of ranks")

    async def member(self, name: str) -> None:
        """One member's process."""
        await asyncio.sleep(self.starts[name])
        transport = self.network.transport(name)
        async with dist.Worker(name, secret=SECRET, transport=transport) as worker:
            self.workers[name] = worker
            for other in self.names:
                if other != name:
                    worker.add_peer(other, f"sim://{other}")
            try:
                group = await dist.join_group(worker, self.names, timeout=SECONDS)
                pending = list(range(OPERATIONS))
                residuals: list[Any] = [None]
                while pending:
                    together, pending = pending[:TOGETHER], pending[TOGETHER:]
                    for outcome in await asyncio.gather(*(self.operate(group, number) for number in together), return_exceptions=True):
                        if isinstance(outcome, BaseException):
                            raise outcome
                    self.done[name] += len(together)
                    residuals = await self.compress(group, self.done[name], residuals)
                    await asyncio.sleep(0.01)
                self.end(name, "done")
            except TYPED as error:
                self.end(name, type(error).__name__)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(6 * SECONDS):
                    await self.all_have_ended.wait()  # the others are to find out from it, not from its end

    async def host(self, name: str) -> None:
        """A host that may be killed."""
        try:
            await self.network.spawn(name, self.member(name))
        except HostKilledError:
            self.end(name, "killed")

    def end(self, name: str, outcome: str) -> None:
        """Note how a member has ended."""
        self.outcomes[name] = outcome
        if outcome != "killed":
            self.ended[name] = asyncio.get_running_loop().time()
        if len(self.outcomes) == len(self.names):
            self.all_have_ended.set()

    async def trouble(self) -> None:
        """Trouble with hosts and links."""
        loop = asyncio.get_running_loop()
        kinds = ("kill",) if self.is_deadly else ("kill", "reset", "cut", "freeze")
        for _ in range(0 if self.is_calm else self.random.randrange(1 if self.is_deadly else 0, 3)):
            await asyncio.sleep(self.random.uniform(0, 0.5))
            a, b = self.random.sample(self.names, 2)
            match self.random.choice(kinds):
                case "kill" if self.outcomes.get(a) != "done":
                    self.killed[a] = loop.time()
                    self.met[a] = {name for name, worker in self.workers.items() if name not in self.killed and has_met(worker, a)}
                    self.network.kill(a, silent=self.random.random() < 0.5)
                case "reset":
                    self.network.reset(a, b)
                case "cut":
                    self.network.cut(a, b)
                    loop.call_later(self.random.uniform(0, 3), self.network.heal, a, b)
                case "freeze":
                    self.network.freeze(a, self.random.uniform(0, 3))

    async def main(self) -> None:
        """The run."""
        running: list[Coroutine[Any, Any, None]] = [self.host(name) for name in self.names]
        await asyncio.gather(*running, self.trouble())

    def judge(self) -> None:
        """See whether everything was as promised.

        Raises:
            Broken: it was not.
        """
        if set(self.outcomes) != set(self.names):
            raise Broken(f"some members have come to no end: {self.outcomes}")
        late = {name: seconds for name, seconds in self.ended.items() if seconds > 6 * SECONDS}
        if late:
            raise Broken(f"members did not end within {6 * SECONDS:g} s: {late}")
        living = {name: outcome for name, outcome in self.outcomes.items() if name not in self.killed}
        if self.is_calm and set(living.values()) != {"done"}:
            raise Broken(f"operations failed although nothing was wrong: {living}")
        if self.odd and "done" in living.values() and self.outcomes[self.odd] != "killed":
            raise Broken(f"{self.odd} has called another operation than the others, and some have ended all of theirs: {living}")
        if "done" in living.values() and set(living.values()) != {"done"}:  # a member was lost when some had ended the last ones
            behind = {name for name, outcome in living.items() if outcome != "done" and self.done[name] < OPERATIONS - TOGETHER}
            if behind:
                raise Broken(f"{behind} failed in operations that others have ended long ago: {living}, {self.done}")
        if self.is_deadly and self.killed:
            is_noticed = any(self.met[name] - set(self.killed) for name in self.killed)
            seconds = dist.Limits().silence if is_noticed else SECONDS
            since = {name: max(self.starts[name], *self.killed.values(), 0.0) if is_noticed else self.starts[name] for name in living}
            late = {name: self.ended[name] for name in living if living[name] != "done" and self.ended[name] > since[name] + seconds + MOMENT}
            if late:
                raise Broken(f"members were lost at {self.killed}, and some heard of it too late: {late}")


def has_met(worker: dist.Worker, name: str) -> bool:
    """True if two members have been connected."""
    peer = PeerId(worker._core.principal, name)
    return worker.endpoint.is_connected(peer) or worker.endpoint.was_there(peer)


def run_group(seed: int) -> GroupRun:
    """Run one seed.

    Raises:
        Broken: a promise was not kept.
    """
    run = GroupRun(seed)
    try:
        simulated = simulated_run(run.main, seed=seed, order=run.random.choice(("fifo", "permuted")))
        run.judge()
        if simulated.leftover_tasks:
            raise Broken(f"left behind: {simulated.leftover_tasks}")
    except BaseException as error:
        error.add_note(f"see it again: tests.chaos.collectives.run_group({seed})")
        raise
    return run


# ---------------------------------------------------------------- what is protected


def _add_as_they_come(stack: ExitStack) -> None:
    def add(self: OrderedSum, rank: int, values: Any) -> None:
        unordered(self, self.next, values)

    unordered = OrderedSum.add
    stack.enter_context(mock.patch.object(OrderedSum, "add", add))


def _tell_nobody(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Group, "_tell", lambda self, value, lost="": None))


def _pass_nothing_on(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(Group, "passes_on", False))


def _join_on(stack: ExitStack) -> None:
    stack.enter_context(mock.patch.object(GroupForming, "lost", lambda self, identity, error: None))


def _give_up_silently(stack: ExitStack) -> None:
    def give_up(self: GroupForming, where: tuple[str, str], joining: Any, error: BaseException) -> None:
        with mock.patch.object(self._core, "is_closing", True):
            tell(self, where, joining, error)
        self._given_up.clear()

    tell = GroupForming._give_up
    stack.enter_context(mock.patch.object(GroupForming, "_give_up", give_up))


def _end_early(stack: ExitStack) -> None:
    is_done = RingExchange.is_done.fget

    def hasty(self: RingExchange) -> bool:
        return bool(is_done and is_done(self)) or (self._missing is not None and len(self._missing) == 1 and self.rank > 0)

    stack.enter_context(mock.patch.object(RingExchange, "is_done", property(hasty)))


#: what is protected -> takes the protection out
PROTECTIONS: Mapping[str, Callable[[ExitStack], None]] = {
    # contributions are added in the order of ranks, not in that in which they arrive
    "add_in_order": _add_as_they_come,
    # a member that fails tells the others
    "tell_failures": _tell_nobody,
    # rank 0 of a large group tells the others what members tell it
    "pass_on_failures": _pass_nothing_on,
    # the loss of a member ends the forming of its group
    "notice_losses_while_joining": _join_on,
    # a member that gives up joining tells those that it has met, and those that come later
    "tell_who_gave_up_joining": _give_up_silently,
    # a result is there when all pieces are
    "wait_for_all_pieces": _end_early,
}


@dataclasses.dataclass(frozen=True)
class Noticed:
    """The seed that noticed that a protection was missing."""

    protection: str
    #: the first seed that did; None: none
    seed: int | None
    how: str


def catch(protection: str, seeds: int) -> Noticed:
    """Take a protection out and run seeds until one notices, those first in which nothing happens but deaths: most can be noticed only there."""
    with ExitStack() as stack:
        PROTECTIONS[protection](stack)
        for seed in sorted(range(seeds), key=lambda seed: seed % 4 != 1):
            try:
                run_group(seed)
            except Exception as error:  # whatever it is: with all protections there is none
                return Noticed(protection, seed, f"{type(error).__name__}: {error}")
    return Noticed(protection, None, "")
