"""``.. public:: aiograd`` with module prefixes: documentation of the public names of a module that are defined in those modules.

The public names are those of ``tests/public_names.py``. A name that is documented nowhere is a warning, and so an error of ``make docs``.
"""

from __future__ import annotations

from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util import logging
from sphinx.util.docutils import SphinxDirective

from aiograd.running.stability import Stability, stability_of
from tests.public_names import MODULES, NAMESPACES, PublicName, public_names

_SERVING = {name.name for name in public_names("aiograd.serving")}
DOCUMENTED: set[tuple[str, str]] = set()
KINDS = {"class": "autoclass", "exception": "autoexception", "function": "autofunction", "data": "autodata"}


class Public(SphinxDirective):
    """Documentation of public names.

    The arguments are the public module and, in the order wanted, prefixes of the modules that define its names, all of them where none is given;
    names without a defining module, such as constants, belong to the prefix ``data``.
    """

    required_arguments = 1
    optional_arguments = 100
    def run(self) -> list[nodes.Node]:
        module, *prefixes = self.arguments
        if prefixes:
            found = [name for prefix in prefixes for name in public_names(module) if name.is_defined_in(prefix)]
            chosen = [*{name.name: name for name in found}.values()]  # once, where the first of the prefixes is
        else:
            chosen = [*public_names(module)]
        if not chosen:
            raise self.error(f"{module} has no public names from {' '.join(prefixes)}")
        return [node for name in chosen for node in self._documented(module, name)]

    def _documented(self, module: str, name: PublicName) -> list[nodes.Node]:
        DOCUMENTED.add((module, name.name))
        if name.kind == "data" and not type(name.value).__module__.startswith("aiograd"):  # a dtype or a number: its own docstring is no help
            return self.parse_text_to_nodes(f".. data:: {module}.{name.name}\n   :value: {name.value!r}\n")
        lines = [f".. {KINDS[name.kind]}:: {module}.{name.name}"]
        level = stability_of(f"{module}.{name.name}")
        note = [] if level is Stability.STABLE else [f"*{level.value.capitalize()}*: see :doc:`stability`.", ""]
        if name.kind == "class":
            lines += [f"   :members: {', '.join(_members(name.value))}".rstrip(), "   :show-inheritance:"]
        return [*self.parse_text_to_nodes("\n".join(note) + "\n"), *self.parse_text_to_nodes("\n".join(lines) + "\n")]


def _members(cls: type[Any]) -> list[str]:
    """The members of a class with bases in `aiograd.serving` that are not public; none for any other class, which shows its own."""
    bases = [base for base in cls.__mro__[1:] if base.__module__.startswith("aiograd.serving.") and base.__name__ not in _SERVING]
    members = {name: None for base in (cls, *bases) for name in vars(base) if not name.startswith("_")}
    return list(members) if bases else []


def check(app: Sphinx, env: Any) -> None:
    """Warn of each public name that no page documents."""
    for module in MODULES:
        for name in public_names(module):
            if (module, name.name) not in DOCUMENTED and f"{module}.{name.name}" not in NAMESPACES:
                logging.getLogger(__name__).warning("%s.%s is public, and no page of the reference documents it", module, name.name)


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("public", Public)
    app.connect("env-check-consistency", check)
    return {"parallel_read_safe": False}
