"""Initial values: distributions, reproducibility, and that they are written in place."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, ShapeError
from aiograd.nn import init
from aiograd.running.random import Generator, seed
from tests.support import assert_raises

SHAPE = (300, 200)


def filled(fill: Any, shape: tuple[int, ...] = SHAPE, **options: Any) -> np.ndarray[Any, Any]:
    p = nn.Parameter(np.full(shape, 99.0, np.float32))
    memory, version = p.detach().numpy(), p.version
    assert fill(p, generator=Generator(3), **options) is p
    assert p.version == version + 1
    assert p.requires_grad
    again = nn.Parameter(np.zeros(shape, np.float32))
    fill(again, generator=Generator(3), **options)
    np.testing.assert_array_equal(memory, again.detach().numpy())
    return memory


@pytest.mark.parametrize(
    ("fill", "options", "std", "bound"),
    [
        (init.uniform_, {"a": -1.0, "b": 1.0}, 1 / math.sqrt(3), 1.0),
        (init.normal_, {"std": 0.5}, 0.5, None),
        (init.xavier_uniform_, {}, math.sqrt(2 / 500), math.sqrt(6 / 500)),
        (init.xavier_normal_, {"gain": 2.0}, 2 * math.sqrt(2 / 500), None),
        (init.kaiming_uniform_, {"a": math.sqrt(5)}, 1 / math.sqrt(600), 1 / math.sqrt(200)),
        (init.kaiming_uniform_, {"mode": "fan_out", "nonlinearity": "relu"}, math.sqrt(2 / 300), math.sqrt(6 / 300)),
        (init.kaiming_normal_, {"nonlinearity": "relu"}, math.sqrt(2 / 200), None),
        (init.trunc_normal_, {"std": 1.0, "a": -1.0, "b": 1.0}, 0.5396, 1.0),
    ],
)
def test_distributions(fill: Any, options: dict[str, Any], std: float, bound: float | None) -> None:
    values = filled(fill, **options)
    assert abs(values.mean()) < 5 * std / math.sqrt(values.size)
    assert abs(values.std() / std - 1) < 0.02
    if bound is not None:
        assert np.abs(values).max() <= bound
        assert np.abs(values).max() > 0.99 * bound


def test_fans_of_convolutions_count_the_window() -> None:
    values = filled(init.kaiming_uniform_, (64, 8, 3, 3), a=math.sqrt(5))
    assert np.abs(values).max() <= 1 / math.sqrt(72)
    assert np.abs(values).max() > 0.99 / math.sqrt(72)


def test_constants() -> None:
    p = nn.Parameter(np.full((2, 3), 9.0))
    assert init.zeros_(p).tolist() == [[0, 0, 0], [0, 0, 0]]
    assert init.ones_(p).tolist() == [[1, 1, 1], [1, 1, 1]]
    assert init.constant_(p, 0.5).tolist()[0] == [0.5, 0.5, 0.5]
    assert init.eye_(p).tolist() == [[1, 0, 0], [0, 1, 0]]
    assert p.dtype == np.float64


@pytest.mark.parametrize("shape", [(4, 9), (9, 4), (5, 3, 2)])
def test_orthogonal(shape: tuple[int, ...]) -> None:
    matrix = filled(init.orthogonal_, shape, gain=2.0).reshape(shape[0], -1).astype(np.float64)
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    np.testing.assert_allclose(gram, 4 * np.eye(len(gram)), atol=1e-5)


@pytest.mark.parametrize(
    ("wrong", "error"),
    [
        (lambda: init.xavier_uniform_(ag.tensor([1.0])), ShapeError),
        (lambda: init.kaiming_normal_(ag.tensor([[1.0]]), mode="sideways"), ArgumentError),
        (lambda: init.calculate_gain("swish"), ArgumentError),
        (lambda: init.eye_(ag.tensor([1.0])), ShapeError),
        (lambda: init.trunc_normal_(ag.tensor([1.0]), a=2.0, b=-2.0), ArgumentError),
        (lambda: init.trunc_normal_(ag.tensor([1.0]), a=9.0, b=10.0), ArgumentError),
        (lambda: init.orthogonal_(ag.tensor([1.0])), ArgumentError),
    ],
)
def test_wrong_arguments_end_in_a_typed_error(wrong: Any, error: type[Exception]) -> None:
    assert_raises(error, None, wrong)


def test_gains() -> None:
    assert init.calculate_gain("relu") == pytest.approx(math.sqrt(2))
    assert init.calculate_gain("leaky_relu", 0.2) == pytest.approx(math.sqrt(2 / 1.04))
    assert init.calculate_gain("tanh") == pytest.approx(5 / 3)


@pytest.mark.parametrize(
    "make",
    [
        lambda g: nn.Linear(3, 4, generator=g),
        lambda g: nn.Conv2d(3, 4, 3, generator=g),
        lambda g: nn.Embedding(3, 4, generator=g),
        lambda g: nn.LSTM(3, 4, 2, bidirectional=True, generator=g),
        lambda g: nn.MultiHeadAttention(4, 2, generator=g),
        lambda g: nn.TransformerEncoderLayer(4, 2, 8, generator=g),
    ],
)
def test_layers_draw_from_the_generator_they_are_given_else_from_the_default_one(make: Any) -> None:
    def values(module: nn.Module) -> list[Any]:
        return [value.tolist() for value in module.state_dict().values()]

    assert values(make(Generator(5))) == values(make(Generator(5)))
    assert values(make(Generator(5))) != values(make(Generator(6)))
    seed(7)
    first = values(make(None))
    assert values(make(None)) != first
    seed(7)
    assert values(make(None)) == first
