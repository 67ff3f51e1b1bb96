"""Second derivatives, and gradients of outputs of a compiled call: the nodes behind a program's node have the bits of the eager ones."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import GraphFreedError, ModifiedError, NaNGradientError
from tests.compiler.test_compile import bits, leaf, rng
from tests.support import assert_awaiting_raises


def network() -> Any:
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.LayerNorm(16), nn.Linear(16, 16), nn.SiLU(), nn.Dropout(0.2), nn.Linear(16, 1))


async def penalized(call: Callable[[Any], Any], x: Any) -> Any:
    """The loss of a gradient penalty: the input gradient is a part of the loss."""
    y = call(x)
    (gradient,) = await ag.grad(y.sum(), [x], create_graph=True)
    return y.mean() + 10.0 * ((ag.sqrt((gradient**2).sum(axis=1) + 1e-6) - 1.0) ** 2).mean()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
async def test_a_gradient_penalty_has_the_bits_of_eager(dtype: Any) -> None:
    model = network().to(dtype)
    compiled = ag.compile(lambda x: model(x))
    for _ in range(4):
        x = leaf(32, 8, dtype=dtype)
        found = []
        for call in (model, compiled):
            ag.seed(3)
            for each in (x, *model.parameters()):
                each.grad = None
            loss = await penalized(call, x)
            await loss.backward()
            found.append(bits(loss, x.grad, *(p.grad for p in model.parameters())))
        assert found[0] == found[1]
    assert compiled.statistics().runs == 3


async def test_third_derivatives_and_uses_elsewhere() -> None:
    w = leaf(4, 4, dtype=np.float64)
    compiled = ag.compile(f := lambda x: ag.sin(x @ w) * ag.tanh(x) * w.sum())
    for _ in range(3):
        x = leaf(3, 4, dtype=np.float64)
        found = []
        for call in (f, compiled):
            w.grad = x.grad = None
            before = (x * w[0]).sum()
            y = call(x)
            (first,) = await ag.grad((y * y).sum() + before, [x], create_graph=True)
            (second,) = await ag.grad((first * y).sum(), [x], create_graph=True)
            await ((second**2).sum() + (y * x).sum() + (w * w).sum()).backward()
            found.append(bits(first, second, x.grad, w.grad))
        assert found[0] == found[1]


def several(w: Any) -> Callable[[Any], tuple[Any, Any, Any]]:
    def f(x: Any) -> tuple[Any, Any, Any]:
        h = ag.tanh(x @ w)
        k = ag.sin(h) * h
        return (k * h).sum(), h, k

    return f


async def _of_outputs(call: Callable[[Any], Any], x: Any, w: Any) -> list[Any]:
    y, h, k = call(x)
    first = await ag.grad(y + (h * 3.0).sum(), [h, k, x, w], retain_graph=True)
    second = await ag.grad((k * y).sum(), [h, x])
    return [*first, *second]


async def _hooked(call: Callable[[Any], Any], x: Any, w: Any) -> list[Any]:
    y, h, k = call(x)
    seen: list[Any] = []
    handles = [h.register_hook(lambda g: seen.append(g * 1) or g * 2.0), k.register_hook(lambda g: seen.append(g * 1))]
    h.retain_grad()
    first = await ag.grad(y + (h * 3.0).sum(), [h, x], retain_graph=True)
    handles[0].remove()
    k.retain_grad()
    h.register_hook(lambda g: g * 0.5)
    await (y * 2.0 + (k * h).sum()).backward()
    return [*first, *seen, h.grad, k.grad, x.grad, w.grad]


async def _into_outputs(call: Callable[[Any], Any], x: Any, w: Any) -> list[Any]:
    y, h, k = call(x)
    await (y + k.sum()).backward(inputs=[h, x])
    return [h.grad, x.grad, w.grad]

async def _hooked_inside(call: Callable[[Any], Any], x: Any, w: Any) -> list[Any]:
    y, h, k = call(x)
    h.register_hook(lambda g: g * 6.0)
    await (y + (h * 3.0).sum()).backward()
    return [x.grad, w.grad]


async def _retained_inside(call: Callable[[Any], Any], x: Any, w: Any) -> list[Any]:
    y, h, k = call(x)
    h.retain_grad()
    k.retain_grad()
    await (y + k.sum()).backward()
    return [h.grad, k.grad, x.grad, w.grad]


async def _seen_inside(call: Callable[[Any], Any], x: Any, w: Any) -> list[Any]:
    y, h, k = call(x)
    seen: list[Any] = []
    ag.graph.register_multi_grad_hook([h, k], lambda grads: seen.extend([grad * 1 for grad in grads]))
    await y.backward()
    return [*seen, x.grad]


@pytest.mark.parametrize("use", [_of_outputs, _hooked, _into_outputs, _hooked_inside, _retained_inside, _seen_inside])
async def test_gradients_of_outputs(use: Callable[[Callable[[Any], Any], Any, Any], Awaitable[list[Any]]]) -> None:
    w = leaf(4, 4)
    compiled = ag.compile(f := several(w))
    for _ in range(3):
        x = leaf(3, 4)
        found = []
        for call in (f, compiled):
            w.grad = x.grad = None
            found.append(bits(*await use(call, x, w)))
        assert found[0] == found[1]
    assert compiled.statistics().runs == 2


async def test_what_a_pass_cannot_go_through_is_an_error_and_leaves_the_rest() -> None:
    w, x = leaf(3), leaf(3)
    compiled = ag.compile(lambda x: ag.exp(x) * w)
    compiled(x)
    freed, changed, other = compiled(x), compiled(x), compiled(x)
    await freed.sum().backward()
    await assert_awaiting_raises(GraphFreedError, None, ag.grad(freed.sum() + other.sum(), [x], create_graph=True))
    with ag.no_grad():
        w += 1.0
    await assert_awaiting_raises(ModifiedError, None, ag.grad(changed.sum(), [x], create_graph=True))
    (gradient,) = await ag.grad((x * w).sum() + compiled(x).sum(), [x], create_graph=True)
    assert bits(gradient) == bits(w + ag.exp(x) * w)


async def test_random_numbers_of_a_call_are_those_of_its_second_pass() -> None:
    x = leaf(64, dtype=np.float64)
    compiled = ag.compile(f := lambda x: (ag.nn.functional.dropout(x, 0.5, True) ** 3, x * float(rng.bit_generator is not None)))
    results = []
    for call in (f, compiled):
        ag.seed(5)
        found = []
        for _ in range(3):
            y, z = call(x)
            (g,) = await ag.grad(y.sum() + z.sum(), [x], create_graph=True)
            found.append(bits(g, *await ag.grad((g * z).sum(), [x])))
        results.append(found)
    assert results[0] == results[1]


def _not_a_number(x: Any) -> Any:
    y = ag.sqrt(x) * 0.0
    return (y / y).sum()  # the line


async def test_anomaly_mode_names_the_operation_and_the_line() -> None:
    compiled, x = ag.compile(_not_a_number), ag.tensor([0.0, 1.0], requires_grad=True)
    with np.errstate(all="ignore"):
        compiled(x)
        loss = compiled(x)
        with pytest.warns(UserWarning), ag.detect_anomaly(), pytest.raises(NaNGradientError, match="DivBackward") as caught:
            await loss.backward()
    assert "test_nodes_behind.py:" in str(caught.value.__notes__) and "# the line" in str(caught.value.__notes__)
    assert x.grad is None


def doubled(x: Any) -> tuple[Any, Any, Any]:
    t = x * 2.0
    return t, t * 5.0 + 1.0, ag.sin(x)


async def test_a_retained_gradient_moves_on_with_a_tensor_that_is_modified() -> None:
    compiled = ag.compile(doubled)
    for call in (doubled, compiled, compiled):
        x = leaf(3, dtype=np.float64)
        t, u, _ = call(x)
        t.retain_grad()
        t += 1.0
        await (t * 3.0 + u).sum().backward()
        assert t.grad.numpy().tolist() == [3.0] * 3, "the gradient of the modified tensor, not of the one before"
        assert x.grad.numpy().tolist() == [16.0] * 3
    assert compiled.statistics().runs == 1


async def test_a_hook_after_a_pass_over_a_part_of_the_call() -> None:
    compiled = ag.compile(doubled)
    for call in (doubled, compiled, compiled):
        x = leaf(3, dtype=np.float64)
        t, u, s = call(x)
        await s.sum().backward()
        x.grad = None
        t.register_hook(lambda g: g * 6.0)
        await (t + u).sum().backward()
        assert x.grad.numpy().tolist() == [72.0] * 3
        await assert_awaiting_raises(GraphFreedError, None, s.sum().backward())


async def test_a_hook_that_comes_after_its_tensors_have_changed_is_refused() -> None:
    c = leaf(3, grad=False)
    compiled = ag.compile(lambda x: (x - c, t := x + c, t * 5.0))
    compiled(leaf(3))
    x = leaf(3)
    outside, inside, _ = compiled(x)
    c += 1.0
    outside.register_hook(lambda g: g * 6.0)
    for ask in (lambda: inside.register_hook(print), inside.retain_grad, lambda: ag.grad(inside.sum(), [inside])):
        with pytest.raises(ModifiedError) as caught:
            ask()
        assert "register its hook" in str(caught.value.__notes__)
    await (outside + inside).sum().backward()
    assert x.grad.numpy().tolist() == [7.0] * 3
