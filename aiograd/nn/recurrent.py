"""LSTM, with PyTorch's order of gates (input, forget, cell, output) and weight layout, so that weights can be exchanged.

A layer in one direction over a whole sequence is one row of the op tables.
"""

from __future__ import annotations

import math
from typing import Any

from aiograd.array_functions.conversion import as_tensor, row
from aiograd.array_functions.creation import zeros
from aiograd.array_functions.manipulation import concat, flip, stack
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import functional, init
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.random import Generator
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_lstm = row("lstm")


class LSTM(Module):
    """Long short-term memory over a sequence, in layers, in one or both directions.

    Parameters are ``weight_ih_l0`` (4H, I), ``weight_hh_l0`` (4H, H), ``bias_ih_l0`` and ``bias_hh_l0`` (4H,) for the first layer, with
    ``_l1`` and so on for the next, and with ``_reverse`` at the end for the direction from the end to the start.

    Args:
        input_size: features of each step.
        hidden_size: features of the states.
        num_layers: each layer takes the states of the one below as its input.
        bias: True if there are biases.
        batch_first: True if sequences are (N, T, I) rather than (T, N, I).
        dropout: probability with which states between layers are dropped in training.
        bidirectional: True to run both ways; outputs of the two are concatenated.
        dtype, device: of the parameters.
        generator: draws their first values, uniform in ``±1 / sqrt(hidden_size)``, and the dropout; None: the default generator.
    """

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
            raise ArgumentError(f"LSTM({input_size}, {hidden_size}, num_layers={num_layers}): expected numbers above 0")
        self.input_size = input_size
        self.hidden_size = hidden_size
        self.num_layers = num_layers
        self.bias = bias
        self.batch_first = batch_first
        self.dropout = dropout
        self.bidirectional = bidirectional
        self.generator = generator
        for layer in range(num_layers):
            inputs = input_size if layer == 0 else hidden_size * (1 + bidirectional)
            for end in self._ends():
                self.register_parameter(f"weight_ih_l{layer}{end}", new_parameter((4 * hidden_size, inputs), dtype, device))
                self.register_parameter(f"weight_hh_l{layer}{end}", new_parameter((4 * hidden_size, hidden_size), dtype, device))
                for name in ("bias_ih", "bias_hh"):
                    self.register_parameter(f"{name}_l{layer}{end}", new_parameter((4 * hidden_size,), dtype, device) if bias else None)
        self.reset_parameters(generator)

    def _ends(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound, generator)

    def forward(self, input: Any, hx: tuple[Any, Any] | None = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Run over a sequence.

        Args:
            input: (T, N, I), or (N, T, I) with `batch_first`, or (T, I).
            hx: first hidden and cell states, (layers * directions, N, H) each, without N for (T, I); zeros if None.

        Returns:
            The states of the last layer, (T, N, H * directions) or as the input is laid out, and the last hidden and cell states of
            every layer and direction, laid out as `hx`.
        """
        x = as_tensor(input)
        single = x.ndim == 2
        if single:
            x = x.unsqueeze(1)
        elif self.batch_first:
            x = x.swapaxes(0, 1)
        if x.ndim != 3 or x.shape[2] != self.input_size:
            raise ShapeError(f"LSTM: found an input of shape {list(as_tensor(input).shape)}, expected sequences of {self.input_size} features")
        first = self._first_states(x, hx, single)
        hidden: list[Tensor] = []
        cells: list[Tensor] = []
        for layer in range(self.num_layers):
            if layer and self.dropout:
                x = functional.dropout(x, self.dropout, self.training, generator=self.generator)
            directions = []
            for end in self._ends():
                h, c = (None, None) if first is None else (first[0][len(hidden)], first[1][len(hidden)])
                out, h, c = self._run(flip(x, axis=0) if end else x, h, c, f"l{layer}{end}")
                directions.append(flip(out, axis=0) if end else out)
                hidden.append(h)
                cells.append(c)
            x = directions[0] if len(directions) == 1 else concat(directions, axis=-1)
        last = stack(hidden), stack(cells)
        if single:
            return x.squeeze(1), (last[0].squeeze(1), last[1].squeeze(1))
        return x.swapaxes(0, 1) if self.batch_first else x, last

    def _run(self, x: Tensor, h: Any, c: Any, where: str) -> tuple[Tensor, Tensor, Tensor]:
        weights = [getattr(self, f"{name}_{where}") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
        if h is None:
            h = c = zeros((x.shape[1], self.hidden_size), dtype=weights[1].dtype, device=x.device)
        return call(_lstm, (x, h, c, *weights), {})  # type: ignore[no-any-return]

    def _first_states(self, x: Tensor, hx: tuple[Any, Any] | None, single: bool) -> tuple[Tensor, Tensor] | None:
        if hx is None:
            return None
        h, c = as_tensor(hx[0]), as_tensor(hx[1])
        if single and h.ndim == c.ndim == 2:
            h, c = h.unsqueeze(1), c.unsqueeze(1)
        expected = (self.num_layers * len(self._ends()), x.shape[1], self.hidden_size)
        if h.shape != expected or c.shape != expected:
            raise ShapeError(f"LSTM: found first states of shapes {list(h.shape)} and {list(c.shape)}, expected {list(expected)}")
        return h, c

    def extra_repr(self) -> str:
        """Extents."""
        given = {"num_layers": (self.num_layers, 1), "bias": (self.bias, True), "batch_first": (self.batch_first, False)}
        given |= {"dropout": (self.dropout, 0.0), "bidirectional": (self.bidirectional, False)}  # type: ignore[dict-item]
        return f"{self.input_size}, {self.hidden_size}" + "".join(f", {name}={value}" for name, (value, default) in given.items() if value != default)
