"""The pages of the documentation, and the code in them: README and ``docs``."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
#: fragments of the changelog become part of its page
FRAGMENTS = {*(ROOT / "docs" / "changes").glob("*.*.md")}
PAGES = (README, ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted({*(ROOT / "docs").rglob("*.md")} - FRAGMENTS))
TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text() for page in PAGES}
#: all pages, one after the other
TEXT = "\n\n".join(TEXTS.values())


def blocks(language: str, text: str = TEXT) -> list[str]:
    """The fenced blocks of a language; a block that stands on two pages is there once."""
    return list(dict.fromkeys(re.findall(rf"^```{language}\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)))


def complaints_in(stderr: str) -> list[str]:
    """The lines of a program's standard error, but for event loops that are held up, as they are on a busy machine."""
    return [line for line in stderr.splitlines() if "the event loop has been held up for" not in line]
