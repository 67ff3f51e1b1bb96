"""Replicas on a simulated network, in virtual time."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.data_parallel.coordinator import ReplicaCoordinator
from tests.distributed.data_parallel.models import Net, bits, module_of, serial, service
from tests.distributed.training_world import TrainingWorld
from tests.support import run_by

OPTIONS: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05}}


class World(TrainingWorld):
    """A driver with replicas on workers of a simulated network.

    Args:
        names: of the workers; the first `replicas` of them have one.
        replicas: None: all.
        module, arguments: of the replicas.
        seed: of the network.
        options: of `DataParallel.create`.
    """

    def __init__(
        self,
        names: Sequence[str] = ("w0", "w1", "w2"),
        replicas: int | None = None,
        *,
        module: Any = Net,
        arguments: Sequence[Any] = (),
        seed: int = 1,
        **options: Any,
    ) -> None:
        super().__init__(names, replicas, module, seed, {**OPTIONS, **options})
        self.arguments = arguments
        self.replicas: dist.DataParallel

    @property
    def coordinator(self) -> ReplicaCoordinator:
        return self.replicas._coordinator

    def peers(self, name: str) -> list[str]:
        return [other for other in ("driver", *self.names) if other != name]

    def service(self, name: str) -> dist.Service:
        return service

    async def drive(self, main: Callable[[World], Awaitable[Any]]) -> Any:
        ag.seed(0)  # for the random numbers of steps
        async with self.worker("driver") as self.driver:
            async with await dist.DataParallel.create(self.driver, self.first, self.module, *self.arguments, **self.options) as self.replicas:
                return await main(self)

    # ---------------------------------------------------------------- what is there

    host = TrainingWorld.member

    def state(self, name: str) -> dict[str, bytes]:
        """The bits of a replica."""
        module = module_of(self.host(name))
        assert all(parameter.grad is None for parameter in module.parameters())
        return bits(module.state_dict())

    @property
    def states(self) -> list[dict[str, bytes]]:
        return [self.state(name) for name in self.replicas.names]


def in_world(*names: Any, **options: Any) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """A decorator of tests that run on the driver of such a world; each gets it first."""
    return run_by(lambda main: World(*names, **options).simulate(main))


async def expected(history: Sequence[Any], module: Any = Net, **options: Any) -> dict[str, bytes]:
    """The bits of one process that has taken these steps."""
    return (await whole(history, module=module, **options))[0]


async def whole(given: Any, cls: Any = ag.optim.AdamW, options: Any = None, module: Any = Net, **more: Any) -> tuple[dict[str, bytes], Any]:
    """Weights and state of one process that has taken these steps."""
    alone = module()
    optimizer = cls(alone.parameters(), **(options or {"lr": 0.05}))
    await serial(alone, optimizer, given, **more)
    return bits(alone.state_dict()), optimizer.state_dict()
