"""The SVG pictures of graphs, programs and timelines in one page, as notebooks and reports have them: none changes another, and text has its room."""

from __future__ import annotations

from typing import Any

import numpy as np

import aiograd as ag
from aiograd.pipeline import Costs, make_schedule, simulate
from tests.browser.geometry import COLLISIONS, OVERFULL

#: everything of a picture that a style can change
LOOKS = """() => [...document.querySelectorAll("svg")].map((picture) => [...picture.querySelectorAll("text, rect, path, line")].map((element) => {
  const style = getComputedStyle(element);
  const box = element.getBBox();
  const { fill, stroke, strokeWidth, fontSize, fontWeight, textAnchor } = style;
  return [element.tagName, fill, stroke, strokeWidth, fontSize, fontWeight, textAnchor, box.x, box.width].join(" ");
}))"""


def pictures() -> list[str]:
    """One picture of each kind, with everything in it that they can have."""
    network = ag.nn.Sequential(ag.nn.Linear(8, 16), ag.nn.ReLU(), ag.nn.LayerNorm(16), ag.nn.Linear(16, 4))
    output = network(ag.tensor(np.ones((5, 8), np.float32)))
    loss = (output * output).mean() + (output - 1.0).abs().sum() * network[0].weight.sum()
    compiled = ag.compile(lambda x: (x.tanh() * x + 2.0).sum())
    compiled(ag.tensor([1.0, 2.0], requires_grad=True))
    interleaved = make_schedule("Interleaved1F1B", ranks=4, microbatches=8, stages_per_rank=2)
    return [
        str(ag.viz.graph_svg(loss, names=network, edge_shapes=True, saved=True)),
        simulate(make_schedule("ZB-H1", ranks=4, microbatches=8), Costs(1, 1, 1, 0.1)).svg(),
        str(compiled.programs[0].svg()),
        simulate(interleaved, Costs(1, 1, 1, 0.1)).svg(width=420),
    ]


async def look_at_pictures(browser: Any, checks: Any, folder: Any) -> None:
    """Each picture looks as it does alone; labels and boxes keep apart."""
    print("pictures of graphs, programs and timelines")
    page = await browser.new_page(viewport={"width": 1280, "height": 900})
    drawn = pictures()
    alone = []
    for picture in drawn:
        await page.set_content(picture)
        alone += await page.evaluate(LOOKS)
    for order, name in ((drawn, "in one page"), (drawn[::-1], "in the other order")):
        await page.set_content("".join(f"<div>{picture}</div>" for picture in order))
        together = await page.evaluate(LOOKS)
        checks.check(together == (alone if order is drawn else alone[::-1]), f"pictures {name} look as each does alone")
    await page.screenshot(path=folder / "pictures.png", full_page=True)
    wrong = await page.evaluate(COLLISIONS, "svg.aiograd-graph")
    checks.check(not wrong, f"labels of arrows can be read {wrong[:4] or ''}")
    wrong = await page.evaluate(OVERFULL, "svg.aiograd-graph g g")
    checks.check(not wrong, f"text is within its box {wrong[:4] or ''}")
    await page.close()
