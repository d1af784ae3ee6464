"""Rollouts of programs without Python: begun, rewarded and ended over HTTP."""

from __future__ import annotations

import asyncio
import signal
import socket
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter, reconstruct
from otel_rollout.command import main
from otel_rollout.command.recording import gateway_options
from otel_rollout.gateway import LIMITS, serve
from otel_rollout.gateway.rollout_parts import HeldRollouts
from otel_rollout.otlp import read
from otel_rollout.record import Options
from otel_rollout.testing import Reply
from tests.gateway.programs import HARNESS, SECRET, Serve, command
from tests.kit.conversations import ASK
from tests.kit.function_calls import calls_of_ours
from tests.kit.outside import send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
BEGIN = {
    "name": "agent",
    "task_id": "t1",
    "group_id": "g",
    "group_run": "1",
    "sample_index": 3,
    "group_size": 4,
    "policy_version": 7,
    "metadata": {"a": [1]},
}


async def test_a_rollout_over_http(captured: Recording, clients: Clients, gateway_to: Serve):
    """Begun, asked in three ways, rewarded, ended: the trajectory has it all."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    begun = await send(gateway.url + "/rollouts", BEGIN, **HARNESS)
    assert begun.status == 201
    said = begun.json()
    key = said["environment"]["OPENAI_API_KEY"]
    assert said["openai_base_url"] == f"{gateway.url}/r/{said['token']}/v1"
    assert said["environment"]["ANTHROPIC_BASE_URL"] == said["anthropic_base_url"]
    assert key == f"or-{said['token']}"
    await send(said["openai_base_url"] + "/chat/completions", CHAT)
    await send(said["anthropic_base_url"] + "/v1/messages", {**CHAT, "max_tokens": 9})
    await send(f"{gateway.url}/v1/chat/completions", CHAT, authorization=f"Bearer {key}")
    address = f"{gateway.url}/rollouts/{said['id']}"
    assert (await send(address, {"reward": 0.5}, "PATCH", **HARNESS)).json()["reward"] == 0.5
    assert (await send(address, {"reward": 1, "name": "style"}, "PATCH", **HARNESS)).status == 200
    assert (await send(address, {"output": [1]}, "DELETE", **HARNESS)).status == 200
    assert (await send(address, None, "DELETE", **HARNESS)).status == 404
    refused = await send(said["openai_base_url"] + "/chat/completions", CHAT)
    assert refused.status == 401
    trajectory = captured.trajectory
    assert trajectory.id == said["id"]
    assert {name: getattr(trajectory, name) for name in BEGIN} == BEGIN
    assert len(trajectory.completions) == 3
    assert trajectory.reward == 0.5
    assert float(trajectory.rewards["style"]) == 1
    assert trajectory.output == [1]
    assert trajectory.status == "complete"
    assert trajectory.warnings == []


async def test_the_version_of_a_rollout(captured: Recording, clients: Clients, gateway_to: Serve):
    """It is that of each call as it is made, whether it was set for one rollout or for all."""
    gateway = await gateway_to(clients.serve("Hello").base_url)
    rollouts = gateway.url + "/rollouts"
    begun = [
        (await send(rollouts, options, **HARNESS)).json()
        for options in ({}, {"policy_version": "v1"}, {"policy_version": 0})
    ]

    async def ask() -> None:
        for each in begun:
            await send(each["openai_base_url"] + "/chat/completions", CHAT)

    await ask()
    first = f"{rollouts}/{begun[0]['id']}"
    changed = await send(first, {"policy_version": 1, "reward": 2}, "PATCH", **HARNESS)
    assert changed.json() == {"id": begun[0]["id"], "reward": 2.0, "policy_version": 1}
    await ask()
    changed = await send(rollouts, {"policy_version": 3}, "PATCH", **HARNESS)
    assert (changed.status, changed.json()) == (200, {"policy_version": 3})
    begun += [(await send(rollouts, options, **HARNESS)).json() for options in ({}, {"name": "n"})]
    await send(f"{rollouts}/{begun[-1]['id']}", {"policy_version": "own"}, "PATCH", **HARNESS)
    await ask()
    for each in begun:
        await send(f"{rollouts}/{each['id']}", None, "DELETE", **HARNESS)
    found = {t.id: t for t in captured.trajectories}
    versions = [[c.policy_version for c in found[each["id"]].completions] for each in begun]
    assert versions == [[None, 1, 3], ["v1", "v1", 3], [0, 0, 3], [3], ["own"]]
    assert [found[each["id"]].policy_version for each in begun] == [1, "v1", 0, 3, 3]


@pytest.mark.parametrize("version", [True, 1.5, [1], {}, None])
async def test_what_is_no_version(
    captured: Recording, clients: Clients, gateway_to: Serve, version: Any
):
    """The error names the member, what came and what is expected; nothing changes."""
    gateway = await gateway_to(clients.serve("Hello").base_url)
    rollouts, asked = gateway.url + "/rollouts", {"policy_version": version}
    begun = (await send(rollouts, {"policy_version": 5}, **HARNESS)).json()
    if version is not None:
        answer = await send(rollouts, asked, **HARNESS)
        assert answer.status == 400
        assert "policy_version" in answer.json()["error"]["message"]
    for address in (rollouts, f"{rollouts}/{begun['id']}"):
        answer = await send(address, asked, "PATCH", **HARNESS)
        assert answer.status == 400
        text = f"policy_version: expected a text or an integer, got {version!r}"
        assert answer.json()["error"]["message"] == text
        assert (await send(address, {}, "PATCH", **HARNESS)).status == 400
        token = {"authorization": f"Bearer or-{begun['token']}"}
        assert (await send(address, {"policy_version": 1}, "PATCH", **token)).status in (401, 403)
    await send(f"{rollouts}/{begun['id']}", None, "DELETE", **HARNESS)
    assert captured.trajectory.policy_version == 5


async def test_a_version_that_changes_in_a_call(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """The call has both, so that it is known to be sampled by two."""
    gateway = await gateway_to(clients.serve(Reply("Hello", delay=0.5)).base_url)
    rollouts = gateway.url + "/rollouts"
    begun = (await send(rollouts, {"policy_version": 5}, **HARNESS)).json()
    asking = asyncio.create_task(send(begun["openai_base_url"] + "/chat/completions", CHAT))
    await asyncio.sleep(0.2)
    await send(rollouts, {"policy_version": 6}, "PATCH", **HARNESS)
    await asking
    await send(f"{rollouts}/{begun['id']}", None, "DELETE", **HARNESS)
    (call,) = captured.trajectory.completions
    assert (call.policy_version, call.exchange.last_policy_version) == (5, 6)


async def test_a_rollout_that_is_left_ends(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """After its time without a call, as a timeout; one that failed says how."""
    gateway = await gateway_to(clients.serve().base_url)
    await send(gateway.url + "/rollouts", {"timeout_seconds": 0.1}, **HARNESS)
    while not captured.trajectories:
        await asyncio.sleep(0.01)
    assert captured.trajectory.termination_reason == "timeout"
    begun = (await send(gateway.url + "/rollouts", {}, **HARNESS)).json()
    await send(
        f"{gateway.url}/rollouts/{begun['id']}", {"error": "exit status 1"}, "DELETE", **HARNESS
    )
    failed = captured.trajectories[1]
    assert failed.status == "error"
    assert failed.error is not None
    assert failed.error["message"] == "exit status 1"


async def test_stopping_the_gateway_ends_its_rollouts(captured: Recording, clients: Clients):
    """Those that were not ended are errors that say so."""
    async with serve(clients.serve().base_url, secret=SECRET) as gateway:
        await send(gateway.url + "/rollouts", {}, **HARNESS)
    assert captured.trajectory.error is not None
    assert captured.trajectory.error["message"] == "the gateway was stopped"


async def test_rollouts_are_bounded(captured: Recording, clients: Clients, gateway_to: Serve):
    """A harness that ends none gets 429; one that ends some begins others."""
    gateway = await gateway_to(clients.serve().base_url, most_rollouts=2)
    begun = [await send(gateway.url + "/rollouts", {}, **HARNESS) for _ in range(3)]
    assert [answer.status for answer in begun] == [201, 201, 429]
    assert "2 rollouts are open" in begun[2].json()["error"]["message"]
    await send(f"{gateway.url}/rollouts/{begun[0].json()['id']}", None, "DELETE", **HARNESS)
    assert (await send(gateway.url + "/rollouts", {}, **HARNESS)).status == 201


async def test_stopping_costs_each_rollout_the_same(captured: Recording):
    """Function calls of ours for each of many open rollouts are as many as for each of a few."""

    def ended(count: int) -> float:
        held = HeldRollouts(most=10, idle_seconds=60)
        for _ in range(count):
            held.begin(Options(name="agent"), 60)
        return calls_of_ours(held.close) / count

    assert ended(10) < 200
    assert ended(200) < 1.1 * ended(10)
    assert len(captured.trajectories) == 220


WRONG: dict[str, tuple[int, str, str, Any]] = {
    "no JSON": (400, "POST", "/rollouts", b"{"),
    "no object": (400, "POST", "/rollouts", [1]),
    "unknown member": (400, "POST", "/rollouts", {"nmae": "x"}),
    "wrong type": (400, "POST", "/rollouts", {"sample_index": "x"}),
    "no time": (400, "POST", "/rollouts", {"timeout_seconds": 0}),
    "no such rollout": (404, "PATCH", "/rollouts/abc", {"reward": 1}),
    "no such method": (405, "PUT", "/rollouts", {}),
}


@pytest.mark.parametrize("wrong", WRONG)
async def test_a_wrong_request_is_told(clients: Clients, gateway_to: Serve, wrong: str):
    """With a status, and a sentence in the error."""
    status, method, path, body = WRONG[wrong]
    gateway = await gateway_to(clients.serve().base_url)
    answer = await send(gateway.url + path, body, method, **HARNESS)
    assert answer.status == status
    assert answer.json()["error"]["message"]


async def test_a_reward_is_a_number(captured: Recording, clients: Clients, gateway_to: Serve):
    """What is none is refused, and the rollout has no reward."""
    gateway = await gateway_to(clients.serve().base_url)
    begun = (await send(gateway.url + "/rollouts", {}, **HARNESS)).json()
    address = f"{gateway.url}/rollouts/{begun['id']}"
    for body in ({}, {"reward": "much"}, {"reward": None}, {"reward": 1, "to": 2}):
        assert (await send(address, body, "PATCH", **HARNESS)).status == 400
    await send(address, None, "DELETE", **HARNESS)
    assert captured.trajectory.reward is None


async def test_with_a_secret_it_is_asked_for(clients: Clients, gateway_to: Serve):
    """By every control route but those that describe them."""
    gateway = await gateway_to(clients.serve().base_url, secret="s3cret")
    url = gateway.url + "/rollouts"
    assert (await send(url, {})).status == 401
    assert (await send(url, {}, authorization="Bearer s3cre")).status == 401
    assert (await send(url, {}, authorization="Basic s3cret")).status == 401
    assert (await send(url, {}, authorization="Bearer s3cret")).status == 201
    assert (await send(gateway.url + "/docs", None, "GET")).status == 200


async def test_without_a_secret_one_is_made(clients: Clients, gateway_to: Serve):
    """Nobody on this machine begins or rewards a rollout without it: the agent is here, too."""
    gateway = await gateway_to(clients.serve().base_url, secret=None)
    url = gateway.url + "/rollouts"
    harness = {"authorization": f"Bearer {gateway.made_secret}"}
    begun = (await send(url, {}, **harness)).json()
    address = f"{url}/{begun['id']}"
    agents = {"authorization": f"Bearer or-{begun['token']}"}
    for headers in (
        {},
        {"authorization": "Bearer "},
        {"authorization": f"Bearer {begun['token']}"},
    ):
        assert (await send(url, {}, **headers)).status == 401
        assert (await send(address, {"reward": 1000}, "PATCH", **headers)).status == 401
        assert (await send(address, None, "DELETE", **headers)).status == 401
    assert (await send(address, {"reward": 1000}, "PATCH", **agents)).status == 403
    assert (await send(address, {"reward": 1}, "PATCH", **harness)).json()["reward"] == 1
    assert (await gateway_to(clients.serve().base_url)).made_secret is None


HOSTS = ["evil.example", "evil.example:{port}", "[::1].evil.example", "127.0.0.1.evil.example", ""]


@pytest.mark.parametrize("host", HOSTS)
async def test_a_request_under_another_name_is_refused(
    clients: Clients, gateway_to: Serve, host: str
):
    """DNS rebinding: a name that was pointed at this machine opens no control route."""
    gateway = await gateway_to(clients.serve().base_url)
    port = gateway.url.rpartition(":")[2]
    answer = await send(gateway.url + "/rollouts", {}, host=host.format(port=port), **HARNESS)
    assert answer.status in (400, 403)


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "LOCALHOST"]
)
async def test_names_of_this_machine_are_known(clients: Clients, gateway_to: Serve, host: str):
    """Another address than this machine's has names that only its network knows."""
    gateway = await gateway_to(clients.serve().base_url)
    port = gateway.url.rpartition(":")[2]
    answer = await send(gateway.url + "/rollouts", {}, host=host.format(port=port), **HARNESS)
    assert answer.status == 201
    gateway = await gateway_to(clients.serve().base_url, host="0.0.0.0")
    assert (await send(gateway.url + "/rollouts", {}, host="gateway", **HARNESS)).status == 201


@pytest.mark.parametrize("origin", ["http://evil.example", "null", "http://127.0.0.1:1", "{host}"])
async def test_a_web_page_of_another_site_gets_no_answer(
    captured: Recording, clients: Clients, gateway_to: Serve, origin: str
):
    """At no route, neither with the secret nor with a token."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    begun = (await send(gateway.url + "/rollouts", {}, **HARNESS)).json()
    given = {"origin": origin.format(host=gateway.url.partition("://")[2])}
    chat = begun["openai_base_url"] + "/chat/completions"
    assert (await send(gateway.url + "/rollouts", {}, **given, **HARNESS)).status == 403
    assert (await send(gateway.url + "/docs", None, "GET", **given)).status == 403
    assert (await send(chat, CHAT, **given)).status == 403
    assert server.exchanges == []
    own = {"origin": gateway.url}
    assert (await send(gateway.url + "/docs", None, "GET", **own)).status == 200


async def test_no_web_page_can_send_it(clients: Clients, gateway_to: Serve):
    """A browser sends without asking only what is no JSON."""
    gateway = await gateway_to(clients.serve().base_url)
    answer = await send(gateway.url + "/rollouts", {}, content_type="text/plain", **HARNESS)
    assert answer.status == 415


async def test_it_describes_itself(clients: Clients, gateway_to: Serve):
    """As OpenAPI, and as a page that needs nothing from elsewhere."""
    gateway = await gateway_to(clients.serve().base_url)
    described = (await send(gateway.url + "/openapi.json", None, "GET")).json()
    assert described["paths"].keys() == {"/rollouts", "/rollouts/{id}"}
    page = (await send(gateway.url + "/docs", None, "GET")).body.decode()
    assert "POST /rollouts" in page
    assert "http" not in page.replace("over HTTP", "")
    properties = described["paths"]["/rollouts"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]["properties"]
    assert properties.keys() == {*BEGIN, "timeout_seconds"}


# --- the command


@pytest.mark.slow
async def test_the_command_prints_the_secret_that_it_makes(clients: Clients):
    """Beside its address, as the header that the control routes ask for."""
    process, url = await command(clients.serve("Hello"), OTEL_ROLLOUT_SECRET="")
    assert process.stdout is not None
    name, _, value = (await process.stdout.readline()).decode().strip().partition(": ")
    assert (await send(url + "/rollouts", {}, **{name: value})).status == 201
    assert (await send(url + "/rollouts", {})).status == 401
    process.terminate()
    _, said = await process.communicate()
    assert "set OTEL_ROLLOUT_SECRET, or name another variable with --secret-env" in said.decode()


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_the_command_serves_until_it_is_told(
    clients: Clients, tmp_path: Path, number: signal.Signals
):
    """Then it ends its rollouts, and trajectories and spans are in their files."""
    server = clients.serve("Hello")
    out, spans = tmp_path / "out.jsonl", tmp_path / "spans.jsonl"
    process, url = await command(
        server, "--out", str(out), "--spans", str(spans), "--api-key-env", "KEY", KEY="sk-key"
    )
    begun = (await send(url + "/rollouts", {"name": "agent"}, **HARNESS)).json()
    await send(begun["openai_base_url"] + "/chat/completions", CHAT)
    await send(f"{url}/rollouts/{begun['id']}", None, "DELETE", **HARNESS)
    left = (await send(url + "/rollouts", {"name": "left"}, **HARNESS)).json()
    process.send_signal(number)
    _, said = await process.communicate()
    assert process.returncode == 0
    assert said.decode() == f"-> {out} (trajectories), {spans} (spans)\n"
    live = {each.id: each for each in JsonlTrajectoryExporter.read(out)}
    assert live.keys() == {begun["id"], left["id"]}
    assert live[left["id"]].status == "error"
    assert {each.id: each for each in reconstruct(read(spans))} == live
    assert server.exchanges[0].request_headers["authorization"] == "Bearer sk-key"
    assert b"sk-key" not in spans.read_bytes() + out.read_bytes()


def test_the_command_says_what_is_wrong(capsys: pytest.CaptureFixture[str]):
    """A key that is not set, and an address that is none."""
    assert main(["gateway", "--upstream", "http://h", "--api-key-env", "NO_SUCH_KEY"]) == 1
    assert "NO_SUCH_KEY: this environment variable is not set" in capsys.readouterr().err
    assert main(["gateway", "--upstream", "h"]) == 1
    assert "expected the address of a model server" in capsys.readouterr().err


def test_others_need_the_secret_to_reach_it(capsys: pytest.CaptureFixture[str]):
    """Off this machine the command listens only where OTEL_ROLLOUT_SECRET, or another, is set."""
    assert main(["gateway", "--upstream", "http://h", "--host", "0.0.0.0"]) == 1
    assert "needs a secret" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("port", "said"),
    [(None, "cannot be used (Address already in use)"), (65_536, "0 (a free one)")],
)
def test_a_port_that_cannot_be_used_is_named(port: int | None, said: str, capsys: Any):
    """With the host, and what to do."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1] if port is None else port
        asked = ["gateway", "--upstream", "http://127.0.0.1:9/v1", "--port", str(port)]
        assert main(asked) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"otel-rollout: port {port}")
    assert said in printed
    assert "Errno" not in printed


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("BODY_SECONDS", "soon"),
        ("MAX_BODY_BYTES", "1.5"),
        ("MOST_ROLLOUTS", "0"),
        ("REQUEST_SECONDS", "inf"),
    ],
)
def test_a_limit_of_the_environment_that_is_none_is_named(
    name: str, value: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
):
    """With what was got and expected."""
    variable = f"OTEL_ROLLOUT_GATEWAY_{name}"
    monkeypatch.setenv(variable, value)
    assert main(["gateway", "--upstream", "http://127.0.0.1:9/v1", "--port", "0"]) == 1
    printed = capsys.readouterr().err
    assert printed.startswith(f"otel-rollout: {variable}: expected a")
    assert repr(value) in printed


def test_limits_of_the_environment_are_those_of_serve(monkeypatch: pytest.MonkeyPatch):
    """Each number that `serve` takes has a variable."""
    for number, (name, kind) in enumerate(LIMITS.items(), 1):
        monkeypatch.setenv(f"OTEL_ROLLOUT_GATEWAY_{name.upper()}", str(kind(number)))
    given = Namespace(host=None, renderer=None, allow_paths=None)
    assert gateway_options(given) == {name: n for n, name in enumerate(LIMITS, 1)}
    assert {"max_body_bytes", "body_seconds", "most_rollouts", "token_seconds"} <= LIMITS.keys()
