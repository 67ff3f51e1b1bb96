"""The functions that are watched, and the functions that are not.

Note [Which functions are watched]
    Every Python function that runs on the recording thread is watched if it belongs to the user, to an installed package, to the standard library
    when one of these calls it, or to a part of this package with objects that carry the user's attributes, such as modules of a network
    (`_OWN_PARTS`); and so is text that `eval` or `exec` runs. The rest of the package, numpy, and the packages that devices name (`register_device`)
    compute from their arguments: all values are read in containers and arrays among these. Functions that print or log have no result that counts,
    importing a module is no part of a computation, and a call that programs make anew at every run reads anew then: these are not watched, nor is
    anything that they call.
"""

from __future__ import annotations

import functools
import os
import sysconfig
from types import CodeType
from typing import Any

from aiograd.running.devices import computing_packages

#: parts of the package with objects that carry the user's attributes
_OWN_PARTS = ("aiograd.nn", "aiograd.distributions", "aiograd.functional.derivatives")
_OWN_FUNCTIONS = "aiograd.nn.functional"
_PACKAGES_THAT_COMPUTE = ("aiograd", "numpy")
_TELL = ("logging", "warnings", "_frozen_importlib", "_frozen_importlib_external", "importlib")
#: module and name of the function by which calls that programs repeat are made
_REPEATS = ("aiograd.compiler.recorded_calls", "call_repeated")
_STANDARD = tuple([sysconfig.get_path(name) + os.sep for name in ("stdlib", "platstdlib")])
_INSTALLED = tuple([sysconfig.get_path(name) + os.sep for name in ("purelib", "platlib")])


def is_watched(code: CodeType, names: dict[str, Any]) -> bool:
    """True for a function with watched instructions.

    Args:
        code: of the function.
        names: its globals.
    """
    return _is_watched(code, str(names.get("__name__", "")), computing_packages())


@functools.lru_cache(8192)
def _is_watched(code: CodeType, module: str, of_devices: frozenset[str]) -> bool:
    root = module.partition(".")[0]
    if root == "aiograd":
        return _is_in(module, _OWN_PARTS) and not _is_in(module, (_OWN_FUNCTIONS,))
    return root not in _PACKAGES_THAT_COMPUTE and not _is_in(module, tuple(of_devices))


def tells(code: CodeType, names: dict[str, Any]) -> bool:
    """True for a function that is left alone with all that it calls."""
    module = str(names.get("__name__", ""))
    return module.partition(".")[0] in _TELL or (module, code.co_name) == _REPEATS


def has_own_names(code: CodeType, names: dict[str, Any]) -> bool:
    """True for a function with global names that user code may set: none of this package or of the standard library."""
    return str(names.get("__name__", "")).partition(".")[0] != "aiograd" and not is_standard(code)


def is_standard(code: CodeType) -> bool:
    """True for a function of the standard library."""
    file = code.co_filename
    return file.startswith("<frozen") or (file.startswith(_STANDARD) and not file.startswith(_INSTALLED))


def _is_in(module: str, packages: tuple[str, ...]) -> bool:
    return any(module == package or module.startswith(f"{package}.") for package in packages)
