"""The panel of waits with reports that the test makes up: a deadlock, a loop that is held up, more waits than can be drawn; and clicks."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from aiograd import distributed as dist
from aiograd.dashboard.board import Board
from aiograd.dashboard.wait_board import MOST_BOXES, wait_rows
from tests.browser.arranged import arranged_page, cluster, look_at_widths, passed

LINE = "a-package-with-a-long-name/training/loops/optimizer_of_the_whole_network.py:1234"


def waiting(count: int, *waits: dist.Wait, held: tuple[dist.HeldLoop, ...] = ()) -> Board:
    """A cluster whose workers report these waits; the first one also tells of loops that are held up."""
    board = passed(cluster(count, False), 2, 3)
    for name in list(board.workers)[:count]:
        mine = dist.WaitReport(tuple(wait for wait in waits if wait.worker == name), held if name == board.here else ())
        board._waits.arrived(name, wait_rows(mine))
    return board


def deadlock() -> Board:
    """Two calls that wait for each other, a pass that waits for one of them, and a loop that is held up."""
    return waiting(
        4,
        dist.Wait("left", "call both 7", "right", "call back 9", "both", "service.py:41", 12.5, "answer"),
        dist.Wait("right", "call back 9", "left", "call both 7", "back", "service.py:57", 12.25, "answer"),
        dist.Wait("driver", "pass 3", "left", "call both 7", "RecvNode", LINE, 31.0, "gradient of 3 × 4 float32 of an edge with a long name"),
        dist.Wait("driver", "pass 4", "", "", "executor", LINE, 2.0),
        held=(dist.HeldLoop("a-worker-with-a-long-name", 3.25, LINE),),
    )


def crowd() -> Board:
    """More works that wait than can be drawn, in a chain over eight workers, with a cycle at its end."""
    names = list(cluster(8, False).workers)
    works = [(names[i % 8], f"pass {i} of a run of which the name is long") for i in range(60)]
    chain = [dist.Wait(*works[i], *works[i + 1], "SendNode", f"train.py:{i}", 1.5 + i) for i in range(59)]
    return waiting(8, *chain, dist.Wait(*works[59], *works[56], "SendNode", "train.py:59", 1.25))


async def look_at_waits(browser: Any, checks: Any, folder: Any) -> None:
    """Cycles are red, labels and rows have room however narrow the page is, and a click or a key shows the row."""
    print("waits")
    async with arranged_page(browser, checks) as (page, show):

        async def picture(name: str) -> None:
            await page.locator("#waits").screenshot(path=folder / f"waits-{name}")

        for name, board in (("deadlock", deadlock()), ("crowd", crowd())):
            await show(board)
            await page.wait_for_selector("#waits-box svg")
            async for _ in look_at_widths(page, checks, name, picture, "#waits-box svg", "#waits-box g.node"):
                pass
        boxes = await page.locator("#waits-box g.node").count()
        hint = await page.inner_text("#waits-hint")
        checks.check(0 < boxes <= MOST_BOXES and "of them are drawn" in hint, f"60 works are drawn as {boxes}, and the hint says so: {hint}")
        await look_at_rows(page, checks, show)


async def look_at_rows(page: Any, checks: Any, show: Callable[..., Awaitable[None]]) -> None:
    """A click shows the row, also after the next report; without waits there is no panel."""
    await page.set_viewport_size({"width": 1280, "height": 900})
    await show(deadlock(), False)
    await page.wait_for_timeout(1500)
    row = " ".join((await page.inner_text("#waits-row")).split())
    wanted = "work call both 7 on left waits for call back 9 on right for 12 s at both line service.py:41 message answer"
    checks.check(row.replace("13 s", "12 s") == wanted, f"the first row is of the cycle: {row}")
    red = await page.locator("#waits-box g[data-cycle=true]").count()
    checks.check(red == 2, f"{red} arrows of the cycle are red")
    await page.locator("#waits-box g.node", has_text="pass 3").click()
    await page.wait_for_timeout(1200)  # two more reports
    row = " ".join((await page.inner_text("#waits-row")).split())
    checks.check("pass 3 on driver" in row and LINE in row and "31 s" in row, f"a click shows the row: {row}")
    await page.locator("#waits-box g.node", has_text="call back 9").focus()
    await page.wait_for_timeout(1200)
    await page.keyboard.press("Enter")
    row = " ".join((await page.inner_text("#waits-row")).split())
    checks.check("call back 9 on right" in row, f"so does a key, and the focus outlasts a report: {row}")
    checks.check(LINE in await page.inner_text("#waits-held"), "a loop that is held up is shown with its line")
    await show(cluster(4, False), False)
    await page.wait_for_timeout(1200)
    checks.check(await page.locator("#waits").is_hidden(), "where nothing waits there is no panel")
