"""Activation functions as modules. Where PyTorch's take ``inplace``, these refuse True: see `aiograd.nn.functional`."""

from __future__ import annotations

from typing import Any

from aiograd.nn import functional, init
from aiograd.nn.function_module import FunctionModule
from aiograd.nn.linear import new_parameter
from aiograd.nn.module import Module
from aiograd.nn.parameter import Parameter
from aiograd.tensors.tensor import Tensor


class ReLU(FunctionModule, function=functional.relu):
    """`relu` as a module.

    >>> ag.nn.ReLU()(ag.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    inplace: bool = False


class ReLU6(FunctionModule, function=functional.relu6):
    """`relu6` as a module.

    >>> ag.nn.ReLU6()(ag.tensor([-1.0, 2.0, 8.0]))
    tensor([0., 2., 6.])
    """

    inplace: bool = False


class GELU(FunctionModule, function=functional.gelu):
    """`gelu` as a module.

    >>> ag.nn.GELU("tanh")(ag.tensor([-1.0, 2.0]))
    tensor([-0.158808 ,  1.9545978])
    """

    approximate: str = "none"


class SiLU(FunctionModule, function=functional.silu):
    """`silu` as a module.

    >>> ag.nn.SiLU()(ag.tensor([-1.0, 2.0]))
    tensor([-0.2689414,  1.761594 ])
    """

    inplace: bool = False


class ELU(FunctionModule, function=functional.elu):
    """`elu` as a module.

    >>> ag.nn.ELU(alpha=0.5)(ag.tensor([-1.0, 2.0]))
    tensor([-0.31606027,  2.        ])
    """

    alpha: float = 1.0
    inplace: bool = False


class SELU(FunctionModule, function=functional.selu):
    """`selu` as a module.

    >>> ag.nn.SELU()(ag.tensor([-1.0, 2.0]))
    tensor([-1.1113307,  2.101402 ])
    """

    inplace: bool = False


class CELU(FunctionModule, function=functional.celu):
    """`celu` as a module.

    >>> ag.nn.CELU(alpha=2.0)(ag.tensor([-1.0, 2.0]))
    tensor([-0.78693867,  2.        ])
    """

    alpha: float = 1.0
    inplace: bool = False


class LeakyReLU(FunctionModule, function=functional.leaky_relu):
    """`leaky_relu` as a module.

    >>> ag.nn.LeakyReLU(0.1)(ag.tensor([-1.0, 2.0]))
    tensor([-0.1,  2. ])
    """

    negative_slope: float = 0.01
    inplace: bool = False


class Softplus(FunctionModule, function=functional.softplus):
    """`softplus` as a module.

    >>> ag.nn.Softplus()(ag.tensor([-1.0, 2.0]))
    tensor([0.31326163, 2.126928  ])
    """

    beta: float = 1.0
    threshold: float | None = None


class Softsign(FunctionModule, function=functional.softsign):
    """`softsign` as a module.

    >>> ag.nn.Softsign()(ag.tensor([-1.0, 3.0]))
    tensor([-0.5 ,  0.75])
    """


class Tanh(FunctionModule, function=functional.tanh):
    """`tanh` as a module.

    >>> ag.nn.Tanh()(ag.tensor([-1.0, 2.0]))
    tensor([-0.7615942,  0.9640276])
    """


class Tanhshrink(FunctionModule, function=functional.tanhshrink):
    """`tanhshrink` as a module.

    >>> ag.nn.Tanhshrink()(ag.tensor([-1.0, 2.0]))
    tensor([-0.23840582,  1.0359724 ])
    """


class Sigmoid(FunctionModule, function=functional.sigmoid):
    """`sigmoid` as a module.

    >>> ag.nn.Sigmoid()(ag.tensor([-1.0, 2.0]))
    tensor([0.2689414, 0.880797 ])
    """


class LogSigmoid(FunctionModule, function=functional.logsigmoid):
    """`logsigmoid` as a module.

    >>> ag.nn.LogSigmoid()(ag.tensor([-1.0, 2.0]))
    tensor([-1.3132616, -0.126928 ])
    """


class Hardsigmoid(FunctionModule, function=functional.hardsigmoid):
    """`hardsigmoid` as a module.

    >>> ag.nn.Hardsigmoid()(ag.tensor([-1.0, 2.0, 4.0]))
    tensor([0.3333333, 0.8333334, 1.       ])
    """

    inplace: bool = False


class Hardswish(FunctionModule, function=functional.hardswish):
    """`hardswish` as a module.

    >>> ag.nn.Hardswish()(ag.tensor([-1.0, 2.0, 4.0]))
    tensor([-0.3333333,  1.6666667,  4.       ])
    """

    inplace: bool = False


class Hardtanh(FunctionModule, function=functional.hardtanh):
    """`hardtanh` as a module.

    >>> ag.nn.Hardtanh(0.0, 0.5)(ag.tensor([-1.0, 0.2, 4.0]))
    tensor([0. , 0.2, 0.5])
    """

    min_val: float = -1.0
    max_val: float = 1.0
    inplace: bool = False


class Hardshrink(FunctionModule, function=functional.hardshrink):
    """`hardshrink` as a module.

    >>> ag.nn.Hardshrink()(ag.tensor([-1.0, 0.2, 4.0]))
    tensor([-1.,  0.,  4.])
    """

    lambd: float = 0.5


class Softshrink(FunctionModule, function=functional.softshrink):
    """`softshrink` as a module.

    >>> ag.nn.Softshrink()(ag.tensor([-1.0, 0.2, 4.0]))
    tensor([-0.5,  0. ,  3.5])
    """

    lambd: float = 0.5


class Threshold(FunctionModule, function=functional.threshold):
    """`threshold` as a module.

    >>> ag.nn.Threshold(1.0, 20.0)(ag.tensor([-1.0, 0.2, 4.0]))
    tensor([20., 20.,  4.])
    """

    threshold: float
    value: float
    inplace: bool = False


class Mish(FunctionModule, function=functional.mish):
    """`mish` as a module.

    >>> ag.nn.Mish()(ag.tensor([-1.0, 2.0]))
    tensor([-0.3034014,  1.9439589])
    """

    inplace: bool = False


class Softmax(FunctionModule, function=functional.softmax):
    """`softmax` as a module.

    >>> ag.nn.Softmax()(ag.tensor([0.0, 0.0, 1.0]))
    tensor([0.21194156, 0.21194156, 0.5761169 ])
    """

    dim: int = -1


class LogSoftmax(FunctionModule, function=functional.log_softmax):
    """`log_softmax` as a module.

    >>> ag.nn.LogSoftmax()(ag.tensor([0.0, 0.0, 1.0]))
    tensor([-1.5514446 , -1.5514446 , -0.55144465])
    """

    dim: int = -1


class Softmin(FunctionModule, function=functional.softmin):
    """`softmin` as a module.

    >>> ag.nn.Softmin()(ag.tensor([0.0, 0.0, 1.0]))
    tensor([0.42231882, 0.42231882, 0.1553624 ])
    """

    dim: int = -1


class GLU(FunctionModule, function=functional.glu):
    """`glu` as a module.

    >>> ag.nn.GLU()(ag.tensor([1.0, 2.0, 0.0, 4.0]))
    tensor([0.5      , 1.9640275])
    """

    dim: int = -1


class PReLU(Module):
    """`x` where positive, a learnt slope times `x` elsewhere.

    Args:
        num_parameters: 1, or the number of channels: one slope for each.
        init: the first slope.
        dtype, device: dtype and device of the slopes.

    Shape: (N, C, ...), or any with one slope.

    Source: He et al., Delving deep into rectifiers (2015).

    >>> ag.nn.PReLU()(ag.tensor([-1.0, 2.0])).detach()
    tensor([-0.25,  2.  ])
    """

    weight: Parameter

    def __init__(self, num_parameters: int = 1, init: float = 0.25, device: str | None = None, dtype: Any = None) -> None:
        self.num_parameters = num_parameters
        self.init = init
        self.weight = new_parameter((num_parameters,), dtype, device)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the first slopes again."""
        init.constant_(self.weight, self.init)

    def forward(self, input: Any) -> Tensor:
        return functional.prelu(input, self.weight)

    def extra_repr(self) -> str:
        return f"num_parameters={self.num_parameters}"
