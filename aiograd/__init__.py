"""Autograd for async Python: a tensor library on numpy whose backward pass is awaited.

::

    import aiograd as ag

    async def main():
        x = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
        y = (x * x).sum()
        await y.backward()
        print(x.grad)

    ag.run(main())
"""

from __future__ import annotations

__version__ = "0.1.0"

from aiograd import errors as errors
from aiograd import graph as graph
from aiograd.devices import device as device
from aiograd.engine.graph_task import GraphTask as GraphTask
from aiograd.engine.run import Engine as Engine
from aiograd.engine.run import aclose_default_engine as aclose_default_engine
from aiograd.engine.run import current_engine as current_engine
from aiograd.engine.run import run as run
from aiograd.function import Function as Function
from aiograd.function import once_differentiable as once_differentiable
from aiograd.modes import detect_anomaly as detect_anomaly
from aiograd.modes import enable_grad as enable_grad
from aiograd.modes import get_default_dtype as get_default_dtype
from aiograd.modes import is_grad_enabled as is_grad_enabled
from aiograd.modes import no_grad as no_grad
from aiograd.modes import set_default_dtype as set_default_dtype
from aiograd.modes import set_grad_enabled as set_grad_enabled
from aiograd.tensors.passes import backward as backward
from aiograd.tensors.passes import grad as grad
from aiograd.tensors.tensor import Tensor as Tensor
from aiograd.tensors.tensor import asarray as asarray
from aiograd.tensors.tensor import from_dlpack as from_dlpack
from aiograd.tensors.tensor import from_numpy as from_numpy
from aiograd.tensors.tensor import tensor as tensor
