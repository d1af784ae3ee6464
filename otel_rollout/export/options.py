"""Options of exporters: declared once, by the constructor's annotations, and read and checked here.

An exporter annotates each option as bool, int, float, str, Path, a Literal, a sequence of str, or
one of these `| None`; `Positive` is an int from 1 on. Texts of a command line are turned into these
types by `read_options`; an exporter itself only ever sees typed values.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from msgspec import Meta, ValidationError, convert

from otel_rollout.errors import ConfigurationError

Positive = Annotated[int, Meta(ge=1)]
"""A whole number from 1 on."""
NotNegative = Annotated[int, Meta(ge=0)]
"""A whole number from 0 on."""

_TRUE = ("true", "1", "yes", "on")
_FALSE = ("false", "0", "no", "off")


@dataclass(frozen=True, slots=True)
class Option:
    """One option of an exporter."""

    name: str
    """Name of the constructor's argument."""
    annotation: Any
    """Its declared type; `Any` where it declares none, or one that is not known here."""
    default: Any = inspect.Parameter.empty
    """Its value where none is given; `Parameter.empty`: one has to be."""

    @property
    def expected(self) -> str:
        """The values that may be given, in words."""
        return _either([_in_words(kind) for kind in _alternatives(self.annotation)])

    def described(self) -> str:
        """The option as a command line has it, with its default and the values that it takes."""
        default = self.default
        if default is inspect.Parameter.empty:
            return f"{self.name}=... (required): {self.expected}"
        if default is None or isinstance(default, bool):
            default = str(default).lower()
        elif isinstance(default, Sequence) and not isinstance(default, str):
            default = ",".join(map(str, default))
        return f"{self.name}={default}: {self.expected}"

    def read(self, text: str) -> object:
        """The value that a text of a command line stands for. ValueError if it stands for none."""
        for kind in _alternatives(self.annotation):
            try:
                return _read(kind, text)
            except ValueError:
                continue
        raise ValueError(f"expected {self.expected}, got {text!r}")

    def accepts(self, value: object) -> bool:
        """True if the value has the declared type."""
        return any(_is(kind, value) for kind in _alternatives(self.annotation))


def options_of(exporter: Callable[..., Any]) -> dict[str, Option]:
    """The options that the constructor of an exporter declares, by name, in its order."""
    hints = _hints(exporter)
    return {
        name: Option(name, hints.get(name, Any), parameter.default)
        for name, parameter in inspect.signature(exporter).parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    }


def read_options(
    name: str, exporter: Callable[..., Any], texts: Mapping[str, str]
) -> dict[str, object]:
    """The options of the exporter `name` from texts of a command line.

    ConfigurationError for an option that it does not have, or a text that is no value of it.
    """
    check_names(name, exporter, texts)
    declared = options_of(exporter)
    values: dict[str, object] = dict(texts)
    for option in declared.values():
        if option.name in texts:
            try:
                values[option.name] = option.read(texts[option.name])
            except ValueError as error:
                raise ConfigurationError(
                    f"exporter {name!r}, option {option.name}: {error}"
                ) from None
    return values


def check_names(
    name: str, exporter: Callable[..., Any], given: Iterable[str], also: Iterable[str] = ()
) -> None:
    """ConfigurationError, with a list of what there is, for an option that is not declared.

    also: options that it has beside those that it declares.
    """
    parameters = inspect.signature(exporter).parameters.values()
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters):
        return
    declared = [*options_of(exporter), *also]
    for option in given:
        if option not in declared:
            raise ConfigurationError(
                f"exporter {name!r}: there is no option {option!r}; "
                + (f"expected one of {', '.join(declared)}" if declared else "it has no options")
            )


class CheckedOptions:
    """Base of exporters that are dataclasses: their fields are options, checked when one is made.

    A subclass that has a `__post_init__` of its own calls this one first.
    """

    def __post_init__(self) -> None:
        """ConfigurationError for a field whose value does not have the declared type."""
        for option in options_of(type(self)).values():
            value = getattr(self, option.name)
            if not option.accepts(value):
                raise ConfigurationError(
                    f"{type(self).__name__}({option.name}=...): expected {option.expected}, "
                    f"got {value!r}"
                )


def check_choice(name: str, value: object, choices: Any) -> None:
    """ConfigurationError for an argument that is none of the values of the Literal `choices`."""
    if not _is(choices, value):
        raise ConfigurationError(f"{name}: expected {_in_words(choices)}, got {value!r}")


def _hints(exporter: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of the arguments, resolved; none where a name in them is not there."""
    is_plain_class = inspect.isclass(exporter) and not is_dataclass(exporter)
    owner = vars(exporter).get("__init__", exporter.__init__) if is_plain_class else exporter
    try:
        return get_type_hints(owner, include_extras=True)
    except (NameError, TypeError, AttributeError):
        return {}


def _alternatives(annotation: Any) -> list[Any]:
    """The members of a union. None is the last: `none` is a text where texts are accepted."""
    members = get_args(annotation) if _is_union(annotation) else (annotation,)
    return sorted(members, key=lambda kind: kind is NoneType)


def _is_union(annotation: Any) -> bool:
    return get_origin(annotation) in (Union, UnionType)


def _bound(kind: Any) -> float | None:
    """The lower bound of an annotated int; None for every other annotation."""
    bounds = [item.ge for item in get_args(kind)[1:] if isinstance(item, Meta)]
    return bounds[0] if get_origin(kind) is Annotated and bounds else None


def _is_texts(kind: Any) -> bool:
    origin = get_origin(kind)
    return inspect.isclass(origin) and issubclass(origin, Sequence)


def _read(kind: Any, text: str) -> object:
    if kind is NoneType:
        return _choose(text.lower(), {"none": None})
    if kind is bool:
        return _choose(text.lower(), dict.fromkeys(_TRUE, True) | dict.fromkeys(_FALSE, False))
    if get_origin(kind) is Literal:
        return _choose(text, {str(choice): choice for choice in get_args(kind)})
    if _bound(kind) is not None:
        number = int(text)
        return _choose(_is(kind, number), {True: number})
    if kind in (int, float, str, Path):
        return kind(text)
    return text.split(",") if _is_texts(kind) else text  # an unknown annotation: as it is


def _choose(key: object, values: Mapping[Any, object]) -> object:
    if key not in values:
        raise ValueError(key)
    return values[key]


def _is(kind: Any, value: object) -> bool:
    try:
        convert(value, kind, dec_hook=lambda wanted, given: wanted(given))
    except ValidationError:
        return False
    except TypeError:  # an annotation that is not known here
        return True
    return True


def _in_words(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return _either(list(map(repr, get_args(kind))))
    if (bound := _bound(kind)) is not None:
        return f"a whole number from {bound} on"
    words: dict[Any, str] = {
        NoneType: "none",
        bool: "'true' or 'false' (also 1, yes, on, 0, no, off)",
        int: "a whole number",
        float: "a number",
        Path: "a path",
    }
    return words.get(kind, "names with commas between them" if _is_texts(kind) else "a text")


def _either(words: Sequence[str]) -> str:
    """`a, b or c`."""
    return " or ".join(filter(None, (", ".join(words[:-1]), words[-1])))
