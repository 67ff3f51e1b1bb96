"""RMSprop, Adagrad, Adadelta, NAdam and RAdam against the formulas written out in scalar numpy, in float64; what all optimizers promise of them."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError
from aiograd.running.offloading import ready
from tests.support import assert_raises, draw
from tests.toy_device import ToyDevice

Array = np.ndarray[Any, Any]


def rmsprop(p: Array, grads: list[Array], o: dict[str, Any]) -> Array:
    square, mean, last, alpha = 0.0 * p, 0.0 * p, 0.0 * p, o.get("alpha", 0.99)
    for g in grads:
        d = g + o.get("weight_decay", 0.0) * p
        square, mean = alpha * square + (1 - alpha) * d**2, alpha * mean + (1 - alpha) * d
        last = o.get("momentum", 0.0) * last + d / (np.sqrt(square - (mean**2 if o.get("centered") else 0)) + 1e-8)
        p = p - o["lr"] * last
    return p


def adagrad(p: Array, grads: list[Array], o: dict[str, Any]) -> Array:
    total = 0.0 * p + o.get("initial_accumulator_value", 0.0)
    for t, g in enumerate(grads):
        d = (-g if o.get("maximize") else g) + o.get("weight_decay", 0.0) * p
        total = total + d**2
        p = p - o["lr"] / (1 + t * o.get("lr_decay", 0.0)) * d / (np.sqrt(total) + 1e-10)
    return p


def adadelta(p: Array, grads: list[Array], o: dict[str, Any]) -> Array:
    square, steps, rho, eps = 0.0 * p, 0.0 * p, o.get("rho", 0.9), o.get("eps", 1e-6)
    for g in grads:
        d = (-g if o.get("maximize") else g) + o.get("weight_decay", 0.0) * p
        square = rho * square + (1 - rho) * d**2
        step = d * np.sqrt((steps + eps) / (square + eps))
        steps = rho * steps + (1 - rho) * step**2
        p = p - o["lr"] * step
    return p


def nadam(p: Array, grads: list[Array], o: dict[str, Any]) -> Array:
    m, v, product, (b1, b2) = 0.0 * p, 0.0 * p, 1.0, o.get("betas", (0.9, 0.999))
    for t, g in enumerate(grads, 1):
        p, d = (p * (1 - o["lr"] * o["weight_decay"]), g) if o.get("decoupled_weight_decay") else (p, g + o.get("weight_decay", 0.0) * p)
        now, following = (b1 * (1 - 0.5 * 0.96 ** (k * o.get("momentum_decay", 4e-3))) for k in (t, t + 1))
        product = float(np.float32(product) * np.float32(now))  # PyTorch keeps it in float32
        m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
        ahead = following * m / (1 - product * following) + (1 - now) * d / (1 - product)
        p = p - o["lr"] * ahead / (np.sqrt(v / (1 - b2**t)) + 1e-8)
    return p


def radam(p: Array, grads: list[Array], o: dict[str, Any]) -> Array:
    m, v, (b1, b2) = 0.0 * p, 0.0 * p, o.get("betas", (0.9, 0.999))
    longest = 2 / (1 - b2) - 1
    for t, g in enumerate(grads, 1):
        p, d = (p * (1 - o["lr"] * o["weight_decay"]), g) if o.get("decoupled_weight_decay") else (p, g + o.get("weight_decay", 0.0) * p)
        m, v = b1 * m + (1 - b1) * d, b2 * v + (1 - b2) * d**2
        length = longest - 2 * t * b2**t / (1 - b2**t)
        step = m / (1 - b1**t)
        if length > 5:
            step = step * math.sqrt((length - 4) * (length - 2) * longest / (longest - 4) / (longest - 2) / length)
            step = step * math.sqrt(1 - b2**t) / (np.sqrt(v) + 1e-8)
        p = p - o["lr"] * step
    return p


RULES: list[tuple[Any, Any, dict[str, Any]]] = [
    (optim.RMSprop, rmsprop, {"lr": 0.1}),
    (optim.RMSprop, rmsprop, {"lr": 0.1, "alpha": 0.8, "momentum": 0.9, "weight_decay": 0.2, "centered": True}),
    (optim.RMSprop, rmsprop, {"lr": 0.1, "centered": True}),
    (optim.Adagrad, adagrad, {"lr": 0.1}),
    (optim.Adagrad, adagrad, {"lr": 0.1, "lr_decay": 0.2, "weight_decay": 0.1, "initial_accumulator_value": 0.5, "maximize": True}),
    (optim.Adadelta, adadelta, {"lr": 1.0}),
    (optim.Adadelta, adadelta, {"lr": 0.5, "rho": 0.8, "eps": 1e-4, "weight_decay": 0.1, "maximize": True}),
    (optim.NAdam, nadam, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.NAdam, nadam, {"lr": 0.1, "momentum_decay": 0.3, "weight_decay": 0.1, "decoupled_weight_decay": True}),
    (optim.RAdam, radam, {"lr": 0.1, "weight_decay": 0.1}),
    (optim.RAdam, radam, {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1, "decoupled_weight_decay": True}),
]
TORCHS: list[tuple[Any, dict[str, Any], list[float]]] = [
    (optim.Adadelta, {"lr": 1.0}, [-1.017092894097104, -0.016784039816809298, 0.9908005067631195]),
    (optim.Adadelta, {"lr": 0.5, "rho": 0.8, "weight_decay": 0.1}, [-1.0070351031436602, -0.0061666135698014105, 0.9962700421143161]),
    (optim.NAdam, {"lr": 0.05}, [-1.2063133089744336, -0.2036661563439754, 0.8631711977272464]),
    (optim.NAdam, {"lr": 0.05, "weight_decay": 0.1, "momentum_decay": 0.1}, [-1.1464364125348694, -0.2025285913399842, 0.855025850069368]),
]
SHAPES = [(), (3,), (40, 500), (0, 2), (2, 2)]


@pytest.mark.parametrize(("cls", "naive", "options"), RULES)
def test_updates_follow_the_formula_and_go_on_from_their_state(cls: Any, naive: Any, options: dict[str, Any]) -> None:
    starts = [draw(*shape, at=i) for i, shape in enumerate(SHAPES)]
    params = [nn.Parameter(start.copy()) for start in starts]
    optimizer = cls(params, **options)
    grads: list[list[Array]] = [[] for _ in params]
    for step in range(7):
        if step == 3:  # as after a restart: other objects, the same numbers
            saved = copy.deepcopy(optimizer.state_dict())
            params = [nn.Parameter(p.detach().clone()) for p in params]
            optimizer = cls(params, lr=9.0)
            optimizer.load_state_dict(saved)
        for i, p in enumerate(params):
            grads[i].append(draw(*p.shape, at=100 + 10 * step + i))
            p.grad = ag.tensor(grads[i][-1])
        optimizer.step()
    for p, start, grad in zip(params, starts, grads, strict=True):
        np.testing.assert_allclose(p.detach().numpy(), naive(start, grad, options), rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(("cls", "naive", "options"), RULES)
async def test_a_device_computes_the_same(cls: Any, naive: Any, options: dict[str, Any]) -> None:
    with ToyDevice("toy:0"):
        start, grads = draw(2, 3), [draw(2, 3, at=step + 1) for step in range(6)]
        p = nn.Parameter(ag.tensor(start, device="toy:0"))
        optimizer = cls([p], **options)
        for grad in grads:
            p.grad = ag.tensor(grad, device="toy:0")
            optimizer.step()
        await ready([p, optimizer.state_dict()])
        np.testing.assert_allclose(p.detach().to("cpu").numpy(), naive(start, grads, options), rtol=1e-9)


def test_numbers_of_pytorch() -> None:
    """As PyTorch 2.13 gives them after five steps."""
    start, grads = np.linspace(-1, 1, 3), [np.sin(np.arange(3) + 0.3 * step) for step in range(5)]
    for cls, options, expected in TORCHS:
        p = nn.Parameter(start.copy())
        optimizer = cls([p], **options)
        for grad in grads:
            p.grad = ag.tensor(grad)
            optimizer.step()
        np.testing.assert_allclose(p.tolist(), expected, rtol=1e-14)


def test_states_of_pytorch_load() -> None:
    p = nn.Parameter(np.zeros(2))
    optimizer = optim.NAdam([p], lr=0.1)
    values = {"step": np.float32(3.0), "mu_product": np.array(0.25), "exp_avg": np.ones(2), "exp_avg_sq": np.ones(2)}
    optimizer.load_state_dict({"state": {0: values}, "param_groups": [{"params": [0], "lr": 0.5, "foreach": None}]})
    assert (optimizer.state[p]["step"], optimizer.state[p]["mu_product"], optimizer.param_groups[0]["lr"]) == (3, 0.25, 0.5)


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        (optim.RMSprop, {"alpha": -1.0}), (optim.RMSprop, {"momentum": float("nan")}), (optim.Adagrad, {"lr_decay": -1.0}),
        (optim.Adagrad, {"initial_accumulator_value": -1.0}), (optim.NAdam, {"betas": (0.9, 1.0)}), (optim.NAdam, {"momentum_decay": -1.0}),
        (optim.RAdam, {"betas": (0.9,)}), (optim.RAdam, {"eps": -1.0}),
        (optim.Adadelta, {"rho": 1.5}), (optim.Adadelta, {"eps": -1.0}),
    ],
)  # fmt: skip
def test_options_that_make_no_sense_are_refused(cls: Any, options: dict[str, Any]) -> None:
    assert_raises(ArgumentError, None, lambda: cls([nn.Parameter([1.0])], **options))
