"""The types of the page: generated from Python's, and what is answered is of them."""

from __future__ import annotations

import runpy
from collections.abc import Mapping
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

import otel_rollout.view
from otel_rollout.view import Finding, Overview, page_types
from otel_rollout.view.answers import Answers
from otel_rollout.view.html import InMemory
from tests.kit.conversations import said, user
from tests.view.made import Call, made

PAGE = Path(otel_rollout.view.__file__).parent / "page"
TOOL = Path(__file__).parents[2] / "tools" / "page_types.py"


def fits(value: Any, hint: Any) -> bool:
    """True if a JSON value is of a type; an object has all names that the type has, and no more."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin is Literal:
        return value in inside
    if origin in (Union, UnionType):
        return any(fits(value, one) for one in inside)
    if origin in (list, tuple):
        return isinstance(value, list) and all(fits(one, inside[0]) for one in value)
    if origin is dict:
        return isinstance(value, Mapping) and all(fits(one, inside[1]) for one in value.values())
    if hint in (Overview, Finding) or is_typeddict(hint):
        fields = get_type_hints(hint) | ({"advantage": float | None} if hint is Overview else {})
        needed = fields.keys() - getattr(hint, "__optional_keys__", ())
        return (
            isinstance(value, Mapping)
            and needed <= value.keys() <= fields.keys()
            and all(fits(one, fields[name]) for name, one in value.items())
        )
    return type(value) in {float: (int, float), None: (NoneType,)}.get(hint, (hint,))


def test_the_types_of_the_page_are_those_of_python() -> None:
    """`make page` writes them anew."""
    source = runpy.run_path(str(TOOL))["page_source"]()
    assert (PAGE / "src" / "types.ts").read_text(encoding="utf-8") == source


def test_what_is_answered_is_of_these_types() -> None:
    """Of two trajectories of a group, one of which goes on after a reply in two ways."""
    hi = user("hi")
    again = [hi, said("one"), user("more")]
    calls = Call([hi], "one", [1], [2]), Call(again, "two", [1, 2, 3], [4]), Call([hi], None)
    one = made(*calls, id_="a", group_id="g", metadata={"x": 1})
    other = made(Call([hi], "other", [1], [5]), id_="b", group_id="g", parent_id="a")
    with InMemory([one, other]) as held:
        answers = Answers(held, jaeger="http://jaeger")
        a, b = one.id, other.id
        for answer, of in (
            (answers.state({"id": a}), page_types.State),
            (answers.trajectories({}), page_types.OverviewPage),
            (answers.summary({}), page_types.Summary),
            (answers.groups({}), page_types.GroupPage),
            (answers.group({"id": "g"}), page_types.Group),
            (answers.diff({"a": a, "b": b}), page_types.Diff),
            (answers.trajectory({"id": a}), page_types.Detail),
            (answers.message({"id": a, "node": "0"}), page_types.MessageAnswer),
            (answers.tokens({"id": a, "row": "0"}), page_types.TokenWindow),
        ):
            wrong = [
                f"{of.__name__}.{name}: {value!r:.200}"
                for name, value in answer.items()
                if name not in get_type_hints(of) or not fits(value, get_type_hints(of)[name])
            ]
            assert wrong == []
            assert fits(answer, of)
