"""The families of array functions that are modules to users, as type checkers see them; there is no such package at run time."""
