"""Compiled steps with passes that record a graph, as of a physics-informed network: their rows are rows of the program, with the bits of eager."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.compiler import steps
from aiograd.compiler.joint_pass import run_jointly
from aiograd.compiler.native.tiers import native_problem
from aiograd.compiler.recorded_pass import RecordedPass
from aiograd.errors import GraphError, UnusedInputError
from aiograd.ops.op import ROWS
from tests.compiler.test_random_programs import bits
from tests.support import assert_awaiting_raises, cancel, custom_function

OPTIMIZERS: dict[str, Callable[[Any], Any]] = {"sgd": lambda p: ag.optim.SGD(p, 0.02, momentum=0.9), "adam": lambda p: ag.optim.Adam(p, 0.01)}


class Case:
    """A network and its optimizer, made anew for the eager and the compiled run."""

    def __init__(self, optimizer: str = "sgd", dtype: Any = np.float32) -> None:
        ag.seed(5)
        self.model = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 8), nn.Sigmoid(), nn.Linear(8, 1)).to(dtype=dtype)
        self.parameters = list(self.model.parameters())
        self.optimizer = OPTIMIZERS[optimizer](self.parameters)
        self.dtype = dtype
        self.rng = np.random.default_rng(2)
        self.seen: list[Any] = []

    def points(self) -> Any:
        return self.rng.normal(size=(6, 2)).astype(self.dtype)

    def leaf(self) -> Any:
        return ag.tensor(self.points(), requires_grad=True)

    async def update(self, loss: Any, **options: Any) -> None:
        self.optimizer.zero_grad()
        await loss.backward(**options)
        self.optimizer.step()


async def residual(case: Case, x: Any, **options: Any) -> tuple[Any, ...]:
    """The gradients of a solution, and the loss of its equation, which is minimized."""
    case.optimizer.zero_grad()
    u = case.model(x)
    (g,) = await ag.grad(u.sum(), [x], create_graph=True)
    cols = [(await ag.grad(g[:, i].sum(), [x], create_graph=True))[0][:, i] for i in range(2)]
    wrong = cols[0] + cols[1] - u[:, 0] * g[:, 1]
    loss = (wrong * wrong).mean()
    await loss.backward(**options)
    case.optimizer.step()
    return loss, g, *cols


async def of_argument(case: Case, x: Any) -> Any:
    return await residual(case, x)


async def of_detached(case: Case, x: Any) -> Any:
    return await residual(case, x.detach().requires_grad_())


async def of_computed(case: Case, x: Any) -> Any:
    scaled = (x * 0.5).detach()
    return await residual(case, scaled.requires_grad_(), inputs=case.parameters)


async def of_array(case: Case, a: Any) -> Any:
    return await residual(case, ag.tensor(a, requires_grad=True))


async def of_shared_array(case: Case, a: Any) -> Any:
    x, other = ag.asarray(a).requires_grad_(), ag.asarray(a)
    assert not other.requires_grad
    return await residual(case, x)


async def of_parameters(case: Case, x: Any) -> Any:
    """A penalty on gradients, with inputs that are captured, and one that is not used."""
    unused = ag.ones(2).requires_grad_()
    u = case.model(x)
    *grads, none = await ag.grad((u**2).mean(), [*case.parameters, unused], create_graph=True, allow_unused=True)
    assert none is None
    loss = sum([(g**2).sum() for g in grads], u.mean())
    await case.update(loss, inputs=case.parameters)
    return loss, *grads


async def of_several(case: Case, x: Any) -> Any:
    """Several outputs with gradients, intermediate values as inputs, a pass within a pass within a pass, a view and a repeated input."""
    h = case.model[0](x).tanh()
    u = case.model(x) * h[:, :1]
    g, gh = await ag.grad([u.sum(), u * h], [x, h], [ag.tensor(2.0, dtype=u.dtype), (u * h).detach()], create_graph=True)
    (k,) = await ag.grad(g, [x], g, create_graph=True)
    k_x, k_again = await ag.grad(k.mean(), [x, x], create_graph=True)
    loss = (k_x * k_again).sum() + (gh.transpose(0, 1)[0] ** 2).mean() + (g * g * g).sum()
    await case.update(loss)
    return loss, g, gh, k, k_x


async def of_value_and_grad(case: Case, x: Any) -> Any:
    value, g = await ag.value_and_grad(lambda x: (case.model(x) ** 2).sum(), x, create_graph=True)
    await case.update((g**2).mean() + value)
    return value, g


#: each with what it takes, of a `Case`
STEPS: dict[str, tuple[Any, Callable[[Case], Any]]] = {
    "argument": (of_argument, Case.leaf),
    "detached": (of_detached, Case.leaf),
    "computed": (of_computed, Case.leaf),
    "array": (of_array, Case.points),
    "shared array": (of_shared_array, Case.points),
    "parameters": (of_parameters, Case.leaf),
    "several": (of_several, Case.leaf),
    "value_and_grad": (of_value_and_grad, Case.leaf),
}


async def train(step: Any, given: Callable[[Case], Any], compiled: bool, *, times: int, tier: Any = None, **options: Any) -> list[Any]:
    """All results, gradients and parameters of some steps."""
    case = Case(**options)

    async def call(x: Any) -> Any:
        return await step(case, x)

    run = ag.compile(call, tier=tier) if compiled else call
    found = []
    for _ in range(times):
        x = given(case)
        results = await run(x)
        results = results if isinstance(results, tuple) else (results,)
        found += bits(*results, *[x.grad] if isinstance(x, ag.Tensor) else [], *case.parameters, *[p.grad for p in case.parameters])
    if compiled:
        statistics = run.statistics()
        assert not statistics.breaks and statistics.runs == times - 1, statistics
    return found


async def same(name: str, **options: Any) -> None:
    assert await train(*STEPS[name], False, **options) == await train(*STEPS[name], True, **options)


@pytest.mark.parametrize("name", STEPS)
async def test_a_step_has_the_bits_of_eager(name: str) -> None:
    await same(name, times=4)


@pytest.mark.one_loop
@pytest.mark.parametrize(("optimizer", "dtype"), [("sgd", np.float32), ("adam", np.float64)], ids=["sgd", "adam"])
async def test_a_hundred_steps(optimizer: str, dtype: Any) -> None:
    await same("detached", times=100, optimizer=optimizer, dtype=dtype)


@pytest.mark.one_loop
@pytest.mark.skipif(native_problem() is not None, reason="there are no native programs here")
@pytest.mark.parametrize("options", [{}, {"inputs"}], ids=["all leaves", "inputs"])
async def test_forward_passes_and_the_last_pass_are_one_native_function(options: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    joint: list[bool] = []

    def counted(*args: Any) -> Any:
        made = run_jointly(*args)
        joint.append(made is not None)
        return made

    monkeypatch.setattr(steps, "run_jointly", counted)

    async def step(case: Case, x: Any) -> Any:
        return (await residual(case, x, **{name: case.parameters for name in options}))[0]

    given = step, Case.leaf
    async with ag.Engine(clock=lambda: 0.0):  # whose budget is never spent
        assert await train(*given, False, times=5) == await train(*given, True, times=5, tier="native")
    assert joint == [True] * 3  # the first run records, and the second one makes the code of the last pass


@pytest.mark.parametrize("name", ["argument", "several"])
async def test_a_pass_that_is_recorded_on_threads_has_the_order_of_an_undisturbed_one(name: str) -> None:
    async with ag.Engine(threads=3, inline_ns=1.0):
        await same(name, times=2)


def test_rows_are_in_the_order_of_their_nodes() -> None:
    """Two rules ran at the same time; a row without a node stays behind the row that it reads, and before those that read it."""
    x = ag.tensor([1.0, -2.0], requires_grad=True)
    first, second = x * 2, x * 3
    mask = first > 0
    third = first * second
    seen = RecordedPass(None)
    by_hand = [(second, [x]), (first, [x]), (mask, [first]), (third, [first, second])]
    for output, tensors in by_hand:
        seen.ran(ROWS["mul"], tensors, {}, [output], (), None)
    assert [row[3][0] is each for row, each in zip(seen.rows((np.ndarray,)), [first, mask, second, third], strict=True)] == [True] * 4


async def test_results_keep_their_graph() -> None:
    """The caller differentiates a gradient that was recorded, and the loss, after the step."""

    async def gradients(compiled: bool) -> list[Any]:
        case = Case()

        async def step(x: Any) -> Any:
            u = case.model(x)
            (g,) = await ag.grad(u.sum(), [x], create_graph=True)
            return (g**2).sum(), g

        run = ag.compile(step) if compiled else step
        for _ in range(3):
            x = case.leaf()
            loss, g = await run(x)
            await (loss + g[0].sum()).backward()
        assert not compiled or not run.statistics().breaks
        return bits(x.grad, *[p.grad for p in case.parameters])

    assert await gradients(False) == await gradients(True)


# -------------------------------------------------------------------- what can be seen


async def seen_by(compiled: bool, calls: Callable[[Case, Any], Any]) -> tuple[list[Any], list[Any]]:
    """The state after the steps of a case, and the reasons why it runs eagerly; ``calls(case, run)`` calls it."""
    case = Case()

    async def step(x: Any) -> Any:
        return await of_argument(case, x)

    run = ag.compile(step, on_break="eager") if compiled else step
    found = await calls(case, run)
    case.seen += bits(*case.parameters, *[p.grad for p in case.parameters])
    return [found, case.seen], list(run.statistics().reasons.values()) if compiled else []


@pytest.mark.filterwarnings("ignore:the compiled function")
async def test_a_hook_on_an_input_is_called_by_every_pass() -> None:
    """By runs with a hook the step is not repeated by rows; without one it is again."""

    async def calls(case: Case, run: Any) -> list[Any]:
        found: list[Any] = []
        for hooked in (False, True, False, True):
            x = case.leaf()
            if hooked:
                x.register_hook(lambda grad: case.seen.extend(bits(grad)))
            found += bits(*await run(x))
        return found

    expected, _ = await seen_by(False, calls)
    found, reasons = await seen_by(True, calls)
    assert found == expected and len(expected[1]) > 8
    assert len(reasons) == 1 and "a pass that runs hooks of the tensors that it differentiates by: test_second_derivatives.py" in reasons[0]


@pytest.mark.filterwarnings("ignore:the compiled function")
async def test_a_hook_on_a_parameter_that_a_pass_differentiates_by() -> None:
    async def gradients(compiled: bool) -> list[Any]:
        case = Case()

        async def step(x: Any) -> Any:
            return await of_parameters(case, x)

        run = ag.compile(step, on_break="eager") if compiled else step
        found = bits(*await run(case.leaf()), *await run(case.leaf()))
        case.parameters[0].register_hook(lambda grad: grad * 2)
        return found + bits(*await run(case.leaf()), *case.parameters)

    assert await gradients(False) == await gradients(True)


async def test_a_hook_on_a_parameter_of_the_last_pass_is_called_by_that_pass() -> None:
    async def calls(case: Case, run: Any) -> list[Any]:
        await run(case.leaf())
        case.parameters[0].register_hook(lambda grad: case.seen.extend(bits(grad)))
        return bits(*await run(case.leaf()))

    expected, _ = await seen_by(False, calls)
    assert await seen_by(True, calls) == (expected, [])


async def test_a_step_that_is_cancelled_in_its_last_pass_leaves_what_the_eager_one_leaves() -> None:
    async def calls(case: Case, run: Any) -> list[Any]:
        await run(case.leaf())
        waiting = asyncio.Event()

        async def wait(grad: Any) -> None:
            waiting.set()
            await asyncio.Event().wait()

        handle = case.parameters[0].register_hook(wait)
        x = case.leaf()
        running = asyncio.ensure_future(run(x))
        await waiting.wait()
        await cancel(running)
        handle.remove()
        assert x.grad is None and all([p.grad is None for p in case.parameters])
        return bits(*await run(case.leaf()))

    expected, _ = await seen_by(False, calls)
    assert await seen_by(True, calls) == (expected, [])


async def test_warming_up_leaves_no_trace() -> None:
    case = Case()
    before = bits(*case.parameters)

    async def step(x: Any) -> Any:
        return await of_detached(case, x)

    run = ag.compile(step)
    await run.warm_up(ag.tensor(case.points()))
    assert run.statistics().signatures == 1 and bits(*case.parameters) == before and case.parameters[0].grad is None


# -------------------------------------------------------------------- what is no row


async def accumulates(case: Case, x: Any) -> Any:
    await (x * x * x).sum().backward(create_graph=True)
    return x * 1


async def frees(case: Case, x: Any) -> Any:
    return (await ag.grad((x**3).sum(), [x], create_graph=True, retain_graph=False))[0]


async def materializes(case: Case, x: Any) -> Any:
    w = case.parameters[0]
    return (await ag.grad((x**3).sum(), [w], create_graph=True, materialize_grads=True))[0] * 2


async def goes_on_after_a_failure(case: Case, x: Any) -> Any:
    try:
        await ag.grad((x**3).sum(), [case.parameters[0]], create_graph=True)
    except UnusedInputError:
        return x * 2
    return x


async def goes_on_after_another_failure(case: Case, x: Any) -> Any:
    try:
        await ag.grad((x**3).sum(), [case.parameters[0]])
    except UnusedInputError:
        return x * 2
    return x


async def hooks(case: Case, x: Any) -> Any:
    y = x**3
    y.register_hook(lambda grad: grad * 2)
    return (await ag.grad(y.sum(), [x], create_graph=True))[0]


@custom_function(lambda x: x * x, saves=True)
def Doubled(ctx: Any, grad: Any) -> Any:
    return grad * 2


async def applies_a_function(case: Case, x: Any) -> Any:
    y = Doubled.apply(x)
    return (await ag.grad((y * x).sum(), [x], create_graph=True))[0]


async def differentiates_by_history(case: Case, x: Any) -> Any:
    y = x * case.parameters[1].sum()
    return (await ag.grad((y**2).sum(), [x, case.parameters[1]], create_graph=True))[0]


async def pushes_forward(case: Case, x: Any) -> Any:
    return (await ag.jvp(lambda x: x * x, x.detach(), ag.ones(6, 2)))[1]


async def reads_the_gradient_of_a_leaf(case: Case, x: Any) -> Any:
    y = x.detach().requires_grad_()
    await (y * y).sum().backward()
    return y.grad


REASONS: dict[str, tuple[Any, str]] = {
    "backward": (accumulates, r"accumulates gradients that have a graph, by backward\(create_graph=True\); ag.grad"),
    "retain_graph": (frees, "frees the graph that it differentiates, with retain_graph=False"),
    "materialize": (materializes, "gets zeros that require grad, with materialize_grads=True"),
    "failure": (goes_on_after_a_failure, "goes on after a pass that has failed"),
    "another failure": (goes_on_after_another_failure, "goes on after a pass that has failed"),
    "hook": (hooks, "registers a hook"),
    "function": (applies_a_function, "differentiates by a pass that goes through Doubled"),
    "forward mode": (pushes_forward, "runs a transform, such as ag.jvp, ag.hvp or ag.vmap"),
    "gradient of a leaf": (reads_the_gradient_of_a_leaf, "reads the gradient of an argument"),
}


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True", "ignore:the compiled function")
@pytest.mark.parametrize("name", REASONS)
async def test_a_reason_names_the_line(name: str) -> None:
    """And the function runs eagerly from then on."""
    step, reason = REASONS[name]

    async def results(compiled: bool) -> list[Any]:
        case = Case()

        async def call(x: Any) -> Any:
            return await step(case, x)

        run = ag.compile(call, on_break="eager") if compiled else call
        found = [bits(await run(case.leaf())) for _ in range(3)]
        if compiled:
            (text,) = run.statistics().reasons.values()
            assert reason.replace("\\", "") in text and "test_second_derivatives.py" in text and run.statistics().runs == 0
        return found

    assert await results(False) == await results(True)


@pytest.mark.filterwarnings("ignore:the compiled function")
@pytest.mark.parametrize(
    ("compute", "reason"),
    [(lambda x, w: x * w[:2], "goes through MulBackward, which is no row"), (lambda x, w: x * 2, "captured tensor may be computed")],
    ids=["of a parameter", "of another leaf"],
)
async def test_an_argument_with_a_history(compute: Any, reason: str) -> None:
    """A program that differentiates by an argument and a parameter is not for an argument that may have been computed from the parameter."""

    async def results(compiled: bool) -> list[Any]:
        case = Case()
        w = case.parameters[1]

        async def step(x: Any) -> Any:
            return await differentiates_by_history(case, x)

        run = ag.compile(step, on_break="eager") if compiled else step
        found = [bits(await run(x)) for x in (case.leaf(), case.leaf(), compute(case.leaf(), w), case.leaf())]
        if compiled:
            (text,) = run.statistics().reasons.values()
            assert reason in text and "test_second_derivatives.py" in text and run.statistics().runs == 2
        return found

    assert await results(False) == await results(True)


async def test_a_pass_over_a_freed_graph_is_an_error_as_eagerly() -> None:
    case = Case()

    async def step(x: Any) -> Any:
        y = (x**3).sum()
        await ag.grad(y, [x])
        return await ag.grad(y, [x], create_graph=True)

    await assert_awaiting_raises(GraphError, "freed|second time", step(case.leaf()))
    await assert_awaiting_raises(GraphError, "freed|second time", ag.compile(step)(case.leaf()))
