"""Whose call it is: three spellings of one carrier, and nothing that others can make up."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

import otel_rollout
from otel_rollout import Trajectory, propagate, reconstruct, rollout
from otel_rollout.gateway import serve
from otel_rollout.gateway.paths import asked_of
from otel_rollout.gateway.tokens import TokenError, Tokens
from otel_rollout.record import Carried
from tests.gateway.programs import SECRET, Serve
from tests.kit.conversations import ASK
from tests.kit.outside import Answer, send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
CARRIED = st.builds(
    Carried,
    st.binary(min_size=16, max_size=16).map(bytes.hex),
    st.integers(1, 2**128 - 1),
    st.integers(1, 2**64 - 1),
    st.none() | st.integers(-10, 10**6) | st.text(max_size=30),
    st.booleans(),
    group_id=st.none() | st.text(max_size=30),
    outer_group_id=st.none() | st.text(max_size=30),
)


# --- tokens


@given(CARRIED, st.booleans())
def test_a_token_says_what_it_was_made_of(carried: Carried, is_own: bool):
    """All of the carrier, and whether the rollout runs in this process."""
    tokens = Tokens(b"secret", 60)
    text = tokens.token_of(carried, is_own=is_own)
    read = Tokens(b"secret", 60).read(text)
    assert (read.carried, read.is_own) == (carried, is_own)
    assert set(text) <= set("ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_")
    assert asked_of(f"/r/{text}/v1/models".encode(), []).token == text


@given(CARRIED, st.data())
def test_a_token_that_was_changed_is_none(carried: Carried, data: st.DataObject):
    """Any other character in any place, a shorter one, and one of another secret."""
    tokens = Tokens(b"secret", 60)
    text = tokens.token_of(carried, is_own=False)
    place = data.draw(st.integers(0, len(text) - 2))  # the last one has bits that say nothing
    other = data.draw(st.sampled_from("aB3_-").filter(lambda letter: letter != text[place]))
    for forged in (text[:place] + other + text[place + 1 :], text[:place], text + "AAAA", ""):
        with pytest.raises(TokenError):
            tokens.read(forged)
    with pytest.raises(TokenError):
        Tokens(b"another", 60).read(text)


def test_a_token_expires():
    """Also one that was read while it was good."""
    tokens = Tokens(b"secret", 0.0)
    carried = Carried("ab" * 16, 1, 2)
    text = tokens.token_of(carried, is_own=False)
    while int(time.time()) == time.time():  # its second has not begun to pass
        pass
    with pytest.raises(TokenError, match="expired"):
        tokens.read(text)


def test_where_a_token_is_looked_for():
    """The path counts before the key; a key of a model server is no token."""
    bearer = [(b"authorization", b"Bearer or-abc")]
    assert asked_of(b"/v1/models", bearer).token == "abc"
    assert asked_of(b"/v1/models", [(b"x-api-key", b"or-abc")]).token == "abc"
    assert asked_of(b"/r/xyz/v1/models", bearer).token == "xyz"
    assert asked_of(b"/r/xyz", []).path == "/"
    assert asked_of(b"/v1/models", [(b"authorization", b"Bearer sk-abc")]).token is None
    assert asked_of(b"/v1/models", [(b"authorization", b"Basic or-abc")]).token is None
    assert asked_of(b"/v1/models", [(b"x-other", b"or-abc")]).token is None


# --- over HTTP


async def test_three_spellings_are_one_rollout(
    captured: Recording, clients: Clients, gateway_to: Serve, monkeypatch: pytest.MonkeyPatch
):
    """By the path, by the key in either header, by the W3C headers: all are in the trajectory."""
    monkeypatch.setenv("OTEL_ROLLOUT_SECRET", SECRET)
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    plain = f"{gateway.url}/v1/chat/completions"
    with rollout("agent") as trajectory:
        key = f"or-{gateway.token()}"
        await send(gateway.base_url() + "/chat/completions", CHAT)
        await send(plain, CHAT, authorization=f"Bearer {key}")
        await send(plain, CHAT, x_api_key=key)
        await send(plain, CHAT, **propagate())
    assert len(trajectory.completions) == 4
    assert trajectory.warnings == []
    for wire in server.exchanges:
        assert not {"authorization", "x-api-key", "baggage"} & wire.request_headers.keys()


@pytest.mark.parametrize("configured", ["captured", "recording"])
@pytest.mark.parametrize("count", [1, 3])
async def test_a_rollout_whose_calls_a_gateway_has_says_so(
    request: pytest.FixtureRequest, clients: Clients, gateway_to: Serve, count: int, configured: str
):
    """Not that it made none, nor that one went by that an instrumentation drew."""
    recorded: Recording = request.getfixturevalue(configured)
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("there") as there:
        client: Any = clients.asynchronous(server).with_options(base_url=gateway.base_url())
        with rollout("agent") as trajectory:
            for _ in range(count):
                await client.chat.completions.create(**CHAT)
    assert (len(there.completions), there.warnings) == (count, [])
    said = f"{count} model call{'s' * (count > 1)} of it went to a gateway, which records what it "
    assert [warning[: len(said)] for warning in trajectory.warnings] == [said]
    again = {each.name: each for each in reconstruct(recorded.spans)}["agent"]
    assert again.warnings == trajectory.warnings


async def refused(answer: Answer, server: Any, *trajectories: Trajectory) -> None:
    """Assert that the gateway refused a request, asked nobody and recorded nothing."""
    assert answer.status == 401
    assert answer.json()["error"]["type"] == "authentication_error"
    assert server.exchanges == []
    for trajectory in trajectories:
        assert trajectory.completions == []


async def test_what_names_no_rollout_is_refused(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """No token, a forged one, one of another gateway, one that has expired."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    other = await gateway_to(server.base_url, secret="another")
    brief = await gateway_to(server.base_url, token_seconds=1e-9)
    with rollout("agent") as trajectory:
        forged = gateway.token()[:-2] + ("AA" if gateway.token()[-2:] != "AA" else "BB")
        for url in (
            f"{gateway.url}/v1",
            f"{gateway.url}/r/{forged}/v1",
            f"{gateway.url}/r/{other.token()}/v1",
            f"{gateway.url}/r//v1",
            brief.base_url(),
        ):
            await refused(await send(url + "/chat/completions", CHAT), server, trajectory)
        answer = await send(f"{gateway.url}/v1/messages", CHAT, x_api_key=f"or-{forged}")
        assert answer.json()["type"] == "error"
        await refused(answer, server, trajectory)


async def test_a_rollout_that_has_ended_is_refused(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Its token is good for calls of its own alone."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("agent") as trajectory:
        url = gateway.base_url()
        assert (await send(url + "/chat/completions", CHAT)).status == 200
    server.clear()
    answer = await send(url + "/chat/completions", CHAT)
    assert "has ended" in answer.json()["error"]["message"]
    assert answer.status == 401
    assert server.exchanges == []
    assert len(trajectory.completions) == 1


async def test_headers_cannot_move_a_call(captured: Recording, clients: Clients, gateway_to: Serve):
    """With a token, no header of the client says which rollout a call belongs to."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("victim") as victim:
        carrier, key = propagate(), f"Bearer or-{gateway.token()}"
        await send(gateway.base_url() + "/chat/completions", CHAT)
    server.clear()
    with rollout("agent") as trajectory:
        url = gateway.base_url() + "/chat/completions"
        smuggled = {
            "x_forwarded_for": "10.0.0.1",
            "forwarded": "host=evil",
            "x_forwarded_host": "e",
        }
        answer = await send(url, CHAT, authorization=key, host="evil", **smuggled, **carrier)
    assert answer.status == 200
    assert len(trajectory.completions) == 1
    assert len(victim.completions) == 1
    (wire,) = server.exchanges
    assert wire.request_headers["host"] == server.base_url.split("/")[2]


async def test_headers_need_a_proof_where_there_is_a_secret(
    captured: Recording, clients: Clients, gateway_to: Serve, monkeypatch: pytest.MonkeyPatch
):
    """Those that `propagate` gives have it where the process knows the secret."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url, secret="s3cret")
    url = f"{gateway.url}/v1/chat/completions"
    with rollout("agent") as trajectory:
        await refused(await send(url, CHAT, **propagate()), server, trajectory)
        monkeypatch.setenv("OTEL_ROLLOUT_SECRET", "another")
        await refused(await send(url, CHAT, **propagate()), server, trajectory)
        monkeypatch.setenv("OTEL_ROLLOUT_SECRET", "s3cret")
        assert (await send(url, CHAT, **propagate())).status == 200
        assert len(trajectory.completions) == 1


async def test_a_rollout_of_another_process_is_continued(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """Its calls are a part here, which ends with the gateway, and join the rollout on the trace."""
    server = clients.serve("Hello")
    tokens = Tokens(b"s3cret", 60)
    with rollout("agent") as trajectory:
        headers = propagate()
    own = Carried.by(headers)
    assert own is not None
    far = Carried("ab" * 16, own.trace_id, own.span_id, policy_version=7)
    async with serve(server.base_url, secret="s3cret") as gateway:
        url = f"{gateway.url}/r/{tokens.token_of(far, is_own=False)}/v1/chat/completions"
        for _ in range(2):
            assert (await send(url, CHAT)).status == 200
    found = {each.id: each for each in reconstruct(captured.spans)}
    assert len(found["ab" * 16].completions) == 2
    assert [c.policy_version for c in found["ab" * 16].completions] == [7, 7]
    assert len({span.context.trace_id for span in captured.spans if span.context}) == 1
    assert found[trajectory.id].completions == []


@pytest.mark.parametrize("options", [{"most_parts": 1}, {"idle_seconds": 0.1}])
async def test_parts_end(
    captured: Recording, clients: Clients, gateway_to: Serve, options: dict[str, Any]
):
    """The one that was idle longest ends for a further one, and each of them after a while."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url, secret="s3cret", **options)
    tokens = Tokens(b"s3cret", 60)
    for number in range(1, 4):
        far = Carried(f"{number:032x}", number, number)
        url = f"{gateway.url}/r/{tokens.token_of(far, is_own=False)}/v1/chat/completions"
        assert (await send(url, CHAT)).status == 200
    ended = 2 if "most_parts" in options else 3
    if ended == 2:
        assert sum("rollout.part" in (span.attributes or {}) for span in captured.spans) == 2
    while sum("rollout.part" in (span.attributes or {}) for span in captured.spans) < ended:
        await asyncio.sleep(0.01)
    found = {each.id: each for each in reconstruct(captured.spans)}
    assert all(len(found[f"{number:032x}"].completions) == 1 for number in range(1, 4))


@pytest.mark.parametrize("secret", [None, SECRET])
async def test_headers_without_a_proof_name_no_rollout(
    captured: Recording, clients: Clients, gateway_to: Serve, secret: str | None
):
    """With a secret that was made, too: an agent knows the ids of others, and their traces."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url, secret=secret)
    with rollout("victim") as victim, rollout("agent") as trajectory:
        url = gateway.url + "/v1/chat/completions"
        answer = await send(url, CHAT, baggage=f"rollout.id={victim.id}")
        await refused(answer, server, trajectory, victim)
        await refused(await send(url, CHAT, **propagate()), server, trajectory, victim)


async def test_a_token_is_good_while_its_rollout_runs(
    captured: Recording, clients: Clients, gateway_to: Serve
):
    """A gateway that was started anew does not run its rollout, and takes it for a shorter time."""
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url, rollout_seconds=1e-9)
    with rollout("agent"):
        assert (await send(gateway.base_url() + "/chat/completions", CHAT)).status == 200
    far = Tokens(SECRET.encode(), 60).token_of(Carried("ab" * 16, 1, 2), is_own=False)
    answer = await send(f"{gateway.url}/r/{far}/v1/chat/completions", CHAT)
    assert answer.status == 401
    assert "expired" in answer.json()["error"]["message"]
    assert len(server.exchanges) == 1


async def test_no_span_has_a_token(clients: Clients, gateway_to: Serve):
    """A client's base URL has it in its path; the default instrumentation writes that URL down."""
    spans = InMemorySpanExporter()
    otel_rollout.configure(exporters=[], span_exporters=[spans])
    server = clients.serve("Hello")
    gateway = await gateway_to(server.base_url)
    with rollout("there"):
        token, base_url = gateway.token(), gateway.base_url()
        client: Any = clients.asynchronous(server).with_options(
            base_url=base_url, api_key=f"or-{token}"
        )
        with rollout("agent"):
            await client.chat.completions.create(**CHAT)
    otel_rollout.shutdown()
    scopes = {str(getattr(s.instrumentation_scope, "name", "")) for s in spans.get_finished_spans()}
    assert "opentelemetry.instrumentation.openai.v1" in scopes
    assert token in base_url
    assert not any(token in span.to_json() for span in spans.get_finished_spans())


@pytest.mark.parametrize("given", [None, "a secret of the gateway's own"])
@pytest.mark.parametrize("begun_here", [False, True], ids=["in Python", "over HTTP"])
async def test_the_headers_that_a_gateway_hands_out(
    captured: Recording, clients: Clients, gateway_to: Serve, given: str | None, begun_here: bool
):
    """They are taken, whatever secret it has, and prove no other rollout than their own."""
    gateway = await gateway_to(clients.serve("Hello").base_url, secret=given)
    secret = {"authorization": f"Bearer {given or gateway.made_secret}"}
    with rollout("agent") as trajectory:
        environment, name = gateway.environment(), trajectory.id
        if begun_here:
            begun = (await send(gateway.url + "/rollouts", {}, **secret)).json()
            environment, name = begun["environment"], begun["id"]
        headers = {each: environment[each.upper()] for each in ("traceparent", "baggage")}
        answer = await send(f"{gateway.url}/v1/chat/completions", CHAT, **headers)
        assert answer.status == 200
        headers["baggage"] = headers["baggage"].replace(name, "ab" * 16)
        answer = await send(f"{gateway.url}/v1/chat/completions", CHAT, **headers)
        assert answer.status == 401
    await send(f"{gateway.url}/rollouts/{name}", None, "DELETE", **secret)
    (found,) = (each for each in captured.trajectories if each.id == name)
    assert len(found.completions) == 1
