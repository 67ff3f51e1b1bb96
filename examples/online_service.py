"""A service that predicts and learns at the same time: one process, one event loop.

An aiohttp application classifies handwritten digits over HTTP and keeps training on the examples its users send. Because ``await
loss.backward()`` never holds the loop up, predictions stay fast while it learns; because a pass is a transaction, shutting down in the
middle of one leaves the model as it was.

    python examples/online_service.py --serve          # http://127.0.0.1:8080, stop with Ctrl-C
    python examples/load_service.py http://127.0.0.1:8080

    curl -X POST http://127.0.0.1:8080/predict -H 'Content-Type: application/json' -d '{"image": [0, 0, 5, ...64 numbers from 0 to 16]}'
    curl -X POST http://127.0.0.1:8080/learn   -H 'Content-Type: application/json' -d '{"image": [...], "digit": 7}'
    curl http://127.0.0.1:8080/stats

Without arguments it starts the service, puts the load script on it for a few seconds, prints what that measured, and stops.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import logging
import math
import os
import time
from collections.abc import AsyncIterator
from typing import Any

# Matrices this small gain nothing from several BLAS threads, and latency suffers where those wait for each other. Before numpy is imported:
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from aiohttp import web
from load_service import put_load_on
from sklearn.datasets import load_digits

import aiograd as ag
from aiograd.nn import functional as F

BATCH = 64
PIXELS = 64
#: requests that are larger than this are refused before they are read
MAX_BODY = 16 * 1024


class Classifier:
    """The model, the examples it learns from, and what is known about how it does."""

    def __init__(self, seed: int = 0) -> None:
        generator = ag.Generator(seed)
        self.model = ag.nn.Sequential(
            ag.nn.Linear(PIXELS, 256, generator=generator),
            ag.nn.ReLU(),
            ag.nn.Linear(256, 256, generator=generator),
            ag.nn.ReLU(),
            ag.nn.Linear(256, 10, generator=generator),
        )
        self.optimizer = ag.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.random = np.random.default_rng(seed)
        digits = load_digits()
        order = self.random.permutation(len(digits.target))
        images, labels = (digits.data[order] / 16).astype(np.float32), digits.target[order]
        #: examples to learn from; what users send pushes the oldest out
        self.examples: collections.deque[tuple[np.ndarray, int]] = collections.deque(zip(images[:1400], labels[:1400], strict=True), maxlen=4000)
        self.taught = asyncio.Event()
        self.test_images, self.test_labels = images[1400:], labels[1400:]
        self.steps = 0
        self.loss = math.nan
        self.predictions = 0

    def predict(self, image: np.ndarray) -> tuple[int, list[float]]:
        """The digit on one image of 64 pixels, and the probability of each digit."""
        with ag.no_grad():
            probabilities = F.softmax(self.model(ag.asarray(image[None])), axis=-1)
        self.predictions += 1
        return int(probabilities.argmax()), [round(p, 6) for p in probabilities.tolist()[0]]

    def accuracy(self) -> float:
        """Share of the held-back images that are classified correctly."""
        with ag.no_grad():
            logits = self.model(ag.asarray(self.test_images))
        return float((logits.numpy().argmax(1) == self.test_labels).mean())

    async def learn_forever(self) -> None:
        """Train on random batches of the examples until cancelled."""
        while True:
            chosen = [self.examples[i] for i in self.random.integers(0, len(self.examples), BATCH)]
            try:
                await self.learn(np.stack([image for image, _ in chosen]), np.array([label for _, label in chosen]))
            except Exception:  # a cancellation is none: it ends the trainer
                logging.exception("a batch was left out, and the model is as it was; training goes on when the next example comes")
                self.taught.clear()
                await self.taught.wait()

    async def learn(self, images: np.ndarray, labels: np.ndarray) -> None:
        """A step on one batch, or none if it fails."""
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(ag.asarray(images)), labels)
        await loss.backward()
        ag.optim.clip_grad_norm_(self.model.parameters(), 10.0, error_if_nonfinite=True)
        self.optimizer.step()
        self.steps += 1
        self.loss = loss.item()

    def teach(self, image: np.ndarray, label: int) -> None:
        """Keep an example to learn from."""
        self.examples.append((image, label))
        self.taught.set()


CLASSIFIER = web.AppKey("classifier", Classifier)
TRAINER = web.AppKey("trainer", asyncio.Task)


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
    return np.array(values, np.float32) / 16


async def predict(request: web.Request) -> web.Response:
    image = read_image(await read_json(request))
    digit, probabilities = request.app[CLASSIFIER].predict(image)
    return web.json_response({"digit": digit, "probabilities": probabilities})


async def learn(request: web.Request) -> web.Response:
    body = await read_json(request)
    image, digit = read_image(body), body.get("digit")
    if type(digit) is not int or not 0 <= digit <= 9:
        raise web.HTTPBadRequest(text=problem("digit must be an integer from 0 to 9"), content_type="application/json")
    classifier = request.app[CLASSIFIER]
    classifier.teach(image, digit)
    return web.json_response({"examples": len(classifier.examples)}, status=202)


async def stats(request: web.Request) -> web.Response:
    classifier = request.app[CLASSIFIER]
    loss = None if math.isnan(classifier.loss) else round(classifier.loss, 6)
    return web.json_response(
        {"steps": classifier.steps, "loss": loss, "accuracy": round(classifier.accuracy(), 4), "predictions": classifier.predictions}
    )


async def health(request: web.Request) -> web.Response:
    trainer = request.app[TRAINER]
    return web.json_response({"training": not trainer.done()}, status=503 if trainer.done() else 200)


# -------------------------------------------------------------------- the application


async def training(app: web.Application) -> AsyncIterator[None]:
    """The trainer lives as long as the application."""
    async with asyncio.TaskGroup() as group:
        app[TRAINER] = group.create_task(app[CLASSIFIER].learn_forever(), name="trainer")
        yield
        app[TRAINER].cancel()
    await ag.aclose_default_engine()


def application(seed: int = 0) -> web.Application:
    app = web.Application(client_max_size=MAX_BODY)
    app[CLASSIFIER] = Classifier(seed)
    app.cleanup_ctx.append(training)
    app.add_routes([web.post("/predict", predict), web.post("/learn", learn), web.get("/stats", stats), web.get("/health", health)])
    return app


@contextlib.asynccontextmanager
async def serving(host: str, port: int) -> AsyncIterator[str]:
    """Run the application; gives its URL. Leaving stops it cleanly."""
    runner = web.AppRunner(application(), access_log=None, keepalive_timeout=60)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        address = runner.addresses[0]
        yield f"http://{address[0]}:{address[1]}"
    finally:
        await runner.cleanup()


async def serve(port: int) -> None:
    async with serving("127.0.0.1", port) as url:
        print(f"serving on {url}, learning from 1400 digits; Ctrl-C stops")
        await asyncio.Event().wait()


async def demonstrate(seconds: float) -> None:
    started = time.perf_counter()
    async with serving("127.0.0.1", 0) as url:
        print(f"serving on {url} and training in the same process; load for {seconds:g} s")
        await put_load_on(url, seconds=seconds, connections=8)
    print(f"stopped cleanly after {time.perf_counter() - started:.1f} s")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--serve", action="store_true", help="serve until interrupted")
    parser.add_argument("--port", type=int, default=8080)
    parser.add_argument("--seconds", type=float, default=5.0, help="how long to demonstrate (default 5)")
    options = parser.parse_args()
    with contextlib.suppress(KeyboardInterrupt):
        ag.run(serve(options.port) if options.serve else demonstrate(options.seconds))
