"""Standard output of commands whose text comes from elsewhere."""

from __future__ import annotations

import sys


def print_text(text: str) -> None:
    """Print a text; characters that the terminal does not have are question marks."""
    encoding = sys.stdout.encoding or "utf-8"
    print(text.encode(encoding, "replace").decode(encoding), flush=True)
