"""The rows that networks need, by family; importing this module adds them to the table.

Each family has its file. The plain rules are the reference: they serve higher orders and other devices, and the compiled kernels of
`aiograd.kernels`, attached as `Fused`, must agree with them.
"""

from __future__ import annotations

from aiograd.ops.nn_attention import scaled_dot_product_attention
from aiograd.ops.nn_binary_loss import binary_cross_entropy
from aiograd.ops.nn_convolution import col2im, conv2d, conv2d_input_grad, conv2d_weight_grad, im2col
from aiograd.ops.nn_embedding import embedding, embedding_grad
from aiograd.ops.nn_gru import gru, gru_cell, rnn
from aiograd.ops.nn_linear import linear
from aiograd.ops.nn_loss import binary_cross_entropy_with_logits, cross_entropy, huber_loss, mse_loss, nll_loss, smooth_l1_loss
from aiograd.ops.nn_normalization import batch_norm, group_norm, layer_norm, rms_norm
from aiograd.ops.nn_pooling import avg_pool2d, avg_pool2d_input_grad, max_pool2d, max_pool2d_gather, max_pool2d_input_grad
from aiograd.ops.nn_recurrent import lstm, lstm_cell
from aiograd.ops.nn_softmax import log_softmax, safe_softmax, softmax

__all__ = [
    "avg_pool2d", "avg_pool2d_input_grad", "batch_norm", "binary_cross_entropy", "binary_cross_entropy_with_logits", "col2im", "conv2d",
    "conv2d_input_grad", "conv2d_weight_grad", "cross_entropy", "embedding", "embedding_grad", "group_norm", "gru", "gru_cell", "huber_loss",
    "im2col", "layer_norm", "linear", "log_softmax", "lstm", "lstm_cell", "max_pool2d", "max_pool2d_gather", "max_pool2d_input_grad", "mse_loss",
    "nll_loss", "rms_norm", "rnn", "safe_softmax", "scaled_dot_product_attention", "smooth_l1_loss", "softmax",
]  # fmt: skip
