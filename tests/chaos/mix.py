"""Mix: what a seed draws. Everything that can go wrong in a run is in here by name, so that a failure can be shrunk to what it needs.

Note [Streams]
    Each purpose draws from a stream of its own, so that switching one thing off leaves the others as they were.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from random import Random
from typing import Literal, get_args

from aiograd.testing import Faults
from aiograd.testing.network.faults import FAULT_KINDS
from aiograd.transaction.tree import FANOUT
from tests.chaos.jobs import JobFaults

Order = Literal["fifo", "permuted"]
#: what happens to hosts and links rather than to frames
Trouble = Literal["cut", "cut one way", "reset", "freeze", "kill", "silent kill", "stop", "swizzle", "kill at a point"]
TROUBLES: tuple[Trouble, ...] = get_args(Trouble)
#: what a driver can be busy with
Activity = Literal["context", "echo", "tally", "steps", "nap", "probe"]

#: part of the seeds in which nothing goes wrong, so that everything has to succeed
CALM = 0.1
NO_FAULTS, NO_JOB_FAULTS = Faults(), JobFaults()
#: rules on the executor, at whatever cost; what an engine does by default
EVERYTHING, LARGE = 1e-3, 400_000.0


@dataclass(frozen=True, kw_only=True)
class Mix:
    """The settings and events of one run."""

    order: Order = "fifo"
    #: workers besides the driver
    workers: int = 2
    #: whether a driver of another principal works at the same time
    tenant: bool = False
    frame_bytes: int = 1024
    #: participants that one worker tells of a decision; more are told by a tree
    fanout: int = FANOUT
    #: of the engines: rules that cost more nanoseconds run on the executor
    inline_ns: float = LARGE
    faults: Faults = NO_FAULTS
    #: of jobs on the executor
    jobs: JobFaults = NO_JOB_FAULTS
    #: probability that a function or hook raises
    failing: float = 0.0
    #: probability that a caller gives up
    cancels: float = 0.0
    #: how many times something happens to hosts, and what may
    troubles: int = 0
    trouble_kinds: tuple[Trouble, ...] = ()
    #: what the driver does: one round after the other, all of a round at the same time
    rounds: tuple[tuple[Activity, ...], ...] = (("context",),)
    tenant_rounds: tuple[tuple[Activity, ...], ...] = ()

    @classmethod
    def drawn(cls, seed: int | str) -> Mix:
        """The mix that a seed draws. See Note [Streams]."""

        def stream(name: str) -> Random:
            return Random(f"{seed}:{name}")

        shape, work = stream("shape"), stream("work")
        is_calm = stream("calm").random() < CALM
        faults = Faults(latency=(0.0005, 0.005)) if is_calm else Faults.drawn(stream("faults"))
        tenant = stream("tenant").random() < 0.3
        return cls(
            order="fifo" if stream("order").random() < 0.5 else "permuted",
            workers=shape.choice((1, 2, 2, 3)),
            tenant=tenant,
            frame_bytes=shape.choice((256, 1024, 1024, 65536)),
            fanout=stream("fanout").choice((1, 1, FANOUT)),
            inline_ns=shape.choice((EVERYTHING, LARGE, LARGE)),
            faults=faults,
            jobs=NO_JOB_FAULTS if is_calm else JobFaults.drawn(stream("jobs")),
            failing=0.0 if is_calm else stream("failing").choice((0.0, 0.0, 0.05)),
            cancels=stream("cancels").choice((0.0, 0.1, 0.3)),
            troubles=0 if is_calm else stream("troubles").choice((0, 0, 1, 2, 3)),
            trouble_kinds=TROUBLES,
            rounds=_rounds(work, ("context",) * 8 + ("echo", "tally", "steps", "nap"), work.choice((1, 2, 3))),
            tenant_rounds=_rounds(work, ("context", "probe", "probe", "nap"), work.choice((1, 2))),
        )

    @property
    def is_gentle(self) -> bool:
        """True if messages are quick enough for every deadline."""
        return self.faults.slow is None and self.faults.latency[1] + self.faults.jitter <= 0.01

    def simpler(self) -> list[tuple[str, Mix]]:
        """Each single thing that could be switched off, and the mix without it: what a failure is shrunk by."""
        found: list[tuple[str, Mix]] = []

        def change(what: str, **values: object) -> None:
            mix = dataclasses.replace(self, **values)  # type: ignore[arg-type]
            if mix != self:
                found.append((f"without {what}", mix))

        change("a permuted order", order="fifo")
        change("the other tenant", tenant=False)
        for kind in (*FAULT_KINDS, "slow", "jitter"):
            change(kind, faults=self.faults.without(kind))
        for name in ("raises", "late", "never"):
            change(f"jobs that are {name}", jobs=dataclasses.replace(self.jobs, **{name: 0.0}))
        change("failing functions", failing=0.0)
        change("callers that give up", cancels=0.0)
        change("one trouble", troubles=max(0, self.troubles - 1))
        if self.troubles:
            for kind in self.trouble_kinds:
                change(kind, trouble_kinds=tuple(each for each in self.trouble_kinds if each != kind) or ("reset",))
        for index in range(len(self.rounds)):
            change(f"round {index}", rounds=(*self.rounds[:index], *self.rounds[index + 1 :]))
        change("a worker", workers=max(1, self.workers - 1))
        change("small frames", frame_bytes=65536)
        change("a tree of receivers", fanout=FANOUT)
        change("rules on the executor", inline_ns=LARGE)
        return found


def _rounds(random: Random, choice: tuple[Activity, ...], count: int) -> tuple[tuple[Activity, ...], ...]:
    return tuple(tuple(random.choices(choice, k=random.choice((1, 1, 1, 2, 3)))) for _ in range(count))
