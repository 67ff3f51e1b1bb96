"""Batch samplers: the order of an epoch is a function of its generator, and what a sampler gives is checked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.data import DataLoader, PoissonSampler
from aiograd.errors import ArgumentError, DataError
from tests.data.test_leases import leased
from tests.data.test_loader import taken
from tests.support import assert_awaiting_raises, assert_raises


class Shuffled:
    """Batches of 3 of 12 in an order of the default generator, drawn as the batches are asked for."""

    def __iter__(self) -> Iterator[list[int]]:
        left = list(range(12))
        while left:
            ag.default_generator().fork()
            chosen = ag.randperm(len(left)).tolist()[:3]
            yield [left[i] for i in chosen]
            left = [index for i, index in enumerate(left) if i not in chosen]


def made(**options: Any) -> DataLoader:
    return DataLoader(range(12), batch_sampler=Shuffled(), **options)


@pytest.mark.parametrize("read", [leased, taken])
@pytest.mark.parametrize("own", [True, False])
async def test_a_sampler_that_draws_gives_the_same_batches_after_a_resume(own: bool, read: Any) -> None:
    def make() -> DataLoader:
        return made(generator=ag.Generator(5) if own else None)

    ag.seed(3)
    whole = make()
    epochs = [await read(whole) for _ in range(2)]
    assert epochs[0] != epochs[1] and all(sorted(i for batch in epoch for i in batch) == list(range(12)) for epoch in epochs)
    for stop in range(5):
        ag.seed(3)
        loader = make()
        found = await read(loader, stop) if stop else []
        state, default = json.dumps(loader.state_dict()), ag.default_generator().state_dict()
        other = make()
        other.load_state_dict(json.loads(state))
        ag.default_generator().load_state_dict(default)
        assert found + (await read(other) if other.epoch == 0 else []) == epochs[0]
        assert await read(other) == epochs[1]


async def test_a_sampler_that_draws_gives_every_rank_the_same_batches() -> None:
    whole = await leased(made(generator=ag.Generator(5)))
    parts = [await leased(made(generator=ag.Generator(5), prefetch=rank), rank=rank, size=2) for rank in range(2)]
    assert [one + other for one, other in zip(*parts, strict=True)] == whole


async def test_draws_of_a_sampler_are_none_of_a_batch() -> None:
    seen: list[Any] = []

    class Forking(Shuffled):
        def __iter__(self) -> Iterator[list[int]]:
            for i in range(3):
                seen.extend(fork.uniform().item() for fork in (ag.default_generator(), *ag.default_generator().spawn(3)))
                yield [i]

    loader = DataLoader(range(3), batch_sampler=Forking())
    async for lease in loader.leases():
        async with lease:
            seen.append(ag.rand(()).item())
    assert len(seen) == len(set(seen)) == 15


async def test_states_of_sampled_loaders_from_before_they_had_an_order_are_taken() -> None:
    def make() -> DataLoader:
        return DataLoader(range(6), batch_sampler=[[0, 1], [2, 3], [4, 5]])

    loader = make()
    for most in (2, None):
        found = await leased(loader, most)
        other = make()
        other.load_state_dict({**loader.state_dict(), "order": None, "draws": None})
        assert (found if most else []) + await leased(other) == [[0, 1], [2, 3], [4, 5]]


async def test_an_error_of_a_sampler_does_not_end_the_epoch() -> None:
    class Flaky(Shuffled):
        fails = True

        def __iter__(self) -> Iterator[list[int]]:
            for number, batch in enumerate(super().__iter__()):
                if number == 2 and self.fails:
                    self.fails = False
                    raise OSError("no index")
                yield batch

    whole = await leased(made(generator=ag.Generator(5)))
    loader = DataLoader(range(12), batch_sampler=Flaky(), generator=ag.Generator(5), prefetch=0)
    found = []
    with pytest.raises(OSError, match="no index"):
        async for lease in loader.leases():
            async with lease as batch:
                found.append(batch.tolist())
    assert found + await leased(loader) == whole and loader.epoch == 1
    once = DataLoader(range(12), batch_sampler=iter(Flaky()), prefetch=0)
    Flaky.fails = True
    await assert_awaiting_raises(OSError, "no index", leased(once))
    await assert_awaiting_raises(DataError, "the batch sampler .generator. is an iterator, which raised", leased(once))
    once = DataLoader(range(12), batch_sampler=iter(Shuffled()), prefetch=0)
    await leased(once, 2)
    once.load_state_dict(once.state_dict())
    await assert_awaiting_raises(DataError, "has gone past the place of a loaded state", leased(once))


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("size", [1, 2])
async def test_a_batch_without_indices_is_an_error_where_nothing_says_what_its_rows_are(size: int, workers: int) -> None:
    for rank in range(size):
        loader = DataLoader([1, 2], batch_sampler=[[0], [], [1]], workers=workers)
        await assert_awaiting_raises(DataError, "found a batch of no indices; no example of list says", leased(loader, rank=rank, size=size))
        assert loader.state_dict()["batches"] == 1 and loader.epoch == 0
        assert await leased(DataLoader([1, 2], batch_sampler=[[0], []], collate=len, workers=workers), rank=rank, size=size) == [1 - rank, 0]
        assert (await leased(DataLoader(np.ones(2), batch_sampler=[[]], workers=workers), rank=rank, size=size)) == [[]]
    sampler = PoissonSampler(3, 0.01, 4, generator=ag.Generator(0))
    assert_raises(DataError, "found a batch of no indices", lambda: list(DataLoader([1, 2, 3], batch_sampler=sampler)))
    await assert_awaiting_raises(DataError, "found a batch of no indices", DataLoader([1, 2], 2).read([]))


@pytest.mark.parametrize("wrong", [None, 3, iter([0, 1]), "01"])
async def test_what_is_no_list_of_indices_is_an_error_and_no_end(wrong: Any) -> None:
    loader = DataLoader([1, 2], batch_sampler=[[0], wrong, [1]])
    await assert_awaiting_raises(DataError, r"the batch sampler gave .* as batch 1; expected a list of indices", leased(loader))
    assert_raises(DataError, "expected a list of indices", lambda: list(loader))


def test_a_state_with_an_order_is_not_for_a_loader_without_one() -> None:
    sampled = made()
    next(iter(sampled))
    assert_raises(ArgumentError, None, DataLoader(range(12), 3).load_state_dict, sampled.state_dict())
