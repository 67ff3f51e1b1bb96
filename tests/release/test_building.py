"""The bill of materials, the contents of a wheel, and the messages where something is missing."""

from __future__ import annotations

import json
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from tests.release import checks, installing, sbom
from tests.release.building import ABOUT, BILL, PAGE, STEPS_PAGE, Built, Commit, ReleaseError, bill_of, by_folder, copy, run, sizes, unneeded, unpack
from tests.release.checks import CHECKS, Release, run_checks
from tests.support import assert_raises

INFO = "aiograd-1.0.dist-info"
WHEEL = [
    "aiograd/__init__.py", "aiograd/py.typed", "aiograd/nn/linear.pyi", f"{PAGE}/index.html", f"{PAGE}/main.js",
    f"{STEPS_PAGE}/step.css", "pytest_aiograd.py",
    *(f"{INFO}/{name}" for name in ABOUT),
]  # fmt: skip


# -------------------------------------------------------------------- the bill of materials


def bill(**changes: Any) -> dict[str, Any]:
    requires = ["numpy>=2.1", "uvloop>=0.21; sys_platform != 'win32'"]
    about: dict[str, Any] = {"licence": "MIT", "author": "the authors", "requires": requires, "extras": {}}
    found: dict[str, Any] = json.loads(sbom.bill("aiograd", "1.0", **about | changes))
    return found


def test_the_bill_names_the_project_and_what_it_requires() -> None:
    extras = {
        "cuda": ["numpy<2.5", "ml_dtypes>=0.5", "numba-cuda[cu13]>=0.30; sys_platform == 'linux'"],
        "all": ["aiograd[cuda]"],
        "dev": ["ruff>=0.17"],
    }
    found = bill(extras=extras)
    itself = found["metadata"]["component"]
    assert (itself["purl"], itself["licenses"]) == ("pkg:pypi/aiograd@1.0", [{"license": {"id": "MIT"}}])
    components = {each["name"]: (each["scope"], [line["value"] for line in each["properties"]]) for each in found["components"]}
    assert components == {
        "ml-dtypes": ("optional", ["ml_dtypes>=0.5; extra == 'cuda'"]),
        "numba-cuda": ("optional", ["numba-cuda[cu13]>=0.30; (sys_platform == \"linux\") and extra == 'cuda'"]),
        "numpy": ("required", ["numpy>=2.1", "numpy<2.5; extra == 'cuda'"]),
        "uvloop": ("required", ["uvloop>=0.21; sys_platform != 'win32'"]),
    }
    assert found["dependencies"] == [{"ref": itself["bom-ref"], "dependsOn": [each["bom-ref"] for each in found["components"]]}]


def test_the_bill_is_the_same_for_the_same_project_and_another_for_another() -> None:
    assert bill() == bill() and bill(epoch="0") == bill(epoch="0")
    assert bill(epoch="0")["metadata"]["timestamp"] == "1970-01-01T00:00:00+00:00" and "timestamp" not in bill()["metadata"]
    numbers = {bill(**changes)["serialNumber"] for changes in ({}, {"epoch": "0"}, {"requires": []}, {"author": "others"})}
    assert len(numbers) == 4
    assert sbom.NAME == BILL


# -------------------------------------------------------------------- the contents of a wheel


def test_a_wheel_with_what_a_user_needs() -> None:
    assert not list(unneeded(WHEEL, "1.0"))


@pytest.mark.parametrize(
    "name",
    [
        "tests/__init__.py", "docs/conf.py", "aiograd/tests/test_nn.py", "aiograd/nn/__pycache__/linear.py", "aiograd/nn/data.npz",
        "aiograd/nn/notes.md", "aiograd/nn/page.html", f"{PAGE}/main.ts", f"{PAGE}/deep/main.js", "conftest.py", f"{INFO}/licenses/other",
        "aiograd-0.9.dist-info/METADATA", "aiograd/notpy.typed",
    ],
)  # fmt: skip
def test_what_no_user_needs_is_named(name: str) -> None:
    assert list(unneeded([*WHEEL, name], "1.0")) == [f"{name} is in the wheel, and no user needs it"]


@pytest.mark.parametrize("name", ["aiograd/py.typed", "pytest_aiograd.py", f"{INFO}/sboms/{BILL}", f"{INFO}/licenses/LICENSE"])
def test_what_is_missing_is_named(name: str) -> None:
    assert list(unneeded({*WHEEL} - {name}, "1.0")) == [f"{name} is not in the wheel"]


def test_sizes_by_folder() -> None:
    files = {"aiograd/a.py": 1, "aiograd/nn/b.py": 10, "aiograd/nn/deep/c.py": 100, "pytest_aiograd.py": 5, f"{INFO}/licenses/LICENSE": 7}
    assert by_folder(files) == [("aiograd", 3, 111), ("aiograd/nn", 2, 110), (INFO, 1, 7), ("pytest_aiograd.py", 1, 5)]


def test_files_and_bill_of_a_wheel(tmp_path: Path) -> None:
    wheel = tmp_path / "a.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("aiograd/a.py", "12345")
    assert sizes(wheel) == {"aiograd/a.py": 5}
    assert_raises(ReleaseError, "a.whl has no sboms/sbom.cdx.json: see", bill_of, wheel)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr(f"{INFO}/sboms/{BILL}", "{}")
    assert bill_of(wheel) == "{}"


# -------------------------------------------------------------------- what is built, and what is missing


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of one commit."""
    root = tmp_path / "checkout"
    (root / "aiograd").mkdir(parents=True)
    (root / "aiograd" / "a.py").write_text("1")
    words = ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "-qm", "one"]
    for arguments in (["init", "-q"], ["add", "."], words):
        run(["git", *arguments], root)
    return root


@pytest.mark.proc
def test_the_files_of_a_commit_are_copied_without_what_lies_beside_them(checkout: Path, tmp_path: Path) -> None:
    assert not Commit.of(checkout).changed and Commit.of(checkout).epoch.isdigit()
    (checkout / "aiograd" / "left over.py").write_text("2")
    (checkout / "aiograd" / "a.py").write_text("3")
    assert Commit.of(checkout).changed == ("aiograd/a.py", '"aiograd/left over.py"')
    copy(checkout, tmp_path / "copy")
    assert {path.name: path.read_text() for path in (tmp_path / "copy").rglob("*") if path.is_file()} == {"a.py": "3"}


def test_what_is_no_checkout_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_raises(ReleaseError, "is no checkout: a release is built from a clone", Commit.of, tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert_raises(ReleaseError, "git is missing.*apt-get install git", Commit.of, tmp_path)


@pytest.mark.proc
def test_a_program_that_fails_is_quoted_with_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    script = "import os, sys; print(os.environ.get('PYTHONPATH'), os.environ['ADDED'], os.getcwd())"
    assert run(["python3", "-c", script], tmp_path, ADDED="x") == f"None x {tmp_path}\n"
    assert_raises(ReleaseError, r"`sh -c echo why; exit 3` ends with 3:\nwhy", run, ["sh", "-c", "echo why; exit 3"], tmp_path)
    log = tmp_path / "log"
    assert_raises(ReleaseError, f"ends with 3, see {log}:", run, ["sh", "-c", "echo why; exit 3"], tmp_path, log=log)
    assert log.read_text() == "why\n"


def test_a_table_has_a_row_for_each_check_and_says_what_is_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def fails(release: Release) -> str:
        raise ReleaseError("one\ntwo")

    def lacks(release: Release) -> str:
        import no_such_tool  # noqa: F401

        return ""

    release = Release(tmp_path, tmp_path / "out")
    assert not run_checks(release, {"first": lambda _: "fine", "second": fails, "third": lacks, "contents": CHECKS["contents"]})
    rows = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert rows == [
        "check s result", "first 0.0 fine", "second 0.0 FAILED: one", "two",
        "third 0.0 FAILED: no_such_tool is missing: `make release` installs it in .venv-release, or `pip install -e '.[release]'` in yours",
        "contents 0.0 FAILED: there is no build: see the rows above",
        "FAILED: second, third, contents",
    ]  # fmt: skip
    assert run_checks(release, {"first": lambda _: "fine"})


def test_a_tool_that_is_missing_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(checks, "BIN", tmp_path)
    wheel = tmp_path / "a.whl"
    release = Release(tmp_path, tmp_path / "out", built=Built(wheel, wheel))
    assert not run_checks(release, {name: CHECKS[name] for name in ("metadata", "workflows")})
    text = capsys.readouterr().out
    assert f"{tmp_path}/twine is missing: `make release` installs it" in text and f"{tmp_path}/zizmor is missing" in text


def test_changes_since_a_revision_need_a_fragment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks, "run", lambda words, folder: "aiograd/a.py\n" if words[:2] == ["git", "diff"] else f"## {ag.__version__}")
    wanted = "the package has changed since main, and there is no new fragment"
    assert_raises(ReleaseError, wanted, CHECKS["changes"], Release(tmp_path, tmp_path, since="main"))
    assert "is the latest section" in CHECKS["changes"](Release(tmp_path, tmp_path))
    monkeypatch.setattr(checks.fragments, "read", lambda: {"x.news.md": "Text"})
    assert_raises(ReleaseError, r"x.news.md: expected slug.type.md.*\nx.news.md: does not end", CHECKS["changes"], Release(tmp_path, tmp_path))


def test_a_version_without_a_section_and_without_fragments_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(checks.aiograd, "__version__", "0.1.0rc")
    monkeypatch.setattr(checks.fragments, "read", dict)
    assert_raises(ReleaseError, "has no `## 0.1.0rc`, and there are no fragments", CHECKS["changes"], Release(tmp_path, tmp_path))


# -------------------------------------------------------------------- the environment of the wheel


def test_a_package_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(pytest.UsageError, match="aiograd comes from .*, not from the wheel in"):
        installing.pytest_sessionstart(None)
    monkeypatch.setattr(ag, "__file__", f"{installing.sys.prefix}/lib/site-packages/aiograd/__init__.py")
    with pytest.raises(pytest.UsageError, match="pytest_aiograd comes from"):
        installing.pytest_sessionstart(None)


def test_the_tests_run_without_the_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sdist = tmp_path / "aiograd-1.0.tar.gz"
    (tmp_path / "aiograd-1.0" / "aiograd").mkdir(parents=True)
    (tmp_path / "aiograd-1.0" / "tests").mkdir()
    with tarfile.open(sdist, "w:gz") as archive:
        archive.add(tmp_path / "aiograd-1.0", "aiograd-1.0")
    assert sorted(path.name for path in unpack(sdist, tmp_path / "out").iterdir()) == ["aiograd", "tests"]
    ran: list[list[str]] = []
    last = "== 300 passed in 3 s =="

    def record(words: list[str], folder: Path, log: Path | None = None) -> str:
        ran.append(words)
        assert "pytest" not in words or [path.name for path in folder.iterdir()] == ["tests"]
        return f"...\n{last}\n"

    monkeypatch.setattr(installing, "run", record)
    built = Built(sdist, tmp_path / "a.whl")
    assert installing.run_tests(Path("python"), built, 3, ["tests/nn"], tmp_path / "log") == "300 passed in 3 s"
    install, test = ran
    assert install[-1] == f"{tmp_path / 'a.whl'}[dev]" and test[-1] == "tests/nn" and ["-n", "3"] == test[test.index("-n") :][:2]
    last = "no tests ran in 0.01s"
    assert_raises(ReleaseError, "no tests have run", installing.run_tests, Path("python"), built, 3, [], tmp_path / "log")


def test_the_tests_that_are_named_exist() -> None:
    assert all((checks.ROOT / name).exists() for name in (*installing.OF_SOURCES, *installing.CHOSEN))
