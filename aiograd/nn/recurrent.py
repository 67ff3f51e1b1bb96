"""LSTM, GRU and RNN, with PyTorch's order of gates and weight layout, so that weights can be exchanged.

A layer in one direction over a whole sequence is one row of the op tables; the networks share the arrangement of
layers and directions. Gates come in the order input, forget, cell, output for LSTM, and reset, update, new for GRU.
"""

from __future__ import annotations

import math
from typing import Any

from aiograd.array_functions.conversion import as_tensor, row
from aiograd.array_functions.creation import zeros
from aiograd.array_functions.manipulation import concat, flip, stack
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import functional, init
from aiograd.nn.functional.documentation import put_behind_first_line
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.running.random import Generator
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_lstm, _gru, _rnn = row("lstm"), row("gru"), row("rnn")


_ARGUMENTS = """Args:
    input_size, hidden_size: features of each step and of the states.
    num_layers: each layer takes the states of the one below as its input.{more}
    bias: True if there are biases.
    batch_first: True if sequences are (N, T, I) rather than (T, N, I).
    dropout: probability with which states between layers are dropped in training.
    bidirectional: True to run both ways; outputs of the two are concatenated.
    dtype, device: dtype and device of the parameters.
    generator: draws their first values, uniform in ``±1 / sqrt(hidden_size)``, and the dropout; None: the default generator.

Raises:
    ArgumentError: a size below 1{other}."""


class _Recurrent(Module):
    #: how many gates there are, and how many states a step hands on
    _gates: int = 1
    _states: int = 1

    def __init_subclass__(cls, *, more: str = "", other: str = "") -> None:
        put_behind_first_line(cls, _ARGUMENTS.format(more=more, other=other))

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        dtype: Any = None,
        device: str | None = None,
        generator: Generator | None = None,
    ) -> None:
        if min(input_size, hidden_size, num_layers) < 1:
            raise ArgumentError(f"{type(self).__name__}({input_size}, {hidden_size}, num_layers={num_layers}): expected numbers above 0")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.generator = generator
        size = self._gates * hidden_size
        for layer in range(num_layers):
            inputs = input_size if layer == 0 else hidden_size * (1 + bidirectional)
            for end in self._ends():
                self.register_parameter(f"weight_ih_l{layer}{end}", new_parameter((size, inputs), dtype, device))
                self.register_parameter(f"weight_hh_l{layer}{end}", new_parameter((size, hidden_size), dtype, device))
                for name in ("bias_ih", "bias_hh"):
                    self.register_parameter(f"{name}_l{layer}{end}", new_parameter((size,), dtype, device) if bias else None)
        self.reset_parameters(generator)

    def _ends(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound, generator)

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Any]:
        """Run over a sequence.

        Args:
            input: (T, N, I), or (N, T, I) with `batch_first`, or (T, I).
            hx: first states, (layers * directions, N, H), without N for (T, I); of an LSTM a pair of them, hidden and cell states; zeros if
                None.

        Returns:
            The states of the last layer, (T, N, H * directions) or as the input is laid out, and the last states of every layer and
            direction, laid out as `hx`.
        """
        x = as_tensor(input)
        single = x.ndim == 2
        if single:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.swapaxes(0, 1)
        if x.ndim != 3 or x.shape[2] != self.input_size:
            found = list(as_tensor(input).shape)
            raise ShapeError(f"{type(self).__name__}: found an input of shape {found}, expected sequences of {self.input_size} features")
        first = self._first_states(x, hx, single)
        last: list[tuple[Tensor, ...]] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = functional.dropout(x, self.dropout, self.training, generator=self.generator)
            directions = []
            for end in self._ends():
                before = None if first is None else tuple(each[len(last)] for each in first)
                out, *after = self._run(flip(x, axis=0) if end else x, before, f"l{layer}{end}")
                directions.append(flip(out, axis=0) if end else out)
                last.append(tuple(after))
            x = directions[0] if len(directions) == 1 else concat(directions, axis=-1)
        states = [each[0].unsqueeze(0) if len(each) == 1 else stack(list(each)) for each in zip(*last, strict=True)]
        if single:
            x, states = x.squeeze(1), [each.squeeze(1) for each in states]
        elif self.batch_first:
            x = x.swapaxes(0, 1)
        return x, states[0] if self._states == 1 else tuple(states)

    def _run(self, x: Tensor, before: tuple[Tensor, ...] | None, where: str) -> tuple[Tensor, ...]:
        weights = [getattr(self, f"{name}_{where}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        if before is None:
            before = (zeros((x.shape[1], self.hidden_size), dtype=weights[1].dtype, device=x.device),) * self._states
        return self._layer(x, before, weights)

    def _layer(self, x: Tensor, before: tuple[Tensor, ...], weights: list[Any]) -> tuple[Tensor, ...]:
        """One layer in one direction: all states, and the last ones."""
        raise NotImplementedError

    def _first_states(self, x: Tensor, hx: Any, single: bool) -> tuple[Tensor, ...] | None:
        if hx is None:
            return None
        given = tuple(as_tensor(each) for each in ((hx,) if self._states == 1 else hx))
        if single and all(each.ndim == 2 for each in given):
            given = tuple(each.unsqueeze(1) for each in given)
        expected = (self.num_layers * len(self._ends()), x.shape[1], self.hidden_size)
        if len(given) != self._states or any(each.shape != expected for each in given):
            found = " and ".join(str(list(each.shape)) for each in given)
            raise ShapeError(f"{type(self).__name__}: found first states of shapes {found}, expected {self._states} of {list(expected)}")
        return given

    def extra_repr(self) -> str:
        given = {"num_layers": (self.num_layers, 1), "bias": (self.bias, True), "batch_first": (self.batch_first, False)}
        given |= {"dropout": (self.dropout, 0.0), "bidirectional": (self.bidirectional, False)}  # type: ignore[dict-item]
        return f"{self.input_size}, {self.hidden_size}" + "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)


class LSTM(_Recurrent):
    """Long short-term memory over a sequence, in layers, in one or both directions.

    Parameters are ``weight_ih_l0`` (4H, I), ``weight_hh_l0`` (4H, H), ``bias_ih_l0`` and ``bias_hh_l0`` (4H,) for the first layer, with
    ``_l1`` and so on for the next, and with ``_reverse`` at the end for the direction from the end to the start.

    >>> outputs, (hidden, cell) = ag.nn.LSTM(3, 4, num_layers=2)(ag.ones(5, 1, 3))
    >>> outputs.shape, hidden.shape, cell.shape
    ((5, 1, 4), (2, 1, 4), (2, 1, 4))
    """

    _gates = 4
    _states = 2

    def _layer(self, x: Tensor, before: tuple[Tensor, ...], weights: list[Any]) -> tuple[Tensor, ...]:
        return call(_lstm, (x, *before, *weights), {})  # type: ignore[no-any-return]


class GRU(_Recurrent):
    """Gated recurrent units over a sequence, in layers, in one or both directions. Parameters have the names of `LSTM`'s, and 3H rows.

    >>> outputs, hidden = ag.nn.GRU(3, 4, batch_first=True)(ag.ones(1, 5, 3))
    >>> outputs.shape, hidden.shape
    ((1, 5, 4), (1, 1, 4))
    """

    _gates = 3

    def _layer(self, x: Tensor, before: tuple[Tensor, ...], weights: list[Any]) -> tuple[Tensor, ...]:
        return call(_gru, (x, *before, *weights), {})  # type: ignore[no-any-return]


class RNN(_Recurrent, more='\n    nonlinearity: "tanh" or "relu".', other=", or another nonlinearity"):
    """A simple recurrent network over a sequence, in layers, in one or both directions. Parameters have the names of `LSTM`'s, and H rows.

    >>> outputs, hidden = ag.nn.RNN(3, 4, bidirectional=True)(ag.ones(5, 1, 3))
    >>> outputs.shape, hidden.shape
    ((5, 1, 8), (2, 1, 4))
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        nonlinearity: str = "tanh",
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        dtype: Any = None,
        device: str | None = None,
        generator: Generator | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(f"RNN(nonlinearity={nonlinearity!r}): expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity
        super().__init__(
            input_size, hidden_size, num_layers, bias, batch_first, dropout, bidirectional, dtype=dtype, device=device, generator=generator
        )

    def _layer(self, x: Tensor, before: tuple[Tensor, ...], weights: list[Any]) -> tuple[Tensor, ...]:
        return call(_rnn, (x, *before, *weights), {"nonlinearity": self.nonlinearity})  # type: ignore[no-any-return]

    def extra_repr(self) -> str:
        return super().extra_repr() + ("" if self.nonlinearity == "tanh" else f", nonlinearity={self.nonlinearity}")
