"""Every differentiable row in one of the lists of `rows.txt`: how its forward runs in a native program, and the reason where it is a call of numpy.

``python -m tests.compiler.native.test_row_lists`` writes the file anew.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.compiler.native import tiers
from tests.compiler.test_rows import functions_of
from tests.ops.test_rows_gradcheck import DIFFERENTIABLE

pytestmark = pytest.mark.skipif(tiers.native_problem() is not None, reason=str(tiers.native_problem()))

LISTS = Path(__file__).with_name("rows.txt")
#: how a row runs, the best first: one case that runs so is enough
ORDER = ("fused", "product", "loop", "view", "Python")


def mark_of(name: str) -> str:
    """How a row of float32 runs, and the reasons where it is Python."""
    kinds: set[str] = set()
    reasons: set[str] = set()
    for function, arguments, _ in functions_of(name, np.float32, (3, 40)):
        compiled = ag.compile(function, tier="native", on_break="eager")
        compiled(*[ag.tensor(value) for value in arguments])
        for program in compiled.programs:
            marks = program.marks()
            made = [value.name for statement in program.statements if statement.op.name == name for value in statement.outputs]
            kinds.update([marks.get(each, "Python").partition(" ")[0] or "fused" for each in made])
            if program.native is not None:
                reasons.update([reason.partition(": ")[2] or reason for reason in program.native.fallbacks])
    kind = next((each for each in ORDER if each in kinds), "Python")
    if kind != "Python":
        return kind
    return f"Python: {min(reasons, key=lambda reason: (len(reason), reason), default='its forward is one call from Python')}"


def lists() -> str:
    """The text of the file."""
    found: dict[str, list[str]] = {}
    for name in sorted(DIFFERENTIABLE):
        kind, _, reason = mark_of(name).partition(": ")
        found.setdefault(kind, []).append(f"{name} ({reason})" if reason else name)
    return "".join([f"{kind}: {len(found.get(kind, ()))}\n" + "".join([f"    {each}\n" for each in found.get(kind, ())]) for kind in ORDER])


def test_every_row_is_in_its_list() -> None:
    written = LISTS.read_text()
    assert lists() == written, "write the lists anew with `python -m tests.compiler.native.test_row_lists`"
    names = [line.split()[0] for line in written.splitlines() if line.startswith("    ")]
    assert sorted(names) == sorted(DIFFERENTIABLE)


if __name__ == "__main__":
    LISTS.write_text(lists())
