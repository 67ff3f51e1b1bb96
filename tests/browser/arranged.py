"""The dashboard with data that the test makes up: clusters of every size, graphs wider than the page, a pipeline; and where everything is then."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from typing import Any

from aiograd import distributed as dist
from aiograd.dashboard.board import Board
from aiograd.dashboard.pass_graph import PassPart, RanNode
from aiograd.dashboard.pipeline_steps import PipelineSteps, read_steps
from aiograd.pipeline import Costs, make_schedule, simulate
from tests.browser.geometry import COLLISIONS, OVERFLOWS, OVERFULL, PARTS, SEEN

NAMES = ("driver", "left", "right", "a-worker-with-a-long-name", "gpu-0", "gpu-1", *(f"node{i:02}.cluster" for i in range(18)))
WIDTHS = (1280, 800, 400)
SCHEMES = ("light", "dark")


def cluster(count: int, is_mesh: bool) -> Board:
    """Workers that all exchange something with the driver, or with each other."""
    board = Board("driver")
    names = NAMES[:count]
    for seconds in (1.0, 2.0):
        for i, name in enumerate(names):
            others = [other for other in names if other != name and (is_mesh or "driver" in (name, other))]
            peers = [[other, True, int(seconds * 3e6 * (i + 1)), int(seconds * 2e5), 0.4 + i, 1] for other in others]
            state = {"pid": i, "contexts": 3, "passes": 1, "committed": 123_456, "aborted": 17, "served": 987_654, "failed": 12, "memory": 5 << 30,
                     "device_memory": 70 << 30, "lag50": 0.3, "lag99": 1234.5, "peers": peers}  # fmt: skip
            board.arrived(name, {"now": 0, "cursor": 1, "state": state, "events": [], "scalars": [], "windows": []}, seconds, seconds)
    for name in names[2:4]:
        board.failed(name, "lost", "nothing was heard from it for 1.5 s", 3.0)
    return board


def passed(board: Board, workers: int, nodes: int) -> Board:
    """A pass that goes from worker to worker and back, a chain of nodes on each."""
    names = NAMES[:workers]
    for i, name in enumerate(names):
        found: dict[int, RanNode] = {}

        def add(name: str, *following: int, edge: int = 0, peer: str = "", out: bool = False, found: dict[int, RanNode] = found) -> None:
            key = len(found) + 1
            found[key] = RanNode(key, name, 3_000 * key, 4096 * key, following, edge, peer, out)

        if i:
            add("SendNode", 2, edge=i, peer=names[i - 1])
        for j in range(nodes):
            here = len(found) + 1
            add(("Conv2dBackward", "AddBackward", "LayerNormBackward")[j % 3], here + 1, here + 2)
            add("AccumulateGrad")
        if i + 1 < workers:
            add("RecvNode", edge=i + 1, peer=names[i + 1], out=True)
        board._passes[name] = [PassPart(found, 0)]
    board.draw_graph(3.0)
    return board


def node(key: int, name: str, *following: int, edge: int = 0, peer: str = "", out: bool = False, size: int = 4096) -> RanNode:
    """A node of a pass that took longer the higher its key is."""
    return RanNode(key, name, 9_000 * key, size, following, edge, peer, out)


def there_and_back(board: Board) -> Board:
    """A pass from the driver to one worker, back, and to another."""
    here = [
        node(1, "CrossEntropyBackward", 2), node(2, "RecvNode", edge=1, peer="right", out=True, size=2600),
        node(3, "SendNode", 4, edge=2, peer="right"), node(4, "RecvNode", edge=3, peer="left", out=True),
    ]  # fmt: skip
    right = [
        node(1, "SendNode", 2, edge=1, peer="driver"), node(2, "LinearBackward", 3, 4, 5), node(3, "ReluBackward", 6),
        node(6, "LinearBackward", 7, 8, 9), node(7, "RecvNode", edge=2, peer="driver", out=True, size=33_300),
        *(node(key, "AccumulateGrad") for key in (4, 5, 8, 9)),
    ]  # fmt: skip
    left = [node(1, "SendNode", 2, edge=3, peer="driver", size=33_300)]
    for key, name in enumerate(("Reshape", "MaxPool2d", "Relu", "Conv2d", "MaxPool2d", "Relu", "Conv2d"), 2):
        left.append(node(key, f"{name}Backward", key + 1, *((20 + key, 30 + key) if name == "Conv2d" else ())))
    left += [node(first + key, "AccumulateGrad") for first in (20, 30) for key in (5, 8)]
    for name, nodes in (("driver", here), ("right", right), ("left", left)):
        board._passes[name] = [PassPart({each.key: each for each in nodes}, 0)]
    board.draw_graph(3.0)
    return board


def piped(board: Board, ranks: int, microbatches: int, stages: int = 1) -> Board:
    """A step of a pipeline whose ranks are on different workers."""
    name = "ZB-H1" if stages == 1 else "Interleaved1F1B"
    schedule = make_schedule(name, ranks=ranks, microbatches=microbatches, stages_per_rank=stages)
    timeline = simulate(schedule, Costs(1, 1, 1, 0.2))
    for rank, name in enumerate(NAMES[:ranks]):
        steps = PipelineSteps()
        for event in timeline.events:
            if event.rank == rank and event.action.kind.is_compute:
                steps.acted((1, 2), rank, event.action, round(event.start * 1e6), round(event.end * 1e6))
        if not rank:
            counts = {each: sum(event.rank == each and event.action.kind.is_compute for event in timeline.events) for each in range(ranks)}
            steps.ended((1, 2), schedule.name, "22 % by the schedule at these times", [counts], 0, round(timeline.duration * 1e6))
        board._steps[name] = read_steps(json.loads(json.dumps(steps.rows(0))), 0.0)
    board.draw_step()
    return board


def rounded(board: Board, trainings: int) -> Board:
    """Rounds of local steps: the fourth loses a member, and one comes late."""
    names = ("loss", "rounds", "members", "late", "lost", "bytes_sent", "bytes_received", "seconds_computing", "seconds_waiting")
    for name in NAMES[:trainings]:
        scalars: list[Any] = []
        for step in range(1, 15):
            values = (4 / step, step, 3 + (step < 4), int(step > 5), int(step > 3), 40_500 * step, 13_500 * step, 9.0 * step, 1.0 * step)
            for each, value in zip(names, values, strict=True):
                scalars.append([len(scalars) + 1, None, f"local_steps/{each}", step, value, 3.0])
        board.arrived(name, {"now": 0, "cursor": 1, "state": {"pid": 1}, "events": [], "scalars": scalars, "windows": []}, 3.0, 3.0)
    return board


def boards() -> Iterator[tuple[str, Board]]:
    """The data, by a name for screenshots."""
    yield "pair", passed(cluster(2, False), 2, 3)
    yield "back", there_and_back(cluster(3, False))
    yield "rounds", rounded(passed(cluster(4, False), 2, 3), 4)
    yield "star", passed(cluster(6, False), 3, 6)
    yield "mesh", piped(passed(cluster(4, True), 4, 9), 4, 8)
    yield "many", piped(passed(cluster(12, False), 1, 25), 8, 16, 2)
    yield "most", passed(cluster(24, True), 5, 2)


@contextlib.asynccontextmanager
async def arranged_page(browser: Any, checks: Any) -> AsyncIterator[tuple[Any, Callable[..., Awaitable[None]]]]:
    """A page of the dashboard, and a function that lets it show a board; with False it is not loaded anew. No script fails meanwhile."""
    async with dist.Worker("driver", dashboard=True) as driver:
        assert driver.dashboard_url is not None
        page = await browser.new_page(viewport={"width": 1280, "height": 900})
        answer = {"body": b"{}"}

        async def fulfil(route: Any) -> None:
            await route.fulfill(status=200, content_type="application/json", body=answer["body"])

        await page.route("**/dashboard/data?*", fulfil)
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))

        async def show(board: Board, is_loaded: bool = True) -> None:
            answer["body"] = board.answer(0, 0, 0, 3.5)
            if is_loaded:
                await page.goto(driver.dashboard_url)

        yield page, show
        checks.check(not errors, f"no script has failed {errors[:3] or ''}")
        await page.close()


async def look_at_widths(page: Any, checks: Any, name: str, picture: Callable[[str], Awaitable[Any]], graphs: str, nodes: str) -> AsyncIterator[str]:
    """At each width: take pictures, and look whether labels can be read and everything has room; yields what was looked at."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            await page.set_viewport_size({"width": width, "height": 900})
            await page.emulate_media(color_scheme=scheme)
            await page.wait_for_timeout(700)
            await picture(f"{name}-{width}-{scheme}.png")
        what = f"{name} at {width} px"
        wrong = await page.evaluate(COLLISIONS, graphs) + await page.evaluate(OVERFULL, nodes)
        checks.check(not wrong, f"labels of {what} can be read {wrong[:4] or ''}")
        wrong = await page.evaluate(OVERFLOWS, PARTS)
        checks.check(not wrong, f"everything of {what} has room {wrong[:4] or ''}")
        yield what


async def look_at_arranged_data(browser: Any, checks: Any, folder: Any) -> None:
    """No label lies over a line, nothing is cut off without a word, whatever there is to show and however narrow the page is."""
    print("clusters, graphs and pipelines of every size")
    async with arranged_page(browser, checks) as (page, show):

        async def picture(name: str) -> None:
            await page.screenshot(path=folder / f"arranged-{name}", full_page=True)

        for name, board in boards():
            await show(board)
            await page.wait_for_selector("#graph-box svg")
            async for what in look_at_widths(page, checks, name, picture, "#cluster-map svg, #graph-box svg", "#graph-box g.node"):
                seen = await page.evaluate(SEEN, ["#graph-box g.node", "#graph-box"])
                checks.check(seen > 3, f"the graph of {what} shows {seen} boxes")
            await page.set_viewport_size({"width": WIDTHS[0], "height": 900})  # narrow pages leave columns out
            rounds = [" ".join(text.split()) for text in await page.locator("#rounds tbody tr").all_inner_texts()]
            wanted = ["14 0.2857 3 0 0 40.5 kB 13.5 kB 90 %", "6 0.6667 3 1 0 40.5 kB 13.5 kB 90 %"] if name == "rounds" else []
            is_right = len(rounds) == 20 * len(wanted) and all(rounds.count(row) == 4 for row in wanted)
            checks.check(is_right, f"{name} shows {len(rounds)} rounds {rounds[:1] or ''}")
            labels = await page.locator("#cluster-map text.link").count()
            checks.check(labels >= min(len(board.workers), 6), f"the map of {name} has {labels} labels")
