"""The work of rounds is done on threads, models are copied as often as the guide says, and a step that was cancelled writes nothing later."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.coordination.buckets import ParameterSpec
from aiograd.coordination.compression import Compressor
from aiograd.distributed.local_steps import base_coordinator, checkpoints, controller
from aiograd.distributed.local_steps.base_state import BaseState
from aiograd.distributed.local_steps.local_training import LocalTraining
from aiograd.distributed.local_steps.payload_form import PayloadForm
from aiograd.tensors import inplace
from aiograd.tensors.core import make
from tests.distributed.local_steps.learners import OUTER, Learner, Oracle, behind, seed_of, service
from tests.distributed.workers import workers


async def test_a_step_that_was_cancelled_on_its_thread_ends_before_the_next_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends, original = threading.Event(), threading.Event(), ag.optim.AdamW.step

    def waiting(self: Any, *args: Any) -> Any:
        begun.set()
        assert ends.wait(30.0)
        return original(self, *args)

    inner = {"lr": 0.05}
    async with workers("driver", "w0", service=service) as (driver, *others):
        made = dist.LocalSteps.create(driver, ["w0"], Learner, steps=2, optimizer=ag.optim.AdamW, optimizer_options=inner, outer_options=OUTER)
        async with await made as training:
            oracle = Oracle(Learner(), inner, optimizer=ag.optim.AdamW, seed=seed_of(training))
            monkeypatch.setattr(ag.optim.AdamW, "step", waiting)
            stepping = asyncio.ensure_future(training.round())
            while not begun.is_set():
                await asyncio.sleep(0.01)
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
            monkeypatch.undo()
            behind(training, others)["w0"]._training.module.waits = {0: 0.1}
            asyncio.get_running_loop().call_later(0.15, ends.set)
            await oracle.take(await training.round())
            assert training.digest == oracle.digest


WORK: dict[type, tuple[str, ...]] = {
    PayloadForm: ("pack", "unpack", "means", "formed"),
    BaseState: ("stage", "digest"),
    Compressor: ("encode", "decode"),
    LocalTraining: ("adopt", "_reset", "_copies", "_shift"),
    ag.optim.AdamW: ("step",),
}


@pytest.mark.parametrize("overlap", [0, 1])
async def test_the_loop_writes_no_values_in_a_round(overlap: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arithmetic, compression, digests and copies run on threads; a commit changes arrays for others."""
    loop_thread, seen, on_loop, written = threading.get_ident(), set(), [], Counter[bool]()

    def noted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            (on_loop.append if threading.get_ident() == loop_thread else seen.add)(name)
            return function(*args, **options)

        return call

    def write(tensor: Any, values: Any) -> Any:
        written[threading.get_ident() == loop_thread] += values.nbytes
        return original(tensor, values)

    original = inplace.write
    compress = dist.TopK(1 / 8, bits=4, block=64)
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "compress": compress, "answer": compress, "overlap": overlap}
    for cls, names in WORK.items():
        for name in names:
            monkeypatch.setattr(cls, name, noted(f"{cls.__name__}.{name}", getattr(cls, name)))
    monkeypatch.setattr(base_coordinator, "copies", noted("copies", base_coordinator.copies))
    monkeypatch.setattr(checkpoints, "copies", base_coordinator.copies)
    monkeypatch.setattr(controller, "copies", base_coordinator.copies)
    async with workers("driver", "w0", "w1", "w2", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, steps=2, **options) as training:
            await training.round()
            monkeypatch.setattr(inplace, "write", write)
            for _ in range(3):
                written.clear()
                await training.round()
                assert written[True] == 0 < written[False], "local steps write on threads"
            await training.add("w2")
            await training.checkpoint()
            await training.state_dict()
    assert not on_loop
    unseen = {"copies", *(f"{cls.__name__}.{name}" for cls, names in WORK.items() for name in names)} - seen
    assert unseen == (set() if overlap else {"LocalTraining._copies", "LocalTraining._shift"})


# ---------------------------------------------------------------- memory

COUNT, SIZE = 16, 1 << 17
SPECS = {f"layer{number}": ParameterSpec((SIZE,), np.dtype(np.float32)) for number in range(COUNT)}
MODEL = 4 * COUNT * SIZE


def peak_of(function: Callable[[], Any]) -> tuple[float, float, Any]:
    """The most memory that a call has held beyond what was there before, and what it leaves, in models; and its result."""
    tracemalloc.start()
    try:
        result = function()
        left, peak = tracemalloc.get_traced_memory()
        return peak / MODEL, left / MODEL, result
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("compress", [None, dist.TopK(1 / 16, bits=4), dist.Blockwise(4)], ids=repr)
def test_packing_and_adding_up_copy_a_model_as_often_as_they_have_to(compress: Any) -> None:
    random = np.random.default_rng(0)
    bases, mine = ([random.standard_normal(SIZE).astype(np.float32) for _ in range(COUNT)] for _ in range(2))
    form = PayloadForm(SPECS, compress)
    form.unpack(make(form.pack(bases, (), compress)[0]), compress)  # compiles
    peak, left, (payload, residuals) = peak_of(lambda: form.pack((one - other for one, other in zip(bases, mine, strict=True)), (), compress))
    kept, piece = payload.nbytes / MODEL + len(residuals) / COUNT, 1 / COUNT
    assert kept <= left < kept + 0.01 and peak < kept + 3 * piece, (peak, left)
    payloads, rows = [make(payload)] * 4, [1, 2, 3, 4]
    peak, left, _ = peak_of(lambda: [each.shape for each in form.sums(payloads, rows)])
    assert left < 0.01 and peak < 12 * piece, ("sums are in float64, one after the other", peak, left)
    peak, left, _ = peak_of(lambda: form.means("each", payloads, rows))
    assert left < 1.01 and peak < 1 + 12 * piece, (peak, left)
    peak, left, _ = peak_of(lambda: form.formed(payloads, rows, ()))
    assert peak < (1 + 12 * piece if compress is None else 0.01), ("the mean where it is shorter; payloads as they are are not added up", peak, left)


class Large(nn.Module):
    """One parameter of 4 MB."""

    def __init__(self) -> None:
        self.weight = nn.Parameter(ag.zeros((1024, 1024)))

    def data(self) -> Any:
        return ag.data.DataLoader(np.zeros((9, 1), np.float32), batch_size=1)

    def loss(self, x: Any) -> Any:
        return (self.weight * self.weight).mean()


INT8 = dist.Blockwise(8)
HELD = {"plain": (None, 0, 5.0), "compressed": (INT8, 0, 6.25), "overlap": (None, 1, 5.0), "overlap, compressed": (INT8, 1, 6.25)}


@pytest.mark.parametrize("name", HELD)
async def test_a_member_keeps_as_many_copies_of_the_parameters_as_the_guide_says(name: str) -> None:
    """The base, a copy for the next, twice the state of the outer optimizer; payloads and residuals; with overlap the values that were sent."""
    compress, overlap, most = HELD[name]
    module = Large()
    inner, outer = (ag.optim.SGD(module.parameters(), **options) for options in ({"lr": 0.1}, OUTER))
    size, found = module.weight.size * 4, []
    tracemalloc.start()
    try:
        training = LocalTraining(module, *(SimpleNamespace(optimizer=each) for each in (inner, outer)), "loss", "data", None, (compress, None))
        training.adopt(0, (1,), {}, is_new=True)
        await training.compute(1, [(0, 0)], is_fresh=False, carried=None, overlap=0)
        for number in (1, 2, 3, 4):
            computing = None
            if overlap:
                batches = [(0, number), (0, number + 1)]
                computing = asyncio.ensure_future(training.compute(number + 1, batches, is_fresh=False, carried=number, overlap=1))
                await asyncio.sleep(0.05)
            last = training.contribution(number)
            training.base.stage(training.form.means("each", [last.payload], [1]), {})
            training.go_on(last)
            del last
            await (computing or training.compute(number + 1, [(0, number)], is_fresh=False, carried=None, overlap=0))
            found.append(tracemalloc.get_traced_memory()[0] / size)
    finally:
        tracemalloc.stop()
    assert abs(max(found) - most) < 0.1, found
