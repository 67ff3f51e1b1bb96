"""Compiled functions with repeated bodies: bits of eager, and a text that does not grow with the repetitions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from tests.benchmarks import networks
from tests.compiler.native.codes import needs_native
from tests.sweeps import swept

pytestmark = needs_native


class Sequence:
    """Networks over some steps, each with its parameters.

    Args:
        steps: how many.
        dtype: of all arrays.
    """

    def __init__(self, steps: int, dtype: Any) -> None:
        self.steps = steps
        self._rng, self._dtype = np.random.default_rng(steps), dtype
        self.inputs = [self._tensor(3, 8, requires_grad=False) for _ in range(steps)]
        self.stacked = self._tensor(steps, 3, 8, requires_grad=False)
        self.parameters = [self._tensor(3, 8), self._tensor(8, 8), self._tensor(8, 8), self._tensor(8)]
        self.layers = [(self._tensor(8, 8), self._tensor(8)) for _ in range(steps)]

    def _tensor(self, *shape: int, requires_grad: bool = True) -> Any:
        return ag.tensor((self._rng.standard_normal(shape) * 0.4).astype(self._dtype), requires_grad=requires_grad)

    def recurrent(self, start: Any) -> Any:
        """An RNN over a list of arrays."""
        _, wx, wh, bias = self.parameters
        for x in self.inputs:
            start = (x @ wx + start @ wh + bias).tanh()
        return (start * start).sum()

    def over_views(self, start: Any) -> Any:
        """An RNN over the rows of one array, with every state in the result."""
        _, wx, wh, bias = self.parameters
        total = 0.0
        for t in range(self.steps):
            start = ag.tanh(self.stacked[t] @ wx + start @ wh + bias)
            total = total + start
        return (total * start).sum()

    def with_numbers(self, start: Any) -> Any:
        """Another number in every step, and a branch that is taken in all of them."""
        _, _, wh, bias = self.parameters
        for t in range(self.steps):
            start = ag.where(start > 0.01 * t, start, start * 0.1) @ wh * (1.0 + 0.25 * t) + bias
            start = ag.tanh(start - 0.5 / (t + 1))
        return start.sum()

    def before_last(self, start: Any) -> Any:
        """Each state from the last one and the one before."""
        _, wx, wh, _ = self.parameters
        last = before = start
        for x in self.inputs:
            last, before = ag.tanh(last @ wh + before * 0.5 + x @ wx), last
        return (last * before).sum()

    def deep(self, start: Any) -> Any:
        """Equal layers with parameters of their own, and a residual."""
        for weight, bias in self.layers:
            start = start + ag.sigmoid(start @ weight + bias) * 0.5
        return start.mean()

    def chosen_parts(self, start: Any) -> Any:
        """Gates that are parts of one product, as in an LSTM."""
        _, wx, wh, bias = self.parameters
        state = start.detach()[:, :4]
        for x in self.inputs:
            gates = x @ wx + start @ wh + bias
            state = gates[:, :4].sigmoid() * state + gates[:, 4:].tanh()
            start = ag.concatenate([state, state * 0.5], axis=1)
        return (start * start).sum()


NAMES = ("recurrent", "over_views", "with_numbers", "before_last", "deep", "chosen_parts")


def grads_of(function: Callable[..., Any], network: Sequence) -> list[bytes]:
    """The bits of the result and of all gradients."""
    leaves = [*network.parameters, *[each for layer in network.layers for each in layer]]
    for leaf in leaves:
        leaf.grad = None

    async def run() -> Any:
        loss = function(network.parameters[0])
        await loss.backward()
        return loss

    loss = ag.run(run())
    return [loss.numpy().tobytes(), *[leaf.grad.numpy().tobytes() for leaf in leaves if leaf.grad is not None]]


def compiled(name: str, steps: int, dtype: Any) -> int:
    """Compare with the eager call; the lines of the native text."""
    network = Sequence(steps, dtype)
    function = getattr(network, name)
    native = ag.compile(function, tier="native")
    expected = grads_of(function, network)
    for _ in range(3):
        assert grads_of(native, network) == expected
    (program,) = native.programs
    assert program.tier == "native" and not program.native.fallbacks
    assert len(program.native.groups) > 2 * steps  # all of them, in loops or not
    return len(program.native.source.splitlines())


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", NAMES)
def test_bits_and_lines(name: str, dtype: Any) -> None:
    """A table is one line. Few lines more hand the interpreter's lock to others, which is not worth it for few steps."""
    few, many = compiled(name, 40, dtype), compiled(name, 80, dtype)
    assert few <= many <= few + 8


@pytest.mark.parametrize("name", swept(NAMES, keep=2))
def test_checked(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIOGRAD_NATIVE_CHECK", "1")
    assert compiled(name, 40, np.float32) == compiled(name, 60, np.float32)


def test_the_lstm_of_the_benchmarks_has_as_few_lines_for_240_steps_as_for_80() -> None:
    """Long ones are cut into parts, a forward and a backward each."""
    texts = []
    for steps in (80, 240):
        network = networks.lstm(steps, 16, 4)
        one, other = networks.on_aiograd(network), networks.on_aiograd(network)
        native = ag.compile(one.forward, tier="native")

        async def both(native: Any = native, one: Any = one, other: Any = other) -> None:
            for forward in (native, other.forward):
                await forward().backward()

        for _ in range(2):
            ag.run(both())
        assert [p.grad.numpy().tobytes() for p in one.parameters] == [p.grad.numpy().tobytes() for p in other.parameters]
        texts.append([text.text.splitlines() for program in native.programs for text in program.native.parts.texts])
    (few, many) = texts
    assert max(map(len, many)) < 1.2 * max(map(len, few))
