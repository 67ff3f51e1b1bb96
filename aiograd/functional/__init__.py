"""Functions of functions.

`function`          `Function`: an operation with a backward rule of the user's own
`derivatives`       `vjp`, `jvp`, `value_and_grad`, and matrices: `jacobian`, `jacrev`, `jacfwd`, `hessian`
`linearization`     `linearize`, `hvp`
`batched_passes`    rows and columns of matrices, many together
`arguments`         arguments of these functions, and results of the differentiated one, checked
`batching`          `vmap`
`checkpointing`     `checkpoint`: computed again in the backward pass instead of kept
`isolation`         forwards with a backward pass of their own
`gradient_check`    `gradcheck`, `gradgradcheck`
"""
