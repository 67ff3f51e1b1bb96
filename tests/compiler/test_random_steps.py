"""Random training steps: compiled, they have the bits of the eager ones, and fail where those fail.

As many as wanted run with ``python -m tests.compiler.test_random_steps [first seed] [count]``.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.native.tiers import native_problem
from aiograd.compiler.passes import arenas
from aiograd.errors import AiogradError, ArgumentError
from tests.compiler.test_random_programs import DTYPES, SHAPES, bits, step

OPTIONS: dict[str, dict[str, Any]] = {"numpy": {"tier": "numpy"}, "native": {"tier": "native"}, "budget": {"memory_budget": 1.0}}
KINDS = ["row"] * 7 + ["transposed"] * 3 + "pass pass_to_some another_pass grad grad read read update forget scale optimizer".split()


class RandomStep:
    """A step of rows, passes, reads of gradients and updates in random order.

    Args:
        seed: of the choices.
        size: the number of its parts.
    """

    def __init__(self, seed: int, size: int) -> None:
        numbers = np.random.default_rng(seed)
        random = Random(seed)
        self.seed, self.size = seed, size
        self.kinds = [(random.choice(SHAPES[:4]), random.choice(DTYPES)) for _ in range(2)]
        self.leaves = [
            ag.tensor(numbers.standard_normal(random.choice(SHAPES[:4])).astype(random.choice(DTYPES)), requires_grad=True) for _ in range(3)
        ]
        self.optimizer = random.choice([ag.optim.SGD, ag.optim.Adam])(self.leaves, 0.01)

    async def __call__(self, *inputs: Any) -> Any:
        random = Random(self.seed + 1)
        pool, losses, results = [*inputs], [], []
        for _ in range(self.size):
            kind, leaf = random.choice(KINDS), random.choice(self.leaves)
            if kind == "row":
                pool.append(_fitted(step(random, pool, self.leaves)))
            elif kind == "transposed":
                x, y = random.choice([*pool, *self.leaves]), random.choice([*pool, *self.leaves])
                pool.append(_fitted(_transposed(random, x, y)))
            elif kind in ("pass", "pass_to_some", "grad"):
                loss = sum([value.mean() for value in random.sample(pool, min(3, len(pool)))]) + (leaf * random.choice(pool).detach()).sum() * 0.1
                losses.append(loss)
                await self._passes(random, kind, loss, pool)
            elif kind == "another_pass" and losses:
                await self._passes(random, random.choice(["pass", "pass_to_some", "grad"]), random.choice(losses), pool)
            elif kind == "read" and leaf.grad is not None:
                read = random.choice([leaf.grad, leaf.grad.detach(), leaf.grad.data, leaf.grad.T])
                pool.append(_fitted(read * 2.0))
            elif kind == "update" and leaf.grad is not None:
                with ag.no_grad():
                    leaf -= leaf.grad.detach() * 0.1 if random.random() < 0.5 else leaf.grad * 0.1
            elif kind == "forget":
                leaf.grad = None
            elif kind == "scale" and leaf.grad is not None:
                with ag.no_grad():
                    leaf.grad *= 0.5
            elif kind == "optimizer":
                self.optimizer.step()
            results.append(pool[-1])
        return tuple([value * 1.0 for value in {id(value): value for value in results[-3:]}.values()])

    async def _passes(self, random: Random, kind: str, loss: Any, pool: list[Any]) -> None:
        keeps = random.choice([None, None, True])
        if kind == "pass":
            await loss.backward(retain_graph=keeps)
            return
        some = random.sample(self.leaves, random.randint(1, 2))
        if kind == "pass_to_some":
            await loss.backward(inputs=some, retain_graph=keeps)
            return
        for grad in await ag.grad(loss, some, retain_graph=keeps, allow_unused=True):
            if grad is not None:
                pool.append(_fitted(grad))


def _transposed(random: Random, x: Any, y: Any) -> Any:
    """A value with strides of another order, or none."""
    kind = random.randrange(6)
    if kind == 0 and x.ndim == y.ndim == 2 and x.shape == y.shape:
        return (x.T * y.T).T
    if kind == 1:
        return x.T
    if kind == 2:
        return ag.broadcast_to(x, (3, 4)) if x.shape in ((4,), (1, 4), (3, 1)) else x.sum()
    if kind == 3 and x.shape == (3, 4):
        return x.reshape(4, 3).T
    if kind == 4 and x.ndim == 2:
        return ag.exp(x.T * 0.1).reshape(-1)[::-1].reshape(x.shape)
    return x.T.sum(axis=0) if x.ndim else x * 2.0


def _fitted(value: Any) -> Any:
    """The value, in a shape that goes with the others."""
    if value.ndim == 2 and 4 not in value.shape and value.shape != (3, 1):
        value = value.T if value.shape == (4, 3) else value.mean(axis=0, keepdims=True)
    try:
        np.broadcast_shapes(value.shape, (3, 4))
    except ValueError:
        value = value.sum()
    return value


async def ran(function: Callable[..., Any], case: RandomStep, runs: int) -> list[Any]:
    """Results, errors, leaves and gradients of some runs."""
    ag.seed(7)
    numbers, found = np.random.default_rng(case.seed), []
    for _ in range(runs):
        inputs = [ag.tensor(numbers.standard_normal(shape).astype(dtype)) for shape, dtype in case.kinds]
        try:
            found.append(bits(*await function(*inputs)))
        except ArgumentError as error:
            if "memory budget" in str(error):
                raise
            found.append(type(error).__name__)
        except AiogradError as error:
            found.append(type(error).__name__)
        found.append(bits(*case.leaves, *[leaf.grad for leaf in case.leaves]))
    return found


async def check(seed: int, options: dict[str, Any], size: int = 14, runs: int = 4) -> Any:
    """One random step gives eager's bits; returns the statistics."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        case = RandomStep(seed, size)
        expected = await ran(case, case, runs)
        case = RandomStep(seed, size)
        compiled = ag.compile(case, **options)
        found = await ran(compiled, case, runs)
    assert found == expected
    return compiled.statistics()


@pytest.mark.one_loop
@pytest.mark.parametrize("seed", [0, 1, 2, 3])
@pytest.mark.parametrize("options", OPTIONS)
async def test_random_steps(options: str, seed: int) -> None:
    if options == "native" and native_problem() is not None:
        pytest.skip(str(native_problem()))
    found = []
    with np.errstate(all="ignore"):
        for each in range(5 * seed, 5 * seed + 5):
            found.append(await check(each, OPTIONS[options]))
    assert sum([statistics.runs > 0 for statistics in found]) > 1 and not any([statistics.breaks for statistics in found])


if __name__ == "__main__":
    first, count = [int(each) for each in [*sys.argv[1:], *("0", "100000")[len(sys.argv) - 1 :]]]
    arenas.FEWEST = 1  # as in the tests
    np.seterr(all="ignore")

    async def check_many() -> None:
        reasons: Counter[str] = Counter()
        for seed in range(first, first + count):
            for name, options in OPTIONS.items():
                try:
                    statistics = await check(seed, options)
                    reasons.update([each.partition(": ")[0] for each in statistics.reasons.values()] or [f"{min(statistics.runs, 1)} compiled"])
                except Exception as error:
                    print(f"seed {seed}, {name}: {type(error).__name__} {str(error)[:200]!r}", flush=True)
        print(reasons)

    ag.run(check_many(), tune_gc=False)
