"""``ag.autograd``: the names of ``torch.autograd``, for scripts that are ported. The functions are awaited, as everywhere."""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.functional.function import Function as Function
from aiograd.functional.gradient_check import gradcheck as gradcheck
from aiograd.functional.gradient_check import gradgradcheck as gradgradcheck
from aiograd.running.lazy import on_first_use
from aiograd.running.modes import detect_anomaly as detect_anomaly
from aiograd.running.modes import enable_grad as enable_grad
from aiograd.running.modes import no_grad as no_grad
from aiograd.running.modes import set_grad_enabled as set_grad_enabled
from aiograd.tensors.passes import backward as backward
from aiograd.tensors.passes import grad as grad

if not TYPE_CHECKING:  # an unknown name is told with the nearest one
    __getattr__, __dir__ = on_first_use(__name__)

__all__ = ["Function", "backward", "detect_anomaly", "enable_grad", "grad", "gradcheck", "gradgradcheck", "no_grad", "set_grad_enabled"]
