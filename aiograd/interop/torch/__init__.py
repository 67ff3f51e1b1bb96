"""PyTorch models as nodes of an aiograd graph.

`wrap` makes an `ag.nn.Module` of a torch module: called with Tensors it runs the module and records one node. `function` is the other way: it
makes a function on torch tensors of an aiograd function. `to_torch` and `from_torch` give the tensor of the other library over the same memory.
Needs the extra ``torch``: ``pip install 'aiograd[torch]'``.
"""

from __future__ import annotations

from aiograd.interop.torch.conversion import from_torch as from_torch
from aiograd.interop.torch.conversion import to_torch as to_torch
from aiograd.interop.torch.function import AiogradFunction as AiogradFunction
from aiograd.interop.torch.function import function as function
from aiograd.interop.torch.module import TorchModule as TorchModule
from aiograd.interop.torch.module import wrap as wrap
