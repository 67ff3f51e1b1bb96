"""Fragments of the changelog: the files of ``docs/changes``, one for each change, from which towncrier writes the section of a release.

The name of a fragment is ``slug.type.md``; the types stand in ``[tool.towncrier]`` of ``pyproject.toml``, and ``docs/changes/README.md`` says what
each is for.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from aiograd.running.stability import Stability
from tests.release.surface import Break

ROOT = Path(__file__).parent.parent.parent
FOLDER = ROOT / "docs" / "changes"
#: files of the folder that are no fragments
OTHERS = {"README.md", "template.md.jinja"}
#: a fragment of this type is needed for a break of a stable name
BREAKING = "breaking"
_NAME = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*\.([a-z]+)\.md")
WIDTH = 150


def types() -> dict[str, bool]:
    """The types of fragments, each with whether the changelog shows it."""
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["towncrier"]["type"]
    return {each["directory"]: each["showcontent"] for each in table}


def read(folder: Path = FOLDER) -> dict[str, str]:
    """The fragments by the names of their files."""
    return {path.name: path.read_text() for path in sorted(folder.iterdir()) if path.name not in OTHERS}


def type_of(name: str) -> str | None:
    """The type in the name of a fragment; None if the name is none of a fragment."""
    found = _NAME.fullmatch(name)
    return found[1] if found else None


def complaints(fragments: Mapping[str, str], known: Iterable[str]) -> Iterator[str]:
    """Errors in fragments, by the names of their files.

    Args:
        fragments: texts.
        known: the types that there are.
    """
    known = tuple(known)
    for name, text in fragments.items():
        kind, lines = type_of(name), text.splitlines()
        if kind not in known:
            yield f"{name}: expected slug.type.md, with a slug of small letters, digits and hyphens, and one of the types {', '.join(known)}"
        if not text.strip():
            yield f"{name}: is empty; say what a user notices, in one or a few sentences"
            continue
        if text.startswith(("-", "*", "#", " ")):
            yield f"{name}: begins with {text.split()[0]!r}; write plain sentences, the list and its headings come with the release"
        if not text.rstrip().endswith("."):
            yield f"{name}: does not end with a full stop"
        if any(len(line) > WIDTH for line in lines):
            yield f"{name}: has a line of more than {WIDTH} characters"
        if kind == BREAKING and not _named(text):
            yield f"{name}: names nothing that breaks; write it in full between backticks, such as `aiograd.nn.Linear`, with what to use instead"


def _named(text: str) -> set[str]:
    """The dotted names of the package between backticks; ``ag`` stands for ``aiograd``."""
    found = re.findall(r"`(?:aiograd|ag)((?:\.\w+)+)(?:\(.*?\))?`", text)
    return {f"aiograd{rest}" for rest in found}


def not_said(breaks: Iterable[Break], fragments: Mapping[str, str], shown: Mapping[str, bool]) -> Iterator[str]:
    """The breaks that no fragment says.

    A fragment says a break if it names what breaks, or the class or module around it. For a stable name it is one of type ``breaking``, for a
    provisional one any that the changelog shows.

    Args:
        breaks: found by `tests.release.surface.breaks`.
        fragments: texts, by the names of their files.
        shown: by type, whether the changelog shows it.
    """
    breaking, other = set[str](), set[str]()
    for name, text in fragments.items():
        kind = type_of(name) or ""
        other |= _named(text) if shown.get(kind) else set()
        breaking |= _named(text) if kind == BREAKING else set()
    for each in breaks:
        is_stable = each.level == Stability.STABLE.value
        around = {each.name[: dot.start()] for dot in re.finditer(r"\.", each.name)} | {each.name}
        if not around & (breaking if is_stable else other):
            yield f"{each}. Keep it, or say so in docs/changes/{_slug(each.name)}.{BREAKING if is_stable else 'feature'}.md with `{each.name}` in it"


def _slug(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.removeprefix("aiograd.").lower()).strip("-")


def needs_fragment(changed: Iterable[str]) -> bool:
    """True if a change has no fragment and needs one: it changes the package.

    Args:
        changed: paths of the files that it adds, changes or removes, relative to the project.
    """
    paths = [Path(path) for path in changed]
    has_one = any(path.parent.as_posix() == "docs/changes" and type_of(path.name) for path in paths)
    return not has_one and any(path.parts[0] == "aiograd" for path in paths)
