"""Training that is killed again and again, and goes on to the same bits.

``python resume.py`` trains a small network in one go, then once more in a process that is killed with SIGKILL in the middle of three steps and
started again after each: model, optimizer, schedule, loader and average come back from one file, and the batch of the step comes again, with the same
dropout. At the end both have the same weights, to the bit. ``python resume.py train FILE`` is that process.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import sys
import tempfile
from pathlib import Path

import numpy as np

import aiograd as ag
from aiograd import nn, optim

EPOCHS = 3
#: steps in which the process is killed, of 3 * 8 in all
KILLED_IN = (5, 9, 18)


async def train(path: Path, kill_in: int | None = None) -> str:
    """Train from where the file says, saving after every batch; returns a digest of the weights."""
    ag.seed(0)
    numbers = np.random.default_rng(0)
    x = numbers.normal(size=(200, 6)).astype(np.float32)
    y = (np.sin(x).sum(1) > 0).astype(np.int64)
    model = nn.Sequential(nn.Linear(6, 32), nn.BatchNorm1d(32), nn.Mish(), nn.Dropout(0.2), nn.Linear(32, 2))
    optimizer = optim.NAdam(model.parameters(), lr=5e-3)
    schedule = optim.OneCycleLR(optimizer, 0.02, total_steps=EPOCHS * 8)
    average = optim.ExponentialMovingAverage(model, 0.9)
    loader = ag.data.DataLoader(list(zip(x, y, strict=True)), 25, shuffle=True, generator=ag.Generator(1), workers=2)
    state = ag.TrainingState(model=model, optimizer=optimizer, schedule=schedule, average=average, loader=loader)
    if os.path.exists(path):  # noqa: ASYNC240 - nothing else waits for the loop here
        state.restore(path)
    while loader.epoch < EPOCHS:
        async for lease in loader.leases():
            async with lease as (inputs, classes):
                optimizer.zero_grad()
                await nn.functional.cross_entropy(model(inputs), classes).backward()
                optimizer.step()
                schedule.step()
                average.update_parameters(model)
                if lease.epoch * len(loader) + lease.number == kill_in:
                    os.kill(os.getpid(), signal.SIGKILL)
            state.save(path)
    digest = hashlib.sha256()
    for part in (model, average.module):
        for value in part.state_dict().values():
            digest.update(value.numpy().tobytes())
    return digest.hexdigest()


async def main() -> None:
    """Train in one go and in pieces, and compare."""
    with tempfile.TemporaryDirectory() as folder:
        whole = await train(Path(folder) / "whole.safetensors")
        print(f"in one go:              {whole[:16]}")
        pieces = ""
        for kill_in in (*KILLED_IN, None):
            command = [sys.executable, __file__, "train", str(Path(folder) / "pieces.safetensors"), *([str(kill_in)] if kill_in else [])]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            output, _ = await process.communicate()
            pieces = output.decode().strip()
            if kill_in is not None:
                assert process.returncode == -signal.SIGKILL
                print(f"killed in step {kill_in:2} of {EPOCHS * 8}")
        print(f"in pieces:              {pieces[:16]}")
        assert pieces == whole
        print("the same bits")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        print(ag.run(train(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)))
    else:
        ag.run(main())
