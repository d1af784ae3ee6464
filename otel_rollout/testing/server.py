"""The server: real HTTP on a free port of 127.0.0.1, a thread for each connection."""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import socket
import sys
import threading
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import TCPServer, ThreadingMixIn
from typing import TYPE_CHECKING, Any, Final, Literal, TypeAlias

from otel_rollout.testing.anthropic_bodies import count_tokens, message_body, message_events
from otel_rollout.testing.bodies import (
    CREATED,
    MODEL,
    TOKENIZER,
    Json,
    ModelCall,
    Reply,
    content_text,
    dump,
    embeddings,
    generation,
    input_messages,
    prompt_ids_of,
)
from otel_rollout.testing.responses_bodies import response_body, response_events, unfinished

if TYPE_CHECKING:
    from typing_extensions import Self  # in typing from Python 3.11 on


@dataclass(frozen=True, slots=True)
class Raw:
    """An HTTP response sent verbatim: malformed JSON, HTML, wrong shapes, any status."""

    status: int = 200
    """HTTP status code."""
    body: bytes = b""
    """The body, or the first part of a stream."""
    content_type: str = "application/json"
    """The header `Content-Type`."""
    headers: Mapping[str, str] = field(default_factory=dict)
    """Further headers."""
    delay: float = 0.0
    """Seconds before the response headers."""
    chunks: Sequence[bytes] = ()
    """Sent one by one after `body`, as a stream: server-sent events of any shape."""


@dataclass(frozen=True, slots=True)
class WireExchange:
    """One request and its response as they were on the wire."""

    path: str
    """Path of the request, with its query."""
    request: bytes
    """Body of the request."""
    request_headers: Mapping[str, str]
    """Headers of the request; names in lower case."""
    status: int
    """HTTP status code of the response."""
    response: bytes
    """Body of the response as far as it was sent: of a stream its events, without HTTP's chunk
    framing; gzipped if the server compresses."""


@dataclass(frozen=True, slots=True)
class _Answer:
    """An HTTP response to send: its body as one part, or as the events of a stream."""

    parts: Sequence[bytes]
    status: int = 200
    content_type: str = "application/json"
    headers: Mapping[str, str] = field(default_factory=dict)
    stream: bool = False
    pace: Reply = field(default_factory=Reply)


def _error(status: int, message: str, code: str | None = None) -> _Answer:
    kind = "server_error" if status >= 500 else "invalid_request_error"
    body = {"error": {"message": message, "type": kind, "code": code, "param": None}}
    # The test is at fault, not the network: openai's client obeys this header and does not retry.
    return _Answer([dump(body)], status, headers={"x-should-retry": "false"})


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: _Server

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 (its name upstream)
        pass

    def _exchange(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        request = self.rfile.read(length)
        if len(request) < length:
            self.close_connection = True
            return
        answer = self.server.model._answer(self.command, self.path, request)
        sent, recorded = list[bytes](), False

        def record() -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            exchange = WireExchange(self.path, request, headers, answer.status, b"".join(sent))
            self.server.model._record(exchange)

        frames = _frames(answer)
        try:
            for number, (pause, body, frame) in enumerate(frames, 1):
                if pause > 0 and self.server.stopping.wait(pause):
                    raise ConnectionAbortedError("the server is stopping")
                sent.append(body)
                if number == len(frames):
                    # Before the last bytes are sent: a client that has them finds the exchange.
                    record()
                    recorded = True
                self.wfile.write(frame)
        except OSError:
            self.close_connection = True
            if not recorded:
                record()
        if answer.pace.cut_after is not None:
            self.close_connection = True

    # http.server's names
    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = _exchange  # noqa: N815


def _frames(answer: _Answer) -> list[tuple[float, bytes, bytes]]:
    """The writes of an answer: (seconds to wait before, part of the body, bytes on the wire)."""
    pace, body = answer.pace, b"".join(answer.parts)
    known = answer.status in HTTPStatus._value2member_map_
    phrase = HTTPStatus(answer.status).phrase if known else ""
    framing = "Transfer-Encoding: chunked" if answer.stream else f"Content-Length: {len(body)}"
    lines = [f"HTTP/1.1 {answer.status} {phrase}", f"Content-Type: {answer.content_type}", framing]
    lines += [f"{name}: {value}" for name, value in answer.headers.items()]
    head = ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
    if not answer.stream:
        body = body if pace.cut_after is None else body[: len(body) // 2]
        return [(pace.delay, body, head + body)]
    frames = [(pace.delay, b"", head)]
    frames += [
        (pace.chunk_delay, part, b"%x\r\n%b\r\n" % (len(part), part))
        for part in answer.parts[: pace.cut_after]
    ]
    if pace.cut_after is None:
        pause, part, frame = frames.pop()
        frames.append((pause, part, frame + b"0\r\n\r\n"))
    return frames


class _Server(ThreadingMixIn, TCPServer):
    allow_reuse_address = True
    daemon_threads = True
    request_queue_size = 1024

    def __init__(self, model: ModelServer, port: int) -> None:
        self.model = model
        self.stopping = threading.Event()
        self._connections: set[socket.socket] = set()
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        self._connections.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        # Clients that hang up are part of what is tested; anything else is a bug in this file.
        if not isinstance(sys.exc_info()[1], OSError):
            super().handle_error(request, client_address)

    def close(self) -> None:
        self.stopping.set()
        self.shutdown()
        self.server_close()
        for connection in list(self._connections):
            with contextlib.suppress(OSError):  # the client may have closed it already
                connection.shutdown(socket.SHUT_RDWR)


_Given: TypeAlias = Reply | Raw | str
_PARAMETERS: Final[Mapping[str, str]] = {
    "/v1/chat/completions": "messages",
    "/v1/completions": "prompt",
    "/v1/responses": "input",
    "/v1/embeddings": "input",
    "/v1/messages": "messages",
    "/v1/messages/count_tokens": "messages",
}
_INSTEAD_OF_INPUT: Final = {"prompt", "conversation", "previous_response_id"}
_azure = re.compile(r"^/openai(/v1)?(/deployments/[^/]+)?").sub
"""Azure has the same endpoints under other paths."""
_retrieval = re.compile(r"/v1/responses/([^/]+)(/cancel)?").fullmatch


class ModelServer:
    """An OpenAI-compatible model server on 127.0.0.1, for tests of agents over real HTTP.

    Endpoints: `/v1/chat/completions`, `/v1/completions`, `/v1/responses` (each also streamed),
    `/v1/embeddings`, `/v1/models`, and the same under Azure's paths; of Anthropic's API
    `/v1/messages`, also streamed, and `/v1/messages/count_tokens` (its client needs the URL without
    `/v1`: `server.base_url.removesuffix("/v1")`). A response can be retrieved by its id; one with
    `background` is complete only then. Any other path, unless it is in `routes`, is a 404 in
    OpenAI's error shape.

    `reply` is the model's reply:

    * a function of the parsed request body, called concurrently for concurrent requests;
    * an iterable: each request takes the next item. When none is left, the answer is HTTP 500. A
      client's retries take items too: give it `max_retries=0` if that matters;
    * one `Reply`, `Raw` or text: the same for every request;
    * None: `You said: {text of the last user message}`.

    An exception in `reply` becomes HTTP 500 with its text, marked as not worth a retry.

    Responses have the fields that vLLM sends on request (`return_token_ids`, `logprobs`):
    `prompt_token_ids` (of a stream, in its first chunk), `token_ids`, log-probabilities. They are
    None where nobody asks, as vLLM's are; with `token_ids=True`, `logprobs=True` they always come.

    Thread-safe. After `stop` it can be started again; ids and replies continue.
    """

    def __init__(
        self,
        reply: Callable[[dict[str, Any]], _Given] | Iterable[_Given] | _Given | None = None,
        *,
        token_ids: bool = False,
        logprobs: bool = False,
        logprobs_mode: Literal["raw", "processed", "wrong"] = "raw",
        chunk_size: int = 8,
        compress: bool = False,
        routes: Mapping[str, Raw | Callable[[dict[str, Any]], Raw]] | None = None,
        port: int = 0,
    ) -> None:
        """`chunk_size`: characters per event of a stream. `port`: 0 is any free port.

        `token_ids` and `logprobs`: send them also where no request asks for them. `logprobs_mode`:
        of chats, "processed" divides them by the temperature, "wrong" are 22 nats off.

        `compress` sends every body gzipped. `routes` are responses of further endpoints by path,
        such as `/v1/moderations`, for any method: a response, or a function of the parsed body.
        """
        if chunk_size < 1:
            raise ValueError(f"chunk_size is {chunk_size!r}, expected 1 or more characters")
        self._reply = _reply_function(reply)
        self._token_ids, self._logprobs, self._mode = token_ids, logprobs, logprobs_mode
        self._chunk_size, self._port = chunk_size, port
        self._compress, self._routes = compress, dict(routes or {})
        self._responses: dict[str, tuple[ModelCall, Iterator[None]]] = {}
        self._server: _Server | None = None
        self._lock = threading.Lock()
        self._exchanges: list[WireExchange] = []
        self._sequence = itertools.count(1)

    @property
    def base_url(self) -> str:
        """`http://127.0.0.1:{port}/v1`, while the server runs."""
        if self._server is None:
            raise RuntimeError("ModelServer is not running: use it in `with`, or call start()")
        return f"http://127.0.0.1:{self._server.server_address[1]}/v1"

    @property
    def exchanges(self) -> list[WireExchange]:
        """A copy of the exchanges so far, in the order in which their responses were complete.

        A client that has read a response to its end finds it here.
        """
        with self._lock:
            return list(self._exchanges)

    def clear(self) -> None:
        """Forget the exchanges so far; response ids continue."""
        with self._lock:
            self._exchanges.clear()

    def start(self) -> Self:
        """Serve in a daemon thread, and return the server itself. No-op when it runs."""
        if self._server is None:
            self._server = _Server(self, self._port)
            # The argument is how long stop() may wait for the accepting loop, in seconds.
            threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def stop(self) -> None:
        """Close the port and every connection, also those that wait in a delay. Idempotent."""
        server, self._server = self._server, None
        if server is not None:
            server.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(self, *_: object) -> None:
        self.stop()

    def _record(self, exchange: WireExchange) -> None:
        with self._lock:
            self._exchanges.append(exchange)

    def _answer(self, method: str, path: str, request: bytes) -> _Answer:
        path, _, query = path.partition("?")
        answer = self._respond(method, _azure("/v1", path), query, request)
        return _compressed(answer) if self._compress else answer

    def _respond(self, method: str, path: str, query: str, request: bytes) -> _Answer:
        if path in self._routes:
            return self._route(self._routes[path], request)
        if (method, path) == ("GET", "/v1/models"):
            model = {"id": MODEL, "object": "model", "created": CREATED, "owned_by": "test"}
            return _Answer([dump({"object": "list", "data": [model]})])
        if found := _retrieval(path):
            return self._retrieve(found[1], cancel=bool(found[2]), stream="stream=true" in query)
        if method != "POST" or path not in _PARAMETERS:
            return _error(404, f"ModelServer has no {method} {path}", "not_found")
        parameter = _PARAMETERS[path]
        try:
            body = json.loads(request)
        except ValueError as error:
            return _error(400, f"the request body is not JSON: {error}")
        if isinstance(body, dict) and path == "/v1/responses" and body.keys() & _INSTEAD_OF_INPUT:
            body = {"input": [], **body}
        elif not isinstance(body, dict) or not body.get(parameter):
            return _error(400, f"the request has no {parameter!r}")
        try:
            if path == "/v1/embeddings":
                return _Answer([dump(embeddings(body))])
            if path == "/v1/messages/count_tokens":
                return _Answer([dump(count_tokens(body))])
            given = self._reply(body)
            if isinstance(given, Raw):
                return _verbatim(given)
            return self._generate(path, body, Reply(given) if isinstance(given, str) else given)
        except Exception as error:  # the reply is the user's code: its failure is a response
            return _error(500, f"{type(error).__name__}: {error}")

    def _route(self, route: Raw | Callable[[dict[str, Any]], Raw], request: bytes) -> _Answer:
        if isinstance(route, Raw):
            return _verbatim(route)
        try:
            return _verbatim(route(json.loads(request or b"null")))
        except Exception as error:  # as of `reply`
            return _error(500, f"{type(error).__name__}: {error}")

    def _generate(self, path: str, body: Json, reply: Reply) -> _Answer:
        if not isinstance(reply, Reply):
            raise TypeError(f"reply gave {reply!r}, expected Reply, Raw or str")
        with self._lock:
            sequence = next(self._sequence)
        token_ids = self._token_ids or bool(body.get("return_token_ids"))
        # Of a text completion `logprobs` is a number, and 0 asks for them.
        logprobs = self._logprobs or body.get("logprobs") not in (None, False)
        sends = token_ids, logprobs, self._mode
        call = ModelCall(body, reply, sequence, self._chunk_size, *sends)
        if path == "/v1/messages":
            if not call.stream:
                return _Answer([dump(message_body(call))], pace=reply)
            events = message_events(call)
            return _Answer(events, content_type="text/event-stream", stream=True, pace=reply)
        if "input" in body:
            with self._lock:
                polls = itertools.repeat(None, reply.polls)
                self._responses[call.head("", "resp_").get("id", "")] = call, polls
        if not call.stream:
            response = response_body(call) if "input" in body else generation(call)[0]
            if body.get("background"):
                response = unfinished(response, "queued")
            return _Answer([dump(response)], pace=reply)
        if "input" in body:
            events = list(response_events(call))
        else:
            events = [b"data: %b\n\n" % dump(chunk) for chunk in generation(call)]
            events.append(b"data: [DONE]\n\n")
        return _Answer(events, content_type="text/event-stream", stream=True, pace=reply)

    def _retrieve(self, response_id: str, *, cancel: bool, stream: bool) -> _Answer:
        with self._lock:
            call, polls = self._responses.get(response_id, (None, iter(())))
            waiting = any(True for _ in itertools.islice(polls, 1))
        if call is None:
            return _error(404, f"Response with id {response_id!r} not found.", "not_found")
        if stream:
            events = list(response_events(call))
            return _Answer(events, content_type="text/event-stream", stream=True, pace=call.reply)
        response = response_body(call)
        if cancel or (waiting and call.body.get("background")):
            response = unfinished(response, "cancelled" if cancel else "in_progress")
        return _Answer([dump(response)])


def _verbatim(given: Raw) -> _Answer:
    parts = [part for part in (given.body, *given.chunks) if part] or [b""]
    pace = Reply(delay=given.delay)
    stream = bool(given.chunks)
    return _Answer(parts, given.status, given.content_type, given.headers, stream=stream, pace=pace)


def _compressed(answer: _Answer) -> _Answer:
    """The answer gzipped; each part can be decompressed as soon as it is sent."""
    packer = zlib.compressobj(wbits=zlib.MAX_WBITS | 16)
    parts = [packer.compress(part) + packer.flush(zlib.Z_SYNC_FLUSH) for part in answer.parts]
    parts[-1] += packer.flush()
    return replace(answer, parts=parts, headers={**answer.headers, "Content-Encoding": "gzip"})


def _reply_function(
    reply: Callable[[Json], _Given] | Iterable[_Given] | _Given | None,
) -> Callable[[Json], _Given]:
    if reply is None:
        return lambda body: f"You said: {_last_user_text(body)}"
    if isinstance(reply, Reply | Raw | str):
        return lambda _: reply
    if callable(reply):
        return reply
    replies, lock, number = iter(reply), threading.Lock(), itertools.count()

    def take(_: Json) -> _Given:
        with lock:
            for given in replies:
                next(number)
                return given
            raise LookupError(f"ModelServer ran out of replies: it was given {next(number)}")

    return take


def _last_user_text(body: Json) -> str:
    if "prompt" in body:
        return TOKENIZER.decode(prompt_ids_of(body["prompt"])[0])
    messages = body["messages"] if "messages" in body else input_messages(body)
    users = [message for message in messages if message.get("role") == "user"]
    return content_text(users[-1].get("content")) if users else ""
