"""Watching: the reads of the functions that run while a program is recorded, so that they can be compared at every later call.

=============  ====================================================================================================
`stack`        operands of the next instruction of a running frame
`instructions` the instructions that read or change something, with the places of their operands
`scope`        the functions that are watched
`objects`      attributes, items and contents of objects
`calls`        calls of functions written in C
`kinds`        the ways to read: the expression of each, and the comparison of values
`reads`        the reads of a call, as data that can be read again
`watcher`      the trace function
=============  ====================================================================================================
"""
