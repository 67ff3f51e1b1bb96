"""Losses on a simulated device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.cuda.device import CudaDevice
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import functional as F
from aiograd.ops.op import ROWS, rule_names
from tests.cuda.fused_on_both import fused_agrees
from tests.cuda.on_both import DOMAINS, row_agrees
from tests.support import assert_raises
from tests.tolerance import tolerance


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("shape", [(4, 5), (3, 40), (5,), (2, 3, 4)], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
def test_agree_with_the_host(device: CudaDevice, dtype: str, shape: tuple[int, ...], reduction: str, rng: np.random.Generator) -> None:
    axis = 1 if len(shape) > 1 else 0
    classes = shape[axis]
    x = rng.standard_normal(shape) * 2
    target = np.asarray(rng.integers(0, classes, shape[:axis] + shape[axis + 1 :]))
    target.reshape(-1)[-1] = classes - 1  # so that some weight remains
    ignoring = target.copy()
    ignoring.reshape(-1)[:1] = -100
    weight = rng.uniform(0, 1, classes)
    weight[0] = 0.0
    cases: list[dict[str, Any]] = [{"target": target}, {"target": target.astype(np.int32), "weight": weight}]
    if len(shape) > 1:
        cases.append({"target": ignoring, "weight": weight})
    for case in cases:
        fused_agrees(device, "nll_loss", (x,), {**case, "reduction": reduction}, dtype)
        fused_agrees(device, "cross_entropy", (x,), {**case, "reduction": reduction}, dtype)
        fused_agrees(device, "cross_entropy", (x,), {**case, "reduction": reduction, "label_smoothing": 0.2}, dtype)


def test_cross_entropy_is_two_launches_forward_and_one_backward(device: CudaDevice, rng: np.random.Generator) -> None:
    fused = device.fused("cross_entropy")
    assert fused is not None
    x, target = device.from_host(rng.standard_normal((4, 5)).astype(np.float32)), np.array([0, 1, 4, 2])
    loss, *kept = fused.forward(x, target, None, -100, 0.0, "mean")
    fused.rules["logits"](loss, x, target, None, -100, 0.0, "mean", *kept)
    device.synchronize()
    assert device.driver.history == ["cross_entropy_forward", "sum_whole", "cross_entropy_logits"]


def test_what_counts_for_nothing_adds_nothing(device: CudaDevice) -> None:
    x = np.array([[0.0, -np.inf, 1.0], [2.0, 0.5, -np.inf]], np.float32)
    options: dict[str, Any] = {"target": np.array([1, 0]), "weight": np.array([1.0, 0.0, 1.0], np.float32)}
    wanted = ROWS["cross_entropy"].forward(x, **options)
    found = ag.nn.functional.cross_entropy(ag.tensor(x, device="cuda:0"), **options)
    np.testing.assert_allclose(found.numpy(), wanted, rtol=tolerance(np.float32))
    for smoothing in (0.3, 1.0):
        options |= {"target": np.array([0, 0]), "weight": np.array([1.0, 0.0, 2.0]), "label_smoothing": smoothing}
        wanted = ROWS["cross_entropy"].forward(x[:1], **(options | {"target": np.array([0])}))
        found = ag.nn.functional.cross_entropy(ag.tensor(x[:1], device="cuda:0"), **(options | {"target": np.array([0])}))
        np.testing.assert_allclose(found.numpy(), wanted, rtol=tolerance(np.float32))
    ignored = ag.nn.functional.cross_entropy(ag.tensor(x, device="cuda:0"), np.array([-100, -100]))
    assert np.isnan(ignored.numpy())  # a mean over nothing


def test_wrong_targets_are_refused_at_the_call(device: CudaDevice) -> None:
    x = ag.tensor(np.zeros((2, 3), np.float32), device="cuda:0")
    assert_raises(ArgumentError, "target 3 is not a class", lambda: ag.nn.functional.cross_entropy(x, np.array([0, 3])))
    assert_raises(ShapeError, "one value per class", lambda: ag.nn.functional.nll_loss(x, np.array([0, 2]), weight=np.ones(2, np.float32)))
    assert_raises(ArgumentError, "reduction", lambda: ag.nn.functional.nll_loss(x, np.array([0, 2]), reduction="some"))


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_targets_that_only_the_device_has_seen(device: CudaDevice, name: str, reduction: str, rng: np.random.Generator) -> None:
    x, target = rng.standard_normal((4, 3)).astype(np.float32), np.array([0, -100, 2, 1])
    fused = device.fused(name)
    assert fused is not None
    ((argument, rule),) = fused.rules.items()
    for weight in (None, np.array([0.5, 2.0, 1.0], np.float32)):
        results = []
        for given in (target, device.from_host(target.astype(np.int32))):
            options: dict[str, Any] = {"target": given, "weight": weight, "ignore_index": -100, "reduction": reduction}
            options |= {"label_smoothing": 0.1} if name == "cross_entropy" else {}
            here = device.from_host(x)
            out, *kept = fused.forward(here, **options)
            known = options | {argument: here, f"{argument}_shape": x.shape, f"{argument}_dtype": x.dtype, "out": out}
            known |= dict(zip(fused.residuals, kept, strict=True))
            gradient = rule(device.from_host(np.full(out.shape, 0.7, np.float32)), *[known[each] for each in rule_names(rule)])
            results.append((device.to_host(out), device.to_host(gradient)))
        for ours, wanted in zip(*results, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=tolerance(np.float32))
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("name", ["cross_entropy", "nll_loss"])
def test_a_target_on_the_device_that_is_no_class_gives_nan(device: CudaDevice, name: str, rng: np.random.Generator) -> None:
    x = device.from_host(rng.standard_normal((3, 3)).astype(np.float32))
    fused = device.fused(name)
    assert fused is not None
    ((argument, rule),) = fused.rules.items()
    options: dict[str, Any] = {"target": device.from_host(np.array([0, 3, -1])), "weight": None, "ignore_index": -100, "reduction": "none"}
    options |= {"label_smoothing": 0.0} if name == "cross_entropy" else {}
    out, *kept = fused.forward(x, **options)
    np.testing.assert_array_equal(np.isnan(device.to_host(out)), [False, True, True])
    known = options | {argument: x, f"{argument}_shape": x.shape, f"{argument}_dtype": x.dtype, "out": out}
    known |= dict(zip(fused.residuals, kept, strict=True))
    gradient = rule(device.from_host(np.ones(3, np.float32)), *[known[each] for each in rule_names(rule)])
    np.testing.assert_array_equal(np.isnan(device.to_host(gradient)), [[False] * 3, [True] * 3, [True] * 3])
    assert_raises(ShapeError, "targets have shape", lambda: ROWS[name](x, target=device.from_host(np.array([0, 1]))))


@pytest.mark.parametrize("name", sorted(name for name in DOMAINS if "loss" in name or "entropy" in name))
def test_rows(device: CudaDevice, name: str) -> None:
    for variety in range(DOMAINS[name].varieties):
        row_agrees(device, name, variety, "float32")


async def test_through_tensors(device: CudaDevice, rng: np.random.Generator) -> None:
    x, target = rng.standard_normal((4, 3)).astype(np.float32), np.array([0, 2, 1, -100])

    async def gradient(place: str) -> np.ndarray:
        t = ag.tensor(x, device=place, requires_grad=True)
        f = ag.nn.functional
        wanted = ag.tensor(np.abs(x) % 1, device=place)
        loss = f.cross_entropy(t, target, label_smoothing=0.1) + f.nll_loss(f.log_softmax(t, 1), target) + f.mse_loss(t, wanted)
        await (loss + f.binary_cross_entropy_with_logits(t, wanted) + f.huber_loss(t, wanted) + f.l1_loss(t, wanted)).backward()
        return (await t.grad).to("cpu").numpy()

    np.testing.assert_allclose(await gradient("cuda:0"), await gradient("cpu"), rtol=1e-4, atol=1e-6)
    assert device.statistics().fallbacks == {}


@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
async def test_targets_on_the_device_stay_there(device: CudaDevice, reduction: str, weighted: bool) -> None:
    """Forward, backward and the backward of that; nothing is read, so nothing needs to be awaited."""
    logits, classes = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32), np.array([0, 1, 3, 2, 1])
    weight = np.array([1, 2, 0.5, 1], np.float32) if weighted else None
    found = []
    for place in (None, "cuda:0"):
        x, y = ag.tensor(logits, device=place, requires_grad=True), ag.tensor(classes, device=place)
        loss = F.cross_entropy(x, y, weight=weight, reduction=reduction).sum()
        loss = loss + F.nll_loss(F.log_softmax(x, axis=1), y, reduction=reduction).sum()
        (first,) = await ag.grad(loss, [x], create_graph=True)
        (second,) = await ag.grad((first * first).sum(), [x])
        found.append([(await each.detach()).to("cpu").numpy() for each in (loss, first, second)])
    for ours, wanted in zip(found[1], found[0], strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=1e-4, atol=1e-5)
    assert device.statistics().fallbacks == {} and device.statistics().downloads == 3


@pytest.mark.parametrize("there", [True, False])
async def test_where_every_target_is_ignored_the_gradients_are_zero(device: CudaDevice, there: bool) -> None:
    target = ag.tensor(np.full(4, -100))
    for function in (F.nll_loss, F.cross_entropy):
        x = ag.tensor(np.ones((4, 3), np.float32), device="cuda:0", requires_grad=True)
        loss = function(x, target.to("cuda:0") if there else target)
        (first,) = await ag.grad(loss, [x], create_graph=True)
        assert not (await first.detach()).to("cpu").numpy().any() and np.isnan((await loss.detach()).to("cpu").item())
        if first.requires_grad:
            (second,) = await ag.grad(first.sum(), [x])
            assert not (await second).to("cpu").numpy().any()
