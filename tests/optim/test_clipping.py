"""Gradient clipping."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, ArgumentTypeError, GradientError
from aiograd.running.offloading import ready
from tests.support import assert_raises
from tests.tolerance import tolerance
from tests.toy_device import ToyDevice

G1, G2 = np.array([[3.0, -4.0]]), np.array([12.0])


def params(*grads: Any) -> list[nn.Parameter]:
    made = [nn.Parameter(np.zeros_like(g)) for g in grads]
    for p, g in zip(made, grads, strict=True):
        p.grad = ag.tensor(g)
    return [*made, nn.Parameter([1.0])]


@pytest.mark.parametrize(("norm_type", "norm"), [(2.0, 13.0), (1.0, 19.0), (math.inf, 12.0), (3.0, (27 + 64 + 1728) ** (1 / 3))])
def test_the_norm_of_all_gradients_together_is_limited(norm_type: float, norm: float) -> None:
    owners = params(G1, G2)
    found = optim.clip_grad_norm_(owners, 6.5, norm_type)
    assert found.item() == pytest.approx(norm)
    for p, g in zip(owners, (G1, G2), strict=False):
        np.testing.assert_allclose(p.grad.numpy(), g * 6.5 / (norm + 1e-6))
    assert owners[2].grad is None


def test_gradients_below_the_limit_stay_as_they_are() -> None:
    owners = params(G1, G2)
    before = [p.grad for p in owners]
    assert optim.clip_grad_norm_(owners, 14.0).item() == 13.0
    assert all(p.grad is g for p, g in zip(owners, before, strict=True))
    assert optim.clip_grad_norm_([nn.Parameter([1.0])], 1.0).item() == 0.0
    assert optim.clip_grad_norm_(owners[1], 1.0).item() == 12.0


def test_dtypes_stay() -> None:
    owners = params(G1.astype(np.float32), (G2 * 100).astype(np.float16))
    optim.clip_grad_norm_(owners, 1.0)
    assert [p.grad.dtype for p in owners[:2]] == [np.float32, np.float16]
    optim.clip_grad_value_(owners, 0.001)
    assert [p.grad.dtype for p in owners[:2]] == [np.float32, np.float16]
    complex_ = params(np.array([3 + 4j]))
    assert optim.clip_grad_norm_(complex_, 2.5).item() == 5.0
    assert complex_[0].grad.numpy()[0] == pytest.approx(1.5 + 2j, rel=1e-6)


def test_a_norm_that_is_not_finite_is_an_error_when_asked_for() -> None:
    owners = params(np.array([math.inf, 1.0]))
    assert_raises(GradientError, "inf", optim.clip_grad_norm_, owners, 1.0, error_if_nonfinite=True)
    assert owners[0].grad.tolist() == [math.inf, 1.0]


def test_values_are_limited() -> None:
    owners = params(G1, G2)
    optim.clip_grad_value_(owners, 3.5)
    assert [p.grad.tolist() for p in owners[:2]] == [[[3.0, -3.5]], [3.5]]


@pytest.mark.parametrize(
    "wrong", [lambda p: optim.clip_grad_norm_(p, -1.0), lambda p: optim.clip_grad_norm_(p, 1.0, 0), lambda p: optim.clip_grad_value_(p, -1)]
)
def test_wrong_limits_are_refused(wrong: Any) -> None:
    assert_raises(ArgumentError, None, lambda: wrong(params(G1)))


async def test_on_a_device_nothing_is_waited_for() -> None:
    with ToyDevice("toy:0"):
        p = nn.Parameter(ag.tensor(np.zeros((1, 2)), device="toy:0"))
        p.grad = ag.tensor(G1, device="toy:0")
        norm = optim.clip_grad_norm_([p], 2.5)
        await ready([norm, p.grad])
        assert norm.item() == 5.0
        np.testing.assert_allclose(p.grad.to("cpu").numpy(), G1 / 2, rtol=tolerance(np.float32))
        optim.clip_grad_value_([p], 1.0)
        await p.grad
        np.testing.assert_allclose(p.grad.to("cpu").numpy(), [[1.0, -1.0]])


def test_a_mapping_of_parameters_to_gradients_is_clipped_in_place() -> None:
    """As gradients of a distributed context are kept; ``grad`` of the parameters is no matter then."""
    owners = [nn.Parameter([0.0]), nn.Parameter([0.0, 0.0])]
    grads = {owners[0]: ag.tensor([3.0]), owners[1]: ag.tensor([4.0, 12.0])}
    assert optim.clip_grad_norm_(grads, 6.5).item() == 13.0
    np.testing.assert_allclose(np.concatenate([grad.numpy() for grad in grads.values()]), [1.5, 2.0, 6.0], rtol=1e-6)
    assert all(owner.grad is None for owner in owners)
    optim.clip_grad_value_(grads, 1.75)
    assert grads[owners[1]].tolist() == [1.75, 1.75]
    assert optim.clip_grad_norm_({}, 1.0).item() == 0.0


@pytest.mark.parametrize("wrong", [None, 3, "ab", [None], [3.0], {"a": 3.0}, nn.Linear(1, 1)])
def test_what_has_no_gradients(wrong: Any) -> None:
    for clip in (optim.clip_grad_norm_, optim.clip_grad_value_):
        with pytest.raises(ArgumentTypeError, match=rf"{clip.__name__}: expected Tensors, or a mapping of Tensors to their gradients, found"):
            clip(wrong, 1.0)
    with pytest.raises(ArgumentTypeError, match=r"found Linear: write parameters\(\)"):
        optim.clip_grad_norm_(nn.Linear(1, 1), 1.0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("limits", "error"),
    [
        ((None,), ArgumentTypeError), (("1",), ArgumentTypeError), (([1.0],), ArgumentTypeError), ((math.nan,), ArgumentError),
        ((-1.0,), ArgumentError), ((1.0, None), ArgumentTypeError), ((1.0, math.nan), ArgumentError), ((1.0, 0.0), ArgumentError),
    ],
)  # fmt: skip
def test_limits_that_are_none(limits: tuple[Any, ...], error: type[Exception]) -> None:
    owners = params(G1)
    with pytest.raises(error, match=r"clip_grad_norm_\(.*: expected a"):
        optim.clip_grad_norm_(owners, *limits)
    if len(limits) == 1:
        with pytest.raises(error, match=r"clip_grad_value_\(clip_value=.*: expected a"):
            optim.clip_grad_value_(owners, *limits)
    assert owners[0].grad.tolist() == G1.tolist()
