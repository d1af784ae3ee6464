"""Tests against the newest releases of what others publish: `make test-newest`, to be run weekly.

Each environment is resolved anew, without our pins, for each Python; what is installed and how its
tests went is written to docs/compatibility.json, from which `--pages` writes the table of
docs/versions.md. An entry is replaced only by a run of the same part and Python. `again` in it
names tests that failed there and passed when they were run again alone; who did that adds it.

    python tools/newest.py [--python 3.12 --python 3.13] [PART ...]
    python tools/newest.py --pages
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import re
import shutil
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "docs" / "compatibility.json"
PAGE = ROOT / "docs" / "versions.md"
BEGIN, END = "<!-- from compatibility.json -->\n", "<!-- end -->\n"
PYTHONS = ("3.12", "3.13")
EXPORTERS = sorted(path.parent for path in (ROOT / "exporters").glob("*/pyproject.toml"))
OVERRIDES = ROOT / "requirements" / "overrides"
OFFLINE = {"HF_HUB_OFFLINE": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
INSTRUMENTOR = "opentelemetry-instrumentation-openai"
CLIENTS = (
    *("test_configure.py", "look", "wire/test_servers.py"),
    *("record/anthropic", "record/clients", "record/endings", "record/processor"),
)

_OPENINFERENCE = "openinference-instrumentation-openai"
DIALECTS = {
    "openllmetry": [INSTRUMENTOR],
    "openinference": [_OPENINFERENCE],
    "logfire": ["logfire"],
    "logfire-v1": ["logfire"],
    "genai": ["opentelemetry-instrumentation-genai-openai"],
    # It imports httpx, which openai 3 has not, and what util-genai 0.5 has no more.
    "openai-v2": [
        *("opentelemetry-instrumentation-openai-v2", "openai<3"),
        "opentelemetry-util-genai<0.5b0",
    ],
    "both": [_OPENINFERENCE, INSTRUMENTOR],
    "anthropic": ["anthropic"],
    "langsmith": ["langsmith"],
    "langfuse": ["langfuse"],
    "weave": ["weave"],
    "litellm": ["litellm"],
}
"""The packages that write each dialect; spans that none writes any more are as recorded."""

PARTS: dict[str, dict[str, Any]] = {
    "dialects": {
        "shown": tuple(dict.fromkeys(packages[0] for packages in DIALECTS.values())),
        "runs": [["-m", "not fuzz", "tests/dialects"]],
    },
    "clients": {
        "shown": ("openai", "anthropic", "opentelemetry-sdk", INSTRUMENTOR),
        "sources": ["--extra", "gateway", "--extra", "genai", "--group", "dev", "pyproject.toml"],
        "overrides": [],
        "runs": [["-m", "not slow", *(f"tests/{name}" for name in CLIENTS)]],
    },
    "frameworks": {
        "shown": "frameworks",
        "sources": ["--group", "dev", "--group", "frameworks", "pyproject.toml"],
        "overrides": ["frameworks"],
        "runs": [
            ["-m", "framework", "--deselect=tests/frameworks/test_docs.py", "tests/frameworks"],
            ["-m", "framework", "tests/record/transports"],
        ],
    },
    "exporters": {
        "shown": "trainers.in",
        "sources": ["--group", "dev", "pyproject.toml", "requirements/trainers.in"],
        "overrides": ["trainers"],
        # A process each: ART changes transformers for all that runs in its process.
        "runs": [["-m", "not ray", str(path.relative_to(ROOT))] for path in EXPORTERS],
        "editable": EXPORTERS,
        "alone": "requirements/harbor.in",
    },
}
"""Sets of packages that are tested together. shown: the packages that the table names, or the group
of pyproject.toml or the file of requirements that lists them."""


def main() -> int:
    """Run what was asked for; the status is 1 if a test failed or nothing could be installed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--python", action="append", choices=PYTHONS, help="both by default")
    parser.add_argument("--pages", action="store_true", help="write the docs' table, run nothing")
    parser.add_argument("parts", nargs="*", metavar="PART", help=", ".join(PARTS))
    asked = parser.parse_args()
    if unknown := set(asked.parts) - set(PARTS):
        parser.error(f"unknown parts {sorted(unknown)}: expected some of {', '.join(PARTS)}")
    failed = False
    if not asked.pages:
        for python in asked.python or PYTHONS:
            for part in asked.parts or PARTS:
                entry = tried(part, python)
                failed |= bool(entry["failed"]) or "refused" in entry
                recorded(entry)
    PAGE.write_text(paged(PAGE.read_text(), json.loads(RESULTS.read_text())))
    return failed


def tried(part: str, python: str) -> dict[str, Any]:
    """Install one part's newest releases and run its tests."""
    print(f"== {part}, Python {python}", flush=True)
    entry: dict[str, Any] = {
        "part": part,
        "python": python,
        "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
    }
    place = ROOT / "build" / "newest" / f"{part}-{python}"
    unrecorded: list[str] = []
    try:
        if part == "dialects":
            interpreter, (versions, unrecorded) = Path(sys.executable), recorded_anew(python, place)
        else:
            interpreter = installed(part, python, place)
            versions = versions_in(interpreter)
    except subprocess.CalledProcessError as error:
        text = (error.stderr or b"").decode(errors="replace")
        print(text, file=sys.stderr)
        return {**entry, "packages": {}, "passed": 0, "failed": [], "refused": text[-600:]}
    found = outcome(part, interpreter, place)
    found["failed"] += unrecorded
    return {
        **entry,
        "packages": {name: versions[name] for name in shown(part) if name in versions},
        **found,
    }


def installed(part: str, python: str, place: Path) -> Path:
    """The interpreter of an environment with the newest releases that go together."""
    place.parent.mkdir(parents=True, exist_ok=True)
    pins = place.with_suffix(".txt")
    overrides = [OVERRIDES / f"{name}.in" for name in PARTS[part]["overrides"]]
    uv(
        *("pip", "compile", "--upgrade", "--no-header", "--no-annotate", "--output-file", pins),
        *("--prerelease", "if-necessary-or-explicit", "--python-version", python),
        *("--python-platform", "x86_64-manylinux_2_28"),
        *(f"--override={path}" for path in overrides),
        *PARTS[part]["sources"],
    )
    interpreter = place / "bin" / "python"
    uv("venv", "--clear", "--python", python, place)
    uv("pip", "install", "--python", interpreter, "--no-deps", "-r", pins)
    if alone := PARTS[part].get("alone"):
        uv("pip", "install", "--python", interpreter, "--no-deps", "-r", alone)
    ours = [ROOT, *PARTS[part].get("editable", ())]
    editable = [text for path in ours for text in ("--editable", str(path))]
    uv("pip", "install", "--python", interpreter, "--no-deps", "--no-build-isolation", *editable)
    return interpreter


def recorded_anew(python: str, place: Path) -> tuple[dict[str, str], list[str]]:
    """Record each dialect into a folder: the versions of all that wrote, and what failed."""
    shutil.rmtree(place, ignore_errors=True)
    shutil.copytree(ROOT / "tests" / "dialects" / "recorded", place)
    versions, failed = dict[str, str](), list[str]()
    for name, packages in DIALECTS.items():
        environment = place.parent / f"{name}-{python}"
        interpreter = environment / "bin" / "python"
        uv("venv", "--clear", "--python", python, environment)
        # Some of them have no release that is not a pre-release.
        allowed = ("--prerelease", "if-necessary-or-explicit")
        needed = ("opentelemetry-sdk", "openai", *packages)
        uv("pip", "install", "--python", interpreter, *allowed, *needed)
        versions |= versions_in(interpreter)
        made = subprocess.run(
            [sys.executable, "-m", "tests.dialects.record", name, interpreter],
            cwd=ROOT,
            env={**os.environ, "OTEL_ROLLOUT_RECORDED": str(place)},
            check=False,
        )
        if made.returncode:
            failed.append(f"{name} (its agents could not be recorded)")
    return versions, failed


def uv(*arguments: object) -> None:
    subprocess.run(
        [str(Path(sys.executable).with_name("uv")), "--quiet", *map(str, arguments)],
        cwd=ROOT,
        check=True,
        stderr=subprocess.PIPE,
    )


def versions_in(interpreter: Path) -> dict[str, str]:
    code = (
        "import json, re; from importlib.metadata import distributions; print(json.dumps({"
        "re.sub('[-_.]+', '-', d.metadata['name']).lower(): d.version for d in distributions()}))"
    )
    found: dict[str, str] = json.loads(subprocess.check_output([interpreter, "-c", code]))
    return found


def shown(part: str) -> Iterator[str]:
    """The names of the packages that the table has of a part."""
    source = PARTS[part]["shown"]
    if isinstance(source, tuple):
        yield from source
        return
    if source.endswith(".in"):
        text = (ROOT / "requirements" / source).read_text()
        lines = text.partition("\n\n")[0].splitlines()
    else:
        text = (ROOT / "pyproject.toml").read_text()
        lines = text.partition(f"\n{source} = [")[2].partition("\n]")[0].splitlines()
    for line in lines:
        if name := re.match(r'\s*"?([A-Za-z0-9][\w.-]*)', line):
            yield name[1].lower()


def outcome(part: str, interpreter: Path, place: Path) -> dict[str, Any]:
    """How many tests passed, and the names of those that did not."""
    passed, failed = 0, list[str]()
    for number, selection in enumerate(PARTS[part]["runs"]):
        report = place.parent / f"{place.name}-{number}.xml"
        report.unlink(missing_ok=True)
        command = [interpreter, "-m", "pytest", "-q", "-W", "ignore", f"--junitxml={report}"]
        jobs = [] if part == "exporters" else ["-n", "auto"]
        environment = {**os.environ, **OFFLINE}
        if part == "dialects":
            environment["OTEL_ROLLOUT_RECORDED"] = str(place)
        subprocess.run([*command, *jobs, *selection], cwd=ROOT, env=environment, check=False)
        if not report.exists():
            failed.append(f"{selection[-1]} (did not start)")
            continue
        for case in ElementTree.parse(report).iter("testcase"):
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(f"{case.get('classname')}.{case.get('name')}")
            else:
                passed += case.find("skipped") is None
    return {"passed": passed, "failed": failed}


def recorded(entry: dict[str, Any]) -> None:
    """Write an entry in the place of the one of the same part and Python."""
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    key = (entry["part"], entry["python"])
    results = [old for old in results if (old["part"], old["python"]) != key]
    results = sorted([*results, entry], key=lambda e: ([*PARTS].index(e["part"]), e["python"]))
    RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def paged(page: str, results: list[dict[str, Any]]) -> str:
    """The page with its table written anew."""
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not (begin and end):
        raise SystemExit(f"{PAGE}: expected the lines {BEGIN.strip()} and {END.strip()}")
    return f"{head}{BEGIN}{table(results)}{END}{tail}"


def table(results: list[dict[str, Any]]) -> str:
    """Versions by package and Python, then how the tests of each part went."""
    pythons = sorted({entry["python"] for entry in results})
    lines = [f"\n| newest | {' | '.join(f'Python {python}' for python in pythons)} |"]
    lines.append(f"|---|{'---|' * len(pythons)}")
    for part in PARTS:
        entries = {entry["python"]: entry for entry in results if entry["part"] == part}
        cells = [_outcome(entries[python]) if python in entries else "" for python in pythons]
        lines.append(f"| **{part}** | {' | '.join(cells)} |")
        for name in dict.fromkeys(name for e in entries.values() for name in e["packages"]):
            cells = [entries.get(p, {}).get("packages", {}).get(name, "") for p in pythons]
            lines.append(f"| `{name}` | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n\n"


def _outcome(entry: dict[str, Any]) -> str:
    if "refused" in entry:
        return f"{entry['date']}: cannot be installed together"
    failed = f", {len(entry['failed'])} failed" if entry["failed"] else ""
    again = f", {len(entry['again'])} only when run again" if entry.get("again") else ""
    return f"{entry['date']}: {entry['passed']} tests passed{again}{failed}"


if __name__ == "__main__":
    sys.exit(main())
