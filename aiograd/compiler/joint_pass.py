"""The rows before a backward pass and the pass itself as one native function.

Note [Joint passes]
    Between the last row of a compiled step and the pass from its only output nothing can be seen, so both are one function where the pass is one of
    `aiograd.engine.short_pass`: values that only the backward reads never become arrays. The graph of the call is there afterwards, as a pass leaves
    it. Where a condition is not met, or the function refuses (an array of another kind, a floating point error to be told, see
    `aiograd.compiler.native.emit`), nothing has been done, and the rows and the pass run one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from aiograd.compiler.calls import ArrayCode, Ref
from aiograd.compiler.native.build import load_native, native_text
from aiograd.compiler.native.placing import Unsupported
from aiograd.compiler.passes import NATIVE_PASSES, optimized
from aiograd.engine.run.current import current_engine
from aiograd.engine.run.loop import running_loop
from aiograd.running.modes import current_mode
from aiograd.running.trees import leaves_of, map_tree

#: calls of forward and backward together; a step of more of them gains little, and all of it is compiled once more
MOST_CALLS = 400


def joint_function(forward: ArrayCode, backward: ArrayCode, seed: Any, *, is_dynamic: bool = False) -> Callable[..., Any] | None:
    """A native function of the forward's arguments; it returns the outputs and the gradients, or False where it has done nothing.

    Args:
        forward: its code, before any pass; its results are the outputs and the values that the backward needs.
        backward: the same of a pass from the only output; its parameters are these values, and the gradient of the output.
        seed: that gradient.
        is_dynamic: see `aiograd.compiler.native.build.native_text`.

    Returns:
        The function; None where not all of it can be native.
    """
    if len(forward.calls) + len(backward.calls) > MOST_CALLS:
        return None
    outputs, saved = forward.results
    (_, needed), (_, (grad,)) = backward.parameters  # type: ignore[misc]
    names: dict[Ref, Any] = {**dict(zip(needed, saved, strict=True)), grad: seed}
    results = map_tree(lambda ref: names.get(ref, ref), backward.results, Ref)
    if any([each is seed for each in leaves_of(results, np.ndarray)]):
        return None
    calls = (*forward.calls, *[call.replaced(names) for call in backward.calls])
    code = optimized(replace(forward, name="joint", calls=calls, results=(outputs, results), private=frozenset()), NATIVE_PASSES)
    try:
        return load_native(native_text(code, is_dynamic=is_dynamic), _refused)
    except Unsupported:
        return None


def _refused(*_: Any) -> bool:
    """Stands where a native function calls numpy's: nothing has been done."""
    return False


def run_jointly(code: Any, inputs: list[Any]) -> list[Any] | None:
    """Run the rows of a part and the pass from its output.

    Args:
        code: the `ProgramCode` of the rows.
        inputs: the Tensors that it takes.

    Returns:
        The Tensors of the outputs; None: nothing has been done.
    """
    function = code.joint
    mode = current_mode()
    if function is None or mode.profiler is not None or mode.collect is not None or running_loop() is None:
        return None
    tensors = [*inputs, *code.program.tensors]

    def compute() -> Any:
        found = function(*[tensor._data for tensor in tensors])
        if found is False:
            return None
        arrays, grads = found
        outputs, node = code.results_maker()(code, tensors, arrays, (), None)
        return node, grads, outputs

    leaves = [tensors[place]._node for place in code.sources]
    found: list[Any] | None = current_engine().run_computed(leaves, code.estimate, compute)
    if found is not None:
        code.count()
    return found
