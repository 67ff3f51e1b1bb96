"""Derivatives of functions: ratios of times or of peaks of memory within one run, ours and torch.func's.

A row is the ratio of two workloads, each on both sides in the same interleaved run, minima. Rows of functions that a build does not have are named
and left out. Peaks are of what Python and numpy allocate (tracemalloc); torch's allocations are not seen by it, so these rows have no torch.

Two figures have no row here: plans of recomputation beside the optimum are in the tests of `aiograd.compiler.passes.recompute`, and eager passes
without any of this are in `small_graphs`, which a build before and one after can run in turn.

What is unfair: torch.func keeps a graph for jvp's values if a parameter requires grad, so its parameters do not; its dense Jacobian of a sparse
system is the only one it has.
"""

from __future__ import annotations

import asyncio
import importlib.util
import itertools
import tracemalloc
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

import aiograd as ag
from aiograd import nn
from tests.benchmarks.harness import Settings, Table, awaited, goal_cells, interleave, threads

Step = Callable[[], Any]
ROUNDS = 6


class Ratio(NamedTuple):
    """Two workloads and what the ratio of their times, or of the numbers they return, may be."""

    name: str
    target: float
    #: dotted names below `aiograd` that the workloads use
    needs: tuple[str, ...]
    #: makes the steps: ``over`` and ``under``, and ``torch over`` and ``torch under`` where torch is a peer
    steps: Callable[[Settings], Mapping[str, Step]]
    #: True if the steps return what is compared (bytes, counts) in place of being timed
    counts: bool = False
    rounds: int = ROUNDS


def run(settings: Settings) -> Iterator[Table]:
    """Measure every row."""
    with threads(1):
        yield asyncio.run(_table(settings))


async def _table(settings: Settings) -> Table:
    table = Table("Derivatives, 1 thread, ratios of minima", ["workload", "over", "under", "ratio", "torch", "target", "beyond", "verdict"])
    missing: dict[str, list[str]] = {}
    for row in ROWS:
        absent = [name for name in row.needs if not _has(name)]
        if absent:
            missing.setdefault(", ".join(absent), []).append(row.name)
            continue
        found = await _measured(row, settings)
        if found is None:
            missing.setdefault("torch", []).append(row.name)
            continue
        ratio = found["over"] / found["under"]
        theirs = f"{found['torch over'] / found['torch under']:.3g}" if "torch over" in found else ""
        shown = [_shown(found[side], row.counts) for side in ("over", "under")]
        table.add(row.name, *shown, f"{ratio:.3g}", theirs, *goal_cells(None if settings.tiny else ratio, row.target, None))
    table.notes.extend(f"left out, no {names}: {'; '.join(rows)}" for names, rows in missing.items())
    return table


def _has(name: str) -> bool:
    if name.startswith("compiler."):
        return importlib.util.find_spec(f"aiograd.{name}") is not None
    found: Any = ag
    for part in name.split("."):
        found = getattr(found, part, None)
    return found is not None


def _shown(value: float, counts: bool) -> str:
    return f"{value:,.0f}" if counts else f"{1e3 * value:.3g} ms"


async def _measured(row: Ratio, settings: Settings) -> dict[str, float] | None:
    steps = row.steps(settings)
    if "under" not in steps:
        return None
    if row.counts:
        return {name: float(await awaited(step())) for name, step in steps.items()}
    options: dict[str, Any] = {"rounds": 1, "repeats": 1, "warm": 0, "pause": 0.0} if settings.tiny else {"rounds": row.rounds}
    timings = await interleave(steps, **options)
    return {name: timing.minimum for name, timing in timings.items()}


async def _peak(step: Step) -> int:
    """The most bytes that a step holds beside what is there before it."""
    await awaited(step())
    tracemalloc.start()
    try:
        await awaited(step())
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def _drawn(*shapes: tuple[int, ...]) -> list[Any]:
    """Standard normal arrays of float32, each divided by the root of its last extent, as weights are."""
    draw = np.random.default_rng(0).standard_normal
    return [(draw(shape) / np.sqrt(shape[-1])).astype(np.float32) for shape in shapes]


def _torch(settings: Settings) -> Any:
    if "torch" not in settings.peers:
        return None
    import torch

    return torch


# -------------------------------------------------------------------- forward mode


def _jvp_of_mlp(settings: Settings) -> Mapping[str, Step]:
    layers, width, batch = settings.of(8, 2), settings.of(512, 8), settings.of(128, 4)
    *weights, x, v = _drawn(*[(width, width)] * layers, (batch, width), (batch, width))
    ours = [ag.tensor(w) for w in weights]

    def network(x: Any) -> Any:
        for w in ours:
            x = ag.tanh(x @ w)
        return x

    value, vector = ag.tensor(x), ag.tensor(v)
    steps: dict[str, Step] = {"over": lambda: ag.jvp(network, value, vector), "under": ag.no_grad()(lambda: network(value))}
    torch = _torch(settings)
    if torch is not None:
        theirs, there, along = [torch.from_numpy(w) for w in weights], torch.from_numpy(x), torch.from_numpy(v)

        def same(x: Any) -> Any:
            for w in theirs:
                x = torch.tanh(x @ w)
            return x

        steps["torch over"] = lambda: torch.func.jvp(same, (there,), (along,))
        steps["torch under"] = torch.no_grad()(lambda: same(there))
    return steps


def _chain(count: int) -> tuple[Callable[..., Any], list[Any]]:
    def chain(x: Any, a: Any, b: Any) -> Any:
        for _ in range(count // 2):
            x = x * a + b
        return x

    return chain, [np.full(4, value, np.float32) for value in (1.0, 0.5, 0.25)]


def _jvp_of_chain(settings: Settings) -> Mapping[str, Step]:
    chain, arrays = _chain(settings.of(1000, 20))
    x, a, b = map(ag.tensor, arrays)
    leaf = ag.tensor(arrays[0], requires_grad=True)
    steps: dict[str, Step] = {"over": lambda: ag.jvp(lambda x: chain(x, a, b), x, x), "under": lambda: chain(leaf, a, b)}
    torch = _torch(settings)
    if torch is not None:
        p, q, r = map(torch.from_numpy, arrays)
        recorded = torch.from_numpy(arrays[0]).requires_grad_()
        steps["torch over"] = lambda: torch.func.jvp(lambda x: chain(x, q, r), (p,), (p,))
        steps["torch under"] = lambda: chain(recorded, q, r)
    return steps


def _jvp_of_program(settings: Settings) -> Mapping[str, Step]:
    chain, arrays = _chain(settings.of(1000, 20))
    x, a, b = map(ag.tensor, arrays)
    program = ag.compile(lambda x: chain(x, a, b))
    return {"over": lambda: ag.jvp(program, x, x), "under": lambda: program(x)}


def _depths(settings: Settings) -> Mapping[str, Step]:
    x = ag.tensor(np.random.default_rng(0).standard_normal(settings.of(1 << 18, 1 << 12)))

    def of(depth: int) -> Step:
        def network(x: Any) -> Any:
            for _ in range(depth):
                x = ag.tanh(x * 1.5)
            return x

        return lambda: _peak(lambda: ag.jvp(network, x, x))

    return {"over": of(settings.of(400, 20)), "under": of(10)}


# -------------------------------------------------------------------- matrices and second derivatives


def _hvp(settings: Settings) -> Mapping[str, Step]:
    layers, width, batch = settings.of(4, 2), settings.of(256, 8), settings.of(128, 4)
    x, *drawn = _drawn((batch, width), *[(width, width)] * (2 * layers))
    weights, vectors = drawn[:layers], drawn[layers:]
    given = ag.tensor(x)

    def loss(*ws: Any) -> Any:
        h = given
        for w in ws:
            h = ag.tanh(h @ w)
        return (h * h).mean()

    inputs, directions = tuple(map(ag.tensor, weights)), tuple(map(ag.tensor, vectors))
    steps: dict[str, Step] = {"over": lambda: ag.hvp(loss, inputs, directions), "under": lambda: ag.value_and_grad(loss, inputs)}
    torch = _torch(settings)
    if torch is not None:
        there, ws, vs = torch.from_numpy(x), tuple(map(torch.from_numpy, weights)), tuple(map(torch.from_numpy, vectors))

        def same(*ws: Any) -> Any:
            h = there
            for w in ws:
                h = torch.tanh(h @ w)
            return (h * h).mean()

        gradient = torch.func.grad_and_value(same, argnums=tuple(range(layers)))
        steps["torch over"] = lambda: torch.func.jvp(gradient, ws, vs)
        steps["torch under"] = lambda: gradient(*ws)
    return steps


def _columns(settings: Settings) -> Mapping[str, Step]:
    size, width = settings.of(64, 4), settings.of(128, 8)
    *weights, x = _drawn((width, size), (width, width), (size, width), (size,))
    ours, value = [ag.tensor(w) for w in weights], ag.tensor(x)
    units = [ag.tensor(unit) for unit in np.eye(size, dtype=np.float32)]

    def network(x: Any) -> Any:
        for w in ours:
            x = ag.tanh(w @ x)
        return x

    async def singly() -> None:
        for unit in units:
            await ag.jvp(network, value, unit)

    steps: dict[str, Step] = {"over": lambda: ag.jacfwd(network, value), "under": singly}
    torch = _torch(settings)
    if torch is not None:
        theirs, there, basis = [torch.from_numpy(w) for w in weights], torch.from_numpy(x), torch.eye(size)

        def same(x: Any) -> Any:
            for w in theirs:
                x = torch.tanh(w @ x)
            return x

        jacfwd = torch.func.jacfwd(same)
        steps["torch over"] = lambda: jacfwd(there)
        steps["torch under"] = lambda: [torch.func.jvp(same, (there,), (unit,)) for unit in basis]
    return steps


# -------------------------------------------------------------------- sparse, implicit


def _tridiagonal(x: Any, library: Any) -> Any:
    """x³ + 2x minus the neighbours; the first and the last have one."""
    y = x * x * x + 2 * x
    zero = library.zeros(1, dtype=x.dtype)
    join = getattr(library, "concatenate", None) or library.cat
    return y - join([x[1:], zero]) - join([zero, x[:-1]])


def _sparse(step: str) -> Callable[[Settings], Mapping[str, Step]]:
    def steps(settings: Settings) -> Mapping[str, Step]:
        size = settings.of(10_000, 30)
        x = np.random.default_rng(0).standard_normal(size)
        value = ag.tensor(x)
        function = lambda x: _tridiagonal(x, ag)  # noqa: E731
        plans: list[Any] = []

        async def planned() -> Any:
            plans.append(await ag.jacobian_plan(function, value))
            return plans[-1]

        async def product() -> Any:
            return await (plans or [await planned()])[0](value)

        async def passes() -> int:
            return int((await planned()).passes)

        if step == "passes":
            return {"over": passes, "under": lambda: 1}
        torch = _torch(settings)
        if torch is None:
            return {}
        dense, there = torch.func.jacrev(lambda x: _tridiagonal(x, torch)), torch.from_numpy(x)
        return {"over": planned if step == "plan" else product, "under": lambda: dense(there)}

    return steps


def _iterations(settings: Settings) -> Mapping[str, Step]:
    draw = np.random.default_rng(0).standard_normal
    size = settings.of(2000, 20)
    a, b = draw(size) * 0.3, draw(size)

    def of(iterations: int) -> Step:
        @ag.implicit.fixed_point(lambda x, a, b: ag.tanh(a * x) + b, residual_tol=None)  # type: ignore[attr-defined,untyped-decorator]
        async def solver(x0: Any, a: Any, b: Any) -> Any:
            x = x0
            for _ in range(iterations):
                x = ag.tanh(a * x) + b
            return x

        async def step() -> None:
            weights = ag.tensor(a, requires_grad=True)
            x = await solver(ag.zeros(size, dtype=np.float64), weights, ag.tensor(b))
            await x.sum().backward()

        return lambda: _peak(step)

    return {"over": of(settings.of(2000, 30)), "under": of(20)}


# -------------------------------------------------------------------- memory by budget, privacy


def _budget(settings: Settings) -> Mapping[str, Step]:
    layers, width, batch = settings.of(12, 3), settings.of(256, 8), settings.of(256, 4)
    *drawn, given = _drawn(*[(width, width)] * layers, (batch, width))
    weights, x = [ag.tensor(w, requires_grad=True) for w in drawn], ag.tensor(given)

    def loss(x: Any) -> Any:
        for w in weights:
            x = ag.tanh(x @ w) * 1.5
        return (x * x).mean()

    def of(program: Any) -> Step:
        async def step() -> None:
            await program(x).backward()
            for w in weights:
                w.grad = None

        return step

    return {"over": of(ag.compile(loss, memory_budget=0.5)), "under": of(ag.compile(loss))}


def _private(measure: str) -> Callable[[Settings], Mapping[str, Step]]:
    def steps(settings: Settings) -> Mapping[str, Step]:
        sizes = (settings.of(256, 8), settings.of(512, 8), settings.of(512, 8), 10)
        batch = settings.of(128, 4)
        draw = np.random.default_rng(0)
        x = ag.tensor(draw.standard_normal((batch, sizes[0])).astype(np.float32))
        y = ag.tensor(draw.integers(0, 10, batch))

        def network() -> Any:
            layers = [layer for n, m in itertools.pairwise(sizes) for layer in (nn.Linear(n, m), nn.ReLU())]
            return nn.Sequential(*layers[:-1])

        plain, private = network(), network()
        optimizer = ag.optim.SGD(plain.parameters(), lr=0.01)
        guarded = ag.optim.Private(  # type: ignore[attr-defined]
            ag.optim.SGD(private.parameters(), lr=0.01), noise_multiplier=1.0, max_grad_norm=1.0, sample_rate=0.01, dataset_size=100 * batch
        )

        async def plainly() -> None:
            optimizer.zero_grad()
            await nn.functional.cross_entropy(plain(x), y).backward()
            await awaited(optimizer.step())

        def privately() -> Any:
            return guarded.step(lambda x, y: nn.functional.cross_entropy(private(x[None]), y[None]), (x, y))

        if measure == "time":
            return {"over": privately, "under": plainly}
        return {"over": lambda: _peak(privately), "under": lambda: _peak(plainly)}

    return steps


ROWS = (
    Ratio("jvp of an MLP 8 × 512, batch 128 / forward, no graph", 2.5, ("jvp",), _jvp_of_mlp),
    Ratio("jvp of a chain of 1,000 on 4 floats / recorded forward", 3.0, ("jvp",), _jvp_of_chain),
    Ratio("jvp of the compiled chain / compiled forward", 2.5, ("jvp",), _jvp_of_program),
    Ratio("peak of jvp at depth 400 / at depth 10", 1.1, ("jvp",), _depths, counts=True),
    Ratio("hvp of an MLP 4 × 256, batch 128 / value and gradient", 3.0, ("hvp",), _hvp),
    Ratio("64 columns by jacfwd / 64 single products", 0.15, ("jacfwd",), _columns),
    Ratio("tridiagonal 10,000: passes of a plan / 1", 3.0, ("jacobian_plan",), _sparse("passes"), counts=True),
    Ratio("tridiagonal 10,000: with a plan / dense by torch.func", 0.01, ("jacobian_plan",), _sparse("product"), rounds=1),
    Ratio("tridiagonal 10,000: the plan / dense by torch.func", 0.1, ("jacobian_plan",), _sparse("plan"), rounds=1),
    Ratio("peak of a fixed point, 2,000 iterations / 20", 1.1, ("implicit",), _iterations, counts=True),
    Ratio("memory_budget=0.5 / without", 1.25, ("compiler.passes.recompute",), _budget),
    Ratio("Private.step / plain step, MLP 256-512-512-10, batch 128", 2.0, ("optim.Private",), _private("time")),
    Ratio("peak of these two", 1.5, ("optim.Private",), _private("peak"), counts=True),
)
