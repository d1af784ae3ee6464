"""A span exporter that writes large values beside the spans, before they leave the process.

Live trajectories, memory and files of trajectories have these values as before: only what the
wrapped exporter sends has references instead, which `read` and `reconstruct` read again.
"""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable, Sequence
from typing import Any

from opentelemetry.attributes import BoundedAttributes
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from otel_rollout import semconv as sc
from otel_rollout.errors import ConfigurationError
from otel_rollout.spans import BlobPlace, blob_reference, digest_of, has_reference, with_lengths
from otel_rollout.wire import cut_elements

logger = logging.getLogger("otel_rollout")

_MIN_BYTES = 1 << 16
_experts = re.compile(
    r'"rout(?:ed_experts|ing_matrices)":\s*("[^"\\]*"|\[[\[\]\d\s,.-]*\]|\["[^\\\]]*"\])'
)
"""Routed experts in a reply: base64, numbers in lists, or a list of texts."""


class BlobSpanExporter(SpanExporter):
    """Passes spans on to `exporter`, with large values in files of `url` instead.

        exporter = BlobSpanExporter(OTLPSpanExporter(), "s3://bucket/blobs")
        configure(span_exporters=[exporter])

    url: a folder, or that of any file system of fsspec (the extra `blobs`).
    min_bytes: smaller values stay on their spans.

    The values are messages of requests (images, results of tools), and routed experts of replies.
    In the place of each is `{"rollout.blob": {digest, bytes, type, uri}}`; the attribute
    `rollout.blobs` names the attributes that have some. A value that cannot be written stays on
    its span; the first time is logged. Who reads the spans sets `OTEL_ROLLOUT_BLOBS` to the URL.
    """

    def __init__(self, exporter: SpanExporter, url: str, *, min_bytes: int = _MIN_BYTES) -> None:
        if not isinstance(min_bytes, int) or min_bytes < 1:
            raise ConfigurationError(
                f"BlobSpanExporter(min_bytes=...): expected a number from 1 on, got {min_bytes!r}"
            )
        self.exporter = exporter
        """The exporter that sends the spans."""
        self._place = BlobPlace(url)
        self._min_bytes = min_bytes
        self._has_failed = False
        """True if the log has said that a blob cannot be written."""
        if callable(at_once := getattr(exporter, "export_at_once", None)):
            self.export_at_once = at_once

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Write the large values, and pass the spans on."""
        return self.exporter.export([self._slim(span) for span in spans])

    def _slim(self, span: ReadableSpan) -> ReadableSpan:
        """The span with references; the same one where it has no large value."""
        there = span.attributes or {}
        changed: dict[str, str] = {}
        for name, slim in _SLIM.items():
            text = there.get(name)
            if not isinstance(text, str) or len(text) < self._min_bytes or has_reference(text):
                continue
            if (made := slim(text, self._put)) != text:
                changed[name] = made
        if not changed:
            return span
        seals = (sc.LENGTHS, sc.CHECKSUMS)
        kept = {name: value for name, value in there.items() if name not in seals}
        noted = {sc.BLOBS: ",".join(changed)}
        attributes = BoundedAttributes(
            attributes=with_lengths({**kept, **changed, **noted}), immutable=False
        )
        attributes.dropped = span.dropped_attributes
        slim_span = copy.copy(span)
        slim_span._attributes = attributes
        return slim_span

    def _put(self, text: str) -> str:
        """The reference to a value that was written; the value where it is small, or could not."""
        data = text.encode()
        if len(data) < self._min_bytes:
            return text
        digest = digest_of(data).hex()
        try:
            return blob_reference(digest, len(data), self._place.put(digest, data))
        except Exception as error:  # a file system of others; a span exporter does not raise
            if not self._has_failed:
                logger.warning("blobs cannot be written, and stay on their spans: %r", error)
            self._has_failed = True
            return text

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        """Flush the wrapped exporter."""
        return self.exporter.force_flush(timeout_millis)

    def shutdown(self) -> None:
        """Shut the wrapped exporter down."""
        self.exporter.shutdown()


_Put = Callable[[str], str]


def _slim_messages(text: str, put: _Put) -> str:
    """The list with references in the place of large elements: each has the element's digest."""
    cuts = cut_elements(text)
    if cuts is None:
        return text
    return f"[{','.join(put(bytes(cut).decode()) for cut in cuts)}]"


def _slim_reply(text: str, put: _Put) -> str:
    """The reply, or its events, with references in the place of routed experts."""

    def value(match: re.Match[str]) -> str:
        return match[0].removesuffix(match[1]) + put(match[1])

    return _experts.sub(value, text)


_SLIM: dict[str, Callable[[str, _Put], Any]] = {
    sc.REQUEST_MESSAGES: _slim_messages,
    sc.RESPONSE_BODY: _slim_reply,
    sc.RESPONSE_EVENTS: _slim_reply,
}
