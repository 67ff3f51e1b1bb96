"""Instructions of a pass, counted by valgrind: ``make counts``. Times differ from run to run, these numbers next to nothing.

`programs`   what is counted
`counting`   the process below valgrind, and the arithmetic
"""
