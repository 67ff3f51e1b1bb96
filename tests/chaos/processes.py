"""Real processes: workers on this machine that are killed with SIGKILL at every protocol point, stopped, and asked to end.

One worker runs passes of its own and calls the two others, which call each other and the first; so each protocol point is met in three roles.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from aiograd import distributed as dist
from aiograd.distributed import failpoints
from aiograd.distributed.cluster import LocalCluster
from aiograd.errors import DistributedError, RemoteError, WorkerLostError
from tests.chaos import programs
from tests.chaos.cells import NOT_THE_INITIATOR

SERVICE = "tests.chaos.process_service:service"
#: small frames, so that answers have two
LIMITS = dist.Limits(frame_bytes=80, default_deadline=5.0, lease=8.0)
ROLES = ("initiator", "middle", "last")
POINTS = tuple(failpoints.POINTS)
#: what cannot happen
IMPOSSIBLE = {("initiator", point) for point in NOT_THE_INITIATOR}
#: every worker is called by the initiator and by another one, which calls the initiator
PROGRAM = programs.everywhere("initiator", ["middle", "last"])
SECONDS = 5.0


@dataclass
class Findings:
    """The observations of a trial."""

    counts: Counter[str] = field(default_factory=Counter)
    #: what should not have been seen
    wrong: list[str] = field(default_factory=list)
    #: seconds, by what was timed
    times: dict[str, list[float]] = field(default_factory=dict)

    def timed(self, what: str, seconds: float) -> None:
        """Note a time."""
        self.times.setdefault(what, []).append(seconds)

    def add(self, other: Findings) -> None:
        """Take over what somebody else has seen."""
        self.counts += other.counts
        self.wrong += other.wrong
        for what, times in other.times.items():
            self.times.setdefault(what, []).extend(times)


class Trial:
    """A cluster to which things are done.

    Args:
        cluster: open.
        folder: for notes of the workers.
    """

    def __init__(self, cluster: LocalCluster, folder: Path) -> None:
        self.cluster = cluster
        self.folder = folder
        self.findings = Findings()

    async def ask(self, name: str, function: str, *args: Any) -> Any:
        """Call a function of a worker."""
        return await self.cluster.driver.call(name, function, *args, timeout=3 * SECONDS)

    def drive(self) -> asyncio.Task[Any]:
        """Let the initiator run a pass."""
        return asyncio.create_task(self.ask("initiator", "drive", PROGRAM, ["middle", "last"], SECONDS))

    async def pass_(self, what: str) -> None:
        """A pass that has to succeed."""
        try:
            report = await self.drive()
        except DistributedError as error:
            self.findings.wrong.append(f"{what}: {error}")
            return
        if report["outcome"] != "committed" or report["wrong"]:
            self.findings.wrong.append(f"{what}: {report}")

    async def kill_at(self, role: str, point: str, hit: int = 1) -> None:
        """Let a worker kill itself when it comes to a point, and see what becomes of everybody."""
        what, findings = f"{role} killed at {point}", self.findings
        note = self.folder / f"{role}-{point}-{findings.counts.total()}"
        await self.ask(role, "arm", point, hit, str(note))
        lost = asyncio.create_task(self.cluster.wait_lost(role))  # of the process that is there now: another may take its place at once
        await asyncio.sleep(0.05)
        report: dict[str, Any] = {}
        try:
            report = await self.drive()
            at = report["at"]
            findings.counts[f"kill: {report['outcome']}"] += 1
            findings.wrong += [f"{what}: {wrong}" for wrong in report["wrong"]]
        except (WorkerLostError, RemoteError) as error:
            at = time.monotonic()
            if role != "initiator":
                findings.wrong.append(f"{what}: {error!r}")
            findings.counts["kill: initiator lost"] += 1
        if not note.exists():
            findings.wrong.append(f"{what}: it never came there")
            lost.cancel()
            await self.ask(role, "arm", "", 1, "")
            return
        killed = float(note.read_text())
        findings.counts["kills"] += 1
        if report.get("outcome") != "committed" and "CommitUnknown" not in report.get("error", ""):
            findings.timed("kill -9 to typed error", at - killed)
        if role == "initiator":
            await self._agree(what)
        await lost
        await self.cluster.wait_running(role)
        await self.pass_(f"after {what}")
        findings.timed("kill -9 to next pass", time.monotonic() - killed)

    async def _agree(self, what: str) -> None:
        """The initiator is gone: those who have decided must have decided alike."""
        await asyncio.sleep(0.2)
        ours, theirs = await asyncio.gather(self.ask("middle", "orphans"), self.ask("last", "orphans"))
        for key in ours.keys() & theirs.keys():
            if ours[key] != theirs[key]:
                self.findings.wrong.append(f"{what}: of context {key} a part is committed on {'middle' if ours[key] else 'last'} only")

    async def freeze(self, role: str, seconds: float) -> None:
        """Stop a process for a while in the midst of passes."""
        findings, pid = self.findings, self.cluster.pids[role]
        driving = self.drive()
        await asyncio.sleep(0.003)
        stopped = time.monotonic()
        os.kill(pid, signal.SIGSTOP)
        try:
            again = asyncio.create_task(self._until_error())
            await asyncio.wait([again], timeout=seconds)
        finally:
            os.kill(pid, signal.SIGCONT)
        for report in (await driving, await again):
            if report is not None:
                findings.wrong += [f"{role} stopped: {wrong}" for wrong in report["wrong"]]
                if report["outcome"] != "committed":
                    findings.timed("SIGSTOP to typed error", report["at"] - stopped)
        findings.counts["stopped processes"] += 1
        await asyncio.sleep(0.2)
        await self.pass_(f"after {role} was stopped")

    async def _until_error(self) -> Any:
        for _ in range(1000):
            report = await self.drive()
            if report["outcome"] != "committed":
                return report
        return None

    async def end(self, role: str) -> None:
        """Ask a process to end in the midst of a pass."""
        driving = self.drive()
        lost = asyncio.create_task(self.cluster.wait_lost(role))
        await asyncio.sleep(0.003)
        began = time.monotonic()
        os.kill(self.cluster.pids[role], signal.SIGTERM)
        with contextlib.suppress(DistributedError):
            report = await driving
            self.findings.wrong += [f"{role} ended: {wrong}" for wrong in report["wrong"]]
        status = await lost
        self.findings.timed("SIGTERM to exit", time.monotonic() - began)
        self.findings.counts["ended processes"] += 1
        if status != 0:
            self.findings.wrong.append(f"{role} ended with status {status}")
        await self.cluster.wait_running(role)
        await self.pass_(f"after {role} was ended")

    async def rest(self) -> None:
        """Nothing may be left once leases are over."""
        left: dict[str, dict[str, int]] = {}
        for _ in range(60):
            figures = {role: await self.ask(role, "figures") for role in ROLES}
            left = {role: {what: count for what, count in counts.items() if count} for role, counts in figures.items()}
            if not any(left.values()):
                return
            await asyncio.sleep(LIMITS.lease_seconds / 20)
        self.findings.wrong.append(f"left over: {left}")


@contextlib.asynccontextmanager
async def trial() -> AsyncIterator[Trial]:
    """Three worker processes, which are started again when they end."""
    with tempfile.TemporaryDirectory() as folder:
        async with LocalCluster(names=ROLES, n=len(ROLES), service=SERVICE, max_restarts=1_000_000, limits=LIMITS) as cluster:
            made = Trial(cluster, Path(folder))
            await made.pass_("at first")
            yield made


async def run_processes(
    *, kills: int = 1, stops: int = 5, ends: int = 5, points: tuple[str, ...] = POINTS, roles: tuple[str, ...] = ROLES
) -> Findings:
    """Kill a worker `kills` times at every point in every role, stop and end some.

    Args:
        kills: per point and role.
        stops, ends: of SIGSTOP and SIGTERM.
    """
    async with trial() as made:
        for number in range(kills):
            for point in points:
                for role in roles:
                    if (role, point) not in IMPOSSIBLE:
                        await made.kill_at(role, point, 1 + number % 2)
        for number in range(stops):
            await made.freeze(roles[1 + number % 2], 2.5)
        for number in range(ends):
            await made.end(roles[number % len(roles)])
        await made.rest()
    return made.findings
