"""WaitReport: the waits on the workers of a cluster, for what, and where that goes round in a circle. Pure.

Note [Cycles]
    The graph has a node for each work of each worker, (worker, task), and an edge from it to what it waits for, (on, on_task). It is a wait-for graph
    with one resource for each node (Holt, Some Deadlock Properties of Computer Systems, 1972), but a node may wait for several at once, so a cycle is
    where to look and no proof. Two passes that wait for each other's workers are two nodes on each, and no cycle. Strongly connected parts are found
    as by Tarjan (Depth-First Search and Linear Graph Algorithms, 1972), on a stack of its own: a chain may be as long as a report.

Note [Reports of peers]
    A report may come from a peer. Its numbers and texts are checked by the constructors and nowhere else, texts are cut there to `TEXT` characters,
    and what is printed has no character that a terminal would obey.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from types import MappingProxyType
from typing import Any, TypeAlias, TypeVar

from aiograd.errors import ArgumentError, ProtocolError

#: characters of a text, and of a line that is printed
TEXT, WIDTH = 500, 240
#: characters of a report of a peer, and rows of each of its lists; more rows are left out
MOST_CHARACTERS, MOST_ROWS = 1 << 25, 50_000
MOST_SECONDS = 1 << 53
#: rows of each kind that are printed
SHOWN = 50

#: worker and task
Work: TypeAlias = tuple[str, str]
R = TypeVar("R", "Wait", "HeldLoop")


@dataclass(frozen=True, slots=True)
class Wait:
    """One thing that waits.

    Attributes:
        worker: name of the worker on which it waits.
        task: the work that waits: a pass, step, call or collective; equal on all workers that take part in it.
        on: name of the worker that it waits for; "": none, it waits for this worker's own executor or memory, or the worker is not known.
        on_task: the work there.
        what: the node, action or function that waits.
        line: the line of the user's code that has led there; "": not known.
        seconds: since when.
        message: the message that is awaited.

    Raises:
        ArgumentError: a text is no str, or the seconds are no number from 0 to `MOST_SECONDS`. Longer texts are cut.

    >>> wait = Wait("left", "pass 7", "right", "pass 7", "SendNode", "train.py:12", 3.5, "gradient")
    >>> wait.work, wait.needs
    (('left', 'pass 7'), ('right', 'pass 7'))
    """

    worker: str
    task: str
    on: str = ""
    on_task: str = ""
    what: str = ""
    line: str = ""
    seconds: float = 0.0
    message: str = ""

    def __post_init__(self) -> None:
        _check(self, ("worker", "task", "on", "on_task", "what", "line", "message"))

    @property
    def work(self) -> Work:
        """The node that waits: worker and task."""
        return self.worker, self.task

    @property
    def needs(self) -> Work | None:
        """The node that it waits for: worker and task; None if it waits for no worker."""
        return (self.on, self.on_task) if self.on else None


@dataclass(frozen=True, slots=True)
class HeldLoop:
    """An event loop that is held up: its worker answers nothing meanwhile.

    Attributes:
        worker: name of the worker.
        seconds: since when.
        line: the line that runs.

    Raises:
        ArgumentError: as for `Wait`.

    >>> print(WaitReport(held=(HeldLoop("left", 3.5, "train.py:88"),)))
    0 waits, 0 cycles, 1 loop held up; asked in 0.00 s
    <BLANKLINE>
    held loops
      left  3.50 s  train.py:88
    """

    worker: str
    seconds: float
    line: str

    def __post_init__(self) -> None:
        _check(self, ("worker", "line"))


@dataclass(frozen=True)
class WaitReport:
    """The waits on the workers of a cluster, at about the same time. Its ``str`` is an aligned text.

    Attributes:
        waits: a row for each thing that waits.
        held: event loops that are held up.
        silent: by the name of a worker that has not answered, the reason.
        seconds: that asking has taken.

    Raises:
        ArgumentError: a value is of another type or out of range.

    >>> left, right = Wait("left", "call f", "right", "call g"), Wait("right", "call g", "left", "call f")
    >>> report = WaitReport((left, right), silent={"third": "no answer within 1 s"})
    >>> report.cycles
    ((('left', 'call f'), ('right', 'call g')),)
    >>> WaitReport.from_json(report.to_json()) == report
    True
    """

    waits: tuple[Wait, ...] = ()
    held: tuple[HeldLoop, ...] = ()
    silent: Mapping[str, str] = field(default_factory=dict, hash=False)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        for name, cls in (("waits", Wait), ("held", HeldLoop)):
            given = getattr(self, name)
            rows = tuple(given) if isinstance(given, Iterable) else (given,)
            if not all(isinstance(row, cls) for row in rows):
                raise ArgumentError(f"WaitReport: {name} are {given!r:.100}; expected a tuple of {cls.__name__}")
            object.__setattr__(self, name, rows)
        if not isinstance(self.silent, Mapping) or not all(isinstance(text, str) for entry in self.silent.items() for text in entry):
            raise ArgumentError(f"WaitReport: silent is {self.silent!r:.100}; expected a dict from names of workers to reasons")
        object.__setattr__(self, "silent", MappingProxyType({name[:TEXT]: reason[:TEXT] for name, reason in self.silent.items()}))
        _check(self, ())

    def __reduce__(self) -> tuple[Any, ...]:  # a proxy of a dict can be neither pickled nor copied
        return type(self), (self.waits, self.held, dict(self.silent), self.seconds)

    @cached_property
    def cycles(self) -> tuple[tuple[Work, ...], ...]:
        """For each strongly connected part of the graph one shortest cycle through its least member, which it begins with. See Note [Cycles]."""
        return find_cycles((wait.work, wait.needs) for wait in self.waits if wait.needs is not None)

    def to_json(self) -> str:
        """The report as JSON: an object of its attributes, with `cycles`.

        Returns:
            The text, equal for equal reports.
        """
        value = {
            "cycles": self.cycles,
            "waits": [{each.name: getattr(wait, each.name) for each in fields(Wait)} for wait in self.waits],
            "held": [{each.name: getattr(loop, each.name) for each in fields(HeldLoop)} for loop in self.held],
            "silent": dict(sorted(self.silent.items())),
            "seconds": self.seconds,
        }
        return json.dumps(value, separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> WaitReport:
        """The report of a JSON text, which may come from a peer. Its cycles are found anew, unknown names are left out.

        Args:
            text: from `to_json`.

        Returns:
            The report, with at most `MOST_ROWS` rows of a kind.

        Raises:
            ProtocolError: the text is too long, no JSON, or no report; it names what does not fit.
        """
        if not isinstance(text, (str, bytes)) or len(text) > MOST_CHARACTERS:
            found = f"{len(text)} characters" if isinstance(text, (str, bytes)) else type(text).__name__
            raise _malformed(f"it is {found}; expected a text of at most {MOST_CHARACTERS} characters")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError):
            raise _malformed(f"its {len(text)} characters are no JSON") from None
        if not isinstance(value, dict):
            raise _malformed(f"it is a JSON {type(value).__name__}; expected an object")
        try:
            silent = value.get("silent", {})
            silent = dict(list(silent.items())[:MOST_ROWS]) if isinstance(silent, dict) else silent
            return cls(_rows(Wait, value, "waits"), _rows(HeldLoop, value, "held"), silent, value.get("seconds", 0.0))
        except ArgumentError as error:
            raise _malformed(str(error)) from None

    def __str__(self) -> str:
        return "\n".join(line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…" for line in _text(self))


def _check(row: Any, texts: Sequence[str]) -> None:
    """Cut the texts of a row; raise where they or its seconds are of another type."""
    for name in texts:
        value = getattr(row, name)
        if not isinstance(value, str):
            raise ArgumentError(f"{type(row).__name__}: {name} is {_shown(value)}; expected a str")
        if len(value) > TEXT:
            object.__setattr__(row, name, f"{value[: TEXT - 1]}…")
    seconds = row.seconds
    if isinstance(seconds, bool) or not isinstance(seconds, (int, float)) or not 0 <= seconds <= MOST_SECONDS:
        raise ArgumentError(f"{type(row).__name__}: seconds are {_shown(seconds)}; expected a number from 0 to {MOST_SECONDS}")


def _shown(value: Any) -> str:
    return f"{value!r:.100}" if not isinstance(value, int) or value.bit_length() < 300 else f"an int of {value.bit_length()} bits"


def _rows(cls: type[R], value: dict[str, Any], name: str) -> tuple[R, ...]:
    rows = value.get(name, [])
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise _malformed(f"its {name} are no list of objects")
    names = [each.name for each in fields(cls)]
    try:
        return tuple(cls(**{name: row[name] for name in names if name in row}) for row in rows[:MOST_ROWS])
    except TypeError:
        raise _malformed(f"an object in its {name} lacks a name; expected {', '.join(names)}") from None


def _malformed(why: str) -> ProtocolError:
    return ProtocolError(f"a malformed report of waits: {why}", code="wait")


# ---------------------------------------------------------------- cycles


def find_cycles(edges: Iterable[tuple[Work, Work]]) -> tuple[tuple[Work, ...], ...]:
    """One shortest cycle of each strongly connected part of a graph. See Note [Cycles].

    Args:
        edges: from a node to one that it waits for.

    Returns:
        Cycles through the least member of their part, beginning there, sorted; of several shortest ones the least.

    >>> find_cycles([(("b", "t"), ("a", "t")), (("a", "t"), ("b", "t")), (("c", "t"), ("a", "t"))])
    ((('a', 't'), ('b', 't')),)
    """
    pairs = sorted(set(edges))
    after: dict[Work, list[Work]] = {start: [] for start, _ in pairs}
    for start, end in pairs:
        if end in after:  # what waits for nothing is in no cycle
            after[start].append(end)
    return tuple(sorted(_shortest(min(part), part, after) for part in _parts(after) if len(part) > 1 or part[0] in after[part[0]]))


def _parts(after: Mapping[Work, Sequence[Work]]) -> Iterator[list[Work]]:
    """The strongly connected parts."""
    number: dict[Work, int] = {}
    lowest: dict[Work, int] = {}
    path: list[Work] = []
    is_on_path: set[Work] = set()
    for root in after:
        if root in number:
            continue
        stack: list[tuple[Work, Iterator[Work]]] = []
        fresh: Work | None = root
        while stack or fresh is not None:
            if fresh is not None:
                number[fresh] = lowest[fresh] = len(number)
                path.append(fresh)
                is_on_path.add(fresh)
                stack.append((fresh, iter(after[fresh])))
                fresh = None
            node, rest = stack[-1]
            for end in rest:
                if end not in number:
                    fresh = end
                    break
                if end in is_on_path:
                    lowest[node] = min(lowest[node], number[end])
            else:
                stack.pop()
                if stack:
                    lowest[stack[-1][0]] = min(lowest[stack[-1][0]], lowest[node])
                if lowest[node] == number[node]:
                    part = [path.pop()]
                    while part[-1] != node:
                        part.append(path.pop())
                    is_on_path.difference_update(part)
                    yield part


def _shortest(first: Work, part: Sequence[Work], after: Mapping[Work, Sequence[Work]]) -> tuple[Work, ...]:
    """The shortest cycle through a node of its part."""
    members = set(part)
    before: dict[Work, Work] = {}
    queue = deque((first,))
    while True:  # a part has a way back to each of its nodes
        node = queue.popleft()
        for end in after[node]:
            if end == first:
                cycle = [node]
                while node != first:
                    node = before[node]
                    cycle.append(node)
                return tuple(cycle[::-1])
            if end in members and end not in before:
                before[end] = node
                queue.append(end)


# ---------------------------------------------------------------- text


def _text(report: WaitReport) -> Iterator[str]:
    """The lines of a report: cycles, loops that are held up, waits from the longest on, workers that have not answered."""
    workers = len({wait.worker for wait in report.waits})
    counts = [_count(len(report.waits), "wait") + (f" on {_count(workers, 'worker')}" if workers else ""), _count(len(report.cycles), "cycle")]
    counts += [_count(len(report.held), "loop") + " held up"] * bool(report.held)
    counts += [f"{_count(len(report.silent), 'worker')} silent"] * bool(report.silent)
    yield f"{', '.join(counts)}; asked in {_seconds(report.seconds)}"
    longest: dict[tuple[Work, Work | None], Wait] = {}
    waits = sorted(report.waits, key=lambda wait: (-wait.seconds, wait.worker, wait.task, wait.on, wait.on_task, wait.what))
    for wait in reversed(waits):
        longest[wait.work, wait.needs] = wait
    for i, cycle in enumerate(report.cycles[:SHOWN]):
        edges = zip(cycle[:SHOWN], (*cycle[1:], cycle[0]), strict=False)
        yield from _section(f"cycle {i + 1}", [_cells(longest[edge]) for edge in edges], len(cycle))
    yield from _rest(len(report.cycles) - SHOWN, "cycle")
    held = sorted(report.held, key=lambda loop: (-loop.seconds, loop.worker))
    yield from _section("held loops", [[loop.worker, _seconds(loop.seconds), loop.line] for loop in held[:SHOWN]], len(held))
    yield from _section("waits", [_cells(wait) for wait in waits[:SHOWN]], len(waits))
    silent = sorted(report.silent.items())
    yield from _section("silent", [list(entry) for entry in silent[:SHOWN]], len(silent))


def _cells(wait: Wait) -> list[str]:
    return [_seconds(wait.seconds), wait.worker, wait.task, wait.on and f"-> {wait.on}", wait.on_task, wait.what, wait.line, wait.message]


def _section(title: str, rows: Sequence[Sequence[str]], count: int) -> Iterator[str]:
    """A title and aligned columns, of which the empty ones are left out."""
    if not rows:
        return
    yield ""
    yield title
    rows = [[_plain(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        yield "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True) if width).rstrip()
    yield from _rest(count - len(rows), "row")


def _rest(count: int, what: str) -> Iterator[str]:
    if count > 0:
        yield f"  and {_count(count, what)} more"


def _plain(text: str) -> str:
    """A text without characters that a terminal would obey. See Note [Reports of peers]."""
    return text if text.isprintable() else "".join(char if char.isprintable() else "?" for char in text)


def _count(count: int, what: str) -> str:
    return f"{count:,} {what}{'s' * (count != 1)}"


def _seconds(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds < 10 else f"{seconds:,.0f} s"
