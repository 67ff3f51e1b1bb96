"""Layers and losses against the shortest numpy that says what they mean, written here, in float64."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
import aiograd.nn.functional as F
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.running.random import Generator, seed
from tests.support import assert_raises, draw

Array = np.ndarray[Any, Any]


def close(ours: ag.Tensor, wanted: Any) -> None:
    assert isinstance(ours, ag.Tensor)
    wanted = np.asarray(wanted)
    assert ours.shape == wanted.shape
    np.testing.assert_allclose(ours.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)


# ---- maps


def test_linear() -> None:
    x, w, b = draw(2, 3, 4), draw(5, 4), draw(5)
    close(F.linear(x, w, b), x @ w.T + b)
    close(F.linear(x[0, 0], w), w @ x[0, 0])
    layer = nn.Linear(4, 5, dtype=np.float64)
    close(layer(x), x @ layer.weight.detach().numpy().T + layer.bias.detach().numpy())
    assert nn.Linear(4, 5, bias=False).bias is None
    assert_raises(ShapeError, None, lambda: layer(draw(2, 3)))


async def test_embedding() -> None:
    table = draw(4, 3)
    close(F.embedding([[1, 0], [3, 3]], table), table[[[1, 0], [3, 3]]])
    layer = nn.Embedding(4, 3, padding_idx=-1)
    assert layer.padding_idx == 3
    assert layer.weight.tolist()[3] == [0, 0, 0]
    await layer(ag.tensor([1, 3, 1])).sum().backward()
    assert layer.weight.grad.tolist() == [[0, 0, 0], [2, 2, 2], [0, 0, 0], [0, 0, 0]]
    looked_up = functools.partial(F.embedding, [1, 3, 1], padding_idx=-1)
    assert (await ag.jvp(looked_up, ag.tensor(table), ag.ones_like(ag.tensor(table))))[1].tolist() == [[1, 1, 1], [0, 0, 0], [1, 1, 1]]
    assert_raises(ArgumentError, "expected the number of one of 4 rows", F.embedding, [0], table, 4)
    assert_raises(ArgumentError, "0 to 3", layer, [4])
    assert_raises(ArgumentTypeError, None, layer, [0.5])
    assert_raises(ArgumentError, None, nn.Embedding, 4, 3, padding_idx=4)


def test_one_hot() -> None:
    assert F.one_hot([2, 0]).tolist() == [[0, 0, 1], [1, 0, 0]]
    assert F.one_hot([[1]], 2).tolist() == [[[0, 1]]]
    for wrong in (lambda: F.one_hot([2], 2), lambda: F.one_hot([-1], 3), lambda: F.one_hot([0.5])):
        assert_raises(ArgumentError, None, wrong)


def naive_conv2d(x: Array, w: Array, b: Array | None, stride: int, padding: int, dilation: int, groups: int) -> Array:
    x = np.pad(x, [(0, 0), (0, 0), (padding, padding), (padding, padding)])
    n, _, height, width = x.shape
    out, per_group, kh, kw = w.shape
    oh, ow = (height - dilation * (kh - 1) - 1) // stride + 1, (width - dilation * (kw - 1) - 1) // stride + 1
    y = np.zeros((n, out, oh, ow))
    for o in range(out):
        first = o // (out // groups) * per_group
        for i in range(oh):
            for j in range(ow):
                rows = slice(i * stride, i * stride + dilation * (kh - 1) + 1, dilation)
                columns = slice(j * stride, j * stride + dilation * (kw - 1) + 1, dilation)
                y[:, o, i, j] = (x[:, first : first + per_group, rows, columns] * w[o]).sum((1, 2, 3)) + (0 if b is None else b[o])
    return y


@pytest.mark.parametrize(("stride", "padding", "dilation", "groups"), [(1, 0, 1, 1), (2, 1, 1, 2), (1, 2, 2, 1), (3, 1, 2, 4)])
def test_conv2d(stride: int, padding: int, dilation: int, groups: int) -> None:
    x, w, b = draw(2, 4, 7, 8), draw(8, 4 // groups, 3, 2), draw(8)
    wanted = naive_conv2d(x, w, b, stride, padding, dilation, groups)
    close(F.conv2d(x, w, b, stride, padding, dilation, groups), wanted)
    close(F.conv2d(x[0], w, b, stride, padding, dilation, groups), wanted[0])
    layer = nn.Conv2d(4, 8, (3, 2), stride, padding, dilation, groups, dtype=np.float64)
    layer.load_state_dict({"weight": w, "bias": b})
    close(layer(x), wanted)


@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3), 1), ((2, 3), 1), ((4, 2), (1, 3))])
def test_same_padding_keeps_the_size(kernel: tuple[int, int], dilation: Any) -> None:
    x, w = draw(1, 2, 6, 7), draw(3, 2, *kernel)
    dh, dw = dilation if isinstance(dilation, tuple) else (dilation, dilation)
    th, tw = dh * (kernel[0] - 1), dw * (kernel[1] - 1)
    padded = np.pad(x, [(0, 0), (0, 0), (th // 2, th - th // 2), (tw // 2, tw - tw // 2)])
    out = F.conv2d(x, w, padding="same", dilation=dilation)
    close(out, F.conv2d(padded, w, dilation=dilation).numpy())
    assert out.shape == (1, 3, 6, 7)
    close(F.conv2d(x, w, padding="valid", dilation=dilation), F.conv2d(x, w, dilation=dilation).numpy())
    assert_raises(ArgumentError, "same", F.conv2d, x, w, padding="same", stride=2)


def test_conv2d_refuses_what_does_not_fit() -> None:
    assert_raises(ShapeError, None, lambda: F.conv2d(draw(4, 4), draw(1, 1, 2, 2)))
    assert_raises(ShapeError, None, lambda: F.conv2d(draw(1, 3, 4, 4), draw(1, 2, 2, 2)))
    assert_raises(ArgumentError, None, nn.Conv2d, 3, 4, 3, groups=2)


def test_pooling() -> None:
    x = draw(2, 3, 6, 6)
    windows = x.reshape(2, 3, 3, 2, 3, 2)
    close(F.max_pool2d(x, 2), windows.max((3, 5)))
    close(nn.MaxPool2d(2)(x[0]), windows.max((3, 5))[0])
    close(F.avg_pool2d(x, 2), windows.mean((3, 5)))
    close(nn.AvgPool2d((2, 2))(x[0]), windows.mean((3, 5))[0])
    close(F.max_pool2d(x, 3, stride=1, padding=1)[..., 0, 0], x[..., :2, :2].max((2, 3)))
    close(F.avg_pool2d(x, 3, stride=1, padding=1, count_include_pad=False)[..., 0, 0], x[..., :2, :2].mean((2, 3)))
    close(F.avg_pool2d(x, 3, stride=1, padding=1)[..., 0, 0], x[..., :2, :2].sum((2, 3)) / 9)
    assert_raises(ShapeError, None, F.max_pool2d, x, 2, padding=2)


def test_pad_counts_axes_from_the_last() -> None:
    x = draw(2, 3, 4)
    close(F.pad(x, (1, 2)), np.pad(x, [(0, 0), (0, 0), (1, 2)]))
    close(F.pad(x, (1, 2, 0, 3), value=5.0), np.pad(x, [(0, 0), (0, 3), (1, 2)], constant_values=5.0))
    for mode, theirs in (("reflect", "reflect"), ("replicate", "edge"), ("circular", "wrap")):
        close(F.pad(x, (1, 1), mode), np.pad(x, [(0, 0), (0, 0), (1, 1)], mode=theirs))
    for wrong in (lambda: F.pad(x, (1,)), lambda: F.pad(x, (1,) * 8), lambda: F.pad(x, (1, 1), "mirror")):
        assert_raises(ArgumentError, None, wrong)


# ---- activations


def test_softmax_takes_dim_or_axis() -> None:
    x = draw(2, 3)
    wanted = np.exp(x) / np.exp(x).sum(0)
    for ours in (F.softmax(x, 0), F.softmax(x, dim=0), F.softmax(x, axis=0), nn.Softmax(0)(x)):
        close(ours, wanted)
    close(F.softmax(x), np.exp(x) / np.exp(x).sum(1, keepdims=True))
    close(F.log_softmax(x, axis=0), np.log(wanted))
    close(nn.LogSoftmax(0)(x), np.log(wanted))
    assert F.softmax(x, dtype=np.float32).dtype == np.float32
    assert_raises(ArgumentError, "two names", F.softmax, x, 0, axis=1)


ACTIVATIONS = {
    "relu": (F.relu, nn.ReLU(), lambda x: np.maximum(x, 0)),
    "gelu": (F.gelu, nn.GELU(), lambda x: x * 0.5 * (1 + np.vectorize(math.erf)(x / math.sqrt(2)))),
    "gelu by tanh": (
        lambda x: F.gelu(x, "tanh"),
        nn.GELU("tanh"),
        lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "silu": (F.silu, nn.SiLU(), lambda x: x / (1 + np.exp(-x))),
    "elu": (lambda x: F.elu(x, 2.0), nn.ELU(2.0), lambda x: np.where(x > 0, x, 2 * np.expm1(x))),
    "leaky_relu": (lambda x: F.leaky_relu(x, 0.2), nn.LeakyReLU(0.2), lambda x: np.where(x > 0, x, 0.2 * x)),
    "softplus": (lambda x: F.softplus(x, 3.0), nn.Softplus(3.0), lambda x: np.log1p(np.exp(3 * x)) / 3),
    "sigmoid": (F.sigmoid, nn.Sigmoid(), lambda x: 1 / (1 + np.exp(-x))),
    "tanh": (F.tanh, nn.Tanh(), np.tanh),
    "softsign": (F.softsign, F.softsign, lambda x: x / (1 + np.abs(x))),
    "logsigmoid": (F.logsigmoid, F.logsigmoid, lambda x: -np.log1p(np.exp(-x))),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations(name: str) -> None:
    function, module, wanted = ACTIVATIONS[name]
    x = draw(3, 4)
    close(function(x), wanted(x))
    close(module(x), wanted(x))
    assert isinstance(repr(module), str)


# ---- normalisation


def test_layer_norm_and_rms_norm() -> None:
    x, w, b = draw(2, 3, 4), draw(3, 4, at=1), draw(3, 4, at=2)
    unit = (x - x.mean((1, 2), keepdims=True)) / np.sqrt(x.var((1, 2), keepdims=True) + 1e-5)
    close(F.layer_norm(x, (3, 4), w, b), unit * w + b)
    close(F.layer_norm(x, (3, 4)), unit)
    layer = nn.LayerNorm([3, 4], dtype=np.float64)
    close(layer(x), unit)
    layer.load_state_dict({"weight": w, "bias": b})
    close(layer(x), unit * w + b)
    assert list(nn.LayerNorm(4, bias=False).state_dict()) == ["weight"]
    assert list(nn.LayerNorm(4, elementwise_affine=False).state_dict()) == []
    root = np.sqrt((x**2).mean(-1, keepdims=True) + 1e-6)
    close(F.rms_norm(x, 4, w[0], 1e-6), x / root * w[0])
    close(nn.RMSNorm(4, 1e-6, dtype=np.float64)(x), x / root)
    for wrong in (lambda: F.layer_norm(x, (4, 4)), lambda: F.rms_norm(x, 5), lambda: F.layer_norm(x, ())):
        assert_raises(ShapeError, None, wrong)


def test_group_norm() -> None:
    x, w, b = draw(2, 6, 3, 3), draw(6, at=1), draw(6, at=2)
    grouped = x.reshape(2, 2, -1)
    unit = ((grouped - grouped.mean(-1, keepdims=True)) / np.sqrt(grouped.var(-1, keepdims=True) + 1e-5)).reshape(x.shape)
    close(F.group_norm(x, 2, w, b), unit * w[:, None, None] + b[:, None, None])
    close(nn.GroupNorm(2, 6, dtype=np.float64)(x), unit)
    assert_raises(ArgumentError, None, nn.GroupNorm, 4, 6)


def test_batch_norm_measures_in_training_and_remembers_in_evaluation() -> None:
    x = draw(5, 3, 4, 2)
    layer = nn.BatchNorm2d(3, dtype=np.float64)
    mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    unit = (x - mean[:, None, None]) / np.sqrt(var + 1e-5)[:, None, None]
    close(layer(x), unit)
    close(layer.running_mean, 0.1 * mean)
    close(layer.running_var, 0.9 + 0.1 * x.var((0, 2, 3), ddof=1))
    assert layer.num_batches_tracked.item() == 1
    layer.load_state_dict({**layer.state_dict(), "weight": draw(3, at=1), "bias": draw(3, at=2)})
    layer.eval()
    running_mean, running_var = layer.running_mean.numpy().copy(), layer.running_var.numpy().copy()
    w, b = draw(3, at=1)[:, None, None], draw(3, at=2)[:, None, None]
    close(layer(x), (x - running_mean[:, None, None]) / np.sqrt(running_var + 1e-5)[:, None, None] * w + b)
    close(layer.running_mean, running_mean)
    assert layer.num_batches_tracked.item() == 1
    assert_raises(ShapeError, None, lambda: layer(draw(5, 4, 4, 2)))
    assert_raises(ShapeError, "more than one value", lambda: layer.train()(ag.tensor(draw(1, 3, 1, 1))))


def test_batch_norm_variants() -> None:
    x = draw(6, 3)
    average = nn.BatchNorm1d(3, momentum=None, dtype=np.float64)
    average(ag.tensor(x))
    average(ag.tensor(x + 2))
    close(average.running_mean, x.mean(0) + 1)
    untracked = nn.BatchNorm1d(3, track_running_stats=False, dtype=np.float64).eval()
    close(untracked(ag.tensor(x)), (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-5))
    assert nn.BatchNorm1d(3)(ag.tensor(draw(2, 3, 4).astype(np.float32))).shape == (2, 3, 4)
    assert_raises(ArgumentError, "running_mean", F.batch_norm, x, None, None)


def test_running_statistics_are_arrays_in_evaluation_and_tensors_where_they_are_updated() -> None:
    x, mean, var = draw(2, 3, 4), np.array([0.5, 0.0, 1.0]), np.array([1.0, 2.0, 3.0])
    wanted = (x - mean[:, None]) / np.sqrt(var[:, None] + 1e-5)
    close(F.batch_norm(x, mean, var), wanted)
    close(F.instance_norm(x, mean, var, use_input_stats=False), wanted)
    for function in (F.batch_norm, F.instance_norm):
        options = {"training": True} if function is F.batch_norm else {}
        assert_raises(ArgumentTypeError, "ndarray; expected a Tensor", lambda f=function, o=options: f(x, mean, var, **o))
        assert_raises(ShapeError, r"shape \[2\], expected \[3\]", lambda f=function, o=options: f(x, ag.zeros(2), ag.ones(2), **o))


async def test_batch_norm_gradients_do_not_flow_into_running_statistics() -> None:
    layer = nn.BatchNorm1d(2)
    x = ag.tensor(draw(4, 2).astype(np.float32), requires_grad=True)
    await (layer(x) * ag.tensor(draw(4, 2, at=1).astype(np.float32))).sum().backward()
    assert layer.running_mean.grad_fn is None
    np.testing.assert_allclose(x.grad.numpy().sum(0), 0, atol=1e-5)


def test_normalize_and_cosine_similarity() -> None:
    x, y = draw(2, 3), draw(2, 3, at=1)
    close(F.normalize(x), x / np.linalg.norm(x, axis=1, keepdims=True))
    close(F.normalize(x, p=1, dim=0), x / np.abs(x).sum(0))
    close(F.normalize(np.zeros((1, 2))), np.zeros((1, 2)))
    close(F.cosine_similarity(x, y), (x * y).sum(1) / np.linalg.norm(x, axis=1) / np.linalg.norm(y, axis=1))


# ---- dropout


async def test_dropout_drops_scales_and_passes_the_same_places_back() -> None:
    x = ag.tensor(np.ones((100, 100), np.float32), requires_grad=True)
    out = F.dropout(x, 0.25, generator=Generator(1))
    values = out.detach().numpy()
    assert set(np.unique(values)) == {np.float32(0), np.float32(1 / 0.75)}
    assert abs((values == 0).mean() - 0.25) < 0.02
    await out.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), values)
    np.testing.assert_array_equal(F.dropout(x, 0.25, generator=Generator(1)).detach().numpy(), values)
    assert F.dropout(x, 0.25, training=False) is x
    assert F.dropout(x, 0.0) is x
    assert not F.dropout(x, 1.0).detach().numpy().any()
    assert_raises(ArgumentError, None, F.dropout, x, 1.5)


def test_dropout_layers_follow_the_mode_and_the_seed() -> None:
    layer, x = nn.Dropout(0.5), ag.tensor(np.ones(50, np.float32))
    seed(3)
    first, second = layer(x).tolist(), layer(x).tolist()
    assert first != second
    seed(3)
    assert layer(x).tolist() == first
    own = nn.Dropout(0.5, generator=Generator(9))
    seed(4)
    assert own(x).tolist() == nn.Dropout(0.5, generator=Generator(9))(x).tolist()
    assert layer.eval()(x) is x
    assert_raises(ArgumentError, None, nn.Dropout, -0.1)


# ---- losses


def naive_cross_entropy(x: Array, target: Array, weight: Array, ignore: int, smoothing: float) -> tuple[Array, Array]:
    """Loss and weight per sample of logits (N, C)."""
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    losses, weights = [], []
    for row, t in zip(logp, target, strict=True):
        kept = t != ignore
        losses.append(-((1 - smoothing) * weight[t] * row[t] + smoothing / len(row) * (weight * row).sum()) if kept else 0.0)
        weights.append(weight[t] if kept else 0.0)
    return np.array(losses), np.array(weights)


@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize("weighted", [False, True])
def test_cross_entropy(smoothing: float, weighted: bool) -> None:
    x, target = draw(6, 4), np.array([0, 3, 2, 1, 3, 3])
    weight = np.array([0.5, 1.0, 2.0, 3.0]) if weighted else np.ones(4)
    given = weight if weighted else None
    for ignore in (-100, 3):
        loss, counts = naive_cross_entropy(x, target, weight, ignore, smoothing)
        options: dict[str, Any] = {"weight": given, "ignore_index": ignore, "label_smoothing": smoothing}
        close(F.cross_entropy(x, target, **options, reduction="none"), loss)
        close(F.cross_entropy(x, target, **options, reduction="sum"), loss.sum())
        close(F.cross_entropy(x, ag.tensor(target), **options), loss.sum() / counts.sum())
        module = nn.CrossEntropyLoss(None if given is None else ag.tensor(given), ignore, label_smoothing=smoothing)
        close(module(x, target), loss.sum() / counts.sum())
    spatial, places = draw(2, 4, 3), np.array([[0, 3, 2], [1, 3, 0]])
    flat = naive_cross_entropy(np.moveaxis(spatial, 1, 2).reshape(6, 4), places.reshape(-1), weight, -100, smoothing)
    close(F.cross_entropy(spatial, places, given, label_smoothing=smoothing), flat[0].sum() / flat[1].sum())


async def test_cross_entropy_with_probabilities() -> None:
    x, target = draw(5, 4), np.abs(draw(5, 4, at=1))
    target /= target.sum(1, keepdims=True)
    logp = x - np.log(np.exp(x).sum(1, keepdims=True))
    weight = np.array([1.0, 2.0, 0.5, 1.0])
    close(F.cross_entropy(x, target), -(target * logp).sum(1).mean())
    smooth = 0.8 * target + 0.2 / 4
    close(F.cross_entropy(x, target, weight, label_smoothing=0.2, reduction="none"), -(weight * smooth * logp).sum(1))
    leaf, wanted = ag.tensor(x, requires_grad=True), (np.exp(logp) - target) / 5
    await F.cross_entropy(leaf, target).backward()
    np.testing.assert_allclose(leaf.grad.numpy(), wanted, atol=1e-12)
    one_hot = F.one_hot([1, 0, 3, 2, 2], 4).astype(np.float64)
    close(F.cross_entropy(x, one_hot), F.cross_entropy(x, [1, 0, 3, 2, 2]).numpy())


def test_nll_loss() -> None:
    logp, target = np.log(np.abs(draw(4, 3)) + 0.1), np.array([0, 2, 1, 1])
    close(F.nll_loss(logp, target), -logp[range(4), target].mean())
    weight = ag.tensor([1.0, 2.0, 3.0], dtype=np.float64)
    weights = np.array([1, 3, 2, 2])
    close(nn.NLLLoss(weight)(logp, target), -(weights * logp[range(4), target]).sum() / weights.sum())


DISTANCES = {
    "mse": (F.mse_loss, nn.MSELoss, {}, lambda d: d**2),
    "l1": (F.l1_loss, nn.L1Loss, {}, np.abs),
    "huber": (F.huber_loss, nn.HuberLoss, {"delta": 0.7}, lambda d: np.where(np.abs(d) < 0.7, d**2 / 2, 0.7 * (np.abs(d) - 0.35))),
    "smooth l1": (F.smooth_l1_loss, nn.SmoothL1Loss, {"beta": 0.7}, lambda d: np.where(np.abs(d) < 0.7, d**2 / 1.4, np.abs(d) - 0.35)),
}


@pytest.mark.parametrize("name", DISTANCES)
def test_distances(name: str) -> None:
    function, module, options, formula = DISTANCES[name]
    x, y = draw(4, 3), draw(4, 3, at=1)
    each = formula(x - y)
    close(function(x, y, **options), each.mean())
    close(function(x, y, reduction="sum", **options), each.sum())
    close(module(reduction="none", **options)(x, y), each)
    assert_raises(ShapeError, None, lambda: function(x, y[0]))
    assert_raises(ArgumentError, None, function, x, y, reduction="median")


def test_binary_cross_entropy_with_logits() -> None:
    x, y = np.append(draw(4, 3), [[500.0, -500.0, 0.0]], 0), np.abs(np.sin(draw(5, 3, at=1)))
    p_weight, weight = np.array([1.0, 2.0, 3.0]), np.array([0.5, 1.0, 1.5])
    softplus = np.logaddexp(0, -x)
    close(F.binary_cross_entropy_with_logits(x, y), ((1 - y) * x + softplus).mean())
    each = weight * ((1 - y) * x + (1 + (p_weight - 1) * y) * softplus)
    close(nn.BCEWithLogitsLoss(ag.tensor(weight), "none", ag.tensor(p_weight))(x, y), each)


def test_kl_div() -> None:
    q, p = np.abs(draw(3, 4)) + 0.1, np.abs(draw(3, 4, at=1))
    p[0, 0] = 0.0
    each = np.where(p > 0, p * np.log(np.where(p > 0, p, 1)), 0) - p * np.log(q)
    close(F.kl_div(np.log(q), p, "none"), each)
    close(F.kl_div(np.log(q), p, "batchmean"), each.sum() / 3)
    close(F.kl_div(np.log(q), np.log(q), log_target=True), 0.0)


async def test_probabilities_of_zero_add_nothing_where_the_logit_is_minus_infinity() -> None:
    x = ag.tensor([[0.0, -np.inf, 1.0]], dtype=np.float64, requires_grad=True)
    rest = np.array([0.0, 1.0]) - np.log(1 + math.e)
    target, weight = np.array([[0.3, 0.0, 0.7]]), np.array([1.0, 1.0, 2.0])
    cases: list[tuple[ag.Tensor, float]] = [
        (F.cross_entropy(x, target), -(0.3 * rest[0] + 0.7 * rest[1])),
        (F.cross_entropy(x, target, weight), -(0.3 * rest[0] + 1.4 * rest[1])),
        (F.cross_entropy(x, np.array([[0.3, 0.2, 0.5]]), np.array([1.0, 0.0, 1.0])), -(0.3 * rest[0] + 0.5 * rest[1])),
        (F.kl_div(F.log_softmax(x), target, "sum"), 0.3 * (math.log(0.3) - rest[0]) + 0.7 * (math.log(0.7) - rest[1])),
        (F.kl_div(F.log_softmax(x), F.log_softmax(x.detach()), "sum", log_target=True), 0.0),
    ]
    for loss, wanted in cases:
        close(loss, wanted)
        (gradient,) = await ag.grad(loss, [x])
        assert np.isfinite(gradient.numpy()).all() and gradient[0, 1].item() == 0.0


def test_losses_of_nothing_are_nan_when_averaged_and_zero_when_summed() -> None:
    x, y = np.zeros((0, 3)), np.zeros(0, np.int64)
    losses: tuple[Any, ...] = (F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.kl_div, F.binary_cross_entropy_with_logits, F.cross_entropy)
    for function, target in (*((function, x) for function in losses), (F.cross_entropy, y), (F.nll_loss, y)):
        for dtype in (np.float16, np.float64):
            wanted = target if target is y else target.astype(dtype)
            assert np.isnan(function(x.astype(dtype), wanted).item()), function
            assert function(x.astype(dtype), wanted, reduction="sum").item() == 0.0
            assert function(x.astype(dtype), wanted, reduction="none").shape[0] == 0
    assert np.isnan(F.kl_div(x, x, "batchmean").item())


@pytest.mark.parametrize("weight", [None, [1.0, 2.0, 3.0]])
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 2, 2)])
async def test_where_every_target_is_ignored_the_mean_is_nan_and_every_derivative_zero(shape: tuple[int, ...], weight: Any) -> None:
    target = np.full(shape[:1] + shape[2:] if len(shape) > 1 else (), 7)
    for function in (F.nll_loss, F.cross_entropy):

        def loss(x: Any, function: Any = function) -> Any:
            return function(x, target, weight and np.array(weight), ignore_index=7)

        x = ag.tensor(draw(*shape), requires_grad=True)
        assert np.isnan(loss(x).item())
        (first,) = await ag.grad(loss(x), [x], create_graph=True)
        assert not first.detach().numpy().any()
        if first.requires_grad:
            (second,) = await ag.grad(first.sum(), [x])
            assert not second.numpy().any()
        _, tangent = await ag.jvp(loss, (x.detach(),), (ag.ones(*shape, dtype=np.float64),))
        assert tangent.item() == 0.0


async def test_cosine_similarity_of_what_is_repeated_is_that_of_the_whole_vector() -> None:
    x1, x2 = ag.tensor([[1.0], [-2.0], [3.0]], dtype=np.float64, requires_grad=True), draw(3, 4)
    wide = np.broadcast_to(x1.detach().numpy(), (3, 4))
    wanted = (wide * x2).sum(1) / np.linalg.norm(wide, axis=1) / np.linalg.norm(x2, axis=1)
    close(F.cosine_similarity(x1, x2), wanted)
    close(F.cosine_similarity(x2[0], x2, axis=-1), (x2[0] * x2).sum(1) / np.linalg.norm(x2[0]) / np.linalg.norm(x2, axis=1))
    (gradient,) = await ag.grad(F.cosine_similarity(x1, x2).sum(), [x1])
    close(gradient, np.zeros((3, 1)))  # of a vector along (1, 1, 1, 1) the length does not matter


async def test_medians_with_nan_are_nan() -> None:
    x = ag.tensor([[3.0, np.nan, 1.0, 7.0], [2.0, 5.0, 1.0, 4.0], [np.nan, np.nan, 0.0, 0.0]], dtype=np.float64, requires_grad=True)
    np.testing.assert_array_equal(ag.median(x, axis=1).detach().numpy(), np.median(x.detach().numpy(), axis=1))
    assert np.isnan(ag.median(x).item()) and np.isnan(np.median(x, axis=(0, 1), keepdims=True).item())
    (gradient,) = await ag.grad(ag.median(x, axis=1)[1], [x])
    close(gradient, [[0, 0, 0, 0], [0.5, 0, 0, 0.5], [0, 0, 0, 0]])
    assert np.isnan(ag.median(np.zeros((2, 0)), axis=1).numpy()).tolist() == [True, True]


@pytest.mark.parametrize("mode", ["constant", "reflect", "replicate", "circular"])
async def test_negative_padding_takes_elements_away(mode: str) -> None:
    x = ag.tensor(draw(5, 6), requires_grad=True)
    numpy_mode: Any = {"replicate": "edge", "circular": "wrap"}.get(mode, mode)
    for columns, rows in (((-1, 2), (0, 0)), ((2, -3), (-1, 1)), ((-2, -4), (0, 0)), ((-6, 2), (0, 0))):
        def cropped(a: Array, rows: Any = rows, columns: Any = columns) -> Array:
            return a[max(-rows[0], 0) : len(a) - max(-rows[1], 0), max(-columns[0], 0) : a.shape[1] - max(-columns[1], 0)]

        whole, added = x.detach().numpy(), [(max(a, 0), max(b, 0)) for a, b in (rows, columns)]
        if mode == "circular":
            if not cropped(whole).size:
                continue
            wanted = np.pad(cropped(whole), added, mode=numpy_mode)
        else:
            wanted = cropped(np.pad(whole, added, mode=numpy_mode))
        out = F.pad(x, (*columns, *rows), mode)
        close(out, wanted)
        (gradient,) = await ag.grad(out.sum(), [x])
        assert gradient.shape == (5, 6) and gradient.sum().item() == pytest.approx(wanted.size if mode != "constant" else np.count_nonzero(wanted))
    assert_raises(ArgumentError, "takes more elements away", F.pad, x, (-4, -3), mode)


async def test_softplus_is_the_identity_above_its_threshold() -> None:
    x = ag.tensor([-1.0, 0.5, 2.0, 30.0], dtype=np.float64, requires_grad=True)
    smooth = np.log1p(np.exp(2 * x.detach().numpy())) / 2
    out = F.softplus(x, beta=2.0, threshold=3.0)
    close(out, np.where(2 * x.detach().numpy() > 3.0, x.detach().numpy(), smooth))
    (gradient,) = await ag.grad(out.sum(), [x])
    close(gradient, [1 / (1 + math.exp(2.0)), 1 / (1 + math.exp(-1.0)), 1.0, 1.0])
    close(F.softplus(x, 2.0), smooth)
    assert repr(nn.Softplus(2.0, 3.0)) == "Softplus(beta=2.0, threshold=3.0)"
    close(nn.Softplus(2.0, 3.0)(x), out.detach().numpy())


def test_everything_named_is_there() -> None:
    assert all(callable(getattr(F, name)) for name in F.__all__)
    assert all(hasattr(nn, name) for name in nn.__all__)
