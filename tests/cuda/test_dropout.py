"""Dropout with masks drawn on a simulated CUDA device: published numbers, frequencies, seeds, replay."""

from __future__ import annotations

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.array import empty
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.kernels import random as kernels
from aiograd.cuda.launching import launch
from aiograd.nn import functional
from aiograd.running.random import Generator


@pytest.mark.parametrize(
    ("key", "stream", "first", "wanted"),
    [
        (0, 0, 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),  # the known answers that the authors of Philox publish
        (0x299F31D0A4093822, 0x0370734413198A2E, None, None),
    ],
)
def test_the_numbers_are_philox(key: int, stream: int, first: int | None, wanted: tuple[int, ...] | None, device: CudaDevice) -> None:
    out = empty(device, (13,), np.uint32)
    launch(kernels.numbers, 1, 2, out, 13, np.uint64(key), np.uint64(stream), np.uint64(0), np.uint32(0), np.uint32(0), writes=(out,))
    found = device.to_host(out).tolist()
    assert found == [number for block in range(4) for number in philox((block, 0, stream % 2**32, stream >> 32), (key % 2**32, key >> 32))][:13]
    if wanted is not None:
        assert tuple(found[:4]) == wanted


def philox(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """As the paper writes it."""
    a, b, c, d = counter
    left, right = key
    for _ in range(10):
        high, low = divmod(0xD2511F53 * a, 2**32)
        upper, lower = divmod(0xCD9E8D57 * c, 2**32)
        a, b, c, d = upper ^ b ^ left, lower, high ^ d ^ right, low
        left, right = (left + 0x9E3779B9) % 2**32, (right + 0xBB67AE85) % 2**32
    return a, b, c, d


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_masks_drop_as_often_as_asked(dtype: type, device: CudaDevice) -> None:
    for p in (0.1, 0.5, 0.9):
        mask = Generator(1).dropout_mask((40, 250), p, dtype=dtype, device="cuda:0").numpy()
        assert mask.dtype == dtype
        assert set(np.unique(mask).tolist()) == {0.0, float(dtype(1 / (1 - p)))}
        assert abs((mask == 0).mean() - p) < 0.02
        halves = mask.reshape(2, -1) == 0
        assert abs((halves[0] == halves[1]).mean() - (p * p + (1 - p) * (1 - p))) < 0.03  # no pattern from one half to the other
    for p, wanted in ((0.0, 1.0), (1.0, 0.0)):
        assert (Generator(1).dropout_mask(7, p, device="cuda:0").numpy() == wanted).all()
    assert Generator(1).dropout_mask((0, 3), 0.5, device="cuda:0").shape == (0, 3)


def test_the_seed_decides_and_the_generator_moves_on(device: CudaDevice) -> None:
    one, other = Generator(7), Generator(7)
    first, second = (one.dropout_mask(100, 0.5, device="cuda:0").numpy() for _ in range(2))
    np.testing.assert_array_equal(first, other.dropout_mask(100, 0.5, device="cuda:0").numpy())
    assert (first != second).any()
    assert (first != Generator(8).dropout_mask(100, 0.5, device="cuda:0").numpy()).any()


async def test_what_is_dropped_takes_no_gradient(device: CudaDevice) -> None:
    x = ag.tensor(np.ones((8, 9), np.float32), device="cuda:0", requires_grad=True)
    before = device.statistics().uploads
    y = functional.dropout(x, 0.25, generator=Generator(3))
    await y.sum().backward()
    assert device.statistics().uploads == before
    np.testing.assert_array_equal((await x.grad).numpy(), (await y).numpy())


async def test_a_checkpointed_region_draws_the_same_mask_again(device: CudaDevice) -> None:
    x = ag.tensor(np.ones(50, np.float32), device="cuda:0", requires_grad=True)

    async def region(x: ag.Tensor) -> ag.Tensor:
        return functional.dropout(x * x, 0.5)

    y = await ag.checkpoint(region, x)
    await y.sum().backward()
    np.testing.assert_array_equal((await x.grad).numpy(), 2 * (await y).numpy())
