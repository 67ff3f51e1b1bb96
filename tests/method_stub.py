"""Writes the stub of Tensor's methods, from which type checkers know them: ``python -m tests.method_stub``."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from aiograd.tensors.methods import TensorMethods

PATH = Path(__file__).parent.parent / "aiograd" / "tensors" / "methods.pyi"
METHODS: dict[str, Callable[..., Any]] = {name: method for name, method in vars(TensorMethods).items() if not name.startswith("_")}
WIDTH = 150
HEAD = '''"""The methods of Tensor that compute; written by ``python -m tests.method_stub``."""

# ruff: noqa: E704

import builtins
from collections.abc import Sequence
from typing import Any, Generic, TypeAlias, TypeVar

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
        else:
            first[method] = name
            yield _declared(name, inspect.signature(method))


def _declared(name: str, signature: inspect.Signature) -> str:
    itself, *rest = signature.parameters.values()
    result = "T" if name.endswith("_") else _type(signature.return_annotation)
    parameters = [itself.replace(name="self", annotation=itself.empty), *(each.replace(annotation=_type(each.annotation)) for each in rest)]
    line = f"    def {name}{inspect.Signature(parameters)} -> {result}: ..."
    return line if len(line) <= WIDTH else line.replace("(", "(\n        ", 1).replace(f") -> {result}:", f"\n    ) -> {result}:")


class _Type(str):
    """The text of a type, which a signature shows without quotes."""

    __repr__ = str.__str__


def _type(annotation: str) -> _Type:
    """An annotation as it reads in the class, whose methods hide some types of the same name."""
    named = re.sub(r"(?:builtins\.)?\b(\w+)\b", lambda found: f"builtins.{found[1]}" if found[1] in METHODS else found[1], annotation)
    return _Type(named.replace("ArrayLike", "ArrayLike[T]").replace("Tensor", "T"))


if __name__ == "__main__":
    PATH.write_text(stub(), encoding="utf-8")
