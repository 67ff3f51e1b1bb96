"""Random programs, and training of networks: compiled, they have the bits of the eager ones.

As many as wanted run with ``python -m tests.compiler.test_random_programs [first seed] [count] [tier]``.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import aiograd as ag
from aiograd import nn
from aiograd.compiler.native.tiers import native_problem
from aiograd.compiler.passes import arenas
from aiograd.nn import functional as F
from tests.sweeps import swept

SHAPES = ((3, 4), (4,), (1, 4), (3, 1), ())
DTYPES = (np.float32, np.float32, np.float64)


def bits(*tensors: Any) -> list[Any]:
    """Shape, dtype and bytes of each; one NaN is as good as another, for which of two a sum of them is depends on numpy's loop."""
    found = []
    for x in tensors:
        array = None if x is None else x.detach().numpy()
        if array is not None and array.dtype.kind == "f":
            array = np.where(np.isnan(array), array.dtype.type(np.nan), array)
        found.append(None if array is None else (array.shape, array.dtype, array.tobytes()))
    return found


def step(random: Random, pool: list[Any], leaves: list[Any]) -> Any:
    """One more value from those of the pool and of the captured leaves."""
    x, y = random.choice([*pool, *leaves]), random.choice([*pool, *leaves])
    kind = random.randrange(21)
    if kind == 20:
        return x * ag.rand(*x.shape)
    if kind > 15:
        return written(random, x * 1.0, y)
    if kind < 3:
        return x + y
    if kind < 6:
        return x * y
    if kind == 6:
        return x - y * random.choice((0.5, 2.0))
    if kind == 7:
        return ag.tanh(x)
    if kind == 8:
        return ag.exp(x * 0.1)
    if kind == 9:
        return x.sum(axis=random.choice((None, 0)) if x.ndim else None, keepdims=x.ndim == 2)
    if kind == 10 and x.ndim == 2:
        return x[:, 1:3].mean() + x.T.reshape(-1)[::2].sum()
    if kind == 11:
        return ag.where(x > 0.0, x, y * 0.1)
    if kind == 12:
        return x.detach() * y
    if kind == 13:
        with ag.no_grad():
            constant = ag.sigmoid(y)
        return x * constant
    if kind == 14 and x.ndim == 2 and x.shape[1] == 4:
        first, second = ag.split(x, 2, axis=1)
        return first * second.mean()
    if x.ndim == 2 and y.ndim == 2 and x.shape[1] == y.shape[1]:
        return x @ y.T
    return ag.maximum(x, y)


def written(random: Random, z: Any, y: Any) -> Any:
    """A value that is modified in place, as a whole, in part or through views."""
    kind = random.randrange(6)
    fits = np.broadcast_shapes(z.shape, y.shape) == z.shape and np.can_cast(y.dtype, z.dtype)
    if kind == 0 and fits:
        z *= y
    elif kind == 1:
        z += 0.5
        z[...] = z + z.detach()
    elif kind == 2 and z.ndim:
        first, last = z[:1], z.reshape(-1)[-1:]
        first *= 2.0
        last -= y.mean().astype(z.dtype)
        z = z + first.sum() * last
    elif kind == 3 and z.ndim == 2:
        z.T[0] = y.sum().astype(z.dtype)
        z[:, 1:] += z[:, :-1] * 1.0
    elif kind == 4 and z.ndim:
        aside = z.detach() * 1.0
        aside /= 3.0
        with ag.no_grad():
            z = z + ag.tanh(aside)
            z -= aside
    elif kind == 5 and z.ndim:
        turned = z[::-1]
        aside = turned.detach()
        z[:1] *= 2.0
        turned[aside > 0.2] = y.mean().astype(z.dtype)
        z[turned.detach() > 1.0] = 0.5
        z = z + turned * aside
    return z


def make(seed: int) -> tuple[Callable[..., Any], list[tuple[Any, Any]], list[Any]]:
    """A function of two tensors, their shapes and dtypes, and the leaves that it captures."""
    random = Random(seed)
    kinds = [(random.choice(SHAPES), random.choice(DTYPES)) for _ in range(2)]
    rng = np.random.default_rng(seed)
    leaves = [ag.tensor(rng.standard_normal(random.choice(SHAPES)).astype(random.choice(DTYPES)), requires_grad=random.random() < 0.8) for _ in "ab"]
    count, steps = random.randint(1, 3), random.randint(3, 25)

    def function(*inputs: Any) -> Any:
        choices = Random(seed + 1)
        pool = list(inputs)
        while len(pool) < steps:
            value = step(choices, pool, leaves)
            if value.ndim == 2 and 4 not in value.shape:
                value = value.mean(axis=0, keepdims=True)
            try:
                np.broadcast_shapes(value.shape, (3, 4))
            except ValueError:
                value = value.sum()
            pool.append(value)
        return tuple(value * 1.0 for value in pool[-count:])

    return function, kinds, leaves


async def run(function: Callable[..., Any], inputs: list[Any], leaves: list[Any], *, outside: bool) -> list[Any]:
    """Results and gradients, with uses of the leaves before and after the call, which may be awaited, where that is wanted."""
    ag.seed(7)
    everything = [x for x in (*inputs, *leaves) if x.requires_grad]
    for x in everything:
        x.grad = None
    before = [x * 0.7 for x in everything] if outside else []
    outputs = function(*inputs)
    outputs = await outputs if inspect.isawaitable(outputs) else outputs
    loss = sum((output**2).sum() for output in outputs)
    loss = loss + sum((x * 0.3).sum() for x in (*before, *(everything if outside else ())))
    if loss.requires_grad:
        await loss.backward()
    return bits(*outputs, *(x.grad for x in everything))


@pytest.mark.one_loop
@pytest.mark.parametrize("outside", swept([True, False]))
@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32 - 2))
async def test_random_programs(seed: int, outside: bool) -> None:
    await check(seed, "auto", outside=outside)


@pytest.mark.one_loop
@pytest.mark.skipif(native_problem() is not None, reason=str(native_problem()))
@pytest.mark.parametrize("dynamic", swept([False, True]))
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 2))
async def test_random_native_programs(seed: int, dynamic: bool) -> None:
    await check(seed, "native", outside=False, dynamic=dynamic)


async def check(seed: int, tier: str, *, outside: bool, dynamic: bool = False) -> None:
    """One random program gives eager's bits, with leaves that change between its runs."""
    function, kinds, leaves = make(seed)
    compiled = ag.compile(function, tier=tier, dynamic=dynamic)
    rng = np.random.default_rng(seed)
    for _ in range(3):
        inputs = [ag.tensor(rng.standard_normal(shape).astype(dtype), requires_grad=True) for shape, dtype in kinds]
        expected = await run(function, inputs, leaves, outside=outside)
        assert await run(compiled, inputs, leaves, outside=outside) == expected
        with ag.no_grad():
            for x in leaves:
                x *= 0.9
    statistics = compiled.statistics()
    assert not statistics.breaks and statistics.recordings == 1 and statistics.runs == 2, statistics


async def check_many(begin: int, count: int, tier: str) -> None:
    """Check programs by their seeds, and print those that differ from eager."""
    for seed in range(begin, begin + count):
        try:
            await check(seed, tier, outside=bool(seed % 2))
        except Exception as error:
            print(f"seed {seed}, outside={bool(seed % 2)}: {type(error).__name__} {str(error)[:300]}", flush=True)
        if seed % 1000 == 999:
            print(f"{seed + 1 - begin} programs", flush=True)


def cnn() -> Any:
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(4, 4, 3, groups=2), nn.GELU(), nn.Flatten(), nn.Linear(16, 4)
    )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        self.lstm = nn.LSTM(10, 8, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        y, _ = self.lstm(x[:, 0])
        return self.head(y[:, -1])


class Transformer(nn.Module):
    def __init__(self) -> None:
        self.embedding = nn.Linear(10, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Any) -> Any:
        return self.head(self.block(self.embedding(x[:, 0])).mean(axis=1))


def mlp() -> Any:
    return nn.Sequential(nn.Flatten(), nn.Linear(100, 16), nn.SiLU(), nn.Dropout(0.3), nn.LayerNorm(16), nn.Linear(16, 4))


@pytest.mark.one_loop
@pytest.mark.parametrize("new", [mlp, cnn, Recurrent, Transformer], ids=["mlp", "cnn", "lstm", "transformer"])
async def test_a_hundred_steps_of_training(new: Callable[[], Any]) -> None:
    async def train(compiled: bool) -> list[Any]:
        ag.seed(7)
        model = new()
        loss_of = lambda x, y: F.cross_entropy(model(x), y)  # noqa: E731
        if compiled:
            loss_of = ag.compile(loss_of)
        optimizer = ag.optim.AdamW(model.parameters(), lr=0.01)
        rng = np.random.default_rng(0)
        losses = []
        for _ in range(100):
            optimizer.zero_grad()
            loss = loss_of(ag.asarray(rng.standard_normal((6, 1, 10, 10)).astype(np.float32)), rng.integers(0, 4, 6))
            await loss.backward()
            optimizer.step()
            losses.append(loss)
        if compiled:
            statistics = loss_of.statistics()
            assert not statistics.breaks and statistics.runs == 99, statistics
        return bits(*losses, *model.parameters(), *model.buffers())

    assert await train(False) == await train(True)


if __name__ == "__main__":
    first, number, way = [*sys.argv[1:], *("0", "100000", "native")[len(sys.argv) - 1 :]]
    arenas.FEWEST = 1  # as in the tests
    np.seterr(all="ignore")
    ag.run(check_many(int(first), int(number), way), tune_gc=False)
