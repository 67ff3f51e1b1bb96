"""A model in stages, as a service of workers: what a user would write, and a way to end at a commit."""

from __future__ import annotations

import asyncio
import hashlib
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist

service = dist.Service()
#: elements of an activation, rows of a microbatch
WIDTH, ROWS = 16, 4
#: virtual seconds that a stage computes for one microbatch
SECONDS = 0.1


def end_process(name: str) -> None:
    """End the process of a worker; whoever simulates it puts another function in this place."""
    raise NotImplementedError(name)


@service.reference
class Stage(ag.nn.Module):
    """One stage of one replica.

    Args:
        index: of the stage.
        is_last: True if it computes the loss.
    """

    def __init__(self, index: int, is_last: bool) -> None:
        self.inner = ag.nn.Linear(WIDTH, WIDTH)
        random = np.random.default_rng(index)
        weights = {name: (0.3 * random.standard_normal(value.shape)).astype(np.float32) for name, value in self.inner.state_dict().items()}
        self.inner.load_state_dict(weights)
        self.is_last = is_last

    async def forward(self, x: ag.Tensor, target: Any = None) -> ag.Tensor:
        """Compute for a while; with a target the loss."""
        await asyncio.sleep(SECONDS)
        y = ag.tanh(self.inner(x))
        return ((y - target) ** 2).mean() if self.is_last and target is not None else y

    async def digest(self) -> bytes:
        """A hash of the parameters."""
        values = b"".join(value.detach().numpy().tobytes() for value in self.inner.state_dict().values())
        return hashlib.blake2b(values, digest_size=16).digest()

    async def end_at_commit(self) -> bool:
        """Let this process end when it has committed its next gradients, before it can say so."""
        name = dist.current_worker().name
        self.inner.weight.register_post_accumulate_grad_hook(lambda _: end_process(name))
        return True
