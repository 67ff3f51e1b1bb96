"""Fragments of the changelog: their form, the breaks that they say, and the changes that need one."""

from __future__ import annotations

import pytest

from tests.release import fragments
from tests.release.fragments import ROOT, complaints, needs_fragment, not_said, type_of, types
from tests.release.surface import PROMISED, Break

STABLE, PROVISIONAL = PROMISED
SHOWN = {"breaking": True, "feature": True, "internal": False}


def test_the_fragments_of_the_project_are_well_formed() -> None:
    assert not list(complaints(fragments.read(), types()))


def test_the_page_about_fragments_has_every_type() -> None:
    page = (fragments.FOLDER / "README.md").read_text()
    assert types() == {"breaking": True, "deprecated": True, "feature": True, "fix": True, "internal": False}
    assert [kind for kind in types() if f"| `{kind}` |" in page] == list(types())


def test_the_changelog_has_the_place_for_releases() -> None:
    changelog = (ROOT / "docs" / "changelog.md").read_text()
    assert changelog.startswith("# Changelog\n\n<!-- releases -->\n\n## ")


def test_fragments_are_all_files_but_the_page_and_the_template(tmp_path: object) -> None:
    folder = fragments.Path(str(tmp_path))
    for name in ("README.md", "template.md.jinja", "b.fix.md", "a.txt"):
        (folder / name).write_text(name)
    assert fragments.read(folder) == {"a.txt": "a.txt", "b.fix.md": "b.fix.md"}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("faster-steps.feature.md", "Steps are faster.\n", None),
        ("faster-steps.feature.md", "Steps are faster\nthan before.", None),
        ("x.breaking.md", "`aiograd.nn.Linear(bias=)` is gone: write `Affine`.", None),
        ("x.breaking.md", "`ag.nn.Linear` is gone.", None),
        ("x.breaking.md", "Linear and `aiograd` are gone.", "names nothing that breaks"),
        ("x.news.md", "Text.", "expected slug.type.md"),
        ("X.feature.md", "Text.", "expected slug.type.md"),
        ("feature.md", "Text.", "expected slug.type.md"),
        ("x.feature.txt", "Text.", "expected slug.type.md"),
        ("x.feature.md", " \n", "is empty"),
        ("x.feature.md", "- Text.", "begins with '-'"),
        ("x.feature.md", "# Text.", "begins with '#'"),
        ("x.feature.md", "Text", "does not end with a full stop"),
        ("x.feature.md", f"{'x' * 150}.", "has a line of more than 150"),
    ],
)
def test_the_form_of_a_fragment(name: str, text: str, complaint: str | None) -> None:
    found = list(complaints({name: text}, SHOWN))
    assert len(found) == (complaint is not None) and (complaint is None or found[0].startswith(f"{name}: {complaint}")), found


def test_types_in_names() -> None:
    assert [type_of(name) for name in ("a-b.fix.md", "a.b.fix.md", "fix.md", "a.fix.md.orig", "-a.fix.md")] == ["fix", None, None, None, None]


@pytest.mark.parametrize(
    ("level", "name", "text", "is_said"),
    [
        (STABLE, "x.breaking.md", "`aiograd.nn.Linear` is gone.", True),
        (STABLE, "x.breaking.md", "`ag.nn.Linear.forward(x)` is gone.", True),
        (STABLE, "x.breaking.md", "All of `aiograd.nn` is gone.", True),
        (STABLE, "x.breaking.md", "`aiograd.nn.Line` and `aiograd.nn.Linear.forward.x` are gone.", False),
        (STABLE, "x.breaking.md", "aiograd.nn.Linear is gone.", False),
        (STABLE, "x.feature.md", "`aiograd.nn.Linear` is gone.", False),
        (PROVISIONAL, "x.feature.md", "`aiograd.nn.Linear` is gone.", True),
        (PROVISIONAL, "x.breaking.md", "`aiograd.nn.Linear` is gone.", True),
        (PROVISIONAL, "x.internal.md", "`aiograd.nn.Linear` is gone.", False),
    ],
)
def test_a_break_is_said_by_a_fragment_that_names_it(level: str, name: str, text: str, is_said: bool) -> None:
    broken = Break("aiograd.nn.Linear.forward", level, "is gone")
    found = list(not_said([broken], {name: text}, SHOWN))
    assert len(found) == (not is_said)
    kind = "breaking" if level == STABLE else "feature"
    assert is_said or f"say so in docs/changes/nn-linear-forward.{kind}.md with `{broken.name}` in it" in found[0]


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        (["aiograd/nn/linear.py"], True),
        (["aiograd/nn/linear.py", "docs/changes/README.md"], True),
        (["aiograd/nn/linear.py", "docs/changes/linear.txt"], True),
        (["aiograd/nn/linear.py", "docs/changes/linear.fix.md"], False),
        (["aiograd/nn/linear.py", "docs/changes/linear.internal.md"], False),
        (["tests/test_nn.py", "docs/index.md", "README.md"], False),
        ([], False),
    ],
)
def test_a_change_of_the_package_needs_a_fragment(changed: list[str], expected: bool) -> None:
    assert needs_fragment(changed) is expected
