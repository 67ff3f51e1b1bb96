"""Random lives of a server on virtual time: whatever meets whatever, each answer is one committed version's, whole and named."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import serving
from aiograd.errors import DeadlineError, DrainingError, QueueFullError, ServingError, VersionNotFoundError
from aiograd.testing import simulated_run
from tests.serving.models import Two, TwoSlowly, ones, state, values

#: requests, and changes of versions at most, in one life
REQUESTS, CHANGES = 60, 30


class Life:
    """One server with requests, changes of versions and a trainer, all drawn from a seed.

    Args:
        seed: of every draw.
    """

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        #: the value of each version's weights, by digest
        self.committed: dict[str, float] = {}
        self.counts: Counter[str] = Counter()

    async def run(self) -> Counter[str]:
        """Live; returns counts of what happened.

        Raises:
            AssertionError: an answer is torn, of no committed version, or a count does not add up.
        """
        draw = self.random
        model: Two = draw.choice((Two, TwoSlowly))(0.5)
        if isinstance(model, TwoSlowly):
            model.seconds = draw.choice((0.0, 0.001, 0.02))
        options = {"max_batch": draw.choice((1, 3, 8)), "max_queue": draw.choice((8, 64)), "keep": draw.choice((1, 3, 10))}
        server = serving.Server(model, **options, max_delay=draw.choice((0.0, 0.005)), deadline=draw.choice((None, 0.05)))
        trainer = self._trainer(server, model)
        admit = server._admit

        def noted(version: serving.Version, promote: bool) -> None:
            self.committed[version.digest] = float(version.state["first"][0])
            admit(version, promote)

        server._admit = noted  # type: ignore[method-assign]
        async with server:
            requests = [asyncio.ensure_future(self._request(server, n)) for n in range(REQUESTS)]
            async with asyncio.TaskGroup() as group:
                group.create_task(self._change(server, model))
                group.create_task(self._cancel(requests))
                if draw.random() < 0.5:
                    async with trainer:
                        await self._teach(trainer)
                    assert trainer.failures == 0, trainer.error
                    found = {"steps": trainer.steps, "candidates dropped": trainer.rejected, "promotions taken back": trainer.rollbacks}
                    self.counts.update(found)
            for ended in await asyncio.gather(*requests, return_exceptions=True):
                if isinstance(ended, Exception):
                    raise ended
            statistics = server.statistics()
        assert sum(self.counts[name] for name in ("answered", "refused", "late", "draining", "unknown", "cancelled")) == REQUESTS
        assert statistics.answers == self.counts["answered"] == sum(statistics.answers_by_version.values()), statistics
        assert statistics.failed == 0 and statistics.queued == 0, statistics
        return self.counts

    def _trainer(self, server: serving.Server, model: Two) -> serving.Trainer:
        """A trainer of which each step adds the same to both weights, with a gate or without."""

        async def loss(model: Any, x: Any, y: Any) -> Any:
            await asyncio.sleep(seconds)
            return -(model.first + model.second).sum()

        draw, seconds = self.random, self.random.choice((0.0, 0.004))
        gate = serving.Gate(lambda outputs, y: (outputs.numpy()[:, 0] - y[:, 0]) ** 2, window=2) if draw.random() < 0.5 else None
        optimizer, every = ag.optim.SGD(model.parameters(), 0.01), draw.choice((1, 3))
        return serving.Trainer(server, optimizer, loss, buffer=serving.ReplayBuffer(4), batch=2, rate=200, publish_every=every, gate=gate)

    async def _teach(self, trainer: serving.Trainer) -> None:
        draw = random.Random(self.random.random())
        for _ in range(draw.randint(0, 40)):
            await asyncio.sleep(draw.uniform(0.0, 0.01))
            await trainer.learn(ones(2), np.full((2, 1), draw.uniform(-1.0, 2.0), np.float32))

    async def _request(self, server: serving.Server, number: int) -> None:
        draw = random.Random(self.random.random())
        asked: dict[str, Any] = {}
        if draw.random() < 0.2:
            asked["version"] = draw.randint(1, 8)
        elif draw.random() < 0.3:
            asked["key"] = number % 5
        if draw.random() < 0.2:
            asked["deadline"] = draw.choice((0.001, 0.01, 0.1))
        rows = draw.choice((1, 1, 2, 5))
        try:
            await asyncio.sleep(draw.uniform(0.0, 0.2))
            answer = await server.predict(ones(rows), **asked)
        except QueueFullError:
            self.counts["refused"] += 1
        except DeadlineError:
            self.counts["late"] += 1
        except DrainingError:
            self.counts["draining"] += 1
        except VersionNotFoundError:
            self.counts["unknown"] += 1
        except asyncio.CancelledError:
            self.counts["cancelled"] += 1
            raise
        else:
            self.counts["answered"] += 1
            found = values(answer)
            assert len(found) == 1, f"torn: {found} by version {answer.version}"
            assert self.committed[answer.digest] == found.pop(), "the weights of the version that is named"
            assert answer.value.shape == (rows, 2)
            assert asked.get("version", answer.version) == answer.version

    async def _change(self, server: serving.Server, model: Two) -> None:
        draw = random.Random(self.random.random())
        for _ in range(draw.choice((3, CHANGES))):
            await asyncio.sleep(draw.uniform(0.0, 0.01))
            numbers = [version.number for version in server.versions]
            try:
                match draw.randrange(7):
                    case 0:
                        await server.publish(state(draw.random()), promote=draw.random() < 0.8)
                    case 1 | 2:
                        model.set(draw.random())
                        await server.publish()
                    case 3:
                        server.rollback(draw.choice((None, *numbers)))
                    case 4:
                        server.promote(draw.choice(numbers))
                    case 5:
                        server.split({} if draw.random() < 0.3 else dict.fromkeys({numbers[0], numbers[-1]}, 1 / len({numbers[0], numbers[-1]})))
                    case 6:
                        server.shadow(draw.choice((None, *numbers)), draw.random())
            except ServingError:
                self.counts["refused changes"] += 1

    async def _cancel(self, requests: list[asyncio.Future[None]]) -> None:
        draw = random.Random(self.random.random())
        for request in draw.sample(requests, len(requests) // 10):
            await asyncio.sleep(draw.uniform(0.0, 0.03))
            request.cancel()


def run_life(seed: int) -> Counter[str]:
    """One life of a server."""
    return simulated_run(Life(seed).run, seed=seed, order="permuted" if seed % 2 else "fifo").value
