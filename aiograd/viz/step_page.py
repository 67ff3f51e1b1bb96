"""The page of a recorded pass: its graph, the step that is shown, and buttons and keys that go forward and back.

The page is one document that loads nothing. All text is written here, escaped; the script only says which part is shown and colours the graph.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import importlib.resources
import json
from collections.abc import Iterable, Sequence
from html import escape
from typing import Any, NamedTuple

TITLE = "A backward pass, step by step"
#: states of a node: the class in the style sheet, and the text of the legend
STATES = (
    ("run", "runs in this step"), ("ready", "ready, the thickest next"), ("waits", "waits for more"), ("done", "has run"), ("", "not reached"),
    ("leaf", "leaf"),
)  # fmt: skip
_CONTROLS = (("first", "First", "Home"), ("back", "Back", "←"), ("next", "Next", "→"), ("last", "Last", "End"), ("play", "Play", "Space"))


class Move(NamedTuple):
    """The changes that a step makes in the picture, by numbers of boxes and arrows."""

    box: int
    #: along which gradients go
    arrows: Sequence[int]
    #: ready after the step, the next one first
    ready: Sequence[int]
    #: boxes, how many gradients have arrived there, and how many they wait for
    counts: Sequence[tuple[int, int, int]]


class StepPicture(NamedTuple):
    """The picture of a graph, the numbers of the boxes of its leaves, and the changes of each step."""

    svg: str
    leaves: Sequence[int]
    moves: Sequence[Move]


def step_page(steps: Sequence[Any], seed: Any, picture: StepPicture) -> str:
    """The page of a pass as the text of an HTML document.

    Args:
        steps: `PassStep`s.
        seed: the `GradientSummary` that the pass began with.
        picture: the graph.
    """
    style, script = _file("step.css"), _file("step.js")
    parts = [_before(steps, seed), *(_step(step, len(steps)) for step in steps), _after(steps)]
    data = json.dumps([picture.leaves, picture.moves])
    buttons = "".join(f'<button id="{name}" type="button" title="{text} ({key})">{text}</button>' for name, text, key in _CONTROLS)
    legend = "".join(f'<li><i class="{name}"></i>{escape(text)}</li>' for name, text in STATES)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}"><meta name="color-scheme" content="light dark"><title>{TITLE}</title>
<style>{style}</style></head><body>
<header><h1>{TITLE}</h1><div class="controls">{buttons}<input id="slider" type="range" min="0" max="{len(parts) - 1}" value="0" aria-label="Step">
</div><p class="keys">Keys: ← → Home End, Space plays.</p></header>
<main><section id="graph"><ul class="legend">{legend}</ul><div class="scrolls" tabindex="0" aria-label="The graph">{picture.svg}</div></section>
<section id="said" aria-live="polite">{"".join(parts)}</section></main>
<script type="application/json" id="data">{data}</script><script>{script}</script></body></html>
"""


@functools.cache
def _file(name: str) -> str:
    return (importlib.resources.files("aiograd.viz") / "static" / name).read_text(encoding="utf-8")


def _before(steps: Sequence[Any], seed: Any) -> str:
    rows = _table([("gradient", seed)])
    first = f"<h3>Ready next</h3><ol><li>{escape(steps[0].title)}</li></ol>"
    return f"<article><h2>Before the first step</h2><p>The pass begins with the gradient of the loss.</p>{rows}{first}</article>"


def _after(steps: Sequence[Any]) -> str:
    failed = next((step.error for step in steps if step.error), "")
    if failed:
        return f'<article><h2>The pass has failed</h2><p class="bad">{escape(failed)}</p><p>No gradient is written.</p></article>'
    rows = [(step.title, step.accumulated) for step in steps if step.accumulated is not None]
    return f"<article><h2>The pass is over</h2><p>A backward now adds to each <code>.grad</code>, all in one step:</p>{_table(rows)}</article>"


def _step(step: Any, count: int) -> str:
    names = ["in" if len(step.inputs) == 1 else f"in {number}" for number in range(len(step.inputs))]
    out = [f'<article><h2><span class="number">{step.number}<span> of {count}</span></span> {escape(step.title)}</h2>']
    if step.code:
        out.append(f'<pre class="code">{escape(step.code)}</pre>')
    if step.place:
        out.append(f'<p class="soft">recorded at {escape(step.place)}</p>')
    several = f", the sum of {step.expected} gradients" if step.expected > 1 else ""
    out.append(f"<h3>Comes in{several}</h3>{_table(zip(names, step.inputs, strict=True))}")
    if step.hooks:
        out.append(f"<p>Hooks run: <code>{escape(', '.join(step.hooks))}</code></p>")
    if step.contributions:
        out.append(f"<h3>Goes out</h3>{_table(row for each in step.contributions for row in _contribution(each))}")
    if step.accumulated is not None:
        out.append(f"<h3>For <code>.grad</code></h3>{_table([('gradient', step.accumulated)])}")
    if step.note:
        out.append(f"<p>{escape(step.note)}</p>")
    if step.error:
        out.append(f'<p class="bad">{escape(step.error)}</p>')
    elif step.ready:
        out.append(f"<h3>Ready next</h3><ol>{''.join(f'<li>{escape(title)}</li>' for title in step.ready)}</ol>")
    return "".join([*out, "</article>"])


def _contribution(each: Any) -> Iterable[tuple[str, Any]]:
    yield f"to {each.target_text}", ...
    yield "gradient", each.gradient
    if each.expected > 1:
        yield f"sum, {each.arrived} of {each.expected}", each.total


def _table(rows: Iterable[tuple[str, Any]]) -> str:
    """Gradients with their names; a name with ``...`` is a heading."""
    out: list[str] = []
    for name, grad in rows:
        if grad is ...:
            out.append(f'<tr><th class="to" scope="rowgroup" colspan="2">{escape(name)}</th></tr>')
            continue
        kind, content = ("", "none") if grad is None else (f' <span class="soft">{escape(grad.kind)}</span>', escape(grad.content))
        out.append(f'<tr><th scope="row">{escape(name)}{kind}</th><td><pre>{content}</pre></td></tr>')
    return f'<div class="scrolls"><table>{"".join(out)}</table></div>'
