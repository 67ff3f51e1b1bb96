"""Runs programs below valgrind and makes counts of passes of what it writes."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tests.counts.programs import LINK, NAMES, PAIRS

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "counts"
#: changes by more than this share are shown, and are an error
LIMIT = 0.03
VARIABLES = {
    "PYTHONHASHSEED": "0",
    "OPENBLAS_NUM_THREADS": "1",
    "OPENBLAS_CORETYPE": "Haswell",  # valgrind knows no AVX-512
    "AIOGRAD_KERNELS": "numpy",
}


class Change(NamedTuple):
    """A count beside that of the file; None where there is none."""

    name: str
    before: float | None
    after: float | None

    @property
    def share(self) -> float:
        """By how much of the former count it is more."""
        return self.after / self.before - 1 if self.before and self.after is not None else 0.0

    @property
    def is_beyond(self) -> bool:
        """True if it is to be looked at: more or less by more than `LIMIT`, or new, or gone."""
        return self.before is None or self.after is None or abs(self.share) > LIMIT


def missing() -> str:
    """The tool that is missing for counting on this machine; "" if none is."""
    if shutil.which("valgrind") is None:
        return "valgrind, which `apt-get install valgrind` brings"
    if compiler() is None:
        return "a C compiler (cc)"
    done = subprocess.run([str(compiler()), "-E", "-"], input="#include <valgrind/callgrind.h>\n", text=True, capture_output=True, check=False)
    return "" if done.returncode == 0 else "valgrind/callgrind.h, which comes with valgrind on Debian"


def compiler() -> str | None:
    """The C compiler."""
    return shutil.which("cc") or shutil.which("gcc")


def environment() -> dict[str, str]:
    """The versions and settings, beside the code, that counts depend on."""
    versions = {name: importlib.metadata.version(name) for name in ("numpy", "cryptography")}
    return {"machine": platform.machine(), "Python": platform.python_version(), **versions}


def count(names: Sequence[str] = NAMES) -> dict[str, float]:
    """Instructions of one pass, by name.

    Raises:
        RuntimeError: a program failed; says where its output is.
    """
    shutil.rmtree(OUT, ignore_errors=True)
    OUT.mkdir(parents=True)
    library, log = OUT / "marks.so", OUT / "log"
    subprocess.run([str(compiler()), "-O1", "-shared", "-fPIC", "-o", str(library), str(Path(__file__).with_name("marks.c"))], check=True)
    command = ["valgrind", "--tool=callgrind", "--instr-atstart=no", f"--callgrind-out-file={OUT / 'counted'}"]
    command += [sys.executable, "-m", "tests.counts.programs", str(library), *names]
    with log.open("w") as output:
        done = subprocess.run(command, check=False, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env={**os.environ, **VARIABLES})
    if done.returncode:
        raise RuntimeError(f"counting below valgrind ended with status {done.returncode}, see {log}")
    return passes(path.read_text(errors="replace") for path in OUT.glob("counted.*"))


def passes(dumps: Iterable[str]) -> dict[str, float]:
    """Counts of one pass from what callgrind wrote for each count, see Note [N and 2 N] in `programs`.

    Raises:
        ValueError: counts are missing.
    """
    found: dict[str, dict[int, dict[int, int]]] = defaultdict(lambda: defaultdict(dict))
    for text in dumps:
        named = re.search(r"^desc: Trigger: Client Request: (.+): (\d+) (\d+)$", text, re.MULTILINE)
        total = re.search(r"^totals: (\d+)$", text, re.MULTILINE)
        if named and total:
            found[named[1]][int(named[2])][int(named[3])] = int(total[1])
    counts = {name: _median(name, found[name]) for name in NAMES if name in found}
    link, longer, shorter, links = LINK
    if longer in counts and shorter in counts:
        counts[link] = round((counts[longer] - counts[shorter]) / links)
    return counts


def _median(name: str, pairs: Mapping[int, Mapping[int, int]]) -> float:
    if len(pairs) != PAIRS or any(len(pair) != 2 for pair in pairs.values()):
        raise ValueError(f"{name}: expected {PAIRS} pairs of counts, found {dict(pairs)}")
    return round(statistics.median((pair[max(pair)] - pair[min(pair)]) / min(pair) for pair in pairs.values()))


def changes(before: Mapping[str, float], after: Mapping[str, float]) -> list[Change]:
    """Every count beside the one before, in the order of the new ones; those that are gone come last."""
    return [Change(name, before.get(name), after.get(name)) for name in (*after, *(name for name in before if name not in after))]


def table(found: Iterable[Change]) -> str:
    """Counts in thousands, beside those of the file."""
    lines = [f"{'instructions of a pass, thousands':<40} {'kept':>10} {'now':>10} {'change':>8}"]
    for each in found:
        numbers = (f"{value / 1000:.1f}" if value is not None else "-" for value in (each.before, each.after))
        share = f"{each.share:+.2%}" if each.before and each.after is not None else "-"
        lines.append("{:<40} {:>10} {:>10} {:>8}{}".format(each.name, *numbers, share, " !" if each.is_beyond else ""))
    return "\n".join(lines)


def document(counts: Mapping[str, float]) -> dict[str, Any]:
    """The content of the file of kept counts."""
    return {"environment": environment(), "counts": dict(counts)}
