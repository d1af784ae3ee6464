"""Google's ADK on LiteLlm."""

from __future__ import annotations

from google.adk.agents import LlmAgent
from google.adk.agents.run_config import RunConfig, StreamingMode
from google.adk.models.lite_llm import LiteLlm
from google.adk.runners import InMemoryRunner
from google.genai import types

from tests.frameworks.script import HELPER, LEAD, TASK, add, divide, task_of


async def told(
    tool: object, args: object, tool_context: object, error: Exception
) -> dict[str, str]:
    """A tool that fails is the model's business."""
    return {"error": str(error)}


async def run(base_url: str, stream: bool) -> str:
    mode = StreamingMode.SSE if stream else StreamingMode.NONE

    async def answer(message: str, tools: list[object], question: str) -> str:
        model = LiteLlm("openai/m", api_base=base_url, api_key="k", num_retries=2)
        agent = LlmAgent(
            name="agent",
            model=model,
            instruction=message,
            tools=tools,
            on_tool_error_callback=told,
        )
        runner = InMemoryRunner(agent, app_name="test")
        session = await runner.session_service.create_session(app_name="test", user_id="u")
        text = ""
        async for event in runner.run_async(
            user_id="u",
            session_id=session.id,
            new_message=types.Content(role="user", parts=[types.Part(text=question)]),
            run_config=RunConfig(streaming_mode=mode),
        ):
            if event.is_final_response() and event.content:
                text = event.content.parts[0].text or ""
        return text

    async def ask(who: str) -> str:
        """Ask a helper."""
        return await answer(HELPER, [add], task_of(who))

    return await answer(LEAD, [add, divide, ask], TASK)
