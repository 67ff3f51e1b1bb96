"""Checks that this checkout reads a folder written by `states` with the package of some release. Each raises, or returns nothing."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.running.digest import state_digest
from tests.releases.states import FILES, Net, batch, describe, differences, parts, step

SERVICE = "tests.releases.states:service"


def told(folder: Path) -> dict[str, Any]:
    """The description of the files, made when they were written."""
    found: dict[str, Any] = json.loads((folder / "told.json").read_text())
    return found


def same(expected: Any, found: Any, what: str) -> None:
    """Raise if a described state is not the expected one."""
    wrong = [*differences(expected, describe(found))]
    if wrong:
        raise AssertionError("; ".join([f"{what}: {len(wrong)} differences", *wrong[:5]]))


def load(folder: Path, name: str) -> Any:
    """A file, which has what was told."""
    state = ag.load(folder / f"{name}.safetensors")
    same(told(folder)[name], state, f"{folder.name}/{name}")
    return state


async def files_have_what_was_told(folder: Path, scratch: Path) -> None:
    """`ag.load` gives every value of every file, to the bit."""
    found = set(FILES) & told(folder).keys()
    assert found >= set(FILES) - {"rounds"}  # which the oldest releases do not have
    for name in found:
        load(folder, name)
        assert ag.load_metadata(folder / f"{name}.safetensors")["wrote"] == told(folder)["release"]


async def training_goes_on(folder: Path, scratch: Path) -> None:
    """A training of this release has the state of the file, and its next step is that of the release that wrote it."""
    made = parts(7)
    state = ag.TrainingState(**made)
    state.restore(folder / "training.safetensors")
    same(told(folder)["training"], state.state_dict(), "the restored training")
    after = await step(made)
    for name, parameters in told(folder)["next"].items():
        for expected, found in zip(parameters, after[name], strict=True):
            np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6, err_msg=f"the next step of {name}")
    assert sum([len(x) async for x, _ in made["loader"]]) == 12, "it goes on behind the batch of four that was read"


async def log_serves(folder: Path, scratch: Path) -> None:
    """Every version of the serving log is whole; a server serves the last one, and gives the next number."""
    if "log" not in told(folder):
        return
    shutil.copytree(folder / "log", scratch / "log")
    log = ag.serving.VersionLog(scratch / "log")
    found = [log.load(number) for number in log.numbers()]
    assert [[each.number, each.digest, each.parent, dict(each.metrics)] for each in found] == told(folder)["log"]
    assert all(state_digest(each.state) == each.digest for each in found)
    async with ag.serving.Server(Net(9), log=log) as server:
        assert (server.current.number, server.current.digest) == (found[-1].number, found[-1].digest)
        assert (await server.publish(Net(1).state_dict())).number == found[-1].number + 1


async def checkpoints_are_taken_up(folder: Path, scratch: Path) -> None:
    """Replicas, stages and local steps on workers take up their checkpoints and give the same back; all take a step."""
    x, target = (ag.tensor(each) for each in batch())
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.01}}
    async with dist.LocalCluster(2, service=SERVICE) as cluster:
        driver, names = cluster.driver, cluster.workers
        state = load(folder, "replicas")
        async with await dist.DataParallel.create(driver, names, Net, 5, **options) as replicas:
            await replicas.load_optimizer_state_dict(state["optimizer"])
            await replicas.load_state_dict(state["module"])
            found = {"module": await replicas.state_dict(), "optimizer": await replicas.optimizer_state_dict()}
            same(told(folder)["replicas"], found, "the checkpoint of replicas")
            await replicas.step([(x, target)])
        state = load(folder, "stages")
        stages = [await driver.remote_module(name, Net, 5) for name in names]
        for stage, saved in zip(stages, state["modules"], strict=True):
            await stage.load_state_dict(saved)
        optimizer = dist.DistributedOptimizer(driver, ag.optim.Adam, stages, lr=0.01)
        await optimizer.load_state_dict(state["optimizer"])
        found = {"modules": [await stage.state_dict() for stage in stages], "optimizer": await optimizer.state_dict()}
        same(told(folder)["stages"], found, "the checkpoint of stages")
        async with driver.context() as ctx:
            await ctx.backward(await stages[0].ref.call("loss", x, target))
            await optimizer.step(ctx)
        assert (await optimizer.state_dict())["steps"] == state["optimizer"]["steps"] + 1
        await optimizer.delete()
        if "rounds" in told(folder):
            state = load(folder, "rounds")
            async with await dist.LocalSteps.create(driver, names, Net, 5, steps=1, **options) as rounds:
                await rounds.restore(state)
                same(told(folder)["rounds"], await rounds.checkpoint(members=True), "the checkpoint of local steps")
                async for _ in rounds.rounds(epochs=2):
                    pass
                assert rounds.version > state["version"]


CHECKS: tuple[Callable[[Path, Path], Awaitable[None]], ...] = (files_have_what_was_told, training_goes_on, log_serves, checkpoints_are_taken_up)


async def _all(folder: Path, scratch: Path) -> None:
    for check in CHECKS:
        await check(folder, scratch)


if __name__ == "__main__":
    ag.run(_all(Path(sys.argv[1]), Path(sys.argv[2])))
    print(f"{len(CHECKS)} passed")
