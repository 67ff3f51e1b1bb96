"""Waits of one worker, read from the tables of its parts: requests, passes, collectives, steps, and the futures that its tasks wait for.

Note [Works and futures]
    A table gives `OpenWork`, a name with tasks that carry it out, and `Awaited`, the meaning of a future: what it waits for. The tasks of a work are
    followed (see `wait_chains`) until they come to futures with a meaning, to another work, or to a lock, which leads to the work that holds it.
    A request whose caller belongs to no work waits for the task that has made it.

Note [Names of works]
    A name is equal on all workers that take part, so it is made of ids that they share: the id of a request and of its session, the key of a
    context and the number of the pass, the key of a group and the number of the operation, the key of the outcomes of a step and its number. A part
    of a pass, step or operation waits for a message that another part owes it, and the message has a name of its own: members that exchange
    messages wait for each other all the time, and that is no cycle.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple, TypeAlias

from aiograd.distributed.wait_chains import (
    Chain,
    Lock,
    awaited_by,
    behind,
    coroutines,
    line_of,
    line_of_thread,
    lock_awaited,
    locks_held,
    name_of,
    place_of,
    waiter_of,
    waking,
)
from aiograd.distributed.waits import Wait

#: rows of one worker at most
MOST = 1000
#: name of the works of other principals
OTHERS = "work of other principals"


class WaitEdge(NamedTuple):
    """The thing that a work waits for.

    Attributes:
        on, on_task, what, line, message: as of `Wait`.
        since: time of the loop; None: as long as the work.
        principal: of the work that is waited for; None: the same.
    """

    on: str = ""
    on_task: str = ""
    what: str = ""
    line: str = ""
    message: str = ""
    since: float | None = None
    principal: str | None = None


@dataclass(eq=False)
class OpenWork:
    """A work that is under way.

    Attributes:
        name: equal on all workers that take part; see Note [Names of works].
        principal: that it belongs to.
        tasks: carry it out.
        since: time of the loop; None: not known.
        edges: the things that it waits for, beside its tasks.
        what: the node, action or function.
        subjects: requests about these are its own, beside those about its name.
    """

    name: str
    principal: str
    tasks: Iterable[asyncio.Task[Any]] = ()
    since: float | None = None
    edges: list[WaitEdge] = field(default_factory=list)
    what: str = ""
    subjects: Iterable[bytes] = ()


class Awaited(NamedTuple):
    """The meaning of a future.

    Attributes:
        future: it.
        edge: of a task that awaits it; None: that is not shown.
        principal: that it belongs to.
        subject: of a request, the name of the work that it belongs to, or the key of the object that it is for.
        needs_row: it has a row, also where no work is found that waits for it.
    """

    future: asyncio.Future[Any]
    edge: WaitEdge | None
    principal: str
    subject: str | bytes = ""
    needs_row: bool = True


WaitEntry: TypeAlias = OpenWork | Awaited
WaitTable: TypeAlias = Callable[[], Iterable[WaitEntry]]


class LocalWaits:
    """The waits of one worker, of this moment.

    Args:
        here: its name.
        now: time of its loop.
        tables: of its parts.
    """

    def __init__(self, here: str, now: float, tables: Iterable[WaitTable]) -> None:
        self._here = here
        self._now = now
        self._works: list[OpenWork] = []
        self._awaited: dict[asyncio.Future[Any], Awaited] = {}
        self._owners: dict[asyncio.Task[Any], OpenWork] = {}
        #: of a semaphore all that have entered it
        self._holders: dict[Lock, set[tuple[str, str]]] = {}
        #: futures with a meaning that a work waits for
        self._met: set[asyncio.Future[Any]] = set()
        self._locks: list[tuple[OpenWork, Lock, WaitEdge]] = []
        self._current = asyncio.current_task()
        for table in tables:
            for entry in table():
                self._add(entry)

    def _add(self, entry: WaitEntry) -> None:
        if isinstance(entry, OpenWork):
            self._works.append(entry)
            for task in entry.tasks:
                owner = self._owners.setdefault(task, entry)
                if owner.since is None:
                    owner.since = entry.since
        else:
            self._awaited[entry.future] = entry

    def rows(self, principal: str | None = None) -> tuple[Wait, ...]:
        """The rows.

        Args:
            principal: only of its works; of others their number. None: all.

        Returns:
            At most `MOST` rows, and one that counts the others.
        """
        self._claim()
        found = [(work, edge) for work in self._works for edge in (*work.edges, *self._followed(work))]
        for future, awaited in self._awaited.items():
            if future not in self._met and not future.done() and awaited.edge is not None and awaited.needs_row:
                found += self._unclaimed(awaited, awaited.edge)
        for work, lock, edge in self._locks:
            holders = self._holders.get(lock, ())
            name, whose = next(iter(holders)) if len(holders) == 1 else ("", work.principal)  # of several, any one may leave first
            found.append((work, edge._replace(on=self._here if name else "", on_task=name, message=type(lock).__name__, principal=whose)))
        lines = self._lines()
        mine = [(work, edge) for work, edge in found if principal in (None, work.principal)]
        rows = dict.fromkeys(self._row(work, edge, lines.get(work.name, ""), principal) for work, edge in mine)
        shown = list(rows)[:MOST]
        if len(rows) > MOST:
            shown.append(Wait(self._here, "further waits", what=f"{len(rows) - MOST} waits"))
        if len(found) > len(mine):
            shown.append(Wait(self._here, OTHERS, what=f"{len(found) - len(mine)} waits"))
        return tuple(shown)

    def _row(self, work: OpenWork, edge: WaitEdge, line: str, principal: str | None) -> Wait:
        since = work.since if edge.since is None else edge.since
        is_hidden = principal is not None and edge.principal not in (None, principal)
        on_task = OTHERS if is_hidden else edge.on_task
        seconds = 0.0 if since is None else max(0.0, self._now - since)
        return Wait(self._here, work.name, edge.on, on_task, edge.what or work.what, edge.line or line, seconds, edge.message)

    def _claim(self) -> None:
        """Give requests to the works that they are about."""
        by_subject: dict[str | bytes, OpenWork] = {work.name: work for work in self._works}
        by_subject |= {subject: work for work in self._works for subject in work.subjects}
        for future, awaited in self._awaited.items():
            if awaited.edge is None or future.done() or not (subject := awaited.subject):
                continue
            work = by_subject.get(subject)
            if work is None and isinstance(subject, str):
                work = by_subject[subject] = OpenWork(subject, awaited.principal)
                self._works.append(work)
            if work is not None:
                if work.since is None or (awaited.edge.since or work.since) < work.since:
                    work.since = awaited.edge.since
                work.edges.append(awaited.edge)
                self._met.add(future)

    def _lines(self) -> dict[str, str]:
        """By work of this worker the line of the user's code that has begun it: a task that belongs to no work waits there for all of it."""
        lines: dict[str, str] = {}
        for future, awaited in self._awaited.items():
            name = awaited.subject or (awaited.edge.on_task if awaited.edge is not None and awaited.edge.on == self._here else "")
            if isinstance(name, str) and name not in lines and (task := waking(future)) is not None and task not in self._owners:
                lines[name] = place_of(coroutines(task))[0]
        return lines

    def _unclaimed(self, awaited: Awaited, edge: WaitEdge) -> Iterator[tuple[OpenWork, WaitEdge]]:
        """Rows of a future that no work waits for, as far as is known."""
        top = waking(awaited.future)
        work = None if top is None else self._owners.get(top)
        if work is None:
            name = "a task" if top is None else f"task {top.get_name().removeprefix('aiograd:')}"
            work = OpenWork(name, awaited.principal, () if top is None else (top,))
            self._add(work)
            yield from ((work, each) for each in self._followed(work))
        if awaited.future not in self._met:
            yield work, edge

    def _followed(self, work: OpenWork) -> list[WaitEdge]:
        """The edges of the tasks of a work."""
        edges: list[WaitEdge] = []
        seen: set[int] = set()
        stack: list[tuple[asyncio.Future[Any], str, str, Chain]] = [(task, "", work.what, []) for task in work.tasks]
        while stack:
            future, line, what, chain = stack.pop()
            if id(future) in seen or future.done():
                continue
            seen.add(id(future))
            if (awaited := self._awaited.get(future)) is not None:
                self._met.add(future)
                if (edge := awaited.edge) is not None and (edge.on, edge.on_task) != (self._here, work.name):
                    edges.append(edge._replace(line=edge.line or line, what=edge.what or what))
            elif isinstance(future, asyncio.Task):
                owner = self._owners.get(future)
                if owner is not None and owner is not work:
                    edges.append(WaitEdge(self._here, owner.name, what, line, principal=owner.principal))
                elif future is not self._current:
                    self._step(work, future, line, what, stack, edges)
            elif children := list(behind(future)):
                stack += [(child, line, what, chain) for child in children]
            else:
                edges.append(self._unknown(future, line, what, chain))
        return edges

    def _step(
        self, work: OpenWork, task: asyncio.Task[Any], line: str, what: str, stack: list[tuple[asyncio.Future[Any], str, str, Chain]],
        edges: list[WaitEdge],
    ) -> None:  # fmt: skip
        chain = coroutines(task)
        for lock in locks_held(chain):
            self._holders.setdefault(lock, set()).add((work.name, work.principal))
        own_line, own_what = place_of(chain)
        line, what = own_line or line, own_what or what
        waiter = waiter_of(task)
        if waiter in self._awaited:
            stack.append((waiter, line, what, chain))
            return
        if (awaited := lock_awaited(chain)) is not None:
            if name_of(chain[-3:][0]) == "Calls.invoke":  # see Note [Waiting for the executor] in `calls`
                edges.append(WaitEdge(what=what, line=line, message="the executor"))
            else:
                self._locks.append((work, awaited, WaitEdge(what=what, line=line)))
            return
        found = list(awaited_by(task, chain))
        known = [each for each in found if each[1] is not None or self._is_known(each[0])]
        for future, node in known or found:
            if node is None:
                stack.append((future, line, what, chain))
            else:
                stack.append((future, line_of(node) or line, node.name, chain))

    def _is_known(self, future: asyncio.Future[Any]) -> bool:
        return isinstance(future, asyncio.Task) or future in self._awaited or any(True for _ in behind(future))

    def _unknown(self, future: asyncio.Future[Any], line: str, what: str, chain: Chain) -> WaitEdge:
        """A future without a meaning: a thread, a timer, or something of the user's."""
        on_thread = line_of_thread(future)
        if on_thread is not None:
            return WaitEdge(what=what, line=on_thread or line, message="a thread of the executor")
        inner = name_of(chain[-1]) if chain else ""
        return WaitEdge(what=what, line=line, message="the executor" if inner in ("Engine.offload", "FuturesInFlight.wait") else inner)
