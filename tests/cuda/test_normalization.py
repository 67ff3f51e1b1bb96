"""Layer, RMS, group and batch normalisation on a simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from tests.cuda.fused_on_both import fused_agrees
from tests.tolerance import tolerance

DTYPES = ["float32", "float64", "float16"]


def normal(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("name", "shape", "parameters", "statics"),
    [
        ("layer_norm", (3, 5), (5,), {}), ("layer_norm", (2, 3, 40), (40,), {"eps": 1e-3}), ("layer_norm", (4, 3, 2), (3, 2), {"ndims": 2}),
        ("layer_norm", (300, 3), (3,), {}), ("rms_norm", (3, 5), (5,), {}), ("rms_norm", (2, 2, 40), (2, 40), {"ndims": 2, "eps": 1e-2}),
        ("group_norm", (2, 6, 3), (6,), {"num_groups": 3}), ("group_norm", (3, 4, 2, 2), (4,), {"num_groups": 1}),
        ("group_norm", (5, 4), (4,), {"num_groups": 2}), ("batch_norm", (6, 3), (3,), {}), ("batch_norm", (3, 2, 5), (2,), {"eps": 1e-3}),
        ("batch_norm", (2, 3, 4, 5), (3,), {}),
    ],
)  # fmt: skip
def test_agrees_with_the_host(
    device: CudaDevice,
    name: str,
    shape: tuple[int, ...],
    parameters: tuple[int, ...],
    statics: dict[str, Any],
    dtype: str,
    rng: np.random.Generator,
) -> None:
    x, weight, bias = normal(rng, *shape) * 2 + 1, normal(rng, *parameters), normal(rng, *parameters)
    both = (x, weight) if name == "rms_norm" else (x, weight, bias)
    fused_agrees(device, name, both, statics, dtype)
    fused_agrees(device, name, (x, *[None] * (len(both) - 1)), statics, dtype)
    if len(both) == 3:
        fused_agrees(device, name, (x, None, bias), statics, dtype)


def test_a_large_mean_loses_no_digits(device: CudaDevice, rng: np.random.Generator) -> None:
    x = (normal(rng, 2, 16) + 4096).astype(np.float32)
    fused = device.fused("layer_norm")
    assert fused is not None
    out, mean, _ = fused.forward(device.from_host(x), None, None, 1, 1e-5)
    exact = x.astype(np.float64)
    exact = (exact - exact.mean(1, keepdims=True)) / np.sqrt(exact.var(1, keepdims=True) + 1e-5)
    np.testing.assert_allclose(device.to_host(out), exact, atol=2e-3)
    np.testing.assert_allclose(device.to_host(mean), x.astype(np.float64).mean(1), rtol=tolerance(np.float32))


def test_layer_norm_is_one_launch_forward_and_one_for_the_gradient_of_its_input(device: CudaDevice, rng: np.random.Generator) -> None:
    fused = device.fused("layer_norm")
    assert fused is not None
    x, weight, bias = (device.from_host(normal(rng, *shape).astype(np.float32)) for shape in ((4, 6), (6,), (6,)))
    out, mean, rstd = fused.forward(x, weight, bias, 1, 1e-5)
    (rule,) = fused.joint.values()
    rule(out, (True, False, False), x, weight, mean, rstd, 1, 1e-5)
    device.synchronize()
    assert device.driver.history == ["standardize", "standardize_backward"]
    gradients = rule(out, (False, True, True), x, weight, mean, rstd, 1, 1e-5)
    device.synchronize()
    assert gradients[0] is None and device.driver.history[2:] == ["standardize_weights"]
    assert gradients[1].base is None and gradients[2].base is None  # parameters keep them as they are
    rule(out, (False, True, False), x, weight, mean, rstd, 1, 1e-5)
    device.synchronize()
    assert len(device.driver.history) == 4  # products are computed where they are summed


@pytest.mark.parametrize("shape", [(0, 3), (2, 0, 3)])
def test_nothing_to_normalise(device: CudaDevice, shape: tuple[int, ...]) -> None:
    fused = device.fused("layer_norm")
    assert fused is not None
    x, weight = device.from_host(np.zeros(shape, np.float32)), device.from_host(np.ones(3, np.float32))
    out, mean, rstd = fused.forward(x, weight, weight, 1, 1e-5)
    assert out.shape == shape
    (rule,) = fused.joint.values()
    dx, dweight, _ = rule(out, (True, True, True), x, weight, mean, rstd, 1, 1e-5)
    assert dx.shape == shape and dweight.shape[-1] == 3


@pytest.mark.parametrize("shape", [(3, 6), (2, 6, 3)])
async def test_through_tensors(device: CudaDevice, shape: tuple[int, ...], rng: np.random.Generator) -> None:
    x, w, b = (normal(rng, *s).astype(np.float32) for s in (shape, shape[1:2], shape[1:2]))

    async def gradients(place: str) -> list[np.ndarray]:
        tensors = [ag.tensor(each, device=place, requires_grad=True) for each in (x, w, b)]
        normed = ag.nn.functional.group_norm(tensors[0], 2, tensors[1], tensors[2])
        loss = (ag.nn.functional.layer_norm(normed, shape[-1:]) ** 3).sum()
        await loss.backward()
        await ag.ready([each.grad for each in tensors])
        return [each.grad.to("cpu").numpy() for each in tensors]

    for ours, wanted in zip(await gradients("cuda:0"), await gradients("cpu"), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=2e-4)
    assert device.statistics().fallbacks == {}
