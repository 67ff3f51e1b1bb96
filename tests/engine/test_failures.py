"""An error that leaves the engine does not keep the engine's frames, and those that still run are left alone."""

from __future__ import annotations

import asyncio
import weakref
from types import FunctionType
from typing import Any

import pytest

from aiograd.engine.run.failures import clear_frames
from tests.support import assert_awaiting_raises


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
