"""Prints the page's types, `otel_rollout/view/page/src/types.ts`, made from `view/page_types.py`.

`make page` writes them, `make check-page` compares. Docstrings, of fields too, are the comments.
"""

from __future__ import annotations

import ast
import inspect
import types
from itertools import pairwise
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints, is_typeddict

from otel_rollout.view import Finding, Overview, page_types

_HEAD = """\
// What the server answers. Times are nanoseconds since 1970; null is unknown, never zero.
// Written by tools/page_types.py from otel_rollout/view/page_types.py: `make page`.
"""
_MORE: dict[type, dict[str, Any]] = {
    Overview: {"advantage": float | None, "hit?": list[str] | None}
}
"""Fields that the index knows of a trajectory beside those that it has alone."""
_WIDTH = 110
"""Characters of a line, as prettier is told."""
_PLAIN = {str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


def page_source() -> str:
    """The text of `types.ts`, as prettier leaves it."""
    types_ = [each for name, each in vars(page_types).items() if not name.startswith("_")]
    return "\n".join([_HEAD, *map(_interface, (Overview, Finding, *filter(is_typeddict, types_)))])


def _interface(of: type) -> str:
    """A class as TypeScript has it."""
    (declared,) = ast.parse(inspect.getsource(of)).body
    assert isinstance(declared, ast.ClassDef)
    comments = {
        field.target.id: below.value.value
        for field, below in pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant)
    }
    optional: frozenset[str] = getattr(of, "__optional_keys__", frozenset())
    lines = [*_comment(ast.get_docstring(declared), ""), f"export interface {of.__name__} {{"]
    for name, hint in {**get_type_hints(of), **_MORE.get(of, {})}.items():
        lines += _comment(comments.get(name), "  ")
        lines.append(_field(f"  {name}{'?' * (name in optional)}:", _written(hint)))
    return "\n".join([*lines, "}", ""])


def _comment(text: str | None, indent: str) -> list[str]:
    return [] if text is None else [f"{indent}/** {' '.join(text.split())} */"]


def _field(name: str, written: str) -> str:
    if len(name) + len(written) + 2 <= _WIDTH:
        return f"{name} {written};"
    return "\n    | ".join([name, *written.split(" | ")]) + ";"


def _written(hint: Any) -> str:
    """A type as TypeScript has it."""
    origin, inside = get_origin(hint), get_args(hint)
    if hint is Any:
        return "unknown"
    if origin is Literal:
        return " | ".join(f'"{value}"' for value in inside)
    if origin in (Union, types.UnionType):
        return " | ".join(dict.fromkeys(map(_written, inside)))
    if origin in (list, tuple):
        item = _written(inside[0])
        return f"({item})[]" if "|" in item else f"{item}[]"
    if origin is dict:
        return f"Record<string, {_written(inside[1])}>"
    return _PLAIN.get(hint) or str(hint.__name__)


if __name__ == "__main__":
    print(page_source(), end="")
