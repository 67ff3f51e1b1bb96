"""TrainingState: everything in one file, all or nothing, and on to the same bits."""

from __future__ import annotations

import asyncio
import gc
import os
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.saving import serialization
from tests.support import assert_raises, cancel

SCHEDULES: dict[str, Any] = {
    "OneCycleLR": lambda o: optim.OneCycleLR(o, 0.1, total_steps=20, cycle_momentum=False),
    "CosineAnnealingWarmRestarts": lambda o: optim.CosineAnnealingWarmRestarts(o, 3),
    "ReduceLROnPlateau": lambda o: optim.ReduceLROnPlateau(o, patience=1),
    "LambdaLR": lambda o: optim.LambdaLR(o, lambda t: 1 / (1 + t)),
}


class Run:
    """A small training run."""

    def __init__(self, optimizer: str, schedule: str) -> None:
        self.model = nn.Sequential(nn.Linear(3, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.GELU(), nn.Linear(8, 1))
        self.optimizer = getattr(optim, optimizer)(self.model.parameters(), lr=0.01)
        self.schedule = SCHEDULES[schedule](self.optimizer)
        self.average = optim.ExponentialMovingAverage(self.model, 0.8)
        self.loader = ag.data.DataLoader(np.random.default_rng(0).normal(size=(20, 3)).astype(np.float32), 4, shuffle=True)
        self.state = ag.TrainingState(**vars(self))

    async def go(self, batches: int) -> None:
        while batches:
            async for x in self.loader:
                self.optimizer.zero_grad()
                loss = (self.model(x) - x.sum(1, keepdims=True)).square().mean()
                await loss.backward()
                self.optimizer.step()
                self.schedule.step(*([loss] if isinstance(self.schedule, optim.ReduceLROnPlateau) else []))
                self.average.update_parameters(self.model)
                batches -= 1
                if not batches:
                    break

    def bits(self) -> list[bytes]:
        return [value.numpy().tobytes() for part in (self.model, self.average.module) for value in part.state_dict().values()]


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        ("Adam", "OneCycleLR"), ("RMSprop", "CosineAnnealingWarmRestarts"), ("NAdam", "ReduceLROnPlateau"), ("RAdam", "LambdaLR"),
        ("Adagrad", "OneCycleLR"), ("SGD", "LambdaLR"),
    ],
)  # fmt: skip
async def test_a_run_goes_on_to_the_same_bits(optimizer: str, schedule: str, tmp_path: Path) -> None:
    ag.seed(3)
    whole = Run(optimizer, schedule)
    first: Any = None
    path = tmp_path / "run.safetensors"
    await whole.go(7)
    await whole.state.asave(path)
    at_seven = whole.loader.state_dict()
    assert at_seven["epoch"] == 1 and at_seven["batches"] == 2
    ag.seed(99)
    other = Run(optimizer, schedule)
    await other.go(2)
    other.state.restore(path)
    assert other.bits() == whole.bits()
    first = ag.default_generator().state_dict()
    await other.go(6)
    ag.default_generator().load_state_dict(first)
    whole.loader.load_state_dict(at_seven)
    await whole.go(6)
    assert other.bits() == whole.bits()
    assert other.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


async def test_a_state_that_does_not_fit_changes_nothing(tmp_path: Path) -> None:
    run = Run("Adam", "LambdaLR")
    await run.go(2)
    state = run.state.state_dict()
    run.state.save(tmp_path / "run.safetensors")
    before, loader = run.bits(), run.loader.state_dict()
    wrong: list[Any] = [
        3, {}, {name: part for name, part in state.items() if name != "loader"}, {**state, "loader": {**loader, "batches": -1}},
        {**state, "model": {}, "optimizer": {}},
    ]  # fmt: skip
    zeros = {name: np.zeros(value.shape, value.dtype) for name, value in state["model"].items()}
    for each in [*wrong, {**state, "model": zeros, "average": {"module": {}, "n_averaged": 1}}]:
        assert_raises(ArgumentError, None, run.state.load_state_dict, each)
    assert run.bits() == before and run.loader.state_dict() == loader
    assert_raises(FileNotFoundError, None, lambda: run.state.restore(tmp_path / "nothing"))
    assert_raises(ArgumentTypeError, None, ag.TrainingState, model=3)
    assert_raises(ArgumentTypeError, None, lambda: ag.TrainingState(default_generator=ag.Generator(0)))


def held_files(monkeypatch: pytest.MonkeyPatch) -> tuple[threading.Event, threading.Event]:
    """The first file that is flushed to the disk waits: it has arrived there, and may go on."""
    arrived, free, flush = threading.Event(), threading.Event(), os.fsync

    def held(descriptor: int) -> None:
        if not arrived.is_set():
            arrived.set()
            free.wait(60)
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", held)
    return arrived, free


@pytest.mark.parametrize("later", ["asave", "save", "other", "failed"])
async def test_a_save_that_was_given_up_replaces_no_later_one(later: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, free = held_files(monkeypatch)
    monkeypatch.chdir(tmp_path)
    generator = ag.Generator(1)
    state = ag.TrainingState(generator=generator)
    async with ag.Engine(threads=2):
        first = asyncio.ensure_future(state.asave(tmp_path / "run.safetensors"))
        while not arrived.is_set():
            await asyncio.sleep(0)
        await cancel(first)
        generator.uniform(3)
        if later == "asave":
            await state.asave(Path("run.safetensors"))
        elif later == "save":
            state.save("run.safetensors")
        elif later == "other":
            await state.asave(tmp_path / "other.safetensors")
        else:
            (tmp_path / "run.safetensors").mkdir()
            with pytest.raises(OSError, match="run.safetensors"):
                await state.asave(tmp_path / "run.safetensors")
            (tmp_path / "run.safetensors").rmdir()
        newer = generator.state_dict()
        free.set()
        while any(name.name.startswith(".") for name in tmp_path.iterdir()):  # until the first has ended
            await asyncio.sleep(0)
    found = ag.load(tmp_path / "run.safetensors")["generator"]
    assert (found == newer) == (later in ("asave", "save"))
    gc.collect()
    assert not serialization._saves_of_paths, "nothing of a path is kept"


async def test_saves_that_are_begun_together_leave_the_last(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    arrived, free = held_files(monkeypatch)
    generator = ag.Generator(1)
    state = ag.TrainingState(generator=generator)
    async with ag.Engine(threads=2):
        saves = [asyncio.ensure_future(state.asave(tmp_path / "run.safetensors"))]
        while not arrived.is_set():
            await asyncio.sleep(0)
        for _ in range(3):
            generator.uniform(3)
            saves.append(asyncio.ensure_future(state.asave(tmp_path / "run.safetensors")))
            await asyncio.sleep(0)
        await saves[-1]
        assert ag.load(tmp_path / "run.safetensors")["generator"] == generator.state_dict()
        free.set()
        await asyncio.gather(*saves)
    assert ag.load(tmp_path / "run.safetensors")["generator"] == generator.state_dict()
    assert [each.name for each in tmp_path.iterdir()] == ["run.safetensors"]


@pytest.mark.parametrize("refuses", ["model", "valid", "default_generator"])
async def test_a_refused_state_does_not_move_a_loader_whatever_part_refuses_it(refuses: str) -> None:
    def make() -> ag.TrainingState:
        loaders = {name: ag.data.DataLoader(iter(range(9)), 2, prefetch=0, generator=ag.Generator(1)) for name in ("train", "valid")}
        return ag.TrainingState(**loaders, model=nn.Linear(1, 1))

    other, state = make(), make()
    train = state.parts["train"]
    leases = train.leases()
    async with await anext(leases):
        pass
    lease = await anext(leases)
    before = state.state_dict()["train"]
    wrong: dict[str, Any] = {**other.state_dict(), refuses: {}}
    assert_raises(ArgumentError, None, state.load_state_dict, wrong)
    assert state.state_dict()["train"] == before
    async with lease as batch:
        assert batch.tolist() == [2, 3]
    async with await anext(leases) as batch:
        assert batch.tolist() == [4, 5], "the iterator goes on"
    await leases.aclose()
    state.load_state_dict(make().state_dict())
    assert train.state_dict()["batches"] == 0
