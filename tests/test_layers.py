"""The package's shape: who may import whom, what is public, and where attribute names are."""

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
    0: ("semconv", "errors", "messages"),
    1: ("spans", "streams", "served", "litellm_post"),
    2: ("exchange",),
    3: ("completion", "dialects"),
    4: ("histories", "steps"),
    5: ("tokens",),
    6: ("trajectory",),
    7: ("reconstruct", "tree", "groups"),
    8: ("episodes",),
    9: ("active", "export", "otlp", "progress", "rows", "partitions"),
    10: ("rowfile", "rollout", "capture", "processor", "processes", "tool"),
    11: ("guard", "gather"),
    12: ("instrumentors", "workflow"),
    13: ("configure", "testing"),
    14: ("doctor",),
    15: ("cli",),
}
LAYER_OF = {module: layer for layer, modules in LAYERS.items() for module in modules}
PURE = 8
"""The last layer that needs no OpenTelemetry SDK."""
NAMES = ("rollout.", "gen_ai.")


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, inside functions too, with the names taken from it."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            module = "." * node.level + (node.module or "")
            yield from (f"{module}.{alias.name}" for alias in node.names)


def violations(module: str, source: str) -> list[str]:
    """What this module of the package does that its layer may not."""
    if module == "__init__":
        return []
    module = module.split(".")[0]  # of a package every module is on one layer
    if module not in LAYER_OF:
        return [f"{module} has no layer: put it into the table of tests/test_layers.py"]
    layer, found = LAYER_OF[module], list[str]()
    for name in imported(ast.parse(source)):
        if name.startswith("."):
            found.append(f"{module} imports relatively: {name}")
        elif name.startswith("opentelemetry.sdk") and layer <= PURE:
            found.append(f"{module} is pure and imports {name}")
        elif name == "otel_rollout" or name.startswith("otel_rollout."):
            other = [*name.split("."), ""][1]
            if LAYER_OF.get(other, 99) >= layer and other != module:
                found.append(f"{module} (layer {layer}) imports {name}")
    return found


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


MODULES = sorted(path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py"))


@pytest.mark.parametrize("path", MODULES)
def test_modules_import_from_lower_layers_only(path: str):
    """Every module of the package has a layer and imports only from below it."""
    module = path.removesuffix(".py").replace("/", ".")
    assert violations(module, (PACKAGE / path).read_text()) == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("messages", "from otel_rollout.exchange import Exchange"),
        ("messages", "from otel_rollout.errors import RolloutError"),
        ("capture", "import otel_rollout.configure"),
        ("capture", "from otel_rollout import configure"),
        ("capture", "from otel_rollout import Trajectory"),
        ("capture", "import otel_rollout"),
        ("rollout", "def f():\n    from otel_rollout.capture import instrument"),
        ("tool", "from .rollout import rollout"),
        ("reconstruct", "from opentelemetry.sdk.trace import ReadableSpan"),
        ("reconstruct", "import opentelemetry.sdk.trace"),
        ("reconstruct", "def f():\n    from opentelemetry import sdk"),
        (
            "spans",
            "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n  import otel_rollout.tool",
        ),
        ("newcomer", ""),
    ],
)
def test_a_violation_is_caught(module: str, source: str):
    """Imports of the same or a higher layer, of the SDK, or by a module without layer, fail."""
    assert len(violations(module, source)) == 1


def test_what_is_allowed_is_not_caught():
    """Imports of lower layers, and of the SDK above the pure ones, are fine."""
    assert violations("capture", "from otel_rollout import semconv as sc") == []
    assert violations("capture", "from otel_rollout.active import ActiveRollout") == []
    assert violations("rollout", "from opentelemetry.sdk.trace.sampling import Sampler") == []
    assert violations("reconstruct", "import json") == []


@pytest.mark.parametrize("path", [path for path in MODULES if path != "semconv.py"])
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
    "no_capture",
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
