"""Forward mode: a function runs once on dual arrays, which hold a value and its tangent.

==============  ====================================================================================
dual            `ForwardLevel`, one call of `aiograd.jvp`; `DualArray`, the arrays of it
rows            how a row runs on them: its forward, and the tangent that its ``jvp`` declares
lean            the short way of element-wise rows on small arrays
transposing     the tangent of a row without a declaration, from its own rule
==============  ====================================================================================

How other parts use it. ``level = ForwardLevel(records=create_graph)``, within ``with level:``; ``level.dual(primal, tangent)`` makes a Tensor of the
level from two Tensors of the caller; ``level.parts(tensor)`` takes one apart (value, tangent or None for zeros). A value of which `has_tangent` is
true (`aiograd.tensors.core`) may not be sent or converted as a plain array: its ``_data`` is a `DualArray`, with ``level``, ``primal``, ``tangent``;
`innermost` finds the level that a call with such arguments belongs to, which then runs on ``level.parts`` and gives back ``level.dual``.
A ``deferred`` level keeps its tangents' steps (`aiograd.linearize`): inputs are made with ``level.dual(primal, level.later())``, and
``await level.settle({number: tangent})`` runs them, as often as is wanted. Several tangents at once are one `vmap` of a function that calls `jvp` or
settles: tangents may be arrays of another level, inner or outer.
"""

from aiograd.forward import lean as lean
from aiograd.forward import rows as rows
