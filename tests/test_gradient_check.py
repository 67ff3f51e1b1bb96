"""`gradcheck` and `gradgradcheck` must pass what is right and catch what is wrong, one mistake at a time."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.functional.gradient_check import gradcheck, gradgradcheck
from tests.support import assert_awaiting_raises

rng = np.random.default_rng(0)


def leaf(shape: tuple[int, ...] = (2, 3), dtype: Any = np.float64) -> Any:
    values = rng.normal(size=shape) + (1j * rng.normal(size=shape) if np.dtype(dtype).kind == "c" else 0)
    return ag.tensor(values.astype(dtype), requires_grad=True)


def function(forward: Any, backward: Any, *, materialize: bool = True) -> Any:
    """A custom function whose forward is ``forward(*tensors)`` and whose backward is ``backward(inputs, *grads)``."""

    class F(ag.Function):
        inline = True

        @staticmethod
        def forward(ctx: Any, *tensors: Any) -> Any:
            ctx.save_for_backward(*tensors)
            ctx.set_materialize_grads(materialize)
            return forward(*tensors)

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return backward(ctx.saved_tensors, *grads)

    return F.apply


# Right rules pass


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
async def test_right_gradients_pass(check: Any) -> None:
    x, y, s = leaf(), leaf((3,)), leaf(())
    assert await check(lambda x, y, s: (np.sin(x) * y, np.exp(x).sum() * s, s * s), (x, y, s))
    assert await check(lambda x: np.tanh(x @ x.T), x)
    assert await check(lambda x, k, none: x**k, (x, 3, None))
    assert await check(lambda x, y: x * y, (x, ag.tensor(rng.normal(size=(2, 3)))))
    assert x.grad is None


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
async def test_complex_functions_holomorphic_or_not(check: Any) -> None:
    z, w, x = leaf((2,), np.complex128), leaf((2,), np.complex128), leaf((2,))
    assert await check(lambda z, w, x: (z * w * x, np.conj(z) * z, np.abs(z), np.real(w) * x, np.exp(z).sum()), (z, w, x))


@pytest.mark.parametrize("check", [gradcheck, gradgradcheck])
async def test_asynchronous_functions(check: Any) -> None:
    async def f(x: Any) -> Any:
        await asyncio.sleep(0)
        return x * x

    assert await check(f, leaf())


async def test_functions_that_run_passes_themselves() -> None:
    async def penalty(x: Any) -> Any:
        (g,) = await ag.grad((x**3).sum(), x, create_graph=True)
        return (g * g).sum()

    assert await gradcheck(penalty, leaf())
    assert await gradgradcheck(penalty, leaf())


async def test_the_same_tensor_as_several_outputs() -> None:
    def f(x: Any) -> Any:
        y = x * 2.0
        return y, y, x

    assert await gradcheck(f, leaf())


async def test_empty_inputs_and_outputs() -> None:
    assert await gradcheck(lambda x: (x * 2.0, x.sum()), leaf((0, 2)))


async def test_outputs_that_do_not_require_grad_are_left_alone_beside_ones_that_do() -> None:
    assert await gradcheck(lambda x: (x * 2.0, np.floor(x.detach())), leaf())


async def test_outputs_that_are_constant_indeed() -> None:
    assert await gradcheck(lambda x: np.floor(x.detach()), ag.tensor([0.5, 1.5], dtype=np.float64, requires_grad=True))


async def test_a_backward_that_takes_none_for_outputs_without_gradient() -> None:
    right = function(
        lambda x, y: (x * y, x + y),
        lambda saved, g, h: tuple(
            None if g is None and h is None else (g * other if g is not None else 0.0 * other) + (0.0 * other if h is None else h)
            for other in (saved[1], saved[0])
        ),
        materialize=False,
    )
    assert await gradcheck(right, (leaf(), leaf()))


# Wrong rules do not


async def failure(fn: Any, inputs: Any, check: Any = gradcheck, **options: Any) -> str:
    caught = await assert_awaiting_raises(ag.errors.GradcheckError, None, check(fn, inputs, **options))
    assert await check(fn, inputs, raise_exception=False, **options) is False
    return str(caught)


async def test_a_wrong_gradient_is_named_with_its_worst_elements() -> None:
    big = leaf((20, 20))
    wrong = function(lambda x, y: x * y, lambda saved, g: (g * saved[1], g * saved[0] * 1.01))
    message = await failure(lambda x, y: (x + y, wrong(x, y)[0]), (big, big.detach().requires_grad_()))
    assert "output 1 with respect to input 1" in message
    assert message.count("numerical") == 1 + 5
    assert len(message) < 1500
    row = int(np.argmax(np.abs(big.detach().numpy()[0])))
    assert f"[{row}, {row}]" in message
    value = big.detach().numpy()[0, row]
    assert f"numerical {value: .5g}"[:-1] in message


@pytest.mark.parametrize(
    "backward",
    [
        lambda saved, g: g,
        lambda saved, g: g * saved[0],
        lambda saved, g: -2.0 * g * saved[0],
        lambda saved, g: None,
        lambda saved, g: g * saved[0] * np.nan,
    ],
)
async def test_wrong_gradients_of_all_kinds(backward: Any) -> None:
    message = await failure(function(lambda x: x * x, backward), leaf())
    assert "output 0 with respect to input 0" in message


async def test_a_gradient_that_is_not_conjugated() -> None:
    z = leaf((2,), np.complex128)
    message = await failure(function(lambda z: z * z, lambda saved, g: 2.0 * g * saved[0]), z)
    assert "complex numbers count as two" in message
    assert await gradcheck(function(lambda z: z * z, lambda saved, g: 2.0 * g * np.conj(saved[0])), z)


async def test_a_graph_cut_off_by_mistake() -> None:
    message = await failure(lambda x: x.detach() * 2.0, leaf())
    assert "No output of fn requires grad" in message
    message = await failure(lambda x, y: x.detach() * y, (leaf(), leaf()))
    assert "input 0" in message


async def test_a_wrong_second_derivative() -> None:
    x = leaf()
    # right to first order; the gradient is cut off from x
    wrong = function(lambda x: x**3, lambda saved, g: g * (3.0 * saved[0].detach() ** 2))
    assert await gradcheck(wrong, x)
    message = await failure(wrong, x, gradgradcheck)
    assert message.startswith("gradgradcheck: Jacobian mismatch for output 0 with respect to input 0")


async def test_forward_that_is_not_deterministic() -> None:
    generator = np.random.default_rng(0)
    message = await failure(lambda x: x * generator.normal(), leaf())
    assert "fn is not deterministic" in message


async def test_backward_that_is_not_deterministic() -> None:
    jitter = itertools.count(1)
    fn = function(lambda x: x * 2.0, lambda saved, g: g * (2.0 + 1e-12 * next(jitter)))
    message = await failure(fn, leaf())
    assert "backward is not deterministic" in message
    assert await gradcheck(fn, leaf(), nondet_tol=1e-6)


async def test_none_taken_for_something_else_than_zeros() -> None:
    # the gradient of the second output is taken for ones where there is none
    wrong = function(
        lambda x: (x * 2.0, x * 3.0),
        lambda saved, g, h: (0.0 if g is None else g * 2.0) + (saved[0] * 0.0 + 1.0 if h is None else h) * 3.0,
        materialize=False,
    )
    message = await failure(wrong, leaf())
    assert "output 1 gets none" in message
    assert await gradcheck(wrong, leaf(), check_undefined_grad=False)


async def test_the_gradient_of_one_output_lost_when_the_other_has_none() -> None:
    wrong = function(
        lambda x: (x * 2.0, x * 3.0), lambda saved, g, h: None if g is None or h is None else g * 2.0 + h * 3.0, materialize=False
    )
    assert "gets none" in await failure(wrong, leaf())


async def test_wrong_only_where_all_but_one_output_have_no_gradient() -> None:
    def backward(saved: Any, *grads: Any) -> Any:
        given = [(k + 2.0) * g for k, g in enumerate(grads) if g is not None]
        return sum(given[1:], given[0]) if len(given) > 1 else None

    wrong = function(lambda x: (x * 2.0, x * 3.0, x * 4.0), backward, materialize=False)
    assert "output 1, 2 gets none" in await failure(wrong, leaf())


async def test_a_backward_that_cannot_take_none() -> None:
    wrong = function(lambda x: (x * 2.0, x * 3.0), lambda saved, g, h: g * 2.0 + h * 3.0, materialize=False)
    message = await failure(wrong, leaf())
    assert "backward fails where an output gets no gradient, with TypeError" in message


async def test_something_from_nothing() -> None:
    wrong = function(lambda x: x * 2.0, lambda saved, g: (saved[0] * 0.0 + 1.0 if g is None else g) * 2.0, materialize=False)
    assert "where no output has one" in await failure(wrong, leaf())


async def test_an_output_whose_shape_depends_on_values() -> None:
    threshold = 0.5
    x = ag.tensor([threshold, 0.1], dtype=np.float64, requires_grad=True)

    def f(x: Any) -> Any:
        return x[: 1 + int(x.detach().numpy()[0] > threshold)] * 2.0

    assert "shape of output 0" in await failure(f, x)


# Tolerances and arguments


async def test_tolerances_are_relative_to_the_numerical_value() -> None:
    x = ag.tensor([100.0], dtype=np.float64, requires_grad=True)
    slightly = function(lambda x: x * x, lambda saved, g: 2.0 * g * saved[0] * 1.0005)
    assert await gradcheck(slightly, x)
    await failure(slightly, x, rtol=1e-4)
    assert await gradcheck(slightly, x, rtol=0.0, atol=0.2)


async def test_single_precision_is_warned_about() -> None:
    with pytest.warns(UserWarning, match="not double precision"):
        assert await gradcheck(lambda x: x * 2.0, leaf(dtype=np.float32), eps=1e-2, atol=1e-2)


async def test_nothing_to_check() -> None:
    await assert_awaiting_raises(ag.errors.ArgumentError, "at least one input Tensor that requires grad", gradcheck(lambda x: x, ag.tensor([1.0])))
    await assert_awaiting_raises(ag.errors.ArgumentError, "no output of fn requires grad", gradgradcheck(lambda x: x.detach(), leaf()))
    await assert_awaiting_raises(ag.errors.ArgumentTypeError, "output 0 of fn is a int", gradcheck(lambda x: 3, leaf()))


async def test_given_output_gradients() -> None:
    x = leaf()
    assert await gradgradcheck(lambda x: x**3, x, ag.tensor(rng.normal(size=(2, 3))))
    await assert_awaiting_raises(ag.errors.ArgumentError, "got 2 grad_outputs; 1 outputs", gradgradcheck(lambda x: x**3, x, (x, x)))


async def test_inputs_and_modes_are_left_as_they_were() -> None:
    x = leaf()
    before = x.detach().numpy().copy()

    def in_place(y: Any) -> Any:
        y = y * 1.0
        y += 1.0
        return y * y

    with ag.no_grad():
        assert await gradcheck(in_place, x)
        assert await gradgradcheck(in_place, x)
        assert not ag.is_grad_enabled()
    np.testing.assert_array_equal(x.detach().numpy(), before)
    assert x.grad is None
    assert x.requires_grad


async def test_integer_outputs_beside_floating_ones_are_passed_over() -> None:
    x = leaf()
    for fn in (lambda x: ag.topk(x, 2), lambda x: (x > 0, x * 2), lambda x: (x**2, (x**2).astype(np.uint8)), lambda x: (x * x, ag.nonzero(x > 0)[0])):
        assert await gradcheck(fn, x)
        assert await gradgradcheck(fn, x)

    def wrong(x: Any) -> Any:
        return ag.argmax(x), x.detach() * x

    await assert_awaiting_raises(ag.errors.GradcheckError, "output 1 with respect to input 0", gradcheck(wrong, x))
    for check in (gradcheck, gradgradcheck):
        await assert_awaiting_raises(ag.errors.ArgumentTypeError, "output 0 of fn has dtype bool", check(lambda x: (x > 0, x.argmax()), x))
