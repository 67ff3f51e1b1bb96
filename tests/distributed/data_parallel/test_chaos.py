"""Training by replicas on networks and workers that fail, seed by seed; and without the protections that this needs."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from aiograd.coordination.compressed_pass import CompressedPass
from aiograd.distributed.data_parallel.coordinator import ReplicaCoordinator
from aiograd.distributed.data_parallel.replica import Replica
from aiograd.distributed.data_parallel.replica_member import ReplicaMember
from aiograd.distributed.data_parallel.replica_step import ReplicaStep
from tests.chaos.replicas import STEPS, ReplicaRun
from tests.distributed.data_parallel.simulated import World


@pytest.mark.sim
@pytest.mark.parametrize("block", range(8))
def test_steps_are_taken_by_all_or_none_and_once(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(block, 24, 8):
        seen += ReplicaRun(seed).run()
    assert seen["taken"] >= 3 * STEPS and seen["lost"] + seen["cancelled"] > 0, seen


# ---------------------------------------------------------------- ablations


@contextlib.contextmanager
def replaced(owner: type, name: str, broken: Any) -> Iterator[None]:
    with mock.patch.object(owner, name, broken):
        yield


def _commit_alone() -> Any:
    """A replica commits as soon as it is prepared."""
    run = ReplicaMember.run

    async def hasty(self: ReplicaMember, step: int, shards: list[Any]) -> dict[str, Any]:
        result = await run(self, step, shards)
        await self.commit(step)
        return result

    return replaced(ReplicaMember, "run", hasty)


def _commit_again() -> Any:
    """A step is taken twice."""
    update = ReplicaStep.commit

    def twice(self: ReplicaStep) -> None:
        update(self)
        if self._running is not None:
            self._replica.running = [None if each is None else each + each for each in self._replica.running]
        else:
            self._replica.parameters[0]._data[...] *= 2.0

    return replaced(ReplicaStep, "commit", twice)


def _join_with_any_state() -> Any:
    """A replica that is behind takes part as it is."""

    async def nothing(self: ReplicaCoordinator, replicas: Any) -> None:
        for each in replicas[1:]:
            host = next(worker._objects.table._held.get(each.ref.key) for worker in _opened(self) if worker.name == each.owner)
            if host is not None:
                host.value._replica.loads, host.value._replica.taken = self.version

    return replaced(ReplicaCoordinator, "synchronise", nothing)


def _keep_residuals_of_failed_steps() -> Any:
    """Residuals change when a step is computed, committed or not."""
    split = CompressedPass._split

    def hasty(self: CompressedPass, number: int, result: Any) -> Any:
        found = split(self, number, result)
        self._before[:] = self.residuals  # type: ignore[index]
        return found

    return replaced(CompressedPass, "_split", hasty)


def _lose_residuals() -> Any:
    """Residuals are as they were before a committed step."""
    committed = Replica.committed

    def forgetful(self: Replica, running: Any, sums: Any) -> None:
        before = self.residuals
        committed(self, running, sums)
        self.residuals = before

    return replaced(Replica, "committed", forgetful)


def _opened(coordinator: ReplicaCoordinator) -> Any:
    return [world.workers[name] for world in WORLDS for name in world.workers]


WORLDS: list[World] = []
ABLATIONS: dict[str, Callable[[], Any]] = {
    "commit alone": _commit_alone,
    "take a step twice": _commit_again,
    "join with any state": _join_with_any_state,
    "residuals wait for the commit": _keep_residuals_of_failed_steps,
    "residuals are part of a step": _lose_residuals,
}
#: the first seeds that notice, where there are long ones before
NOTICED = {"commit alone": 4, "residuals wait for the commit": 4}


@pytest.mark.sim
@pytest.mark.parametrize("ablation", ABLATIONS)
def test_a_missing_protection_is_noticed(ablation: str) -> None:
    with ABLATIONS[ablation]():
        for seed in range(NOTICED.get(ablation, 0), 60):
            run = ReplicaRun(seed)
            WORLDS[:] = [run.world]
            try:
                run.run()
            except AssertionError:
                return
    raise AssertionError(f"nothing has noticed the absence of: {ablation}")
