"""Replicas in one process: the bits of a serial run, and the state of all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import ArgumentError, ArgumentTypeError, DistributedError, EngineClosedError, ModeError, RemoteError, UnknownPeerError
from tests.distributed.data_parallel.models import (
    BadLoss,
    BatchNet,
    Clamped,
    Frozen,
    Net,
    Overlapping,
    PartlyUsed,
    Stepper,
    Strange,
    Unlike,
    all_bits,
    batches,
    bits,
    module_of,
    numbers,
    replicas_behind,
    serial,
    service,
)
from tests.distributed.workers import workers
from tests.tolerance import assert_close

NAMES = ("w0", "w1", "w2")
SGD = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1, "momentum": 0.9}}


@contextlib.asynccontextmanager
async def replicated(
    module: Any, *args: Any, names: tuple[str, ...] = NAMES, **options: Any
) -> AsyncIterator[tuple[dist.DataParallel, list[dist.Worker]]]:
    """Replicas on workers of this process."""
    async with workers("driver", *names, service=service) as opened:
        options = {**SGD, **options}
        async with await dist.DataParallel.create(opened[0], names, module, *args, **options) as replicas:
            yield replicas, list(opened)


OPTIMIZERS = [
    (ag.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    (ag.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1}),
    (ag.optim.RMSprop, {"lr": 0.01}),
]


@pytest.mark.parametrize(("optimizer", "options"), OPTIMIZERS)
@pytest.mark.parametrize("count", [1, 2, 3])
async def test_steps_have_the_bits_of_one_process(count: int, optimizer: Any, options: dict[str, Any]) -> None:
    given = batches(4, (4,) * count)
    async with replicated(Net, names=NAMES[:count], optimizer=optimizer, optimizer_options=options) as (replicas, opened):
        losses = [numbers(await replicas.step(shards)) for shards in given]
        found = all_bits(replicas, opened)
    alone = Net()
    assert losses == await serial(alone, optimizer(alone.parameters(), **options), given)
    assert found == [bits(alone.state_dict())] * count


async def test_the_optimizer_is_adamw_if_none_is_given() -> None:
    given = batches(2, (4, 4))
    async with workers("driver", *NAMES[:2], service=service) as opened, await dist.DataParallel.create(opened[0], NAMES[:2], Net) as replicas:
        for shards in given:
            await replicas.step(shards)
        found = all_bits(replicas, list(opened))
    alone = Net()
    await serial(alone, ag.optim.AdamW(alone.parameters()), given)
    assert found == [bits(alone.state_dict())] * 2


#: batches, options of replicas, and those of them that one process is given too
BUCKETS: dict[str, tuple[int, tuple[int, ...], dict[str, Any], dict[str, Any]]] = {
    "a bucket for each parameter": (5, (3, 1, 4), {"bucket_bytes": 1}, {"accumulate": 2}),
    "buckets of a few parameters": (5, (3, 1, 4), {"bucket_bytes": 100}, {"accumulate": 2}),
    "one bucket": (5, (3, 1, 4), {"bucket_bytes": 1 << 20}, {"accumulate": 2}),
    "a norm above the limit": (3, (4, 4, 4), {}, {"clip_norm": 0.05}),
    "a norm below the limit": (3, (4, 4, 4), {}, {"clip_norm": 100.0}),
    "a loss on the executor": (2, (4, 4, 4), {}, {"method": "plain_loss"}),
}


@pytest.mark.parametrize("name", BUCKETS)
async def test_buckets_clipping_and_methods_have_the_bits_of_one_process(name: str) -> None:
    count, rows, options, shared = BUCKETS[name]
    given = batches(count, rows)
    async with replicated(Net, **options, **shared) as (replicas, opened):
        losses = [numbers(await replicas.step(shards)) for shards in given]
        found = all_bits(replicas, opened)
    alone = Net()
    assert losses == await serial(alone, ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), given, **shared)
    assert found == [bits(alone.state_dict())] * 3


@pytest.mark.parametrize("count", [1, 2])
async def test_a_loss_that_writes_to_parameters_is_refused(count: int) -> None:
    """Replicas with several shards would write several times, and each after its own shards only."""
    async with replicated(Clamped, names=NAMES[:count]) as (replicas, _):
        with pytest.raises(RemoteError, match="ModifiedError: Clamped: the loss of a shard has written to parameters"):
            await replicas.step(batches(1, (4, 4, 4))[0])


async def test_buckets_are_sent_while_backward_runs() -> None:
    """Backward of the first layer waits until the gradients of the last have been summed."""
    async with replicated(Overlapping, names=NAMES[:2], bucket_bytes=1, timeout=20.0) as (replicas, opened):
        modules = [module_of(host) for host in replicas_behind(replicas, opened)]
        groups = [host._group for host in replicas_behind(replicas, opened)]
        for module, group in zip(modules, groups, strict=True):
            original = group.all_reduce

            def noted(arrays: Any, *args: Any, original: Any = original, module: Any = module, **options: Any) -> Any:
                return module.note(original(arrays, *args, **options))

            group.all_reduce = noted
        await replicas.step([(np.ones((2, 2), np.float32),)] * 2)
        assert [module.order for module in modules] == [["begun", "summed", "first layer", "begun", "summed"]] * 2


@pytest.mark.parametrize("rows", [(1, 7, 4), (5, 0, 3), (0, 0, 2)])
async def test_shards_weigh_by_their_rows(rows: tuple[int, ...]) -> None:
    given = batches(3, rows)
    async with replicated(Net) as (replicas, opened):
        losses = [numbers(await replicas.step(shards)) for shards in given]
        found = all_bits(replicas, opened)
    alone = Net()
    filled = [[shard for shard in shards if len(shard[0])] for shards in given]
    expected = await serial(alone, ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), filled)
    assert [[loss for loss in each if not np.isnan(loss)] for each in losses] == expected
    assert [np.isnan(losses[0]).tolist()] == [[count == 0 for count in rows]]
    assert found == [bits(alone.state_dict())] * 3
    whole = Net()
    optimizer = ag.optim.SGD(whole.parameters(), lr=0.1, momentum=0.9)
    joined = [[tuple(np.concatenate(parts) for parts in zip(*shards, strict=True))] for shards in given]
    await serial(whole, optimizer, joined)
    for name, value in alone.state_dict().items():  # and so the gradient is that of the mean over the batch
        assert_close(whole.state_dict()[name].numpy(), value.numpy())


@pytest.mark.parametrize("clip_norm", [None, 0.1])
async def test_gradients_of_several_steps_are_summed(clip_norm: float | None) -> None:
    given = batches(7, (3, 4, 2))
    async with replicated(Net, accumulate=3, clip_norm=clip_norm) as (replicas, opened):
        before = all_bits(replicas, opened)
        await replicas.step(given[0])
        await replicas.step(given[1])
        assert all_bits(replicas, opened) == before, "the optimizer waits for the third"
        for shards in given[2:]:
            await replicas.step(shards)
        found = all_bits(replicas, opened)
    alone = Net()
    await serial(alone, ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), given, accumulate=3, clip_norm=clip_norm)
    assert found == [bits(alone.state_dict())] * 3


async def test_parameters_that_some_shards_or_none_reach() -> None:
    def shard(kind: int, sign: float = 1.0) -> tuple[Any]:
        return (np.full((2, 2), kind, np.float32) * np.float32(sign),)

    given = [[shard(0), shard(2), shard(4)], [shard(1), shard(2), shard(3)], [shard(2), shard(0), shard(1)], [shard(1), shard(1), shard(1)]]
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.05, "weight_decay": 0.3}}
    async with replicated(PartlyUsed, **options) as (replicas, opened):
        for shards in given:
            await replicas.step(shards)
        found = all_bits(replicas, opened)
    alone = PartlyUsed()
    await serial(alone, ag.optim.AdamW(alone.parameters(), lr=0.05, weight_decay=0.3), given)
    assert found == [bits(alone.state_dict())] * 3


async def test_a_sum_without_a_contribution_keeps_the_sign_of_zero() -> None:
    async with replicated(PartlyUsed, names=NAMES[:2], accumulate=2) as (replicas, opened):
        await replicas.step([(np.array([[1.0, -0.0]], np.float32),), (np.array([[2.0, 1.0]], np.float32),)])
        running = [host._replica.running for host in replicas_behind(replicas, opened)]
        alone = PartlyUsed()
        odd = np.array([[1.0, -0.0]], np.float32)
        await ag.backward(alone.loss(ag.asarray(odd)), ag.tensor(0.25))
        assert [each[2].tobytes() for each in running] == [alone.odd.weight.grad.numpy().tobytes()] * 2


async def test_buffers_are_those_of_the_first_replica() -> None:
    given = batches(3, (4, 5, 6))
    async with replicated(BatchNet) as (replicas, opened):
        for shards in given:
            await replicas.step(shards)
        found = all_bits(replicas, opened)
    assert found[0] == found[1] == found[2]
    alone = BatchNet()
    optimizer = ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9)
    for shards in given:
        after = None
        for number, shard in enumerate(shards):
            before = {name: buffer.clone() for name, buffer in alone.named_buffers()}
            loss = alone.loss(*map(ag.asarray, shard))
            await ag.backward(loss, ag.tensor(len(shard[0]) / 15))
            if number == 0:
                after = {name: buffer.clone() for name, buffer in alone.named_buffers()}
            alone.load_state_dict({**alone.state_dict(), **before})
        optimizer.step()
        optimizer.zero_grad()
        alone.load_state_dict({**alone.state_dict(), **(after or {})})
    assert found[0] == bits(alone.state_dict())
    assert found[0]["norm.num_batches_tracked"] == np.int64(3).tobytes()


async def test_random_numbers_differ_by_replica_and_step_and_not_by_run() -> None:
    same = [batches(1, (8,))[0][0]] * 2
    runs = []
    for _ in range(2):
        ag.seed(7)
        async with replicated(BatchNet, 0.5, names=NAMES[:2], optimizer_options={"lr": 0.0}) as (replicas, _):
            runs.append([numbers(await replicas.step(same)) for _ in range(2)])
    assert runs[0] == runs[1] and len({loss for losses in runs[0] for loss in losses}) == 4


async def test_all_begin_with_the_state_of_the_first() -> None:
    async with workers("driver", *NAMES, service=service) as opened, await dist.DataParallel.create(opened[0], NAMES, Unlike, **SGD) as replicas:
        found = all_bits(replicas, list(opened))
        assert found[0] == found[1] == found[2] != bits(Unlike(1).state_dict())
        assert found[0] == bits(Unlike(0).state_dict())
        assert [module_of(host).hidden.item() for host in replicas_behind(replicas, opened)] == [0.0] * 3, "buffers outside of the state as well"


async def test_eval_is_without_gradients_and_in_evaluation_mode() -> None:
    given = batches(1)[0]
    async with replicated(BatchNet, 0.5) as (replicas, opened):
        await replicas.step(given)
        before = all_bits(replicas, opened)
        outputs = await replicas.eval([(x,) for x, _ in given])
        again = await replicas.eval([x for x, _ in given])
        assert [each.numpy().tobytes() for each in outputs] == [each.numpy().tobytes() for each in again], "no dropout"
        assert all_bits(replicas, opened) == before and not any(each.requires_grad for each in outputs)
        modules = [module_of(host) for host in replicas_behind(replicas, opened)]
        assert all(each.training for module in modules for each in module.modules())
        alone = BatchNet(0.5)
        alone.load_state_dict(await replicas.state_dict())
        alone.eval()
        assert [each.tolist() for each in outputs] == [alone(ag.asarray(x)).tolist() for x, _ in given]


@pytest.mark.parametrize("accumulate", [1, 2])
async def test_states_are_read_and_loaded(accumulate: int) -> None:
    given = batches(6)
    options: dict[str, Any] = {"optimizer": ag.optim.AdamW, "optimizer_options": {"lr": 0.02}, "accumulate": accumulate}
    async with replicated(Net, **options) as (replicas, opened):
        for shards in given[:2]:
            await replicas.step(shards)
        state, optimizer_state = await replicas.state_dict(), await replicas.optimizer_state_dict()
        for shards in given[2:4]:
            await replicas.step(shards)
        expected = all_bits(replicas, opened)
        await replicas.load_state_dict(state)
        await replicas.load_optimizer_state_dict(optimizer_state)
        assert all_bits(replicas, opened) == [bits(state)] * 3
        for shards in given[2:4]:
            await replicas.step(shards)
        assert all_bits(replicas, opened) == expected
    alone = Net()
    alone.load_state_dict(state)
    optimizer = ag.optim.AdamW(alone.parameters(), lr=0.5)
    optimizer.load_state_dict(optimizer_state)  # a state as any other
    await serial(alone, optimizer, given[2:4], accumulate=accumulate)
    assert [bits(alone.state_dict())] * 3 == expected


async def test_gradients_that_were_accumulated_stay_when_a_state_is_loaded() -> None:
    given = batches(2)
    async with replicated(Net, accumulate=2) as (replicas, opened):
        state = await replicas.state_dict()
        await replicas.step(given[0])
        await replicas.load_state_dict(state)
        await replicas.step(given[1])
        found = all_bits(replicas, opened)
    alone = Net()
    await serial(alone, ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), given, accumulate=2)
    assert found == [bits(alone.state_dict())] * 3


async def test_a_state_that_does_not_fit_changes_nothing() -> None:
    async with replicated(Net) as (replicas, opened):
        await replicas.step(batches(1)[0])
        before = all_bits(replicas, opened)
        with pytest.raises(RemoteError, match="the state does not fit"):
            await replicas.load_state_dict({"nothing": ag.zeros(1)})
        with pytest.raises(RemoteError, match="expected"):
            await replicas.load_optimizer_state_dict({"state": {}, "param_groups": []})
        for wrong in (None, 3, []):
            with pytest.raises(ArgumentTypeError, match="expected a dict of Tensors or arrays by name, found"):
                await replicas.load_state_dict(wrong)  # type: ignore[arg-type]
        for no_state in (
            None, {"state": 3}, {"state": {}, "param_groups": 3}, {"state": {}, "param_groups": [3]}, {"state": {0: 3}, "param_groups": [{}]},
            {"state": {"x": {}}, "param_groups": []}, {"state": {1.5: {}}, "param_groups": []}, {"state": {"x": {"a": object()}}, "param_groups": 3},
        ):  # fmt: skip
            with pytest.raises(ArgumentError, match="as optimizer_state_dict.. returns it; found"):
                await replicas.load_optimizer_state_dict(no_state)  # type: ignore[arg-type]
        assert all_bits(replicas, opened) == before
        await replicas.step(batches(2)[1])
        alone = Net()
        await serial(alone, ag.optim.SGD(alone.parameters(), lr=0.1, momentum=0.9), batches(2))
        assert all_bits(replicas, opened) == [bits(alone.state_dict())] * 3


async def test_models_that_differ_are_one_error() -> None:
    async with workers("driver", *NAMES, service=service) as opened:
        shapes, dtypes = r"number 0 is .*\[3, 2\], expected .*\[2, 2\]", "float64.*expected.*float32"
        for kind, what in (("shape", shapes), ("more", "has a further"), ("dtype", dtypes)):
            with pytest.raises(ArgumentError, match=rf"replicas of Strange differ: .* on w1, .*{what}"):
                await dist.DataParallel.create(opened[0], NAMES, Strange, kind, **SGD)
        assert [worker.statistics().references for worker in opened] == [0, 0, 0, 0]


async def test_what_create_refuses() -> None:
    async with workers("driver", *NAMES, service=service) as opened:
        driver = opened[0]

        async def create(*given: Any, **options: Any) -> Any:
            return await dist.DataParallel.create(*given, **{**SGD, **options})

        for names, found in ((["w0", "w0"], "w0 stands twice"), ([], "at least one"), (["w 0"], "characters out of")):
            with pytest.raises(ArgumentError, match=found):
                await create(driver, names, Net)
        with pytest.raises(ArgumentTypeError, match="list of names"):
            await create(driver, "w0", Net)
        with pytest.raises(ArgumentTypeError, match=r"dist\.Worker"):
            await create(None, NAMES, Net)
        for module in (3, None):
            with pytest.raises(ArgumentTypeError, match="or its name, found"):
                await create(driver, NAMES, module)
        for options, found in (
            ({"accumulate": 0}, "accumulate=0"),
            ({"accumulate": True}, "accumulate=True"),
            ({"bucket_bytes": 0}, "bucket_bytes=0"),
            ({"clip_norm": -1.0}, "clip_norm=-1.0"),
            ({"clip_norm": float("nan")}, "clip_norm=nan"),
            ({"method": "_private"}, "public method"),
            ({"optimizer": 3}, "optimizer class"),
            ({"optimizer_options": 3}, "optimizer_options=3.: expected a dict of options by name"),
        ):
            with pytest.raises(ArgumentError, match=found):
                await create(driver, NAMES, Net, **options)
        for module, options, found in (
            (Net, {"method": "nothing"}, "has no method 'nothing'"),
            (Net, {"optimizer": "Unheard"}, "no class 'Unheard' is exposed"),
            (Net, {"optimizer": Stepper}, "derived from ag.optim.Optimizer"),
            (Net, {"optimizer_options": {"lr": -1.0}}, "lr=-1.0"),
            (Frozen, {}, "empty list of parameters"),
        ):
            with pytest.raises(DistributedError, match=found):
                await create(driver, NAMES, module, **options)
        with pytest.raises(UnknownPeerError, match="nobody"):
            await create(driver, ["w0", "nobody"], Net)
        assert [worker.statistics().references for worker in opened] == [0, 0, 0, 0]


async def test_what_steps_refuse() -> None:
    given = batches(1)[0]
    async with replicated(Net) as (replicas, opened):
        before = all_bits(replicas, opened)
        x, target = given[0]
        for shards, found in (
            ([], "got no shards; expected at least one"),
            ("abc", "expected a list of shards, each a tuple of arrays, found str"),
            ([*given, (x,)], "shard 3 has 1 arrays, shard 0 has 2; expected equally many"),
            ([(3, target)] * 3, "begins with a int"),
            ([()] * 3, "begins with nothing"),
            ([(np.float32(1.0),)] * 3, "begins with a 0-d"),
            ([(x[:0], target[:0])] * 3, "no shard has any rows"),
            ([(ag.tensor(x, requires_grad=True), target)] * 3, "requires grad"),
        ):
            with pytest.raises(ArgumentError, match=found):
                await replicas.step(shards)
        with ag.no_grad(), pytest.raises(ModeError, match="grad mode is off"):
            await replicas.step(given)
        assert all_bits(replicas, opened) == before
        assert repr(replicas) == "<DataParallel: replicas on w0, w1, w2>" and replicas.names == NAMES
        await replicas.aclose()
        await replicas.aclose()
        with pytest.raises(EngineClosedError, match="closed"):
            await replicas.step(given)
        assert sum(worker.statistics().references for worker in opened) == 0


@pytest.mark.parametrize(
    ("kind", "found"),
    [("number", "returned a float"), ("many", r"shape \[2\]"), ("no graph", "does not require grad"), ("complex", "of dtype complex64")],
)
async def test_losses_that_are_none(kind: str, found: str) -> None:
    async with replicated(BadLoss, kind) as (replicas, _):
        with pytest.raises(RemoteError, match=found):
            await replicas.step([(np.ones((1, 2), np.float32),)] * 3)
