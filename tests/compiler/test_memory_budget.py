"""Memory by budget: plans simulated and compared with the optimum, and programs that hold no more than their plan and have the bits of others."""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.compiler.passes.recompute import RecomputePlan, plan
from aiograd.errors import ArgumentError, GraphFreedError, ModifiedError
from aiograd.nn import functional as F
from tests.compiler.test_random_programs import Recurrent, Transformer, bits, cnn, mlp
from tests.support import assert_awaiting_raises
from tests.support import random_leaf as leaf

rng = np.random.default_rng(4)

Values = Sequence[tuple[float, int, Sequence[int]]]
Uses = Sequence[Sequence[int]]


# -------------------------------------------------------------------- plans


def simulated(values: Values, uses: Uses, found: RecomputePlan) -> tuple[int, float]:
    """The peak and the extra cost of a plan, carried out step by step; fails where something is read that is not in memory."""
    there, peak, extra = set(found.kept), sum(values[v][1] for v in found.kept), 0.0
    for step, reads in enumerate(uses):
        for v in found.recompute[step]:
            assert set(values[v][2]) <= there, (step, v)
            there.add(v)
            extra += values[v][0]
        assert set(reads) <= there, step
        peak = max(peak, sum(values[v][1] for v in there))
        there = {v for v in there if is_read_before_it_is_made(v, values, uses, found, step + 1)}
    return peak, extra


def is_read_before_it_is_made(value: int, values: Values, uses: Uses, found: RecomputePlan, step: int) -> bool:
    for later in range(step, len(uses)):
        for v in found.recompute[later]:
            if value in values[v][2]:
                return True
            if v == value:
                return False
        if value in uses[later]:
            return True
    return False


def graph(source: random.Random) -> tuple[Values, Uses]:
    """Values that read one or two earlier ones, and steps in reverse order that read what rules read: arguments, the result or both."""
    values: list[tuple[float, int, tuple[int, ...]]] = []
    for i in range(source.randint(8, 14)):
        reads = {i - 1 if source.random() < 0.7 else source.randrange(i)} if i else set()
        if i > 1 and source.random() < 0.3:
            reads.add(source.randrange(i))
        values.append((float(source.randint(1, 20)), source.randint(1, 20), tuple(sorted(reads))))
    uses = []
    for i in reversed(range(len(values))):
        reads = {*values[i][2]} if source.random() < 0.7 else set()
        uses.append(tuple(sorted(reads | ({i} if source.random() < 0.6 else set()))))
    return values, uses


def optimum(values: Values, uses: Uses, limit: float) -> float | None:
    """The least extra cost within a limit, by an integer program; None if there is no plan."""
    optimize, sparse = pytest.importorskip("scipy.optimize"), pytest.importorskip("scipy.sparse")
    n, steps = len(values), len(uses)
    rows: list[tuple[dict[int, float], float, float]] = []
    again, before = (lambda t, v: t * n + v), (lambda t, v: (steps + t) * n + v)
    for t in range(steps):
        rows += [({again(t, v): 1, before(t, v): 1}, 1, np.inf) for v in uses[t]]
        for v in range(n):
            rows += [({again(t, v): -1, again(t, a): 1, before(t, a): 1}, 0, np.inf) for a in values[v][2]]
            rows.append(({again(t, v): 1, before(t, v): 1}, 0, 1))
            if t + 1 < steps:
                rows.append(({before(t + 1, v): -1, again(t, v): 1, before(t, v): 1}, 0, np.inf))
        rows.append(({each(t, v): values[v][1] for v in range(n) for each in (again, before)}, -np.inf, limit))
    matrix = sparse.lil_matrix((len(rows), 2 * n * steps))
    for i, (row, _, _) in enumerate(rows):
        for k, factor in row.items():
            matrix[i, k] = factor
    costs = np.array([*[values[v][0] for _ in range(steps) for v in range(n)], *[0.0] * (n * steps)])
    constraint = optimize.LinearConstraint(matrix.tocsr(), [low for _, low, _ in rows], [high for _, _, high in rows])
    result = optimize.milp(costs, constraints=constraint, integrality=np.ones(len(costs)), bounds=optimize.Bounds(0, 1))
    assert result.status in (0, 2), result.message
    return float(result.fun) if result.status == 0 else None


@pytest.mark.parametrize(("seed", "count"), [(1, 3), pytest.param(2, 25, marks=pytest.mark.sweep)])
def test_plans_are_close_to_the_optimum(seed: int, count: int) -> None:
    """Time is the forward's and what is computed again; a backward would only make the ratios smaller."""
    source, ratios, missed = random.Random(seed), [], 0
    for _ in range(count):
        values, uses = graph(source)
        forward = sum(cost for cost, _, _ in values)
        for budget in (0.5, 0.75):
            full = sum(values[v][1] for v in {v for reads in uses for v in reads})
            best = optimum(values, uses, budget * full)
            try:
                found = plan(values, uses, budget)
            except ArgumentError:
                missed += best is not None
                continue
            assert found.full == full
            assert simulated(values, uses, found) == (found.peak, pytest.approx(found.extra))
            assert found.peak <= budget * full
            assert best is not None
            ratios.append((forward + found.extra) / (forward + best))
    assert len(ratios) > count
    assert missed <= count // 20
    assert 1.0 <= np.mean(ratios) <= 1.05
    assert max(ratios) <= 1.2


@pytest.mark.parametrize("budget", [0.3, 0.5])
def test_a_plan_of_a_deep_chain(budget: float) -> None:
    """Half of the layers or more are computed again, each once."""
    values: list[tuple[float, int, tuple[int, ...]]] = []
    for layer in range(60):
        values += [(10.0, 100, (2 * layer - 1,) if layer else ()), (1.0, 100, (2 * layer,))]
    uses = [reads for layer in reversed(range(60)) for reads in ((2 * layer + 1,), (2 * layer - 1,) if layer else ())]
    found = plan(values, uses, budget)
    assert simulated(values, uses, found) == (found.peak, pytest.approx(found.extra))
    assert found.peak <= budget * found.full
    assert found.extra <= 1.1 * (1 - budget) * sum(cost for cost, _, _ in values)


def test_values_of_infinite_cost_are_kept() -> None:
    found = plan([(1.0, 4, ()), (float("inf"), 4, (0,)), (1.0, 4, (1,))], [(2,), (1, 0)], 0.7)
    assert 1 in found.kept
    assert all(1 not in again for again in found.recompute)


@pytest.mark.parametrize("budget", [0, -0.5, 1.5, float("nan"), True, "half"])
def test_bad_budgets(budget: Any) -> None:
    with pytest.raises(ArgumentError, match="above 0 and at most 1"):
        plan([(1.0, 4, ())], [(0,)], budget)
    with pytest.raises(ArgumentError, match="above 0 and at most 1"):
        ag.compile(lambda x: x, memory_budget=budget)


def test_bad_plans() -> None:
    with pytest.raises(ArgumentError, match="earlier values"):
        plan([(1.0, 4, (0,))], [(0,)], 0.5)
    with pytest.raises(ArgumentError, match="none of the 1"):
        plan([(1.0, 4, ())], [(1,)], 0.5)
    with pytest.raises(ArgumentError, match=r"smallest budget found is 1\.0"):
        plan([(1.0, 4, ())], [(0,)], 0.5)


# -------------------------------------------------------------------- programs


class Deep(nn.Module):
    """Layers with dropout and normalisation."""

    def __init__(self, width: int = 32, depth: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])

    def forward(self, x: Any) -> Any:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.dropout(norm(layer(x)).tanh(), 0.2)
        return x


async def results(run: Callable[..., Any], model: Any, *inputs: Any) -> list[bytes]:
    """The bits of two calls and of their gradients, the first of which may be recorded."""
    found = []
    for seed in range(3):
        ag.seed(seed)
        for parameter in model.parameters():
            parameter.grad = None
        loss = run(*inputs)
        ag.rand(3)  # other draws between forward and backward
        await loss.backward()
        found += bits(loss, *[parameter.grad for parameter in model.parameters()], ag.rand(2))
    return found


CASES: dict[str, tuple[Callable[[], Any], tuple[int, ...], float]] = {
    "deep": (Deep, (16, 32), 0.4),
    "mlp": (mlp, (6, 1, 10, 10), 0.9),
    "cnn": (cnn, (6, 1, 10, 10), 0.8),
    "lstm": (Recurrent, (6, 1, 10, 10), 1.0),
    "transformer": (Transformer, (6, 1, 10, 10), 0.6),
}


@pytest.mark.parametrize("tier", ["numpy", "native"])
@pytest.mark.parametrize("case", CASES)
async def test_bits_are_those_without_a_budget(case: str, tier: Any) -> None:
    new, shape, budget = CASES[case]
    ag.seed(1)
    model = new()
    x = ag.asarray(rng.standard_normal(shape).astype(np.float32))

    def loss(x: Any) -> Any:
        return (model(x) ** 2).sum()

    compiled = ag.compile(loss, memory_budget=budget, tier=tier)
    assert await results(compiled, model, x) == await results(loss, model, x)
    memory = compiled.programs[0].memory_plan
    assert compiled.statistics().runs == 2
    assert 0 < memory.peak <= budget * memory.full
    assert memory.recompute or budget == 1.0
    assert ("# again," in compiled.programs[0].source) is bool(memory.recompute)


@pytest.mark.parametrize("budget", [0.4, 1.0])
async def test_live_memory_is_within_the_budget(budget: float) -> None:
    """Of the arrays; objects of Python, and the gradients on their way, come on top."""
    model = Deep(64, 5)
    x = ag.asarray(rng.standard_normal((256, 64)).astype(np.float32))
    compiled = ag.compile(lambda x: (model(x) ** 2).sum(), memory_budget=budget)
    while not compiled.statistics().runs:
        compiled(x)
    unit = 256 * 64 * 4
    for _ in range(2):  # the first backward writes its code
        tracemalloc.start()
        try:
            begin = tracemalloc.get_traced_memory()[0]
            loss = compiled(x)
            held, top = tracemalloc.get_traced_memory()
            tracemalloc.reset_peak()
            await loss.backward()
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        memory = compiled.programs[0].memory_plan
        grads = sum(4 * parameter.size for parameter in model.parameters())
        assert held - begin <= budget * memory.full + 100_000
        assert top - begin <= budget * memory.full + 4 * unit + 100_000
        assert peak - begin <= budget * memory.full + 5 * unit + 2 * grads + 600_000
    assert memory.full > 12 * unit
    assert memory.live[0] <= memory.peak == max(memory.live) <= budget * memory.full
    assert memory.live_full[0] == memory.full


async def test_a_graph_that_is_kept_runs_again() -> None:
    model = Deep()
    x = ag.asarray(rng.standard_normal((16, 32)).astype(np.float32))
    compiled = ag.compile(lambda x: (model(x) ** 2).sum(), memory_budget=0.5)
    compiled(x)
    loss = compiled(x)
    first = bits(*await ag.grad(loss, model.parameters(), retain_graph=True))
    await loss.backward(retain_graph=True)
    assert bits(*[p.grad for p in model.parameters()]) == first
    assert bits(*await ag.grad(loss, model.parameters())) == first
    await assert_awaiting_raises(GraphFreedError, None, loss.backward())


async def test_parts_of_a_program_run_one_after_the_other() -> None:
    w = [leaf(8, 8) for _ in range(5)]

    def two(x: Any) -> Any:
        a = b = x
        for each in w:
            a, b = (a @ each).tanh(), (b @ each).sin()
        return a.sum(), b.sum()

    compiled = ag.compile(two, memory_budget=0.6)
    x = leaf(8, 8)
    compiled(x)
    for run in (two, compiled):
        a, b = run(x)
        found = bits(*await ag.grad(b, [x, w[2]]), *await ag.grad(a, [x, *w]))
        if run is two:
            expected = found
    assert compiled.statistics().runs == 1
    assert found == expected


async def test_a_pass_of_all_statements_frees_what_it_has_read() -> None:
    """From one of two outputs; the arrays of the backward go one by one."""
    w = [leaf(64, 64) for _ in range(8)]

    def both(x: Any) -> Any:
        for each in w:
            x = (x @ each).tanh()
        return x, (x * x).sum()

    compiled, x = ag.compile(both, memory_budget=0.6), leaf(64, 64)
    for _ in range(3):
        out, loss = compiled(x)
    node = loss._node
    arrays = node._arrays
    assert len(arrays) > 4
    await ag.grad(loss, w, retain_graph=True)
    assert node._arrays is arrays
    assert len(arrays) > 4
    await loss.backward()
    assert not arrays
    await assert_awaiting_raises(GraphFreedError, None, out.sum().backward())


async def test_passes_that_record_a_graph_draw_the_same_numbers() -> None:
    w = [leaf(8, 8) for _ in range(4)]

    def noisy(x: Any) -> Any:
        for each in w:
            x = F.dropout((x @ each).tanh(), 0.5) * ag.rand(8)
        return (x * x).sum()

    compiled, x = ag.compile(noisy, memory_budget=0.5), leaf(8, 8)
    compiled(x)
    found = []
    for run in (noisy, compiled):
        ag.seed(3)
        (g,) = await ag.grad(run(x), [x], create_graph=True)
        found.append(bits(g, *await ag.grad((g * g).sum(), [x, *w])))
    assert found[0] == found[1]


async def test_a_whole_step() -> None:
    async def train(compiled: bool) -> list[bytes]:
        ag.seed(7)
        model = Deep()
        optimizer = ag.optim.Adam(model.parameters(), 0.01)

        async def step(x: Any) -> Any:
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            await loss.backward()
            optimizer.step()
            return loss

        run = ag.compile(step, memory_budget=0.5) if compiled else step
        numbers = np.random.default_rng(0)
        losses = [await run(ag.asarray(numbers.standard_normal((16, 32)).astype(np.float32))) for _ in range(6)]
        if compiled:
            (program,) = run.programs
            assert run.statistics().runs >= 4
            assert program.memory_plan.peak <= 0.5 * program.memory_plan.full
            assert program.memory_svg().startswith("<svg")
        return bits(*losses, *model.parameters())

    assert await train(True) == await train(False)


async def test_what_is_read_again_must_not_change() -> None:
    """The eager backward of this reads no element of `x`; the program computes from it again."""
    w = leaf(16)

    def chain(x: Any, w: Any) -> Any:
        return (x + w).sin().exp().sin().sum()

    compiled = ag.compile(chain, memory_budget=0.7)
    x = ag.asarray(rng.standard_normal(16))
    compiled(x, w)
    loss = compiled(x, w)
    x += 1.0
    await assert_awaiting_raises(ModifiedError, None, loss.backward())


async def test_tensors_that_the_program_writes_to() -> None:
    """A row that reads the old value of `count` is not computed again: it would read the new one."""
    count, w = ag.zeros(64), leaf(64)

    def counting(x: Any) -> Any:
        y = (x * w + count).sin()
        for _ in range(5):
            y = (y + 1.0).exp().sin()
        with ag.no_grad():
            count.add_(1.0)
        return y.sum()

    found = []
    for budget in (None, 0.7):
        count.zero_()
        compiled = counting if budget is None else ag.compile(counting, memory_budget=budget)
        x = ag.asarray(np.linspace(0.0, 1.0, 64))
        grads = [bits(*await ag.grad(compiled(x), [w])) for _ in range(3)]
        found.append(grads)
    assert found[0] == found[1]


async def test_floating_point_errors_are_told_once() -> None:
    w = leaf(64)
    compiled = ag.compile(lambda x: (((x * w).exp() * 0.0 + x).sin() * w).exp().sin().sum(), memory_budget=0.7)
    x = ag.asarray(np.full(64, 1e4))
    with np.errstate(all="ignore"):
        compiled(x)
        loss = compiled(x)
    with np.errstate(over="raise"):
        assert compiled.programs[0].memory_plan.recompute
        await loss.backward()


def test_a_budget_that_cannot_be_met() -> None:
    compiled = ag.compile(lambda x: x.exp().sin().sum(), memory_budget=0.5)
    x = leaf(100)
    for _ in range(2):
        with pytest.raises(ArgumentError, match=r"smallest budget found is 1\.0"):
            compiled(x)
    assert not compiled.programs


def test_programs_without_a_backward_and_without_a_budget() -> None:
    compiled = ag.compile(lambda x: x.exp() * 2, memory_budget=0.5)
    compiled(ag.ones(3))
    assert (compiled.programs[0].memory_plan.full, compiled.programs[0].memory_plan.peak) == (0, 0)
    plain = ag.compile(lambda x: x.exp() * 2)
    plain(ag.ones(3))
    assert plain.programs[0].memory_plan is None
    with pytest.raises(ArgumentError, match="no memory budget"):
        plain.programs[0].memory_svg()


def test_the_picture() -> None:
    compiled = ag.compile(lambda x: x.exp().sin().exp().sin().exp().sin().exp().sin().sum(), memory_budget=0.75)
    compiled(leaf(1000))
    (program,) = compiled.programs
    text = program.memory_svg()
    assert text.count('class="again"') == len(program.memory_plan.recompute) > 0
    assert text.count("<polygon") == 2
    assert "12 kB of 16 kB" in text
    assert "computed again" in str(program.memory_plan)


async def test_a_value_that_is_computed_twice_is_not_held_in_between() -> None:
    """Equal calls are done once elsewhere; here the second one is there because its result would take memory until then."""

    def chain(x: Any) -> Any:
        a = x.exp()
        y = x
        for _ in range(8):
            y = (y * a).sin()
        return y.sum()

    compiled, x = ag.compile(chain, memory_budget=0.35), leaf(1000)
    found = []
    for run in (chain, compiled, compiled):
        found.append(bits(*await ag.grad(run(x), [x])))
    assert found[0] == found[1] == found[2]
    (program,) = compiled.programs
    names = [name for _, again in program.memory_plan.recompute for name in again]
    assert len(names) > len(set(names))
    assert program.source.count("# again,") == len(names)
