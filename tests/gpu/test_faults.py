"""A kernel that goes wrong, each in a process of its own: the device is lost, the error says where, and the process goes on without it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

FAULT = """
import asyncio, numpy as np
import aiograd as ag
from aiograd.cuda.launching import launch
from aiograd.errors import DeviceLostError

def out_of_range(out):
    out[1 << 40] = 1.0

async def main():
    device = ag.devices.device("cuda:0")
    x = ag.tensor(np.ones(4, np.float32), device="cuda:0", requires_grad=True)
    y = (x * 2).sum()
    await y
    bad = device.from_host(np.ones(4, np.float32))
    launch(out_of_range, 1, 1, bad, writes=(bad,))
    try:
        await ag.cuda.synchronize()
    except DeviceLostError as error:
        assert "out_of_range" in str(error), error
    else:
        raise SystemExit("the fault went unnoticed")
    try:
        await y.backward()
    except DeviceLostError:
        pass
    else:
        raise SystemExit("a pass on a lost device succeeded")
    assert x.grad is None, "nothing was committed"
    z = ag.tensor(np.ones(3), requires_grad=True)
    await (z * z).sum().backward()
    assert z.grad.numpy().tolist() == [2, 2, 2]
    print("went on")

asyncio.run(main())
"""


@pytest.mark.proc
@pytest.mark.parametrize("blocking", ["0", "1"])
def test_a_kernel_that_writes_where_it_must_not(blocking: str) -> None:
    environment = {**os.environ, "AIOGRAD_CUDA_SYNC": blocking, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", FAULT], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0 and done.stdout.endswith("went on\n"), done.stdout + done.stderr[-4000:]
