"""`otel-rollout gateway --workers`: several processes on one port record the same rollouts."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import reconstruct
from otel_rollout import semconv as sc
from otel_rollout.command import main
from otel_rollout.otlp import read
from otel_rollout.testing import Raw
from tests.gateway.programs import HARNESS, command
from tests.kit.outside import send
from tests.kit.recording import Clients

GROUP = {"name": "agent", "group_id": "g", "group_size": 4}


def children(pid: int) -> set[int]:
    """The workers of a gateway; `multiprocessing` has one process more, which tracks resources."""
    found = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {
        int(each)
        for each in found
        if b"resource_tracker" not in Path(f"/proc/{each}/cmdline").read_bytes()
    }


async def begun(url: str, sample: int) -> Any:
    answered = await send(f"{url}/rollouts", {**GROUP, "sample_index": sample}, **HARNESS)
    assert answered.status == 201, answered.body
    return answered.json()


async def turns(base_url: str, count: int) -> list[str]:
    """A conversation whose calls come over connections of their own; the replies' ids."""
    messages: list[Any] = [{"role": "user", "content": "begin"}]
    ids: list[str] = []
    while len(ids) < count:
        try:
            reply = await send(f"{base_url}/chat/completions", {"model": "m", "messages": messages})
        except (OSError, asyncio.IncompleteReadError):
            continue  # as clients do: the worker was killed
        if reply.status == 200 and reply.whole:
            ids.append(reply.json()["id"])
            messages += [reply.json()["choices"][0]["message"], {"role": "user", "content": "on"}]
    return ids


async def stop(process: asyncio.subprocess.Process) -> str:
    process.send_signal(signal.SIGTERM)
    _, said = await asyncio.wait_for(process.communicate(), 60)
    return said.decode()


async def test_workers_take_turns_on_a_rollout(clients: Clients, tmp_path: Path):
    """Each has calls of each conversation, and what is rebuilt is whole, with its reward."""
    spans = tmp_path / "spans.jsonl"
    process, url = await command(clients.serve(), "--workers", "2", "--spans", str(spans))
    rollouts = [await begun(url, sample) for sample in range(2)]
    assert all(each["openai_base_url"].startswith(url) for each in rollouts)
    ids = await asyncio.gather(*(turns(each["openai_base_url"], 8) for each in rollouts))
    for each in rollouts:
        address = f"{url}/rollouts/{each['id']}"
        assert (await send(address, {"reward": 1}, "PATCH", **HARNESS)).status == 200
        assert (await send(address, None, "DELETE", **HARNESS)).status == 200
        assert (await send(address, None, "DELETE", **HARNESS)).status == 404
        assert (await send(address, None, "DELETE", authorization="Bearer no")).status == 401
    await stop(process)
    assert process.returncode == 0
    trajectories = reconstruct(read(spans))
    assert sorted(t.id for t in trajectories) == sorted(each["id"] for each in rollouts)
    for each, own in zip(rollouts, ids, strict=True):
        (trajectory,) = (t for t in trajectories if t.id == each["id"])
        assert trajectory.warnings == []
        assert trajectory.status == "complete"
        assert trajectory.reward == 1
        assert [completion.id for completion in trajectory.histories[0].completions] == own
        assert len(trajectory.histories) == 1
    assert len({record.text(sc.EXCHANGE_PROCESS) for record in read(spans)} - {None}) >= 2


async def test_workers_know_the_version(clients: Clients, tmp_path: Path):
    """Each call of each worker has the version that was set last, by whichever of them."""
    spans = tmp_path / "spans.jsonl"
    process, url = await command(clients.serve(), "--workers", "2", "--spans", str(spans))
    one, other = [await begun(url, sample) for sample in range(2)]

    async def ask() -> None:
        for each in (one, other):
            await turns(each["openai_base_url"], 4)

    await ask()
    for address, version in ((f"/rollouts/{one['id']}", "a"), ("/rollouts", 2), ("/rollouts", 3)):
        answer = await send(url + address, {"policy_version": version}, "PATCH", **HARNESS)
        assert answer.status == 200, answer.body
        await ask()
    for each in (one, other):
        await send(f"{url}/rollouts/{each['id']}", None, "DELETE", **HARNESS)
    await stop(process)
    found = {t.id: t for t in reconstruct(read(spans))}
    versions = [[c.policy_version for c in found[each["id"]].completions] for each in (one, other)]
    assert versions == [
        [None] * 4 + ["a"] * 4 + [2] * 4 + [3] * 4,
        [None] * 8 + [2] * 4 + [3] * 4,
    ]
    assert [found[each["id"]].policy_version for each in (one, other)] == ["a", 2]


async def test_a_worker_takes_a_refusal_for_one_request(clients: Clients, tmp_path: Path):
    """Where each fourth request for token ids is refused, all others have them."""
    spans, asked = tmp_path / "spans.jsonl", list[bool]()

    def reply(body: dict[str, Any]) -> Any:
        asked.append("return_token_ids" in body)
        is_refused = asked[-1] and sum(asked) % 4 == 0
        return Raw(400, b'{"error": {"message": "not JSON compliant"}}') if is_refused else "Hi"

    server = clients.serve(reply, token_ids=False, logprobs=False)
    options = "--workers", "2", "--request-token-ids", "--spans", str(spans)
    process, url = await command(server, *options)
    rollout = await begun(url, 0)
    await turns(rollout["openai_base_url"], 24)
    await send(f"{url}/rollouts/{rollout['id']}", None, "DELETE", **HARNESS)
    await stop(process)
    assert asked.count(True) == 24
    (trajectory,) = reconstruct(read(spans))
    assert sum(bool(each.token_ids) for each in trajectory.completions) == 18
    (warning,) = trajectory.warnings
    assert warning.startswith("6 replies have no token ids: the server refused the fields")


@pytest.mark.slow
async def test_a_worker_that_is_killed_loses_nothing_in_silence(clients: Clients, tmp_path: Path):
    """The others go on, another takes its place, and what it had not sent is a warning."""
    spans = tmp_path / "spans.jsonl"
    process, url = await command(clients.serve(), "--workers", "2", "--spans", str(spans))
    rollouts = [await begun(url, sample) for sample in range(4)]
    asking = [asyncio.create_task(turns(each["openai_base_url"], 40)) for each in rollouts]
    await asyncio.sleep(0.5)
    before = children(process.pid)
    os.kill(min(before), signal.SIGKILL)
    ids = await asyncio.gather(*asking)
    while len(children(process.pid)) < 2:
        await asyncio.sleep(0.1)
    for each in rollouts:
        answered = await send(f"{url}/rollouts/{each['id']}", None, "DELETE", **HARNESS)
        assert answered.status == 200
    assert "another one takes its place" in await stop(process)
    for each, own in zip(rollouts, ids, strict=True):
        (trajectory,) = (t for t in reconstruct(read(spans)) if t.id == each["id"])
        recorded = {completion.id for completion in trajectory.completions}
        assert recorded <= {*own} | {None}
        assert recorded.issuperset(own) or trajectory.warnings
        trained = {id_ for row in trajectory.token_sequences() for id_ in row.completion_ids}
        assert trained <= recorded


_FAILING = """
import os, sys
if "--multiprocessing-fork" in sys.orig_argv:
    tries = os.environ["TRIES"]
    os.close(os.open(os.path.join(tries, str(os.getpid())), os.O_CREAT))
    for number in range(int(os.environ["FAIL"])):
        try:
            os.mkdir(os.path.join(tries, f"failed-{number}"))  # each by one worker alone
        except FileExistsError:
            continue
        os._exit(3)
"""
"""`sitecustomize`: as many workers as `FAIL` says cannot start."""


@pytest.mark.slow
@pytest.mark.parametrize("fail", [3, 1000])
async def test_workers_that_cannot_start(clients: Clients, tmp_path: Path, fail: int):
    """They are replaced after growing pauses; where none can ever, the gateway ends."""
    (tmp_path / "sitecustomize.py").write_text(_FAILING)
    tries = tmp_path / "tries"
    tries.mkdir()
    environment = {"PYTHONPATH": str(tmp_path), "TRIES": str(tries), "FAIL": str(fail)}
    spans = str(tmp_path / "spans.jsonl")
    process, url = await command(clients.serve(), "--workers", "2", "--spans", spans, **environment)
    if fail == 3:
        rollout = await begun(url, 0)
        await turns(rollout["openai_base_url"], 1)
        while len(started(tries)) < 5:  # the place of the third that failed is taken
            await asyncio.sleep(0.1)
        said = await stop(process)
        assert process.returncode == 0
    else:
        said = (await asyncio.wait_for(process.communicate(), 120))[1].decode()
        assert process.returncode == 1
        assert "gateway: no worker could serve: see their errors above" in said
        assert len(started(tries)) <= 6  # two begin at a time
    assert said.count("another one takes its place in ") == min(fail, 4)
    assert "takes its place in 0.4 seconds" in said
    assert "takes its place in 1.6 seconds" in said


def started(tries: Path) -> list[Path]:
    return [each for each in tries.iterdir() if each.name.isdecimal()]


@pytest.mark.parametrize("options", [[], ["--out", "t.jsonl", "--spans", "s.jsonl"]])
def test_workers_need_spans(options: list[str], capsys: Any, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    with pytest.raises(SystemExit):
        main(["gateway", "--upstream", "http://127.0.0.1:1", "--workers", "2", *options])
    assert "they need --spans, or OTLP" in capsys.readouterr().err
