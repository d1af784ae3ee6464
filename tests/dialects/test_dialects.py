"""What is read of other instrumentations' spans, held against what our server saw and sent."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import openai
import pytest

from otel_rollout import Trajectory, gather_trajectory, reconstruct, rollout
from otel_rollout.rebuild.dialects.call import Dialect, Fact
from otel_rollout.rebuild.dialects.reader import dialect_of, dialects
from otel_rollout.spans.record import SpanRecord
from otel_rollout.wire import normalised_key
from tests.dialects.compare import (
    ALL,
    NAMES,
    lost_in,
    observed,
    pairs,
    spans_of,
    table,
    trajectories_of,
    wire_of,
)
from tests.dialects.record import EXPORTED
from tests.kit.recording import Clients, Recording

every_dialect = pytest.mark.parametrize("name", NAMES)
with_root = pytest.mark.parametrize("name", [name for name in NAMES if name != "litellm"])
"""Those whose traces have a root with the scenario's name."""
WITH_IDS = ("langsmith", "weave", "litellm", "openinference")
WITHOUT_EMBEDDINGS = ("langsmith", "litellm")
"""Those under which embeddings were not recorded."""
DOCS = Path(__file__).parents[2] / "docs" / "dialects.md"


def completions(name: str, scenario: str) -> Any:
    return trajectories_of(name)[scenario].completions


def changed(name: str, scenario: str, change: Any) -> list[SpanRecord]:
    """The recorded spans of one scenario, each as `change` leaves it (None: it did not come)."""
    trace_id = trajectories_of(name)[scenario].trace_id
    spans = [change(span) for span in spans_of(name) if span.trace_id == trace_id]
    return [span for span in spans if span is not None]


def only(spans: Any) -> Trajectory:
    (trajectory,) = reconstruct(spans, infer_rollouts=True)
    return trajectory


# --- what is kept


@pytest.mark.parametrize("name", ALL)
def test_what_is_not_declared_lost_is_exact(name: str):
    """Every fact of every call that differs from the wire is in the completion's `lost`."""
    compared = 0
    for wire, exchange, of_call in pairs(name):
        unnamed = {
            difference
            for difference in lost_in(wire, exchange, of_call)
            if not isinstance(difference, Fact) or difference.value not in exchange.lost
        }
        assert not unnamed or exchange.damage, wire.scenario
        compared += not exchange.damage
    assert compared > (15 if name == "anthropic" else 25)


@pytest.mark.parametrize("dialect", dialects(), ids=ALL)
def test_what_is_declared_lost_is_lost(dialect: Dialect):
    """Nothing is declared lost that every recorded call kept."""
    plain, streamed = observed(dialect, stream=False), observed(dialect, stream=True)
    assert dialect.loses <= plain | streamed
    assert dialect.loses_in_streams <= streamed
    assert not dialect.loses_in_streams & (plain | dialect.loses)


@every_dialect
def test_roles_texts_and_ids_are_those_of_the_wire(name: str):
    """In a call that is not damaged each message and reply has its role, text and tool calls."""
    for wire, exchange, of_call in pairs(name):
        if exchange.damage or "messages" not in wire.request:
            continue
        if lost_in(wire, exchange, of_call) & {Fact.CUSTOM_TOOLS, Fact.FUNCTION_CALL, Fact.PARTS}:
            continue
        read = exchange.request()["messages"]
        assert [_said(message) for message in read] == [
            _said(message) for message in wire.request["messages"]
        ], wire.scenario
        if wire.status != 200:
            assert [(c.status, c.message) for c in of_call] == [("error", None)]
        elif of_call[0].status == "complete":
            sent = [choice["message"] for choice in wire.reply["choices"]]
            if name == "logfire-v1":
                sent = sent[:1]
            assert [_said(c.message) for c in of_call] == [_said(m) for m in sent], wire.scenario


def _said(message: Any) -> Any:
    calls = [
        (call["id"], call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls") or ()
        if call["type"] == "function"
    ]
    content = message.get("content") or message.get("refusal") or ""
    if isinstance(content, list):
        content = [
            part.get("text") or part.get("refusal") or (part.get("image_url") or {}).get("url")
            for part in content
        ]
        content = content[0] if len(content) == 1 else content
    return message["role"], content, calls, message.get("tool_call_id")


@every_dialect
def test_nothing_is_exact(name: str):
    """No completion that was inferred says that it is what was on the wire."""
    for trajectory in trajectories_of(name).values():
        for completion in trajectory.completions:
            assert completion.exchange.source == name
            assert not completion.exact
            assert completion.lost == completion.exchange.lost != []
            assert not (completion.trainable and completion.exchange.damage)


def test_token_ids_and_logprobs_are_those_of_the_wire():
    """Where they are there at all; of streams only one dialect has them."""
    for name in NAMES:
        for wire, _, of_call in pairs(name):
            if wire.scenario != "tokens":
                continue
            (completion,), (choice,) = of_call, wire.reply["choices"]
            found = completion.token_ids, completion.prompt_token_ids, completion.logprobs
            streamed = wire.request.get("stream")
            if name == "openinference" or (name in WITH_IDS and not streamed):
                logprobs = [row["logprob"] for row in choice["logprobs"]["content"]]
                assert found == (choice["token_ids"], wire.reply["prompt_token_ids"], logprobs)
            else:
                assert found == (None, None, None), name


@pytest.mark.parametrize("field", ["token_ids", "prompt_token_ids", "logprobs"])
def test_token_ids_that_do_not_add_up_are_unknown(field: str):
    """Token ids whose number is not that of usage or log-probabilities are None, not guessed."""

    def shorten(span: SpanRecord) -> SpanRecord:
        value = span.text("output.value")
        if value is None:
            return span
        reply = json.loads(value)
        holder = reply if field == "prompt_token_ids" else reply["choices"][0]
        if field == "logprobs":
            holder["logprobs"]["content"].pop()
            reply.pop("usage", None)
        else:
            holder[field].pop()
        return replace(span, attributes={**span.attributes, "output.value": json.dumps(reply)})

    spans = changed("openinference", "tokens", shorten)
    first, second = only(spans).completions
    assert first.token_ids is None
    assert first.prompt_token_ids is None
    assert Fact.TOKEN_IDS.value in first.lost
    assert first.message == completions("openinference", "tokens")[0].message
    if field != "prompt_token_ids":  # a stream without usage says nothing of its prompt's length
        assert second.token_ids is None


# --- histories


@every_dialect
@pytest.mark.parametrize(
    ("scenario", "length"),
    [("chat", 5), ("stream", 5), ("tools", 4), ("stream_tools", 4), ("parallel_tools", 5)],
)
def test_a_conversation_is_one_history(name: str, scenario: str, length: int):
    """A reply is recognised in the request that replays it, tool calls and all."""
    trajectory = trajectories_of(name)[scenario]
    (history,) = trajectory.histories
    assert len(history.messages()) == length
    first, second = trajectory.completions
    assert history.completions == [first, second]
    if not first.exchange.damage:
        assert [item.trainable for item in history.items].count(True) == 2
    sent = [wire for wire in wire_of(name) if wire.scenario == scenario][1].request["messages"]
    assert [normalised_key(m) for m in history.messages()[:-1]] == [normalised_key(m) for m in sent]
    if scenario.endswith("tools") and name != "openai-v2":
        assert history.tools is not None


@pytest.mark.parametrize("name", [name for name in NAMES if name != "logfire-v1"])
def test_the_choice_that_was_continued_is_the_one(name: str):
    """Of two choices the replayed one goes on; the other one is a history of its own."""
    first, second, last = completions(name, "choices")
    assert (first.choice_index, second.choice_index) == (0, 1)
    assert first.id == second.id
    if name != "langfuse":
        assert (first.finish_reason, second.finish_reason) == ("stop", "length")
    histories = trajectories_of(name)["choices"].histories
    assert [h.completions for h in histories] == [[second, last], [first]]


@pytest.mark.parametrize("name", ["genai", "openllmetry", "logfire", "logfire-v1"])
def test_a_tool_loop_of_the_responses_api_is_one_history(name: str):
    """Items that were read as chat messages join; a call that names another by id does not."""
    first, second, third = completions(name, "responses")
    histories = trajectories_of(name)["responses"].histories
    assert [h.completions for h in histories] == [[third], [first, second]]
    assert histories[1].messages()[0] == {"role": "system", "content": "Be terse."}
    assert Fact.PREVIOUS.value in third.lost


def test_openinference_keeps_the_responses_api():
    """Items are items, and a call continues the response that it names."""
    trajectory = trajectories_of("openinference")["responses"]
    (history,) = trajectory.histories
    assert history.completions == trajectory.completions
    assert (trajectory.completions[0].message or {})["type"] == "function_call"
    assert trajectory.completions[2].request["previous_response_id"] == trajectory.completions[1].id


# --- how calls ended


@every_dialect
def test_a_failed_call_is_an_error(name: str):
    """A call that the server refused has its error and no message, and the next one is whole."""
    failed, fine = completions(name, "error")
    assert (failed.status, failed.message, failed.trainable) == ("error", None, False)
    kind = "Error" if name == "langfuse" else "BadRequestError"
    assert failed.error["type"].rpartition(".")[2] == kind
    assert "too many tokens" in failed.error["message"]
    assert failed.request_messages == [{"role": "user", "content": "too long"}]
    assert (fine.status, fine.trainable) == ("complete", True)


@pytest.mark.slow
@every_dialect
@pytest.mark.parametrize("scenario", ["cut", "abandoned"])
def test_a_reply_that_broke_off_is_not_trained_on(name: str, scenario: str):
    """A stream that did not come to its end is never a complete reply, whatever its span says."""
    if (name, scenario) == ("litellm", "abandoned"):
        return  # it has no record
    (completion,) = completions(name, scenario)
    assert completion.status in ("error", "abandoned")
    assert not completion.trainable
    if scenario == "cut" and name not in ("openllmetry-flat", "weave", "litellm"):
        assert completion.message["content"] == "A reply that is long eno"


@pytest.mark.parametrize("name", ["openinference", "genai", "logfire", "logfire-v1"])
def test_a_cancelled_call_is_cancelled(name: str):
    """A cancelled call that has a span has that status and what it asked."""
    cancelled, _ = completions(name, "cancelled")
    assert (cancelled.status, cancelled.message, cancelled.trainable) == ("cancelled", None, False)
    assert cancelled.request_messages == [{"role": "user", "content": "are you there?"}]


@pytest.mark.parametrize("name", ["openinference", "openllmetry-flat", "logfire-v1"])
def test_text_completions_are_read(name: str):
    """A call of the completions API has its prompt as a message and its text as the reply."""
    first, second = completions(name, "completions")
    assert first.request_messages == [{"role": "user", "content": "Once upon"}]
    assert first.message == {"role": "assistant", "content": "upon a time"}
    assert second.message["content"] == "there was"


@pytest.mark.parametrize("name", [name for name in NAMES if name not in WITHOUT_EMBEDDINGS])
def test_embeddings_are_no_completions(name: str):
    """A call that generates nothing is an exchange without completions, and no reason to worry."""
    trajectory = trajectories_of(name)["embeddings"]
    assert [e.path for e in trajectory.exchanges] == ["/embeddings"]
    assert trajectory.completions == []
    assert [w for w in trajectory.warnings if not w.startswith("inferred:")] == []


# --- limits


@pytest.mark.parametrize("name", ["openinference", "openllmetry-flat"])
def test_a_conversation_with_evicted_attributes_is_damaged(name: str):
    """Where the limit on attributes dropped the first messages, the call says so."""
    for completion in completions(name, "long"):
        assert not completion.trainable
        assert any("missing" in sentence for sentence in completion.exchange.damage)
        assert completion.message is not None
    assert trajectories_of(name)["long"].histories == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [n for n in NAMES if n not in ("openinference", "openllmetry-flat")]
)
def test_a_long_conversation_in_one_attribute_is_whole(name: str):
    """A conversation of any length survives where it is one attribute."""
    (history,) = trajectories_of(name)["long"].histories
    assert len(history.messages()) == 75


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name not in EXPORTED])
def test_texts_that_a_limit_cut_are_damage(name: str):
    """Whatever a limit on the length of values cut is not trained on."""
    of_limit = completions(name, "value_limit")
    assert len(of_limit) == 2
    for completion in of_limit:
        assert not completion.trainable
        assert any("length limit" in sentence for sentence in completion.exchange.damage)


def test_a_dropped_attribute_counts_even_if_no_message_is_missing():
    """Evicted parameters leave no hole in the numbers; the count of dropped attributes does."""
    spans = changed("openllmetry-flat", "chat", lambda s: replace(s, dropped_attributes=3))
    assert [c.trainable for c in only(spans).completions] == [False, False]


def test_dropped_fields_of_openinference_count_too():
    """Where the request as a whole was dropped, fields without a hole are no proof of all."""
    values = ("input.value", "llm.tools.0.tool.json_schema")
    spans = changed(
        "openinference",
        "tools",
        lambda s: replace(
            s,
            attributes={k: v for k, v in s.attributes.items() if k not in values},
            dropped_attributes=2,
        ),
    )
    for completion in only(spans).completions:
        assert completion.request_messages
        assert completion.message is not None
        assert not completion.trainable
        assert "dropped by a limit" in completion.exchange.damage[0]


@with_root
def test_content_that_was_not_recorded_is_not_an_empty_conversation(name: str):
    """Spans of an instrumentation whose content capture is off give calls that say so."""
    content = ("messages", "prompt", "value", "request_data", "response_data", "completion", "put")

    def without_content(span: SpanRecord) -> SpanRecord:
        kept = {
            key: value
            for key, value in span.attributes.items()
            if not any(word in key for word in content)
        }
        if name.startswith("logfire") and "request_data" in span.attributes:
            kept["request_data"] = '{"model":"m"}'
        return replace(span, attributes=kept)

    trajectory = only(changed(name, "chat", without_content))
    assert len(trajectory.completions) == 2
    for completion in trajectory.completions:
        assert not completion.trainable
        assert completion.exchange.damage
        assert completion.message is None
    assert trajectory.histories == []


# --- the trajectory


@with_root
def test_each_trace_is_a_trajectory(name: str):
    """Id, name, times and status are those of the trace and its root span."""
    roots = {s.name: s for s in spans_of(name) if s.parent_span_id is None}
    for scenario, trajectory in trajectories_of(name).items():
        root = roots[scenario]
        assert trajectory.id == trajectory.trace_id == root.trace_id
        assert (trajectory.span_id, trajectory.status) == (root.span_id, "complete")
        assert trajectory.start_time_ns == root.start_time_ns
        assert trajectory.end_time_ns == root.end_time_ns
        assert trajectory.reward is None
        assert trajectory.warnings[0].startswith("inferred:")
        assert f"'{name}'" in trajectory.warnings[0]
        assert sum("inferred:" in warning for warning in trajectory.warnings) == 1
        for sentence in {fact for e in trajectory.exchanges for fact in e.lost}:
            assert sentence in trajectory.warnings[0]


@every_dialect
def test_nothing_is_inferred_unasked(name: str):
    """Without `infer_rollouts` the spans of others are passed over."""
    assert reconstruct(spans_of(name)) == []


@pytest.mark.slow
@every_dialect
def test_the_order_of_spans_is_no_matter(name: str):
    """Any order of the same spans, with duplicates, gives the same trajectories."""
    spans = [*spans_of(name), *spans_of(name)[:40]]
    random.Random(name).shuffle(spans)
    shuffled = reconstruct(spans, infer_rollouts=True)
    assert {t.id: t for t in shuffled} == {t.id: t for t in trajectories_of(name).values()}


@every_dialect
def test_an_inferred_trajectory_survives_as_data(name: str):
    """`to_dict` keeps where it was read and what is lost."""
    for trajectory in trajectories_of(name).values():
        again = Trajectory.from_dict(json.loads(json.dumps(trajectory.to_dict())))
        assert again == trajectory
        assert [(c.exact, c.lost, c.trainable) for c in again.completions] == [
            (c.exact, c.lost, c.trainable) for c in trajectory.completions
        ]
        assert [e.source for e in again.exchanges] == [name] * len(again.exchanges)


def test_a_trace_stores_each_message_once():
    """A conversation that was sent with every request is stored once, as from our own spans."""
    data = trajectories_of("genai")["tools"].to_dict()
    assert len(data["messages"]) == 3  # the last reply is in its response


def test_a_root_that_did_not_come_is_said():
    """Without its root span a trajectory does not know how it ended."""
    spans = changed("genai", "chat", lambda s: s if s.parent_span_id else None)
    trajectory = only(spans)
    assert trajectory.status == "unknown"
    assert any("its root span did not come" in warning for warning in trajectory.warnings)
    assert len(trajectory.completions) == 2


def test_a_root_that_failed_is_an_error():
    """The trajectory of a trace whose root has an error ended with that error."""
    spans = changed(
        "genai", "chat", lambda s: s if s.parent_span_id else replace(s, status_error="boom")
    )
    trajectory = only(spans)
    assert (trajectory.status, trajectory.termination_reason) == ("error", "error")
    assert trajectory.error == {"type": "Error", "message": "boom"}


def test_spans_without_a_model_call_are_nothing():
    """A trace in which no model was called is no trajectory."""
    spans = changed("genai", "chat", lambda s: s if s.parent_span_id is None else None)
    assert len(spans) == 1
    assert reconstruct(spans, infer_rollouts=True) == []


# --- several instrumentations at once


def nested(outer: str, inner: str, scenario: str) -> list[SpanRecord]:
    """One run under two instrumentations: the calls of `inner` run inside those of `outer`."""
    outside = changed(outer, scenario, lambda s: s)
    calls = sorted((s for s in outside if dialect_of(s)), key=lambda s: s.start_time_ns)
    inside = changed(inner, scenario, lambda s: s if dialect_of(s) else None)
    inside.sort(key=lambda s: s.start_time_ns)
    assert len(calls) == len(inside) > 0
    return outside + [
        replace(
            span,
            trace_id=call.trace_id,
            parent_span_id=call.span_id,
            start_time_ns=call.start_time_ns + 1,
            end_time_ns=(call.end_time_ns or 0) - 1,
        )
        for span, call in zip(inside, calls, strict=True)
    ]


INSIDE = ("openinference", "openllmetry", "genai", "openai-v2")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("outer", "inner"), [(one, two) for one in NAMES for two in INSIDE if one != two]
)
@pytest.mark.parametrize("scenario", ["chat", "tools", "error"])
def test_a_call_with_two_spans_is_one_call(outer: str, inner: str, scenario: str):
    """Of two instrumentations' spans of one call the one that keeps more is read."""
    trajectory = only(nested(outer, inner, scenario))
    assert len(trajectory.exchanges) == 2
    of_both = [trajectories_of(name)[scenario].exchanges for name in (outer, inner)]
    for read, *same in zip(trajectory.exchanges, *of_both, strict=True):
        assert read.source in (outer, inner)
        assert len(read.lost) == min(len(exchange.lost) for exchange in same)
    assert [c.status for c in trajectory.completions] == [
        c.status for c in completions(outer, scenario)
    ]


@pytest.mark.parametrize("inner", ["openinference", "genai"])
def test_a_damaged_span_gives_way_to_a_whole_one(inner: str):
    """What keeps more in general is not taken where it is damaged here."""

    def cut(span: SpanRecord) -> SpanRecord:
        cut_values = {
            key: value[:20] if key in ("input.value", "gen_ai.input.messages") else value
            for key, value in span.attributes.items()
            if isinstance(value, str)
        }
        return replace(span, attributes={**span.attributes, **cut_values})

    spans = [
        cut(span) if (d := dialect_of(span)) and d.name == inner else span
        for span in nested("openllmetry", inner, "chat")
    ]
    trajectory = only(spans)
    assert {e.source for e in trajectory.exchanges} == {"openllmetry"}
    assert all(c.trainable for c in trajectory.completions)


@pytest.mark.parametrize("scenario", ["chat", "error", "stream", "stream_tools", "tools"])
def test_two_instrumentations_at_once_give_each_call_once(scenario: str):
    """In a real run under two instrumentations each request is one call, as the richer has it."""
    trajectory = trajectories_of("both")[scenario]
    wires = [wire for wire in wire_of("both") if wire.scenario == scenario]
    assert [e.source for e in trajectory.exchanges] == ["openinference"] * len(wires)
    assert [e.request()["messages"] for e in trajectory.exchanges] == [
        wire.request["messages"] for wire in wires
    ]
    assert len(trajectory.histories) == 1


def test_two_instrumentations_of_one_dialect_give_each_call_once():
    """A framework's span around a client's is the same call, though both are of one vendor."""
    fields = ("llm.", "openinference.")

    def framework(span: SpanRecord) -> SpanRecord:
        kept = {k: v for k, v in span.attributes.items() if k.startswith(fields)}
        return replace(
            span, span_id=span.span_id[::-1], scope="openinference.of.a.framework", attributes=kept
        )

    spans = changed("openinference", "tools", lambda s: s)
    outside = {s.span_id: framework(s) for s in spans if dialect_of(s)}
    inside = [
        replace(s, parent_span_id=outside[s.span_id].span_id) if s.span_id in outside else s
        for s in spans
    ]
    only_outside = only([*outside.values(), *(s for s in spans if s.span_id not in outside)])
    assert len(only_outside.histories) == 1
    assert [c.id for c in only_outside.completions] == [
        f"span-{e.span_id}" for e in only_outside.exchanges
    ]
    assert [c.id for c in only([*inside, *outside.values()]).completions] == [
        c.id for c in completions("openinference", "tools")
    ]


def test_spans_beside_each_other_at_one_time_are_one_call():
    """A framework's span that is not made current has the client's beside it, not inside."""

    def framework(span: SpanRecord, scope: str, shift: int) -> SpanRecord:
        kept = {k: v for k, v in span.attributes.items() if k.startswith(("llm.", "openinf"))}
        return replace(
            span,
            span_id=scope[0] * 16,
            scope=scope,
            attributes=kept,
            start_time_ns=span.start_time_ns - 10 + shift,
            end_time_ns=(span.end_time_ns or 0) + 10 + shift,
        )

    spans = changed("openinference", "structured", lambda s: s)
    (call,) = [s for s in spans if dialect_of(s)]
    two = [framework(call, "a.framework", 0), framework(call, "b.framework", 5)]
    (completion,) = only([*spans, *two]).completions
    assert completion.span_id == call.span_id
    (completion,) = only([s for s in [*spans, *two] if s is not call]).completions
    assert completion.span_id in {span.span_id for span in two}
    apart = [replace(two[0], start_time_ns=0, end_time_ns=1), *spans]
    assert len(only(apart).completions) == 2
    elsewhere = [replace(two[0], parent_span_id="e" * 16), *spans]
    assert len(only(elsewhere).completions) == 2


def test_parallel_samples_stay_apart():
    """Concurrent calls with one request are as many under two instrumentations as under one."""
    spans = changed("openinference", "structured", lambda s: s)
    (call,) = [s for s in spans if dialect_of(s)]
    fields = {k: v for k, v in call.attributes.items() if k.startswith(("llm.", "openinf"))}
    more = []
    for number in range(3):
        later = replace(call, start_time_ns=call.start_time_ns + number)
        value = str(call.attributes["output.value"]).replace("chatcmpl-000001", f"id-{number}")
        own = {**call.attributes, "output.value": value}
        more.append(replace(later, span_id=f"{number:016x}", attributes=own))
        span_id = f"{number + 1:x}" * 16
        more.append(replace(later, span_id=span_id, attributes=fields, scope="a.framework"))
    trajectory = only([s for s in spans if s is not call] + more)
    assert sorted(c.id for c in trajectory.completions) == ["id-0", "id-1", "id-2"]


def test_a_span_around_several_calls_is_none_of_its_own():
    """A span without id that has two calls of one instrumentation inside stands for both."""
    spans = changed("openinference", "chat", lambda s: s)
    calls = sorted((s for s in spans if dialect_of(s)), key=lambda s: s.start_time_ns)
    fields = {k: v for k, v in calls[0].attributes.items() if k.startswith(("llm.", "openinf"))}
    around = replace(
        calls[0],
        span_id="a" * 16,
        scope="a.framework",
        attributes=fields,
        end_time_ns=calls[1].end_time_ns,
    )
    inside = [replace(s, parent_span_id=around.span_id) if s in calls else s for s in spans]
    assert [c.span_id for c in only([around, *inside]).completions] == [s.span_id for s in calls]


def test_concurrent_calls_with_other_conversations_stay_apart():
    """What asks something else at the same time is another call, whoever wrote it."""
    spans = changed("openinference", "chat", lambda s: s)
    first, second = sorted((s for s in spans if dialect_of(s)), key=lambda s: s.start_time_ns)
    fields = {k: v for k, v in second.attributes.items() if k.startswith(("llm.", "openinf"))}
    other = replace(first, span_id="a" * 16, scope="a.framework", attributes=fields)
    rest = [s for s in spans if s is not second]
    assert len(only([other, *rest]).completions) == 2


def test_who_saw_more_answers_with_one_id_is_believed():
    """A server that repeats an id answered twice, though who keeps more of a call saw one."""
    spans = nested("openllmetry", "openinference", "structured")
    call = next(s for s in spans if (d := dialect_of(s)) and d.name == "openllmetry")
    spans.append(replace(call, span_id="c" * 16))
    assert [e.source for e in only(spans).exchanges] == ["openllmetry"] * 2


def test_siblings_with_one_response_id_are_one_call():
    """Spans beside each other join by the response id."""
    outer = changed("openllmetry", "chat", lambda s: s)
    root = next(s for s in outer if s.parent_span_id is None)
    beside = changed("genai", "chat", lambda s: s if s.parent_span_id else None)
    spans = [replace(s, trace_id=root.trace_id, parent_span_id=root.span_id) for s in beside]
    trajectory = only([*outer, *spans])
    assert [e.source for e in trajectory.exchanges] == ["genai", "genai"]


def test_calls_inside_each_other_with_different_ids_are_two():
    """A model call made while another one was current is a call of its own."""
    spans = nested("openllmetry", "genai", "chat")
    spans = [
        replace(s, attributes={**s.attributes, "gen_ai.response.id": f"other-{s.span_id}"})
        if (d := dialect_of(s)) and d.name == "genai"
        else s
        for s in spans
    ]
    assert len(only(spans).exchanges) == 4


def test_two_spans_of_one_instrumentation_are_two_calls():
    """The same response id twice from one instrumentation is a server that repeats ids."""
    spans = changed("genai", "chat", lambda s: s)
    calls = [s for s in spans if dialect_of(s)]
    again = replace(calls[0], span_id="f" * 16, parent_span_id=calls[0].span_id)
    assert len(only([*spans, again]).exchanges) == 3


# --- beside our own spans


async def test_a_trace_of_ours_is_rebuilt_from_ours_alone(recording: Recording, clients: Clients):
    """The instrumentation's span beside an exchange span is not counted again."""

    @rollout
    async def agent() -> None:
        await say(clients, "hi")

    await gather_trajectory(agent())
    assert recording.spans_named("chat ")
    (trajectory,) = reconstruct(recording.spans, infer_rollouts=True)
    assert trajectory == recording.trajectory
    (completion,) = trajectory.completions
    assert completion.exact
    assert completion.lost == []
    assert completion.exchange.source == "exchange"


async def test_calls_outside_of_a_rollout_can_be_inferred(recording: Recording, clients: Clients):
    """What the instrumentation wrote of a call without rollout is a trajectory if one asks."""
    await say(clients, "hi")
    assert reconstruct(recording.spans) == []
    (trajectory,) = reconstruct(recording.spans, infer_rollouts=True)
    assert trajectory.name == "chat m"
    assert trajectory.messages() == [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "You said: hi"},
    ]
    assert not trajectory.completions[0].exact


async def test_an_exchange_span_that_lacks_something_is_not_exact(
    recording: Recording, clients: Clients
):
    """`exact` is about what is there, not about who wrote it."""

    @rollout
    async def agent() -> None:
        client = clients.asynchronous(clients.serve())
        reply = await create(client, [{"role": "user", "content": "hi"}])
        again = {"role": "user", "content": "again"}
        for _ in range(3):
            await create(client, [{"role": "user", "content": "hi"}, reply, again])

    await gather_trajectory(agent())
    spans = [s for s in recording.spans if not s.name.startswith("recording")]
    exchanges = sorted(recording.spans_named("recording"), key=lambda s: s.start_time or 0)
    (trajectory,) = reconstruct([*spans, exchanges[-1]])
    assert [(c.exact, bool(c.exchange.damage)) for c in trajectory.completions] == [(False, True)]


def test_lines_that_were_written_before_are_read():
    """A trajectory's data without `source` and `lost` is that of our own spans."""
    data = trajectories_of("genai")["chat"].to_dict()
    for row in data["exchanges"]:
        del row["source"], row["lost"]
    for completion in Trajectory.from_dict(data).completions:
        assert (completion.exact, completion.lost) == (True, [])


async def say(clients: Clients, text: str) -> None:
    client = clients.asynchronous(clients.serve())
    await create(client, [{"role": "user", "content": text}])


async def create(client: openai.AsyncOpenAI, messages: Any) -> Any:
    made = await client.chat.completions.create(model="m", messages=messages)
    return made.choices[0].message.model_dump(exclude_none=True)


# --- streams of logfire


def test_streams_of_equal_requests_each_have_their_reply():
    """Concurrent calls with the same request get one reply each, none twice."""
    spans = changed("logfire", "stream", lambda s: s)
    first = min((s for s in spans if dialect_of(s)), key=lambda s: s.start_time_ns)
    same = "gen_ai.input.messages"
    outputs = [
        s for s in spans if s.attributes.get(same) == first.attributes[same] and s is not first
    ]
    assert len(outputs) == 1
    later = 1000
    twins = [
        replace(
            s,
            span_id=f"{number:016x}",
            start_time_ns=s.start_time_ns + later,
            end_time_ns=(s.end_time_ns or 0) + later,
        )
        for number, s in enumerate((first, outputs[0]), 1)
    ]
    trajectory = only([*spans, *twins])
    assert [(c.message or {})["content"] for c in trajectory.completions] == [
        "Paris.",
        "Paris.",
        "Lima.",
    ]
    assert [c.status for c in trajectory.completions] == ["complete"] * 3


def test_streams_of_equal_requests_stay_with_their_parents():
    """A reply belongs to a call with the same parent, though another one was as close in time."""
    spans = changed("logfire", "stream", lambda s: s)
    calls = sorted((s for s in spans if dialect_of(s)), key=lambda s: s.start_time_ns)
    of_first = [
        s
        for s in spans
        if s.attributes.get("gen_ai.input.messages") == calls[0].attributes["gen_ai.input.messages"]
    ]
    # The other agent's call ends before the first one does, its reply comes after the first one's.
    other = [
        replace(
            s,
            span_id=s.span_id[::-1],
            parent_span_id="a" * 16,
            start_time_ns=s.start_time_ns + (-5 if s is calls[0] else 5),
            end_time_ns=(s.end_time_ns or 0) + (-5 if s is calls[0] else 5),
        )
        for s in of_first
    ]
    output = next(s for s in other if not dialect_of(s))
    text = (output.text("gen_ai.output.messages") or "").replace("Paris", "Rome")
    other[other.index(output)] = replace(
        output, attributes={**output.attributes, "gen_ai.output.messages": text}
    )
    found = {c.span_id: (c.message or {})["content"] for c in only([*spans, *other]).completions}
    assert found[calls[0].span_id] == "Paris."
    assert found[calls[0].span_id[::-1]] == "Rome."


def test_a_stream_whose_second_span_is_missing_has_no_reply():
    """What a stream said is on a span that can be lost; then the call is damaged."""
    spans = changed("logfire", "stream", lambda s: None if s.name.startswith("streaming") else s)
    for completion in only(spans).completions:
        assert completion.message is None
        assert not completion.trainable
        assert "did not come" in completion.exchange.damage[0]


def test_what_logfire_scrubbed_is_damage():
    """A text that was replaced because it looked secret is not what the model saw."""

    def scrub(span: SpanRecord) -> SpanRecord:
        text = span.text("gen_ai.input.messages")
        if text is None:
            return span
        scrubbed = text.replace("capital", "[Scrubbed due to 'secret']")
        return replace(span, attributes={**span.attributes, "gen_ai.input.messages": scrubbed})

    assert not any(c.trainable for c in only(changed("logfire", "chat", scrub)).completions)


# --- stores that keep only text


@pytest.mark.slow
@every_dialect
def test_a_store_that_keeps_only_text_gives_the_same(name: str):
    """Booleans, numbers and lists that a store made text of are read as what they were."""

    def as_text(span: SpanRecord) -> SpanRecord:
        return replace(
            span,
            attributes={
                key: value if isinstance(value, str) else json.dumps(value)
                for key, value in span.attributes.items()
            },
        )

    for scenario in ("chat", "stream", "tools", "choices"):
        read = only(changed(name, scenario, as_text))
        assert read == trajectories_of(name)[scenario], scenario


# --- the documentation


def test_the_table_in_the_docs_is_what_was_recorded():
    """docs/dialects.md has the table that the recordings give."""
    assert table() in DOCS.read_text()
