"""The code in the README and in ``docs``, run as it stands there, and what it prints."""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import gc
import importlib.util
import inspect
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from aiograd import pipeline
from aiograd.errors import DeadlineError, DistributedError, WorkerLostError
from aiograd.testing import simulated_run
from aiograd.testing.virtual_clock import VirtualClock
from tests.distributed.groups import groups
from tests.documentation import ROOT, TEXT, TEXTS, blocks, complaints_in
from tests.support import assert_awaiting_raises

IMAGES = np.random.default_rng(0).normal(size=(16, 64)).astype(np.float32)
LABELS = np.arange(16) % 10
SHELL = "/bin/sh"


# -------------------------------------------------------------------- finding code


def recipes() -> dict[str, list[str]]:
    """The code of each recipe, fenced or within a line, by its title in bold."""
    section = TEXTS["docs/guides/recipes.md"]
    found: dict[str, list[str]] = {}
    for title, text in re.findall(r"^\*\*(.+?)\*\*(.*?)(?=^\*\*|\Z)", section, re.MULTILINE | re.DOTALL):
        found[title.rstrip(".")] = blocks("python", text) or [span for span in re.findall(r"`([^`]+)`", text) if "(" in span]
    return found


RECIPES = recipes()


def block(start: str) -> str:
    """The one block of Python that starts so."""
    (found,) = (code for code in blocks("python") if code.startswith(start))
    return found


def after(start: str, language: str) -> str:
    """The first block of a language behind the block of Python that starts so."""
    return blocks(language, TEXT[TEXT.index(f"```python\n{start}") :])[0]


def start(code: str, names: dict[str, Any]) -> Any:
    """Run code; returns a coroutine if it awaits something."""
    names |= {"__name__": "readme", "__builtins__": builtins}
    return types.FunctionType(compile(code, "documentation", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT), names)()


async def run(code: str, **names: Any) -> dict[str, Any]:
    """Run code that may await; returns its names."""
    running = start(code, names)
    if inspect.iscoroutine(running):
        await running
    return names


async def cook(title: str, **names: Any) -> dict[str, Any]:
    """Run a recipe."""
    for code in RECIPES[title]:
        names = await run(code, **names)
    return names


def numbers(text: str) -> list[float]:
    """All numbers in a text that have a point in them."""
    return [float(number) for number in re.findall(r"-?\d+\.\d+", text)]


def test_every_block_is_run_by_a_test() -> None:
    """A block that is new needs a test here, or in the module that runs whole pages."""
    here = "".join((Path(__file__).parent / name).read_text() for name in ("test_recipes.py", "test_documentation.py"))
    for title, codes in RECIPES.items():
        assert codes, f"the recipe {title!r} has no code"
        starts = [code.split("\n")[0] for code in codes]
        runs = (f'cook("{title}"', f'RECIPES["{title}"', *(f'block("{start}' for start in starts))
        assert any(each in here for each in runs), f"no test runs the recipe {title!r}"
    cells = blocks("python", TEXTS["docs/guides/jupyter.md"])  # those of one notebook
    cooked = {code for codes in RECIPES.values() for code in codes} | {*cells}
    for code in blocks("python"):
        start = code.split("\n")[0]
        known = (start, start[:60], f"{start.split(' = ')[0]} = ", start.split("  ")[0])
        assert code in cooked or any(f'{how}("{each}")' in here for each in known for how in ("block", "load")), f"no test runs the block {start!r}"


# -------------------------------------------------------------------- in one process


@pytest.fixture
def model() -> ag.nn.Module:
    ag.seed(0)
    return ag.nn.Sequential(ag.nn.Linear(64, 128), ag.nn.ReLU(), ag.nn.Linear(128, 10))


def model_and_loss(model: ag.nn.Module, images: Any = IMAGES, labels: Any = LABELS) -> Any:
    return ag.nn.functional.cross_entropy(model(ag.asarray(images)), labels)


async def test_a_pass_step_by_step(capsys: pytest.CaptureFixture[str]) -> None:
    code = block("# step_through.py")
    names = await run(code)
    assert names["w"].grad is None
    await run(block("print(steps[4])"), steps=names["steps"])
    printed, claimed = capsys.readouterr().out.splitlines(), after("print(steps[4])", "text").splitlines()
    place, line = claimed.pop(1).strip().split(": ", 1)
    assert printed.pop(1).strip() == f"recorded at documentation:{place.rpartition(':')[2]}"  # the code is no file
    assert place.startswith("recorded at step_through.py:") and code.split("\n")[int(place.rpartition(":")[2]) - 1].strip() == line
    assert printed[:-1] == claimed[:-1]
    np.testing.assert_allclose(numbers(printed[-1]), numbers(claimed[-1]), rtol=1e-6)


@pytest.mark.parametrize("first", [block("# private.py"), block("# each.py")])
async def test_what_is_computed_per_sample(first: str, capsys: pytest.CaptureFixture[str]) -> None:
    await run(first)
    assert capsys.readouterr().out.strip() == after(first.split("\n")[0], "text").strip()


@pytest.mark.parametrize(("first", "count"), [(block("# first.py"), 3), (block("import numpy as np"), 4)])
def test_the_first_lines(first: str, count: int, capsys: pytest.CaptureFixture[str]) -> None:
    start(first, {})
    printed = capsys.readouterr().out
    claimed = "".join(re.findall(r"# (?=[-t])(.*)", first))
    assert len(numbers(printed)) == count
    np.testing.assert_allclose(numbers(printed), numbers(claimed), rtol=1e-6 if count == 3 else 1e-8, atol=2e-9)


def test_what_a_ported_script_looks_like() -> None:
    made = "parameters = [torch.tensor([1.0, 2.0], requires_grad=True)]\n    loss, another_loss = (parameters[0].sum() * i for i in (1, 2))"
    code = block("import aiograd as torch").replace("    ...\n", f"    global grads, parameters\n    {made}\n")
    names: dict[str, Any] = {}
    start(code, names)
    assert names["parameters"][0].grad.tolist() == [1.0, 1.0] and names["grads"][0].tolist() == [2.0, 2.0]


async def test_serving_and_learning() -> None:
    names: dict[str, Any] = {}
    await start(block("# serving and learning"), names)
    assert names["server"].statistics().rollbacks == 1 and names["answer"].version == 1
    await start(block("# learning with a gate"), names)
    assert len(names["trainer"].buffer) == 4 and names["trainer"].error is None


def test_a_compiled_function(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# compiled.py"), {})
    printed = capsys.readouterr().out
    assert "dropout_mask" in printed and "recordings=1, runs=19" in printed


def test_a_native_program(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# native.py"), {})
    printed = capsys.readouterr().out
    assert "energy" not in printed.partition("\n")[0] and "runs=1" in printed and "recordings=1" in printed
    assert ("fused 1" in printed) is ("native_programs=1" in printed) is ag.kernels.native_available()


def test_a_compiled_function_in_forward_mode(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# trajectory.py"), {})
    printed = capsys.readouterr().out
    assert "recordings=1, runs=3" in printed and "d_i0" in printed


def test_a_sparse_jacobian(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# heat.py"), {})
    assert capsys.readouterr().out == after("# heat.py", "text")


def test_memory_by_budget(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# budget.py"), {})
    share = float(capsys.readouterr().out.split()[3])
    assert 0.3 < share <= 0.5


def test_a_compiled_step(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# compiled_step.py"), {})
    printed = capsys.readouterr().out
    assert " 19\n" in printed and "\ndef step():  # " in printed


def test_the_step_of_a_physics_informed_network() -> None:
    names: dict[str, Any] = {}
    start(block("# pinn_step.py"), names)
    assert names["step"].statistics().runs == 19 and not names["step"].statistics().breaks


async def test_an_implicit_function() -> None:
    names: dict[str, Any] = {}
    start(block("async def adjoint(matvec, b):"), names)
    shift = np.eye(20, k=-1)
    solve = ag.implicit.root(lambda x, b: x - ag.asarray(shift) @ x - b, solve=names["adjoint"])(lambda x, b: np.cumsum(b.numpy()))
    b = ag.tensor(np.ones(20), requires_grad=True)
    await (await solve(ag.zeros(20, dtype=np.float64), b)).sum().backward()
    assert b.grad.tolist() == list(range(20, 0, -1))


def test_the_penalty_of_a_ridge_regression(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# implicit.py"), {})
    assert numbers(capsys.readouterr().out) == numbers(after("# implicit.py", "text"))


async def test_train(model: ag.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first = model_and_loss(model).item()

    def batches() -> Iterator[tuple[Any, Any]]:
        for _ in range(20):
            yield ag.asarray(IMAGES), LABELS

    trained = (await cook("Train", ag=ag, batches=batches()))["model"]
    assert model_and_loss(trained).item() < first
    for name, value in ag.load("model.safetensors").items():
        np.testing.assert_array_equal(value.numpy(), trained.state_dict()[name].detach().numpy())


async def test_time_out(model: ag.nn.Module) -> None:
    await cook("Time out, or stop", asyncio=asyncio, loss=model_and_loss(model))
    before = [parameter.grad.numpy().copy() for parameter in model.parameters()]

    async def slow(gradient: Any) -> None:
        await asyncio.Event().wait()

    loss = model_and_loss(model)
    loss.register_hook(slow)
    await assert_awaiting_raises(TimeoutError, None, run(RECIPES["Time out, or stop"][0].replace("0.5", "0"), asyncio=asyncio, loss=loss))
    for parameter, gradient in zip(model.parameters(), before, strict=True):
        np.testing.assert_array_equal(parameter.grad.numpy(), gradient)


@pytest.mark.parametrize("where", ["before the decision", "after the decision", "by aiograd"])
async def test_whether_a_step_that_timed_out_was_taken(virtual_clock: VirtualClock, where: str) -> None:
    class Replicas:
        async def step(self, shards: Any) -> None:
            x = shards[0]
            y = x * 1

            async def wait(_: Any) -> None:
                await asyncio.sleep(100)

            if where == "before the decision":
                y.register_hook(wait)
            elif where == "after the decision":
                x.register_post_accumulate_grad_hook(wait)
            else:
                raise DeadlineError("took too long")
            await (y * y).sum().backward()

    x = ag.tensor([1.0, 2.0], requires_grad=True)
    names = await cook("Was the step that timed out taken?", asyncio=asyncio, replicas=Replicas(), shards=[x], left_out=[])
    assert names["taken"] == (where == "after the decision") == (x.grad is not None)
    assert names["left_out"] == ([] if names["taken"] else [names["shards"]])


class Client:
    async def scale(self, g: Any) -> Any:
        await asyncio.sleep(0)
        return g * 2


async def test_a_function_whose_backward_waits_for_somebody_else() -> None:
    names = await cook("A function of your own", ag=ag)
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    await names["RemoteScale"].apply(x, Client()).sum().backward()
    assert x.grad.tolist() == [2.0, 2.0]


async def test_attribution_touches_no_gradient(model: ag.nn.Module) -> None:
    image = ag.tensor(IMAGES[0], requires_grad=True)
    names = await cook("Per-example attribution in a request handler", ag=ag, model=model, image=image, label=3)
    assert names["attribution"].shape == (64,)
    assert image.grad is None and all(parameter.grad is None for parameter in model.parameters())


async def test_several_tasks_train_one_model(model: ag.nn.Module) -> None:
    first = model_and_loss(model).item()
    batches = [(ag.asarray(IMAGES[half]), LABELS[half]) for half in (slice(8), slice(8, 16))]
    optimizer = ag.optim.SGD(model.parameters(), lr=0.05)
    await cook("Several tasks train one model", ag=ag, asyncio=asyncio, model=model, optimizer=optimizer, batches=batches)
    assert model_and_loss(model).item() < first
    assert all(parameter.grad is None for parameter in model.parameters())


async def test_one_engine_for_all_handlers(model: ag.nn.Module) -> None:
    names = await cook("One engine for all handlers", ag=ag, contextlib=contextlib)
    app = types.SimpleNamespace(state=types.SimpleNamespace())
    is_up, is_over = asyncio.Event(), asyncio.Event()

    async def live() -> None:
        async with names["lifespan"](app):
            is_up.set()
            await is_over.wait()

    living = asyncio.create_task(live())
    await is_up.wait()
    await model_and_loss(model).backward()  # in another task than the one that entered the engine
    assert app.state.engine.statistics().committed == 1
    is_over.set()
    await living


async def test_a_service_with_its_own_loop(model: ag.nn.Module) -> None:
    names = await cook("A service with its own loop", ag=ag, contextlib=contextlib)
    app = types.SimpleNamespace(state=types.SimpleNamespace())
    before = gc.get_threshold()
    async with names["lifespan"](app):
        assert gc.get_threshold() != before
        await model_and_loss(model).backward()
        assert app.state.engine.statistics().committed == 1
    assert gc.get_threshold() == before


@pytest.mark.proc
async def test_a_training_program_with_its_own_loop() -> None:
    """In a process of its own, since it is for good; what it does is tested in ``engine/test_allocator.py``."""
    (code,) = RECIPES["A training program with its own loop"]
    program = f"import aiograd as ag\nassert {code} in (True, False)"
    assert await (await asyncio.create_subprocess_exec(sys.executable, "-c", program)).wait() == 0


async def test_offload_and_checkpoint_give_the_same_gradients(model: ag.nn.Module) -> None:
    def forward(images: Any, labels: Any = LABELS) -> Any:
        return model_and_loss(model, images, labels)

    plain = model_and_loss(model)
    offloaded = await cook("Keep the forward off the loop too", ag=ag, model_and_loss=forward, images=IMAGES, labels=LABELS)
    recomputed = await cook("Trade time for memory", ag=ag, block=forward, x=ag.asarray(IMAGES))
    gradients = []
    for loss in (plain, offloaded["loss"], recomputed["y"]):
        await loss.backward()
        gradients.append([parameter.grad.numpy().copy() for parameter in model.parameters()])
        for parameter in model.parameters():
            parameter.grad = None
    for others in gradients[1:]:
        for one, other in zip(gradients[0], others, strict=True):
            np.testing.assert_array_equal(one, other)


async def test_optimizer_in_backward(model: ag.nn.Module) -> None:
    def step(parameter: Any) -> None:
        with ag.no_grad():
            parameter -= 0.01 * parameter.grad
        parameter.grad = None

    before = model_and_loss(model)
    for parameter in model.parameters():
        await cook("Optimizer in backward", parameter=parameter, hook=step)
    await before.backward()
    assert model_and_loss(model).item() < before.item()
    assert all(parameter.grad is None for parameter in model.parameters())


async def test_see_what_happens(model: ag.nn.Module, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    loss = model_and_loss(model)
    await cook("See what happens", ag=ag, loss=loss)
    record, draw = RECIPES["See what happens"]
    await run(record.replace("...", "await loss.backward()"), ag=ag, loss=loss)
    assert "linear" in capsys.readouterr().out
    assert (tmp_path / "trace.json").stat().st_size > 0
    assert "LinearBackward" in (await run(f"svg = {draw}", ag=ag, loss=loss))["svg"]


@pytest.mark.net
def test_the_example_of_the_distributed_package(capsys: pytest.CaptureFixture[str]) -> None:
    assert dist.__doc__ is not None
    example = textwrap.dedent(re.findall(r"^::\n(.*?)^\S", dist.__doc__, re.MULTILINE | re.DOTALL)[0])
    start(example, {"ag": ag})
    assert capsys.readouterr().out.strip() in example and "tensor([2., 4.])" in example


@pytest.mark.proc
def test_what_tests_may_look_like(pytester: pytest.Pytester) -> None:
    pytester.makepyfile(across=block("# across.py"), test_mine=block("# test_mine.py"), test_lines=block("# test_lines.py"))
    pytester.makepyfile(test_clock=block("# test_clock.py"))
    (ini,) = blocks("ini", TEXTS["docs/tutorials/testing.md"])
    pytester.makefile(".ini", pytest=ini)
    pytester.runpytest_subprocess("-p", "no:cacheprovider", "-W", "error").assert_outcomes(passed=3)


# -------------------------------------------------------------------- pipelines, parallel maps, experts


def drawn(timeline: pipeline.Timeline) -> str:
    """A timeline as the documentation draws it: three letters per unit of time."""
    lines = [f"{timeline.name}: {timeline.cost:g} units, idle {timeline.bubble_rate:.1%}"]
    for rank in range(timeline.ranks):
        line, end = "", 0.0
        for event in (event for event in timeline.events if event.rank == rank and event.action.kind.is_compute):
            line += " . " * round(event.start - end)
            line += f"{event.action.kind.value}{event.action.microbatch}".ljust(3 * round(event.end - event.start) - 1, "=") + " "
            end = event.end
        lines.append(f"rank {rank}  {line.rstrip()}")
    return "\n".join(lines)


EVEN = pipeline.Costs(forward=1, input_backward=1, weight_backward=1)


def test_the_drawn_timelines_are_those_of_the_schedules() -> None:
    for name in ("1F1B", "ZB-H1"):
        assert drawn(pipeline.simulate(pipeline.make_schedule(name, 3, 4), EVEN)) in TEXT


def test_the_table_of_schedules_is_what_simulation_says() -> None:
    rows = re.findall(r"^\| `([\w-]+)`(.*?) \| (\d+) \| ([\d.]+%) \| (\d+) \|$", TEXT, re.MULTILINE)
    assert len(rows) == 6
    for name, note, *said in rows:
        limit = re.search(r"memory_limit=(\d+)", note)
        schedule = pipeline.make_schedule(name, 4, 8, 2 if "two stages" in note else 1, memory_limit=float(limit[1]) if limit else None)
        timeline = pipeline.simulate(schedule, EVEN)
        assert said == [f"{timeline.cost:g}", f"{timeline.bubble_rate:.1%}", f"{max(timeline.peak_activations):g}"], name


def test_every_schedule_that_is_named_can_be_made() -> None:
    (sentence,) = re.findall(r"^Others are (.*?)\.", TEXT, re.MULTILINE | re.DOTALL)
    names = re.findall(r"`([^`]+)`", sentence)
    assert len(names) == 7
    for name in names:
        pipeline.make_schedule(name, 4, 8, 2).validate()


def test_a_pipeline(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# pipelined.py"), {})
    printed, claimed = capsys.readouterr().out.splitlines(), after("# pipelined.py", "text").splitlines()
    assert printed[0] == claimed[0]  # the simulation
    np.testing.assert_allclose(numbers(printed[1]), numbers(claimed[1]), atol=2e-3)
    assert printed[1].split()[-2:] == claimed[1].split()[-2:]


def test_more_than_a_chain(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# past_a_neighbour.py"), {})
    assert capsys.readouterr().out == after("# past_a_neighbour.py", "text")


def test_one_line_awaits(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# only_one_line_awaits.py"), {})
    assert capsys.readouterr().out == "(4, 4)\n"


def test_a_plan_after_a_loss(capsys: pytest.CaptureFixture[str]) -> None:
    start(block("# absorbed.py"), {})
    assert capsys.readouterr().out == after("# absorbed.py", "text")


def test_the_table_of_losses_is_what_plans_say() -> None:
    rows = re.findall(r"^\| (\d+) \| (\d+) \| ([\d.]+) × \|$", TEXTS["docs/tutorials/pipeline.md"], re.MULTILINE)
    assert len(rows) == 3
    for microbatches, units, ratio in rows:
        schedule = pipeline.make_schedule("1F1B", 4, int(microbatches))
        most = max(pipeline.absorb(schedule, 4, [(0, rank)]).timeline().duration for rank in range(4))
        assert most == float(units)
        assert float(ratio) - 0.01 <= most / pipeline.simulate(schedule, EVEN).duration <= float(ratio)


def test_a_parallel_map() -> None:
    async def main() -> float:
        a, b, c = leaves
        await run(block("class Distant(ag.Function):"), ag=ag, asyncio=asyncio, a=a, b=b, c=c)
        return asyncio.get_running_loop().time()

    leaves = [ag.tensor([float(i), 1.0], requires_grad=True) for i in range(3)]
    result = simulated_run(main)
    assert result.value == pytest.approx(0.2)
    assert all(leaf.grad.tolist() == [2.0, 2.0] for leaf in leaves)


async def test_a_mixture_of_experts() -> None:
    names = await run(block("from aiograd.distributed import moe"), ag=ag, images=ag.asarray(IMAGES[:1]), labels=LABELS[:1])
    mixture, modules = names["mixture"], names["modules"]
    assert all(parameter.grad is not None for parameter in mixture.parameters())
    (scores,) = IMAGES[:1] @ mixture.weight.detach().numpy().T + mixture.bias.detach().numpy()
    best = sorted(modules, key=lambda uid: scores[int(uid[-3])] + scores[2 + int(uid[-1])])[-2:]
    assert {uid for uid, module in modules.items() if module.weight.grad is not None} == set(best)


# -------------------------------------------------------------------- across processes


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the files that the tutorial names, and an environment in which `aiograd` and `python` are ours."""
    for name in ("across.py", "drive.py"):
        (tmp_path / name).write_text(block(f"# {name}"))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    for name in ("AIOGRAD_SECRET", "AIOGRAD_SECRET_FILE"):
        monkeypatch.delenv(name, raising=False)
    return tmp_path


def typed(console: str) -> list[str]:
    """The lines that are typed in a terminal."""
    return [line.removeprefix("$ ") for line in console.splitlines() if line.startswith("$ ")]


def shown(console: str) -> str:
    """The lines that appear in a terminal."""
    return "\n".join(line for line in console.splitlines() if not line.startswith("$ "))


@pytest.mark.proc
def test_two_workers_in_one_process(folder: Path) -> None:
    done = subprocess.run([sys.executable, "across.py"], cwd=folder, capture_output=True, text=True, check=True)
    np.testing.assert_allclose(numbers(done.stdout), numbers(after("# across.py", "text")), atol=1e-4)
    assert len(numbers(done.stdout)) == 9 and not complaints_in(done.stderr)


@pytest.mark.proc
@pytest.mark.skipif(shutil.which("openssl") is None, reason="the secret is drawn with openssl")
def test_two_terminals(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    first, second = (console.replace("7000", port) for console in (after("# across.py", "console"), after("# drive.py", "console")))
    (folder / "drive.py").write_text(block("# drive.py").replace("7000", port))
    *preparing, serving = typed(first)
    with subprocess.Popen([SHELL, "-c", "\n".join([*preparing, f"exec {serving}"])], stdout=subprocess.PIPE, text=True) as worker:
        try:
            assert worker.stdout is not None
            line = worker.stdout.readline().strip()
            assert re.sub(r"pid \d+", "", line) == re.sub(r"pid \d+", "", shown(first))
            done = subprocess.run([SHELL, "-c", "\n".join(typed(second))], capture_output=True, text=True, check=True)
            np.testing.assert_allclose(numbers(done.stdout), numbers(shown(second)), atol=1e-4)
            assert len(numbers(done.stdout)) == 9
            worker.send_signal(signal.SIGINT)
            assert worker.wait(20) == 0
        finally:
            worker.kill()


@pytest.mark.proc
async def test_a_lost_worker_is_restored(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    x = ag.tensor([0.5, -1.0])
    dies = [False]  # whether the worker is to die

    async def train_on(layer: dist.RemoteModule, optimizer: dist.DistributedOptimizer) -> None:
        for step in range(4):
            async with driver.context() as ctx:
                y = await layer(x)
                if dies[0] and step == 2:
                    dies[0] = False
                    os.kill(cluster.pids["left"], signal.SIGKILL)
                await ctx.backward((y**2).sum())
                await optimizer.step(ctx)

    monkeypatch.syspath_prepend(folder)
    weights = []
    for disturbed in (False, True):
        async with dist.LocalCluster(1, names=["left"], service="across:service") as cluster:
            driver = cluster.driver
            layer = dist.RemoteModule(driver, "left", await driver.remote("left", "Layer"))
            optimizer = dist.DistributedOptimizer(driver, ag.optim.SGD, [layer], lr=0.2, momentum=0.9)
            await train_on(layer, optimizer)  # a new layer differs from the saved one
            dies[0] = disturbed
            given = {"ag": ag, "dist": dist, "DistributedError": DistributedError, "driver": driver, "cluster": cluster, "train_on": train_on}
            names = await run(block("saved = "), layer=layer, optimizer=optimizer, **given)
            weights.append(await names["layer"].state_dict())
            assert names["optimizer"].steps == 8 and not dies[0]
    for name, value in weights[0].items():
        np.testing.assert_array_equal(value.numpy(), weights[1][name].numpy())


@pytest.mark.proc
@pytest.mark.skipif(importlib.util.find_spec("numba_cuda") is None, reason="there is no numba-cuda for this platform")
def test_training_on_a_device() -> None:
    """In numba's simulator, which is chosen before numba is imported."""
    code = block("model = ag.nn.Sequential(ag.nn.Linear(64, 128), ag.nn.GELU()")
    short = block("linear = ")
    before = "import numpy as np\nimport aiograd as ag\npixels = np.ones((2, 64), np.float32)\nbatches = [(pixels, np.array([1, 2]))] * 2\n"
    before += "async def main():\n"
    after = "    assert model[0].weight.device == 'cuda:0' and not ag.cuda.statistics().fallbacks\nag.run(main())\n"
    done = subprocess.run(
        [sys.executable, "-c", before + textwrap.indent(short + code, "    ") + after],
        cwd=ROOT, env={**os.environ, "NUMBA_ENABLE_CUDASIM": "1"}, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    total, loss = map(float, done.stdout.split())
    assert abs(total) > 0 and 0 < loss < 10


# -------------------------------------------------------------------- batches that count once


class _Replicas:
    """Replicas of which one is lost at the second step."""

    def __init__(self) -> None:
        self.tried: list[list[float]] = []
        self.taken: list[list[float]] = []
        self.removed: list[str] = []

    async def step(self, shards: Any) -> None:
        self.tried.append(shards)
        if len(self.tried) == 2:
            raise WorkerLostError("worker 'left' was lost", worker="left")
        self.taken.append(shards)

    async def remove(self, name: str) -> None:
        self.removed.append(name)


async def test_the_batch_of_a_lost_worker_comes_again() -> None:
    loader = ag.data.DataLoader(list(zip(range(6), range(6), strict=True)), batch_size=2)
    replicas = _Replicas()
    given = {"replicas": replicas, "shards_of": lambda images, labels: images.tolist(), "WorkerLostError": WorkerLostError}
    await run(block("while loader.epoch < epochs:"), loader=loader, epochs=2, **given)
    assert replicas.tried[:4] == [[0, 1], [2, 3], [2, 3], [4, 5]] and replicas.removed == ["left"]
    assert replicas.taken == 2 * [[0, 1], [2, 3], [4, 5]]


@pytest.mark.proc
def test_local_steps(tmp_path: Path) -> None:
    (tmp_path / "slow_links.py").write_text(block("# slow_links.py"))
    done = subprocess.run([sys.executable, "slow_links.py"], cwd=tmp_path, capture_output=True, text=True, check=True)
    rounds = done.stdout.splitlines()
    assert [line.split(" {")[0] for line in rounds] == [f"{number} ()" for number in range(1, 7)] and not complaints_in(done.stderr)
    assert sum(numbers(rounds[-1])) < sum(numbers(rounds[0]))


async def test_members_take_their_rows_of_the_same_batches() -> None:
    code = block("ddp = dist.DistributedDataParallel(model, group, data=loader)")
    weights = []

    async def member(group: dist.Group) -> None:
        model = ag.nn.Linear(1, 1, generator=ag.Generator(group.rank))
        rows = np.arange(8, dtype=np.float32).reshape(8, 1) / 8
        loader = ag.data.DataLoader(list(zip(rows, 2 * rows, strict=True)), batch_size=4)
        optimizer = ag.optim.SGD(model.parameters(), lr=0.1)
        given = {"dist": dist, "loss_of": lambda found, labels: ((found - labels) ** 2).mean()}
        await run(code, model=model, group=group, loader=loader, optimizer=optimizer, **given)
        assert loader.epoch == 1
        weights.append([p.detach().numpy().tobytes() for p in model.parameters()])

    async with groups("w0", "w1") as (_, joined):
        await asyncio.gather(*map(member, joined))
    assert weights[0] == weights[1]


async def test_a_penalty_on_the_gradient_of_all_rows() -> None:
    code = block("grads = await ag.grad(loss, parameters, create_graph=True)")
    rows = [ag.tensor(np.random.default_rng(rank).normal(size=(4, 3)), dtype=np.float64) for rank in (0, 1)]

    def network() -> Any:
        return ag.nn.Sequential(ag.nn.Linear(3, 4, generator=ag.Generator(0), dtype=np.float64), ag.nn.Tanh())

    alone = network()
    loss = (alone(rows[0]).square().mean() + alone(rows[1]).square().mean()) / 2
    grads = await ag.grad(loss, list(alone.parameters()), create_graph=True)
    await (loss + 0.1 * sum((grad * grad).sum() for grad in grads)).backward()

    async def member(group: dist.Group) -> None:
        ddp = dist.DistributedDataParallel(network(), group)
        found = await ddp(rows[group.rank])
        await run(code, ag=ag, group=group, parameters=list(ddp.parameters()), loss=found.square().mean())
        for ours, one in zip(ddp.parameters(), alone.parameters(), strict=True):
            np.testing.assert_allclose(ours.grad.numpy(), one.grad.numpy(), rtol=1e-12)

    async with groups("w0", "w1") as (_, joined):
        await asyncio.gather(*map(member, joined))


async def test_a_penalised_critic() -> None:
    critic = (await run(block("# penalised.py")))["Critic"]()
    real, made = (ag.tensor(np.random.default_rng(seed).normal(size=(5, 8)).astype(np.float32)) for seed in (0, 1))
    weight = critic.layers[0].weight
    found = (await ag.grad(await critic.loss(real, made), [weight]))[0].numpy()
    before = weight.detach().numpy().copy()
    values = []
    for step in (1e-2, -1e-2):
        weight.data[0, 0] = before[0, 0] + step
        values.append((await critic.loss(real, made)).item())
    assert (values[0] - values[1]) / 2e-2 == pytest.approx(found[0, 0], rel=2e-2)


async def test_a_training_goes_on_where_its_file_says(tmp_path: Path) -> None:
    code = block("state = ag.TrainingState(model=model, optimizer=optimizer, loader=loader)")
    read: list[Any] = []

    async def step(batch: Any) -> None:
        if len(read) == 2 and batch.tolist() == [4, 5]:
            raise KeyboardInterrupt  # the process ends
        read.append(batch.tolist())

    def given() -> dict[str, Any]:
        model = ag.nn.Linear(1, 1)
        loader = ag.data.DataLoader(range(6), batch_size=2)
        return {"ag": ag, "model": model, "optimizer": ag.optim.SGD(model.parameters(), lr=0.1), "loader": loader, "path": tmp_path / "state"}

    with contextlib.suppress(KeyboardInterrupt):
        await run(code, epochs=2, step=step, **given())
    read.append("ended")
    await run(code, epochs=2, step=step, **given())
    assert read == [[0, 1], [2, 3], "ended", [4, 5], [0, 1], [2, 3], [4, 5]]
