"""The installed package: metadata, wheel contents, and an import that stays light."""

from __future__ import annotations

import ast
import email
import importlib.metadata
import pydoc
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

import aiograd
from aiograd.dashboard.pages import SCRIPTS
from tests.support import assert_raises
from tests.sweeps import swept

ROOT = Path(__file__).parent.parent
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def _python(*arguments: str) -> str:
    return subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def test_the_installed_version_is_that_of_the_package() -> None:
    assert importlib.metadata.version("aiograd") == aiograd.__version__


def test_the_citation_names_the_version_of_the_package() -> None:
    assert f"\nversion: {aiograd.__version__}\n" in (ROOT / "CITATION.cff").read_text()


@pytest.mark.proc
def test_the_wheel_holds_the_package_and_nothing_else(tmp_path: Path) -> None:
    _python("-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path))
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        info = f"aiograd-{aiograd.__version__}.dist-info"
        metadata = email.message_from_bytes(archive.read(f"{info}/METADATA"))
        entry_points = archive.read(f"{info}/entry_points.txt").decode()
    files = [*(ROOT / "aiograd").rglob("*.py"), *(ROOT / "aiograd").rglob("*.pyi")]
    sources = {path.relative_to(ROOT).as_posix() for path in files if path.name != "pytest_aiograd.py"}
    page = {f"aiograd/viz/static/step.{kind}" for kind in ("css", "js")}
    page |= {f"aiograd/dashboard/static/{name}" for name in ("index.html", "style.css", "icon.svg", *(f"{script}.js" for script in SCRIPTS))}
    about = {f"{info}/{name}" for name in ("METADATA", "RECORD", "WHEEL", "entry_points.txt", "licenses/LICENSE", "sboms/sbom.cdx.json")}
    assert names == sources | page | {"aiograd/py.typed", "pytest_aiograd.py"} | about
    assert metadata["Version"] == aiograd.__version__
    assert metadata["Requires-Python"] == ">=3.11"
    assert metadata["License-Expression"] == "MIT"
    assert "aiograd = aiograd.running.cli:main" in entry_points
    assert "pytest_aiograd = pytest_aiograd" in entry_points


def test_the_runtime_dependencies_and_extras_are_the_agreed_ones() -> None:
    def names(requirements: list[str]) -> set[str]:
        return {requirement.split(";")[0].split("[")[0].split("=")[0].split(">")[0].split("<")[0].strip() for requirement in requirements}

    assert names(PROJECT["dependencies"]) == {"numpy", "uvloop", "aiohttp", "cryptography", "safetensors"}
    extras = PROJECT["optional-dependencies"]
    assert extras.keys() >= {"kernels", "cuda", "ray", "otel", "metrics", "parity", "dev"}
    for extra, requirements in extras.items():
        for requirement in requirements:
            if requirement.startswith("torch"):
                assert requirement == "torch==2.13.0", f"{extra}: an open torch requirement pulls gigabytes of CUDA packages"


def test_the_console_script_exists() -> None:
    (script,) = importlib.metadata.entry_points(group="console_scripts", name="aiograd")
    assert callable(script.load())


def test_readme_and_licence_are_there() -> None:
    assert (ROOT / PROJECT["readme"]).read_text().startswith("# aiograd")
    assert "MIT License" in (ROOT / "LICENSE").read_text()


@pytest.mark.proc
@pytest.mark.parametrize("flags", [(), ("-O",)])
def test_importing_is_light_and_silent(flags: tuple[str, ...]) -> None:
    heavy = {"numba", "llvmlite", "scipy", "sklearn", "torch", "autograd", "ray", "pytest", "hypothesis", "tqdm", "aiohttp", "cryptography"}
    heavy |= {"uvloop", "safetensors", "dataclasses", "difflib", "html", "json", "csv"}
    parts = {f"aiograd.{name}" for name in LATE} | {"aiograd.running.cli", "aiograd.functional.batching", "numpy.random"}
    loaded = set(_python("-W", "error", *flags, "-c", "import sys, aiograd; print(*sys.modules)").split())
    assert "aiograd.tensors" in loaded
    assert not loaded & parts
    assert not {name.partition(".")[0] for name in loaded} & heavy


@pytest.mark.proc
def test_a_worker_starts_without_what_only_other_commands_need() -> None:
    script = """
import sys
from aiograd.running.cli import main
try:
    main(["worker", "--help"])
except SystemExit:
    print("loaded", *sys.modules)
"""
    loaded = set(_python("-c", script).partition("loaded ")[2].split())
    assert "aiograd.distributed" in loaded
    others = {"cli.demo", "nn", "profiler", "cuda", "cli.doctor", "compiler", "data"}
    assert not loaded & {f"aiograd.{name}" for name in others}


LATE = (
    "compiler", "cuda", "dashboard", "data", "distributed", "distributions", "stats", "autograd",
    "functional.checkpointing", "functional.gradient_check", "functional.isolation", "implicit", "interop", "nn", "optim", "parallel", "pipeline",
    "profiler", "running.accelerator", "running.scalars", "saving", "saving.serialization", "saving.training_state", "serving", "sparse",
    "testing", "transaction", "utils", "viz",
)  # fmt: skip


@pytest.mark.proc
@pytest.mark.parametrize("module", swept(LATE, keep=4))
def test_a_part_is_there_when_it_is_asked_for(module: str) -> None:
    name = module.rpartition(".")[2]
    script = f"""
import sys, aiograd as ag
assert {name!r} in dir(ag)
assert ag.{name} is sys.modules["aiograd.{module}"] is ag.__dict__[{name!r}]
"""
    _python("-W", "error", "-c", script)


def test_type_checkers_see_the_names_that_are_imported_on_first_access() -> None:
    tree = ast.parse(Path(aiograd.__file__).read_text())
    (block,) = [node.body for node in tree.body if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)]
    seen = {(node.module, alias.asname) for node in block if isinstance(node, ast.ImportFrom) for alias in node.names}
    homes = {(f"aiograd.{home}", name) for name, home in aiograd._HOMES.items()}
    parts = {(f"aiograd.{module}".rpartition(".")[0], module.rpartition(".")[2]) for module in aiograd._PARTS}
    assert seen == parts | homes
    assert set(LATE) == set(aiograd._PARTS)
    assert {name for _, name in seen} <= {*aiograd.__all__, *(name for _, name in parts)} & {*dir(aiograd)}


@pytest.mark.proc
def test_a_compiled_function_draws_itself_however_the_compiler_is_imported() -> None:
    for statement in ("from aiograd import compile", "from aiograd.compiler.compiled import compile"):
        script = f"{statement}; import aiograd as ag; f = compile(lambda x: x * x); f(ag.ones(2)); print(f.programs[0].dot())"
        assert _python("-W", "error", "-c", script).startswith("digraph")


@pytest.mark.proc
def test_threads_that_ask_for_a_part_at_the_same_time_all_get_all_of_it() -> None:
    script = """
import threading, aiograd as ag
together, found = threading.Barrier(8), []
def ask(number):
    together.wait()
    part = ag.distributed if number % 2 else ag.pipeline
    found.append(part.Worker if number % 2 else part.Pipeline)
threads = [threading.Thread(target=ask, args=(number,)) for number in range(8)]
for thread in threads: thread.start()
for thread in threads: thread.join()
assert len(found) == 8, found
from aiograd.distributed.objects.object_server import ADAPTERS
from aiograd.distributed.objects.optimizer_server import OPTIMIZERS
assert ADAPTERS.keys() == {"pipeline.member", "data_parallel.replica", "local_steps.member"}
assert OPTIMIZERS.keys() == {"SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam"}
"""
    _python("-W", "error", "-c", script)


@pytest.mark.proc
@pytest.mark.parametrize(
    "statement", ["import aiograd.distributed as dist", "from aiograd.distributed import Worker", "import aiograd as ag; ag.distributed"]
)
def test_workers_can_make_everything_however_they_are_imported(statement: str) -> None:
    made = "from aiograd.distributed.objects import object_server, optimizer_server; print(*object_server.ADAPTERS, *optimizer_server.OPTIMIZERS)"
    assert _python("-c", f"{statement}; {made}").split() == [
        "pipeline.member", "data_parallel.replica", "local_steps.member", "SGD", "Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam",
        "RAdam",
    ]  # fmt: skip


@pytest.mark.proc
def test_a_star_import_brings_names_and_no_modules() -> None:
    script = """
import random, types, sys
from aiograd import *
import aiograd
assert random.random and types.ModuleType, "the standard library's"
found = {name: value for name, value in vars(aiograd).items() if name in aiograd.__all__}
assert not [name for name, value in found.items() if isinstance(value, types.ModuleType) or name.startswith("_")]
assert tensor([1.0]).sum().item() == 1.0 and zeros(2, 3).shape == (2, 3)
"""
    _python("-W", "error", "-c", script)


def test_every_public_name_is_listed_and_no_other_is_there() -> None:
    assert all(hasattr(aiograd, name) for name in aiograd.__all__)
    assert {"tensor", "matmul", "run", "Engine", "seed", "compile", "vmap"} <= set(aiograd.__all__) <= set(dir(aiograd))
    assert {name.rpartition(".")[2] for name in LATE} <= set(dir(aiograd))
    assert not any(name.startswith("_") or isinstance(getattr(aiograd, name), type(annotations)) for name in aiograd.__all__)
    assert_raises(AttributeError, "module 'aiograd' has no attribute 'tensr'", lambda: aiograd.tensr)
    listed = pydoc.plain(pydoc.render_doc(aiograd))
    functions = listed[listed.index("\nFUNCTIONS") :]
    for name in ("matmul", "tensor", "run", "set_default_dtype", "async jacobian"):
        assert f"\n    {name}(" in functions
