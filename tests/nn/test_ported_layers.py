"""Layers and functions that PyTorch scripts take for granted: channels dropped as one, places of maxima, triplets, shared heads, a transformer."""

from __future__ import annotations

import inspect
import math
import operator
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn
from aiograd.errors import ArgumentError, IndexRangeError, ShapeError, UnknownNameError
from aiograd.nn import functional as F
from aiograd.running.random import Generator
from tests.support import assert_raises, draw

#: of what the guide names, examples of which each takes the arguments of its row
PORTED: dict[str, tuple[Any, ...]] = {
    "`register_forward_hook`": (nn.Module.register_forward_hook,),
    "`nn.LSTM`": (nn.LSTM,), "`nn.MultiheadAttention`": (nn.MultiheadAttention,), "`nn.Embedding`, `F.embedding`": (nn.Embedding, F.embedding),
    "`nn.BatchNorm*`, `nn.InstanceNorm*`, `nn.GroupNorm`": (nn.BatchNorm2d, nn.InstanceNorm1d, nn.GroupNorm), "`nn.Hardtanh`": (nn.Hardtanh,),
    "`nn.Upsample`, `F.interpolate`": (nn.Upsample,), "`nn.TransformerEncoder`": (nn.TransformerEncoder,), "losses": (F.mse_loss, nn.L1Loss),
    "activations and dropout in `F`": (F.relu, F.dropout2d), "optimizers": (ag.optim.Adam, ag.optim.SGD), "schedules": (ag.optim.StepLR,),
}  # fmt: skip


def test_the_guide_names_arguments_that_are_not_there() -> None:
    text = (Path(__file__).parents[2] / "docs/guides/port-from-pytorch.md").read_text(encoding="utf-8")
    _, _, section = text.partition("### Arguments that are not there\n")
    rows = re.findall(r"^\| (.+?) \| (.+?) \| .+ \|$", section, re.MULTILINE)[1:]
    assert [name for name, _ in rows] == list(PORTED)
    for name, arguments in rows:
        for function in PORTED[name]:
            assert not set(re.findall(r"`([a-z_]+)`", arguments)) & inspect.signature(function).parameters.keys(), name
    for mode in re.findall(r'`"([a-z]+)"`', section):
        assert_raises(ArgumentError, "expected one of", lambda mode=mode: F.interpolate(ag.ones(1, 1, 2, 2), size=2, mode=mode))


def test_the_guide_names_what_is_not_there_and_what_to_write_instead() -> None:
    text = (Path(__file__).parents[2] / "docs/guides/port-from-pytorch.md").read_text(encoding="utf-8")
    section = text.partition("### Names that are not there\n")[2].partition("###")[0]
    rows = dict(re.findall(r"^\| `([\w.]+)`.* \| (.+) \|$", section, re.MULTILINE))
    module = nn.Linear(2, 3)
    names = {"module": module, "nn": nn, "F": F}
    for path in rows:
        assert_raises(AttributeError, "has no attribute", operator.attrgetter(path.partition(".")[2]), names[path.partition(".")[0]])
    n, k, h, w, r, margin = 2, 8, 3, 5, 2, 0.1
    x, y, c = draw(n, k, h, w), np.array([1.0, -1.0]), np.array([0.3, 0.4])
    xs = [ag.tensor(draw(2, 3)), ag.tensor(draw(4, 3, at=1))]
    names |= {"ag": ag, "n": n, "k": k, "h": h, "w": w, "r": r, "margin": margin, "x": ag.tensor(x), "y": ag.tensor(y), "c": ag.tensor(c), "xs": xs}
    names |= {"longest": 4, "name": "weight"}
    run = ("module.get_parameter", "nn.CosineEmbeddingLoss", "nn.PixelShuffle", "nn.utils.rnn", "F.unfold")
    found = {path: eval(rows[path].strip("`"), dict(names)) for path in run}  # noqa: S307
    assert found["module.get_parameter"] is module.weight
    assert found["nn.CosineEmbeddingLoss"].item() == pytest.approx((1 - 0.3 + 0.4 - 0.1) / 2)
    shuffled, unfolded, padded = (found[path].numpy() for path in ("nn.PixelShuffle", "F.unfold", "nn.utils.rnn"))
    assert shuffled.shape == (n, 2, 6, 10) and shuffled[1, 1, 2 * 2 + 1, 2 * 3 + 0] == x[1, 4 + 2, 2, 3]
    assert unfolded.shape == (n, k * 4, 2 * 4) and unfolded[1, 3 * 4 + 1, 1 * 4 + 2] == x[1, 3, 1, 2 + 1]
    assert padded.shape == (2, 4, 3) and (padded[0, 2:] == 0).all() and (padded[0, :2] == xs[0].numpy()).all()


# ---- dropout of channels


@pytest.mark.parametrize(("layer", "shape"), [(nn.Dropout1d, (6, 5, 4)), (nn.Dropout2d, (6, 5, 2, 3)), (nn.Dropout3d, (6, 5, 2, 2, 2))])
async def test_channels_are_dropped_as_one(layer: Any, shape: tuple[int, ...]) -> None:
    drop = layer(0.4, generator=Generator(0))
    x = ag.ones(*shape, requires_grad=True)
    out = drop(x)
    each = out.detach().numpy().reshape(*shape[:2], -1)
    assert (each == each[..., :1]).all()
    assert {round(float(value), 5) for value in np.unique(each)} == {0.0, round(1 / 0.6, 5)}
    await out.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), out.detach().numpy())
    assert drop.eval()(x) is x and layer(0.0)(x) is x
    if layer is not nn.Dropout2d:  # of three axes it takes the first two for sample and channel
        alone = layer(0.5, generator=Generator(1))(x[0]).detach().numpy().reshape(shape[1], -1)
        assert (alone == alone[:, :1]).all() and len(np.unique(alone)) == 2
    assert_raises(ArgumentError, rf"{layer.__name__}\(p=1.5\)", layer, 1.5)
    assert_raises(ShapeError, "found shape", lambda: drop.train()(ag.ones(2)))


# ---- places of maxima


@pytest.mark.parametrize(
    ("size", "stride", "padding", "dilation", "ceil"), [(2, None, 0, 1, False), (3, 2, 1, 1, True), ((2, 3), (1, 2), (1, 0), (2, 1), False)]
)
def test_places_of_maxima_are_those_of_the_values(size: Any, stride: Any, padding: Any, dilation: Any, ceil: bool) -> None:
    x = draw(2, 3, 7, 8)
    values, places = F.max_pool2d(x, size, stride, padding, dilation, ceil, return_indices=True)
    np.testing.assert_array_equal(values.numpy(), F.max_pool2d(x, size, stride, padding, dilation, ceil).numpy())
    assert places.dtype == np.int64
    flat = x.reshape(2, 3, -1)
    np.testing.assert_array_equal(np.take_along_axis(flat, places.numpy().reshape(2, 3, -1), 2).reshape(values.shape), values.numpy())
    alone = nn.MaxPool2d(size, stride, padding, dilation, True, ceil)(x[0])
    assert [each.tolist() for each in alone] == [values[0].tolist(), places[0].tolist()]


@pytest.mark.filterwarnings("ignore:the compiled function place runs eagerly")
def test_places_in_lines_and_in_a_compiled_function() -> None:
    values, places = nn.MaxPool1d(3, 2, 1, return_indices=True)(ag.tensor([[1.0, 5.0, 2.0, 4.0, 9.0]]))
    assert values.tolist() == [[5.0, 5.0, 9.0]] and places.tolist() == [[1, 1, 4]]

    @ag.compile(on_break="eager")  # the places are values, which a program does not choose by
    def place(x: Any) -> Any:
        return F.max_pool2d(x, 2, return_indices=True)[1] * 1.0

    found = [place(ag.tensor(each)).item() for each in ([[[1.0, 2.0], [0.0, 0.0]]], [[[1.0, 0.0], [0.0, 3.0]]], [[[4.0, 0.0], [0.0, 3.0]]])]
    assert found == [1.0, 3.0, 0.0]


async def test_values_go_back_to_their_places() -> None:
    x = draw(2, 3, 4, 6)
    values, places = nn.MaxPool2d(2, return_indices=True)(ag.tensor(x, requires_grad=True))
    back = nn.MaxUnpool2d(2)(values, places)
    kept = back.detach().numpy()
    assert back.shape == x.shape and (kept != 0).sum() == values.size
    np.testing.assert_array_equal(kept[kept != 0], x[kept != 0])
    source = ag.tensor(draw(1, 2, 2), requires_grad=True)
    spread = F.max_unpool2d(source, [[[0, 3], [11, 12]]], 2, output_size=(5, 5))
    assert spread.shape == (1, 5, 5) and spread.reshape(-1)[ag.tensor([0, 3, 11, 12])].tolist() == source.reshape(-1).tolist()
    await (spread * 2).sum().backward()
    assert source.grad.tolist() == [[[2.0, 2.0], [2.0, 2.0]]]
    assert_raises(ShapeError, "expected one shape", F.max_unpool2d, source, [[[0, 3]]], 2)
    with pytest.raises(ShapeError, match=r"expected extents within a stride \(2, 2\) of \[4, 4\]"):
        F.max_unpool2d(source, [[[0, 1], [2, 3]]], 2, output_size=(9, 9))
    assert_raises(IndexRangeError, None, F.max_unpool2d, source, [[[0, 1], [2, 16]]], 2)


# ---- triplets


@pytest.mark.parametrize("options", [{}, {"margin": 0.3, "p": 1.0}, {"swap": True}, {"p": 3.0, "eps": 1e-3}])
def test_triplets(options: dict[str, Any]) -> None:
    a, p, n = draw(5, 4), draw(5, 4, at=1), draw(5, 4, at=2)
    order, eps = options.get("p", 2.0), options.get("eps", 1e-6)

    def distance(x: Any, y: Any) -> Any:
        return (np.abs(x - y + eps) ** order).sum(-1) ** (1 / order)

    far = np.minimum(distance(a, n), distance(p, n)) if options.get("swap") else distance(a, n)
    losses = np.maximum(distance(a, p) - far + options.get("margin", 1.0), 0)
    for reduction, expected in (("none", losses), ("sum", losses.sum()), ("mean", losses.mean())):
        np.testing.assert_allclose(nn.TripletMarginLoss(reduction=reduction, **options)(a, p, n).numpy(), expected, rtol=1e-12)
    assert F.pairwise_distance(a, p, keepdim=True).shape == (5, 1)
    assert_raises(ArgumentError, "margin=0", F.triplet_margin_loss, a, p, n, margin=0)


# ---- attention


def test_heads_that_share_keys() -> None:
    q, k, v = draw(2, 6, 5, 4), draw(2, 2, 7, 4, at=1), draw(2, 2, 7, 3, at=2)
    for causal in (False, True):
        found = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=True)
        expected = F.scaled_dot_product_attention(q, np.repeat(k, 3, 1), np.repeat(v, 3, 1), is_causal=causal)
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
    with pytest.raises(ShapeError, match="dividing those of the query"):
        F.scaled_dot_product_attention(q, draw(2, 4, 7, 4), draw(2, 4, 7, 3), enable_gqa=True)


def test_attention_returns_output_and_weights() -> None:
    attention = nn.MultiheadAttention(4, 2, batch_first=True, dtype=np.float64)
    x = ag.tensor(draw(2, 3, 4))
    out, weights = attention(x, x, x)
    assert weights is not None and weights.shape == (2, 3, 3)
    np.testing.assert_allclose(weights.detach().numpy().sum(-1), 1.0)
    faster, none = attention(x, x, x, need_weights=False)
    assert none is None
    np.testing.assert_allclose(out.detach().numpy(), faster.detach().numpy(), atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"norm_first": True, "activation": "gelu", "batch_first": True, "bias": False}])
def test_a_transformer_is_its_encoder_and_decoder(options: dict[str, Any]) -> None:
    model = nn.Transformer(8, 2, 2, 3, 16, 0.0, dtype=np.float64, generator=Generator(0), **options)
    assert len(model.encoder.layers) == 2 and len(model.decoder.layers) == 3
    names = {name for name, _ in model.named_parameters()}
    assert {"encoder.layers.1.self_attn.in_proj_weight", "decoder.layers.2.multihead_attn.out_proj.weight", "encoder.norm.weight"} <= names
    first = options.get("batch_first", False)
    src, tgt = (ag.tensor(draw(*((2, n, 8) if first else (n, 2, 8)), at=n)) for n in (6, 5))
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=np.float64)
    assert mask[0].tolist() == [0.0, *[-math.inf] * 4] and mask[4].tolist() == [0.0] * 5
    padding = np.array([[False] * 6, [False] * 4 + [True] * 2])
    out = model(src, tgt, tgt_mask=mask, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    memory = model.encoder(src, src_key_padding_mask=padding)
    np.testing.assert_array_equal(
        out.detach().numpy(), model.decoder(tgt, memory, mask, memory_key_padding_mask=padding).detach().numpy()
    )
    causal = model(src, tgt, tgt_is_causal=True, src_key_padding_mask=padding, memory_key_padding_mask=padding)
    np.testing.assert_allclose(causal.detach().numpy(), out.detach().numpy(), atol=1e-12)
    bound = math.sqrt(6 / (8 + 16))
    assert 0.9 * bound < abs(model.encoder.layers[0].linear1.weight.detach().numpy()).max() <= bound  # Xavier
    other: Any = nn.Transformer(8, 2, custom_encoder=nn.Identity(), num_decoder_layers=1)
    assert isinstance(other.encoder, nn.Identity)


# ---- names


@pytest.mark.parametrize(
    ("get", "nearest"),
    [(lambda: nn.Linaer, "Linear"), (lambda: ag.optim.Adamm, "Adam"), (lambda: F.cross_entropi, "cross_entropy"), (lambda: nn.Conv4d, "Conv3d")],  # type: ignore[attr-defined]
)
def test_an_unknown_name_is_told_with_the_nearest_one(get: Any, nearest: str) -> None:
    assert_raises(UnknownNameError, f"the nearest is '{nearest}'", get)


@pytest.mark.parametrize(
    "path",
    [
        "data.DataLoader", "utils.data.Dataset", "nn.init.xavier_uniform_", "nn.utils.clip_grad_norm_", "optim.lr_scheduler.StepLR",
        "linalg.cholesky", "fft.rfftn", "special.gammaln", "stats.multivariate_normal", "distributions.Bernoulli", "autograd.gradcheck",
        "graph.GradientEdge", "implicit.fixed_point", "parallel.run_isolated_forward", "pipeline.Pipeline", "profiler.profile",
        "transaction.Participant", "viz.graph_svg",
    ],
)  # fmt: skip
def test_every_public_module_names_the_nearest(path: str) -> None:
    where, _, name = path.rpartition(".")
    module = operator.attrgetter(where)(ag)
    getattr(module, name)
    assert_raises(UnknownNameError, f"the nearest is '{name}'", getattr, module, name[:1] + name[2:])
