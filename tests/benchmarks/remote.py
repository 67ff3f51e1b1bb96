"""Remote calls and distributed backward over loopback, beside raw aiohttp and beside torch.distributed.rpc with dist_autograd.

Every side has two processes. aiograd's messages are authenticated and encrypted and its passes find out who takes part and commit on both
workers together; the peers do none of that. aiograd and torch run twice: as they come (large frames in shared memory between processes of one
machine, unencrypted there) and restricted to TCP, which is what they have between machines.
"""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import statistics
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from typing import Any

import numpy as np
from aiohttp import ClientSession, WSMsgType, web

import aiograd as ag
from aiograd import distributed as dist
from tests.benchmarks.harness import OURS, Settings, Table, goal_cells

#: seconds per operation, by operation
Times = dict[str, list[float]]

SMALL, MEDIUM, LARGE, HUGE = 4, 250_000, 2_500_000, 25_000_000
#: operation -> elements of the tensor, repeats per round
OPERATIONS = {
    "call": (SMALL, 200), "edge": (SMALL, 60), "edge 1 MB": (MEDIUM, 20), "edge 10 MB": (LARGE, 3), "100 MB": (HUGE, 2), "call, busy": (HUGE, 50),
}  # fmt: skip
#: tensors of 100 MB that are always on their way while small calls are timed
STREAMS = 2


def run(settings: Settings) -> Iterator[Table]:
    """Start the processes and measure in turns."""
    yield ag.run(_run(settings))


async def _run(settings: Settings) -> Table:
    sides: dict[str, Side] = {OURS: Ours(), f"{OURS} TCP": Ours(shared_bytes=0), "aiohttp": Raw()}
    if "torch" in settings.peers:
        sides["torch"] = Torch(tcp=False)
        sides["torch TCP"] = Torch(tcp=True)
    times: dict[str, Times] = {name: {operation: [] for operation in OPERATIONS} for name in sides}
    try:
        for side in sides.values():
            await side.start()
        for _ in range(settings.of(5, 1)):
            for name, side in sides.items():
                for operation, (elements, repeats) in OPERATIONS.items():
                    if operation in side.operations:
                        elements, repeats = (min(elements, 1000), 2) if settings.tiny else (elements, repeats)
                        times[name][operation] += await side.measure(operation, elements, repeats)
    finally:
        for side in sides.values():
            await side.stop()
    table = Table(
        "Between two processes on one machine",
        ["operation", *(f"{name} min/median" for name in sides), "ratio min/median", "target", "beyond", "verdict"],
        notes=["call: a tensor of 4 floats there and back; edge: forward and backward through one remote function, 16 B, 1 and 10 MB;"],
    )
    table.notes.append("100 MB: one tensor there, a number back; aiohttp: a WebSocket message there and back, in the clear, of the same size;")
    table.notes.append(f"call, busy: as call, while {STREAMS} tensors of 100 MB are always on their way there over the same connection.")
    goals: dict[str, tuple[str, float | None, float | None]] = {
        "call": ("torch", 0.5, None), "edge": ("torch", 0.7, 0.6), "edge 1 MB": ("torch", 1.0, None),
        "edge 10 MB": ("torch", 1.0, 0.8), "100 MB": ("", 0.9, None),
        "call, busy": ("", None, None),
    }  # fmt: skip
    for operation in OPERATIONS:
        found = {name: times[name][operation] for name in sides}
        cells = [f"{_time(min(seconds))}/{_time(statistics.median(seconds))}" if seconds else "" for seconds in found.values()]
        peer, target, beyond = goals[operation]
        ours = found[OURS]
        if operation == "100 MB":
            rate, middle = 4 * HUGE / min(ours) / 1e9, 4 * HUGE / statistics.median(ours) / 1e9
            verdict = goal_cells(None if settings.tiny else rate, target, beyond, higher=True)
            table.add(operation, *cells, "" if settings.tiny else f"{rate:.2f}/{middle:.2f} GB/s", *verdict)
            continue
        theirs = found.get(peer)
        ratio = min(ours) / min(theirs) if theirs else None
        shown = f"{ratio:.2f}/{statistics.median(ours) / statistics.median(theirs):.2f} × {peer}" if ratio and theirs else ""
        table.add(operation, *cells, shown, *goal_cells(None if settings.tiny else ratio, target, beyond))
    return table


def _time(seconds: float) -> str:
    return f"{seconds * 1e6:.0f} µs" if seconds < 1e-3 else f"{seconds * 1e3:.1f} ms"


class Side:
    """Two processes and what they can do; this one drives."""

    operations: tuple[str, ...] = ("call", "edge", "edge 1 MB", "edge 10 MB", "100 MB")

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def _spawn(self, what: str, **environment: str) -> str:
        command = [sys.executable, "-m", "tests.benchmarks.remote", what]
        variables = {**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", **environment}
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables)
        return self._line()

    def _line(self) -> str:
        line = self.process.stdout.readline() if self.process is not None and self.process.stdout is not None else ""
        if not line:
            raise RuntimeError(f"{type(self).__name__}: the other process ended")
        return line.strip()

    async def start(self) -> None:
        """Start the other process."""
        raise NotImplementedError

    async def measure(self, operation: str, elements: int, repeats: int) -> list[float]:
        """Seconds of each of `repeats` operations."""
        raise NotImplementedError

    async def stop(self) -> None:
        """End the other process."""
        if self.process is not None and self.process.stdin is not None and self.process.stdout is not None:
            self.process.stdin.close()
            self.process.wait(30)
            self.process.stdout.close()


async def _timed(operation: Callable[[], Awaitable[Any]], repeats: int) -> list[float]:
    await operation()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        await operation()
        seconds.append(time.perf_counter() - started)
    return seconds


class Ours(Side):
    """A worker in each process."""

    operations = tuple(OPERATIONS)

    def __init__(self, **limits: int) -> None:
        super().__init__()
        self.limits = dist.Limits(**limits)  # type: ignore[arg-type]

    async def start(self) -> None:
        secret = secrets.token_bytes(32)
        url = self._spawn("serve", AIOGRAD_SECRET=secret.hex())
        self.worker = await dist.Worker("driver", peers={"other": url}, secret=secret, limits=self.limits).__aenter__()

    async def measure(self, operation: str, elements: int, repeats: int) -> list[float]:
        worker = self.worker
        x = ag.tensor(np.ones(elements, np.float32), requires_grad=operation.startswith("edge"))
        if operation == "call":
            return await _timed(lambda: worker.call("other", "echo", x), repeats)
        if operation == "100 MB":
            return await _timed(lambda: worker.call("other", "size", x), repeats)
        if operation == "call, busy":
            return await self._beside_streams(x, repeats)

        async with worker.context() as ctx:

            async def edge() -> None:
                y = await worker.call("other", "double", x)
                await ctx.backward(y.sum())

            return await _timed(edge, repeats)

    async def _beside_streams(self, x: ag.Tensor, repeats: int) -> list[float]:
        small, is_over = ag.tensor(np.ones(SMALL, np.float32)), False

        async def stream() -> None:
            while not is_over:
                await self.worker.call("other", "size", x)

        streams = [asyncio.create_task(stream()) for _ in range(STREAMS)]
        try:
            return await _timed(lambda: self.worker.call("other", "echo", small), repeats)
        finally:
            is_over = True
            await asyncio.gather(*streams)

    async def stop(self) -> None:
        await self.worker.aclose()
        await super().stop()


class Raw(Side):
    """A WebSocket of aiohttp that echoes, with nothing around it."""

    operations = ("call", "edge 1 MB", "edge 10 MB", "100 MB")

    async def start(self) -> None:
        url = self._spawn("echo")
        self.session = ClientSession()
        self.socket = await self.session.ws_connect(url, max_msg_size=0, compress=0)

    async def measure(self, operation: str, elements: int, repeats: int) -> list[float]:
        data = bytes(4 * elements)

        async def there_and_back() -> None:
            await self.socket.send_bytes(data)
            await self.socket.receive_bytes()

        return await _timed(there_and_back, repeats)

    async def stop(self) -> None:
        await self.socket.close()
        await self.session.close()
        await super().stop()


class Torch(Side):
    """Two ranks of torch.distributed.rpc; the first of them measures, in a process of its own."""

    def __init__(self, *, tcp: bool) -> None:
        super().__init__()
        self.tcp = tcp

    async def start(self) -> None:
        await asyncio.to_thread(self._spawn, "torch", AIOGRAD_BENCH_TCP="1" if self.tcp else "")

    async def measure(self, operation: str, elements: int, repeats: int) -> list[float]:
        if self.process is None or self.process.stdin is None:
            raise RuntimeError("not started")
        self.process.stdin.write(json.dumps([operation, elements, repeats]) + "\n")
        self.process.stdin.flush()
        found: list[float] = json.loads(await asyncio.to_thread(self._line))
        return found


# -------------------------------------------------------------------- the other processes


def _say(text: str) -> None:
    print(text, flush=True)


async def _until_stdin_ends() -> None:
    await asyncio.to_thread(sys.stdin.read)


async def _serve() -> None:
    service = dist.Service()

    @service.function
    async def echo(x: ag.Tensor) -> ag.Tensor:
        return x

    @service.function
    async def size(x: ag.Tensor) -> int:
        return int(x.size)

    @service.function
    async def double(x: ag.Tensor) -> ag.Tensor:
        return x * 2.0

    async with dist.Worker("other", service=service) as worker:
        _say(worker.url)
        await _until_stdin_ends()


async def _echo() -> None:
    async def handler(request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse(max_msg_size=0, compress=False)
        await socket.prepare(request)
        async for message in socket:
            if message.type is WSMsgType.BINARY:
                await socket.send_bytes(message.data)
        return socket

    app = web.Application()
    app.router.add_get("/", handler)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    _say(f"ws://127.0.0.1:{runner.addresses[0][1]}/")
    await _until_stdin_ends()
    await runner.cleanup()


def _torch_echo(x: Any) -> Any:
    return x


def _torch_size(x: Any) -> int:
    return int(x.numel())


def _torch_double(x: Any) -> Any:
    return x * 2.0


def _torch(rank: int, port: str) -> None:
    import torch
    from torch.distributed import autograd, rpc

    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, GLOO_SOCKET_IFNAME="lo", TP_SOCKET_IFNAME="lo")
    torch.set_num_threads(1)
    options = rpc.TensorPipeRpcBackendOptions(**({"_transports": ["uv"], "_channels": ["basic"]} if os.environ["AIOGRAD_BENCH_TCP"] else {}))
    rpc.init_rpc(f"rank{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    if rank == 0:
        _say("ready")
        for line in sys.stdin:
            operation, elements, repeats = json.loads(line)
            x = torch.ones(elements, requires_grad=operation.startswith("edge"))

            def once(operation: str = operation, x: Any = x) -> None:
                if operation == "call":
                    rpc.rpc_sync("rank1", _torch_echo, args=(x,))
                elif operation == "100 MB":
                    rpc.rpc_sync("rank1", _torch_size, args=(x,))
                else:
                    with autograd.context() as context:
                        y = rpc.rpc_sync("rank1", _torch_double, args=(x,))
                        autograd.backward(context, [y.sum()])

            once()
            seconds = []
            for _ in range(repeats):
                started = time.perf_counter()
                once()
                seconds.append(time.perf_counter() - started)
            _say(json.dumps(seconds))
    rpc.shutdown()


def _main(what: str) -> None:
    if what == "serve":
        ag.run(_serve())
    elif what == "echo":
        ag.run(_echo())
    elif what == "torch":
        import socket

        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        command = [sys.executable, "-m", "tests.benchmarks.remote", "torch-peer", port]
        with subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL) as peer:
            _torch(0, port)
            peer.wait(30)
    else:
        _torch(1, sys.argv[2])


if __name__ == "__main__":
    _main(sys.argv[1])
