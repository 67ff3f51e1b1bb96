"""The service of the worker processes that ``test_torch_workers.py`` starts."""

from __future__ import annotations

from typing import Any

import torch

import aiograd as ag
from aiograd import distributed as dist

service = dist.Service()


def module() -> Any:
    """A torch module with dropout, whose masks come with the seed of each call."""
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 16), torch.nn.Dropout(0.25), torch.nn.Tanh(), torch.nn.Linear(16, 4))


@service.reference
class Served(ag.nn.Module):
    """A wrapped torch module and its optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = ag.interop.torch.wrap(module())
        self._optimizer = torch.optim.SGD(self.layers.module.parameters(), lr=0.1)

    def forward(self, x: Any, seed: int) -> Any:
        """Outputs, with the masks of a seed."""
        torch.manual_seed(seed)
        return self.layers(x)

    async def learn(self) -> None:
        """Step with the gradients of the running context, by torch."""
        context = dist.current_context()
        assert context is not None
        for parameter in self.parameters():
            ag.interop.torch.to_torch(parameter).grad = ag.interop.torch.to_torch(context.grads[parameter])
        self._optimizer.step()
        self._optimizer.zero_grad()
