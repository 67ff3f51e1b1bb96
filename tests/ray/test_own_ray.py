"""A Ray that is started here: `aiograd demo --on ray` to its end. It has to run before there is another Ray on this machine, which it would find."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.ray.conftest import is_running
from tests.ray.nodes import ROOT

pytestmark = pytest.mark.proc


def descendants(pid: int) -> set[int]:
    """Processes that this one has started, and those that they have."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdigit():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = {pid}
    while len(found) < len(found := found | {child for child, parent in parents.items() if parent in found}):
        pass
    return found - {pid}


def test_the_demo_on_a_ray_of_its_own_arrives_at_the_same_bits_and_leaves_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    command = [sys.executable, "-m", "aiograd", "demo", "--on", "ray", "--epochs", "2", "--output", str(tmp_path)]
    demo = subprocess.Popen(command, cwd=ROOT, env=environment | {"PYTHONIOENCODING": "utf-8"}, stdout=subprocess.PIPE, text=True)
    started: set[int] = set()
    priorities: list[int] = []
    lines: list[str] = []
    try:
        assert demo.stdout is not None
        for line in demo.stdout:
            lines.append(line)
            if found := re.match(r" +(?:worker\d|alone) +pid (\d+)", line):
                priorities.append(os.getpriority(os.PRIO_PROCESS, int(found[1])))
                started |= descendants(demo.pid)
        assert demo.wait() == 0
    finally:
        demo.kill()
        demo.communicate()
    printed = "".join(lines)
    killed = ("killed with SIGKILL", "WorkerLostError", "worker1 runs again", "in the same step")
    for words in ("have the same bits", *killed, "epoch    2/2", "everything promised was so"):
        assert words in printed, printed
    assert len(re.findall("^  ✓ ", printed, re.MULTILINE)) == 6
    assert priorities == [os.getpriority(os.PRIO_PROCESS, 0)] * 3, "Ray's own default is 15 below"
    assert len(started) > 5 and not [pid for pid in started if is_running(pid)]
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
