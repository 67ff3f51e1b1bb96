"""The reference says of every public function and class what it takes, returns and raises, and of what waits what a cancellation does.

The docstrings are what the reference is made of. A section is asked for where there is something to say: Args where there are parameters, Returns
where something is returned, Raises where the function's own code raises, cancellation where a call is awaited. Examples are run by
``test_examples_in_docstrings.py``.
"""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from enum import Enum
from typing import Any

import pytest

from docs.extensions.raises_entries import ENTRY, part_entries, split_entries
from tests.public_names import public_callables

#: what is awaited: a coroutine function, or a function that returns something to await
AWAITED = re.compile(r"\b(Awaitable|Coroutine|Future)\b")
SECTION = re.compile(r"^(\w[\w ]*):\n((?:[ \t]+.*\n|\n)*)", re.MULTILINE)
#: errors that say "not here", or that belong to the language's protocols
NO_NEWS = {"NotImplementedError", "StopIteration", "StopAsyncIteration", "AttributeError", "CancelledError", "GeneratorExit"}


def sections(text: str) -> dict[str, str]:
    """The sections of a Google style docstring by name."""
    return {name: body for name, body in SECTION.findall(text + "\n")}


def signature_of(value: Any) -> inspect.Signature | None:
    try:
        return inspect.signature(value)
    except (ValueError, TypeError):
        return None


def parameters_of(value: Any) -> list[str]:
    """The names of the parameters that a caller may give."""
    if inspect.isclass(value) and (issubclass(value, Enum) or value.__init__ is object.__init__ or getattr(value, "_is_protocol", False)):
        return []
    if inspect.isclass(value) and issubclass(value, BaseException) and "__init__" not in vars(value):
        return []
    signature = signature_of(value)
    names = [] if signature is None else [name for name in signature.parameters if not name.startswith("_")]
    if inspect.isclass(value) and issubclass(value, BaseException):
        names = [name for name in names if name not in ("message", "origin")]  # the text of the error, and what its base class takes
    return [name for name in names if name not in ("self", "cls")]


def raised_by(function: Any) -> set[str]:
    """The names of the errors that the function's own code raises."""
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):
        return set()
    (definition, *_) = tree.body
    found = set()
    for node in _own_statements(definition):
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc
            name = call.func if isinstance(call, ast.Call) else call
            if isinstance(name, ast.Name) and name.id[0].isupper():
                found.add(name.id)
    return found - NO_NEWS


def _own_statements(definition: ast.AST) -> Iterator[ast.AST]:
    """The source of a function, or of the ``__init__`` of a class."""
    if isinstance(definition, ast.ClassDef):
        for child in definition.body:
            if isinstance(child, ast.FunctionDef) and child.name in ("__init__", "__post_init__"):
                yield from ast.walk(child)
    else:
        yield from ast.walk(definition)


def missing(value: Any) -> list[str]:
    """The parts that the docstring of a public callable lacks."""
    text = inspect.getdoc(value) or ""
    if not text:
        return ["a docstring"]
    found, complaints = sections(text), []
    documented = " ".join(found.get(name, "") for name in ("Args", "Attributes"))
    parameters = parameters_of(value)
    unnamed = [name for name in parameters if not re.search(rf"(?m)^\s+(?:[\w*, ]*, )?\*{{0,2}}{name}\b[\w*, ]*(\(.*?\))?:", documented)]
    if unnamed:
        complaints.append(f"Args: {', '.join(unnamed)}")
    signature = signature_of(value)
    returned = None if inspect.isclass(value) or signature is None else signature.return_annotation
    if returned not in (None, "None", "Never", "NoReturn", inspect.Signature.empty) and not {"Returns", "Yields"} & found.keys():
        complaints.append("Returns")
    unsaid = sorted(name for name in raised_by(value) if not re.search(rf"\b{name}\b", found.get("Raises", "")))
    if unsaid:
        complaints.append(f"Raises: {', '.join(unsaid)}")
    if (inspect.iscoroutinefunction(value) or AWAITED.search(str(returned))) and "ancel" not in text:
        complaints.append("what a cancellation does")
    return complaints


CALLABLES = dict(public_callables())


def test_every_public_callable_is_documented() -> None:
    assert len(CALLABLES) > 900
    found = {name: complaints for name, value in CALLABLES.items() if (complaints := missing(value))}
    lines = "\n".join(f"{name}: {'; '.join(complaints)}" for name, complaints in found.items())
    assert not found, f"{len(found)} of {len(CALLABLES)} public callables lack something in their docstring:\n{lines}"


def test_the_first_sentence_is_one() -> None:
    """Subject and verb, or a noun: not a clause that leaves the reader to guess what is meant."""
    clause = re.compile(r"(Where|Why|How|When|Those|As|With|Without|In reverse|Times)\b")
    found = [name for name, value in CALLABLES.items() if clause.match(inspect.getdoc(value) or "")]
    assert not found, f"say what it is or does: {', '.join(found)}"


# -------------------------------------------------------------------- the check itself


async def waits(seconds: float) -> int:
    """Wait.

    Args:
        seconds: how long.

    Returns:
        Nothing of interest.
    """
    raise ValueError


class Made:
    """A class.

    Args:
        first, second: two.
        **options: more.
    """

    def __init__(self, first: int, second: int, third: int = 3, **options: int) -> None:
        if first:
            raise KeyError


@pytest.mark.parametrize(
    ("value", "complaints"),
    [
        (waits, ["Raises: ValueError", "what a cancellation does"]),
        (Made, ["Args: third", "Raises: KeyError"]),
        (lambda x: x, ["a docstring"]),
        (sections, ["Args: text", "Returns"]),
    ],
)
def test_what_is_missing_is_found(value: Any, complaints: list[str]) -> None:
    assert missing(value) == complaints


# -------------------------------------------------------------------- how it is shown


@pytest.mark.parametrize(
    ("text", "entries"),
    [
        ("ShapeError: wrong. LoopError: no loop.", ["ShapeError: wrong.", "LoopError: no loop."]),
        ("ShapeError, TypeError: a; when awaited: b. When awaited: c.", ["ShapeError, TypeError: a; when awaited: b.", "When awaited: c."]),
        ("AddressError: its URL is wrong. Overloaded, LimitError.", ["AddressError: its URL is wrong.", "Overloaded, LimitError"]),
        ("LimitError: x. When awaited, CollectiveError: y; ShapeError: z", ["LimitError: x.", "When awaited, CollectiveError: y", "ShapeError: z"]),
        ("ArgumentError: see: this. Otherwise: as `call`.", ["ArgumentError: see: this. Otherwise: as `call`."]),
        ("As `step`.", ["As `step`."]),
    ],
)
def test_entries_under_raises_are_parted(text: str, entries: list[str]) -> None:
    assert split_entries(text) == entries


def test_lines_of_a_section_are_its_entries_whatever_their_indentation() -> None:
    entries = ["    CommitUnknown: one is out of reach: restore it and make a", "    new Pipeline. ArgumentError: x,", "        y."]
    parted = ["    CommitUnknown: one is out of reach: restore it and make a new Pipeline.", "    ArgumentError: x, y.", ""]
    assert part_entries(["Do it.", "", "Raises:", *entries]) == ["Do it.", "", "Raises:", *parted]
    assert part_entries(["Raises:", *entries, "", "More."]) == ["Raises:", *parted, "More."]


def test_no_entry_under_raises_has_another_within() -> None:
    seen = 0
    for name, value in public_callables():
        doc = inspect.getdoc(value) or ""
        lines = part_entries(doc.splitlines())
        for line in sections("\n".join(lines)).get("Raises", "").splitlines():
            seen += 1
            words = line.strip()
            rest = ENTRY.match(words)
            inside = words[rest.end() if rest else 0 :]
            assert not re.search(r"[.;] [A-Z]\w*(Error|Unknown|Overloaded|Mismatch): ", inside), f"{name}: {words}"
    assert seen > 500
