"""Code outside of aiograd that takes the values of a tensor that requires grad: which code it is, and what records in its place.

Functions of SciPy that are written in Python call ``np.asarray`` of their arguments, so an error about the conversion is the only place where aiograd
hears of them: the frames of the call say which function it is.

Note [Stores into arrays]
    ``array[0] = t`` of an ndarray, an ``array.array`` or a memoryview asks a 0-d tensor for its ``__float__``, as ``float(t)`` does. The second
    is how a program reads a number; the first keeps the number among others and drops the gradient. The frame that asks tells them apart: it
    executes a store.
"""

from __future__ import annotations

import dis
import sys
from types import FrameType, FunctionType
from typing import Any

from aiograd.errors import GraphError
from aiograd.running.modes import current_mode

#: distributions of ``scipy.stats``, and the classes of `aiograd.distributions` for them
_DISTRIBUTIONS = {
    "norm": "Normal", "uniform": "Uniform", "gamma": "Gamma", "beta": "Beta", "dirichlet": "Dirichlet", "bernoulli": "Bernoulli",
    "multinomial": "Multinomial",
}  # fmt: skip
#: methods of those distributions, and of these classes
_METHODS = {"logpdf": "log_prob", "logpmf": "log_prob", "cdf": "cdf", "ppf": "icdf", "entropy": "entropy", "rvs": "rsample"}
_STORE = dis.opmap["STORE_SUBSCR"]


def refuse_stores(frame: FrameType) -> None:
    """Raise if a frame that asks a tensor that requires grad for a number stores it; see Note [Stores into arrays].

    Raises:
        GraphError
    """
    if frame.f_lasti >= 0 and frame.f_code.co_code[frame.f_lasti] == _STORE and current_mode().grad:
        raise GraphError(
            "storing a tensor that requires grad in an array of plain numbers would drop its graph: make one tensor of several with aiograd.stack(), "
            "assign to a tensor, or store its detach()."
        )


def advice(found: str | None) -> str:
    """The advice in place of a function that would drop a graph: its counterpart, where there is one."""
    if found is not None:
        return f"Use {found}, which records; detach().numpy() is for values without a gradient."
    return "It has no counterpart here: write an aiograd.Function around it. detach().numpy() is for values without a gradient."


def array_advice(frame: FrameType) -> str:
    """The end of the message about a tensor that code asks for an array: what to do about it.

    Args:
        frame: the one that asks.
    """
    name, found = _running(frame)
    if name is None:
        return ": use detach().numpy() where its values are meant."
    return f" in {name}. {advice(found)}"


def counterpart(*path: str) -> str | None:
    """The name of aiograd's function for ``linalg.inv`` of another library, given as ``("linalg", "inv")``; None: there is none."""
    for parts in (path, path[-1:]) if path else ():
        owner: Any = sys.modules["aiograd"]
        for part in parts:
            owner = vars(owner).get(part) if hasattr(owner, "__dict__") else None
        if callable(owner) and not path[-1].startswith("_"):
            return ".".join(("aiograd", *parts))
    return None


def _running(frame: FrameType | None) -> tuple[str | None, str | None]:
    """The public function of SciPy that frames belong to, and its counterpart; the outermost one that has a counterpart, if any has."""
    known: list[tuple[str, str | None]] = []
    while frame is not None:
        home = frame.f_globals.get("__name__", "").split(".")
        if home[0] not in ("scipy", "numpy"):
            break
        if home[0] == "scipy":
            known.extend(_named(frame))
        frame = frame.f_back
    known.reverse()
    return next((each for each in known if each[1] is not None), known[0] if known else (None, None))


def _named(frame: FrameType) -> list[tuple[str, str | None]]:
    """The public name of the SciPy function that a frame executes or decorates, and the counterpart; empty: there is no public name."""
    variables, name = frame.f_locals, frame.f_code.co_name
    owner = variables.get("self")
    if owner is not None and name in _METHODS and frame.f_globals["__name__"].startswith("scipy.stats."):
        owner = getattr(owner, "dist", owner)  # of a frozen distribution
        family = getattr(owner, "name", None) or type(owner).__name__.removesuffix("_gen")
        known = f"aiograd.distributions.{_DISTRIBUTIONS[family]}(...).{_METHODS[name]}" if family in _DISTRIBUTIONS else None
        return [(f"scipy.stats.{family}.{name}", counterpart("stats", family, name) or known)]
    decorated = (variables.get(free) for free in frame.f_code.co_freevars)
    functions = [(frame.f_globals["__name__"], name), *((f.__module__, f.__name__) for f in decorated if isinstance(f, FunctionType))]
    for home, name in functions:
        parts = home.split(".")
        for end in range(len(parts), 1, -1):
            module = ".".join(parts[:end])
            public = parts[0] == "scipy" and not any(part.startswith("_") for part in (*parts[:end], name))
            if public and callable(getattr(sys.modules.get(module), name, None)):
                return [(f"{module}.{name}", counterpart(parts[1], name))]
    return []
