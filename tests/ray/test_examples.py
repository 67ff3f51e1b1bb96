"""Every distributed example on Ray, and on workers that join; on processes of this machine they run in ``tests/test_examples.py``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shlex
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import yaml

from tests.ray.nodes import HEAD, ROOT, Nodes

pytestmark = pytest.mark.proc
FOLDER = ROOT / "examples"
#: arguments, the number of workers, and a line that it prints at its end
EXAMPLES = {
    "split_learning.py": (["--epochs", "1"], 4, "have the same bits as before"),
    "pipeline_over_processes.py": (["--epochs", "1"], 4, "the weights of all stages have the same bits as those of one process"),
    "data_parallel.py": (["--epochs", "2"], 5, "the weights have the same bits as those of one process"),
    "mixture_of_experts.py": (["--steps", "20"], 3, "runs again with new experts"),
}


def command(example: str, on: str, port: int, folder: Path) -> list[str]:
    output = ["--output", str(folder)] if example.startswith("pipeline") else []
    return [sys.executable, "-m", "tests.ray.program", HEAD, str(port), str(FOLDER / example), "--on", on, *EXAMPLES[example][0], *output]


def environment(**others: str) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "OPENBLAS_NUM_THREADS": "1", **others}


@pytest.mark.parametrize("example", EXAMPLES)
def test_a_distributed_example_runs_on_ray(nodes: Nodes, example: str, tmp_path: Path) -> None:
    words = command(example, "ray", 0, tmp_path)
    done = subprocess.run(words, cwd=ROOT, env=environment(RAY_ADDRESS=nodes.address), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert EXAMPLES[example][2] in done.stdout


def test_an_example_of_rays_tasks_and_actors(nodes: Nodes) -> None:
    words = [sys.executable, "-m", "tests.ray.program", HEAD, "0", str(FOLDER / "ray_training.py")]
    done = subprocess.run(words, cwd=ROOT, env=environment(RAY_ADDRESS=nodes.address), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "kills upper" in done.stdout and "Ray makes the actor again" in done.stdout
    assert "the weights have the same bits as those of the training without a loss" in done.stdout


@pytest.mark.parametrize("example", EXAMPLES)
async def test_a_distributed_example_runs_on_workers_that_join(example: str, tmp_path: Path) -> None:
    key = tmp_path / "cluster.key"
    key.write_text(secrets.token_hex(32))
    key.chmod(0o600)
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    around = environment(AIOGRAD_SECRET_FILE=str(key))
    words = command(example, "join", port, tmp_path)
    driver = await asyncio.create_subprocess_exec(*words, cwd=ROOT, env=around, stdout=asyncio.subprocess.PIPE)
    assert driver.stdout is not None
    try:
        lines: list[str] = []
        async with contextlib.AsyncExitStack() as launched:
            while line := (await driver.stdout.readline()).decode():
                lines.append(line)
                if line.startswith("    aiograd worker --join"):  # what it tells people to run
                    await launched.enter_async_context(kept_running(shlex.split(line)[1:], around))
            assert await driver.wait() == 0, lines
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
    assert sum("aiograd worker --join" in line for line in lines) == EXAMPLES[example][1]
    assert EXAMPLES[example][2] in "".join(lines)


@contextlib.asynccontextmanager
async def kept_running(words: list[str], environment: dict[str, str]) -> AsyncIterator[None]:
    """A worker that is started again when it is killed, as a scheduler would. At the end it has been told to end, and has.

    One that was started again may have come when the driver had ended already, and wait for another: it is ended here.
    """
    restarts = 0

    async def keep() -> int:
        nonlocal restarts
        while True:
            command = [sys.executable, "-m", "aiograd", *words]
            process = await asyncio.create_subprocess_exec(*command, cwd=FOLDER, env=environment, stdout=subprocess.DEVNULL)
            try:
                status = await process.wait()
            finally:
                if process.returncode is None:
                    process.kill()
                    await process.wait()
            if status >= 0:
                return status
            restarts += 1

    keeping = asyncio.create_task(keep())
    try:
        yield
        if not restarts:
            assert await keeping == 0
    finally:
        keeping.cancel()
        await asyncio.wait((keeping,))


@pytest.mark.parametrize("name", ["compose.yaml", "kubernetes-job.yaml", "kubernetes-statefulset.yaml"])
def test_a_launch_file_is_yaml_of_its_kind(name: str) -> None:
    documents = list(yaml.safe_load_all((FOLDER / "launch" / name).read_text()))
    assert documents and all(isinstance(document, dict) for document in documents)
    if name == "compose.yaml":
        assert all({"command", "image"} <= each.keys() for each in documents[0]["services"].values())
        return
    assert all({"apiVersion", "kind", "metadata"} <= document.keys() for document in documents)
    pods = [document["spec"]["template"]["spec"] for document in documents if "template" in document.get("spec", {})]
    assert pods and all(container["name"] for pod in pods for container in pod["containers"])
