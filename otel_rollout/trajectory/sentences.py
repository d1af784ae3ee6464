"""The sentences that a trajectory's warnings are: each with its kind, and with what to do.

A warning is made from its sentence here, and recognised by it again: in JSON it is only a text.
Pure; a text is matched in one pass, however long it is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from string import Formatter
from typing import Literal

from otel_rollout.spans import DIFFERS, WAS_CUT

Kind = Literal[
    "incomplete",
    "inexact",
    "damaged",
    "drift",
    "unscored",
    "side_call",
    "duplicate",
    "failed",
    "truncated",
    "dropped",
    "mixed_policy",
    "uncertain",
]
"""Kinds of findings:
incomplete: calls or spans are missing. inexact: token ids or log-probabilities are missing or
doubtful. damaged: something recorded cannot be read, or is not proved. drift: calls whose messages
continue a call and whose token ids do not. unscored: no reward. side_call: made beside the agent.
duplicate: an id that several have. failed: a rollout or a call failed, or was cancelled.
truncated: the model did not end a reply itself. dropped: left out as was asked, or nothing was
sampled. mixed_policy: several versions of the policy sampled it. uncertain: what continues what is
not certain."""


@dataclass(frozen=True)
class Sentence:
    """One kind of warning: its words, with `{names}` for what differs."""

    words: str
    kind: Kind
    advice: str
    """What to do, one or two sentences with full stops."""

    def __call__(self, **values: object) -> str:
        """The warning with these values."""
        return self.words.format(**values)

    @cached_property
    def _parts(self) -> list[tuple[str, str | None]]:
        """Each fixed text, and the name of the value after it."""
        return [(text, name) for text, name, _, _ in Formatter().parse(self.words)]

    def values(self, text: str) -> dict[str, str] | None:
        """The values of a warning that this sentence made; None for any other text.

        A value ends where the next fixed text begins first; the last fixed text is at the end.
        """
        found: dict[str, str] = {}
        place, waiting = 0, None
        for number, (fixed, name) in enumerate(self._parts, 1):
            is_last = number == len(self._parts) and name is None
            if waiting is None:
                start = 0 if text.startswith(fixed) else -1
            elif is_last:
                start = len(text) - len(fixed) if text.endswith(fixed) else -1
            else:
                start = text.find(fixed, place) if fixed else len(text)
            if start < place:
                return None
            if waiting is not None:
                found[waiting] = text[place:start]
            place, waiting = start + len(fixed), name
        if waiting is not None:
            found[waiting] = text[place:]
        return found if waiting is not None or place == len(text) else None


def sentence_of(warning: str) -> tuple[Sentence, dict[str, str]]:
    """The sentence that a warning was made from, with its values; `UNKNOWN` for any other text."""
    for sentence in _all():
        if (values := sentence.values(warning)) is not None:
            return sentence, values
    return UNKNOWN, {}


# --- calls that are not here

_ALL_SPANS = (
    "Give all sources that the run wrote, once it has ended, and read from one that keeps all "
    "spans: a file, or a backend without sampling"
)
NO_SPAN = Sentence(
    "the rollout's own span did not come: its name, rewards, how it ended and how many model calls "
    "it made are not known",
    "incomplete",
    f"{_ALL_SPANS}. A process that is killed writes no such span.",
)
MISSING = Sentence(
    "{missing} of {began} model calls are missing: their spans did not come",
    "incomplete",
    f"{_ALL_SPANS}. Otherwise leave the trajectory out (require_all_calls=True).",
)
MISSING_CONTENT = Sentence(
    "{missing} of {began} model calls are missing: content was kept off its spans "
    "(configure(content='none')), trajectories are whole only in its own process",
    "incomplete",
    "Take the trajectories from the process itself (JsonlTrajectoryExporter, gather_trajectory), "
    "or record content.",
)
GAPS = Sentence(
    "at least {gaps} model calls are missing: their spans did not come, or they had not ended",
    "incomplete",
    f"{_ALL_SPANS}. Otherwise leave the trajectory out (require_all_calls=True).",
)
LATE = Sentence(
    "{count} model calls had not ended when the rollout did; they are not part of it",
    "incomplete",
    "Await every task that the rollout starts, and read streams to their ends, before it returns.",
)
AFTER = Sentence(
    "{count} model calls began after the rollout had ended; they are not part of it",
    "incomplete",
    "Await every task that the rollout starts before it returns.",
)
ELSEWHERE = Sentence(
    "it was handed on to another process, of which no span is here: calls that were made there are "
    "missing (reconstruct from the spans of both, or add_spans)",
    "incomplete",
    "Give the sources of both processes, or hand its spans over with trajectory.add_spans(...).",
)
COUNT_UNKNOWN = Sentence(
    "how many model calls it made is not known",
    "incomplete",
    "Read from a source that keeps attributes of any length and number.",
)
UNCAPTURED_UNKNOWN = Sentence(
    "how many of its model calls were not captured is not known",
    "incomplete",
    "Read from a source that keeps attributes of any length and number.",
)
UNCAPTURED = Sentence(
    "{count} {requests} to {path} went through {library} and {were} not captured",
    "incomplete",
    "Use a client that is captured (`otel-rollout doctor` lists them; LiteLLM is one), or send the "
    "calls through the gateway.",
)
OUTSIDE = Sentence(
    "{count} {calls} {were} made outside any rollout while it ran, in {place}: if they are its "
    "own, hand the rollout on to there (propagate, continue_rollout)",
    "incomplete",
    "Hand the rollout on to there (propagate, continue_rollout), or exempt calls that are not its "
    "own with no_capture().",
)
PROGRAMS_GIVEN = Sentence(
    "{count} {programs} ({names}) {were} started with the address or the key of a model server: "
    "calls that were made there are not captured",
    "incomplete",
    "Send them through a gateway: rollout(..., gateway=True), or otel_rollout.gateway.around().",
)
PROGRAMS = Sentence(
    "it started {count} {programs} ({names}): model calls that were made there are not captured",
    "incomplete",
    "If they make model calls, send these through a gateway: rollout(..., gateway=True).",
)
NO_CALL = Sentence(
    "it made no model call that was captured: check that its client is one that is captured "
    "(`otel-rollout doctor`), that the calls are made where the rollout is current (not in a "
    "thread or process that is older than it), and not under no_capture()",
    "incomplete",
    "Run `otel-rollout doctor` with your set-up: it says which clients are captured.",
)
TO_GATEWAY = Sentence(
    "{count} {calls} of it went to a gateway, which records what it is asked in the rollout that "
    "the URL or the key names",
    "incomplete",
    "Read the gateway's file: this rollout is beside the one that has the calls.",
)
NO_CALL_ENDED = Sentence(
    "it made no model call that was captured before it ended as {status}",
    "incomplete",
    "See the error of the rollout; there is nothing of it to train on.",
)
LIMITED = Sentence(
    "a limit on the number of attributes cut this rollout's spans: calls may be missing",
    "incomplete",
    "Raise OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT, or SpanLimits(max_span_attributes=...).",
)
REFUSED = Sentence(
    "{count} model calls were not kept: the running rollouts held {size} bytes "
    "(TrajectorySpanProcessor(max_bytes=...))",
    "incomplete",
    "Give the processor more (max_bytes), or run fewer rollouts at once.",
)
SHUT_DOWN = Sentence(
    "the tracer provider was shut down while this rollout was running: what came afterwards is not "
    "part of it",
    "incomplete",
    "Call shutdown() only when the rollouts have ended.",
)
PASSED_OVER = Sentence(
    "{count} spans of its trace were passed over: their {key} was cut",
    "incomplete",
    "Read from a source that keeps attributes of any length.",
)
NO_ROOT = Sentence(
    "inferred: its root span did not come: how it ended is not known",
    "incomplete",
    f"{_ALL_SPANS}.",
)
LOST_REWARDS = Sentence(
    "{count} rewards that came after the rollout are missing: their spans did not come, what they "
    "replaced may still be there",
    "incomplete",
    "Give the sources that have the spans of the rewards too.",
)
EPISODE_NOT_HERE = Sentence(
    "{count} of the {of} trajectories of its episode have not come", "incomplete", f"{_ALL_SPANS}."
)
NOT_HERE = Sentence(
    "completion {id} continues the response {previous}, which is not here: what was said before "
    "its own request is not known",
    "incomplete",
    "Make the calls of one conversation in one rollout. What the call itself sampled is known.",
)
ITEM_NOT_HERE = Sentence(
    "completion {id} refers to the item {item}, which no earlier call here has: what its request "
    "said there is not known",
    "incomplete",
    "Make the calls of one conversation in one rollout. What the call itself sampled is known.",
)
UNREAD = Sentence(
    "exchange {span}: its response has choices, but no model API is known at {path}; what was "
    "sampled there is in no completion, and does not train",
    "incomplete",
    "Ask the model at a path of an API that is known (docs/model-apis.md).",
)
NO_SHAPE = Sentence(
    "exchange {span}: its response has a shape that is not read at {path}; what was sampled there "
    "is in no completion, and does not train",
    "incomplete",
    "See the response in the trajectory: docs/model-apis.md says what is read of each API.",
)

# --- what cannot be read, or is not proved

_KEPT = (
    "Record again with a source that keeps attributes of any length (docs/limits.md); the damaged "
    "part does not train."
)
DAMAGED = Sentence("exchange {span}: {damage}", "damaged", _KEPT)
NO_BLOB = Sentence(
    "{blob}, so the response of exchange {span} is not whole",
    "damaged",
    "Set OTEL_ROLLOUT_BLOBS to the URL where the blobs are; tokens do not need this one.",
)
CUT = Sentence(WAS_CUT, "damaged", _KEPT)
COPIES_DIFFER = Sentence(
    DIFFERS,
    "damaged",
    "Leave out the source whose copy was changed: what they differ in is not believed.",
)
UNREADABLE = Sentence("its {key} cannot be read", "damaged", _KEPT)
NEWER = Sentence(
    "it was written by a newer otel-rollout: what that added is not read",
    "damaged",
    "Update otel-rollout.",
)
DISPUTED = Sentence(
    "{count} spans say that they are its own: the first is read, and nothing of it trains",
    "damaged",
    "Leave out the source that has the span of the other one: ids are unique unless spans are "
    "forged or changed.",
)
STRANGERS = Sentence(
    "{count} parts of other processes are not in its trace: they are passed over",
    "damaged",
    "Continue the rollout with the headers of propagate(), so that its parts are in one trace.",
)
CUT_REWARDS = Sentence(
    "{count} rewards that came after the rollout were cut; what they may have replaced is None",
    "damaged",
    "Set the reward again, and read from a source that keeps attributes of any length.",
)
CLAIMS_ITSELF = Sentence(
    "it claims calls of itself: they stay where they are",
    "damaged",
    "Its span was changed: check what is between the recording process and this source.",
)
CLAIMS_ELSEWHERE = Sentence(
    "it claims calls of the rollout {id}, which is in another trace: they are not given to it",
    "damaged",
    "Run the workflow and its trajectories in one trace.",
)

# --- what is less than what was on the wire, or not certain

INFERRED = Sentence(
    "inferred: no rollout was recorded; its calls were read from spans of the dialect {dialect}, "
    "which does not keep: {lost}",
    "inexact",
    "Record with otel-rollout to train on exact tokens; docs/dialects.md says what each keeps.",
)
FROM_DOCUMENT = Sentence(
    "no rollout was recorded; its calls were read from a document of the format {format}, which "
    "does not keep: {lost}",
    "inexact",
    "Record with otel-rollout to train on exact tokens; docs/dialects.md says what each keeps.",
)
NO_ENTRY = Sentence(
    "NeMo Gym marked it as incomplete: the token ids of a call are missing",
    "incomplete",
    "Have its model server send token ids and log-probabilities with every reply.",
)
NO_ID = Sentence(
    "a response came without an id; its completion is {id}",
    "uncertain",
    "Nothing has to be done: the id is made of the span's. A proxy may have taken the server's.",
)
CONTRADICTED = Sentence(
    "the stream on span {span} contradicts itself, and does not train: {what}",
    "inexact",
    "Update the model server or the proxy that sent this stream, or ask it without stream; "
    "completion.response has what its pieces were put together to.",
)
NO_NUMBERS = Sentence(
    "completion {id}: {count} log-probabilities are not numbers, or stand for one that is not "
    "known; they are None",
    "inexact",
    "Ask the server for log-probabilities of the sampled tokens, without masking them.",
)
FEWER_CHOICES = Sentence(
    "completion {id}: its request asks for {asked} choices, and {came} came",
    "uncertain",
    "Nothing has to be done if the server, or a proxy before it, leaves choices out; what came "
    "trains, unless its token counts are of more.",
)
REPEATED = Sentence(
    "{count} responses have the id {id}: get_history({again}) gives the last of them",
    "duplicate",
    "Have the server, or what replays its answers (a cache?), give each response an id of its own.",
)
AMBIGUOUS = Sentence(
    "completion {id} continues a reply that was sampled identically as {others}; it is taken to "
    "continue {parent} (choice {choice})",
    "uncertain",
    "Nothing has to be done unless rewards of single replies matter: the replies are the same.",
)
NOT_ASKED = Sentence(
    "the server sends token ids to those who ask for them, and was not asked: "
    "otel_rollout.configure(request_token_ids=True)",
    "inexact",
    "Ask the server for them: configure(request_token_ids=True), or `with "
    "otel_rollout.request_token_ids():` around the calls.",
)
FIELDS_REFUSED = Sentence(
    "{count} replies have no token ids: the server refused the fields that ask for them ({fields})",
    "inexact",
    "Nothing has to be done for single ones; if they are many, see the server's log for why, and "
    "`otel-rollout doctor --server URL`.",
)
REWRITTEN = Sentence(
    "{replies} replies, {histories} histories: the client replays what was sampled in other words, "
    "first at completion {id}",
    "uncertain",
    "Send replies back as they came, so that turns are one history (docs/frameworks.md).",
)
UNKNOWN = Sentence(
    "",
    "uncertain",
    "Read the warning: this version does not know its sentence, another one wrote it.",
)


LOST = (
    *(NO_SPAN, MISSING, MISSING_CONTENT, GAPS, COUNT_UNKNOWN, ELSEWHERE, EPISODE_NOT_HERE),
    *(PASSED_OVER, LOST_REWARDS, CUT_REWARDS, DAMAGED, CUT, COPIES_DIFFER, DISPUTED, STRANGERS),
)
"""Those about spans that did not come, or came damaged: others may have them."""


def name_of(sentence: Sentence) -> str:
    """The name of a sentence here, in lower case."""
    return next((n for n, found in globals().items() if found is sentence), "unknown").lower()


def _all() -> Iterator[Sentence]:
    """Every sentence; those that others look like come first."""
    return iter(_SENTENCES)


_SENTENCES = [found for found in list(globals().values()) if isinstance(found, Sentence)]
_SENTENCES.remove(UNKNOWN)
