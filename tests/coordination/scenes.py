"""The protocols that decide together, each as a `Scene`: passes, steps of pipelines and of replicas, agreements of groups, optimizers' steps."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Mapping
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import CommitUnknown, StepError, WorkerLostError
from aiograd.pipeline import Pipeline, make_schedule
from tests.coordination.faults import COORDINATOR, MEMBERS, NAMES, Moment, Scene
from tests.distributed.data_parallel import models
from tests.distributed.data_parallel.replicas import gradients as replica_gradients
from tests.distributed.data_parallel.replicas import loss_of, mean_gradients, net
from tests.distributed.data_parallel.simulated import expected
from tests.distributed.workers import knows, view
from tests.pipeline import remote
from tests.pipeline.models import blocks, data, gradients, mean_square, serial
from tests.pipeline.replicas import place_replicas, serial_replicas

COMMIT_MOMENTS: Mapping[str, Moment] = {
    "decided": Moment("sent", "Commit", COORDINATOR),
    "one is told": Moment("after", "Commit", "a", held=("Commit", "b")),
    "all are told": Moment("after", "Commit", "b"),
}


class PassScene(Scene):
    """A backward pass through the weights of both members and of the coordinator."""

    moments = {
        "begun": Moment("before", "Mark", "b", pauses=True),
        "one is prepared": Moment("before", "Gradient", "b", pauses=True),
        "all are prepared": Moment("after", "Gradient", "b", pauses=True),
        **COMMIT_MOMENTS,
    }

    def __init__(self) -> None:
        super().__init__()
        self.service = dist.Service()
        self.weights = {name: ag.tensor(np.array([2.0, 3.0, 5.0]) + number, requires_grad=True) for number, name in enumerate(NAMES)}
        self.context: Any = None

        @self.service.function
        async def via(path: list[str], x: Any) -> Any:
            worker = dist.current_worker()
            y = x * self.weights[worker.name]
            return await worker.call(path[0], "via", path[1:], y) if path else y

        @self.service.function
        async def weight() -> Any:
            worker = dist.current_worker()
            return worker.refer(self.weights[worker.name])

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        worker, living = self.workers[COORDINATOR], self.living
        async with worker.context() as self.context:
            y = await worker.call(living[1], "via", living[2:], ag.tensor(np.ones(3)))
            self.loss = (y * self.weights[COORDINATOR]).sum()
            self.product = np.prod([self.weights[name].numpy() for name in living], axis=0)
            self.keep_contexts()
            yield
        for name in set(living[1:]) & {*self.living}:
            for context in list(self.workers[name]._contexts):
                await self.workers[name]._leases.release(context)

    async def step(self) -> None:
        await self.context.backward(self.loss, retain_graph=True)

    def keep_contexts(self) -> None:
        """Members keep their contexts when a lease ends, as where their own code has opened them."""
        for name in self.living[1:]:
            self.view(name).openers.clear()

    def view(self, name: str) -> Any:
        worker = self.workers[name]
        return view(worker, self.context) if knows(worker, self.context) else None

    def taken(self, name: str) -> int:
        context, weight = self.view(name), self.weights[name]
        if context is None or weight not in context.grads:
            return 0
        counts = context.grads[weight].numpy() * weight.numpy() / self.product
        assert len(set(counts)) == 1
        return int(counts[0])

    def is_in_doubt(self, name: str) -> bool:
        context = self.view(name)
        return context is not None and bool(context.in_doubt)

    def left(self, name: str) -> Any:
        return self.workers[name].statistics().passes


class StepScene(Scene):
    """A step of members that a process coordinates."""

    moments = {
        "begun": Moment("before", "run", "b", pauses=True),
        "one is prepared": Moment("after", "run", "b", pauses=True),
        "all are prepared": Moment("after", "check", "b", pauses=True),
        "decided": Moment("sent", "commit", COORDINATOR),
        "one is told": Moment("after", "commit", "a", held=("commit", "b")),
        "all are told": Moment("after", "commit", "b"),
    }
    #: the members' adapters by worker
    members: dict[str, Any]

    def find_members(self, coordinator: Any) -> None:
        self.members = {remote.owner: self.workers[remote.owner]._objects.table._held[remote.ref.key].value for remote in coordinator.remotes}

    @property
    def is_usable(self) -> bool:
        return self.living == list(NAMES) and not any(map(self.is_in_doubt, NAMES))

    def is_in_doubt(self, name: str) -> bool:
        session = self.members[name]._session if name in self.members else None
        return session is not None and session.transaction.is_doubtful

    def left(self, name: str) -> Any:
        session = self.members[name]._session if name in self.members else None
        return session is not None and (session.work.execution or session.work.runner or session.drive.timer)


class PipelineScene(StepScene):
    """A step of a pipeline with a stage on each host."""

    service = remote.service

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        worker = self.workers[COORDINATOR]
        homes = [None, *self.living[1:]]
        stages = await remote.place(worker, homes, wait=0.01)
        self.stages = {home or COORDINATOR: remote.behind(stage, *self.workers.values()) for home, stage in zip(homes, stages, strict=True)}
        self.known = {name: await gradients_of(len(homes), number) for number, name in enumerate(self.stages)}
        async with Pipeline(stages, make_schedule("1F1B", len(stages), 3), loss_fn=mean_square) as self.pipeline:
            await self.pipeline.eval(BATCH[0])
            self.find_members(self.pipeline._coordinator)
            yield

    async def step(self) -> None:
        await self.pipeline.step(*BATCH)

    def taken(self, name: str) -> int:
        return self.known[name].index(gradients([self.stages[name]]))


async def gradients_of(stages: int, stage: int) -> list[Any]:
    """The gradients of a stage after no step, one step and two steps."""
    modules = blocks(stages)
    found = [gradients([modules[stage]])]
    for _ in range(2):
        await serial(modules, 3, *BATCH)
        found.append(gradients([modules[stage]]))
    return found


class ReplicaScene(StepScene):
    """A step of replicas: the weights of a model on each member."""

    moments = {**StepScene.moments, "all are prepared": Moment("after", "run", "a", pauses=True)}
    service = models.service
    participants = MEMBERS
    absorbs = False
    #: the replicas, and what a member has after each number of steps
    trainer: Any
    known: list[Any]

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        names = self.living[1:]
        options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05}, "absorb": self.absorbs}
        async with await dist.DataParallel.create(self.workers[COORDINATOR], names, models.Net, **options) as self.trainer:
            self.known = [await self.expected(*[len(names)] * steps) for steps in range(3)]
            self.find_members(self.trainer._coordinator)
            yield

    async def expected(self, *replicas: int) -> Any:
        """The weights of a member after steps of so many replicas."""
        return await expected([SHARDS[:count] for count in replicas])

    async def step(self) -> None:
        await self.trainer.step(SHARDS[: len(self.trainer.names)])

    def taken(self, name: str) -> int:
        return self.known.index(models.bits(models.module_of(self.members[name]).state_dict()))

    @property
    def is_usable(self) -> bool:
        return True

    async def again(self) -> None:
        """Without a lost replica; and once more where the others notice only now that contact was lost."""
        lost = {*self.members} - {*self.living}
        for name in lost:
            await self.trainer.remove(name)
        count = max(self.taken(name) for name in MEMBERS)
        self.known[count + 1] = await self.expected(*[2] * count, 2 - len(lost))
        try:
            await self.step()
        except WorkerLostError:
            await self.step()


class AbsorbingScene(ReplicaScene):
    """A step of replicas, which compute the shards of a lost one."""

    absorbs = True

    async def step(self) -> None:
        await self.trainer.step(SHARDS)

    async def again(self) -> None:
        """With all that are there; one is left out in the step where contact to it was lost and nothing has noticed that."""
        await self.take_in()
        await self.step()
        await self.take_in()
        self.find_members(self.trainer._coordinator)

    async def take_in(self) -> None:
        for name in self.trainer.lost:
            await (self.trainer.add(name) if name in self.living else self.trainer.remove(name))


class ReplicatedPipelineScene(ReplicaScene):
    """A step of a pipeline in replicas: two stages on each member."""

    service = remote.service

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        worker, names = self.workers[COORDINATOR], self.living[1:]
        replicas = await place_replicas(worker, [(name, name) for name in names])
        self.stages = {name: [remote.behind(stage, *self.workers.values()) for stage in stages] for name, stages in zip(names, replicas, strict=True)}
        async with Pipeline(replicas, make_schedule("ZB-H1", 2, 2)) as self.trainer:
            await self.trainer.eval(BATCH[0])
            self.known = [await self.expected(*[len(names)] * steps) for steps in range(3)]
            self.find_members(self.trainer._coordinator)
            yield

    async def expected(self, *replicas: int) -> Any:
        stages = blocks(2)
        for count in replicas:
            await serial_replicas(stages, [2] * count, *BATCH)
        return gradients(stages)

    async def step(self) -> None:
        await self.trainer.step(*BATCH)

    def taken(self, name: str) -> int:
        return self.known.index(gradients(self.stages[name]))

    @property
    def is_usable(self) -> bool:
        return self.living != list(NAMES) or not any(map(self.is_in_doubt, NAMES))


BATCH = data(8)
SHARDS = models.batches(1, (4, 4))[0]


class AgreementScene(Scene):
    """A change of each member of a group, which all apply or none."""

    moments = {
        "begun": Moment("sent", "Vote", "b"),
        "one is prepared": Moment("before", "Vote", COORDINATOR, pauses=True),
        "decided": Moment("after", "Vote", COORDINATOR),
        "one is told": Moment("before", "apply", "a", held=("answer to Vote", "b")),
        "all are told": Moment("before", "apply", "b"),
    }

    def __init__(self) -> None:
        super().__init__()
        self.groups: dict[str, dist.Group] = {}
        self.applied: dict[str, int] = {}
        self.models: dict[str, Any] = {}

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        self.names = self.living
        joining = [self.network.spawn(name, self.join(name)) for name in self.names]
        await asyncio.gather(*joining)
        self.applied = dict.fromkeys(self.names, 0)
        yield
        await asyncio.gather(*(self.network.spawn(name, self.groups[name].aclose()) for name in self.living), return_exceptions=True)

    async def join(self, name: str) -> None:
        self.groups[name] = await dist.join_group(self.workers[name], self.names, name=f"group-of-{len(self.names)}")

    async def step(self) -> None:
        self.voting = {name: self.network.spawn(name, self.commit(name)) for name in self.names[1:]}
        await self.commit(COORDINATOR)

    async def commit(self, name: str) -> None:
        def apply() -> None:
            self.reach("before", "apply", name)
            self.applied[name] += 1

        await self.groups[name].commit(apply)

    def taken(self, name: str) -> int:
        return self.applied[name]

    def is_in_doubt(self, name: str) -> bool:
        return name in MEMBERS and not self.left(name) and isinstance(self.voting[name].exception(), CommitUnknown)

    def left(self, name: str) -> Any:
        return name in MEMBERS and not self.voting[name].done()

    @property
    def is_usable(self) -> bool:
        return super().is_usable and not any(group.error for group in self.groups.values())


class GradientScene(AgreementScene):
    """A pass of `DistributedDataParallel`, which writes the mean of all members' gradients on all of them or on none."""

    moments = {"one waits": Moment("before", "GroupPiece", "b", pauses=True), **AgreementScene.moments}

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        once = await mean_gradients(len(self.living))
        self.known = [[None] * len(once), once, [(2 * np.frombuffer(each, np.float32)).tobytes() for each in once]]
        async with super().session():
            yield

    async def join(self, name: str) -> None:
        await super().join(name)
        group = self.groups[name]
        commit = group.commit

        def noted(apply: Any, **options: Any) -> Any:
            return commit(lambda: self.reach("before", "apply", name) or apply(), **options)

        group.commit = noted  # type: ignore[method-assign]
        self.models[name] = dist.DistributedDataParallel(net(), group)
        await self.models[name].synchronize()

    async def commit(self, name: str) -> None:
        await loss_of(self.models[name], self.names.index(name)).backward()

    def taken(self, name: str) -> int:
        return self.known.index(replica_gradients(self.models[name]))


class OptimizerScene(PassScene):
    """A step of a distributed optimizer, which the workers take when they are told of it."""

    STEP = "aiograd.optimizer.step"
    moments = {
        "decided": Moment("sent", STEP, COORDINATOR),
        "one is told": Moment("after", STEP, "a", held=(STEP, "b")),
        "all are told": Moment("after", STEP, "b"),
    }

    @contextlib.asynccontextmanager
    async def session(self) -> AsyncIterator[None]:
        worker = self.workers[COORDINATOR]
        async with super().session():
            refs = [self.weights[COORDINATOR], *[await worker.call(name, "weight") for name in self.living[1:]]]
            self.optimizer = dist.DistributedOptimizer(worker, ag.optim.SGD, refs, lr=1.0)
            await self.context.backward(self.loss)
            await self.optimizer.set_options(lr=1.0)
            self.first = {name: weight.numpy().copy() for name, weight in self.weights.items()}
            self.keep_contexts()
            yield

    async def step(self) -> None:
        await self.optimizer.step(self.context)

    def taken(self, name: str) -> int:
        counts = (self.first[name] - self.weights[name].numpy()) * self.first[name] / self.product
        assert len(set(counts)) == 1
        return int(counts[0])

    def is_in_doubt(self, name: str) -> bool:
        error = None if not self.stepping.done() or self.stepping.cancelled() else self.stepping.exception()
        return isinstance(error, StepError) and name in error.failed

    def left(self, name: str) -> Any:
        return self.workers[name].statistics().calls

    @property
    def is_usable(self) -> bool:
        return super().is_usable and all(map(self.view, NAMES))


SCENES: Mapping[str, type[Scene]] = {
    "pass": PassScene,
    "pipeline": PipelineScene,
    "replicas": ReplicaScene,
    "absorbing": AbsorbingScene,
    "replicated pipeline": ReplicatedPipelineScene,
    "agreement": AgreementScene,
    "gradients": GradientScene,
    "optimizer": OptimizerScene,
}
