"""Jacobians whose rows or columns run together: every row of the op tables, functions with rules of their own, blocks of any size."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.engine.run.dispatch import RuleDispatch
from aiograd.errors import ArgumentError, NoRuleError, OnceDifferentiableError
from aiograd.ops import ROWS
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE, DOMAINS, drawn, floating
from tests.support import assert_awaiting_raises
from tests.sweeps import swept

rng = np.random.default_rng(0)


def close(found: Any, expected: Any) -> None:
    np.testing.assert_allclose(found.detach().numpy(), expected, rtol=1e-9, atol=1e-10)


async def one_by_one(fn: Any, x: Any) -> Any:
    """The Jacobian by a pass for each row."""
    x = x.detach().requires_grad_()
    y = fn(x)
    rows = []
    for i in range(y.size):
        seed = np.zeros(y.size, y.dtype)
        seed[i] = 1
        (row,) = await ag.grad(y, [x], ag.tensor(seed.reshape(y.shape)), retain_graph=True, allow_unused=True)
        rows.append(np.zeros(x.shape) if row is None else row.numpy())
    return np.array(rows).reshape((*y.shape, *x.shape))


@pytest.mark.parametrize("name", swept(DIFFERENTIABLE, keep=40))
async def test_rows_and_columns_of_every_op_run_together(name: str) -> None:
    domain, row = DOMAINS[name], ROWS[name]
    for args, kwargs in drawn(domain, 2, 60, False):
        for key in [i for i, a in enumerate(args) if floating(a)]:

            def outputs(x: Any, args: Any = args, kwargs: Any = kwargs, key: int = key) -> Any:
                out = domain.call(row, [*args[:key], x, *args[key + 1 :]], kwargs)
                return out if isinstance(out, tuple) else (out,)

            x = ag.tensor(args[key])
            number = next((i for i, y in enumerate(outputs(x.detach().requires_grad_())) if y.requires_grad and y.dtype.kind == "f"), None)
            if number is None or x.dtype.kind != "f":
                continue
            function = lambda x, outputs=outputs, number=number: outputs(x)[number]  # noqa: E731
            expected = await one_by_one(function, x)
            close(await ag.jacrev(function, x), expected)
            close(await ag.jacfwd(function, x), expected)


class Counted(ag.Function):
    """The square, which counts its rules and reads the values of its gradient where it is told to."""

    forwards, backwards = 0, 0
    reads = False

    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        Counted.forwards += 1
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        Counted.backwards += 1
        (x,) = ctx.saved_tensors
        return 2 * x * (ag.tensor(g.numpy()) if Counted.reads else g)


@pytest.fixture
def counted() -> Any:
    Counted.forwards = Counted.backwards = 0
    yield Counted
    Counted.reads = False


async def test_one_pass_carries_all_rows_of_a_block(counted: Any) -> None:
    x = ag.tensor(rng.normal(size=(2, 3)))
    expected = np.diag(2 * x.numpy().reshape(-1)).reshape(2, 3, 2, 3)
    for chunk_size, passes in ((None, 1), (6, 1), (4, 2), (1, 6)):
        counted.forwards = counted.backwards = 0
        close(await ag.jacrev(counted.apply, x, chunk_size=chunk_size), expected)
        assert (counted.forwards, counted.backwards) == (1, passes)
    counted.reads = True
    close(await ag.jacrev(counted.apply, x), expected)
    assert counted.backwards > 6, "a rule that reads the values of its gradient runs for each row"


async def test_columns_run_together_and_jacobian_takes_the_shorter_side(counted: Any) -> None:
    x = ag.tensor(rng.normal(size=(2, 3)))
    expected = np.diag(2 * x.numpy().reshape(-1)).reshape(2, 3, 2, 3)
    for chunk_size, runs in ((None, 1), (4, 2), (1, 6)):
        counted.forwards = 0
        close(await ag.jacfwd(counted.apply, x, chunk_size=chunk_size), expected)
        assert counted.forwards == runs
    tall = lambda x: ag.concatenate([counted.apply(x), x, x * 3.0])  # noqa: E731
    wide = lambda x: counted.apply(x).sum(0)  # noqa: E731
    for function in (tall, wide):
        for create_graph in (False, True):
            close(await ag.jacobian(function, x, create_graph=create_graph), (await ag.jacrev(function, x)).numpy())
    x.requires_grad_()
    found = await ag.jacobian(tall, x, create_graph=True)
    (grad,) = await ag.grad((found * found).sum(), [x])
    close(grad, 8 * x.detach().numpy())


async def test_columns_of_several_inputs_and_outputs() -> None:
    x, y = ag.tensor(rng.normal(size=(2, 3))), ag.tensor(rng.normal(size=4).astype(np.float32))

    async def function(x: Any, y: Any) -> Any:
        assert float(x.sum()) != 0, "a value may be read"
        return ag.tanh(x).sum(0) * x[0, 0], y.astype(np.float64) * x.sum(), ag.ones(2)

    for chunk_size in (None, 3):
        by_rows, by_columns = await ag.jacrev(function, (x, y)), await ag.jacfwd(function, (x, y), chunk_size=chunk_size)
        for mine, theirs in zip(by_columns, by_rows, strict=True):
            for a, b in zip(mine, theirs, strict=True):
                assert a.shape == b.shape and a.dtype == b.dtype
                np.testing.assert_allclose(a.numpy(), b.numpy(), rtol=1e-6)
    assert (await ag.jacfwd(lambda x: x * 2.0, ag.tensor(np.zeros((0, 2))))).shape == (0, 2, 0, 2)
    assert (await ag.jacfwd(lambda x: x.sum(), ag.tensor(np.zeros(0)))).shape == (0,)
    twice = await ag.jacfwd(lambda x: ag.jacfwd(lambda x: (x**3).sum() * x[0, 0], x), x)
    close(twice, (await ag.hessian(lambda x: (x**3).sum() * x[0, 0], x)).numpy())
    close(await ag.jacrev(lambda x: ag.jacfwd(lambda x: (x**3).sum() * x[0, 0], x), x), twice.numpy())


async def test_a_result_that_must_not_be_differentiated_again_says_so() -> None:
    class Once(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @ag.once_differentiable
        def backward(ctx: Any, g: Any) -> Any:
            return 2 * ctx.saved_tensors[0] * g

    x = ag.tensor([1.0, 2.0], requires_grad=True)
    close(await ag.jacobian(Once.apply, x), np.diag([2.0, 4.0]))
    tall = lambda x: ag.concatenate([Once.apply(x), x])  # noqa: E731
    close(await ag.jacobian(tall, x), np.concatenate([np.diag([2.0, 4.0]), np.eye(2)]))  # it has no tangent, so by rows
    with pytest.raises(NoRuleError):
        await ag.jacfwd(tall, x.detach())
    j = await ag.jacobian(Once.apply, x, create_graph=True)
    with pytest.raises(OnceDifferentiableError):
        await ag.grad(j.sum(), [x])


async def test_through_programs_checkpoints_views_and_parameters() -> None:
    w = ag.tensor(rng.normal(size=(4, 4)), requires_grad=True)

    def body(x: Any) -> Any:
        h = w @ x
        h[1:] *= 2.0
        return ag.softmax(ag.tanh(h), axis=0) * x.sum()

    x = ag.tensor(rng.normal(size=4))
    expected = await one_by_one(body, x)
    program = ag.compile(body)
    for function in (body, program, program, program, lambda x: ag.checkpoint(body, x)):
        close(await ag.jacrev(function, x), expected)
    jac = await ag.jacobian(body, x, create_graph=True)
    (found,) = await ag.grad((jac * jac).sum(), [w])

    async def norm(weight: Any) -> Any:
        h = lambda x: ag.softmax(ag.tanh(weight @ x * ag.tensor([1.0, 2.0, 2.0, 2.0])), axis=0) * x.sum()  # noqa: E731
        jac = await ag.jacobian(h, x, create_graph=True)
        return (jac * jac).sum()

    assert await ag.gradcheck(norm, (w,))
    close((await ag.grad(await norm(w), [w]))[0], found.numpy())


@pytest.mark.parametrize("call", [ag.jacrev, ag.jacfwd, ag.jacobian, ag.hessian])
async def test_a_chunk_size_is_a_positive_integer(call: Any) -> None:
    ran: list[Any] = []
    for wrong in (0, -1, 2.0, True, "3"):
        await assert_awaiting_raises(ArgumentError, "chunk_size", call(lambda x: ran.append(x), ag.tensor([1.0]), chunk_size=wrong))
    assert not ran


async def test_the_rules_of_a_large_block_leave_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    offloaded: list[Any] = []
    offload = RuleDispatch.offload

    def counted(self: RuleDispatch, function: Any) -> Any:
        offloaded.append(function)
        return offload(self, function)

    monkeypatch.setattr(RuleDispatch, "offload", counted)
    x, w = ag.tensor(rng.normal(size=400)), ag.tensor(rng.normal(size=(400, 400)) / 20)
    function = lambda x: ag.tanh(w @ x)  # noqa: E731
    found = await ag.jacrev(function, x)
    assert offloaded, "400 rows take long, whatever one of them takes"
    offloaded.clear()
    _, row = await ag.vjp(function, x, ag.tensor(np.eye(400)[7]))
    close(found[7], row.numpy())
    assert not offloaded


async def test_a_pass_over_a_graph_of_the_caller_within_vmap(counted: Any) -> None:
    x = ag.tensor(rng.normal(size=3), requires_grad=True)
    seen: list[Any] = []
    y = counted.apply(x)
    y.register_hook(lambda g: seen.append(g.shape))
    seeds = ag.tensor(rng.normal(size=(4, 3)))
    (found,) = await ag.vmap(lambda seed: ag.grad(y, [x], seed, retain_graph=True))(seeds)
    close(found, 2 * x.detach().numpy() * seeds.numpy())
    assert (counted.backwards, seen, x.grad) == (1, [(3,)], None)
