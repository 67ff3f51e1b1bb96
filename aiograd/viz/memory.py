"""The memory that a program holds for its backward, drawn over the steps of the backward."""

from __future__ import annotations

from collections.abc import Sequence

from aiograd.compiler.program import Program
from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.running.caller import type_found
from aiograd.running.svg import svg_document, svg_text
from aiograd.viz.svg import SvgText

WIDTH, HEIGHT = 560.0, 220.0
#: left, top, right, bottom
MARGINS = (70.0, 34.0, 16.0, 34.0)
_CLASS = "aiograd-memory"
_RULES = (
    "text{font-size:11px;fill:#57606a}", ".full{fill:#eaeef2;stroke:#8c959f}", ".live{fill:#b6d7f5;stroke:#0969da}", ".again{fill:#bc6a2a}",
    ".limit{stroke:#cf222e;stroke-dasharray:5 4}", ".axis{stroke:#8c959f}",
)  # fmt: skip


def memory_svg(program: Program) -> SvgText:
    """Live bytes over the backward of a program, with its memory budget and without, as an SVG picture.

    From left to right the steps of the backward, the first one at the left; a mark below a step says that values are computed again before it. The
    dashed line is the budget.

    Args:
        program: from ``compiled.programs``, of a function that was compiled with ``memory_budget``.

    Returns:
        The text of the SVG, as of `graph_svg`.

    Raises:
        ArgumentError: the program has no memory budget. ArgumentTypeError: it is no program.

    >>> f = ag.compile(lambda x: x.exp().sin().tanh().sum(), memory_budget=0.9)
    >>> loss = f(ag.ones(100, requires_grad=True))
    >>> ag.viz.memory_svg(f.programs[0]).startswith("<svg")
    True
    """
    if not isinstance(program, Program):
        raise ArgumentTypeError(f"memory_svg(): expected a program, of `compiled.programs`, found {type_found(program)}")
    plan = program.memory_plan
    if plan is None:
        raise ArgumentError("memory_svg(): the program has no memory budget; compile the function with memory_budget=, a share above 0 and at most 1")
    left, top, right, bottom = MARGINS
    step = (WIDTH - left - right) / max(len(plan.live), 1)
    scale = (HEIGHT - top - bottom) / max(plan.full, 1)
    ground = HEIGHT - bottom

    def area(kind: str, held: Sequence[int]) -> str:
        points = [f"{left:.1f},{ground:.1f}"]
        for number, amount in enumerate(held):
            y = ground - amount * scale
            points += [f"{left + number * step:.1f},{y:.1f}", f"{left + (number + 1) * step:.1f},{y:.1f}"]
        points.append(f"{left + len(held) * step:.1f},{ground:.1f}")
        return f'<polygon class="{kind}" points="{" ".join(points)}"/>'

    def level(amount: float, text: str) -> list[str]:
        y = ground - amount * scale
        return [f'<text x="{left - 6:.1f}" y="{y + 4:.1f}" text-anchor="end">{svg_text(text)}</text>']

    limit = ground - plan.budget * plan.full * scale
    out = [area("full", plan.live_full), area("live", plan.live)]
    out.append(f'<line class="limit" x1="{left:.1f}" x2="{WIDTH - right:.1f}" y1="{limit:.1f}" y2="{limit:.1f}"/>')
    for number, again in enumerate(plan.again_before):
        if again:
            out.append(f'<rect class="again" x="{left + number * step:.1f}" y="{ground + 2:.1f}" width="{max(step - 0.5, 0.5):.1f}" height="4"/>')
    out.append(f'<line class="axis" x1="{left:.1f}" x2="{WIDTH - right:.1f}" y1="{ground:.1f}" y2="{ground:.1f}"/>')
    out += [*level(plan.full, _amount(plan.full)), *level(plan.budget * plan.full, _amount(plan.budget * plan.full)), *level(0, "0")]
    out.append(f'<text x="{left:.1f}" y="18">{svg_text(f"Bytes held for the backward: {_amount(plan.peak)} of {_amount(plan.full)}")}</text>')
    out.append(f'<text x="{left:.1f}" y="{HEIGHT - 10:.1f}">steps of the backward; marks: values computed again before the step</text>')
    return SvgText(svg_document(_CLASS, f"Memory of a program: {len(plan.live)} steps", (WIDTH, HEIGHT), _RULES, out))


def _amount(amount: float) -> str:
    for unit in ("B", "kB", "MB"):
        if amount < 1000:
            return f"{amount:.0f} {unit}"
        amount /= 1000
    return f"{amount:.1f} GB"
