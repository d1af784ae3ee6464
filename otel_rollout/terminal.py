"""Text for people: sentences to stderr, numbers with their nouns, colours on terminals."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Iterable
from difflib import get_close_matches

_unsafe = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f"
    "\ufeff\ufff9-\ufffb\ud800-\udfff\U000e0000-\U000e007f]"
)


def escaped(text: str) -> str:
    """The text with escapes for what could steer a terminal or turn what is read on it around.

    Control characters but tab and line feed, marks of direction, invisible ones, lone surrogates.
    """
    return _unsafe.sub(lambda match: repr(match[0])[1:-1], text)


def line_width() -> int:
    """Characters of a line of results: of the terminal, of `COLUMNS`, else 160."""
    return shutil.get_terminal_size((160, 24)).columns


def note(text: str) -> None:
    """Print to stderr: stdout is for results."""
    print(escaped(text), file=sys.stderr)


def sentence_about(error: BaseException) -> str:
    """What ended the command, in one line."""
    if isinstance(error, OSError) and error.filename is not None:
        return f"otel-rollout: {error.filename}: {error.strerror}"
    if isinstance(error, OSError) and error.strerror is not None:
        return f"otel-rollout: {error.strerror}"
    return f"otel-rollout: {error}"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """The end of a sentence about a name that is none of the known ones: the closest, if any."""
    return "".join(f"; did you mean {close!r}?" for close in get_close_matches(name, known, 1))


def number_of(number: int, what: str) -> str:
    """The number with its noun, which is in the plural where it has to be."""
    many = what.removesuffix("y") + "ies" if what.endswith("y") else what + "s"
    return f"{number} {what if number == 1 else many}"


def shortened(text: str, most: int) -> str:
    """The text, or as much of it as so many characters hold, with an ellipsis at its end."""
    return text if len(text) <= most else text[: most - 1] + "…"


def without_ids(sentence: str) -> str:
    """The sentence without ids, so that those about different trajectories can be equal."""
    return _id.sub("…", sentence)


def without_ids_and_numbers(sentence: str) -> str:
    """The sentence without what differs between equal ones, to count them: it is one of a sum."""
    text = _some.sub("some of the ", _counted.sub("", without_ids(sentence)))
    return _again.sub(r"\1", _list.sub("…", _number.sub("…", text)))


def for_commands(text: str, options: Iterable[str]) -> str:
    """The text with the arguments of Python that it names as options of commands.

    options: those that `--option` takes.
    """
    text = _asking.sub(
        "`--request-token-ids` at `run` and `gateway`, in Python configure(request_token_ids=True)",
        text,
    )
    names = "|".join(map(re.escape, options))
    given = rf"\b({names})=(['\"]?)(\w+)\2(?!\w)"
    return re.sub(given, r"--option \1=\3", text) if names else text


_asking = re.compile(
    r"(?:otel_rollout\.)?configure\(request_token_ids=True\)(?:, or `with "
    r"otel_rollout\.request_token_ids\(\):` around the calls)?|`with "
    r"otel_rollout\.request_token_ids\(\):`"
)


_id = re.compile(
    r"\b(?:span-)?[0-9a-f]{16,32}\b|'[^'\s/]*\d[^'\s/]*'|\b(?:chatcmpl|cmpl|resp|msg)[-_][\w-]+"
)
"""Our ids, and those of responses, which are in quotes or have a prefix."""
_list = re.compile(r"…(?:, …)+(?: and … more)?")
_again = re.compile(r"(?<=[:;] )([^;]{1,400}?)(?:; \1)+(?=[;.]|$)")
_counted = re.compile(r"(?:(?<=^)|(?<=[:,] ))(?:at least )?(?:\d+ of )?\d+ (?=[a-z])")
"""How many a sentence, or a part of it, is about."""
_some = re.compile(r"\b\d+ of (?:the )?\d+ (?=[a-z])")
_number = re.compile(r"(?<![\w/.'])\d+(?![\w/.'])")


def has_colours() -> bool:
    """True if stdout is a terminal that shows colours, and NO_COLOR is not set."""
    return (
        sys.stdout.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    )
