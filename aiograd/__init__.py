"""Autograd for async Python: a tensor library on numpy whose backward pass is awaited.

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
from aiograd.array_functions import __array_api_version__ as __array_api_version__
from aiograd.array_functions import __array_namespace_info__ as __array_namespace_info__
from aiograd.array_functions import abs as abs
from aiograd.array_functions import absolute as absolute
from aiograd.array_functions import acos as acos
from aiograd.array_functions import acosh as acosh
from aiograd.array_functions import add as add
from aiograd.array_functions import addbmm as addbmm
from aiograd.array_functions import addcdiv as addcdiv
from aiograd.array_functions import addcmul as addcmul
from aiograd.array_functions import addmm as addmm
from aiograd.array_functions import addmv as addmv
from aiograd.array_functions import addr as addr
from aiograd.array_functions import all as all
from aiograd.array_functions import allclose as allclose
from aiograd.array_functions import amax as amax
from aiograd.array_functions import amin as amin
from aiograd.array_functions import aminmax as aminmax
from aiograd.array_functions import angle as angle
from aiograd.array_functions import any as any
from aiograd.array_functions import append as append
from aiograd.array_functions import arange as arange
from aiograd.array_functions import arccos as arccos
from aiograd.array_functions import arccosh as arccosh
from aiograd.array_functions import arcsin as arcsin
from aiograd.array_functions import arcsinh as arcsinh
from aiograd.array_functions import arctan as arctan
from aiograd.array_functions import arctan2 as arctan2
from aiograd.array_functions import arctanh as arctanh
from aiograd.array_functions import argmax as argmax
from aiograd.array_functions import argmin as argmin
from aiograd.array_functions import argsort as argsort
from aiograd.array_functions import argwhere as argwhere
from aiograd.array_functions import around as around
from aiograd.array_functions import array as array
from aiograd.array_functions import array_equal as array_equal
from aiograd.array_functions import asin as asin
from aiograd.array_functions import asinh as asinh
from aiograd.array_functions import astype as astype
from aiograd.array_functions import atan as atan
from aiograd.array_functions import atan2 as atan2
from aiograd.array_functions import atanh as atanh
from aiograd.array_functions import atleast_1d as atleast_1d
from aiograd.array_functions import atleast_2d as atleast_2d
from aiograd.array_functions import atleast_3d as atleast_3d
from aiograd.array_functions import baddbmm as baddbmm
from aiograd.array_functions import bernoulli as bernoulli
from aiograd.array_functions import bincount as bincount
from aiograd.array_functions import bitwise_and as bitwise_and
from aiograd.array_functions import bitwise_invert as bitwise_invert
from aiograd.array_functions import bitwise_left_shift as bitwise_left_shift
from aiograd.array_functions import bitwise_not as bitwise_not
from aiograd.array_functions import bitwise_or as bitwise_or
from aiograd.array_functions import bitwise_right_shift as bitwise_right_shift
from aiograd.array_functions import bitwise_xor as bitwise_xor
from aiograd.array_functions import block_diag as block_diag
from aiograd.array_functions import bmm as bmm
from aiograd.array_functions import bool as bool
from aiograd.array_functions import broadcast_arrays as broadcast_arrays
from aiograd.array_functions import broadcast_shapes as broadcast_shapes
from aiograd.array_functions import broadcast_tensors as broadcast_tensors
from aiograd.array_functions import broadcast_to as broadcast_to
from aiograd.array_functions import bucketize as bucketize
from aiograd.array_functions import can_cast as can_cast
from aiograd.array_functions import cartesian_prod as cartesian_prod
from aiograd.array_functions import cat as cat
from aiograd.array_functions import cbrt as cbrt
from aiograd.array_functions import cdist as cdist
from aiograd.array_functions import cdouble as cdouble
from aiograd.array_functions import ceil as ceil
from aiograd.array_functions import cfloat as cfloat
from aiograd.array_functions import cholesky as cholesky
from aiograd.array_functions import chunk as chunk
from aiograd.array_functions import clamp as clamp
from aiograd.array_functions import clip as clip
from aiograd.array_functions import clone as clone
from aiograd.array_functions import column_stack as column_stack
from aiograd.array_functions import complex as complex
from aiograd.array_functions import complex64 as complex64
from aiograd.array_functions import complex128 as complex128
from aiograd.array_functions import concat as concat
from aiograd.array_functions import concatenate as concatenate
from aiograd.array_functions import conj as conj
from aiograd.array_functions import conjugate as conjugate
from aiograd.array_functions import convolve as convolve
from aiograd.array_functions import copysign as copysign
from aiograd.array_functions import corrcoef as corrcoef
from aiograd.array_functions import correlate as correlate
from aiograd.array_functions import cos as cos
from aiograd.array_functions import cosh as cosh
from aiograd.array_functions import count_nonzero as count_nonzero
from aiograd.array_functions import cov as cov
from aiograd.array_functions import cross as cross
from aiograd.array_functions import cummax as cummax
from aiograd.array_functions import cummin as cummin
from aiograd.array_functions import cumprod as cumprod
from aiograd.array_functions import cumsum as cumsum
from aiograd.array_functions import cumulative_prod as cumulative_prod
from aiograd.array_functions import cumulative_sum as cumulative_sum
from aiograd.array_functions import cumulative_trapezoid as cumulative_trapezoid
from aiograd.array_functions import deg2rad as deg2rad
from aiograd.array_functions import det as det
from aiograd.array_functions import diag as diag
from aiograd.array_functions import diag_embed as diag_embed
from aiograd.array_functions import diagflat as diagflat
from aiograd.array_functions import diagonal as diagonal
from aiograd.array_functions import diff as diff
from aiograd.array_functions import digamma as digamma
from aiograd.array_functions import dist as dist
from aiograd.array_functions import div as div
from aiograd.array_functions import divide as divide
from aiograd.array_functions import dot as dot
from aiograd.array_functions import double as double
from aiograd.array_functions import dsplit as dsplit
from aiograd.array_functions import dstack as dstack
from aiograd.array_functions import e as e
from aiograd.array_functions import einsum as einsum
from aiograd.array_functions import elu as elu
from aiograd.array_functions import empty as empty
from aiograd.array_functions import empty_like as empty_like
from aiograd.array_functions import eq as eq
from aiograd.array_functions import equal as equal
from aiograd.array_functions import erf as erf
from aiograd.array_functions import erfc as erfc
from aiograd.array_functions import erfinv as erfinv
from aiograd.array_functions import exp as exp
from aiograd.array_functions import exp2 as exp2
from aiograd.array_functions import expand_dims as expand_dims
from aiograd.array_functions import expm1 as expm1
from aiograd.array_functions import eye as eye
from aiograd.array_functions import fft as fft
from aiograd.array_functions import finfo as finfo
from aiograd.array_functions import fix as fix
from aiograd.array_functions import flatten as flatten
from aiograd.array_functions import flip as flip
from aiograd.array_functions import fliplr as fliplr
from aiograd.array_functions import flipud as flipud
from aiograd.array_functions import float as float
from aiograd.array_functions import float16 as float16
from aiograd.array_functions import float32 as float32
from aiograd.array_functions import float64 as float64
from aiograd.array_functions import float_power as float_power
from aiograd.array_functions import floor as floor
from aiograd.array_functions import floor_divide as floor_divide
from aiograd.array_functions import fmax as fmax
from aiograd.array_functions import fmin as fmin
from aiograd.array_functions import fmod as fmod
from aiograd.array_functions import frac as frac
from aiograd.array_functions import full as full
from aiograd.array_functions import full_like as full_like
from aiograd.array_functions import gather as gather
from aiograd.array_functions import gcd as gcd
from aiograd.array_functions import ge as ge
from aiograd.array_functions import gelu as gelu
from aiograd.array_functions import ger as ger
from aiograd.array_functions import gradient as gradient
from aiograd.array_functions import greater as greater
from aiograd.array_functions import greater_equal as greater_equal
from aiograd.array_functions import gt as gt
from aiograd.array_functions import half as half
from aiograd.array_functions import heaviside as heaviside
from aiograd.array_functions import histc as histc
from aiograd.array_functions import hsplit as hsplit
from aiograd.array_functions import hstack as hstack
from aiograd.array_functions import hypot as hypot
from aiograd.array_functions import i0 as i0
from aiograd.array_functions import iinfo as iinfo
from aiograd.array_functions import imag as imag
from aiograd.array_functions import index_add as index_add
from aiograd.array_functions import index_copy as index_copy
from aiograd.array_functions import index_fill as index_fill
from aiograd.array_functions import index_select as index_select
from aiograd.array_functions import inf as inf
from aiograd.array_functions import inference_mode as inference_mode
from aiograd.array_functions import inner as inner
from aiograd.array_functions import int as int
from aiograd.array_functions import int8 as int8
from aiograd.array_functions import int16 as int16
from aiograd.array_functions import int32 as int32
from aiograd.array_functions import int64 as int64
from aiograd.array_functions import interp as interp
from aiograd.array_functions import inverse as inverse
from aiograd.array_functions import invert as invert
from aiograd.array_functions import is_complex as is_complex
from aiograd.array_functions import is_floating_point as is_floating_point
from aiograd.array_functions import is_tensor as is_tensor
from aiograd.array_functions import isclose as isclose
from aiograd.array_functions import isdtype as isdtype
from aiograd.array_functions import isfinite as isfinite
from aiograd.array_functions import isin as isin
from aiograd.array_functions import isinf as isinf
from aiograd.array_functions import isnan as isnan
from aiograd.array_functions import isneginf as isneginf
from aiograd.array_functions import isposinf as isposinf
from aiograd.array_functions import isreal as isreal
from aiograd.array_functions import kron as kron
from aiograd.array_functions import kthvalue as kthvalue
from aiograd.array_functions import lcm as lcm
from aiograd.array_functions import ldexp as ldexp
from aiograd.array_functions import le as le
from aiograd.array_functions import leaky_relu as leaky_relu
from aiograd.array_functions import left_shift as left_shift
from aiograd.array_functions import lerp as lerp
from aiograd.array_functions import less as less
from aiograd.array_functions import less_equal as less_equal
from aiograd.array_functions import lgamma as lgamma
from aiograd.array_functions import linalg as linalg
from aiograd.array_functions import linspace as linspace
from aiograd.array_functions import log1p as log1p
from aiograd.array_functions import log2 as log2
from aiograd.array_functions import log10 as log10
from aiograd.array_functions import log_sigmoid as log_sigmoid
from aiograd.array_functions import log_softmax as log_softmax
from aiograd.array_functions import logaddexp as logaddexp
from aiograd.array_functions import logaddexp2 as logaddexp2
from aiograd.array_functions import logcumsumexp as logcumsumexp
from aiograd.array_functions import logdet as logdet
from aiograd.array_functions import logical_and as logical_and
from aiograd.array_functions import logical_not as logical_not
from aiograd.array_functions import logical_or as logical_or
from aiograd.array_functions import logical_xor as logical_xor
from aiograd.array_functions import logit as logit
from aiograd.array_functions import logspace as logspace
from aiograd.array_functions import logsumexp as logsumexp
from aiograd.array_functions import long as long
from aiograd.array_functions import lt as lt
from aiograd.array_functions import manual_seed as manual_seed
from aiograd.array_functions import masked_fill as masked_fill
from aiograd.array_functions import masked_select as masked_select
from aiograd.array_functions import matmul as matmul
from aiograd.array_functions import matrix_exp as matrix_exp
from aiograd.array_functions import matrix_power as matrix_power
from aiograd.array_functions import matrix_transpose as matrix_transpose
from aiograd.array_functions import max as max
from aiograd.array_functions import maximum as maximum
from aiograd.array_functions import mean as mean
from aiograd.array_functions import median as median
from aiograd.array_functions import meshgrid as meshgrid
from aiograd.array_functions import min as min
from aiograd.array_functions import minimum as minimum
from aiograd.array_functions import mm as mm
from aiograd.array_functions import mod as mod
from aiograd.array_functions import moveaxis as moveaxis
from aiograd.array_functions import movedim as movedim
from aiograd.array_functions import msort as msort
from aiograd.array_functions import mul as mul
from aiograd.array_functions import multiply as multiply
from aiograd.array_functions import mv as mv
from aiograd.array_functions import nan as nan
from aiograd.array_functions import nan_to_num as nan_to_num
from aiograd.array_functions import nanmean as nanmean
from aiograd.array_functions import nanmedian as nanmedian
from aiograd.array_functions import nanquantile as nanquantile
from aiograd.array_functions import nansum as nansum
from aiograd.array_functions import narrow as narrow
from aiograd.array_functions import ne as ne
from aiograd.array_functions import neg as neg
from aiograd.array_functions import negative as negative
from aiograd.array_functions import newaxis as newaxis
from aiograd.array_functions import nextafter as nextafter
from aiograd.array_functions import nonzero as nonzero
from aiograd.array_functions import norm as norm
from aiograd.array_functions import normal as normal
from aiograd.array_functions import not_equal as not_equal
from aiograd.array_functions import numel as numel
from aiograd.array_functions import ones as ones
from aiograd.array_functions import ones_like as ones_like
from aiograd.array_functions import outer as outer
from aiograd.array_functions import pad as pad
from aiograd.array_functions import partition as partition
from aiograd.array_functions import percentile as percentile
from aiograd.array_functions import permute as permute
from aiograd.array_functions import permute_dims as permute_dims
from aiograd.array_functions import pi as pi
from aiograd.array_functions import pinverse as pinverse
from aiograd.array_functions import polar as polar
from aiograd.array_functions import polygamma as polygamma
from aiograd.array_functions import positive as positive
from aiograd.array_functions import pow as pow
from aiograd.array_functions import power as power
from aiograd.array_functions import prod as prod
from aiograd.array_functions import quantile as quantile
from aiograd.array_functions import rad2deg as rad2deg
from aiograd.array_functions import rand as rand
from aiograd.array_functions import rand_like as rand_like
from aiograd.array_functions import randint as randint
from aiograd.array_functions import randint_like as randint_like
from aiograd.array_functions import randn as randn
from aiograd.array_functions import randn_like as randn_like
from aiograd.array_functions import randperm as randperm
from aiograd.array_functions import ravel as ravel
from aiograd.array_functions import real as real
from aiograd.array_functions import reciprocal as reciprocal
from aiograd.array_functions import relu as relu
from aiograd.array_functions import remainder as remainder
from aiograd.array_functions import repeat as repeat
from aiograd.array_functions import repeat_interleave as repeat_interleave
from aiograd.array_functions import reshape as reshape
from aiograd.array_functions import result_type as result_type
from aiograd.array_functions import right_shift as right_shift
from aiograd.array_functions import roll as roll
from aiograd.array_functions import rollaxis as rollaxis
from aiograd.array_functions import rot90 as rot90
from aiograd.array_functions import round as round
from aiograd.array_functions import rsqrt as rsqrt
from aiograd.array_functions import scatter as scatter
from aiograd.array_functions import scatter_add as scatter_add
from aiograd.array_functions import scatter_reduce as scatter_reduce
from aiograd.array_functions import searchsorted as searchsorted
from aiograd.array_functions import select as select
from aiograd.array_functions import sgn as sgn
from aiograd.array_functions import short as short
from aiograd.array_functions import sigmoid as sigmoid
from aiograd.array_functions import sign as sign
from aiograd.array_functions import signbit as signbit
from aiograd.array_functions import silu as silu
from aiograd.array_functions import sin as sin
from aiograd.array_functions import sinc as sinc
from aiograd.array_functions import sinh as sinh
from aiograd.array_functions import sliding_window_view as sliding_window_view
from aiograd.array_functions import slogdet as slogdet
from aiograd.array_functions import softmax as softmax
from aiograd.array_functions import softplus as softplus
from aiograd.array_functions import softsign as softsign
from aiograd.array_functions import sort as sort
from aiograd.array_functions import special as special
from aiograd.array_functions import split as split
from aiograd.array_functions import sqrt as sqrt
from aiograd.array_functions import square as square
from aiograd.array_functions import squeeze as squeeze
from aiograd.array_functions import stack as stack
from aiograd.array_functions import std as std
from aiograd.array_functions import std_mean as std_mean
from aiograd.array_functions import sub as sub
from aiograd.array_functions import subtract as subtract
from aiograd.array_functions import sum as sum
from aiograd.array_functions import swapaxes as swapaxes
from aiograd.array_functions import swapdims as swapdims
from aiograd.array_functions import t as t
from aiograd.array_functions import take as take
from aiograd.array_functions import take_along_axis as take_along_axis
from aiograd.array_functions import take_along_dim as take_along_dim
from aiograd.array_functions import tan as tan
from aiograd.array_functions import tanh as tanh
from aiograd.array_functions import tensor_split as tensor_split
from aiograd.array_functions import tensordot as tensordot
from aiograd.array_functions import tile as tile
from aiograd.array_functions import topk as topk
from aiograd.array_functions import trace as trace
from aiograd.array_functions import transpose as transpose
from aiograd.array_functions import trapezoid as trapezoid
from aiograd.array_functions import tril as tril
from aiograd.array_functions import triu as triu
from aiograd.array_functions import true_divide as true_divide
from aiograd.array_functions import trunc as trunc
from aiograd.array_functions import uint8 as uint8
from aiograd.array_functions import uint16 as uint16
from aiograd.array_functions import uint32 as uint32
from aiograd.array_functions import uint64 as uint64
from aiograd.array_functions import unbind as unbind
from aiograd.array_functions import unflatten as unflatten
from aiograd.array_functions import unfold as unfold
from aiograd.array_functions import unique as unique
from aiograd.array_functions import unique_all as unique_all
from aiograd.array_functions import unique_counts as unique_counts
from aiograd.array_functions import unique_inverse as unique_inverse
from aiograd.array_functions import unique_values as unique_values
from aiograd.array_functions import unsqueeze as unsqueeze
from aiograd.array_functions import unstack as unstack
from aiograd.array_functions import var as var
from aiograd.array_functions import var_mean as var_mean
from aiograd.array_functions import vdot as vdot
from aiograd.array_functions import vecdot as vecdot
from aiograd.array_functions import vsplit as vsplit
from aiograd.array_functions import vstack as vstack
from aiograd.array_functions import where as where
from aiograd.array_functions import xlogy as xlogy
from aiograd.array_functions import zeros as zeros
from aiograd.array_functions import zeros_like as zeros_like
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

# PyTorch's names
as_tensor = asarray
device = _DeviceName

# Parts that many programs do not need: imported when they are first asked for.
_PARTS = (
    "compiler", "cuda", "dashboard", "data", "distributed", "distributions", "stats", "autograd",
    "functional.checkpointing", "functional.gradient_check", "functional.isolation", "interop", "nn", "optim", "parallel", "pipeline", "profiler",
    "running.accelerator", "running.scalars", "saving", "saving.serialization", "saving.training_state", "utils", "viz",
)  # fmt: skip
_HOMES = {
    "TrainingState": "saving.training_state",
    "checkpoint": "functional.checkpointing",
    "compile": "compiler",
    "functional_call": "nn.stateless",
    "gradcheck": "functional.gradient_check",
    "gradgradcheck": "functional.gradient_check",
    "hessian": "functional.derivatives",
    "jacobian": "functional.derivatives",
    "jvp": "functional.derivatives",
    "load": "saving.serialization",
    "load_metadata": "saving.serialization",
    "log": "running.scalars",
    "multinomial": "distributions.drawing",
    "save": "saving.serialization",
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
    from aiograd import interop as interop
    from aiograd import nn as nn
    from aiograd import optim as optim
    from aiograd import parallel as parallel
    from aiograd import pipeline as pipeline
    from aiograd import profiler as profiler
    from aiograd import saving as saving
    from aiograd import stats as stats
    from aiograd import utils as utils
    from aiograd import viz as viz
    from aiograd.compiler import compile as compile
    from aiograd.distributions.drawing import multinomial as multinomial
    from aiograd.functional import checkpointing as checkpointing
    from aiograd.functional import gradient_check as gradient_check
    from aiograd.functional import isolation as isolation
    from aiograd.functional.batching.vmap import vmap as vmap
    from aiograd.functional.checkpointing import checkpoint as checkpoint
    from aiograd.functional.derivatives import hessian as hessian
    from aiograd.functional.derivatives import jacobian as jacobian
    from aiograd.functional.derivatives import jvp as jvp
    from aiograd.functional.derivatives import value_and_grad as value_and_grad
    from aiograd.functional.derivatives import vjp as vjp
    from aiograd.functional.gradient_check import gradcheck as gradcheck
    from aiograd.functional.gradient_check import gradgradcheck as gradgradcheck
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
    _here.distributed.register_face(lambda core: _here.dashboard.DashboardFace(core))
    _here.distributed.register_adapter(_assembly.STAGE_HOST_ADAPTER, lambda: _here.pipeline.run.StageMember)
    _here.distributed.register_adapter(_assembly.REPLICA_HOST_ADAPTER, lambda: _here.distributed.data_parallel.ReplicaMember)


def _let_programs_be_drawn() -> None:
    _here.compiler.program.DRAWING.append(lambda: _here.viz)


def _cuda_device(ordinal: _builtins.int) -> _typing.Any:
    return _here.cuda.loading.make_device(ordinal)


_assembly.when_imported("distributed", _equip_workers)
_assembly.when_imported("compiler", _let_programs_be_drawn)
devices.register_device_kind("cuda", _cuda_device)
