"""The parameters and buffers of modules that are to be alike on several workers, as they are compared. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from aiograd.coordination.message_form import WireMessage, message


def tensors_of(module: Any) -> dict[str, Any]:
    """Parameters and buffers of a module by name, also outside of its state dict."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@message(code="outline", wire=list)
class TensorOutline(WireMessage):
    """A parameter or buffer."""

    name: str
    kind: str
    shape: list[int]
    dtype: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name} of {self.dtype}{self.shape}"


@message(code="outline", wire=list)
class ModuleOutline(WireMessage):
    """The parameters and buffers of modules, as equal members compare them."""

    tensors: list[TensorOutline]

    @classmethod
    def of(cls, modules: Mapping[str, Any]) -> ModuleOutline:
        """The outline of modules.

        Args:
            modules: by the prefix of their names in the outline.

        Returns:
            The outline, in the order of the modules.
        """
        found = []
        for prefix, module in modules.items():
            kinds = {name: "parameter" if each.requires_grad else "parameter without gradient" for name, each in module.named_parameters()}
            for name, each in tensors_of(module).items():
                found.append(TensorOutline(prefix + name, kinds.get(name, "buffer"), [*each.shape], str(np.dtype(each.dtype))))
        return cls(found)


def difference(expected: Sequence[TensorOutline], found: Sequence[TensorOutline]) -> str | None:
    """The first difference between two outlines, in words; None if there is none."""
    for index, (mine, theirs) in enumerate(zip(expected, found, strict=False)):
        if mine != theirs:
            return f"number {index} is {theirs}, expected {mine}"
    if len(expected) != len(found):
        longer = max(expected, found, key=len)
        which = "has no" if longer is expected else "has a further"
        return f"it {which} {longer[min(len(expected), len(found))]}"
    return None
