"""The messages where there is no device: each case, from a record of the search."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from aiograd import errors
from aiograd.cuda import discovery, loading
from aiograd.cuda.discovery import Probe, reason
from aiograd.running.cli.doctor import doctor
from tests.support import assert_raises

ROOT = Path(__file__).parents[2]
PACKAGES = (("numba-cuda", "0.30.4"), ("cuda-core", "1.2.2"), ("cuda-bindings", "13.5.0"))
OLDER = (*PACKAGES[:2], ("cuda-bindings", "12.9.4"))
FINE = {
    "packages": PACKAGES, "library_error": "", "driver_version": 13000, "missing_libraries": (), "init_status": 0, "device_count": 2,
}  # fmt: skip


def found(**changes: Any) -> Probe:
    return Probe(**{**FINE, **changes})


def test_all_is_well() -> None:
    assert reason(found()) is None
    assert reason(found(), 1) is None
    assert reason(Probe()) is None, "what was not looked at is no reason"
    assert reason(found(driver_version=13020)) is None, "a newer minor version"
    assert reason(found(driver_version=14000)) is None, "a newer driver"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"packages": (("numba-cuda", None),)}, ["looked for the package numba-cuda", "not installed", 'pip install "aiograd[cuda]"']),
        ({"packages": (PACKAGES[0], ("cuda-core", None))}, ["looked for the package cuda-core", "pip install"]),
        ({"packages": (PACKAGES[0], ("cuda-core", "0.5.1"))}, ["cuda-core 0.5.1 (needed: 1.0 or later)", "pip install"]),
        ({"numpy_without_row_stack": "2.5.2"}, ["numba-cuda 0.30.4", "numpy 2.5.2", 'pip install "numpy<2.5"']),
        ({"library_error": "libcuda.so.1: cannot open"}, ["libcuda.so.1: cannot open", "driver", "--gpus all", "NUMBA_ENABLE_CUDASIM=1"]),
        ({"driver_version": 12080}, ["made for CUDA 12.8", "cuda-bindings 13.5.0", "Update the driver", "numba-cuda[cu12]"]),
        ({"missing_libraries": ("nvJitLink",)}, ["toolkit's libraries nvJitLink", "CUDA_HOME", "pip install"]),
        ({"init_status": 803}, ["does not start", "803", "reinstall the driver"]),
        ({"init_status": 100, "visible": ""}, ["no device was found", "CUDA_VISIBLE_DEVICES is ''"]),
        ({"init_status": 12345}, ["12345"]),
        ({"device_count": 0}, ["reports no devices"]),
    ],
)
def test_what_is_missing_is_named_with_what_to_do(changes: dict[str, Any], words: list[str]) -> None:
    said = reason(found(**changes))
    assert said is not None
    for word in words:
        assert word in said


def test_numpy_is_held_against_numba_cuda_only_where_kernels_are_compiled() -> None:
    without = {"numpy_without_row_stack": "2.5.2"}
    assert reason(Probe(is_simulated=True, packages=PACKAGES[:1], **without)) is None, "the simulator compiles nothing"
    assert reason(found(packages=(("numba-cuda", "0.31.0"), *PACKAGES[1:]), **without)) is None
    assert reason(found(packages=(("numba-cuda", None),), **without)) == reason(found(packages=(("numba-cuda", None),))), "that comes first"


def test_the_search_asks_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    """On any machine: the answer comes before the driver's library is looked for."""
    monkeypatch.setattr(discovery, "is_simulated", lambda: False)
    monkeypatch.setattr(discovery, "_version", dict(PACKAGES).get)
    monkeypatch.setattr(discovery, "np", argparse.Namespace(__version__="2.5.2"))
    found = discovery.probe.__wrapped__()
    assert found.numpy_without_row_stack == "2.5.2" and found.library_error is None
    assert "do not fit each other" in str(reason(found))
    monkeypatch.setattr(discovery, "np", argparse.Namespace(__version__="2.4.6", row_stack=None))
    found = discovery.probe.__wrapped__()
    assert found.numpy_without_row_stack is None and found.library_error is not None, "it looks further"


def test_a_number_beyond_the_last_device() -> None:
    assert "cuda:0 to cuda:1" in str(reason(found(), 2))
    assert "device 1 was asked for, and there is only cuda:0" in str(reason(found(device_count=1), 1))
    hidden = reason(found(device_count=1, visible="3"), 1)
    assert hidden is not None and "CUDA_VISIBLE_DEVICES is '3'" in hidden
    assert "one simulated device" in str(reason(Probe(is_simulated=True, packages=PACKAGES[:1]), 1))
    assert reason(Probe(is_simulated=True, packages=PACKAGES[:1]), 0) is None


def test_the_public_questions_follow_the_record(monkeypatch: pytest.MonkeyPatch) -> None:
    for record, available, count, line in (
        (found(names=("Large", "Small")), True, 2, "cuda:0 Large, cuda:1 Small; driver for CUDA 13.0"),
        (found(device_count=1, names=("One",), driver_version=12090, packages=OLDER), True, 1, "cuda:0 One; driver for CUDA 12.9"),
        (Probe(is_simulated=True, packages=PACKAGES[:1]), True, 1, "simulated"),
        (found(library_error="not there"), False, 0, "none: looked for the CUDA driver's library"),
    ):
        monkeypatch.setattr(discovery, "probe", lambda record=record: record)
        assert discovery.is_available() is available
        assert discovery.device_count() == count
        assert discovery.describe().startswith(line)
        assert (discovery.why_not() is None) is available


def test_a_device_that_is_not_there_is_one_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "probe", lambda: found(library_error="libcuda.so.1: no such file"))
    assert_raises(errors.DeviceUnavailableError, r"cuda:0 cannot be used: looked for the CUDA driver's library libcuda.so.1", loading.make_device, 0)
    monkeypatch.setattr(discovery, "probe", found)
    assert_raises(errors.DeviceUnavailableError, "cuda:7 cannot be used: device 7 was asked for", loading.make_device, 7)


def test_a_module_that_cannot_be_imported() -> None:
    with pytest.raises(errors.DeviceUnavailableError, match=r"aiograd.cuda.nothing_of_the_kind cannot be imported.*pip install"):
        loading.load("nothing_of_the_kind")


def test_the_doctor_says_what_there_is(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(discovery, "probe", lambda: found(missing_libraries=("nvvm",)))
    assert doctor(argparse.Namespace()) == 0
    assert re.search(r"^CUDA +none: looked for the toolkit's libraries nvvm", capsys.readouterr().out, re.M)


@pytest.mark.proc
def test_looking_needs_no_numba() -> None:
    """A process that asks whether there is a device has imported neither numba nor NVIDIA's packages where the answer is no."""
    code = (
        "import sys, aiograd as ag\n"
        "from aiograd import cuda\n"
        "assert cuda.is_available() == (cuda.device_count() > 0) == (cuda.why_not() is None)\n"
        "loaded = [name for name in ('numba', 'numba_cuda') if name in sys.modules]\n"
        "assert not loaded, loaded\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, timeout=60)
