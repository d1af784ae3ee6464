"""The CPU seconds that the tests of each folder take, printed after a run and held to a bound.

Registered by `tests/conftest.py`. Counted are the process of a test and the programs that it waited
for, fixtures included; with several workers, each sends its seconds with its reports.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Generator
from pathlib import Path

import pytest

BOUNDS: dict[str, float] = {"tests/wire": 90, "tests/spans": 20}
"""CPU seconds of a folder's tests that are not slow, by its path; they are about twice what an idle
machine takes. Changed with a reason only: the tests of a room must stay quick."""
SHOWN = int(os.environ.get("DEAREST", "0"))
"""How many of the dearest tests are printed."""
START: pytest.StashKey[float] = pytest.StashKey()


def cpu_seconds() -> float:
    """CPU seconds of this process and of the children that it waited for, so far."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


class Spending:
    """Sums the CPU seconds of tests by folder."""

    def __init__(self) -> None:
        self.quick: dict[str, float] = defaultdict(float)
        self.slow: dict[str, float] = defaultdict(float)
        self.dearest: list[tuple[float, str]] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, object, object]:
        item.stash[START] = cpu_seconds()
        return (yield)

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        if report.when == "teardown":
            report.user_properties.append(("cpu", cpu_seconds() - item.stash[START]))
        return report

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        seconds = dict(report.user_properties).get("cpu")
        if report.when == "teardown" and isinstance(seconds, float):
            sums = self.slow if "slow" in report.keywords else self.quick
            path = report.nodeid.partition("::")[0]
            sums["/".join(Path(path).parent.parts[:2])] += seconds
            self.dearest.append((seconds, report.nodeid))

    def too_dear(self) -> list[str]:
        """A line for each folder whose quick tests took more than their bound."""
        return [
            f"{folder}: {self.quick[folder]:.0f} CPU seconds, the bound is {bound:.0f}"
            for folder, bound in BOUNDS.items()
            if self.quick.get(folder, 0) > bound
        ]

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        folders = sorted({*self.quick, *self.slow})
        terminalreporter.section("CPU seconds: quick, slow")
        for folder in folders:
            terminalreporter.line(
                f"{folder:<28}{self.quick[folder]:>8.1f}{self.slow[folder]:>8.1f}"
            )
        for seconds, name in sorted(self.dearest, reverse=True)[:SHOWN]:
            terminalreporter.line(f"{seconds:8.1f}  {name}")
        for line in self.too_dear():
            terminalreporter.line(line, red=True)

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if not hasattr(session.config, "workerinput") and self.too_dear():
            session.exitstatus = pytest.ExitCode.TESTS_FAILED
