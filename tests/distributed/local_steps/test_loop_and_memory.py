"""The work of rounds is done on threads, memory is copied as often as the guide says, and a step that was cancelled on its thread changes nothing later."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd.coordination.buckets import ParameterSpec
from aiograd.coordination.compression import Compressor
from aiograd.distributed.local_steps import local_training
from aiograd.distributed.local_steps.base_state import BaseState
from aiograd.distributed.local_steps.payload_form import PayloadForm
from aiograd.tensors import inplace
from aiograd.tensors.core import make
from tests.distributed.local_steps.learners import OUTER, SGD, Dropping, Learner, Oracle, behind, seed_of, service
from tests.distributed.workers import workers


async def test_a_step_that_was_cancelled_on_its_thread_ends_before_the_next_computation(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, ends, original = threading.Event(), threading.Event(), ag.optim.AdamW.step

    def waiting(self: Any, *args: Any) -> Any:
        begun.set()
        assert ends.wait(30.0)
        return original(self, *args)

    inner = {"lr": 0.05}
    async with workers("driver", "w0", service=service) as (driver, *others):
        made = dist.LocalSteps.create(driver, ["w0"], Learner, steps=2, optimizer=ag.optim.AdamW, optimizer_options=inner, outer_options=OUTER)
        async with await made as training:
            oracle = Oracle(Learner(), inner, optimizer=ag.optim.AdamW, seed=seed_of(training))
            monkeypatch.setattr(ag.optim.AdamW, "step", waiting)
            stepping = asyncio.ensure_future(training.round())
            while not begun.is_set():
                await asyncio.sleep(0.01)
            stepping.cancel()
            with pytest.raises(asyncio.CancelledError):
                await stepping
            monkeypatch.undo()
            behind(training, others)["w0"]._training.module.waits = {0: 0.1}
            asyncio.get_running_loop().call_later(0.15, ends.set)
            await oracle.take(await training.round())
            assert training.digest == oracle.digest
