"""MultiHeadAttention, with PyTorch's conventions and weight layout, so that weights can be exchanged."""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.array_functions.conversion import as_tensor, as_tensors
from aiograd.array_functions.searching import where
from aiograd.errors import ArgumentError, ArgumentTypeError, ShapeError
from aiograd.nn import functional, init
from aiograd.nn.functional.attentions import attention_weights
from aiograd.nn.linear import Linear, new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor


class MultiHeadAttention(Module):
    """Attention in several heads between a projected query, key and value, projected back.

    Masks mean the same as in PyTorch's module, where True means *left out*; in `functional.scaled_dot_product_attention` it means *takes part*.

    Args:
        embed_dim: features of query and output.
        num_heads: how many heads; divides `embed_dim`.
        dropout: probability with which attention weights are dropped in training.
        bias: True if projections have one.
        kdim, vdim: features of key and value; None: `embed_dim`.
        batch_first: True if inputs are (N, L, E) rather than (L, N, E).
        dtype, device: of the parameters.
        generator: draws their first values (Xavier) and the dropout; None: the default generator.

    Raises:
        ArgumentError: `embed_dim` does not divide into `num_heads`.

    >>> attention = ag.nn.MultiHeadAttention(8, num_heads=2, batch_first=True)
    >>> x = ag.ones(1, 5, 8)
    >>> output, weights = attention(x, x, x)
    >>> output.shape, weights.shape
    ((1, 5, 8), (1, 5, 5))
    """

    in_proj_weight: Parameter | None
    q_proj_weight: Parameter | None
    k_proj_weight: Parameter | None
    v_proj_weight: Parameter | None
    in_proj_bias: Parameter | None
    out_proj: Linear

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        dtype: Any = None,
        device: str | None = None,
        generator: Generator | None = None,
    ) -> None:
        if num_heads < 1 or embed_dim % num_heads:
            raise ArgumentError(f"MultiHeadAttention({embed_dim}, {num_heads}): expected features divisible by the number of heads")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.dropout = dropout
        self.batch_first = batch_first
        self.generator = generator
        sizes = (embed_dim, embed_dim if kdim is None else kdim, embed_dim if vdim is None else vdim)
        together = sizes == (embed_dim,) * 3
        self.in_proj_weight = new_parameter((3 * embed_dim, embed_dim), dtype, device) if together else None
        separate = [None if together else new_parameter((embed_dim, size), dtype, device) for size in sizes]
        self.q_proj_weight, self.k_proj_weight, self.v_proj_weight = separate
        self.in_proj_bias = new_parameter((3 * embed_dim,), dtype, device) if bias else None
        self.out_proj = Linear(embed_dim, embed_dim, bias, dtype=dtype, device=device, generator=generator)
        self.reset_parameters(generator)

    def reset_parameters(self, generator: Generator | None = None) -> None:
        """Draw new values.

        Args:
            generator: where the numbers come from; None: the default generator.
        """
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                init.xavier_uniform_(weight, generator=generator)
        self.out_proj.reset_parameters(generator)
        for bias in (self.in_proj_bias, self.out_proj.bias):
            if bias is not None:
                init.zeros_(bias)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attend: outputs are mixtures of projected values.

        Args:
            query: (L, N, E), or (N, L, E) with `batch_first`, or (L, E).
            key, value: the same with S in place of L.
            key_padding_mask: (N, S) or (S,), True where a key is left out; or floating, added to the scores.
            need_weights: False to return no attention weights, which makes it faster.
            attn_mask: (L, S) or (N * heads, L, S), True where a key is left out for a query; or floating, added to the scores.
            average_attn_weights: True to average the returned weights over heads.
            is_causal: query i attends to keys 0 to i only.

        Returns:
            The output, of the shape of `query`, and the weights (N, L, S), or (N, heads, L, S) where not averaged, or None.

        Raises:
            ShapeError: shapes that do not fit.
            ArgumentTypeError: a mask of another dtype.
        """
        q, k, v = as_tensors(query, key, value)
        single = q.ndim == 2
        if single:
            q, k, v = q.unsqueeze(0), k.unsqueeze(0), v.unsqueeze(0)
        elif not self.batch_first:
            shared, same = k is q, v is k
            q = q.swapaxes(0, 1)
            k = q if shared else k.swapaxes(0, 1)
            v = k if same else v.swapaxes(0, 1)
        if min(q.ndim, k.ndim, v.ndim) != 3 or q.shape[-1] != self.embed_dim or q.shape[0] != k.shape[0] or k.shape[:2] != v.shape[:2]:
            raise ShapeError(
                f"MultiHeadAttention({self.embed_dim}): found query {list(query.shape)}, key {list(key.shape)}, value {list(value.shape)}; expected "
                f"sequences of {self.embed_dim} features, with one batch size, and as many values as keys"
            )
        q, k, v = (self._heads(x) for x in self._project(q, k, v))
        mask = self._mask(q, k, key_padding_mask, attn_mask)
        dropped = self.dropout if self.training else 0.0
        weights = None
        if need_weights:
            weights = attention_weights(q, k, mask, is_causal)
            if dropped:
                weights = functional.dropout(weights, dropped, generator=self.generator)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = functional.scaled_dot_product_attention(q, k, v, mask, dropped, is_causal, generator=self.generator)
        out = self.out_proj(out.swapaxes(1, 2).flatten(2))
        if single:
            return out.squeeze(0), None if weights is None else weights.squeeze(0)
        return out if self.batch_first else out.swapaxes(0, 1), weights

    def _project(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        e = self.embed_dim
        bias = self.in_proj_bias
        if self.in_proj_weight is not None and k is q and v is q:
            packed = functional.linear(q, self.in_proj_weight, bias)
            return packed[..., :e], packed[..., e : 2 * e], packed[..., 2 * e :]
        results = []
        for i, (x, separate) in enumerate(((q, self.q_proj_weight), (k, self.k_proj_weight), (v, self.v_proj_weight))):
            part = slice(i * e, (i + 1) * e)
            weight: Any = separate if self.in_proj_weight is None else self.in_proj_weight[part]
            results.append(functional.linear(x, weight, None if bias is None else bias[part]))
        return results[0], results[1], results[2]

    def _heads(self, x: Tensor) -> Tensor:
        """(N, L, E) to (N, heads, L, E / heads)."""
        return x.reshape(*x.shape[:2], self.num_heads, x.shape[2] // self.num_heads).swapaxes(1, 2)

    def _mask(self, q: Tensor, k: Tensor, key_padding_mask: Any, attn_mask: Any) -> Tensor | None:
        """Both masks as one that `scaled_dot_product_attention` understands."""
        batch, queries, keys = q.shape[0], q.shape[2], k.shape[2]
        masks = []
        for name, given, shapes in (
            ("key_padding_mask", key_padding_mask, {(keys,): (1, 1, 1, keys), (batch, keys): (batch, 1, 1, keys)}),
            (
                "attn_mask",
                attn_mask,
                {(queries, keys): (1, 1, queries, keys), (batch * self.num_heads, queries, keys): (batch, self.num_heads, queries, keys)},
            ),
        ):
            if given is None:
                continue
            mask = as_tensor(given)
            if mask.shape not in shapes:
                raise ShapeError(f"MultiHeadAttention: {name} has shape {list(mask.shape)}, expected {' or '.join(str(list(s)) for s in shapes)}")
            if mask.dtype.kind not in "bf":
                raise ArgumentTypeError(f"MultiHeadAttention: {name} has dtype {mask.dtype}, expected bool (True is left out) or floating")
            masks.append(mask.reshape(shapes[mask.shape]))
        if not masks:
            return None
        if all(mask.dtype == np.bool_ for mask in masks):
            taking_part = [~mask for mask in masks]
            return taking_part[0] if len(masks) == 1 else taking_part[0] & taking_part[1]
        added = [_as_added(mask, q.dtype) for mask in masks]
        return added[0] if len(added) == 1 else added[0] + added[1]

    def extra_repr(self) -> str:
        return f"{self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}, batch_first={self.batch_first}"


def _as_added(mask: Tensor, dtype: Any) -> Tensor:
    if mask.dtype != np.bool_:
        return mask
    return where(mask, np.array(-np.inf, dtype), np.array(0, dtype))
