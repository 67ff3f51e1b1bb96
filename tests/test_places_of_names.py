"""PyTorch's modules that are other modules here: the imports of a script that is ported find what they name."""

from __future__ import annotations

import copy
import json
import pickle
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd import nn, optim
from aiograd.errors import ArgumentError, DeviceError, ShapeError
from aiograd.running.devices import DeviceName
from tests.support import assert_raises
from tests.toy_device import ToyDevice


def test_imports_as_a_script_writes_them() -> None:
    import aiograd.nn.utils
    import aiograd.optim.lr_scheduler as lr_scheduler
    from aiograd.nn.utils import clip_grad_norm_
    from aiograd.optim.lr_scheduler import StepLR
    from aiograd.utils.data import DataLoader, Dataset, Subset, TensorDataset, random_split

    assert aiograd.nn.utils is nn.utils and DataLoader is ag.data.DataLoader is ag.utils.data.DataLoader and lr_scheduler is optim.lr_scheduler
    assert clip_grad_norm_ is optim.clip_grad_norm_ and StepLR is optim.StepLR and issubclass(TensorDataset, Dataset)
    assert random_split is ag.data.random_split and issubclass(Subset, Dataset)


def test_every_schedule_is_in_its_module() -> None:
    schedules = {name for name, each in vars(optim).items() if hasattr(each, "get_last_lr")} | {"LRScheduler"}
    assert schedules == set(optim.lr_scheduler.__all__) and "StepLR" in schedules
    assert all(getattr(optim.lr_scheduler, name) is getattr(optim, name) for name in schedules)


def test_an_accelerator_is_a_cuda_device_or_none() -> None:
    found = ag.accelerator.current_accelerator()
    assert (found is None) is not ag.accelerator.is_available() and ag.accelerator.device_count() == ag.cuda.device_count()
    device = found.type if found is not None else "cpu"
    assert device in ("cpu", "cuda")


def test_parameters_as_a_vector_and_back() -> None:
    layer = nn.Linear(2, 3)
    vector = nn.utils.parameters_to_vector(layer.parameters())
    assert vector.shape == (9,) and vector.requires_grad
    with pytest.raises(ShapeError, match=r"found a vector of shape \[8\], expected \[9\]"):
        nn.utils.vector_to_parameters(ag.zeros(8), layer.parameters())
    assert layer.weight.tolist() == vector.reshape(-1)[:6].reshape(3, 2).tolist()
    nn.utils.vector_to_parameters(ag.arange(9.0), layer.parameters())
    assert layer.weight.tolist() == [[0, 1], [2, 3], [4, 5]] and layer.bias is not None and layer.bias.tolist() == [6, 7, 8]
    assert layer.weight.is_leaf and layer.weight.requires_grad


# ---- devices


def test_the_host_is_a_device() -> None:
    device = ag.device("cpu")
    assert isinstance(device, ag.device) and device == "cpu" and device.type == "cpu" and device.index is None and f"{device}" == "cpu"
    assert ag.zeros(2, device=device).device == device and ag.ones(1).to(device).device.type == "cpu" and ag.device(device) == device
    assert nn.Linear(1, 1, device=device).to(device).weight.device == device
    assert json.dumps([device]) == '["cpu"]' and {type(copy.deepcopy(device)), type(pickle.loads(pickle.dumps(device)))} == {str}  # noqa: S301
    assert_raises(AttributeError, "'cpu'.* no attribute 'memory_stats'", lambda: device.memory_stats)


def test_another_device_has_its_kind_number_and_attributes() -> None:
    with ToyDevice() as toy:
        device = ag.device("toy")
        assert device == "toy:0" == ag.device("toy", 0) and (device.type, device.index) == ("toy", 0) and device.name == "toy:0"
        assert device.launches_ahead is toy.launches_ahead
        there = ag.ones(2).to(device)
        assert there.device == device and there.device.type == "toy" and ag.zeros_like(there).device.index == 0


@pytest.mark.parametrize(("name", "error"), [("nowhere:0", DeviceError), ("toy:one", ArgumentError), ("", ArgumentError), (0, ArgumentError)])
def test_no_device(name: Any, error: type[Exception]) -> None:
    assert_raises(error, "device", ag.device, name)


def test_a_compiled_function_reads_the_device() -> None:
    @ag.compile
    def double(x: Any) -> Any:
        return x + ag.ones(2, device=x.device) if x.device.type == "cpu" else x

    assert [double(ag.ones(2)).tolist() for _ in range(2)] == [[2.0, 2.0]] * 2 and isinstance(ag.ones(1).device, DeviceName)


# ---- sources


def test_tensors_side_by_side() -> None:
    rows = ag.data.TensorDataset(ag.arange(4), ag.arange(8).reshape(4, 2))
    batches = list(ag.data.DataLoader(rows, 3))
    assert len(rows) == 4 and [[part.tolist() for part in batch] for batch in batches] == [[[0, 1, 2], [[0, 1], [2, 3], [4, 5]]], [[3], [[6, 7]]]]
    for tensors in ((), (ag.ones(2), ag.ones(3)), (ag.tensor(1.0),)):
        with pytest.raises(ArgumentError, match="expected at least one, all with as many rows"):
            ag.data.TensorDataset(*tensors)
    assert np.asarray(rows[1][1]).tolist() == [2, 3]
