"""Each protection of rounds is needed: without it a training on a failing network breaks a promise."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from aiograd import distributed as dist
from aiograd.distributed.local_steps.base_coordinator import BaseCoordinator
from aiograd.distributed.local_steps.coordinator import RoundCoordinator
from aiograd.distributed.local_steps.local_training import LocalTraining
from aiograd.distributed.local_steps.member import LocalStepsMember
from tests.distributed.local_steps.scenario import LocalStepsRun

#: seeds until which a missing protection has to be noticed
MOST = 60


def _commit_alone() -> Any:
    """A member commits as soon as it is prepared."""
    prepare = LocalStepsMember.prepare

    async def hasty(self: LocalStepsMember, step: int, *args: Any) -> Any:
        result = await prepare(self, step, *args)
        await self.commit(step)
        return result

    return mock.patch.object(LocalStepsMember, "prepare", hasty)


def _residuals_at_once() -> Any:
    """Residuals change with the computation, not with the round."""
    compute = LocalTraining.compute

    async def hasty(self: LocalTraining, *args: Any, **options: Any) -> Any:
        result = await compute(self, *args, **options)
        assert self._last is not None
        self._residuals = self._last.residuals
        return result

    return mock.patch.object(LocalTraining, "compute", hasty)


def _no_residuals() -> Any:
    """Residuals are not kept when a round is committed."""
    go_on = LocalTraining.go_on

    def forgetful(self: LocalTraining, contribution: Any) -> None:
        before = self._residuals
        go_on(self, contribution)
        self._residuals = before

    return mock.patch.object(LocalTraining, "go_on", forgetful)


def _no_replay() -> Any:
    """Members that were late are not given the rounds since."""

    async def update(self: BaseCoordinator, member: Any) -> None:
        if member.version == -1:
            await original(self, member)
        member.version = self.base.version

    original = BaseCoordinator.update
    return mock.patch.object(BaseCoordinator, "update", update)


def _no_give_back() -> Any:
    """Batches of a lost member count as read."""

    def give_back(self: BaseCoordinator, member: Any) -> None:
        for batch in member.batches:
            self.ledger.read(batch)
        member.batches, member.is_fresh = [], True

    return mock.patch.object(BaseCoordinator, "give_back", give_back)


def _keep_inner() -> Any:
    """The inner optimizer of a member that has failed goes on."""
    compute = LocalTraining.compute

    async def going_on(self: LocalTraining, *args: Any, is_fresh: bool, **options: Any) -> Any:
        self._is_broken = False
        return await compute(self, *args, is_fresh=False, **options)

    return mock.patch.object(LocalTraining, "compute", going_on)


def _wrong_began() -> Any:
    """A late contribution counts as if it began at the newest base."""
    decided = RoundCoordinator._decided

    def wrong(self: RoundCoordinator, members: Any, contributors: Any, *args: Any) -> None:
        version = self.base.version
        for member, each in list(contributors.items()):
            result = type(each.result)(**{name: getattr(each.result, name) for name in each.result.form.names} | {"began": version})
            contributors[member] = each._replace(result=result)
        decided(self, members, contributors, *args)

    return mock.patch.object(RoundCoordinator, "_decided", wrong)


def _apply_at_once() -> Any:
    """With overlap the base is taken when it comes, not after the agreed step."""
    compute = LocalTraining.compute

    async def hasty(self: LocalTraining, *args: Any, overlap: int, **options: Any) -> Any:
        return await compute(self, *args, overlap=0, **options)

    return mock.patch.object(LocalTraining, "compute", hasty)


COMPRESSED: dict[str, Any] = {"compress": dist.TopK(1 / 8, bits=4, block=64)}
ABLATIONS: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "commit in two phases": (_commit_alone, {}),
    "residuals in the transaction": (_residuals_at_once, COMPRESSED),
    "error feedback": (_no_residuals, COMPRESSED),
    "replay of rounds": (_no_replay, {"patience": 0.0}),
    "batches that go back": (_no_give_back, {}),
    "a fresh inner optimizer": (_keep_inner, {}),
    "the base of a late member": (_wrong_began, {"patience": 0.0}),
    "overlap after the agreed step": (_apply_at_once, {"overlap": 1, "steps": 2}),
}


@contextlib.contextmanager
def without(name: str) -> Iterator[dict[str, Any]]:
    broken, options = ABLATIONS[name]
    with broken():
        yield options


@pytest.mark.sim
@pytest.mark.parametrize("name", ABLATIONS)
def test_a_protection_that_is_missing_is_missed(name: str) -> None:
    with without(name) as options:
        for seed in range(1, MOST):
            try:
                LocalStepsRun(seed, **options).run()
            except Exception:
                return
    raise AssertionError(f"nothing notices in {MOST} seeds that {name} is missing")
