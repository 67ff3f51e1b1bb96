"""Transformers: layers of attention and a feed-forward network, each with a residual connection and a norm, and stacks of them.

Source: Vaswani et al., Attention Is All You Need (2017); with ``norm_first`` Xiong et al., On Layer Normalization in the Transformer
Architecture (2020). Names and layout of parameters are PyTorch's.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import Any

from aiograd.array_functions.creation import full, triu
from aiograd.errors import ArgumentError
from aiograd.nn import functional, init
from aiograd.nn.attention import MultiHeadAttention
from aiograd.nn.containers import ModuleList
from aiograd.nn.dropout import Dropout
from aiograd.nn.functional.documentation import put_behind_first_line
from aiograd.nn.linear import Linear
from aiograd.nn.module import Module
from aiograd.nn.normalization import LayerNorm
from aiograd.running.random import Generator
from aiograd.tensors.tensor import Tensor

_ACTIVATIONS: dict[str, Callable[[Any], Tensor]] = {"relu": functional.relu, "gelu": functional.gelu}


_ARGUMENTS = """Args:
    d_model: features.
    nhead: heads of attention; divides `d_model`.
    dim_feedforward: features inside the feed-forward network.
    dropout: probability of dropping in training, in {places} places.
    activation: "relu", "gelu" or a function.
    layer_norm_eps: added to variances by the norms.
    batch_first: True if inputs are (N, L, E) rather than (L, N, E).
    norm_first: True if norms come before attention and feed-forward network rather than after.
    bias: True if projections and norms have one.
    dtype, device: dtype and device of the parameters.
    generator: draws first values and dropout; None: the default generator."""


class _TransformerLayer(Module):
    #: names of the attention modules, in the order of their norms
    _attentions: tuple[str, ...] = ()

    def __init_subclass__(cls) -> None:
        put_behind_first_line(cls, _ARGUMENTS.format(places="four" if len(cls._attentions) == 1 else "six"))

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
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        if isinstance(activation, str) and activation not in _ACTIVATIONS:
            raise ArgumentError(f"{type(self).__name__}(activation={activation!r}): expected 'relu', 'gelu' or a function")
        made: dict[str, Any] = {"dtype": dtype, "device": device, "generator": generator}
        for name in self._attentions:
            self.add_module(name, MultiHeadAttention(d_model, nhead, dropout, bias, batch_first=batch_first, **made))
        self.linear1: Linear = Linear(d_model, dim_feedforward, bias, **made)
        self.dropout: Dropout = Dropout(dropout, generator=generator)
        self.linear2: Linear = Linear(dim_feedforward, d_model, bias, **made)
        self.norm_first = norm_first
        for i in range(1, len(self._attentions) + 2):
            self.add_module(f"norm{i}", LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype, device=device))
        for i in range(1, len(self._attentions) + 2):
            self.add_module(f"dropout{i}", Dropout(dropout, generator=generator))
        self.activation: Callable[[Any], Tensor] = _ACTIVATIONS[activation] if isinstance(activation, str) else activation

    def _blocks(self, x: Tensor, blocks: Sequence[Callable[[Tensor], Tensor]]) -> Tensor:
        """Each block with its residual connection and norm."""
        for i, block in enumerate(blocks, 1):
            norm: Any = getattr(self, f"norm{i}")
            x = x + block(norm(x)) if self.norm_first else norm(x + block(x))
        return x

    def _attend(self, number: int, x: Tensor, other: Tensor | None, mask: Any, padding: Any, is_causal: bool) -> Tensor:
        """Attention of `x` to `other`, or to itself, and dropout."""
        attention: Any = getattr(self, self._attentions[number - 1])
        drop: Any = getattr(self, f"dropout{number}")
        seen = x if other is None else other
        return drop(attention(x, seen, seen, padding, False, attn_mask=mask, is_causal=is_causal)[0])  # type: ignore[no-any-return]

    def _feed(self, x: Tensor) -> Tensor:
        drop: Any = getattr(self, f"dropout{len(self._attentions) + 1}")
        return drop(self.linear2(self.dropout(self.activation(self.linear1(x)))))  # type: ignore[no-any-return]


class TransformerEncoderLayer(_TransformerLayer):
    """One layer of a transformer encoder: self-attention and a feed-forward network.

    >>> ag.nn.TransformerEncoderLayer(8, nhead=2, batch_first=True)(ag.ones(1, 5, 8)).shape
    (1, 5, 8)
    """

    _attentions = ("self_attn",)

    def forward(self, src: Tensor, src_mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool = False) -> Tensor:
        """One layer; masks as in `MultiHeadAttention`.

        Args:
            src: (L, N, E), or (N, L, E) with `batch_first`.
            src_mask: True, or minus infinity, where attention is left out; or None.
            src_key_padding_mask: True where a position is left out, (N, L); or None.
            is_causal: each position sees itself and those before it.

        Returns:
            A Tensor of the shape of `src`.
        """
        return self._blocks(src, [lambda x: self._attend(1, x, None, src_mask, src_key_padding_mask, is_causal), self._feed])


class TransformerDecoderLayer(_TransformerLayer):
    """One layer of a transformer decoder: self-attention, attention to an encoder's result, and a feed-forward network.

    >>> layer = ag.nn.TransformerDecoderLayer(8, nhead=2, batch_first=True)
    >>> layer(ag.ones(1, 3, 8), ag.ones(1, 5, 8)).shape
    (1, 3, 8)
    """

    _attentions = ("self_attn", "multihead_attn")

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool = False,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """One layer; masks as in `MultiHeadAttention`, of attention to itself (``tgt_...``) and to `memory`.

        Args:
            tgt: (T, N, E), or (N, T, E) with `batch_first`.
            memory: the encoder's output, laid out as `tgt`.
            tgt_mask, memory_mask: True, or minus infinity, where attention is left out; or None.
            tgt_key_padding_mask, memory_key_padding_mask: True where a position is left out; or None.
            tgt_is_causal, memory_is_causal: each position sees itself and those before it.

        Returns:
            A Tensor of the shape of `tgt`.
        """
        return self._blocks(
            tgt,
            [
                lambda x: self._attend(1, x, None, tgt_mask, tgt_key_padding_mask, tgt_is_causal),
                lambda x: self._attend(2, x, memory, memory_mask, memory_key_padding_mask, memory_is_causal),
                self._feed,
            ],
        )


class _TransformerStack(Module):
    norm: Module | None

    def __init__(self, layer: Module, num_layers: int, norm: Module | None = None) -> None:
        if num_layers < 1:
            raise ArgumentError(f"{type(self).__name__}(num_layers={num_layers}): expected at least 1")
        # generators are shared: copies of one would drop the same places in every layer
        drawing = {id(each): each for module in layer.modules() if (each := getattr(module, "generator", None)) is not None}
        self.layers: ModuleList = ModuleList([copy.deepcopy(layer, dict(drawing)) for _ in range(num_layers)])
        self.num_layers = num_layers
        self.norm = norm

    def _through(self, x: Tensor, *given: Any) -> Tensor:
        for layer in self.layers:
            x = layer(x, *given)
        return x if self.norm is None else self.norm(x)


class TransformerEncoder(_TransformerStack):
    """Layers of an encoder, one after the other.

    Args:
        encoder_layer: is copied, values of parameters included.
        num_layers: how many copies.
        norm: a module for the end, or None.

    >>> encoder = ag.nn.TransformerEncoder(ag.nn.TransformerEncoderLayer(8, nhead=2), num_layers=3)
    >>> encoder(ag.ones(5, 1, 8)).shape
    (5, 1, 8)
    >>> len(encoder.layers)
    3
    """

    def __init__(self, encoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(encoder_layer, num_layers, norm)

    def forward(self, src: Tensor, mask: Any = None, src_key_padding_mask: Any = None, is_causal: bool | None = None) -> Tensor:
        """All layers; masks as in `MultiHeadAttention`.

        Args:
            src: (L, N, E), or (N, L, E) where the layers have `batch_first`.
            mask: True, or minus infinity, where attention is left out; or None.
            src_key_padding_mask: True where a position is left out, (N, L); or None.
            is_causal: each position sees itself and those before it.

        Returns:
            A Tensor of the shape of `src`.
        """
        return self._through(src, mask, src_key_padding_mask, bool(is_causal))


class TransformerDecoder(_TransformerStack):
    """Layers of a decoder, one after the other.

    Args:
        decoder_layer: is copied, values of parameters included.
        num_layers: how many copies.
        norm: a module for the end, or None.

    >>> decoder = ag.nn.TransformerDecoder(ag.nn.TransformerDecoderLayer(8, nhead=2), num_layers=3)
    >>> decoder(ag.ones(3, 1, 8), ag.ones(5, 1, 8)).shape
    (3, 1, 8)
    """

    def __init__(self, decoder_layer: Module, num_layers: int, norm: Module | None = None) -> None:
        super().__init__(decoder_layer, num_layers, norm)

    def forward(
        self,
        tgt: Tensor,
        memory: Tensor,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """All layers; masks as in `TransformerDecoderLayer`.

        Args:
            tgt: (T, N, E), or (N, T, E) where the layers have `batch_first`.
            memory: the encoder's output, laid out as `tgt`.
            tgt_mask, memory_mask: True, or minus infinity, where attention is left out; or None.
            tgt_key_padding_mask, memory_key_padding_mask: True where a position is left out; or None.
            tgt_is_causal, memory_is_causal: each position sees itself and those before it.

        Returns:
            A Tensor of the shape of `tgt`.
        """
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return self._through(tgt, memory, *masks, bool(tgt_is_causal), memory_is_causal)


class Transformer(Module):
    """An encoder and a decoder that attends to the encoder's result.

    Args:
        d_model: features.
        nhead: heads of attention; divides `d_model`.
        num_encoder_layers, num_decoder_layers: how many layers each has.
        dim_feedforward: features inside the feed-forward networks.
        dropout: probability of dropping in training.
        activation: "relu", "gelu" or a function.
        custom_encoder, custom_decoder: modules in the place of encoder and decoder; None: PyTorch's, with a norm at the end.
        layer_norm_eps: of the norms.
        batch_first: True if inputs are (N, L, E) rather than (L, N, E).
        norm_first: True if norms come before each part rather than after.
        bias: True if projections and norms have one.
        dtype, device: of the parameters.
        generator: draws first values (matrices by Xavier) and dropout; None: the default generator.

    Raises:
        ArgumentError: features that do not divide, or another `activation`.

    >>> model = ag.nn.Transformer(8, nhead=2, num_encoder_layers=1, num_decoder_layers=1, batch_first=True)
    >>> model(ag.ones(1, 5, 8), ag.ones(1, 3, 8)).shape
    (1, 3, 8)
    """

    def __init__(
        self,
        d_model: int = 512,
        nhead: int = 8,
        num_encoder_layers: int = 6,
        num_decoder_layers: int = 6,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Any], Tensor] = "relu",
        custom_encoder: Module | None = None,
        custom_decoder: Module | None = None,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: str | None = None,
        dtype: Any = None,
        *,
        generator: Generator | None = None,
    ) -> None:
        settings: Any = (d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype)

        def norm() -> LayerNorm:
            return LayerNorm(d_model, layer_norm_eps, bias=bias, dtype=dtype, device=device)

        self.encoder: Module = custom_encoder or TransformerEncoder(
            TransformerEncoderLayer(*settings, generator=generator), num_encoder_layers, norm()
        )
        self.decoder: Module = custom_decoder or TransformerDecoder(
            TransformerDecoderLayer(*settings, generator=generator), num_decoder_layers, norm()
        )
        self.d_model = d_model
        self.nhead = nhead
        self.batch_first = batch_first
        for parameter in self.parameters():
            if parameter.ndim > 1:
                init.xavier_uniform_(parameter, generator=generator)

    def forward(
        self,
        src: Tensor,
        tgt: Tensor,
        src_mask: Any = None,
        tgt_mask: Any = None,
        memory_mask: Any = None,
        src_key_padding_mask: Any = None,
        tgt_key_padding_mask: Any = None,
        memory_key_padding_mask: Any = None,
        src_is_causal: bool | None = None,
        tgt_is_causal: bool | None = None,
        memory_is_causal: bool = False,
    ) -> Tensor:
        """Encode one sequence and decode another; masks as in `MultiHeadAttention`.

        Args:
            src: (S, N, E), or (N, S, E) with `batch_first`.
            tgt: (T, N, E), or (N, T, E).
            src_mask, tgt_mask, memory_mask: True, or minus infinity, where attention is left out; or None.
            src_key_padding_mask, tgt_key_padding_mask, memory_key_padding_mask: True where a position is left out; or None.
            src_is_causal, tgt_is_causal, memory_is_causal: each position sees itself and those before it.

        Returns:
            A Tensor of the shape of `tgt`.
        """
        memory = self.encoder(src, src_mask, src_key_padding_mask, src_is_causal)
        masks = (tgt_mask, memory_mask, tgt_key_padding_mask, memory_key_padding_mask)
        return self.decoder(tgt, memory, *masks, tgt_is_causal, memory_is_causal)  # type: ignore[no-any-return]

    @staticmethod
    def generate_square_subsequent_mask(sz: int, device: str | None = None, dtype: Any = None) -> Tensor:
        """The mask by which each position sees itself and those before it.

        Args:
            sz: how many positions.
            device, dtype: of the mask.

        Returns:
            (sz, sz), minus infinity above the diagonal and 0 elsewhere.
        """
        return triu(full((sz, sz), -math.inf, dtype=dtype, device=device), 1)
