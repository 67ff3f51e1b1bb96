"""Native programs: compiled functions as machine code, with the bits of eager.

================  ======================================================================================
`tiers`           when programs become native, and the thread on which they do
`partition`       the parts of a code that are native functions
`lowering`        calls of numpy to loops and calls of numpy's loops, as data
`expansions`      kernels of several steps, as calls of numpy
`update_rules`    optimizers' rules, as calls of numpy
`placing`         where arrays are, and which rows share a loop
`rolling`         bodies that repeat in the list of loops and calls
`items`           that data
`layouts`         where the elements of arrays lie
`emit`            its text of LLVM: `writer` lines, `item_code` items, `elementwise` rows, `flag_code` flags, `roll_code` bodies that repeat
`ufuncs`          numpy's own loops, and the way in which numpy calls them
`check`           the same text with every access checked, for tests
`machine`         text to machine code
`cache`           machine code that is kept, in memory and on disk
`build`           machine code to a function
`objects`         addresses in CPython and numpy
`turns`           pauses of the thread that makes them
`marks`           how each statement of a program runs
================  ======================================================================================

A native function is made of an `ArrayCode`, as the Python function of a program is; it takes and returns the same.
"""
