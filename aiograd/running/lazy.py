"""Names of a package that are imported on first access (PEP 562)."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from aiograd.errors import UnknownNameError


def on_first_use(
    package: str, names: Mapping[str, str] | None = None, *, modules: Iterable[str] = (), load: Callable[[str], Any] = importlib.import_module
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """``__getattr__`` and ``__dir__`` of a package::

        if TYPE_CHECKING:                                      # for checkers and editors, which then know every name
            from aiograd.testing.network import Faults as Faults
        else:                                                  # a checker that sees __getattr__ takes any name for defined
            __getattr__, __dir__ = on_first_use(__name__, {"Faults": "aiograd.testing.network"})

    Threads that access one name at the same time all get it once its module is complete; the import system ensures that.

    Args:
        package: the ``__name__`` of the package.
        names: name -> module that defines it.
        modules: modules of the package, by their dotted names below it; each is an attribute by the last part.
        load: imports a module.
    """
    homes = dict(names or {})
    places = {module.rpartition(".")[2]: f"{package}.{module}" for module in modules}

    def __getattr__(name: str) -> Any:
        if name in places:
            value = load(places[name])
        elif name in homes:
            value = getattr(load(homes[name]), name)
        else:
            raise UnknownNameError(f"module {package!r}", name, __dir__)
        setattr(sys.modules[package], name, value)
        return value

    def __dir__() -> list[str]:
        return sorted({*vars(sys.modules[package]), *homes, *places})

    return __getattr__, __dir__
