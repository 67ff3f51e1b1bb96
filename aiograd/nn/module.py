"""Module: a function with state, that is, with parameters, buffers and other modules.

Note [Attributes are the registry]
    A module's parameters and children are its attributes of the types Parameter and Module, in the order in which they were
    first assigned. Nothing is kept twice, so nothing can disagree, attribute access is Python's own, and ``copy.deepcopy``, ``del`` and
    subclasses that forget ``super().__init__()`` just work. Only which plain Tensors are buffers has to be written down.

Rejected: a ``__getattr__`` with three dictionaries behind it (PyTorch's way: five times slower per access, and errors inside properties
surface as missing attributes).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, Self

from aiograd.errors import ArgumentError, ArgumentTypeError, UnknownNameError
from aiograd.graph.hooks import HookDict, RemovableHandle
from aiograd.nn.forward_hooks import ForwardHook, call_with_hooks, missing_argument, register
from aiograd.nn.loading import IncompatibleKeys, load_state
from aiograd.nn.parameter import Parameter
from aiograd.nn.tensor_container import TensorContainer
from aiograd.running import notebook
from aiograd.tensors.core import TensorCore
from aiograd.tensors.op_error import NONE_ADVICE
from aiograd.tensors.tensor import Tensor


class Module(TensorContainer):
    """Base of all networks and layers: assign Parameters and Modules as attributes and define ``forward``.

    ``forward`` may be ``def`` or ``async def``; calling the module returns its result, a Tensor or a coroutine, and ``await model(x)``
    works in both cases.

    >>> class Twice(ag.nn.Module):
    ...     def __init__(self):
    ...         self.layer = ag.nn.Linear(3, 3)
    ...
    ...     def forward(self, x):
    ...         return self.layer(self.layer(x))
    >>> model = Twice()
    >>> model
    Twice(
      (layer): Linear(in_features=3, out_features=3, bias=True)
    )
    >>> [name for name, _ in model.named_parameters()]
    ['layer.weight', 'layer.bias']
    >>> (await model(ag.ones(2, 3))).shape
    (2, 3)
    """

    training: bool = True

    def __new__(cls, *args: Any, **kwargs: Any) -> Self:
        """A module that is set to training; an attribute from the beginning, so that `train` and `eval` set it and add none."""
        module = super().__new__(cls)
        if isinstance(cls.training, bool):  # else it is a property, of a module that keeps its mode elsewhere
            object.__setattr__(module, "training", cls.training)
        return module

    #: names of the attributes that are buffers, and whether they belong to the state
    _buffer_names: Mapping[str, bool] = MappingProxyType({})
    #: hooks before and after ``forward``, once there is one
    _forward_hooks: HookDict | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the outputs; called by ``module(*args)`` and defined by subclasses.

        Args:
            input, args: the inputs; the class says their shapes.
            kwargs: inputs by name.

        Returns:
            The outputs, or a coroutine of them.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no forward(): define it, as `def` or `async def`")

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        try:
            if self._forward_hooks:
                return call_with_hooks(self, self.forward, self._forward_hooks, args, kwargs)
            return self.forward(*args, **kwargs)
        except (AttributeError, TypeError) as error:
            name = missing_argument(error, self.forward, args, kwargs)
            if name is None:
                raise
            raise ArgumentTypeError(f"{type(self).__name__}.forward: its argument {name!r} {NONE_ADVICE}") from error

    def register_forward_pre_hook(self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False) -> RemovableHandle:
        """Call ``hook(module, args)`` before every forward.

        Args:
            hook: ``def`` or ``async def``; returns None, or the arguments that take the place of `args` (a tuple, or the only one).
            prepend: True to call it before the hooks there are.
            with_kwargs: True to call ``hook(module, args, kwargs)``, which then returns None or both.

        Returns:
            A handle; its ``remove()`` takes the hook away.
        """
        return self._add_hook(ForwardHook(hook, with_kwargs, True), prepend)

    def register_forward_hook(self, hook: Callable[..., Any], *, prepend: bool = False, with_kwargs: bool = False) -> RemovableHandle:
        """Call ``hook(module, args, output)`` after every forward; of an ``async def`` one, with the result.

        Args:
            hook: ``def`` or ``async def``; returns None, or what takes the place of the output.
            prepend: True to call it before the hooks there are.
            with_kwargs: True to call ``hook(module, args, kwargs, output)``.

        Returns:
            A handle; its ``remove()`` takes the hook away.
        """
        return self._add_hook(ForwardHook(hook, with_kwargs, False), prepend)

    def _add_hook(self, hook: ForwardHook, prepend: bool) -> RemovableHandle:
        if not callable(hook.function):
            raise ArgumentTypeError(f"{type(self).__name__}: a hook is a function, found {type(hook.function).__name__}")
        if self._forward_hooks is None:
            object.__setattr__(self, "_forward_hooks", HookDict())
        hooks: Any = self._forward_hooks
        return register(hooks, hook, prepend)

    # ---------------------------------------------------------------- parts

    def __setattr__(self, name: str, value: Any) -> None:
        if value is not None:
            current = self.__dict__.get(name)
            for cls in (Parameter, Module):
                if isinstance(current, cls) and not isinstance(value, cls):
                    raise ArgumentTypeError(
                        f"{type(self).__name__}.{name} is a {cls.__name__} and cannot become a {type(value).__name__}: "
                        f"assign a {cls.__name__} or None, or delete the attribute first"
                    )
            if name in self._buffer_names and not isinstance(value, TensorCore):
                raise ArgumentTypeError(
                    f"{type(self).__name__}.{name} is a buffer and cannot become a {type(value).__name__}: assign a Tensor or None"
                )
        object.__setattr__(self, name, value)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Make a Tensor that is no parameter part of the module: it moves with it, and belongs to its state if `persistent`.

        Args:
            name: its name, without dots.
            tensor: the buffer; None says that there is none.
            persistent: True: it is in `state_dict`.

        Raises:
            ArgumentTypeError: something else than a Tensor. ArgumentError: there is a Parameter or a Module of that name.
        """
        self._assign("register_buffer", name, tensor, TensorCore)
        object.__setattr__(self, "_buffer_names", {**self._buffer_names, name: persistent})

    def register_parameter(self, name: str, parameter: Parameter | None) -> None:
        """Assign a Parameter under a name; None says that there is none.

        Args:
            name: its name, without dots.
            parameter: the Parameter.

        Raises:
            ArgumentTypeError: something else than a Parameter. ArgumentError: there is a buffer or a Module of that name.
        """
        self._assign("register_parameter", name, parameter, Parameter)

    def add_module(self, name: str, module: Module | None) -> None:
        """Assign a child under a name; None says that there is none.

        Args:
            name: its name, without dots.
            module: the child.

        Raises:
            ArgumentTypeError: something else than a Module. ArgumentError: there is a buffer or a Parameter of that name.
        """
        self._assign("add_module", name, module, Module)

    register_module = add_module

    def _assign(self, function: str, name: str, value: Any, cls: type) -> None:
        """Assign a part under a name that is checked."""
        if not name or "." in name:
            raise ArgumentError(f"{type(self).__name__}: {name!r} cannot name a part of a module: expected a name without dots")
        if hasattr(type(self), name):
            raise ArgumentError(f"{type(self).__name__}: {name!r} is the name of something the class defines; choose another")
        if value is not None and not isinstance(value, cls):
            raise ArgumentTypeError(f"{function}({name!r}): expected a {cls.__name__.removesuffix('Core')} or None, found {type(value).__name__}")
        kind = next((each.__name__ for each in (Parameter, Module) if isinstance(self.__dict__.get(name), each)), None)
        kind = "buffer" if name in self._buffer_names and name in self.__dict__ else kind
        if kind not in (None, "buffer" if cls is TensorCore else cls.__name__):
            raise ArgumentError(f"{function}({name!r}): {type(self).__name__} has a {kind} of that name; choose another, or delete that first")
        object.__setattr__(self, name, value)

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """Modules assigned as attributes, with their names; each once.

        Returns:
            An iterator over pairs of name and module.
        """
        seen: set[int] = set()
        for name, value in list(self.__dict__.items()):
            if isinstance(value, Module) and id(value) not in seen:
                seen.add(id(value))
                yield name, value

    def children(self) -> Iterator[Module]:
        """Modules assigned as attributes.

        Returns:
            An iterator over modules.
        """
        return (module for _, module in self.named_children())

    def named_modules(self, prefix: str = "", *, remove_duplicate: bool = True) -> Iterator[tuple[str, Module]]:
        """This module and all below it with their paths (``"encoder.0.linear"``), parents first; each once.

        Args:
            prefix: path of this module.
            remove_duplicate: False: modules that are shared appear under each path.

        Returns:
            An iterator over pairs of path and module.
        """
        return self._walk(prefix, set() if remove_duplicate else None)

    def _walk(self, prefix: str, seen: set[int] | None) -> Iterator[tuple[str, Module]]:
        if seen is not None:
            if id(self) in seen:
                return
            seen.add(id(self))
        yield prefix, self
        for name, value in list(self.__dict__.items()):
            if isinstance(value, Module):
                yield from value._walk(f"{prefix}.{name}" if prefix else name, seen)

    def get_submodule(self, target: str) -> Module:
        """The module at a path.

        Args:
            target: the path, ``"encoder.0.linear"``; ``""`` for this module.

        Returns:
            The module.

        Raises:
            UnknownNameError: there is none at that path, with the nearest name.
        """
        module: Any = self
        for i, name in enumerate(parts := target.split(".") if target else []):
            child = module.__dict__.get(name)
            if not isinstance(child, Module):
                where = f"{type(self).__name__}.get_submodule({target!r}): {'.'.join(parts[:i]) or type(self).__name__}"
                children = dict(module.named_children())
                raise UnknownNameError(where, name, children.keys)
            module = child
        return module  # type: ignore[no-any-return]

    def modules(self) -> Iterator[Module]:
        """This module and all below it.

        Returns:
            An iterator over modules.
        """
        return (module for _, module in self.named_modules())

    def named_parameters(self, prefix: str = "", recurse: bool = True, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Parameter]]:
        """Parameters with their paths (``"encoder.0.weight"``); one that is shared appears once, under its first path.

        Args:
            prefix: path of this module.
            recurse: False: leave modules below this one out.
            remove_duplicate: False: parameters that are shared appear under each path.

        Returns:
            An iterator over pairs of path and Parameter.
        """
        return self._parts(lambda module: module._own_parameters(), prefix, recurse, remove_duplicate)

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """Parameters of this module and those below it.

        Args:
            recurse: False: leave modules below this one out.

        Returns:
            An iterator over Parameters, each once.
        """
        return (parameter for _, parameter in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True, *, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Buffers with their paths.

        Args:
            prefix: path of this module.
            recurse: False: leave modules below this one out.
            remove_duplicate: False: buffers that are shared appear under each path.

        Returns:
            An iterator over pairs of path and Tensor.
        """
        return self._parts(lambda module: module._own_buffers(), prefix, recurse, remove_duplicate)

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """Buffers of this module and those below it.

        Args:
            recurse: False: leave modules below this one out.

        Returns:
            An iterator over Tensors, each once.
        """
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _parts(
        self, parts: Callable[[Module], list[tuple[str, Any]]], prefix: str, recurse: bool, remove_duplicate: bool
    ) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        for path, module in self.named_modules(prefix, remove_duplicate=remove_duplicate) if recurse else [(prefix, self)]:
            for name, value in parts(module):
                if remove_duplicate and id(value) in seen:
                    continue
                seen.add(id(value))
                yield f"{path}.{name}" if path else name, value

    def _own_parameters(self) -> list[tuple[str, Any]]:
        """The Parameters of this module itself by name; a module that stands for several names those below it by their paths."""
        return [(name, value) for name, value in self.__dict__.items() if isinstance(value, Parameter)]

    def _hold(self, tensors: Mapping[str, Any]) -> None:
        """Take these in the place of own parameters and buffers, by name."""
        self.__dict__.update(tensors)

    def _keeps_tensors(self) -> str | None:
        """The reason why other parameters cannot take the place of its own for good; None if they can."""
        return None

    def _own_buffers(self, only_state: bool = False) -> list[tuple[str, Any]]:
        """As `_own_parameters`, the buffers; with `only_state` the persistent ones."""
        found = [(name, getattr(self, name, None)) for name, is_state in self._buffer_names.items() if is_state or not only_state]
        return [(name, value) for name, value in found if value is not None]

    # ---------------------------------------------------------------- state

    def _state(self) -> dict[str, Tensor]:
        """Parameters and persistent buffers by path; one with two paths is under both."""
        state: dict[str, Tensor] = {}
        for path, module in self.named_modules(remove_duplicate=False):
            dot = f"{path}." if path else ""
            state |= {dot + name: value for name, value in module._own_parameters()}
            state |= {dot + name: value for name, value in module._own_buffers(only_state=True)}
        return state

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Parameters and persistent buffers by path, outside of any graph. They share the module's memory: ``clone`` them to keep a snapshot.

        Args:
            prefix: put before each path as it is, ``"encoder."``.

        Returns:
            Tensors by path.
        """
        return {f"{prefix}{path}": value.detach() for path, value in self._state().items()}

    def load_state_dict(self, state: Mapping[str, Any], strict: bool = True, assign: bool = False) -> IncompatibleKeys:
        """Write the values of a `state_dict` into the module; see Note [Loading is all or nothing] in `loading`.

        Args:
            state: Tensors or arrays by path; cast to the dtype of the values that they replace.
            strict: True if paths that are missing or unexpected are an error.
            assign: True to put them in the place of parameters and buffers instead of writing their values: dtype, device and memory are theirs.
                Parameters are then other objects, so optimizers are made afterwards.

        Returns:
            The paths that were missing or unexpected.

        Raises:
            ArgumentError: paths, shapes or values that do not fit, all of them named; nothing has been written.
            ArgumentTypeError: `state` is no mapping.
        """
        return load_state(self, state, strict, assign)

    # ---------------------------------------------------------------- all modules at once

    def apply(self, fn: Callable[[Module], Any]) -> Self:
        """Call `fn` on every module below this one, then on this one.

        Args:
            fn: called with each module.

        Returns:
            The module itself.
        """
        for child in self.children():
            child.apply(fn)
        fn(self)
        return self

    def train(self, mode: bool = True) -> Self:
        """Set every module to training (dropout drops, batch norm measures) or, with False, to evaluation.

        Args:
            mode: True for training.

        Returns:
            The module itself.
        """
        for module in self.modules():
            object.__setattr__(module, "training", bool(mode))
        return self

    def eval(self) -> Self:
        """Set every module to evaluation.

        Returns:
            The module itself.
        """
        return self.train(False)

    # ---------------------------------------------------------------- text

    def extra_repr(self) -> str:
        """The text between the parentheses of the repr.

        Returns:
            The text; subclasses define it.
        """
        return ""

    def __repr__(self) -> str:
        lines = [f"({name}): {_indented(repr(child))}" for name, child in self.__dict__.items() if isinstance(child, Module)]
        extra = self.extra_repr()
        if not lines:
            return f"{type(self).__name__}({extra})"
        return f"{type(self).__name__}(\n  " + "\n  ".join([*([extra] if extra else []), *lines]) + "\n)"

    def _repr_html_(self) -> str:
        return _tree("", self)


def _tree(name: str, module: Module) -> str:
    """A module and its layers as HTML that folds, each with its number of parameters."""
    count = sum(parameter.size for parameter in module.parameters())
    children = [_tree(child_name, child) for child_name, child in module.__dict__.items() if isinstance(child, Module)]
    heading = f"{name}: " if name else ""
    return notebook.tree(f"{heading}{type(module).__name__}({module.extra_repr()}), {count:,} parameters", children)


def _indented(text: str) -> str:
    return text.replace("\n", "\n  ")
