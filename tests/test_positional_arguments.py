"""Arguments that numpy and PyTorch take by position are taken by position."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn

A = np.random.default_rng(0).normal(size=(3, 4, 4))
M = A[0]
PD = M @ M.T + 4 * np.eye(4)

BOTH: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "diag": (lambda x: ag.diag(x[0, 0], 1), lambda x: np.diag(x[0, 0], 1)),
    "diag as a method": (lambda x: x[0].diag(-1), lambda x: np.diag(x[0], -1)),
    "tril": (lambda x: x.tril(-1), lambda x: np.tril(x, -1)),
    "triu": (lambda x: ag.triu(x, 1), lambda x: np.triu(x, 1)),
    "in place": (lambda x: x.clone().triu_(1), lambda x: np.triu(x, 1)),
    "diagonal": (lambda x: ag.diagonal(x[0], 1), lambda x: np.diagonal(x[0], 1)),
    "diagonal of a plane": (lambda x: ag.diagonal(x, 1, 0, 2), lambda x: np.diagonal(x, 1, 0, 2)),
    "diagonal, PyTorch's names": (lambda x: ag.diagonal(x, dim1=0, dim2=2), lambda x: np.diagonal(x, 0, 0, 2)),
    "one name of diagonal": (lambda x: x.diagonal(dim1=2), lambda x: np.diagonal(x, 0, 2, 1)),
    "trace": (lambda x: ag.trace(x[0], 1), lambda x: np.trace(x[0], 1)),
    "diff": (lambda x: ag.diff(x, 1, -1, x[..., :1]), lambda x: np.diff(x, 1, -1, x[..., :1])),
    "tensordot": (lambda x: ag.tensordot(x[0], x[1], 1), lambda x: np.tensordot(x[0], x[1], 1)),
    "pad": (lambda x: ag.pad(x, 1, "edge"), lambda x: np.pad(x, 1, "edge")),
    "trapezoid": (lambda x: ag.trapezoid(x, None, 0.5, 0), lambda x: np.trapezoid(x, None, 0.5, 0)),
    "searchsorted": (lambda x: ag.searchsorted(ag.arange(4), ag.arange(3), "right"), lambda x: np.searchsorted(range(4), range(3), "right")),
    "eye": (lambda x: ag.eye(3, 4, 1), lambda x: np.eye(3, 4, 1, np.float32)),
    "zeros": (lambda x: ag.zeros((2, 3), np.int32), lambda x: np.zeros((2, 3), np.int32)),
    "ones": (lambda x: ag.ones(2, np.int32), lambda x: np.ones(2, np.int32)),
    "full": (lambda x: ag.full((2,), 1, np.float64), lambda x: np.full((2,), 1, np.float64)),
    "ones_like": (lambda x: ag.ones_like(x, np.int8), lambda x: np.ones_like(x, np.int8)),
    "array": (lambda x: ag.array([1, 2], np.float64), lambda x: np.array([1, 2], np.float64)),
    "asarray": (lambda x: ag.asarray([1, 2], np.int16), lambda x: np.asarray([1, 2], np.int16)),
    "vector_norm": (lambda x: ag.linalg.vector_norm(x, 1), lambda x: np.abs(x).sum()),
    "vector_norm of axes": (lambda x: ag.linalg.vector_norm(x, 2, -1, True), lambda x: np.linalg.norm(x, 2, -1, True)),
    "matrix_norm": (lambda x: ag.linalg.matrix_norm(x, "nuc"), lambda x: np.linalg.norm(x, "nuc", (-2, -1))),
    "svd": (lambda x: ag.linalg.svd(x[:, :2], False).S, lambda x: np.linalg.svd(x[:, :2], False).S),
    "qr": (lambda x: ag.linalg.qr(x, "reduced").R, lambda x: np.linalg.qr(x, "reduced").R),
    "pinv": (lambda x: ag.linalg.pinv(x, 1e-3), lambda x: np.linalg.pinv(x, 1e-3)),
    "lstsq": (lambda x: ag.linalg.lstsq(x[0], x[1], 1e-3).solution, lambda x: np.linalg.lstsq(x[0], x[1], 1e-3)[0]),
    "cholesky": (lambda x: ag.linalg.cholesky(ag.tensor(PD), True), lambda x: np.linalg.cholesky(PD).T),
    **{
        f"fft.{name}": (lambda x, name=name: getattr(ag.fft, name)(x, 3, 1, "ortho"), lambda x, name=name: getattr(np.fft, name)(x, 3, 1, "ortho"))
        for name in ("fft", "ifft", "rfft", "hfft")
    },
    "fft.fftn": (lambda x: ag.fft.fftn(x, (2, 3), (0, 1)), lambda x: np.fft.fftn(x, (2, 3), (0, 1))),
    "fft.fft2": (lambda x: ag.fft.fft2(x, (2, 3)), lambda x: np.fft.fft2(x, (2, 3))),
    "fft.fftshift": (lambda x: ag.fft.fftshift(x, 1), lambda x: np.fft.fftshift(x, 1)),
    "fft.fftfreq": (lambda x: ag.fft.fftfreq(4, 0.5, dtype=np.float64), lambda x: np.fft.fftfreq(4, 0.5)),
}


@pytest.mark.parametrize("name", BOTH)
def test_functions(name: str) -> None:
    ours, numpys = BOTH[name]
    found, expected = ours(ag.tensor(A)), np.asarray(numpys(A))
    assert found.dtype == expected.dtype
    np.testing.assert_allclose(found.numpy(), expected, atol=1e-10)


def test_several_ints_are_a_shape_still() -> None:
    assert ag.zeros(2, 3).shape == (2, 3) and ag.randn(2, 3, 4).shape == (2, 3, 4) and ag.empty(2, np.int64(3)).shape == (2, 3)


#: parameters between those here and ``device`` that PyTorch has and layers here do not
_OTHERS_BETWEEN = {nn.Embedding, nn.MultiheadAttention, nn.LSTM, nn.GRU, nn.RNN}


@pytest.mark.parametrize("layer", [each for each in vars(nn).values() if inspect.isclass(each)])
def test_layers_take_device_and_dtype_behind_the_rest(layer: type[nn.Module]) -> None:
    """``Linear(in, out, bias, device, dtype)``."""
    parameters = inspect.signature(layer.__init__).parameters
    if "dtype" not in parameters or layer in _OTHERS_BETWEEN:
        return
    by_position = [name for name, parameter in parameters.items() if parameter.kind is parameter.POSITIONAL_OR_KEYWORD]
    assert by_position[-2:] == ["device", "dtype"]


def test_a_layer_made_by_position() -> None:
    layer = nn.Linear(2, 3, False, "cpu", np.float64)
    assert layer.bias is None and layer.weight.dtype == np.float64
    assert nn.Conv2d(1, 2, 3, 1, 0, 1, 1, True, "zeros", "cpu", np.float64).weight.dtype == np.float64
    assert nn.ConvTranspose1d(1, 2, 3, 1, 0, 0, 1, True, 1, "zeros", "cpu", np.float64).weight.dtype == np.float64
    assert nn.LSTMCell(2, 3, True, "cpu", np.float64).weight_ih.dtype == np.float64
