"""Putting the pieces of a stream together: one rule, for all APIs.

A piece belongs to the element whose id it has, else to the one at its index, else to the last one.
Texts, arguments and lists grow; names, roles, types and ids do not. Pieces that contradict each
other, or that may belong to several elements, are kept and named in `Merging.contradictions`: such
a reply does not train.

Pure. While a stream is merged a text is a list of `GrowingText` pieces, joined once at the end by
`finish`: to join at every piece would cost the square of the text's length.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate, dropwhile
from typing import Any

from otel_rollout.wire.json import Chunk, Json, try_loads

_WHOLE = ("role", "id", "type", "name")
"""Texts that a server may repeat, but does not send in pieces, a name aside."""
SO_FAR = ("policy_token_spans", "weight_versions")
"""Lists that a chunk has whole, as far as they came."""
_GROWING = ("text", "thinking")
"""Types of parts that a stream sends in pieces."""
_ARGUMENTS = ("arguments", "input", "partial_json")
"""Members of a tool call that grow after its name."""
_MOST = 8
"""Contradictions that are named: a broken stream may have one in every chunk."""


class GrowingText(str):
    """A piece of a text that is still growing."""

    __slots__ = ()


class GrowingParts(list[Json]):
    """The parts of a content, of which the last one may still be growing."""


class Element(dict[str, Any]):
    """One of several things that a stream sends in pieces: a choice, a block, a tool call."""

    __slots__ = ("ends", "index", "is_guessed", "key")

    def __init__(self, index: int | None, key: str | None) -> None:
        super().__init__()
        self.index, self.key = index, key
        self.is_guessed = False
        """True if a piece was taken for its own by order alone while there were several."""
        self.ends = 0
        """Number of pieces that said why it ended."""


def index_of(value: Json) -> int | None:
    """The index that a server sent, which may be a text; None where that is none from 0 on."""
    if isinstance(value, str) and value.isascii() and value.isdecimal():
        value = int(value[:10])
    return value if type(value) is int and 0 <= value < 1 << 31 else None


class Elements:
    """The elements of one list, each found by what its pieces have."""

    def __init__(self) -> None:
        self._all: list[Element] = []
        self._at: dict[int, Element] = {}
        """The element that the last piece with this index belongs to."""
        self._shared: set[int] = set()
        """Indexes that several elements have."""

    def __len__(self) -> int:
        return len(self._all)

    def open(self, index: Json, key: Json = None) -> Element:
        """A new element: the stream said that one begins."""
        number = index_of(index)
        found = Element(number, key if isinstance(key, str) and key else None)
        self._all.append(found)
        if number is not None:
            if number in self._at:
                self._shared.add(number)
            self._at[number] = found
        return found

    def find(self, index: Json, key: Json = None) -> Element | None:
        """The element of a piece that opens none: by its id, its index, or the last one.

        None: there is none at its index, or none at all.
        """
        found = next((e for e in reversed(self._all) if key and e.key == key), None)
        if found is not None:
            return found
        number = index_of(index)
        last = self._all[-1] if self._all else None
        found = last if number is None else self._at.get(number)
        if found is not None and len(self._all) > 1 and (number is None or number in self._shared):
            found.is_guessed = True
        return found

    def each(self, pieces: Sequence[Any] | None) -> Iterator[tuple[Element, Any]]:
        """The pieces of a chunk, each with its element: one with a new id or index opens that."""
        pieces = pieces or ()
        for place, piece in enumerate(pieces):
            index, key = index_of(piece.get("index")), piece.get("id")
            key = key if isinstance(key, str) and key else None
            found = self._matching(index, key, place if len(pieces) > 1 else len(self._all) - 1)
            if found is None:
                found = self.open(index, key)
            elif index is not None:
                self._at[index] = found
            is_alone = len(pieces) < len(self._all)  # else each of the chunk is at its place
            if key is None and is_alone and (index is None or index in self._shared):
                found.is_guessed = True
            found.key = found.key or key
            yield found, piece

    def _matching(self, index: int | None, key: str | None, place: int) -> Element | None:
        """The element with this id at this index, else the one at its place."""
        found = None if index is None else self._at.get(index)
        if key and (found is None or found.key not in (None, key)):
            same = (e for e in reversed(self._all) if e.key == key and index in (None, e.index))
            return next(same, None)
        if index is None and 0 <= place < len(self._all):
            return self._all[place]
        return found

    def in_order(self) -> list[Element]:
        """By their indexes where each has one of its own, else as they began."""
        if len(self._at) == len(self._all):
            return sorted(self._all, key=lambda element: element.index or 0)
        return self._all


class Merging:
    """The state of one stream that is put together."""

    def __init__(self, asked: int = 1) -> None:
        self.asked = asked
        """Number of choices that were asked for."""
        self.contradictions: list[str] = []
        """What in the pieces contradicts each other, as sentences without a full stop."""
        self.proves_no_end = False
        """True if pieces followed the reason why a choice ended: then a reason is no end."""
        self._first: dict[str, str] = {}
        self._repeats: list[tuple[dict[str, Any], str, int]] = []
        """Calls whose name came again, with the member that grows and its pieces until then."""
        self._named_again: set[int] = set()
        self._unnamed: set[int] = set()
        """Calls of which a later piece had no name."""

    def contradicts(self, sentence: str) -> None:
        """Note a contradiction."""
        if sentence not in self.contradictions and len(self.contradictions) < _MOST:
            self.contradictions.append(sentence)

    def same(self, name: str, value: Json) -> None:
        """Note what a reply can have only one of, such as its model."""
        if isinstance(value, str) and value and self._first.setdefault(name, value) != value:
            self.changed(name, self._first[name], value)

    def changed(self, name: str, before: Json, after: Json) -> None:
        """Note that something changed in the stream that cannot."""
        self.contradicts(f"its {name} changes from {before!r:.60} to {after!r:.60}")

    def whole(self, target: dict[str, Any], key: str, value: Json) -> None:
        """Add to a member: lists grow, objects are merged, texts and the rest are replaced."""
        old = target.get(key)
        if isinstance(value, dict):
            members = target[key] = old if isinstance(old, dict) else {}
            for name, part in value.items():
                self.whole(members, name, part)
        elif isinstance(value, list) and isinstance(old, list) and key not in SO_FAR:
            old.extend(value)
        elif value is not None or key not in target:
            target[key] = list(value) if isinstance(value, list) else value

    def field(
        self, target: dict[str, Any], key: str, value: Json, *, is_sure: bool = False
    ) -> None:
        """Add to a member: texts and lists grow, objects are merged, the rest is replaced.

        is_sure: True if an id shows whose piece it is, so that a name may come in pieces, too.
        """
        old = target.get(key)
        if isinstance(value, dict) and (old is None or isinstance(old, dict)):
            target[key] = {} if old is None else old
            self._object(target[key], value, is_sure=is_sure)
        elif key in _WHOLE and isinstance(value, str):
            self._whole_text(target, key, value, is_sure=is_sure)
        elif old is None:
            if value is not None or key not in target:
                target[key] = _first_piece(value)
        elif isinstance(value, str) and _is_growing(old):
            old.append(GrowingText(value))
        elif isinstance(value, list) and isinstance(old, list):
            old.extend(value)
        elif value is not None:
            target[key] = value

    def _object(self, members: dict[str, Any], added: dict[str, Json], *, is_sure: bool) -> None:
        if members.get("name") and not added.get("name") and any(map(added.get, _ARGUMENTS)):
            self._unnamed.add(id(members))
        for name in sorted(added, key="name".__ne__):  # it comes before its arguments
            self.field(members, name, added[name], is_sure=is_sure)

    def _whole_text(self, target: dict[str, Any], key: str, text: str, *, is_sure: bool) -> None:
        if key == "name":
            self._name(target, text, is_sure=is_sure)
            return
        old = target.get(key)
        if old and text and old != text:
            self.changed(key, old, text)
        target[key] = old or text

    def _name(self, call: dict[str, Any], name: str, *, is_sure: bool) -> None:
        """A name that comes again is the same one; it may grow until its arguments begin."""
        old = call.get("name")
        grown = next((each for each in _ARGUMENTS if _has_some(call.get(each))), None)
        if not old:
            call["name"] = name
        elif name == old:
            self._named_again.add(id(call))
            if grown is not None:
                pieces = call[grown]
                self._repeats.append((call, grown, len(pieces) if _is_growing(pieces) else 0))
        elif name and (
            grown or not is_sure or name.startswith(old) or id(call) in self._named_again
        ):
            self.changed("tool call's name", old, name)
        else:
            call["name"] = old + name

    def text(self, target: dict[str, Any], key: str, piece: Json) -> None:
        """Add a piece to a text that may have begun as a whole one."""
        if not isinstance(piece, str):
            raise TypeError(f"expected a piece of text, got {piece!r}")
        if isinstance(target.get(key), str):
            target[key] = [GrowingText(target[key])]
        self.field(target, key, piece)

    def members(
        self, target: dict[str, Any], members: Mapping[str, Json], growing: Container[str] = ()
    ) -> None:
        """Add the members of an object: of each the last value that is not null counts.

        growing: members that a stream sends in pieces, which are added by `field`.
        """
        for key, value in members.items():
            if key in growing:
                self.field(target, key, value)
            elif value is not None or key not in target:
                target[key] = value

    def parts(self, target: dict[str, Any], key: str, value: Json) -> None:
        """Add to a content that is a list of parts; a text before or after them is a part, too."""
        parts = target.get(key)
        if not isinstance(parts, GrowingParts):
            before, parts = finish(parts), GrowingParts()
            if before:
                parts.append({"type": "text", "text": [GrowingText(before)]})
            target[key] = parts
        if isinstance(value, str):
            value = [{"type": "text", "text": value}] if value else []
        for part in value or ():
            kind = part.get("type")
            if not parts or kind not in _GROWING or parts[-1].get("type") != kind:
                parts.append({"type": kind})
            for name, inner in part.items():
                if name == kind and isinstance(inner, list):
                    self.parts(parts[-1], name, inner)
                elif name != "type":
                    self.field(parts[-1], name, inner)

    def ended(self, element: Element, reason: Json, *, adds: bool) -> bool:
        """Note what a piece says of the end of its choice; True if it says why that ended.

        Only a text says why. adds: True if the piece has something sampled: the choice had not
        ended before it, whatever was said.
        """
        if element.ends and adds:
            self.proves_no_end = True
        if not isinstance(reason, str) or not reason:
            return False
        element.ends += 1
        return True

    def check_choices(self, choices: Elements) -> None:
        """Find several choices that came as one."""
        is_less = len(choices) < self.asked
        for choice in choices.in_order():
            is_several = (
                choice.ends > 1 or choice.index is None or (len(choices) == 1 and not choice.ends)
            )
            if choice.is_guessed or (is_less and is_several):
                self.contradicts(
                    f"{self.asked} choices were asked for, and pieces of several may be in choice "
                    f"{choice.index or 0}: the indexes of its chunks do not tell them apart"
                )

    def check_calls(self, calls: Iterable[Element]) -> None:
        """Find tool calls without a name, or whose pieces cannot be told apart."""
        calls = list(calls)
        keys = [call.key for call in calls if call.key]
        is_sure = len({*keys}) == len(keys) and not any(call.is_guessed for call in calls)
        for call in map(_called, calls):
            if not call.get("name") and not {"function", "toolUse", *_ARGUMENTS}.isdisjoint(call):
                self.contradicts("a tool call has no name")
            texts = [finish(call[name]) for name in _ARGUMENTS if not is_sure and name in call]
            if any(isinstance(text, str) and text and try_loads(text) is None for text in texts):
                self.contradicts("pieces of its tool calls cannot be told apart")

    def check_end(
        self, chunks: Iterable[Chunk], ends: Callable[[Chunk], bool], *adding: str
    ) -> None:
        """Find pieces after the end. adding: the ends of the types, or the members, of pieces."""
        after = dropwhile(lambda chunk: not ends(chunk), chunks)
        next(after, None)
        for chunk in after:
            if str(chunk.get("type")).endswith(adding) or not chunk.keys().isdisjoint(adding):
                self.contradicts("more of it comes after its end")

    def check_repeats(self) -> None:
        """Find calls whose arguments are those of several: their name came again between two."""
        by_call: dict[int, list[tuple[dict[str, Any], str, int]]] = {}
        for repeat in self._repeats:
            by_call.setdefault(id(repeat[0]), []).append(repeat)
        for repeats in by_call.values():
            call, member, _ = repeats[0]
            pieces = call[member]
            if id(call) in self._unnamed:
                self.contradicts("the name of a tool call comes again, as if another one began")
            if not _is_growing(pieces):
                self.contradicts("a tool call has its name and its arguments twice")
                continue
            ends = list(accumulate(map(len, pieces)))
            if _first_value_ends(finish(pieces)) & {ends[count - 1] for _, _, count in repeats}:
                self.contradicts("the arguments of a tool call are those of several")


def _called(call: Element) -> dict[str, Any]:
    """The member of a tool call that has its name, or the call itself."""
    members = (value for value in call.values() if isinstance(value, dict) and value.get("name"))
    return call if call.get("name") else next(members, call)


def _first_value_ends(text: str) -> set[int]:
    """Where the first of several JSON values in a text may end; none if there is only one."""
    try:
        _, end = json.JSONDecoder(strict=False).raw_decode(text.lstrip())
    except (ValueError, RecursionError):
        return set()
    end += len(text) - len(text.lstrip())
    rest = text[end:]
    return set(range(end, end + len(rest) - len(rest.lstrip()) + 1)) if rest.strip() else set()


def _is_growing(value: Json) -> bool:
    return isinstance(value, list) and bool(value) and isinstance(value[0], GrowingText)


def _has_some(value: Json) -> bool:
    return any(value) if _is_growing(value) else bool(value)


def _first_piece(value: Json) -> Json:
    if isinstance(value, str):
        return [GrowingText(value)]
    return list(value) if isinstance(value, list) else value


def finish(value: Json) -> Json:
    """The merged value with its texts joined, and its elements in order as plain objects."""
    if isinstance(value, dict):
        return {key: finish(part) for key, part in value.items()}
    if isinstance(value, GrowingParts):
        return [finish(part) for part in value]
    if isinstance(value, Elements):
        return [_finished_call(part) for part in value.in_order()]
    if _is_growing(value):
        return "".join(value)
    return value


def _finished_call(call: Json) -> Json:
    """A tool call, whose arguments are a text also where the stream ended before they came."""
    call = finish(call)
    function = call.get("function") if isinstance(call, dict) else None
    if isinstance(function, dict) and "name" in function:
        function.setdefault("arguments", "")
    return call


def finished_json(text: str) -> Json:
    """What a text that came in pieces is as JSON; a truncated one stays the text that it is."""
    parsed = try_loads(text)
    return text if parsed is None else parsed
