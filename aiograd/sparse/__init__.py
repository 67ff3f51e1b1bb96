"""Jacobians that are mostly zero.

=========  ==============================================================================================
pattern    sets of inputs: on which inputs each element of an array may depend
rules      how each row of the op tables changes these sets
level      arrays that run a function's rows, follow the sets, and note which rows ran
plan       `jacobian_plan` and `sparse_jacobian`: pattern, colors, and all products in one batched pass
=========  ==============================================================================================
"""
