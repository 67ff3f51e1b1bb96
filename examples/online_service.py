"""A service that predicts and learns at the same time: one process, one event loop, and a version behind every answer.

An aiohttp application classifies handwritten digits over HTTP and keeps training on the examples its users send. Each prediction names the version of
the weights that made it, and with ``--log`` the last version serves again after a restart.

    python examples/online_service.py --serve          # http://127.0.0.1:8080, stop with Ctrl-C
    python examples/load_service.py http://127.0.0.1:8080
    python examples/online_service.py --serve --dashboard   # and a page that shows versions, latency and steps

    curl -X POST http://127.0.0.1:8080/predict -H 'Content-Type: application/json' -d '{"image": [0, 0, 5, ...64 numbers from 0 to 16]}'
    curl -X POST http://127.0.0.1:8080/learn   -H 'Content-Type: application/json' -d '{"image": [...], "digit": 7}'
    curl http://127.0.0.1:8080/stats

Without arguments it starts the service, puts the load script on it for a few seconds, prints what that measured, and stops.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import sys
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

# Matrices this small gain nothing from several BLAS threads, and latency suffers where those wait for each other. Before numpy is imported:
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from aiohttp import web
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd import distributed as dist
from aiograd import serving
from aiograd.nn import functional as F

LOAD = str(Path(__file__).with_name("load_service.py"))
BATCH = 64
PIXELS = 64
#: requests that are larger than this are refused before they are read
MAX_BODY = 16 * 1024


def scores(module: Any, images: Any) -> Any:
    """The probability of each digit."""
    return F.softmax(module(images), axis=-1)


def loss(model: Any, images: Any, digits: Any) -> Any:
    return F.cross_entropy(model(images), digits)


class Classifier:
    """The model, the server that answers with it, and the trainer."""

    def __init__(self, seed: int = 0, log: str | None = None) -> None:
        generator = ag.Generator(seed)
        self.model = ag.nn.Sequential(
            ag.nn.Linear(PIXELS, 256, generator=generator),
            ag.nn.ReLU(),
            ag.nn.Linear(256, 256, generator=generator),
            ag.nn.ReLU(),
            ag.nn.Linear(256, 10, generator=generator),
        )
        digits = load_digits()
        order = np.random.default_rng(seed).permutation(len(digits.target))
        images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
        self.test_images, self.test_labels = images[1400:], labels[1400:]
        #: examples to learn from; examples of users push the oldest out
        self.examples = serving.ReplayBuffer(4000, seed=seed)
        self.examples.add(images[:1400], labels[:1400])
        self.server = serving.Server(self.model, forward=scores, max_batch=64, max_queue=1024, deadline=1.0, keep=10, log=log)
        self.trainer: serving.Trainer | None = None

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Serve and train."""
        optimizer = ag.optim.AdamW(self.model.parameters(), lr=1e-3)
        async with self.server:
            self.trainer = serving.Trainer(self.server, optimizer, loss, buffer=self.examples, batch=BATCH, rate=100, publish_every=5)
            async with self.trainer:
                yield

    def accuracy(self) -> float:
        """Share of the held-back images that the version that serves classifies correctly."""
        with ag.no_grad():
            logits = ag.functional_call(self.model, {path: ag.asarray(array) for path, array in self.server.current.state.items()}, self.test_images)
        return float((logits.numpy().argmax(1) == self.test_labels).mean())


CLASSIFIER = web.AppKey("classifier", Classifier)


# -------------------------------------------------------------------- requests


async def read_json(request: web.Request) -> dict[str, Any]:
    """The JSON object in the request's body; anything else is the sender's mistake."""
    if request.content_type != "application/json":
        raise web.HTTPUnsupportedMediaType(text=problem("send Content-Type: application/json"), content_type="application/json")
    try:
        body = json.loads(await request.read())
    except (ValueError, RecursionError):
        raise web.HTTPBadRequest(text=problem("the body is not JSON"), content_type="application/json") from None
    if not isinstance(body, dict):
        raise web.HTTPBadRequest(text=problem("the body must be a JSON object"), content_type="application/json")
    return body


def problem(text: str) -> str:
    return json.dumps({"error": text})


def read_image(body: dict[str, Any]) -> np.ndarray:
    """The field ``image``: 64 numbers from 0 to 16."""
    values = body.get("image")
    right = isinstance(values, list) and len(values) == PIXELS and all(type(v) in (int, float) and 0 <= v <= 16 for v in values)
    if not right:
        raise web.HTTPBadRequest(text=problem("image must be a list of 64 numbers from 0 to 16"), content_type="application/json")
    return np.array([values], np.float32) / 16


async def predict(request: web.Request) -> web.Response:
    image = read_image(await read_json(request))
    answer = await request.app[CLASSIFIER].server.predict(image)
    found = answer.value.numpy()[0]
    return web.json_response({"digit": int(found.argmax()), "probabilities": [round(p, 6) for p in found.tolist()]}, headers=answer.headers)


async def learn(request: web.Request) -> web.Response:
    body = await read_json(request)
    image, digit = read_image(body), body.get("digit")
    if type(digit) is not int or not 0 <= digit <= 9:
        raise web.HTTPBadRequest(text=problem("digit must be an integer from 0 to 9"), content_type="application/json")
    classifier = request.app[CLASSIFIER]
    await classifier.trainer.learn(image, np.array([digit]))
    return web.json_response({"examples": len(classifier.examples)}, status=202)


async def stats(request: web.Request) -> web.Response:
    classifier = request.app[CLASSIFIER]
    server, trainer = classifier.server.statistics(), classifier.trainer
    found = {"steps": trainer.steps, "failures": trainer.failures, "accuracy": round(classifier.accuracy(), 4), "predictions": server.answers}
    counts = {"version": server.version, "published": server.published, "promoted": server.promoted, "rollbacks": server.rollbacks}
    return web.json_response({**found, **counts})


async def health(request: web.Request) -> web.Response:
    trainer = request.app[CLASSIFIER].trainer
    error = None if trainer.error is None else str(trainer.error)
    return web.json_response({"training": trainer.is_running, "error": error}, status=200 if trainer.is_running else 503)


# -------------------------------------------------------------------- the application


async def lifetime(app: web.Application) -> AsyncIterator[None]:
    """The server and the trainer live as long as the application."""
    async with app[CLASSIFIER].running():
        yield
    await ag.aclose_default_engine()


def application(seed: int = 0, log: str | None = None) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY, middlewares=[serving.aiohttp_middleware()])
    app[CLASSIFIER] = Classifier(seed, log)
    app.cleanup_ctx.append(lifetime)
    app.add_routes([web.post("/predict", predict), web.post("/learn", learn), web.get("/stats", stats), web.get("/health", health)])
    return app


@contextlib.asynccontextmanager
async def serve_on(host: str, port: int, log: str | None = None) -> AsyncIterator[str]:
    """Run the application; gives its URL. Leaving stops it cleanly."""
    runner = web.AppRunner(application(log=log), access_log=None, keepalive_timeout=60)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        address = runner.addresses[0]
        yield f"http://{address[0]}:{address[1]}"
    finally:
        await runner.cleanup()


async def serve(port: int, log: str | None, with_dashboard: bool) -> None:
    async with contextlib.AsyncExitStack() as stack:
        url = await stack.enter_async_context(serve_on("127.0.0.1", port, log))
        print(f"serving on {url}, learning from 1400 digits; Ctrl-C stops")
        if with_dashboard:
            worker = await stack.enter_async_context(dist.Worker("service", dashboard=True))
            print(f"dashboard: {worker.dashboard_url}", flush=True)
        await asyncio.Event().wait()


async def demonstrate(seconds: float) -> None:
    started = time.perf_counter()
    async with serve_on("127.0.0.1", 0) as url:
        print(f"serving on {url} and training in the same process; load for {seconds:g} s", flush=True)
        # a process of its own: in this one the load would wait for the training, and the service for the load
        load = await asyncio.create_subprocess_exec(sys.executable, LOAD, url, "--seconds", str(seconds))
        if await load.wait():
            raise SystemExit(f"{LOAD} failed")
    print(f"stopped cleanly after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="serve until interrupted")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--log", help="folder that keeps the versions over restarts")
    parser.add_argument("--dashboard", action="store_true", help="serve a page with versions and latency too")
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to demonstrate (default 5)")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        ag.run(serve(options.port, options.log, options.dashboard) if options.serve else demonstrate(options.seconds))
