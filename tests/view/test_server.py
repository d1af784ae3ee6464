"""The server over real HTTP: who may ask, for what, and what a browser may do with the answer."""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import requests

from otel_rollout.errors import ConfigurationError
from otel_rollout.view.answers import Answers
from otel_rollout.view.built_page import Page
from otel_rollout.view.index import Index
from otel_rollout.view.server import Server
from tests.kit.conversations import user
from tests.view.made import PAGE, Call, line, write

HOSTILE = "<script>alert(1)</script>\u202e\x00\x1b[31m"


@contextmanager
def serving(
    path: Path, page: Page = PAGE, host: str = "127.0.0.1", **options: bool
) -> Iterator[str]:
    """The address of a page about a file of trajectories."""
    with Index([str(path)], cached=False, follow=False) as index:
        index.wait()
        server = Server(Answers(index), page, host=host, **options)
        thread = threading.Thread(target=server.run)
        thread.start()
        try:
            yield server.url
        finally:
            server.stop()
            thread.join()


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    """The address of a page about two trajectories."""
    lines = (line(id_, Call([user(HOSTILE)])) for id_ in ("t1", "t2"))
    with serving(write(tmp_path / "a.jsonl", *lines)) as address:
        yield address


def raw(url: str, request: str) -> tuple[int, bytes]:
    """Status and whole answer of a request that is sent as it is."""
    parts = urlsplit(url)
    assert parts.hostname
    with closing(socket.create_connection((parts.hostname, parts.port or 0))) as connection:
        connection.sendall(request.encode("latin-1"))
        answer = b""
        while data := connection.recv(65536):
            answer += data
    return int(answer.split(b" ", 2)[1]), answer


def get(url: str, path: str, host: str | None = None, method: str = "GET") -> tuple[int, bytes]:
    """A request for a path, which is not normalised on its way."""
    host = urlsplit(url).netloc if host is None else host
    return raw(url, f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n")


def test_the_page_and_its_answers_are_there(url: str):
    """Each file with its type, each answer as JSON."""
    page = requests.get(url)
    assert (page.status_code, page.headers["content-type"]) == (200, "text/html; charset=utf-8")
    assert page.content == PAGE.files[""][0]
    script = requests.get(f"{url}assets/app.js")
    assert script.headers["content-type"] == "text/javascript; charset=utf-8"
    state = requests.get(f"{url}api/state").json()
    assert (state["indexed"], state["complete"], state["errors"]) == (2, True, [])
    rows = requests.get(f"{url}api/trajectories", params={"limit": "1", "sort": "-id"}).json()
    assert (rows["total"], [row["id"] for row in rows["rows"]]) == (2, ["t2"])
    for name in ("trajectory", "message", "tokens", "search"):
        answer = requests.get(f"{url}api/{name}", params={"id": "t1", "node": "0", "text": "a"})
        assert answer.status_code == (404 if name == "tokens" else 200)
    assert requests.head(url).status_code == 200


def test_every_answer_tells_the_browser_what_it_may_do(url: str):
    """Errors and refusals too: no script of others, no frame, no sniffing, no cache."""
    other = url.replace(urlsplit(url).path, "/x/")
    for address in (url, f"{url}api/state", f"{url}api/none", f"{url}api/trajectory?id=x", other):
        headers = requests.get(address).headers
        assert headers["content-security-policy"].startswith(
            "default-src 'none'; script-src 'self'"
        )
        assert "frame-ancestors 'none'" in headers["content-security-policy"]
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["referrer-policy"] == "no-referrer"
        assert headers["cache-control"] == "no-store"
        assert "access-control-allow-origin" not in headers
        assert "server" not in headers


def test_without_the_secret_there_is_nothing(url: str):
    """No path, a wrong one, a part of the right one; the answers are all the same."""
    secret = urlsplit(url).path.strip("/")
    assert len(secret) >= 32
    paths = ["/", "/api/state", "/x/api/state", f"/{secret[:-1]}/api/state", f"/{secret}x/", "//"]
    paths += [f"//{secret}/api/state", f"/x/{secret}/", f"/{secret.upper()}/", f"/%2e/{secret}/"]
    answers = {get(url, path) for path in paths}
    ((status, content),) = answers
    assert status == 404
    assert content.endswith(b"not found")
    assert get(url, f"/{secret}/api/state")[0] == 200


def test_each_server_has_a_secret_of_its_own(tmp_path: Path):
    """An address of yesterday does not work today."""
    path = write(tmp_path / "a.jsonl", line("t1"))
    secrets = set()
    for _ in range(2):
        with serving(path) as address:
            secrets.add(urlsplit(address).path)
    assert len(secrets) == 2


@pytest.mark.parametrize(
    "host",
    [
        "evil.example",
        "evil.example:{port}",
        "127.0.0.1.evil.example",
        "[::1].evil.example",
        "[::1",
        "0x7f000001",
        "",
    ],
)
def test_a_request_under_another_name_is_refused(url: str, host: str):
    """A name that somebody else has pointed at this machine leads nowhere, with the secret too."""
    port = urlsplit(url).port
    assert get(url, urlsplit(url).path, host.format(port=port))[0] in (400, 404)


@pytest.mark.parametrize(
    "host", ["localhost:{port}", "127.0.0.1:{port}", "[::1]:{port}", "LOCALHOST"]
)
def test_names_of_this_machine_are_known(url: str, host: str):
    """With and without a port."""
    assert get(url, urlsplit(url).path, host.format(port=urlsplit(url).port))[0] == 200


def test_two_names_are_none(url: str):
    """A request with two hosts is for neither."""
    path, netloc = urlsplit(url).path, urlsplit(url).netloc
    head = f"GET {path} HTTP/1.1\r\nHost: {netloc}\r\nHost: evil.example\r\n"
    assert raw(url, f"{head}Connection: close\r\n\r\n")[0] in (400, 404)


@pytest.mark.parametrize(
    "method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"]
)
def test_nothing_can_be_changed(url: str, method: str):
    """Only GET and HEAD are answered, of pages and answers alike."""
    for path in ("", "api/state", "assets/app.js"):
        assert get(url, f"{urlsplit(url).path}{path}", method=method)[0] == 405


@pytest.mark.parametrize(
    "path",
    [
        "../../etc/passwd",
        "assets/../../../../etc/passwd",
        "assets/%2e%2e/%2e%2e/etc/passwd",
        "assets/..%2f..%2fserver.py",
        "%2fetc%2fpasswd",
        "/etc/passwd",
        "assets/app.js%00.css",
        "assets/",
        "assets",
        "api",
        "api/",
        "api/load",
        "api/__class__",
        "index.html",
        "..\\..\\server.py",
    ],
)
def test_no_path_leads_to_a_file(url: str, path: str):
    """There is what was read at the start, under its own name, and nothing else."""
    status, content = get(url, f"{urlsplit(url).path}{path}")
    assert status in (307, 404)
    assert b"root:" not in content
    assert b"import" not in content


@pytest.mark.parametrize(
    "query",
    [
        "id=' OR 1=1 --",
        "id=%00",
        "id=" + "x" * 20_000,
        "id=%ff%fe",
        "id=../../etc/passwd",
        "id=%",
        "id=<script>",
        "",
        "id=t1&row=-1&start=x",
        "id=t1&count=99999999999999999999",
        "id=t1&node=1e9",
        "id=t1&row=٣",
    ],
)
@pytest.mark.parametrize("name", ["trajectory", "tokens", "message", "group", "search", "diff"])
def test_hostile_queries_are_answered_with_a_sentence(url: str, name: str, query: str):
    """Never with an error of the server, and never as a page."""
    answer = requests.get(f"{url}api/{name}?{query}")
    assert answer.status_code in (200, 400, 404)
    assert answer.headers["content-type"] == "application/json"
    assert answer.status_code == 200 or set(answer.json()) == {"error"}


def test_a_wrong_filter_says_what_is_wrong(url: str):
    """In words, as 400; a field that is not there too."""
    answer = requests.get(f"{url}api/trajectories", params={"where": "__import__('os')"})
    assert answer.status_code == 400
    assert "where" in answer.json()["error"]
    assert requests.get(f"{url}api/summary", params={"where": "x" * 30_000}).status_code == 400
    deep = "(" * 5_000 + "1" + ")" * 5_000
    assert requests.get(f"{url}api/summary", params={"where": deep}).status_code == 400
    assert requests.get(f"{url}api/trajectories", params={"sort": "x"}).status_code == 400


def test_content_is_data(url: str):
    """What an agent was told stands in JSON as it is, which no browser takes for a page."""
    answer = requests.get(f"{url}api/message", params={"id": "t1", "node": "0"})
    assert answer.json()["message"]["content"] == HOSTILE
    assert answer.headers["content-type"] == "application/json"


def test_many_ask_at_once(url: str):
    """Each thread reads on a connection of its own."""
    found: list[int] = []

    def read() -> None:
        for name in ("state", "trajectories", "summary", "groups"):
            found.append(requests.get(f"{url}api/{name}").status_code)
        found.append(requests.get(f"{url}api/trajectory", params={"id": "t1"}).status_code)

    threads = [threading.Thread(target=read) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == [200] * 60


def test_others_do_not_reach_it_unless_that_is_meant(tmp_path: Path):
    """An address that other machines reach is refused, by name and by number."""
    path = write(tmp_path / "a.jsonl", line("t1"))
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with (
            pytest.raises(ConfigurationError, match="OTEL_ROLLOUT_VIEW_REACHABLE=1"),
            serving(path, host=host),
        ):
            pass
    with serving(path, host="0.0.0.0", reachable=True) as address:
        port = urlsplit(address).port
        near = address.replace("0.0.0.0", "127.0.0.1")
        assert get(near, urlsplit(address).path, f"192.0.2.1:{port}")[0] == 200
        assert get(near, urlsplit(address).path, "evil.example")[0] == 404


def test_a_port_that_is_taken_is_named(tmp_path: Path):
    """The error says which."""
    path = write(tmp_path / "a.jsonl", line("t1"))
    with serving(path) as address, Index([str(path)], cached=False, follow=False) as index:
        port = urlsplit(address).port
        assert port
        with pytest.raises(ConfigurationError, match=f"port {port} of 127"):
            Server(Answers(index), PAGE, port=port)
        with pytest.raises(ConfigurationError, match="port 99999"):
            Server(Answers(index), PAGE, port=99999)


def test_numbers_that_json_lacks_are_null(tmp_path: Path):
    """A file may hold NaN where a number is expected; every browser reads the answer."""
    odd = json.dumps(line("t1", Call([{"role": "user", "content": "x", "n": float("nan")}])))
    path = tmp_path / "a.jsonl"
    path.write_text(odd + "\n")
    with serving(path) as address:
        answer = requests.get(f"{address}api/message", params={"id": "t1", "node": "0"})
        assert answer.json()["message"]["n"] is None
