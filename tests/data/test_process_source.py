"""Sources in processes of their own."""

from __future__ import annotations

import asyncio
import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.data import DataLoader, ProcessSource
from aiograd.errors import ArgumentError, DataError, ModeError
from tests.support import assert_awaiting_raises, cancel

SOURCE = '''
import os
import numpy as np

class Examples:
    def __len__(self):
        return 6
    def __getitem__(self, index):
        print("reading", index)  # must not get among the answers
        if index == 4:
            raise ValueError("no such thing")
        if index == 5:
            os._exit(3)
        return np.full(3, index, np.float32), {"pid": os.getpid(), "name": f"number {index}"}

examples = Examples()

def made():
    return Examples()
'''


@pytest.fixture(autouse=True)
def _importable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.mark.proc
async def test_leases_of_examples_of_other_processes() -> None:
    async with ProcessSource("mine:examples", 2) as source:
        loader = DataLoader(source, 1, prefetch=2)  # example 5, which ends its process, is not read ahead
        found = []
        for fails in (True, False, False):
            async for lease in loader.leases():
                with contextlib.suppress(ZeroDivisionError):
                    async with lease as (x, _):
                        if fails:
                            raise ZeroDivisionError  # batches that were read ahead are dropped, and read again
                        found.append(int(x[0, 0].item()))
                break
        assert found == [0, 1]
        leases = loader.leases()
        async with await anext(leases) as (x, _):
            assert x.tolist() == [[2] * 3]
        await leases.aclose()
        pids = [process.pid for process in source._started]
        assert all(process.returncode is None for process in source._started)
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)


@pytest.mark.proc
async def test_examples_come_from_other_processes() -> None:
    pids = set()
    async with ProcessSource("mine:examples", 2) as source:
        assert len(source) == 6
        loader = DataLoader(source, 2, prefetch=0)
        found = []
        async for x, rest in loader:
            found.append(x.tolist())
            pids.update(rest["pid"].tolist())
            if len(found) == 2:
                break
        assert found == [[[0] * 3, [1] * 3], [[2] * 3, [3] * 3]]
        assert rest["name"] == ["number 2", "number 3"]
        await assert_awaiting_raises(DataError, "example 4: ValueError: no such thing", source[4])
        assert (await source[1])[0].tolist() == [1, 1, 1], "the process goes on"
    assert os.getpid() not in pids
    assert len(source) == 6, "the length is known when the processes have ended"


@pytest.mark.proc
async def test_a_process_that_ends_is_an_error() -> None:
    async with ProcessSource("mine:made", 1) as source:
        await assert_awaiting_raises(DataError, "has ended", source[5])


@pytest.mark.proc
async def test_a_read_that_is_cancelled_leaves_the_process_in_order() -> None:
    async with ProcessSource("mine:made", 1) as source:
        task = asyncio.ensure_future(source[0])
        await asyncio.sleep(0)
        await cancel(task)
        assert (await source[2])[0].tolist() == [2, 2, 2]


@pytest.mark.proc
async def test_a_source_is_entered_once_at_a_time() -> None:
    source = ProcessSource("mine:made", 1)
    entering = asyncio.ensure_future(source.__aenter__())
    await asyncio.sleep(0)
    for _ in range(2):  # while its processes start, and while they run
        await assert_awaiting_raises(ModeError, "entered already: its processes run; share it, or make another one", source.__aenter__())
        await entering
    assert (await source[1])[0].tolist() == [1, 1, 1] and len(source._started) == 1
    await source.aclose()
    async with source:
        assert (await source[2])[0].tolist() == [2, 2, 2], "it can be entered again"


@pytest.mark.proc
async def test_sources_that_cannot_be_had() -> None:
    for name, match in (("mine:nothing", "AttributeError"), ("nowhere:examples", "ModuleNotFoundError")):
        with pytest.raises(DataError, match=match):
            async with ProcessSource(name, 1):
                pass
    for wrong in (("mine", 1), ("mine:examples", 0), (None, 1), ("mine:examples", "2"), ("mine:examples", 1.5)):
        with pytest.raises(ArgumentError):
            ProcessSource(*wrong)  # type: ignore[arg-type]
    await assert_awaiting_raises(DataError, "async with", ProcessSource("mine:examples")[0])


async def test_a_source_that_was_never_entered_is_no_empty_one() -> None:
    loader = DataLoader(ProcessSource("mine:examples"), 2)
    with pytest.raises(DataError, match="async with"):
        len(loader)
    await assert_awaiting_raises(DataError, "async with", anext(aiter(loader)))


def test_any_nesting_crosses() -> None:
    from aiograd.data.frames import packed, unpacked

    value: Any = {"a": [np.arange(3), (ag.tensor([1.5]), None)], "b": "text", "c": True, 4: 2.5}
    found = unpacked(packed(value))
    assert found["a"][0].tolist() == [0, 1, 2] and found["a"][1][0].tolist() == [1.5] and found["a"][1][1] is None
    assert (found["b"], found["c"], found[4]) == ("text", True, 2.5)
