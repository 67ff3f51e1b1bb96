"""Layers, activations and losses as functions, with PyTorch's names and signatures.

Arguments that PyTorch calls ``dim`` may be called ``axis`` as well. CTC, sparse layers and quantization are left out:
a wrapped PyTorch module or a library serves there. There is no ``inplace``: an in-place version would save no memory here,
since gradients need the values. Everything takes Tensors, arrays and numbers and returns Tensors.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.nn.functional.activations import (
    celu,
    elu,
    gelu,
    glu,
    leaky_relu,
    log_softmax,
    logit,
    logsigmoid,
    mish,
    relu,
    selu,
    sigmoid,
    silu,
    softmax,
    softmin,
    softplus,
    softsign,
    tanh,
    tanhshrink,
)
from aiograd.nn.functional.attentions import dropout, dropout1d, dropout2d, dropout3d, scaled_dot_product_attention
from aiograd.nn.functional.convolutions import conv1d, conv_transpose1d, conv_transpose2d
from aiograd.nn.functional.losses import (
    binary_cross_entropy,
    binary_cross_entropy_with_logits,
    cross_entropy,
    huber_loss,
    kl_div,
    l1_loss,
    mse_loss,
    nll_loss,
    pairwise_distance,
    smooth_l1_loss,
    triplet_margin_loss,
)
from aiograd.nn.functional.maps import conv2d, embedding, linear, one_hot, pad
from aiograd.nn.functional.normalizations import batch_norm, cosine_similarity, group_norm, instance_norm, layer_norm, normalize, rms_norm
from aiograd.nn.functional.piecewise import hardshrink, hardsigmoid, hardswish, hardtanh, prelu, relu6, softshrink, threshold
from aiograd.nn.functional.pooling import adaptive_avg_pool1d, adaptive_avg_pool2d, avg_pool1d, avg_pool2d, max_pool1d, max_pool2d, max_unpool2d
from aiograd.nn.functional.resampling import interpolate
from aiograd.nn.functional.volumes import avg_pool3d, conv3d, conv_transpose3d, max_pool3d
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = [
    "relu", "gelu", "silu", "elu", "leaky_relu", "softplus", "softsign", "sigmoid", "logsigmoid", "tanh", "softmax", "log_softmax",
    "softmin", "selu", "celu", "mish", "glu", "logit", "tanhshrink", "hardtanh", "relu6", "hardsigmoid", "hardswish", "hardshrink", "softshrink",
    "threshold", "prelu",
    "dropout", "dropout1d", "dropout2d", "dropout3d", "scaled_dot_product_attention",
    "binary_cross_entropy", "binary_cross_entropy_with_logits", "cross_entropy", "huber_loss", "kl_div", "l1_loss", "mse_loss", "nll_loss",
    "smooth_l1_loss", "triplet_margin_loss", "pairwise_distance",
    "linear", "embedding", "one_hot", "conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "pad", "interpolate",
    "max_pool1d", "max_pool2d", "max_pool3d", "max_unpool2d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d", "adaptive_avg_pool2d",
    "layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "cosine_similarity",
]  # fmt: skip
