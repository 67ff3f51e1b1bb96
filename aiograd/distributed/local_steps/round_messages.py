"""The messages of rounds: arguments and results of calls of a `LocalStepsMember`. Pure."""

from __future__ import annotations

from typing import Annotated, Any

from aiograd.coordination.compression import Compressor
from aiograd.coordination.compressor_message import CompressorForm, received_form
from aiograd.coordination.message_code import Bound
from aiograd.coordination.message_form import Count, Positive, WireMessage, message
from aiograd.coordination.outline import ModuleOutline
from aiograd.distributed.data_parallel.replica_messages import MethodName, Norm
from aiograd.distributed.objects.references import RemoteRef


@message(code="local-steps", wire=dict)
class MemberOptions(WireMessage):
    """Options of a member."""

    #: of the module: the method that computes the loss, and the one that returns the loader
    method: MethodName
    data: MethodName
    #: None: gradients are not scaled
    clip_norm: Norm | None
    #: None: pseudo-gradients, and answers, are sent as they are
    compress: CompressorForm | None
    answer: CompressorForm | None
    optimizer: RemoteRef
    outer: RemoteRef

    @property
    def compressors(self) -> tuple[Compressor | None, Compressor | None]:
        """Of pseudo-gradients and of answers.

        Raises:
            ProtocolError: there are no such compressors.
        """
        return received_form(self.compress), received_form(self.answer)


@message(code="local-steps", wire=dict)
class LoaderOutline(WireMessage):
    """The data set of a member and the order of its batches."""

    examples: Count
    #: of an epoch
    batches: Positive
    batch_size: Count
    drop_last: bool
    #: JSON of the state of the generator from which the order of each epoch is forked; "": the loader does not shuffle
    generator: str
    #: the digest of the batches of a sampler in the first epoch; "": there is no sampler
    sampler: str


@message(code="local-steps", wire=dict)
class MemberOutline(WireMessage):
    """The model and the data set of a member."""

    model: ModuleOutline
    #: the path of a parameter or buffer in `model`, by path in the state dict of the module
    state: dict[str, str]
    loader: LoaderOutline


@message(code="local-steps", wire=list)
class DealtBatch(WireMessage):
    """A batch that a member is to read."""

    epoch: Count
    number: Count


@message(code="local-steps", wire=dict)
class LocalResult(WireMessage):
    """The local steps of one member, as they enter a round."""

    #: the version of the base from which the pseudo-gradients are taken
    began: Count
    rows: Positive
    #: the mean over the rows
    loss: float
    #: seconds that the steps took
    seconds: float
    #: the pseudo-gradients: a Tensor of bytes
    payload: Any
    #: of the examples, by batch, if a sampler draws them
    indices: list[list[int]] | None = None
    #: the digest of the order of each epoch of these batches, by number of the epoch, if a sampler draws them
    orders: list[str] | None = None


@message(code="local-steps", wire=list)
class ChangedBuffer(WireMessage):
    """A buffer with other values than in the base before."""

    name: str
    #: a Tensor
    values: Any


@message(code="local-steps", wire=dict)
class RoundAnswer(WireMessage):
    """The result of a round, of which every member makes the same next base."""

    #: of the base that it leads to
    version: Positive
    #: of each contributor
    rows: list[Positive]
    #: of the payloads: "each": one of each contributor; "mean": the mean; "sum": the weighted sum, compressed
    kind: Annotated[str, Bound("each, mean or sum", lambda kind: kind in ("each", "mean", "sum"))]
    #: Tensors of bytes; None: the payload of the receiver
    payloads: list[Any]
    buffers: list[ChangedBuffer]


@message(code="local-steps", wire=dict)
class PreparedRound(WireMessage):
    """A round that is prepared."""

    #: seconds from the request on for which it is kept
    kept: float
    #: of the next base
    digest: str


@message(code="local-steps", wire=list)
class MemberDigest(WireMessage):
    """The base of a member."""

    version: Count
    digest: str


@message(code="local-steps", wire=dict)
class MemberProgress(WireMessage):
    """The state of a member beside the base and the inner optimizer."""

    #: of the computation with a result that waits for a round; None: there is none
    number: Count | None
    #: its payload, where it is loaded
    payload: Any
    #: of the module after it
    buffers: list[ChangedBuffer]
    #: Tensors of bytes of the values that the compressor has left out of contributions that were in a round; None: there are none
    residuals: Any
    #: the same with the contribution that waits
    rest: Any
