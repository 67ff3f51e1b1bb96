"""`PoissonSampler`: every example in every batch with the same probability, independently."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError
from tests.support import assert_raises


def test_examples_are_drawn_independently_at_the_rate() -> None:
    sampler = ag.data.PoissonSampler(200, 0.1, 2000, generator=ag.Generator(0))
    member = np.zeros((2000, 200))
    for row, batch in zip(member, sampler, strict=True):
        assert batch.dtype == np.int64 and (np.diff(batch) > 0).all()
        row[batch] = 1
    assert len(sampler) == 2000
    np.testing.assert_allclose(member.mean(0), 0.1, atol=0.04)
    assert member.sum(1).var() == pytest.approx(200 * 0.1 * 0.9, rel=0.1), "lengths are binomial"
    together = np.cov(member[:, :20].T) - np.eye(20) * 0.09
    assert np.abs(together).max() < 0.015


def test_loops_are_new_draws_of_a_generator() -> None:
    first, second = (ag.data.PoissonSampler(50, 0.5, 3, generator=ag.Generator(4)) for _ in range(2))
    loops = [[batch.tolist() for batch in sampler] for sampler in (first, second, first)]
    assert loops[0] == loops[1] != loops[2]
    assert [batch.tolist() for batch in ag.data.PoissonSampler(4, 1.0, 2)] == [[0, 1, 2, 3]] * 2
    assert list(ag.data.PoissonSampler(4, 0.5, 0)) == []
    assert any(not len(batch) for batch in ag.data.PoissonSampler(2, 0.01, 50, generator=ag.Generator(0))), "batches may be empty"
    ag.seed(3)
    drawn = [batch.tolist() for batch in ag.data.PoissonSampler(50, 0.5, 3)]
    ag.seed(3)
    assert drawn == [batch.tolist() for batch in ag.data.PoissonSampler(50, 0.5, 3)]


async def test_a_loader_reads_the_batches_of_a_sampler() -> None:
    sampler = ag.data.PoissonSampler(40, 0.3, 5, generator=ag.Generator(0))
    wanted = [batch.tolist() for batch in ag.data.PoissonSampler(40, 0.3, 5, generator=ag.Generator(0))]
    loader = ag.data.DataLoader(np.arange(40), batch_sampler=sampler)
    assert [batch.tolist() async for batch in loader] == wanted


@pytest.mark.parametrize(
    "wrong", [{"dataset_size": 0}, {"dataset_size": 1.5}, {"sample_rate": 0.0}, {"sample_rate": 1.5}, {"sample_rate": "1"}, {"steps": -1}]
)
def test_settings_out_of_range(wrong: dict[str, Any]) -> None:
    (name,) = wrong
    assert_raises(ArgumentError, f"{name}=", ag.data.PoissonSampler, **{"dataset_size": 10, "sample_rate": 0.1, "steps": 3, **wrong})
    assert_raises(ArgumentTypeError, "Generator", ag.data.PoissonSampler, 10, 0.1, 3, generator=1)
