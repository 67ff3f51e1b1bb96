"""Pipelines whose stages live on workers: the same gradients, one commit, and failures that reach everybody."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.kinds import Kind
from aiograd.distributed.rpc import request_handlers
from aiograd.errors import (
    ArgumentError,
    CommitUnknown,
    NotExposedError,
    PipelineError,
    ProtocolError,
    ReferenceLostError,
    RemoteError,
    RemotePipelineError,
    WorkerLostError,
)
from aiograd.pipeline import Pipeline, Stage, make_schedule
from aiograd.pipeline.run import outbox
from aiograd.running.assembly import STAGE_MEMBER_ADAPTER
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.workers import settled, two_principals, workers
from tests.pipeline.models import TURN, blocks, data, gradients, mean_square, serial, values
from tests.pipeline.remote import Block, Head, NoisyBlock, behind, place, service
from tests.toy_device import ToyDevice


@pytest.mark.parametrize("homes", ["abc", "aba", "a.b", ".ab", "ab.", "aaa"])
@pytest.mark.parametrize("name", ["1F1B", "ZB-H1"])
async def test_the_gradients_are_those_of_the_serial_run(homes: str, name: str) -> None:
    x, target = data(9)
    alone = blocks(3)
    losses = await serial(alone, 4, x, target)
    async with workers("driver", "a", "b", "c", service=service) as opened:
        modules = await place(opened[0], [None if home == "." else home for home in homes])
        held = [worker.statistics().references for worker in opened]
        async with Pipeline(modules, make_schedule(name, 3, 4), loss_fn=mean_square) as pipe:
            before = await pipe.eval(x)
            assert values(await pipe.step(x, target)) == losses
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)
            await serial(alone, 4, x, target)
            assert values(await pipe.step(x, target)) == losses
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)
            with ag.no_grad():
                assert np.array_equal((await pipe.eval(x)).numpy(), before.numpy())
        assert [worker.statistics().references for worker in opened] == held


@pytest.mark.parametrize("homes", ["ab", ".b", "a."])
async def test_arrays_of_a_batch_and_numbers_of_numpy_reach_workers(homes: str) -> None:
    """The first stage gets the input, the last one the target and computes the loss."""
    x, target = data(9)
    alone = blocks(2)
    losses = await serial(alone, 3, x, target)
    async with workers("driver", "a", "b", service=service) as opened:
        driver = opened[0]
        modules = [
            kind(index) if home == "." else dist.RemoteModule(driver, home, await driver.remote(home, kind, index))
            for index, (home, kind) in enumerate(zip(homes, (Block, Head), strict=True))
        ]
        async with Pipeline(modules, make_schedule("1F1B", 2, 3)) as pipe:
            assert values(await pipe.step(x.numpy(), target.numpy())) == losses
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)
            parts = [(part,) for part in np.array_split(x.numpy(), 3)]
            assert values(await pipe.step(arg_mbs=parts, target_mbs=[np.float32(0)] * 3)) == await serial(alone, 3, x, target * 0)
            assert np.array_equal((await pipe.eval(x.numpy())).numpy(), alone[1](alone[0](x)).detach().numpy())


async def test_workers_draw_the_random_numbers_of_the_serial_run() -> None:
    x, target = data(9)
    results = []
    async with workers("driver", "a", "b", service=service) as opened:
        driver = opened[0]
        for homes in ((None, None, None), ("a", None, "b"), ("b", "b", "a")):
            modules = [
                NoisyBlock(i) if home is None else dist.RemoteModule(driver, home, await driver.remote(home, NoisyBlock, i))
                for i, home in enumerate(homes)
            ]
            for name in ("1F1B", "ZB-H1"):
                for module in modules:
                    behind(module, *opened).zero_grad()
                ag.seed(7)
                async with Pipeline(modules, make_schedule(name, 3, 4), loss_fn=mean_square) as pipe:
                    losses = [values(await pipe.step(x, target)) for _ in range(2)]
                    results.append((losses, gradients(behind(module, *opened) for module in modules)))
    assert all(result == results[0] for result in results)
    assert results[0][0][0] != results[0][0][1]


async def test_several_stages_per_worker_and_a_turn() -> None:
    x, target = data(5)
    alone = blocks(4)
    losses = await serial(alone, 2, x, target)
    async with workers("driver", "a", "b", service=service) as opened:
        modules = await place(opened[0], ["a", "b", "b", "a"])
        async with Pipeline(modules, TURN, loss_fn=mean_square) as pipe:
            assert values(await pipe.step(x, target)) == losses
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)


async def test_the_last_worker_computes_the_loss() -> None:
    x, target = data(9)
    alone = blocks(2)
    losses = await serial(alone, 4, x, target)
    async with workers("driver", "a", "b", service=service) as opened:
        driver = opened[0]
        first, last = await driver.remote("a", Block, 0), await driver.remote("b", Head, 1)
        async with Pipeline([first, last], make_schedule("1F1B", 2, 4)) as pipe:  # references are enough: nothing comes back here
            assert values(await pipe.step(x, target)) == losses
            modules = [behind(dist.RemoteModule(driver, ref.owner, ref), *opened) for ref in (first, last)]
            assert gradients(modules) == gradients(alone)
            assert (await pipe.eval(x)).shape == x.shape


async def test_training_over_several_steps() -> None:
    """A step leaves gradients in ``grad`` on every worker, where an optimizer over the workers finds them."""
    async with workers("driver", "a", "b", service=service) as opened:
        modules = await place(opened[0], ["a", None, "b"])
        real = [behind(module, *opened) for module in modules]
        alone = blocks(3)
        mine = ag.optim.Adam([p for module in alone for p in module.parameters()], lr=0.1)
        optimizer = dist.DistributedOptimizer(opened[0], ag.optim.Adam, modules, lr=0.1)
        async with Pipeline(modules, make_schedule("ZB-H1", 3, 4), loss_fn=mean_square) as pipe:
            for seed in range(3):
                x, target = data(8, seed=seed)
                assert values(await pipe.step(x, target)) == await serial(alone, 4, x, target)
                mine.step()
                mine.zero_grad()
                await optimizer.step()
                assert not any(gradients(real)) and optimizer.steps == seed + 1
        await optimizer.delete()


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("homes", ["ab", "a.", ".b"])
async def test_a_stage_on_a_worker_fails(homes: str) -> None:
    x, target = data(8)
    async with workers("driver", "a", "b", service=service) as opened:
        modules = await place(opened[0], [None if home == "." else home for home in homes])
        at = 1 if homes[1] != "." else 0
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            for call in (1, 3):
                await modules[at].ref.call("fail_at", call)
                with pytest.raises(
                    PipelineError, match=rf"^Error on Node {homes[at]}: .*{at}F{call - 1} failed .*ZeroDivisionError: by nought"
                ) as caught:
                    await pipe.step(x, target)
                failure = caught.value
                assert (failure.stage, failure.microbatch, failure.action, failure.rank) == (at, call - 1, f"{at}F{call - 1}", at)
                assert isinstance(failure, RemotePipelineError) and failure.correlation_id
                assert failure.path == (failure.worker,) == (homes[at],)
                assert not any(gradients(behind(module, *opened) for module in modules))
            with pytest.raises(PipelineError, match="ZeroDivisionError"):
                await modules[at].ref.call("fail_at", 2)
                await pipe.eval(x)
            alone = blocks(2)
            assert values(await pipe.step(x, target)) == await serial(alone, 4, x, target)
            assert gradients(behind(module, *opened) for module in modules) == gradients(alone)


async def test_what_was_prepared_elsewhere_is_dropped() -> None:
    async with workers("driver", "a", "b", service=service) as opened:
        modules = await place(opened[0], ["a", "b"])
        calls: list[Any] = []

        def fail(grad: Any) -> None:
            calls.append(grad)
            if len(calls) == 4:
                raise ZeroDivisionError("by nought")

        behind(modules[0], *opened).inner[0].weight.register_hook(fail)
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            with pytest.raises(PipelineError, match="0B3 failed"):
                await pipe.step(*data(8))
            hosts = [behind(dist.RemoteModule(opened[0], remote.owner, remote.ref), *opened) for remote in pipe._coordinator.remotes]
            assert [host._session.state for host in hosts] == ["aborted", "aborted"] and not any(host._session.work.execution for host in hosts)


async def test_a_value_that_cannot_be_sent() -> None:
    async with workers("driver", "a", service=service) as opened:
        module = (await place(opened[0], ["a"]))[0]
        async with Pipeline([lambda x: (x, object()), module], make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            with pytest.raises(ag.errors.ArgumentTypeError, match="what can be sent"):
                await pipe.step(*data(8))
        async with Pipeline([module], make_schedule("GPipe", 1, 4), loss_fn=mean_square) as pipe:
            with pytest.raises(ag.errors.ArgumentTypeError, match="what can be sent"):
                await pipe.eval(data(8)[0], extra=object())


async def test_options_of_stages_on_workers() -> None:
    x, target = data(9)
    alone = blocks(2)
    losses = await serial(alone, 4, x, target)
    with ToyDevice("toy:0"):
        async with workers("driver", "a", "b", service=service) as opened:
            first, last = await place(opened[0], ["a", None])
            behind(first, *opened).to("toy:0")
            async with Pipeline([Stage(first, where="loop", device="toy:0"), last], make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
                assert values(await pipe.step(x, target)) == losses
            assert [p.grad.device for p in behind(first, *opened).parameters()] == ["toy:0"] * 2
            assert [p.grad.to("cpu").numpy().tobytes() for p in behind(first, *opened).parameters()] == [each[1] for each in gradients(alone[:1])]


@pytest.mark.parametrize("homes", ["ab", "a.", ".b"])
@pytest.mark.parametrize("block", range(2))
def test_cancelled_at_many_steps_of_the_loop(homes: str, block: int) -> None:
    """Either the step was carried out on every worker, or nothing has changed on any; and the pipeline works afterwards."""
    x, target = data(4)
    expected: list[Any] = []
    outcomes: set[str] = set()

    async def main(begin: list[int], cancel_after: int | None) -> int:
        async with workers("driver", "a", "b", service=service) as opened:
            loop: Any = asyncio.get_running_loop()
            modules = await place(opened[0], [None if home == "." else home for home in homes])
            async with Pipeline(modules, make_schedule("1F1B", 2, 2), loss_fn=mean_square) as pipe:
                begin.append(loop.steps)
                running = loop.create_task(pipe.step(x, target))
                if cancel_after is not None:
                    loop.at_step(loop.steps + cancel_after, running.cancel)
                try:
                    await running
                    outcomes.add("done")
                except asyncio.CancelledError as error:
                    found = gradients(behind(module, *opened) for module in modules)
                    committed = getattr(error, "committed", False)
                    outcomes.add("committed" if committed else "cancelled")
                    assert found == (expected if committed else [None] * len(expected))
                    if not committed:
                        await settled(*opened)
                        await pipe.step(x, target)
                steps = loop.steps - begin[-1]
                assert gradients(behind(module, *opened) for module in modules) == expected
                return int(steps)

    async def alone() -> None:
        modules = blocks(2)
        await serial(modules, 2, x, target)
        expected.extend(gradients(modules))

    simulated_run(alone)
    steps = simulated_run(main, [], None).value
    for after in range(1 + 3 * block, steps, 6):
        run = simulated_run(main, [], after)
        assert not run.leftover_tasks
    assert outcomes == {"done", "committed", "cancelled"}


async def test_a_worker_that_has_lost_a_prepared_step() -> None:
    """The commit is not confirmed: what the others have written stays, and the error says whose outcome is not known."""
    x, target = data(8)
    async with workers("driver", "a", "b", service=service, idle=False) as opened:
        modules = await place(opened[0], ["a", "b"])
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            await pipe.eval(x)
            host = pipe._coordinator.remotes[1].ref
            real = behind(dist.RemoteModule(opened[0], "b", host), *opened)
            commit = real.commit

            async def late(step: int) -> bool:
                await real.abort(step)
                return bool(await commit(step))

            real.commit = late
            with pytest.raises(CommitUnknown, match="not confirmed by b") as caught:
                await pipe.step(x, target)
            assert caught.value.workers == ("b",) and caught.value.committed
            assert all(gradients([behind(modules[0], *opened)])) and not any(gradients([behind(modules[1], *opened)]))


async def test_a_hook_that_fails_on_a_worker() -> None:
    async with workers("driver", "a", service=service) as opened:
        modules = await place(opened[0], ["a", None])

        def on_leaf(leaf: Any) -> None:
            raise KeyError("oops")

        behind(modules[0], *opened).inner[0].weight.register_post_accumulate_grad_hook(on_leaf)
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            with pytest.raises(RemoteError, match="oops") as caught:
                await pipe.step(*data(8))
            assert caught.value.committed and all(gradients(behind(module, *opened) for module in modules))


async def test_a_step_asks_every_host_three_times() -> None:
    """To carry it out, whether it is prepared, and to commit; an evaluation ends with an abort."""
    async with workers("driver", "a", "b", service=service) as opened:
        async with Pipeline(await place(opened[0], ["a", "b"]), make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            await pipe.eval(data(8)[0])
            asked: Counter[str] = Counter()
            posted: list[tuple[str, int]] = []
            request = pipe._coordinator.remotes[0].ref._request

            def spied(ref: Any, what: str, values: Any, timeout: Any) -> Any:
                if what == "post":
                    posted.append((ref.owner, len(values[0])))
                    return request(ref, what, values, timeout)
                asked[values[0] if what == "call" else what] += 1
                return request(ref, what, values, timeout)

            for remote in pipe._coordinator.remotes:
                remote.ref._request = spied
            await pipe.step(*data(8))
            assert posted[0] == ("a", 4), "the microbatches go together"
            assert Counter(owner for owner, count in posted if count) == {"a": 1, "b": 4}
            assert asked == {"run": 2, "check": 2, "commit": 2}
            asked.clear()
            await pipe.eval(data(8)[0])
            assert asked == {"run": 2, "check": 2, "abort": 2}


async def test_values_that_are_large_or_many_do_not_travel_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "TOGETHER_BYTES", 2 * data(8)[0][:2].numpy().nbytes)
    sent: list[int] = []

    def spied(ref: Any, what: str, values: Any, timeout: Any) -> Any:
        sent.append(len(values[0]))
        return request(ref, what, values, timeout)

    async with workers("driver", "a", service=service) as opened:
        modules = await place(opened[0], ["a"])
        async with Pipeline(modules, make_schedule("GPipe", 1, 4), loss_fn=mean_square) as pipe:
            await pipe.step(*data(8))
            ref = pipe._coordinator.remotes[0].ref
            request = ref._request
            expected = await pipe.step(*data(8))
            for most in (16, 1):
                monkeypatch.setattr(outbox, "TOGETHER", most)
                sent.clear()
                ref._request = lambda ref, what, *rest: spied(ref, what, *rest) if what == "post" else request(ref, what, *rest)
                assert [loss.item() for loss in await pipe.step(*data(8))] == [loss.item() for loss in expected]
                assert sent[: 4 // min(most, 2)] == [min(most, 2)] * (4 // min(most, 2))


async def test_nobody_waits_for_confirmations_that_are_held(virtual_clock: VirtualClock) -> None:
    """A host that has nothing more to send asks for them."""
    async with workers("driver", "a", "b", service=service) as opened:
        async with Pipeline(await place(opened[0], ["a", "b"]), make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            await pipe.step(*data(8))
            began = virtual_clock.time()
            await pipe.step(*data(8))
            assert virtual_clock.time() - began < request_handlers.HOLD


async def test_hosts_of_others_take_nothing() -> None:
    """A value for another principal's host is refused as one for a host that never was."""
    server, tenant = two_principals()
    async with workers("driver", "a", "x", service=service, secrets={"a": server, "x": tenant}, idle=False) as opened:
        modules = await place(opened[0], ["a"])
        async with Pipeline(modules, make_schedule("GPipe", 1, 4), loss_fn=mean_square) as pipe:
            await pipe.step(*data(8))
            wire = pipe._coordinator.remotes[0].ref.to_wire()
            texts = []
            for key in (wire.id, bytes(16)):
                with pytest.raises(ReferenceLostError) as caught:
                    message = (wire._replace(id=key), [(2, 0, "entry", 0, 0, ((), {}))], True)
                    await opened[2].endpoint.request("a", Kind.POST, message, 5)
                texts.append(str(caught.value))
            assert texts[0] == texts[1]
            for malformed in ((), (wire,), (wire, 3, True), (wire, [], 1), (wire, [], True, 4), 7):
                with pytest.raises(ProtocolError, match="malformed"):
                    await opened[0].endpoint.request("a", Kind.POST, malformed, 5)
            await pipe.step(*data(8))


async def test_steps_that_come_too_late() -> None:
    x, target = data(8)
    async with workers("driver", "a", service=service) as opened:
        modules = await place(opened[0], ["a", None])
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            await pipe.step(x, target)
            host = pipe._coordinator.remotes[0].ref
            before = gradients(behind(module, *opened) for module in modules)
            assert await host.call("commit", 1) and await host.call("check", 1)  # again, which does nothing
            for method, args in (("run", (1, True, {})), ("run", (0, True, {})), ("commit", (0,)), ("commit", (2,))):
                with pytest.raises(RemoteError, match=r"too late|not prepared"):
                    await host.call(method, *args)
            await host.post([(0, 0, "entry", 0, 0, ((x,), {}))])  # comes too late, and is dropped
            wrong: Any
            several = [(5, 0, "entry", 0, 0, 3), (5, 0, "moon", 0, 0, ()), (5, 1, "entry", 0, 0, ((), {})), (5, 0, "forward", 0, 9, ((), ()))]
            for wrong in (*several, (5,), 7):
                with pytest.raises((ProtocolError, RemoteError), match="malformed RankValue|wrong place"):
                    await host.post([wrong])
            with pytest.raises(NotExposedError, match="takes no values"):
                await modules[0].ref.post([1])
            assert gradients(behind(module, *opened) for module in modules) == before
            await pipe._coordinator.abort(pipe._coordinator.open(6))
            pipe._steps = 6
            await pipe.step(x, target)


# ---------------------------------------------------------------- what can be asked for


async def test_hosts_are_made_around_what_may_be_called() -> None:
    async with workers("driver", "a", service=service) as (driver, _):
        ref = await driver.remote("a", Block, 0)
        module = dist.RemoteModule(driver, "a", ref)
        weight = (await module.parameters())[0]
        with pytest.raises(NotExposedError, match="no adapter 'pipeline.moon'"):
            await ref.adapt("pipeline.moon", [], {})
        with pytest.raises(NotExposedError, match="cannot be called"):
            await weight.adapt(STAGE_MEMBER_ADAPTER, [], {})
        plan = {
            "stages": {"0": [None, None, False]},
            "training": {"0": "0F0 0B0"},
            "evaluation": {"0": "0F0"},
            "stage_to_rank": [0],
            "microbatches": 1,
        }
        plan |= {"loss_stage": 0, "last_stage": 0, "scale": 1.0, "recovers": False}
        host = await ref.adapt(STAGE_MEMBER_ADAPTER, [], plan)
        for private in ("_find", "_commit", "__init__"):
            with pytest.raises(NotExposedError):
                await host.call(private, 1)
        for wrong in (
            {},
            {"stages": {"1": [None, None, False]}},
            {"stages": {"0": ["moon", None, False]}},
            {"stages": {"0": [None, "moon:1", False]}},
            {"stages": {"0": None}},
            {"training": {"0": "0F0 0Foo"}},
            {"training": {"1": "1F0"}},
            {"training": {"0": "0F3"}},
            {"scale": "x"},
        ):
            with pytest.raises((ProtocolError, RemoteError), match="malformed StagesRequest|a StagesRequest (with|for) "):
                await ref.adapt(STAGE_MEMBER_ADAPTER, [], {} if not wrong else plan | wrong)
        with pytest.raises(RemoteError, match="stages or rows that cannot be made"):
            await ref.adapt(STAGE_MEMBER_ADAPTER, [ref], plan)


async def test_places_that_do_not_work() -> None:
    async with workers("driver", "a", "b", service=service) as (driver, _, _):
        modules = await place(driver, ["a", "b", None])
        with pytest.raises(ArgumentError, match="rank 0 has stages on worker a and in this process"):
            Pipeline(modules[:2] + modules[2:] + modules[1:2], make_schedule("Interleaved1F1B", 2, 2, 2), loss_fn=mean_square)
        with pytest.raises(ArgumentError, match="pass this process's Worker"):
            Pipeline([modules[0].ref, modules[2]], make_schedule("1F1B", 2, 2), loss_fn=mean_square)
        with pytest.raises(ArgumentError, match="on another worker"):
            Stage(modules[0], weight_backward=print)
        async with Pipeline([modules[0].ref, modules[2]], make_schedule("1F1B", 2, 2), loss_fn=mean_square, worker=driver) as pipe:
            x, target = data(4)
            with pytest.raises(ArgumentError, match="on another worker"):
                await pipe.step(x.requires_grad_(), target)
            await pipe.step(x.detach(), target)
        with pytest.raises(PipelineError, match="closed"):
            await pipe.step(x.detach(), target)


async def test_a_worker_that_is_gone() -> None:
    async with workers("driver", "a", "b", service=service, idle=False) as (driver, a, b):
        modules = await place(driver, ["a", "b"])
        async with Pipeline(modules, make_schedule("1F1B", 2, 4), loss_fn=mean_square) as pipe:
            await pipe.step(*data(8))
            before = gradients([behind(modules[0], a)])
            await b.aclose()
            with pytest.raises((WorkerLostError, ReferenceLostError)):
                await pipe.step(*data(8))
            assert gradients([behind(modules[0], a)]) == before
