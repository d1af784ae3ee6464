"""Files of trajectories for people to look at: ordinary ones, a hard one and a hostile one.

Agents run over real HTTP on a model that speaks in whole words: a token is a word, as with a real
tokenizer, so that pages of tokens read as they do in earnest.
"""

from __future__ import annotations

import json
import math
import random
import re
import struct
import zlib
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai

import otel_rollout
from otel_rollout import JsonlTrajectoryExporter, get_current_trajectory, rollout
from otel_rollout.testing import ModelServer, Raw, Reply
from tests.kit.conversations import TITLE, Message, said, system, user

_WORDS = re.compile(r"<\|\w+\|>\n?| ?[\w']+|\n|[^\w\s<]+|<|\s")
IMAGE_WIDTH = 360


def _image() -> str:
    """A small chart, as a PNG in an address."""
    bars = {20: 45, 90: 75, 160: 20, 230: 95, 300: 60}

    def dot(x: int, y: int) -> int:
        return int(any(left <= x < left + 50 and y > 115 - top for left, top in bars.items()))

    lines = (bytes([0, *(dot(x, y) for x in range(IMAGE_WIDTH))]) for y in range(130))
    header = struct.pack(">IIBBBBB", IMAGE_WIDTH, 130, 8, 3, 0, 0, 0)
    chunks = {
        b"IHDR": header,
        b"PLTE": bytes.fromhex("f3f3f07fb0d8"),
        b"IDAT": zlib.compress(b"".join(lines)),
        b"IEND": b"",
    }
    png = b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        for kind, body in chunks.items()
    )
    return f"data:image/png;base64,{b64encode(png).decode()}"


IMAGE = _image()
BIDI, ESCAPE = "\u202e", "\x1b[31m"
HOSTILE = (
    f"<script>window.broken = 1</script><img src=x onerror='window.broken = 1'> {ESCAPE}red{BIDI}"
)
FORKS = 10_000
LONG = 50_000_000


class WordModel:
    """A model whose tokens are words, and the vocabulary that it makes as it goes."""

    def __init__(self, say: Callable[[dict[str, Any]], Message]) -> None:
        self._say = say
        self._ids: dict[str, int] = {}
        self._texts: list[str] = []
        self._random = random.Random(7)
        self._calls = 0

    def text(self, id_: int) -> str | None:
        """The text of a token, as a tokenizer that the user names gives it."""
        return self._texts[id_] if 0 <= id_ < len(self._texts) else None

    def _encode(self, text: str) -> list[int]:
        words = _WORDS.findall(text)
        for word in words:
            if word not in self._ids:
                self._ids[word] = len(self._texts)
                self._texts.append(word)
        return [self._ids[word] for word in words]

    def _rendered(self, message: Message) -> str:
        content = message.get("content") or ""
        if isinstance(content, list):
            content = "".join(part.get("text", "<|image|>") for part in content)
        calls = [
            json.dumps(call["function"], sort_keys=True) for call in message.get("tool_calls") or ()
        ]
        return "".join([message.get("reasoning_content") or "", content, *calls])

    def __call__(self, request: dict[str, Any]) -> Raw:
        """The reply to a request, as a server sends it."""
        prompt = "".join(
            f"<|im_start|>{each['role']}\n{self._rendered(each)}<|im_end|>\n"
            for each in request["messages"]
        )
        message = self._say(request)
        finish = message.pop("finish_reason", "tool_calls" if "tool_calls" in message else "stop")
        end = "" if finish == "length" else "<|im_end|>\n"
        ids = self._encode(f"{self._rendered(message)}{end}")
        self._calls += 1
        prompt_ids = self._encode(f"{prompt}<|im_start|>assistant\n")
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": finish,
            "token_ids": ids,
            "logprobs": {"content": [self._logprob(id_, request) for id_ in ids]},
        }
        body = {
            "id": f"chatcmpl-{self._calls:04d}",
            "object": "chat.completion",
            "created": 1,
            "model": request["model"],
            "choices": [choice],
            "prompt_token_ids": prompt_ids,
            "usage": {
                "prompt_tokens": len(prompt_ids),
                "completion_tokens": len(ids),
                "total_tokens": len(prompt_ids) + len(ids),
            },
        }
        return Raw(body=json.dumps(body).encode())

    def _logprob(self, id_: int, request: dict[str, Any]) -> dict[str, Any]:
        sure = self._random.random() < 0.62
        value = -round(self._random.random() * 0.08 if sure else self._random.expovariate(0.9), 5)
        text = self._texts[id_]
        others = ["the", " a", "\n", " it", " so"] if request.get("top_logprobs") else []
        left = max(1e-9, 1 - math.exp(value))
        rest = [(each, math.log(left * 0.5**n)) for n, each in enumerate(others, 1)]
        top = [(text, value), *rest]
        listed = [{"token": token, "logprob": number, "bytes": None} for token, number in top]
        return {**listed[0], "top_logprobs": listed if others else []}


@contextmanager
def recording_to(path: Path, model: WordModel) -> Iterator[openai.OpenAI]:
    """A client of the model; the rollouts inside are appended to the file."""
    otel_rollout.configure(service_name="look", exporters=[JsonlTrajectoryExporter(path)])
    try:
        with ModelServer(routes={"/v1/chat/completions": model}) as server:
            yield openai.OpenAI(base_url=server.base_url, api_key="none", max_retries=0)
    finally:
        otel_rollout.shutdown()


# --- what the model says

_THOUGHTS = [
    "The test names the inactive items, so the filter is the first suspect.",
    "If the cache were stale, the second call would differ from the first. It does not.",
    "I should run the one test that fails before I change anything else.",
]
_STEPS = [
    "Let me read the failing test first.",
    "The filter runs, but only **after** the sum:\n\n"
    "```python\ntotal = sum(i.price for i in order)\n"
    "items = [i for i in order if i.active]\n```\n\nI will swap the two.",
    "",
    "Two things are left:\n\n1. `Order.items` is lazy, so a *second* pass sees nothing\n"
    "2. the key of the cache leaves out the currency",
    "The test passes now. I will run the whole suite before I answer.",
]
_TOOLS = [
    ("read_file", {"path": "shop/orders.py", "lines": [1, 80]}),
    ("run_tests", {"pattern": "test_total_filters_inactive"}),
    ("grep", {"word": "active", "folder": "shop"}),
    ("edit_file", {"path": "shop/orders.py", "old": "sum(order)", "new": "sum(items)"}),
]
OFFERED: list[Any] = [
    {
        "type": "function",
        "function": {"name": name, "parameters": {"type": "object", "properties": {}}},
    }
    for name, _ in _TOOLS
]
_OUTPUT = (
    "shop/orders.py:41: in total\n    return sum(item.price for item in self)\n"
    "E   AssertionError: assert Decimal('10.00') == Decimal('0')\n1 failed, 41 passed in 0.83s\n"
)


def _engineer(request: dict[str, Any]) -> Message:
    """Reads, greps and edits until it was told that it is enough."""
    messages = request["messages"]
    turn = sum(message["role"] == "assistant" for message in messages)
    if "title generator" in str(messages[0]["content"]):
        return said("Totals of orders")
    if "researcher" in str(messages[0]["content"]):
        return said("Django evaluates a queryset at its first iteration, and keeps the result.")
    if "FINISH" in str(messages[-1]["content"]):
        return said("The sum now runs over the filtered items. All 42 tests pass.")
    if "CUT" in str(messages[-1]["content"]):
        return {**said("In short, the total is wrong because the"), "finish_reason": "length"}
    name, arguments = _TOOLS[turn % len(_TOOLS)]
    function = {"name": name, "arguments": json.dumps(arguments)}
    reply: Message = {
        **said(_STEPS[turn % len(_STEPS)]),
        "tool_calls": [{"id": f"call_{turn}", "type": "function", "function": function}],
    }
    if turn % 3 == 0:
        reply["reasoning_content"] = _THOUGHTS[turn // 3 % len(_THOUGHTS)]
    return reply


def _ask(client: openai.OpenAI, messages: list[Message], **options: Any) -> Message:
    sent: Any = messages
    extra: Any = {"extra_body": {"return_token_ids": True}, "logprobs": True, **options}
    reply = client.chat.completions.create(model="Qwen3-8B", messages=sent, **extra)
    message: Message = reply.choices[0].message.model_dump(exclude_none=True)
    return message


def _loop(client: openai.OpenAI, messages: list[Message], turns: int, padding: str = "") -> None:
    """An agent's loop: the messages grow by a reply and what its tool said."""
    for turn in range(turns):
        if turn == turns - 1:
            messages.append(user("FINISH: say what you found."))
        top = {"top_logprobs": 5} if turn % 2 else {}
        reply = _ask(client, messages, tools=OFFERED, **top)
        messages.append(reply)
        for call in reply.get("tool_calls", ()):
            output = f"{_OUTPUT}{padding}"
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": output})


_START = (
    system("You are a careful software engineer. Use the tools; run the tests before you answer."),
    user(
        [
            {"type": "text", "text": "`test_total_filters_inactive` fails. Find out why, mend it."},
            {"type": "image_url", "image_url": {"url": IMAGE}},
        ]
    ),
)


def record_hard(path: Path, *, turns: int = 12, padding: int = 0) -> WordModel:
    """A rollout with forks, a compaction, a resample, a side call, sub-agents, a failed and a cut
    call; and its model. `padding`: further lines in each result of a tool.
    """
    model = WordModel(_engineer)
    more = "".join(f"tests/test_shop.py::test_order_{line} PASSED\n" for line in range(padding))
    with (
        recording_to(path, model) as client,
        ModelServer(
            Reply("I was about to say that the total", chunk_delay=0.01),
            token_ids=True,
            logprobs=True,
        ) as other,
        openai.OpenAI(base_url=other.base_url, api_key="none", max_retries=0) as cut,
        rollout("swe_agent", task_id="orders-17", group_id="hard", policy_version=4) as trajectory,
    ):
        messages = [*_START]
        _ask(client, list(TITLE))
        _loop(client, messages, turns, more)
        fork = [*messages[:6], user("Try another way.")]
        _loop(client, fork, 3)
        _ask(client, fork[:-3], tools=OFFERED)
        _ask(client, [*messages[:8], user("CUT: in one sentence?")], tools=OFFERED)
        _loop(client, [messages[0], user("So far: the filter runs after the sum. Go on.")], 3)
        for place in ("querysets", "caches"):
            with rollout("researcher"):
                _ask(client, [system("You are a researcher."), user(f"How do {place} work?")])
                get_current_trajectory().reward = 0.5
        _break_off(cut, messages[:4])
        trajectory.log("cloned the repository")
        trajectory.log(f"tests: {ESCAPE}1 failed\x1b[0m, 41 passed")
        trajectory.metrics["tests_passed"] = 41
        trajectory.metadata["repository"] = "shop"
        trajectory.reward = 0.75
    return model


def _break_off(client: openai.OpenAI, messages: list[Message]) -> None:
    """A stream that is left in its middle, and a call that the server refuses."""
    sent: Any = messages
    stream = client.chat.completions.create(model="Qwen3-8B", messages=sent, stream=True)
    next(iter(stream))
    stream.close()
    sent = [{"role": "nobody", "content": "Is anybody there?"}]
    with suppress(openai.APIStatusError):
        client.chat.completions.create(model="Qwen3-8B", messages=sent)


def record_groups(path: Path, *, groups: int = 3, samples: int = 4) -> WordModel:
    """Groups of short rollouts: with and without tools, scored, failed, of two policy versions."""
    chance = random.Random(11)

    def say(request: dict[str, Any]) -> Message:
        if request["messages"][-1]["role"] == "tool":
            return said(f"It is {request['messages'][-1]['content']}. " + "Evenings are warm. " * 2)
        if chance.random() < 0.4:
            return said(f"About {chance.randrange(8, 15)}00 km, I think.")
        function = {"name": "distance", "arguments": '{"origin": "Paris", "destination": "Rome"}'}
        call = {"id": "call_0", "type": "function", "function": function}
        return {**said("I will look it up."), "tool_calls": [call]}

    model = WordModel(say)
    with recording_to(path, model) as client:
        for number in range(groups):
            for sample in range(samples):
                _short(client, number, sample, chance)
    return model


def _short(client: openai.OpenAI, group: int, sample: int, chance: random.Random) -> None:
    with (
        suppress(TimeoutError),
        rollout(
            "travel_agent",
            task_id=f"trip-{group}",
            group_id=f"trip-{group}",
            sample_index=sample,
            policy_version=3 + group % 2,
        ) as trajectory,
    ):
        messages = [system("You plan journeys. Use the tools."), user("How far is Rome?")]
        reply = _ask(client, messages, tools=OFFERED)
        if "tool_calls" in reply:
            result = {"role": "tool", "tool_call_id": "call_0", "content": "1106 km"}
            _ask(client, [*messages, reply, result], tools=OFFERED)
        if sample == 2 and group == 1:
            raise TimeoutError("the environment did not answer")
        if (group, sample) != (0, 3):
            trajectory.reward = round(chance.random(), 2) if "tool_calls" in reply else 0.0


def record_long(path: Path, tokens: int = 100_000) -> WordModel:
    """A rollout of one call, whose row has as many tokens; the last 2,000 were sampled."""
    model = WordModel(lambda _: said("word " * 1998))
    with recording_to(path, model) as client, rollout("reader", group_id="long") as trajectory:
        _ask(client, [user("w " * (tokens - 2010))], top_logprobs=3)
        trajectory.reward = 1.0
    return model


def record_said(path: Path, texts: list[str]) -> WordModel:
    """A rollout whose model was told all these texts, each in a message."""
    model = WordModel(lambda _: said("Yes."))
    with recording_to(path, model) as client, rollout("told"):
        _ask(client, [user(text) for text in texts])
    return model


def record_hostile(path: Path, *, forks: int = FORKS, long: int = LONG) -> WordModel:
    """A rollout whose names and texts want to be more than text, with a very long message; and
    one with very many forks, named "forked".
    """
    call = {"name": f"rm{ESCAPE}", "arguments": f'{{"a": "{BIDI}"}}'}
    texts = [
        f"{HOSTILE}\n\n[link](javascript:alert(1)) ![image](http://127.0.0.1:1/x.png)\n\n<b>x</b>",
        f"{BIDI}reversed{ESCAPE}",
    ]

    def say(request: dict[str, Any]) -> Message:
        function = {"id": f"c{BIDI}", "type": "function", "function": call}
        return {
            **said(texts[len(request["messages"]) // 2 % 2]),
            "reasoning_content": HOSTILE,
            "tool_calls": [function],
        }

    model = WordModel(say)
    with recording_to(path, model) as client:
        with rollout(f"hostile {HOSTILE}", group_id=f"g{BIDI}", task_id=HOSTILE) as trajectory:
            messages = [user(HOSTILE)]
            messages.append(_ask(client, messages))
            messages.append({"role": "tool", "tool_call_id": f"c{BIDI}", "content": HOSTILE})
            messages.append(_ask(client, messages))
            trajectory.metadata[HOSTILE] = HOSTILE
            trajectory.log(HOSTILE)
        with rollout("forked"):
            _ask(client, [user("Say a word.")])
    _lengthen(path, forks, long)
    return model


def _lengthen(path: Path, forks: int, long: int) -> None:
    """Write in what would take a server long to say: a message of 50 MB, 10,000 replies."""
    hostile, forked = (json.loads(line) for line in path.read_text().splitlines()[-2:])
    kept = path.read_text().splitlines()[:-2]
    for _, message in hostile["messages"]:
        if message["role"] == "tool":
            message["content"] = "A line of a very long result.\n" * (long // 30)
    first = forked["exchanges"][0]
    for number in range(1, forks):
        text = f"word {number}"
        body = json.loads(json.dumps(first["response"]))
        body["id"] = f"chatcmpl-{number + 1:06d}"
        body["choices"][0]["message"]["content"] = text
        forked["exchanges"].append(
            {
                **first,
                "span_id": f"{number:016x}",
                "response_id": body["id"],
                "response": body,
                "started": 2 * number,
                "ended": 2 * number + 1,
            }
        )
    lines = [*kept, json.dumps(hostile), json.dumps(forked)]
    path.write_text("".join(f"{line}\n" for line in lines))
