"""Layers against definitions written out in numpy: convolutions, pooling, resampling, recurrent networks, decoders, activations."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import AiogradError, ArgumentError, ShapeError
from aiograd.nn import functional as F
from aiograd.running.random import Generator
from tests.support import assert_raises, draw

Array = np.ndarray[Any, Any]
D: dict[str, Any] = {"dtype": np.float64}


def close(ours: Any, wanted: Any) -> None:
    found = ours.detach().numpy()
    assert found.shape == np.shape(wanted)
    np.testing.assert_allclose(found, wanted, rtol=1e-9, atol=1e-9)


def numbers(module: nn.Module) -> dict[str, Array]:
    return {name: value.numpy() for name, value in module.state_dict().items()}


def correlate(x: Array, w: Array, stride: int, dilation: int) -> Array:
    """(N, C, L), (O, C, K), no padding and no groups."""
    reach = dilation * (w.shape[2] - 1) + 1
    return np.stack([np.einsum("nck,ock->no", x[:, :, s : s + reach : dilation], w) for s in range(0, x.shape[2] - reach + 1, stride)], axis=-1)


@pytest.mark.parametrize(("mode", "numpy_mode"), [("zeros", "constant"), ("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap")])
def test_conv1d_in_every_padding_mode(mode: str, numpy_mode: Any) -> None:
    layer = nn.Conv1d(3, 4, 3, stride=2, padding=2, dilation=2, padding_mode=mode, **D)
    x, state = draw(2, 3, 9), numbers(layer)
    padded = np.pad(x, ((0, 0), (0, 0), (2, 2)), mode=numpy_mode)
    wanted = correlate(padded, state["weight"], 2, 2) + state["bias"][:, None]
    close(layer(x), wanted)
    close(layer(x[0]), wanted[0])


def test_conv2d_same_with_a_border_that_is_not_zero() -> None:
    layer = nn.Conv2d(2, 3, (2, 3), padding="same", padding_mode="reflect", bias=False, **D)
    x, w = draw(1, 2, 5, 4), numbers(layer)["weight"]
    padded = np.pad(x, ((0, 0), (0, 0), (0, 1), (1, 1)), mode="reflect")
    wanted = sum(np.einsum("nchw,oc->nohw", padded[:, :, i : i + 5, j : j + 4], w[:, :, i, j]) for i in range(2) for j in range(3))
    close(layer(x), wanted)


@pytest.mark.parametrize("extra", [0, 1])
def test_a_transposed_convolution_spreads_each_element_over_its_window(extra: int) -> None:
    layer = nn.ConvTranspose1d(4, 2, 3, stride=2, padding=1, output_padding=extra, groups=2, **D)
    x, state = draw(2, 4, 5), numbers(layer)
    assert state["weight"].shape == (4, 1, 3)
    whole = np.zeros((2, 2, 2 * 4 + 3 + extra))
    for group, i in itertools.product(range(2), range(5)):
        channels = slice(2 * group, 2 * group + 2)
        whole[:, group, 2 * i : 2 * i + 3] += np.einsum("nc,ck->nk", x[:, channels, i], state["weight"][channels, 0])
    wanted = whole[:, :, 1:-1] + state["bias"][:, None]
    close(layer(x), wanted)
    plane = nn.ConvTranspose2d(4, 2, (1, 3), stride=(1, 2), padding=(0, 1), output_padding=(0, extra), groups=2, **D)
    plane.load_state_dict({"weight": state["weight"][:, :, None], "bias": state["bias"]})
    close(plane(x[:, :, None]), wanted[:, :, None])


@pytest.mark.parametrize(("stride", "dilation", "extra"), [(1, 2, 1), (1, 3, 2), (2, 3, 2), (1, 2, 0)])
@pytest.mark.parametrize("padding", [0, 1, 2])
async def test_a_transposed_convolution_with_an_output_that_is_longer_by_a_stride(stride: int, dilation: int, extra: int, padding: int) -> None:
    x, weight, bias = (ag.tensor(draw(*shape, at=i), requires_grad=True) for i, shape in enumerate([(2, 4, 5), (4, 1, 2), (2,)]))
    wanted = np.zeros((2, 2, 4 * stride + dilation + 1 + extra + padding))
    for group, i, tap in itertools.product(range(2), range(5), range(2)):
        channels = slice(2 * group, 2 * group + 2)
        wanted[:, group, stride * i + dilation * tap] += x.detach().numpy()[:, channels, i] @ weight.detach().numpy()[channels, 0, tap]
    length = 4 * stride + dilation + 1 + extra - 2 * padding
    wanted = wanted[:, :, padding : padding + length] + bias.detach().numpy()[:, None]

    def lines(x: Any, weight: Any, bias: Any) -> Any:
        return F.conv_transpose1d(x, weight, bias, stride, padding, extra, 2, dilation)

    def planes(x: Any, weight: Any, bias: Any) -> Any:
        return F.conv_transpose2d(x[..., None], weight[..., None], bias, (stride, 1), (padding, 0), (extra, 0), 2, (dilation, 1))[..., 0]

    for function in (lines, planes):
        close(function(x, weight, bias), wanted)
        assert await ag.gradcheck(function, (x, weight, bias))
        assert await ag.gradgradcheck(function, (x, weight, bias))


def windows(length: int, size: int, stride: int, padding: int, ceil: bool) -> list[tuple[int, int]]:
    """(start, end) of each window, in places of the input; ends at the padding."""
    count = (length + 2 * padding - size + (stride - 1 if ceil else 0)) // stride + 1
    starts = [i * stride - padding for i in range(count)]
    return [(s, min(s + size, length + padding)) for s in starts if s < length + (0 if ceil else padding)]


@pytest.mark.parametrize(("size", "stride", "padding"), [(3, 2, 1), (2, 3, 0), (3, 1, 0), (2, 2, 1)])
@pytest.mark.parametrize("ceil", [False, True])
def test_pooling_of_lines(size: int, stride: int, padding: int, ceil: bool) -> None:
    x = draw(2, 3, 8)
    found = windows(8, size, stride, padding, ceil)
    inside = [x[:, :, max(s, 0) : min(e, 8)] for s, e in found]
    close(nn.MaxPool1d(size, stride, padding, ceil_mode=ceil)(x), np.stack([part.max(-1) for part in inside], -1))
    close(nn.AvgPool1d(size, stride, padding, ceil)(x), np.stack([part.sum(-1) / (e - s) for part, (s, e) in zip(inside, found, strict=True)], -1))
    close(nn.AvgPool1d(size, stride, padding, ceil, count_include_pad=False)(x), np.stack([part.mean(-1) for part in inside], -1))
    image = nn.AvgPool2d((1, size), (1, stride), (0, padding), ceil, divisor_override=5)(x)
    close(image, np.stack([part.sum(-1) / 5 for part in inside], -1))


@pytest.mark.parametrize("size", [1, 3, 4, (5, 2), (None, 7), (9, 3)])
def test_adaptive_pooling_shares_out(size: Any) -> None:
    x = draw(2, 3, 7, 6)
    x[0, 0, 0, 0] = np.inf  # stays in the windows that see it
    height, width = (size, size) if isinstance(size, int) else (size[0] or 7, size[1] or 6)
    wanted = np.empty((2, 3, height, width))
    for i in range(height):
        for j in range(width):
            rows, columns = slice(i * 7 // height, -(-(i + 1) * 7 // height)), slice(j * 6 // width, -(-(j + 1) * 6 // width))
            wanted[:, :, i, j] = x[:, :, rows, columns].mean((2, 3))
    close(nn.AdaptiveAvgPool2d(size)(x), wanted)


def test_resampling() -> None:
    line = np.array([[[1.0, 3.0, 7.0]]])
    close(F.interpolate(line, scale_factor=2), [[[1, 1, 3, 3, 7, 7]]])
    close(F.interpolate(line, size=2), [[[1, 3]]])
    close(F.interpolate(line, size=5, mode="linear", align_corners=True), [[[1, 2, 3, 5, 7]]])
    close(F.interpolate(line, scale_factor=2, mode="linear"), [[[1, 1.5, 2.5, 4, 6, 7]]])
    image = draw(1, 2, 3, 4)
    once = F.interpolate(image.transpose(0, 1, 3, 2).reshape(2, 4, 3), size=7, mode="linear").reshape(1, 2, 4, 7).numpy().transpose(0, 1, 3, 2)
    twice = F.interpolate(once.reshape(2, 7, 4), size=2, mode="linear").reshape(1, 2, 7, 2)
    close(nn.Upsample((7, 2), mode="bilinear")(image), twice.numpy())


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gru_step(x: Array, h: Array, w: list[Array]) -> Array:
    (r, z, n), (rh, zh, nh) = np.split(x @ w[0].T + w[2], 3, -1), np.split(h @ w[1].T + w[3], 3, -1)
    z = sigmoid(z + zh)
    return (1 - z) * np.tanh(n + sigmoid(r + rh) * nh) + z * h


def rnn_step(x: Array, h: Array, w: list[Array]) -> Array:
    return np.tanh(x @ w[0].T + w[2] + h @ w[1].T + w[3])


@pytest.mark.parametrize(("cls", "cell", "step"), [(nn.GRU, nn.GRUCell, gru_step), (nn.RNN, nn.RNNCell, rnn_step)])
def test_recurrent_networks_are_their_steps(cls: Any, cell: Any, step: Any) -> None:
    net = cls(3, 4, 2, bidirectional=True, generator=Generator(1), **D)
    state, x, h0 = numbers(net), draw(5, 2, 3), draw(4, 2, 4, at=1)
    layer_input, last = x, []
    for layer in range(2):
        sides = []
        for end in ("", "_reverse"):
            w = [state[f"{name}_l{layer}{end}"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
            h, outputs = h0[len(last)], []
            for row in layer_input[::-1] if end else layer_input:
                h = step(row, h, w)
                outputs.append(h)
            last.append(h)
            sides.append(np.stack(outputs[::-1] if end else outputs))
        layer_input = np.concatenate(sides, -1)
    out, hn = net(x, h0)
    close(out, layer_input)
    close(hn, np.stack(last))
    one = cell(3, 4, **D)
    one.load_state_dict({name: state[f"{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")})
    close(one(x[0], h0[0]), step(x[0], h0[0], [state[f"{name}_l0"] for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]))
    close(one(x[0, 0]), one(x[0])[0].detach().numpy())


def test_an_lstm_is_its_cell() -> None:
    net, cell = nn.LSTM(3, 4, **D), nn.LSTMCell(3, 4, **D)
    cell.load_state_dict({name.removesuffix("_l0"): value for name, value in net.state_dict().items()})
    x, states = ag.tensor(draw(5, 2, 3)), None
    for t in range(5):
        states = cell(x[t], states)
    out, (h, c) = net(x)
    close(states[0], h[0].detach().numpy())
    close(states[1], c[0].detach().numpy())
    close(out[-1], h[0].detach().numpy())


@pytest.mark.parametrize("norm_first", [False, True])
def test_a_decoder_attends_to_itself_and_to_memory(norm_first: bool) -> None:
    layer = nn.TransformerDecoderLayer(8, 2, 16, 0.0, norm_first=norm_first, **D)
    stack = nn.TransformerDecoder(layer, 2, nn.LayerNorm(8, **D))
    x, memory = ag.tensor(draw(5, 2, 8)), ag.tensor(draw(4, 2, 8, at=1))
    mask = ag.tensor(~np.tri(5, dtype=bool))

    def once(x: Any) -> Any:
        for i, part in enumerate((
            lambda x: layer.self_attn(x, x, x, attn_mask=mask)[0],
            lambda x: layer.multihead_attn(x, memory, memory)[0],
            lambda x: layer.linear2(F.relu(layer.linear1(x))),
        ), 1):
            norm = getattr(layer, f"norm{i}")
            x = x + part(norm(x)) if norm_first else norm(x + part(x))
        return x

    close(layer(x, memory, tgt_mask=mask), once(x).detach().numpy())
    close(stack(x, memory, tgt_is_causal=True), stack.norm(once(once(x))).detach().numpy())
    assert len({id(p) for p in stack.parameters()}) == 2 * len(list(layer.parameters())) + 2


def test_layers_of_a_stack_share_a_generator() -> None:
    generator = Generator(3)
    stack = nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2, 8, 0.5, generator=generator), 3)
    assert all(layer.dropout.generator is generator for layer in stack.layers)
    before = generator.state_dict()
    stack(ag.tensor(draw(2, 3, 4).astype(np.float32)))
    assert generator.state_dict() != before


def test_instance_norm_keeps_statistics_of_samples() -> None:
    layer, x = nn.InstanceNorm2d(3, track_running_stats=True, affine=True, **D), draw(4, 3, 5, 2)
    mean, var = x.mean((2, 3), keepdims=True), x.var((2, 3), keepdims=True)
    close(layer(x), (x - mean) / np.sqrt(var + 1e-5))
    state = numbers(layer)
    np.testing.assert_allclose(state["running_mean"], 0.1 * mean.mean(0).ravel())
    np.testing.assert_allclose(state["running_var"], 0.9 + 0.1 * (var * 10 / 9).mean(0).ravel())
    running = state["running_mean"][:, None, None], state["running_var"][:, None, None]
    close(layer.eval()(x[0]), (x[0] - running[0]) / np.sqrt(running[1] + 1e-5))
    close(nn.InstanceNorm1d(3, **D).eval()(x[..., 0]), nn.InstanceNorm1d(3, **D)(x[..., 0]).detach().numpy())


X = np.array([-4.0, -3.0, -1.0, -0.5, -0.2, 0.0, 0.3, 0.5, 1.0, 3.0, 6.0, 7.0])
ACTIVATIONS: dict[str, tuple[Any, Any, Any]] = {
    # module, value, slope: at a corner that of PyTorch
    "relu6": (nn.ReLU6(), np.clip(X, 0, 6), (X > 0) & (X < 6)),
    "hardtanh": (nn.Hardtanh(-0.5, 3.0), np.clip(X, -0.5, 3), (X > -0.5) & (X < 3)),
    "hardsigmoid": (nn.Hardsigmoid(), np.clip(X / 6 + 0.5, 0, 1), ((X > -3) & (X < 3)) / 6),
    "hardswish": (nn.Hardswish(), X * np.clip(X / 6 + 0.5, 0, 1), np.where(X <= -3, 0, np.where(X >= 3, 1, X / 3 + 0.5))),
    "hardshrink": (nn.Hardshrink(), np.where(np.abs(X) > 0.5, X, 0), np.abs(X) > 0.5),
    "softshrink": (nn.Softshrink(), np.sign(X) * np.maximum(np.abs(X) - 0.5, 0), np.abs(X) > 0.5),
    "threshold": (nn.Threshold(0.5, -9.0), np.where(X > 0.5, X, -9), X > 0.5),
    "prelu": (nn.PReLU(**D), np.where(X > 0, X, X / 4), np.where(X > 0, 1, 0.25)),
    "selu": (nn.SELU(), 1.0507009873554805 * np.where(X > 0, X, 1.6732632423543772 * np.expm1(np.minimum(X, 0))), None),
    "celu": (nn.CELU(0.7), np.where(X > 0, X, 0.7 * np.expm1(np.minimum(X, 0) / 0.7)), np.where(X > 0, 1, np.exp(np.minimum(X, 0) / 0.7))),
    "mish": (nn.Mish(), X * np.tanh(np.log1p(np.exp(X))), None),
    "tanhshrink": (nn.Tanhshrink(), X - np.tanh(X), np.tanh(X) ** 2),
    "softsign": (nn.Softsign(), X / (1 + np.abs(X)), None),
    "logsigmoid": (nn.LogSigmoid(), np.log(sigmoid(X)), sigmoid(-X)),
    "softmin": (nn.Softmin(0), np.exp(-X) / np.exp(-X).sum(), None),
    "glu": (nn.GLU(), X[:6] * sigmoid(X[6:]), None),
    "identity": (nn.Identity(), X, np.ones(12)),
    "unflatten": (nn.Unflatten(0, (3, -1)), X.reshape(3, 4), np.ones(12)),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
async def test_activations(name: str) -> None:
    module, value, slope = ACTIVATIONS[name]
    x = ag.tensor(X, requires_grad=True)
    out = module(x)
    close(out, value)
    await out.sum().backward()
    if slope is not None:
        np.testing.assert_allclose(x.grad.numpy(), slope, atol=1e-12)
    else:
        smooth = ag.tensor(X[np.abs(X) > 1e-3], requires_grad=True)
        assert await ag.gradcheck(module, (smooth if name != "glu" else x,))
    assert repr(module).startswith(type(module).__name__)


async def test_logit_and_its_limits() -> None:
    x = ag.tensor([0.0, 0.2, 1.0], dtype=np.float64, requires_grad=True)
    out = F.logit(x, eps=0.1)
    close(out, np.log([1 / 9, 0.25, 9]))
    await out.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [0, 1 / 0.16, 0])


async def test_binary_cross_entropy_is_finite_at_certainty() -> None:
    x, y = ag.tensor([0.0, 1.0, 0.0, 1.0, 0.3], dtype=np.float64, requires_grad=True), np.array([0.0, 1.0, 1.0, 0.0, 0.4])
    loss = nn.BCELoss(reduction="none")(x, y)
    close(loss, [0, 0, 100, 100, -(0.4 * math.log(0.3) + 0.6 * math.log(0.7))])
    await loss.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [0, 0, -1e12, 1e12, -0.1 / 0.21])
    assert_raises(ArgumentError, "expected 0 to 1", lambda: nn.BCELoss()(ag.tensor([1.5]), ag.tensor([1.0])))


def test_kl_divergence() -> None:
    p, q = np.array([[0.2, 0.8], [0.0, 1.0]]), np.array([[0.5, 0.5], [0.25, 0.75]])
    wanted = (0.2 * np.log(0.4) + 0.8 * np.log(1.6) + np.log(4 / 3)) / 2
    close(nn.KLDivLoss("batchmean")(np.log(q), p), wanted)


CASES: list[tuple[Any, type[Exception]]] = [
    (lambda: nn.Conv1d(3, 4, 3, padding_mode="mirror"), ArgumentError),
    (lambda: nn.Conv1d(3, 4, (3, 3)), ArgumentError),
    (lambda: nn.Conv2d(3, 4, 3, padding="full"), ArgumentError),
    (lambda: nn.Conv2d(3, 4, 3, stride=2, padding="same"), ArgumentError),
    (lambda: nn.ConvTranspose2d(3, 4, 3, padding="same"), ArgumentError),
    (lambda: nn.ConvTranspose2d(3, 4, 3, padding_mode="reflect"), ArgumentError),
    (lambda: nn.ConvTranspose1d(3, 4, 3, output_padding=1)(np.ones((3, 5))), ArgumentError),
    (lambda: nn.ConvTranspose1d(3, 4, 1, padding=9)(np.ones((3, 5))), ShapeError),
    (lambda: nn.Conv1d(3, 4, 3)(np.ones((2, 2, 3, 5))), ShapeError),
    (lambda: nn.AvgPool2d(2, divisor_override=0)(np.ones((1, 4, 4))), ArgumentError),
    (lambda: nn.AdaptiveAvgPool2d(0)(np.ones((1, 4, 4))), ShapeError),
    (lambda: nn.Upsample(2, mode="bilinear")(np.ones((1, 4, 4))), ShapeError),
    (lambda: nn.Upsample(mode="cubic", size=2)(np.ones((1, 4, 4))), ArgumentError),
    (lambda: F.interpolate(np.ones((1, 1, 4)), size=2, scale_factor=2), ArgumentError),
    (lambda: F.interpolate(np.ones((1, 1, 4)), scale_factor=0.1), ShapeError),
    (lambda: nn.GRU(3, 0), ArgumentError),
    (lambda: nn.RNN(3, 4, nonlinearity="sigmoid"), ArgumentError),
    (lambda: nn.GRU(3, 4)(np.ones((5, 2, 2))), ShapeError),
    (lambda: nn.GRU(3, 4)(np.ones((5, 2, 3), np.float32), np.ones((2, 2, 4))), ShapeError),
    (lambda: nn.GRUCell(3, 4)(np.ones((5, 2))), ShapeError),
    (lambda: nn.LSTMCell(3, 4)(np.ones((2, 3)), (np.ones((1, 4)), np.ones((2, 4)))), ShapeError),
    (lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(4, 2), 0), ArgumentError),
    (lambda: nn.TransformerDecoderLayer(4, 2, activation="swish"), ArgumentError),
    (lambda: nn.InstanceNorm2d(3)(ag.tensor(np.ones((1, 3, 1, 1), np.float32))), ShapeError),
    (lambda: F.glu(np.ones(3)), ShapeError),
    (lambda: F.prelu(np.ones((2, 3)), np.ones(2)), ShapeError),
    (lambda: F.hardtanh([1.0], 2.0, 1.0), ArgumentError),
    (lambda: F.softshrink([1.0], -1.0), ArgumentError),
    (lambda: F.celu([1.0], 0.0), ArgumentError),
]


@pytest.mark.parametrize("number", range(len(CASES)))
def test_what_does_not_fit_is_refused(number: int) -> None:
    call, error = CASES[number]
    raised = assert_raises(error, None, call)
    assert isinstance(raised, AiogradError)
