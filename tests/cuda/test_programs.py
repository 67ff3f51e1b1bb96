"""Every row with all its rules, and training steps of models, on a simulated CUDA device against the host."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from aiograd.cuda.device import CudaDevice
from tests.cuda.programs import DOMAINS, NOT_ON_DEVICES, TRAINING, differentiate
from tests.sweeps import swept
from tests.tolerance import assert_close


def close(found: Any, wanted: Any, what: object) -> None:
    """Both are absent, or equal up to the roundings of a whole program."""
    if wanted is None or found is None:
        assert found is wanted, what
        return
    assert_close(found.detach().to("cpu").numpy(), wanted.detach().numpy(), 200, what)


@pytest.mark.one_loop
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("name", swept(sorted(set(DOMAINS) - NOT_ON_DEVICES), keep=60))
async def test_every_row_and_rule_agrees_with_the_host(name: str, device: CudaDevice) -> None:
    for variety in range(DOMAINS[name].varieties):
        wanted = await differentiate(name, variety, "cpu")
        found = await differentiate(name, variety, "cuda:0")
        assert all(each is None or each.device == "cuda:0" for each in found)
        for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            close(ours, theirs, (name, variety, i))


@pytest.mark.parametrize("name", sorted(TRAINING))
async def test_training_follows_the_host(name: str, device: CudaDevice) -> None:
    wanted, found = await TRAINING[name](None), await TRAINING[name]("cuda:0")
    for i, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
        np.testing.assert_allclose(ours.numpy(), theirs.numpy(), rtol=2e-4, atol=2e-5, err_msg=f"{name} {i}")
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("name", swept(sorted(TRAINING), keep=2))
async def test_training_gives_the_same_bits_every_time(name: str, device: CudaDevice) -> None:
    first, second = await TRAINING[name]("cuda:0"), await TRAINING[name]("cuda:0")
    assert [each.numpy().tobytes() for each in first] == [each.numpy().tobytes() for each in second]
