"""Compiled functions: `compile` records the rows that a function runs, once per signature, and from then on runs them as one program.

==================  ===============================================================================================
`compiled`          the callable that users get: signatures, guards, statistics
`signature`         of the arguments: their structure, and the facts that a program depends on
`watching`          the reads of the running functions from the objects around them
`guard_code`        guards as straight lines of comparisons
`recording`         an eager run as statements; calls that cannot be repeated
`recorded_calls`    passes and optimizers' steps while a function is recorded
`recorded_pass`     passes that record a graph, as rows
`recorded_results`  the program, made from the function's result
`effects`           statements that are no rows: draws, effects, repeated calls
`writes`            how a recording treats modifications in place
`awaiting`          a coroutine while it is recorded
`lines`             the user's lines
`program`           statements and values: the data, pure
`calls`             a function of arrays as calls of numpy: the data, pure
`tracing`           recording arrays: the calls of a row's forward or rule
`results`           results: leaves that are no Tensors, shared memory
`forward_code`      the forward as calls
`backward_code`     the backward as calls, made by the first pass that runs it
`passes`            calls to fewer and cheaper calls of the same bits
`source`            calls to text to function: the only one that calls ``compile``
`program_code`      a program with its code, ready to be called
`arena`             memory that calls compute in, used again
`steps`             programs in parts: calls between rows, segments
`awaited_forward`   rows that are awaited, in turns on the loop and on the executor
`updates`           optimizers' steps as statements
`joint_pass`        rows and the pass after them as one native function
`reached`           the statements that a pass runs
`estimates`         estimated times of backwards
`profiled`          programs under a profiler
`node`              the backward node of one call
`warming`           programs before the first call
`snapshot`          what a call may change, to be put back
`native`            programs as machine code
==================  ===============================================================================================
"""

from aiograd.compiler.compiled import CompiledFunction, compile
from aiograd.compiler.compiled_statistics import CompiledStatistics
from aiograd.compiler.program import Program, Statement
from aiograd.running import assembly as _assembly

__all__ = ["CompiledFunction", "CompiledStatistics", "Program", "Statement", "compile"]

_assembly.imported("compiler")
