"""The rows of the matrix."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

#: extras that are small enough to be installed for a row each
EXTRAS = ("kernels", "otel", "metrics", "scipy", "einops", "demo")


class Environment(NamedTuple):
    """A Python with the package and what it needs."""

    #: its version; "": that of the Python that runs this
    python: str = ""
    lowest: bool = False
    extras: tuple[str, ...] = ()
    #: packages that are removed again
    without: tuple[str, ...] = ()


class Row(NamedTuple):
    """Tests in an environment."""

    name: str
    #: None: the one that runs this
    environment: Environment | None = None
    variables: Mapping[str, str] = {}
    #: tests that are left out, and why
    ignored: tuple[str, str] = ("", "")


#: of Pythons whose byte code it does not know
UNWATCHED = ("tests/compiler", "compiled functions watch CPython 3.11 to 3.13 and run eagerly elsewhere")
ROWS: tuple[Row, ...] = (
    Row("lowest", Environment(lowest=True)),
    Row("lowest with extras", Environment(lowest=True, extras=EXTRAS)),
    Row("highest", Environment(extras=EXTRAS)),
    *(Row(f"Python {version}", Environment(version, extras=EXTRAS)) for version in ("3.11", "3.12", "3.13")),
    Row("Python 3.14", Environment("3.14", extras=EXTRAS), ignored=UNWATCHED),
    Row("without numba", Environment()),
    Row("without uvloop", Environment(without=("uvloop",))),
    Row("development mode", None, {"PYTHONDEVMODE": "1"}),
    Row("optimized", None, {"PYTHONOPTIMIZE": "1"}),  # what `python -O` sets, for processes of tests too
    *(Row(f"hash seed {seed}", None, {"PYTHONHASHSEED": str(seed)}) for seed in (1, 2, 4242)),
)

#: rows and tests of the sample in .ci/run
SAMPLE = ("lowest with extras", "without uvloop", "development mode", "optimized")
SAMPLE_TESTS = (
    "tests/graph", "tests/compiler/test_powers.py", "tests/test_serialization.py", "tests/test_training_state.py", "tests/releases/test_states.py",
)  # fmt: skip
TESTS = (
    "tests/graph", "tests/engine", "tests/ops", "tests/tensors", "tests/nn", "tests/optim", "tests/parallel", "tests/pipeline", "tests/serving",
    "tests/coordination", "tests/compiler", "tests/distributed", "tests/releases", "tests/test_serialization.py", "tests/test_training_state.py",
    "tests/test_sparse.py", "tests/test_tracing.py", "tests/test_top_level.py",
)  # fmt: skip


class Result(NamedTuple):
    """The result of a row."""

    name: str
    #: versions, in words
    environment: str
    command: str
    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0
    failures: tuple[str, ...] = ()
    #: why it was not run
    left_out: str = ""


def table(results: list[Result]) -> str:
    """Results as a table of Markdown, then commands and failures."""
    lines = ["| row | environment | passed | failed | skipped | seconds |", "|---|---|---|---|---|---|"]
    for each in results:
        if each.left_out:
            lines.append(f"| {each.name} | left out: {each.left_out} | | | | |")
        else:
            lines.append(f"| {each.name} | {each.environment} | {each.passed} | {each.failed} | {each.skipped} | {each.seconds:.0f} |")
    lines += ["", *(f"{each.name}: {each.command}" for each in results if each.command)]
    lines += ["", *(f"{each.name}: {failure}" for each in results for failure in each.failures)]
    return "\n".join(lines).rstrip()


def described(versions: Mapping[str, Any]) -> str:
    """Versions in words: Python, then every package that is there."""
    return ", ".join(f"{name} {version}" for name, version in versions.items() if version)
