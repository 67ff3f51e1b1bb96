"""Every public array function by its name, ready for use: with its documentation, the other names of its parameters and its method of Tensor.

A family lists its names in ``__all__``; they stand in no other list. Type checkers read the stub beside this file, which ``python -m
tests.function_stub`` writes: with it they know the other names of parameters too.
"""

import sys as _sys
from types import FunctionType as _FunctionType

from aiograd.array_functions import fft as fft
from aiograd.array_functions import linalg as linalg
from aiograd.array_functions import method_forms as _method_forms
from aiograd.array_functions import methods as _methods
from aiograd.array_functions import special as special
from aiograd.array_functions.activation import *
from aiograd.array_functions.aliases import *
from aiograd.array_functions.blending import *
from aiograd.array_functions.comparison import *
from aiograd.array_functions.creation import *
from aiograd.array_functions.documentation import document as _document
from aiograd.array_functions.dtypes import *
from aiograd.array_functions.elementwise import *
from aiograd.array_functions.joining import *
from aiograd.array_functions.manipulation import *
from aiograd.array_functions.names import with_other_names as _with_other_names
from aiograd.array_functions.products import *
from aiograd.array_functions.reduction import *
from aiograd.array_functions.sampling import *
from aiograd.array_functions.scattering import *
from aiograd.array_functions.searching import *
from aiograd.array_functions.statistics import *

_functions = {_name: _value for _name, _value in globals().items() if isinstance(_value, _FunctionType) and not _name.startswith("_")}
_families = {_function.__module__ for _function in _functions.values() if _function.__module__.startswith(__package__)}
_document(_method_forms, fft, linalg, special, *map(_sys.modules.__getitem__, _families))
_methods.install(_functions)

# Note [Names of parameters] in `names`
for _namespace in (fft, linalg, special):
    for _name in _namespace.__all__:
        if isinstance(_value := getattr(_namespace, _name), _FunctionType):
            setattr(_namespace, _name, _with_other_names(_value))
globals().update({_name: _with_other_names(_function) for _name, _function in _functions.items()})
