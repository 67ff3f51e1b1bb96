"""Drives headless Chromium through the demo, in which a worker is killed, through a cluster of unfriendly names, and past a server with a follower;
keeps screenshots in ``out/``.

Exits with 1 and says what was wrong if: a row, a panel or a state does not appear, zoom or keys do nothing, the console has an error, a request
leaves the machine, or anything is shown without the token; if a line runs through a label, or something has no room and does not say so, on the
dashboard, in pictures or in the built documents. Also has TensorBoard and promtool read what is written for them.
"""

from __future__ import annotations

import asyncio
import os
import re
import shutil
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from unittest import mock
from urllib.parse import urlsplit

import aiograd as ag
from aiograd import distributed as dist
from aiograd.dashboard.pipeline_steps import PipelineSteps
from aiograd.pipeline.schedule.timeline.timeline import Timeline
from tests.browser import readers
from tests.browser.arranged import look_at_arranged_data
from tests.browser.documents import look_at_documents
from tests.browser.geometry import COLLISIONS, OVERFLOWS, PARTS, SEEN
from tests.browser.pictures import look_at_pictures
from tests.browser.serving import look_at_serving
from tests.browser.stepper import look_at_steps
from tests.browser.waits import look_at_waits

OUT = Path("out/dashboard")
SECONDS = 90_000.0  # milliseconds, as playwright counts
CHROMIUM = ("chromium", "chromium-browser", "google-chrome")
VIEWS = tuple((f"{width}-{scheme}", width, scheme) for width in (1280, 800, 400) for scheme in ("light", "dark"))
#: of each link its round trip as the map has it, and as the table does
ROUND_TRIPS = """() => [...document.querySelectorAll("#cluster-map .crossing title")].map((title) => {
  const [, one, other, trip] = /^(\\S+) and (\\S+): .*?(?:, ([^,]+ ms))?$/.exec(title.textContent);
  const here = document.getElementById("here").textContent;
  const row = [...document.querySelectorAll("#cluster-table tbody tr")].find((each) => each.cells[0].textContent === (one === here ? other : one));
  return [other, trip ?? "–", row.cells[2].textContent];
})"""
HOSTILE = "<img src=x onerror=\"window.broken=1\"><script>window.broken=1</script>'\"&lt;"

service = dist.Service()


@service.function(HOSTILE)
def hostile(x: ag.Tensor) -> ag.Tensor:
    """A function with an unfriendly name."""
    ag.log(HOSTILE, 0.5)
    return (x * x).sum()


class CheckList:
    """The checks of a run, and those that failed."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def check(self, holds: object, text: str) -> None:
        """Note one fact."""
        print(f"  {'ok    ' if holds else 'FAILED'} {text}", flush=True)
        if not holds:
            self.failures.append(text)


class Watched:
    """A page of the browser, with everything that it asks for and complains about."""

    def __init__(self, page: Any, host: str) -> None:
        self.page = page
        self.errors: list[str] = []
        self.foreign: list[str] = []
        page.on("console", lambda message: self.errors.append(message.text) if message.type in ("error", "warning") else None)
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.on("request", lambda request: self.foreign.append(request.url) if urlsplit(request.url).netloc != host else None)


@asynccontextmanager
async def demo(*arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str, Callable[[str], None]]]:
    """The demo as a process, the URL that it prints, and a function that lets it go on from a place where it waits (see `held_demo`)."""
    with tempfile.TemporaryDirectory() as folder:
        async with _demo_in(folder, *arguments) as (process, url):
            yield process, url, lambda place: (Path(folder) / place).touch()


@asynccontextmanager
async def _demo_in(folder: str, *arguments: str) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    command = [sys.executable, "-m", "tests.browser.held_demo", folder, "--output", str(OUT), *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    assert process.stdout is not None
    printed: list[str] = []
    try:
        while True:
            line = (await process.stdout.readline()).decode()
            printed.append(line)
            found = re.search(r"http://\S+/dashboard\?token=\w+", line)
            if found:
                break
            assert line, "the demo has ended without a URL:\n" + "".join(printed)
        drain = asyncio.create_task(process.stdout.read())
        yield process, found[0]
        drain.cancel()
    finally:
        if process.returncode is None:
            process.terminate()
            await process.wait()


async def until(page: Any, expression: str, argument: Any = None) -> None:
    """Wait until an expression is true. (playwright's own way evaluates text in the page, which the page's policy forbids.)"""
    async with asyncio.timeout(SECONDS / 1000):
        while not await page.evaluate(expression, argument):
            await asyncio.sleep(0.05)


async def shoot(page: Any, name: str) -> None:
    """A screenshot of the whole page."""
    await page.screenshot(path=OUT / f"{name}.png", full_page=True)


async def watch_the_demo(browser: Any, checks: CheckList) -> None:
    """Everything appears, a killed worker goes red and green, and the stream can be stopped, zoomed and walked through."""
    print("the demo, with a killed worker")
    async with demo("--epochs", "12") as (process, url, go_on):
        host = urlsplit(url).netloc
        stranger = await browser.new_page()
        locked = await stranger.goto(url.partition("?")[0])
        checks.check(locked.status == 401 and "locked" in await stranger.inner_text("body"), "the page is locked without the token")
        for route in ("/data", "/main.js", "/data?token=wrong"):
            answer = await stranger.request.get(f"http://{host}/dashboard{route}")
            checks.check(answer.status == 401, f"{route} is refused without the cookie")
        await stranger.close()

        page = await browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="light")
        seen = Watched(page, host)
        await page.goto(url)
        await page.wait_for_selector("#connection.live", timeout=SECONDS)
        checks.check("token" not in page.url, "the token is no longer in the address")
        cookies = await page.context.cookies()
        checks.check(all(c["httpOnly"] and c["sameSite"] == "Strict" for c in cookies) and len(cookies) == 1, "one cookie: HttpOnly, SameSite=Strict")
        checks.check(await page.evaluate("document.cookie") == "", "scripts cannot read it")
        state: Callable[[str], Awaitable[Any]] = lambda wanted: until(  # noqa: E731
            page,
            "([name, state]) => [...document.querySelectorAll('#cluster-table tr')]"
            ".some(row => row.cells[0]?.textContent === name && row.classList.contains(state))",
            ["worker1", wanted],
        )
        await state("running")
        await until(page, "document.querySelectorAll('#stream-legend li').length > 4")
        rows = "Number(/(\\d+) rows/.exec(document.getElementById('stream-canvas').getAttribute('aria-label'))[1])"
        await until(page, f"{rows} >= 3")
        checks.check(True, "rows of all workers appear")
        await page.wait_for_selector("#graph-box svg", timeout=SECONDS)
        await page.wait_for_selector("#training-charts figure", timeout=SECONDS)
        await until(page, "document.getElementById('graph-hint').textContent.includes('workers')")
        checks.check(True, f"graph: {await page.inner_text('#graph-hint')}")
        await page.wait_for_timeout(4000)
        for name, width, scheme in VIEWS:
            await page.set_viewport_size({"width": width, "height": 900})
            await page.emulate_media(color_scheme=scheme)
            await page.wait_for_timeout(900)
            wrong = await page.evaluate(OVERFLOWS, PARTS)
            checks.check(not wrong, f"everything has room at {name} {wrong[:3] or ''}")
            wrong = await page.evaluate(COLLISIONS, "#cluster-map svg, #graph-box svg")
            checks.check(not wrong, f"labels can be read at {name} {wrong[:3] or ''}")
            seen_boxes = await page.evaluate(SEEN, ["#graph-box g.node", "#graph-box"])
            checks.check(seen_boxes > 3, f"the graph shows {seen_boxes} boxes at {name}")
            await shoot(page, f"live-{name}")
        trips = await page.evaluate(ROUND_TRIPS)
        checks.check(trips and all(on_map == in_table for _, on_map, in_table in trips), f"one round trip on the map and in the table: {trips}")
        graph = await page.inner_text("#graph-hint")
        checks.check("3 workers" in graph and "without" not in graph, f"the last pass is a whole one: {graph}")
        await page.set_viewport_size({"width": 1280, "height": 900})
        await page.emulate_media(color_scheme="light")

        hint = "document.getElementById('stream-hint').textContent"
        await page.focus("#stream-canvas")
        before = await page.evaluate(hint)
        for _ in range(4):
            await page.keyboard.press("+")
        zoomed = await page.evaluate(hint)
        checks.check(before != zoomed and "ms" in zoomed, f"keys zoom: {before} became {zoomed}")
        await page.keyboard.press("Space")
        stopped = await page.evaluate("document.getElementById('stream-canvas').toDataURL()")
        await page.wait_for_timeout(700)
        checks.check(stopped == await page.evaluate("document.getElementById('stream-canvas').toDataURL()"), "Space stops the stream")
        await page.keyboard.press("ArrowLeft")
        checks.check("ago" in await page.evaluate(hint), "arrow keys go back")
        await page.keyboard.press(".")
        said = await page.inner_text("#stream-said")
        checks.check(len(said) > 10 and not await page.locator("#stream-tip").is_hidden(), f"keys walk from event to event: {said[:90]}")
        await shoot(page, "stopped-1280-light")
        await page.keyboard.press("Home")

        go_on("kill")
        await state("lost")
        checks.check(True, "the killed worker is red")
        red = await page.evaluate("document.querySelector('#cluster-map [data-state=lost]')?.getAttribute('data-worker')")
        checks.check(red == "worker1", "in the graph of workers too")
        await shoot(page, "lost-1280-light")
        go_on("restart")
        await state("running")
        checks.check(True, "and green when it is back")
        go_on("end")
        checks.check(await process.wait() == 0, "the demo keeps its promises while it is watched")
        await page.wait_for_selector("#connection.gone", timeout=SECONDS)
        lost_contact = [error for error in seen.errors if "ERR_CONNECTION" not in error]
        checks.check(not lost_contact, f"no console errors {lost_contact[:3] or ''}")
        checks.check(not seen.foreign, f"no request leaves the worker {seen.foreign[:3] or ''}")
        await page.close()


async def watch_unfriendly_names(browser: Any, checks: CheckList) -> None:
    """Names are shown as text, whatever is in them; a thousand workers are shown too."""
    print("unfriendly names, a pipeline, and a thousand workers")
    async with (
        dist.Worker("left", service=service) as left,
        dist.Worker("driver", peers={"left": left.url}, dashboard=True) as driver,
    ):
        stop = asyncio.Event()
        #: by step, its events as the page is told them; in the pipeline's own timeline such a short step has a bubble 1 to 8 points smaller
        noted: dict[tuple[int, ...], list[Any]] = {}
        acted = PipelineSteps.acted

        def note(steps: PipelineSteps, step: Any, rank: int, action: Any, began: int, ended: int) -> None:
            noted.setdefault(tuple(step), []).append((rank, action, began, ended))
            acted(steps, step, rank, action, began, ended)

        async def work() -> None:
            stages = [ag.nn.Linear(64, 64) for _ in range(4)]
            pipe = ag.pipeline.Pipeline(stages, ag.pipeline.make_schedule("1F1B", ranks=4, microbatches=8), loss_fn=ag.nn.functional.mse_loss)
            async with pipe:
                data, step = ag.tensor([[0.5] * 64] * 64), 0
                while not stop.is_set():
                    async with driver.context() as ctx:
                        x = ag.tensor([1.0, 2.0], requires_grad=True)
                        await ctx.backward(await driver.call("left", HOSTILE, x))
                    await pipe.step(data, data)
                    ag.log(HOSTILE, step := step + 1)
                    ag.log("not a number", float("nan"))
                    await asyncio.sleep(0.05)

        noting = mock.patch.object(PipelineSteps, "acted", note)
        noting.start()
        working = asyncio.create_task(work())
        assert driver.dashboard_url is not None
        page = await browser.new_page(viewport={"width": 1280, "height": 900}, color_scheme="dark")
        seen = Watched(page, urlsplit(driver.url).netloc)
        await page.goto(driver.dashboard_url)
        await page.wait_for_selector("#training-charts figure", timeout=SECONDS)
        await page.wait_for_selector("#pipeline:not([hidden])", timeout=SECONDS)
        await page.wait_for_timeout(3000)
        await page.focus("#stream-canvas")
        await page.keyboard.press("Space")
        for _ in range(30):
            await page.keyboard.press(".")
        await shoot(page, "unfriendly-1280-dark")
        checks.check(await page.evaluate("window.broken") is None, "no name is run as a script")
        checks.check(await page.locator("main img, main script").count() == 0, "nor becomes an element")
        checks.check(HOSTILE in await page.inner_text("#training-charts"), "it is shown as it is")
        hint = await page.inner_text("#pipeline-hint")
        found = re.match(r"last step: .+ (\d+) % bubble; 1F1B", hint)
        whole = max(map(len, noted.values()))
        bubbles = {round(Timeline.from_events(step).bubble_rate * 100) for step in noted.values() if len(step) == whole}
        checks.check(found and {int(found[1]) + i for i in (-1, 0, 1)} & bubbles, f"a whole step, with a bubble that a step had: {hint}")
        await page.keyboard.press("Home")
        names = [f"w{i:03}" for i in range(1000)]
        for name in names:
            driver.add_peer(name, "http://127.0.0.1:1")
        await until(page, "document.querySelectorAll('.tiles i').length >= 1000")
        await page.wait_for_timeout(9000)
        for name, width, scheme in VIEWS[1::3]:
            await page.set_viewport_size({"width": width, "height": 900})
            await page.emulate_media(color_scheme=scheme)
            await page.wait_for_timeout(600)
            wrong = await page.evaluate(OVERFLOWS, PARTS)
            checks.check(not wrong, f"a thousand workers have room at {name} {wrong[:3] or ''}")
            await shoot(page, f"thousand-{name}")
        checks.check(await page.locator("#cluster-table tbody tr").count() <= 24, "a thousand workers make a table that ends")
        checks.check("1002 workers" in await page.inner_text("#cluster-hint"), await page.inner_text("#cluster-hint"))
        checks.check(not seen.errors, f"no console errors {seen.errors[:3] or ''}")
        checks.check(not seen.foreign, f"no request leaves the worker {seen.foreign[:3] or ''}")
        stop.set()
        await working
        noting.stop()
        await page.close()


async def main() -> int:
    """Run everything; returns the exit status."""
    from playwright.async_api import async_playwright

    path = next((found for name in CHROMIUM if (found := shutil.which(name))), None)
    if path is None:
        print("there is no Chromium: on Debian, apt-get install chromium", file=sys.stderr)
        return 1
    OUT.mkdir(parents=True, exist_ok=True)
    checks = CheckList()
    only = sys.argv[1:]
    async with async_playwright() as playwright:
        browser = await playwright.chromium.launch(executable_path=path, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        for part in (watch_the_demo, watch_unfriendly_names):
            if not only or part.__name__ in only:
                await part(browser, checks)
        for look in (look_at_serving, look_at_waits, look_at_arranged_data, look_at_pictures, look_at_steps, look_at_documents):
            if not only or look.__name__ in only:
                await look(browser, checks, OUT)
        await browser.close()
    if not only:
        print("other programs")
        with tempfile.TemporaryDirectory() as folder:
            readers.read_event_files(Path(folder), checks.check)
        await readers.read_metrics(checks.check)
    print(f"screenshots in {OUT}; " + (f"{len(checks.failures)} checks FAILED" if checks.failures else "all as it should be"))
    return 1 if checks.failures else 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main()))
