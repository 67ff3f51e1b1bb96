"""The public surface as text, and what a later one breaks of an earlier one."""

from __future__ import annotations

import dataclasses
import enum
import inspect
from typing import Any

import pytest
from packaging.version import Version

import aiograd as ag
from aiograd.running.stability import Stability, deprecated, stability_of
from tests.release import fragments, surface
from tests.release.surface import PROMISED, STORED, Break, Line, breaks, describe, store, stored

DESCRIBED = describe()
STABLE, PROVISIONAL = PROMISED


def test_no_public_name_is_broken_without_a_fragment_that_says_so() -> None:
    """``python -m tests.release renew`` writes the description anew; that is for a release."""
    found = list(fragments.not_said(breaks(stored(), DESCRIBED), fragments.read(), fragments.types()))
    assert not found, "\n".join(found)


def test_the_stored_description_is_of_the_same_form_and_of_a_release_up_to_this_one() -> None:
    text = STORED.read_text()
    assert text == store({level: stored()[level] for level in PROMISED}, stored()["version"])
    assert Version(stored()["version"]) <= Version(ag.__version__)
    kinds = {Line.parsed(line).kind for level in PROMISED for line in stored()[level].values()}
    assert kinds == {"attribute", "class", "def", "async def", "static def", "class def", "class async def"}


def test_the_description_has_every_promised_name_and_the_members_of_classes() -> None:
    stable = DESCRIBED[STABLE]
    assert len(stable) > 3000 and len(DESCRIBED[PROVISIONAL]) > 300 and not stable.keys() & DESCRIBED[PROVISIONAL].keys()
    assert stable["aiograd.matmul"] == "def (x1, x2, /)"  # made from a table
    assert stable["aiograd.Tensor.backward"].startswith("def (self, ")
    assert stable["aiograd.Engine.aclose"] == "async def (self)"
    linear = stable["aiograd.nn.Linear"]
    assert linear.startswith("class (in_features, out_features, bias=True") and linear.endswith(": aiograd.nn.Module")
    assert "aiograd.errors.AiogradError" in stable["aiograd.errors.ShapeError"] and "ValueError" in stable["aiograd.errors.ShapeError"]
    assert stable["aiograd.Function.apply"].startswith("class def (") and stable["aiograd.Function.forward"].startswith("static def (")
    assert stable["aiograd.nn.Module.training"] == "attribute" and "aiograd.nn.Linear.training" not in stable
    assert "aiograd.Tensor.__await__" in stable or "aiograd.Tensor.__add__" in stable
    internal = [name for name in (*stable, *DESCRIBED[PROVISIONAL]) if stability_of(name) is Stability.INTERNAL]
    assert not internal and not [name for name in stable if name.rpartition(".")[2].startswith("_") and not name.endswith("__")]


class Colour(enum.Enum):
    RED = 1


class Hidden:
    inherited = 1

    def method(self, x: int, /, *, y: str = "a", _private: int = 2) -> None: ...


class Shown(Hidden):
    __slots__ = ("slot",)

    @property
    def shape(self) -> int:
        return 1

    async def awaited(self, *args: Any, **kwargs: Any) -> None: ...

    @deprecated(instead="new", since="0.1", removed_in="0.3")
    def old(self) -> None: ...

    @classmethod
    def made(cls, dtype: Any = float, to: Any = Colour.RED) -> None: ...

    @staticmethod
    def plain(a: Any = (1, None, "b")) -> None: ...

    def __len__(self) -> int:
        return 0


@dataclasses.dataclass(slots=True, frozen=True)
class Data:
    a: int
    b: list[int] = dataclasses.field(default_factory=list)


def test_members_of_a_class(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(surface, "_is_ours", lambda cls: cls.__module__ == __name__)
    assert dict(surface._members(Shown, {Shown: "Shown"})) == {
        "shape": "attribute", "slot": "attribute", "awaited": "async def (self, *args, **kwargs)", "old": "deprecated def (self)",
        "made": "class def (dtype=float, to=...)", "plain": "static def (a=(1, None, 'b'))", "__len__": "def (self)", "inherited": "attribute",
        "method": "def (self, x, /, *, y='a')",
    }  # fmt: skip
    assert dict(surface._members(Shown, {Shown: "Shown", Hidden: "Hidden"})).keys().isdisjoint({"inherited", "method"})
    assert dict(surface._members(Data, {})) == {"a": "attribute", "b": "attribute"} and surface._line(Data, {}) == "class (a, b=...)"
    assert surface._line(Colour, {}) == "class (value)" and dict(surface._members(Colour, {})) == {"RED": "attribute"}


@pytest.mark.parametrize(
    ("earlier", "later", "text"),
    [
        ("def (x)", "def (x, y=1)", None),
        ("def (x)", "def (x, *, y=1)", None),
        ("def (x)", "def (x, *args, **kwargs)", None),
        ("def (x, *, y)", "def (x, y=1)", None),
        ("def (x, /)", "def (z, /)", None),
        ("def (x, /)", "def (x)", None),
        ("def (x, y=1)", "def (*args, **kwargs)", None),
        ("def (x, y=1)", "def (x, **kwargs)", "does not take (x, y): too many positional arguments"),
        ("def (x)", "def (x, y)", "does not take (x): missing a required argument: 'y'"),
        ("def (x)", "def (x, *, y)", "does not take (x): missing a required"),
        ("def (x, y=1)", "def (x)", "does not take (x, y): too many positional arguments"),
        ("def (x, *, y=1)", "def (x)", "does not take (x, y=): got an unexpected keyword argument 'y'"),
        ("def (x, y=1, z=2)", "def (x, z=2, y=1)", "gives to z what y was given by position"),
        ("def (x, y, /)", "def (y, x, /)", "gives to y what x was given by position"),
        ("def (x, y=1)", "def (x, *, y=1)", "does not take (x, y): too many positional arguments"),
        ("def (x)", "def (x, /)", "does not take (x=): "),
        ("def (x)", "def (input)", "does not take (x=): "),
        ("def (x=1)", "def (x)", "does not take (): missing a required argument: 'x'"),
        ("def (x=1)", "def (x=2)", "has x=2, where it was 1"),
        ("def (x, *args)", "def (x)", "does not take (x, *): too many positional arguments"),
        ("def (x, **kwargs)", "def (x)", "does not take (x, any_keyword=): got an unexpected keyword"),
        ("def (x)", "async def (x)", "was `def`, is `async def`"),
        ("def (self)", "attribute", "was `def`, is `attribute`"),
        ("static def (x)", "def (x)", "was `static def`, is `def`"),
        ("static deprecated def (x)", "static def (x)", None),
        ("deprecated def (x)", "def (x)", None),
        ("def (x)", "deprecated def (x)", None),
        ("class (x): A, B", "class (x): A, B, C", None),
        ("class (x): A, B", "class (x): B", "is no A any more"),
        ("class (x)", "class (x, y)", "does not take (x): missing"),
        ("attribute", "attribute", None),
    ],
)
def test_what_breaks_a_name(earlier: str, later: str, text: str | None) -> None:
    found = list(breaks({STABLE: {"a.f": earlier}}, {STABLE: {"a.f": later}}))
    assert [(each.name, each.level) for each in found] == [("a.f", STABLE)] * (text is not None)
    assert text is None or found[0].text.startswith(text), found


def test_a_name_that_is_gone_or_has_a_lower_level() -> None:
    gone = {"a.C": "class ()", "a.C.f": "def (self)", "a.D.g": "attribute", "a.old": "deprecated def ()"}
    earlier, later = {STABLE: {**gone, "a.f": "def ()"}}, {STABLE: {"a.new": "def ()"}, PROVISIONAL: {"a.f": "def ()"}}
    assert [str(each) for each in breaks(earlier, later)] == [
        "a.C (stable) is gone, and was not deprecated",
        "a.D.g (stable) is gone, and was not deprecated",
        "a.old (stable) is gone",
        "a.f (stable) is provisional now",
    ]
    assert not list(breaks({PROVISIONAL: {"a.f": "def ()"}}, {STABLE: {"a.f": "def ()"}})), "a higher level breaks nothing"


def test_every_signature_takes_the_calls_that_are_made_of_it() -> None:
    for name, line in DESCRIBED[STABLE].items():
        signature = Line.parsed(line).signature
        for positional, keywords in surface._calls(signature) if signature is not None else ():
            signature.bind(*positional, **keywords)  # type: ignore[union-attr]
        if signature is not None and any(each.kind is not inspect.Parameter.VAR_KEYWORD for each in signature.parameters.values()):
            assert any(positional or keywords for positional, keywords in surface._calls(signature)), name


def test_each_kind_of_change_is_found_in_the_package() -> None:
    """Changes of the whole description: every function loses its last parameter, or is renamed, or becomes a coroutine function."""
    functions = {name: line for name, line in DESCRIBED[STABLE].items() if line.startswith("def (") and Line.parsed(line).signature}
    assert len(functions) > 1500
    awaited = {STABLE: DESCRIBED[STABLE] | {name: f"async {line}" for name, line in functions.items()}, PROVISIONAL: DESCRIBED[PROVISIONAL]}
    assert {each.name for each in breaks(DESCRIBED, awaited)} == set(functions)
    more = {name: line.replace("(", "(needed_first, ", 1) for name, line in functions.items()}
    assert {each.name for each in breaks({STABLE: functions}, {STABLE: more})} >= {name for name in functions if "*args" not in functions[name]}
    assert next(breaks(DESCRIBED, {STABLE: {}, PROVISIONAL: {}})) == Break("aiograd.Engine", STABLE, "is gone, and was not deprecated")
