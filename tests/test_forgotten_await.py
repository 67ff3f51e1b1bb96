"""A coroutine that is never awaited names the public function and the line that called it, and is a plain coroutine otherwise."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import inspect
import re
import warnings
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

import aiograd as ag
from aiograd import cuda
from aiograd import distributed as dist
from aiograd.distributed.autograd.nodes import RecvNode
from aiograd.errors import ArgumentTypeError, LoopError
from aiograd.testing.suspension import coroutine_name
from tests.distributed.workers import workers
from tests.public_names import MODULES, public_names
from tests.support import assert_awaiting_raises, assert_raises, leaf

service = dist.Service()


@service.function
def squared(x: ag.Tensor) -> ag.Tensor:
    """The square of a number."""
    return x * x


@service.reference
class Box:
    """An object of a worker."""


Call = Callable[[], Any]

#: public functions whose coroutines nothing in a user's program awaits: the library does
OF_THE_LIBRARY = {RecvNode.carry.__qualname__, dist.Group.ask.__qualname__}


@contextlib.asynccontextmanager
async def calls() -> AsyncIterator[dict[str, Call]]:
    """A call of every public ``def`` that returns a coroutine, by the function's name."""
    async with workers("here", "there", service=service, idle=False) as (here, there), here.context() as ctx:
        x = leaf([2.0])
        y = (await here.call("there", "squared", x)).sum()
        groups = await asyncio.gather(*(dist.join_group(worker, ("here", "there")) for worker in (here, there)))
        group, ref = groups[0], await here.remote("there", "Box")
        array = x.detach().numpy()
        yield {
            "backward": lambda: ag.backward(y), "grad": lambda: ag.grad(y, [x]), "Tensor.backward": lambda: y.backward(),
            "offload": lambda: ag.offload(abs, 1), "Context.backward": lambda: ctx.backward(y), "Context.grad": lambda: ctx.grad(y, [x]),
            "Worker.call": lambda: here.call("there", "squared", x), "RemoteRef.call": lambda: ref.call("sum"),
            "RemoteRef.post": lambda: ref.post([1]), "RemoteRef.call_all": lambda: ref.call_all([ref], "sum"),
            "RemoteRef.adapt": lambda: ref.adapt("stages", [], {}), "RemoteRef.get": lambda: ref.get(), "RemoteRef.delete": lambda: ref.delete(),
            "Group.all_reduce": lambda: group.all_reduce(array), "Group.reduce_scatter": lambda: group.reduce_scatter(array),
            "Group.all_gather": lambda: group.all_gather(array), "Group.broadcast": lambda: group.broadcast(array),
            "Group.sum_in_turn": lambda: group.sum_in_turn([[array]]),
            "Group.barrier": lambda: group.barrier(),
        }  # fmt: skip


def forgotten(call: Call) -> str:
    """The warning of Python when the coroutine is dropped elsewhere."""
    coroutine = call()
    assert inspect.iscoroutine(coroutine) and asyncio.iscoroutine(coroutine) and inspect.isawaitable(coroutine)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        del coroutine
    return "\n".join(str(warning.message) for warning in caught if "never awaited" in str(warning.message))


def returning_coroutines() -> Iterator[str]:
    """Names of the public functions and methods that are a ``def`` and return a coroutine."""
    for module in MODULES:
        if module == cuda.__name__:  # where its functions return before the device is done there is a device
            continue
        for name in public_names(module):
            functions = vars(name.value).values() if inspect.isclass(name.value) else [name.value]
            for function in functions:
                if inspect.isfunction(function) and not inspect.iscoroutinefunction(function):
                    if str(function.__annotations__.get("return", "")).startswith("Coroutine") and not function.__name__.startswith("_"):
                        yield function.__qualname__


@pytest.mark.one_loop
async def test_every_public_function_that_returns_a_coroutine_is_named_with_the_line_of_the_call() -> None:
    async with calls() as made:
        assert set(made) == set(returning_coroutines()) - OF_THE_LIBRARY
        for name, call in made.items():
            said = forgotten(call)
            here = f"{re.escape(__file__)}:{call.__code__.co_firstlineno}"
            assert re.search(f"coroutine '{re.escape(name)}, called at {here}' was never awaited", said), (name, said)
            assert "_" not in said.partition(",")[0].replace(name, ""), said


async def test_the_line_is_that_of_the_call_in_a_function_of_many_lines() -> None:
    x = leaf([2.0])
    y = (x * x).sum()
    kept = [
        y.backward(),
        ag.grad(y, [x]),
    ]
    first = inspect.currentframe().f_lineno - 4 + 1  # type: ignore[union-attr]
    texts = [str(coroutine.__qualname__) for coroutine in kept]
    assert [text.rpartition(":")[2] for text in texts] == [str(first), str(first + 1)]
    assert "Tensor.backward, called at" in repr(kept[0])
    for coroutine in kept:
        coroutine.close()


async def test_awaited_or_closed_coroutines_say_nothing_and_keep_nothing_of_the_caller() -> None:
    class Large:
        pass

    def begin() -> tuple[Any, weakref.ref[Large]]:
        large = Large()
        x = leaf([2.0])
        return ag.grad((x * x).sum(), [x]), weakref.ref(large)

    coroutine, large = begin()
    gc.collect()
    assert large() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        (gradient,) = await coroutine
    assert gradient.tolist() == [4.0]


async def test_coroutines_are_taken_by_all_that_takes_coroutines() -> None:
    def begin() -> Any:
        x = leaf([3.0])
        return ag.grad((x * x).sum(), [x])

    async with asyncio.TaskGroup() as group:
        task = group.create_task(begin())
    results = [await asyncio.create_task(begin()), task.result(), *await asyncio.gather(begin(), begin()), await asyncio.wait_for(begin(), 60)]
    assert [gradient.tolist() for (gradient,) in results] == [[6.0]] * 5


def test_asyncio_run_takes_the_coroutine() -> None:
    x = leaf([3.0])

    async def main() -> Any:
        return ag.grad((x * x).sum(), [x])

    coroutine = asyncio.run(main())
    ((gradient,)) = asyncio.run(coroutine)
    assert gradient.tolist() == [6.0]


async def test_a_compiled_function_that_forgets_says_so_too() -> None:
    x = leaf([2.0])

    async def forgets(x: ag.Tensor) -> ag.Tensor:
        y = (x * x).sum()
        kept.append(y.backward())
        return y

    kept: list[Any] = []
    await ag.compile(forgets)(x)
    assert "Tensor.backward, called at" in str(kept[0].__qualname__)
    for coroutine in kept:
        coroutine.close()


@pytest.mark.parametrize(
    "use",
    [
        lambda coroutine: ag.exp(coroutine), lambda coroutine: ag.tensor(coroutine), lambda coroutine: ag.tensor([1.0, coroutine]),
        lambda coroutine: leaf([1.0]).sum().backward(coroutine), lambda coroutine: ag.stack([coroutine]),
        lambda coroutine: ag.nn.Linear(1, 1)(coroutine), lambda coroutine: ag.backward(coroutine), lambda coroutine: ag.backward([coroutine]),
        lambda coroutine: ag.optim.SGD([leaf([1.0])], lr=0.1).step(coroutine),
    ],
)  # fmt: skip
async def test_what_takes_tensors_says_which_call_is_not_awaited(use: Callable[[Any], Any]) -> None:
    x = leaf([2.0])
    coroutine = ag.grad((x * x).sum(), [x])
    assert_raises(ArgumentTypeError, rf"not awaited \(grad, called at {re.escape(__file__)}:\d+\): write `await`", use, coroutine)
    coroutine.close()


@pytest.mark.one_loop
async def test_remote_calls_and_passes_say_which_call_is_not_awaited() -> None:
    async with workers("here", "there", service=service) as (here, _), here.context() as ctx:
        coroutine = here.call("there", "squared", leaf([2.0]))
        said = rf"not awaited \(Worker.call, called at {re.escape(__file__)}:\d+\): write `await`"
        assert_raises(ArgumentTypeError, said, ctx.backward, coroutine)
        await assert_awaiting_raises(ArgumentTypeError, said, here.call("there", "squared", coroutine))
        coroutine.close()


async def test_run_inside_a_loop_names_the_public_function() -> None:
    x = leaf([2.0])
    assert_raises(LoopError, "use `await grad\\(\\)`", lambda: ag.run(ag.grad((x * x).sum(), [x])))


async def test_tasks_are_named_alike_wherever_the_program_lies() -> None:
    """The names of tasks are part of what a simulated run is compared by."""
    x = leaf([2.0])
    task: asyncio.Task[Any] = asyncio.ensure_future((x * x).sum().backward())
    assert coroutine_name(task) == "Tensor.backward" and type(coroutine_name(task)) is str
    await task
