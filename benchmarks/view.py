"""The cost of looking: `otel-rollout view` on files of 10, 1,000 and 100,000 trajectories.

    python benchmarks/view.py [--trajectories 10 1000 100000] [--turns 2]

A trajectory is one that a real client made with the model server of the tests: so many turns, with
the ids of its tokens; the others of a file are that one under other ids, with other rewards, in
groups of 8. The program is started as a user starts it, and asked over HTTP. `page` is the time
from its start to the page and the first rows, `index` to when all is read, `again` from the start
to the page and all rows of a second start; `memory` is the most that the first one took, in MB;
`list`, `summary` and `search` are the times of these questions about all trajectories, the median
of five.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import openai

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.testing import ModelServer

_VIEW = "import sys; from otel_rollout.command import main; sys.exit(main(sys.argv[1:]))"


def recorded(turns: int) -> dict[str, Any]:
    """The JSON of one trajectory."""
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], instrumentor=None, request_token_ids=True)
    messages: list[Any] = [{"role": "user", "content": "What is the capital of France?"}]
    with ModelServer("The capital of France is Paris.", token_ids=True, logprobs=True) as server:
        client = openai.OpenAI(base_url=server.base_url, api_key="none")
        with client, rollout("agent"):
            for turn in range(turns):
                reply = client.chat.completions.create(model="m", messages=messages)
                said = {"role": "assistant", "content": reply.choices[0].message.content}
                messages += [said, {"role": "user", "content": f"And of country {turn}?"}]
    otel_rollout.shutdown()
    (trajectory,) = exporter.get_finished_trajectories()
    return trajectory.to_dict()


def write(path: Path, count: int, turns: int) -> None:
    """A file of so many trajectories."""
    base = recorded(turns) | {"rewards": [{"value": 0.5}], "reward": 0.5, "group_id": "GROUP"}
    text = json.dumps(base | {"task_id": "TASK"}, separators=(",", ":"))
    with path.open("w") as file:
        for number in range(count):
            line = text.replace(base["id"], f"{number:032x}").replace('"TASK"', f'"task {number}"')
            line = line.replace('"GROUP"', f'"g{number // 8}"')
            file.write(line.replace('{"value":0.5}', f'{{"value":{number % 97 / 96}}}') + "\n")


@dataclass
class Running:
    """The program, and what it says."""

    url: str
    process: subprocess.Popen[str]
    started: float

    def ask(self, name: str, **query: object) -> Any:
        """The answer of this name."""
        with urllib.request.urlopen(f"{self.url}api/{name}?{urlencode(query)}") as answer:
            return json.load(answer)

    def seconds(self) -> float:
        """Since it was started."""
        return time.perf_counter() - self.started

    def memory(self) -> float:
        """The most memory that it took, in MB."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+)", status)[0]) / 1024

    def until_complete(self) -> None:
        """Wait until all is read."""
        while not self.ask("state")["complete"]:
            time.sleep(0.05)


@contextmanager
def running(path: Path, index: Path) -> Iterator[Running]:
    """The program on a file, with its page loaded."""
    started = time.perf_counter()
    command = [
        sys.executable,
        "-c",
        _VIEW,
        "view",
        str(path),
        "--no-browser",
    ]
    environment = {**os.environ, "OTEL_ROLLOUT_VIEW_INDEX": str(index)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            found = Running(process.stdout.readline().strip(), process, started)
            urllib.request.urlopen(found.url).read()
            urllib.request.urlopen(f"{found.url}assets/app.js").read()
            yield found
        finally:
            process.terminate()
            assert process.wait() == 0


def median(ask: Running, name: str, **query: object) -> float:
    """Milliseconds of a question, the median of five."""
    times = []
    for _ in range(5):
        before = time.perf_counter()
        ask.ask(name, **query)
        times.append((time.perf_counter() - before) * 1000)
    return statistics.median(times)


def measure(folder: Path, count: int, turns: int) -> str:
    """One line of figures."""
    path, index = folder / f"{count}.jsonl", folder / f"{count}.sqlite"
    write(path, count, turns)
    with running(path, index) as first:
        while not first.ask("trajectories")["rows"]:
            time.sleep(0.01)
        page = first.seconds()
        first.until_complete()
        whole, memory = first.seconds(), first.memory()
        asked = (
            median(first, "trajectories", sort="-reward", where="reward > 0.5"),
            median(first, "summary"),
            median(first, "trajectories", search=f'"task {count - 1}"'),
        )
    with running(path, index) as second:
        second.until_complete()
        assert second.ask("trajectories")["total"] == count
        again = second.seconds()
    size, kept = path.stat().st_size / 1e6, index.stat().st_size / 1e6
    path.unlink()
    return (
        f"{count:>12,} {size:>9.1f} {kept:>9.1f} {page:>7.2f} {whole:>8.2f} {count / whole:>7.0f} "
        f"{size / whole:>6.1f} {again:>7.2f} {memory:>7.0f} "
        + " ".join(f"{each:>8.1f}" for each in asked)
    )


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trajectories", type=int, nargs="+", default=[10, 1_000, 100_000])
    parser.add_argument("--turns", type=int, default=2)
    options = parser.parse_args()
    print(
        f"{'trajectories':>12} {'file MB':>9} {'index MB':>9} {'page s':>7} {'index s':>8} "
        f"{'/s':>7} {'MB/s':>6} {'again s':>7} {'memory':>7} {'list ms':>8} {'summary':>8} "
        f"{'search':>8}"
    )
    with tempfile.TemporaryDirectory() as folder:
        os.chmod(folder, 0o700)
        for count in options.trajectories:
            print(measure(Path(folder), count, options.turns), flush=True)


if __name__ == "__main__":
    main()
