"""The distributed optimizer: parameters of several workers updated where they live, with the gradients of one context, once per step."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from typing import Any
from unittest import mock
from unittest.mock import DEFAULT

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.distributed.objects.optimizer_server import SteppedOptimizer
from aiograd.errors import (
    ArgumentError,
    ArgumentTypeError,
    CommitUnknown,
    ContextError,
    ContextReleasedError,
    DistributedError,
    GradientError,
    NoContextError,
    NotExposedError,
    ReferenceLostError,
    RemoteError,
    StepError,
    WorkerLostError,
)
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.memory import Switchboard
from tests.distributed.passes_kit import Net
from tests.distributed.workers import SECRET, leaf, settled, until, values, view, workers

service = dist.Service()


@service.reference
class Layer(ag.nn.Module):
    def __init__(self, *factors: float) -> None:
        self.weight = ag.nn.Parameter(list(factors))
        self.unused = ag.nn.Parameter([1.0])

    def forward(self, x: Any) -> Any:
        return x * self.weight

    def total(self) -> Any:
        return self.weight.sum()


@service.reference
class Fragile:
    """An optimizer of plain steps that fails or waits on demand."""

    broken: set[str] = set()
    steps: list[tuple[str, list[Any]]] = []
    gate: threading.Event | None = None
    #: how often a step finds too little memory
    short = 0

    def __init__(self, params: list[Any], where: str = "") -> None:
        self.params = params

    def step(self, gradients: Mapping[Any, Any]) -> None:
        name = threading.current_thread().name
        first = values(self.params[0])
        if Fragile.gate is not None:
            Fragile.gate.wait(10)
        if Fragile.short:
            Fragile.short -= 1
            raise MemoryError("no room")
        if str(first[0]) in Fragile.broken:
            raise ValueError(f"cannot step {first[0]}")
        Fragile.steps.append((name, first))


@pytest.fixture(autouse=True)
def _whole() -> None:
    Fragile.broken, Fragile.steps, Fragile.gate, Fragile.short = set(), [], None, 0


async def made(worker: dist.Worker, peer: str, *factors: float) -> dist.RemoteModule:
    return dist.RemoteModule(worker, peer, await worker.remote(peer, Layer, *factors))


async def weight_of(module: dist.RemoteModule) -> list[float]:
    return values((await module.state_dict())["weight"])


@pytest.mark.parametrize(("name", "options"), [("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adam", {"lr": 0.1}), ("AdamW", {"lr": 0.1})])
async def test_steps_are_those_of_one_process_to_the_bit(name: str, options: dict[str, Any]) -> None:
    head, first, second = Layer(0.5, 0.25), Layer(2.0, 3.0), Layer(-1.0, 4.0)
    local = getattr(ag.optim, name)([*first.parameters(), *second.parameters(), *head.parameters()], **options)
    async with workers("a", "b", "c", service=service) as (a, *_):
        stages = [await made(a, "b", 2.0, 3.0), await made(a, "c", -1.0, 4.0)]
        here = Layer(0.5, 0.25)
        optimizer = dist.DistributedOptimizer(a, getattr(ag.optim, name), [*stages, here], **options)
        for n in range(4):
            x = ag.tensor([1.0, 0.5 * n])
            async with a.context() as ctx:
                y = here(await stages[1](await stages[0](x)))
                await ctx.backward((y * y).sum())
                await optimizer.step(ctx)
            local.zero_grad()
            z = head(second(first(x)))
            await (z * z).sum().backward()
            local.step()
            assert optimizer.steps == n + 1
        assert [await weight_of(stage) for stage in stages] == [values(first.weight), values(second.weight)]
        assert values(here.weight) == values(head.weight) and here.weight.grad is None
        assert values((await stages[0].state_dict())["unused"]) == [1.0], "what has no gradient stays"


async def test_what_may_be_optimized() -> None:
    async with workers("a", "b", service=service) as (a, b):
        module = await made(a, "b", 2.0)
        named = await module.named_parameters()
        here, other = leaf(3), Layer(5.0)
        refs = [named["weight"], module, module.ref, here, a.refer(here), other, other.weight]
        optimizer = dist.DistributedOptimizer(a, "SGD", refs, lr=1.0)
        async with a.context() as ctx:
            y = await module(here * other.weight)
            await ctx.backward(y.sum())
            await optimizer.step(ctx)
        assert await weight_of(module) == [2 - 15] and values(here) == [3 - 10] and values(other.weight) == [5 - 6], "each once"
        del b


async def test_what_may_not_be_optimized() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, "b", 2.0)
        for refs, error, text in (
            ([], ArgumentError, "empty list of parameters"),
            ([3], ArgumentTypeError, "expected RemoteRefs, RemoteModules, parameters or modules, found int"),
            (None, ArgumentTypeError, "expected a list of RemoteRefs, .*, found NoneType"),
            (leaf(1, 2), ArgumentTypeError, "expected a list of RemoteRefs, .*, found"),
        ):
            with pytest.raises(error, match=text):
                dist.DistributedOptimizer(a, ag.optim.SGD, refs)  # type: ignore[arg-type]
        optimizer = dist.DistributedOptimizer(a, ag.optim.SGD, [module], lr=0.1)
        for refuse in (lambda: optimizer.restore(None, None), lambda: optimizer.add(None, like="b")):  # type: ignore[arg-type]
            with pytest.raises(ArgumentTypeError, match="expected a list of RemoteRefs"):
                await refuse()
        here = ag.nn.Linear(1, 1)
        for name in (3, [], None):
            with pytest.raises(ArgumentError, match="like="):
                await optimizer.add([here], like=name)  # type: ignore[arg-type]
            with pytest.raises(ArgumentError, match="one has to stay"):
                await optimizer.remove(name)  # type: ignore[arg-type]
        for refuse in (lambda: optimizer.step(3), lambda: optimizer.clip_grad_norm_(3, 1.0)):
            with pytest.raises(ArgumentTypeError, match=r"expected the context with the gradients, .*, found int"):
                await refuse()
        with pytest.raises(ArgumentTypeError, match=r"expected a class such as ag\.optim\.SGD"):
            dist.DistributedOptimizer(a, 3, [module])
        async with a.context() as ctx:
            for optimizer, error, text in (
                (dist.DistributedOptimizer(a, ag.optim.SGD, [module], lr=-1.0), RemoteError, "Error on Node b: .*lr"),
                (dist.DistributedOptimizer(a, ag.optim.SGD, [module], colour=1), RemoteError, "Error on Node b: .*colour"),
                (dist.DistributedOptimizer(a, "Nothing", [module]), NotExposedError, "Error on Node b: no class 'Nothing' is exposed"),
                (dist.DistributedOptimizer(a, "Layer", [module]), RemoteError, r"Layer is no optimizer: it has no step\(gradients\)"),
                (dist.DistributedOptimizer(a, "SGD", [await a.remote("b", Fragile, [])]), RemoteError, "is neither a parameter nor a module"),
            ):
                for _ in range(2):
                    with pytest.raises(error, match=text):
                        await optimizer.step(ctx)
                assert optimizer.steps == 0
            await module.delete()
            with pytest.raises(ReferenceLostError):
                await dist.DistributedOptimizer(a, "SGD", [module]).step(ctx)


async def test_a_step_needs_a_context_that_is_open() -> None:
    async with workers("a", "b", service=service) as (a, b):
        module = await made(a, "b", 2.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [module], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await module(leaf(1))).sum())
            with pytest.raises(ContextError, match="that is how worker b sees a context, and this is worker a"):
                await optimizer.step(view(b, ctx))
        with pytest.raises(ContextReleasedError):
            await optimizer.step(ctx)
        await optimizer.state_dict()
        ref = optimizer._optimizers["b"]
        with pytest.raises(NoContextError, match=r"await optimizer.step\(ctx\)"):
            await a.call("b", "aiograd.optimizer.step", ref, 1)
        assert await weight_of(module) == [2]
        async with a.context() as ctx:  # with no gradients at all: a step that changes nothing
            await optimizer.step(ctx)
        assert await weight_of(module) == [2]


async def test_a_context_that_the_owner_does_not_know_changes_nothing_there() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [left, right], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await left(leaf(1))).sum())
            await optimizer.step(ctx)
        assert await weight_of(left) == [1] and await weight_of(right) == [3]


async def test_contexts_side_by_side_step_with_their_own_gradients() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, "b", 0.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [module], lr=1.0)

        async def train(n: int) -> None:
            async with a.context() as ctx:
                await ctx.backward((await module(ag.tensor([float(n)]))).sum())
                await optimizer.step(ctx)

        await asyncio.gather(*map(train, range(1, 11)))
        assert await weight_of(module) == [-55] and optimizer.steps == 10


# -------------------------------------------------------------------- steps that fail


async def test_a_step_that_fails_on_one_worker_says_who_has_taken_it() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, Fragile, [left, right])
        async with a.context() as ctx:
            await optimizer.step(ctx)
            Fragile.broken = {"3.0"}
            text = r"optimizer step 2 was taken on b and not confirmed by c \(Error on Node c: aiograd.optimizer.step: ValueError: cannot step 3.0\)"
            with pytest.raises(StepError, match=text) as caught:
                await optimizer.step(ctx)
            assert (caught.value.step, caught.value.applied, caught.value.failed) == (2, ("b",), ("c",))
            assert isinstance(caught.value.__cause__, RemoteError)
            with pytest.raises(StepError, match="ValueError: cannot step 3.0") as caught:
                await optimizer.step(ctx)
            assert (caught.value.step, caught.value.applied, caught.value.failed) == (2, ("b",), ("c",))
            Fragile.broken = set()
            await optimizer.step(ctx)  # c takes it, and b does not repeat it
            assert optimizer.steps == 2 and sorted(first for _, first in Fragile.steps) == [[2.0], [2.0], [3.0], [3.0]]
            await optimizer.step(ctx)
        assert optimizer.steps == 3 and len(Fragile.steps) == 6


@pytest.mark.parametrize("next_one", ["in another context", "after a further pass", "with grad"])
async def test_a_step_that_some_have_taken_is_not_followed_by_another_one(next_one: str) -> None:
    """It is refused before any worker is asked, and so is what would mix states of different steps."""
    async with workers("a", "b", "c", service=service) as (a, *_):
        modules = [await made(a, "b", 2.0), await made(a, "c", 3.0)]
        optimizer = dist.DistributedOptimizer(a, "Fragile", modules)

        async def backward(ctx: Any) -> None:
            await ctx.backward((await modules[1](await modules[0](leaf(1)))).sum())

        async def refused() -> None:
            clip, add = lambda: optimizer.clip_grad_norm_(ctx, 1.0), lambda: optimizer.add([Layer(1.0)], like="b")
            for refuse in (lambda: optimizer.step(None if next_one == "with grad" else ctx), clip, add, optimizer.state_dict):
                with pytest.raises(StepError, match="step 1 was taken on b and not confirmed by c, and this request would .*checkpoint") as caught:
                    await refuse()
                assert (caught.value.step, caught.value.applied, caught.value.failed) == (1, ("b",), ("c",))
            assert len(Fragile.steps) == 1
            await optimizer.remove("c")
            await optimizer.step(ctx)
            assert len(Fragile.steps) == optimizer.steps == 2

        async with a.context() as ctx:
            await backward(ctx)
            Fragile.broken = {"3.0"}
            with pytest.raises(StepError, match="cannot step 3.0"):
                await optimizer.step(None if next_one == "with grad" else ctx)
            Fragile.broken = set()
            await backward(ctx)
            if next_one != "in another context":
                await refused()
        if next_one == "in another context":
            async with a.context() as ctx:
                await backward(ctx)
                await refused()


async def test_a_step_that_no_worker_has_confirmed_is_not_asked_for_again_with_other_gradients_of_its_context() -> None:
    """A worker may have taken it with the gradients of then; in another context it would say so."""
    async with workers("a", "b", "c", service=service) as (a, *_):
        modules = [await made(a, "b", 2.0), await made(a, "c", 3.0)]
        optimizer = dist.DistributedOptimizer(a, "Fragile", modules)
        Fragile.broken = {"2.0", "3.0"}
        for is_other in (False, True):
            async with a.context() as ctx:
                await ctx.backward((await modules[1](await modules[0](leaf(1)))).sum())
                if is_other:
                    await optimizer.step(ctx)
                    break
                with pytest.raises(StepError, match="cannot step"):
                    await optimizer.step(ctx)
                Fragile.broken = set()
                await ctx.backward((await modules[1](await modules[0](leaf(1)))).sum())
                with pytest.raises(StepError, match="was taken on no worker .* after a further pass or clipping.* in a new context"):
                    await optimizer.step(ctx)
                assert not Fragile.steps
        assert optimizer.steps == 1 and len(Fragile.steps) == 2


@pytest.mark.parametrize("method", ["load_state_dict", "restore"])
async def test_gradients_of_a_step_that_failed_are_in_no_step_after_a_restore(method: str) -> None:
    """One worker has taken the step and cleared them, the other one still has them."""
    async with workers("a", "b", "c", service=service) as (a, *others):
        modules = [await made(a, "b", 2.0), await made(a, "c", 3.0)]
        layers = [worker._objects.table._held[module.ref.key].value for worker, module in zip(others, modules, strict=True)]
        optimizer = dist.DistributedOptimizer(a, "SGD", modules, lr=1.0)

        def backward() -> None:
            for layer in layers:
                layer.weight.grad = ag.tensor([1.0]) if layer.weight.grad is None else layer.weight.grad + 1.0

        state = await optimizer.state_dict()
        backward()
        with mock.patch.object(ag.optim.SGD, "astep", side_effect=ValueError("c cannot")) as broken:
            broken.side_effect = [DEFAULT, ValueError("one cannot")]
            with pytest.raises(StepError, match="one cannot") as caught:
                await optimizer.step()
        assert len(caught.value.applied) == len(caught.value.failed) == 1
        for module, weight in zip(modules, (2.0, 3.0), strict=True):
            await module.load_state_dict({"weight": ag.tensor([weight]), "unused": ag.ones(1)})
        await (optimizer.load_state_dict(state) if method == "load_state_dict" else optimizer.restore(modules, state))
        backward()
        await optimizer.load_state_dict(state)
        await optimizer.step()
        assert [await weight_of(module) for module in modules] == [[1.0], [2.0]]


async def test_clipping_between_a_failed_step_and_the_next_one_in_its_context() -> None:
    async with workers("a", "b", service=service) as (a, *_):
        module = await made(a, "b", 2.0)
        optimizer = dist.DistributedOptimizer(a, "Fragile", [module])
        async with a.context() as ctx:
            await ctx.backward((await module(leaf(30))).sum())
            Fragile.broken = {"2.0"}
            with pytest.raises(StepError, match="cannot step"):
                await optimizer.step(ctx)
            await optimizer.clip_grad_norm_(ctx, 1.0)
            Fragile.broken = set()
            with pytest.raises(StepError, match="was taken on no worker .* after a further pass or clipping.* in a new context"):
                await optimizer.step(ctx)


async def test_a_step_that_the_lost_worker_alone_has_taken_is_taken_by_the_others() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        optimizer = dist.DistributedOptimizer(a, "Fragile", [await made(a, "b", 2.0), await made(a, "c", 3.0)])
        async with a.context() as ctx:
            Fragile.broken = {"3.0"}
            with pytest.raises(StepError):
                await optimizer.step(ctx)
            Fragile.broken = set()
            await optimizer.remove("b")
            await optimizer.step(ctx)
        assert optimizer.steps == 1 and sorted(first for _, first in Fragile.steps) == [[2.0], [3.0]]


async def test_states_that_were_loaded_on_some_workers_only_are_not_stepped_from() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        optimizer = dist.DistributedOptimizer(a, "SGD", [await made(a, "b", 2.0), await made(a, "c", 3.0)], lr=1.0)
        state = await optimizer.state_dict()
        spoilt = {**state, "workers": {**state["workers"], "b": {**state["workers"]["b"], "groups": 3}}}
        with pytest.raises(RemoteError):
            await optimizer.load_state_dict(spoilt)
        async with a.context() as ctx:
            with pytest.raises(DistributedError, match=r"load_state_dict\(\) did not get to its end"):
                await optimizer.step(ctx)
            await optimizer.load_state_dict(state)
            await optimizer.step(ctx)


async def test_a_step_that_nobody_has_taken_is_tried_again_under_its_number() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, "Fragile", [left, right])
        async with a.context() as ctx:
            Fragile.broken = {"2.0", "3.0"}
            with pytest.raises(StepError, match=r"was taken on no worker and not confirmed by b, c") as caught:
                await optimizer.step(ctx)
            assert caught.value.applied == () and optimizer.steps == 0
            Fragile.broken = set()
            await optimizer.step(ctx)
            assert optimizer.steps == 1 and len(Fragile.steps) == 2


async def test_a_worker_that_is_short_of_memory_is_told_of_a_step_again(virtual_clock: VirtualClock) -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        optimizer = dist.DistributedOptimizer(a, "Fragile", [await made(a, "b", 2.0), await made(a, "c", 3.0)])
        async with a.context() as ctx:
            Fragile.short = 3
            await optimizer.step(ctx)
            assert optimizer.steps == 1 and sorted(first for _, first in Fragile.steps) == [[2.0], [3.0]] and not Fragile.short


@pytest.mark.parametrize("place", [0, 1, 2, 3])
async def test_a_worker_that_is_short_of_memory_within_a_step_updates_nothing_twice(virtual_clock: VirtualClock, place: int) -> None:
    """Before it has updated a parameter the step is taken again, else all have to be restored."""
    short = [place]

    def initial(optimizer: Any, name: str, parameter: Any, group: Any, original: Any = ag.optim.Adam._initial) -> Any:
        short[0] -= 1
        if short[0] == -1:
            raise MemoryError("no room")
        return original(optimizer, name, parameter, group)

    first, second, model = leaf(*[1.0] * 3000), leaf(2.0, 3.0), [leaf(*[1.0] * 3000), leaf(2.0, 3.0)]
    local = ag.optim.Adam(model, lr=0.1)
    await (model[0].sum() + model[1].sum()).backward()
    local.step()
    async with workers("a", service=service) as (a,):
        optimizer = dist.DistributedOptimizer(a, "Adam", [first, second], lr=0.1)
        async with a.context() as ctx:
            await ctx.backward(first.sum() + second.sum())
            with mock.patch.object(ag.optim.Adam, "_initial", initial):
                if place < 2:
                    await optimizer.step(ctx)
                else:
                    for _ in range(2):
                        with pytest.raises(StepError, match="step 1 has failed when some parameters were updated: they would be updated twice"):
                            await optimizer.step(ctx)
            assert values(first) == values(model[0]) and (values(second) == values(model[1])) is (place < 2)
            if place < 2:
                await optimizer.step(ctx)
                local.step()
                assert values(first) == values(model[0])


async def test_a_step_is_taken_once_however_often_it_is_asked_for() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, "b", 2.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [module], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await module(leaf(1))).sum())
            await optimizer.step(ctx)
            ref = optimizer._optimizers["b"]
            assert await asyncio.gather(*(a.call("b", "aiograd.optimizer.step", ref, 1) for _ in range(5))) == [1] * 5
            assert await weight_of(module) == [1]
            assert await asyncio.gather(*(a.call("b", "aiograd.optimizer.step", ref, 2) for _ in range(5))) == [2] * 5
            assert await weight_of(module) == [0]
            with pytest.raises(Exception, match="step 4 of an optimizer that has taken 2: this worker has missed one"):
                await a.call("b", "aiograd.optimizer.step", ref, 4)


@pytest.mark.parametrize("when", ["begun", "just sent"])
async def test_a_step_that_has_begun_is_carried_out_everywhere_though_its_caller_goes_away(when: str) -> None:
    async with workers("a", "b", "c", service=service) as (a, b, _):
        modules = [await made(a, "b", 2.0), await made(a, "c", 3.0)]
        optimizer = dist.DistributedOptimizer(a, "Fragile", modules)
        await optimizer._prepare()
        Fragile.gate = threading.Event()
        async with a.context() as ctx:
            step = asyncio.ensure_future(optimizer.step(ctx))
            waiting = asyncio.ensure_future(optimizer.step(ctx))
            await until(lambda: taking(b) if when == "begun" else optimizer.steps)
            for each in (waiting, step):
                each.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await each
            assert not Fragile.steps
        Fragile.gate.set()
        async with a.context() as ctx:
            await optimizer.step(ctx)
        taken = [first[0] for _, first in Fragile.steps]
        assert taken.count(2) == taken.count(3) == optimizer.steps, "the same steps everywhere"
        assert optimizer.steps == 2 if when == "begun" else optimizer.steps in (1, 2), "and the one that waited was withdrawn"


@service.reference
class Patient:
    """An optimizer whose steps take a second."""

    taken = 0

    def __init__(self, params: list[Any]) -> None: ...

    async def astep(self, gradients: Mapping[Any, Any]) -> None:
        await asyncio.sleep(1.0)
        Patient.taken += 1


async def test_a_step_whose_confirmation_comes_too_late_is_confirmed_when_it_is_asked_for_again(virtual_clock: VirtualClock) -> None:
    Patient.taken = 0
    async with workers("a", "b", service=service) as (a, _):
        optimizer = dist.DistributedOptimizer(a, Patient, [await made(a, "b", 2.0)])
        async with a.context() as ctx:
            with pytest.raises(StepError, match=r"was taken on no worker and not confirmed by b .*did not end within"):
                await optimizer.step(ctx, timeout=0.5)
            await asyncio.sleep(1.0)
            assert Patient.taken == 1, "it was carried out all the same"
            await optimizer.step(ctx)
            assert Patient.taken == 1 and optimizer.steps == 1


def taking(worker: dist.Worker) -> bool:
    """True if a step is under way on a worker."""
    return any(task.get_name().endswith(":step") for task in worker._core._tasks)


async def test_a_number_that_was_taken_with_other_gradients_is_not_taken_for_a_repetition() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [left, right], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await right(await left(leaf(1)))).sum())
            await optimizer.state_dict()
            await a.call("b", "aiograd.optimizer.step", optimizer._optimizers["b"], 1)  # taken, but its confirmation was lost, and c heard nothing
        async with a.context() as ctx:
            await ctx.backward((await right(await left(leaf(1)))).sum())
            with pytest.raises(StepError, match="taken 1, with the gradients of another context: its confirmation must have been lost") as caught:
                await optimizer.step(ctx)
            assert (caught.value.applied, caught.value.failed) == (("c",), ("b",))


async def test_gradients_that_are_in_doubt_are_not_stepped_with() -> None:
    async with workers("a", "b", service=service) as (a, b):
        module = await made(a, "b", 2.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [module], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await module(leaf(1))).sum())
            view(b, ctx).in_doubt.add(("a", 1))
            with pytest.raises(StepError, match="worker b does not know whether the gradients of context") as caught:
                await optimizer.step(ctx)
            assert isinstance(caught.value.__cause__, CommitUnknown) and caught.value.__cause__.workers == ("b",)
            view(b, ctx).in_doubt.clear()
        assert await weight_of(module) == [2]
        await settled(a, b)


# -------------------------------------------------------------------- checkpoints


async def train(a: dist.Worker, modules: list[dist.RemoteModule], optimizer: dist.DistributedOptimizer, steps: int) -> None:
    for n in range(steps):
        async with a.context() as ctx:
            x: Any = ag.tensor([1.0, float(n)])
            for module in modules:
                x = await module(x)
            await ctx.backward((x * x).sum())
            await optimizer.step(ctx)


@pytest.mark.parametrize(("name", "options"), [("SGD", {"lr": 0.01, "momentum": 0.9}), ("Adam", {"lr": 0.1, "betas": (0.8, 0.9)})])
async def test_training_goes_on_from_a_checkpoint_on_other_workers_to_the_bit(name: str, options: dict[str, Any]) -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        modules = [await made(a, "b", 2.0, 1.0), await made(a, "c", 3.0, 1.0)]
        optimizer = dist.DistributedOptimizer(a, name, modules, **options)
        await train(a, modules, optimizer, 3)
        checkpoint = await optimizer.state_dict(), [await module.state_dict() for module in modules]
        await train(a, modules, optimizer, 3)
        expected = [await weight_of(module) for module in modules]

    async with workers("a", "b", "c", service=service) as (a, *_):
        modules = [await made(a, "b", 0.0, 0.0), await made(a, "c", 0.0, 0.0)]
        optimizer = dist.DistributedOptimizer(a, name, modules, **{**options, "lr": 99.0})
        await optimizer.load_state_dict(checkpoint[0])
        for module, state in zip(modules, checkpoint[1], strict=True):
            await module.load_state_dict(state)
        assert optimizer.steps == 3
        await train(a, modules, optimizer, 3)
        assert [await weight_of(module) for module in modules] == expected
        assert optimizer.steps == 6


async def test_after_a_partial_step_a_checkpoint_makes_everybody_agree_again() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, ag.optim.SGD, [left, right], lr=1.0)
        state = await optimizer.state_dict()
        async with a.context() as ctx:
            ref = optimizer._optimizers["b"]
            await a.call("b", "aiograd.optimizer.step", ref, 1)  # as if c had not heard of it
            optimizer._steps.restored(1)
            with pytest.raises(StepError, match="missed one"):
                await optimizer.step(ctx)
            await optimizer.load_state_dict(state)
            await optimizer.step(ctx)
        assert optimizer.steps == 1


async def test_a_state_that_does_not_fit() -> None:
    async with workers("a", "b", "c", service=service) as (a, *_):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, ag.optim.SGD, [left, right], lr=1.0)
        one = await dist.DistributedOptimizer(a, ag.optim.SGD, [left], lr=1.0).state_dict()
        for state in (one, {}, 3, {"steps": 1}, {"workers": 3}):
            with pytest.raises(ArgumentError, match=r"expected a state of the workers \['b', 'c'\]"):
                await optimizer.load_state_dict(state)  # type: ignore[arg-type]
        state = await optimizer.state_dict()
        whole = state["workers"]["b"]
        for spoilt in ({"taken": 1}, {**whole, "taken": "1"}, 3, {**whole, "state": [[1, 2, 3]]}, {**whole, "state": 3}):
            with pytest.raises(ArgumentError, match="the state of worker 'b' is not what"):
                await optimizer.load_state_dict({**state, "workers": {**state["workers"], "b": spoilt}})
        async with a.context() as ctx:
            await optimizer.step(ctx)


async def test_large_parameters_are_stepped_off_the_loop() -> None:
    async with workers("a", "b", service=service) as (a, _):
        module = await made(a, "b", *np.ones(1000).tolist())
        optimizer = dist.DistributedOptimizer(a, Fragile, [module])
        async with a.context() as ctx:
            await optimizer.step(ctx)
        assert Fragile.steps[0][0] != threading.main_thread().name


async def test_a_large_state_of_an_optimizer_goes_in_several_messages() -> None:
    limits = dist.Limits(message_bytes=12_000, tensors=3)
    async with workers("a", "b", service=service, limits=limits) as (a, _):
        module = await made(a, "b", *map(float, range(600)))
        parameters = await module.parameters()
        optimizer, other = (dist.DistributedOptimizer(a, "Adam", parameters, lr=0.1) for _ in range(2))
        async with a.context() as ctx:
            await ctx.backward(await module.ref.call("total"))
            await optimizer.step(ctx)
        state = await optimizer.state_dict()
        assert {type(each) for _, each in state["workers"]["b"]["state"]} == {dict}
        await other.load_state_dict(state)
        assert plain(await other.state_dict()) == plain(state) and other.steps == 1


def plain(state: Any) -> Any:
    if isinstance(state, dict):
        return {name: plain(value) for name, value in state.items()}
    if isinstance(state, list):
        return [plain(value) for value in state]
    return values(state) if isinstance(state, ag.Tensor) else state


async def test_restore_goes_on_with_new_references_after_a_worker_was_lost() -> None:
    board = Switchboard()
    options: dict[str, Any] = {"service": service, "secret": SECRET}
    async with workers("a", "c", service=service, board=board, idle=False) as (a, c):
        async with dist.Worker("b", transport=board.transport("b"), **options) as b:
            a.add_peer("b", b.url)
            stages = [await made(a, "b", 2.0), await made(a, "c", 3.0)]
            here = Layer(1.0)
            optimizer = dist.DistributedOptimizer(a, "Adam", [*stages, here], lr=0.1)

            async def train(n: int) -> None:
                for _ in range(n):
                    async with a.context() as ctx:
                        y = here(await stages[1](await stages[0](leaf(1))))
                        await ctx.backward((y * y).sum())
                        await optimizer.step(ctx)

            await train(2)
            saved = [await stage.state_dict() for stage in stages], {**here.state_dict()}, await optimizer.state_dict()
            kept = {name: ag.tensor(value.numpy().copy()) for name, value in saved[1].items()}
            await train(2)
            wanted = [await weight_of(stage) for stage in stages], values(here.weight)
        held = c.statistics().references, a.statistics().references
        async with dist.Worker("b", transport=board.transport("b"), **options) as b:
            stages[0] = await made(a, "b", 9.0)
            for stage, state in zip(stages, saved[0], strict=True):
                await stage.load_state_dict(state)
            here.load_state_dict(kept)
            await optimizer.restore([*stages, here], saved[2])
            assert optimizer.steps == 2
            assert (c.statistics().references, a.statistics().references) == held, "the old ones are gone"
            await train(2)
            assert ([await weight_of(stage) for stage in stages], values(here.weight)) == wanted


async def test_a_restore_that_fails_changes_nothing_or_lets_no_step_happen() -> None:
    async with workers("a", "b", "c", service=service) as (a, b, _):
        modules = [await made(a, "b", 2.0), await made(a, "c", 3.0)]
        optimizer = dist.DistributedOptimizer(a, "Adam", modules, lr=0.1)
        state = await optimizer.state_dict()
        mine = a.statistics().references
        for refs, text in (([modules[0], Layer(1.0)], "expected a state of the workers"), ([], "empty"), ([*modules, 3], "found int")):
            with pytest.raises(ArgumentError, match=text):
                await optimizer.restore(refs, state)
        assert a.statistics().references == mine
        async with a.context() as ctx:
            await ctx.backward((await modules[1](await modules[0](leaf(1)))).sum())
            await optimizer.step(ctx)
            state = await optimizer.state_dict()
            gone = await made(a, "b", 1.0)
            await gone.delete()
            with pytest.raises(ReferenceLostError):
                await optimizer.restore([gone, modules[1]], state)
            for use in (optimizer.step(ctx), optimizer.state_dict(), optimizer.load_state_dict(state)):
                with pytest.raises(DistributedError, match="call it again"):
                    await use
            await optimizer.restore(modules, state)
            await optimizer.step(ctx)
            assert optimizer.steps == 2


# -------------------------------------------------------------------- clipping


def clipped_at_home(grads: list[Any], *arguments: Any) -> tuple[bytes, list[bytes]]:
    """In one process: the norm of these gradients, and what clipping makes of them, as bytes."""
    owners = [ag.nn.Parameter(np.zeros(grad.shape, grad.dtype)) for grad in grads]
    for owner, grad in zip(owners, grads, strict=True):
        owner.grad = ag.tensor(grad)
    norm = ag.optim.clip_grad_norm_(owners, *arguments)
    return norm.numpy().tobytes(), [owner.grad.numpy().tobytes() for owner in owners]


@pytest.mark.parametrize("norm_type", [2.0, 1.0, 3.0, float("inf")])
@pytest.mark.parametrize("max_norm", [0.7, 1e6])
async def test_the_gradients_of_all_workers_have_one_norm(max_norm: float, norm_type: float) -> None:
    """To the bit as in one process, where sums over float32 depend on the order: owners as they were given, then the parameters of each."""
    random = np.random.default_rng(3)
    factors = [(random.standard_normal(5) * 10.0**n).astype(np.float32).tolist() for n in (-3, 2, 0, 1)]
    async with workers("a", "b", "c", service=service) as (a, b, c):
        first, second, third = [await made(a, peer, *values) for peer, values in zip("cbc", factors, strict=False)]
        own = ag.nn.Parameter(factors[3])
        optimizer = dist.DistributedOptimizer(a, "SGD", [first, own, second, third], lr=1.0)
        async with a.context() as ctx:
            x = leaf(*random.standard_normal(5))
            await ctx.backward((await first(x) * await second(x) * await third(x) * own).sum())

            def known() -> list[Any]:
                """The parameters of the workers, in the order of the optimizer: c was named first, then a, then b."""
                found = {tuple(values(known)): grad for worker in (a, b, c) for known, grad in view(worker, ctx).grads.items()}
                return [found[tuple(factors[n])].detach().numpy().copy() for n in (0, 2, 3, 1)]

            before = known()
            norm, wanted = clipped_at_home(before, max_norm, norm_type)
            found = await optimizer.clip_grad_norm_(ctx, max_norm, norm_type)
            after = known()
            assert found.numpy().tobytes() == norm and [grad.tobytes() for grad in after] == wanted
            assert (wanted == [grad.tobytes() for grad in before]) == (max_norm > 1)
            await optimizer.step(ctx)
            assert values(own) == (np.float32(factors[3]) - after[2]).tolist()
            assert await weight_of(second) == (np.float32(factors[1]) - after[3]).tolist()


async def test_clipping_where_no_gradient_has_arrived() -> None:
    async with workers("a", "b", service=service) as (a, _):
        optimizer = dist.DistributedOptimizer(a, "SGD", [await made(a, "b", 2.0)], lr=1.0)
        async with a.context() as ctx:
            assert (await optimizer.clip_grad_norm_(ctx, 1.0)).item() == 0.0
            with pytest.raises(ArgumentError, match="expected a limit of at least 0"):
                await optimizer.clip_grad_norm_(ctx, -1.0)
            for limits in ((None,), ("1",), (1.0, None)):
                with pytest.raises(ArgumentTypeError, match="expected a number"):
                    await optimizer.clip_grad_norm_(ctx, *limits)
        with pytest.raises(NoContextError, match="scales the gradients of a context"):
            await optimizer.clip_grad_norm_(None, 1.0)
        with pytest.raises(ContextReleasedError):
            await optimizer.clip_grad_norm_(ctx, 1.0)


async def test_a_norm_that_is_not_finite_changes_nothing() -> None:
    async with workers("a", "b", service=service) as (a, b):
        module = await made(a, "b", 2.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [module], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await module(leaf(float("inf")))).sum())
            with pytest.raises(GradientError, match="norm of order 2.0 of the gradients is inf"):
                await optimizer.clip_grad_norm_(ctx, 1.0, error_if_nonfinite=True)
            (grad,) = view(b, ctx).grads.values()
            assert values(grad) == [float("inf")] and not ctx.in_doubt


@pytest.mark.parametrize("when", ["sizes", "scaling"])
async def test_a_worker_that_is_lost_while_gradients_are_clipped(virtual_clock: VirtualClock, when: str) -> None:
    """Before anything was scaled: an error, and a step is possible where it was. After: nobody steps with gradients of which some are scaled."""

    board = Net()
    async with workers("a", "b", "c", service=service, board=board, idle=False) as (a, b, c):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [left, right], lr=1.0)
        async with a.context() as ctx:
            await ctx.backward((await left(leaf(30)) * await right(leaf(1))).sum())
            target = "aiograd.optimizer.gradient_sizes" if when == "sizes" else "aiograd.optimizer.scale_gradients"
            serve = c._calls.builtins[target]

            async def die(*arguments: Any) -> Any:
                board.kill("c")
                return await serve(*arguments)

            c._calls.builtins[target] = die
            with pytest.raises(WorkerLostError if when == "sizes" else CommitUnknown) as caught:
                await optimizer.clip_grad_norm_(ctx, 1.0)
            (grad,) = view(b, ctx).grads.values()
            if when == "sizes":
                assert values(grad) == [90] and not ctx.in_doubt
            else:
                assert isinstance(caught.value, CommitUnknown) and caught.value.workers == ("c",) and values(grad) < [2]
                with pytest.raises(CommitUnknown, match="clipping not to have reached every worker"):
                    await optimizer.step(ctx)
                with pytest.raises(CommitUnknown):
                    await optimizer.clip_grad_norm_(ctx, 1.0)
                assert await weight_of(left) == [2]


async def test_clipping_that_is_cancelled_is_carried_out(virtual_clock: VirtualClock) -> None:
    async with workers("a", "b", "c", service=service) as (a, b, c):
        left, right = await made(a, "b", 2.0), await made(a, "c", 3.0)
        optimizer = dist.DistributedOptimizer(a, "SGD", [left, right], lr=1.0)
        for turns in range(12):
            async with a.context() as ctx:
                await ctx.backward((await left(leaf(30)) * await right(leaf(1))).sum())
                clipping = asyncio.ensure_future(optimizer.clip_grad_norm_(ctx, 1.0))
                for _ in range(turns):
                    await asyncio.sleep(0)
                began = optimizer._lock.locked() or clipping.done()
                clipping.cancel()
                await asyncio.wait([clipping])
                async with optimizer._lock:
                    scaled = [values(grad)[0] < 2 for worker in (b, c) for grad in view(worker, ctx).grads.values()]
                assert scaled == [began] * 2 and not ctx.in_doubt


async def test_a_step_counts_as_a_modification_of_what_it_writes_only() -> None:
    """So the graph of another context that used other parameters of the same optimizer can still be differentiated."""
    used, other = ag.nn.Parameter([2.0]), ag.nn.Parameter([3.0])
    loss = (used * used).sum()
    stepped = SteppedOptimizer(ag.optim.SGD([used, other], lr=1.0))
    await stepped.step(1, b"a context", {other: ag.tensor([1.0])})
    assert (used.version, other.tolist()) == (0, [2.0])
    await loss.backward()
    assert used.grad is not None and used.grad.tolist() == [4.0]
