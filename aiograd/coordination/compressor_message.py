"""A compressor on the wire. Pure."""

from __future__ import annotations

from aiograd.coordination.compression import Blockwise, Compressor, TopK
from aiograd.coordination.message_form import Positive, WireMessage, message
from aiograd.errors import ArgumentError, ProtocolError


@message(code="compressor", wire=list)
class CompressorForm(WireMessage):
    """A compressor."""

    #: None: it is no `TopK`
    fraction: float | None
    bits: Positive
    block: Positive
    decay: float


def sent_form(compressor: Compressor | None) -> CompressorForm | None:
    """The message of a compressor."""
    if compressor is None:
        return None
    return CompressorForm(compressor.fraction if isinstance(compressor, TopK) else None, compressor.bits, compressor.block, compressor.decay)


def received_form(form: CompressorForm | None) -> Compressor | None:
    """The compressor of a message.

    Raises:
        ProtocolError: there is no such compressor.
    """
    if form is None:
        return None
    try:
        if form.fraction is None:
            return Blockwise(form.bits, block=form.block)
        return TopK(form.fraction, form.bits, block=form.block, decay=form.decay)
    except ArgumentError as error:
        raise ProtocolError(f"a message with a compressor that does not exist: {error}", code="compressor") from error
