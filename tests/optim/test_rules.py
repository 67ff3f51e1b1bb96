"""SGD, Adam and AdamW against the formulas written out in scalar numpy, one parameter at a time, in float64."""

from __future__ import annotations

import itertools
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
#: of one element, small, several axes, and larger than what is packed or updated by the shortest way
SHAPES = [(), (3,), (2, 3), (40, 500), (0, 2)]
STEPS = 4


def naive_sgd(p: Array, grads: list[Array], o: dict[str, Any]) -> Array:
    p, v = p.copy(), None
    for g in grads:
        d = -g if o.get("maximize") else g
        d = d + o.get("weight_decay", 0.0) * p
        momentum = o.get("momentum", 0.0)
        if momentum:
            v = d if v is None else momentum * v + (1 - o.get("dampening", 0.0)) * d
            d = d + momentum * v if o.get("nesterov") else v
        p = p - o["lr"] * d
    return p


def naive_adam(p: Array, grads: list[Array], o: dict[str, Any], decoupled: bool) -> Array:
    p, m, v, top = p.copy(), 0.0 * p, 0.0 * p, 0.0 * p
    beta1, beta2 = o.get("betas", (0.9, 0.999))
    decay = o.get("weight_decay", 0.01 if decoupled else 0.0)
    for t, g in enumerate(grads, 1):
        d = -g if o.get("maximize") else g
        if decoupled:
            p = p - o["lr"] * decay * p
        else:
            d = d + decay * p
        m, v = beta1 * m + (1 - beta1) * d, beta2 * v + (1 - beta2) * d**2
        top = np.maximum(top, v)
        square = top if o.get("amsgrad") else v
        p = p - o["lr"] * (m / (1 - beta1**t)) / (np.sqrt(square / (1 - beta2**t)) + o.get("eps", 1e-8))
    return p


SGD_OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "maximize": True},
    {"lr": 0.1, "weight_decay": 0.2},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1},
    {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True, "weight_decay": 0.1},
]
ADAM_OPTIONS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "weight_decay": 0.3},
    {"lr": 0.1, "amsgrad": True, "betas": (0.5, 0.6)},
    {"lr": 0.1, "maximize": True, "weight_decay": 0.3, "eps": 0.1},
]
RULES = [(optim.SGD, o) for o in SGD_OPTIONS] + [(cls, o) for cls in (optim.Adam, optim.AdamW) for o in ADAM_OPTIONS]


def wanted(cls: type[optim.Optimizer], p: Array, grads: list[Array], options: dict[str, Any]) -> Array:
    return naive_sgd(p, grads, options) if cls is optim.SGD else naive_adam(p, grads, options, cls is optim.AdamW)


@pytest.mark.parametrize(("cls", "options"), RULES)
def test_updates_follow_the_formula(cls: Any, options: dict[str, Any]) -> None:
    starts = [draw(*shape, at=i) for i, shape in enumerate(SHAPES)]
    params = [nn.Parameter(start.copy()) for start in starts]
    memory = [p.detach().numpy() for p in params]
    optimizer = cls(params, **options)
    grads: list[list[Array]] = [[] for _ in params]
    for step in range(STEPS):
        for i, p in enumerate(params):
            if (i, step) == (1, 2):
                p.grad = None  # a parameter without a gradient is left as it is, and its state too
                continue
            grads[i].append(draw(*p.shape, at=100 + 10 * step + i))
            p.grad = ag.tensor(grads[i][-1])
        versions = [p.version for p in params]
        optimizer.step()
        assert [p.version - version for p, version in zip(params, versions, strict=True)] == [0 if p.grad is None else 1 for p in params]
    for p, start, grad, array in zip(params, starts, grads, memory, strict=True):
        np.testing.assert_allclose(array, wanted(cls, start, grad, options), rtol=1e-10, atol=1e-12)
        assert np.shares_memory(p.detach().numpy(), array) or not array.size
        assert p.grad is None or p.grad.tolist() == grad[-1].tolist(), "a step reads gradients and does not touch them"


@pytest.mark.parametrize(("cls", "options"), [(optim.SGD, {"lr": 0.1, "momentum": 0.9}), (optim.Adam, {"lr": 0.1}), (optim.SGD, {"lr": 0.1})])
def test_arrays_that_are_not_contiguous_are_updated_in_place(cls: Any, options: dict[str, Any]) -> None:
    start, grads = draw(4, 6), [draw(3, 4, at=step + 1) for step in range(STEPS)]
    buffer = start.copy()
    p = nn.Parameter(buffer[:, ::2].T)
    optimizer = cls([p], **options)
    for grad in grads:
        p.grad = ag.tensor(np.asfortranarray(grad))
        optimizer.step()
    np.testing.assert_allclose(buffer[:, ::2].T, wanted(cls, start[:, ::2].T, grads, options), rtol=1e-10)
    np.testing.assert_array_equal(buffer[:, 1::2], start[:, 1::2])


@pytest.mark.parametrize(("cls", "options"), [(optim.SGD, {"lr": 0.1}), (optim.SGD, {"lr": 0.1, "momentum": 0.5}), (optim.Adam, {"lr": 0.1})])
def test_a_complex_number_is_updated_as_two_real_ones(cls: Any, options: dict[str, Any]) -> None:
    start, grad = draw(3, 2) + 1j * draw(3, 2, at=1), draw(3, 2, at=2) + 1j * draw(3, 2, at=3)
    p = nn.Parameter(start.copy())
    optimizer = cls([p], **options)
    p.grad = ag.tensor(grad)
    optimizer.step()
    np.testing.assert_allclose(p.detach().numpy().real, wanted(cls, start.real, [grad.real], options), rtol=1e-12)
    np.testing.assert_allclose(p.detach().numpy().imag, wanted(cls, start.imag, [grad.imag], options), rtol=1e-12)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_every_floating_dtype_keeps_its_own(dtype: Any) -> None:
    for cls, options in RULES:
        params = [nn.Parameter(np.ones(4, dtype)), nn.Parameter(np.ones((2, 2), dtype))]
        optimizer = cls(params, **options)
        for _ in range(2):
            for p in params:
                p.grad = ag.tensor(np.full(p.shape, 0.5, dtype))
            optimizer.step()
        assert all(p.dtype == dtype and np.isfinite(p.detach().numpy()).all() for p in params)
        assert all(value.dtype == dtype for state in optimizer.state.values() for value in state.values() if isinstance(value, ag.Tensor))


@pytest.mark.parametrize(("cls", "options"), RULES)
async def test_a_device_computes_the_same(cls: Any, options: dict[str, Any]) -> None:
    with ToyDevice("toy:0"):
        start, grads = draw(2, 3), [draw(2, 3, at=step + 1) for step in range(STEPS)]
        p = nn.Parameter(ag.tensor(start, device="toy:0"))
        optimizer = cls([p], **options)
        for grad in grads:
            p.grad = ag.tensor(grad, device="toy:0")
            optimizer.step()
        assert all(t.device == "toy:0" for state in optimizer.state.values() for t in state.values() if isinstance(t, ag.Tensor))
        await ready([p, optimizer.state_dict()])
        np.testing.assert_allclose(p.detach().to("cpu").numpy(), wanted(cls, start, grads, options), rtol=1e-10)


@pytest.mark.parametrize(("cls", "options"), RULES)
def test_packing_changes_no_bit(cls: Any, options: dict[str, Any]) -> None:
    def run(together: bool) -> list[list[Any]]:
        params = [nn.Parameter(draw(n, at=n).astype(np.float32)) for n in (3, 7, 50, 9)]
        optimizers = [cls(params, **options)] if together else [cls([p], **options) for p in params]
        for step, present in enumerate(([0, 1, 2, 3], [0, 1, 2, 3], [1, 2], [0, 1, 2, 3], [0, 1, 2, 3])):
            for i, p in enumerate(params):
                p.grad = ag.tensor(draw(*p.shape, at=step).astype(np.float32)) if i in present else None
            for optimizer in optimizers:
                optimizer.step()
        return [p.tolist() for p in params]

    assert run(together=True) == run(together=False)


def test_options_of_a_group_may_change_between_steps() -> None:
    p = nn.Parameter(np.zeros(2))
    optimizer = optim.SGD([p], lr=1.0)
    for lr in (1.0, 0.25):
        optimizer.param_groups[0]["lr"] = lr
        p.grad = ag.tensor([1.0, 2.0], dtype=np.float64)
        optimizer.step()
    assert p.tolist() == [-1.25, -2.5]


@pytest.mark.parametrize(
    ("cls", "options"),
    [
        *itertools.product([optim.SGD, optim.Adam, optim.AdamW], [{"lr": -1.0}, {"lr": float("nan")}, {"weight_decay": -1.0}]),
        (optim.SGD, {"momentum": -0.5}),
        (optim.SGD, {"nesterov": True}),
        (optim.SGD, {"nesterov": True, "momentum": 0.9, "dampening": 0.1}),
        (optim.Adam, {"betas": (0.9, 1.0)}),
        (optim.Adam, {"betas": (0.9,)}),
        (optim.AdamW, {"eps": -1e-8}),
    ],
)
def test_options_that_make_no_sense_are_refused(cls: Any, options: dict[str, Any]) -> None:
    assert_raises(ArgumentError, None, lambda: cls([nn.Parameter([1.0])], **options))
