"""Programs of ``dynamic=True`` that differ in their sizes alone have one text, and so one machine code, with the bits of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from tests.compiler.native.codes import needs_native

pytestmark = [needs_native, pytest.mark.one_loop]

#: of the first axis: of a service that puts up to 64 requests together
BATCHES = range(1, 65)


#: a function, its leaves, and the arrays that it takes by the length of their first axis
Case = tuple[Callable[..., Any], list[ag.Tensor], Callable[[int], tuple[Any, ...]]]


def mlp(rng: np.random.Generator) -> Case:
    model = nn.Sequential(nn.Linear(16, 24), nn.ReLU(), nn.Linear(24, 5))

    def loss(x: Any, y: Any) -> Any:
        return nn.functional.cross_entropy(model(x), y)

    return loss, list(model.parameters()), lambda n: (rng.standard_normal((n, 16)).astype(np.float32), rng.integers(0, 5, n))


def rnn(rng: np.random.Generator) -> Case:
    weight = ag.tensor(rng.standard_normal((6, 6)) / 3, requires_grad=True)

    def final(x: Any) -> Any:
        h = x[0]
        for step in range(1, 12):
            h = (h @ weight + x[step]).tanh() * (1.0 / h.shape[0])
        return (h * h).mean()

    return final, [weight], lambda n: (rng.standard_normal((12, n, 6)),)


def strided(rng: np.random.Generator) -> Case:
    scale = ag.tensor(rng.standard_normal(7), requires_grad=True)

    def total(x: Any) -> Any:
        backwards, by_column = x.flip(0)[:, 1:], (x * scale).sum(0)
        return ((backwards * by_column[1:]).T + x[:, 0]).sum(1).mean() / x.shape[0]

    return total, [scale], lambda n: (rng.standard_normal((n, 7)),)


async def bits(function: Callable[..., Any], leaves: list[ag.Tensor], arguments: tuple[Any, ...]) -> list[bytes]:
    """The bits of its value and of all gradients."""
    tensors = [ag.tensor(array, requires_grad=array.dtype.kind == "f") for array in arguments]
    every = [*leaves, *[tensor for tensor in tensors if tensor.requires_grad]]
    for tensor in every:
        tensor.grad = None
    value = function(*tensors)
    await value.backward()
    return [value.numpy().tobytes(), *[tensor.grad.numpy().tobytes() for tensor in every]]


@pytest.mark.parametrize(("make", "most"), [(mlp, 3), (rnn, 2), (strided, 2)])
async def test_a_service_of_many_sizes_has_few_texts(make: Any, most: int) -> None:
    """At most one for a single request, one for all others, and a third where functions of large batches release the interpreter's lock."""
    function, leaves, arguments_of = make(np.random.default_rng(0))
    compiled = ag.compile(function, tier="native", dynamic=True)
    for n in BATCHES:
        arguments = arguments_of(n)
        assert await bits(compiled, leaves, arguments) == await bits(function, leaves, arguments), n
    statistics = compiled.statistics()
    assert statistics.native_programs == len(BATCHES) and not statistics.breaks
    texts = {program.native.source for program in compiled.programs}
    assert len(texts) <= most


async def test_other_programs_have_a_text_for_each_size() -> None:
    """Without `dynamic` a text has the sizes of its loops, so the count of the test above can be another one."""
    function, leaves, arguments_of = mlp(np.random.default_rng(0))
    compiled = ag.compile(function, tier="native")
    for n in (2, 3, 4):
        arguments = arguments_of(n)
        assert await bits(compiled, leaves, arguments) == await bits(function, leaves, arguments), n
    assert len({program.native.source for program in compiled.programs}) == 3
