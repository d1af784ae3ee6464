"""Sessions that harnesses name in headers: on the span as evidence, and they decide nothing."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Any

import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from requests.structures import CaseInsensitiveDict

import otel_rollout
from otel_rollout import InMemoryTrajectoryExporter, rollout
from otel_rollout.record.privacy.secrets import headers_of
from otel_rollout.record.transports.sessions import HEADERS, TURN_METADATA, session_of
from otel_rollout.testing import ModelServer
from tests.kit.comparing import attribute, exchange_spans, replayed
from tests.kit.conversations import ASK, chat, table, user
from tests.kit.recording import Clients, Recording

ID = "0198f3c2-5f3a-7c11-a1b2-c3d4e5f60718"


@pytest.mark.parametrize("name", [*HEADERS, "Session-Id", "X-Claude-Code-Session-Id"])
async def test_each_header_is_read(recording: Recording, clients: Clients, name: str):
    """Whatever the case of its name; the span and the completion have it."""
    client = clients.asynchronous(clients.serve())
    with rollout("agent"):
        await chat(client, extra_headers={name: ID})
        await chat(client)
    first, second = replayed(recording).completions
    assert (first.session, second.session) == (ID, None)
    assert [attribute(span, "session") for span in exchange_spans(recording)] == [ID, None]


@pytest.mark.parametrize(
    ("metadata", "expected"),
    [
        (json.dumps({"turn_id": "t-1", "session_id": ID, "sandbox": "none"}), ID),
        (json.dumps({"turn_id": "t-1"}), "t-1"),
        (json.dumps({"turn_id": 1}), None),
        (json.dumps([ID]), None),
        ("{", None),
        ("[" * 4000, None),
        (json.dumps({"session_id": ID, "more": "x" * 5000}), None),
    ],
)
def test_the_metadata_of_a_turn(metadata: str, expected: str | None):
    """An object in a header, if it is one, and not too long."""
    assert session_of({TURN_METADATA: metadata}.items()) == expected


def test_the_most_telling_header_wins():
    """In the order in which they are listed, not in that of the request."""
    assert session_of({"x-session-affinity": "b", "session-id": "a"}.items()) == "a"
    assert session_of({TURN_METADATA: '{"turn_id": "t"}', "x-session-id": "a"}.items()) == "a"
    assert session_of({"x-session-id": "not a plain id", "x-session-affinity": "b"}.items()) == "b"


KEY = "0123456789abcdef"


@pytest.mark.parametrize(
    "headers",
    [
        {"x-session-id": KEY, "authorization": f"Bearer {KEY}"},
        {"x-session-id": KEY, "Authorization": f"Bearer {KEY}"},
        {"x-session-id": KEY, "x-api-key": KEY},
        {"x-session-id": KEY, "cookie": f"session={KEY}"},
        {"x-session-id": "sk-not-a-real-key"},
        {"x-session-id": "or-token"},
        {"x-session-id": "eyJhbGciOiJIUzI1NiJ9.e30.c2ln"},
        {"x-session-id": "Bearer abc"},
        {"x-session-id": "a" * 129},
        {"x-session-id": ""},
        {"x-session-id": "a\nb"},
        {"session-token": "abc"},
    ],
)
def test_no_credential_is_taken_for_a_session(headers: Mapping[str, str]):
    """What signs the request, what looks like a key, and what is no plain id."""
    assert session_of(headers_of(CaseInsensitiveDict(headers))) is None


@given(st.dictionaries(st.sampled_from([*HEADERS, TURN_METADATA, "authorization"]), st.text()))
def test_any_headers_give_an_id_or_nothing(headers: dict[str, str]):
    """Nothing raises, and what is kept is short and one of the values."""
    session = session_of(headers.items())
    if session is not None:
        assert 0 < len(session) <= 128
        assert any(session in value for value in headers.values())


async def test_a_session_is_redacted(clients: Clients):
    """What the user's function takes out of texts is on no span."""
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], redact=lambda body: body.replace(b"0198", b"****"))
    with rollout("agent"):
        await chat(clients.asynchronous(clients.serve()), extra_headers={"session-id": ID})
    (trajectory,) = exporter.get_finished_trajectories()
    assert trajectory.completions[0].session == ID.replace("0198", "****")


async def test_a_request_is_recorded_whatever_its_headers_are(
    recording: Recording, clients: Clients, caplog: pytest.LogCaptureFixture
):
    """A session that cannot be kept costs the call nothing."""
    client = clients.asynchronous(clients.serve())
    with caplog.at_level(logging.WARNING), rollout("agent"):
        await chat(client, extra_headers={TURN_METADATA: "[" * 3000, "session-id": "a b"})
    (completion,) = replayed(recording).completions
    assert (completion.session, completion.request_messages) == (None, ASK)
    assert not caplog.records


SESSIONS = st.lists(
    st.dictionaries(st.sampled_from(HEADERS), st.sampled_from(["a", "b", "c"]), max_size=2),
    min_size=6,
    max_size=6,
)


@pytest.mark.not_replayed("it configures anew for each example; it compares rebuilt ones itself")
@given(SESSIONS)
@settings(max_examples=25)
def test_histories_do_not_depend_on_sessions(sessions: list[dict[str, str]]):
    """The same calls give the same histories, whatever sessions their headers name."""
    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(exporters=[exporter], instrumentor=None)
    try:
        with SERVER, rollout("agent"):
            play(SERVER, sessions)
        (trajectory,) = exporter.get_finished_trajectories()
    finally:
        otel_rollout.shutdown()
    assert table(trajectory) == [
        "user two, 1* You said: two, user four, 3* You said: four, user five, 5* You said: five",
        "user one, 0* You said: one, user three, 2* You said: three",
        "user one, 0 You said: one, user fork, 4* You said: fork",
    ]
    assert [c.session for c in trajectory.completions] == [
        next((headers[name] for name in HEADERS if name in headers), None) for headers in sessions
    ]


SERVER = ModelServer()


def play(server: ModelServer, sessions: list[dict[str, str]]) -> None:
    """Two conversations that take turns, the first of which forks."""
    one, two = [user("one")], [user("two")]
    with openai.OpenAI(base_url=server.base_url, api_key="k", max_retries=0) as client:

        def call(messages: list[Any], headers: dict[str, str]) -> Any:
            made = client.chat.completions.create(
                model="m", messages=messages, extra_headers=headers
            )
            return made.choices[0].message

        first, second = call(one, sessions[0]), call(two, sessions[1])
        call([*one, first, user("three")], sessions[2])
        two += [second, user("four")]
        two += [call(two, sessions[3]), user("five")]
        call([*one, first, user("fork")], sessions[4])
        call(two, sessions[5])
