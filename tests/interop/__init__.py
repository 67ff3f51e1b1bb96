"""aiograd beside other libraries: the conformance suite of the Array API, and programs of others that take Tensors. Run by ``make interop``."""
