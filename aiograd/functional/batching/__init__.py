"""`vmap`: a function of one example as a function of a batch.

==========  ====================================================================================
array       an array with a hidden batch axis, which implements the interface of a device's arrays
rules       how each row of the op tables runs on such arrays: by numpy's broadcasting, or in a loop
vmap        the transform
per_sample  gradients of every example, and their norms
==========  ====================================================================================
"""
