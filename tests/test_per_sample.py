"""Gradients of every example, and their norms: what one example after the other gives, for any graph, and no gradient formed for products."""

from __future__ import annotations

import asyncio
import inspect
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, ModifiedError, ShapeError
from aiograd.functional.batching import per_sample
from aiograd.running.devices import known_devices
from tests.support import assert_awaiting_raises, cancel, custom_function, draw, leaf

F = ag.nn.functional
Case = tuple[Callable[..., Any], list[Any], tuple[Any, ...]]
CLASSES = np.array([0, 1, 1, 0, 1])
WORDS = np.array([[1, 4, 4], [0, 2, 1], [5, 5, 5], [3, 0, 4], [2, 2, 3]])


def module(made: Any) -> tuple[Any, list[Any]]:
    made = made.to(np.float64)
    return made, list(made.parameters())


def perceptron() -> tuple[Any, list[Any]]:
    return module(ag.nn.Sequential(ag.nn.Linear(3, 4), ag.nn.Tanh(), ag.nn.Linear(4, 2)))


def classifier() -> Case:
    model, params = perceptron()
    return lambda x, y: F.cross_entropy(model(x), y), params, (draw(5, 3), CLASSES)


def classifier_of(shape: tuple[int, ...], **options: Any) -> Case:
    w = leaf(draw(3, *shape, at=1))
    targets = np.random.default_rng(4).integers(0, shape[min(1, len(shape) - 1)], (5, *shape[:1], *shape[2:]) if len(shape) > 1 else (5,))
    return lambda x, y: F.cross_entropy(ag.tensordot(x, w, 1), y, **options), [w], (draw(5, 3), targets)


def of_rows(loss: Callable[[Any], Any], *shape: int) -> Case:
    model, params = perceptron()
    return lambda x: loss(model(x)), params, (draw(5, *shape),)


def products(loss: Callable[..., Any], weight: tuple[int, ...], *shape: int) -> Case:
    w = leaf(draw(*weight, at=1))
    return lambda x: loss(x, w), [w], (draw(5, *shape),)


def of_integers(integers: Any) -> Case:
    w = leaf(draw(3, 2, at=1))
    return lambda x: ag.exp(x @ w / 9).sum(), [w], (integers,)


def embedding(padding: int | None = None, tied: bool = False) -> Case:
    table, params = module(ag.nn.Embedding(6, 3, padding_idx=padding))
    if tied:
        return lambda i: F.cross_entropy(F.linear(ag.tanh(table(i)).sum(0), table.weight), i[0]), params, (WORDS,)
    model, more = perceptron()
    return lambda i: (model(table(i)) ** 2).sum(), params + more, (WORDS,)


def convolution() -> Case:
    model, params = module(ag.nn.Sequential(ag.nn.Conv2d(2, 3, 3, padding=1), ag.nn.ReLU(), ag.nn.Flatten(0), ag.nn.Linear(48, 1)))
    return lambda x: model(x).sum() ** 2, params, (draw(5, 2, 4, 4),)


def attention() -> Case:
    model, params = module(ag.nn.MultiheadAttention(4, 2, batch_first=True))
    return lambda x: (model(x, x, x)[0] ** 2).sum(), params, (draw(5, 1, 3, 4),)


def recurrent(cls: Any) -> Case:
    model, params = module(cls(3, 4))
    return lambda x: (model(x)[0] ** 2).sum(), params, (draw(5, 4, 3),)


def both_sides() -> Case:
    w = leaf(draw(3, 3, at=1))
    return lambda x: ag.exp(w @ (x @ w)).sum() / 50, [w], (draw(5, 3, 3) / 3,)


def normalized() -> Case:
    model, params = module(ag.nn.Sequential(ag.nn.Linear(3, 4), ag.nn.LayerNorm(4), ag.nn.Linear(4, 1)))
    return lambda x: model(x).sum() ** 2, params, (draw(5, 3),)


@custom_function(lambda x: np.sign(x))
def straight_through(ctx: Any, g: Any) -> Any:
    return 3.0 * g


async def penalty(x: Any, w: Any) -> Any:
    value, slope = await ag.value_and_grad(lambda x: ag.tanh(x @ w).prod(), x, create_graph=True)
    await asyncio.sleep(0)
    return value + (slope * slope).sum()


CASES: dict[str, Callable[[], Case]] = {
    "classifier": classifier,
    "classifier of one row": lambda: classifier_of((1, 4)),
    "classifier of rows and places": lambda: classifier_of((3, 4, 2), reduction="sum"),
    "classifier of places that partly count": lambda: classifier_of((3, 4, 2), ignore_index=2),
    "classifier with smoothing": lambda: classifier_of((4,), label_smoothing=0.2),
    "classifier with weights": lambda: classifier_of((2, 4), weight=ag.tensor([1.0, 2.0, 0.5, 1.0], dtype=np.float64)),
    "rows of an example": lambda: of_rows(lambda y: (y**2).mean(), 7, 3),
    "more rows than the gradient has numbers": lambda: of_rows(lambda y: (y**2).mean(), 30, 3),
    "mean squared error": lambda: of_rows(lambda y: F.mse_loss(y, ag.zeros(2)), 3),
    "huber loss": lambda: of_rows(lambda y: F.huber_loss(y, ag.ones(2), reduction="sum"), 3),
    "matmul": lambda: products(lambda x, w: ag.exp(x @ w).sum(), (3, 4), 3),
    "matmul of matrices": lambda: products(lambda x, w: ag.exp(x @ w).sum(), (3, 4), 2, 3),
    "matmul from the left": lambda: products(lambda x, w: ag.exp(w @ x).sum(), (4, 3), 3),
    "matmul of many from the left": lambda: products(lambda x, w: ag.exp(w @ x).sum(), (4, 3), 2, 3, 2),
    "dot": lambda: products(lambda x, w: (x @ w) ** 3, (3,), 3),
    "vector on the right": lambda: products(lambda x, w: ag.exp(x @ w).sum(), (3,), 4, 3),
    "vector on the left": lambda: products(lambda x, w: ag.exp(w @ x).sum(), (3,), 3, 4),
    "vector on the left of many": lambda: products(lambda x, w: ag.exp(w @ x).sum(), (3,), 2, 3, 4),
    "integers": lambda: of_integers(WORDS),
    "integers in rows": lambda: of_integers(WORDS.reshape(5, 1, 3)),
    "one matrix twice": lambda: products(lambda x, w: ag.exp(x @ w).sum() + ag.sin(x[0] @ w).sum(), (3, 4), 2, 3),
    "on both sides": both_sides,
    "power of a matrix": lambda: products(lambda x, w: (x @ (w @ w)).sum(), (3, 3), 3),
    "regularized": lambda: products(lambda x, w: ag.exp(x @ w).sum() + (w * w).sum(), (3, 4), 3),
    "nothing but the regularization": lambda: products(lambda x, w: (w * w).sum(), (3, 4), 3),
    "transposed": lambda: products(lambda x, w: ag.exp(x @ w.T).sum(), (4, 3), 3),
    "embedding": embedding,
    "embedding with padding": lambda: embedding(padding=4),
    "tied weights": lambda: embedding(tied=True),
    "convolution": convolution,
    "attention": attention,
    "RNN": lambda: recurrent(ag.nn.RNN),
    "GRU": lambda: recurrent(ag.nn.GRU),
    "LSTM": lambda: recurrent(ag.nn.LSTM),
    "layer norm": normalized,
    "a pass inside": lambda: products(penalty, (3, 4), 3),
    "a rule of the user's own": lambda: products(lambda x, w: (straight_through.apply(x @ w) * x.sum()).sum(), (3, 4), 3),
    "detached": lambda: products(lambda x, w: ((x @ w).detach() * (x @ w)).sum(), (3, 4), 3),
    "checkpointed": lambda: products(lambda x, w: ag.checkpoint(lambda x, w: ag.exp(x @ w).sum(), x, w), (3, 4), 3),
    "vmap inside": lambda: products(lambda x, w: ag.vmap(lambda row: ag.exp(row @ w).sum())(x).prod(), (3, 2), 2, 3),
}


async def one_by_one(loss: Any, params: Any, batch: Any) -> list[Any]:
    found = []
    for example in zip(*batch, strict=True):
        value = loss(*map(ag.as_tensor, example))
        value = await value if inspect.iscoroutine(value) else value
        found.append(await ag.grad(value, params, materialize_grads=True, retain_graph=True))
    return [np.stack([grads[k].numpy() for grads in found]) for k in range(len(params))]


def norms_of(gradients: list[Any]) -> Any:
    return np.sqrt(sum((g.reshape(len(g), -1) ** 2).sum(1) for g in gradients))


@pytest.mark.parametrize("name", CASES)
async def test_what_one_example_after_the_other_gives(name: str) -> None:
    ag.seed(0)
    loss, params, batch = CASES[name]()
    wanted = await one_by_one(loss, params, batch)
    found = await ag.grad_per_sample(loss, params, batch)
    for mine, theirs, p in zip(found, wanted, params, strict=True):
        assert mine.shape == (5, *p.shape) and mine.dtype == p.dtype and not mine.requires_grad
        np.testing.assert_allclose(mine.numpy(), theirs, rtol=1e-9, atol=1e-12)
    for chunk_size in (None, 2):
        norms = await ag.grad_norms_per_sample(loss, params, batch, chunk_size=chunk_size)
        np.testing.assert_allclose(norms.numpy(), norms_of(wanted), rtol=1e-9)
    assert all(p.grad is None for p in params) and known_devices() == ["cpu"]


async def test_the_sum_of_weighted_gradients_is_made_of_the_same_factors() -> None:
    ag.seed(0)
    weights = np.array([0.5, 0.0, 1.0, 2.0, -1.0])
    for name in ("classifier", "rows of an example", "matmul of many from the left", "vector on the right", "dot", "embedding with padding", "GRU"):
        loss, params, batch = CASES[name]()
        wanted = [np.tensordot(weights, g, 1) for g in await one_by_one(loss, params, batch)]
        listed, chunks = per_sample.checked("test", loss, params, batch, None)
        _, found = await per_sample.gradients_of_examples("test", loss, listed, chunks[0])
        for mine, theirs in zip(found, wanted, strict=True):
            assert mine is not None
            np.testing.assert_allclose(mine.weighted(weights), theirs, rtol=1e-9, atol=1e-12)


async def test_no_gradient_is_formed_where_a_product_meets_a_parameter() -> None:
    model = ag.nn.Sequential(ag.nn.Linear(300, 400), ag.nn.ReLU(), ag.nn.Linear(400, 5))
    table = leaf(draw(2000, 300), np.float32)
    x = ag.tensor(np.arange(64) * 7, dtype=np.int64)

    tracemalloc.start()
    try:
        await ag.grad_norms_per_sample(lambda i: model(F.embedding(i, table)).sum() ** 2, [table, *model.parameters()], x)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 4_000_000, "the gradients of all examples would take 190 MB"


async def test_norms_of_extreme_gradients() -> None:
    w = leaf(np.ones(3), np.float32)
    x = np.array([[3e25, 4e25, 0.0], [3e-25, 4e-25, 0.0], [0.0, 0.0, 0.0]], np.float32)
    found = await ag.grad_norms_per_sample(lambda x: (x * w).sum(), w, x)
    np.testing.assert_allclose(found.numpy(), [5e25, 5e-25, 0.0], rtol=1e-6)
    # two rows of one example that nearly cancel
    near = np.zeros((1, 2, 8), np.float32)
    near[0, :, :2] = [[1000.0, 1.0], [-1000.0, 1.001]]
    v = leaf(np.eye(8), np.float32)
    (each,) = await ag.grad_per_sample(lambda x: (x @ v).sum(), [v], near)
    (norm,) = (await ag.grad_norms_per_sample(lambda x: (x @ v).sum(), [v], near)).numpy()
    np.testing.assert_allclose(norm, np.linalg.norm(each.numpy()), rtol=1e-6)


async def test_gradients_have_the_dtype_of_their_parameter() -> None:
    w, double = leaf(draw(3, 2), np.float32), leaf(draw(3, 2))
    listed, chunks = per_sample.checked("test", lambda x: None, [w, double], draw(5, 3), None)
    _, found = await per_sample.gradients_of_examples("test", lambda x: (x @ w + x @ double).sum(), listed, chunks[0])
    sums = [each.weighted(np.ones(5)) for each in found if each is not None]
    assert [each.dtype for each in sums] == [np.float32, np.float64]
    np.testing.assert_allclose(sums[0], sums[1], rtol=1e-6)


async def test_chunks_and_empty_batches() -> None:
    w, calls = leaf(draw(3, 2)), []

    def loss(x: Any) -> Any:
        calls.append(x.shape)
        return ag.exp(x @ w).sum()

    whole = await ag.grad_per_sample(loss, [w], draw(7, 3))
    assert calls == [(3,)], "the loss runs once for a batch"
    parts = await ag.grad_per_sample(loss, [w], draw(7, 3), chunk_size=3)
    assert len(calls) == 4
    np.testing.assert_allclose(parts[0].numpy(), whole[0].numpy(), rtol=1e-12)
    (none,) = await ag.grad_per_sample(loss, w, draw(0, 3))
    norms = await ag.grad_norms_per_sample(loss, w, [draw(0, 3)])
    assert none.shape == (0, 3, 2) and none.dtype == w.dtype and norms.shape == (0,) and len(calls) == 4


async def test_what_the_loss_does_not_depend_on() -> None:
    w, other = leaf(draw(3, 2)), leaf(draw(2))
    frozen = leaf(draw(2))
    found = await ag.grad_per_sample(lambda x: ((x @ w) * frozen).sum(), [w, other], draw(4, 3))
    assert found[1].shape == (4, 2) and not found[1].numpy().any() and found[0].numpy().any()
    assert not (await ag.grad_per_sample(lambda x: x.sum(), [w], draw(4, 3)))[0].numpy().any()
    assert not (await ag.grad_norms_per_sample(lambda x: x.sum(), [w], draw(4, 3))).numpy().any()


async def test_parameters_that_are_no_leaves() -> None:
    w = leaf(draw(3, 2))
    inner = w * 2.0
    found = await ag.grad_per_sample(lambda x: (x @ inner).sum(), [w, inner], draw(4, 3))
    np.testing.assert_allclose(found[0].numpy(), 2.0 * found[1].numpy())
    await inner.sum().backward()
    np.testing.assert_allclose(w.grad.numpy(), 2.0), "the caller's graph is not spent"


async def test_what_is_refused_before_anything_runs() -> None:
    w, x = leaf(draw(3, 2)), draw(4, 3)

    def loss(*given: Any) -> Any:
        raise AssertionError("it runs")

    for call in (ag.grad_per_sample, ag.grad_norms_per_sample):
        for error, match, args in (
            (ArgumentTypeError, "a function of one example", (None, [w], x)),
            (ArgumentTypeError, "at least one", (loss, [], x)),
            (ArgumentTypeError, "Tensors to differentiate by", (loss, [1.0], x)),
            (ArgumentError, "requires_grad=False", (loss, [w.detach()], x)),
            (ArgumentError, "complex128", (loss, [leaf(draw(2) * 1j)], x)),
            (ShapeError, r"\[\[4, 3\], \[3\]\]", (loss, [w], (x, draw(3)))),
            (ShapeError, "one length in front", (loss, [w], 1.0)),
            (ShapeError, "one length in front", (loss, [w], ())),
        ):
            await assert_awaiting_raises(error, match, call(*args))
        for wrong in (0, -1, 1.5, True):
            await assert_awaiting_raises(ArgumentError, f"chunk_size={wrong}", call(loss, [w], x, chunk_size=wrong))
        for returned in (lambda x: x @ w, lambda x: 1.0, lambda x: (x @ w).sum().astype(np.int64), lambda x: None):
            await assert_awaiting_raises(ArgumentError, "one element, the loss of one example", call(returned, [w], x))
        await assert_awaiting_raises(ArgumentError, "random numbers", call(lambda x: (F.dropout(x) @ w).sum(), [w], x))
        await assert_awaiting_raises(ArgumentError, "random numbers", call(lambda x: ((x + ag.rand(3)) @ w).sum(), [w], x))
        await assert_awaiting_raises(ArgumentError, "reads the value", call(lambda x: (x @ w).sum() if x[0] > 0 else w.sum(), [w], x))
    assert known_devices() == ["cpu"]


async def test_nothing_is_left_when_it_is_cancelled_and_a_parameter_that_changes_is_noticed() -> None:
    w, waiting = leaf(draw(3, 2)), asyncio.Event()

    async def loss(x: Any) -> Any:
        value = (x @ w).sum()
        await waiting.wait()
        return value

    task = asyncio.ensure_future(ag.grad_per_sample(loss, [w], draw(4, 3)))
    await asyncio.sleep(0)
    assert len(known_devices()) == 2
    await cancel(task)
    assert known_devices() == ["cpu"]
    for call in (ag.grad_per_sample, ag.grad_norms_per_sample):
        waiting.clear()
        task = asyncio.ensure_future(call(loss, [w], draw(4, 3)))
        await asyncio.sleep(0)
        with ag.no_grad():
            w += 1.0
        waiting.set()
        await assert_awaiting_raises(ModifiedError, "modified", task)


async def test_many_at_once() -> None:
    params = [leaf(draw(3, 2, at=i)) for i in range(20)]

    async def loss(x: Any, w: Any) -> Any:
        await asyncio.sleep(0)
        return ag.exp(x @ w).sum()

    every = await asyncio.gather(*(ag.grad_per_sample(lambda x, w=w: loss(x, w), [w], draw(4, 3)) for w in params))
    for w, (found,) in zip(params, every, strict=True):
        (wanted,) = await one_by_one(lambda x, w=w: loss(x, w), [w], (draw(4, 3),))
        np.testing.assert_allclose(found.numpy(), wanted)
