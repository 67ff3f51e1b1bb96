"""The built documents at three widths: nothing runs out of the page, no word is broken, and each error under Raises has an entry of its own."""

from __future__ import annotations

from pathlib import Path
from typing import Any

DOCUMENTS = Path("out/docs")
WIDTHS = (1280, 800, 400)
#: pages of which screenshots are kept: long lines of code, wide tables, signatures, diagrams
SHOWN = ("reference/distributed", "reference/passes", "guarantees", "guides/monitoring", "guides/performance", "explanation/paths")

#: what runs out: the page, lines of code, tables, and diagrams that do not say that they scroll
RUNS_OUT = """() => {
  const found = [];
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > room) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const element of document.querySelectorAll(".content pre, .content .table-wrapper, .content dt, .content p, .sequence-box")) {
    const note = element.nextElementSibling;
    if (note?.matches(".scrolls") && getComputedStyle(note).display !== "none") continue;
    const text = element.textContent.trim().slice(0, 50);
    if (element.scrollWidth > element.clientWidth + 1) found.push(`${element.tagName} ${text}: ${element.scrollWidth} in ${element.clientWidth}`);
    if (element.getBoundingClientRect().right > room + 1) found.push(`${element.tagName} ${text} sticks out`);
  }
  return found;
}"""

#: words that go on in the next line without a separator before
BROKEN = """() => {
  const found = [];
  const walker = document.createTreeWalker(document.querySelector(".content"), NodeFilter.SHOW_TEXT);
  const range = document.createRange();
  for (let node = walker.nextNode(); node; node = walker.nextNode()) {
    if (!node.parentElement.offsetParent) continue;
    range.selectNodeContents(node);
    if (new Set([...range.getClientRects()].map((box) => Math.round(box.top / 4))).size < 2) continue;
    for (const word of node.textContent.matchAll(/[A-Za-z0-9]{2,}/g)) {
      range.setStart(node, word.index);
      range.setEnd(node, word.index + word[0].length);
      if (new Set([...range.getClientRects()].filter((box) => box.width).map((box) => Math.round(box.top / 4))).size > 1) found.push(word[0]);
    }
  }
  return found;
}"""

#: entries under Raises in which another one begins
RUN_TOGETHER = r"""() => [...document.querySelectorAll("dl.field-list > dt")].filter((name) => name.textContent.startsWith("Raises"))
  .flatMap((name) => [...name.nextElementSibling.querySelectorAll("li, :scope > p")].map((entry) => entry.textContent)
    .filter((text) => /[.;] (When awaited|[A-Z]\w*(Error|Unknown|Mismatch)(, [A-Z]\w*)*): /.test(text)))"""


async def look_at_documents(browser: Any, checks: Any, folder: Path) -> None:
    """Every page, as wide as a screen, a tablet and a telephone."""
    print("documents")
    pages = sorted(path for path in DOCUMENTS.rglob("*.html") if not {"_modules", "_static"} & {*path.relative_to(DOCUMENTS).parts})
    checks.check(len(pages) > 40, f"{len(pages)} pages are built")
    wrong: dict[str, list[str]] = {"run out of the page": [], "break inside a word": [], "run into the entry before, under Raises": []}
    raised = 0
    page = await browser.new_page()
    for path in pages:
        name = str(path.relative_to(DOCUMENTS).with_suffix(""))
        await page.goto(path.resolve().as_uri())
        for width in WIDTHS:
            await page.set_viewport_size({"width": width, "height": 1400})
            for expression, found in ((RUNS_OUT, "run out of the page"), (BROKEN, "break inside a word")):
                wrong[found] += [f"{name} at {width} px: {each}" for each in await page.evaluate(expression)]
            if name in SHOWN:
                for scheme in ("light", "dark"):
                    await page.emulate_media(color_scheme=scheme)
                    await page.screenshot(path=folder / f"document-{name.replace('/', '-')}-{width}-{scheme}.png")
        raised += await page.locator("dl.field-list > dt", has_text="Raises").count()
        wrong["run into the entry before, under Raises"] += [f"{name}: {each}" for each in await page.evaluate(RUN_TOGETHER)]
    for what, places in wrong.items():
        checks.check(not places, f"none of them {what} {places[:4] or ''}")
    checks.check(raised > 500, f"{raised} sections on what is raised")
    await page.close()
