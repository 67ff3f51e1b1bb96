"""Autograd for async Python: a tensor library on numpy with an awaited backward pass.

::

    import aiograd as ag

    async def main():
        x = ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
        y = (x * x).sum()
        await y.backward()
        print(x.grad)

    ag.run(main())
"""

from __future__ import annotations

import builtins as _builtins
import sys as _sys
import typing as _typing

from aiograd import errors as errors
from aiograd import functional as functional
from aiograd import graph as graph
from aiograd import kernels as kernels
from aiograd.array_functions.inspection import __array_api_version__ as __array_api_version__
from aiograd.array_functions.inspection import __array_namespace_info__ as __array_namespace_info__
from aiograd.array_functions.public import *
from aiograd.engine.graph_task import GraphTask as GraphTask
from aiograd.engine.run import Engine as Engine
from aiograd.engine.run import aclose_default_engine as aclose_default_engine
from aiograd.engine.run import current_engine as current_engine
from aiograd.engine.run import run as run
from aiograd.engine.run import tune_malloc as tune_malloc
from aiograd.engine.run import tuned_gc as tuned_gc
from aiograd.functional.function import Function as Function
from aiograd.functional.function import once_differentiable as once_differentiable
from aiograd.running import assembly as _assembly
from aiograd.running import devices as devices
from aiograd.running import log_fields as log_fields
from aiograd.running import random as random
from aiograd.running.devices import DeviceName as _DeviceName
from aiograd.running.lazy import on_first_use as _on_first_use
from aiograd.running.modes import detect_anomaly as detect_anomaly
from aiograd.running.modes import enable_grad as enable_grad
from aiograd.running.modes import get_default_dtype as get_default_dtype
from aiograd.running.modes import is_grad_enabled as is_grad_enabled
from aiograd.running.modes import no_grad as no_grad
from aiograd.running.modes import set_default_dtype as set_default_dtype
from aiograd.running.modes import set_grad_enabled as set_grad_enabled
from aiograd.running.offloading import offload as offload
from aiograd.running.offloading import ready as ready
from aiograd.running.progress import progress as progress
from aiograd.running.random import Generator as Generator
from aiograd.running.random import default_generator as default_generator
from aiograd.running.random import seed as seed
from aiograd.running.version import __version__ as __version__
from aiograd.tensors.creation import asarray as asarray
from aiograd.tensors.creation import from_numpy as from_numpy
from aiograd.tensors.creation import tensor as tensor
from aiograd.tensors.exchange import from_dlpack as from_dlpack
from aiograd.tensors.passes import backward as backward
from aiograd.tensors.passes import grad as grad
from aiograd.tensors.tensor import Tensor as Tensor

globals().pop("log")  # `running.scalars.log`, see `_HOMES`, takes an array too

# PyTorch's names
as_tensor = asarray
device = _DeviceName

# Parts that many programs do not need: imported when they are first asked for.
_PARTS = (
    "compiler", "cuda", "dashboard", "data", "distributed", "distributions", "stats", "autograd",
    "functional.checkpointing", "functional.gradient_check", "functional.isolation", "implicit", "interop", "nn", "optim", "parallel", "pipeline",
    "profiler", "running.accelerator", "running.scalars", "saving", "saving.serialization", "saving.training_state", "serving", "sparse",
    "testing", "transaction", "utils", "viz",
)  # fmt: skip
_HOMES = {
    "TrainingState": "saving.training_state",
    "checkpoint": "functional.checkpointing",
    "compile": "compiler",
    "functional_call": "nn.stateless",
    "gradcheck": "functional.gradient_check",
    "grad_norms_per_sample": "functional.batching.per_sample",
    "grad_per_sample": "functional.batching.per_sample",
    "gradgradcheck": "functional.gradient_check",
    "hessian": "functional.derivatives",
    "jacobian": "functional.derivatives",
    "jacobian_plan": "sparse.plan",
    "jacfwd": "functional.derivatives",
    "linearize": "functional.linearization",
    "hvp": "functional.linearization",
    "jacrev": "functional.derivatives",
    "jvp": "functional.derivatives",
    "load": "saving.serialization",
    "load_metadata": "saving.serialization",
    "log": "running.scalars",
    "multinomial": "distributions.drawing",
    "save": "saving.serialization",
    "sparse_jacobian": "sparse.plan",
    "value_and_grad": "functional.derivatives",
    "vjp": "functional.derivatives",
    "vmap": "functional.batching.vmap",
}
if _typing.TYPE_CHECKING:
    from aiograd import autograd as autograd
    from aiograd import compiler as compiler
    from aiograd import cuda as cuda
    from aiograd import dashboard as dashboard
    from aiograd import data as data
    from aiograd import distributed as distributed
    from aiograd import distributions as distributions
    from aiograd import implicit as implicit
    from aiograd import interop as interop
    from aiograd import nn as nn
    from aiograd import optim as optim
    from aiograd import parallel as parallel
    from aiograd import pipeline as pipeline
    from aiograd import profiler as profiler
    from aiograd import saving as saving
    from aiograd import serving as serving
    from aiograd import sparse as sparse
    from aiograd import stats as stats
    from aiograd import testing as testing
    from aiograd import transaction as transaction
    from aiograd import utils as utils
    from aiograd import viz as viz
    from aiograd.compiler import compile as compile
    from aiograd.distributions.drawing import multinomial as multinomial
    from aiograd.functional import checkpointing as checkpointing
    from aiograd.functional import gradient_check as gradient_check
    from aiograd.functional import isolation as isolation
    from aiograd.functional.batching.per_sample import grad_norms_per_sample as grad_norms_per_sample
    from aiograd.functional.batching.per_sample import grad_per_sample as grad_per_sample
    from aiograd.functional.batching.vmap import vmap as vmap
    from aiograd.functional.checkpointing import checkpoint as checkpoint
    from aiograd.functional.derivatives import hessian as hessian
    from aiograd.functional.derivatives import jacfwd as jacfwd
    from aiograd.functional.derivatives import jacobian as jacobian
    from aiograd.functional.derivatives import jacrev as jacrev
    from aiograd.functional.derivatives import jvp as jvp
    from aiograd.functional.derivatives import value_and_grad as value_and_grad
    from aiograd.functional.derivatives import vjp as vjp
    from aiograd.functional.gradient_check import gradcheck as gradcheck
    from aiograd.functional.gradient_check import gradgradcheck as gradgradcheck
    from aiograd.functional.linearization import hvp as hvp
    from aiograd.functional.linearization import linearize as linearize
    from aiograd.nn.stateless import functional_call as functional_call
    from aiograd.running import accelerator as accelerator
    from aiograd.running import scalars as scalars
    from aiograd.running.scalars import log as log
    from aiograd.saving import serialization as serialization
    from aiograd.saving import training_state as training_state
    from aiograd.saving.serialization import load as load
    from aiograd.saving.serialization import load_metadata as load_metadata
    from aiograd.saving.serialization import save as save
    from aiograd.saving.training_state import TrainingState as TrainingState
    from aiograd.sparse.plan import jacobian_plan as jacobian_plan
    from aiograd.sparse.plan import sparse_jacobian as sparse_jacobian
else:
    __getattr__, __dir__ = _on_first_use(__name__, {name: f"{__name__}.{home}" for name, home in _HOMES.items()}, modules=_PARTS)

# names, no modules: a star import takes neither ``random`` nor ``types`` from a program
_modules = {name for name, value in globals().items() if isinstance(value, type(_sys))}
__all__ = sorted({name for name in globals() if not name.startswith("_")} - _modules - {"annotations"} | {*_HOMES})


# the one place that sees both sides: what workers make on request, and where devices come from
_here = _sys.modules[__name__]


def _equip_workers() -> None:
    optim = _here.optim
    _here.distributed.register_optimizers(optim.SGD, optim.Adam, optim.AdamW, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.NAdam, optim.RAdam)
    _here.distributed.register_face(lambda core: _here.dashboard.DashboardMonitor(core))
    _here.distributed.register_adapter(_assembly.STAGE_MEMBER_ADAPTER, lambda: _here.pipeline.run.StageMember)
    _here.distributed.register_adapter(_assembly.REPLICA_MEMBER_ADAPTER, lambda: _here.distributed.data_parallel.ReplicaMember)
    _here.distributed.register_adapter(_assembly.LOCAL_STEPS_ADAPTER, lambda: _here.distributed.local_steps.LocalStepsMember)


def _let_programs_be_drawn() -> None:
    _here.compiler.program.DRAWING.append(lambda: _here.viz)


def _let_programs_be_native() -> None:
    _here.kernels.native.NATIVE_PROBLEM.append(lambda: _here.compiler.native.tiers.native_problem())


def _cuda_device(ordinal: _builtins.int) -> _typing.Any:
    return _here.cuda.loading.make_device(ordinal)


_assembly.when_imported("distributed", _equip_workers)
_assembly.when_imported("compiler", _let_programs_be_drawn)
_let_programs_be_native()
devices.register_device_kind("cuda", _cuda_device)
