"""Optimizers on a simulated CUDA device: one launch for many parameters, the same bits for each as alone, values as on the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import optim
from aiograd.cuda.device import CudaDevice
from aiograd.cuda.operations.optimizer import MAX_MEMBERS
from tests.support import assert_awaiting_raises
from tests.tolerance import tolerance

SHAPES: list[tuple[int, ...]] = [(3,), (5, 7), (1,), (40,), (0,), (2, 3, 4), (), *[(i + 1,) for i in range(MAX_MEMBERS)]]
MAKE: dict[str, Callable[[Any], Any]] = {
    "sgd": lambda p: optim.SGD(p, lr=0.1),
    "momentum": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.01),
    "nesterov": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "dampening": lambda p: optim.SGD(p, lr=0.1, momentum=0.9, dampening=0.2, maximize=True),
    "adam": lambda p: optim.Adam(p, lr=0.1),
    "amsgrad": lambda p: optim.Adam(p, lr=0.1, amsgrad=True, weight_decay=0.1),
    "adamw": lambda p: optim.AdamW(p, lr=0.1, maximize=True),
}


def train(place: str | None, name: str, shapes: list[tuple[int, ...]], dtype: type, which: slice = slice(None)) -> list[np.ndarray]:
    """Parameters and their state after three steps; of those that `which` chooses, the others are drawn and left alone."""
    rng = np.random.default_rng(1)
    params = [ag.tensor(rng.standard_normal(shape).astype(dtype), device=place, requires_grad=True) for shape in shapes]
    optimizer = MAKE[name](params[which])
    for _ in range(3):
        gradients = [ag.tensor(rng.standard_normal(p.shape).astype(dtype), device=place) for p in params]
        optimizer.step(dict(zip(params[which], gradients[which], strict=True)))
    tensors = list(params[which])
    for p in params[which]:
        tensors += [value for value in optimizer.state.get(p, {}).values() if isinstance(value, ag.Tensor)]
    return [tensor.detach().to("cpu").numpy() for tensor in tensors]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
@pytest.mark.parametrize("name", MAKE)
def test_steps_are_those_of_the_host(name: str, dtype: type, device: CudaDevice) -> None:
    wanted = train(None, name, SHAPES, np.float32 if dtype is np.float16 else dtype)
    found = train("cuda:0", name, SHAPES, dtype)
    most = {2: 2e-2, 4: 1e-5, 8: 1e-12}[np.dtype(dtype).itemsize]
    for ours, theirs in zip(found, wanted, strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours, theirs, rtol=most, atol=most)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("name", MAKE)
def test_the_bits_do_not_depend_on_what_is_updated_together(name: str, device: CudaDevice) -> None:
    together = train("cuda:0", name, SHAPES, np.float32)
    for place in (0, 1, 5, 6):
        alone = train("cuda:0", name, SHAPES, np.float32, slice(place, place + 1))
        assert alone[0].tobytes() == together[place].tobytes()


@pytest.mark.parametrize("name", MAKE)
def test_a_step_is_few_launches(name: str, device: CudaDevice) -> None:
    params = [ag.tensor(np.ones(shape, np.float32), device="cuda:0", requires_grad=True) for shape in SHAPES]
    gradients = {p: ag.tensor(np.ones(p.shape, np.float32), device="cuda:0") for p in params}
    optimizer = MAKE[name](params)
    optimizer.step(gradients)  # makes the state
    device.synchronize()
    before = len(device.driver.history)
    optimizer.step(gradients)
    device.synchronize()
    assert len(device.driver.history) - before == 2  # 22 parameters of at least one element, 16 at a time


def test_what_a_kernel_cannot_update_is_left_to_arithmetic(device: CudaDevice) -> None:
    x = np.arange(12.0).reshape(3, 4)
    turned = ag.tensor(x, device="cuda:0").T.requires_grad_()
    other = ag.tensor(x, device="cuda:0", requires_grad=True)
    optimizer = optim.Adam([turned, other], lr=0.1)
    optimizer.step({turned: ag.ones((4, 3), device="cuda:0", dtype=np.float64), other: ag.ones((3, 4), device="cuda:0", dtype=np.float64)})
    np.testing.assert_allclose(turned.detach().to("cpu").numpy().T, other.detach().to("cpu").numpy(), rtol=tolerance(np.float64))
    np.testing.assert_allclose(other.detach().to("cpu").numpy(), x - 0.1, rtol=tolerance(np.float32))


async def test_a_step_counts_as_a_modification(device: CudaDevice) -> None:
    p = ag.tensor(np.ones(3, np.float32), device="cuda:0", requires_grad=True)
    y = (p * p).sum()
    optim.SGD([p], lr=0.1).step({p: ag.ones(3, device="cuda:0")})
    await assert_awaiting_raises(ag.errors.ModifiedError, None, y.backward())


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16])
def test_clipping_by_the_norm_is_few_launches(dtype: type, device: CudaDevice) -> None:
    rng = np.random.default_rng(5)
    drawn = [(rng.standard_normal(shape) * 3).astype(dtype) for shape in SHAPES]

    def clipped(place: str | None, kind: type, limit: float) -> tuple[float, list[np.ndarray]]:
        params = [ag.tensor(np.zeros(shape, kind), device=place, requires_grad=True) for shape in SHAPES]
        for p, values in zip(params, drawn, strict=True):
            p.grad = ag.tensor(values.astype(kind), device=place)
        norm = optim.clip_grad_norm_(params, limit)
        return norm.item(), [p.grad.to("cpu").numpy() for p in params]

    for limit in (2.0, 1e6):
        device.synchronize()
        device.driver.history.clear()
        norm, found = clipped("cuda:0", dtype, limit)
        assert len(device.driver.history) <= 8, device.driver.history
        wanted_norm, wanted = clipped(None, np.float64, limit)
        most = tolerance(dtype)
        np.testing.assert_allclose(norm, wanted_norm, rtol=tolerance(np.float32) if dtype is np.float16 else most)
        for ours, theirs in zip(found, wanted, strict=True):
            assert ours.dtype == dtype
            np.testing.assert_allclose(ours, theirs, rtol=most, atol=most)
    assert device.statistics().fallbacks == {}


def test_clipping_gradients_of_several_dtypes(device: CudaDevice) -> None:
    params = [ag.tensor(np.zeros(3, dtype), device="cuda:0", requires_grad=True) for dtype in (np.float32, np.float64)]
    for p in params:
        p.grad = ag.tensor(np.full(3, 2.0, p.dtype), device="cuda:0")
    assert optim.clip_grad_norm_(params, 1.0).item() == pytest.approx(24**0.5)
    for p in params:
        np.testing.assert_allclose(p.grad.to("cpu").numpy(), 2 / 24**0.5, rtol=tolerance(np.float32))
