"""RayPlacement: where Ray puts the workers of a cluster, and why it cannot."""

from __future__ import annotations

import asyncio
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from aiograd.errors import ArgumentError, ClusterError

STRATEGIES = ("SPREAD", "STRICT_SPREAD", "PACK", "STRICT_PACK")
#: seconds until all workers have been placed
PLACE_SECONDS = 30.0
#: the same if no present node has the resources that a worker needs
HOPELESS_SECONDS = 5.0


class RayPlacement:
    """Places for workers: bundles of placement groups.

    A worker that Ray makes again, or that is restarted, keeps its place. One that is removed leaves it to the next, since a placement group does
    not shrink.

    Args:
        ray: the module, connected.
        label: the prefix of the names of placement groups.
        bundle: the resources of each worker, see `bundle_of`.
        strategy: one of `STRATEGIES`.
        timeout: seconds until workers have to be placed; None: `PLACE_SECONDS`, or `HOPELESS_SECONDS` where the nodes could not hold them if idle.
    """

    def __init__(self, ray: Any, label: str, bundle: Mapping[str, float], strategy: str, timeout: float | None) -> None:
        self._ray = ray
        self._label = label
        self._bundle = dict(bundle)
        self._strategy = strategy
        self._timeout = PLACE_SECONDS if timeout is None else timeout
        self._hopeless_timeout = HOPELESS_SECONDS if timeout is None else timeout
        self._groups: list[Any] = []
        #: group and number of the bundle
        self._places: dict[str, tuple[Any, int]] = {}
        self._free: list[tuple[Any, int]] = []

    async def reserve(self, names: Sequence[str]) -> None:
        """Give each of these workers a place: a free one, or one in a new placement group. Cancelled, none has one.

        Raises:
            ClusterError: Ray has no room for them in time; the message names the missing resources.
        """
        missing = len(names) - len(self._free)
        if missing > 0:
            group = await self._new_group(missing)
            self._groups.append(group)
            self._free += [(group, i) for i in range(missing)]
        for name in names:
            self._places[name] = self._free.pop(0)

    def release(self, name: str) -> None:
        """A worker needs its place no more."""
        place = self._places.pop(name, None)
        if place is not None:
            self._free.append(place)

    def strategy_of(self, name: str) -> Any:
        """The option ``scheduling_strategy`` of the actor of this worker."""
        group, index = self._places[name]
        return self._ray.util.scheduling_strategies.PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)

    def close(self) -> None:
        """Give all places back to Ray."""
        for group in self._groups:
            self._ray.util.remove_placement_group(group)
        self._groups, self._free, self._places = [], [], {}

    async def _new_group(self, count: int) -> Any:
        util = self._ray.util
        group = util.placement_group([self._bundle] * count, strategy=self._strategy, name=f"{self._label}-{secrets.token_hex(2)}")
        try:
            left = self._timeout if self._could_hold(count) else self._hopeless_timeout
            while not await asyncio.to_thread(group.wait, min(left, 1.0)):
                left -= 1.0
                if left <= 0:
                    raise ClusterError(
                        f"RayCluster: {count} worker(s) of {_spelt(self._bundle)} each (strategy {self._strategy}) were not placed in time: "
                        f"{self._missing(count)}. Ask for less, add nodes, or raise start_timeout where nodes come on demand."
                    )
        except BaseException:
            util.remove_placement_group(group)
            raise
        return group

    def _nodes(self) -> list[dict[str, float]]:
        """Resources of each node, used or not."""
        return [node["Resources"] for node in self._ray.nodes() if node["Alive"]]

    def _could_hold(self, count: int) -> bool:
        """True if the nodes that are there would have room for `count` workers if they were idle."""
        room = [min(math.floor(round(node.get(name, 0.0) / amount, 6)) for name, amount in self._bundle.items()) for node in self._nodes()]
        if self._strategy == "STRICT_PACK":
            return max(room, default=0) >= count
        return sum(min(n, 1) if self._strategy == "STRICT_SPREAD" else n for n in room) >= count

    def _missing(self, count: int) -> str:
        """Why Ray has no room."""
        ray, nodes = self._ray, self._nodes()
        lacking = [name for name, amount in self._bundle.items() if not any(node.get(name, 0.0) >= amount for node in nodes)]
        if lacking:
            return f"no node has {_spelt({name: self._bundle[name] for name in lacking})}"
        free = ray.available_resources()
        short = {name: free.get(name, 0.0) for name, amount in self._bundle.items() if free.get(name, 0.0) < amount * count}
        if not short:
            return f"{len(nodes)} node(s) cannot hold them in this way"
        return f"{len(nodes)} node(s) together have only {_spelt(short)} free"


def bundle_of(resources: Mapping[str, Any]) -> dict[str, float]:
    """Resources of a worker, as Ray's options say them, as a bundle of a placement group.

    Raises:
        ArgumentError: Ray has no such option, or the amount makes no sense.
    """
    names = {"num_cpus": "CPU", "num_gpus": "GPU", "memory": "memory"}
    own = resources.get("resources") or {}
    unknown = [name for name in resources if name not in names and name != "resources"]
    amounts = {**{names[name]: amount for name, amount in resources.items() if name in names}, **own}
    if unknown:
        raise ArgumentError(
            f"RayCluster(resources=...): Ray has no {unknown[0]!r}; expected {', '.join(names)}, and resources={{name: amount}} of your own"
        )
    for name, amount in amounts.items():
        if not isinstance(amount, (int, float)) or not 0 <= amount < float("inf"):
            raise ArgumentError(f"RayCluster(resources=...): {name}={amount!r}; expected a number of at least 0")
    bundle = {name: float(amount) for name, amount in amounts.items() if amount}
    return bundle or {"CPU": 0.001}  # a bundle of nothing is refused


def _spelt(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())
