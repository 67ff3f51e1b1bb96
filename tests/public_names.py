"""The public names of the package: what the reference documents, and what the tests of docstrings look at."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import types
from collections.abc import Iterator
from typing import Any, NamedTuple

#: the public modules; their ``__all__``, or where they have none the names that they import under the same name (``X as X``), are public
MODULES = (
    "aiograd", "aiograd.linalg", "aiograd.special", "aiograd.fft", "aiograd.distributions", "aiograd.stats", "aiograd.nn", "aiograd.nn.functional",
    "aiograd.nn.init", "aiograd.optim", "aiograd.data", "aiograd.graph", "aiograd.implicit", "aiograd.parallel", "aiograd.profiler", "aiograd.viz",
    "aiograd.kernels", "aiograd.cuda", "aiograd.distributed", "aiograd.distributed.moe", "aiograd.pipeline", "aiograd.serving", "aiograd.testing",
    "aiograd.transaction", "aiograd.interop", "aiograd.interop.torch", "aiograd.interop.jax", "aiograd.errors",
)  # fmt: skip
#: public names that are modules
NAMESPACES = {*MODULES, "aiograd.distributed.cluster"}


class PublicName(NamedTuple):
    """A public name, and the object that it stands for."""

    module: str
    name: str
    value: Any

    @property
    def kind(self) -> str:
        """``class``, ``exception``, ``function`` or ``data``."""
        if inspect.isclass(self.value):
            return "exception" if issubclass(self.value, BaseException) else "class"
        return "function" if inspect.isroutine(self.value) else "data"

    def is_defined_in(self, prefix: str) -> bool:
        """True if a module of that name, or in that package, defines the object; constants are defined in ``data``."""
        home = "data" if self.kind == "data" else self.value.__module__
        return home == prefix or home.startswith(f"{prefix}.")


def load(module: str) -> types.ModuleType:
    """A public module, which may be an attribute of its parent (`aiograd.linalg`)."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError:
        parent, _, name = module.rpartition(".")
        return getattr(load(parent), name)  # type: ignore[no-any-return]


@functools.cache
def public_names(module: str) -> tuple[PublicName, ...]:
    """The public names of a module that are not modules, sorted."""
    loaded = load(module)
    names = getattr(loaded, "__all__", None) or _exported(inspect.getsource(loaded))
    found = (PublicName(module, name, getattr(loaded, name)) for name in sorted(names))
    return tuple(name for name in found if not inspect.ismodule(name.value))


def _exported(source: str) -> set[str]:
    """The names that a module without ``__all__`` defines or imports under the same name."""
    names = set[str]()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
    for node in ast.parse(source).body:
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)) and not node.name.startswith("_"):
            names.add(node.name)
    return names


def public_callables() -> Iterator[tuple[str, Any]]:
    """Each public function and class, and the public functions of public classes, once, with its dotted name."""
    seen = set[int]()
    for module in MODULES:
        for public in public_names(module):
            value = public.value
            if not callable(value) or id(value) in seen or not getattr(value, "__module__", "").startswith("aiograd"):
                continue
            seen.add(id(value))
            yield f"{module}.{public.name}", value
            for name, member in vars(value).items() if inspect.isclass(value) else ():
                function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
                if not name.startswith("_") and inspect.isfunction(function) and id(function) not in seen:
                    seen.add(id(function))
                    yield f"{module}.{public.name}.{name}", function
