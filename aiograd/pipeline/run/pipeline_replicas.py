"""PipelineReplicas: the part of a `Pipeline` that is about its replicas: which there are, and what became of lost workers."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from typing import Any

from aiograd.errors import ArgumentError, PipelineError
from aiograd.pipeline.run.coordinator import PipelineCoordinator
from aiograd.pipeline.run.stage_assignment import StageAssignment
from aiograd.pipeline.schedule.schedule import Schedule
from aiograd.pipeline.step.stage import numbered_stages


class PipelineReplicas:
    """The replicas of a `Pipeline`."""

    schedule: Schedule
    _coordinator: PipelineCoordinator
    _assignment: StageAssignment
    _turn: asyncio.Lock
    _made: int
    _closed: bool

    @property
    def stages(self) -> tuple[Any, ...]:
        """The stages, with replacements in the places of lost ones; of the first replica, where there are several."""
        return tuple(self._coordinator.stages[index].module for index in range(self._assignment.last_stage + 1))

    @property
    def replicas(self) -> tuple[tuple[Any, ...], ...]:
        """The stages of each replica, in the order in which gradients are added up; one, if they were not given as replicas."""
        if not self._coordinator.is_replicated:
            return (self.stages,)
        return tuple(tuple(each.stages[index].module for index in range(len(each.stages))) for each in self._coordinator.replicas)

    @property
    def absorbed(self) -> dict[tuple[int, int], tuple[str, ...]]:
        """With ``absorb=True``, for each (replica, stage) that is lost the names of the workers that compute it, in the order of replicas."""
        coordinator = self._coordinator
        if coordinator.lost is None or not coordinator.lost.remotes:
            return {}
        owners = {
            (number, stage): remote.owner
            for number, replica in enumerate(coordinator.replicas)
            for remote in coordinator.remotes if remote.replica is replica
            for stage in remote.stages
        }  # fmt: skip
        absorbed = coordinator.lost.plan(coordinator.replicas).absorbed
        return {(replica, stage): tuple(owners[taker, stage] for taker in takers) for (replica, stage), takers in absorbed.items()}

    def _open(self) -> PipelineCoordinator:
        if self._closed:
            raise PipelineError("this Pipeline has been closed; make a new one")
        return self._coordinator

    async def remove(self, name: str) -> None:
        """Go on without the replica that has a stage on a worker, which may be lost. The others keep their order.

        A step that is in doubt on that replica alone is settled by that: the others have taken it. Cancelled, the replica is removed all the
        same, but its workers may not know.

        Args:
            name: of the worker.

        Raises:
            ArgumentError: no replica has a stage there, or there is no other.

        >>> await pipe.remove("right")
        """
        async with self._turn:
            coordinator = self._open()
            lost = [] if coordinator.lost is None else coordinator.lost.remotes
            replica = next((each.replica for each in (*coordinator.remotes, *lost) if each.owner == name), None)
            if replica is None or not self._coordinator.is_replicated:
                raise ArgumentError(f"Pipeline.remove({name!r}): no replica has a stage on this worker")
            if len(self._coordinator.replicas) == 1:
                raise ArgumentError(f"Pipeline.remove({name!r}): it has a stage of the last replica; call aclose() to end")
            await self._coordinator.leave(replica)

    async def add(self, stages: Iterable[Any]) -> None:
        """Take in another replica, as the last. Its parameters, buffers and gradients become copies of the first one's.

        Of a replica that was removed since it had lost a worker, the other stages may be given again. The state of an optimizer is not this
        object's; see `DistributedOptimizer.add`. Cancelled or failed, the replicas are the same as before.

        Args:
            stages: modules on workers, as for a replica of the constructor.

        Raises:
            ArgumentError, ArgumentTypeError: the stages do not fit the others'. WorkerLostError: a worker cannot be reached.

        >>> await pipe.remove("right")
        >>> await pipe.add([await driver.remote_module("right", "Linear", 2, 2)])
        """
        async with self._turn:
            coordinator = self._open()
            if not coordinator.is_replicated:
                raise ArgumentError("Pipeline.add(): this pipeline was not made of replicas; give the stages as a list of lists")
            await coordinator.settle()
            replica = self._assignment.numbered(self._made, numbered_stages(stages, self.schedule.num_stages))
            self._made += 1
            await coordinator.enter(replica)

    async def replace(self, worker: str, module: Any) -> None:
        """Fill the place of a lost worker, whose stages others compute (``absorb=True``), with the state of a peer: parameters, buffers, gradients.

        The state of an optimizer is not this object's; see `DistributedOptimizer.add`. Cancelled or failed, the place is lost as before.

        Args:
            worker: name of the lost worker.
            module: a module on another worker, or on the same one that was started again; a list, where the worker had several stages.

        Raises:
            ArgumentError: the worker is not lost, or the modules do not fit. WorkerLostError: a worker cannot be reached.

        >>> await pipe.replace("right", await driver.remote_module("right", "Linear", 2, 2))
        Traceback (most recent call last):
            ...
        aiograd.errors.ArgumentError: Pipeline.replace('right'): this worker is not lost; lost are: none
        """
        async with self._turn:
            coordinator = self._open()
            remote = None if coordinator.lost is None else coordinator.lost.find(worker)
            if remote is None:
                known = ", ".join(each.owner for each in coordinator.lost.remotes) if coordinator.lost is not None else ""
                raise ArgumentError(f"Pipeline.replace({worker!r}): this worker is not lost; lost are: {known or 'none'}")
            modules = list(module) if isinstance(module, (list, tuple)) else [module]
            if len(modules) != len(remote.stages):
                stages = list(remote.stages)
                raise ArgumentError(f"Pipeline.replace({worker!r}): {len(modules)} modules; expected one for each of its stages {stages}")
            await coordinator.settle()
            await coordinator.fill(remote, modules)
