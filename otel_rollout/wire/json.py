"""JSON as model servers and clients write it: parsed as the OpenAI client does, copied, checked."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import cache, reduce
from operator import getitem
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

Json = Any
"""A JSON value: None, bool, int, float, str, list or dict with string keys."""
Params: TypeAlias = Mapping[str, Json]
"""The members of a request, such as `model` and `temperature`."""
Message: TypeAlias = dict[str, Json]
"""A message of a conversation in wire form, such as `{"role": "user", "content": "Hi"}`."""
Reply: TypeAlias = Mapping[str, Json]
"""The body of a response, a stream in unstreamed shape."""
Choice: TypeAlias = Mapping[str, Json]
"""One sampled choice as the server sent it; the reply itself where an API has only one."""
Chunk: TypeAlias = dict[str, Json]
"""The JSON of one event of a stream."""


OBJECT = (dict, Mapping)
"""Types of JSON objects, for `isinstance`: Python asks at length whether a dict is a mapping."""
_CONSTANTS = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


_decoder = json.JSONDecoder(strict=False, parse_constant=_CONSTANTS.__getitem__)
_decode_strict = msgspec.json.Decoder().decode


def loads(text: str | bytes) -> Json:
    """Parse JSON as the OpenAI client does; NaN is the one `math.nan`, so equal texts are equal.

    Strict JSON is read in C by `msgspec`. What that refuses, such as NaN, lone surrogates and
    numbers out of range, is read, or refused, by `json`, which gives the same for what both read.
    """
    try:
        # A text that is not ASCII would keep what it is in UTF-8 as long as it lives.
        if isinstance(text, str) and not text.isascii():
            return _decode_strict(text.encode())
        return _decode_strict(text)
    except (ValueError, RecursionError):
        pass
    if isinstance(text, bytes):
        text = text.decode(json.detect_encoding(text), "surrogatepass")
    return _decoder.decode(text)


class JsonText:
    """A JSON value and the text of it: each is made of the other when somebody asks."""

    __slots__ = ("_text", "_value", "read")

    def __init__(self, text: str | Callable[[], str] | None, value: Json = None) -> None:
        """text: None where nobody wrote it, or a function that gives it when somebody asks."""
        self._text = text
        self._value = _UNREAD if value is None and text is not None else value
        self.read: tuple[bytes | None, tuple[str, ...]] | None = None
        """Of a message, once it was read: what it is compared by, and the types of its media."""

    @property
    def text(self) -> str:
        """As it was written; compact where nobody wrote it."""
        if not isinstance(self._text, str):
            self._text = dumps(self.value) if self._text is None else self._text()
        return self._text

    @property
    def value(self) -> Json:
        """What it says, one object however often it is asked for."""
        if self._value is _UNREAD:
            self._value = loads(self.text)
        return self._value

    @property
    def seen(self) -> Json:
        """What it says, at least all that a model sees of it; it may be less than `value`."""
        return self.value


_UNREAD = msgspec.UNSET

Cut = msgspec.Raw
"""JSON that was cut out of a text, checked as strict JSON, and not read; it has its bytes."""
_Value = TypeVar("_Value")


class Bounded(Generic[_Value]):
    """Reads strict JSON of a kind that is not nested too deep; gives None for anything else.

    kind: what `msgspec` is to make of it. is_read: False if its parts are read later, so that a
    number in it that Python does not read has to be found now.
    """

    def __init__(self, kind: Any, *, is_read: bool = True) -> None:
        self.kind = kind
        self._is_read = is_read
        self._decode: Callable[[str | bytes | Cut], _Value] = msgspec.json.Decoder(kind).decode

    def part(self, cut: Cut | bytes) -> _Value | None:
        """The same of what was cut out of such a text, or of bytes, whose depth is not bounded."""
        try:
            return self._decode(cut)
        except (ValueError, RecursionError):
            return None

    def __call__(self, text: str | bytes) -> _Value | None:
        try:
            if isinstance(text, bytes):
                text = text.decode()  # who passes over a text does not look at its bytes
            if not self._is_read and _has_unread_number(text):
                return None
            whole = text if text.isascii() else text.encode()
            if len(text) <= DEEPEST:
                return self._decode(whole)
            if _IS_COUNTED and sys.getrecursionlimit() <= _LEVELS:
                found: _Value = _inside_margin()(self._decode, whole)
                return found
            check_depth(text)
            return self._decode(whole)
        except (ValueError, RecursionError):
            return None


@cache
def _inside_margin() -> Callable[..., Any]:
    """Calls a function with a text, inside the margin; made when it is first needed."""
    call: Callable[..., Any] = lambda read, text: read(text)  # noqa: E731 - a static method's
    for _ in range(_MARGIN - 1):
        call = staticmethod(call)
    return call


def _has_unread_number(text: str) -> bool:
    """True if it has a number of more digits than Python makes an integer of."""
    half = _DIGITS // 2  # wherever it begins, it fills one block of half its length
    blocks = range(0, len(text) - half + 1, half)
    # Few blocks begin with so many digits: the others are not copied.
    likely = (at for at in blocks if text[at : at + 32].isdigit())
    is_likely = any(text[at : at + half].isdigit() for at in likely)
    return is_likely and _unread_number(text) is not None


DEEPEST = 850
"""Levels of lists and objects; no request or reply of a model has nearly as many. What is nested
deeper could be parsed, and not be written again."""
_MARGIN = 150
"""Calls around the reading of a text: Python 3.11 reads 1,000 levels in all, calls included, so
that the text has no more than `DEEPEST`. A static method that is called calls the next one, which
costs nearly nothing; to count the brackets of a text costs as much as to cut it."""
_IS_COUNTED = sys.version_info < (3, 12)
_LEVELS = 1000
_DIGITS = 4300
_unread_number = re.compile(rf"(?<![0-9])[0-9]{{{_DIGITS}}}").search
"""Where so many digits begin; it looks at each digit once."""
cut_value: Bounded[Cut] = Bounded(Cut)
"""The value in a text, less white space around it."""
cut_members: Bounded[dict[str, Cut]] = Bounded(dict[str, Cut], is_read=False)
"""The members of the object that a text is."""
cut_elements: Bounded[list[Cut]] = Bounded(list[Cut], is_read=False)
"""The elements of the list that a text is."""
read_strict: Bounded[Json] = Bounded(Any)
"""What a text says."""


def loads_leniently(text: str) -> Json:
    """`loads`, in which an integer that is too long for Python is a text."""
    return _lenient.decode(text)


def _integer(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:
        return digits


_lenient = json.JSONDecoder(strict=False, parse_constant=_CONSTANTS.__getitem__, parse_int=_integer)


def loads_bounded(text: str) -> Json:
    """`loads`; ValueError for what is nested deeper than `DEEPEST`."""
    value = read_strict(text)
    if value is None:
        check_depth(text)
        return loads(text)
    return value


class PartlyRead(Mapping[str, Json]):
    """A choice of which some members are cut out, or passed over: these are read when asked for.

    reply: that the choice is in, under these keys one in the other; without keys that it is itself.
    It has what is `PASSED` here.
    """

    __slots__ = ("_members", "_place", "_reply", "known")

    def __init__(
        self,
        members: dict[str, Json],
        reply: JsonText | None = None,
        place: tuple[str | int, ...] = (),
        known: dict[str, Any] | None = None,
    ) -> None:
        self._members = members
        self._reply, self._place = reply, place
        self.known: dict[str, Any] = {} if known is None else known
        """What was found in unread members, by the name of one or of what is asked of several."""

    def cut(self, name: str) -> Cut | None:
        """A member that was cut out; None for any other."""
        member = self._members.get(name)
        return member if isinstance(member, Cut) else None

    def __getitem__(self, name: str) -> Json:
        member = self._members[name]
        return self.get(name) if member is PASSED or isinstance(member, Cut) else member

    def get(self, name: str, default: Any = None) -> Any:
        member = self._members.get(name, default)
        if type(member) is Cut:
            return loads(bytes(member))
        if member is PASSED and self._reply is not None:
            whole = reduce(getitem, self._place, self._reply.value)
            return whole[name]
        return member

    def may_have(self, name: str, text: str) -> bool:
        """False if no text in an unread member has this one in it, which is ASCII."""
        cut = self.cut(name)
        if cut is not None:
            return text.encode() in bytes(cut) or b"\\u00" in bytes(cut)
        whole = "" if self._reply is None else self._reply.text
        return text in whole or "\\u00" in whole

    def __contains__(self, name: object) -> bool:
        return name in self._members

    def __iter__(self) -> Iterator[str]:
        return iter(self._members)

    def __len__(self) -> int:
        return len(self._members)

    def __repr__(self) -> str:
        return repr(dict(self))


PASSED = msgspec.UNSET
"""Stands for a member that was passed over; copies of it are the same object."""


def wholly_read(reply: Json) -> Json:
    """The reply with all of its choices read."""
    if isinstance(reply, PartlyRead):
        return dict(reply)
    members = reply.items() if isinstance(reply, dict) else ()
    lists = {name: value for name, value in members if isinstance(value, list)}
    for name, value in lists.items():
        lists[name] = [dict(each) if isinstance(each, PartlyRead) else each for each in value]
    return {**reply, **lists} if lists else reply


def list_of(kind: Any) -> Any:
    """The type of lists of these."""
    return list[kind]


def struct_of(name: str, members: Mapping[str, Any]) -> Any:
    """A type of objects to read with `Bounded`: with these members of these types, or fewer."""
    fields = [(each, kind, msgspec.UNSET) for each, kind in members.items()]
    return msgspec.defstruct(name, fields, forbid_unknown_fields=True, gc=False)


def as_objects(found: Any) -> Any:
    """What was read as a type as plain JSON, with the members that are there, and cuts."""
    return msgspec.to_builtins(found, builtin_types=(Cut,))


def try_loads(text: str) -> Json:
    """The JSON value of a text; None where it is no JSON."""
    try:
        return loads_bounded(text)
    except (ValueError, RecursionError):
        return None


def member_of(value: Json, *names: str) -> Json:
    """The member of this name, of which each further one is a member; None where one is missing."""
    for name in names:
        value = value.get(name) if isinstance(value, OBJECT) else None
    return value


scan = _decoder.raw_decode
"""`scan(text, start) -> (value, end)`: the JSON value that begins exactly at `start`."""


def _plain(value: Any) -> Json:
    if isinstance(value, PartlyRead):
        return dict(value)
    if isinstance(value, Cut):
        return loads(bytes(value))
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


_encode = json.JSONEncoder(ensure_ascii=False, separators=(",", ":"), default=_plain).encode


def dumps(value: Json) -> str:
    """Compact JSON that any UTF-8 transport carries: lone surrogates are written escaped."""
    text = _encode(value)
    if not text.isascii():
        try:
            text.encode()
        except UnicodeEncodeError:
            return json.dumps(value, separators=(",", ":"), default=_plain)
    return text


_USUAL = 32
"""Levels that are looked at together; deeper texts are read bracket by bracket."""

_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_quoted = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)


def check_depth(text: str) -> None:
    """ValueError for a JSON text that is nested deeper than `DEEPEST`; linear, and fast."""
    data = text.encode("utf-8", "surrogatepass")
    brackets = data.translate(None, _NOT_BRACKETS)
    for _ in range(_USUAL):
        if len(brackets) <= DEEPEST:
            return
        fewer = brackets.replace(b"[]", b"").replace(b"{}", b"")
        if len(fewer) == len(brackets):
            break  # there are brackets in texts
        brackets = fewer
    depth = 0
    for bracket in _quoted.sub(b"", data).translate(None, _NOT_BRACKETS):
        depth += 1 if bracket in b"[{" else -1
        if depth > DEEPEST:
            raise ValueError(f"it is nested deeper than {DEEPEST} levels")


def dumps_strict(value: Json) -> str:
    """`dumps` of what was read from strict JSON: it has no number and no text that JSON has not."""
    try:
        return _encode_strict(value).decode()
    except (TypeError, ValueError, OverflowError, RecursionError):
        return dumps(value)


def _as_cut(value: Any) -> Json:
    if not isinstance(value, PartlyRead):
        return _plain(value)
    cuts = {name: value.cut(name) for name in value}
    return {name: value[name] if cut is None else cut for name, cut in cuts.items()}


_encode_strict = msgspec.json.Encoder(enc_hook=_as_cut).encode


def finite(value: Json) -> Json:
    """A copy with null for NaN and infinities, which are no JSON; tuples become lists."""
    whole = [value]
    unfinished: list[Any] = [whole]
    while unfinished:
        container = unfinished.pop()
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, Mapping):
                container[key] = item = dict(item)
                unfinished.append(item)
            elif isinstance(item, list | tuple):
                container[key] = item = list(item)
                unfinished.append(item)
            elif isinstance(item, float) and not math.isfinite(item):
                container[key] = None
    return whole[0]


def copy_json(value: Json) -> Json:
    """A copy of a JSON value that shares nothing mutable with it, however deep it is."""
    if not isinstance(value, (dict, list)):
        return value
    copy = value.copy()
    unfinished = [copy]
    while unfinished:
        container = unfinished.pop()
        for key, item in container.items() if isinstance(container, dict) else enumerate(container):
            if isinstance(item, (dict, list)):
                container[key] = item = item.copy()
                unfinished.append(item)
    return copy


def checked_json(value: Json, what: str) -> Json:
    """`value` as JSON would carry it; ValueError that names `what` if it cannot."""
    try:
        text = dumps(value)
        check_depth(text)
        return loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{what}: expected a JSON value, got {value!r} ({error})") from None
