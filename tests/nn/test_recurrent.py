"""LSTM against a loop over steps with PyTorch's formulas."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ShapeError
from aiograd.running.random import Generator
from tests.support import assert_raises, draw

Array = np.ndarray[Any, Any]


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def naive(module: nn.LSTM, x: Array, h0: Array, c0: Array) -> tuple[Array, Array, Array]:
    """(T, N, I) -> states of the last layer, last hidden and cell states."""
    state = {name: value.numpy() for name, value in module.state_dict().items()}
    hidden, cells, k = [], [], 0
    for layer in range(module.num_layers):
        sides = []
        for end in ("", "_reverse") if module.bidirectional else ("",):
            w, u = state[f"weight_ih_l{layer}{end}"], state[f"weight_hh_l{layer}{end}"]
            b = state[f"bias_ih_l{layer}{end}"] + state[f"bias_hh_l{layer}{end}"] if module.bias else 0.0
            h, c, outputs = h0[k], c0[k], []
            for step in x[::-1] if end else x:
                i, f, g, o = np.split(step @ w.T + h @ u.T + b, 4, -1)
                c = sigmoid(f) * c + sigmoid(i) * np.tanh(g)
                h = sigmoid(o) * np.tanh(c)
                outputs.append(h)
            hidden.append(h)
            cells.append(c)
            k += 1
            sides.append(np.stack(outputs[::-1] if end else outputs))
        x = np.concatenate(sides, -1)
    return x, np.stack(hidden), np.stack(cells)


def close(ours: Any, wanted: Array) -> None:
    assert ours.shape == wanted.shape
    np.testing.assert_allclose(ours.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("layers", [1, 3])
def test_lstm(layers: int, bidirectional: bool, bias: bool) -> None:
    module = nn.LSTM(3, 4, layers, bias=bias, bidirectional=bidirectional, dtype=np.float64, generator=Generator(2))
    x, states = draw(5, 2, 3), layers * (1 + bidirectional)
    h0, c0 = draw(states, 2, 4, at=1), draw(states, 2, 4, at=2)
    zero = np.zeros((states, 2, 4))
    for given, h, c in ((None, zero, zero), ((h0, c0), h0, c0)):
        out, (hn, cn) = module(x, given)
        wanted = naive(module, x, h, c)
        for ours, theirs in zip((out, hn, cn), wanted, strict=True):
            close(ours, theirs)


def test_layouts() -> None:
    module = nn.LSTM(3, 4, 2, bidirectional=True, dtype=np.float64, generator=Generator(2))
    first = nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True, dtype=np.float64)
    first.load_state_dict(module.state_dict())
    x = draw(5, 2, 3)
    out, (hn, cn) = module(x)
    turned, (h, c) = first(x.swapaxes(0, 1))
    close(turned, out.detach().numpy().swapaxes(0, 1))
    close(h, hn.detach().numpy())
    close(c, cn.detach().numpy())
    alone, (h, c) = module(x[:, 0])
    close(alone, out.detach().numpy()[:, 0])
    close(h, hn.detach().numpy()[:, 0])
    again, _ = module(x[:, 0], (np.zeros((4, 4)), np.zeros((4, 4))))
    close(again, out.detach().numpy()[:, 0])


def test_names_and_shapes_of_weights_are_pytorchs() -> None:
    state = nn.LSTM(3, 4, 2, bidirectional=True).state_dict()
    assert {name: value.shape for name, value in state.items() if name.startswith("weight")} == {
        "weight_ih_l0": (16, 3), "weight_hh_l0": (16, 4), "weight_ih_l0_reverse": (16, 3), "weight_hh_l0_reverse": (16, 4),
        "weight_ih_l1": (16, 8), "weight_hh_l1": (16, 4), "weight_ih_l1_reverse": (16, 8), "weight_hh_l1_reverse": (16, 4),
    }  # fmt: skip
    assert not any("bias" in name for name in nn.LSTM(3, 4, bias=False).state_dict())


async def test_gradients_reach_every_weight_and_agree_with_differences() -> None:
    module = nn.LSTM(2, 3, 2, bidirectional=True, dtype=np.float64, generator=Generator(0))
    x = ag.tensor(draw(4, 2, 2), requires_grad=True)
    weights = draw(4, 2, 6, at=3)

    def loss() -> Any:
        out, (hn, cn) = module(x)
        return (out * ag.tensor(weights)).sum() + (hn * cn).sum()

    await loss().backward()
    for p in (x, *module.parameters()):
        assert p.grad is not None
        values = p.detach().numpy()
        place = tuple(n // 2 for n in values.shape)
        kept, step = values[place], 1e-6
        values[place] = kept + step
        up = loss().item()
        values[place] = kept - step
        down = loss().item()
        values[place] = kept
        assert p.grad.numpy()[place] == pytest.approx((up - down) / (2 * step), rel=1e-5, abs=1e-7)


def test_dropout_acts_between_layers_in_training_only() -> None:
    module = nn.LSTM(3, 4, 2, dropout=0.5, dtype=np.float64, generator=Generator(0))
    x = draw(5, 2, 3)
    assert module(x)[0].tolist() != module(x)[0].tolist()
    module.eval()
    close(module(x)[0], naive(module, x, np.zeros((2, 2, 4)), np.zeros((2, 2, 4)))[0])


def test_wrong_arguments_end_in_a_typed_error() -> None:
    module = nn.LSTM(3, 4)
    for wrong, error in (
        (lambda: nn.LSTM(3, 0), ArgumentError),
        (lambda: module(draw(5, 2, 4)), ShapeError),
        (lambda: module(draw(5)), ShapeError),
        (lambda: module(draw(5, 2, 3).astype(np.float32), (np.zeros((2, 2, 4)), np.zeros((2, 2, 4)))), ShapeError),
    ):
        assert_raises(error, None, wrong)
