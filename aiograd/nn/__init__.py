"""Networks: modules, layers, losses, initialisation. Names, signatures and weight layouts are PyTorch's.

Read `module` first; layers are short classes around `functional`. ``aiograd.optim`` trains them, ``aiograd.save`` keeps them.
"""

from __future__ import annotations

from aiograd.nn import functional as functional
from aiograd.nn import init as init
from aiograd.nn.activation import ELU, GELU, LeakyReLU, LogSoftmax, ReLU, Sigmoid, SiLU, Softmax, Softplus, Tanh
from aiograd.nn.attention import MultiHeadAttention
from aiograd.nn.containers import ModuleDict, ModuleList, Sequential
from aiograd.nn.convolution import AvgPool2d, Conv2d, MaxPool2d
from aiograd.nn.dropout import Dropout
from aiograd.nn.embedding import Embedding
from aiograd.nn.linear import Flatten, Identity, Linear
from aiograd.nn.loss import BCEWithLogitsLoss, CrossEntropyLoss, HuberLoss, L1Loss, MSELoss, NLLLoss, SmoothL1Loss
from aiograd.nn.module import IncompatibleKeys, Module
from aiograd.nn.normalization import BatchNorm1d, BatchNorm2d, GroupNorm, LayerNorm, RMSNorm
from aiograd.nn.parameter import Parameter
from aiograd.nn.recurrent import LSTM
from aiograd.nn.transformer import TransformerEncoderLayer

MultiheadAttention = MultiHeadAttention  # PyTorch's spelling

__all__ = [
    "functional", "init",
    "Module", "Parameter", "IncompatibleKeys", "Sequential", "ModuleList", "ModuleDict",
    "Linear", "Identity", "Flatten", "Embedding", "Conv2d", "MaxPool2d", "AvgPool2d",
    "LayerNorm", "RMSNorm", "GroupNorm", "BatchNorm1d", "BatchNorm2d", "Dropout",
    "ReLU", "GELU", "SiLU", "ELU", "LeakyReLU", "Softplus", "Tanh", "Sigmoid", "Softmax", "LogSoftmax",
    "MultiHeadAttention", "MultiheadAttention", "LSTM", "TransformerEncoderLayer",
    "CrossEntropyLoss", "NLLLoss", "MSELoss", "L1Loss", "HuberLoss", "SmoothL1Loss", "BCEWithLogitsLoss",
]  # fmt: skip
