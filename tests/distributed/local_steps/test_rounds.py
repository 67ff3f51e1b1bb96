"""Rounds without faults: the bits of one process in any order of arrival, and every batch once."""

from __future__ import annotations

import contextlib
import types
from collections import Counter
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from tests.distributed.local_steps.learners import OUTER, Dropping, Learner, Oracle, behind, seed_of, service
from tests.distributed.workers import workers
from tests.documentation import TEXTS, blocks

NAMES = ("w0", "w1", "w2", "w3", "w4")
INNER: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.05, "momentum": 0.9}}


@contextlib.asynccontextmanager
async def trained(
    module: Any = Learner, *args: Any, count: int = 2, steps: int = 3, **options: Any
) -> AsyncIterator[tuple[dist.LocalSteps, list[dist.Worker]]]:
    """A training on workers of this process."""
    names = NAMES[:count]
    async with workers("driver", *names, service=service) as opened:
        async with await dist.LocalSteps.create(opened[0], names, module, *args, steps=steps, **{**INNER, **options}) as training:
            yield training, list(opened)


@pytest.mark.parametrize("count", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("module", [Learner, Dropping])
async def test_rounds_have_the_bits_of_one_process(module: Any, count: int) -> None:
    async with trained(module, count=count) as (training, opened):
        oracle = Oracle(module(), seed=seed_of(training))
        members = behind(training, opened)
        read: Counter[tuple[int, int]] = Counter()
        for number, name in enumerate(training.names):  # they arrive in another order than the names
            members[name]._training.module.waits = {0: 0.002 * (count - number)}
        async for record in training.rounds(epochs=2):
            await oracle.take(record)
            assert training.digest == oracle.digest
            assert await training.digests() == dict.fromkeys(training.names, oracle.digest)
            read.update(batch for name in record.members for batch in record.batches[name])
            for name in record.members:
                assert record.indices(name) == tuple(i for batch in record.batches[name] for i in oracle.indices(*batch))
            assert (record.late, record.lost) == ((), ())
        assert read == Counter({(epoch, number): 1 for epoch in range(2) for number in range(13)})
        assert training.epoch == 2 and training.version == oracle.bases.__len__() - 1
        state = await training.state_dict()
        expected = module().state_dict()
        assert list(state) == list(expected)
        assert all(state[path].numpy().tobytes() == oracle.base[path].tobytes() for path in state)


async def test_batches_are_dealt_in_the_order_of_names() -> None:
    async with trained(count=2, steps=4) as (training, _):
        records = [record async for record in training.rounds(1)]
        assert [dict(record.batches) for record in records] == [
            {"w0": ((0, 0), (0, 1), (0, 2), (0, 3)), "w1": ((0, 4), (0, 5), (0, 6), (0, 7))},
            {"w0": ((0, 8), (0, 9), (0, 10), (0, 11)), "w1": ((0, 12),)},
        ]
        assert [record.epoch for record in records] == [0, 0]
        record = await training.round()
        assert record.epoch == 1 and record.batches["w0"][0] == (1, 0)


async def test_rounds_go_on_over_the_end_of_an_epoch() -> None:
    async with trained(count=2, steps=4) as (training, _):
        records = [await training.round() for _ in range(2)]
        assert records[1].batches["w1"] == ((0, 12), (1, 0), (1, 1), (1, 2))
        assert training.epoch == 1


async def test_clipping_other_optimizers_and_other_outer_options() -> None:
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.01}, "outer_options": {"lr": 1.0}, "clip_norm": 0.1}
    async with trained(count=3, **options) as (training, _):
        oracle = Oracle(Learner(), {"lr": 0.01}, {"lr": 1.0}, optimizer=ag.optim.AdamW, clip_norm=0.1)
        for _ in range(3):
            await oracle.take(await training.round())
        assert training.digest == oracle.digest


async def test_members_that_begin_with_other_values_get_those_of_the_first() -> None:
    async with trained(Unlike, count=3) as (training, _):
        assert (await training.state_dict())["weight"].tolist() == [0.0, 0.0]
        assert set((await training.digests()).values()) == {training.digest}
        await training.round()
        assert len(set((await training.digests()).values())) == 1


@service.reference
class Unlike(ag.nn.Module):
    """A model that begins with other values on each worker."""

    def __init__(self) -> None:
        number = float(dist.current_worker().name[-1])
        self.weight = ag.nn.Parameter(ag.full((2,), number))
        self.register_buffer("hidden", ag.full((), number), persistent=False)

    def data(self) -> Any:
        return ag.data.DataLoader(np.ones((12, 2), np.float32), batch_size=2)

    def loss(self, x: Any) -> Any:
        return (x @ self.weight).mean()


COMPRESSED: dict[str, dict[str, Any]] = {
    "top-k": {"compress": dist.TopK(1 / 8, bits=4, block=64)},
    "top-k with decay": {"compress": dist.TopK(1 / 16, bits=2, block=64, decay=0.5)},
    "blockwise": {"compress": dist.Blockwise(8, block=64)},
    "answers too": {"compress": dist.Blockwise(4, block=64), "answer": dist.TopK(1 / 4, bits=8, block=64)},
    "answers only": {"answer": dist.Blockwise(8)},
    "overlap": {"overlap": 1},
    "overlap of all steps": {"overlap": 3},
    "everything": {"overlap": 2, "compress": dist.TopK(1 / 8, bits=4, block=64), "answer": dist.Blockwise(8)},
}


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("name", COMPRESSED)
async def test_compressors_and_overlap_have_the_bits_of_one_process(name: str, count: int) -> None:
    async with trained(Dropping, count=count, outer_options=OUTER, **COMPRESSED[name]) as (training, _):
        oracle = Oracle(Dropping(), seed=seed_of(training), **COMPRESSED[name])
        seen: set[str] = set()
        async for record in training.rounds(epochs=2):
            if record.members:
                await oracle.take(record, seen if "overlap" in COMPRESSED[name] else ())
                seen.update(record.members)
            else:
                assert name in ("overlap", "overlap of all steps", "everything") and not seen
            assert training.digest == oracle.digest
        assert training.epoch == 2
        assert await training.digests() == dict.fromkeys(training.names, oracle.digest)


async def test_the_first_call_with_overlap_commits_nothing() -> None:
    async with trained(count=2, overlap=1) as (training, _):
        before = training.digest
        record = await training.round()
        assert (record.number, record.members, record.batches) == (0, (), {}) and training.digest == before
        record = await training.round()
        assert (record.number, record.members, record.began) == (1, ("w0", "w1"), {"w0": 0, "w1": 0})
        record = await training.round()
        assert record.number == training.version == 2 and record.began == {"w0": 1, "w1": 1}


def test_default_outer_options() -> None:
    from aiograd.distributed.local_steps.controller import _outer_options

    assert _outer_options("SGD", None, None) == {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    assert _outer_options(ag.optim.SGD, None, dist.Blockwise()) == {"lr": 0.7, "momentum": 0.9, "nesterov": True}
    assert _outer_options(ag.optim.SGD, None, dist.TopK()) == {"lr": 0.9, "momentum": 0.5, "nesterov": True}
    assert _outer_options(ag.optim.Adam, None, dist.TopK()) == {} and _outer_options("SGD", {"lr": 1}, dist.TopK()) == {"lr": 1}


async def test_statistics_are_counted_and_logged() -> None:
    from aiograd.running.scalars import LOG

    async with trained(count=2) as (training, opened):
        assert training.statistics().utilisation == 0.0
        records = [record async for record in training.rounds(1)]
        figures = training.statistics()
        assert (figures.rounds, figures.members, figures.late, figures.lost, figures.rows) == (len(records), 2, 0, 0, 26)
        assert figures.bytes_sent > 1000 < figures.bytes_received
        assert 0 < figures.utilisation < 1 and figures.seconds_computing > 0
        logged = {name: entry for (_, name), entry in LOG.latest.items() if name.startswith("local_steps/")}
        assert logged["local_steps/loss"].step == len(records)
        assert logged["local_steps/loss"].value == pytest.approx(records[-1].loss)
        assert logged["local_steps/rounds"].value == len(records) and "local_steps/utilisation" in logged


async def test_the_model_of_the_guide_learns() -> None:
    module = types.ModuleType("slow_links")
    (block,) = (code for code in blocks("python", TEXTS["docs/guides/local-steps.md"]) if code.startswith("# slow_links.py"))
    exec(block, module.__dict__)  # noqa: S102 - the documentation's own code
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 1e-3}, "compress": dist.TopK(1 / 16, bits=4)}
    async with workers("driver", "w0", "w1", service=module.service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], module.Net, 16, steps=10, **options) as training:
            records = [record async for record in training.rounds(epochs=3)]
    assert len(records) == 6 and records[-1].loss < records[0].loss
