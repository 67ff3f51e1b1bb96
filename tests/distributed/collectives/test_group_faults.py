"""Groups on networks that fail: results are right to the bit, or there is a typed error on every member in time. See `tests.chaos.collectives`."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.chaos.collectives import PROTECTIONS, catch, run_group
from tests.sweeps import swept

#: seeds of one test
BLOCK = 4


@pytest.mark.sim
@pytest.mark.parametrize("block", range(10))
def test_whatever_fails_results_are_right_or_all_members_are_told(block: int) -> None:
    outcomes: Counter[str] = Counter()
    for seed in range(BLOCK * block, BLOCK * (block + 1)):
        outcomes.update(run_group(seed).outcomes.values())
    assert outcomes["done"] > 2, outcomes


@pytest.mark.sim
@pytest.mark.parametrize("protection", swept(PROTECTIONS, keep=2))
def test_a_protection_of_collectives_that_is_missing_is_missed(protection: str) -> None:
    assert catch(protection, 60).seed is not None, f"nothing goes wrong without {protection}"
