"""Compiled functions, methods and modules as their users meet them: attributes, parts, copies, and errors for bad arguments."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentTypeError, TraceError
from tests.compiler.test_compile import bits, leaf
from tests.support import assert_raises


@ag.compile
def doubled(x: Any) -> Any:
    return x * 2


class Layer(nn.Module):
    def __init__(self, factor: float) -> None:
        self.linear = nn.Linear(3, 3)
        self.factor = factor

    @ag.compile
    def forward(self, x: Any) -> Any:
        return self.linear(x) * self.factor

    @ag.compile
    @staticmethod
    def static(x: Any) -> Any:
        return x * 3


async def test_a_compiled_module_passes_for_the_module() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
    compiled = ag.compile(module)
    assert isinstance(compiled, nn.Sequential) and len(compiled) == 3 and compiled and list(compiled) == list(module)
    assert compiled[0].weight is module[0].weight and list(compiled.state_dict()) == list(module.state_dict())
    compiled.eval()
    assert not module.training and not compiled.training and not module[1].training
    compiled.note = "of the module"
    assert module.note == "of the module"
    optimizer, x = ag.optim.SGD(compiled.parameters(), lr=0.1), leaf(2, 3, grad=False)
    for _ in range(3):
        optimizer.zero_grad()
        loss = compiled(x).sum()
        assert bits(loss) == bits(module(x).sum())
        await loss.backward()
        optimizer.step()
    compiled.load_state_dict({name: value.clone() * 0.5 for name, value in module.state_dict().items()})
    assert bits(compiled(x)) == bits(module(x))
    assert compiled.statistics().recordings == 1 and compiled.statistics().runs == 3
    with pytest.raises(AttributeError, match="nothing"):
        compiled.nothing  # noqa: B018


async def test_a_compiled_module_is_a_part_of_others() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            self.encoder = ag.compile(nn.Linear(3, 3))
            self.decoder = nn.Linear(3, 1)

        def forward(self, x: Any) -> Any:
            return self.decoder(self.encoder(x))

    model, x = Model(), leaf(2, 3, grad=False)
    assert [name for name, _ in model.named_parameters()] == ["encoder.weight", "encoder.bias", "decoder.weight", "decoder.bias"]
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    assert not model.eval().encoder.training
    for _ in range(2):
        await model(x).sum().backward()
    assert model.encoder.weight.grad is not None and model.encoder.statistics().runs == 1
    chain = nn.Sequential(ag.compile(nn.Linear(3, 3)), nn.ReLU())
    assert chain(x).shape == (2, 3) and len(list(chain.parameters())) == 2
    outer = ag.compile(model)
    for _ in range(3):
        assert bits(outer(x)) == bits(model(x))
    assert outer.statistics().runs == 2


def test_methods() -> None:
    layers, x = [Layer(1.0), Layer(2.0)], leaf(2, 3, grad=False)
    for _ in range(3):
        for layer in layers:
            assert bits(layer(x)) == bits(layer.linear(x) * layer.factor)
    layers[0].factor = 5.0
    assert bits(layers[0](x)) == bits(layers[0].linear(x) * 5.0)
    forward = layers[0].forward
    assert forward.statistics().recordings == 3 and len(forward.programs) == 3 and forward.__self__ is layers[0] and forward.__name__ == "forward"
    assert bits(Layer.static(x)) == bits(layers[0].static(x)) == bits(x * 3)


def test_copies() -> None:
    x = leaf(2, 3, grad=False)
    model = nn.Linear(3, 3)
    model.forward = ag.compile(model.forward)  # type: ignore[method-assign]
    other = copy.deepcopy(model)
    with ag.no_grad():
        other.weight.zero_()
        other.bias.zero_()
    for _ in range(3):
        assert not other(x).numpy().any() and model(x).numpy().any()
    layer = Layer(2.0)
    again = copy.deepcopy(layer)
    again.factor = 3.0
    assert bits(again(x)) == bits(again.linear(x) * 3.0) and bits(layer(x)) == bits(layer.linear(x) * 2.0)
    assert pickle.loads(pickle.dumps(doubled)) is doubled and copy.copy(doubled) is doubled  # noqa: S301
    partial = ag.compile(functools.partial(np.multiply, 2.0), max_signatures=3)
    assert bits(pickle.loads(pickle.dumps(partial))(x)) == bits(partial(x))  # noqa: S301


async def test_what_is_awaited_can_be_told() -> None:
    class Called:
        async def __call__(self, x: Any) -> Any:
            return x * 2

    @ag.compile
    async def step(x: Any) -> Any:
        return x * 2

    x = leaf(3)
    called = ag.compile(Called())
    for _ in range(3):
        assert bits(await called(x)) == bits(x * 2) == bits(await step(x))
    assert inspect.iscoroutinefunction(step) and not inspect.iscoroutinefunction(doubled)
    stepping = ag.no_grad()(step)
    assert not (await stepping(x)).requires_grad
    assert_raises(TraceError, "returned a coroutine; compile the `async def` itself", lambda: ag.compile(lambda x: Called()(x))(x))


def _iterator() -> Iterator[int]:
    yield 1


def test_bad_arguments() -> None:
    x = leaf(3)
    itself: list[Any] = [x]
    itself.append(itself)
    f = ag.compile(lambda x, other: x * 2)
    for bad, text in (
        (iter([1]), "an iterator .* which can be used only once"), (_iterator(), "an iterator"), ({1}, "with a set"),
        ([1, bytearray(b"1")], "bytearray"),
        (itself, "nested too deep, or contain themselves"),
    ):  # fmt: skip
        with pytest.raises(ArgumentTypeError, match=text) as raised:
            f(x, bad)
        assert "test_compiled_objects.py:" in str(raised.value)
    with pytest.raises(ArgumentTypeError, match="found the class Layer; compile an object of it"):
        ag.compile(Layer)
    assert f.statistics().recordings == 0


def test_results_that_contain_themselves_or_are_nested_deep() -> None:
    def itself(x: Any) -> Any:
        found: list[Any] = [x * 2]
        found.append(found)
        return found

    def deep(x: Any) -> Any:
        for _ in range(2000):
            x = [x]
        return x

    for function in (itself, deep):
        assert_raises(TraceError, "returned a result that is nested too deep, or contains itself", lambda f=function: ag.compile(f)(leaf(3)))
