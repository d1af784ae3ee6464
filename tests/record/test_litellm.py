"""What LiteLLM's client posts, without LiteLLM: which posts ask a model, and what they send."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout.record.litellm import Post

URL = "https://host/v1/chat/completions"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "é😀"}]}
BODIES: list[dict[str, Any]] = [
    {"json": BODY},
    {"data": json.dumps(BODY)},
    {"data": json.dumps(BODY).encode()},
    {"content": json.dumps(BODY, separators=(",", ":"))},
    {"content": json.dumps(BODY).encode(), "data": b"{}"},
]


@pytest.fixture
def client() -> Iterator[Any]:
    """An HTTP client of the kind that LiteLLM sends with."""
    with openai.DefaultHttpxClient(headers={"user-agent": "litellm"}) as made:
        yield made


@pytest.mark.parametrize(
    ("url", "path"),
    [
        (URL, "/chat/completions"),
        ("http://127.0.0.1:8000/v1/completions", "/completions"),
        ("https://h/openai/deployments/m/chat/completions?api-version=1", "/chat/completions"),
        ("https://h/v1/chat/completions/", "/chat/completions"),
        ("https://h/v1/responses#x", "/responses"),
        ("https://h/anthropic/v1/messages", "/v1/messages"),
        ("https://h/v1/embeddings", "/embeddings"),
        ("https://h/chat/completions/responses", "/responses"),
    ],
)
def test_where_models_are_asked(url: str, path: str) -> None:
    """The call is named by the end of the path, as a client library names it."""
    post = Post.of((url,), {})
    assert post is not None
    assert post.path == path


@pytest.mark.parametrize(
    "url",
    [
        "https://h/v1/chat/completions/logs",
        "https://h/log?to=/chat/completions",
        "https://h/log#/chat/completions",
        "https://h/v1/messages/count_tokens",
        "https://h/v1/responses/resp_1/cancel",
        "https://h/api/subcompletions",
        "https://h/messages",
        "",
        None,
    ],
)
def test_what_asks_no_model(url: Any) -> None:
    """Logs, counts of tokens, and whatever has no address are no calls."""
    assert Post.of((), {"url": url}) is None


def test_a_post_without_arguments() -> None:
    """What the client will refuse is none of ours."""
    assert Post.of((), {}) is None


@pytest.mark.parametrize("arguments", BODIES)
def test_the_request_is_what_will_be_sent(client: Any, arguments: dict[str, Any]) -> None:
    """However the body is given, it is known as JSON and as the bytes that are sent."""
    post = Post.of((URL,), {**arguments, "headers": {"x": "y"}})
    assert post is not None
    assert post.json_data == BODY
    request = post.request(client)
    assert json.loads(request.content) == BODY
    body = arguments.get("content") or arguments.get("data")
    if body is not None:
        assert request.content == (body.encode() if isinstance(body, str) else body)
    assert request.headers["x"] == "y"
    assert str(request.url) == URL


def test_arguments_by_position(client: Any) -> None:
    """The first five arguments may be given without their names."""
    post = Post.of((URL, None, BODY, {"a": "b"}, {"x": "y"}), {})
    assert post is not None
    request = post.request(client)
    assert (post.json_data, request.headers["x"]) == (BODY, "y")
    assert str(request.url) == URL + "?a=b"


@pytest.mark.parametrize("data", ["no JSON", b"\xff", "[" * 100_000, {"a": "form"}, None, ""])
def test_a_body_that_is_no_json(data: Any) -> None:
    """It is not understood, and nothing is raised."""
    post = Post.of((URL,), {"data": data})
    assert post is not None
    assert not isinstance(post.json_data, dict) or post.json_data is data


@pytest.mark.parametrize("arguments", BODIES[:-1])
def test_fields_are_added(client: Any, arguments: dict[str, Any]) -> None:
    """They are in the body that is sent, which is of the type that it was; nothing else changes."""
    given = dict(arguments)
    post = Post.of((URL,), given)
    assert post is not None
    post.extend(given, {"return_token_ids": True})
    (name,) = arguments
    assert type(given[name]) is type(arguments[name])
    assert json.loads(post.request(client).content) == {**BODY, "return_token_ids": True}
    assert "return_token_ids" not in BODY
    again = Post.of((URL,), given)
    assert again is not None
    assert again.request(client).content == post.request(client).content


@pytest.mark.parametrize(
    ("args", "kwargs"),
    [
        ((URL, json.dumps(BODY)), {}),
        ((URL,), {"json": BODY, "headers": {"Authorization": "AWS4-HMAC-SHA256 Credential=a"}}),
        ((URL,), {"json": BODY, "headers": None}),
    ],
    ids=["by position", "signed", "nothing to add"],
)
def test_where_no_field_is_added(args: Any, kwargs: dict[str, Any]) -> None:
    """A body that cannot be changed is sent as it is."""
    given = dict(kwargs)
    post = Post.of(args, given)
    assert post is not None
    fields = {"return_token_ids": True} if given.get("headers") or not given else {}
    post.extend(given, fields)
    assert given == kwargs


@given(st.text(max_size=80), st.sampled_from(["", "/chat/completions", "/v1/messages"]))
def test_any_address(text: str, end: str) -> None:
    """No address raises, and what ends at a model's path is a call."""
    post = Post.of((text + end,), {})
    if end and not {"?", "#"} & set(text) and "\n" not in text:
        assert post is not None
        assert post.path.endswith(end)
