"""The page of a recorded pass: buttons, keys and slider go through it, what is shown is what was recorded, and it has room at every width."""

from __future__ import annotations

from typing import Any

import aiograd as ag
from aiograd.viz.picture import shortened
from tests.browser.geometry import COLLISIONS, OVERFULL

VIEWS = tuple((width, scheme) for width in (1280, 800, 400) for scheme in ("light", "dark"))
HOSTILE = "<img src=x onerror=\"window.broken=1\"><script>window.broken=1</script>'\""
#: the node that is coloured as running, the counts beside nodes, and the text of the step
SHOWN = """() => ({
  runs: [...document.querySelectorAll("#graph g.run text.t")].map((text) => text.textContent),
  counts: [...document.querySelectorAll("#graph .badge")].map((text) => text.textContent).filter(Boolean),
  flows: document.querySelectorAll("#graph path.a.run").length,
  said: document.querySelector("#said article:not([hidden])").innerText,
})"""
WIDE = """() => [...document.querySelectorAll("header, section, article:not([hidden]) *")]
  .filter((element) => !element.parentElement.closest(".scrolls") && element.getBoundingClientRect().right > document.documentElement.clientWidth + 1)
  .map((element) => element.outerHTML.slice(0, 60))"""


async def recorded() -> ag.viz.PassSteps:
    """A pass with sums, several inputs, and unfriendly names."""
    ag.seed(0)
    network = ag.nn.Sequential(ag.nn.Linear(3, 4), ag.nn.Tanh(), ag.nn.Linear(4, 2))
    x = ag.tensor([[1.0, -2.0, 0.5]], requires_grad=True)
    with ag.detect_anomaly():
        output = network(x)
        loss = (output * output).mean() + (output - 1.0).abs().sum() * network[0].weight.sum()
    return await ag.viz.step(loss, names=network, params={HOSTILE: x})


async def look_at_steps(browser: Any, checks: Any, folder: Any) -> None:
    """Go through a pass in every way, and look at it at every width."""
    print("a pass, step by step")
    steps = await recorded()
    path = folder / "step.html"
    steps.save(path)
    page = await browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
    errors: list[str] = []
    asked: list[str] = []
    page.on("console", lambda message: errors.append(message.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: asked.append(request.url))
    await page.goto(path.resolve().as_uri())

    async def right(number: int) -> bool:
        shown = await page.evaluate(SHOWN)
        if not 1 <= number <= len(steps):
            return not shown["runs"] and ("Before the first step" if number < 1 else "The pass is over") in shown["said"]
        step = steps[number - 1]
        sums = [each for each in step.contributions if each.expected > 1]
        before = [each for other in steps[:number] for each in other.contributions if each.expected > 1]
        counts = {each.target_step: f"{each.arrived}/{each.expected}" for each in before}
        return (
            shown["runs"] == [shortened(step.title)]
            and f"{number} of {len(steps)}" in " ".join(shown["said"].split())
            and sorted(shown["counts"]) == sorted(counts.values())
            and shown["flows"] == len(step.contributions)
            and all(line.strip() in shown["said"] for each in sums for line in each.total.content.split("\n"))
        )

    found = [await right(0)]
    for number in range(1, len(steps) + 2):
        await page.keyboard.press("ArrowRight")
        found.append(await right(number))
    checks.check(all(found), f"the right arrow shows each of {len(steps)} steps as it was recorded {found if not all(found) else ''}")
    checks.check(await page.is_disabled("#next") and await page.is_disabled("#last"), "at the end there is no next step")
    end = len(steps) + 1
    for act, number in (
        (page.click("#first"), 0), (page.click("#next"), 1), (page.click("#next"), 2), (page.click("#back"), 1), (page.click("#last"), end),
        (page.keyboard.press("Home"), 0), (page.keyboard.press("End"), end), (page.keyboard.press("ArrowLeft"), end - 1),
        (page.fill("#slider", "3"), 3), (page.press("#slider", "ArrowRight"), 4), (page.click("#graph g[data-step='2']"), 2),
    ):  # fmt: skip
        await act
        checks.check(await right(number), f"step {number} is shown")
    await page.locator("#next").focus()
    await page.keyboard.press("Space")
    checks.check(await right(3), "Space on a button presses it")
    await page.locator("#slider").focus()
    await page.keyboard.press("Space")
    await page.wait_for_selector("#said article:nth-child(5):not([hidden])")
    await page.keyboard.press("Space")
    checks.check(await page.get_attribute("#play", "aria-pressed") == "false", "Space plays, and stops")
    checks.check(await page.evaluate("window.broken") is None and await page.locator("img").count() == 0, "no name becomes an element or runs")
    await page.keyboard.press("Home")
    for _ in range(7):
        await page.keyboard.press("ArrowRight")
    for width, scheme in VIEWS:
        await page.set_viewport_size({"width": width, "height": 900})
        await page.emulate_media(color_scheme=scheme)
        wrong = await page.evaluate(WIDE)
        checks.check(not wrong, f"everything has room at {width}-{scheme} {wrong[:3] or ''}")
        await page.screenshot(path=folder / f"step-{width}-{scheme}.png")
    wrong = await page.evaluate(COLLISIONS, "svg.aiograd-graph") + await page.evaluate(OVERFULL, "svg.aiograd-graph g g")
    checks.check(not wrong, f"text is within its box {wrong[:4] or ''}")
    await page.set_content(f"<p>a notebook</p>{steps._repr_html_()}")
    frame = page.frame_locator("iframe")
    await frame.locator("#next").click()
    checks.check("1 of" in await frame.locator("#said article:not([hidden])").inner_text(), "it steps in the frame of a notebook")
    checks.check(not errors, f"no console errors {errors[:3] or ''}")
    foreign = [url for url in asked if not url.startswith(("file:", "about:"))]
    checks.check(not foreign, f"no request leaves the page {foreign[:3] or ''}")
    await page.close()
