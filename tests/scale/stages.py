"""A model in stages, as a service of workers: each worker has one stage of one replica, and shares its gradients with the same stage of the others.

All of it is what a user would write: a module that is exposed by reference, a group joined from inside of the workers, an optimizer of one's own.

Note [A step in two phases]
    `reduce` adds up the gradients of all replicas and keeps the sum; nothing has changed then, and it can be done again. `apply` takes the step
    with that sum. The driver asks for it once every worker has a sum; it is numbered, so that asking again changes nothing. A worker that is lost
    before has the step of the others wait until another one has taken its place; one that is lost after takes nothing with it that others have not.
"""

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
LEARNING_RATE, MOMENTUM = 0.05, 0.9


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
        self.optimizer = ag.optim.SGD(self.inner.parameters(), lr=LEARNING_RATE, momentum=MOMENTUM)
        #: the number of steps taken, and the sum of the gradients for the next one
        self.taken = 0
        self.total: list[Any] | None = None
        self.group: dist.Group | None = None

    async def forward(self, x: ag.Tensor, target: Any = None) -> ag.Tensor:
        """Compute for a while; with a target the loss."""
        await asyncio.sleep(SECONDS)
        y = ag.tanh(self.inner(x))
        return ((y - target) ** 2).mean() if self.is_last and target is not None else y

    async def join(self, names: list, group: str) -> bool:
        """Join the workers that have the same stage of other replicas, in the order of the replicas."""
        if self.group is not None:
            await self.group.aclose()
        self.total = None  # somebody else may not have it
        self.group = await dist.join_group(dist.current_worker(), names, name=group)
        return True

    async def reduce(self, step: int) -> bool:
        """Add up the gradients of all replicas; see Note [A step in two phases]."""
        if self.total is None and self.group is not None:
            gradients = [parameter.grad.numpy() for parameter in self.inner.parameters()]
            self.total = await self.group.all_reduce(gradients, "mean")
        return True

    async def apply(self, step: int) -> bool:
        """Take a step, unless it has been taken."""
        if self.taken == step - 1 and self.total is not None:
            for parameter, total in zip(self.inner.parameters(), self.total, strict=True):
                parameter.grad = ag.tensor(total)
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.taken, self.total = step, None
        return self.taken == step

    async def forget(self) -> bool:
        """Drop this replica's gradients of a step; a sum that was made of them stays: they will be the same again."""
        self.optimizer.zero_grad()
        return True

    async def copy(self, donor: dist.RemoteRef) -> bool:
        """Become what the same stage of another replica is."""
        self.taken, weights, momenta = await donor.call("state")
        self.inner.load_state_dict(dict(weights))
        state = self.optimizer.state_dict()
        state["state"] = {number: {"momentum_buffer": momentum} for number, momentum in enumerate(momenta)}
        self.optimizer.load_state_dict(state)
        return True

    async def state(self) -> tuple:
        """The number of steps, parameters, and the optimizer's momenta."""
        momenta = [each["momentum_buffer"] for each in self.optimizer.state_dict()["state"].values()]
        return self.taken, {name: value.detach() for name, value in self.inner.state_dict().items()}, momenta

    async def digest(self) -> bytes:
        """A hash of the parameters."""
        values = b"".join(value.detach().numpy().tobytes() for value in self.inner.state_dict().values())
        return hashlib.blake2b(values, digest_size=16).digest()
