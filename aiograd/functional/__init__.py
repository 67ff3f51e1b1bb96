"""Functions of functions.

`function`          `Function`: an operation with a backward rule of the user's own
`derivatives`       `jacobian`, `hessian`, `vjp`, `jvp`, `value_and_grad`
`batching`          `vmap`
`checkpointing`     `checkpoint`: computed again in the backward pass instead of kept
`isolation`         forwards with a backward pass of their own
`gradient_check`    `gradcheck`, `gradgradcheck`
"""
