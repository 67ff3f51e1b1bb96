"""The layout of the package is what it says it is, and the checker that says so is no rubber stamp."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.layering import complaints, package_sources
from tests.rooms import rooms

ROOT = Path(__file__).parent.parent / "aiograd"


def test_the_package_keeps_its_layout() -> None:
    sources = package_sources(ROOT)
    assert len(sources) > 20, "the package was found"
    complained = complaints(sources)
    assert not complained, "\n" + "\n".join(complained)


def test_the_documentation_shows_every_room() -> None:
    shown = {line.split()[0].split(".")[0] for line in rooms().split("\n") if line[:1].isalpha() or line.startswith("_")}
    assert shown == {path.stem for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists()}
    page = ROOT.parent / "docs" / "explanation" / "how-it-works.md"
    assert "```{rooms}\n" in page.read_text(encoding="utf-8")


def test_the_top_of_the_package_can_be_taken_in() -> None:
    parts = (path for path in ROOT.iterdir() if path.suffix == ".py" or (path / "__init__.py").exists())
    names = [path.name for path in parts if not path.name.startswith("__")]
    assert len(names) <= 33, sorted(names)


LONGEST = 450


def test_no_file_is_too_long_to_be_read_at_once() -> None:
    lengths = {path: text.count("\n") for path, text in package_sources(ROOT).items() if path.endswith(".py")}  # a program writes the stubs
    assert not [path for path, length in lengths.items() if length > LONGEST], "divide the file"


# each made-up package breaks one rule in one place: what is said of it starts with `expected`, and nothing else is said
VIOLATIONS = {
    "upwards": ({"ops/a.py": "from aiograd.engine import run", "engine/run.py": ""}, "ops/a.py:1: level 1 imports aiograd.engine.run of level"),
    "upwards by import": ({"ops/a.py": "import aiograd.engine.run", "engine/run.py": ""}, "ops/a.py:1: level 1 imports aiograd.engine.run"),
    "upwards for types only": (
        {"engine/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from aiograd.tensors import Tensor", "tensors/__init__.py": ""},
        "engine/a.py:3: level 3 imports aiograd.tensors of level 4",
    ),
    "upwards, relative": ({"ops/a.py": "from ..engine.run import E", "engine/run.py": ""}, "ops/a.py:1: level 1 imports aiograd.engine.run"),
    "relative in a package": ({"ops/__init__.py": "from ..nn import M", "nn.py": ""}, "ops/__init__.py:1: level 1 imports aiograd.nn of level 5"),
    "the whole package": ({"__init__.py": "", "nn/a.py": "import aiograd as ag"}, "nn/a.py:1: level 5 imports aiograd.__init__ of level 7"),
    "a name of the package": ({"__init__.py": "", "nn/a.py": "from aiograd import Tensor"}, "nn/a.py:1: level 5 imports aiograd.__init__ of level 7"),
    "siblings": ({"optim.py": "from aiograd.nn.module import Module", "nn/module.py": ""}, "optim.py:1: optim imports its sibling aiograd.nn.module"),
    "no level": ({"helpers.py": ""}, "helpers.py:1: helpers has no level"),
    "circle": ({"graph/a.py": "from aiograd.graph import b", "graph/b.py": "import aiograd.graph.a"}, "import circle: graph.a -> "),
    "circle of types": (
        {
            "graph/a.py": "import typing\nif typing.TYPE_CHECKING:\n    from .b import B",
            "graph/b.py": "from .c import C",
            "graph/c.py": "from .a import A",
        },
        "import circle: graph.a -> graph.b (types), graph.b -> graph.c, graph.c -> graph.a",
    ),
    "circles side by side": (
        {"graph/a.py": "from . import b, c", "graph/b.py": "from . import a", "graph/c.py": "from . import a", "graph/d.py": "from . import a"},
        "import circle: graph.a -> graph.b, graph.b -> graph.a; 3 modules reach each other here",
    ),
    "circle by a stub": (
        {"graph/a.py": "", "graph/a.pyi": "from aiograd.graph.b import B", "graph/b.py": "from aiograd.graph.a import A"},
        "import circle: graph.a -> graph.b, graph.b -> graph.a",
    ),
    "in a function": ({"graph/a.py": "def f():\n    import json"}, "graph/a.py:2: imports json inside a function"),
    "in a method": ({"graph/a.py": "class A:\n  async def f(s):\n    if s:\n      import json"}, "graph/a.py:4: imports json inside a function"),
    "star": ({"nn/a.py": "from math import *"}, "nn/a.py:1: star import from math"),
    "pickle": ({"nn/a.py": "import pickle"}, "nn/a.py:1: imports pickle"),
    "pickle's name": ({"nn/a.py": "from pickle import loads as read"}, "nn/a.py:1: imports pickle"),
    "marshal": ({"engine/a.py": "import marshal"}, "engine/a.py:1: imports marshal"),
    "asyncio": ({"tensors/a.py": "import asyncio"}, "tensors/a.py:1: imports asyncio, which belongs in engine.run,"),
    "asyncio's name": ({"graph/a.py": "from asyncio import Future"}, "graph/a.py:1: imports asyncio"),
    "aiohttp": (
        {"distributed/worker.py": "from aiohttp import web"}, "distributed/worker.py:1: imports aiohttp, which belongs in distributed.rpc.http"),
    "numba": ({"nn/a.py": "def f():\n    import numba"}, "nn/a.py:2: imports numba, which belongs in kernels, cuda"),
    "ray": ({"distributed/worker.py": "def f():\n    import ray"}, "distributed/worker.py:2: imports ray, which belongs in distributed.cluster.ray_"),
    "pytest": ({"testing/leaks.py": "import pytest"}, "testing/leaks.py:1: imports pytest, which belongs in testing.plugin"),
    "torch": ({"kernels/a.py": "import torch"}, "kernels/a.py:1: imports torch, which belongs in interop.torch"),
    "clock in a core": ({"engine/graph_task.py": "from time import monotonic"}, "engine/graph_task.py:1: imports time, but this module decides"),
    "eval": ({"nn/a.py": "x = eval('1')"}, "nn/a.py:1: calls eval"),
    "exec": ({"ops/a.py": "def f():\n    exec('1')"}, "ops/a.py:2: calls exec"),
    "np.load": ({"saving/a.py": "import numpy as np\nx = np.load('f')"}, "saving/a.py:2: calls np.load"),
    "import_module": ({"nn/a.py": "import importlib\nimportlib.import_module('x')"}, "nn/a.py:2: calls importlib.import_module"),
    "assert": ({"nn/a.py": "def f(x):\n    assert x"}, "nn/a.py:2: assert"),
}


@pytest.mark.parametrize(("sources", "expected"), VIOLATIONS.values(), ids=VIOLATIONS.keys())
def test_a_violation_is_caught(sources: dict[str, str], expected: str) -> None:
    found = complaints(sources)
    assert len(found) == 1 and found[0].startswith(expected), found


def test_what_is_allowed_is_not_complained_about() -> None:
    assert not complaints({
        "__init__.py": "from aiograd.nn.module import Module\nfrom aiograd.tensors import *",
        "__main__.py": "import sys\nfrom aiograd.running.cli import main",
        "running/cli/__init__.py": "import asyncio",
        "distributed/cluster/loading.py": "import importlib\nimportlib.import_module('service')",
        "engine/run.py": "import asyncio\nimport time\nfrom aiograd.engine.graph_task import GraphTask",
        "engine/graph_task.py": "import weakref\nfrom aiograd.graph.node import Node",
        "graph/node.py": "from typing import TYPE_CHECKING\nimport re\nif TYPE_CHECKING:\n    from aiograd.errors import E\nP = re.compile('x')",
        "graph/edge.py": "from aiograd.graph.node import Node",
        "kernels/softmax.py": "def compiled():\n    import numba\n    return numba",
        "ops/nn.py": "from aiograd.kernels import softmax\nfrom . import nn_linear",
        "ops/nn_linear.py": "from typing import assert_never\ndef f(x):\n    assert_never(x)",
        "nn/module.py": "from .linear import Linear\nfrom aiograd.tensors import Tensor",
        "nn/linear.py": "",
        "tensors/__init__.py": "from aiograd.tensors.codegen import build",
        "tensors/codegen.py": "exec(compile('1', 'row', 'exec'))",
        "testing/virtual_clock.py": "import asyncio",
    })
