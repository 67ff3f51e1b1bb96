"""The output of the demo: headings, facts, checks, and a progress bar on a terminal.

Where the output is no terminal there is a line per epoch instead of the bar, and signs that its encoding lacks are replaced by plainer ones.
"""

from __future__ import annotations

import shutil
import sys
import textwrap
from types import TracebackType
from typing import Any, Self, TextIO

WIDTH = 112
#: replacements for signs that an encoding does not have
PLAIN = {"✓": "ok", "✗": "FAILED", "✂": "--", "×": "x", "→": "->", "–": "-", "…": "..."}


class Display:
    """Prints to one stream.

    Args:
        stream: standard output by default.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        self._stream = sys.stdout if stream is None else stream
        self._bar: Bar | None = None
        #: promised checks that failed
        self.failures: list[str] = []

    @property
    def is_terminal(self) -> bool:
        """True if the output is a terminal."""
        return self._stream.isatty()

    def say(self, text: str = "") -> None:
        """Print a line, above the bar if there is one."""
        if self._bar is not None:
            self._bar.hide()
        self._stream.write(self.encodable(text) + "\n")
        self._stream.flush()
        if self._bar is not None:
            self._bar.show()

    def heading(self, text: str) -> None:
        """Begin a part."""
        self.say()
        self.say(text)

    def note(self, text: str, sign: str = " ") -> None:
        """A fact, wrapped, after a sign."""
        sign = self.encodable(sign)
        lead = f"  {sign} "
        width = min(WIDTH, shutil.get_terminal_size((WIDTH, 24)).columns - 1)
        self.say(textwrap.fill(text, width, initial_indent=lead, subsequent_indent=" " * len(lead), break_long_words=False, break_on_hyphens=False))

    def check(self, passed: bool, text: str) -> bool:
        """Something that the demo promises, with whether it is so; returns it."""
        self.note(text, "✓" if passed else "✗")
        if not passed:
            self.failures.append(text)
        return passed

    def bar(self, total: int) -> Bar:
        """A progress bar of `total` steps, to be used with ``with``."""
        self._bar = Bar(self, self._stream, total, wants_blocks=self.encodable("█") == "█")
        return self._bar

    def forget_bar(self) -> None:
        """The bar is gone."""
        self._bar = None

    def encodable(self, text: str) -> str:
        """`text` with signs that the stream's encoding has."""
        encoding = getattr(self._stream, "encoding", None) or "utf-8"
        try:
            text.encode(encoding)
            return text
        except UnicodeEncodeError:
            for sign, plain in PLAIN.items():
                text = text.replace(sign, plain)
            return text.encode(encoding, "replace").decode(encoding)


class Bar:
    """Progress: a bar of tqdm on a terminal (if tqdm is installed), nothing elsewhere."""

    def __init__(self, display: Display, stream: TextIO, total: int, *, wants_blocks: bool) -> None:
        self._display = display
        self._bar: Any = None
        if display.is_terminal:
            try:
                from tqdm import tqdm
            except ImportError:
                return
            form = "    {percentage:3.0f}%|{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}]{postfix}"
            columns = shutil.get_terminal_size((WIDTH, 24)).columns - 1
            self._bar = tqdm(total=total, file=stream, ascii=not wants_blocks, bar_format=form, ncols=columns)

    def step(self, count: int, text: str) -> None:
        """So many steps are done; `text` says how it goes."""
        if self._bar is not None:
            self._bar.set_postfix_str(self._display.encodable(text), refresh=False)
            self._bar.update(count - self._bar.n)

    def hide(self) -> None:
        """Make room for a line."""
        if self._bar is not None:
            self._bar.clear()

    def show(self) -> None:
        """Come back below it."""
        if self._bar is not None:
            self._bar.refresh()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._display.forget_bar()
        if self._bar is not None:
            self._bar.refresh()
            self._bar.close()


def megabytes(count: float) -> str:
    """Bytes for people."""
    return f"{count / 1e6:.1f} MB" if count >= 1e5 else f"{count / 1e3:.1f} kB"
