"""README and docs: their code runs as it stands, their links lead somewhere."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import json
import re
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import (
    Episode,
    TerminationReason,
    TrajectoryGroup,
    get_current_trajectory,
    rollout,
    semconv,
    to_token_rows,
)
from otel_rollout.command import main
from otel_rollout.command.cli import command_parser
from otel_rollout.otlp import JsonLinesSpanExporter
from otel_rollout.testing import ModelServer, Reply, ToolCall
from otel_rollout.trajectory import gate, sentences, tokens, trajectory
from otel_rollout.wire import api_of
from otel_rollout.wire.apis import APIS
from otel_rollout.workflows import run_workflows
from tests.kit.programs import ROOT, python

DOCS = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md"))


READMES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.glob("exporters/*/README.md"))]


def blocks(page: str) -> list[str]:
    """The Python blocks of a page, in their order."""
    return re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(), re.DOTALL)


def block(page: str, text: str) -> str:
    """The page's only block that has this text."""
    (found,) = [code for code in blocks(page) if text in code]
    return found


def tool(name: str) -> Any:
    """A program of tools/, as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_quickstart_of_the_readme() -> None:
    """The block runs as it stands and prints a reward, the messages, ids and logprobs."""
    (code,) = blocks("README.md")
    with ModelServer(Reply("It is 4.")) as server:
        printed = python("-c", code, server=server)
    first, second = printed.splitlines()
    assert first.startswith("1.0 [{'role': 'user', 'content': '2 + 2?'}, {'role': 'assistant'")
    assert re.fullmatch(r"\[\d+(, \d+)*\] \[-\d.*\]", second)


def test_inside_a_rollout() -> None:
    """The block about what can be done inside a rollout runs inside one."""
    code = block("docs/rollouts.md", "history.append(")
    otel_rollout.configure(request_token_ids=True)
    call = SimpleNamespace(id="call_1", function=SimpleNamespace(name="f", arguments="{}"))
    reply = Reply(tool_calls=[ToolCall("f", "{}", id="call_1")])

    def judge(client: openai.OpenAI) -> Any:
        message = {"role": "user", "content": "good?"}
        return client.chat.completions.create(model="m", messages=[message])  # type: ignore[list-item]

    with (
        ModelServer([reply, "yes"]) as server,
        openai.OpenAI(base_url=server.base_url, api_key="none-needed") as client,
        rollout("agent") as trajectory,
    ):
        completion = client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "go"}]
        )
        exec(code, {"completion": completion, "call": call, "client": client, "judge": judge})
    assert trajectory.reward == 0.7
    assert trajectory.rewards["format"] == 0.5
    (sampled,) = trajectory.completions
    assert sampled.reward == 0.2
    assert [message["role"] for message in trajectory.messages()] == ["user", "assistant", "tool"]
    assert trajectory.metrics["turns"] == 3
    assert trajectory.warnings == []


def test_reading_back_is_valid() -> None:
    """The block that reads trajectories back names what there is."""
    code = block("docs/backends.md", "read_jaeger(")
    compile(code, "backends.md", "exec")
    for line in code.splitlines():
        if line.startswith("from "):
            exec(line)


@pytest.mark.slow
def test_production_and_training() -> None:
    """The block that calls the agent both ways goes with the README's quickstart."""
    both = block("docs/rollouts.md", "in production")
    definitions = block("README.md", "gather_trajectory(solve(").partition("async def main")[0]
    body = "".join(f"    {line}\n" for line in both.splitlines())
    code = (
        f"{definitions}async def main():\n    client = AsyncOpenAI()\n{body}"
        "    print(answer, trajectory.reward)\n\nasyncio.run(main())\n"
    )
    with ModelServer(Reply("It is 4.")) as server:
        assert python("-c", code, server=server) == "It is 4. 1.0\n"


@pytest.mark.slow
async def test_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The blocks of docs/metrics.md are one program, and its table has every metric."""
    monkeypatch.chdir(tmp_path)
    logged: list[Any] = []

    @rollout(group_id="sum")
    async def agent(client: openai.AsyncOpenAI, question: str) -> None:
        message: Any = {"role": "user", "content": question}
        await client.chat.completions.create(model="m", messages=[message])
        get_current_trajectory().reward = 1.0

    otel_rollout.configure()
    with ModelServer("It is 4.", token_ids=True, logprobs=True) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none-needed")
        names: dict[str, Any] = {"client": client, "agent": agent}
        names["run"] = SimpleNamespace(log=logged.append)
        program = blocks("docs/metrics.md")
        assert len(program) == 3
        for code in [program[0], program[1], program[0], program[2]]:
            compiled = compile(code, "metrics.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(compiled, names)
            if inspect.iscoroutine(running):
                await running
        await client.close()
    assert otel_rollout.shutdown()
    assert logged == [{"rollout/reward": 1.0, "rollout/turns": 1}] * 100
    assert (tmp_path / "rows.parquet").stat().st_size > 0
    assert names["table"].num_rows == 100
    page = (ROOT / "docs" / "metrics.md").read_text()
    listed = set(re.findall(r"^\| `((?:rollout|gen_ai)\.[\w.]+)` \|", page, re.MULTILINE))
    assert listed == {v for k, v in vars(semconv).items() if k.startswith("METRIC_")}


def test_every_block_is_run() -> None:
    """A block that is added to these pages needs a test here."""
    pages = ("README.md", "docs/rollouts.md", "docs/backends.md")
    assert [len(blocks(page)) for page in pages] == [1, 2, 1]


@pytest.mark.parametrize("name", ["README.md", *DOCS])
def test_every_block_compiles(name: str) -> None:
    """Every Python block of every page is Python."""
    for code in blocks(name):
        compile(code, name, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)


async def run_page(page: str, names: dict[str, Any]) -> dict[str, Any]:
    """Run the blocks of a page as one program, with these names; the names that it leaves."""
    for number, code in enumerate(blocks(page), 1):
        compiled = compile(
            code, f"{page}, block {number}", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        )
        running = eval(compiled, names)
        if inspect.iscoroutine(running):
            await running
    return names


async def test_the_tour(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of the tour are one program, and print what stands beside them."""
    monkeypatch.chdir(tmp_path)
    await run_page("docs/tour.md", {})
    lines = capsys.readouterr().out.splitlines()
    assert lines[:2] == ["[1.0, 0.0, 1.0, 0.0]", "[0.5, -0.5, 0.5, -0.5]"]
    assert lines[2].startswith("[{'role': 'user', 'content': '2 + 2?'}")
    assert lines[4] == "[]"
    assert [float(line.split()[2]) for line in lines[5:9]] == [0.5, -0.5, 0.5, -0.5]
    assert lines[9:] == ["[]", "True"]


async def test_the_page_for_coding_agents(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its blocks are one program, and its commands find nothing to complain of afterwards."""
    monkeypatch.chdir(tmp_path)
    names = await run_page("docs/coding-agents.md", {})
    with ModelServer("It is 4.", token_ids=True, logprobs=True) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none-needed")
        group = await names["collect"](client, [{"role": "user", "content": "2 + 2?"}], "4")
        await client.close()
    assert group.rewards == [1.0] * 8
    assert len(to_token_rows(group)) == 8
    page = (ROOT / "docs" / "coding-agents.md").read_text()
    commands = re.findall(r"^otel-rollout ((?:check|show) .*)$", page, re.M)
    assert len(commands) == 2
    for command in commands:
        assert main(command.split()) == 0
    capsys.readouterr()
    (run,) = re.findall(r"^otel-rollout (run .*?)$", page.replace("\\\n", ""), re.M)
    assert command_parser().parse_args(shlex.split(run)).samples == 8


async def test_an_empty_batch(capsys: pytest.CaptureFixture[str]) -> None:
    """What the page says is dropped is, and what mends it does."""
    names = await run_page("docs/cookbook/empty-batch.md", {})
    first, last = capsys.readouterr().out.splitlines()
    assert "the server sends token ids to those who ask" in first
    assert last == "2 []"
    assert [member.reward for member in names["asked"]] == [1.0, 1.0]


@pytest.mark.slow
async def test_workflows(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The blocks of docs/workflows.md are one program; the last reads what the first recorded."""
    document = (ROOT / "docs" / "workflows.md").read_text()
    monkeypatch.chdir(tmp_path)
    provider = otel_rollout.configure()
    provider.add_span_processor(SimpleSpanProcessor(JsonLinesSpanExporter("traces.jsonl")))
    program = blocks("docs/workflows.md")
    assert len(program) == 3
    with ModelServer("It is 4.", token_ids=True, logprobs=True) as server:
        client = openai.AsyncOpenAI(base_url=server.base_url, api_key="none-needed")
        names: dict[str, Any] = {"client": client}
        live: list[Episode] = []
        for code in program:
            compiled = compile(code, "workflows.md", "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            running = eval(compiled, names)
            if inspect.iscoroutine(running):
                await running
            live = live or names["episodes"]
        sums = [
            {"question": "2 + 2?", "answer": "4"},
            {"question": "9 - 5?", "answer": "5"},
        ]
        two = await run_workflows(lambda: names["Solve"](client), sums, n_samples=8, n_parallel=64)
        await client.close()
    assert [(e.id, e.is_correct, e.metrics) for e in live] == [
        (f"sum:{n}", True, {"solver_acc": 1.0}) for n in range(4)
    ]
    assert sorted(names["episodes"], key=lambda e: e.id) == live
    assert [row["advantage"] for row in names["rows"]] == [0.0] * 4
    rows = to_token_rows(two, mask_reasons={TerminationReason.TIMEOUT})
    assert [row["reward"] for row in rows] == [1.0] * 8 + [0.0] * 8
    assert {row["group_id"].partition("@")[0] for row in rows} == {"0:solver", "1:solver"}
    for reason in TerminationReason:
        assert f"`{reason.name}`" in document
    for name in inspect.signature(run_workflows).parameters:
        assert name in document or name in ("timeout", "workflow_args", "kwargs")


@pytest.mark.slow
async def test_training(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The blocks of docs/training.md are one program, and it gives what the text says."""
    document = (ROOT / "docs" / "training.md").read_text()
    monkeypatch.chdir(tmp_path)

    def reply(request: dict[str, Any]) -> Reply:
        sure = len(request["messages"]) > 1
        right = request["messages"][0]["content"] != "9 - 5?"
        return Reply("Yes, it is 4 or 6." if sure and right else "It is 5.")

    trained: list[tuple[Any, ...]] = []
    names: dict[str, Any] = {
        "trainer": SimpleNamespace(step=3),
        "train_on": lambda *row: trained.append(row),
    }
    with ModelServer(reply) as server:
        monkeypatch.setenv("OPENAI_BASE_URL", server.base_url)
        monkeypatch.setenv("OPENAI_API_KEY", "none-needed")
        assert len(blocks("docs/training.md")) == 9
        await run_page("docs/training.md", names)
        await names["client"].close()

    group: TrajectoryGroup = names["group"]
    assert len(group) == 8
    assert all(member.warnings == [] for member in group)
    lines = capsys.readouterr().out.splitlines()
    assert lines[:3] == [str([1.0] * 8), str([0.0] * 8), "[]"]
    assert len(lines) == 4 + 8 + 1  # a row for each trajectory, and none dropped
    assert len(trained) == len(names["rows"]) == len(names["fresh"]) == 8
    ids, mask, logprobs, advantage = trained[0]
    assert 0 < sum(mask) < len(ids) == len(mask) == len(logprobs)
    assert advantage == 0.0
    assert lines[-1] == f"{[0.1] * 8} 0.5"
    groups: list[TrajectoryGroup] = names["groups"]
    assert [len(each) for each in groups] == [8, 8, 8]
    assert {each.id for each in groups} == {group.id, "product", "difference"}
    # Whether a late reward is in the file too is a matter of time.
    rewards = {each.id: [member.rewards["correct"] for member in each] for each in groups}
    assert rewards == {group.id: [1.0] * 8, "product": [1.0] * 8, "difference": [0.0] * 8}
    for name in re.findall(r"`(\w+)`", document[document.index("Each row also has") :])[:12]:
        assert name in names["rows"][0]


def test_training_has_every_reason() -> None:
    """The table of what is dropped in docs/training.md quotes the reasons that there are."""
    document = (ROOT / "docs" / "training.md").read_text()
    table = document[document.index("| what is dropped") :].partition("\n\n")[0]
    quoted = [
        part for line in table.splitlines()[2:] for part in line.split("|")[1].split("`")[1::2]
    ]
    source = "\n".join(map(inspect.getsource, (gate, tokens, trajectory)))
    source += f"\n_ = {sentences.NOT_ASKED()!r}"
    said = " ".join(json.dumps(node) for node in _texts(source))
    assert [text for text in quoted if text not in said] == []
    reasons = {text for text in _texts(source) if text.startswith(("its ", "the server", "masked"))}
    unknown = [text for text in reasons if not any(part in text for part in quoted)]
    assert unknown == []
    assert len(reasons) > 6


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", *DOCS, *READMES])
def test_links(name: str) -> None:
    """What the documents link to is there, and so is the heading."""
    page = ROOT / name
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text()):
        if "://" not in link:
            path, _, heading = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            anchors = re.findall(r"^#+ (.+)$", target.read_text(), re.M) if heading else []
            names = [re.sub(r"[^\w -]", "", text.lower()).replace(" ", "-") for text in anchors]
            assert not heading or heading in names, link


def test_the_paths_of_model_apis() -> None:
    """docs/model-apis.md names each module of an API, by paths that lead to it."""
    document = (ROOT / "docs" / "model-apis.md").read_text()
    table = document[document.index("| API |") :].partition("\n\n")[0]
    modules: set[str] = set()
    for line in table.splitlines()[2:]:
        paths, provider, module = (cell.split("`")[1::2] for cell in line.split("|")[2:5])
        modules |= set(module)
        for path in paths:
            api = api_of(path)
            assert api is not None
            assert type(api).__module__ == f"otel_rollout.wire.{module[0]}"
            assert [api.provider_of(path)] in (provider, [None])
    assert modules == {type(api).__module__.rpartition(".")[2] for api in APIS}


def test_every_exporter_is_a_trainer() -> None:
    """docs/trainers.md leads to each exporter that there is."""
    document = (ROOT / "docs" / "trainers.md").read_text()
    for project in (ROOT / "exporters").glob("*/pyproject.toml"):
        assert f"(../exporters/{project.parent.name}/README.md)" in document


def test_the_comparison_of_the_readme() -> None:
    """It is the table of docs/comparison.toml, in which each cell has its evidence."""
    tomllib = pytest.importorskip("tomllib", reason="Python 3.10 cannot read the file")
    comparison = tool("comparison")
    text = (ROOT / "docs" / "comparison.toml").read_text()
    readme = (ROOT / "README.md").read_text()
    assert comparison.written(readme, tomllib.loads(text)) == readme
    with pytest.raises(ValueError, match=r"'trains': no evidence for ours"):
        comparison.table(tomllib.loads(text.replace('"exporters/"]', '""]')))
    with pytest.raises(ValueError, match=r"'trains': expected cells"):
        comparison.table(tomllib.loads(text.replace('verifiers = ["prime', 'verifier = ["prime')))


def test_the_table_of_the_newest_versions() -> None:
    """The page's table is made of docs/compatibility.json, which has each part on each Python."""
    newest = tool("newest")
    results = json.loads((ROOT / "docs" / "compatibility.json").read_text())
    page = (ROOT / "docs" / "versions.md").read_text()
    assert newest.paged(page, results) == page
    tried = [(entry["part"], entry["python"]) for entry in results]
    assert tried == [(part, python) for part in newest.PARTS for python in newest.PYTHONS]
    for entry in results:
        assert entry["passed"]
        assert set(entry["packages"]) <= set(newest.shown(entry["part"]))
    failed = {**results[0], "passed": 3, "failed": ["tests.a"]}
    assert "3 tests passed, 1 failed" in newest.table([failed])
    again = {**results[0], "passed": 3, "again": ["tests.a"]}
    assert "3 tests passed, 1 only when run again |" in newest.table([again])
    refused = {**results[0], "refused": "no"}
    assert "cannot be installed together" in newest.table([refused])


def test_the_advice_of_the_page_about_errors() -> None:
    """Each message of docs/errors.md is a warning's, with its advice; each class is there."""
    page = (ROOT / "docs" / "errors.md").read_text()
    plain = re.sub(r"\[[^]]*\]\(([\w-]+\.md)\)", r"docs/\1", page)
    known = [value for value in vars(sentences).values() if isinstance(value, sentences.Sentence)]
    rows = re.findall(r"^\| `(.+?)` \| (.+) \|$", plain.partition("## Exceptions")[0], re.M)
    assert len(rows) > 8
    for message, advice in rows:
        words = re.compile(".*".join(map(re.escape, re.split(r" ?… ?", message))))
        assert {each.advice for each in known if words.search(each.words)} == {advice}
    for name in vars(otel_rollout)["__all__"]:
        assert not name.endswith(("Error", "Warning")) or f"`{name}`" in page, name


def test_every_page_that_is_named_in_code_exists() -> None:
    """What docstrings, errors and READMEs call `docs/...` is there."""
    folders = ("otel_rollout", "exporters", "examples", "tools", "benchmarks", "tests")
    texts = [path for each in folders for path in (ROOT / each).rglob("*.*")]
    for path in [*texts, ROOT / "CHANGELOG.md", ROOT / "CONTRIBUTING.md", ROOT / "Makefile"]:
        is_ours = path.is_file() and "node_modules" not in path.parts
        if is_ours and path.suffix in (".py", ".md", ".pyi", ""):
            for page in re.findall(r"(?<![\w/.])docs/[\w/-]+\.\w+", path.read_text()):
                assert (ROOT / page).exists(), f"{path}: {page}"


def test_every_public_name_is_in_the_reference() -> None:
    """The pages of the reference have each name that users import, and no other."""
    pages = "".join(path.read_text() for path in (ROOT / "docs" / "reference").glob("*.md"))
    named = re.findall(r"^::: (\S+)$", pages, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {f"otel_rollout.{name}" for name in vars(otel_rollout)["__all__"]} <= set(named)
    for name in named:
        room, _, attribute = name.rpartition(".")
        assert hasattr(importlib.import_module(room), attribute), name


def test_every_page_has_its_place_on_the_site() -> None:
    """What `make docs` refuses is found here too: a page that nothing leads to."""
    site = (ROOT / "mkdocs.yml").read_text()
    assert [page for page in DOCS if f": {page.removeprefix('docs/')}\n" not in site] == []


def _texts(source: str) -> list[str]:
    """The texts in the code, of f-strings their fixed parts; no docstrings."""
    tree = ast.parse(source)
    alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    return [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone
    ]


def test_rules_for_side_calls() -> None:
    """The blocks about rules configure them, and judge spans that were recorded."""
    exec(block("docs/side-calls.md", "def suggestion"), {})
    provider = otel_rollout.configure()
    kept = InMemorySpanExporter()
    provider.add_span_processor(SimpleSpanProcessor(kept))
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    asked: list[Any] = [("go", [tool]), ("[SUGGESTION MODE: ...]", []), ("other words", [])]
    with (
        ModelServer() as server,
        openai.OpenAI(base_url=server.base_url, api_key="none-needed") as client,
        rollout("agent") as trajectory,
    ):
        for text, tools in asked:
            client.chat.completions.create(
                model="my-policy",
                messages=[{"role": "user", "content": text}],
                **({"tools": tools} if tools else {}),
            )
    said = [completion.side_call for completion in trajectory.completions]
    assert said == [None, "it suggests what the user may type", None]
    names: dict[str, Any] = {"spans": kept.get_finished_spans()}
    exec(block("docs/side-calls.md", "with_side_calls(())"), names)
    found = [
        [c.side_call is None for c in names[n].completions] for n in ("judged", "nothing_left_out")
    ]
    assert found == [[True, False, False], [True, True, True]]


def test_each_promise_of_the_threat_model_has_its_test():
    """The page names tests that exist."""
    page = (ROOT / "docs" / "threat-model.md").read_text()
    named = re.findall(r"`(tests/\S+\.py)::(\w+)`", page)
    assert len(named) == page.count("\n* ")
    for path, name in named:
        assert re.search(rf"^(async )?def {name}\(", (ROOT / path).read_text(), re.MULTILINE), name
