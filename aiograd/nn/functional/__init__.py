"""Layers, activations and losses as functions, with PyTorch's names and signatures.

Arguments that PyTorch calls ``dim`` may be called ``axis`` as well. There is no ``inplace``: an in-place version would save no memory here,
since gradients need the values. Everything takes Tensors, arrays and numbers and returns Tensors.
"""

from __future__ import annotations

from aiograd.nn.functional.activations import (
    elu,
    gelu,
    leaky_relu,
    log_softmax,
    logsigmoid,
    relu,
    sigmoid,
    silu,
    softmax,
    softplus,
    softsign,
    tanh,
)
from aiograd.nn.functional.attentions import (
    dropout,
    scaled_dot_product_attention,
)
from aiograd.nn.functional.losses import (
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    smooth_l1_loss,
)
from aiograd.nn.functional.maps import (
    avg_pool2d,
    conv2d,
    embedding,
    linear,
    max_pool2d,
    one_hot,
    pad,
)
from aiograd.nn.functional.normalizations import (
    batch_norm,
    cosine_similarity,
    group_norm,
    layer_norm,
    normalize,
    rms_norm,
)

__all__ = [
    "relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "softsign", "sigmoid", "logsigmoid", "tanh", "softmax", "log_softmax",
    "dropout", "scaled_dot_product_attention",
    "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss", "smooth_l1_loss",
    "linear", "embedding", "one_hot", "conv2d", "max_pool2d", "avg_pool2d", "pad",
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "normalize", "cosine_similarity",
]  # fmt: skip
