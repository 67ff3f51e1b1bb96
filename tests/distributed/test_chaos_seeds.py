"""Random programs forward and backward under drawn faults, some hundred seeds; ``test_chaos.py`` and ``make chaos`` run more, and more kinds."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator

import pytest

from tests.chaos.world import run_seed

pytestmark = pytest.mark.sim
PIECE = 25


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    """What workers log of the failures that are made here is no news."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize("first", range(0, 300, PIECE))
async def test_whatever_a_seed_does(first: int) -> None:
    for seed in range(first, first + PIECE):
        await asyncio.to_thread(run_seed, seed)
