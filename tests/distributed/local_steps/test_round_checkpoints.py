"""Checkpoints: the training goes on from them with the bits of one process, with any members; and arguments that make no sense."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import nn
from aiograd.errors import ArgumentError, ArgumentTypeError, EngineClosedError, ModeError, RemoteError
from tests.distributed.local_steps.learners import SGD, Dropping, Learner, Oracle, behind, service
from tests.distributed.workers import workers

INNER: dict[str, Any] = {"optimizer": ag.optim.SGD, "optimizer_options": SGD, "steps": 2}


async def with_contribution(training: Any, others: Any) -> Any:
    """A checkpoint after a round in which w1 has failed, so that the contribution of w0 waits."""
    behind(training, others)["w1"]._training.module.fails.append(ZeroDivisionError("by nought"))
    with pytest.raises(RemoteError):
        await training.round()
    return await training.checkpoint(members=True)


@pytest.mark.parametrize("names", [("w0", "w1"), ("w2",), ("w2", "w1", "w0")])
async def test_a_training_goes_on_from_a_checkpoint(names: tuple[str, ...], tmp_path: Path) -> None:
    async with workers("driver", "w0", "w1", "w2", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Dropping, **INNER) as training:
            oracle = Oracle(Dropping(), seed=training._coordinator.seed)
            for _ in range(2):
                await oracle.take(await training.round())
            ag.save(await training.checkpoint(), tmp_path / "state.safetensors")
            digest = training.digest
            await training.round()
        async with await dist.LocalSteps.create(driver, names, Dropping, **INNER) as training:
            await training.restore(ag.load(tmp_path / "state.safetensors"))
            assert (training.version, training.digest, training.epoch) == (2, digest, 0)
            assert await training.digests() == dict.fromkeys(names, digest)
            for name in ("w0", "w1"):
                oracle.forget(name)  # inner optimizers are fresh
            read = []
            async for record in training.rounds(1):
                await oracle.take(record)
                read += [batch for name in record.members for batch in record.batches[name]]
            assert sorted(read) == [(0, number) for number in range(8, 13)]
            assert training.digest == oracle.digest


async def test_restoring_an_earlier_state() -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **INNER) as training:
            records, state = [await training.round()], await training.checkpoint()
            digests = [(await training.round(), training.digest)[1] for _ in range(3)]
            await training.restore(state)
            again = [(await training.round(), training.digest)[1] for _ in range(3)]
            assert training.version == 4 and len(records) == 1
            assert digests[0] != again[0], "the inner optimizers are fresh, the first time they were not"
            await training.restore(state)
            assert [(await training.round(), training.digest)[1] for _ in range(3)] == again


RESUMED: dict[str, dict[str, Any]] = {
    "plain": {},
    "compressed": {"compress": dist.TopK(1 / 8, bits=4, block=64), "answer": dist.Blockwise(8)},
    "overlap": {"overlap": 1},
    "overlap, compressed": {"overlap": 2, "compress": dist.TopK(1 / 8, bits=4, block=64)},
}


@pytest.mark.parametrize("name", RESUMED)
async def test_with_the_states_of_members_the_bits_are_the_same(name: str, tmp_path: Path) -> None:
    options = {**INNER, "optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.01}, **RESUMED[name]}
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Dropping, **options) as training:
            for _ in range(3):
                await training.round()
            ag.save(await training.checkpoint(members=True), tmp_path / "state.safetensors")
            expected = [(record, training.digest) async for record in training.rounds(2)]
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Dropping, **options) as training:
            await training.restore(ag.load(tmp_path / "state.safetensors"))
            found = [(record, training.digest) async for record in training.rounds(2)]
        assert found == expected


async def test_a_contribution_that_waits_is_in_a_checkpoint_of_the_members() -> None:
    options: dict[str, Any] = {**INNER, "compress": dist.TopK(1 / 8, bits=4, block=64)}
    async with workers("driver", "w0", "w1", service=service) as (driver, *others):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Dropping, **options) as training:
            await training.round()
            state = await with_contribution(training, others)
            assert state["members"]["w0"]["contribution"] is not None
            expected = [(record, training.digest) async for record in training.rounds(1)]
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Dropping, **options) as training:
            await training.restore(state)
            for member in training._coordinator.remotes:
                member.is_fresh = member.owner == "w1"
            assert [(record, training.digest) async for record in training.rounds(1)] == expected


async def test_batches_of_a_member_that_cannot_go_on_from_a_checkpoint_are_read() -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *others):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **INNER) as training:
            state = await with_contribution(training, others)
            assert state["members"]["w0"]["contribution"] is not None

            async def fails(progress: Any) -> bool:
                raise ZeroDivisionError("no way on")

            behind(training, others)["w0"].resume = fails
            with pytest.raises(RemoteError, match="no way on"):
                await training.restore(state)
            assert not training._coordinator.ledger.open
            read = [batch async for record in training.rounds(1) for name in record.members for batch in record.batches[name]]
            assert sorted(read) == [(0, number) for number in range(13)]


BROKEN: dict[str, Any] = {
    "a text": lambda state: "state",
    "a part is missing": lambda state: {name: value for name, value in state.items() if name != "outer"},
    "another parameter": lambda state: {**state, "parameters": {**state["parameters"], "more": ag.ones(1)}},
    "another shape": lambda state: {**state, "parameters": {**state["parameters"], "unused": ag.ones(4)}},
    "another data set": lambda state: {**state, "order": {**state["order"], "examples": 27}},
    "a place beyond": lambda state: {**state, "data": {"epoch": 0, "batches": 13, "ahead": []}},
    "another optimizer": lambda state: {**state, "outer": {"state": {}, "param_groups": []}},
    "no outer optimizer": lambda state: {**state, "outer": {"state": [], "param_groups": []}},
    **{f"version {version}": lambda state, version=version: {**state, "version": version} for version in (-1, 1.5, True, "3", None, 1 << 63)},
    **{f"seed {seed}": lambda state, seed=seed: {**state, "seed": seed} for seed in ([-1, 2], [1.5, 2], ["1", "2"], "12", 3, [1 << 63, 1], None)},
}


@pytest.mark.parametrize("name", BROKEN)
async def test_what_cannot_be_restored(name: str) -> None:
    async with workers("driver", "w0", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0"], Learner, **INNER) as training:
            await training.round()
            before = training.digest
            state = await training.checkpoint()
            with pytest.raises(ArgumentError):
                await training.restore(BROKEN[name](state))
            assert (training.digest, training.version) == (before, 1)
            await training.round()


def spoilt(path: str, value: Any) -> Any:
    """A change of the state of member w0: the part at a path gets another value; "..." takes it away."""

    def spoil(member: dict[str, Any]) -> None:
        *outer, last = path.split(".")
        for name in outer:
            member = member[name]
        if value is ...:
            del member[last]
        else:
            member[last] = value

    return spoil


MEMBERS: dict[str, tuple[str, Any]] = {
    "no state of a parameter": ("inner.state.1", 3),
    "an unknown parameter": ("inner.state.9", {}),
    "a shape": ("inner.state.1.exp_avg", np.ones(3, np.float32)),
    "a missing slot": ("inner.state.1.exp_avg_sq", ...),
    "a step": ("inner.state.1.step", -1),
    "a rate": ("inner.param_groups", [{"params": [0, 1, 2, 3, 4], "lr": "fast"}]),
    "no groups": ("inner.param_groups", ...),
    "residuals": ("residuals", np.ones(3, np.float32)),
    "residuals of another size": ("residuals", ag.asarray(np.zeros(3, np.uint8))),
    "a payload": ("contribution.result.payload", ag.asarray(np.zeros(3, np.uint8))),
    "rows": ("contribution.result.rows", 0),
    "a loss": ("contribution.result.loss", "low"),
    "a later base": ("contribution.result.began", 2),
    "indices without a sampler": ("contribution.result.indices", [[1]]),
    "a number": ("contribution.number", -1),
    "carried": ("contribution.carried", "x"),
    "the rest": ("contribution.rest", ag.asarray(np.zeros(3, np.uint8))),
    "buffers": ("contribution.buffers", {"count": ag.ones(2)}),
    "a module": ("contribution.local", {"weight": ag.ones(2)}),
}


@pytest.mark.parametrize("name", MEMBERS)
async def test_states_of_members_that_cannot_be_restored(name: str) -> None:
    options: dict[str, Any] = {**INNER, "optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.01}}
    options["compress"] = dist.TopK(1 / 8, bits=4, block=64)
    async with workers("driver", "w0", "w1", service=service) as (driver, *others):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **options) as training:
            await training.round()
            state = await with_contribution(training, others)
            good = copy.deepcopy(state)
            before = await training.checkpoint(members=True)
            spoilt(*MEMBERS[name])(state["members"]["w0"])
            with pytest.raises(ArgumentError, match="the state of the member on w0 makes no sense|the states of the members make no sense"):
                await training.restore(state)
            assert str(await training.checkpoint(members=True)) == str(before)
            record = await training.round()
            await training.restore(good)
            again = await training.round()
            assert (again.batches["w0"], again.losses["w0"]) == (record.batches["w0"], record.losses["w0"])


CONTRIBUTED: dict[str, tuple[Any, str]] = {
    "read": ([[0, 0], [0, 5]], "w0 has batch 0 of epoch 0, but batch 0 of epoch 0 was read already"),
    "read ahead": ([[0, 12], [0, 5]], "w0 has batch 12 of epoch 0, but batch 12 of epoch 0 was read already"),
    "twice": ([[0, 5], [0, 5]], "w0 has batch 5 of epoch 0, but it is in a contribution already"),
    "outside": ([[0, 5], [0, 13]], "w0 has batch 13 of epoch 0, but .*: an epoch has 13 batches"),
    "an epoch below 0": ([[-1, 5]], "w0 has batch 5 of epoch -1, but .*: an epoch has 13 batches"),
    "no pairs": ([[0]], "the states of the members make no sense: TypeError"),
    "no numbers": ([["a", "b"]], "the states of the members make no sense: ValueError"),
}


@pytest.mark.parametrize("name", [*CONTRIBUTED, "in two", "no contribution", "no dict"])
async def test_contributions_that_cannot_be_restored(name: str) -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *others):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **INNER) as training:
            await training.round()
            state = await with_contribution(training, others)
            members = state["members"]
            state["data"]["ahead"] = [[0, 12]]
            if name in CONTRIBUTED:
                members["w0"]["contribution"]["batches"], text = CONTRIBUTED[name]
            elif name == "in two":
                members["w7"], text = members["w0"], "w7 has batch 4 of epoch 0, but it is in a contribution already"
            else:
                members["w0"], text = {} if name == "no contribution" else 3, "the states of the members make no sense: (KeyError|TypeError)"
            before, contributions = await training.checkpoint(), [each.contribution for each in training._coordinator.remotes]
            with pytest.raises(ArgumentError, match=text):
                await training.restore(state)
            assert str(await training.checkpoint()) == str(before)
            assert [each.contribution for each in training._coordinator.remotes] == contributions != [None, None]
            read = [batch async for record in training.rounds(1) for name in record.members for batch in record.batches[name]]
            assert sorted(read) == [(0, number) for number in range(4, 13)]


async def test_batches_of_members_that_are_not_there_any_more_are_read() -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *others):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **INNER) as training:
            state = await with_contribution(training, others)
            await training.remove("w0")
            await training.restore(state)
            assert not training._coordinator.ledger.open
            read = [batch async for record in training.rounds(1) for name in record.members for batch in record.batches[name]]
            assert sorted(read) == [(0, number) for number in range(13)]


# ---------------------------------------------------------------- arguments


ARGUMENTS: dict[str, Any] = {
    "steps": [0, -1, 1.5, True, "3"],
    "quorum": [0, 3, True],
    "patience": [-1, "soon", float("nan"), True],
    "method": ["", "_loss", 3],
    "data": ["", "_data", None],
    "clip_norm": [0.0, -1.0, "1"],
    "optimizer": [3],
    "outer": [None],
    "compress": ["topk", dist.TopK, 0.1],
    "answer": [1, "blockwise"],
    "overlap": [-1, 3, 1.0, True],
}


@pytest.mark.parametrize(("name", "value"), [(name, value) for name, values in ARGUMENTS.items() for value in values])
async def test_no_such_arguments(name: str, value: Any) -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        with pytest.raises(ArgumentError, match=name):
            await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **{**INNER, name: value})


@pytest.mark.parametrize(("module", "options"), [(5, {}), (None, {}), (Learner, {"optimizer_options": 5}), (Learner, {"outer_options": 5})])
async def test_no_such_module_or_options(module: Any, options: dict[str, Any]) -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *others):
        with pytest.raises(ArgumentTypeError, match="or its name, found|_options=5.: expected a dict of options by name"):
            await dist.LocalSteps.create(driver, ["w0", "w1"], module, **{**INNER, **options})
        assert not any(worker.statistics().references for worker in others)


@pytest.mark.parametrize("names", [[], ["w0", "w0"], "w0", ["", "w1"]])
async def test_no_such_names(names: Any) -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        with pytest.raises(ArgumentError):
            await dist.LocalSteps.create(driver, names, Learner, **INNER)
        with pytest.raises(ArgumentTypeError):
            await dist.LocalSteps.create("driver", ["w0"], Learner, **INNER)  # type: ignore[arg-type]


@service.reference
class OddData(nn.Module):
    """Data sets that are none, or differ between the members."""

    def __init__(self, kind: str) -> None:
        self.weight = nn.Parameter(ag.ones((2,)))
        self.kind = kind

    def data(self) -> Any:
        number = int(dist.current_worker().name[-1])
        rows = np.ones((8, 2), np.float32)
        return {
            "a list": lambda: [1, 2],
            "a stream": lambda: ag.data.DataLoader(iter(rows), batch_size=2),
            "no batches": lambda: ag.data.DataLoader(rows),
            "nothing": lambda: ag.data.DataLoader(rows[:0], batch_size=2),
            "only dropped": lambda: ag.data.DataLoader(rows[:1], batch_size=2, drop_last=True),
            "examples": lambda: ag.data.DataLoader(rows[number:], batch_size=2),
            "size": lambda: ag.data.DataLoader(rows, batch_size=2 + number),
            "order": lambda: ag.data.DataLoader(rows, batch_size=2, shuffle=True, generator=ag.Generator(number)),
            "shuffles": lambda: ag.data.DataLoader(rows, batch_size=2, shuffle=number == 0, generator=ag.Generator(0)),
            "sampler": lambda: ag.data.DataLoader(rows, batch_sampler=[[0, 1], [2, number]]),
            "drawn": lambda: ag.data.DataLoader(rows, batch_sampler=Drawn(number)),
            "the same sampler": lambda: ag.data.DataLoader(rows, batch_sampler=[[0, 1, 5], [2, 4]]),
        }[self.kind]()

    def loss(self, x: Any) -> Any:
        return (x @ self.weight).mean()


@pytest.mark.parametrize("kind", ["a list", "a stream", "no batches", "nothing", "only dropped"])
async def test_loaders_that_are_none(kind: str) -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        with pytest.raises(RemoteError, match=r"OddData.data\(\) returned a") as caught:
            await dist.LocalSteps.create(driver, ["w0", "w1"], OddData, kind, **INNER)
        assert caught.value.worker == "w0" and "the worker w1 has failed, too: RemoteError: " in caught.value.__notes__[0]
        with pytest.raises(RemoteError, match="no method 'numbers'"):
            await dist.LocalSteps.create(driver, ["w0", "w1"], OddData, kind, **INNER, data="numbers")


DIFFERENT = {"examples": "7 examples", "size": "examples in a batch|batches", "order": "order", "shuffles": "order", "sampler": "order"}


@pytest.mark.parametrize(("kind", "text"), DIFFERENT.items())
async def test_data_sets_that_differ(kind: str, text: str) -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        with pytest.raises(ArgumentError, match=f"w1 and w0 differ: w1 has .*({text})"):
            await dist.LocalSteps.create(driver, ["w0", "w1"], OddData, kind, **INNER)


@service.reference
class OddModel(nn.Module):
    """Shared, frozen and float64 parameters, buffers of several kinds, and batches that are dicts."""

    def __init__(self, dtype: str = "float64") -> None:
        generator = ag.Generator(0)
        self.first = nn.Linear(2, 2, generator=generator)
        self.second = nn.Linear(2, 2, generator=generator)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(ag.ones(()))
        self.frozen = nn.Parameter(ag.ones((2,)), requires_grad=False)
        self.wide = nn.Parameter(ag.asarray(np.ones(2, dtype)))
        self.register_buffer("count", ag.asarray(np.zeros((), np.int64)))
        self.register_buffer("hidden", ag.zeros((2,)), persistent=False)

    def data(self) -> Any:
        rows = np.random.default_rng(0).standard_normal((9, 2)).astype(np.float32)
        return ag.data.DataLoader([{"x": row} for row in rows], batch_size=2)

    def loss(self, batch: Any) -> Any:
        with ag.no_grad():
            self.count += 1
            self.hidden += 1.0
        y = self.second(self.first(batch["x"])) * self.frozen * self.scale
        return (y * self.wide.astype(ag.float32)).mean()


@pytest.mark.parametrize("options", [{}, {"compress": dist.TopK(1 / 4, block=64)}])
async def test_models_with_all_kinds_of_parameters_and_buffers(options: dict[str, Any]) -> None:
    async with workers("driver", "w0", "w1", "w2", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], OddModel, **INNER, **options) as training:
            records = [record async for record in training.rounds(1)]
            await training.add("w2")
            records.append(await training.round())
            assert await training.digests() == dict.fromkeys(("w0", "w1", "w2"), training.digest)
            state = await training.state_dict()
        expected = OddModel().state_dict()
        assert list(state) == list(expected) and "hidden" not in state
        assert (state["first.weight"] == state["second.weight"]).all() and state["frozen"].tolist() == [1.0, 1.0]
        assert state["wide"].dtype == ag.float64 and state["count"].item() == sum(len(record.batches[record.members[0]]) for record in records)


async def test_a_parameter_that_cannot_be_compressed() -> None:
    async with workers("driver", "w0", service=service) as (driver, *_):
        with pytest.raises(ArgumentError, match="wide is float16"):
            await dist.LocalSteps.create(driver, ["w0"], OddModel, "float16", **INNER, compress=dist.Blockwise())


async def test_batches_of_a_sampler() -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], OddData, "the same sampler", **{**INNER, "steps": 1}) as training:
            for _ in range(2):
                record = await training.round()
                assert (record.indices("w0"), record.indices("w1"), record.rows) == ((0, 1, 5), (2, 4), {"w0": 3, "w1": 2})
            with pytest.raises(ArgumentError, match="contributors w0, w1"):
                record.indices("w7")


class Drawn:
    """A sampler that draws each epoch anew; the second one differs between members."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.epoch = -1

    def __len__(self) -> int:
        return 4

    def __iter__(self) -> Any:
        self.epoch += 1
        order = np.random.default_rng((self.epoch, self.number if self.epoch == 1 else 0)).permutation(8)
        return iter(order.reshape(4, 2).tolist())


async def test_a_sampler_whose_second_epoch_differs_between_members() -> None:
    """Its batches are in no round; what the member has read first counts for all."""
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        async with await dist.LocalSteps.create(driver, ["w0", "w1"], OddData, "drawn", **{**INNER, "steps": 1}) as training:
            drawn = [index for _ in range(2) for record in [await training.round()] for name in record.members for index in record.indices(name)]
            assert sorted(drawn) == [*range(8)]
            for _ in range(2):
                with pytest.raises(ArgumentError, match="the batches of epoch 1 that the sampler on w[01] has drawn differ from those on w[01]"):
                    await training.round()
            assert (training.version, training.epoch) == (2, 1)
            await training.remove("w1")
            assert (await training.round()).members == ("w0",)


async def test_calls_that_make_no_sense() -> None:
    async with workers("driver", "w0", "w1", service=service) as (driver, *_):
        training = await dist.LocalSteps.create(driver, ["w0", "w1"], Learner, **INNER)
        with pytest.raises(ArgumentError, match="epochs=0"):
            await anext(aiter(training.rounds(0)))
        with ag.no_grad(), pytest.raises(ModeError):
            await training.round()
        with pytest.raises(ArgumentError, match="no member of this name"):
            await training.remove("w7")
        await training.remove("w0")
        with pytest.raises(ArgumentError, match="the last member"):
            await training.remove("w1")
        await training.aclose()
        await training.aclose()
        for call in (training.round, training.state_dict, training.checkpoint, training.digests):
            with pytest.raises(EngineClosedError):
                await call()
        with pytest.raises(EngineClosedError):
            await training.add("w0")
