"""Every public class and every public function that is awaited shows an example, and examples print what they say.

Examples use ``ag``, ``np`` and ``asyncio`` without importing them, and ``await`` at top level, as in a notebook. Examples of `distributed` and
`pipeline` also find the names that `ready` makes, on workers of a network in memory or of a `LocalCluster`; docs/reference/index.md lists them.
"""

from __future__ import annotations

import ast
import asyncio
import builtins
import contextlib
import doctest
import importlib
import inspect
import pkgutil
import re
import tempfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import aiohttp.web
import numpy as np
import pytest

import aiograd as ag
from aiograd import distributed as dist
from tests.distributed.workers import workers
from tests.public_names import public_callables
from tests.sweeps import swept

#: what an example may print in place of its text: numbers to this tolerance, since other CPUs and kernels add in other orders
TOLERANCE = {"rtol": 1e-4, "atol": 1e-6}
NUMBER = re.compile(r"(?<![\w.])-?\d+\.\d*(?:e[+-]?\d+)?")
#: names that show no example yet: packages and classes with all of their names; the table only gets shorter
WITHOUT = {"aiograd.distributed.JoinCluster", "aiograd.distributed.RayCluster"}
#: packages with examples that need a device or a library: ``tests/cuda/test_examples.py`` and ``tests/interop/test_examples.py`` run them
ELSEWHERE = ("aiograd.cuda.", "aiograd.interop.torch.", "aiograd.interop.jax.")


class Checker(doctest.OutputChecker):
    """Compares text exactly and floating numbers to a tolerance."""

    def check_output(self, want: str, got: str, optionflags: int) -> bool:
        if super().check_output(want, got, optionflags):
            return True
        texts = [re.sub(r"\s+", "", NUMBER.sub("#", text)) for text in (want, got)]
        numbers = [[float(number) for number in NUMBER.findall(text)] for text in (want, got)]
        return texts[0] == texts[1] and np.allclose(*numbers, **TOLERANCE)


def modules(package: types.ModuleType) -> Iterator[types.ModuleType]:
    """The modules of a package that have examples, but for those of `ELSEWHERE` below it."""
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
        origin = found.module_finder.find_spec(found.name).origin  # type: ignore[union-attr, call-arg]
        here = not found.name.startswith(ELSEWHERE) or package is not ag
        if here and origin is not None and ">>> " in Path(origin).read_text():
            yield importlib.import_module(found.name)


def examples(package: types.ModuleType) -> list[doctest.DocTest]:
    """The docstrings of those modules that have examples."""
    return [example for module in modules(package) for example in doctest.DocTestFinder(exclude_empty=True).find(module) if example.examples]


_ALL = examples(ag)
#: those of a cluster start a process each
_OF_CLUSTERS = [pytest.param(example, id=example.name, marks=[pytest.mark.proc]) for example in _ALL if ".cluster." in example.name]
EXAMPLES = [pytest.param(example, id=example.name) for example in _ALL if ".cluster." not in example.name] + swept(_OF_CLUSTERS, keep=3)


class Linear(ag.nn.Linear):
    """A linear layer with ones as weights, and its loss."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__(inputs, outputs, bias=False)
        with ag.no_grad():
            self.weight.fill_(1)

    async def loss(self, x: ag.Tensor, y: ag.Tensor) -> ag.Tensor:
        return ((await self(x) - y) ** 2).mean()  # type: ignore[no-any-return]


class Learner(Linear):
    """The same with data: eight rows of ones and the target 1."""

    def __init__(self) -> None:
        super().__init__(2, 1)

    def data(self) -> ag.data.DataLoader:
        return ag.data.DataLoader([(np.ones(2, np.float32), np.ones(1, np.float32))] * 16, batch_size=2)


async def ready(stack: contextlib.AsyncExitStack, example: doctest.DocTest) -> dict[str, Any]:
    """The names that an example of `distributed`, `pipeline` or `serving` finds, as far as its text has them."""
    if ".cluster." in example.name:
        return {"dist": dist, "cluster": await stack.enter_async_context(dist.LocalCluster(1, service="tests.distributed.cluster_service:service"))}
    if ".serving." in example.name:
        names = {"dist": dist, "aiohttp": aiohttp, "folder": stack.enter_context(tempfile.TemporaryDirectory())}
        more = {".Follower.": followed, ".Trainer.": trained}
        return names | {name: value for part, make in more.items() if part in example.name for name, value in (await make(stack)).items()}
    service = dist.Service()
    service.reference(Linear)
    service.reference(Learner)
    service.function("cubed")(lambda x: x**3)
    experts = {"ffn.0": dist.moe.ExpertBackend(Linear(2, 2)), "ffn.1": dist.moe.ExpertBackend(Linear(2, 2))}
    dist.moe.serve_experts(service, experts)
    driver, left, right = await stack.enter_async_context(workers("driver", "left", "right", service=service, idle=False))
    names: dict[str, Any] = {"dist": dist, "driver": driver, "left": left, "right": right}
    used = set(re.findall(r"\w+", "".join(each.source for each in example.examples)))
    if used & {"model", "optimizer"}:
        names["model"] = model = await driver.remote_module("left", "Linear", 2, 1)
        names["optimizer"] = dist.DistributedOptimizer(driver, ag.optim.SGD, [model], lr=0.1)
    if "replicas" in used:
        options = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1}}
        names["replicas"] = await dist.DataParallel.create(driver, ["left", "right"], "Linear", 2, 1, **options)
    if ".local_steps." in example.name:
        options = {"optimizer": ag.optim.SGD, "optimizer_options": {"lr": 0.1}}
        names["training"] = await dist.LocalSteps.create(driver, ["left", "right"], "Learner", steps=2, **options)
        if ".round_record." in example.name:
            names["record"] = await names["training"].round()
    if "pipe" in used:
        stages = [[await driver.remote_module(name, "Linear", 2, 2)] for name in ("left", "right")]
        names["pipe"] = ag.pipeline.Pipeline(stages, ag.pipeline.make_schedule("GPipe", ranks=1, microbatches=2))
        stack.push_async_callback(names["pipe"].aclose)
    if "groups" in used:
        names["groups"] = await asyncio.gather(*(dist.join_group(worker, ["left", "right"]) for worker in (left, right)))
    return names


async def followed(stack: contextlib.AsyncExitStack) -> dict[str, Any]:
    """A server and a follower of it."""
    service, server = dist.Service(), ag.serving.Server(Linear(2, 1))
    ag.serving.lead(service, server)
    _, left = await stack.enter_async_context(workers("leader", "left", services={"leader": service}, idle=False))
    await stack.enter_async_context(server)
    return {"server": server, "follower": await stack.enter_async_context(ag.serving.Follower(left, "leader", Linear(2, 1)))}


async def trained(stack: contextlib.AsyncExitStack) -> dict[str, Any]:
    """A trainer and rows."""
    model, buffer = Linear(2, 1), ag.serving.ReplayBuffer(100)
    server = await stack.enter_async_context(ag.serving.Server(model))
    trainer = ag.serving.Trainer(server, ag.optim.SGD(model.parameters(), 0.1), lambda model, x, y: ((model(x) - y) ** 2).mean(), buffer=buffer)
    return {"trainer": trainer, "x": np.ones((8, 2), np.float32)}


def run(example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch) -> doctest.TestResults:
    """Run the examples of a docstring, in one event loop those that wait."""
    with asyncio.Runner() as runner:
        stack = contextlib.AsyncExitStack()

        def execute(code: types.CodeType, names: dict[str, Any]) -> None:
            if code.co_flags & inspect.CO_COROUTINE:
                runner.run(eval(code, names))  # noqa: S307 - the documentation's own code
            else:
                builtins.exec(code, names)  # noqa: S102 - as above

        monkeypatch.setattr(doctest, "exec", execute, raising=False)
        example.globs.update(ag=ag, np=np, asyncio=asyncio, dist=dist)
        if example.name.startswith(("aiograd.distributed.", "aiograd.pipeline.run.pipeline", "aiograd.serving.")):
            example.globs.update(runner.run(ready(stack, example)))
        flags = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
        results = doctest.DocTestRunner(Checker(), optionflags=flags).run(example, compileflags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
        runner.run(stack.aclose())
        runner.run(ag.aclose_default_engine())
        return results


@pytest.mark.parametrize("example", EXAMPLES)
def test_an_example_prints_what_it_says(example: doctest.DocTest, monkeypatch: pytest.MonkeyPatch) -> None:
    results = run(example, monkeypatch)
    assert results.failed == 0 and results.attempted > 0


@pytest.mark.parametrize(
    ("text", "failed"),
    [
        (">>> await asyncio.sleep(0, result=2)\n2", 0),
        (">>> await asyncio.sleep(0, result=2)\n3", 1),
        (">>> ag.tensor(1.25)\ntensor(1.25001)", 0),
        (">>> ag.tensor(1.25)\ntensor(1.26)", 1),
        (">>> 3\n4", 1),
    ],
)
def test_an_example_that_prints_something_else_fails(text: str, failed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    example = doctest.DocTestParser().get_doctest(text, {}, "example", None, None)
    assert run(example, monkeypatch) == (failed, 1)


def lacks_example(value: Any) -> bool:
    is_asked = inspect.iscoroutinefunction(value) or (inspect.isclass(value) and not issubclass(value, BaseException))
    return is_asked and ">>> " not in (inspect.getdoc(value) or "")


def test_every_class_and_awaited_function_shows_an_example() -> None:
    lacking = {name: value.__module__.split(".")[1] for name, value in public_callables() if lacks_example(value)}
    found = [name for name, package in lacking.items() if not {name, name.rpartition(".")[0], package} & WITHOUT]
    assert not found, "these have no example (`>>> `) in their docstrings:\n" + "\n".join(found)
    assert {*lacking, *lacking.values()} >= WITHOUT, "some show examples now, take them out of WITHOUT"
