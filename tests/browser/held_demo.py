"""``python -m tests.browser.held_demo DIR [arguments of the demo]``: the demo, which waits at three places until a file is made in DIR.

``kill``: before it kills a worker; meanwhile it computes gradients and takes no step. ``restart``: before that worker is started again. ``end``:
before its conclusion. So whoever watches sees each state, however fast the machine is.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

from aiograd.distributed.cluster.local import LocalCluster
from aiograd.running.cli import main
from aiograd.running.cli.demo import story


def hold(folder: Path) -> None:
    """Put the waits into the demo."""
    lose, conclude, restart = story._Demo._lose, story._Demo.conclude, LocalCluster._restart

    async def reached(place: str) -> None:
        while not (folder / place).exists():
            await asyncio.sleep(0.05)

    async def held_lose(self: Any, *arguments: Any) -> None:
        while not (folder / "kill").exists():
            await self.training.gradients(*arguments[:2])
        await lose(self, *arguments)

    async def held_restart(self: Any, name: str) -> None:
        await reached("restart")
        await restart(self, name)

    async def held_conclude(self: Any, alone: Any) -> None:
        await reached("end")
        await conclude(self, alone)

    story._Demo._lose, story._Demo.conclude, LocalCluster._restart = held_lose, held_conclude, held_restart  # type: ignore[method-assign]


if __name__ == "__main__":
    hold(Path(sys.argv[1]))
    sys.exit(main(["demo", *sys.argv[2:]]))
