"""The tutorials and guides that are programs of their own, run; what they say they print, they print.

Recipes and the parts of one long example are run by ``test_recipes.py``, names and tables are checked by ``test_readme.py``.
"""

from __future__ import annotations

import contextlib
import csv
import gc
import json
import os
import re
import subprocess
import sys
import types
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

from aiograd import cli
from aiograd.errors import WorkerLostError
from tests.documentation import TEXTS, blocks
from tests.public_names import MODULES, NAMESPACES, public_names
from tests.test_recipes import after, block, numbers


def load(start: str) -> types.ModuleType:
    """The module that a block is, as if it was imported."""
    module = types.ModuleType("documented")
    exec(compile(block(start), start, "exec"), module.__dict__)  # noqa: S102 - the documentation's own code
    return module


@contextlib.asynccontextmanager
async def serving(app: web.Application) -> AsyncIterator[tuple[TestServer, ClientSession]]:
    async with TestServer(app) as server, ClientSession() as client:
        yield server, client


# -------------------------------------------------------------------- tutorials


@pytest.mark.net
async def test_the_service_learns_while_it_serves() -> None:
    module = load("# learning_service.py")
    app = module.application()
    random = np.random.default_rng(1)
    async with serving(app) as (server, client):
        first = await (await client.post(server.make_url("/predict"), json={"numbers": [0.5, 0.5]})).json()
        assert sum(first["probabilities"]) == pytest.approx(1)
        learner = app[module.LEARNER]
        while learner.steps < 200:
            x = random.normal(size=2)
            answer = await client.post(server.make_url("/learn"), json={"numbers": x.tolist(), "label": int(x.sum() > 0)})
            assert answer.status == 202
        for sign in (1, -1):
            body = await (await client.post(server.make_url("/predict"), json={"numbers": [sign, sign]})).json()
            assert body["probabilities"][int(sign > 0)] > 0.8
    assert learner.steps >= 200


@pytest.mark.proc
def test_split_learning(tmp_path: Path) -> None:
    (tmp_path / "split.py").write_text(block("# split.py"))
    done = subprocess.run([sys.executable, "split.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    claimed = after("# split.py", "text")
    assert done.stderr == "" and len(numbers(claimed)) == 3
    np.testing.assert_allclose(numbers(done.stdout), numbers(claimed), atol=0.06)
    printed, said = (int(re.findall(r"(\d+)% right", text)[0]) for text in (done.stdout, claimed))
    assert abs(printed - said) <= 3


# -------------------------------------------------------------------- guides


@pytest.mark.proc
def test_a_ported_script(tmp_path: Path) -> None:
    (tmp_path / "ported.py").write_text(block("# ported.py"))
    done = subprocess.run([sys.executable, "ported.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    printed, claimed = (int(re.findall(r"(\d+)% right", text)[0]) for text in (done.stdout, after("# ported.py", "text")))
    assert abs(printed - claimed) <= 5 and (tmp_path / "net.safetensors").stat().st_size > 0


@pytest.mark.proc
def test_replicas(tmp_path: Path) -> None:
    (tmp_path / "replicas_service.py").write_text(block("# replicas_service.py"))
    (tmp_path / "replicas.py").write_text(block("# replicas.py"))
    done = subprocess.run([sys.executable, "replicas.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "3 layers.0.bias\n" and done.stderr == ""


@pytest.mark.proc
def test_replicas_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "replicated_pipeline.py").write_text(block("# replicated_pipeline.py"))
    done = subprocess.run([sys.executable, "replicated_pipeline.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "8 True\n" and done.stderr == ""


class _Flaky:
    """Replicas whose first step fails, and the cluster on which the lost one is back."""

    def __init__(self) -> None:
        self.happened: list[str] = []

    async def step(self, shards: Any) -> str:
        self.happened.append("step")
        if len(self.happened) == 1:
            raise WorkerLostError("lost", worker="left")
        return "losses"

    async def wait_running(self, name: str) -> None:
        self.happened.append(f"wait for {name}")

    async def add(self, name: str) -> None:
        self.happened.append(f"add {name}")


async def test_a_lost_replica_is_added_and_the_step_taken_again() -> None:
    body = "".join("    " + line for line in block("while True:").splitlines(keepends=True))
    flaky, scope = _Flaky(), {"WorkerLostError": WorkerLostError}
    exec(f"async def run(replicas, cluster, shards):\n{body}    return losses\n", scope)  # noqa: S102 - the documentation's own code
    run: Any = scope["run"]
    assert await run(flaky, flaky, []) == "losses"
    assert flaky.happened == ["step", "wait for left", "add left", "step"]


@pytest.mark.proc
def test_a_monitored_run(tmp_path: Path) -> None:
    (tmp_path / "monitored.py").write_text(block("# monitored.py"))
    command = [sys.executable, "monitored.py"]
    done = subprocess.run(command, cwd=tmp_path, env=os.environ | {"STEPS": "5"}, capture_output=True, text=True, check=True)
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/dashboard\?token=\w+\n", done.stdout) and done.stderr == ""
    rows = list(csv.DictReader((tmp_path / "run.csv").read_text().splitlines()))
    assert [(row["name"], row["step"]) for row in rows] == [("loss", str(step)) for step in range(5)]
    assert float(rows[-1]["value"]) < float(rows[0]["value"]) and len(list((tmp_path / "runs" / "today").iterdir())) == 1


@pytest.mark.net
async def test_the_service_of_the_readme() -> None:
    module = load("# readme_service.py")
    async with serving(module.app) as (server, client):
        losses = []
        for _ in range(3):
            answer = await client.post(server.make_url("/learn"), json={"numbers": [1, 2], "label": 1})
            losses.append((await answer.json())["loss"])
    assert losses[0] > losses[1] > losses[2] > 0


@pytest.mark.net
async def test_aiohttp() -> None:
    module = load("# aiohttp_service.py")
    async with serving(module.app) as (server, client):
        answer = await client.post(server.make_url("/attribution"), json={"numbers": [1, 2, 3, 4], "label": 2})
        np.testing.assert_array_equal(np.float32(await answer.json()), module.model.weight.numpy()[2])
        assert module.app[module.ENGINE].statistics().committed == 1


@pytest.mark.net
async def test_fastapi() -> None:
    pytest.importorskip("fastapi", reason="it comes with the extra `docs`")
    httpx = pytest.importorskip("httpx", reason="it comes with the extra `docs`")
    module = load("# fastapi_service.py")
    async with (
        module.app.router.lifespan_context(module.app),
        httpx.AsyncClient(transport=httpx.ASGITransport(module.app), base_url="http://service") as client,
    ):
        answer = await client.post("/attribution", params={"label": 2}, json=[1, 2, 3, 4])
        np.testing.assert_array_equal(np.float32(answer.json()), module.model.weight.numpy()[2])
        assert (await client.get("/engine")).json() == {"committed": 1, "failed": 0, "cancelled": 0}


def test_the_guide_of_a_bridge_to_jax(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("jax", reason="it comes with the extra `jax`")
    load("# jax_layer.py")
    assert numbers(capsys.readouterr().out)[0] < 0.3


def test_the_guide_of_a_bridge_from_jax(capsys: pytest.CaptureFixture[str]) -> None:
    jax = pytest.importorskip("jax", reason="it comes with the extra `jax`")
    load("# jax_program.py").__dict__.clear()
    assert capsys.readouterr().out == "(3, 1)\n"
    jax.clear_caches()
    gc.collect()  # the loop in the background ends with the last function that uses it


@pytest.mark.net
def test_the_guide_of_a_bridge_from_torch(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch", reason="it comes with the extra `torch`")
    load("# torch_remote.py")
    first, last = numbers(capsys.readouterr().out)
    assert last < first / 2


def test_workers(capsys: pytest.CaptureFixture[str]) -> None:
    load("# workers.py")
    assert capsys.readouterr().out == "tensor([0.75, 3.  ])\n"


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    load("# stages.py")
    assert capsys.readouterr().out == "4 (8, 8)\n"


WITH_TORCH = (block("# torch_wrapped.py"), block("# torch_across.py"), block("# torch_pipelined.py"))


@pytest.mark.proc
@pytest.mark.parametrize("code", WITH_TORCH, ids=lambda code: code.split()[1])
def test_torch_modules(code: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="it comes with the extra `torch`")
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    printed, claimed = numbers(done.stdout), numbers(after(code.split("\n")[0], "text"))
    assert done.stderr == "" and len(claimed) >= 3
    np.testing.assert_allclose(printed, claimed, atol=0.06)


NOTEBOOK = blocks("python", TEXTS["docs/guides/jupyter.md"])


async def test_the_cells_of_the_notebook_await_at_top_level() -> None:
    from tests.test_recipes import run

    names: dict[str, Any] = {}
    for cell in NOTEBOOK:
        names = await run(cell, **names)
    assert "5" in names["summary"]._repr_html_() and "0.weight" in names["picture"]._repr_svg_()
    assert names["loss"].item() < 0.2


#: runs the cells that it is given as JSON in a kernel, and prints the media types of what each of them shows
IN_A_KERNEL = """
import json, sys
from jupyter_client.manager import start_new_kernel

shown = []

def show(message):
    assert message["msg_type"] != "error", message["content"]
    if message["msg_type"] == "execute_result":
        shown.append(list(message["content"]["data"]))

manager, client = start_new_kernel(kernel_name="python3")
for cell in json.load(sys.stdin):
    client.execute_interactive(cell, output_hook=show, timeout=300)
client.stop_channels()
manager.shutdown_kernel(now=True)
print(json.dumps(shown))
"""


@pytest.mark.proc
def test_a_jupyter_kernel_runs_them_and_shows_what_the_guide_says() -> None:
    pytest.importorskip("ipykernel", reason="it comes with the extra `docs`")
    views = {
        "loss": "text/html",
        "model": "text/html",
        "summary": "text/html",
        "picture": "image/svg+xml",
        "schedule": "text/html",
        "pipeline.simulate(schedule, pipeline.Costs(1, 1, 1))": "image/svg+xml",
    }
    setting = "from aiograd import pipeline\nschedule = pipeline.make_schedule('1F1B', 2, 2)"
    cells = json.dumps([*NOTEBOOK, setting, *views])
    done = subprocess.run([sys.executable, "-c", IN_A_KERNEL], input=cells, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    number, *shown = json.loads(done.stdout)
    assert number == ["text/plain"], "the loss, as a number"
    assert [kind in kinds for kind, kinds in zip(views.values(), shown, strict=True)] == [True] * len(views)


# -------------------------------------------------------------------- the reference


def test_every_page_is_reached_from_an_index() -> None:
    for folder in ("tutorials", "guides", "explanation"):
        listed = set(re.findall(r"^([\w-]+)$", TEXTS[f"docs/{folder}/index.md"], re.MULTILINE))
        pages = {Path(name).stem for name in TEXTS if name.startswith(f"docs/{folder}/")} - {"index"}
        assert pages <= listed, f"docs/{folder}/index.md does not list {pages - listed}"


def test_every_public_module_has_a_page() -> None:
    pages = "".join(path.read_text() for path in (Path(__file__).parent.parent / "docs/reference").glob("*.rst"))
    asked = set(re.findall(r"^\.\. public:: ([\w.]+)", pages, re.MULTILINE))
    assert asked == set(MODULES) and asked <= NAMESPACES
    for module in MODULES:
        assert public_names(module)


def test_every_command_and_option_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    page = TEXTS["docs/reference/command-line.md"]
    for arguments in (["--help"], ["worker", "--help"]):
        with pytest.raises(SystemExit):
            cli.main(arguments)
        text = capsys.readouterr().out
        named = set(re.findall(r"--[a-z-]+", text)) if "worker" in arguments else set(re.findall(r"^    ([a-z]+) ", text, re.MULTILINE))
        assert not [name for name in named - {"--help"} if name not in page]
