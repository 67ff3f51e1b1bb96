"""Workers of two releases in two processes: they work together, or part by version and are told which to upgrade."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

import aiograd
from aiograd.distributed.rpc.frames import PROTOCOL_VERSIONS
from aiograd.errors import VersionMismatch
from aiograd.running import version
from tests.releases import builds
from tests.support import assert_raises

NEWEST = PROTOCOL_VERSIONS[1]
#: the folder with the package that is tested: the checkout, or what is installed
PACKAGES = Path(aiograd.__file__).parents[1]


def other_release(folder: Path, versions: tuple[int, int]) -> Path:
    """A copy of the package that speaks other versions of the protocol."""
    shutil.copytree(PACKAGES / "aiograd", folder / "aiograd")
    frames = folder / "aiograd" / "distributed" / "rpc" / "frames.py"
    before = frames.read_text()
    frames.write_text(before.replace(f"PROTOCOL_VERSIONS: Final = {PROTOCOL_VERSIONS}", f"PROTOCOL_VERSIONS: Final = {versions}"))
    assert frames.read_text() != before
    return folder


@pytest.mark.proc
@pytest.mark.parametrize(
    ("versions", "server_is_other", "older"), [((NEWEST - 1, NEWEST - 1), True, "server"), ((NEWEST + 1, NEWEST + 2), False, "server")]
)
def test_a_release_of_another_protocol_is_refused_and_the_older_side_is_named(
    tmp_path: Path, versions: tuple[int, int], server_is_other: bool, older: str
) -> None:
    other = other_release(tmp_path, versions)
    found = builds.together(*((other, PACKAGES) if server_is_other else (PACKAGES, other)))
    assert found["refused"] == "VersionMismatch"
    assert found["text"].endswith(f"upgrade aiograd where worker {older!r} runs"), found


@pytest.mark.proc
def test_two_of_one_release_call_differentiate_and_step() -> None:
    found = builds.together(PACKAGES, PACKAGES)
    assert found["call"] == [3.0, -6.0, 1.5]
    # twice x, times the weight 1 2 3, then momentum SGD at 0.5 twice: by hand
    assert found["loss"] == [-3.0, -13.5] and found["gradient"] == [0.0, 8.0, 5.0]
    assert found["weight"] == pytest.approx([1 - 1 - 1.9, 2 + 2 + 3.8, 3 - 0.5 - 0.95])


def test_releases_of_one_minor_number_work_together_and_the_older_of_two_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(version, "__version__", "1.10.2")
    for release in ("1.10.0", "1.10.2", "1.10.30rc1"):
        version.check_release("worker a", release)
    for release in ("1.9.7", "0.11.0", "odd"):
        assert_raises(VersionMismatch, f"worker a has aiograd {release}, .* 1.10.2; .*: upgrade worker a", version.check_release, "worker a", release)
    assert_raises(VersionMismatch, "upgrade the coordinator$", version.check_release, "worker a", "1.11.0")


def test_a_verdict_is_the_same_numbers_or_a_refusal_that_says_which_to_upgrade() -> None:
    expected = {"call": [3.0], "weight": [1.0]}
    refused = {"refused": "VersionMismatch", "text": "versions 4 to 4; upgrade aiograd where worker 'server' runs"}
    vague = {"refused": "VersionMismatch", "text": "versions 4 to 4; upgrade the older one"}
    assert builds.verdict(dict(expected), expected, told_which=True) == (True, "work together")
    assert builds.verdict({**expected, "weight": [2.0]}, expected, told_which=False)[0] is False
    assert builds.verdict(refused, expected, told_which=True) == (True, "refused: upgrade aiograd where worker 'server' runs")
    assert builds.verdict(vague, expected, told_which=True)[0] is False
    assert builds.verdict(vague, expected, told_which=False)[0] is True
    lost = builds.verdict({"refused": "WorkerLostError", "text": "gone"}, expected, told_which=False)
    assert lost == (False, "failed with WorkerLostError: gone")


def test_what_is_not_there_is_said() -> None:
    assert_raises(builds.NoSuchReleaseError, "git has no commit no-such-commit here; a shallow clone gets it", builds.package, "no-such-commit")
    assert_raises(builds.NoSuchReleaseError, "there is no wheel gone.whl", builds.package, "gone.whl")
