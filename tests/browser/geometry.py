"""Places on a page, measured by a browser: texts that lie over lines, boxes or each other, and elements wider than their room.

Expressions for `playwright`, each a function of elements of the page; every one gives a list of what is wrong, in words.
"""

from __future__ import annotations

#: in the pictures of a selector: labels that a line runs through, that lie over a box or another label, or outside of their picture
COLLISIONS = """(selector) => {
  const found = [];
  const inner = (box, by) => ({ left: box.left + by, right: box.right - by, top: box.top + by, bottom: box.bottom - by });
  const meet = (one, other) => one.left < other.right && other.left < one.right && one.top < other.bottom && other.top < one.bottom;
  for (const picture of document.querySelectorAll(selector)) {
    const frame = picture.getBoundingClientRect();
    const labels = [...picture.querySelectorAll("text.link, text.e")].map((text) => [text.textContent, text.getBoundingClientRect()]);
    const lines = [...picture.querySelectorAll(".crossing, path.a")].map((line) => {
      const matrix = line.getScreenCTM();
      const length = line.getTotalLength();
      return Array.from({ length: 200 }, (_, i) => line.getPointAtLength((i / 199) * length).matrixTransform(matrix));
    });
    const boxes = [...picture.querySelectorAll("circle[data-worker], g.node, .aiograd-graph g > rect")].map((box) => box.getBoundingClientRect());
    labels.forEach(([text, label], i) => {
      if (lines.some((points) => points.some((p) => p.x > label.left && p.x < label.right && p.y > label.top + 2 && p.y < label.bottom - 2)))
        found.push(`a line runs through ${text}`);
      if (boxes.some((box) => meet(inner(label, 2), box))) found.push(`${text} lies over a box`);
      for (const [other, place] of labels.slice(0, i)) if (meet(inner(label, 1), inner(place, 1))) found.push(`${text} lies over ${other}`);
      if (label.left < frame.left - 1 || label.right > frame.right + 1 || label.top < frame.top - 1 || label.bottom > frame.bottom + 1)
        found.push(`${text} is cut off`);
    });
  }
  return found;
}"""

#: in the pictures of a selector: text that is wider or higher than the box that it stands in
OVERFULL = """(selector) => [...document.querySelectorAll(selector)].flatMap((group) => {
  const box = group.querySelector("rect").getBoundingClientRect();
  return [...group.querySelectorAll("text")].filter((text) => {
    const place = text.getBoundingClientRect();
    return place.left < box.left || place.right > box.right || place.top < box.top - 1 || place.bottom > box.bottom + 1;
  }).map((text) => `${text.textContent} is larger than its box`);
})"""

#: elements of a selector, or of all of the page, that have more in them than fits and do not say so
OVERFLOWS = """(selector) => {
  const found = [];
  const room = document.documentElement.clientWidth;
  if (document.documentElement.scrollWidth > room) found.push(`the page is ${document.documentElement.scrollWidth} wide`);
  for (const element of document.querySelectorAll(selector)) {
    const box = element.getBoundingClientRect();
    if (!box.width || !box.height || element.closest(".said, .skip")) continue;
    const name = `${element.tagName.toLowerCase()}${element.id ? `#${element.id}` : ""} ${element.textContent.trim().slice(0, 40)}`;
    const style = getComputedStyle(element);
    if (style.textOverflow === "ellipsis") continue;
    const note = element.parentElement.querySelector(":scope > .more");
    if (note && !note.hidden) continue;
    const [wide, tall] = [element.scrollWidth, element.scrollHeight];
    if (wide > element.clientWidth + 1 && style.display !== "inline") found.push(`${name}: ${wide} in ${element.clientWidth}`);
    if (tall > element.clientHeight + 1 && style.overflowY !== "visible") found.push(`${name}: ${tall} high in ${element.clientHeight}`);
    if (box.right > room + 1 && !element.closest(".graph-box")) found.push(`${name}: sticks out by ${Math.round(box.right - room)}`);
  }
  return [...new Set(found)];
}"""

#: what of the dashboard has to fit: everything but what is drawn inside of pictures
PARTS = "main *:not(svg *), header *"

#: elements of a selector that can be seen whole in the box of another, without scrolling in it
SEEN = """([selector, container]) => {
  const frame = document.querySelector(container).getBoundingClientRect();
  return [...document.querySelectorAll(selector)].filter((element) => {
    const box = element.getBoundingClientRect();
    return box.left >= frame.left - 1 && box.right <= frame.right + 1 && box.top >= frame.top - 1 && box.bottom <= frame.bottom + 1;
  }).length;
}"""
