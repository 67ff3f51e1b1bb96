"""The signatures by which a function may be called: its own, with PyTorch's names of parameters, with numpy's; the stubs declare each.

See Note [Names of parameters] in `aiograd.array_functions.names`. A checker accepts the names of one library in a call, not a mixture.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection, Iterator, Mapping

from aiograd.array_functions.names import PARAMETERS, SHAPES

#: names of `PARAMETERS` that are numpy's
NUMPY = frozenset({"ddof", "indices_or_sections"})
#: functions of which PyTorch names an axis ``dims``, as it does where they are ``axes`` here, but in its ``fft``
PLURAL = frozenset({"flip", "roll"})


def spellings(name: str, signature: inspect.Signature) -> Iterator[inspect.Signature]:
    """The signatures of a function of that name; the first is `signature`."""
    yield signature
    others = _others(name, signature.parameters)
    plural = {own for own in others if name in PLURAL or (own == "axes" and "fft" not in name)}
    for is_numpy in (False, True):
        chosen = {own: short for own, shorts in others.items() if (short := _chosen(shorts, own in plural, is_numpy))}
        if chosen:
            yield _renamed(signature, chosen)
    if name in SHAPES:
        yield _gathering(signature)


def _others(name: str, parameters: Collection[str]) -> dict[str, list[str]]:
    """Parameter -> the other names that it has; where it has some in this function alone, those."""
    found: dict[str, list[str]] = {}
    special: dict[str, list[str]] = {}
    for short in dict.fromkeys(other.rpartition(".")[2] for other in PARAMETERS):
        owns = PARAMETERS.get(f"{name}.{short}") or PARAMETERS.get(short, ())
        own = next((own for own in owns if own in parameters), None)
        if own is not None and short not in parameters:
            (special if f"{name}.{short}" in PARAMETERS else found).setdefault(own, []).append(short)
    return found | special


def _chosen(shorts: Collection[str], is_plural: bool, is_numpy: bool) -> str | None:
    fitting = [short for short in shorts if (short in NUMPY) is is_numpy]
    return "dims" if is_plural and "dims" in fitting else next(iter(fitting), None)


def _renamed(signature: inspect.Signature, chosen: Mapping[str, str]) -> inspect.Signature:
    """Parameters under other names, by which they can be given, and so can those behind them."""
    named = False
    parameters: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        own = parameter.name
        named = named or own in chosen
        kind = parameter.kind
        if kind is parameter.VAR_POSITIONAL and own in chosen:
            kind = parameter.KEYWORD_ONLY
        elif kind is parameter.POSITIONAL_ONLY and named:
            kind = parameter.POSITIONAL_OR_KEYWORD
        parameters.append(parameter.replace(name=chosen.get(own, own), kind=kind))
    return signature.replace(parameters=parameters)


def _gathering(signature: inspect.Signature) -> inspect.Signature:
    """The first parameter, a shape, as several ints."""
    shape, *rest = signature.parameters.values()
    several = shape.replace(kind=shape.VAR_POSITIONAL, annotation="int", default=shape.empty)
    return signature.replace(parameters=[several, *(each.replace(kind=each.KEYWORD_ONLY) for each in rest)])
