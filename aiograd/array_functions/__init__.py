"""The public functions ``ag.*``, with the names and signatures of the Python Array API standard (2024.12).

A family to a file: `creation`, `dtypes`, `elementwise`, `comparison`, `activation`, `manipulation`, `reduction`, `searching`, `scattering`,
`products`, and `linalg` as a namespace of its own. `conversion` makes Tensors of their arguments, `methods` puts them on Tensor, and `public` gathers
the names. Each function runs rows of the op tables on Tensors; there is no arithmetic here.

A function that only runs a row is declared, ``sin = one("sin", "Sines of angles in radians.")``.

Rejected: making the functions in a loop over the tables. Editors and type checkers would not see definitions then.
"""
