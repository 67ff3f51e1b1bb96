"""The table of faults names tests that exist and run."""

from __future__ import annotations

import ast
import functools
from pathlib import Path

import pytest

from tests.chaos.__main__ import PARTS
from tests.distributed.fault_model import FAULTS, table

TESTS = Path(__file__).parents[1]


@functools.cache
def functions(file: str) -> dict[str, ast.FunctionDef | ast.AsyncFunctionDef]:
    """The functions of a module of tests, by name."""
    body = ast.parse((TESTS / file).read_text()).body
    return {each.name: each for each in body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)}


def is_skipped(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """True if a test is never run as it stands; one that depends on the system is."""
    return any("skip(" in (text := ast.unparse(decorator)) or "xfail" in text for decorator in function.decorator_list)


def test_the_rows_are_numbered() -> None:
    assert list(FAULTS) == list(range(1, 36))


@pytest.mark.parametrize("number", FAULTS)
def test_every_row_is_tested(number: int) -> None:
    fault, promise, tests, chaos = FAULTS[number]
    assert fault and promise and tests and "\n" not in fault + promise
    assert len(set(tests)) == len(tests)
    for test in tests:
        file, _, name = test.partition("::")
        assert name.startswith("test_") and (TESTS / file).name.startswith("test_"), test
        assert (TESTS / file).is_file(), f"there is no {file}"
        assert name in functions(file), f"there is no {test}"
        assert not is_skipped(functions(file)[name]), f"{test} is not run"
    assert set(chaos) <= set(PARTS), chaos


def test_no_two_rows_say_the_same() -> None:
    for part in zip(*((row.fault, row.promise) for row in FAULTS.values()), strict=True):
        assert len(set(part)) == len(FAULTS)


def test_the_table_has_two_cells_per_row() -> None:
    assert {line.count("|") for line in table().splitlines()} == {3}
