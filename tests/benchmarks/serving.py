"""Serving and learning: answers per second, latency and torn answers beside torch behind a lock, and the costs of versions.

Services are processes of their own (`serving_sides`), this process is the load generator. BLAS has one thread on every side. In the flat-out tables
each connection sends the next request when it has the answer; the table at half of that rate has Poisson arrivals, and latency counts from
the planned moment, so that a service that stops is not asked less.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import os
import secrets
import statistics
import sys
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from aiograd.errors import DistributedError
from aiograd.running.digest import state_digest
from aiograd.serving.versions import snapshot
from tests.benchmarks import serving_sides
from tests.benchmarks.child import forget_peak, in_child, resident
from tests.benchmarks.harness import OURS, Settings, Table, goal_cells
from tests.benchmarks.serving_sides import CLASSES, FEATURES, Weights, model_of

#: steps per second
RATE = 100
FROZEN = ", frozen"
ONE_THREAD = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}


def run(settings: Settings) -> Iterator[Table]:
    """The tables of docs/guides/performance.md on serving."""
    yield ag.run(_flat_out(settings))
    yield ag.run(_at_half(settings))
    yield _without_http(settings)
    yield _versions(settings)
    yield _deltas(settings)
    yield ag.run(_followers(settings))


# -------------------------------------------------------------------- over HTTP


@contextlib.asynccontextmanager
async def _service(side: str, rate: float, tiny: bool) -> AsyncIterator[int]:
    """A service in a process of its own; gives its port."""
    command = (sys.executable, "-m", "tests.benchmarks.serving_sides", side, str(rate), str(int(tiny)))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env={**os.environ, **ONE_THREAD})
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("no pipes")
    try:
        yield json.loads(await process.stdout.readline())["port"]
    finally:
        process.stdin.close()
        await process.wait()


class _Connection(asyncio.Protocol):
    """A connection of HTTP/1.1 with one request at a time. aiohttp's client takes more processor time for a request than a service for its answer."""

    def __init__(self) -> None:
        self._transport: Any = None
        self._answer: asyncio.Future[bytes] | None = None
        self._data = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._data += data
        head, found, body = self._data.partition(b"\r\n\r\n")
        lines = head.lower().split(b"\r\n")
        if self._answer is None or not found or len(body) < next(int(line[15:]) for line in lines if line.startswith(b"content-length:")):
            return
        self._data = b""
        if b" 200 " in lines[0]:
            self._answer.set_result(body)
        else:
            self._answer.set_exception(RuntimeError(f"the service answered {head + body!r}"))

    def connection_lost(self, error: Exception | None) -> None:
        if self._answer is not None and not self._answer.done():
            self._answer.set_exception(ConnectionError("the service has closed the connection"))

    @classmethod
    async def open(cls, port: int) -> _Connection:
        """Connect to a service on this host."""
        return (await asyncio.get_running_loop().create_connection(cls, "127.0.0.1", port))[1]

    async def request(self, message: bytes) -> bytes:
        """The body of the answer to a request."""
        self._answer = asyncio.get_running_loop().create_future()
        self._transport.write(message)
        return await self._answer

    @property
    def is_closed(self) -> bool:
        """True where the service has closed it, as some do with idle ones."""
        return bool(self._transport.is_closing())

    def close(self) -> None:
        """End the connection."""
        self._transport.close()


def _message(method: str, path: str, body: bytes = b"") -> bytes:
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    return head.encode() + body


class _Client:
    """Asks a service, and keeps latencies and the answers to one probe by version, which are compared after each run."""

    def __init__(self, port: int, connections: int) -> None:
        self._port, self._count = port, connections
        self._free: asyncio.LifoQueue[_Connection | None] = asyncio.LifoQueue()
        for _ in range(connections):
            self._free.put_nowait(None)
        row = np.random.default_rng(7).standard_normal(FEATURES).round(4).tolist()
        self._message = _message("POST", "/predict", json.dumps({"x": row}).encode())
        self.latencies: list[float] = []
        self._bodies: list[bytes] = []
        self.probes: dict[int, list[float]] = {}
        self.torn = 0

    async def _request(self, message: bytes) -> bytes:
        connection = await self._free.get()
        if connection is None or connection.is_closed:
            connection = await _Connection.open(self._port)
        body = await connection.request(message)
        self._free.put_nowait(connection)
        return body

    async def ask(self, planned: float) -> None:
        """One request, which was planned for this moment."""
        self._bodies.append(await self._request(self._message))
        self.latencies.append(time.perf_counter() - planned)

    async def spent(self) -> dict[str, float]:
        """Steps of training and CPU seconds of the service so far."""
        return dict(json.loads(await self._request(_message("GET", "/spent"))))

    def close(self) -> None:
        """End the connections."""
        while not self._free.empty():
            if (connection := self._free.get_nowait()) is not None:
                connection.close()

    async def flat_out(self, seconds: float) -> dict[str, float]:
        """Each connection sends the next request when it has the answer."""

        async def connection() -> None:
            while (now := time.perf_counter()) < until:
                await self.ask(now)

        before, began, own = await self._begin()
        until = began + seconds
        await asyncio.gather(*[connection() for _ in range(self._count)])
        return await self._figures(began, before, own)

    async def poisson(self, seconds: float, rate: float) -> dict[str, float]:
        """Requests at planned moments, however long the answers take."""
        gaps = np.random.default_rng(3).exponential(1 / rate, int(seconds * rate))
        before, began, own = await self._begin()
        async with asyncio.TaskGroup() as group:
            for moment in began + np.cumsum(gaps):
                if (rest := moment - time.perf_counter()) > 0:
                    await asyncio.sleep(rest)
                group.create_task(self.ask(float(moment)))
        return await self._figures(began, before, own)

    async def _begin(self) -> tuple[dict[str, float], float, float]:
        self.latencies.clear()
        self._bodies.clear()
        return await self.spent(), time.perf_counter(), time.process_time()

    async def _figures(self, began: float, before: dict[str, float], own: float) -> dict[str, float]:
        took, load, after = time.perf_counter() - began, time.process_time() - own, await self.spent()
        for body in self._bodies:
            answer = json.loads(body)
            if len(answer["scores"]) != CLASSES:
                raise RuntimeError(f"the service answered {answer}")
            probe = self.probes.setdefault(answer["version"], answer["scores"])
            self.torn += probe != answer["scores"] and not np.allclose(probe, answer["scores"], rtol=1e-4, atol=1e-5)
        p50, p99 = (float(np.percentile(self.latencies, q)) * 1e3 for q in (50, 99))
        steps, cpu = (after["steps"] - before["steps"]) / took, 1e6 * (after["cpu"] - before["cpu"]) / len(self.latencies)
        counts = {"torn": self.torn, "versions": len(self.probes), "load": load / took}
        return {"rate": len(self.latencies) / took, "p50": p50, "p99": p99, "steps": steps, "cpu": cpu, **counts}


@contextlib.asynccontextmanager
async def _client(side: str, rate: float, settings: Settings, connections: int) -> AsyncIterator[_Client]:
    async with _service(side, rate, settings.tiny) as port:
        client = _Client(port, connections)
        try:
            for count in 2 * [*range(1, connections + 1)]:  # programs of all sizes of batches are recorded
                await asyncio.gather(*[client.ask(time.perf_counter()) for _ in range(count)])
            await client.flat_out(0.1 if settings.tiny else 1.0)
            yield client
        finally:
            client.close()


def _sides(settings: Settings) -> list[str]:
    has_fastapi = importlib.util.find_spec("fastapi") is not None and importlib.util.find_spec("uvicorn") is not None
    frameworks = ["aiohttp", *["fastapi"] * has_fastapi]
    sides = [f"{engine}/{framework}{frozen}" for framework in frameworks for engine, frozen in ((OURS, ""), (OURS, FROZEN), ("empty", ""))]
    return [*sides, *["torch/fastapi"] * (has_fastapi and "torch" in settings.peers)]


async def _flat_out(settings: Settings) -> Table:
    rounds, seconds, connections = settings.of(3, 1), 0.2 if settings.tiny else 3.0, settings.of(32, 2)
    table = Table(
        f"Flat out, {RATE} steps/s of training: {connections} connections, medians of {rounds} runs of {seconds:g} s",
        ["service", "requests/s", "p50 ms", "p99 ms", "steps/s", "CPU us per answer", "versions", "torn"],
    )
    runs: dict[str, list[dict[str, float]]] = {side: [] for side in _sides(settings)}
    for _ in range(rounds):
        for side, found in runs.items():
            async with _client(side.removesuffix(FROZEN), 0 if side.endswith(FROZEN) else RATE, settings, connections) as client:
                found.append(await client.flat_out(seconds))
    middle = {side: {key: statistics.median(each[key] for each in found) for key in found[0]} for side, found in runs.items()}
    for side, m in middle.items():
        counts = (f"{m[key]:.0f}" for key in ("steps", "cpu", "versions", "torn"))
        table.add(side, f"{m['rate']:.0f}", f"{m['p50']:.2f}", f"{m['p99']:.2f}", *counts)
    if "torch/fastapi" in middle and not settings.tiny:
        torch = middle["torch/fastapi"]
        for framework, goals in (("aiohttp", (4.0, 0.25)), ("fastapi", (2.0, 0.5))):
            ours, frozen, empty = middle[f"{OURS}/{framework}"], middle[f"{OURS}/{framework}{FROZEN}"], middle[f"empty/{framework}"]
            rate, tail = goal_cells(ours["rate"] / torch["rate"], goals[0], None, higher=True), goal_cells(ours["p99"] / torch["p99"], goals[1], None)
            table.notes.append(
                f"{framework}: × torch in FastAPI's threads requests/s {ours['rate'] / torch['rate']:.2f} (target {rate[0]}: {rate[2]}), "
                f"p99 {ours['p99'] / torch['p99']:.2f} (target {tail[0]}: {tail[2]}), answers per CPU second {torch['cpu'] / ours['cpu']:.2f}; "
                f"frozen × empty handler requests/s {frozen['rate'] / empty['rate']:.2f}, answers per CPU second {empty['cpu'] / frozen['cpu']:.2f}"
            )
    return table


async def _at_half(settings: Settings) -> Table:
    rounds, seconds, connections = settings.of(4, 1), 0.2 if settings.tiny else 4.0, settings.of(32, 2)
    table = Table(
        f"At half of the flat-out rate, Poisson arrivals, latency from the planned moment: medians of {rounds} runs of {seconds:g} s",
        ["service", "requests/s", "p50 ms", "p99 ms", "steps/s"],
    )
    side = f"{OURS}/aiohttp"
    async with _client(side, 0, settings, connections) as client:
        rate = (await client.flat_out(seconds / 2))["rate"] / 2
    runs: dict[str, list[dict[str, float]]] = {"frozen": [], "learning": []}
    for _ in range(rounds):
        for name, found in runs.items():
            async with _client(side, RATE * (name == "learning"), settings, connections) as client:
                found.append(await client.poisson(seconds, rate))
    middle = {name: {key: statistics.median(each[key] for each in found) for key in found[0]} for name, found in runs.items()}
    for name, m in middle.items():
        table.add(f"{side}, {name}", f"{m['rate']:.0f}", f"{m['p50']:.2f}", f"{m['p99']:.2f}", f"{m['steps']:.0f}")
    ratio = middle["learning"]["p99"] / middle["frozen"]["p99"]
    goal = goal_cells(ratio, 1.2, None)
    if not settings.tiny:
        table.notes.append(f"p99 learning / frozen {ratio:.2f} (target {goal[0]}: {goal[2]})")
    return table


# -------------------------------------------------------------------- without HTTP


async def _answers_per_second(engine: str, rate: float, seconds: float, tiny: bool) -> dict[str, float]:
    counts: dict[str, Any] = {"steps": 0}
    row = np.random.default_rng(7).standard_normal((1, FEATURES)).astype(np.float32)
    answers = 0
    async with ag.tuned_gc(), serving_sides.ENGINES[engine](8 if tiny else 256, rate, counts) as predict:

        async def ask(until: float) -> None:
            nonlocal answers
            while time.perf_counter() < until:
                await predict(row)
                answers += 1

        for length in (seconds / 3, seconds):
            answers, before, began = 0, serving_sides.steps_of(counts), time.perf_counter()
            await asyncio.gather(*[ask(began + length) for _ in range(32)])
            took = time.perf_counter() - began
        return {"rate": answers / took, "steps": (serving_sides.steps_of(counts) - before) / took}


def answers_per_second(engine: str, rate: float, seconds: float, tiny: bool) -> dict[str, float]:
    """Answers to 32 tasks, in a process of its own."""
    return ag.run(_answers_per_second(engine, rate, seconds, tiny))


def _without_http(settings: Settings) -> Table:
    rounds, seconds = settings.of(3, 1), 0.1 if settings.tiny else 2.0
    engines = [OURS, *["torch"] * ("torch" in settings.peers and importlib.util.find_spec("anyio") is not None)]
    table = Table(f"Without HTTP: 32 tasks, {RATE} steps/s of training, medians of {rounds} runs", ["engine", "answers/s", "steps/s"])
    runs: dict[str, list[dict[str, Any]]] = {engine: [] for engine in engines}
    for _ in range(rounds):
        for engine, found in runs.items():
            found.append(in_child(answers_per_second, environment=ONE_THREAD, engine=engine, rate=RATE, seconds=seconds, tiny=settings.tiny))
    middle = {engine: {key: statistics.median(each[key] for each in found) for key in found[0]} for engine, found in runs.items()}
    for engine, m in middle.items():
        table.add(engine if engine == OURS else "torch in a thread pool", f"{m['rate']:.0f}", f"{m['steps']:.0f}")
    if "torch" in middle and not settings.tiny:
        ratio = middle[OURS]["rate"] / middle["torch"]["rate"]
        goal = goal_cells(ratio, 4.0, None, higher=True)
        table.notes.append(f"× torch in a thread pool {ratio:.2f} (target {goal[0]}: {goal[2]})")
    return table


# -------------------------------------------------------------------- versions


async def _hold_ups(arrays: int) -> dict[str, float]:
    model: Any = model_of(256) if not arrays else Weights(arrays)
    async with serving.Server(model, keep=60) as server:
        longest = {"publish": [], "rollback": []}  # type: dict[str, list[float]]
        for _ in range(5 if arrays else 50):
            with ag.no_grad():
                for parameter in model.parameters():
                    parameter.add_(1.0)
            beats: list[float] = []

            async def beat(beats: list[float] = beats) -> None:
                while True:
                    beats.append(time.perf_counter())
                    await asyncio.sleep(0)

            ticker = asyncio.ensure_future(beat())
            await asyncio.sleep(0.01)
            del beats[:-1]
            await server.publish()
            await asyncio.sleep(0)
            longest["publish"].append(float(np.diff(beats).max()) if len(beats) > 1 else 0.0)
            ticker.cancel()
            began = time.perf_counter()
            server.rollback()
            longest["rollback"].append(time.perf_counter() - began)
        return {name: min(found) for name, found in longest.items()}


def hold_ups(arrays: int) -> dict[str, float]:
    """The longest time that `publish` and `rollback` hold the loop up, the least of 5, of 50 for the small model."""
    return ag.run(_hold_ups(arrays))


async def _memory(arrays: int) -> dict[str, float]:
    model = Weights(arrays)
    forget_peak()
    one = resident()
    async with serving.Server(model, keep=10) as server:
        forget_peak()
        first = resident()
        for n in range(9):
            with ag.no_grad():
                getattr(model, f"w{n % arrays:03}").add_(1.0)
            await server.publish()
        forget_peak()
        return {"model": arrays * 4e5, "before": one, "first": first, "ten": resident()}


def memory(arrays: int) -> dict[str, float]:
    """Resident bytes with a model, with one version of it, and with ten that differ in one array each."""
    return ag.run(_memory(arrays))


async def _overhead(count: int) -> dict[str, float]:
    model = model_of(256)
    row = np.ones((1, FEATURES), np.float32)
    tensor = ag.asarray(row)
    async with serving.Server(model) as server:
        forward = ag.compile(model.eval())
        predicted, alone = [], []
        for _ in range(count):
            began = time.perf_counter()
            await server.predict(row)
            predicted.append(time.perf_counter() - began)
            with ag.no_grad():
                began = time.perf_counter()
                forward(tensor)
                alone.append(time.perf_counter() - began)
        return {"predict": min(predicted), "forward": min(alone)}


def overhead(count: int) -> dict[str, float]:
    """Seconds of `Server.predict` with one row, and of the compiled forward."""
    return ag.run(_overhead(count))


def _versions(settings: Settings) -> Table:
    table = Table("Versions: minima, in processes of their own", ["what", "found", "target", ""])
    small = in_child(hold_ups, environment=ONE_THREAD, arrays=0)
    large = in_child(hold_ups, environment=ONE_THREAD, arrays=settings.of(250, 2))
    cost = in_child(overhead, environment=ONE_THREAD, count=settings.of(3000, 10))
    held = in_child(memory, environment=ONE_THREAD, arrays=settings.of(100, 10))
    kept = (held["ten"] - held["first"]) / held["model"] + 1
    for what, value, goal, text in (
        ("publish of 85,000 weights holds the loop up, ms", small["publish"] * 1e3, 0.5, "{:.2f}"),
        (f"publish of {settings.of(25, 0)} M weights holds the loop up, ms", large["publish"] * 1e3, 2.0, "{:.2f}"),
        (f"rollback of {settings.of(25, 0)} M weights, ms", large["rollback"] * 1e3, 1.0, "{:.3f}"),
        ("memory of 10 versions, 1 % of the bytes new in each, × one", kept, 1.2, "{:.2f}"),
        ("Server.predict of one row over the compiled forward, us", (cost["predict"] - cost["forward"]) * 1e6, 60.0, "{:.0f}"),
    ):
        met = goal_cells(value, goal, None)
        table.add(what, text.format(value), f"≤ {goal:g}", "" if settings.tiny else met[2])
    return table


def _deltas(settings: Settings) -> Table:
    """Bytes and times of deltas between two versions."""
    size = settings.of(1_000_000, 1000)
    random = np.random.default_rng(0)
    table = Table(
        f"Deltas of {size} weights of standard deviation 0.05: bytes in % of the model, 2 bytes a word in bfloat16, ms to encode and apply",
        ["update", "bfloat16 %", "float32 %", "bytes per changed word", "encode ms", "apply ms"],
    )
    weights = (0.05 * random.standard_normal(size)).astype(np.float32)
    updates = {f"step {step:g}": step * random.standard_normal(size) for step in (1e-6, 3e-6, 1e-5, 1e-4, 1e-3)}
    updates["2.4 % of the words by one step each"] = np.zeros(size)
    for name, update in updates.items():
        cells, times = [], [0.0, 0.0]
        per_word = 0.0
        for precision, bytes_each in (("bfloat16", 2), ("float32", 4)):
            first = _rounded(weights, precision)
            changed = (first + update).astype(np.float32)
            if not update.any():
                chosen = random.random(size) < 0.024
                words = first.view(np.uint32) + np.where(chosen, 1 << (16 if precision == "bfloat16" else 0), 0).astype(np.uint32)
                changed = words.view(np.float32)
            second = _rounded(changed, precision)
            base, target = (
                serving.Version.of(n, {"w": array}, digest=state_digest({"w": array})) for n, array in ((1, first), (2, second))
            )
            began = time.perf_counter()
            payload = serving.encode_delta(base, target)
            between = time.perf_counter()
            serving.apply_delta(base, payload)
            cells.append(f"{100 * len(payload) / (bytes_each * size):.2f}")
            if precision == "bfloat16":
                times = [between - began, time.perf_counter() - between]
                per_word = len(payload) / max(1, int((first != second).sum()))
        table.add(name, *cells, f"{per_word:.2f}", *(f"{1e3 * each:.1f}" for each in times))
    return table


# -------------------------------------------------------------------- followers


async def _followers(settings: Settings) -> Table:
    """Followers in processes of their own on loopback, while the leader publishes."""
    arrays, versions, rate = settings.of(10, 1), settings.of(100, 4), 20
    table = Table(
        f"Followers of {arrays * 100_000:,} weights in bfloat16, {rate} versions/s with steps of 1e-6",
        ["followers", "behind p50 ms", "behind p99 ms", "bytes per version, % of the model in bfloat16", "CPU ms per version: leader", "follower"],
    )
    for count in (1,) if settings.tiny else (8, 1):
        found = await _behind(count, arrays, versions, rate)
        table.add(count, f"{found['p50']:.1f}", *(f"{found[key]:.{2 if key == 'bytes' else 1}f}" for key in ("p99", "bytes", "leader", "follower")))
        if not settings.tiny:
            goal = goal_cells(found["p99"], 50.0, None)
            table.notes.append(f"{count} followers: p99 target {goal[0]}: {goal[2]}")
    return table


async def _behind(count: int, arrays: int, versions: int, rate: int) -> dict[str, float]:
    model, service, random = Weights(arrays), dist.Service(), np.random.default_rng(0)
    steps = (1e-6 * random.standard_normal(200_000)).astype(np.float32)  # drawn before: drawing takes longer than all that is measured
    os.environ.setdefault("AIOGRAD_SECRET", secrets.token_hex(32))  # the followers inherit it
    names, processes = [f"follower{n}" for n in range(count)], []
    async with serving.Server(model, precision="bfloat16") as server, dist.Worker("leader", service=service) as worker:
        serving.lead(service, server)
        try:
            for name in names:
                command = (sys.executable, "-m", "tests.benchmarks.serving_sides", "follow", name, worker.url, str(arrays))
                process = await asyncio.create_subprocess_exec(*command, stdin=asyncio.subprocess.PIPE, env={**os.environ, **ONE_THREAD})
                processes.append(process)
            for name in names:
                while True:
                    with contextlib.suppress(DistributedError):
                        await worker.call(name, "report", True)
                        break
                    await asyncio.sleep(0.1)
            own = time.process_time()
            for _ in range(versions):
                due = asyncio.get_running_loop().time() + 1 / rate
                with ag.no_grad():
                    for parameter in model.parameters():
                        start = random.integers(0, len(steps) - parameter.shape[0])
                        parameter.add_(ag.asarray(steps[start : start + parameter.shape[0]]))
                await server.publish()
                await asyncio.sleep(max(0.0, due - asyncio.get_running_loop().time()))
            own = time.process_time() - own
            await asyncio.sleep(0.5)
            reports = [await worker.call(name, "report", False) for name in names]
        finally:
            for process in processes:
                if process.stdin is not None:
                    process.stdin.close()
                await process.wait()
    behind = [1e3 * each for report in reports for each in report["behind"]]
    received = max(1, len(behind))
    share = sum(report["bytes"] for report in reports) / received / (arrays * 2e5) * 100
    own, follower = 1e3 * own / versions, 1e3 * sum(report["cpu"] for report in reports) / received
    return {"p50": float(np.percentile(behind, 50)), "p99": float(np.percentile(behind, 99)), "bytes": share, "leader": own, "follower": follower}


def _rounded(values: Any, precision: str) -> Any:
    return snapshot({"w": values}, None, "bfloat16" if precision == "bfloat16" else "exact")["w"]
