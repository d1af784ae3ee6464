"""The package's shape: its rooms, who may import whom, what is public, where names are spelled."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path

import pytest

import otel_rollout

PACKAGE = Path(otel_rollout.__file__).parent
LAYERS = {
    0: ("errors", "first_use", "moved", "notebook", "semconv"),
    1: ("lines", "packed", "wire"),
    2: ("spans",),
    3: ("trajectory",),
    4: ("rebuild",),
    5: ("export", "otlp"),
    6: ("record",),
    7: ("gateway", "look", "testing", "view", "workflows"),
    8: ("wiring",),
    9: ("command",),
}
"""Rooms, which are packages with a door (`__init__`), and the modules that stand beside them."""
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
PURE = 4
"""The last layer that needs neither the OpenTelemetry SDK nor a client."""
IMPURE = ("opentelemetry.sdk", "opentelemetry.instrumentation", "openai", "anthropic", "tqdm")
NAMES = ("rollout.", "gen_ai.")


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, inside functions too, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}:{alias.name}" for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """What this module of the package does that its place does not allow."""
    if module == "__init__":
        return []
    room = module.split(".")[0]
    if room not in LAYER_OF:
        return [f"{room} has no layer: put it into the table of tests/test_rooms.py"]
    layer, found = LAYER_OF[room], list[str]()
    for imports in imported(ast.parse(source)):
        name, _, attribute = imports.partition(":")
        if name.startswith("."):
            found.append(f"{module} imports relatively: {name}")
        elif layer <= PURE and any(f"{name}.{attribute}.".startswith(f"{i}.") for i in IMPURE):
            found.append(f"{module} is pure and imports {name}")
        elif name.split(".")[0] == "otel_rollout":
            path = [*name.split(".")[1:], *([attribute] if name == "otel_rollout" else [])]
            other = path[0] if path else ""
            if other == room:
                continue
            if LAYER_OF.get(other, 99) >= layer:
                found.append(f"{module} (layer {layer}) imports {imports}")
            elif len(path) > 1:
                found.append(f"{module} passes by the door of {other}: {imports}")
    return found


def circles(sources: dict[str, str]) -> list[str]:
    """Modules of one room that import each other, in a circle of any length."""
    needs = {
        module: {
            name.partition(":")[0].removeprefix("otel_rollout.")
            for name in imported(ast.parse(source))
        }
        & sources.keys()
        for module, source in sources.items()
    }
    while free := [module for module, needed in needs.items() if not needed]:
        for module in free:
            del needs[module]
        for needed in needs.values():
            needed.difference_update(free)
    return sorted(needs)


def spelled(source: str) -> list[str]:
    """Attribute names that are written out, docstrings aside."""
    tree = ast.parse(source)
    prose = {
        id(node.value)
        for node in ast.walk(tree)
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and node.value.startswith(NAMES)
        and id(node) not in prose
    ]


PATHS = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))
MODULES = {path: path.removesuffix(".py").replace("/", ".") for path in PATHS}


@pytest.mark.parametrize("path", PATHS)
def test_modules_import_from_lower_layers_through_doors(path: str):
    """Every module has a layer and imports only from below it, what the doors there have."""
    assert violations(MODULES[path].removesuffix(".__init__"), (PACKAGE / path).read_text()) == []


def test_no_modules_import_each_other():
    """Inside a room, too, imports have a direction."""
    sources = {
        module: (PACKAGE / path).read_text()
        for path, module in MODULES.items()
        if not module.endswith("__init__")
    }
    assert circles(sources) == []


def test_a_circle_is_found():
    """Also one of three, and not what only leads to it."""
    texts = {
        "wire.a": "from otel_rollout.wire.b import x",
        "wire.b": "def f():\n    from otel_rollout.wire.c import x",
        "wire.c": "import otel_rollout.wire.a",
        "wire.d": "from otel_rollout.wire.e import x",
        "wire.e": "import json",
    }
    assert circles(texts) == ["wire.a", "wire.b", "wire.c"]


EXPORTERS = PACKAGE.parent / "exporters"
EXPORTER_PATHS = sorted(
    path.relative_to(EXPORTERS).as_posix() for path in EXPORTERS.glob("*/otel_rollout_*/**/*.py")
)


def private_imports(source: str) -> list[str]:
    """Imports of this library that are not `otel_rollout` or `otel_rollout.export`."""
    public = ("otel_rollout", "otel_rollout.export")
    return [
        name
        for name in imported(ast.parse(source))
        if name.split(":")[0].split(".")[0] == "otel_rollout"
        and (name.split(":")[0] not in public or name == "otel_rollout:export")
    ]


@pytest.mark.parametrize("path", EXPORTER_PATHS)
def test_exporters_import_one_door(path: str):
    """An exporter in a distribution of its own uses what is public, and public for it."""
    assert private_imports((EXPORTERS / path).read_text()) == []


def test_a_private_import_of_an_exporter_is_caught():
    """Past the door, or another door."""
    assert private_imports("from otel_rollout.wire import loads")
    assert private_imports("import otel_rollout.export.rows")
    assert not private_imports("from otel_rollout.export import loads\nimport otel_rollout_trl")


@pytest.mark.parametrize(
    "path", [*EXPORTER_PATHS, "../otel_rollout/export/rows.py"], ids=lambda path: path
)
def test_every_option_of_an_exporter_is_described(path: str):
    """In the docstring of its class, which the command and editors show."""
    for node in ast.parse((EXPORTERS / path).read_text()).body:
        if isinstance(node, ast.ClassDef) and node.name.endswith("Rows") and node.decorator_list:
            lines = (ast.get_docstring(node) or "").splitlines()
            for field in node.body:
                if isinstance(field, ast.AnnAssign):
                    start = f"{ast.unparse(field.target)}: "
                    assert any(line.startswith(start) for line in lines), (node.name, start)


@pytest.mark.parametrize("path", [path for path in PATHS if path.endswith("/__init__.py")])
def test_a_door_only_names_what_is_behind_it(path: str):
    """A room's `__init__` has imports and `__all__`, and no code but for names that load later."""
    tree = ast.parse((PACKAGE / path).read_text())
    code = [
        node
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        and not (isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__")
        and not (isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING")
    ]
    assert [ast.unparse(node)[:80] for node in code] == []
    names = importlib.import_module(f"otel_rollout.{MODULES[path][:-9]}").__all__
    assert len(names) == len(set(names)) > 0


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.messages", "from otel_rollout.spans import Exchange"),
        ("errors", "from otel_rollout.wire import loads"),
        ("record.capture", "import otel_rollout.wiring"),
        ("record.capture", "from otel_rollout import wiring"),
        ("record.capture", "from otel_rollout import Trajectory"),
        ("record.capture", "import otel_rollout"),
        ("record.capture", "from otel_rollout.wire.json import loads"),
        ("look.guard", "import otel_rollout.record.capture"),
        ("look.guard", "from otel_rollout.workflows import Workflow"),
        ("record.rollouts", "def f():\n    from otel_rollout.look import instrument"),
        ("record.tools", "from .rollout import rollout"),
        ("rebuild.assembly", "from opentelemetry.sdk.trace import ReadableSpan"),
        ("rebuild.assembly", "import opentelemetry.sdk.trace"),
        ("rebuild.assembly", "def f():\n    from opentelemetry import sdk"),
        ("wire.chat", "import openai"),
        (
            "spans.record",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import otel_rollout.record",
        ),
        ("newcomer", ""),
    ],
)
def test_a_violation_is_caught(module: str, source: str):
    """Same or higher layer, past a door, the SDK where it is pure, no layer: each fails."""
    assert len(violations(module, source)) == 1


def test_what_is_allowed_is_not_caught():
    """Doors of lower layers, modules of the own room, and the SDK above the pure ones, are fine."""
    assert violations("record.capture", "from otel_rollout import semconv as sc") == []
    assert violations("record.capture", "from otel_rollout.record.running import Run") == []
    assert violations("record.rollouts", "from opentelemetry.sdk.trace import Sampler") == []
    assert violations("rebuild.assembly", "from otel_rollout.wire import loads") == []
    assert violations("rebuild.assembly", "import json") == []


LATER_IMPORTS = {
    "command/view.py": "the server's packages, which --html does not need",
    "otlp/source.py": "protobuf and an HTTP client, for the sources that need them",
}
"""Modules that import inside a function, and why."""
BOUNDARIES = {
    "command/checks/model_server.py": "whatever a model server does to a call is a finding",
    "command/checks/one_rollout.py": "whatever a set-up does to a rollout is a finding",
    "command/doctor.py": "the user's set-up",
    "command/export.py": "another package's exporter",
    "look/guard.py": "an instrumentor's code inside the user's call",
    "look/streams.py": "an instrumentor's code inside the reading of a stream",
    "otlp/writing.py": "an exporter of spans does not raise",
    "view/tokens.py": "the package tokenizers raises no other exception",
    "trajectory/steps.py": "objects of the user's that are to be shown",
    "workflows/workflow.py": "what a run or a hook of the user's raises is in the episode",
}
"""Modules that swallow any exception, and whose it is; `record.boundary` is the other place."""


def later_imports(source: str) -> int:
    """Imports inside functions."""
    functions = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    return sum(
        isinstance(node, ast.Import | ast.ImportFrom)
        for function in functions
        for node in ast.walk(function)
    )


def names_of(expression: ast.AST) -> set[str]:
    """The plain names in an expression."""
    return {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}


def swallowed(source: str) -> int:
    """Handlers of any exception that do not raise it again."""
    return sum(
        isinstance(node, ast.ExceptHandler)
        and (
            node.type is None or not names_of(node.type).isdisjoint(("Exception", "BaseException"))
        )
        and not any(isinstance(inner, ast.Raise) and not inner.exc for inner in ast.walk(node))
        for node in ast.walk(ast.parse(source))
    )


OWN = [path for path in PATHS if not path.startswith("testing/")]


@pytest.mark.parametrize("path", OWN)
def test_imports_inside_functions_have_a_reason(path: str):
    """Only what is optional is imported when it is used."""
    assert bool(later_imports((PACKAGE / path).read_text())) is (path in LATER_IMPORTS)


@pytest.mark.parametrize("path", OWN)
def test_exceptions_are_swallowed_at_boundaries_only(path: str):
    """A broad `except` that does not raise again stands where somebody else's code runs."""
    assert bool(swallowed((PACKAGE / path).read_text())) is (path in BOUNDARIES)


def test_what_these_two_look_for_is_found():
    """An import in a function; a broad handler that swallows, and not one that raises again."""
    assert later_imports("import a\ndef f():\n    async def g():\n        from b import c") > 0
    assert later_imports("import a\ndef f():\n    pass") == 0
    assert swallowed("try:\n  f()\nexcept Exception:\n  pass") == 1
    assert swallowed("try:\n  f()\nexcept:\n  g()") == 1
    assert swallowed("try:\n  f()\nexcept BaseException:\n  g()\n  raise") == 0
    assert swallowed("try:\n  f()\nexcept ValueError:\n  pass") == 0


@pytest.mark.parametrize("path", [path for path in PATHS if path != "semconv.py"])
def test_attribute_names_are_spelled_once(path: str):
    """No module but `semconv` spells an attribute name."""
    assert spelled((PACKAGE / path).read_text()) == []


def test_a_spelled_attribute_name_is_caught():
    """A name in code is found, also in an f-string; one in a docstring is not."""
    assert spelled("x = {'rollout.id': 1}") == ["rollout.id"]
    assert spelled("x = f'gen_ai.{y}'") == ["gen_ai."]
    assert spelled("'''rollout.id is a name.'''\nx = 'a rollout.id'") == []


def test_attribute_names_are_different():
    """No two constants of `semconv` are the same attribute."""
    from otel_rollout import semconv

    names = [
        value
        for name, value in vars(semconv).items()
        if name.isupper() and isinstance(value, str) and value.startswith(NAMES)
    ]
    assert len(names) == len(set(names)) > 40


PUBLIC = [
    "Action",
    "Completion",
    "ConfigurationError",
    "EmptyRowsWarning",
    "Episode",
    "ExportError",
    "History",
    "HistoryItem",
    "InMemoryTrajectoryExporter",
    "JsonlTrajectoryExporter",
    "NoActiveRolloutError",
    "NotARolloutError",
    "NotRecordedError",
    "Reward",
    "RolloutError",
    "RowExporter",
    "SideCalls",
    "SpanFormatError",
    "Step",
    "TerminationEvent",
    "TerminationReason",
    "TokenSequence",
    "TooManyExceptionsError",
    "Trajectory",
    "TrajectoryExporter",
    "TrajectoryGroup",
    "TrajectorySealedError",
    "TrajectorySpanProcessor",
    "TruncationWarning",
    "UnknownCompletionError",
    "Workflow",
    "configure",
    "continue_rollout",
    "gather_group",
    "gather_trajectories",
    "gather_trajectory",
    "get_current_trajectory",
    "get_history",
    "known_side_call",
    "no_capture",
    "overviews",
    "propagate",
    "reconstruct",
    "reconstruct_episodes",
    "record_reward",
    "request_token_ids",
    "rollout",
    "run_workflows",
    "shutdown",
    "to_token_rows",
    "tool",
    "without_tools",
]


def test_the_public_names():
    """What `otel_rollout` exports is this list, sorted; a change of it is a change here."""
    assert otel_rollout.__all__ == PUBLIC
    assert sorted(PUBLIC) == PUBLIC


@pytest.mark.parametrize("name", PUBLIC)
def test_every_public_name_says_what_it_is(name: str):
    """Every public name can be imported and has a docstring of its own."""
    thing = getattr(importlib.import_module("otel_rollout"), name)
    assert inspect.cleandoc(vars(thing).get("__doc__") or thing.__doc__ or "")
    if inspect.isclass(thing):
        assert "__doc__" in vars(thing)
        assert thing.__doc__
        assert thing.__module__.startswith("otel_rollout.")


@pytest.mark.parametrize("name", [name for name in PUBLIC if name[0].isupper()])
def test_every_public_method_says_what_it_does(name: str):
    """Every public method of a public class that does something has a docstring."""
    silent = [
        attribute
        for attribute, value in vars(getattr(otel_rollout, name)).items()
        if not attribute.startswith("_") and inspect.isfunction(value) and not value.__doc__
    ]
    assert silent == []
