"""Compiles the functions that make, parse and encode the messages of one class.

Note [Messages are compiled]
    Every call and every pass makes, encodes and parses a few messages. The constructor of a frozen dataclass sets each field through
    ``object.__setattr__``, and a loop over fields looks up the class, the bounds and the converter of each; together that is a tenth of a call of
    another worker (the operations *call* and *edge* of ``tests/benchmarks/remote.py``). So the functions of a class are written out from its fields,
    once, as for `Listed` in ``tests/distributed/test_messages.py``::

        def make(_cls, first, second=None):
            _message = _new(_Draft)
            _message.first = first
            _message.second = second
            _message.__class__ = _cls
            return _message

        def parse(_value):
            if _value.__class__ is not _wire: raise _unfit(_value)
            _count = len(_value)
            if _count == 1: v0, = _value; v1 = None
            elif _count == 2:
                v0, v1, = _value
                if v1 is None: raise _mismatch(1, None, 'to be left out')
            else: raise _unfit(_value)
            if v0.__class__ is not _class0: raise _mismatch(0, v0)
            if v1 is not None:
                if v1.__class__ is not _class1: raise _mismatch(1, v1)
            _message = _new(_Draft)
            ...

        def encode(_message):
            if _message.second is not None: return [_message.first, _message.second,]
            return [_message.first,]

    ``_Draft`` has the slots of the class and can be written to; the finished message becomes an instance of the class, which is frozen. The text
    consists of names of fields and numbers only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

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


class MismatchError(Exception):
    """A value that does not fit its field; on its way out it collects the path of fields.

    Args:
        found: the value, as `shown`.
        expected: the form of its field, in words.
    """

    def __init__(self, found: str, expected: str) -> None:
        super().__init__(found)
        self.found = found
        self.expected = expected
        self.path: list[str] = []

    def at(self, place: str) -> MismatchError:
        """Add the place of the value in the value around it.

        Args:
            place: a field, an index or a key.

        Returns:
            This error.
        """
        self.path.append(place)
        return self

    @property
    def field(self) -> str:
        """The path of the field, or ""."""
        return "".join(reversed(self.path)).lstrip(".")


class ValueForm(NamedTuple):
    """The wire form of the values of one annotation."""

    #: the classes of the wire that fit; None: all
    classes: frozenset[type] | None
    #: the bounds of values of these classes
    bounds: tuple[Bound, ...]
    #: converts a value within the bounds, and may find that it does not fit; None: there is nothing to do
    read: Convert | None
    write: Convert | None
    #: the annotation in words
    expected: str
    #: where None is a value: the form of the other values
    optional: ValueForm | None = None
    #: of a list or tuple of values that are the same on the wire: their classes, all that `read` checks
    items: frozenset[type] | None = None

    @property
    def is_plain(self) -> bool:
        """True if values of the right class fit, and are the same on the wire."""
        return not self.bounds and self.read is None

    def parse(self, value: Any) -> Any:
        """Check and convert a value from the wire.

        Args:
            value: any value of the codec.

        Returns:
            A value of the annotation.

        Raises:
            MismatchError: it does not fit.
        """
        if self.classes is not None and value.__class__ not in self.classes:
            raise MismatchError(shown(value), self.expected)
        return self.convert(value) if self.bounds else value if self.read is None else self.read(value)

    def convert(self, value: Any) -> Any:
        """The same for a value of one of the classes."""
        for text, holds in self.bounds:
            if not holds(value):
                raise MismatchError(shown(value), text)
        return value if self.read is None else self.read(value)


class MessageFields(NamedTuple):
    """The fields of a class of messages."""

    names: tuple[str, ...]
    forms: tuple[ValueForm, ...]
    #: the number of fields without a default; the others are None by default
    required: int
    #: tuple, list or dict: the type of a message on the wire
    wire: type[Any]

    def unfit(self, value: Any) -> MismatchError:
        """The error of a wire value that is no message, or has too few or too many fields."""
        cls = self.wire
        found = f"a {cls.__name__} of {len(value)} values" if value.__class__ is cls else shown(value)
        return MismatchError(found, f"a {cls.__name__} ({', '.join(self.names)})")

    def mismatch(self, i: int, value: Any, expected: str = "") -> MismatchError:
        """The error of a value that does not fit field `i`."""
        return MismatchError(shown(value), expected or self.forms[i].expected).at(f".{self.names[i]}")

    def values_of(self, named: Any) -> list[Any]:
        """The values of a message that is a dict on the wire, in the order of its fields."""
        if named.__class__ is not dict or not self.required <= len(named) <= len(self.names):
            raise self.unfit(named)
        names = self.names[: len(named)]
        for name in names:
            if name not in named:
                raise MismatchError(f"without {name}", f"a dict ({', '.join(self.names)})")
        return [named[name] for name in names]


class MessageFunctions(NamedTuple):
    """The compiled functions of a class of messages. See Note [Messages are compiled]."""

    #: makes a message of the class, which is the first argument
    make: Callable[..., Any]
    #: the message of a wire value; raises MismatchError
    parse: Convert
    #: the wire value of a message
    encode: Convert


def compile_message(cls: type[Any], fields: MessageFields) -> MessageFunctions:
    """Compile the functions of a class of messages.

    Args:
        cls: a frozen dataclass with slots.
        fields: its fields.

    Returns:
        The functions.

    Raises:
        TypeError: the name of a field cannot be used.
    """
    names, forms = fields.names, fields.forms
    for name in names:
        if not name.isidentifier() or name.startswith("_"):
            raise TypeError(f"messages: field {name!r} of {cls.__name__}; expected an identifier without underscore at its beginning")
    writable = {"__slots__": cls.__dict__["__slots__"], "__setattr__": object.__setattr__, "__delattr__": object.__delattr__}
    namespace: dict[str, Any] = {
        "__name__": __name__, "_made": cls, "_Draft": type(cls.__name__, cls.__bases__, writable), "_new": object.__new__, "_wire": fields.wire,
        "_unfit": fields.unfit, "_mismatch": fields.mismatch, "_values_of": fields.values_of, "_MismatchError": MismatchError,
    }  # fmt: skip
    lines = [*_make_source(fields), *_parse_source(fields, namespace), *_encode_source(fields)]
    for i, form in enumerate(forms):
        namespace[f"_write{i}"] = (form.optional or form).write
    exec(compile("\n".join(lines) + "\n", f"<message {cls.__name__}>", "exec"), namespace)  # noqa: S102 - see Note [Messages are compiled]
    return MessageFunctions(namespace["make"], namespace["parse"], namespace["encode"])


def _make_source(fields: MessageFields) -> list[str]:
    arguments = [name if i < fields.required else f"{name}=None" for i, name in enumerate(fields.names)]
    return [f"def make({', '.join(['_cls', *arguments])}):", *_made_source(fields.names, fields.names, "_cls")]


def _made_source(names: Sequence[str], values: Sequence[str], cls: str) -> list[str]:
    """Source that returns a message of a class with these values."""
    settings = [f"    _message.{name} = {value}" for name, value in zip(names, values, strict=True)]
    return ["    _message = _new(_Draft)", *settings, f"    _message.__class__ = {cls}", "    return _message"]


def _parse_source(fields: MessageFields, namespace: dict[str, Any]) -> list[str]:
    count, required = len(fields.names), fields.required
    lines = ["def parse(_value):"]
    lines.append("    _value = _values_of(_value)" if fields.wire is dict else "    if _value.__class__ is not _wire: raise _unfit(_value)")
    lines.append("    _count = len(_value)")
    for given in range(required, count + 1):
        lines.append(f"    {'if' if given == required else 'elif'} _count == {given}:")
        lines.append(f"        {''.join(f'v{i}, ' for i in range(given)) or '()'} = _value")
        if given > required:
            lines.append(f"        if v{given - 1} is None: raise _mismatch({given - 1}, None, 'to be left out')")
        lines += [f"        v{i} = None" for i in range(given, count)]
    lines.append("    else: raise _unfit(_value)")
    for i, form in enumerate(fields.forms):
        lines += ["    " + line for line in _field_source(i, fields.names[i], form, namespace)]
    return [*lines, *_made_source(fields.names, [f"v{i}" for i in range(count)], "_made")]


def _field_source(i: int, name: str, form: ValueForm, namespace: dict[str, Any]) -> list[str]:
    """Source that checks and converts the value of field `i`."""
    if form.optional is not None:
        return [f"if v{i} is not None:", *("    " + line for line in _field_source(i, name, form.optional, namespace) or ["pass"])]
    lines: list[str] = []
    if form.classes is not None:
        namespace[f"_class{i}"] = next(iter(form.classes)) if len(form.classes) == 1 else form.classes
        lines.append(f"if v{i}.__class__ {'is not' if len(form.classes) == 1 else 'not in'} _class{i}: raise _mismatch({i}, v{i})")
    for j, bound in enumerate(form.bounds):
        namespace[f"_holds{i}_{j}"], namespace[f"_text{i}_{j}"] = bound.holds, bound.text
        lines.append(f"if not _holds{i}_{j}(v{i}): raise _mismatch({i}, v{i}, _text{i}_{j})")
    if form.read is not None:
        namespace[f"_read{i}"] = form.read
        if form.items is not None:
            namespace[f"_items{i}"] = next(iter(form.items)) if len(form.items) == 1 else form.items
            lines.append(f"for _item in v{i}:")
            lines.append(f"    if _item.__class__ {'is not' if len(form.items) == 1 else 'not in'} _items{i}:")
            lines += [f"        try: _read{i}(v{i})", f"        except _MismatchError as _error: raise _error.at({'.' + name!r})"]
            return lines
        lines += [f"try: v{i} = _read{i}(v{i})", f"except _MismatchError as _error: raise _error.at({'.' + name!r})"]
    return lines


def _encode_source(fields: MessageFields) -> list[str]:
    names, required = fields.names, fields.required
    values: list[str] = []
    for i, (name, form) in enumerate(zip(names, fields.forms, strict=True)):
        value = f"_message.{name}"
        if form.write is not None:
            value = f"(None if {value} is None else _write{i}({value}))" if form.optional is not None else f"_write{i}({value})"
        values.append(f"{name!r}: {value}" if fields.wire is dict else value)
    begin, end = ("(", ")") if fields.wire is tuple else ("[", "]") if fields.wire is list else ("{", "}")
    wholes = [f"return {begin}{''.join(f'{value}, ' for value in values[:count])}{end}" for count in range(len(names) + 1)]
    tests = [f"    if _message.{names[i]} is not None: {wholes[i + 1]}" for i in reversed(range(required, len(names)))]
    return ["def encode(_message):", *tests, f"    {wholes[required]}"]


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
