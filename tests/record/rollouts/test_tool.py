"""Tools: a span says what was called, with what and what came out; the tool stays what it was."""

from __future__ import annotations

import functools
import inspect
import json
from typing import Any

import openai
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import ReadableSpan

from otel_rollout import NotARolloutError, rollout, tool
from otel_rollout.testing import Reply, ToolCall
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Clients, Recording


def attributes(recording: Recording) -> dict[str, Any]:
    """Of the only tool span there is."""
    (span,) = recording.spans_named("execute_tool")
    return dict(span.attributes or {})


def parent(span: ReadableSpan) -> int | None:
    return span.parent.span_id if span.parent else None


def test_a_call_is_a_span_of_its_rollout(recording: Recording):
    """The span is a child of the rollout span and carries name, arguments and result."""

    @tool
    def search(query: str, limit: int = 3) -> list[str]:
        return [query] * limit

    with rollout("agent") as trajectory:
        assert search("é", limit=2) == ["é", "é"]
    (span,) = recording.spans_named("execute_tool")
    (root,) = recording.spans_named("invoke_agent")
    assert span.name == "execute_tool search"
    assert root.context is not None
    assert parent(span) == root.context.span_id
    assert span.attributes == {
        "gen_ai.operation.name": "execute_tool",
        "gen_ai.tool.name": "search",
        "gen_ai.tool.type": "function",
        "gen_ai.tool.call.arguments": '{"query":"é","limit":2}',
        "gen_ai.tool.call.result": '["é","é"]',
        "rollout.id": trajectory.id,
    }
    assert span.status.is_unset
    assert trajectory.warnings == [NO_CALL.words]


async def test_an_async_tool(recording: Recording):
    """An async tool's span lasts as long as the tool runs, and is current inside."""
    inside = list[trace.Span]()

    @tool(name="web_search")
    async def search(query: str) -> str:
        inside.append(trace.get_current_span())
        return query * 2

    assert inspect.iscoroutinefunction(search)
    assert await search(query="ab") == "abab"
    (span,) = recording.spans_named("execute_tool web_search")
    assert inside[0].get_span_context() == span.context
    assert attributes(recording)["gen_ai.tool.call.result"] == "abab"
    assert not trace.get_current_span().get_span_context().is_valid


def documented(first: int, /, second: str = "x", *, third: bool = True) -> str:
    """What it does."""
    return second


@pytest.mark.parametrize("decorate", [tool, tool(), tool("named"), tool(name="named")])
def test_a_tool_keeps_its_face(decorate: Any):
    """Name, docstring and signature stay, so that a schema made from them stays too."""
    decorated = decorate(documented)
    assert (decorated.__name__, decorated.__doc__) == ("documented", "What it does.")
    assert inspect.signature(decorated) == inspect.signature(documented)
    assert decorated.__wrapped__ is documented


class Value:
    def __repr__(self) -> str:
        return "<a value>"


def test_the_very_object_is_returned(recording: Recording):
    """What is no JSON is returned as it is, and shown as Python shows it."""
    value = Value()

    @tool
    def make(x: Any) -> Any:
        return x

    assert make(value) is value
    assert attributes(recording)["gen_ai.tool.call.result"] == "<a value>"
    assert "<a value>" in attributes(recording)["gen_ai.tool.call.arguments"]


def test_none_is_a_result(recording: Recording):
    """A tool that returns None has a result: null."""

    @tool
    def nothing() -> None:
        pass

    nothing()
    assert attributes(recording)["gen_ai.tool.call.result"] == "null"
    assert attributes(recording)["gen_ai.tool.call.arguments"] == "{}"


@pytest.mark.parametrize("asynchronous", [False, True])
async def test_an_exception_is_on_the_span_and_passes(recording: Recording, asynchronous: bool):
    """The same exception arrives; the span has it as its status, event and error type."""
    error = KeyError("went wrong")

    def fail(x: int) -> None:
        raise error

    async def fail_async(x: int) -> None:
        raise error

    async def call() -> None:
        if asynchronous:
            await tool(fail_async)(1)
        tool(fail)(1)

    with pytest.raises(KeyError) as caught:
        await call()
    assert caught.value is error
    (span,) = recording.spans_named("execute_tool")
    assert span.status.status_code is trace.StatusCode.ERROR
    assert "went wrong" in (span.status.description or "")
    assert attributes(recording)["error.type"] == "KeyError"
    assert attributes(recording)["gen_ai.tool.call.arguments"] == '{"x":1}'
    assert "gen_ai.tool.call.result" not in attributes(recording)
    (event,) = span.events
    assert event.name == "exception"
    assert dict(event.attributes or {})["exception.type"] == "KeyError"


def test_the_call_id_joins_the_models_call(recording: Recording):
    """`tool_call_id` goes on the span and not to a function that does not know it."""

    def search(**query: str) -> dict[str, str]:
        return query

    assert tool(search)(q="x", tool_call_id="call_1") == {"q": "x"}
    assert attributes(recording)["gen_ai.tool.call.id"] == "call_1"
    assert "call_1" not in attributes(recording)["gen_ai.tool.call.arguments"]


@pytest.mark.parametrize("positional", [False, True])
def test_a_tool_that_wants_the_call_id_gets_it(recording: Recording, positional: bool):
    """A function that declares `tool_call_id` gets it, however it is passed; the span too."""

    @tool
    def search(q: str, tool_call_id: str) -> str:
        return tool_call_id

    found = search("x", "call_1") if positional else search("x", tool_call_id="call_1")
    assert found == "call_1"
    assert attributes(recording)["gen_ai.tool.call.id"] == "call_1"
    assert attributes(recording)["gen_ai.tool.call.arguments"] == '{"q":"x"}'


def test_wrong_arguments_are_the_functions_own_error(recording: Recording):
    """A call that does not fit fails as it would undecorated, and the span shows what came."""

    @tool
    def search(query: str) -> str:
        return query

    call: Any = search
    with pytest.raises(TypeError, match=r"search\(\) got an unexpected keyword argument 'x'"):
        call(1, 2, x=3)
    arguments = json.loads(attributes(recording)["gen_ai.tool.call.arguments"])
    assert arguments == {"args": [1, 2], "x": 3}


def test_as_a_context_manager(recording: Recording):
    """`with tool(...)` records a call that some other code makes."""
    with rollout("agent"), tool("add", call_id="call_1", arguments='{"a":  1}') as span:
        span.result = {"sum": 2}
    found = attributes(recording)
    assert found["gen_ai.tool.name"] == "add"
    assert found["gen_ai.tool.call.id"] == "call_1"
    assert found["gen_ai.tool.call.arguments"] == '{"a":  1}'
    assert found["gen_ai.tool.call.result"] == '{"sum":2}'


def test_a_context_manager_without_a_result(recording: Recording):
    """What was not said is not on the span; an exception passes and is."""
    error = RuntimeError("no")
    with pytest.raises(RuntimeError) as caught, tool("add"):
        raise error
    assert caught.value is error
    found = attributes(recording)
    assert "gen_ai.tool.call.result" not in found
    assert "gen_ai.tool.call.arguments" not in found
    assert found["error.type"] == "RuntimeError"


def test_methods_are_tools(recording: Recording):
    """Methods, static and class methods can be tools; `self` is no argument."""

    class Box:
        def __repr__(self) -> str:
            return "the box"

        @tool
        def method(self, x: int) -> tuple[Any, int]:
            return self, x

        @tool
        @staticmethod
        def static(x: int) -> int:
            return x

        @staticmethod
        @tool
        def static_inside(x: int) -> int:
            return x

        @tool(name="made")
        @classmethod
        def of_class(cls, x: int) -> tuple[Any, int]:
            return cls, x

    box = Box()
    assert box.method(1) == (box, 1)
    assert box.static(2) == Box.static(2) == 2
    assert box.static_inside(3) == 3
    assert box.of_class(4) == Box.of_class(4) == (Box, 4)
    spans = recording.spans_named("execute_tool")
    assert [span.name.split()[1] for span in spans] == [
        "method",
        *["static"] * 2,
        "static_inside",
        *["made"] * 2,
    ]
    texts = [dict(span.attributes or {})["gen_ai.tool.call.arguments"] for span in spans]
    assert texts == [f'{{"x":{x}}}' for x in (1, 2, 2, 3, 4, 4)]


async def test_callable_objects_are_tools(recording: Recording):
    """An object with an async `__call__`, and a partial of an async function, are async tools."""

    class Search:
        async def __call__(self, query: str) -> str:
            return query * 2

    async def search(query: str) -> str:
        return query * 2

    assert await tool(Search())("a") == "aa"
    assert await tool(functools.partial(search))("b") == "bb"
    spans = recording.spans_named("execute_tool")
    assert [span.name for span in spans] == ["execute_tool Search", "execute_tool partial"]
    results = [dict(span.attributes or {})["gen_ai.tool.call.result"] for span in spans]
    assert results == ["aa", "bb"]


@pytest.mark.parametrize("thing", [Value, 3])
def test_what_is_no_function_is_refused(thing: Any):
    """A class or a number is no tool."""
    with pytest.raises(NotARolloutError, match="@tool: expected a function, got"):
        tool(thing)


def test_unknown_options_are_refused():
    """A misspelled option is named."""
    anything: Any = tool
    with pytest.raises(TypeError, match="unexpected keyword argument 'nmae'"):
        anything(nmae="x")


def test_without_configure_tools_just_run():
    """With no SDK at all a tool runs as ever."""

    @tool
    def double(x: int) -> int:
        return 2 * x

    assert double(2) == 4
    with_id: Any = double
    assert with_id(2, tool_call_id="x") == 4
    with tool("x") as span:
        span.result = 1


def test_a_whole_turn(recording: Recording, clients: Clients):
    """A model's tool call, the tool's span and the reply to its result are one trace."""
    replies = [Reply(tool_calls=[ToolCall("add", '{"a": 1, "b": 2}', id="call_1")]), "3"]
    client: openai.OpenAI = clients.sync(clients.serve(replies))

    @tool
    def add(a: int, b: int) -> int:
        return a + b

    with rollout("agent") as trajectory:
        messages: list[Any] = [{"role": "user", "content": "1+2?"}]
        reply = client.chat.completions.create(model="m", messages=messages).choices[0].message
        calls: list[Any] = list(reply.tool_calls or ())
        (call,) = calls
        with_id: Any = add
        result = with_id(**json.loads(call.function.arguments), tool_call_id=call.id)
        messages += [
            reply.model_dump(exclude_none=True),
            {"role": "tool", "tool_call_id": call.id, "content": str(result)},
        ]
        client.chat.completions.create(model="m", messages=messages)
    assert attributes(recording)["gen_ai.tool.call.id"] == "call_1"
    assert attributes(recording)["gen_ai.tool.call.result"] == "3"
    assert [m["role"] for m in trajectory.messages()] == ["user", "assistant", "tool", "assistant"]
    assert trajectory.warnings == []
    assert len({span.context.trace_id for span in recording.spans if span.context}) == 1
