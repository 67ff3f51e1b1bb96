"""NVIDIA's Python bindings on a driver made of C and ordinary memory, and that they have what is asked of them."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cuda_driver.fake_calls import FakeCalls
from tests.cuda_driver.toolkit import is_missing

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
BINDINGS = ROOT / "aiograd" / "cuda" / "driver" / "bindings.py"
COMPILER = shutil.which("cc") or shutil.which("gcc")


def _has_bindings() -> bool:
    return importlib.util.find_spec("cuda") is not None and importlib.util.find_spec("cuda.bindings") is not None


needs_bindings = pytest.mark.skipif(not _has_bindings(), reason="needs cuda-bindings: pip install 'aiograd[cuda]'")


def test_the_fake_has_what_the_real_one_has() -> None:
    """The fake that other tests run against has the calls that the driver makes, and no others."""
    offered = set(re.findall(r"^    def ([a-z]\w*)\(", BINDINGS.read_text(), re.M))
    assert offered <= set(dir(FakeCalls)), sorted(offered - set(dir(FakeCalls)))
    used = {name for file in ("hardware.py", "memory.py") for name in re.findall(r"calls\.([a-z]\w*)", (BINDINGS.parent / file).read_text())}
    assert "launch" in used and used <= offered, sorted(used - offered)


@needs_bindings
def test_every_call_exists() -> None:
    from cuda.bindings import driver

    asked = set(re.findall(r'"(cu[A-Z]\w+)"', BINDINGS.read_text())) | {"cuLaunchKernel", "cuEventQuery", "cuEventRecord", "CUstream"}
    assert len(asked) > 30
    assert [name for name in sorted(asked) if not hasattr(driver, name)] == []
    for name in ("MULTIPROCESSOR_COUNT", "COMPUTE_CAPABILITY_MAJOR", "COMPUTE_CAPABILITY_MINOR", "MAX_SHARED_MEMORY_PER_BLOCK"):
        assert hasattr(driver.CUdevice_attribute, f"CU_DEVICE_ATTRIBUTE_{name}")


@needs_bindings
def test_the_numbers_of_results_are_those_of_the_driver() -> None:
    from cuda.bindings.driver import CUresult

    from aiograd.cuda.driver import bindings

    assert int(CUresult.CUDA_ERROR_OUT_OF_MEMORY) == bindings.OUT_OF_MEMORY
    assert int(CUresult.CUDA_ERROR_INVALID_CONTEXT) == bindings.INVALID_CONTEXT
    assert int(CUresult.CUDA_ERROR_NOT_READY) == bindings.NOT_READY
    for name in ("ILLEGAL_ADDRESS", "LAUNCH_FAILED", "ECC_UNCORRECTABLE", "MISALIGNED_ADDRESS", "ILLEGAL_INSTRUCTION", "ASSERT", "LAUNCH_TIMEOUT"):
        assert int(getattr(CUresult, f"CUDA_ERROR_{name}")) in bindings.STICKY
    for name in ("INVALID_VALUE", "INVALID_HANDLE", "LAUNCH_OUT_OF_RESOURCES", "COOPERATIVE_LAUNCH_TOO_LARGE", "NOT_READY", "OUT_OF_MEMORY"):
        assert int(getattr(CUresult, f"CUDA_ERROR_{name}")) not in bindings.STICKY


@pytest.mark.proc
@needs_bindings
@pytest.mark.skipif(COMPILER is None, reason="needs a C compiler")
@pytest.mark.skipif(is_missing(), reason="needs the toolkit's libraries: pip install 'aiograd[cuda]'")
def test_the_whole_driver_on_a_made_up_device(tmp_path: Path) -> None:
    library = tmp_path / "libcuda.so.1"
    command = [str(COMPILER), "-O1", "-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", str(library), str(HERE / "fake_libcuda.c"), "-ldl"]
    subprocess.run(command, check=True, timeout=60)
    environment = {name: value for name, value in os.environ.items() if name not in ("NUMBA_ENABLE_CUDASIM", "CUDA_VISIBLE_DEVICES")}
    environment |= {"LD_LIBRARY_PATH": str(tmp_path), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-m", "tests.cuda_driver.against_fake_libcuda"], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0 and done.stdout.endswith("all is well\n"), done.stderr[-4000:]
