"""Replicas that form their group anew after workers were stopped: an attempt that cannot succeed ends within the silence."""

from __future__ import annotations

import asyncio
from random import Random

import pytest

from aiograd.errors import WorkerLostError
from tests.distributed.data_parallel.models import batches
from tests.distributed.data_parallel.simulated import World, expected
from tests.distributed.training_world import LIMITS

STEPS, EVERY, MOMENT = 26, 4, 1.0


@pytest.mark.sim
@pytest.mark.parametrize("seed", [0, 20, 28, 42, 44, 46])
def test_a_step_after_a_loss_is_taken_or_fails_within_the_silence(seed: int) -> None:
    """A worker that was stopped learns later than the others that they have lost it, perhaps when it has formed the next group."""
    random = Random(f"{seed}:stops")
    given = batches(STEPS, (3, 3, 3))

    async def main(world: World) -> None:
        loop = asyncio.get_running_loop()
        done, stopped_at, back = 0, 0, 0.0

        def stop(name: str, seconds: float) -> None:
            nonlocal back
            back = loop.time() + seconds
            world.network.freeze(name, seconds)

        while done < STEPS:
            if done >= stopped_at + EVERY:
                stopped_at = done
                loop.call_later(random.uniform(0, 0.06), stop, random.choice(world.names), random.uniform(1.0, 4.0))
            began = loop.time()
            try:
                await world.replicas.step(given[done])
                done += 1
            except WorkerLostError as error:
                assert loop.time() < max(began, back) + LIMITS.silence + MOMENT
                await world.replicas.add(error.worker)
        await asyncio.sleep(max(back - loop.time(), 0.0) + MOMENT)
        await world.coordinator.get_ready()  # a replica that was stopped in the last step is told of it
        assert world.states == [await expected(given)] * 3

    World(seed=seed).simulate(main, seed=seed)
