"""`vmap`: every row gives for a batch what it gives for each example, with gradients inside and outside of the function."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import ArgumentError, ArgumentTypeError, IndexRangeError, InPlaceError, NoGraphError, ShapeError
from aiograd.functional.batching.rules import RULES
from aiograd.ops import ROWS
from aiograd.running.devices import known_devices
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE, DOMAINS, drawn, floating
from tests.support import assert_awaiting_raises, assert_raises, leaf
from tests.toy_device import ToyDevice

F = ag.nn.functional
rng = np.random.default_rng(0)
X, W = rng.normal(size=(5, 3)), rng.normal(size=(3, 2))


@pytest.mark.parametrize("name", DIFFERENTIABLE)
def test_a_row_of_a_batch_is_the_row_of_each_example(name: str) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    for args, kwargs in drawn(domain, 6, 60, False):
        keys = [i for i, a in enumerate(args) if floating(a)]
        batches = [np.stack([args[i] * (1 + 1e-3 * k) for k in range(3)]) for i in keys]

        def function(*tensors: Any, args: Any = args, kwargs: Any = kwargs, keys: Any = keys) -> Any:
            full = list(args)
            for i, tensor in zip(keys, tensors, strict=True):
                full[i] = tensor
            out = domain.call(row, full, kwargs)
            return out if isinstance(out, tuple) else (out,)

        for dims in ([0] * len(keys), [0] + [None] * (len(keys) - 1)) if keys else ():
            given = [b if dim == 0 else b[0] for b, dim in zip(batches, dims, strict=True)]
            found = ag.vmap(function, tuple(dims))(*map(ag.tensor, given))
            each = [function(*(ag.tensor(g[k] if dim == 0 else g) for g, dim in zip(given, dims, strict=True))) for k in range(3)]
            for mine, theirs in zip(found, zip(*each, strict=True), strict=True):
                expected = np.stack([t.numpy() for t in theirs])
                assert mine.shape == expected.shape and mine.dtype == expected.dtype
                np.testing.assert_allclose(mine.numpy(), expected, rtol=1e-9, atol=1e-9)


def test_rows_with_a_rule_run_once_for_the_whole_batch() -> None:
    batch = ag.tensor(rng.normal(size=(50, 3)))
    one = ag.vmap(lambda x: (ag.softmax(ag.tanh(x @ ag.tensor(W)), dim=0) * 2).sum().reshape(1, 1).squeeze())(batch)
    assert one.shape == (50,) and set(RULES) <= set(ROWS)
    loss = ag.vmap(lambda x: (x @ x).exp())(leaf(X)).sum()
    nodes, front = 0, [loss.grad_fn]
    while front:
        node = front.pop()
        nodes += 1
        front += [edge.node for edge in node.next_edges if edge is not None and edge.node is not None]
    assert nodes < 15, "a loop over five examples would record more"


async def test_gradients_outside_inside_and_both() -> None:
    x, w = leaf(X), leaf(W)
    y = ag.vmap(lambda row: ag.tanh(row @ w).sum())(x)
    np.testing.assert_allclose(y.detach().numpy(), np.tanh(X @ W).sum(1))
    gx, gw = await ag.grad(y.sum(), (x, w))
    ex, ew = await ag.grad(ag.tanh(x @ w).sum(), (x, w))
    np.testing.assert_allclose(gx.numpy(), ex.numpy())
    np.testing.assert_allclose(gw.numpy(), ew.numpy())

    async def gradient(row: Any, weight: Any) -> Any:
        value, grads = await ag.value_and_grad(lambda v: ag.tanh(row @ v).prod(), weight)
        return value, grads

    values, per_example = await ag.vmap(gradient, in_dims=(0, None))(x, w)
    for k in range(5):
        value, expected = await ag.value_and_grad(lambda v, k=k: ag.tanh(x.detach()[k] @ v).prod(), w.detach())
        np.testing.assert_allclose(per_example[k].detach().numpy(), expected.numpy(), rtol=1e-12)
        np.testing.assert_allclose(values[k].detach().numpy(), value.numpy(), rtol=1e-12)

    async def norms(x: Any) -> Any:
        async def one(row: Any) -> Any:
            _, g = await ag.value_and_grad(lambda v: (v**3).sum() * v[0], row, create_graph=True)
            return (g * g).sum()

        return await ag.vmap(one)(x)

    assert await ag.gradcheck(norms, (leaf(X),))
    assert await ag.gradgradcheck(lambda a, b: ag.vmap(lambda r: (r @ b).sin().sum())(a), (leaf(X), leaf(W)), atol=1e-4, rtol=1e-3)


Y = np.array([0.5, -1.0, 2.0, 1.5, 3.0])

#: functions of a row and of a number of an inner call of `vmap`
PAIRS: dict[str, tuple[Any, Any]] = {
    "product": (lambda a, b: a * b, lambda a, b: a * b),
    "reflected": (lambda a, b: b - a, lambda a, b: b - a),
    "outer alone": (lambda a, b: a * 2.0, lambda a, b: a * 2.0),
    "inner alone": (lambda a, b: b * 2.0, lambda a, b: b * 2.0),
    "matmul": (lambda a, b: (a * b) @ a, lambda a, b: (a * b) @ a),
    "where": (lambda a, b: ag.where(a > b, a, b), lambda a, b: np.where(a > b, a, b)),
    "joined": (lambda a, b: ag.concat([a, b.reshape(1)]), lambda a, b: np.append(a, b)),
    "softmax": (lambda a, b: ag.softmax(a * b, axis=-1), lambda a, b: np.exp(a * b) / np.exp(a * b).sum()),
    "indexed": (lambda a, b: ag.take(a, (b > 0).astype(np.int64).reshape(1)), lambda a, b: a[[int(b > 0)]]),
    "in a loop": (lambda a, b: ag.linalg.det(ag.outer(a, a) * b + ag.eye(len(a))), lambda a, b: np.linalg.det(np.outer(a, a) * b + np.eye(len(a)))),
    "made inside": (lambda a, b: (ag.zeros(len(a)) + b) * a, lambda a, b: a * b),
    "an array": (lambda a, b: a * np.arange(len(a)) + b, lambda a, b: a * np.arange(len(a)) + b),
    "filled": (lambda a, b: (a * b).index_fill(0, [0], 7.0), lambda a, b: np.append([7.0], (a * b)[1:])),
}


@pytest.mark.parametrize("name", PAIRS)
async def test_a_function_within_another_uses_values_of_both(name: str) -> None:
    ours, numpys = PAIRS[name]
    wanted = np.array([[numpys(a, b) for b in Y] for a in X])
    x, y = ag.tensor(X, requires_grad=True), ag.tensor(Y, requires_grad=True)
    found = ag.vmap(lambda a: ag.vmap(lambda b: ours(a, b))(y))(x)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(found.detach().numpy(), wanted, rtol=1e-6)
    await (found * found).sum().backward()
    again, other = ag.tensor(X, requires_grad=True), ag.tensor(Y, requires_grad=True)
    await sum((ours(again[i], other[j]) ** 2).sum() for i in range(len(X)) for j in range(len(Y))).backward()
    for first, second in ((x, again), (y, other)):
        np.testing.assert_allclose(*(np.zeros(t.shape) if t.grad is None else t.grad.numpy() for t in (first, second)), rtol=1e-6)


async def test_three_levels_and_passes_within_passes() -> None:
    triple = ag.vmap(lambda a: ag.vmap(lambda b: ag.vmap(lambda c: a[0] * b + c)(ag.tensor(Y)))(ag.tensor(Y)))(ag.tensor(X))
    np.testing.assert_allclose(triple.numpy(), X[:, 0, None, None] * Y[:, None] + Y)

    async def outer(a: Any) -> Any:
        async def inner(b: Any) -> Any:
            b.requires_grad_()
            (grad,) = await ag.grad((ag.sin(b) * a).sum(), [b])
            return grad

        return await ag.vmap(inner)(ag.tensor(Y))

    found = await ag.vmap(outer)(ag.tensor(X))
    np.testing.assert_allclose(found.numpy(), np.cos(Y) * X.sum(1)[:, None])


def test_an_inner_function_writes_into_tensors_of_its_own() -> None:
    def own(b: Any, a: Any) -> Any:
        made = ag.zeros(2, dtype=np.float64) + b
        made[0] = a[0]
        made += a[1]
        return made

    found = ag.vmap(lambda a: ag.vmap(lambda b: own(b, a))(ag.tensor(Y)))(ag.tensor(X))
    wanted = [[[a[0] + a[1], b + a[1]] for b in Y] for a in X]
    np.testing.assert_allclose(found.numpy(), wanted)

    def foreign(a: Any) -> Any:
        copy = a * 1.0
        for write in (lambda b: copy.__setitem__(0, b), copy.__iadd__):
            with pytest.raises(ArgumentError, match="outer one"):
                ag.vmap(write)(ag.tensor(Y))
        return copy

    np.testing.assert_array_equal(ag.vmap(foreign)(ag.tensor(X)).numpy(), X)


def test_axes_nesting_and_constants() -> None:
    x = ag.tensor(rng.normal(size=(2, 5, 3)))
    found = ag.vmap(lambda m: m.sum(0), in_dims=1, out_dims=1)(x)
    np.testing.assert_allclose(found.numpy(), x.numpy().sum(0).T)
    nested = ag.vmap(ag.vmap(lambda a, b: (a * b).sum(), in_dims=(0, None)), in_dims=(None, 0))(ag.tensor(X), ag.tensor(X))
    np.testing.assert_allclose(nested.numpy(), X @ X.T)
    first, second = ag.vmap(lambda r: (r + np.arange(3.0), ag.ones(2)))(ag.tensor(X))
    np.testing.assert_allclose(first.numpy(), X + np.arange(3))
    assert second.shape == (5, 2)
    chosen = ag.vmap(lambda r, i: r[i])(ag.tensor(X), ag.tensor([0, 2, 1, 0, 2]))
    np.testing.assert_allclose(chosen.numpy(), X[np.arange(5), [0, 2, 1, 0, 2]])
    assert ag.vmap(lambda r: ag.where(r > 0, r, 0.0).max())(ag.tensor(X)).tolist() == np.where(X > 0, X, 0).max(1).tolist()
    solved = ag.vmap(ag.linalg.solve)(ag.tensor(X[:, :, None] * 0 + np.eye(3) * 2), ag.tensor(X))
    np.testing.assert_allclose(solved.numpy(), X / 2)


def test_several_axes_no_axis_and_an_axis_that_is_not_there() -> None:
    batch = ag.tensor(rng.normal(size=(4, 2, 3)))
    for function in (lambda x: ag.softmax(x, (0, 1)), lambda x: ag.log_softmax(x, (0, -1)), lambda x: ag.argsort(x, None)):
        found = ag.vmap(function)(batch)
        np.testing.assert_allclose(found.numpy(), np.stack([function(x).numpy() for x in batch]))
    for function in (
        lambda x: x.sum(2), lambda x: x.softmax(-3), lambda x: x.argmax(2), lambda x: x.swapaxes(0, 2), lambda x: x.squeeze(2), lambda x: x.cumsum(2),
        lambda x: x.unsqueeze(3), lambda x: ag.stack([x, x], 3), lambda x: ag.cat([x, x], 2), lambda x: ag.permute(x, (1, 2)),
    ):  # fmt: skip
        for run in (lambda f=function: f(batch[0]), lambda f=function: ag.vmap(f)(batch)):
            assert_raises(IndexRangeError, None, run)


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda: ag.vmap(lambda a, b: a + b)(ag.ones(3), ag.ones(2)), ShapeError),
        (lambda: ag.vmap(lambda a: a, in_dims=None)(ag.ones(3)), ShapeError),
        (lambda: ag.vmap(lambda a: a)(ag.ones((0, 2))), ShapeError),
        (lambda: ag.vmap(lambda a: a, in_dims=(0, 0))(ag.ones(3)), ArgumentError),
        (lambda: ag.vmap(lambda a: a if a > 0 else -a)(ag.ones(3)), ArgumentError),
        (lambda: ag.vmap(lambda a: ag.tensor(a.item()))(ag.ones(3)), ArgumentError),
        (lambda: ag.vmap(lambda a: 3)(ag.ones(3)), ArgumentTypeError),
    ],
)
def test_wrong_use_ends_in_a_typed_error(call: Any, error: type[Exception]) -> None:
    assert_raises(error, None, call)


async def test_a_failed_function_leaves_nothing_behind() -> None:
    known = ag.__array_namespace_info__().devices()

    async def fails(row: Any) -> Any:
        return await ag.grad(row.sum(), row)

    await assert_awaiting_raises(NoGraphError, None, ag.vmap(fails)(ag.ones((2, 3))))
    assert_raises(ShapeError, None, lambda: ag.vmap(lambda r: r.reshape(7))(ag.ones((2, 3))))
    assert ag.__array_namespace_info__().devices() == known


@pytest.mark.parametrize(
    "write",
    [
        lambda y: y[1:3].__imul__(2.0),
        lambda y: y.reshape(-1)[1:].__setitem__(0, y[0]),
        lambda y: y[::-1][:1].__iadd__(y.sum()),
        lambda y: y.__setitem__(slice(1, 3), y[:2] * 3.0),
    ],
    ids=["part", "view-of-view", "reversed", "itself"],
)
async def test_writes_through_views_are_seen_by_all_that_share_the_memory(write: Any) -> None:
    def written(x: Any) -> Any:
        y = x * 1.0
        first, last = y[:2], y[-1:]
        write(y)
        return y, first, last, (y * y).sum()

    x = ag.tensor(rng.normal(size=(4, 3)), requires_grad=True)
    found = ag.vmap(written)(x)
    wanted = [ag.stack(parts) for parts in zip(*(written(x[i]) for i in range(4)), strict=True)]
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.detach().numpy(), other.detach().numpy())
    seeds = [ag.tensor(rng.normal(size=part.shape)) for part in wanted]
    (gradient,) = await ag.grad(found, x, seeds)
    (expected,) = await ag.grad(wanted, x, seeds)
    np.testing.assert_allclose(gradient.numpy(), expected.numpy())


async def test_detach_and_no_grad_in_the_function_stop_the_gradient_of_the_caller() -> None:
    def tripled(x: Any) -> Any:
        with ag.no_grad():
            return x * 3.0

    for function, wanted in ((lambda x: x.detach() * x, X), (lambda x: tripled(x) * x, 3.0 * X)):
        x = ag.tensor(X, requires_grad=True)
        await ag.vmap(function)(x).sum().backward()
        assert x.grad is not None
        np.testing.assert_allclose(x.grad.numpy(), wanted)


def _read(x: Any) -> Any:
    y = x * 2.0
    part = y[1:]
    apart = part.detach()
    y += 1
    return apart


def _written(x: Any) -> Any:
    y = x * 2.0
    part, apart = y[1:], y.detach()
    apart += 1
    return y, part, apart


def _of_a_part(x: Any) -> Any:
    y = x * 2.0
    part = y[::-1]
    apart = part.detach().detach()
    end = apart[1:]
    end[0] = 7.0
    return y, part, apart, end


def _assigned(x: Any) -> Any:
    y = x * 2.0
    y.data = ag.ones(3, dtype=np.float64)
    return y * x


def _quietly(x: Any) -> Any:
    y = x * 2.0
    part = y[1:]
    with ag.no_grad():
        part += x[1:]
        y[:2] = 3.0
    return y, part


@pytest.mark.parametrize("function", [_read, _written, _of_a_part, _assigned, _quietly])
@pytest.mark.parametrize("within", ["vmap", "jvp in vmap", "vmap in jvp"])
async def test_detached_tensors_share_memory_and_writes_without_recording_leave_derivatives(function: Any, within: str) -> None:
    """Values, gradients and tangents as of the function alone."""

    def listed(x: Any) -> Any:
        returned = function(x)
        return returned if isinstance(returned, tuple) else (returned,)

    async def pushed(x: Any) -> Any:
        values, tangents = await ag.jvp(listed, x, x.detach() * 2.0)
        return *values, *tangents

    batch = ag.tensor(X)
    if within == "vmap":
        found = ag.vmap(listed)(batch)
        wanted = [ag.stack(parts) for parts in zip(*map(listed, (batch * 1)), strict=True)]
        leaves = [batch.clone().requires_grad_() for _ in range(2)]
        results = [ag.vmap(listed)(leaves[0]), [ag.stack(parts) for parts in zip(*map(listed, leaves[1] * 1), strict=True)]]
        if results[1][0].requires_grad:
            for outputs in results:
                await sum((part * part).sum() for part in outputs if part.requires_grad).backward()
            np.testing.assert_allclose(leaves[0].grad.numpy(), leaves[1].grad.numpy())
        assert [part.requires_grad for part in results[0]] == [part.requires_grad for part in results[1]]
    else:
        wanted = [ag.stack(parts) for parts in zip(*[await pushed(row) for row in batch * 1], strict=True)]
        if within == "jvp in vmap":
            found = await ag.vmap(pushed)(batch)
        else:
            values, tangents = await ag.jvp(ag.vmap(listed), batch, batch * 2.0)
            found = (*values, *tangents)
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one.detach().numpy(), other.detach().numpy())


@pytest.mark.parametrize("take", [lambda y: y[::-1], lambda y: y.reshape(3, 1)[:, 0], lambda y: y.detach()[::-1]], ids=["part", "parts", "detached"])
async def test_writes_through_views_on_arrays_of_two_levels(take: Any) -> None:
    def written(x: Any) -> Any:
        y = x * 2.0
        part = take(y)
        part[0] = x[1].detach() * 3.0
        return y

    async def pushed(x: Any) -> Any:
        return await ag.jvp(written, x, x)

    found = await ag.vmap(pushed)(ag.tensor(X))
    for mine, theirs in zip(found, zip(*[await pushed(row) for row in ag.tensor(X) * 1], strict=True), strict=True):
        np.testing.assert_allclose(mine.numpy(), ag.stack(theirs).numpy())


def test_a_write_into_a_detached_tensor_takes_no_values_with_a_gradient() -> None:
    def function(x: Any) -> Any:
        apart = ag.zeros_like(x).detach()
        apart += x
        return apart

    np.testing.assert_array_equal(ag.vmap(function)(ag.tensor(X)).numpy(), X)
    assert_raises(InPlaceError, "written into a tensor of detach", ag.vmap(function), leaf(X))


def test_a_tensor_of_a_batch_is_where_its_values_are() -> None:
    for move in (lambda t: t.cpu(), lambda t: t.to("cpu"), lambda t: t.to_device("cpu"), lambda t: t.to(ag.tensor(1.0, dtype=np.float64))):

        def function(x: Any, move: Any = move) -> Any:
            y = x * 2.0
            there = move(y)
            assert there is y
            there += 1
            return y

        np.testing.assert_array_equal(ag.vmap(function)(ag.tensor(X)).numpy(), X * 2 + 1)
    with ToyDevice("toy:0"):
        moved = ag.vmap(lambda x, w: (x.to("toy:0") * 2.0 + w.to("toy:0"), x.to("toy:0").to("cpu")), (0, None))(ag.tensor(X), ag.tensor(X[0]))
        assert [part.device for part in moved] == ["toy:0", "cpu"]
        np.testing.assert_array_equal(moved[0].cpu().numpy(), X * 2 + X[0])
        np.testing.assert_array_equal(moved[1].numpy(), X)


def test_values_of_examples_are_not_written_into_tensors_from_outside() -> None:
    buffer = ag.zeros(3, dtype=np.float64)
    with pytest.raises(ag.errors.ShapeError, match="vmap: values that differ from example to example are written into a tensor from outside"):
        ag.vmap(lambda x: buffer.__setitem__(0, x[0]))(ag.tensor(X))
    assert not buffer.numpy().any()


@pytest.mark.parametrize(
    "draws",
    [
        lambda x: F.dropout(x, 0.5), ag.nn.Dropout(0.5), lambda x: x * ag.rand(3), lambda x: x + ag.randn_like(x),
        lambda x: x + ag.randint(0, 9, (3,)), lambda x: x[ag.randperm(3)], lambda x: x * ag.Generator(0).bernoulli(0.5, 3),
    ],
    ids=["dropout", "module", "rand", "like", "randint", "permutation", "own"],
)  # fmt: skip
async def test_a_function_that_draws_is_refused_before_the_generator_advances(draws: Any) -> None:
    async def later(x: Any) -> Any:
        return draws(x)

    ag.seed(0)
    before = ag.default_generator().state_dict()
    assert_raises(ArgumentError, "the function draws random numbers", lambda: ag.vmap(draws)(ag.tensor(X)))
    await assert_awaiting_raises(ArgumentError, "the function draws random numbers", ag.vmap(later)(ag.tensor(X)))
    await assert_awaiting_raises(ArgumentError, "the function draws random numbers", ag.vmap(lambda x: later(x))(ag.tensor(X)))
    assert ag.default_generator().state_dict() == before
    jacobian = await ag.jacobian(lambda x: F.dropout(x, 0.5), leaf(X[0]))
    assert jacobian.shape == (3, 3), "rows of one Jacobian are of one draw"
    np.testing.assert_array_equal(ag.vmap(ag.nn.Dropout(0.5).eval())(ag.tensor(X)).numpy(), X)


async def test_a_function_that_is_cancelled_before_its_first_step_leaves_nothing_behind() -> None:
    ran: list[Any] = []

    async def function(row: Any) -> Any:
        ran.append(row)
        return row

    for mapped in (ag.vmap(function), ag.vmap(function, out_dims=1)):
        known = known_devices()
        task = asyncio.create_task(mapped(ag.tensor(X)))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert known_devices() == known and not ran
