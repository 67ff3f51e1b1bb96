"""The processes behind `serving`: services of one model on several engines and frameworks, followers, and measurements in a process of their own.

``python -m tests.benchmarks.serving_sides SIDE STEPS TINY`` serves until its standard input is closed; SIDE is ENGINE/FRAMEWORK, of
aiograd, torch, empty and aiohttp, fastapi. `torch` is the service that people write today: a forward by ``run_in_threadpool``, a trainer in a
thread, and one lock for both, without which answers are torn. `empty` answers without a model: the share of the framework.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import threading
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import numpy as np
from aiohttp import web

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn, serving

FEATURES, CLASSES, BATCH = 64, 10, 64
#: one row -> its scores and the number of the version
Predict = Callable[[Any], Awaitable[tuple[list[float], int]]]


def model_of(width: int) -> Any:
    """The network of the tables, 64-width-width-10."""
    generator = ag.Generator(0)
    sizes = (FEATURES, width, width, CLASSES)
    layers = [nn.Linear(sizes[n], sizes[n + 1], generator=generator) for n in range(3)]
    return nn.Sequential(layers[0], nn.ReLU(), layers[1], nn.ReLU(), layers[2])


class Weights(nn.Module):
    """Arrays of 100,000 weights each."""

    def __init__(self, arrays: int) -> None:
        super().__init__()
        random = np.random.default_rng(0)
        for n in range(arrays):
            self.register_parameter(f"w{n:03}", nn.Parameter(ag.asarray((0.05 * random.standard_normal(100_000)).astype(np.float32))))

    def forward(self, x: Any) -> Any:
        return x * self.w000[0]


def examples(seed: int = 0) -> tuple[Any, Any]:
    """Rows to train on."""
    random = np.random.default_rng(seed)
    return random.standard_normal((1000, FEATURES)).astype(np.float32), random.integers(0, CLASSES, 1000)


@contextlib.asynccontextmanager
async def on_aiograd(width: int, rate: float, counts: dict[str, int]) -> AsyncIterator[Predict]:
    """Serve by `aiograd.serving`, training `rate` steps per second; 0: frozen."""
    model = model_of(width)
    async with serving.Server(model) as server:

        async def predict(row: Any) -> tuple[list[float], int]:
            answer = await server.predict(row)
            return answer.value.numpy()[0].tolist(), answer.version

        async with contextlib.AsyncExitStack() as stack:
            if rate:
                buffer = serving.ReplayBuffer(1000)
                optimizer = ag.optim.AdamW(model.parameters(), lr=1e-3)
                trainer = serving.Trainer(
                    server, optimizer, lambda m, x, y: nn.functional.cross_entropy(m(x), y), buffer=buffer, batch=BATCH, rate=rate
                )
                await trainer.learn(*examples())
                await stack.enter_async_context(trainer)
                stack.callback(lambda: counts.update(steps=trainer.steps))
                counts["trainer"] = trainer  # type: ignore[assignment]
            yield predict


@contextlib.asynccontextmanager
async def on_torch(width: int, rate: float, counts: dict[str, int]) -> AsyncIterator[Predict]:
    """Serve by torch in threads under one lock."""
    import torch
    from anyio import to_thread

    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(FEATURES, width), torch.nn.ReLU(), torch.nn.Linear(width, width), torch.nn.ReLU(), torch.nn.Linear(width, CLASSES)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    lock, ended = threading.Lock(), threading.Event()
    rows, labels = (torch.from_numpy(array) for array in examples())

    def forward(row: Any) -> tuple[list[float], int]:
        with torch.no_grad(), lock:
            return model(torch.from_numpy(row))[0].tolist(), counts["steps"]

    def train() -> None:
        random, due = np.random.default_rng(0), time.perf_counter()
        while not ended.is_set():
            chosen = random.integers(0, len(rows), BATCH)
            with lock:
                loss = torch.nn.functional.cross_entropy(model(rows[chosen]), labels[chosen])
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                counts["steps"] += 1
            due = max(due + 1 / rate, time.perf_counter() - 1)
            ended.wait(max(0.0, due - time.perf_counter()))

    async def predict(row: Any) -> tuple[list[float], int]:
        return await to_thread.run_sync(forward, row)  # as Starlette's run_in_threadpool

    thread = threading.Thread(target=train)
    if rate:
        thread.start()
    try:
        yield predict
    finally:
        ended.set()
        if rate:
            thread.join()


@contextlib.asynccontextmanager
async def on_nothing(width: int, rate: float, counts: dict[str, int]) -> AsyncIterator[Predict]:
    """Answer without a model, by as many digits as a model's."""
    scores = np.random.default_rng(0).standard_normal(CLASSES).astype(np.float32).tolist()

    async def predict(row: Any) -> tuple[list[float], int]:
        return scores, 0

    yield predict


ENGINES = {"aiograd": on_aiograd, "torch": on_torch, "empty": on_nothing}


def steps_of(counts: dict[str, Any]) -> int:
    """Steps that were trained so far."""
    return int(counts["trainer"].steps if "trainer" in counts else counts["steps"])


def spent(counts: dict[str, Any]) -> dict[str, float]:
    """Steps that were trained so far, and the CPU seconds of this process."""
    return {"steps": steps_of(counts), "cpu": time.process_time()}


async def serve(side: str, rate: float, tiny: bool) -> None:
    """Answer until the standard input is closed."""
    engine, framework = side.split("/")
    counts: dict[str, Any] = {"steps": 0}
    closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    async with ag.tuned_gc(), ENGINES[engine](8 if tiny else 256, rate, counts) as predict:
        if framework == "aiohttp":
            await _on_aiohttp(predict, counts, closed)
        else:
            await _on_fastapi(predict, counts, closed)


def _tell(port: int) -> None:
    print(json.dumps({"port": port}), flush=True)


async def _on_aiohttp(predict: Predict, counts: dict[str, Any], closed: asyncio.Future[bytes]) -> None:
    async def answer(request: web.Request) -> web.Response:
        scores, version = await predict(np.array([(await request.json())["x"]], np.float32))
        return web.json_response({"scores": scores, "version": version})

    async def spent_so_far(_: web.Request) -> web.Response:
        return web.json_response(spent(counts))

    application = web.Application()
    application.add_routes([web.post("/predict", answer), web.get("/spent", spent_so_far)])
    runner = web.AppRunner(application, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    _tell(runner.addresses[0][1])
    await closed
    await runner.cleanup()


async def _on_fastapi(predict: Predict, counts: dict[str, Any], closed: asyncio.Future[bytes]) -> None:
    import uvicorn
    from fastapi import FastAPI, Request
    from fastapi.responses import JSONResponse

    application = FastAPI()

    async def answer(request: Any) -> Any:
        scores, version = await predict(np.array([(await request.json())["x"]], np.float32))
        return JSONResponse({"scores": scores, "version": version})

    async def spent_so_far() -> Any:
        return JSONResponse(spent(counts))

    answer.__annotations__["request"] = Request
    application.post("/predict")(answer)
    application.get("/spent")(spent_so_far)
    server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="warning", access_log=False))
    serving_task = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    _tell(server.servers[0].sockets[0].getsockname()[1])
    await closed
    server.should_exit = True
    await serving_task


# -------------------------------------------------------------------- a follower


async def follow(name: str, url: str, arrays: int) -> None:
    """Follow the leader until the standard input is closed."""
    closed = asyncio.get_running_loop().run_in_executor(None, sys.stdin.buffer.read)
    service = dist.Service()
    async with dist.Worker(name, service=service, peers={"leader": url}) as worker, serving.Follower(worker, "leader", Weights(arrays)) as follower:
        bytes_before, cpu_before = follower.bytes_received, 0.0

        @service.function
        async def report(begins: bool) -> dict[str, Any]:
            nonlocal bytes_before, cpu_before
            if begins:
                bytes_before, cpu_before = follower.bytes_received, time.process_time()
                follower.behind.clear()
            cpu = time.process_time() - cpu_before
            return {"behind": list(follower.behind), "bytes": follower.bytes_received - bytes_before, "cpu": cpu}

        await closed


if __name__ == "__main__":
    if sys.argv[1] == "follow":
        ag.run(follow(sys.argv[2], sys.argv[3], int(sys.argv[4])))
    else:
        ag.run(serve(sys.argv[1], float(sys.argv[2]), sys.argv[3] == "1"))
