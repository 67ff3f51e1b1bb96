"""Networks: modules, layers, losses, initialisation. Names, signatures and weight layouts are PyTorch's.

Left out, because a wrapped PyTorch module or a library serves: three-dimensional convolutions, CTC, sparse layers, quantization, vision and audio
transforms, data sets, pretrained weights.

Read `module` first; layers are short classes around `functional`. ``aiograd.optim`` trains them, ``aiograd.save`` keeps them.
"""

from __future__ import annotations

from aiograd.nn import functional as functional
from aiograd.nn import init as init
from aiograd.nn import utils as utils
from aiograd.nn.activation import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softmin,
    Softplus,
    Softsign,
    Tanh,
    Tanhshrink,
)
from aiograd.nn.attention import MultiHeadAttention
from aiograd.nn.containers import ModuleDict, ModuleList, Sequential
from aiograd.nn.convolution import Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d
from aiograd.nn.dropout import Dropout
from aiograd.nn.embedding import Embedding
from aiograd.nn.linear import Flatten, Identity, Linear, Unflatten
from aiograd.nn.loading import IncompatibleKeys
from aiograd.nn.loss import BCELoss, BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, KLDivLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from aiograd.nn.module import Module
from aiograd.nn.normalization import BatchNorm1d, BatchNorm2d, GroupNorm, InstanceNorm1d, InstanceNorm2d, LayerNorm, RMSNorm
from aiograd.nn.parameter import Parameter
from aiograd.nn.parameter_containers import ParameterDict, ParameterList
from aiograd.nn.piecewise import Hardshrink, Hardsigmoid, Hardswish, Hardtanh, PReLU, ReLU6, Softshrink, Threshold
from aiograd.nn.pooling import AdaptiveAvgPool1d, AdaptiveAvgPool2d, AvgPool1d, AvgPool2d, MaxPool1d, MaxPool2d, Upsample
from aiograd.nn.recurrent import GRU, LSTM, RNN
from aiograd.nn.recurrent_cells import GRUCell, LSTMCell, RNNCell
from aiograd.nn.stateless import functional_call
from aiograd.nn.summary import summary
from aiograd.nn.transformer import TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer

MultiheadAttention = MultiHeadAttention  # PyTorch's spelling

__all__ = [
    "functional", "init", "utils", "functional_call", "summary",
    "Module", "Parameter", "IncompatibleKeys", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "Linear", "Identity", "Flatten", "Unflatten", "Embedding", "Conv1d", "Conv2d", "ConvTranspose1d", "ConvTranspose2d",
    "MaxPool1d", "MaxPool2d", "AvgPool1d", "AvgPool2d", "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "Upsample",
    "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "InstanceNorm1d", "InstanceNorm2d", "Dropout",
    "ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Softplus", "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "Softmin", "GLU", "SELU", "CELU", "Mish",
    "Tanhshrink", "Softsign", "LogSigmoid", "ReLU6", "Hardtanh", "Hardsigmoid", "Hardswish", "Hardshrink", "Softshrink", "Threshold", "PReLU",
    "MultiHeadAttention", "MultiheadAttention", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell",
    "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer", "TransformerDecoder",
    "CrossEntropyLoss", "NLLLoss", "MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "BCELoss", "BCEWithLogitsLoss", "KLDivLoss",
]  # fmt: skip
