"""Which code paths `make cpus` tries, and what it makes of pytest's output. The runs themselves are for CI."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpus.__main__ import PARTS, ROOT, build_other_cpu, described, machine_of, main, probe, read_outcome
from tests.cpus.paths import Machine, paths
from tests.support import assert_raises

X86 = Machine("Linux", "x86_64", "openblas", "libscipy_openblas", "/usr/bin/cc", ["SSE42", "AVX", "AVX2", "X86_V3"], ["X86_V3"])


def names(machine: Machine, *, without: bool = False) -> list[str]:
    return [path.name for path in paths(machine) if bool(path.without) == without]


def test_a_cpu_takes_the_paths_of_its_forerunners() -> None:
    assert names(X86) == (
        "default prescott nehalem sandybridge haswell zen below-x86_v3 numba-generic oldest other-cpu threads-1 threads-2 threads-8".split()
    )
    assert names(X86, without=True) == ["skylakex", "sapphirerapids"]
    newer = X86._replace(features=[*X86.features, "X86_V4", "AVX512_SPR"], dispatched=["X86_V3", "X86_V4", "AVX512_SPR"])
    assert {"skylakex", "sapphirerapids", "below-x86_v4"} <= set(names(newer)) and not names(newer, without=True)
    chosen = {path.name: path.environment for path in paths(newer)}
    assert chosen["below-x86_v4"] == {"NPY_DISABLE_CPU_FEATURES": "X86_V4 AVX512_SPR"}
    assert chosen["oldest"] == {
        "OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "X86_V3 X86_V4 AVX512_SPR", "NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""
    }  # fmt: skip


def test_other_architectures_have_other_names() -> None:
    arm = X86._replace(architecture="arm64", features=["NEON", "ASIMD", "ASIMDHP"], dispatched=["ASIMDHP"])
    assert names(arm)[:5] == ["default", "armv8", "cortexa57", "neoversen1", "thunderx2t99"] and names(arm, without=True) == ["neoversev1"]
    mac = arm._replace(system="Darwin", blas="accelerate", prefix="", dispatched=[])
    assert names(mac) == ["default", "numba-generic", "oldest", "threads-1", "threads-2", "threads-8"]
    assert all("accelerate" in path.without or path.name == "other-cpu" for path in paths(mac) if path.without)
    assert names(Machine("Linux", "riscv64", "", "", "", [], [])) == ["default", "numba-generic", "oldest", "threads-1", "threads-2", "threads-8"]


def test_a_path_is_what_a_process_with_its_variables_takes() -> None:
    default = probe(sys.executable, {})
    machine = machine_of(default)
    for path in paths(machine):
        if path.name in ("oldest", "threads-8", "other-cpu") and not path.without:
            if path.name == "other-cpu":
                build_other_cpu(machine.compiler)
            found = probe(sys.executable, path.environment)
            assert described(found) != described(default), path.name
            assert (found["dispatched"] == []) == (path.name != "threads-8" or not machine.dispatched)
            assert path.name != "threads-8" or found["threads"] in (0, 8)
            assert (found["core"] == "of other_cpu.c") == (path.name == "other-cpu")


def test_what_pytest_says_is_read() -> None:
    said = "FAILED tests/a.py::test_b - assert 1 == 2\nERROR tests/c.py\n= short =\n1 failed, 12 passed, 3 skipped, 1 error in 3.21s (0:00:03)\n"
    outcome = read_outcome(said, 1, 3.0, "see out")
    assert (outcome.passed, outcome.failed, outcome.skipped) == (12, 2, 3)
    assert outcome.failures == ["tests/a.py::test_b - assert 1 == 2", "tests/c.py"]
    assert read_outcome("7 passed in 1s\n", 0, 1.0, "see out")[:3] == (7, 0, [])
    killed = read_outcome("....\n", -9, 1.0, "see out")
    assert killed.failed == 1 and killed.failures == ["pytest ended with status -9, see out"]


def test_the_parts_are_there() -> None:
    assert all((ROOT / place).exists() for places in PARTS.values() for place in places)


def test_unknown_paths_are_refused_and_known_ones_listed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.cpus.__main__.probe", lambda interpreter, environment: X86._asdict())
    assert_raises(SystemExit, None, main, ["--paths", "pentium"])
    assert "no code path is called pentium; there are default" in capsys.readouterr().err
    assert main(["--list"]) == 0
    assert "threads-8" in capsys.readouterr().out


DIFFERENCES = """
import math
import numpy as np
x = np.random.default_rng(0).standard_normal((9, 7))
turned = np.asfortranarray(x)
print(int((x @ x.T == turned @ x.T).all()), int(np.allclose(x @ x.T, np.einsum("ij,kj->ik", x, x), rtol=1e-13)), np.exp(0.0) == 1)
wanted = [[math.exp(each) for each in row] for row in x]
print((np.exp(x) != wanted).sum() > 10, np.allclose(np.exp(x), wanted, rtol=1e-15))
"""


@pytest.mark.proc
def test_the_other_cpu_is_right_and_has_other_bits() -> None:
    machine = machine_of(probe(sys.executable, {}))
    (other,) = [path for path in paths(machine) if path.name == "other-cpu"]
    if other.without:
        pytest.skip(other.without)
    build_other_cpu(machine.compiler)
    done = subprocess.run([sys.executable, "-c", DIFFERENCES], env={**os.environ, **other.environment}, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "1", "True", "True", "True"], done.stdout


@pytest.mark.proc
def test_a_run_ends_with_a_table(tmp_path: Path) -> None:
    test = tmp_path / "test_it.py"
    test.write_text("import os\ndef test_it(): assert os.environ['NUMBA_CPU_NAME'] == 'generic'\ndef test_wrong(): assert False\n")
    script = (
        "import os, sys; from tests.cpus import __main__ as cpus\n"
        f"cpus.PARTS['optim'] = [{str(test)!r}]; cpus.OUT = cpus.Path({str(tmp_path)!r})\n"
        "status = cpus.main(['--paths', 'numba-generic', '--parts', 'optim', '--jobs', '1'])\n"
        "assert 'NUMBA_CPU_NAME' not in os.environ\n"
        "sys.exit(status)\n"
    )
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NUMBA_CPU"))}
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, env=clean, capture_output=True, text=True, check=False)
    assert done.returncode == 1, done.stdout + done.stderr
    row, failure = done.stdout.partition("\ncode path")[2].splitlines()[1:]
    assert row.startswith("numba-generic ") and row.split()[-4:-1] == ["generic", "1", "1"]
    assert failure.startswith("numba-generic: ") and "test_wrong" in failure


@pytest.mark.parametrize("plugin", ["tests.cpus.threads", "tests.gpu.progress"])
def test_pytest_takes_plugins_that_are_helpers_of_the_tests(plugin: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", plugin, "-p", "no:cacheprovider", "--collect-only", "tests/test_words.py"]
    completed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert completed.returncode == 0, completed.stdout + completed.stderr
