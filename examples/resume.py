"""Training that is killed again and again, and goes on to the same bits.

``python resume.py`` trains a small network in one go, then once more in a process that is killed with SIGKILL at three places in mid-epoch and
started again after each: model, optimizer, schedule, loader, average and random numbers come back from one file. At the end both have the same
weights, to the bit. ``python resume.py train FILE`` is that process.
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
#: batches after which the process is killed, of 3 * 8 in all
KILLED_AFTER = (5, 9, 18)


async def train(path: Path, kill_after: int | None = None) -> str:
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
    batches = loader.epoch * len(loader) + loader.state_dict()["batches"]
    while loader.epoch < EPOCHS:
        async for inputs, classes in loader:
            optimizer.zero_grad()
            await nn.functional.cross_entropy(model(inputs), classes).backward()
            optimizer.step()
            schedule.step()
            average.update_parameters(model)
            state.save(path)
            batches += 1
            if batches == kill_after:
                os.kill(os.getpid(), signal.SIGKILL)
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
        for kill_after in (*KILLED_AFTER, None):
            command = [sys.executable, __file__, "train", str(Path(folder) / "pieces.safetensors"), *([str(kill_after)] if kill_after else [])]
            process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
            output, _ = await process.communicate()
            pieces = output.decode().strip()
            if kill_after is not None:
                assert process.returncode == -signal.SIGKILL
                print(f"killed after batch {kill_after:2} of {EPOCHS * 8}")
        print(f"in pieces:              {pieces[:16]}")
        assert pieces == whole
        print("the same bits")


if __name__ == "__main__":
    if sys.argv[1:2] == ["train"]:
        print(ag.run(train(Path(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else None)))
    else:
        ag.run(main())
