"""Which public names have a type that every checker reads alike: what ``pyright --verifytypes`` reports, by the names that users write.

A type is *known* where every part of it is annotated, *partly known* where a part is left to what a checker infers, or is an argument that a generic
class lacks, and *unknown* where the checker finds no type or does not find the name. The type of a class includes those of its public attributes.
"""

from __future__ import annotations

import ast
import enum
import functools
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from aiograd.running.stability import Stability
from tests.public_names import MODULES, load, public_names

#: what pyright says of a type that is incomplete because another one is, which has an entry of its own
_INDIRECT = "partially unknown"


class Knowledge(enum.Enum):
    """How much of the type of a name is known."""

    KNOWN = "known"
    PARTLY = "partly known"
    UNKNOWN = "unknown"


class TypedName(NamedTuple):
    """A public name, and how much of its type is known."""

    name: str
    level: Stability
    knowledge: Knowledge
    #: what lacks, with the place; of a class, what its attributes lack
    gaps: tuple[str, ...]


def places() -> dict[str, str]:
    """Each public name, as users write it, with the name under which a checker finds it; they differ in modules that are attributes of `aiograd`."""
    return {f"{module}.{public.name}": f"{load(module).__name__}.{public.name}" for module in MODULES for public in public_names(module)}


class Annotations:
    """The classes that annotations of attributes name: where the type of an attribute is incomplete, pyright does not say which class it is of.

    Args:
        root: the folder of the package's folder.
    """

    def __init__(self, root: Path) -> None:
        self._root = root
        self._read = functools.cache(self._annotations)

    def __call__(self, name: str) -> Collection[str]:
        """The names in the annotation of an attribute, ``package.module.Class.attribute``."""
        home, _, attribute = name.rpartition(".")
        while home:
            home = home.rpartition(".")[0]
            path = self._root.joinpath(*home.split("."))
            for file in (path.with_suffix(".py"), path / "__init__.py"):
                if home and file.is_file():
                    return self._read(file).get(attribute, set())
        return ()

    def _annotations(self, file: Path) -> Mapping[str, set[str]]:
        found: dict[str, set[str]] = defaultdict(set)
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.AnnAssign):
                found[ast.unparse(node.target).rpartition(".")[2]] |= {*re.findall(r"\w+", ast.unparse(node.annotation))}
        return found


def typed_names(
    report: Mapping[str, Any], places: Mapping[str, str], level_of: Callable[[str], Stability], annotations: Callable[[str], Collection[str]]
) -> list[TypedName]:
    """The completeness of public names, from a report.

    Args:
        report: what ``pyright --verifytypes PACKAGE --outputjson`` prints.
        places: see `places`.
        level_of: the stability of a name.
        annotations: the names in the annotation of an attribute, see `Annotations`.

    Returns:
        An entry for each of the names, in their order.
    """
    symbols = _Symbols(report["typeCompleteness"]["symbols"], annotations)
    return [TypedName(name, level_of(name), symbols.knowledge(place), tuple(symbols.gaps(place))) for name, place in places.items()]


class _Symbols:
    """The symbols of a report by each of their names."""

    def __init__(self, symbols: Iterable[Mapping[str, Any]], annotations: Callable[[str], Collection[str]]) -> None:
        self._annotations = annotations
        self.by_name: dict[str, Mapping[str, Any]] = {}
        self.attributes: dict[str, list[str]] = defaultdict(list)
        #: name of a class without its module -> names
        self.classes: dict[str, list[str]] = defaultdict(list)
        for symbol in symbols:
            for name in (symbol["name"], *symbol.get("alternateNames", ())):
                self.by_name.setdefault(name, symbol)
            home, _, last = symbol["name"].rpartition(".")
            self.attributes[home].append(symbol["name"])
            if symbol["category"] == "class":
                self.classes[last].append(symbol["name"])

    def knowledge(self, name: str) -> Knowledge:
        symbol = self.by_name.get(name)
        if symbol is None:
            return Knowledge.UNKNOWN
        if symbol["isTypeAmbiguous"]:
            return Knowledge.PARTLY
        return Knowledge.KNOWN if symbol["isTypeKnown"] else Knowledge.UNKNOWN

    def _parts(self, name: str) -> list[str]:
        """Incomplete symbols in the type of a name: attributes, the class of that name in another module, classes of an annotation."""
        words = (name.rpartition(".")[2], *self._annotations(name))
        named = [*self.attributes[name], *(found for word in words for found in self.classes[word])]
        return [each for each in named if each != name and self.knowledge(each) is not Knowledge.KNOWN]

    def gaps(self, name: str) -> Iterator[str]:
        """Missing parts of the type of a name, and of the types that it consists of; each once."""
        if name not in self.by_name:
            yield f"{name}: pyright does not find it"
        waiting, seen = [name], set[str]()
        unexplained, is_explained = None, False
        while waiting:
            symbol = self.by_name.get(waiting.pop())
            if symbol is None or symbol["name"] in seen or self.knowledge(symbol["name"]) is Knowledge.KNOWN:
                continue
            seen.add(symbol["name"])
            waiting += (parts := self._parts(symbol["name"]))
            errors = [each for each in symbol["diagnostics"] if each["severity"] == "error"]
            if not errors and not parts:
                unexplained = f"{symbol['name']}: pyright does not say what lacks in its type"
            for diagnostic in errors:
                message = " ".join(diagnostic["message"].split())
                waiting += (found for word in re.findall(r"\w+", message) for found in self.classes[word])
                if _INDIRECT not in message:
                    is_explained = True
                    line = f":{diagnostic['range']['start']['line'] + 1}" if "range" in diagnostic else ""
                    yield f"{diagnostic['file']}{line}: {symbol['name']}: {message}"
        if unexplained is not None and not is_explained:
            yield unexplained


def table(names: Iterable[TypedName]) -> str:
    """How many names of each level are known, partly known and unknown."""
    counts: dict[Stability, Counter[Knowledge]] = {level: Counter() for level in Stability}
    for name in names:
        counts[name.level][name.knowledge] += 1
    lines = [f"{'level':14}" + "".join(f"{knowledge.value:>14}" for knowledge in Knowledge) + f"{'':4}complete"]
    for level, count in counts.items():
        total = count.total()
        share = f"{100 * count[Knowledge.KNOWN] / total:10.1f} %" if total else ""
        lines.append(f"{level.value:14}" + "".join(f"{count[knowledge]:14}" for knowledge in Knowledge) + share)
    return "\n".join(lines)


def incomplete(names: Iterable[TypedName]) -> list[TypedName]:
    """The names whose types are not known."""
    return [name for name in names if name.knowledge is not Knowledge.KNOWN]


def complaints(names: Iterable[TypedName]) -> str:
    """Missing parts of types by place, with the names that each makes incomplete."""
    users: dict[str, list[str]] = defaultdict(list)
    for name in names:
        for gap in name.gaps:
            users[gap].append(name.name)
    lines = []
    for gap, concerned in sorted(users.items()):
        rest = f" and {len(concerned) - 3} more" if len(concerned) > 3 else ""
        lines.append(f"{gap}\n    in the type of {', '.join(concerned[:3])}{rest}")
    return "\n".join(lines)
