"""The service of the demo's worker processes: parts of the network, gradients for comparison, profiles, and training alone."""

from __future__ import annotations

import json

from aiograd.distributed import RemoteRef, Service, current_context, current_worker
from aiograd.errors import ArgumentTypeError
from aiograd.profiler import profile
from aiograd.running.cli.demo.alone import gradients_alone, train_alone
from aiograd.running.cli.demo.model import Network
from aiograd.tensors.tensor import Tensor

service = Service()
service.reference(Network)
service.function(gradients_alone)
service.function(train_alone)

#: the profiles that are being recorded, by worker
_profiles: dict[str, profile] = {}


@service.function
async def gradients(module: RemoteRef) -> dict[str, Tensor]:
    """Gradients of a module's parameters in the caller's context, by name."""
    context = current_context()
    network = module.local_value()
    if context is None or not isinstance(network, Network):
        raise ArgumentTypeError("gradients: expected a Network, inside of a context")
    return {name: context.grads[parameter] for name, parameter in network.named_parameters()}


@service.function
async def start_profile() -> None:
    """Record what this worker runs for others from now on."""
    worker = current_worker()
    recording = _profiles[worker.name] = profile()
    worker.profiler = recording.recorder


@service.function
async def stop_profile() -> str:
    """Stop recording; returns the Chrome trace as JSON."""
    worker = current_worker()
    worker.profiler = None
    return json.dumps(_profiles.pop(worker.name).chrome_trace(process_name=worker.name))
