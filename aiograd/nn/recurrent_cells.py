"""One step of a recurrent network as a module: LSTMCell, GRUCell, RNNCell. Names and layout of parameters are PyTorch's."""

from __future__ import annotations

import math
from typing import Any

from aiograd.array_functions.conversion import as_tensor, row
from aiograd.array_functions.creation import zeros
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import functional, init
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.running.random import Generator
from aiograd.tensors.record import call
from aiograd.tensors.tensor import Tensor

_lstm_cell, _gru_cell = row("lstm_cell"), row("gru_cell")


class _Cell(Module):
    weight_ih: Parameter
    weight_hh: Parameter
    bias_ih: Parameter | None
    bias_hh: Parameter | None

    _gates: int = 1

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        if min(input_size, hidden_size) < 1:
            raise ArgumentError(f"{type(self).__name__}({input_size}, {hidden_size}): expected numbers above 0")
        self.input_size = input_size
        self.hidden_size = hidden_size
        size = self._gates * hidden_size
        self.weight_ih = new_parameter((size, input_size), dtype, device)
        self.weight_hh = new_parameter((size, hidden_size), dtype, device)
        self.bias_ih = new_parameter((size,), dtype, device) if bias else None
        self.bias_hh = new_parameter((size,), dtype, device) if bias else None
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values, uniform in ``±1 / sqrt(hidden_size)``."""
        bound = 1.0 / math.sqrt(self.hidden_size)
        for parameter in self.parameters():
            init.uniform_(parameter, -bound, bound, generator)

    def _contributions(self, input: Any, *states: Any) -> tuple[Tensor, Tensor, list[Tensor]]:
        """The gates' parts that come of the input and of the first state, and the states."""
        x = as_tensor(input)
        if x.ndim not in (1, 2) or x.shape[-1] != self.input_size:
            wanted = f"(N, {self.input_size}) or ({self.input_size},)"
            raise ShapeError(f"{type(self).__name__}: found an input of shape {list(x.shape)}, expected {wanted}")
        expected = (*x.shape[:-1], self.hidden_size)
        given = [zeros(expected, dtype=self.weight_hh.dtype, device=x.device) if h is None else as_tensor(h) for h in states]
        if any(h.shape != expected for h in given):
            found = " and ".join(str(list(h.shape)) for h in given)
            raise ShapeError(f"{type(self).__name__}: found states of shapes {found}, expected {list(expected)}")
        return functional.linear(x, self.weight_ih, self.bias_ih), functional.linear(given[0], self.weight_hh, self.bias_hh), given

    def extra_repr(self) -> str:
        return f"{self.input_size}, {self.hidden_size}" + ("" if self.bias_ih is not None else ", bias=False")


class LSTMCell(_Cell):
    """One step of an LSTM. Parameters are ``weight_ih`` (4H, I), ``weight_hh`` (4H, H), ``bias_ih`` and ``bias_hh`` (4H,).

    Args:
        input_size, hidden_size: features of the input and of the states.
        bias: True if there are biases.
        dtype, device: of the parameters.
        generator: draws their first values.

    >>> hidden, cell = ag.nn.LSTMCell(3, 4)(ag.ones(2, 3))
    >>> hidden.shape, cell.shape
    ((2, 4), (2, 4))
    """

    _gates = 4

    def forward(self, input: Any, hx: tuple[Any, Any] | None = None) -> tuple[Tensor, Tensor]:
        """New hidden and cell states from an input (N, I) or (I,) and the old ones (zeros if None).

        Args:
            input: (N, I) or (I,).
            hx: the old hidden and cell states, (N, H) or (H,) each; None: zeros.

        Returns:
            The new hidden and cell states.
        """
        gi, gh, (_, c) = self._contributions(input, *((None, None) if hx is None else hx))
        return call(_lstm_cell, (gi + gh, c), {})  # type: ignore[no-any-return]


class GRUCell(_Cell):
    """One step of a GRU. Parameters are ``weight_ih`` (3H, I), ``weight_hh`` (3H, H), ``bias_ih`` and ``bias_hh`` (3H,).

    Args:
        input_size, hidden_size: features of the input and of the state.
        bias: True if there are biases.
        dtype, device: of the parameters.
        generator: draws their first values.

    >>> ag.nn.GRUCell(3, 4)(ag.ones(2, 3)).shape
    (2, 4)
    """

    _gates = 3

    def forward(self, input: Any, hx: Any = None) -> Tensor:
        """The new state from an input (N, I) or (I,) and the old one (zeros if None).

        Args:
            input: (N, I) or (I,).
            hx: the old state, (N, H) or (H,); None: zeros.

        Returns:
            The new state, of the shape of the old one.
        """
        gi, gh, (h,) = self._contributions(input, hx)
        return call(_gru_cell, (gi, gh, h), {})  # type: ignore[no-any-return]


class RNNCell(_Cell):
    """One step of a simple recurrent network.

    Args:
        input_size, hidden_size: features of the input and of the state.
        bias: True if there are biases.
        nonlinearity: "tanh" or "relu".
        dtype, device: of the parameters.
        generator: draws their first values.

    Raises:
        ArgumentError: another nonlinearity.

    >>> ag.nn.RNNCell(3, 4, nonlinearity="relu")(ag.ones(2, 3)).shape
    (2, 4)
    """

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        bias: bool = True,
        nonlinearity: str = "tanh",
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        if nonlinearity not in ("tanh", "relu"):
            raise ArgumentError(f"RNNCell(nonlinearity={nonlinearity!r}): expected 'tanh' or 'relu'")
        self.nonlinearity = nonlinearity
        super().__init__(input_size, hidden_size, bias, dtype=dtype, device=device, generator=generator)

    def forward(self, input: Any, hx: Any = None) -> Tensor:
        """The new state from an input (N, I) or (I,) and the old one (zeros if None).

        Args:
            input: (N, I) or (I,).
            hx: the old state, (N, H) or (H,); None: zeros.

        Returns:
            The new state, of the shape of the old one.
        """
        gi, gh, _ = self._contributions(input, hx)
        return functional.tanh(gi + gh) if self.nonlinearity == "tanh" else functional.relu(gi + gh)
