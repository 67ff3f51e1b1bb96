"""Compiled functions inside of `ag.jvp`: one program of values and tangents, with the bits of the eager call, and what runs row by row instead."""

from __future__ import annotations

import asyncio
import copy
import tracemalloc
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.compiler.calls import ArrayCode, Call, Form, Ref
from aiograd.compiler.linear_code import halves_of
from aiograd.compiler.native import tiers
from aiograd.compiler.source import SourceFile
from aiograd.errors import ShapeError
from aiograd.forward.dual import ForwardLevel, Pending
from aiograd.nn import functional as F
from aiograd.running.modes import ModeScope
from aiograd.tensors.core import make
from tests.compiler.test_rows import DIFFERENTIABLE, functions_of, other
from tests.support import assert_awaiting_raises
from tests.sweeps import swept

rng = np.random.default_rng(3)
TIERS = ["numpy", pytest.param("native", marks=pytest.mark.skipif(tiers.native_problem() is not None, reason=str(tiers.native_problem())))]


def drawn(*shape: int, dtype: Any = np.float64) -> Any:
    return ag.tensor(rng.normal(size=shape).astype(dtype))


A, W, INDEX = drawn(3, 4), ag.tensor(rng.normal(size=(4, 4)), requires_grad=True), np.array([2, 0, 1])


def under_no_grad(x: Any) -> Any:
    with ag.no_grad():
        y = x * 2
    return x * y


FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "elementwise": lambda x: (x.sin() * x + x.exp() / 2 - x.tanh()).abs() ** 1.5,
    "several outputs": lambda x: (x.sin(), (x * 2).sum(0), A * 2, x.detach() * 3),
    "an argument and parts": lambda x: (x, x[0], x.T),
    "parts of a value": lambda x: (lambda y: (y, y[0], y.T))(x * 2),
    "detached": lambda x: (x * 3).detach(),
    "detached inside": lambda x: x * x.detach() + x.detach()[0],
    "no_grad inside": under_no_grad,
    "matrices": lambda x: ((x @ W).relu() @ W, ag.einsum("ij,kj->ik", x, A)),
    "reductions": lambda x: (x.mean(), x.var(0), x.std(), x.prod(1), x.logsumexp(-1), x.max(), x.cumsum(0)),
    "scalars": lambda x: x.sum() * x.sum().sin(),
    "moved": lambda x: (x.reshape(-1).reshape(4, 3), x[INDEX], x[1:, ::2] * x[:2, :2], ag.cat([x, A], 0), ag.stack([x, A * x]), (x[0] + A) * x),
    "an index that is computed": lambda x: x[:, x.argmax(1)] * x[x.argmin(0)][:3, :3],
    "choices": lambda x: (ag.where(x > 0, x, x * x), ag.maximum(x, A), ag.maximum(x, x), x.clamp(-0.5, 0.5), x.sort(-1)[0]),
    "networks": lambda x: (x.softmax(-1), F.layer_norm(x, (4,)), F.gelu(x), F.cross_entropy(x, INDEX), F.mse_loss(x, A)),
    "dtypes": lambda x: ((x.astype(np.float32) * 2).astype(np.float64), (x * (1 + 2j)).abs()),
    "decompositions": lambda x: (ag.linalg.svd(x, full_matrices=False)[1], ag.linalg.inv(x[:, :3] + 9 * ag.eye(3, dtype=np.float64))),
    "draws": lambda x: (F.dropout(x * 2, 0.5), x * ag.rand(3, 4, dtype=np.float64)),
    "numbers": lambda x: ag.zeros(3, 4, dtype=np.float64) + x,
    "rounded": lambda x: (x.floor(), x.round() * x, x.ceil().sort(0)[0], x.trunc().std(), x * 2),
    "made where x is": lambda x: (
        x + x.new_zeros(3, 4) + ag.eye(3, 4, device=x.device), A.to(x.device), x.to("cpu") * ag.tensor(2.0, device=x.device)
    ),
    "draws where x is": lambda x: (x + ag.rand_like(x), x * ag.bernoulli(ag.ones_like(x) * 0.5), x * ag.randint_like(x, 3)),
    "no argument": lambda x: A * 2,
}


def seen(result: Any) -> list[bytes]:
    """The bits of values and tangents."""
    if isinstance(result, (tuple, list)):
        return [each for part in result for each in seen(part)]
    return [result.detach().numpy().tobytes() + str((result.shape, result.dtype)).encode()]


async def check(function: Any, compiled: Any, inputs: Any, vectors: Any, **options: Any) -> None:
    """Equal bits of values and tangents, of the eager and the compiled function."""
    found = []
    for each in (function, compiled):
        ag.seed(0)
        found.append(seen(await ag.jvp(each, inputs, vectors, **options)))
    assert found[0] == found[1]


@pytest.mark.one_loop
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("name", FUNCTIONS)
async def test_values_and_tangents_have_the_bits_of_the_eager_call(name: str, tier: Any) -> None:
    function = FUNCTIONS[name]
    compiled = ag.compile(function, tier=tier)
    for _ in range(3):
        await check(function, compiled, drawn(3, 4), drawn(3, 4))
    statistics = compiled.statistics()
    assert (statistics.recordings, statistics.runs, statistics.eager, statistics.reasons) == (1, 2, 0, {})
    if tier == "native" and name in ("elementwise", "scalars", "choices"):
        assert statistics.native_runs > 0


async def pushed(function: Any, x: Any, tangents: list[Any]) -> tuple[list[Any], int]:
    """The bits of the values of a function, and of its tangents for tangents that come later; the number of steps that these take."""
    with ForwardLevel(deferred=True) as level:
        place = level.later()
        with ModeScope(grad=False, tangents=True):
            returned = function(level.dual(x, place))
        parts = [level.parts(output) for output in (returned if isinstance(returned, tuple) else (returned,))]
    found: list[Any] = []
    for tangent in tangents:
        known = await level.settle({place.number: tangent})
        found.append([known[t.number] if isinstance(t, Pending) else t for _, t, _ in parts])
    return [seen([value for value, _, _ in parts]), *[[None if t is None else seen(ag.asarray(t)) for t in each] for each in found]], len(level.steps)


@pytest.mark.one_loop
@pytest.mark.parametrize("name", FUNCTIONS)
async def test_tangents_that_come_later_are_one_step_of_the_program(name: str) -> None:
    function = FUNCTIONS[name]
    compiled = ag.compile(function)
    for call in range(3):
        x, tangents = drawn(3, 4), [*[drawn(3, 4)._data for _ in range(3)], np.asfortranarray(drawn(3, 4)._data), None]
        found = []
        for each in (function, compiled):
            ag.seed(0)
            found.append(await pushed(each, x, tangents))
        assert found[0][0] == found[1][0], "also of those that were pushed before others"
        assert found[1][1] == 1 or call == 0 or "draws" in name or name in ("numbers", "no argument"), "one step"
    statistics = compiled.statistics()
    assert statistics.recordings == 1 and statistics.runs == (0 if "draws" in name else 2)
    assert ("draws" in name) == bool(statistics.reasons)


def test_memory_that_tangents_are_written_to_is_made_for_each_push() -> None:
    x, t, made, other, out = (Ref(name, (3,), np.dtype(float), (8,)) for name in ("i0", "d_i0", "t1", "t2", "v0"))
    calls = (
        Call(Form.CALL, np.sin, "sin", (x,), (out,), fresh=True),
        Call(Form.CALL, np.cos, "cos", (x,), (made,), fresh=True),
        Call(Form.CALL, np.multiply, "multiply", (made, t), (other,), out=made),
    )
    halves = halves_of(ArrayCode("forward", (x, t), calls, ((out, other), ())), [t], [True], SourceFile())
    assert halves is not None
    values, push = halves
    (value,), saved = values(np.arange(3.0))
    first, second = (push(saved, [np.full(3, number)])[0] for number in (2.0, 3.0))
    assert np.array_equal(value, np.sin(np.arange(3.0)))
    assert np.array_equal(first, 2 * np.cos(np.arange(3.0))) and np.array_equal(second, 3 * np.cos(np.arange(3.0)))


async def test_tangents_of_another_level_go_through_the_rows() -> None:
    compiled = ag.compile(f := lambda x: (x @ W).sin() * x[0])
    x = drawn(3, 4)

    async def of(function: Any, tangent: Any) -> Any:
        with ForwardLevel(deferred=True) as level:
            place = level.later()
            with ModeScope(grad=False, tangents=True):
                _, moved, _ = level.parts(function(level.dual(x, place)))
            return make((await level.settle({place.number: tangent._data}))[moved.number])

    for _ in range(3):
        batch = drawn(5, 3, 4)
        assert seen(await ag.vmap(lambda t: of(f, t))(batch)) == seen(await ag.vmap(lambda t: of(compiled, t))(batch))
        await check(lambda t: of(f, t), lambda t: of(compiled, t), drawn(3, 4), drawn(3, 4))
    assert compiled.statistics().runs == 5


async def check_row(name: str, dtype: Any) -> None:
    for function, arguments, text in functions_of(name, dtype, (2, 200)):
        compiled = ag.compile(function)
        for by in (0.0, 1e-4, -1e-4):
            values = tuple([ag.tensor(other(argument, by)) for argument in arguments])
            vectors = tuple([ag.asarray(np.cos(np.arange(value.size) + 1).reshape(value.shape).astype(value.dtype)) for value in values])
            if not all([output.dtype.kind == "f" for output in function(*values)] or [False]):
                continue  # they are integers or complex
            found = [seen(await ag.jvp(call, values, vectors)) for call in (function, compiled)]
            assert found[0] == found[1], f"{text} at {by}"
        statistics = compiled.statistics()
        assert not statistics.breaks and statistics.recordings <= 1 and statistics.runs in (0, 2), statistics


@pytest.mark.parametrize("name", swept(DIFFERENTIABLE, keep=20))
@pytest.mark.parametrize("dtype", [np.float64, np.float32])
def test_row(name: str, dtype: Any) -> None:
    with warnings.catch_warnings(action="ignore", category=RuntimeWarning):
        ag.run(check_row(name, dtype), tune_gc=False)


@pytest.mark.one_loop
@pytest.mark.parametrize("tier", TIERS)
async def test_one_program_serves_every_call(tier: Any) -> None:
    calls = []

    def chain(x: Any, a: Any, b: Any) -> Any:
        calls.append(1)
        for _ in range(100):
            x = x * a + b
        return x

    compiled = ag.compile(chain, tier=tier)
    a, b = drawn(4, dtype=np.float32), drawn(4, dtype=np.float32)
    for _ in range(5):
        await check(lambda x: chain(x, a, b), lambda x: compiled(x, a, b), drawn(4, dtype=np.float32), drawn(4, dtype=np.float32))
    assert len(calls) == 6, "five eager calls and one that was recorded"
    (program,) = compiled.programs
    # the tangent of x * a + b is a product more: no addition, and nothing for a and b
    assert (program.source.count("multiply("), program.source.count("add(")) == (200, 100)
    assert "float32[4] of jvp, tangent" in program.signature and program.source.count("chain") == 0
    assert f"{__name__.rpartition('.')[2]}.py" in program.source, "each line names the user's"
    for _ in range(2):  # tangents of others make another program
        await check(chain, compiled, (drawn(4), drawn(4), drawn(4)), (drawn(4), drawn(4), drawn(4)))
    assert len(compiled.programs) == 2


async def test_guards_of_programs_hold_for_tangents() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh())
    other = copy.deepcopy(model)
    compiled = ag.compile(other)
    for step in range(8):
        await check(model, compiled, drawn(8, 4, dtype=np.float32), drawn(8, 4, dtype=np.float32))
        assert seen([*model.state_dict().values()]) == seen([*other.state_dict().values()]), "running statistics move once"
        for each in (model, other):
            each.train(step % 4 < 2)
            with ag.no_grad():
                each[0].weight *= 1.5
    assert compiled.statistics().recordings == 2 and compiled.statistics().runs == 6
    scale = 2.0
    compiled = ag.compile(f := lambda x: x * scale)
    for scale in (2.0, 2.0, 3.0, 3.0, 2.0):  # noqa: B007 - the function reads it
        await check(f, compiled, drawn(3), drawn(3))
    assert compiled.statistics().runs == 3


async def test_plain_calls_and_those_inside_of_jvp_have_programs_of_their_own() -> None:
    compiled = ag.compile(f := lambda x: (x * x).sum())
    x = drawn(3)
    for _ in range(3):
        assert seen(compiled(x)) == seen(f(x))
        await check(f, compiled, x, drawn(3))
        with ag.no_grad():
            await check(lambda x: x * f(x), lambda x: x * compiled(x), x, drawn(3))

        def without(x: Any) -> Any:
            with ag.no_grad():
                return compiled(x) * 2

        assert seen(await ag.jvp(without, x, x))[1] == seen(ag.zeros((), dtype=np.float64))[0]
    assert compiled.statistics().signatures == 2 and compiled.statistics().reasons == {}


async def test_an_async_function_and_many_tasks_at_once() -> None:
    @ag.compile
    async def compiled(x: Any) -> Any:
        await asyncio.sleep(0) if False else None
        return x.sin() * x

    async def both(x: Any, v: Any) -> None:
        await check(lambda x: x.sin() * x, compiled, x, v)

    await both(drawn(5), drawn(5))
    async with asyncio.TaskGroup() as group:
        for _ in range(20):
            group.create_task(both(drawn(5), drawn(5)))
    assert len(compiled.programs) == 1 and compiled.statistics().runs == 20


async def test_nested_transforms_and_graphs_run_row_by_row() -> None:
    def f(x: Any) -> Any:
        return (x.sin() * x).sum()

    compiled = ag.compile(f)
    x, v, batch = drawn(3), drawn(3), drawn(2, 3)

    async def tangent(function: Any, x: Any) -> Any:
        return (await ag.jvp(function, x, v))[1]

    async def gradient(function: Any, x: Any) -> Any:
        return (await ag.value_and_grad(function, x))[1]

    for _ in range(3):
        await check(lambda x: tangent(f, x), lambda x: tangent(compiled, x), x, v)
        await check(lambda x: gradient(f, x), lambda x: gradient(compiled, x), x, v)
        await check(ag.vmap(f), ag.vmap(compiled), batch, batch)
        assert seen(await ag.vmap(lambda x: tangent(compiled, x))(batch)) == seen(await ag.vmap(lambda x: tangent(f, x))(batch))
        await check(f, compiled, x, v, create_graph=True)
        await check(f, compiled, x, v, strict=True)
        await check(f, compiled, x, v)
    assert compiled.statistics().runs == 2, "the plain ones have a program"
    recordings, reasons = compiled.statistics().recordings, compiled.statistics().reasons
    for _ in range(3):
        await check(ag.vmap(f), ag.vmap(compiled), batch, batch)
    assert compiled.statistics().recordings == recordings and compiled.statistics().reasons == reasons, "calls add nothing"
    assert all("transforms" in reason or "gradients are wanted" in reason for reason in reasons.values()) and len(reasons) == 3


async def test_two_levels_at_once_run_row_by_row() -> None:
    compiled = ag.compile(f := lambda x, y: x * y.sin())
    x, y, v = drawn(3), drawn(3), drawn(3)

    async def mixed(function: Any, x: Any) -> Any:  # x is of the outer call, y of the inner one
        return (await ag.jvp(lambda y: function(x, y), y, v))[1]

    for _ in range(3):
        await check(f, compiled, (x, y), (v, v))
        await check(lambda x: mixed(f, x), lambda x: mixed(compiled, x), x, v)


@pytest.mark.parametrize(
    ("reason", "function"),
    {
        "modifies a tensor in place": lambda x: _written(x * 1),
        "reads the value": lambda x: x * 2 if float(x.sum()) > -1e9 else x,
        "no argument": lambda x: x * OUTER[0],
        "one tensor twice": lambda x: (lambda y: (y, y.detach()))(x * 2),
    }.items(),
)
async def test_what_a_program_cannot_repeat_runs_row_by_row(reason: str, function: Any) -> None:
    compiled = ag.compile(function)

    async def inner(function: Any, x: Any) -> Any:
        OUTER[:] = [x * 3]
        return function(x)

    with warnings.catch_warnings(action="error"):
        for _ in range(3):
            await check(lambda x: inner(function, x), lambda x: inner(compiled, x), drawn(3), drawn(3))
    statistics = compiled.statistics()
    assert (statistics.runs, statistics.recordings) == (0, 1)
    assert all(reason in each for each in statistics.reasons.values()) and len(statistics.reasons) == 1
    OUTER.clear()


OUTER: list[Any] = []


def _written(y: Any) -> Any:
    y[0] = y[1] * 2
    return y


async def test_arguments_that_share_a_value_are_told_apart() -> None:
    compiled = ag.compile(f := lambda x, y: x * y.detach() + y)
    for _ in range(3):
        await check(lambda x: f(x, x.detach()), lambda x: compiled(x, x.detach()), drawn(3), drawn(3))
        await check(lambda x: f(x, (x * 2).detach()), lambda x: compiled(x, (x * 2).detach()), drawn(3), drawn(3))
        await check(f, compiled, (drawn(3), drawn(3)), (drawn(3), drawn(3)))
        await check(lambda x: f(x, x), lambda x: compiled(x, x), drawn(3), drawn(3))


@pytest.mark.one_loop
@pytest.mark.parametrize("tier", TIERS)
async def test_memory_does_not_grow_with_depth(tier: Any) -> None:
    peaks = []
    for depth in (10, 50):

        def f(x: Any, depth: int = depth) -> Any:
            for _ in range(depth):
                x = (x * 0.5).sin()
            return x

        compiled = ag.compile(f, tier=tier)
        x, v = drawn(10_000), drawn(10_000)
        for _ in range(3):
            await ag.jvp(compiled, x, v)
        tracemalloc.start()
        await ag.jvp(compiled, x, v)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] < 8 * x.numpy().nbytes


async def test_errors_and_warnings_are_those_of_the_eager_call() -> None:
    compiled = ag.compile(f := lambda x: (x.log(), x @ x))
    for call in (f, compiled, compiled, compiled):
        with pytest.warns(RuntimeWarning, match="divide by zero"):
            await ag.jvp(call, ag.zeros(2, 2), ag.ones(2, 2))
    for call in (f, compiled):
        await assert_awaiting_raises(ShapeError, None, ag.jvp(call, ag.ones(2, 3), ag.ones(2, 3)))
    kept: list[Any] = []
    await ag.jvp(lambda x: kept.append(x) or x * 2, ag.ones(2), ag.ones(2))
    compiled = ag.compile(lambda x: x * 2)
    for _ in range(2):
        with pytest.raises(ag.errors.GraphError, match="has ended"):
            compiled(kept[0])
