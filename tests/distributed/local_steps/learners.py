"""Models that members of local steps train, and one process that takes the rounds of records again: the oracle."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.nn import functional as F
from aiograd.running.digest import state_digest
from aiograd.running.random import drawing_from

service = dist.Service()

ROWS, SIZE = 26, 2
SGD = {"lr": 0.05, "momentum": 0.9}
OUTER = {"lr": 0.7, "momentum": 0.9, "nesterov": True}


def data_set(rows: int = ROWS) -> list[tuple[Any, int]]:
    """Rows of four numbers with a class each."""
    random = np.random.default_rng(7)
    return [(random.standard_normal(4).astype(np.float32), int(random.integers(0, 3))) for _ in range(rows)]


@service.reference
class Learner(nn.Module):
    """Two layers, and a parameter that no graph reaches."""

    def __init__(self, rows: int = ROWS, size: int = SIZE) -> None:
        generator = ag.Generator(0)
        self.first = nn.Linear(4, 5, generator=generator)
        self.second = nn.Linear(5, 3, generator=generator)
        self.unused = nn.Parameter(ag.ones((3,)))
        self.rows, self.size = rows, size
        self.waits: dict[int, float] = {}
        self.fails: list[Exception] = []
        self.steps = 0

    def data(self) -> Any:
        return ag.data.DataLoader(data_set(self.rows), batch_size=self.size, shuffle=True, generator=ag.Generator(5))

    def forward(self, x: Any) -> Any:
        return self.second(ag.tanh(self.first(x)))

    async def loss(self, x: Any, target: Any) -> Any:
        self.steps += 1
        if self.waits:
            await asyncio.sleep(self.waits.get(self.steps, self.waits.get(0, 0.0)))
        if self.fails:
            raise self.fails.pop()
        return F.cross_entropy(self(x), target)


@service.reference
class Dropping(Learner):
    """With dropout and running statistics."""

    def __init__(self, rows: int = ROWS, size: int = SIZE) -> None:
        super().__init__(rows, size)
        self.norm = nn.BatchNorm1d(5)

    def forward(self, x: Any) -> Any:
        return self.second(F.dropout(ag.tanh(self.norm(self.first(x))), 0.3, self.training))


class Oracle:
    """One process that takes the rounds of records.

    Args:
        module: a new module.
        inner, outer: options of the two optimizers, which are SGD unless `optimizer` says otherwise.
        seed: of the draws.
        clip_norm, compress, answer, overlap: as of `LocalSteps.create`.
    """

    def __init__(
        self,
        module: Any,
        inner: Mapping[str, Any] = SGD,
        outer: Mapping[str, Any] = OUTER,
        *,
        optimizer: Any = ag.optim.SGD,
        seed: Sequence[int] = (),
        clip_norm: float | None = None,
        compress: Any = None,
        answer: Any = None,
        overlap: int = 0,
    ) -> None:
        self.module = module
        self.loader = module.data()
        self.seed = seed
        self.clip_norm = clip_norm
        self.compress, self.answer, self.overlap = compress, answer, overlap
        #: residuals by name, and of the answer
        self.residuals: dict[str, Any] = {}
        self.rest: list[Any] | None = None
        #: the parameters after the last local step, by name
        self.locals: dict[str, Any] = {}
        self.base = {path: each.detach().numpy().copy() for path, each in [*module.named_parameters(), *module.named_buffers()]}
        self.tensors = [ag.tensor(self.base[path]) for path, _ in module.named_parameters()]
        self.outer = ag.optim.SGD(self.tensors, **outer)
        self.make_inner = lambda: optimizer(module.parameters(), **inner)
        #: states of inner optimizers by name
        self.inners: dict[str, Any] = {}
        #: the bases by version
        self.bases = [dict(self.base)]
        self.orders: list[list[list[int]]] = []

    def forget(self, name: str, *, residual: bool = False) -> None:
        """Begin a member anew; `residual`: it is another one, without a residual."""
        self.inners.pop(name, None)
        if residual:
            self.residuals.pop(name, None)

    @property
    def digest(self) -> str:
        return state_digest(self.base)

    def indices(self, epoch: int, number: int) -> list[int]:
        while len(self.orders) <= epoch:
            batches: Any = self.loader._begin().batches
            self.orders.append([list(batches.indices_of(each)) for each in range(len(self.loader))])
        return self.orders[epoch][number]

    async def local(self, name: str, began: int, batches: Iterable[tuple[int, int]], carries: bool) -> tuple[list[Any], dict[str, Any], float, int]:
        """The pseudo-gradients of a member, its buffers, its mean loss and its rows; `carries`: it began where it had ended before."""
        module, base = self.module, self.bases[began]
        sent = self.locals.get(name) if carries else None
        module.load_state_dict(base if sent is None else sent)
        inner = self.make_inner()
        if name in self.inners:
            inner.load_state_dict(self.inners[name])
        total, rows = 0.0, 0
        for step, (epoch, number) in enumerate(batches):
            if step == self.overlap and sent is not None:
                sent = self.apply(base, sent)
            indices = self.indices(epoch, number)
            with drawing_from(ag.Generator((*self.seed, epoch, number))):
                batch = await self.loader.read(indices)
                loss = await module.loss(*batch)
            await ag.backward(loss)
            if self.clip_norm is not None:
                ag.optim.clip_grad_norm_(module.parameters(), self.clip_norm)
            inner.step()
            inner.zero_grad()
            total, rows = total + len(indices) * loss.item(), rows + len(indices)
        if sent is not None:
            self.apply(base, sent)
        self.inners[name] = inner.state_dict()
        self.locals[name] = {path: each.numpy().copy() for path, each in module.state_dict().items()}
        deltas = [base[path] - each.detach().numpy() for path, each in module.named_parameters()]
        if self.compress is not None:
            pairs = [self.compress.encode(each, rest) for each, rest in zip(deltas, self.residuals.get(name, [None] * len(deltas)), strict=True)]
            self.residuals[name] = [rest for _, rest in pairs]
            deltas = [self.compress.decode(sent, each.size, each.dtype).reshape(each.shape) for (sent, _), each in zip(pairs, deltas, strict=True)]
        return deltas, {path: each.numpy().copy() for path, each in module.named_buffers()}, total / rows, rows

    def apply(self, base: dict[str, Any], sent: dict[str, Any]) -> None:
        """The round in exchange arrives."""
        mine = {path: each.detach().numpy() for path, each in self.module.named_parameters()}
        self.module.load_state_dict(base | {path: base[path] + (values - sent[path]) for path, values in mine.items()})

    async def take(self, record: dist.local_steps.RoundRecord, carrying: Iterable[str] = ()) -> None:
        """Take a round, and compare its losses and rows."""
        found = {name: await self.local(name, record.began[name], record.batches[name], name in carrying) for name in record.members}
        assert record.losses == {name: each[2] for name, each in found.items()}
        assert record.rows == {name: each[3] for name, each in found.items()}
        rows = sum(record.rows.values())
        means = []
        rests = []
        for index, tensor in enumerate(self.tensors):
            total = np.zeros(tensor.shape, np.float64)
            for deltas, _, _, count in found.values():
                total += deltas[index].astype(np.float64) * count
            if self.answer is not None:
                payload, rest = self.answer.encode(total, None if self.rest is None else self.rest[index])
                total = self.answer.decode(payload, total.size, np.float64).reshape(total.shape)
                rests.append(rest)
            means.append((total / rows).astype(tensor.numpy().dtype))
        self.rest = rests or None
        self.outer.step(dict(zip(self.tensors, means, strict=True)))
        names = [path for path, _ in self.module.named_parameters()]
        self.base = {path: tensor.numpy().copy() for path, tensor in zip(names, self.tensors, strict=True)} | found[record.members[0]][1]
        self.bases.append(dict(self.base))
        assert len(self.bases) - 1 == record.number


def seed_of(training: dist.LocalSteps) -> tuple[int, ...]:
    """The seed of the draws of a training."""
    return training._coordinator.seed


def behind(training: dist.LocalSteps, opened: Sequence[dist.Worker]) -> dict[str, Any]:
    """The members as they are on their workers, by name."""
    found = {}
    for remote in training._coordinator.remotes:
        worker = next(each for each in opened if each.name == remote.owner)
        found[remote.owner] = worker._objects.table._held[remote.ref.key].value
    return found
