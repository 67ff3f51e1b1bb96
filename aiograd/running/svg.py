"""Pictures as SVG text, with type that can be read and nothing to load."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape


def svg_document(name: str, title: str, size: tuple[float, float], rules: Iterable[str], lines: Iterable[str]) -> str:
    """A picture on a white ground.

    Args:
        name: the class of the picture; each rule names it, so that it reaches into no other picture of a page.
        title: the title of the picture, which a browser shows.
        size: width and height in pixels.
        rules: style rules.
        lines: elements of the picture.

    Returns:
        The text of the SVG.
    """
    width, height = size
    family = "Inter,'Helvetica Neue',Helvetica,Arial,'Liberation Sans','DejaVu Sans',sans-serif"
    style = "".join(f".{name} {rule}" for rule in (f"text{{font-family:{family}}}", *rules))
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="{name}" width="{width:.0f}" height="{height:.0f}" '
        f'viewBox="0 0 {width:.1f} {height:.1f}" role="img">',
        f"<title>{svg_text(title)}</title><style>{style}</style>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    )
    return "\n".join([*head, *lines, "</svg>"]) + "\n"


def svg_text(text: str) -> str:
    """Text that XML can hold."""
    return escape("".join(character if character.isprintable() else " " for character in text))


def text_width(text: str, size: float) -> float:
    """The width of a text in pixels: an estimate on the large side, for the usual sans-serif types.

    Args:
        text: the text.
        size: of the type, in pixels.
    """
    return size * sum(map(_advance, text))


def _advance(character: str) -> float:
    if character in "iljtfI.,:;|'!()[] ":
        return 0.3
    if character in "mwMW@%":
        return 0.9
    return 0.7 if character.isupper() else 1.0 if ord(character) > 0x2000 else 0.58
