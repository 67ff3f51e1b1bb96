"""Networks: modules, layers, losses, initialisation. Names, signatures and weight layouts are PyTorch's.

Left out, because a wrapped PyTorch module or a library serves: CTC, sparse layers, quantization, vision and audio
transforms, data sets, pretrained weights.

Read `module` first; layers are short classes around `functional`. ``aiograd.optim`` trains them, ``aiograd.save`` keeps them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.nn import functional as functional
from aiograd.nn import init as init
from aiograd.nn import utils as utils
from aiograd.nn.activation import (
    CELU,
    ELU,
    GELU,
    GLU,
    SELU,
    Hardshrink,
    Hardsigmoid,
    Hardswish,
    Hardtanh,
    LeakyReLU,
    LogSigmoid,
    LogSoftmax,
    Mish,
    PReLU,
    ReLU,
    ReLU6,
    Sigmoid,
    SiLU,
    Softmax,
    Softmin,
    Softplus,
    Softshrink,
    Softsign,
    Tanh,
    Tanhshrink,
    Threshold,
)  # fmt: skip
from aiograd.nn.attention import MultiHeadAttention
from aiograd.nn.containers import ModuleDict, ModuleList, Sequential
from aiograd.nn.convolution import Conv1d, Conv2d, Conv3d, ConvTranspose1d, ConvTranspose2d, ConvTranspose3d
from aiograd.nn.dropout import Dropout, Dropout1d, Dropout2d, Dropout3d
from aiograd.nn.embedding import Embedding
from aiograd.nn.linear import Flatten, Identity, Linear, Unflatten
from aiograd.nn.loading import IncompatibleKeys
from aiograd.nn.loss import (
    BCELoss,
    BCEWithLogitsLoss,
    CrossEntropyLoss,
    HuberLoss,
    KLDivLoss,
    L1Loss,
    MSELoss,
    NLLLoss,
    SmoothL1Loss,
    TripletMarginLoss,
)
from aiograd.nn.module import Module
from aiograd.nn.normalization import (
    BatchNorm1d,
    BatchNorm2d,
    BatchNorm3d,
    GroupNorm,
    InstanceNorm1d,
    InstanceNorm2d,
    InstanceNorm3d,
    LayerNorm,
    RMSNorm,
)
from aiograd.nn.parameter import Parameter
from aiograd.nn.parameter_containers import ParameterDict, ParameterList
from aiograd.nn.pooling import (
    AdaptiveAvgPool1d,
    AdaptiveAvgPool2d,
    AvgPool1d,
    AvgPool2d,
    AvgPool3d,
    MaxPool1d,
    MaxPool2d,
    MaxPool3d,
    MaxUnpool2d,
    Upsample,
)
from aiograd.nn.recurrent import GRU, LSTM, RNN
from aiograd.nn.recurrent_cells import GRUCell, LSTMCell, RNNCell
from aiograd.nn.stateless import functional_call
from aiograd.nn.summary import summary
from aiograd.nn.transformer import Transformer, TransformerDecoder, TransformerDecoderLayer, TransformerEncoder, TransformerEncoderLayer
from aiograd.running.lazy import on_first_use

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

MultiheadAttention = MultiHeadAttention  # PyTorch's spelling

__all__ = [
    "functional", "init", "utils", "functional_call", "summary",
    "Module", "Parameter", "IncompatibleKeys", "Sequential", "ModuleList", "ModuleDict", "ParameterList", "ParameterDict",
    "Linear", "Identity", "Flatten", "Unflatten", "Embedding", "Conv1d", "Conv2d", "Conv3d", "ConvTranspose1d", "ConvTranspose2d",
    "ConvTranspose3d", "MaxPool1d", "MaxPool2d", "MaxPool3d", "MaxUnpool2d", "AvgPool1d", "AvgPool2d", "AvgPool3d",
    "AdaptiveAvgPool1d", "AdaptiveAvgPool2d", "Upsample",
    "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "BatchNorm3d", "InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d",
    "Dropout", "Dropout1d", "Dropout2d", "Dropout3d",
    "ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Softplus", "Tanh", "Sigmoid", "Softmax", "LogSoftmax", "Softmin", "GLU", "SELU", "CELU", "Mish",
    "Tanhshrink", "Softsign", "LogSigmoid", "ReLU6", "Hardtanh", "Hardsigmoid", "Hardswish", "Hardshrink", "Softshrink", "Threshold", "PReLU",
    "MultiHeadAttention", "MultiheadAttention", "LSTM", "GRU", "RNN", "LSTMCell", "GRUCell", "RNNCell",
    "TransformerEncoderLayer", "TransformerEncoder", "TransformerDecoderLayer", "TransformerDecoder", "Transformer",
    "CrossEntropyLoss", "NLLLoss", "MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "BCELoss", "BCEWithLogitsLoss", "KLDivLoss",
    "TripletMarginLoss",
]  # fmt: skip
