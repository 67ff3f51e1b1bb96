"""A small transformer on four processes behind lines of 1 Mbit/s, as of homes: one is killed on the way, another one joins.

    python examples/slow_links.py              # about half a minute; slower lines: --mbit 0.25

Each process dials this one through a line that passes so many bytes per second each way, and counts them. A round is many local steps of every
member, then the exchange of an eighth of what has changed, in four bits each. Beside it stand the bytes that averaging every gradient would take.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import secrets
import sys
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F

CONTEXT, WIDTH, MEMBERS, KILL_AFTER, JOIN_AFTER = 48, 32, 4, 3, 5  # the last two in rounds
COMPRESS = dist.TopK(1 / 8, bits=4)
#: everything passes the lines, also on one machine; on a busy one processes are silent for a while
LIMITS: dict[str, Any] = {"shared_bytes": 0, "missed_heartbeats": 10}

# -------------------------------------------------------------------- what runs in the worker processes

service = dist.Service()


@service.reference
class Writer(nn.Module):
    """Predicts the next character of Python code: the modules of aiograd.nn."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        text = "".join(path.read_text("utf-8") for path in sorted(Path(nn.__file__).parent.glob("*.py")))
        characters, self.text = np.unique(list(text), return_inverse=True)
        self.embed = nn.Embedding(len(characters), WIDTH, generator=generator)
        self.place = nn.Parameter(generator.normal((CONTEXT, WIDTH)) * 0.1)
        made: dict[str, Any] = {"dropout": 0.0, "batch_first": True, "norm_first": True, "generator": generator}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, **made) for _ in range(2))
        self.head = nn.Linear(WIDTH, len(characters), generator=generator)

    def data(self) -> ag.data.DataLoader:
        """The whole data set, alike on all members: windows of the text."""
        windows = [self.text[start : start + CONTEXT + 1] for start in range(0, len(self.text) - CONTEXT, 8)]
        return ag.data.DataLoader(windows, batch_size=16, shuffle=True, drop_last=True, generator=ag.Generator(1))

    def loss(self, windows: Any) -> Any:
        """The mean loss of a batch."""
        x = self.embed(windows[:, :-1]) + self.place
        for block in self.blocks:
            x = block(x, is_causal=True)
        return F.cross_entropy(self.head(x).reshape(-1, self.head.out_features), windows[:, 1:].reshape(-1))


# -------------------------------------------------------------------- the lines


class Line:
    """A way to a port of this machine that passes `rate` bytes per second each way, over all connections, and counts them."""

    def __init__(self, port: int, rate: float) -> None:
        self.bytes = 0
        self._port, self._rate = port, rate
        self._free_at = {"up": 0.0, "down": 0.0}

    async def open(self) -> int:
        """Listen; returns the port."""
        server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        return int(server.sockets[0].getsockname()[1])

    async def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            theirs, ours = await asyncio.open_connection("127.0.0.1", self._port)
            await asyncio.gather(self._carry("up", reader, ours), self._carry("down", theirs, writer), return_exceptions=True)

    async def _carry(self, way: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        now = asyncio.get_running_loop().time
        try:
            while data := await reader.read(4096):
                self.bytes += len(data)
                self._free_at[way] = max(self._free_at[way], now()) + len(data) / self._rate
                await asyncio.sleep(self._free_at[way] - now())
                writer.write(data)
                await writer.drain()
        finally:
            writer.close()


# -------------------------------------------------------------------- what runs here


async def start(name: str, port: int, secret: str) -> asyncio.subprocess.Process:
    """Start a worker that joins through the line at this port."""
    words = ["--join", f"http://127.0.0.1:{port}", "--name", name, "--service", "slow_links:service", "--log-level", "error"]
    words += ["--limits", json.dumps(LIMITS)]
    environment = {**os.environ, "AIOGRAD_SECRET": secret, "OPENBLAS_NUM_THREADS": "1"}
    command, here = [sys.executable, "-m", "aiograd", "worker", *words], Path(__file__).parent
    return await asyncio.create_subprocess_exec(*command, cwd=here, env=environment, stdout=asyncio.subprocess.DEVNULL)


async def main(rounds: int, steps: int, mbit: float) -> None:
    """Train over the lines, with one member lost and one joining."""
    secret, names = secrets.token_hex(32), [f"home{number}" for number in range(MEMBERS + 1)]
    made: dict[str, Any] = {"secret": secret, "limits": dist.Limits(**LIMITS), "trusted_hosts": ("127.0.0.1",)}  # as which a line is dialled
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 3e-3}, "compress": COMPRESS, "answer": COMPRESS}
    async with dist.JoinCluster(0, at_most=len(names), **made) as cluster:
        lines = [Line(int(cluster.url.rsplit(":", 1)[1]), mbit * 125_000) for _ in names]
        homes = [await start(name, await line.open(), secret) for name, line in zip(names, lines, strict=True)]
        await cluster.wait_joined(len(names))
        async with await dist.LocalSteps.create(cluster.driver, names[:MEMBERS], Writer, steps=steps, **options) as training:
            size = sum(each.size for each in (await training.state_dict()).values())
            averaged = MEMBERS * steps * 3 * size * 4  # each sends and receives 3/4 of all gradients twice, in float32
            print(f"{size:,} parameters; averaging every gradient would move {averaged / 1e6:,.0f} MB in the {steps} steps of a round")
            joining, before = None, sum(each.bytes for each in lines)
            for _ in range(rounds):
                record, passed = await training.round(), sum(each.bytes for each in lines)
                print(
                    f"round {record.number:2}: loss {record.loss:.3f}, {len(record.members)} members, lost {', '.join(record.lost) or 'none'}; "
                    f"{(passed - before) / 1000:.0f} kB, 1/{averaged / (passed - before):,.0f}; {training.statistics().utilisation:.0%} computing"
                )
                before = passed
                if record.number == KILL_AFTER:
                    homes[1].kill()
                if record.number == JOIN_AFTER:
                    joining = asyncio.create_task(training.add(names[-1]))
            if joining is not None:
                await joining
            await training.round()
            alike = set((await training.digests()).values()) == {training.digest}
            print(f"at the end on {', '.join(training.names)}; all have the same bits: {alike}")
    await asyncio.gather(*(home.wait() for home in homes))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--steps", type=int, default=40, help="local steps of a member between two rounds")
    parser.add_argument("--mbit", type=float, default=1.0, help="of every line, each way")
    arguments = parser.parse_args()
    ag.run(main(arguments.rounds, arguments.steps, arguments.mbit))
