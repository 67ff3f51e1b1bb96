"""Writes the stub of Tensor's methods, from which type checkers know them: ``python -m tests.method_stub``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiograd.tensors.methods import TensorMethods
from tests.spellings import spellings

PATH = Path(__file__).parent.parent / "aiograd" / "tensors" / "methods.pyi"
METHODS: dict[str, Callable[..., Any]] = {name: method for name, method in vars(TensorMethods).items() if not name.startswith("_")}
WIDTH = 150
HEAD = '''"""The methods of Tensor that compute; written by ``python -m tests.method_stub``."""

# ruff: noqa: E704

import builtins
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar, overload

import numpy.typing as npt

from aiograd.ops.decomposition import QRResult, SVDResult
from aiograd.ops.determinant import SlogdetResult
from aiograd.ops.statistics import MinMax

T = TypeVar("T")
ArrayLike: TypeAlias = T | npt.ArrayLike
Axis: TypeAlias = int | Sequence[int] | None

class TensorMethods(Generic[T]):
'''


def stub() -> str:
    """The text of the stub."""
    return HEAD + "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    first: dict[object, str] = {}
    for name, method in sorted(METHODS.items()):
        if method in first:
            yield f"    {name} = {first[method]}"
            continue
        first[method] = name
        signatures = [_typed(name, spelled) for spelled in spellings(method.__name__, inspect.signature(method))]
        for signature in signatures:
            if len(signatures) > 1:
                yield "    @overload"
            yield declared("    ", name, signature)


def _typed(name: str, signature: inspect.Signature) -> inspect.Signature:
    itself, *rest = signature.parameters.values()
    result = Shown("T") if name.endswith("_") else _type(signature.return_annotation)
    parameters = [itself.replace(name="self", annotation=itself.empty), *(each.replace(annotation=_type(each.annotation)) for each in rest)]
    return signature.replace(parameters=parameters, return_annotation=result)


def declared(indent: str, name: str, signature: inspect.Signature) -> str:
    """The declaration of a function, in one line where it fits."""
    line = f"{indent}def {name}{signature}: ..."
    if len(line) <= WIDTH:
        return line
    before, arrow, result = line.rpartition(") -> ")
    return before.replace("(", f"(\n{indent}    ", 1) + f"\n{indent}{arrow}{result}"


class Shown(str):
    """Text that a signature shows without quotes: of a type, of a default."""

    __repr__ = str.__str__


def _type(annotation: str) -> Shown:
    """An annotation as it reads in the class, whose methods hide some types of the same name."""
    named = re.sub(r"(?:builtins\.)?\b(\w+)\b", lambda found: f"builtins.{found[1]}" if found[1] in METHODS else found[1], annotation)
    return Shown(named.replace("ArrayLike", "ArrayLike[T]").replace("Tensor", "T"))


if __name__ == "__main__":
    PATH.write_text(stub(), encoding="utf-8")
