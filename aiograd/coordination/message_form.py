"""The wire form of messages: a frozen dataclass on either side, between them its fields: a tuple or list in their order, or a dict by name.

The annotation of a field is its type on the wire: a type of the codec, another message, ``list[...]``, ``dict[str, ...]``, ``tuple[..., ...]`` or
``... | None`` of these, `Any` for values that the receiver examines itself; ``Annotated[..., Bound(...)]`` adds a bound. Fields with the default None
at the end of a message are left out where they are None.
"""

from __future__ import annotations

import dataclasses
import operator
import types
import typing
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from aiograd.coordination.malformed import malformed

M = TypeVar("M", bound="WireMessage")
T = TypeVar("T")
#: turns a value of the wire into one of a field, or back
Convert: TypeAlias = Callable[[Any], Any]

#: characters of a value that an error shows
SHOWN = 40


class Bound(NamedTuple):
    """A bound of a field, in `Annotated`."""

    #: in words, as in "expected 16 bytes"
    text: str
    #: True for values within the bound; the type has been checked
    holds: Callable[[Any], bool]


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
        made = dataclasses.dataclass(frozen=True, slots=True)(cls)
        made.form = MessageForm(
            made, f"{name or made.__name__} {word}".strip(), code, wire, MessageKind(kind, name), word, value_form(answer), failpoints
        )
        return made

    return decorate


class _MismatchError(Exception):
    """A value that does not fit its field; on its way out it collects the path of fields."""

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.path: list[str] = []

    @property
    def field(self) -> str:
        return "".join(reversed(self.path)).lstrip(".")


class ValueForm(NamedTuple):
    """The wire form of the values of one annotation."""

    #: the classes of the wire that fit; None: all
    classes: frozenset[type] | None
    #: checks more than the class and converts; None: there is nothing to do
    read: Convert | None
    write: Convert | None
    #: the annotation in words
    expected: str

    def parse(self, value: Any) -> Any:
        """Check and convert a value from the wire."""
        if self.classes is not None and value.__class__ not in self.classes:
            raise _MismatchError(shown(value), self.expected)
        return value if self.read is None else self.read(value)


class MessageForm:
    """The wire form of one class of messages: its fields, compiled once.

    Args:
        cls: the class.
        name: of the message, in errors.
        code, wire, word, failpoints: see `message`.
        kind: of the request; 0: it is none.
        answer: the form of its answer.
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
        self.cls = cls
        self.name = name
        self.code = code
        self.wire = wire
        self.kind = kind
        self.word = word
        self.answer = answer
        self.failpoints = failpoints
        hints = typing.get_type_hints(cls, include_extras=True)
        fields = dataclasses.fields(cls)  # type: ignore[arg-type]
        self.names = tuple(field.name for field in fields)
        self.forms = tuple(value_form(hints[name]) for name in self.names)
        self.required = sum(field.default is dataclasses.MISSING for field in fields)
        self._read = operator.attrgetter(*self.names) if self.names else lambda _: ()
        self._classes = tuple(form.classes for form in self.forms)
        self._readers = tuple((i, form.read) for i, form in enumerate(self.forms) if form.read is not None)
        self._writers = tuple((i, form.write) for i, form in enumerate(self.forms) if form.write is not None)
        #: the types of the fields of messages that have been parsed: equal types are not examined again
        self._seen: set[tuple[type, ...]] = set()

    def encode(self, message: WireMessage) -> Any:
        """The wire value of a message."""
        values = self._encode(message)
        return values if self.wire is tuple else dict(zip(self.names, values, strict=False)) if self.wire is dict else list(values)

    def _encode(self, message: WireMessage) -> tuple[Any, ...]:
        values: tuple[Any, ...] = self._read(message)
        if len(self.names) == 1:
            values = (values,)
        count, required = len(values), self.required
        while count > required and values[count - 1] is None:
            count -= 1
        if count < len(values):
            values = values[:count]
        if not self._writers:
            return values
        written = list(values)
        for i, write in self._writers:
            if i < count:
                written[i] = write(written[i])
        return tuple(written)

    def parse(self, value: Any) -> Any:
        """The message of a wire value."""
        wire = self.wire
        if value.__class__ is not wire or not self.required <= len(value) <= len(self.names):
            found = f"a {wire.__name__} of {len(value)} values" if value.__class__ is wire else shown(value)
            raise _MismatchError(found, f"a {wire.__name__} ({', '.join(self.names)})")
        if wire is dict:
            missing = [name for name in self.names[: len(value)] if name not in value]
            if missing:
                raise _MismatchError(f"without {missing[0]}", f"a dict ({', '.join(self.names)})")
            value = [value[name] for name in self.names[: len(value)]]
        if len(value) > self.required and value[-1] is None:
            raise self._mismatch(self.names[len(value) - 1], None, "to be left out")
        types = tuple(map(type, value))
        if types not in self._seen:
            for name, form, cls, item in zip(self.names, self._classes, types, value, strict=False):
                if form is not None and cls not in form:
                    raise self._mismatch(name, item, self.forms[self.names.index(name)].expected)
            if len(self._seen) < 64:
                self._seen.add(types)
        if self._readers:
            value = list(value)
            count = len(value)
            for i, read in self._readers:
                if i < count:
                    try:
                        value[i] = read(value[i])
                    except _MismatchError as error:
                        error.path.append(f".{self.names[i]}")
                        raise
        return self.cls(*value)

    def _mismatch(self, name: str, item: Any, expected: str) -> _MismatchError:
        return _at(f".{name}", _MismatchError(shown(item), expected))


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
        return ValueForm(None, None, None, "any value")
    if hint is None or hint is types.NoneType:
        return ValueForm(frozenset({types.NoneType}), None, None, "None")
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Annotated:
        return _bounded(value_form(inner[0]), [each for each in inner[1:] if isinstance(each, Bound)])
    if origin in (typing.Union, types.UnionType):
        return _union([value_form(each) for each in inner])
    if origin is None and isinstance(hint, type):
        if issubclass(hint, WireMessage):
            form = hint.form
            return ValueForm(frozenset({form.wire}), form.parse, form.encode, f"{form.name} ({', '.join(form.names)})")
        return ValueForm(frozenset({hint}), None, None, hint.__name__)
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
    for bound in bounds:
        form = ValueForm(form.classes, _checked(form.read, *bound), form.write, bound.text)
    return form


def _checked(inner: Convert | None, text: str, holds: Callable[[Any], bool]) -> Convert:
    def read(value: Any) -> Any:
        if not holds(value):
            raise _MismatchError(shown(value), text)
        return value if inner is None else inner(value)

    return read


def _union(forms: list[ValueForm]) -> ValueForm:
    """One of several forms with different classes on the wire."""
    by_class: dict[type, ValueForm] = {}
    for form in forms:
        for cls in form.classes or ():
            if by_class.setdefault(cls, form) is not form:
                raise TypeError(f"messages: two types of a union are {cls.__name__} on the wire")
    readers = {cls: form.read for cls, form in by_class.items() if form.read is not None}
    writers = [form.write for form in forms if form.write is not None]
    if len(writers) > 1:
        raise TypeError("messages: a union has one type at most that is or holds messages")
    plain = frozenset(cls for form in forms if form.write is None for cls in form.classes or ())

    def read(value: Any) -> Any:
        reader = readers.get(value.__class__)
        return value if reader is None else reader(value)

    def write(value: Any) -> Any:
        return value if value.__class__ in plain else writers[0](value)

    return ValueForm(frozenset(by_class), read if readers else None, write if writers else None, " or ".join(form.expected for form in forms))


def _items(form: ValueForm, cls: type, name: str) -> ValueForm:
    classes, inner, writer = form.classes, form.read, form.write

    def read(values: Any) -> Any:
        if inner is None and classes.issuperset(map(type, values)):  # type: ignore[union-attr]
            return values
        made = []
        for i, value in enumerate(values):
            if classes is not None and value.__class__ not in classes:
                raise _at(f"[{i}]", _MismatchError(shown(value), form.expected))
            if inner is not None:
                try:
                    value = inner(value)
                except _MismatchError as error:
                    raise _at(f"[{i}]", error) from None
            made.append(value)
        return values if inner is None else cls(made)

    def write(values: Any) -> Any:
        return cls(map(writer, values))  # type: ignore[arg-type]

    is_plain = classes is None and inner is None
    return ValueForm(frozenset({cls}), None if is_plain else read, write if writer else None, name if is_plain else f"{name} of {form.expected}")


def _fixed(forms: list[ValueForm]) -> ValueForm:
    expected = f"a tuple ({', '.join(form.expected for form in forms)})"

    def read(values: Any) -> Any:
        if len(values) != len(forms):
            raise _MismatchError(f"a tuple of {len(values)} values", expected)
        made = []
        for i, (form, value) in enumerate(zip(forms, values, strict=True)):
            try:
                made.append(form.parse(value))
            except _MismatchError as error:
                raise _at(f"[{i}]", error) from None
        return tuple(made)

    if any(form.write for form in forms):
        raise TypeError("messages: give the fields of a tuple with messages names, as a message of its own")
    return ValueForm(frozenset({tuple}), read, None, expected)


def _entries(form: ValueForm) -> ValueForm:
    def read(values: Any) -> Any:
        made = {}
        for key, value in values.items():
            try:
                made[key] = form.parse(value)
            except _MismatchError as error:
                raise _at(f"[{key!r:.{SHOWN}}]", error) from None
        return made

    writer = form.write

    def write(values: Any) -> Any:
        return {key: writer(value) for key, value in values.items()}  # type: ignore[misc]

    is_plain = form.classes is None and form.read is None
    return ValueForm(frozenset({dict}), None if is_plain else read, write if writer else None, "dict" if is_plain else f"dict of {form.expected}")


def _at(place: str, error: _MismatchError) -> _MismatchError:
    error.path.append(place)
    return error


def shown(value: Any) -> str:
    """A value of the wire in an error.

    Args:
        value: any value of the codec.

    Returns:
        The type, with the first characters of a plain value.
    """
    cls = type(value)
    if cls in (int, float, bool, str, bytes) or value is None:
        return f"{value!r:.{SHOWN}}" if value is None or cls is bool else f"{value!r:.{SHOWN}} of type {cls.__name__}"
    return f"of type {cls.__name__}"


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
    except _MismatchError as error:
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
    except _MismatchError as error:
        raise malformed(request.form, error.found, error.expected, error.field, peer=peer, is_answer=True) from None
