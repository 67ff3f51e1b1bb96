"""A FastAPI service whose model learns while it answers: lifespan, response models, dependencies, background work, and its test.

    pip install fastapi httpx
    python examples/fastapi_service.py                       # starts the application as a test does, asks it things, and ends
    uvicorn --app-dir examples fastapi_service:app           # serves it; http://127.0.0.1:8000/docs has a form for each path

All of it runs on one event loop. A step of training is `await loss.backward()`, so requests are answered between its parts; a gradient can be the
answer of a request, too. What is cancelled, or fails, has changed nothing.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated, Any

import numpy as np

import aiograd as ag
from aiograd import nn
from aiograd.nn import functional as F

try:
    from fastapi import Depends, FastAPI, HTTPException, Request
    from httpx import ASGITransport, AsyncClient
    from pydantic import BaseModel, Field
except ImportError:
    print("this example needs FastAPI and httpx: pip install fastapi httpx")
    sys.exit()

CENTRES = np.array([[0, 0], [4, 0], [0, 4]], np.float32)  # of three kinds of points

Measure = Annotated[float, Field(ge=-100, le=100)]  # and so neither NaN nor infinite


class Point(BaseModel):
    """The body of a request."""

    measures: Annotated[list[Measure], Field(min_length=2, max_length=2, examples=[[3.5, 0.2]])]


class Prediction(BaseModel):
    """The kind of the point, and how much each measure speaks for it."""

    kind: int
    probabilities: list[float]
    influence: list[float]


class Training(BaseModel):
    """How far training is."""

    steps: int
    loss: float | None
    running: bool


class Learner:
    """The model, and the training that goes on in the background."""

    def __init__(self) -> None:
        generator = ag.Generator(0)
        self.model = nn.Sequential(nn.Linear(2, 64, generator=generator), nn.ReLU(), nn.Linear(64, 3, generator=generator))
        self.optimizer = ag.optim.Adam(self.model.parameters(), lr=1e-2)
        self.state = Training(steps=0, loss=None, running=False)
        self.task: asyncio.Task[None] | None = None
        #: held from forward to step, or to the gradient: those who share parameters take turns
        self.turn = asyncio.Lock()

    async def train(self, steps: int) -> None:
        """Take steps; cancelled in the midst of one, that one has changed nothing."""
        rng = np.random.default_rng(0)
        for _ in range(steps):
            kinds = rng.integers(0, 3, 64)
            points = ag.tensor(CENTRES[kinds] + rng.normal(size=(64, 2)).astype(np.float32))
            async with self.turn:
                self.optimizer.zero_grad()
                loss = F.cross_entropy(self.model(points), kinds)
                await loss.backward()
                self.optimizer.step()
            self.state = Training(steps=self.state.steps + 1, loss=loss.item(), running=True)
        self.state = self.state.model_copy(update={"running": False})


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The model lives as long as the application; training ends with it."""
    async with ag.tuned_gc(), ag.Engine(blas_threads=1, default=True):
        app.state.learner = Learner()
        yield
        if (task := app.state.learner.task) is not None:
            task.cancel()
            await asyncio.wait([task])


async def learner(request: Request) -> Learner:
    """The dependency of every path."""
    return request.app.state.learner  # type: ignore[no-any-return]


app = FastAPI(title="A model that learns", lifespan=lifespan, exception_handlers=ag.serving.exception_handlers())
Model = Annotated[Learner, Depends(learner)]


@app.post("/predict")
async def predict(point: Point, learner: Model) -> Prediction:
    """A gradient as an answer, between two steps of training; it touches no `.grad`."""
    x = ag.tensor(point.measures, dtype=ag.float32, requires_grad=True)
    async with learner.turn:
        scores = learner.model(x)
        kind = int(scores.detach().numpy().argmax())
        (gradient,) = await ag.grad(scores[kind], [x])
    return Prediction(kind=kind, probabilities=F.softmax(scores.detach(), axis=0).tolist(), influence=gradient.tolist())


@app.post("/train", status_code=202)
async def train(learner: Model, steps: Annotated[int, Field(ge=1, le=10_000)] = 300) -> Training:
    """Begins to train in the background."""
    if learner.state.running:
        raise HTTPException(409, "training is under way")
    learner.state = learner.state.model_copy(update={"running": True})
    learner.task = asyncio.create_task(learner.train(steps))
    return learner.state


@app.get("/train")
async def progress(learner: Model) -> Training:
    """How far training is."""
    return learner.state


async def main() -> None:
    """Ask the application things, as its tests would: here it is called without a server, on the same loop."""
    async with lifespan(app), AsyncClient(transport=ASGITransport(app=app), base_url="http://test") as client:
        print("refused:", (await client.post("/predict", json={"measures": [1, 2, 3]})).status_code)
        print("begins: ", (await client.post("/train", params={"steps": 300})).json())
        answers = 0
        while (state := (await client.get("/train")).json())["running"]:
            answers += (await client.post("/predict", json={"measures": [3.5, 0.2]})).status_code == 200
        print("trained:", {"steps": state["steps"], "loss": round(state["loss"], 2)}, "and answered meanwhile:", answers > 0)
        for measures in CENTRES.tolist():
            answer: Any = (await client.post("/predict", json={"measures": measures})).json()
            print(f"{measures} is of kind {answer['kind']}, influence", [round(each, 2) for each in answer["influence"]])


if __name__ == "__main__":
    ag.run(main())
