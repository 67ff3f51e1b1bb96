"""A service that predicts while it trains: requests per second and latency, beside the same service on torch in a thread pool.

The server is a process that answers ``POST /predict`` (a row of features as JSON) and trains a network on batches; this process is the client, with
a few connections that each send the next request when they have the answer. aiograd predicts on the loop and awaits its backward passes; torch,
which would block the loop, predicts and trains in threads. Everything else, the loop included, is the same; BLAS has one thread on both sides, since
its threads spin for each other when requests keep the cores busy.

Training takes from the same cores as the requests, so it is done in two ways: at a pace that both keep, which is what the ratios are of, and as
fast as each can, where the requests pay for the steps.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import sys
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
from aiohttp import ClientSession, TCPConnector, web

import aiograd as ag
from aiograd import nn
from tests.benchmarks import networks
from tests.benchmarks.harness import OURS, Settings, Table, goal_cells

#: (predict, train): one row of features -> class scores; one training step
Learner = tuple[Callable[[list[float]], Awaitable[list[float]]], Callable[[], Awaitable[None]]]

FEATURES, CLASSES = 64, 10
#: training steps per second where both keep pace
PACE = 60


def run(settings: Settings) -> Iterator[Table]:
    """Serve from one process, load from this one."""
    yield ag.run(_run(settings))


async def _run(settings: Settings) -> Table:
    names = [OURS, *(name for name in ("torch",) if name in settings.peers)]
    rounds, seconds, connections = settings.of(3, 1), 0.2 if settings.tiny else 3.0, settings.of(8, 2)
    table = Table(
        f"Predictions while training in the same process: {connections} connections, medians of {rounds} runs of {seconds:g} s",
        ["service", "training", "requests/s", "p50 ms", "p99 ms", "max ms", "steps/s"],
    )
    for pace, training in ((PACE, "at a pace"), (0, "as fast as it can")):
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in names}
        for _ in range(rounds):
            for name in names:
                runs[name].append(await _load(name, seconds, connections, pace, settings.tiny))
        middle = {name: {key: statistics.median(run[key] for run in found) for key in found[0]} for name, found in runs.items()}
        for name in names:
            m = middle[name]
            side = name if name == OURS else f"{name} in a thread pool"
            table.add(side, training, f"{m['rate']:.0f}", f"{m['p50']:.2f}", f"{m['p99']:.2f}", f"{m['max']:.1f}", f"{m['steps']:.0f}")
        if "torch" in middle and not settings.tiny:
            rate, tail, steps = (middle[OURS][key] / middle["torch"][key] for key in ("rate", "p99", "steps"))
            text = f"training {training}: × torch requests/s {rate:.2f}, p99 {tail:.2f}, steps/s {steps:.2f}"
            if pace:
                goals = goal_cells(rate, 1.0, None, higher=True), goal_cells(tail, 0.5, None)
                text += f"; targets {goals[0][0]}: {goals[0][2]}, {goals[1][0]}: {goals[1][2]}"
            table.notes.append(text)
    return table


# -------------------------------------------------------------------- the client


async def _load(side: str, seconds: float, connections: int, pace: int, tiny: bool) -> dict[str, float]:
    """Start a server, load it, stop it; medians of its latencies."""
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "tests.benchmarks.service", side, str(pace), str(int(tiny))),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
    )
    assert server.stdin is not None and server.stdout is not None
    try:
        port = json.loads(await server.stdout.readline())["port"]
        url = f"http://127.0.0.1:{port}/predict"
        row = np.random.default_rng(7).normal(size=FEATURES).round(4).tolist()
        latencies: list[float] = []
        async with ClientSession(connector=TCPConnector(limit=connections)) as session:

            async def connection(until: float, kept: list[float] | None) -> None:
                while (started := time.perf_counter()) < until:
                    async with session.post(url, json={"x": row}) as answer:
                        scores = (await answer.json())["scores"]
                    if len(scores) != CLASSES:
                        raise RuntimeError(f"{side}: the service answered {scores}")
                    if kept is not None:
                        kept.append(time.perf_counter() - started)

            warm = time.perf_counter() + seconds / 4
            await asyncio.gather(*[connection(warm, None) for _ in range(connections)])
            await _steps(session, port)
            began = time.perf_counter()
            await asyncio.gather(*[connection(began + seconds, latencies) for _ in range(connections)])
            took = time.perf_counter() - began
            steps = await _steps(session, port)
        p50, p99, most = (float(np.percentile(latencies, q)) * 1e3 for q in (50, 99, 100))
        return {"rate": len(latencies) / took, "p50": p50, "p99": p99, "max": most, "steps": steps / took}
    finally:
        server.stdin.close()
        await server.wait()


async def _steps(session: ClientSession, port: int) -> int:
    """How many steps the server has trained since it was last asked."""
    async with session.get(f"http://127.0.0.1:{port}/steps") as answer:
        return int((await answer.json())["steps"])


# -------------------------------------------------------------------- the server


def _on_aiograd(network: networks.Network) -> Learner:
    model = networks.on_aiograd(network, rate=1e-3)

    async def predict(row: list[float]) -> list[float]:
        with ag.no_grad():
            w1, b1, w2, b2, w3, b3 = model.parameters
            F = nn.functional
            x = ag.asarray(np.array([row], np.float32))
            scores: list[float] = F.linear(F.relu(F.linear(F.relu(F.linear(x, w1, b1)), w2, b2)), w3, b3)[0].tolist()
            return scores

    async def train() -> None:
        loss = model.forward()
        await loss.backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    return predict, train


def _on_torch(network: networks.Network) -> Learner:
    import torch
    import torch.nn.functional as F

    model = networks.on_torch(network, rate=1e-3)
    pool = ThreadPoolExecutor(4)

    def scores_of(row: list[float]) -> list[float]:
        with torch.no_grad():
            w1, b1, w2, b2, w3, b3 = model.parameters
            scores: list[float] = F.linear(F.relu(F.linear(F.relu(F.linear(torch.tensor([row]), w1, b1)), w2, b2)), w3, b3)[0].tolist()
            return scores

    def step() -> None:
        model.forward().backward()
        model.optimizer.step()
        model.optimizer.zero_grad()

    async def predict(row: list[float]) -> list[float]:
        return await asyncio.get_running_loop().run_in_executor(pool, scores_of, row)

    async def train() -> None:
        await asyncio.get_running_loop().run_in_executor(pool, step)

    return predict, train


async def _serve(side: str, pace: int, tiny: bool) -> None:
    """Answer, and train `pace` steps per second (0: all the time), until the standard input is closed."""
    network = networks.mlp(4 if tiny else 64, (FEATURES, 8 if tiny else 256, 8 if tiny else 256, CLASSES))
    predict, train = (_on_aiograd if side == OURS else _on_torch)(network)
    steps = 0

    async def answer(request: web.Request) -> web.Response:
        return web.json_response({"scores": await predict((await request.json())["x"])})

    async def count(_: web.Request) -> web.Response:
        nonlocal steps
        done, steps = steps, 0
        return web.json_response({"steps": done})

    async def train_on() -> None:
        nonlocal steps
        clock = asyncio.get_running_loop().time
        due = clock()
        while True:
            await train()
            steps += 1
            if pace:
                due = max(due + 1 / pace, clock())
                await asyncio.sleep(due - clock())

    application = web.Application()
    application.add_routes([web.post("/predict", answer), web.get("/steps", count)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    print(json.dumps({"port": runner.addresses[0][1]}), flush=True)
    training = asyncio.ensure_future(train_on())
    try:
        closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
        await asyncio.wait([closed, training], return_when=asyncio.FIRST_COMPLETED)
        if training.done():
            training.result()
    finally:
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        await runner.cleanup()


if __name__ == "__main__":
    ag.run(_serve(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "1"))
