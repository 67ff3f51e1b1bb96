"""One name, one class: a name that stands for two things makes a reader look up every import."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

ROOT = Path(__file__).parent.parent / "aiograd"

#: public names that two packages share, and why
SHARED: Mapping[str, str] = {
    "Event": "`aiograd.cuda.Event` is PyTorch's name, `aiograd.profiler.Event` one line of a profile; both are public",
}


def classes(sources: Mapping[str, str]) -> dict[str, list[str]]:
    """The modules that define each class, nested classes left out: those are qualified by the one around them."""
    found: dict[str, list[str]] = defaultdict(list)
    for module, text in sources.items():
        for node in _outermost(ast.parse(text)):
            found[node.name].append(module)
    return found


def _outermost(tree: ast.AST) -> list[ast.ClassDef]:
    found: list[ast.ClassDef] = []
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.expr):
            continue  # no class is made in one
        found += [child] if isinstance(child, ast.ClassDef) else _outermost(child)
    return found


def repeated(found: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """Names of more than one class."""
    return {name: modules for name, modules in found.items() if len(modules) > 1}


def test_no_two_classes_have_one_name() -> None:
    sources = {path.relative_to(ROOT).as_posix(): path.read_text() for path in ROOT.rglob("*.py")}
    every = classes(sources)
    assert len(every) > 300, "the package was found"
    found = repeated(every)
    assert found.keys() == SHARED.keys(), {name: found.get(name, "strike it out of SHARED") for name in found.keys() ^ SHARED.keys()}
    assert sorted(found["Event"]) == ["cuda/stream.py", "profiler/event.py"]


def test_what_is_counted() -> None:
    stand_in = "if True:\n    from b import A\nelse:\n    class A: pass"
    assert repeated(classes({"a.py": "class A: pass", "b.py": "class B: pass"})) == {}
    assert repeated(classes({"a.py": "class A: pass", "b.py": stand_in})) == {"A": ["a.py", "b.py"]}
    assert repeated(classes({"a.py": "class _A: pass\nclass _A: pass"})) == {"_A": ["a.py", "a.py"]}
    assert repeated(classes({"a.py": "class A:\n    class Meta: pass", "b.py": "class B:\n    class Meta: pass"})) == {}
