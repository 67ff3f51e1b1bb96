"""An error that leaves the engine does not keep the engine's frames, and those that still run are left alone."""

from __future__ import annotations

import asyncio
import weakref
from types import FunctionType
from typing import Any

import pytest

import aiograd as ag
from aiograd.engine.run.failures import clear_frames, first_of
from aiograd.errors import GraphFreedError
from tests.support import assert_awaiting_raises
from tests.toy_device import ToyDevice


async def raising(error: BaseException, kept: Any) -> None:
    raise error


async def handling(error: BaseException, seen: list[str]) -> None:
    try:
        await raising(error, None)
    except ValueError:
        await asyncio.sleep(0)
        seen.append("went on")


def module(name: str) -> dict[str, Any]:
    """These coroutine functions, in a module of that name."""
    names: dict[str, Any] = {**globals(), "__name__": name}
    names |= {each.__name__: FunctionType(each.__code__, names) for each in (raising, handling)}
    return names


class Kept:
    """Something that a frame refers to."""


@pytest.mark.parametrize(("name", "is_kept"), [("aiograd.engine.example", False), ("somewhere.else", True)])
async def test_frames_of_the_package_keep_nothing(name: str, is_kept: bool) -> None:
    kept = Kept()
    alive = weakref.ref(kept)
    caught = await assert_awaiting_raises(ValueError, None, module(name)["raising"](ValueError(), kept))
    del kept
    clear_frames(caught)
    assert (alive() is not None) is is_kept


async def test_a_coroutine_that_has_caught_the_same_error_goes_on() -> None:
    names, error, seen = module("aiograd.engine.example"), ValueError(), list[str]()
    other = asyncio.create_task(names["handling"](error, seen))
    await asyncio.sleep(0)  # it has caught the error, and awaits something
    caught = await assert_awaiting_raises(ValueError, None, names["raising"](error, None))
    clear_frames(caught)
    await other
    assert seen == ["went on"]


class WithoutTextError(TypeError):
    def __str__(self) -> str:
        raise LookupError("the text is missing")


async def test_an_error_whose_text_cannot_be_had_arrives() -> None:
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    y = x * x

    def fail(gradient: ag.Tensor) -> None:
        raise WithoutTextError

    y.register_hook(fail)
    loss = y.sum()
    steps = await ag.viz.step(loss)
    assert isinstance(steps.error, WithoutTextError) and "WithoutTextError: <exception str() failed>" in str(steps)
    assert "WithoutTextError" in repr(steps) and "WithoutTextError" in steps.html
    await assert_awaiting_raises(WithoutTextError, None, loss.backward())
    await assert_awaiting_raises(GraphFreedError, "WithoutTextError: <exception str", loss.backward())
    assert x.grad is None


def test_an_error_beside_one_whose_text_cannot_be_had_arrives() -> None:
    first = first_of([("a", ValueError("odd")), ("b", WithoutTextError())])
    assert isinstance(first, ValueError) and "b has failed, too: WithoutTextError" in first.__notes__[0]


def test_a_forward_whose_error_has_no_text_raises_it() -> None:
    class Layer(ag.nn.Module):
        def forward(self, x: Any) -> Any:
            raise WithoutTextError

    with pytest.raises(WithoutTextError):
        Layer()(None)


async def test_stop_iteration_of_a_rule_on_a_device_arrives() -> None:
    with ToyDevice("toy:0"):
        x = ag.tensor([1.0, 2.0], device="toy:0", requires_grad=True)

        class Stopping(ag.Function):
            @staticmethod
            def forward(ctx: Any, x: ag.Tensor) -> ag.Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, gradient: ag.Tensor) -> ag.Tensor:
                raise StopIteration(7)

        error = await assert_awaiting_raises(RuntimeError, "StopIteration", Stopping.apply(x).sum().backward())
        assert error.__cause__.value == 7 and x.grad is None
