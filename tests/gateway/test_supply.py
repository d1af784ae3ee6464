"""Token in, token out: what a gateway with a renderer sends, and what is recorded of it."""

from __future__ import annotations

import asyncio
import itertools
import json
import signal
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

import otel_rollout
from otel_rollout import ConfigurationError, JsonlTrajectoryExporter, Trajectory, rollout
from otel_rollout.gateway import Gateway
from otel_rollout.gateway.supply import with_ids
from tests.gateway.programs import HARNESS, Serve, command
from tests.gateway.toy_server import ToyRenderer, ToyServer
from tests.kit.conversations import TOOLS, said, user
from tests.kit.outside import send
from tests.kit.recording import Clients, Recording
from tests.kit.templates import Message, Toy

THINKS: list[Message] = [
    {"content": f"a{number} 12", "reasoning_content": "hm"} for number in range(4)
]


def drifting(replies: Sequence[Message] = THINKS, **options: Any) -> ToyServer:
    """A server whose template drops reasoning, and merges digits."""
    toy = Toy(drops_reasoning=True, merges_digits=True)
    return ToyServer(toy, itertools.cycle(replies), **options)


async def ask(gateway: Gateway, messages: Sequence[Message], **more: Any) -> Message:
    """Ask through the gateway; the message of the reply."""
    url = gateway.base_url() + "/chat/completions"
    answer = await send(url, {"model": "m", "messages": list(messages), **more})
    assert answer.status == 200, answer.body
    if more.get("stream"):
        text = answer.body.decode().partition("data: ")[2].partition("\n")[0]
        message: Message = json.loads(text)["choices"][0]["delta"]
        return message
    message = answer.json()["choices"][0]["message"]
    assert isinstance(message, dict)
    return message


async def talk(gateway: Gateway, turns: int, first: str = "hi", **more: Any) -> list[Message]:
    """An agent that appends what it got, and a question; its messages."""
    messages = [user(first)]
    for turn in range(turns):
        reply = await ask(gateway, messages, **more)
        messages += [{"role": "assistant", **reply}, user(f"go on {turn}")]
    return messages


def rebuilt(recording: Recording) -> Trajectory:
    """The trajectory of the spans, which is equal to the live one."""
    (trajectory,) = otel_rollout.reconstruct(list(recording.spans))
    assert trajectory == recording.trajectory
    assert Trajectory.from_dict(trajectory.to_dict()) == trajectory
    return trajectory


@pytest.mark.parametrize("stream", [False, True], ids=["plain", "stream"])
@pytest.mark.parametrize("shows_prompts", [True, False], ids=["shown", "not shown"])
async def test_an_append_only_agent_merges(
    captured: Recording, clients: Clients, gateway_to: Serve, stream: bool, shows_prompts: bool
) -> None:
    """With a renderer each prompt begins with the ids before it, and what was sent is recorded."""
    model = drifting(shows_prompts=True)
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url, renderer=ToyRenderer(model.toy))
    with rollout("agent") as trajectory:
        reply = await ask(gateway, [user("hi")], stream=stream)
        model.shows_prompts = shows_prompts
        messages = [user("hi"), {"role": "assistant", **reply}, user("so?")]
        for _ in range(3):
            reply = await ask(gateway, messages, stream=stream)
            messages += [{"role": "assistant", **reply}, user("and?")]
    drift = trajectory.drift()
    assert (drift.continued, drift.merge_ratio) == (3, 1.0)
    assert len(trajectory.token_sequences()) == 1
    again = rebuilt(captured)
    for one, body in zip(again.completions, model.asked, strict=True):
        asked = body.get("input_ids", [])
        assert (one.supplied is None) == (not asked)
        if one.supplied is not None and one.supplied.prompt is not None:
            assert one.supplied.prompt.to_list() == asked == one.prompt_token_ids
            assert one.supplied.held + (one.supplied.new or 0) == len(asked)
    assert [one.supplied is None for one in again.completions] == [True, False, False, False]
    assert "input_ids" not in again.completions[1].request, "which is what the agent sent"


async def test_without_a_renderer_nothing_changes(
    captured: Recording, clients: Clients, gateway_to: Serve
) -> None:
    """The same agent without one drifts, and its bytes pass untouched."""
    model = drifting()
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url)
    body = b'{ "model": "m", "messages": [ {"role": "user", "content": "hi"} ] }'
    with rollout("agent") as trajectory:
        await send(gateway.base_url() + "/chat/completions", body)
        await talk(gateway, 3)
    assert server.exchanges[0].request == body
    assert not any("input_ids" in body for body in model.asked)
    assert trajectory.drift().merge_ratio == 0.0
    assert all(completion.supplied is None for completion in trajectory.completions)


@pytest.mark.parametrize("way", ["/tokenize", "/v1/chat/completions/render"])
async def test_the_model_server_renders(
    captured: Recording, clients: Clients, gateway_to: Serve, way: str
) -> None:
    """A server that can be asked for ids renders itself; its own drift does not matter."""
    model = drifting(renders=way)
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url, renderer="server")
    with rollout("agent") as trajectory:
        await talk(gateway, 4)
    assert trajectory.drift().merge_ratio == 1.0
    # The template itself, where nothing of a reply has drifted, gives the same ids.
    plain = Toy(ids=model.toy.ids)
    new = plain.prompt([user("go on 0")], 0)
    assert model.asked[1]["input_ids"][-len(new) :] == new


async def test_a_model_server_that_cannot_render(
    captured: Recording, clients: Clients, gateway_to: Serve
) -> None:
    """Where no endpoint renders, requests pass as they are."""
    model = drifting()
    gateway = await gateway_to(clients.serve(routes=model.routes()).base_url, renderer="server")
    with rollout("agent") as trajectory:
        await talk(gateway, 3)
    assert not any("input_ids" in body for body in model.asked)
    assert trajectory.drift().merge_ratio == 0.0


@pytest.mark.parametrize("change", ["edit", "tools", "model", "template", "prefill", "own ids"])
async def test_what_is_changed_is_not_supplied(
    captured: Recording, clients: Clients, gateway_to: Serve, change: str
) -> None:
    """Any edit, other tools, another model or template, and ids of the client's own: it passes."""
    model = drifting()
    renderer = ToyRenderer(model.toy)
    gateway = await gateway_to(clients.serve(routes=model.routes()).base_url, renderer=renderer)
    changes: dict[str, dict[str, Any]] = {
        "tools": {"tools": TOOLS},
        "model": {"model": "other"},
        "template": {"chat_template_kwargs": {"enable_thinking": False}},
        "own ids": {"input_ids": [1, 2]},
    }
    more = changes.get(change, {})
    with rollout("agent"):
        reply = await ask(gateway, [user("hi")])
        replayed = {"role": "assistant", **reply}
        if change == "edit":
            replayed = said("edited")
        messages = [user("hi"), replayed, user("so?")]
        if change == "prefill":
            messages.append(said("It is"))
        await ask(gateway, messages, **more)
    assert model.asked[1].get("input_ids") == more.get("input_ids")
    assert renderer.calls == 0
    assert all(completion.supplied is None for completion in captured.trajectory.completions)


async def test_what_a_client_drops_or_reformats_is_supplied_all_the_same(
    captured: Recording, clients: Clients, gateway_to: Serve
) -> None:
    """What the normalised form leaves out does not change a history: its ids are kept."""
    model = drifting()
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url, renderer=ToyRenderer(model.toy))
    with rollout("agent") as trajectory:
        reply = await ask(gateway, [user("hi")])
        parts = [{"type": "text", "text": reply["content"]}]
        await ask(gateway, [user("hi"), {"role": "assistant", "content": parts}, user("so?")])
    assert trajectory.drift().merge_ratio == 1.0
    assert not trajectory.drift().forks


async def test_sub_agents_at_once_have_a_history_each(
    captured: Recording, clients: Clients, gateway_to: Serve
) -> None:
    """Conversations that are interleaved in one rollout merge, each with itself."""
    model = drifting([{"content": "the same"}, {"content": "the same", "reasoning_content": "x"}])
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url, renderer=ToyRenderer(model.toy))
    with rollout("agent") as trajectory:
        await asyncio.gather(*(talk(gateway, 5, first=f"agent {n}") for n in range(4)))
    drift = trajectory.drift()
    assert (drift.continued, drift.merge_ratio) == (16, 1.0)
    assert len(trajectory.token_sequences()) == len(trajectory.histories) == 4


@pytest.mark.parametrize("status", [400, 422])
async def test_a_server_that_refuses_ids_is_asked_without(
    captured: Recording, clients: Clients, gateway_to: Serve, status: int
) -> None:
    """One request is sent again as it came; the next ones are not even tried."""
    model = drifting(refuses=status)
    renderer = ToyRenderer(model.toy)
    gateway = await gateway_to(clients.serve(routes=model.routes()).base_url, renderer=renderer)
    with rollout("agent") as trajectory:
        await talk(gateway, 4)
    assert ["input_ids" in body for body in model.asked] == [False, True, False, False, False]
    assert renderer.calls == 1
    assert [one.status for one in trajectory.completions] == ["complete"] * 4
    assert [one.exchange.attempts for one in rebuilt(captured).completions] == [1, 2, 1, 1]
    assert all(completion.supplied is None for completion in trajectory.completions)


async def test_a_refusal_of_something_else_is_the_clients(
    captured: Recording, clients: Clients, gateway_to: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """What is refused without the ids too is handed on as it came, and ids are still supplied."""
    model = drifting()
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url, renderer=ToyRenderer(model.toy))
    with rollout("agent"):
        messages = await talk(gateway, 1)
        model.refuses = 422
        server._routes["/v1/chat/completions"] = otel_rollout.testing.Raw(400, b'{"error": "no"}')
        url = gateway.base_url() + "/chat/completions"
        answer = await send(url, {"model": "m", "messages": messages})
    assert (answer.status, answer.body) == (400, b'{"error": "no"}')
    assert captured.trajectory.completions[1].status == "error"
    assert "supplies no token ids any more" not in caplog.text


async def test_a_server_that_ignores_ids_gets_none(
    captured: Recording, clients: Clients, gateway_to: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    """The ids of its prompts are others than those that were sent: that is seen, and said once."""
    model = drifting(takes_ids=False)
    server = clients.serve(routes=model.routes())
    gateway = await gateway_to(server.base_url, renderer=ToyRenderer(model.toy))
    with rollout("agent") as trajectory:
        await talk(gateway, 4)
    assert ["input_ids" in body for body in model.asked] == [False, True, False, False]
    assert caplog.text.count("supplies no token ids any more") == 1
    ignored = trajectory.completions[1]
    assert ignored.supplied is not None
    assert ignored.prompt_token_ids == model.toy.prompt(model.asked[1]["messages"], 2)


@pytest.mark.parametrize("wrong", ["raises", "None", "other ids"])
async def test_a_renderer_that_fails(
    captured: Recording, clients: Clients, gateway_to: Serve, wrong: str
) -> None:
    """A renderer that raises, cannot tell, or changes what is held: the request passes."""

    class Failing:
        def bridge_to_next_turn(self, *given: Any, tools: Any = None) -> Any:
            if wrong == "raises":
                raise ValueError("no")
            return None if wrong == "None" else [0, *given[0], *given[1]]

    model = drifting()
    gateway = await gateway_to(clients.serve(routes=model.routes()).base_url, renderer=Failing())
    with rollout("agent") as trajectory:
        await talk(gateway, 3)
    assert not any("input_ids" in body for body in model.asked)
    assert len(trajectory.completions) == 3


async def test_the_command(clients: Clients, tmp_path: Path) -> None:
    """`otel-rollout gateway --renderer server` supplies ids to agents of any language."""
    model = drifting(renders="/tokenize")
    path = tmp_path / "out.jsonl"
    server = clients.serve(routes=model.routes())
    process, url = await command(server, "--renderer", "server", "--out", str(path))
    try:
        begun = (await send(url + "/rollouts", {"name": "agent"}, **HARNESS)).json()
        messages = [user("hi")]
        for _ in range(3):
            chat = {"model": "m", "messages": messages}
            answer = await send(begun["openai_base_url"] + "/chat/completions", chat)
            reply = answer.json()["choices"][0]["message"]
            messages += [reply, user("so?")]
        await send(f"{url}/rollouts/{begun['id']}", None, "DELETE", **HARNESS)
    finally:
        process.send_signal(signal.SIGTERM)
        await process.communicate()
    (trajectory,) = JsonlTrajectoryExporter.read(path)
    drift = trajectory.drift()
    assert (drift.continued, drift.merge_ratio) == (2, 1.0)
    assert [one.supplied is None for one in trajectory.completions] == [True, False, False]


@pytest.mark.parametrize("renderer", ["no-such-tokenizer", 7])
def test_a_wrong_renderer(renderer: Any) -> None:
    """The error names what was expected, or what is to be installed."""
    with pytest.raises(ConfigurationError, match=r"gateway renderer.*(server|otel-rollout)"):
        otel_rollout.gateway.application("http://127.0.0.1:1", renderer=renderer)


@pytest.mark.parametrize("body", [b'{"messages":[]}', b' {"a": {"b": 1}\n } \n'])
def test_the_ids_are_added_to_the_bytes(body: bytes) -> None:
    """Nothing else of a body is changed."""
    changed = with_ids(body, [1, 2])
    assert json.loads(changed) == {**json.loads(body), "input_ids": [1, 2]}
    assert changed.replace(b',"input_ids":[1,2]', b"").split() == body.split()
