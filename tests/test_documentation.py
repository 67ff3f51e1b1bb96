"""The tutorials and guides that are programs of their own, run; what they say they print, they print.

Recipes and the parts of one long example are run by ``test_recipes.py``, names and tables are checked by ``test_readme.py``.
"""

from __future__ import annotations

import asyncio
import contextlib
import csv
import gc
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import types
from collections.abc import AsyncIterator, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer

import aiograd as ag
from aiograd import distributed as dist
from aiograd.errors import WorkerLostError
from aiograd.running import cli
from tests.documentation import TEXTS, blocks, complaints_in
from tests.public_names import MODULES, NAMESPACES, public_names
from tests.support import assert_raises
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


#: bodies that are no JSON, or not the JSON of any request
BROKEN = (b"", b"{", b"[]", b"null", b"3", b'"numbers"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"numbers": [0.5, 0.5], "label": 0')
#: JSON in place of two numbers
NO_NUMBERS = (
    "[0.5]", "[0.5, 0.5, 0.5]", "[]", "null", "0.5", '"ab"', '["a", "b"]', "[[0.5], [0.5]]", "[null, 0.5]", '{"a": 0.5, "b": 0.5}', "[NaN, 0.5]",
    "[Infinity, 0.5]", "[1e300, 0.5]", "[1e39, -1e39]", f"[1{'0' * 400}, 0.5]",
)  # fmt: skip
#: JSON in place of a class that the model has
NO_LABEL = ("2", "-1", '"1"', "null", "[1]", "{}", "0.5", "NaN", f"1{'0' * 400}")
TAUGHT = (*(f'{{"numbers": {n}, "label": 1}}'.encode() for n in NO_NUMBERS), *(f'{{"numbers": [0.5, 0.5], "label": {n}}}'.encode() for n in NO_LABEL))


async def refused(client: ClientSession, url: Any, bodies: Iterable[bytes]) -> None:
    """Each body is answered as its sender's mistake, in words that say what was expected."""
    for body in bodies:
        for content_type in ("application/json", "application/json; charset=nothing", "text/plain"):
            async with client.post(url, data=body, headers={"Content-Type": content_type}) as answer:
                assert 400 <= answer.status < 500 and "expected" in await answer.text(), (body[:50], content_type, answer.status)


# -------------------------------------------------------------------- tutorials


@pytest.mark.net
async def test_the_service_that_learns_refuses_malformed_requests_and_goes_on() -> None:
    module = load("# learning_service.py")
    app = module.application()
    async with serving(app) as (server, client):
        teach, predict, trainer = server.make_url("/learn"), server.make_url("/predict"), app[module.TRAINER]
        await refused(client, teach, (*BROKEN, b'{"numbers": [0.5, 0.5]}', *TAUGHT))
        await refused(client, predict, (*BROKEN[:-1], *(f'{{"numbers": {n}}}'.encode() for n in NO_NUMBERS)))
        assert not len(trainer.buffer) and not trainer.steps
        assert (await client.post(teach, json={"numbers": [100, -100], "label": 0})).status == 202
        while trainer.steps < 3:
            await asyncio.sleep(0)
        body = await (await client.post(predict, json={"numbers": [100, -100]})).json()
        assert sum(body["probabilities"]) == pytest.approx(1)


@pytest.mark.net
async def test_the_service_learns_while_it_serves() -> None:
    module = load("# learning_service.py")
    app = module.application()
    random = np.random.default_rng(1)
    async with serving(app) as (server, client):
        first = await (await client.post(server.make_url("/predict"), json={"numbers": [0.5, 0.5]})).json()
        assert sum(first["probabilities"]) == pytest.approx(1)
        learner = app[module.TRAINER]
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
@pytest.mark.parametrize("name", ["minimized.py", "fitted.py"])
def test_minimizing_with_scipy(name: str, tmp_path: Path) -> None:
    code = block("# minimized.py") if name == "minimized.py" else block("# fitted.py")
    (tmp_path / name).write_text(code)
    done = subprocess.run([sys.executable, "-W", "error", name], cwd=tmp_path, capture_output=True, text=True, check=True)
    count, claimed = re.compile(r"\d+(?= evaluations)"), after(f"# {name}", "text")
    assert done.stderr == "" and count.sub("many", done.stdout) == count.sub("many", claimed)
    counts = zip(count.findall(done.stdout), count.findall(claimed), strict=True)  # another release of SciPy may take a few more
    assert all(int(taken) < 2 * int(said) for taken, said in counts)


def test_a_loop_that_stood_at_module_level(capsys: pytest.CaptureFixture[str]) -> None:
    load("# looped.py")
    assert capsys.readouterr().out == after("# looped.py", "text")


def test_derivatives(capsys: pytest.CaptureFixture[str]) -> None:
    load("# derivatives.py")
    assert capsys.readouterr().out == after("# derivatives.py", "text")
    load("# remote_derivatives.py")
    assert capsys.readouterr().out == after("# remote_derivatives.py", "text")


def test_gradients_of_gradients_that_come_from_a_worker(capsys: pytest.CaptureFixture[str]) -> None:
    load("# meta.py")
    found, difference = numbers(capsys.readouterr().out)
    assert found == pytest.approx(difference, rel=1e-6) and [found] == pytest.approx(numbers(after("# meta.py", "text"))[:1], rel=1e-6)


def test_tangents(capsys: pytest.CaptureFixture[str]) -> None:
    load("# tangents.py")
    assert capsys.readouterr().out == after("# tangents.py", "text")


def test_leases(capsys: pytest.CaptureFixture[str]) -> None:
    load("# leased.py")
    assert capsys.readouterr().out == after("# leased.py", "text")


@pytest.mark.proc
def test_replicas(tmp_path: Path) -> None:
    (tmp_path / "replicas_service.py").write_text(block("# replicas_service.py"))
    (tmp_path / "replicas.py").write_text(block("# replicas.py"))
    done = subprocess.run([sys.executable, "replicas.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "6 layers.0.bias\n" and not complaints_in(done.stderr)


@pytest.mark.proc
def test_replicas_of_a_pipeline(tmp_path: Path) -> None:
    (tmp_path / "replicated_pipeline.py").write_text(block("# replicated_pipeline.py"))
    done = subprocess.run([sys.executable, "replicated_pipeline.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "8 True\n" and not complaints_in(done.stderr)
    (tmp_path / "absorbing_pipeline.py").write_text(block("# absorbing_pipeline.py"))
    done = subprocess.run([sys.executable, "absorbing_pipeline.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout == "True True\n{}\n"


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
    assert re.fullmatch(r"http://127\.0\.0\.1:\d+/dashboard\?token=\w+\n", done.stdout) and not complaints_in(done.stderr)
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
        await refused(client, server.make_url("/learn"), (*BROKEN, b'{"numbers": [0.5, 0.5]}', *TAUGHT))
        answer = await client.post(server.make_url("/learn"), json={"numbers": [1, 2], "label": 1})
        losses.append((await answer.json())["loss"])
    assert losses[0] > losses[1] > losses[2] > losses[3] > 0, "what was refused has changed nothing"


@pytest.mark.proc
async def test_the_service_of_the_readme_says_where_it_serves(tmp_path: Path) -> None:
    """As a program it serves until it is interrupted; the command of the README reaches it."""
    (port,) = re.findall(r"http://127\.0\.0\.1:(\d+)/learn", TEXTS["README.md"])
    code = block("# readme_service.py").replace(f"port={port}", "port=0")
    (tmp_path / "readme_service.py").write_text(code)
    environment = os.environ | {"PYTHONUNBUFFERED": "1"}
    process = await asyncio.create_subprocess_exec(sys.executable, "readme_service.py", cwd=tmp_path, env=environment, stdout=subprocess.PIPE)
    assert process.stdout is not None
    (url,) = re.findall(r"Running on (http://127\.0\.0\.1:\d+)", (await process.stdout.readline()).decode())
    (body,) = re.findall(r"-d '(.+)' http", TEXTS["README.md"])
    async with ClientSession() as client, client.post(f"{url}/learn", data=body) as answer:
        assert answer.status == 200 and (await answer.json())["loss"] > 0
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 0


@pytest.mark.net
async def test_aiohttp() -> None:
    module = load("# aiohttp_service.py")
    async with serving(module.app) as (server, client):
        answer = await client.post(server.make_url("/attribution"), json={"numbers": [1, 2, 3, 4], "label": 2})
        np.testing.assert_array_equal(np.float32(await answer.json()), module.model.weight.numpy()[2])
        numbers = (*NO_NUMBERS, *(f"[1, 2, 3, {n}]" for n in ("NaN", "-Infinity", "1e300", "null", '"a"', "[4]")))
        labels = ("3", *NO_LABEL[1:])
        await refused(client, server.make_url("/attribution"), (
            *BROKEN, *(f'{{"numbers": {n}, "label": 1}}'.encode() for n in numbers),
            *(f'{{"numbers": [1, 2, 3, 4], "label": {n}}}'.encode() for n in labels),
        ))  # fmt: skip
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
        for values in (*NO_NUMBERS, "[1, 2, 3]", "[1, 2, 3, 4, 5]", "[1, 2, 3, NaN]", "[1, 2, 3, 1e300]"):
            answer = await client.post("/attribution", params={"label": 2}, content=values, headers={"Content-Type": "application/json"})
            assert answer.status_code == 422 and answer.json()["detail"], values
        for label in (3, -1, "a", "1.5", None):
            answer = await client.post("/attribution", params={} if label is None else {"label": label}, json=[1, 2, 3, 4])
            assert answer.status_code == 422 and "label" in answer.json()["detail"][0]["loc"], label
        assert (await client.get("/engine")).json() == {"committed": 1, "failed": 0, "cancelled": 0}


@pytest.mark.net
async def test_the_example_of_fastapi(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("fastapi", reason="it comes with the extra `docs`")
    httpx = pytest.importorskip("httpx", reason="it comes with the extra `docs`")
    spec = importlib.util.spec_from_file_location("fastapi_service", Path(__file__).parent.parent / "examples" / "fastapi_service.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["fastapi_service"] = module  # annotations are looked up in it
    try:
        spec.loader.exec_module(module)
        await module.main()
        printed = capsys.readouterr().out
        assert "refused: 422" in printed and "'steps': 300" in printed and "answered meanwhile: True" in printed
        assert [f"of kind {kind}" in printed for kind in range(3)] == [True] * 3
        transport = httpx.ASGITransport(module.app)
        async with module.lifespan(module.app), httpx.AsyncClient(transport=transport, base_url="http://service") as client:
            learner = module.app.state.learner
            assert (await client.post("/train", params={"steps": 10_000})).status_code == 202
            assert (await client.post("/train")).status_code == 409
            answers = [await client.post("/predict", json={"measures": [3.5, 0.2]}) for _ in range(20)]
            assert {answer.status_code for answer in answers} == {200}
            assert 0 < (await client.get("/train")).json()["steps"] < 10_000
        assert learner.task.cancelled() and not learner.turn.locked()
    finally:
        del sys.modules["fastapi_service"]


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


def test_the_lines_of_torch_rpc(capsys: pytest.CaptureFixture[str]) -> None:
    load("# from_rpc.py")
    assert capsys.readouterr().out == after("# from_rpc.py", "text")


def test_the_table_of_torch_rpc_names_what_is_there() -> None:
    """Each name of the right column is one of the object before its dot, and the calls take these arguments."""
    cells = re.findall(r"^\| .+? \| (.+) \|$", TEXTS["docs/guides/from-torch-rpc.md"], re.MULTILINE)
    owners: dict[str, Any] = {
        "ag": ag, "optim": ag.optim, "dist": dist, "worker": dist.Worker, "ref": dist.RemoteRef, "module": dist.RemoteModule,
        "ctx": dist.Context, "optimizer": dist.DistributedOptimizer, "asyncio": asyncio,
    }  # fmt: skip
    names = [name for cell in cells for code in re.findall(r"`([^`]+)`", cell) for name in re.findall(r"(?<![\w.\"])([a-z]+)\.(\w+)", code)]
    assert len(cells) > 20 and len({owner for owner, _ in names}) >= 8
    for owner, name in names:
        assert hasattr(owners[owner], name), (owner, name)


def test_stages(capsys: pytest.CaptureFixture[str]) -> None:
    load("# stages.py")
    assert capsys.readouterr().out == "4 (8, 8)\n"


WITH_TORCH = (block("# torch_wrapped.py"), block("# torch_across.py"), block("# torch_pipelined.py"), block("# hosted.py"))


@pytest.mark.proc
@pytest.mark.parametrize("code", WITH_TORCH, ids=lambda code: code.split()[1])
def test_torch_modules(code: str, tmp_path: Path) -> None:
    pytest.importorskip("torch", reason="it comes with the extra `torch`")
    (tmp_path / "program.py").write_text(code)
    done = subprocess.run([sys.executable, "program.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    printed, claimed = numbers(done.stdout), numbers(after(code.split("\n")[0], "text"))
    assert not complaints_in(done.stderr) and len(claimed) >= 3
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
        "loss": "text/html", "model": "text/html", "summary": "text/html", "picture": "image/svg+xml", "schedule": "text/html",
        "pipeline.simulate(schedule, pipeline.Costs(1, 1, 1))": "image/svg+xml",
        "await ag.viz.step((model(x) ** 2).mean(), names=model)": "text/html",
    }  # fmt: skip
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
    for arguments in (["--help"], ["worker", "--help"], ["wan", "--help"]):
        assert_raises(SystemExit, None, cli.main, arguments)
        text = capsys.readouterr().out
        named = set(re.findall(r"--[a-z-]+", text)) if len(arguments) > 1 else set(re.findall(r"^    ([a-z]+) ", text, re.MULTILINE))
        assert not [name for name in named - {"--help"} if name not in page]
