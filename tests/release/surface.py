"""The public surface as text, one line for each public name and each member of a public class, and what a later surface breaks of an earlier one.

`describe` reads the package as it is imported, since many names come from tables, which a reader of sources does not see. ``api.json`` holds the
description of the last release; `breaks` compares two descriptions and knows nothing of the package.

Note [Calls instead of parameters]
    A signature is broken if a call that it took is not taken any more, or gives a value to another parameter. So the calls that a signature takes are
    made (everything by position, everything by keyword, required parameters alone, each optional one added) and bound to the later one. A rule per
    kind of parameter would say the same in more words, and would have to know what ``*args`` and ``**kwargs`` swallow.

Limits: annotations and attributes that ``__init__`` sets are not in a description.
"""

from __future__ import annotations

import ast
import enum
import functools
import inspect
import json
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aiograd.running.stability import Stability, stability_of
from tests.public_names import MODULES, public_names

#: by level of stability, by name, a line such as ``async def (self, x, *, retain_graph=False)``
Surface = Mapping[str, Mapping[str, str]]

STORED = Path(__file__).parent / "api.json"
#: the levels whose names are described; internal ones are promised nothing
PROMISED = (Stability.STABLE.value, Stability.PROVISIONAL.value)
#: what Python, dataclasses and typing add to classes, in some versions only
_ADDED = {"__init__", "__new__", "__post_init__", "__replace__", "__class_getitem__", "__init_subclass__", "__setstate__"}


# -------------------------------------------------------------------- reading


def describe() -> dict[str, dict[str, str]]:
    """The surface of the package that is imported."""
    found = [(f"{module}.{public.name}", public.value) for module in MODULES for public in public_names(module)]
    classes = {value: name for name, value in reversed(found) if inspect.isclass(value)}
    surface: dict[str, dict[str, str]] = {level: {} for level in PROMISED}
    for name, value in found:
        lines = surface.get(stability_of(name).value)
        if lines is None:
            continue
        lines[name] = _line(value, classes)
        for member, text in _members(value, classes) if inspect.isclass(value) and _is_ours(value) else ():
            lines[f"{name}.{member}"] = text
    return {level: dict(sorted(lines.items())) for level, lines in surface.items()}


def _is_ours(cls: type) -> bool:
    return cls.__module__.partition(".")[0] == "aiograd"


def _line(value: Any, classes: Mapping[type, str]) -> str:
    """The description of a value, in which classes have their public names."""
    deprecated = "deprecated " if getattr(value, "__deprecated__", None) else ""
    if inspect.isclass(value):
        names = [classes.get(base) or (base.__name__ if base.__module__ == "builtins" else "object") for base in value.__mro__[1:]]
        bases = ", ".join(sorted({*names} - {"object"}))
        return f"{deprecated}class {_signature(value)}" + (f": {bases}" if bases else "")
    if callable(value) and (inspect.isroutine(value) or hasattr(value, "__wrapped__")):
        return f"{deprecated}{_kind(value)} {_signature(value)}"
    return "attribute"


def _members(cls: type, classes: Mapping[type, str]) -> Iterator[tuple[str, str]]:
    """The members of a class, with those of bases that are not public themselves."""
    seen = set[str]()
    for base in cls.__mro__:
        if not _is_ours(base) or (base is not cls and base in classes):
            continue
        for name in (*vars(base), *inspect.get_annotations(base)):
            is_special = name.startswith("__") and name.endswith("__")
            if name not in seen and not (hasattr(object, name) or name in _ADDED if is_special else name.startswith("_")):
                seen.add(name)
                value = vars(base).get(name)
                if isinstance(value, (staticmethod, classmethod)):
                    yield name, f"{'class' if isinstance(value, classmethod) else 'static'} {_line(getattr(cls, name), classes)}"
                elif not is_special or inspect.isfunction(value):
                    yield name, _line(value, classes)


def _kind(function: Any) -> str:
    function = inspect.unwrap(function)
    while isinstance(function, (functools.partial, types.MethodType)):
        function = function.func if isinstance(function, functools.partial) else function.__func__
    return "async def" if inspect.iscoroutinefunction(function) else "def"


def _signature(value: Any) -> str:
    if inspect.isclass(value) and issubclass(value, enum.Enum):  # its signature is not the same in all versions of Python
        return "(value)"
    try:
        signature = inspect.signature(value)
    except ValueError:  # built-in constructors, as exceptions have them
        return "(*args, **kwargs)"
    parameters = [
        parameter.replace(annotation=inspect.Parameter.empty, default=_Shown.of(parameter.default))
        for name, parameter in signature.parameters.items()
        if not name.startswith("_") or parameter.default is parameter.empty
    ]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


class _Shown:
    """A default value, with the same text in every process: a literal, a name, or ``...``."""

    def __init__(self, text: str) -> None:
        self._text = text

    def __repr__(self) -> str:
        return self._text

    @classmethod
    def of(cls, value: Any) -> Any:
        if value is inspect.Parameter.empty:
            return value
        if type(value) in (type(None), bool, int, float, complex, str, bytes):
            return cls(repr(value))
        if isinstance(value, tuple):
            return cls(repr(tuple(map(cls.of, value))))
        return cls(value.__name__ if inspect.isclass(value) or inspect.isbuiltin(value) else "...")


def stored() -> dict[str, Any]:
    """The description of the last release."""
    return json.loads(STORED.read_text())  # type: ignore[no-any-return]


def store(surface: Surface, version: str) -> str:
    """The text of ``api.json``: a line for each name, sorted, so that a change reads as a change."""
    return json.dumps({"version": version, **surface}, indent=0, ensure_ascii=False) + "\n"


# -------------------------------------------------------------------- comparison


@dataclass(frozen=True)
class Break:
    """Something that a program could do with the earlier surface and cannot do any more.

    Attributes:
        name: dotted.
        level: of the name, in the earlier surface.
        text: what has changed.
    """

    name: str
    level: str
    text: str

    def __str__(self) -> str:
        return f"{self.name} ({self.level}) {self.text}"


def breaks(earlier: Surface, later: Surface) -> Iterator[Break]:
    """The names that the later surface breaks; of a class that is gone, its members are not named."""
    levels = {name: level for level in PROMISED for name in later.get(level, {})}
    for level in PROMISED:
        gone = set[str]()
        for name, line in earlier.get(level, {}).items():
            if name.rpartition(".")[0] in gone:
                gone.add(name)
                continue
            if name not in levels:
                gone.add(name)
                yield Break(name, level, "is gone" if line.startswith("deprecated ") else "is gone, and was not deprecated")
                continue
            if level == Stability.STABLE.value != levels[name]:
                yield Break(name, level, f"is {levels[name]} now")
            now = later[levels[name]][name]
            for text in _changes(Line.parsed(line), Line.parsed(now)) if now != line else ():
                yield Break(name, level, text)


@dataclass(frozen=True)
class Line:
    """A line of a description, taken apart.

    Attributes:
        kind: ``def``, ``async def``, ``class`` or ``attribute``, with ``static`` or ``class`` before it for such methods.
        signature: None for an attribute.
        bases: full names, for a class.
    """

    kind: str
    signature: inspect.Signature | None
    bases: tuple[str, ...]

    @classmethod
    def parsed(cls, line: str) -> Line:
        """Parse a line."""
        head, bracket, rest = line.removeprefix("deprecated ").replace(" deprecated ", " ").partition("(")
        if not bracket:
            return cls(head, None, ())
        arguments, _, bases = rest.rpartition(")")
        function = ast.parse(f"def f({arguments}): ...").body[0]
        assert isinstance(function, ast.FunctionDef)
        return cls(head.strip(), _parsed_signature(function.args), tuple(bases.removeprefix(": ").split(", ")) if bases else ())


def _parsed_signature(arguments: ast.arguments) -> inspect.Signature:
    empty, parameter = inspect.Parameter.empty, inspect.Parameter
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [empty] * (len(positional) - len(arguments.defaults)) + [ast.unparse(default) for default in arguments.defaults]
    found = [
        parameter(each.arg, parameter.POSITIONAL_ONLY if each in arguments.posonlyargs else parameter.POSITIONAL_OR_KEYWORD, default=default)
        for each, default in zip(positional, defaults, strict=True)
    ]
    if arguments.vararg:
        found.append(parameter(arguments.vararg.arg, parameter.VAR_POSITIONAL))
    for each, value in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True):
        found.append(parameter(each.arg, parameter.KEYWORD_ONLY, default=empty if value is None else ast.unparse(value)))
    if arguments.kwarg:
        found.append(parameter(arguments.kwarg.arg, parameter.VAR_KEYWORD))
    return inspect.Signature(found)


def _changes(earlier: Line, later: Line) -> Iterator[str]:
    if earlier.kind != later.kind:
        yield f"was `{earlier.kind}`, is `{later.kind}`"
        return
    for base in earlier.bases:
        if base not in later.bases:
            yield f"is no {base} any more"
    if earlier.signature is None or later.signature is None:
        return
    for name, parameter in earlier.signature.parameters.items():
        other = later.signature.parameters.get(name)
        if other is not None and parameter.default is not parameter.empty and other.default not in (parameter.default, other.empty):
            yield f"has {name}={other.default}, where it was {parameter.default}"
    for positional, keywords in _calls(earlier.signature):
        try:
            bound = later.signature.bind(*positional, **keywords).arguments
        except TypeError as error:
            yield f"does not take ({_written(positional, keywords)}): {error}"
            return  # other calls fail for the same reason
        for name, value in bound.items():
            if isinstance(value, str) and value != name and value in earlier.signature.parameters and value in later.signature.parameters:
                yield f"gives to {name} what {value} was given by position"
                return


Call = tuple[tuple[str, ...], dict[str, str]]


def _calls(signature: inspect.Signature) -> Iterator[Call]:
    """Calls that the signature takes; each argument is the name of its parameter."""
    of = {kind: [each for each in signature.parameters.values() if each.kind is kind] for kind in inspect._ParameterKind}
    only, either, keyword = of[inspect.Parameter.POSITIONAL_ONLY], of[inspect.Parameter.POSITIONAL_OR_KEYWORD], of[inspect.Parameter.KEYWORD_ONLY]
    required = {each.name: each.name for each in keyword if each.default is each.empty}
    every = {each.name: each.name for each in keyword}
    first = [each for each in (*only, *either) if each.default is each.empty]
    for count in range(len(first), len(only) + len(either) + 1):
        names = tuple(each.name for each in (*only, *either)[:count])
        yield names, required
        yield names, every
    for count in range(sum(each.default is each.empty for each in only), len(only) + 1):
        names = tuple(each.name for each in only[:count])
        needed = {each.name: each.name for each in either if each.default is each.empty}
        if count == len(only):
            yield names, {**{each.name: each.name for each in either}, **every}
        yield names, {**needed, **required}
        for each in (*either, *keyword):
            yield names, {**needed, **required, each.name: each.name}
    most = tuple(each.name for each in (*only, *either))
    if of[inspect.Parameter.VAR_POSITIONAL]:
        yield (*most, "*"), required
    if of[inspect.Parameter.VAR_KEYWORD]:
        yield most, {**every, "any_keyword": "**"}


def _written(positional: tuple[str, ...], keywords: Mapping[str, str]) -> str:
    return ", ".join([*positional, *(f"{name}=" for name in keywords)])
