"""`wrap` and TorchModule: a torch module as a module of aiograd.

Note [Look-ups in the torch module]
    Parameters, buffers, ``training`` and the state are looked up in the torch module each time, under its own paths. So ``outer.eval()``, which sets
    ``training`` of every module below without calling their ``train()``, reaches the torch module through a property, and ``state_dict`` of both
    have the same keys.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Self

from aiograd.errors import ArgumentError, ArgumentTypeError, GraphError
from aiograd.interop.extras import from_extra
from aiograd.interop.torch.call import call
from aiograd.interop.torch.conversion import tensor_over
from aiograd.interop.torch.modes import noted_modes
from aiograd.interop.torch.parameters import SIDES, SharedParameter, shared_parameter
from aiograd.nn.module import Module
from aiograd.running import foreign_modes
from aiograd.running.modes import current_mode

if TYPE_CHECKING:
    import torch
else:
    torch = from_extra("torch", "torch")


def wrap(module: Any, *, keep_grad: str = "both") -> TorchModule:
    """A torch module as a module of aiograd: its call on Tensors runs it, and records one node.

    Memory is shared: inputs and outputs of a call, parameters, buffers and gradients are not copied. Optimizers, ``zero_grad`` and ``state_dict`` of
    either library work on both. A call takes as long as the module does; ``await ag.offload(layer, x)`` keeps it off the event loop, as backward is
    by itself.

    Args:
        module: a ``torch.nn.Module`` on the host or on one CUDA device, with parameters of dtypes that numpy has.
        keep_grad: where gradients of the parameters arrive: in ``grad`` of ``"both"`` sides, which is one memory, or of ``"aiograd"`` or ``"torch"``
            alone, so that an optimizer of the other side does not see them.

    Returns:
        The module; its ``module`` is the torch module.

    Raises:
        MissingExtraError: torch is not installed. ArgumentTypeError: no torch module, or a parameter of a dtype that numpy does not have.
            ArgumentError: another `keep_grad`, or a parameter that has no shape yet. DeviceError: a parameter is on a device that aiograd does not
            have.
    """
    if not isinstance(module, torch.nn.Module):
        raise ArgumentTypeError(f"interop.torch.wrap: expected a torch.nn.Module, found {type(module).__name__}")
    if keep_grad not in SIDES:
        raise ArgumentError(f"interop.torch.wrap(keep_grad={keep_grad!r}): expected one of {', '.join(map(repr, SIDES))}")
    foreign_modes.register(noted_modes)
    return TorchModule(module, keep_grad)


class TorchModule(Module):
    """A torch module in a graph of aiograd; made by `wrap`.

    Args:
        module: the torch module.
        keep_grad: see `wrap`.

    >>> import torch
    >>> layer = ag.interop.torch.wrap(torch.nn.Linear(3, 2))
    >>> await layer(ag.ones(4, 3)).sum().backward()
    >>> layer.module.weight.grad.shape
    torch.Size([2, 3])
    """

    def __init__(self, module: Any, keep_grad: str) -> None:
        self.module = module
        self.keep_grad = keep_grad
        self._places: list[tuple[dict[str, Any], list[int], dict[str, Any], list[int]]] = []
        self._shared: list[SharedParameter] = []
        #: the buffers of each torch module by their names
        self._buffers_by_name: list[dict[str, Any]] = []
        self._by_path: list[tuple[str, SharedParameter]] = []
        self._buffers: dict[str, tuple[Any, Any]] = {}
        #: Tensors in the place of parameters and buffers, by path; see `aiograd.functional_call`
        self._given: Mapping[str, Any] = {}
        self.shared_parameters()

    @property
    def training(self) -> bool:
        """The torch module's; setting it calls the torch module's ``train()``."""
        return bool(self.module.training)

    @training.setter
    def training(self, mode: bool) -> None:
        self.module.train(mode)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the torch module.

        Args:
            *args: its arguments; Tensors and arrays, nested in tuples, lists, dicts, deques, sets and dataclasses, become torch tensors over the same
                memory.
            **kwargs: its arguments by name.

        Returns:
            Its result, with Tensors in the place of torch tensors; containers of all these kinds keep their class.

        Raises:
            GraphError: a torch tensor that requires grad among the arguments, a result within an object of another kind, or a graph that the module
                has put into a buffer. InPlaceError: the module modified an input in place, or a parameter where that needs a gradient, or returned a
                view of an input. DeviceMismatchError: arguments and module are on different devices.
                DeviceError: a result is on a device that aiograd does not have. ArgumentTypeError: a dtype that one of the libraries does not have.
        """
        trace = current_mode().trace
        if trace is not None:
            return trace.applies(f"{type(self.module).__name__}, a torch module", _called_again, (self, args, kwargs, self._given), is_async=False)
        return call(self, args, kwargs, self._given)

    def _hold(self, tensors: Mapping[str, Any]) -> None:
        self._given = {**self._given, **tensors}

    def _keeps_tensors(self) -> str:
        return "a torch module, whose parameters are torch's; load without assign"

    def shared_parameters(self) -> list[SharedParameter]:
        """The torch module's parameters as Parameters, each once.

        Returns:
            A list, which belongs to the module.
        """
        for parameters, ids, children, below in self._places:
            if [*map(id, parameters.values())] != ids or [*map(id, children.values())] != below:
                break
        else:
            if self._places:
                return self._shared
        by_path = [
            (path, shared_parameter(parameter, self.keep_grad, path))
            for path, parameter in self.module.named_parameters(remove_duplicate=False)
        ]
        self._by_path, self._shared = by_path, list(dict.fromkeys(parameter for _, parameter in by_path))
        #: parameters and children of each module that the list was made of; they stay alive with it, so their ids do not come again
        self._places = [
            (each._parameters, [*map(id, each._parameters.values())], each._modules, [*map(id, each._modules.values())])
            for each in self.module.modules()
        ]
        self._buffers_by_name = [each._buffers for each in self.module.modules()]
        return self._shared

    def refuse_graphs_in_buffers(self) -> None:
        """Raise if a buffer of the torch module is part of a graph.

        Raises:
            GraphError: it is.
        """
        for buffers in self._buffers_by_name:
            for name, buffer in buffers.items() if buffers else ():
                if buffer is not None and buffer.grad_fn is not None:
                    raise GraphError(
                        f"the torch module {type(self.module).__name__} has put a tensor with a graph into its buffer {name!r}: gradients of later "
                        "calls would stop there. Detach what is written (detach(), or torch.no_grad()), and the buffer that there is (detach_())."
                    )

    def _own_parameters(self) -> list[tuple[str, Any]]:
        self.shared_parameters()
        return self._by_path

    def _own_buffers(self, only_state: bool = False) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for prefix, module in self.module.named_modules(remove_duplicate=False):
            for name, buffer in module._buffers.items():
                if buffer is not None and not (only_state and name in module._non_persistent_buffers_set):
                    path = f"{prefix}.{name}" if prefix else name
                    place = (buffer.data_ptr(), buffer.dtype, buffer.shape)
                    known, tensor = self._buffers.get(path, (None, None))
                    if known != place:
                        tensor = tensor_over(buffer.detach())
                        self._buffers[path] = (place, tensor)
                    found.append((path, tensor))
        return found

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        copied = type(self)(copy.deepcopy(self.module, memo), self.keep_grad)
        memo[id(self)] = copied
        for ours, theirs in zip(self.shared_parameters(), copied.shared_parameters(), strict=True):
            memo[id(ours)] = theirs
        return copied

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.module!r})"


def _called_again(layer: TorchModule, args: tuple[Any, ...], kwargs: dict[str, Any], given: Mapping[str, Any]) -> Any:
    """The call that a compiled function repeats."""
    return call(layer, args, kwargs, given)
