"""Filters over overviews: an expression in Python's words, which becomes SQL and is never run.

`reward < 0.5 and status == "error"`: names are the fields of `Overview`. What is None is not known,
and so is a comparison with it, its `not` too; a filter keeps what is true. `is None` asks for it.
Parsed with `ast`; each part is SQL with parameters, so no text of an expression is ever SQL.
"""

from __future__ import annotations

import ast
import re
import sqlite3
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from itertools import pairwise

from otel_rollout.errors import ConfigurationError
from otel_rollout.terminal import shortened
from otel_rollout.view.fields import COLUMNS, Kind, Parameter, row_of, sql_value
from otel_rollout.view.overview import Overview

_LONGEST = 20_000
"""Characters of an expression."""
_DEEPEST = 50
"""Levels of an expression: SQLite has a limit of its own, far above."""
_MOST = 400
"""Comparisons of an expression, for the same reason."""
_ORDER = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "=", ast.NotEq: "<>"}
_EXAMPLE = "such as 'reward < 0.5 and status == \"error\"'"


@dataclass(frozen=True, slots=True)
class Where:
    """A filter over overviews."""

    sql: str
    """A condition over the columns `COLUMNS`."""
    parameters: tuple[Parameter, ...]
    """The values of its parameters, in order."""

    @classmethod
    def parse(cls, text: str) -> Where:
        """The filter that a text is. ConfigurationError, with what is known, for any other text."""
        sql = _Parser(text).parse()
        return cls(sql.text, sql.parameters)

    @property
    def names(self) -> set[str]:
        """The fields that it is about."""
        return {name for name in COLUMNS if f'"{name}"' in self.sql}

    def matches(self, overview: Overview) -> bool:
        """True if the filter keeps it: the SQL is true of its row."""
        values = [*row_of(overview), *self.parameters]
        return _sqlite().execute(f"{_ONE_ROW} WHERE {self.sql}", values).fetchone() is not None


_NAMES = ", ".join(f'? AS "{name}"' for name in COLUMNS)
_ONE_ROW = f"SELECT 1 FROM (SELECT {_NAMES})"  # noqa: S608 - our own names


@cache
def _sqlite() -> sqlite3.Connection:
    """A database of nothing, in which the SQL of filters is run; it keeps what it has compiled."""
    return sqlite3.connect(":memory:", check_same_thread=False)


@dataclass(frozen=True, slots=True)
class _Sql:
    """A piece of SQL with the values of its parameters, and what it gives."""

    text: str
    parameters: tuple[Parameter, ...] = ()
    kind: Kind = "any"
    source: str = ""
    """The same in the words of the expression, for errors."""
    holder: _Sql | None = None
    """Of a value of `metadata`: its JSON type."""
    literals: tuple[_Sql, ...] = ()
    """The items of a list that is written out."""


def _joined(template: str, *pieces: _Sql) -> _Sql:
    """The template with a piece for each `{}`, and all their parameters in order."""
    text = template.format(*(piece.text for piece in pieces))
    return _Sql(text, tuple(value for piece in pieces for value in piece.parameters))


class _Parser:
    """One expression on its way to SQL."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._source = re.sub(r"[\r\n\f]", " ", text).strip().encode(errors="backslashreplace")
        """The expression on one line, for the places of its parts."""
        self._comparisons = 0

    def parse(self) -> _Sql:
        if len(self._text) > _LONGEST:
            raise self._wrong(f"it has {len(self._text)} characters, expected at most {_LONGEST}")
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # such as one about an escape in a text
                tree = ast.parse(self._source, mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            message = error.msg if isinstance(error, SyntaxError) else str(error)
            why = message or "it is nested too deep"
            raise self._wrong(f"expected an expression {_EXAMPLE}; {why}") from None
        return self._condition(tree.body, 0)

    def _wrong(self, why: str) -> ConfigurationError:
        return ConfigurationError(f"where {shortened(self._text, 200)!r}: {why}")

    def _source_of(self, node: ast.expr) -> str:
        source = self._source[node.col_offset : node.end_col_offset].decode(errors="replace")
        return shortened(source, 60)

    # --- what is true, false or not known

    def _condition(self, node: ast.expr, depth: int) -> _Sql:
        if depth > _DEEPEST:
            raise self._wrong(
                f"it is nested deeper than {_DEEPEST} levels: split it, or use `in [...]`"
            )
        match node:
            case ast.BoolOp(op=op, values=values):
                parts = [self._condition(value, depth + 1) for value in values]
                word = " AND " if isinstance(op, ast.And) else " OR "
                return _joined(f"({word.join(['{}'] * len(parts))})", *parts)
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return _joined("(NOT {})", self._condition(operand, depth + 1))
            case ast.Compare(left=left, ops=ops, comparators=comparators):
                return self._comparison([left, *comparators], ops)
            case ast.Constant(value=bool() as value):
                return _Sql(str(int(value)))
        raise self._wrong(f"expected a comparison, {_EXAMPLE}, got {self._source_of(node)!r}")

    def _comparison(self, nodes: Sequence[ast.expr], ops: Sequence[ast.cmpop]) -> _Sql:
        self._comparisons += len(ops)
        if self._comparisons > _MOST:
            raise self._wrong(f"it has more than {_MOST} comparisons: use `in [...]`")
        operands = [self._operand(node) for node in nodes]
        parts = [
            self._pair(left, op, right)
            for (left, right), op in zip(pairwise(operands), ops, strict=True)
        ]
        return _joined(f"({' AND '.join(['{}'] * len(parts))})", *parts)

    def _pair(self, left: _Sql, op: ast.cmpop, right: _Sql) -> _Sql:
        if isinstance(op, ast.In | ast.NotIn):
            return _joined("{}" if isinstance(op, ast.In) else "(NOT {})", self._in(left, right))
        if "none" in (left.kind, right.kind):
            return self._is_none(left, op, right)
        if isinstance(op, ast.Is | ast.IsNot):
            raise self._wrong(f"`is` asks for None alone, use == or != for {right.source!r}")
        for operand in (left, right):
            if operand.kind in ("list", "object", "literals"):
                raise self._wrong(
                    f"{operand.source!r} is a list or an object: ask what is in it, "
                    f"such as '\"x\" in versions', or for one value, such as 'metrics[\"x\"] > 1'"
                )
        return self._compared(left, _ORDER[type(op)], right)

    def _compared(self, left: _Sql, op: str, right: _Sql) -> _Sql:
        self._check_kinds(left, right)
        if "any" not in (left.kind, right.kind):
            return _joined(f"{{}} {op} {{}}", left, right)
        other = {"=": "0", "<>": "1"}.get(op, "NULL")  # a text is neither less nor more than 1
        return _joined(
            "(CASE WHEN {} IS NULL OR {} IS NULL THEN NULL "
            "WHEN (typeof({}) = 'text') = (typeof({}) = 'text') "
            f"THEN {{}} {op} {{}} ELSE {other} END)",
            *(left, right) * 3,
        )

    def _check_kinds(self, left: _Sql, right: _Sql) -> None:
        kinds = {left.kind, right.kind}
        if "any" not in kinds and len(kinds) > 1:
            raise self._wrong(
                f"{left.source!r} is a {left.kind}, {right.source!r} is a {right.kind}: "
                f"they cannot be compared"
            )

    def _is_none(self, left: _Sql, op: ast.cmpop, right: _Sql) -> _Sql:
        asked = right if left.kind == "none" else left
        if asked.kind == "literals" or not isinstance(op, ast.Is | ast.IsNot | ast.Eq | ast.NotEq):
            raise self._wrong(
                f"None is compared by `is None` and `is not None` alone, got {asked.source!r}"
            )
        test = "IS NULL" if isinstance(op, ast.Is | ast.Eq) else "IS NOT NULL"
        # Of a value of `metadata` its type tells: a list is compared with nothing, and not None.
        found = _joined("nullif({}, 'null')", asked.holder) if asked.holder else asked
        return _joined(f"({{}} {test})", found)

    # --- membership

    def _in(self, item: _Sql, container: _Sql) -> _Sql:
        if container.kind == "literals":
            return self._in_literals(item, container.literals)
        if item.kind not in ("text", "number") or item.text != "?":
            raise self._wrong(
                f"expected a text or a number before `in {container.source}`, got {item.source!r}"
            )
        match container.kind:
            case "list":
                return _joined("({} IN (SELECT value FROM json_each({})))", item, container)
            case "object":
                return _joined("({} IN (SELECT key FROM json_each({})))", item, container)
            case "text":
                self._check_kinds(item, container)
                return _joined("(instr({}, {}) > 0)", container, item)
            case "any" if container.holder is not None:
                return self._in_metadata(item, container, container.holder)
        raise self._wrong(
            f"nothing is in {container.source!r}: expected a list, an object or a text"
        )

    def _in_literals(self, item: _Sql, literals: Sequence[_Sql]) -> _Sql:
        if item.kind not in ("text", "number", "any"):
            raise self._wrong(
                f"{item.source!r} is no single value: it is in no list that is written out"
            )
        for literal in literals:
            self._check_kinds(item, literal)
        if not literals:
            return _joined("(CASE WHEN {} IS NOT NULL THEN 0 END)", item)
        return _joined(f"({{}} IN ({', '.join(['{}'] * len(literals))}))", item, *literals)

    def _in_metadata(self, item: _Sql, value: _Sql, holder: _Sql) -> _Sql:
        """In a list, among the keys of an object, in a text; not known in anything else."""
        inner = _Sql(value.text.replace(_PLAIN, ""), value.parameters)
        text = _joined("WHEN 'text' THEN instr({}, {}) > 0", inner, item)
        return _joined(
            "(CASE {} WHEN 'array' THEN {} IN (SELECT value FROM json_each({})) "
            "WHEN 'object' THEN {} IN (SELECT key FROM json_each({})) {} END)",
            *(holder, item, inner, item, inner),
            text if item.kind == "text" else _Sql(""),
        )

    # --- what is compared

    def _operand(self, node: ast.expr) -> _Sql:
        source = self._source_of(node)
        match node:
            case ast.Constant():
                return self._literal(node, source)
            case ast.UnaryOp(op=ast.USub(), operand=inner):
                return self._negative(inner, source)
            case ast.List(elts=items) | ast.Tuple(elts=items):
                literals = tuple(self._item(item) for item in items)
                return _Sql("", kind="literals", source=source, literals=literals)
            case ast.Name(id=name) if name in COLUMNS:
                return _Sql(f'"{name}"', kind=COLUMNS[name], source=source)
            case ast.Name(id=name):
                raise self._wrong(
                    f"there is no field {name!r}; expected one of {', '.join(COLUMNS)}"
                )
            case ast.Subscript(value=ast.Name(id=name), slice=ast.Constant(value=str() as key)):
                return self._value_in(name, key, source)
        raise self._wrong(
            f"expected a field, a text, a number, None, True or False, got {source!r}; "
            f"fields are {', '.join(COLUMNS)}"
        )

    def _item(self, node: ast.expr) -> _Sql:
        found = self._operand(node)
        if found.text != "?":
            raise self._wrong(f"expected texts and numbers in a list, got {found.source!r}")
        return found

    def _literal(self, node: ast.Constant, source: str) -> _Sql:
        match node.value:
            case None:
                return _Sql("NULL", kind="none", source=source)
            case str() as text:
                return _Sql("?", (sql_value(text),), "text", source)
            case int() | float() as number:
                return _Sql("?", (sql_value(number),), "number", source)
        raise self._wrong(f"expected a text, a number, None, True or False, got {source!r}")

    def _negative(self, node: ast.expr, source: str) -> _Sql:
        match node:
            case ast.Constant(value=int() | float() as number):
                return _Sql("?", (sql_value(-number),), "number", source)
            case ast.Name(id=name) if COLUMNS.get(name) == "number":
                return _Sql(f'(-"{name}")', kind="number", source=source)
        raise self._wrong(f"expected a number after the minus, got {source!r}")

    def _value_in(self, name: str, key: str, source: str) -> _Sql:
        if COLUMNS.get(name) != "object":
            objects = ", ".join(name for name, kind in COLUMNS.items() if kind == "object")
            raise self._wrong(f"{name!r} has no values by name; expected one of {objects}")
        parameters = (sql_value(key),)
        found = f'(SELECT value FROM json_each("{name}") WHERE key = ?'  # noqa: S608 - our own names
        if name != "metadata":
            return _Sql(f"{found})", parameters, "number", source)
        holder = _Sql('(SELECT type FROM json_each("metadata") WHERE key = ?)', parameters)
        return _Sql(f"{found}{_PLAIN})", parameters, "any", source, holder)


_PLAIN = " AND type NOT IN ('array', 'object')"
"""A value of `metadata` that can be compared."""
