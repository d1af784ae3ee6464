"""Rollouts of programs without Python: begun, rewarded and ended over HTTP.

    POST   /rollouts        {"name": ..., "task_id": ..., ...}  -> id, token, base URLs, environment
    PATCH  /rollouts/{id}   {"reward": 1.0}                     -> the reward is on the rollout
    PATCH  /rollouts        {"policy_version": 7}               -> that of all from now on
    DELETE /rollouts/{id}                                       -> it has ended

Each of them needs `Authorization: Bearer SECRET`: the agent is not to reward itself. Only JSON is
taken, so that no web page can send it from a browser on this machine. `openapi.json` describes
them, and has the names of the members that a request may have.
"""

from __future__ import annotations

import hmac
from collections.abc import Mapping
from functools import cache
from html import escape
from pathlib import Path

from otel_rollout.errors import RolloutError
from otel_rollout.gateway.http import Refusal, Scope
from otel_rollout.gateway.rollout_parts import HeldRollouts
from otel_rollout.gateway.tokens import Tokens
from otel_rollout.record import Options, record_reward
from otel_rollout.wire import Json, dumps, loads, object_in

_ROLLOUTS, _ROLLOUT = "/rollouts", "/rollouts/{id}"
_DESCRIPTIONS = ("/docs", "/openapi.json")


@cache
def description() -> dict[str, Json]:
    """The control routes as OpenAPI describes them."""
    found: dict[str, Json] = loads(Path(__file__).with_name("openapi.json").read_bytes())
    return found


def _members(operation: Json) -> dict[str, Json]:
    """The members of a request's body, as they are described."""
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    properties: dict[str, Json] = schema["properties"]
    return properties


def _row(method: str, path: str, operation: Json) -> str:
    members = "".join(
        f"<tr><td><code>{escape(name)}</code></td><td>{escape(member['description'])}</td></tr>"
        for name, member in _members(operation).items()
    )
    title = f"<h2><code>{method.upper()} {escape(path)}</code></h2>"
    return f"{title}<p>{escape(operation['summary'])}.</p><table>{members}</table>"


def page() -> str:
    """The description for people, without anything from elsewhere."""
    described = description()
    rows = "".join(
        _row(method, path, operation)
        for path, methods in described["paths"].items()
        for method, operation in methods.items()
        if method != "parameters"
    )
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem;"
        "color-scheme:light dark}td{padding:.1rem 1rem .1rem 0;vertical-align:top}"
    )
    info = described["info"]
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{info["title"]}</title>'
        f"<style>{style}</style><h1>{info['title']}</h1><p>{escape(info['description'])}</p>"
        f"<p>Send <code>Authorization: Bearer SECRET</code>. "
        f'The same for programs: <a href="openapi.json">openapi.json</a>.</p>{rows}</html>'
    )


ControlReply = tuple[int, bytes, str]
"""Status, body and type of a reply of the control routes."""


class Control:
    """The control routes of one gateway.

    secret: what they ask for.
    seconds: how long a rollout may be without a call, unless its request sets `timeout_seconds`.
    most: rollouts that are open at a time; a further one is refused with 429.
    """

    def __init__(
        self, held: HeldRollouts, tokens: Tokens, secret: bytes, seconds: float, most: int
    ) -> None:
        self._held = held
        self._secret = secret
        self._seconds = seconds
        self._most = most
        self._tokens = tokens

    @staticmethod
    def is_at(path: str) -> bool:
        """True if a path is one of the control routes."""
        return path in (*_DESCRIPTIONS, _ROLLOUTS) or path.startswith(_ROLLOUTS + "/")

    def answer(self, scope: Scope, path: str, body: bytes, root: str) -> ControlReply:
        """The reply to a request. Refusal for one that is wrong.

        root: the address that the client reached the gateway at.
        """
        method, headers = scope["method"], dict(scope["headers"])
        if method in ("GET", "HEAD") and path == "/docs":
            return 200, page().encode(), "text/html; charset=utf-8"
        if method in ("GET", "HEAD") and path == "/openapi.json":
            return _json(200, description())
        rollout_id = path.removeprefix(_ROLLOUTS).removeprefix("/")
        if method == "POST" and path == _ROLLOUTS:
            return self._begin(_object(body, headers, "post", _ROLLOUTS), root)
        if method == "PATCH":
            route = _ROLLOUT if rollout_id else _ROLLOUTS
            return self._change(rollout_id, _object(body, headers, "patch", route))
        if method == "DELETE" and rollout_id:
            asked = _object(body, headers, "delete", _ROLLOUT) if body else {}
            return self._end(rollout_id, asked)
        raise Refusal(405, f"the gateway has no {method} {path}: see /docs")

    def check(self, scope: Scope, path: str) -> None:
        """Refusal for who may not use the routes; what describes them is for all."""
        if scope["method"] in ("GET", "HEAD") and path in _DESCRIPTIONS:
            return
        headers = dict(scope["headers"])
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() != b"bearer" or not hmac.compare_digest(given.strip(), self._secret):
            raise Refusal(
                401, "this needs the header Authorization: Bearer SECRET", "authentication_error"
            )

    def _begin(self, asked: dict[str, Json], root: str) -> ControlReply:
        seconds = asked.pop("timeout_seconds", None)
        if seconds is None:
            seconds = self._seconds
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or seconds <= 0:
            raise Refusal(400, f"timeout_seconds: expected more than 0, got {seconds!r}")
        try:
            options = Options.of({"name": "rollout", **asked})
        except (RolloutError, ValueError) as error:
            raise Refusal(400, str(error)) from None
        if self._held.begun_count >= self._most:
            raise Refusal(429, f"{self._most} rollouts are open: end some", "rate_limit_error")
        active = self._held.begin(options, float(seconds))
        environment = self._tokens.environment(active, root)
        return _json(
            201,
            {
                "id": active.id,
                "token": environment["OPENAI_API_KEY"].partition("-")[2],
                "openai_base_url": environment["OPENAI_BASE_URL"],
                "anthropic_base_url": environment["ANTHROPIC_BASE_URL"],
                "environment": environment,
            },
        )

    def _change(self, rollout_id: str, asked: dict[str, Json]) -> ControlReply:
        """Reward a rollout, or set its version; "": set that of all."""
        active = self._held.begun(rollout_id)
        if active is None and rollout_id:
            raise _unknown(rollout_id)
        has_version, version = "policy_version" in asked, asked.pop("policy_version", None)
        if has_version and (isinstance(version, bool) or not isinstance(version, str | int)):
            raise Refusal(400, f"policy_version: expected a text or an integer, got {version!r}")
        if "reward" not in asked and (asked or not has_version):
            raise Refusal(400, "expected the member reward, a number, or policy_version")
        if active is not None and "reward" in asked:
            try:
                record_reward(asked.pop("reward"), trajectory=active.trajectory, **asked)
            except (RolloutError, ValueError, TypeError) as error:
                raise Refusal(400, str(error)) from None
        if has_version:
            self._held.set_version(version, rollout_id or None)
        if active is None:
            return _json(200, {"policy_version": version})
        reward, now = active.trajectory.reward, active.policy_version
        return _json(200, {"id": rollout_id, "reward": reward, "policy_version": now})

    def _end(self, rollout_id: str, asked: dict[str, Json]) -> ControlReply:
        error = RuntimeError(str(asked["error"])) if asked.get("error") else None
        if self._held.begun(rollout_id) is None:
            raise _unknown(rollout_id)
        self._held.end(rollout_id, asked.get("output"), error)
        return _json(200, {"id": rollout_id, "status": "error" if error else "complete"})


def _object(body: bytes, headers: Mapping[bytes, bytes], method: str, path: str) -> dict[str, Json]:
    """The JSON object that a request's body is. Refusal if it is none that is described."""
    if b"json" not in headers.get(b"content-type", b""):
        raise Refusal(415, "expected the header Content-Type: application/json")
    if (found := object_in(body)) is None:
        raise Refusal(400, "expected a JSON object")
    known = _members(description()["paths"][path][method])
    if unknown := found.keys() - known:
        raise Refusal(
            400, f"expected the members {', '.join(known)}, got {', '.join(sorted(unknown))}"
        )
    return found


def _unknown(rollout_id: str) -> Refusal:
    return Refusal(404, f"no rollout {rollout_id[:40]!r} was begun here, or it has ended")


def _json(status: int, value: Json) -> ControlReply:
    return status, dumps(value).encode(), "application/json"
