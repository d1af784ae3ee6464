"""The key of the model server is in no reply and on no span, in whatever form it is repeated."""

from __future__ import annotations

import gzip
import json
from base64 import b64encode, urlsafe_b64encode
from itertools import pairwise
from urllib.parse import quote, quote_plus

import pytest
from hypothesis import given
from hypothesis import strategies as st

from otel_rollout import request_token_ids, rollout
from otel_rollout.gateway.replies import KeylessStream, KeyRemover
from otel_rollout.testing import Raw
from tests.gateway.programs import Serve
from tests.kit.conversations import ASK
from tests.kit.outside import send
from tests.kit.recording import Clients, Recording

CHAT = {"model": "m", "messages": ASK}
KEY = "sk-of/the+gateway=0123456789"
FORMS = {
    "plain": KEY,
    "JSON of PHP": KEY.replace("/", "\\/"),
    "JSON of .NET": KEY.replace("+", "\\u002B"),
    "JSON of Gson": KEY.replace("=", "\\u003d"),
    "JSON with all escaped": KEY.replace("/", "\\u002f")
    .replace("+", "\\u002b")
    .replace("=", "\\u003d"),
    "JSON in mixed ways": KEY.replace("/", "\\/").replace("+", "\\u002B").replace("=", "\\u003d"),
    "URL": quote(KEY),
    "URL, all": quote(KEY, safe=""),
    "URL, lower case": quote(KEY, safe="")
    .replace("%2B", "%2b")
    .replace("%2F", "%2f")
    .replace("%3D", "%3d"),
    "form": quote_plus(KEY),
    "base64": b64encode(KEY.encode()).decode(),
    "base64 of Bearer": b64encode(f"Bearer {KEY}".encode()).decode(),
    "base64 of Basic": b64encode(f"user:{KEY}".encode()).decode(),
    "base64 of another text": urlsafe_b64encode(f"x{KEY}, it was".encode()).decode(),
}


def said(form: str) -> list[bytes]:
    """What of a form must not be left: of base64 the part that no other text could have."""
    return [form[6:-8].encode()] if len(form) > len(KEY) and form.isascii() else [form.encode()]


def replies(form: str) -> dict[str, Raw]:
    """The ways in which a server may repeat a text."""
    error = json.dumps({"error": {"message": "MARK"}}).replace("MARK", f"bad key {form} given")
    message = {"role": "assistant", "content": "MARK"}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    reply = {"id": "c1", "object": "chat.completion", "model": "m", "choices": [choice]}
    model = json.dumps(reply).replace("MARK", f"You have {form}.")
    half = len(form) // 2
    cut = [f"data: {error[: error.index(form) + half]}".encode()]
    cut += [f"{error[error.index(form) + half :]}\n\n".encode()]
    events = "text/event-stream"
    packed = {"content-encoding": "gzip"}
    return {
        "200 with an error": Raw(200, error.encode()),
        "200, text": Raw(200, f"for {form}".encode(), content_type="text/plain"),
        "200 of a model": Raw(200, model.encode()),
        "200, gzip though not asked for": Raw(200, gzip.compress(error.encode()), headers=packed),
        "401": Raw(401, error.encode()),
        "401, text": Raw(401, f"for {form}".encode(), content_type="text/plain"),
        "500, gzip": Raw(500, gzip.compress(error.encode()), headers=packed),
        "a header": Raw(200, b"{}", headers={"x-echo": f"for {form}"}),
        "a stream": Raw(content_type=events, chunks=[f"data: {error}\n\n".encode()]),
        "a stream, cut": Raw(content_type=events, chunks=cut),
        "a stream, bytes": Raw(
            content_type=events, chunks=[bytes([each]) for each in f"data: {error}\n\n".encode()]
        ),
    }


CASES = [(form, "200 with an error") for form in FORMS]
CASES += [(form, how) for form in ("plain", "JSON in mixed ways", "base64") for how in replies("")]


@pytest.mark.parametrize(("form", "how"), CASES)
async def test_the_key_is_in_no_reply(
    captured: Recording, clients: Clients, gateway_to: Serve, form: str, how: str
):
    """Nor on a span, nor in the trajectory; and all other bytes are as the server sent them."""
    server = clients.serve(replies(FORMS[form])[how])
    gateway = await gateway_to(server.base_url, api_key=KEY)
    with rollout("agent") as trajectory:
        answer = await send(gateway.base_url() + "/chat/completions", CHAT, accept_encoding="gzip")
    assert answer.whole
    shown = str(answer.headers).encode() + answer.body
    recorded = "".join(span.to_json() for span in captured.spans) + trajectory.to_json()
    for part in said(FORMS[form]):
        assert part not in shown
        if "gzip though" not in how:
            assert part not in recorded.encode()
            assert part not in json.dumps(recorded).encode()
    assert b"[redacted]" in shown
    if "gzip" not in how and how != "a header":
        sent = server.exchanges[0].response
        assert len(answer.body) == len(sent)
        assert "accept-encoding" not in server.exchanges[0].request_headers


async def test_hidden_fields_stay_hidden(captured: Recording, clients: Clients, gateway_to: Serve):
    """Where a server compresses what it was not asked to."""
    server = clients.serve("Hello", compress=True)
    gateway = await gateway_to(server.base_url, api_key=KEY)
    with request_token_ids(), rollout("agent") as trajectory:
        for stream in (False, True):
            body = {**CHAT, "stream": stream}
            answer = await send(gateway.base_url() + "/chat/completions", body)
            assert b"Hello" in answer.body or b"Hel" in answer.body
            assert b"token_ids" not in answer.body
    assert all(completion.token_ids for completion in trajectory.completions)


@pytest.mark.parametrize("key", ["EMPTY", "none"])
async def test_a_word_is_no_key(captured: Recording, clients: Clients, gateway_to: Serve, key: str):
    """Local servers are given one that any reply may have."""
    server = clients.serve(f"It is {key}.")
    gateway = await gateway_to(server.base_url, api_key=key)
    with rollout("agent"):
        answer = await send(gateway.base_url() + "/chat/completions", CHAT)
    assert answer.body == server.exchanges[0].response


REMOVER = KeyRemover(KEY)
PIECES = st.lists(
    st.sampled_from([*FORMS.values(), KEY[:9], KEY[-9:], "s", "sk", "c2st", "sk-sk-of", "\n", "x"])
    | st.text("sk-of/the+", max_size=9)
).map(lambda parts: "".join(parts).encode())


@given(PIECES, st.data())
def test_a_reply_is_the_same_however_it_is_cut(text: bytes, data: st.DataObject):
    """And has no form of the key."""
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=9)))
    stream = KeylessStream(REMOVER)
    ends = [0, *cuts, len(text)]
    pieces = [text[a:b] for a, b in pairwise(ends) if a < b]
    shown = b"".join(map(stream.shown, [*pieces, b""]))
    assert len(shown) == len(text)
    assert REMOVER.removed(shown) == shown
    assert KEY.encode() not in shown


@given(st.binary())
def test_a_piece_without_the_key_is_the_same_object(text: bytes):
    """Nothing of it is copied, unless the key may have begun at its end."""
    assert REMOVER.removed(text) is text
    if text and not REMOVER.begun(text):
        assert KeylessStream(REMOVER).shown(text) is text


def test_what_the_key_may_begin_with_is_held():
    """Until the next piece says what it is; an event of a stream ends with a line break."""
    stream = KeylessStream(REMOVER)
    assert stream.shown(b"data: sk-of") == b"data: "
    assert stream.shown(b"ten\n\n") == b"sk-often\n\n"
    assert stream.shown(b"data: c2s") == b"data: "
    assert stream.shown(b"") == b"c2s"
