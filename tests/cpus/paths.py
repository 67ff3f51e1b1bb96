"""Which code paths a CPU has, and the environment variables that choose each.

Note [Code paths]
    What decides the bits of a floating-point result is not the name of the CPU: it is the BLAS kernels (OpenBLAS picks a set when it is loaded), the
    loops of numpy (one set per level of instructions), the instructions that numba compiles for, and the number of BLAS threads, which split
    sums. Each of these can be set on one machine, downwards: instructions that the CPU lacks cannot be tried. Their stand-in is a CPU
    that nobody has (``other_cpu.c``), whose kernels differ from each other more than any real ones do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

#: where the whole output goes, and what is built
OUT = Path(__file__).parents[2] / "out" / "cpus"
#: ``other_cpu.c``, compiled
OTHER_CPU = OUT / "other_cpu.so"

#: OpenBLAS's kernel sets, oldest first, by architecture: name -> features of which the CPU has to have one, as numpy calls them (none: always there)
CORES: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "x86_64": {
        "Prescott": (), "Nehalem": ("SSE42",), "Sandybridge": ("AVX",), "Haswell": ("AVX2",), "Zen": ("AVX2",), "SkylakeX": ("AVX512_SKX", "X86_V4"),
        "SapphireRapids": ("AVX512_SPR",),
    },
    "aarch64": {"ARMV8": (), "CORTEXA57": (), "NEOVERSEN1": ("ASIMDHP",), "THUNDERX2T99": ("ASIMDHP",), "NEOVERSEV1": ("SVE",)},
}  # fmt: skip
#: other names of them
ARCHITECTURES = {"amd64": "x86_64", "arm64": "aarch64"}
THREADS = (1, 2, 8)
#: what `tests.cpus.threads` reads
THREADS_VARIABLE = "AIOGRAD_TEST_BLAS_THREADS"


class Machine(NamedTuple):
    """The paths to choose from."""

    system: str
    architecture: str
    #: which BLAS numpy calls, as threadpoolctl names it ("" where it does not know it), and how its file's name begins
    blas: str
    prefix: str
    #: of C, "" where there is none
    compiler: str
    #: what numpy has found in the CPU
    features: Collection[str]
    #: those that numpy has loops of its own for and that are in use, lowest first
    dispatched: Sequence[str]


class CodePath(NamedTuple):
    """Environment variables that choose a code path; `without` says why this machine has not got it."""

    name: str
    environment: Mapping[str, str]
    without: str = ""


def paths(machine: Machine) -> list[CodePath]:
    """Every code path, the machine's own first, then those that it can be told to take, and those that it lacks with the reason."""
    found = [CodePath("default", {})]
    cores = CORES.get(ARCHITECTURES.get(machine.architecture.lower(), machine.architecture), {})
    oldest: dict[str, str] = {}
    for core, needs in cores.items():
        chosen = {"OPENBLAS_CORETYPE": core}
        if machine.blas != "openblas":
            without = f"numpy's BLAS is {machine.blas or 'unknown'}, not OpenBLAS"
        else:
            without = "" if not needs or set(needs) & set(machine.features) else f"the CPU lacks {needs[0]}"
            oldest = oldest or chosen
        found.append(CodePath(core.lower(), chosen, without))
    for i, feature in enumerate(machine.dispatched):
        found.append(CodePath(f"below-{feature.lower()}", {"NPY_DISABLE_CPU_FEATURES": " ".join(machine.dispatched[i:])}))
    generic = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    found.append(CodePath("numba-generic", generic))
    baseline = {"NPY_DISABLE_CPU_FEATURES": " ".join(machine.dispatched)} if machine.dispatched else {}
    found.append(CodePath("oldest", {**oldest, **baseline, **generic}))
    can_be_replaced = machine.system == "Linux" and machine.prefix == "libscipy_openblas"
    without = "" if machine.compiler and can_be_replaced else "it takes Linux, a C compiler and the OpenBLAS of numpy's wheels"
    found.append(CodePath("other-cpu", {"LD_PRELOAD": str(OTHER_CPU), **baseline}, without))
    # OpenBLAS takes no more threads from its variable than there are cores: the rest is done in the process
    found += [CodePath(f"threads-{n}", {"OPENBLAS_NUM_THREADS": str(n), THREADS_VARIABLE: str(n)}) for n in THREADS]
    return found
