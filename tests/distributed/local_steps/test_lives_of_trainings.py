"""Trainings with local steps on networks and workers that fail, seed by seed."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.distributed.local_steps.scenario import LocalStepsRun


@pytest.mark.sim
@pytest.mark.parametrize("block", range(8))
def test_rounds_have_the_bits_of_one_process_whatever_fails(block: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(4 * block, 4 * block + 4):
        seen += LocalStepsRun(seed).run()
    assert seen["rounds"] > 8 and seen["left out"] + seen["cancelled"] + seen["no quorum"] > 0, seen
