"""PyTorch models as nodes of an aiograd graph.

`wrap` makes an `ag.nn.Module` of a torch module: called with Tensors it runs the module and records one node. `to_torch` and `from_torch` give the
tensor of the other library over the same memory. Needs the extra ``torch``: ``pip install 'aiograd[torch]'``.
"""

from __future__ import annotations

from aiograd.interop.torch.conversion import from_torch as from_torch
from aiograd.interop.torch.conversion import to_torch as to_torch
from aiograd.interop.torch.module import TorchModule as TorchModule
from aiograd.interop.torch.module import wrap as wrap
