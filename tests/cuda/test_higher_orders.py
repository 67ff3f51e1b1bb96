"""Gradients of gradients on a simulated device: fused kernels are differentiated by the plain rules, which run on the device as well."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice

X = np.random.default_rng(0).standard_normal((4, 6)).astype(np.float32)
TARGET = np.array([0, 1, 2, 5])

F = ag.nn.functional
FUNCTIONS: dict[str, Callable[[ag.Tensor], ag.Tensor]] = {
    "cross_entropy": lambda t: F.cross_entropy(t, TARGET),
    "nll_loss": lambda t: F.nll_loss(F.log_softmax(t, 1), TARGET),
    "layer_norm": lambda t: (F.layer_norm(t, (6,)) ** 3).sum(),
    "rms_norm": lambda t: (F.rms_norm(t, (6,)) ** 3).sum(),
    "group_norm": lambda t: (F.group_norm(t, 2) ** 3).sum(),
    "logsumexp": lambda t: (ag.logsumexp(t, axis=1) ** 2).sum(),
    "cumsum": lambda t: (ag.cumulative_sum(t, axis=1) ** 3).sum(),
    "cumprod": lambda t: (ag.cumulative_prod(t, axis=1) ** 2).sum(),
    "prod": lambda t: (ag.prod(t, axis=1) ** 2).sum(),
    "var": lambda t: (ag.var(t, axis=1) ** 2).sum(),
    "max": lambda t: (ag.max(t, axis=1) ** 3).sum(),
}


@pytest.mark.parametrize("name", FUNCTIONS)
async def test_second_derivatives_are_those_of_the_host(device: CudaDevice, name: str) -> None:
    async def second(place: str) -> np.ndarray:
        t = ag.tensor(X, device=place, requires_grad=True)
        (first,) = await ag.grad(FUNCTIONS[name](t), (t,), create_graph=True)
        (result,) = await ag.grad((first * first).sum(), (t,))
        return (await result).to("cpu").numpy()

    wanted = await second("cpu")
    np.testing.assert_allclose(await second("cuda:0"), wanted, atol=2e-6 * (1 + np.abs(wanted).max()))
    assert device.statistics().fallbacks == {}
