"""Hostile spans at the command line: what a terminal gets, how much of it, and how it ends."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from otel_rollout import JsonlTrajectoryExporter, reconstruct, rollout
from otel_rollout import semconv as sc
from otel_rollout.command.cli import main
from otel_rollout.spans import SpanRecord, as_record, with_lengths
from otel_rollout.testing import Raw
from otel_rollout.view import format_trajectory
from otel_rollout.wire import dumps
from tests.kit.fuzzing import changed
from tests.kit.recording import Clients, Recording
from tests.kit.scenarios import play
from tests.kit.transports import to_json_line

STEERS = "\x1b]0;mine\x07\x1b[2J\r\x9b1m\u202eabc\u2066\u200b\u061c\U000e0041\xad"
pytestmark = pytest.mark.not_replayed("spans are made and changed by hand")


def record(number: int, attributes: dict[str, Any]) -> SpanRecord:
    attributes = with_lengths({sc.ROLLOUT_ID: "a" * 32, **attributes})
    return SpanRecord("span", "1" * 32, f"{number:016x}", None, number, 10**6, attributes)


def call(number: int, **more: Any) -> SpanRecord:
    attributes = {
        sc.EXCHANGE_VERSION: 1,
        sc.EXCHANGE_STATUS: "complete",
        sc.EXCHANGE_PROCESS: "p",
        sc.EXCHANGE_STARTED: number,
        sc.EXCHANGE_ENDED: number,
        sc.REQUEST_PATH: "/chat/completions",
    }
    return record(number, attributes | {getattr(sc, key): value for key, value in more.items()})


def as_json(spans: list[SpanRecord]) -> str:
    """The spans as OTLP/JSON lines."""

    def value(found: Any) -> dict[str, Any]:
        if isinstance(found, bool):
            return {"boolValue": found}
        if isinstance(found, int):
            return {"intValue": str(found)}
        return {"stringValue": found}

    return "".join(
        dumps(
            {
                "resourceSpans": [
                    {
                        "scopeSpans": [
                            {
                                "scope": {"name": sc.SCOPE},
                                "spans": [
                                    {
                                        "name": s.name,
                                        "traceId": s.trace_id,
                                        "spanId": s.span_id,
                                        "startTimeUnixNano": str(s.start_time_ns),
                                        "endTimeUnixNano": str(s.end_time_ns or 0),
                                        "attributes": [
                                            {"key": k, "value": value(v)}
                                            for k, v in s.attributes.items()
                                        ],
                                    }
                                ],
                            }
                        ]
                    }
                ]
            }
        )
        + "\n"
        for s in spans
    )


def test_nothing_that_is_shown_steers_the_terminal(
    recording: Recording, clients: Clients, tmp_path: Path, capsys: Any
):
    """Ids, roles, names, texts and warnings come from servers and senders."""
    body = {
        "id": f"id{STEERS}",
        "choices": [{"index": 0, "finish_reason": "stop"}],
    }
    body["choices"][0]["message"] = {"role": f"r{STEERS}", "content": f"c{STEERS}"}  # type: ignore[index]
    client = clients.sync(clients.serve([Raw(200, dumps(body).encode())]))
    with rollout(f"n{STEERS}", task_id=f"t{STEERS}", group_id=f"g{STEERS}") as trajectory:
        client.chat.completions.create(model="m", messages=[{"role": "user", "content": STEERS}])
        trajectory.metrics[f"m{STEERS}"] = 1
        trajectory.rewards[f"w{STEERS}"] = 1
    text = "".join(to_json_line([span]) for span in recording.spans)
    path = tmp_path / f"spans{STEERS}".replace("/", "")
    path.write_text(text + '{"\x1b[2J": 1}\n')
    for options in ([], ["--full"]):
        main(["show", str(path), *options])
        out, err = capsys.readouterr()
        assert "\\x1b" in out
        for character in set(STEERS) - set("0;mine]2J[1mabc"):
            assert character not in out
            assert character not in err
    main(["rebuild", str(path), "-o", str(tmp_path / "out"), "--force"])
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "message",
    [
        *({"tool_calls": ["x"]}, {"tool_calls": "x"}, {"tool_calls": [{"type": []}]}),
        *({"tool_calls": [{"function": "x"}]}, {"role": {}, "content": {"a": 1}}, {"role": [1]}),
        *({"content": [1, None, {"type": 1}, {"type": "text", "text": {}}]}, {"refusal": [1]}),
        *({"content": [{"type": "tool_use"}, {"type": "tool_result", "content": 1}]},),
    ],
    ids=dumps,
)
def test_any_message_can_be_shown(message: Any):
    span = call(
        1,
        RESPONSE_BODY=dumps({"id": "x", "choices": [{"message": message}]}),
        REQUEST_PARAMS='{"tools":[1,{"type":[]},{"type":"function","function":1}]}',
        REQUEST_KEY="messages",
    )
    (trajectory,) = reconstruct([span])
    for width in (None, 20, 80):
        assert "x" in format_trajectory(trajectory, width=width)


def test_what_histories_share_is_shown_once():
    """A fold line stands for it; what trains is said where it is shown."""
    from otel_rollout.spans import ExchangeWriter

    writer = ExchangeWriter()
    messages: list[Any] = [{"role": "user", "content": f"shared {n}"} for n in range(50)]
    spans = []
    for number in range(1, 21):
        asked = [*messages, {"role": "user", "content": f"own {number}"}]
        answer = {"role": "assistant", "content": f"answer {number}"}
        reply = {"id": f"c{number}", "choices": [{"message": answer, "finish_reason": "stop"}]}
        attributes = writer.request(dumps({"messages": asked}).encode())
        attributes |= writer.response(dumps(reply).encode())
        plain = call(number)
        known = {k: v for k, v in plain.attributes.items() if "lengths" not in k}
        spans.append(record(number, {**known, **attributes}))
    (trajectory,) = reconstruct(spans)
    assert len(trajectory.histories) == 20
    shown = format_trajectory(trajectory, width=None)
    assert shown.count("shared 7") == 1
    assert shown.count("… 50 messages as in history 1") == 19
    assert shown.count("● assistant") == 20
    assert "20 of 20 completions train" in shown
    assert len(shown.splitlines()) < 150


BOMBS: dict[str, Any] = {
    "events": {
        "RESPONSE_STREAM": True,
        "RESPONSE_EVENTS": "data: " + "x" * 22_000 + "\n\n\n\n" + "+\n\n" * 7_000 + "=",
    },
    "prompt": {
        "RESPONSE_BODY": '{"choices":[' + ",".join(['{"~packed":0}'] * 3_000) + "]}",
        "RESPONSE_PROMPT_IDS": dumps([{"base": "", "digest": "", "blocks": ["1," * 20_000 + "1"]}]),
    },
    "parameters": {
        "REQUEST_PARAMS": "{}",
        "REQUEST_SHARED": dumps({f"p{n}": "0" * 32 for n in range(1_000)}),
    },
    "depth": {"REQUEST_PARAMS": '{"a":' + "[" * 5_000 + "]" * 5_000 + "}"},
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_small_span_stays_small(name: str, tmp_path: Path, capsys: Any):
    """What would expand is damage of that call, and is said."""
    bomb, good = call(1, **BOMBS[name]), call(2, RESPONSE_BODY='{"id":"good","choices":[]}')
    source = tmp_path / "spans"
    source.write_text(as_json([bomb, good]))
    (trajectory,) = reconstruct([bomb, good])
    assert [w for w in trajectory.warnings if w.startswith(f"exchange {bomb.span_id}: ")]
    assert not any(c.trainable for c in trajectory.completions if c.span_id == bomb.span_id)
    size = len(dumps(trajectory.to_dict()))
    assert size < 5 * source.stat().st_size
    for verb in (
        ["rebuild", str(source), "-o", str(tmp_path / "out"), "--force"],
        ["show", str(source)],
    ):
        main(verb)
    assert len(capsys.readouterr().out) < 10_000
    assert (tmp_path / "out").stat().st_size == pytest.approx(size, abs=10)


@pytest.mark.slow
def test_hostile_files_end_with_a_sentence(recording: Recording, tmp_path: Path, capsys: Any):
    """Rebuild, show and export of changed spans: no traceback, and the others are written."""
    play("plain", "tool_loop", "streamed", "late_rewards")
    spans = [as_record(s) for s in recording.spans if s.name != "chat m"]
    draw = random.Random(5)
    source, target = str(tmp_path / "spans"), str(tmp_path / "out")
    for number in range(25):
        change = changed(spans, draw)
        try:
            text = as_json(change.spans)
        except (ValueError, RecursionError, TypeError, AttributeError):
            continue  # it has no form as OTLP/JSON
        Path(source).write_text(text, errors="backslashreplace")
        whole = {t.id: t for t in recording.trajectories}
        for verb in (
            ["rebuild", source, "-o", target, "--force"],
            ["show", source],
            [
                "export",
                source,
                "--to",
                "token-rows",
                "-o",
                f"{target}.rows",
                "--restart",
                "--force",
            ],
        ):
            assert main(verb) in (0, 1), change.what
        for found in JsonlTrajectoryExporter.read(target):
            if found.id in whole and not {found.id, found.trace_id} & change.touched:
                assert found == whole[found.id], (number, change.what)
    assert "Traceback" not in "".join(capsys.readouterr())
