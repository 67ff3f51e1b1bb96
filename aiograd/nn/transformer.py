"""TransformerEncoderLayer: self-attention and a feed-forward network, each with a residual connection and a norm.

Source: Vaswani et al., Attention Is All You Need (2017); with ``norm_first`` Xiong et al., On Layer Normalization in the Transformer
Architecture (2020). Names and layout of parameters are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from aiograd.errors import ArgumentError
from aiograd.nn import functional
from aiograd.nn.attention import MultiHeadAttention
from aiograd.nn.dropout import Dropout
from aiograd.nn.linear import Linear
from aiograd.nn.module import Module
from aiograd.nn.normalization import LayerNorm
from aiograd.random import Generator
from aiograd.tensors.tensor import Tensor

_ACTIVATIONS: dict[str, Callable[[Any], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


class TransformerEncoderLayer(Module):
    """One layer of a transformer encoder.

    Args:
        d_model: features.
        nhead: heads of attention; divides `d_model`.
        dim_feedforward: features inside the feed-forward network.
        dropout: probability of dropping in training, in four places.
        activation: "relu", "gelu" or a function.
        layer_norm_eps: of the norms.
        batch_first: True if inputs are (N, L, E) rather than (L, N, E).
        norm_first: True if norms come before attention and feed-forward network rather than after.
        bias: True if projections and norms have one.
        dtype, device: of the parameters.
        generator: draws first values and dropout; None: the default generator.
    """

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Any], Tensor] = "relu",
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        *,
        dtype: Any = None,
        device: str | None = None,
        generator: Generator | None = None,
    ) -> None:
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ArgumentError(f"TransformerEncoderLayer(activation={activation!r}): expected 'relu', 'gelu' or a function")
        made: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
        self.self_attn = MultiHeadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **made)
        self.linear1 = Linear(d_model, dim_feedforward, bias, **made)
        self.dropout = Dropout(dropout, generator=generator)
        self.linear2 = Linear(dim_feedforward, d_model, bias, **made)
        self.norm_first = norm_first
        self.norm1 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype, device=device)
        self.norm2 = LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype, device=device)
        self.dropout1 = Dropout(dropout, generator=generator)
        self.dropout2 = Dropout(dropout, generator=generator)
        self.activation = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def forward(self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        """One layer; masks as in `MultiHeadAttention`."""
        if self.norm_first:
            x = src + self._attend(self.norm1(src), src_mask, src_key_padding_mask, is_causal)
            return x + self._feed(self.norm2(x))
        x = self.norm1(src + self._attend(src, src_mask, src_key_padding_mask, is_causal))
        return self.norm2(x + self._feed(x))  # type: ignore[no-any-return]

    def _attend(self, x: Tensor, mask: Any, padding: Any, is_causal: bool) -> Tensor:
        return self.dropout1(self.self_attn(x, x, x, padding, attn_mask=mask, is_causal=is_causal)[0])  # type: ignore[no-any-return]

    def _feed(self, x: Tensor) -> Tensor:
        return self.dropout2(self.linear2(self.dropout(self.activation(self.linear1(x)))))  # type: ignore[no-any-return]
