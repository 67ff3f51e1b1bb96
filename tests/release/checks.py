"""The checks of a release, in the order in which they run; each gives the text of its row or raises `ReleaseError`."""

from __future__ import annotations

import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any

import aiograd
from tests.release import fragments, installing
from tests.release.building import Built, Commit, ReleaseError, bill_of, build, by_folder, copy, run, sizes, unneeded
from tests.release.surface import PROMISED, Break, Line, Surface, breaks, describe, stored

ROOT = fragments.ROOT
WORKFLOWS = ROOT / ".github" / "workflows"
BIN = Path(sys.executable).parent


@dataclass
class Release:
    """The state that the checks share: the options, and the results of earlier checks.

    Attributes:
        folder: of copies of the commit and of builds; removed afterwards.
        out: where the files of the release are left.
        since: a revision of git, from which on changes of the package need a fragment.
        jobs: processes that run tests.
        all: every test runs against the wheel.
    """

    folder: Path
    out: Path
    since: str | None = None
    jobs: int = 2
    all: bool = False
    commit: Commit | None = None
    built: Built | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def files(self) -> Built:
        """The build."""
        if self.built is None:
            raise ReleaseError("there is no build: see the rows above")
        return self.built


# -------------------------------------------------------------------- the checkout


def check_commit(release: Release) -> str:
    """The commit, and what is not in it."""
    release.commit = commit = Commit.of(ROOT)
    if commit.changed:
        files = ", ".join(commit.changed[:3]) + ", ..." * (len(commit.changed) > 3)
        release.notes.append(f"NO RELEASE: the checkout is not {commit.name}, it differs in {files}")
    return f"{commit.name}, {time.strftime('%Y-%m-%d %H:%M', time.gmtime(int(commit.epoch)))} UTC, {len(commit.changed)} files changed since"


def check_changes(release: Release) -> str:
    """Fragments are well-formed, the changelog has a section of this version or fragments for it, and changes have fragments."""
    found, shown = fragments.read(), fragments.types()
    wrong = list(fragments.complaints(found, shown))
    if release.since is not None:
        if fragments.needs_fragment(run(["git", "diff", "--name-only", f"{release.since}...HEAD"], ROOT).splitlines()):
            wrong.append(f"the package has changed since {release.since}, and there is no new fragment: docs/changes/README.md says how to write one")
    section = f"## {aiograd.__version__}"
    changelog = (ROOT / "docs" / "changelog.md").read_text()
    if not found and not re.search(rf"^{re.escape(section)}(,|$)", changelog, re.MULTILINE):
        wrong.append(f"docs/changelog.md has no `{section}`, and there are no fragments to make it of")
    if wrong:
        raise ReleaseError("\n".join(wrong))
    draft = run([str(BIN / "towncrier"), "build", "--draft", "--version", aiograd.__version__], ROOT) if found else ""
    if found and section not in draft:
        raise ReleaseError(f"towncrier makes no section of the fragments:\n{draft}")
    return f"{len(found)} fragments, {changelog.partition('## ')[2].partition(chr(10))[0]} is the latest section"


def check_surface(release: Release) -> str:
    """Nothing that was public is broken, unless a fragment says so; griffe compares the same descriptions once more."""
    earlier, later = stored(), describe()
    found = list(breaks(earlier, later))
    known = {each.name for each in found}
    found += [each for each in _griffe_breaks(earlier, later) if not any(each.name == name or each.name.startswith(f"{name}.") for name in known)]
    wrong = list(fragments.not_said(found, fragments.read(), fragments.types()))
    if wrong:
        raise ReleaseError("\n".join(wrong))
    counts = ", ".join(f"{len(later[level])} {level}" for level in PROMISED)
    added = sum(len(later[level].keys() - earlier[level].keys()) for level in PROMISED)
    return f"{counts}; since {earlier['version']} {added} added and {len(found)} broken, each with a fragment"


def _griffe_breaks(earlier: Surface, later: Surface) -> Iterator[Break]:
    """The differences that griffe finds between two descriptions."""
    import griffe

    levels = {name: level for level in PROMISED for name in earlier[level]}
    for each in griffe.find_breaking_changes(_griffe_tree(griffe, earlier), _griffe_tree(griffe, later)):
        name = each.obj.path.removesuffix(".__init__")
        if name in levels:  # of a module that is gone, each name is
            yield Break(name, levels[name], each.kind.value.lower())


def _griffe_tree(griffe: Any, surface: Surface) -> Any:
    """A description as griffe's modules, classes, functions and attributes."""
    lines = {name: Line.parsed(line) for level in PROMISED for name, line in surface[level].items()}
    made: dict[str, Any] = {}

    def place(name: str) -> Any:
        if name not in made:
            parent, _, last = name.rpartition(".")
            made[name] = _griffe_object(griffe, last, lines[name]) if name in lines else griffe.Module(last)
            if parent:
                place(parent).set_member(last, made[name])
        return made[name]

    for name in lines:
        place(name)
    return made["aiograd"]


def _griffe_object(griffe: Any, name: str, line: Line) -> Any:
    if line.signature is None:
        return griffe.Attribute(name)
    parameters = griffe.Parameters(
        *(
            griffe.Parameter(
                each.name, kind=griffe.ParameterKind(each.kind.description), default=None if each.default is each.empty else each.default
            )
            for each in line.signature.parameters.values()
        )
    )
    if not line.kind.endswith("class"):
        return griffe.Function(name, parameters=parameters)
    cls = griffe.Class(name, bases=list(line.bases))
    cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(griffe.Parameter("self"), *parameters)))
    return cls


# -------------------------------------------------------------------- the files


def check_build(release: Release) -> str:
    """The sdist from a copy of the commit, the wheel from the sdist."""
    if release.commit is None:
        raise ReleaseError("there is no commit to build: see the row above")
    copy(ROOT, release.folder / "copy")
    (release.folder / "first").mkdir()
    built = build(release.folder / "copy", release.folder / "first", release.commit.epoch)
    release.out.mkdir(exist_ok=True)
    kept = [Path(shutil.copy(path, release.out)) for path in (built.sdist, built.wheel)]
    release.built = Built(*kept)
    return ", ".join(f"{path.name} {path.stat().st_size / 1e6:.2f} MB" for path in kept)


def check_same_bytes(release: Release) -> str:
    """Another copy, under another path, mask, hash seed, locale and time zone, with files of another age, gives the same bytes."""
    first = release.files
    assert release.commit is not None
    source = release.folder / "another place" / "copy"
    copy(ROOT, source)
    for number, path in enumerate(sorted(source.rglob("*"))):
        os.utime(path, (1e9 + number, 1e9 + number))
    (release.folder / "second").mkdir()
    others = {"PYTHONHASHSEED": "1", "LC_ALL": "C", "TZ": "Asia/Tokyo"}
    second = build(source, release.folder / "second", release.commit.epoch, umask=0o077, **others)
    digests = []
    for one, other in ((first.sdist, second.sdist), (first.wheel, second.wheel)):
        digest = sha256(one.read_bytes()).hexdigest()
        if digest != sha256(other.read_bytes()).hexdigest():
            kept = shutil.copy(other, first.sdist.parent / f"other-{other.name}")
            raise ReleaseError(f"two builds of the same commit differ: compare {one} and {kept}, for instance with diffoscope")
        digests.append(f"{one.suffix[1:]} {digest[:12]}")
    return f"two builds, {', '.join(digests)}"


def check_contents(release: Release) -> str:
    """The wheel has what a user needs, and nothing else."""
    files = sizes(release.files.wheel)
    wrong = list(unneeded(files, aiograd.__version__))
    if wrong:
        raise ReleaseError("\n".join(wrong))
    for name, count, size in by_folder(files):
        release.notes.append(f"{name:32} {count:4} files {size / 1e3:8,.1f} kB")
    return f"{len(files)} files, {sum(files.values()) / 1e6:.2f} MB unpacked"


def check_bill(release: Release) -> str:
    """The bill of materials in the wheel is valid CycloneDX."""
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    text = bill_of(release.files.wheel)
    problem = JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)
    if problem is not None:
        raise ReleaseError(f"the bill of materials is no valid CycloneDX 1.6: {str(problem).partition(chr(10))[0]}")
    return f"CycloneDX 1.6, {text.count('bom-ref') - 1} components"


def check_metadata(release: Release) -> str:
    """The package index will take the files and show the README."""
    run([str(BIN / "twine"), "check", "--strict", str(release.files.sdist), str(release.files.wheel)], ROOT)
    return "twine check --strict"


def check_workflows(release: Release) -> str:
    """The workflows for a public host have no known weakness."""
    run([str(BIN / "zizmor"), "--offline", "--strict-collection", "--persona=pedantic", "--no-progress", str(WORKFLOWS)], ROOT)
    actionlint = shutil.which("actionlint")
    if actionlint is None:
        return f"{len(list(WORKFLOWS.glob('*.yml')))} files, zizmor; no actionlint (go install github.com/rhysd/actionlint/cmd/actionlint@v1.7.12)"
    run([actionlint, *map(str, sorted(WORKFLOWS.glob("*.yml")))], ROOT)
    return f"{len(list(WORKFLOWS.glob('*.yml')))} files, zizmor and actionlint"


def check_installed(release: Release) -> str:
    """The wheel works alone in a new environment, and the tests of the sdist pass with it."""
    paths = () if release.all else installing.CHOSEN
    with installing.environment(release.files.wheel) as python:
        alone = installing.use_alone(python)
        return f"{alone}; {installing.run_tests(python, release.files, release.jobs, paths, release.out / 'tests.log')}"


Check = Callable[[Release], str]
#: by name, what `make release` runs
CHECKS: Mapping[str, Check] = {
    "commit": check_commit,
    "changes": check_changes,
    "surface": check_surface,
    "build": check_build,
    "same-bytes": check_same_bytes,
    "contents": check_contents,
    "bill": check_bill,
    "metadata": check_metadata,
    "workflows": check_workflows,
    "installed": check_installed,
}


def run_checks(release: Release, checks: Mapping[str, Check]) -> bool:
    """Run checks, with a row for each; returns whether all passed."""
    failed = []
    print(f"{'check':12} {'s':>6}  result", flush=True)
    for name, check in checks.items():
        began = time.perf_counter()
        try:
            text, mark = check(release), ""
        except ReleaseError as error:
            text, mark = str(error).replace("\n", f"\n{'':21}"), "FAILED: "
        except (ModuleNotFoundError, FileNotFoundError) as error:
            missing = error.name if isinstance(error, ModuleNotFoundError) else error.filename
            text, mark = f"{missing} is missing: `make release` installs it in .venv-release, or `pip install -e '.[release]'` in yours", "FAILED: "
        if mark:
            failed.append(name)
        print(f"{name:12} {time.perf_counter() - began:6.1f}  {mark}{text}", flush=True)
    for note in release.notes:
        print(f"    {note}")
    where = f"; the files are in {release.out}" if release.built is not None else ""
    print(f"FAILED: {', '.join(failed)}" if failed else f"{len(checks)} of {len(CHECKS)} checks have run, and none has failed{where}")
    return not failed
