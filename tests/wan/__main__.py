"""``python -m tests.wan``: four processes on links of 1 Mbit/s train with local steps; one is killed, and joins again.

One process takes the rounds of the records again, and has to end with the same bits. The links are network namespaces that tbf shapes, or proxies
where namespaces are not permitted (``--proxies`` asks for them). ``--small`` does less of it, in seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from tests.distributed.local_steps.learners import SGD, Oracle, seed_of
from tests.namespaces import Hosts
from tests.wan.links import Namespaces, Proxies, ShapedLinks, Traffic
from tests.wan.service import Wide, service

NAMES = ("w0", "w1", "w2", "w3")
#: the member that is killed, the round in which it is, and the round beside which it joins again
KILLED, KILLED_IN, JOINS_IN = 3, 3, 5
PATIENT = 120.0
COMPRESS = dist.TopK(1 / 16, bits=4)
OUTER = {"lr": 0.9, "momentum": 0.5, "nesterov": True}
#: everything passes the links; on a busy machine processes are silent for a while
LIMITS = {"shared_bytes": 0, "missed_heartbeats": 10}


class Processes:
    """The processes of workers.

    Args:
        links: open.
        secret: of all.
        folder: for the file of the secret.
    """

    def __init__(self, links: ShapedLinks, secret: bytes, folder: Path) -> None:
        self._links = links
        self._file = folder / "cluster.key"
        self._file.touch(0o600)
        self._file.write_text(secret.hex())
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    async def start(self, number: int) -> None:
        """Start the process of a worker, and wait until it listens."""
        words = [sys.executable, "-m", "aiograd", "worker", "--name", NAMES[number], "--service", "tests.wan.service:service"]
        words += ["--listen", self._links.listen(number), "--secret-file", str(self._file), "--allow-plaintext", "--log-level", "error"]
        words += ["--limits", json.dumps(LIMITS)]
        words += ["--trusted-host", "127.0.0.1"]  # as which a proxy is called
        environment = {**os.environ, "OPENBLAS_NUM_THREADS": "1"}
        command = [*self._links.command(number), *words]
        self._processes[number] = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)  # noqa: ASYNC220 - it returns at once
        host, _, port = self._links.url(number).removeprefix("http://").partition(":")
        async with asyncio.timeout(PATIENT):
            while True:
                with contextlib.suppress(OSError):
                    reader, writer = await asyncio.open_connection(host, int(port))
                    writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n\r\n")
                    answer = await reader.read(1)
                    writer.close()
                    if answer:
                        return
                await asyncio.sleep(0.2)

    def kill(self, number: int) -> None:
        """Kill the process of a worker."""
        self._processes[number].kill()
        self._processes[number].wait()

    def close(self) -> None:
        """End all."""
        for process in self._processes.values():
            process.terminate()
        for process in self._processes.values():
            process.wait()


@contextlib.asynccontextmanager
async def opened(links: ShapedLinks, secret: bytes) -> AsyncIterator[Processes]:
    """Links with a process behind each."""
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(links, secret, Path(folder))
        try:
            for number in range(len(NAMES)):
                await links.open(number)
            await asyncio.gather(*map(processes.start, range(len(NAMES))))
            yield processes
        finally:
            processes.close()
            await links.aclose()


class Report:
    """Prints a table with a row for each round.

    Args:
        links: the links.
    """

    def __init__(self, links: ShapedLinks) -> None:
        self._links = links
        self._before = self._traffic()
        self._at = time.perf_counter()
        self._latest = 0
        print(f"{'round':5}  {'members':15} {'lost':5} {'seconds':>7} {'busy':>5}   kB up and down, by worker", flush=True)

    def _traffic(self) -> list[Traffic]:
        return [self._links.traffic(number) for number in range(len(NAMES))]

    def summary(self, parameters: int, steps: int) -> None:
        """Print the bytes of the first worker in the latest round beside the bytes of a gradient in each of its steps."""
        per_step = 2 * 2 * (len(NAMES) - 1) / len(NAMES) * 4 * parameters
        print(f"\na round moves {self._latest / 1000:.0f} kB for {NAMES[0]}; averaging {steps} gradients {steps * per_step / 1000:,.0f} kB", end="")
        print(f", {steps * per_step / self._latest:.0f} times as much")

    def row(self, record: Any, computing: float) -> None:
        """Print a round.

        Args:
            record: of the round.
            computing: seconds of its local steps.
        """
        now, traffic = time.perf_counter(), self._traffic()
        each = [
            f"{(after.up - before.up) / 1000:.0f}/{(after.down - before.down) / 1000:.0f}"
            for before, after in zip(self._before, traffic, strict=True)
        ]
        seconds = now - self._at
        members, lost = ",".join(record.members), ",".join(record.lost)
        print(f"{record.number:5}  {members:15} {lost:5} {seconds:7.2f} {computing / seconds:5.2f}   {'  '.join(each)}", flush=True)
        self._latest = sum(traffic[0]) - sum(self._before[0])
        self._before, self._at = traffic, now


async def train(links: ShapedLinks, options: argparse.Namespace) -> list[str]:
    """Train, and take the rounds again in this process; returns the promises that were broken."""
    secret = secrets.token_bytes(32)
    arguments: tuple[Any, ...] = (options.width, options.step_seconds)
    async with opened(links, secret) as processes:
        peers = {name: links.url(number) for number, name in enumerate(NAMES)}
        async with dist.Worker("coordinator", service=service, peers=peers, secret=secret, limits=dist.Limits(**LIMITS)) as coordinator:
            made = dist.LocalSteps.create(
                coordinator, NAMES, Wide, *arguments, steps=options.steps, optimizer=ag.optim.SGD, optimizer_options=SGD, outer_options=OUTER,
                compress=COMPRESS, timeout=PATIENT,
            )  # fmt: skip
            async with await made as training:
                report = Report(links)
                records = await _rounds(training, processes, report, options)
                report.summary(8 * options.width + 3, options.steps)
                digests, digest, seed = await training.digests(), training.digest, seed_of(training)
    oracle = Oracle(Wide(options.width, 0.0), SGD, OUTER, seed=seed, compress=COMPRESS)
    for record in records:
        for name in record.lost:
            oracle.forget(name, residual=True)
        await oracle.take(record)
    print(f"\nbase after {len(records)} rounds: {digest}\none process:          {oracle.digest}")
    return _complaints(records, digests, digest, oracle.digest)


async def _rounds(training: dist.LocalSteps, processes: Processes, report: Report, options: argparse.Namespace) -> list[Any]:
    """All rounds, with the kill and the joining, and one more with all members."""
    records: list[Any] = []
    joining: asyncio.Task[None] | None = None
    while len(records) < options.rounds or len(records[-1].members) < len(NAMES):
        if len(records) + 1 == KILLED_IN:
            asyncio.get_running_loop().call_later(options.steps * options.step_seconds / 2, processes.kill, KILLED)
        if len(records) + 1 == JOINS_IN:
            joining = asyncio.create_task(_join(training, processes))
        records.append(await training.round())
        report.row(records[-1], options.steps * options.step_seconds)
        if joining is not None and joining.done():
            joining.result()
    return records


async def _join(training: dist.LocalSteps, processes: Processes) -> None:
    await processes.start(KILLED)
    await training.add(NAMES[KILLED])


def _complaints(records: Sequence[Any], digests: dict[str, str], digest: str, expected: str) -> list[str]:
    """The promises that were broken."""
    name, rest = NAMES[KILLED], tuple(each for number, each in enumerate(NAMES) if number != KILLED)
    return [
        text
        for text, is_right in (
            ("the base differs from the base of one process", digest == expected),
            ("a member has another base", set(digests.values()) == {digest}),
            ("no member was lost", name in records[KILLED_IN - 1].lost and records[KILLED_IN - 1].members == rest),
            ("no member has joined", name in records[-1].members and set(digests) == set(NAMES)),
        )
        if not is_right
    ]


def main() -> int:
    """See the module."""
    parser = argparse.ArgumentParser(prog="python -m tests.wan", description=__doc__)
    parser.add_argument("--small", action="store_true")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--step-seconds", type=float, default=0.2)
    parser.add_argument("--width", type=int, default=25_000)
    parser.add_argument("--mbit", type=float, default=1.0)
    parser.add_argument("--proxies", action="store_true")
    if "--small" in sys.argv:
        parser.set_defaults(rounds=6, steps=4, step_seconds=0.1, width=2_500)
    options = parser.parse_args()
    rate = options.mbit * 125_000
    links: ShapedLinks = Namespaces(rate) if not options.proxies and Hosts.is_permitted() else Proxies(rate)
    print(
        f"{len(NAMES)} processes, {8 * options.width + 3:,} parameters, {options.steps} local steps of {options.step_seconds:g} s\n"
        f"{options.mbit:g} Mbit/s up and down: {links.kind}\n{NAMES[KILLED]} is killed in round {KILLED_IN} and joins from round {JOINS_IN} on\n"
    )
    wrong = ag.run(train(links, options))
    print("\n".join(wrong) or "the same bits")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
