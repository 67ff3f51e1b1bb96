"""A setting of the top level holds for the process; one of a task, a thread or a block is its own."""

from __future__ import annotations

import ast
import asyncio
import contextvars
import inspect
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.testing import simulated_run

DEFAULTS = ("float32", True, "another generator")


def found() -> tuple[str, bool, str]:
    """The three settings as the running code sees them."""
    entropy = ag.default_generator().state_dict()["seed"]
    return str(ag.get_default_dtype()), ag.is_grad_enabled(), f"seed {entropy}" if entropy == 77 else "another generator"


def set_all() -> None:
    ag.set_default_dtype(np.float64)
    ag.set_grad_enabled(False)
    ag.seed(77)


SET = ("float64", False, "seed 77")


@pytest.fixture(autouse=True)
def _restored() -> Iterator[None]:
    yield
    ag.set_default_dtype(np.float32)
    ag.set_grad_enabled(True)
    ag.seed(0)


def in_a_pool(function: Callable[[], Any]) -> Any:
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(function).result(timeout=60)


def in_a_thread(function: Callable[[], Any]) -> Any:
    results: list[Any] = []
    thread = threading.Thread(target=lambda: results.append(function()))
    thread.start()
    thread.join(timeout=60)
    return results[0]


def on_a_fresh_loop(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return function()

    return asyncio.run(main())


def on_a_simulated_loop(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        return await asyncio.get_running_loop().run_in_executor(None, function)

    return simulated_run(main).value


def in_a_callback(function: Callable[[], Any]) -> Any:
    async def main() -> Any:
        done = asyncio.get_running_loop().create_future()
        asyncio.get_running_loop().call_soon(lambda: done.set_result(function()))
        return await done

    return asyncio.run(main())


ELSEWHERE = [in_a_pool, in_a_thread, on_a_fresh_loop, on_a_simulated_loop, in_a_callback]


@pytest.mark.parametrize("elsewhere", [*ELSEWHERE, lambda function: contextvars.Context().run(function)])
def test_what_is_set_at_the_top_level_holds_everywhere(elsewhere: Any) -> None:
    assert elsewhere(found) == DEFAULTS
    set_all()
    assert found() == SET
    assert elsewhere(found) == SET


@pytest.mark.parametrize("elsewhere", ELSEWHERE)
def test_what_is_set_in_a_task_a_thread_or_a_callback_stays_there(elsewhere: Any) -> None:
    assert elsewhere(lambda: (set_all(), found())[1]) == SET
    assert found() == DEFAULTS
    assert elsewhere(found) == DEFAULTS


async def test_two_tasks_do_not_disturb_each_other_nor_a_thread() -> None:
    steps = asyncio.Barrier(2)

    async def sets() -> None:
        set_all()
        await steps.wait()
        assert found() == SET
        await asyncio.to_thread(lambda: (ag.set_grad_enabled(True), ag.set_default_dtype(np.float16)))
        assert found() == SET
        await steps.wait()

    async def looks_on() -> None:
        with ag.no_grad():
            await steps.wait()
        assert ag.is_grad_enabled()
        assert found()[:2] == DEFAULTS[:2]
        assert await asyncio.get_running_loop().run_in_executor(None, found) != SET
        await steps.wait()

    await asyncio.gather(sets(), looks_on())


def test_what_a_block_is_given_is_never_seen_outside_of_it() -> None:
    seen: list[bool] = []

    class Watched(ag.set_grad_enabled):
        def __enter__(self) -> Any:
            seen.append(in_a_thread(ag.is_grad_enabled))
            return super().__enter__()

    with Watched(False):
        seen.append(in_a_thread(ag.is_grad_enabled))
        assert not ag.is_grad_enabled()
    kept = ag.set_grad_enabled(False)
    seen.append(in_a_thread(ag.is_grad_enabled))
    with kept:
        pass

    @ag.set_grad_enabled(False)
    def decorated() -> bool:
        return ag.is_grad_enabled()

    assert not decorated()
    assert ag.is_grad_enabled()
    assert seen == [True] * 3


def test_within_a_block_of_the_same_setting_a_switch_lasts_until_its_end() -> None:
    with ag.no_grad():
        ag.set_grad_enabled(True)
        assert ag.is_grad_enabled()
        assert in_a_thread(ag.is_grad_enabled)
        ag.set_default_dtype(np.float64)  # another setting: for the process
        assert in_a_thread(ag.get_default_dtype) == np.float64
    with ag.enable_grad():
        ag.set_grad_enabled(False)
    assert found()[:2] == in_a_thread(found)[:2] == ("float64", True)


def test_a_context_that_has_left_its_blocks_follows_the_process_again() -> None:
    context = contextvars.Context()

    def blocks() -> None:
        with ag.no_grad(), ag.set_grad_enabled(True), ag.detect_anomaly():
            pass

    context.run(blocks)
    set_all()
    assert context.run(found) == SET


# -------------------------------------------------------------------- REPLs and notebooks

CELLS = [
    ["ag.set_default_dtype('float64')", "ag.set_grad_enabled(False)", "ag.seed(77)"],
    [
        "await asyncio.sleep(0); ag.set_default_dtype('float64')",
        "ag.set_grad_enabled(False); await asyncio.sleep(0)",
        "await asyncio.sleep(0, ag.seed(77))",
    ],
    ["def setup():\n    set_all()\n", "setup(); await asyncio.sleep(0)"],
    ["async def wait():\n    await asyncio.sleep(0)\n", "set_all()", "await wait()"],
]


def run_cell(source: str, names: dict[str, Any]) -> Any:
    """A cell as IPython and Jupyter compile it: a coroutine where its statements contain ``await``."""
    code = compile(source, "<cell>", "single", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    return eval(code, names)  # noqa: S307 - the cells of this file


def like_ipython(cells: list[str], names: dict[str, Any]) -> None:
    loop = asyncio.new_event_loop()
    for cell in cells:
        coroutine = run_cell(cell, names)
        if inspect.iscoroutine(coroutine):
            loop.run_until_complete(coroutine)
    loop.close()


def like_jupyter(cells: list[str], names: dict[str, Any]) -> None:
    async def cell_task(cell: str) -> None:
        coroutine = run_cell(cell, names)
        if inspect.iscoroutine(coroutine):
            await coroutine

    async def kernel() -> None:
        for cell in cells:
            await asyncio.create_task(cell_task(cell))

    asyncio.run(kernel())


def like_a_notebook_that_evaluates_the_last_line(cells: list[str], names: dict[str, Any]) -> None:
    for cell in cells:
        tree = ast.parse(cell).body
        last = [tree.pop()] if isinstance(tree[-1], ast.Expr) else []
        exec(compile(ast.Module(tree, []), "<cell>", "exec"), names)  # noqa: S102
        for expression in last:
            eval(compile(ast.Expression(expression.value), "<cell>", "eval"), names)  # noqa: S307


@pytest.mark.parametrize("cells", CELLS, ids=["plain", "with await", "in a function", "as called"])
@pytest.mark.parametrize("run", [like_ipython, like_jupyter])
def test_what_one_cell_sets_holds_in_the_next(run: Any, cells: list[str]) -> None:
    names: dict[str, Any] = {"ag": ag, "asyncio": asyncio, "set_all": set_all, "found": found, "seen": []}
    run([*cells, "seen.append(found())", "await asyncio.sleep(0); seen.append(found())"], names)
    assert names["seen"] == [SET, SET]
    assert in_a_pool(found) == SET


def test_a_last_line_that_is_evaluated_counts_as_a_statement() -> None:
    names: dict[str, Any] = {"ag": ag}
    like_a_notebook_that_evaluates_the_last_line(["x = 1\nag.set_grad_enabled(False)"], names)
    assert not in_a_pool(ag.is_grad_enabled)


def test_what_a_coroutine_function_of_a_cell_sets_is_its_own() -> None:
    names: dict[str, Any] = {"ag": ag, "asyncio": asyncio, "set_all": set_all}
    like_jupyter(["async def main():\n    set_all()\n", "await main()", "await asyncio.create_task(main())"], names)
    assert in_a_pool(found) == DEFAULTS


@pytest.mark.proc
def test_statements_of_the_asyncio_repl() -> None:
    lines = """
        import asyncio, aiograd as ag
        ag.set_default_dtype("float64")
        ag.set_grad_enabled(False)
        await asyncio.sleep(0, ag.seed(77))
        print("found", ag.get_default_dtype(), ag.is_grad_enabled(), ag.default_generator())
        await asyncio.sleep(0); ag.set_grad_enabled(True)
        await asyncio.sleep(0); print("awaited", ag.get_default_dtype(), ag.is_grad_enabled(), ag.default_generator())
        with ag.set_grad_enabled(False): await asyncio.sleep(0)

        from concurrent.futures import ThreadPoolExecutor
        print("pool", ThreadPoolExecutor(1).submit(ag.is_grad_enabled).result(), ThreadPoolExecutor(1).submit(ag.default_generator).result())
        print("loop", await asyncio.get_running_loop().run_in_executor(None, ag.get_default_dtype))
    """
    result = subprocess.run([sys.executable, "-m", "asyncio"], input=textwrap.dedent(lines), capture_output=True, text=True, timeout=110)
    for line in (
        "found float64 False Generator(seed=77)",
        "awaited float64 True Generator(seed=77)",
        "pool True Generator(seed=77)",
        "loop float64",
    ):
        assert line in result.stdout, result.stdout + result.stderr
