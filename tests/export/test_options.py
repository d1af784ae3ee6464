"""Options of exporters: read from texts by their declared types, and checked once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Optional

import pytest

from otel_rollout import ConfigurationError
from otel_rollout.export import (
    JsonRows,
    Positive,
    TokenRows,
    all_options,
    row_exporter,
    row_exporter_from_texts,
)
from otel_rollout.export.options import options_of, read_options


@dataclass(frozen=True)
class Everything(JsonRows):
    """Has an option of each kind."""

    flag: bool = False
    count: int = 0
    length: Positive | None = None
    ratio: float = 0.5
    name: str | None = None
    kind: Literal["one", "two"] = "one"
    level: Literal[1, 2] | None = None
    folder: Path | None = None
    fields: Sequence[str] = ()
    old: Optional[int] = None  # noqa: UP045 - as others write it


@pytest.mark.parametrize(
    ("texts", "values"),
    [
        (("true", "True", "TRUE", "1", "yes", "Yes", "on"), {"flag": True}),
        (("false", "False", "0", "no", "OFF"), {"flag": False}),
        (("-3",), {"count": -3}),
        (("3",), {"length": 3, "ratio": 3.0, "name": "3", "old": 3}),
        (("none", "None"), {"length": None, "level": None, "old": None}),
        (("none",), {"name": "none"}),
        (("two",), {"kind": "two"}),
        (("2",), {"level": 2}),
        (("a/b",), {"folder": Path("a/b")}),
        (("a,b c",), {"fields": ["a", "b c"]}),
    ],
)
def test_a_text_becomes_the_declared_type(texts: tuple[str, ...], values: dict[str, Any]):
    """Every spelling of true is true for every exporter, and the same for false."""
    for text in texts:
        for name, value in values.items():
            (found,) = read_options("x", Everything, {name: text}).values()
            assert found == value
            assert type(found) is type(value)
            given: dict[str, Any] = {name: found}
            assert getattr(Everything(**given), name) == value


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("flag", "maybe", r"'true' or 'false' \(also 1, yes, on, 0, no, off\)"),
        ("count", "1.5", "a whole number"),
        ("length", "0", "a whole number from 1 on or none"),
        ("ratio", "high", "a number"),
        ("kind", "three", "'one' or 'two'"),
        ("level", "3", "1 or 2 or none"),
    ],
)
def test_a_wrong_text_is_named(name: str, text: str, expected: str):
    """With the exporter, the option, what was got and what may be said."""
    message = f"exporter 'x', option {name}: expected {expected}, got '{text}'"
    with pytest.raises(ConfigurationError, match=message):
        read_options("x", Everything, {name: text})


def test_an_unknown_option_lists_those_there_are():
    """Also where there are none."""
    with pytest.raises(ConfigurationError, match=r"'x': there is no option 'far'; .* flag, count"):
        read_options("x", Everything, {"far": "1"})
    with pytest.raises(ConfigurationError, match="'far'; it has no options"):
        read_options("x", JsonRows, {"far": "1"})
    with pytest.raises(ConfigurationError, match="there is no option 'far'; expected one of cre"):
        row_exporter("tokens", far=1)


@pytest.mark.parametrize(
    "options",
    [
        {"flag": "true"},
        {"flag": 1},
        {"count": True},
        {"count": 1.0},
        {"length": 0},
        {"ratio": "0.5"},
        {"name": 3},
        {"kind": "three"},
        {"level": True},
        {"folder": 3},
        {"fields": "a"},
        {"fields": [1]},
    ],
)
def test_a_wrong_type_is_named(options: dict[str, Any]):
    """In Python values have their types: a text is no bool."""
    ((name, value),) = options.items()
    with pytest.raises(ConfigurationError) as raised:
        Everything(**options)
    assert str(raised.value).startswith(f"Everything({name}=...): expected ")
    assert str(raised.value).endswith(f"got {value!r}")


def test_exporters_that_declare_nothing_get_texts():
    """Those of others, which read their options themselves, are left alone."""

    class Others:
        def __init__(self, least="0", *, other: "Unheard" = 1, **more: Any) -> None:  # type: ignore  # noqa: F821, UP037
            pass

    texts = {"least": "2", "other": "x", "unheard": "of"}
    assert list(options_of(Others)) == ["least", "other"]
    assert read_options("others", Others, texts) == texts


def test_the_command_and_python_give_one_exporter():
    """The same options as texts and as values."""
    texts = {"mask_truncated": "True", "max_length": "4", "on_failure": "keep"}
    values: dict[str, Any] = {"mask_truncated": True, "max_length": 4, "on_failure": "keep"}
    made = row_exporter_from_texts("tokens", texts)
    assert made == row_exporter("tokens", **values) == TokenRows(**values)


def test_each_option_is_described_with_its_default() -> None:
    """The text after the name is one that the option reads, and it reads as the default."""
    for option in all_options(TokenRows):
        name, _, rest = option.described().partition("=")
        assert name == option.name
        assert option.read(rest.partition(": ")[0]) == option.default
        assert rest == rest.replace("None", "none").replace("False", "false")


def test_an_option_without_a_default_is_required() -> None:
    """It says so, and what it takes; several names stand with commas between them."""

    def made(path: Path, names: Sequence[str] = ("a", "b")) -> None:
        """An exporter's constructor."""

    path, names, *common = all_options(made)
    assert path.described() == "path=... (required): a path"
    assert names.described().startswith("names=a,b: ")
    of_all = ["require_all_calls", "include_side_calls", "require_whole_groups", "max_token_id"]
    assert [option.name for option in common] == of_all
