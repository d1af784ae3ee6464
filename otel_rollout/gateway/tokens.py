"""A token is the carrier of one rollout as a word: signed, and good while that rollout runs.

A process that does not run the rollout, such as a second gateway, takes it for a shorter time.

It is used in paths and in place of API keys, so it is made of letters, digits, `-` and `_`. Nobody
without the secret can make one, or change the rollout that one names.
"""

from __future__ import annotations

import binascii
import hmac
import os
import re
import struct
import time
from base64 import urlsafe_b64decode, urlsafe_b64encode
from dataclasses import dataclass
from hashlib import blake2s

from otel_rollout.errors import RolloutError
from otel_rollout.record import (
    BASE_URLS,
    KEY_PREFIX,
    TOKEN,
    ActiveRollout,
    Carried,
    headers_of,
    process_state,
)
from otel_rollout.wire import dumps, loads

_FIELDS = struct.Struct(">BQ16s16s8s4s")
"""Trainable or not, when it was made, ids of rollout, trace and span, whose rollout it is."""
_MORE = ("policy_version", "group_id", "group_size", "group_run", "outer_group_id")
"""Further fields of what is carried."""
_MAC = 16
"""Bytes of the signature."""
_NEAR = ("127.0.0.1", "localhost")
_WITHOUT_VERSION = ("ANTHROPIC_BASE_URL", "ANTHROPIC_API_BASE", "GOOGLE_GEMINI_BASE_URL")
"""Those that do not end in `/v1`."""
_is_token = re.compile(TOKEN).fullmatch


class TokenError(RolloutError):
    """A token that is not to be believed: none, forged, expired, or of a rollout that ended."""


@dataclass(frozen=True, slots=True)
class Token:
    """The content of a token."""

    carried: Carried
    """The rollout that it names."""
    is_own: bool
    """True if the rollout runs, or ran, in this very process."""


class Tokens:
    """Makes and reads tokens.

    secret: bytes that sign them; whoever has them can make tokens.
    seconds: how long a token is good for, at most.
    elsewhere: how long it is where its rollout does not run. None: as long.
    """

    def __init__(self, secret: bytes, seconds: float, elsewhere: float | None = None) -> None:
        self._secret = secret
        self._key = hmac.digest(secret, b"otel-rollout gateway token", "sha256")
        self._seconds = seconds
        self._elsewhere = min(seconds, seconds if elsewhere is None else elsewhere)
        self._read: dict[str, tuple[float, Token]] = {}
        """Tokens that were read, and when they expire: a rollout's calls all have the same one."""

    def token_of(self, carried: Carried, *, is_own: bool) -> str:
        """A token that names this rollout."""
        payload = _FIELDS.pack(
            carried.trainable,
            int(time.time()),
            bytes.fromhex(carried.rollout_id),
            carried.trace_id.to_bytes(16, "big"),
            carried.span_id.to_bytes(8, "big"),
            _home() if is_own else bytes(4),
        )
        payload += dumps([getattr(carried, name) for name in _MORE]).encode()
        return urlsafe_b64encode(payload + self._mac(payload)).rstrip(b"=").decode()

    def own(self, active: ActiveRollout) -> str:
        """The token of a rollout that runs in this process."""
        return self.token_of(Carried.of(active), is_own=True)

    def environment(self, active: ActiveRollout, url: str) -> dict[str, str]:
        """Environment variables for a program whose model calls belong to this rollout.

        url: the address at which the program reaches the gateway.
        """
        token = self.own(active)
        root, key = f"{url}/r/{token}", KEY_PREFIX + token
        return {
            **address_environment(url, root, key),
            "OTEL_ROLLOUT_ID": active.id,
            **headers_of(active, environ=True, secret=self._secret),
        }

    def read(self, text: str) -> Token:
        """The content of a token. TokenError for one that is forged, has expired, or is none."""
        expires, token = self._read.get(text) or self._checked(text)
        if expires < time.time():
            self._read.pop(text, None)
            raise TokenError("the token has expired: its rollout has to be begun anew")
        return token

    def _checked(self, text: str) -> tuple[float, Token]:
        try:
            data = urlsafe_b64decode(text + "=" * (-len(text) % 4)) if _is_token(text) else b""
        except binascii.Error:
            data = b""
        payload, mac = data[:-_MAC], data[-_MAC:]
        if len(payload) < _FIELDS.size or not hmac.compare_digest(mac, self._mac(payload)):
            raise TokenError("the token is not one of this gateway")
        if len(self._read) >= 1 << 12:
            self._read.clear()
        trainable, made, rollout_id, trace_id, span_id, home = _FIELDS.unpack_from(payload)
        carried = Carried(
            rollout_id.hex(),
            int.from_bytes(trace_id, "big"),
            int.from_bytes(span_id, "big"),
            trainable=bool(trainable),
            **dict(zip(_MORE, loads(payload[_FIELDS.size :]), strict=True)),
        )
        token = Token(carried, home == _home())
        life = self._seconds if token.is_own else self._elsewhere
        found = self._read[text] = made + life, token
        return found

    def _mac(self, payload: bytes) -> bytes:
        return hmac.digest(self._key, payload, "sha256")[:_MAC]


def address_environment(url: str, root: str, key: str) -> dict[str, str]:
    """Environment variables by which model clients find a server of ours.

    url: its address. root: the address that paths are below. key: stands for an API key.
    """
    return {
        **dict.fromkeys(BASE_URLS, f"{root}/v1"),
        **dict.fromkeys(_WITHOUT_VERSION, root),
        **dict.fromkeys(BASE_URLS.values(), key),
        "OTEL_ROLLOUT_GATEWAY": url,
        **_no_proxy(),
    }


def _home() -> bytes:
    """Four bytes that name this process."""
    return blake2s(process_state.name.encode(), digest_size=4).digest()


def _no_proxy() -> dict[str, str]:
    """`NO_PROXY` with this machine: a proxy of the network cannot reach the gateway."""
    existing = os.environ.get("NO_PROXY") or os.environ.get("no_proxy") or ""
    hosts = [host.strip() for host in existing.split(",") if host.strip()]
    every = ",".join(dict.fromkeys((*hosts, *_NEAR)))
    return {"NO_PROXY": every, "no_proxy": every}
