"""The plugin in other people's test suites, each run by a pytest of its own."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweeps import swept

PLUGIN = ("-p", "pytest_aiograd")

ASYNC_TESTS = """
    import asyncio
    import pytest
    from aiograd.testing import SimulatedLoop

    async def test_plain():
        assert not isinstance(asyncio.get_running_loop(), SimulatedLoop)

    async def test_jumps(virtual_clock):
        await asyncio.sleep(3600)
        assert virtual_clock.time() == 3600
        virtual_clock.advance(5)
        assert virtual_clock.loop.time() == 3605

    @pytest.mark.virtual_clock(seed=3, order="permuted")
    async def test_marked(virtual_clock):
        assert (virtual_clock.loop.seed, virtual_clock.loop.order) == (3, "permuted")
"""


def _ini(pytester: pytest.Pytester, mode: str = "auto") -> None:
    lines = (f"asyncio_mode = {mode}", "asyncio_default_fixture_loop_scope = function", "filterwarnings = error", "addopts = --strict-markers")
    pytester.makeini("\n".join(("[pytest]", *lines)))


def test_async_tests_get_the_virtual_clock(pytester: pytest.Pytester) -> None:
    _ini(pytester)
    pytester.makepyfile(ASYNC_TESTS)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=3)


def test_markers_take_arguments_by_position(pytester: pytest.Pytester) -> None:
    _ini(pytester)
    pytester.makepyfile("""
        import asyncio
        import pytest
        from aiograd.testing import Faults

        @pytest.mark.virtual_clock(3, "permuted")
        @pytest.mark.simulated_network(4, faults=Faults(reset=0.5))
        async def test_on_a_loop(virtual_clock, simulated_network):
            assert (virtual_clock.loop.seed, virtual_clock.loop.order) == (3, "permuted")
            assert simulated_network.seed == 4 and simulated_network.link("a", "b").faults.reset == 0.5

        @pytest.mark.virtual_clock(3)
        def test_plain(virtual_clock):
            async def seed():
                return asyncio.get_running_loop().seed
            assert virtual_clock.run(seed).value == 3
    """)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=2)


@pytest.mark.parametrize(
    ("marker", "fixture"),
    [
        ("virtual_clock(3, 'fifo', 'inline', 5)", "virtual_clock"), ("virtual_clock(3, seed=4)", "virtual_clock"),
        ("virtual_clock(sead=4)", "virtual_clock"), ("simulated_network(3, fault=4)", "simulated_network"),
    ],
)  # fmt: skip
def test_arguments_of_markers_that_are_none(pytester: pytest.Pytester, marker: str, fixture: str) -> None:
    _ini(pytester)
    pytester.makepyfile(f"""
        import pytest

        @pytest.mark.{marker}
        def test_it({fixture}):
            pass
    """)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(errors=1)
    expected = "virtual_clock(seed, order, executor)" if fixture == "virtual_clock" else "simulated_network(seed, faults, access, room)"
    result.stdout.fnmatch_lines([f"*found the marker {marker}; expected {expected}, each once*"])


def test_a_suite_with_loops_of_its_own_keeps_them(pytester: pytest.Pytester) -> None:
    _ini(pytester)
    pytester.makeconftest("""
        import asyncio
        def pytest_asyncio_loop_factories(config, item):
            return {"one": asyncio.new_event_loop, "two": asyncio.new_event_loop}
    """)
    pytester.makepyfile(ASYNC_TESTS)
    result = pytester.runpytest_inprocess(*PLUGIN, "-v")
    result.assert_outcomes(passed=4)  # the plain test twice, the others once on the simulated loop
    result.stdout.fnmatch_lines(["*test_plain?one?*", "*test_plain?two?*", "*test_jumps PASSED*"])


def test_plain_tests_run_coroutines_on_fresh_loops(pytester: pytest.Pytester) -> None:
    _ini(pytester)
    pytester.makepyfile("""
        import asyncio
        import pytest
        from aiograd.errors import LoopError

        @pytest.mark.virtual_clock(seed=3)
        def test_runs(virtual_clock):
            async def main(seconds):
                await asyncio.sleep(seconds)
                return asyncio.get_running_loop().seed
            run = virtual_clock.run(main, 60)
            assert (run.value, run.time) == (3, 60)
            assert virtual_clock.run(main, 1, seed=4).value == 4
            with pytest.raises(LoopError, match="no loop is running"):
                virtual_clock.time()
    """)
    pytester.runpytest_inprocess(*PLUGIN).assert_outcomes(passed=1)


def test_a_suite_without_pytest_asyncio_is_served_too(pytester: pytest.Pytester) -> None:
    pytester.makepyfile("""
        import asyncio
        def test_runs(virtual_clock, task_leak_check):
            assert virtual_clock.run(asyncio.sleep, 5, "value").value == "value"
    """)
    pytester.runpytest_inprocess("-p", "no:asyncio", *PLUGIN).assert_outcomes(passed=1)


def test_a_test_that_another_plugin_runs_is_refused(pytester: pytest.Pytester) -> None:
    """As anyio's plugin does: it calls the test itself, on a loop that it makes."""
    _ini(pytester, "strict")
    pytester.makeconftest("""
        import asyncio, inspect
        import pytest

        def pytest_configure(config):
            config.addinivalue_line("markers", "other: run by this plugin")

        @pytest.hookimpl(tryfirst=True)
        def pytest_pyfunc_call(pyfuncitem):
            if pyfuncitem.get_closest_marker("other") and inspect.iscoroutinefunction(pyfuncitem.obj):
                asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in pyfuncitem._fixtureinfo.argnames}))
                return True
    """)
    pytester.makepyfile("""
        import asyncio
        import pytest

        ran = []

        @pytest.mark.other
        async def test_waits(virtual_clock):
            ran.append(1)
            await asyncio.sleep(1000)

        class TestOfAClass:
            @pytest.mark.other
            async def test_plain(self):
                self.seen = 1

            @pytest.mark.asyncio
            async def test_jumps(self, virtual_clock):
                await asyncio.sleep(1000)

        def test_nothing_was_run():
            assert not ran
    """)
    result = pytester.runpytest_inprocess(*PLUGIN)
    result.assert_outcomes(passed=3, failed=1)
    result.stdout.fnmatch_lines(["*LoopError: virtual_clock: test_waits runs on *EventLoop, whose time is real*pytest-asyncio*"])


LIST_MODULES = """
    import sys
    def pytest_configure(config):  # so that tests may carry the markers without the plugin as well
        config.addinivalue_line("markers", "virtual_clock: of the plugin")
    def pytest_unconfigure(config):
        print("modules", *sys.modules)
"""


def _imported(pytester: pytest.Pytester, *arguments: str) -> set[str]:
    """The modules that a run of pytest has imported when it ends; the plugins are those of the environment, found as pytest finds them."""
    result = pytester.runpytest_subprocess("-p", "no:randomly", *arguments)
    assert result.ret == pytest.ExitCode.OK
    (line,) = (line for line in result.outlines if line.startswith("modules "))
    return set(line.split()[1:])


@pytest.mark.proc
@pytest.mark.parametrize("options", swept(["", "--fixtures", "--markers", "--collect-only", "-k plain --setup-show"]))
def test_a_run_that_does_not_use_the_plugin_imports_that_module_alone(pytester: pytest.Pytester, options: str) -> None:
    _ini(pytester)
    pytester.makeconftest(LIST_MODULES)
    pytester.makepyfile("""
        import asyncio
        import pytest

        def test_plain(tmp_path, monkeypatch):
            pass

        async def test_on_a_loop():
            await asyncio.sleep(0)

        @pytest.mark.virtual_clock(seed=3)
        async def test_with_the_marker_and_no_fixture():
            await asyncio.sleep(0)
    """)
    with_plugin, without = _imported(pytester, *options.split()), _imported(pytester, *options.split(), "-p", "no:pytest_aiograd")
    assert with_plugin - without == {"pytest_aiograd"}
    assert not {name.partition(".")[0] for name in without} & {"aiograd", "numpy"}


@pytest.mark.proc
@pytest.mark.parametrize(
    "fixture, brings, leaves",
    [
        ("virtual_clock", "aiograd.testing.virtual_clock", {"aiograd.distributed", "aiohttp"}),
        ("leak_check", "aiograd.testing.leaks", {"aiograd.distributed", "aiohttp"}),
        ("task_leak_check", "aiograd.testing.leaks", {"aiograd.distributed", "aiohttp"}),
        ("simulated_network", "aiograd.distributed", {"numba"}),
    ],
)
def test_a_fixture_imports_what_it_needs(pytester: pytest.Pytester, fixture: str, brings: str, leaves: set[str]) -> None:
    _ini(pytester)
    pytester.makeconftest(LIST_MODULES)
    pytester.makepyfile(f"async def test_uses_it({fixture}):\n    pass")
    imported = _imported(pytester)
    assert brings in imported and not leaves & imported


LEAKING_TESTS = """
    import asyncio, contextvars, os
    import pytest
    from aiograd.engine.run import current_engine

    pytestmark = pytest.mark.usefixtures("task_leak_check")
    kept = []

    {mark}
    async def test_task():
        kept.append(asyncio.create_task(asyncio.Event().wait(), name="stray"))

    {mark}
    async def test_clean():
        loop = asyncio.get_running_loop()
        await asyncio.to_thread(int)  # its thread ends with the loop
        engine = current_engine()
        await engine.executor.submit(loop, contextvars.copy_context(), int)  # these end when the fixture closes the default engine
        kept.append(engine)

    def test_descriptor():
        kept.append(os.open(os.devnull, os.O_RDONLY))
"""


@pytest.mark.proc
@pytest.mark.parametrize("mode", ["auto", "strict"])
def test_leaks_fail_the_test_that_left_them(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))
    _ini(pytester, mode)
    pytester.makepyfile(LEAKING_TESTS.format(mark="@pytest.mark.asyncio"))
    result = pytester.runpytest_subprocess(*PLUGIN)  # its leaks are to die with it
    result.assert_outcomes(passed=3, errors=2)
    result.stdout.fnmatch_lines_random(["*LeakError: tasks left behind (1):", "*stray (Event.wait) waits at*"])
    result.stdout.fnmatch_lines_random(["*LeakError: file descriptors left behind (1):", "*/dev/null*"])
