"""Tests share code through `tests/kit`, or through a helper module of their own folder, alone."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.kit.changed import chosen
from tests.kit.spending import Spending

TESTS = Path(__file__).parent
PATHS = sorted(path.relative_to(TESTS).as_posix() for path in TESTS.rglob("*.py"))


def shared(path: str, source: str) -> list[str]:
    """The modules below `tests` that the file at this path imports and may not import."""
    folder = ["tests", *path.split("/")[:-1]]
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
            if names == ["tests"]:
                names = [f"tests.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        else:
            continue
        found += [name for name in names if not _may_import(folder, name.split("."))]
    return found


def _may_import(folder: list[str], module: list[str]) -> bool:
    if module[0] not in ("tests", ""):
        return True
    if module[:2] == ["tests", "kit"]:
        return True
    helper = module[-1] != "conftest" and not module[-1].startswith("test_")
    return module[0] == "tests" and module[:-1] == folder and len(folder) > 1 and helper


def test_tests_import_the_kit_and_helpers_of_their_folder() -> None:
    """No test module imports another test module, a conftest, or a helper of another folder."""
    found = {path: shared(path, (TESTS / path).read_text()) for path in PATHS}
    assert {path: names for path, names in found.items() if names} == {}


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("record/test_tool.py", "from tests.record.test_rollout import ask"),
        ("record/test_tool.py", "from tests.conftest import Recording"),
        ("record/test_tool.py", "def f():\n    from tests import conftest"),
        ("record/test_tool.py", "import tests.look.llm_spans"),
        ("record/test_tool.py", "from .helper import ask"),
        ("test_docs.py", "from tests.test_examples import python"),
        ("kit/calling.py", "from tests.record.helper import ask"),
    ],
)
def test_any_other_import_is_found(path: str, source: str) -> None:
    """Test modules, conftests, other folders and relative imports are each reported."""
    assert len(shared(path, source)) == 1


def test_the_kit_and_the_own_folder_are_fine() -> None:
    """What a test may import is not reported."""
    assert shared("record/test_tool.py", "from tests.kit.recording import Clients") == []
    assert shared("record/test_tool.py", "from tests.record.helper import ask") == []
    assert shared("record/test_tool.py", "import json") == []


def test_a_change_touches_its_room():
    """A room's files, its tests, what stands beside rooms; what all tests share touches all."""
    paths = ["otel_rollout/record/calls.py", "tests/spans/test_seals.py", "otel_rollout/wiring.py"]
    assert chosen(paths) == [
        "tests/record",
        "tests/spans",
        "tests/test_configure.py",
        "tests/test_rooms.py",
    ]
    assert chosen(["otel_rollout/rebuild/dialects/call.py", "Makefile"]) == [
        "tests/dialects",
        "tests/test_rooms.py",
    ]
    assert chosen(["tests/kit/talk.py", "otel_rollout/wire/json.py"]) == ["tests"]


def test_a_folder_that_takes_too_long_is_named():
    """Its quick tests are bounded; slow ones are not."""
    spending = Spending()
    spending.slow["tests/wire"] = 1000
    assert spending.too_dear() == []
    spending.quick["tests/wire"] = 1000
    (line,) = spending.too_dear()
    assert line.startswith("tests/wire: 1000 CPU seconds")
