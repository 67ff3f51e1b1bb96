"""`make test` leaves out no promise: each test has a case that is no sweep. See tests/sweeps.py."""

from __future__ import annotations

import pytest

from tests.loops import LOOPS
from tests.sweeps import WHOLLY_SWEPT, swept

#: the tests that only `make test-all` runs, and why
EXCEPTIONS: dict[str, str] = {
    "tests/engine/test_state_machine.py::TestEngineAtLength::runTest": "TestEngine runs a fifth of these programs",
    "tests/distributed/test_release_checks.py::test_a_run_that_is_killed_and_one_that_ends_early_have_the_report_of_a_whole_one": (
        "five processes of `make chaos`; the other tests of the file cut the ledger at each byte"
    ),
    "tests/pipeline/test_replicas_processes.py::test_four_replicas_of_four_stages_absorb_losses": (
        "sixteen processes; tests/pipeline/test_absorbing.py has the same losses on the simulated network"
    ),
    "tests/distributed/data_parallel/test_absorbing.py::test_five_hundred_steps_under_kills": "the lives beside it are shorter",
    "tests/scale/test_scale.py::test_parameters_have_the_bits_of_the_undisturbed_run": "`make scale ARGS=--small` looks at the same bits",
}


def test_every_test_has_a_case_that_is_no_sweep(pytestconfig: pytest.Config) -> None:
    assert pytestconfig.stash[WHOLLY_SWEPT] <= EXCEPTIONS.keys(), "each of these needs a case that `make test` runs, or a reason in EXCEPTIONS"


def test_kept_cases_are_spread_and_in_place() -> None:
    cases = swept([1, (2, "b"), pytest.param(3, id="three"), 4, 5], keep=2)
    found = [case if isinstance(case, int) else (case.values, case.id) for case in cases]
    assert found == [1, ((2, "b"), None), ((3,), "three"), ((4,), None), ((5,), None)]


SUITE = """
    import pytest
    from tests.sweeps import swept

    @pytest.mark.parametrize(("a", "b"), [(1, 1), (1, 2), (2, 2)])
    @pytest.mark.parametrize("c", "xy")
    def test_crossed(a, b, c): ...

    @pytest.mark.parametrize("seed", range(3))
    @pytest.mark.parametrize("c", "xy")
    def test_drawn(seed, c): ...

    @pytest.mark.parametrize("row", swept("pqrst", keep=2))
    def test_rows(row): ...

    @pytest.mark.parametrize("case", [7, 8])
    async def test_on_loops(case): ...

    @pytest.mark.parametrize("row", swept("pq", keep=0))
    def test_left_out(row): ...
"""


@pytest.mark.skipif("uvloop" not in LOOPS, reason="there is one loop only")
def test_what_is_no_sweep(pytester: pytest.Pytester) -> None:
    """Each case of a parametrization has its turn, of seeds the first; both loops have theirs where the test is about the loop."""
    pytester.makeini("[pytest]\nasyncio_mode = auto\nasyncio_default_fixture_loop_scope = function\nmarkers = sweep")
    pytester.makeconftest("""
        import pytest
        from tests import sweeps
        from tests.conftest import pytest_asyncio_loop_factories

        @pytest.hookimpl(wrapper=True, tryfirst=True)
        def pytest_generate_tests(metafunc):
            result = yield
            sweeps.mark_cases(metafunc)
            return result

        @pytest.hookimpl(tryfirst=True)
        def pytest_collection_modifyitems(config, items):
            sweeps.mark(config, items)
            assert [name.partition("::")[2] for name in config.stash[sweeps.WHOLLY_SWEPT]] == ["test_left_out"]
    """)
    others = ["crossed[x-1-1]", "crossed[x-1-2]", "crossed[x-2-2]", "crossed[y-1-1]", "drawn[x-0]", "drawn[y-0]", "rows[p]", "rows[r]"]
    plain = pytester.makepyfile(test_some=SUITE)
    about_loops = pytester.mkdir("tests") / "testing"
    about_loops.mkdir()
    (about_loops / "test_loops.py").write_text(plain.read_text())
    for path, loops in ((plain, ["uvloop-7", "uvloop-8"]), (about_loops, ["asyncio-7", "uvloop-7", "asyncio-8"])):
        result = pytester.runpytest_inprocess("--collect-only", "-q", "-m", "not sweep", path)
        found = [line.partition("::test_")[2] for line in result.outlines if "::" in line]
        assert sorted(found) == sorted([*others, *(f"on_loops[{loop}]" for loop in loops)])
