"""Timelines as SVG text: a row per rank, a colour per kind, the microbatch in each box."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Final, NamedTuple

from aiograd.errors import ArgumentError, ArgumentTypeError
from aiograd.pipeline.schedule.action import Action, ActionKind
from aiograd.pipeline.schedule.timeline.data import TimelineData, TimelineEvent
from aiograd.running.svg import svg_document, svg_text, text_width

_K = ActionKind

#: pixels
MARGIN = 20.0
LABEL = 58.0  # names of ranks, at least
SIDE = 52.0  # peak memory, at least
TITLE = 24.0  # height of the title
LEGEND = 20.0  # height of a line of the legend
HEAD = 22.0  # between legend and rows
ROW = 28.0
SPACE = 6.0
AXIS = 34.0
PLOT = 560.0, 16_000.0  # least and most width of the part that is to scale, unless a width is asked for;
LEAST = 140.0  # if one is, its least
DIGIT = 6.4
TICK = 90.0

TYPE = 11.0  # size of the type
TITLE_TYPE = 13.0 * 1.1  # bold type is wider


class _ActionStyle(NamedTuple):
    fill: tuple[int, int, int]
    meaning: str


_ACTION_STYLES: Final = {
    _K.F: _ActionStyle((109, 165, 230), "F forward"),
    _K.I: _ActionStyle((242, 164, 94), "I input backward"),
    _K.W: _ActionStyle((125, 192, 120), "W weight backward"),
    _K.B: _ActionStyle((222, 128, 140), "B full backward"),
}
_OTHER: Final = _ActionStyle((200, 206, 212), "parameters")

#: how much of the colour of its kind the first stage of a rank has, if there are several; the last has all of it
_FIRST_STAGE = 0.45

_CLASS = "aiograd-timeline"
_RULES = (
    f"text{{font-size:{TYPE:g}px;fill:#1f2328}}", ".t{font-size:13px;font-weight:600}", ".m{text-anchor:middle}", ".f{fill:#57606a}",
    ".e{text-anchor:end}", ".b{stroke:#ffffff;stroke-width:.75}", "line{stroke:#8c959f}",
)  # fmt: skip


def timeline_svg(timeline: TimelineData, width: float | None) -> str:
    """See `Timeline.svg`."""
    picture = _Picture(timeline, width)
    return svg_document(_CLASS, picture.title(), (picture.width, picture.height), _RULES, picture.lines())


class _Picture:
    def __init__(self, timeline: TimelineData, width: float | None) -> None:
        self.timeline = timeline
        self.events = [event for event in timeline.events if not (event.action.kind.is_send or event.action.kind.is_receive)]
        self.start = min(event.start for event in self.events)
        self.duration = max(event.end for event in self.events) - self.start
        self.peaks = [f"{peak:.4g}" for peak in timeline.peak_activations]
        self.left = MARGIN + max(LABEL, _width(f"rank {timeline.ranks - 1}") + 12)
        self.side = max(SIDE, max(map(_width, self.peaks)) + 12) + MARGIN
        self.scale = self._scale(width)
        self.plot = self.duration * self.scale
        self.width = self.left + self.plot + self.side
        #: for each stage which of its rank's stages it is, and how many that has
        self.local = [
            (timeline.stage_to_rank[:stage].count(rank), timeline.stage_to_rank.count(rank)) for stage, rank in enumerate(timeline.stage_to_rank)
        ]
        self.legend_lines = self._legend_lines()
        self.head = MARGIN + TITLE + LEGEND * len(self.legend_lines) + HEAD
        self.bottom = self.head + timeline.ranks * (ROW + SPACE)
        self.height = self.bottom + AXIS + MARGIN

    def _scale(self, width: float | None) -> float:
        """Pixels per unit of time."""
        if width is not None:
            if isinstance(width, bool) or not isinstance(width, int | float):
                raise ArgumentTypeError(f"the width of a timeline's picture must be a number of pixels, not {type(width).__name__}")
            plot = width - self.left - self.side
            if not LEAST <= plot <= 1e6:
                raise ArgumentError(f"a timeline cannot be drawn {width:g} pixels wide: expected from {LEAST + width - plot:.0f} to a million")
            return plot / self.duration if self.duration else 1.0
        needed = 0.0
        for kind in _ACTION_STYLES:
            boxes = [event for event in self.events if any(part.kind is kind for part in event.action.computations) and event.end > event.start]
            if boxes:
                label = max(_label_width(_label(part)) for event in boxes for part in event.action.computations)
                needed = max(needed, label / median(event.end - event.start for event in boxes))
        least, most = PLOT
        return min(max(needed * self.duration, least), most) / self.duration if self.duration else 1.0

    def lines(self) -> Iterator[str]:
        yield f'<text class="t" x="{MARGIN:g}" y="{MARGIN + 11:g}">{svg_text(self.title())}</text>'
        yield from self.legend()
        yield f'<text class="f e" x="{self.width - MARGIN:.1f}" y="{self.head - 6:g}">peak memory</text>'
        for rank, peak in enumerate(self.peaks):
            top = self.top(rank)
            yield f'<text x="{MARGIN:g}" y="{top + ROW / 2 + 4:g}">rank {rank}</text>'
            yield f'<rect x="{self.left:g}" y="{top:g}" width="{self.plot:.1f}" height="{ROW:g}" fill="#eef1f4"/>'
            yield f'<text class="f e" x="{self.width - MARGIN:.1f}" y="{top + ROW / 2 + 4:g}">{peak}</text>'
        for event in self.events:
            yield from self.boxes(event)
        yield from self.axis()

    def title(self) -> str:
        """The name, shortened to the room for it, and figures."""
        timeline = self.timeline
        ranks = "1 rank" if timeline.ranks == 1 else f"{timeline.ranks} ranks"
        facts = f"{ranks}, cost {timeline.cost:.6g}, bubble {100 * timeline.bubble_rate:.1f} %"
        name = " ".join(timeline.name.split())[:1000]
        room = self.width - 2 * MARGIN - text_width(f": {facts}", TITLE_TYPE)
        if text_width(name, TITLE_TYPE) > room:
            while name and text_width(f"{name}…", TITLE_TYPE) > room:
                name = name[:-1]
            name = f"{name}…" if name else ""
        return f"{name}: {facts}" if name else facts

    def top(self, rank: int) -> float:
        return self.head + rank * (ROW + SPACE)

    def _legend_lines(self) -> list[list[tuple[float, _ActionStyle | None, str]]]:
        """The legend of the colours that occur, wrapped to the width: lines of entries with position, colour if there is one, and text."""
        kinds = {part.kind for event in self.events for part in event.action.computations}
        entries: list[tuple[_ActionStyle | None, str]] = [(style, style.meaning) for kind, style in _ACTION_STYLES.items() if kind in kinds]
        if any(not event.action.kind.is_compute and event.end > event.start for event in self.events):
            entries.append((_OTHER, _OTHER.meaning))
        if any(count > 1 for _, count in self.local):
            entries.append((None, "paler: earlier stage"))
        lines: list[list[tuple[float, _ActionStyle | None, str]]] = [[]]
        x = MARGIN
        for style, text in entries:
            wide = (0 if style is None else 17) + _width(text)
            if lines[-1] and x + wide > self.width - MARGIN:
                lines.append([])
                x = MARGIN
            lines[-1].append((x, style, text))
            x += wide + 14
        return lines

    def legend(self) -> Iterator[str]:
        """The lines of the legend."""
        for nr, line in enumerate(self.legend_lines):
            y = MARGIN + TITLE + nr * LEGEND + 3
            for x, style, text in line:
                if style is not None:
                    yield f'<rect x="{x:.1f}" y="{y:g}" width="12" height="12" rx="2" fill="{_mixed(style.fill, 1.0)}"/>'
                yield f'<text class="f" x="{x + (0 if style is None else 17):.1f}" y="{y + 10:g}">{text}</text>'

    def boxes(self, event: TimelineEvent) -> Iterator[str]:
        """The box of an action; of an overlap, one above the other."""
        action = event.action
        parts = action.parts or (action,)
        if not action.kind.is_compute and event.end <= event.start:
            return
        x, width = self.left + (event.start - self.start) * self.scale, max((event.end - event.start) * self.scale, 0.5)
        height = ROW / len(parts)
        tip = f"rank {event.rank}, {action}: {event.start - self.start:.6g} to {event.end - self.start:.6g}"
        yield f"<g><title>{svg_text(tip)}</title>"
        for nr, part in enumerate(parts):
            y = self.top(event.rank) + nr * height
            yield (
                f'<rect class="b" x="{x:.2f}" y="{y:g}" width="{width:.2f}" height="{height:g}" fill="{self.colour(part)}"/>'
                + (f'<text class="m" x="{x + width / 2:.2f}" y="{y + height / 2 + 4:g}">{_label(part)}</text>' if _fits(part, width) else "")
            )
        yield "</g>"

    def colour(self, part: Action) -> str:
        style = _ACTION_STYLES.get(part.kind)
        if style is None:
            return _mixed(_OTHER.fill, 1.0)
        nr, count = self.local[part.stage]
        return _mixed(style.fill, 1.0 if count == 1 else _FIRST_STAGE + (1 - _FIRST_STAGE) * nr / (count - 1))

    def axis(self) -> Iterator[str]:
        y = self.bottom + 4
        yield f'<line x1="{self.left:g}" y1="{y:g}" x2="{self.left + self.plot:.1f}" y2="{y:g}"/>'
        for tick in _ticks(self.duration, max(2.0, self.plot / TICK)):
            x = self.left + tick * self.scale
            yield f'<line x1="{x:.1f}" y1="{y:g}" x2="{x:.1f}" y2="{y + 5:g}"/><text class="f m" x="{x:.1f}" y="{y + 18:g}">{tick:.6g}</text>'


def _label(part: Action) -> str:
    return part.kind.value[0] if part.microbatch is None else str(part.microbatch)


def _label_width(label: str) -> float:
    return DIGIT * len(label) + 7


def _fits(part: Action, width: float) -> bool:
    return width >= _label_width(_label(part)) - 4


def _width(text: str) -> float:
    return text_width(text, TYPE)


def _ticks(duration: float, count: float) -> Iterable[float]:
    """Round numbers from 0 to the duration, about so many."""
    if duration <= 0:
        return [0.0]
    rough = duration / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    return [nr * step for nr in range(math.floor(duration / step * (1 + 1e-9)) + 1)]


def _mixed(colour: tuple[int, int, int], share: float) -> str:
    """A colour mixed with white."""
    return "#" + "".join(f"{round(255 - (255 - part) * share):02x}" for part in colour)
