"""Operations on CudaArrays by family: shapes, allocation and launches; importing this package fills `aiograd.cuda.tables`."""

from __future__ import annotations

from aiograd.cuda import elementwise as elementwise
from aiograd.cuda import fallback, tables
from aiograd.cuda.operations import attention as attention
from aiograd.cuda.operations import convolution as convolution
from aiograd.cuda.operations import creation as creation
from aiograd.cuda.operations import dropout as dropout
from aiograd.cuda.operations import indexing as indexing
from aiograd.cuda.operations import joining as joining
from aiograd.cuda.operations import loss as loss
from aiograd.cuda.operations import normalization as normalization
from aiograd.cuda.operations import optimizer as optimizer
from aiograd.cuda.operations import pooling as pooling
from aiograd.cuda.operations import products as products
from aiograd.cuda.operations import recurrent as recurrent
from aiograd.cuda.operations import reduction as reduction
from aiograd.cuda.operations import scan as scan
from aiograd.cuda.operations import selecting as selecting
from aiograd.cuda.operations import softmax as softmax
from aiograd.cuda.operations import sorting as sorting
from aiograd.cuda.operations import special as special
from aiograd.cuda.operations import views as views

tables.ARRAY_OPERATIONS = tables.ArrayOperations(fallback.on_host, elementwise.cast, indexing.getitem, indexing.setitem)
