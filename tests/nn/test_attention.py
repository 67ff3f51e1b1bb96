"""Attention against a loop over heads and queries."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import aiograd as ag
import aiograd.nn.functional as F
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.running.random import Generator
from tests.support import assert_raises, draw
from tests.toy_device import ToyDevice

Array = np.ndarray[Any, Any]


def naive(q: Array, k: Array, v: Array, allowed: Array, added: Array) -> tuple[Array, Array]:
    """One head: (L, E), (S, E), (S, V), masks (L, S)."""
    weights = np.zeros((len(q), len(k)))
    for i in range(len(q)):
        keys = np.flatnonzero(allowed[i])
        if len(keys):
            scores = np.exp([q[i] @ k[j] / math.sqrt(q.shape[-1]) + added[i, j] for j in keys])
            weights[i, keys] = scores / scores.sum()
    return weights @ v, weights


def naive_module(m: nn.MultiHeadAttention, q: Array, k: Array, v: Array, allowed: Array, added: Array) -> tuple[Array, Array]:
    """A batch (N, L, E); masks (N, heads, L, S)."""
    state = {name: value.numpy() for name, value in m.state_dict().items()}
    e, h = m.embed_dim, m.num_heads
    weights = np.split(state["in_proj_weight"], 3) if "in_proj_weight" in state else [state[f"{n}_proj_weight"] for n in "qkv"]
    biases = np.split(state.get("in_proj_bias", np.zeros(3 * e)), 3)
    q, k, v = (x @ w.T + b for x, w, b in zip((q, k, v), weights, biases, strict=True))
    out, all_weights = np.zeros_like(q), np.zeros((len(q), h, q.shape[1], k.shape[1]))
    for n in range(len(q)):
        for i in range(h):
            part = slice(i * e // h, (i + 1) * e // h)
            out[n, :, part], all_weights[n, i] = naive(q[n, :, part], k[n, :, part], v[n, :, part], allowed[n, i], added[n, i])
    return out @ state["out_proj.weight"].T + state.get("out_proj.bias", 0), all_weights


def close(ours: Any, wanted: Array) -> None:
    assert ours.shape == wanted.shape
    np.testing.assert_allclose(ours.detach().numpy(), wanted, rtol=1e-9, atol=1e-9)


def test_scaled_dot_product_attention() -> None:
    q, k, v = draw(2, 3, 4), draw(2, 5, 4, at=1), draw(2, 5, 6, at=2)
    every, none = np.ones((3, 5), bool), np.zeros((3, 5))
    mask, added = draw(3, 5, at=3) > 0, draw(3, 5, at=4)
    mask[1] = False
    causal = np.tri(3, 5, dtype=bool)
    for given, is_causal, allowed, bias in (
        (None, False, every, none), (mask, False, mask, none), (added, False, every, added), (None, True, causal, none),
        (mask, True, mask & causal, none), (added, True, causal, added),
    ):  # fmt: skip
        wanted = np.stack([naive(q[n], k[n], v[n], allowed, bias)[0] for n in range(2)])
        close(F.scaled_dot_product_attention(q, k, v, given, is_causal=is_causal), wanted)


def test_dropout_of_attention_weights_keeps_the_mean() -> None:
    q, k, v = draw(1, 50, 4), draw(1, 40, 4, at=1), np.ones((1, 40, 400))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, generator=Generator(0)).numpy()
    assert abs(out.mean() - 1) < 0.05
    assert out.std() > 0.05
    again = F.scaled_dot_product_attention(q, k, v, dropout_p=0.5, generator=Generator(0)).numpy()
    np.testing.assert_array_equal(out, again)


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("self_attention", [False, True])
@pytest.mark.parametrize("bias", [False, True])
def test_multi_head_attention(batch_first: bool, self_attention: bool, bias: bool) -> None:
    module = nn.MultiHeadAttention(6, 2, bias=bias, batch_first=batch_first, dtype=np.float64, generator=Generator(1))
    if bias:
        module.load_state_dict({"in_proj_bias": draw(18), "out_proj.bias": draw(6)}, strict=False)
    q = draw(2, 3, 6)
    k, v = (q, q) if self_attention else (draw(2, 5, 6, at=1), draw(2, 5, 6, at=2))
    queries, keys = q.shape[1], k.shape[1]
    padding, left_out = np.zeros((2, keys), bool), draw(queries, keys, at=5) > 0.5
    padding[0, -1] = True
    added = draw(4, queries, keys, at=6)
    turn = (lambda x: x) if batch_first else (lambda x: x.swapaxes(0, 1))
    given = [ag.tensor(turn(x)) for x in (q, k, v)]
    if self_attention:
        given = [given[0]] * 3
    shape = (2, 2, queries, keys)
    for options, allowed, bias_added in (
        ({}, np.ones(shape, bool), np.zeros(shape)),
        ({"attn_mask": left_out}, np.broadcast_to(~left_out, shape), np.zeros(shape)),
        ({"key_padding_mask": padding}, np.broadcast_to(~padding[:, None, None], shape), np.zeros(shape)),
        ({"attn_mask": added}, np.ones(shape, bool), added.reshape(shape)),
        ({"attn_mask": left_out, "key_padding_mask": padding}, np.broadcast_to(~left_out & ~padding[:, None, None], shape), np.zeros(shape)),
        ({"attn_mask": added, "key_padding_mask": padding}, np.broadcast_to(~padding[:, None, None], shape), added.reshape(shape)),
        ({"is_causal": True}, np.broadcast_to(np.tri(queries, keys, dtype=bool), shape), np.zeros(shape)),
    ):
        wanted, weights = naive_module(module, q, k, v, allowed, bias_added)
        out, nothing = module(*given, need_weights=False, **options)
        assert nothing is None
        close(out, turn(wanted))
        out, found = module(*given, **options)
        close(out, turn(wanted))
        close(found, weights.mean(1))
        close(module(*given, average_attn_weights=False, **options)[1], weights)
    single, _ = module(*(turn(x.numpy())[0] for x in given))
    close(single, naive_module(module, q[:1], k[:1], v[:1], np.ones((1, 2, queries, keys), bool), np.zeros((1, 2, queries, keys)))[0][0])


def test_keys_and_values_of_other_sizes() -> None:
    module = nn.MultiHeadAttention(4, 2, kdim=3, vdim=5, batch_first=True, dtype=np.float64)
    assert module.in_proj_weight is None
    assert module.k_proj_weight.shape == (4, 3)
    q, k, v = draw(2, 3, 4), draw(2, 5, 3, at=1), draw(2, 5, 5, at=2)
    close(module(q, k, v)[0], naive_module(module, q, k, v, np.ones((2, 2, 3, 5), bool), np.zeros((2, 2, 3, 5)))[0])


def test_wrong_arguments_end_in_a_typed_error() -> None:
    module, x = nn.MultiHeadAttention(4, 2, dtype=np.float64), draw(3, 1, 4)
    for wrong, error in (
        (lambda: nn.MultiHeadAttention(5, 2), ArgumentError),
        (lambda: module(x, x, draw(2, 1, 4)), ShapeError),
        (lambda: module(draw(3, 1, 5), x, x), ShapeError),
        (lambda: module(x, x, x, attn_mask=np.zeros((2, 3), bool)), ShapeError),
        (lambda: module(x, x, x, attn_mask=np.zeros((3, 3), int)), ArgumentTypeError),
        (lambda: nn.TransformerEncoderLayer(4, 2, activation="swish"), ArgumentError),
    ):
        assert_raises(error, None, wrong)


@pytest.mark.parametrize("norm_first", [False, True])
async def test_transformer_encoder_layer(norm_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, activation="gelu", batch_first=True, norm_first=norm_first, dtype=np.float64)
    assert set(layer.state_dict()) == {
        "self_attn.in_proj_weight", "self_attn.in_proj_bias", "self_attn.out_proj.weight", "self_attn.out_proj.bias",
        "linear1.weight", "linear1.bias", "linear2.weight", "linear2.bias", "norm1.weight", "norm1.bias", "norm2.weight", "norm2.bias",
    }  # fmt: skip
    x = draw(2, 3, 4)

    def attend(y: Array) -> Array:
        return naive_module(layer.self_attn, y, y, y, np.ones((2, 2, 3, 3), bool), np.zeros((2, 2, 3, 3)))[0]

    def feed(y: Array) -> Array:
        return np.asarray(layer.linear2(F.gelu(layer.linear1(y))).detach())

    def norm(y: Array) -> Array:
        return (y - y.mean(-1, keepdims=True)) / np.sqrt(y.var(-1, keepdims=True) + 1e-5)

    if norm_first:
        middle = x + attend(norm(x))
        wanted = middle + feed(norm(middle))
    else:
        middle = norm(x + attend(x))
        wanted = norm(middle + feed(middle))
    out = layer(ag.tensor(x))
    close(out, wanted)
    await out.square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


EMPTY: dict[str, Any] = {
    "attention": lambda q, k: F.scaled_dot_product_attention(q, k, k),
    "with a mask": lambda q, k: F.scaled_dot_product_attention(q, k, k, np.ones((q.shape[-2], k.shape[-2]), bool)),
    "with numbers added": lambda q, k: F.scaled_dot_product_attention(q, k, k, np.zeros((q.shape[-2], k.shape[-2]))),
    "causal": lambda q, k: F.scaled_dot_product_attention(q, k, k, is_causal=True),
    "with dropout": lambda q, k: F.scaled_dot_product_attention(q, k, k, dropout_p=0.5),
    "on a device": lambda q, k: F.scaled_dot_product_attention(q.to("toy:attention"), *(k.to("toy:attention"),) * 2),
}


@pytest.mark.parametrize("shapes", [((2, 3, 4), (2, 0, 4)), ((2, 0, 4), (2, 3, 4)), ((0, 3, 4), (0, 2, 4)), ((2, 0, 4), (2, 0, 4))])
@pytest.mark.parametrize("name", EMPTY)
async def test_without_keys_a_query_gives_zeros_and_has_no_gradient(name: str, shapes: Any) -> None:
    q, k = (ag.tensor(draw(*shape), requires_grad=True) for shape in shapes)
    with ToyDevice("toy:attention"):
        out = (await EMPTY[name](q, k)).cpu()
        assert out.shape == q.shape and not out.detach().numpy().any()
        grads = await ag.grad(out.sum(), [q, k], create_graph=True, allow_unused=True)
    assert all(g is None or not g.detach().numpy().any() for g in grads)


@pytest.mark.parametrize("need_weights", [True, False])
@pytest.mark.parametrize(("queries", "keys", "batch"), [(3, 0, 2), (0, 3, 2), (3, 2, 0), (0, 0, 2)])
async def test_multi_head_attention_over_empty_axes(queries: int, keys: int, batch: int, need_weights: bool) -> None:
    layer = nn.MultiheadAttention(4, 2, dtype=np.float64)
    q, k = (ag.tensor(draw(length, batch, 4), requires_grad=True) for length in (queries, keys))
    out, weights = layer(q, k, k, need_weights=need_weights)
    assert out.shape == q.shape and (weights is None or weights.shape == (batch, queries, keys))
    if not keys and layer.out_proj.bias is not None:
        np.testing.assert_array_equal(out.detach().numpy(), np.broadcast_to(layer.out_proj.bias.detach().numpy(), q.shape))
    await out.sum().backward()
    assert not q.grad.numpy().any() or keys


async def test_transformer_layers_over_empty_axes() -> None:
    encoder = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, dtype=np.float64)
    decoder = nn.TransformerDecoderLayer(4, 2, 8, dropout=0.0, dtype=np.float64)
    for out, shape in ((encoder(draw(0, 2, 4)), (0, 2, 4)), (decoder(draw(3, 2, 4), draw(0, 2, 4)), (3, 2, 4))):
        assert out.shape == shape and np.isfinite(out.detach().numpy()).all()
        await out.sum().backward()
