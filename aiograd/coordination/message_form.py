"""The wire form of messages: a frozen dataclass on either side, between them its fields: a tuple or list in their order, or a dict by name.

The annotation of a field is its type on the wire: a type of the codec, another message, ``list[...]``, ``dict[str, ...]``, ``tuple[..., ...]`` or
``... | None`` of these, `Any` for values that the receiver examines itself; ``Annotated[..., Bound(...)]`` adds a bound. Fields with the default None
at the end of a message are left out where they are None.
"""

from __future__ import annotations

import dataclasses
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, TypeAlias, TypeVar, dataclass_transform

from aiograd.coordination.malformed import malformed
from aiograd.coordination.message_code import SHOWN, Bound, Convert, MessageFields, MismatchError, ValueForm, compile_message, shown

M = TypeVar("M", bound="WireMessage")
#: a number that counts something, and one of at least 1
Count: TypeAlias = typing.Annotated[int, Bound("an int from 0", lambda count: count >= 0)]
Positive: TypeAlias = typing.Annotated[int, Bound("an int from 1", lambda count: count >= 1)]


class MessageKind(int):
    """The number of a kind of request, which its frames carry, with its name."""

    name: str

    def __new__(cls, number: int, name: str) -> MessageKind:
        """The kind `number`, called `name`."""
        kind = super().__new__(cls, number)
        kind.name = name
        return kind


class WireMessage:
    """A request, an answer, or a group of fields of one. Made by the decorator `message`."""

    __slots__ = ()

    form: ClassVar[MessageForm]


@dataclass_transform(frozen_default=True)
def message(
    *, code: str, name: str = "", wire: type[Any] = tuple, kind: int = 0, word: str = "", answer: Any = Any, failpoints: tuple[str, ...] = ()
) -> Callable[[type[M]], type[M]]:
    """Make a class a message: a frozen dataclass with a wire form.

    Args:
        code: the code of the `ProtocolError` of a message that does not parse.
        name: of the kind of a request; of another message, the name of the class by default.
        wire: tuple, list or dict: the type of the message on the wire.
        kind: the number of the kind of a request; 0: this is no request.
        word: of a request: the first value on the wire, where several requests share a kind.
        answer: of a request: the type of its answer, as an annotation.
        failpoints: of a request, the fields of its `RequestPoints`.

    Returns:
        The decorator.
    """

    def decorate(cls: type[M]) -> type[M]:
        made = dataclasses.dataclass(frozen=True, init=False, slots=True)(cls)
        made.form = MessageForm(
            made, f"{name or made.__name__} {word}".strip(), code, wire, MessageKind(kind, name), word, value_form(answer), failpoints
        )
        return made

    return decorate


class MessageForm:
    """The wire form of one class of messages: its fields, compiled once.

    Args:
        cls: the class, which gets its constructor.
        name: of the message, in errors.
        code, wire, word, failpoints: see `message`.
        kind: of the request; 0: it is none.
        answer: the form of its answer.

    Attributes:
        names, forms: of its fields, in order.
        required: the number of fields without a default.
        parse: the message of a wire value without its word; raises MismatchError.
        encode: the wire value of a message without its word.
    """

    def __init__(
        self,
        cls: type[WireMessage],
        name: str,
        code: str,
        wire: type[Any],
        kind: MessageKind,
        word: str,
        answer: ValueForm,
        failpoints: tuple[str, ...],
    ) -> None:
        self.name = name
        self.code = code
        self.wire = wire
        self.kind = kind
        self.word = word
        self.answer = answer
        self.failpoints = failpoints
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        self.names: tuple[str, ...] = tuple(field.name for field in fields)
        self.forms: tuple[ValueForm, ...] = tuple(value_form(hints[name]) for name in self.names)
        self.required: int = sum(field.default is dataclasses.MISSING for field in fields)
        self.parse: Convert
        self.encode: Convert
        make, self.parse, self.encode = compile_message(cls, MessageFields(self.names, self.forms, self.required, wire))
        cls.__new__ = make  # type: ignore[method-assign]


# ---------------------------------------------------------------- forms of annotations


def value_form(hint: Any) -> ValueForm:
    """The wire form of an annotation.

    Args:
        hint: see the module.

    Returns:
        The form.

    Raises:
        TypeError: it is no annotation of a message.
    """
    if hint is Any:
        return ValueForm(None, (), None, None, "any value")
    if hint is None or hint is types.NoneType:
        return ValueForm(frozenset({types.NoneType}), (), None, None, "None")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _bounded(value_form(inner[0]), [each for each in inner[1:] if isinstance(each, Bound)])
    if origin in (typing.Union, types.UnionType):
        return _union([value_form(each) for each in inner])
    if origin is None and isinstance(hint, type):
        if issubclass(hint, WireMessage):
            form = hint.form
            return ValueForm(frozenset({form.wire}), (), form.parse, form.encode, f"{form.name} ({', '.join(form.names)})")
        return ValueForm(frozenset({hint}), (), None, None, hint.__name__)
    if origin is list:
        return _items(value_form(inner[0]), list, "list")
    if origin is tuple and inner[-1] is Ellipsis:
        return _items(value_form(inner[0]), tuple, "tuple")
    if origin is tuple:
        return _fixed([value_form(each) for each in inner])
    if origin is dict and inner[0] is str:
        return _entries(value_form(inner[1]))
    raise TypeError(f"messages: {hint!r} is no type that a field of a message can have")


def _bounded(form: ValueForm, bounds: list[Bound]) -> ValueForm:
    if form.optional is not None or form.classes is None:
        raise TypeError(f"messages: a bound needs a type; {form.expected} has none, or several with None among them")
    for bound in bounds:
        form = form._replace(bounds=(bound, *form.bounds), expected=bound.text)
    return form


def _union(forms: list[ValueForm]) -> ValueForm:
    """One of several forms with different classes on the wire."""
    by_class: dict[type, ValueForm] = {}
    for form in forms:
        for cls in form.classes or ():
            if by_class.setdefault(cls, form) is not form:
                raise TypeError(f"messages: two types of a union are {cls.__name__} on the wire")
    writers = [form.write for form in forms if form.write is not None]
    if len(writers) > 1:
        raise TypeError("messages: a union has one type at most that is or holds messages")
    plain = frozenset(cls for form in forms if form.write is None for cls in form.classes or ())

    def read(value: Any) -> Any:
        return by_class[value.__class__].convert(value)

    def write(value: Any) -> Any:
        return value if value.__class__ in plain else writers[0](value)

    is_plain = all(form.is_plain for form in forms)
    expected = " or ".join(form.expected for form in forms)
    others = [form for form in forms if form.classes != frozenset({types.NoneType})]
    optional = None if len(others) == len(forms) else others[0] if len(others) == 1 else _union(others)
    return ValueForm(frozenset(by_class), (), None if is_plain else read, write if writers else None, expected, optional)


def _items(form: ValueForm, cls: type, name: str) -> ValueForm:
    classes, is_plain, inner, writer = form.classes, form.is_plain, form.convert if form.bounds else form.read, form.write

    def read(values: Any) -> Any:
        made = []
        for i, value in enumerate(values):
            if classes is not None and value.__class__ not in classes:
                raise MismatchError(shown(value), form.expected).at(f"[{i}]")
            try:
                made.append(value if inner is None else inner(value))
            except MismatchError as error:
                raise error.at(f"[{i}]") from None
        return values if is_plain else cls(made)

    def write(values: Any) -> Any:
        return cls(map(writer, values))  # type: ignore[arg-type]

    if is_plain and classes is None:
        return ValueForm(frozenset({cls}), (), None, None, name)
    return ValueForm(frozenset({cls}), (), read, write if writer else None, f"{name} of {form.expected}", items=classes if is_plain else None)


def _fixed(forms: list[ValueForm]) -> ValueForm:
    expected = f"a tuple ({', '.join(form.expected for form in forms)})"

    def read(values: Any) -> Any:
        if len(values) != len(forms):
            raise MismatchError(f"a tuple of {len(values)} values", expected)
        made = []
        for i, (form, value) in enumerate(zip(forms, values, strict=True)):
            try:
                made.append(form.parse(value))
            except MismatchError as error:
                raise error.at(f"[{i}]") from None
        return tuple(made)

    if any(form.write for form in forms):
        raise TypeError("messages: give the fields of a tuple with messages names, as a message of its own")
    return ValueForm(frozenset({tuple}), (), read, None, expected)


def _entries(form: ValueForm) -> ValueForm:
    def read(values: Any) -> Any:
        made = {}
        for key, value in values.items():
            try:
                made[key] = form.parse(value)
            except MismatchError as error:
                raise error.at(f"[{key!r:.{SHOWN}}]") from None
        return made

    writer = form.write

    def write(values: Any) -> Any:
        return {key: writer(value) for key, value in values.items()}  # type: ignore[misc]

    is_any = form.classes is None and form.is_plain
    return ValueForm(frozenset({dict}), (), None if is_any else read, write if writer else None, "dict" if is_any else f"dict of {form.expected}")


# ---------------------------------------------------------------- messages to wire values and back


def encode(message: WireMessage) -> Any:
    """The wire value of a message.

    Args:
        message: the message.

    Returns:
        The type `wire` of the message, of values that the codec takes, if it takes the fields of type `Any`. A word of the message comes first.
    """
    form = message.form
    values = form.encode(message)
    return (form.word, *values) if form.word else values


def parse(cls: type[M], value: Any, peer: str = "") -> M:
    """The message of a wire value. For a request with a word, see `MessageTable.parse`.

    Args:
        cls: the class of the message.
        value: from a peer; any value of the codec.
        peer: its name, for the error.

    Returns:
        The message.

    Raises:
        ProtocolError: it does not fit; the text names the message, the field and its type or bound.
    """
    try:
        return cls.form.parse(value)  # type: ignore[no-any-return]
    except MismatchError as error:
        raise malformed(cls.form, error.found, error.expected, error.field, peer=peer) from None


def encode_answer(request: type[WireMessage], answer: Any) -> Any:
    """The wire value of the answer to a request.

    Args:
        request: the class of the request.
        answer: of its type of answers.

    Returns:
        A value that the codec takes.
    """
    write = request.form.answer.write
    return answer if write is None else write(answer)


def parse_answer(request: type[WireMessage], value: Any, peer: str) -> Any:
    """The answer to a request.

    Args:
        request: the class of the request.
        value: from a peer.
        peer: its name.

    Returns:
        A value of the type of answers of the request.

    Raises:
        ProtocolError: as for `parse`.
    """
    try:
        return request.form.answer.parse(value)
    except MismatchError as error:
        raise malformed(request.form, error.found, error.expected, error.field, peer=peer, is_answer=True) from None
