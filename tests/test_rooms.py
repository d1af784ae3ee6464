"""The package's shape: its rooms, who may import whom, what is public, where names are spelled."""

from __future__ import annotations

import ast
import importlib
import inspect
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

import otel_rollout

PACKAGE = Path(otel_rollout.__file__).parent
LAYERS = {
    0: ("errors", "first_use", "hosts", "looking", "semconv", "terminal", "worker_processes"),
    1: ("compressed", "extras", "lines", "wire"),
    2: ("spans",),
    3: ("journal", "trajectory"),
    4: ("rebuild", "side_calls"),
    5: ("export", "otlp", "providers"),
    6: ("evidence", "record"),
    7: ("look", "testing"),
    8: ("gateway", "kafka", "lanes", "view", "workflows"),
    9: ("receive", "wiring"),
    10: ("command",),
}
"""Rooms, which are packages with a door (`__init__`), and the modules that stand beside them."""
LAYER_OF = {room: layer for layer, rooms in LAYERS.items() for room in rooms}
PURE = 4
"""The last layer that needs neither the OpenTelemetry SDK nor a client."""
IMPURE = ("opentelemetry.sdk", "opentelemetry.instrumentation", "openai", "anthropic", "tqdm")
NAMES = ("rollout.", "gen_ai.")


def written_import(node: ast.AST) -> str | None:
    """The module that a call of `import_module` names; of an f-string what it begins with."""
    match node:
        case ast.Call(
            func=ast.Name(id="import_module") | ast.Attribute(attr="import_module"),
            args=[ast.Constant(value=str() as name), *_]
            | [ast.JoinedStr(values=[ast.Constant(value=str() as name), *_]), *_],
        ):
            return name.rstrip(".")
    return None


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module that is imported, inside functions too, with the names taken from it.

    A call `import_module("name")` is an import, as far as the name is written out.
    """
    for node in ast.walk(tree):
        if (name := written_import(node)) is not None:
            yield name
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
SOURCES = {path: (PACKAGE / path).read_text() for path in PATHS}


def test_modules_import_from_lower_layers_through_doors():
    """Every module has a layer and imports only from below it, what the doors there have."""
    found = [violations(MODULES[p].removesuffix(".__init__"), SOURCES[p]) for p in PATHS]
    assert list(filter(None, found)) == []


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


FOR_READERS = (
    *("otel_rollout.rebuild.dialects", "otel_rollout.rebuild.documents"),
    *(f"otel_rollout.{door}" for door in ("errors", "semconv", "spans", "trajectory", "wire")),
)
"""Doors that a `reader.py` may use too: it makes trajectories of others' documents."""


def private_imports(source: str, *, reads: bool = False) -> list[str]:
    """Imports of this library that are not `otel_rollout` or `otel_rollout.export`."""
    public = ("otel_rollout", "otel_rollout.export", *(FOR_READERS if reads else ()))
    return [
        name
        for name in imported(ast.parse(source))
        if name.split(":")[0].split(".")[0] == "otel_rollout"
        and (name.split(":")[0] not in public or name == "otel_rollout:export")
    ]


def test_exporters_import_one_door():
    """An exporter in a distribution of its own uses what is public, and public for it."""
    found = {
        path: private_imports((EXPORTERS / path).read_text(), reads=path.endswith("/reader.py"))
        for path in EXPORTER_PATHS
    }
    assert {path: names for path, names in found.items() if names} == {}


def test_a_private_import_of_an_exporter_is_caught():
    """Past the door, or another door."""
    assert private_imports("from otel_rollout.wire import loads")
    assert private_imports("import otel_rollout.export.rows")
    assert not private_imports("from otel_rollout.export import loads\nimport otel_rollout_trl")
    assert private_imports("from otel_rollout.wire.json import loads", reads=True)


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


def names_of_door(path: Path) -> list[str]:
    """The names that a room's `__init__` gives, as its imports say."""
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text())
    return [
        alias.asname or alias.name
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
        if node.module != "otel_rollout.first_use"
    ]


_CONNECTED = "show_with"
"""The top-level package may also connect a lower room with a higher one."""


@pytest.mark.parametrize("path", [path for path in PATHS if path.endswith("__init__.py")])
def test_a_door_only_names_what_is_behind_it(path: str):
    """A room's `__init__` has imports, `import x as x`, each name once, and no code."""
    tree = ast.parse((PACKAGE / path).read_text())
    code = [
        ast.unparse(node)
        for node in tree.body
        if not isinstance(node, ast.Import | ast.ImportFrom)
        and not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
    ]
    later = "load_on_first_use(__name__, __file__)"
    code = [line[:80] for line in code if not line.endswith(later)]
    assert code == [] or (
        path == "__init__.py" and [line.partition("(")[0] for line in code] == [_CONNECTED]
    )
    room = importlib.import_module(f"otel_rollout.{MODULES[path][:-9]}".rstrip("."))
    names = names_of_door(PACKAGE / path)
    assert len(names) == len(set(names)) > 0
    assert [name for name in names if not hasattr(room, name)] == []


@pytest.mark.parametrize(
    ("module", "source"),
    [
        ("wire.message", "from otel_rollout.spans import Exchange"),
        ("errors", "from otel_rollout.wire import loads"),
        ("record.capture", "import otel_rollout.wiring"),
        ("record.capture", "from otel_rollout import wiring"),
        ("record.capture", "from otel_rollout import Trajectory"),
        ("record.capture", "import otel_rollout"),
        ("record.capture", "from otel_rollout.wire.json import loads"),
        ("look.guard", "import otel_rollout.record.capture"),
        ("look.guard", "from otel_rollout.workflows import Workflow"),
        ("record.rollouts", "def f():\n    from otel_rollout.look import instrument"),
        ("looking", "def f():\n    import_module('otel_rollout.view').notebook_cell(1)"),
        ("record.capture", "importlib.import_module('otel_rollout.view')"),
        ("record.capture", "x = import_module(f'otel_rollout.command.{verb}')"),
        ("rebuild.assembly", "import_module('opentelemetry.sdk.trace')"),
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
    "command/cli.py": "a verb loads what it needs, --help nothing",
    "command/argument_types.py": "reads the version, for --version alone",
    "record/sending/sender.py": "the journal, where there is a folder",
    "record/transports/capture.py": "the openai that the program has imported",
    "record/transports/encoding.py": "decoders that are optional packages",
    "export/memory.py": "asyncio, which who waits in a coroutine has loaded",
    "record/gathering/progress.py": "tqdm, for those who want a bar",
    "view/sources.py": "tqdm, where a bar is shown",
    "view/tokens.py": "an optional package",
    "wiring.py": "the gateway, for rollouts that ask for one",
    "view/jobs.py": "processes, for --jobs alone",
    "first_use.py": "what waits for the import of another module",
    "rebuild/plugins.py": "the registry of packages, for formats of others alone",
    "providers.py": "the SDK's metrics, where they are asked for",
    "view/verbs/view.py": "the server's packages, which --html does not need",
    "otlp/encoding.py": "protobuf, where spans are sent over it",
    "otlp/writing.py": "the exporters of OTLP, where they are used",
    "otlp/source.py": "protobuf and an HTTP client, for the sources that need them",
}
"""Modules that import inside a function, and why."""
BOUNDARIES = {
    "command/checks/trials.py": "whatever a set-up or a server does to a rollout is a finding",
    "command/doctor.py": "the user's set-up",
    "command/export.py": "another package's exporter",
    "first_use.py": "inside the import of another package",
    "look/guard.py": "an instrumentor's code inside the user's call",
    "otlp/blobs.py": "a file system of others, in an exporter of spans",
    "otlp/writing.py": "an exporter of spans does not raise",
    "spans/blobs.py": "a file system of others",
    "view/tokens.py": "the package tokenizers raises no other exception",
    "receive/handover.py": "another's exporter of trajectories",
    "record/observer.py": "observers, inside the user's call",
    "record/privacy/content.py": "the user's function that redacts",
    "trajectory/steps.py": "objects of the user's that are to be shown",
    "workflows/rllm.py": "values of the user's that cannot be copied",
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
        isinstance(node, ast.Import | ast.ImportFrom) or written_import(node) is not None
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


def test_imports_inside_functions_have_a_reason():
    """Only what is optional is imported when it is used."""
    assert {path for path in OWN if later_imports(SOURCES[path])} == LATER_IMPORTS.keys()


def test_exceptions_are_swallowed_at_boundaries_only():
    """A broad `except` that does not raise again stands where somebody else's code runs."""
    assert {path for path in OWN if swallowed(SOURCES[path])} == BOUNDARIES.keys()


def test_what_these_two_look_for_is_found():
    """An import in a function; a broad handler that swallows, and not one that raises again."""
    assert later_imports("import a\ndef f():\n    async def g():\n        from b import c") > 0
    assert later_imports("def f():\n    return import_module('a')") > 0
    assert later_imports("import a\ndef f(name):\n    return import_module(name)") == 0
    assert swallowed("try:\n  f()\nexcept Exception:\n  pass") == 1
    assert swallowed("try:\n  f()\nexcept:\n  g()") == 1
    assert swallowed("try:\n  f()\nexcept BaseException:\n  g()\n  raise") == 0
    assert swallowed("try:\n  f()\nexcept ValueError:\n  pass") == 0


def test_attribute_names_are_spelled_once():
    """No module but `semconv` spells an attribute name."""
    found = {path: spelled(SOURCES[path]) for path in PATHS if path != "semconv.py"}
    assert {path: names for path, names in found.items() if names} == {}


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
    "Completion",
    "ConfigurationError",
    "ContentWarning",
    "EmptyRowsWarning",
    "Episode",
    "ExportError",
    "History",
    "HistoryItem",
    "InMemoryTrajectoryExporter",
    "JsonlTrajectoryExporter",
    "NoActiveRolloutError",
    "NoAdvantageWarning",
    "NotARolloutError",
    "NotRecordedError",
    "PartialGroupWarning",
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
    "overviews",
    "propagate",
    "reconstruct",
    "record_reward",
    "request_token_ids",
    "rollout",
    "shutdown",
    "to_token_rows",
    "tool",
]


def test_the_public_names():
    """What `otel_rollout` exports is this list, sorted; a change of it is a change here."""
    assert list(vars(otel_rollout)["__all__"]) == PUBLIC
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


LINES = 56_474
"""Lines of Python in the package, docstrings included; lowered when it gets smaller."""
LINES_OF_A_FILE = 450
LINES_OF_A_FUNCTION = 60
COMPLEXITY = 15
FILES_OF_A_FOLDER = 25
FLOORS = {"record": 11}
"""Rooms whose modules may import each other in chains of so many."""
SMALL = 60
"""Lines below which a module that one other imports belongs into that."""
LIBRARY = "a module for each library"
ARGUMENTS = "the documentation of its arguments"
CASES = "a flat list of cases"
EXCEPTIONS = {
    "export/options.py:_is": CASES,
    "export/rowfile.py": "one file: what is collected, written, counted, and gone on with",
    "otlp/source.py:spans": CASES,
    "rebuild/dialects/reader.py:_each_once": "one walk over the spans",
    "testing/bodies.py:_choice_parts": CASES,
    "testing/bodies.py:generation": CASES,
    "testing/server.py:_respond": CASES,
    "trajectory/tokens.py": "one algorithm, which is read as a whole",
    "trajectory/gate.py:admit": CASES,
    "wiring.py:configure": ARGUMENTS,
    "workflows/runs.py:run_workflows": ARGUMENTS,
    "command/checks/check.py": "documented: programs call it",
    "record/transports/httpx.py": LIBRARY,
}
"""Modules (`wire/json.py`) and functions (`wire/json.py:loads`) that are larger or more complex, or
small and imported once, each with its reason."""


def test_the_package_keeps_to_its_lines():
    """What is added takes the place of something."""
    assert sum(len(text.splitlines()) for text in SOURCES.values()) <= LINES


def functions(source: str) -> Iterator[tuple[str, int, int]]:
    """The name, the lines and the complexity of each function."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name, (node.end_lineno or 0) - node.lineno + 1, complexity(node)


BRANCHES = (
    *(ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While),
    *(ast.ExceptHandler, ast.comprehension, ast.match_case),
)


def complexity(function: ast.AST) -> int:
    """One, and one more for each branch, loop, handler, `and`, `or`, `if` of a comprehension."""
    count = 1
    for node in ast.walk(function):
        count += isinstance(node, BRANCHES)
        count += len(node.values) - 1 if isinstance(node, ast.BoolOp) else 0
        count += len(node.ifs) if isinstance(node, ast.comprehension) else 0
    return count


def test_functions_are_short_and_simple():
    """What is longer is two functions."""
    assert [
        (path, name, lines, branches)
        for path, source in SOURCES.items()
        for name, lines, branches in functions(source)
        if (lines > LINES_OF_A_FUNCTION or branches > COMPLEXITY)
        and f"{path}:{name}" not in EXCEPTIONS
    ] == []


def test_files_are_of_one_idea():
    """What is longer is two ideas; and a folder can be read at a glance."""
    long = {
        path: len(text.splitlines()) for path, text in SOURCES.items() if path not in EXCEPTIONS
    }
    assert {path: lines for path, lines in long.items() if lines > LINES_OF_A_FILE} == {}
    folders = Counter(Path(path).parent for path in SOURCES)
    assert {f: count for f, count in folders.items() if count > FILES_OF_A_FOLDER} == {}


def needed_by() -> dict[str, set[str]]:
    """The modules that import each module, also through the door of its room."""
    behind = {
        f"{MODULES[path].removesuffix('.__init__')}:{name}": module
        for path in PATHS
        if path.endswith("__init__.py")
        for name, module in sources_of_door(PACKAGE / path).items()
    }
    needs: dict[str, set[str]] = {module: set() for module in MODULES.values()}
    for path, module in MODULES.items():
        if path.endswith("__init__.py"):
            continue
        for imports in imported(ast.parse(SOURCES[path])):
            name = imports.removeprefix("otel_rollout.")
            plain = name.replace("otel_rollout:", "").replace(":", ".")
            for needed in (behind.get(name), name.partition(":")[0], plain):
                if needed in needs:
                    needs[needed].add(module)
    for module in sources_of_door(PACKAGE / "__init__.py").values():
        needs.setdefault(module, set()).add("a user")
    return needs


def sources_of_door(path: Path) -> dict[str, str]:
    """The names that a room's `__init__` gives, with the module of each."""
    stub = path.with_suffix(".pyi")
    tree = ast.parse((stub if stub.exists() else path).read_text())
    return {
        alias.asname or alias.name: str(node.module).removeprefix("otel_rollout.")
        for node in tree.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_small_files_are_needed_twice():
    """A piece that one module needs belongs into that module."""
    needs = needed_by()
    small = {
        path
        for path, module in MODULES.items()
        if not path.endswith(("__init__.py", "__main__.py"))
        and len(SOURCES[path].splitlines()) < SMALL
        and len(needs[module]) == 1
    }
    assert sorted(small - EXCEPTIONS.keys()) == []


@pytest.mark.parametrize("room", FLOORS)
def test_a_room_has_few_floors(room: str):
    """The longest chain of imports between the modules of a room."""
    needs = needed_by()
    inside = {module for module in needs if module.split(".")[0] == room}
    height = dict.fromkeys(inside, 1)
    for _ in inside:
        for module in inside:
            above = [height[importer] for importer in needs[module] & inside]
            height[module] = 1 + max(above, default=0)
    assert max(height.values()) <= FLOORS[room]


def test_what_is_too_large_is_found():
    """By its lines, its branches."""
    source = "def f(a):\n    if a and a or 1:\n        return [b for b in a if b]\n"
    assert list(functions(source)) == [("f", 3, 6)]
