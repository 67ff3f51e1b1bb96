"""The examples do what they say, and the service withstands its callers."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from tests.sweeps import swept

needs_numba_cuda = pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="there is no numba-cuda for this platform")
EXAMPLES = Path(__file__).parent.parent / "examples"
IMAGE = [0.0] * 64


@pytest.fixture(scope="module")
def service() -> Iterator[ModuleType]:
    """The module ``examples/online_service.py``."""
    sys.path.insert(0, str(EXAMPLES))
    try:
        spec = importlib.util.spec_from_file_location("online_service", EXAMPLES / "online_service.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        yield module
    finally:
        sys.path.remove(str(EXAMPLES))


@pytest_asyncio.fixture
async def client(service: ModuleType) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of the running service; leaving stops both (and the leak check looks at what is left)."""
    async with service.serve_on("127.0.0.1", 0) as url, aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=20)) as session:
        yield session


async def read(session: aiohttp.ClientSession, path: str) -> Any:
    async with session.get(path) as response:
        return await response.json()


@pytest.mark.net
async def test_the_service_predicts_while_it_learns(client: aiohttp.ClientSession, service: ModuleType) -> None:
    digits = service.load_digits()
    while (await read(client, "/stats"))["steps"] < 100:
        await asyncio.sleep(0.05)
    answers = []
    for image in digits.data[:50]:
        async with client.post("/predict", json={"image": image.tolist()}) as response:
            assert response.status == 200
            answer = await response.json()
        assert abs(sum(answer["probabilities"]) - 1) < 1e-4
        assert answer["digit"] == int(np.argmax(answer["probabilities"]))
        answers.append(answer["digit"])
    assert np.mean(np.array(answers) == digits.target[:50]) > 0.8
    steps = (await read(client, "/stats"))["steps"]
    assert steps > 100, "it went on learning meanwhile"
    assert await read(client, "/health") == {"training": True, "error": None}


@pytest.mark.net
async def test_the_service_takes_examples(client: aiohttp.ClientSession) -> None:
    async with client.post("/learn", json={"image": IMAGE, "digit": 3}) as response:
        assert response.status == 202
        assert (await response.json())["examples"] == 1401


@pytest.mark.net
async def test_malformed_requests_are_refused_and_harm_nothing(client: aiohttp.ClientSession, service: ModuleType) -> None:
    json_type = {"Content-Type": "application/json"}
    for body in (
        b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 10_000, b'{"image": 3}', b'{"image": [1]}', b'{"image": null}',
        b'{"image": [' + b",".join([b'"a"'] * 64) + b"]}", b'{"image": [' + b",".join([b"NaN"] * 64) + b"]}",
        b'{"image": [' + b",".join([b"1e999"] * 64) + b"]}", b'{"image": [' + b",".join([b"true"] * 64) + b"]}",
    ):  # fmt: skip
        async with client.post("/predict", data=body, headers=json_type) as response:
            assert response.status == 400, body[:40]
            assert "error" in await response.json()
    for digit in (10, -1, 1.5, "3", None, True):
        async with client.post("/learn", json={"image": IMAGE, "digit": digit}) as response:
            assert response.status == 400, digit
    async with client.post("/predict", data=b"{}", headers={"Content-Type": "text/plain"}) as response:
        assert response.status == 415
    async with client.post("/predict", data=b" " * (service.MAX_BODY + 1), headers=json_type) as response:
        assert response.status == 413
    async with client.get("/predict") as response:
        assert response.status == 405
    async with client.post("/predict", json={"image": IMAGE}) as response:
        assert response.status == 200
    assert await read(client, "/health") == {"training": True, "error": None}


@pytest.mark.proc
@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("words", "expected"),
    swept(
        [
            (["quickstart.py"], "backward said"),
            (["train.py", "mlp", "--epochs", "1"], "test accuracy"),
            (["data_parallel.py", "--epochs", "1"], "the weights have the same bits as those of one process"),
            (["load_service.py"], "give the URL"),
            (["private_training.py", "--steps", "20"], "the step that failed changed nothing: True"),
            (["slow_links.py", "--rounds", "8", "--steps", "8", "--mbit", "4"], "home0, home2, home3, home4; all have the same bits: True"),
            (["resume.py"], "the same bits"),
            (["split_learning.py", "--epochs", "1"], "RemoteError: Error on Node"),
            (["data_parallel_pipeline.py", "--steps", "8"], "the weights have the same bits as those of one process"),
            (["absorbed.py", "--steps", "8"], "no step of 16 failed, and the weights have the same bits"),
            (["unusual_pipelines.py", "--steps", "6"], "the weights have the same bits as those of one process"),
            (["simulated_faults.py", "--seeds", "40"], "is the first to notice"),
            (["simulated_faults.py", "--seed", "3"], "done: the same bits"),
            (["distributed_data_parallel.py", "--processes", "3", "--steps", "8"], "all 3 ranks have the same bits: True"),
            (["sparse_newton.py", "--side", "12", "--steps", "2"], "each step to a residual of 1e-09"),
            (["followers.py"], "every answer had the bits of its version"),
            (["hyperparameters.py", "--steps", "6"], "have the same bits as those of one process"),
            (["step_through.py"], "with the bits of a backward"),
            (["neural_ode.py", "--steps", "10"], "the adjoint gives the gradients of the unrolled solver"),
            (["maml.py", "--steps", "12"], "the weights have the same bits as those of one process"),
            (["gradient_penalty.py", "--steps", "8"], "the weights have the same bits as those of one process"),
            (["parameter_server.py", "--steps", "8"], "the losses of all trainers are those of one process, to the bit"),
            pytest.param(["gpu.py"], "a second run on the device gave the same bits", marks=needs_numba_cuda),
        ],
        keep=2,
    ),
)
def test_an_example_runs(words: list[str], expected: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent), "PYTHONWARNINGS": "error::RuntimeWarning"}
    done = subprocess.run([sys.executable, *words], cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert expected in done.stdout


@pytest.mark.proc
@pytest.mark.parametrize(
    ("example", "missing", "expected"),
    [
        ("fastapi_service.py", "fastapi", "this example needs FastAPI and httpx: pip install fastapi httpx"),
        ("ray_training.py", "ray", "this example needs Ray: pip install '.[ray]'"),
    ],
)
def test_an_example_without_its_extra_says_what_to_install(example: str, missing: str, expected: str) -> None:
    program = f"import runpy, sys; sys.modules[{missing!r}] = None; runpy.run_path({example!r}, run_name='__main__')"
    environment = {**os.environ, "PYTHONPATH": str(EXAMPLES.parent)}
    done = subprocess.run([sys.executable, "-c", program], cwd=EXAMPLES, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, expected + "\n", "")
