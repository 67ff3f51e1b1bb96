"""The table that `make types` makes of a report of pyright; and the programs that it checks, run."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest

from aiograd.running.stability import Stability
from tests.types.__main__ import PROGRAMS
from tests.types.completeness import Annotations, Knowledge, complaints, incomplete, places, table, typed_names

INFERRED = "Type is missing type annotation and could be inferred differently by type checkers\n  Inferred type is"


def symbol(name: str, *errors: str, category: str = "class", known: bool = True, also: tuple[str, ...] = (), line: int = 4) -> dict[str, Any]:
    """A symbol of a report, partly known where it has errors."""
    place = {"file": "library/home.py", "severity": "error", "range": {"start": {"line": line, "character": 0}}}
    return {
        "category": category, "name": name, "alternateNames": [*also], "isTypeKnown": known and not errors, "isTypeAmbiguous": bool(errors),
        "diagnostics": [{"severity": "warning", "message": "No docstring", "file": ""}, *({**place, "message": error} for error in errors)],
    }  # fmt: skip


def report(*symbols: dict[str, Any]) -> dict[str, Any]:
    return {"typeCompleteness": {"symbols": [*symbols]}}


def level_of(name: str) -> Stability:
    return Stability.PROVISIONAL if name.endswith("trial") else Stability.STABLE


REPORT = report(
    symbol("library.home.Good", also=("library.Good",)),
    symbol("library.home.Part", 'Type of base class "library.home.Base" is partially unknown', also=("library.Part",)),
    symbol("library.home.Base", 'Type of parameter "x" is partially unknown\n  Parameter type is "Inner"'),
    symbol("library.home.Base.count", f'{INFERRED} "int"', category="variable", line=11),
    symbol("library.home.Inner", "something lacks"),
    symbol("library.home.Other", "an error of a class that none of the names refers to"),
    symbol("library.lost", category="function", known=False),
    symbol("library.trial", f'{INFERRED} "str"', category="variable"),
    {**symbol("library.home.Holder", also=("library.Holder",)), "isTypeAmbiguous": True},
    {**symbol("library.home.Holder.inner", category="variable"), "isTypeAmbiguous": True},
    {**symbol("library.home.Closed", also=("library.Closed",)), "isTypeAmbiguous": True},
)
ANNOTATIONS = {"library.home.Holder.inner": ("Inner", "None")}
PLACES = {f"library.{name}": f"library.{name}" for name in "Good Part lost trial absent Holder Closed".split()}
NAMES = typed_names(REPORT, PLACES, level_of, lambda name: ANNOTATIONS.get(name, ()))


def test_how_much_is_known_of_each_name() -> None:
    assert {name.name: name.knowledge for name in NAMES} == {
        "library.Good": Knowledge.KNOWN,
        "library.Part": Knowledge.PARTLY,
        "library.lost": Knowledge.UNKNOWN,
        "library.trial": Knowledge.PARTLY,
        "library.absent": Knowledge.UNKNOWN,
        "library.Holder": Knowledge.PARTLY,
        "library.Closed": Knowledge.PARTLY,
    }
    found = [name.name for name in incomplete(NAMES)]
    assert found == ["library.Part", "library.lost", "library.trial", "library.absent", "library.Holder", "library.Closed"]


def test_what_lacks_in_a_name_is_found_where_it_lacks() -> None:
    gaps = {name.name: set(name.gaps) for name in NAMES}
    assert gaps["library.Good"] == set()
    assert gaps["library.Part"] == {
        f'library/home.py:12: library.home.Base.count: {" ".join(INFERRED.split())} "int"',
        "library/home.py:5: library.home.Inner: something lacks",
    }
    assert gaps["library.lost"] == {"library.lost: pyright does not say what lacks in its type"}
    assert gaps["library.Holder"] == {"library/home.py:5: library.home.Inner: something lacks"}
    assert gaps["library.Closed"] == {"library.home.Closed: pyright does not say what lacks in its type"}
    assert gaps["library.absent"] == {"library.absent: pyright does not find it"}


def test_annotations_are_read_where_the_attribute_is_declared(tmp_path: Path) -> None:
    (tmp_path / "library").mkdir()
    (tmp_path / "library" / "__init__.py").write_text("class A:\n    def __init__(self) -> None:\n        self.b: list[B] | None = None\n")
    (tmp_path / "library" / "home.py").write_text("class C:\n    d: D\n")
    annotations = Annotations(tmp_path)
    assert annotations("library.A.b") == {"list", "B", "None"}
    assert annotations("library.home.C.d") == {"D"}
    assert not annotations("library.home.C.e") and not annotations("elsewhere.home.C.d")


def test_the_table_counts_by_level() -> None:
    rows = [line.split() for line in table(NAMES).splitlines()]
    assert rows[1] == ["stable", "1", "3", "2", "16.7", "%"]
    assert rows[2] == ["provisional", "0", "1", "0", "0.0", "%"]
    assert rows[3] == ["internal", "0", "0", "0"]


def test_the_complaint_names_the_place_once_and_those_it_concerns() -> None:
    many = [name._replace(name=f"library.{i}", gaps=("home.py:1: nothing",)) for i, name in enumerate(NAMES)]
    assert complaints(many) == "home.py:1: nothing\n    in the type of library.0, library.1, library.2 and 4 more"


def test_names_of_attributes_of_the_package_are_looked_for_in_their_modules() -> None:
    found = places()
    assert found["aiograd.linalg.norm"] == "aiograd.array_functions.linalg.norm" and found["aiograd.nn.Linear"] == "aiograd.nn.Linear"
    assert len(found) > 1000


@pytest.mark.parametrize("program", sorted(path.stem for path in PROGRAMS.glob("*.py")))
async def test_a_program_that_is_checked_runs(program: str) -> None:
    await importlib.import_module(f"tests.types.programs.{program}").main()
