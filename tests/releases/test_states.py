"""Files of every release that is kept in ``data`` load, to the bit, and are gone on from."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import aiograd as ag
from tests.releases import checks
from tests.releases.states import DATA, FILES, describe, differences, values

RELEASES = sorted(folder.name for folder in DATA.iterdir())

@pytest.mark.one_loop
@pytest.mark.parametrize("check", [checks.files_have_what_was_told, checks.training_goes_on, checks.log_serves])
@pytest.mark.parametrize("release", RELEASES)
async def test_states_of_a_release_are_read(release: str, check: Callable[[Path, Path], Any], tmp_path: Path) -> None:
    await check(DATA / release, tmp_path)


@pytest.mark.proc
@pytest.mark.parametrize("release", RELEASES)
async def test_checkpoints_of_workers_are_taken_up(release: str, tmp_path: Path) -> None:
    await checks.checkpoints_are_taken_up(DATA / release, tmp_path)


def test_states_of_this_release_are_kept() -> None:
    assert ag.__version__ in RELEASES, "python -m tests.releases.states writes them"


def test_what_is_told_is_the_state_to_the_bit(tmp_path: Path) -> None:
    state = values()
    ag.save(state, tmp_path / "it")
    told = json.loads(json.dumps(describe(state)))
    assert not [*differences(told, describe(ag.load(tmp_path / "it")))]
    state["arrays"]["float32"] = ag.nextafter(state["arrays"]["float32"], ag.tensor(0.0))
    state["scalar"] = ag.tensor(0.0)
    state["plain"][6] = [1, (2.5,)]
    assert [each.partition(" is ")[0] for each in differences(told, describe(state))] == [".'arrays'.'float32'", ".'scalar'", ".'plain'[6]"]


def test_a_later_release_may_keep_more_and_nothing_less() -> None:
    told = describe({"lr": 0.1, "state": [1]})
    assert not [*differences(told, describe({"lr": 0.1, "foreach": None, "state": [1]}))]
    assert [*differences(told, describe({"state": [1, 2]}))] == [".'lr' is missing", ".'state' has 2 items, expected 1"]


def test_a_file_that_is_not_what_was_told_is_noticed(tmp_path: Path) -> None:
    (release,) = RELEASES[-1:]
    told = checks.told(DATA / release)
    for name in FILES:
        (tmp_path / f"{name}.safetensors").write_bytes((DATA / release / f"{name}.safetensors").read_bytes())
    told["replicas"], told["stages"] = told["stages"], told["replicas"]
    (tmp_path / "told.json").write_text(json.dumps(told))
    checks.load(tmp_path, "values")
    with pytest.raises(AssertionError, match=r"replicas: \d+ differences"):
        checks.load(tmp_path, "replicas")
