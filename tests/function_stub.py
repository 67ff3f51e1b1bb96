"""Writes the stubs of the public array functions, with the other names of their parameters: ``python -m tests.function_stub``.

Functions of `ag.fft`, `ag.linalg` and `ag.special` stand in stubs of their own, so that checkers look at the bodies of the modules themselves.
"""

from __future__ import annotations

import builtins
import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from aiograd import array_functions
from aiograd.array_functions import public
from tests.method_stub import WIDTH, Shown, declared
from tests.spellings import spellings

PATH = Path(array_functions.__file__).parent / "public.pyi"
HEAD = '''"""The public array functions, with PyTorch's and numpy's names of parameters; written by ``python -m tests.function_stub``."""

# ruff: noqa: E501, E704, I001

import builtins
from collections.abc import Sequence
from typing import Any, overload

import numpy

from aiograd.array_functions.named import fft as fft
from aiograd.array_functions.named import linalg as linalg
from aiograd.array_functions.named import special as special
from aiograd.array_functions.conversion import ArrayLike, Axis
from aiograd.ops.statistics import MinMax
from aiograd.running.random import Generator
from aiograd.running.types import Shape
from aiograd.tensors.tensor import Tensor
'''
#: families that are modules to users, and what the stub of each imports for its declarations
NAMESPACES = {
    "fft": "from collections.abc import Sequence\nfrom typing import overload\n",
    "linalg": "from collections.abc import Sequence\nfrom typing import Any, overload\n",
    "special": "from typing import overload\n",
}
NAMESPACE_HEAD = '''"""``ag.{name}`` with PyTorch's and numpy's names of parameters; written by ``python -m tests.function_stub``."""

# ruff: noqa: E704, I001

import builtins
{imports}
from aiograd.array_functions.conversion import ArrayLike{axis}
from aiograd.tensors.tensor import Tensor
'''
#: the name that `aiograd` has from another module, see `aiograd.running.scalars.log`
ELSEWHERE = frozenset({"log"})
FUNCTIONS: dict[str, Callable[..., Any]] = {name: each for name, each in vars(public).items() if hasattr(each, "__wrapped__") and name[0] != "_"}


def stub() -> str:
    """The text of the stub."""
    return HEAD + "\n".join([*_imports(), *_declarations(FUNCTIONS)]) + "\n"


def namespace_stub(name: str) -> str:
    """The text of the stub of a family that is a module to users."""
    module = importlib.import_module(f"{array_functions.__name__}.{name}")
    functions = {each: function for each in module.__all__ if hasattr(function := getattr(module, each), "__wrapped__")}
    rest = [f"{each} as {each}," for each in sorted({*module.__all__} - {*functions})] + ["Sizes,"] * (name == "fft")
    head = NAMESPACE_HEAD.format(name=name, imports=NAMESPACES[name], axis=", Axis" * (name != "fft"))
    return head + "\n".join([*_wrapped(f"from {module.__name__} import (", rest), *_declarations(functions)]) + "\n"


def stubs() -> dict[Path, str]:
    """The text of each stub, by its place."""
    return {PATH: stub(), **{PATH.parent / "named" / f"{name}.pyi": namespace_stub(name) for name in NAMESPACES}}


def _imports() -> Iterator[str]:
    """Imports of names that keep the types of their definitions."""
    taken = {*FUNCTIONS, *ELSEWHERE}
    for each in sorted(pkgutil.iter_modules(array_functions.__path__), key=lambda each: each.name):
        if each.name in NAMESPACES:
            continue
        module = importlib.import_module(f"{array_functions.__name__}.{each.name}")
        names = {name for name in getattr(module, "__all__", ()) if getattr(public, name, None) is getattr(module, name)} - taken
        taken |= names
        if names:
            yield from _wrapped(f"from {module.__name__} import (", [f"{name} as {name}," for name in sorted(names)])


def _wrapped(first: str, items: list[str]) -> Iterator[str]:
    yield first
    line = "   "
    for item in items:
        if len(line) + 1 + len(item) > WIDTH:
            yield line
            line = "   "
        line += f" {item}"
    yield line
    yield ")  # fmt: skip"


def _declarations(functions: Mapping[str, Callable[..., Any]]) -> Iterator[str]:
    for name, function in sorted(functions.items()):
        signature = inspect.signature(function)
        for spelled in spellings(function.__name__, signature):
            yield "@overload"
            yield declared("", name, _typed(spelled))


def _typed(signature: inspect.Signature) -> inspect.Signature:
    """A signature whose types stand for themselves where the stub is read, which exports ``bool``, ``int`` and others."""
    parameters = [each.replace(annotation=_type(each.annotation), default=_default(each.default)) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=_type(signature.return_annotation))


def _default(value: Any) -> Any:
    return Shown(f"{value.__module__}.{value.__name__}") if inspect.isclass(value) and value is not inspect.Parameter.empty else value


def _type(annotation: str) -> Shown:
    def named(found: re.Match[str]) -> str:
        return f"builtins.{found[1]}" if isinstance(getattr(builtins, found[1], None), type) else found[1]

    return Shown(re.sub(r"(?:builtins\.)?\b(\w+)\b", named, annotation))


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text, encoding="utf-8")
