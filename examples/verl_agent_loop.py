"""An agent of your own in verl: its agent loop runs the agent and returns what it sampled.

verl starts one vLLM or SGLang server per replica, with OpenAI's API, and keeps the weights of each
up to date. `ListenLoop` asks verl for a server, runs the agent against it, and returns an output
for each token sequence. `examples/verl_agent_loop.yaml` gives it its name; docs/verl.md has the
command that trains. The tasks are written by

    python -m examples.verl_agent_loop tasks.parquet        # needs verl, and exporters/verl
"""

import argparse
import re
from collections.abc import Sequence
from typing import Any
from uuid import uuid4

from openai import AsyncOpenAI
from otel_rollout_verl import to_verl_outputs
from verl.experimental.agent_loop.agent_loop import AgentLoopBase, AgentLoopOutput

from otel_rollout import configure, gather_trajectory, get_current_trajectory, rollout

configure(service_name="train-verl", request_token_ids=True)  # once in each worker of verl

# --- the agent, and what it is asked to do

SOUNDS = {"cow": "moo", "duck": "quack"}


@rollout
async def listen(client: AsyncOpenAI, prompt: Sequence[Any], **options: Any) -> str:
    """Ask an animal twice; the reward is the share of words that are the animal's sound."""
    messages, heard = list[Any](), list[str]()
    for question in (*prompt, {"role": "user", "content": "Say it again."}):
        messages.append(question)
        reply = await client.chat.completions.create(messages=messages, max_tokens=4, **options)
        said = reply.choices[0].message.content or ""
        messages.append({"role": "assistant", "content": said})
        heard += re.findall(r"[a-z]+", said.lower())
    (right,) = (SOUNDS[animal] for animal in SOUNDS if animal in prompt[0]["content"])
    get_current_trajectory().reward = heard.count(right) / max(len(heard), 1)
    return " ".join(heard)


def write_tasks(path: str) -> None:
    """A parquet file of prompts, as verl's `RLHFDataset` reads them."""
    import datasets

    rows = [
        {
            "data_source": "sounds",
            "agent_name": "listen",
            "prompt": [{"role": "user", "content": f"What does a {animal} say?"}],
            "extra_info": {"index": number},
        }
        for number, animal in enumerate(SOUNDS)
    ]
    datasets.Dataset.from_list(rows * 64).to_parquet(path)


# --- the agent loop


class ListenLoop(AgentLoopBase):  # type: ignore[misc, unused-ignore]
    """Runs `listen` once for each sample that verl asks for."""

    async def run(self, sampling_params: dict[str, Any], **kwargs: Any) -> list[AgentLoopOutput]:
        """The outputs of one rollout: none if it failed, several if it has several rows.

        kwargs: the fields of the task, and verl's `uid`, `session_id` and `global_steps`.
        """
        request_id = uuid4().hex  # calls of one rollout go to one server, for its prefix cache
        address, _ = await self.server_manager._acquire_server(request_id)
        try:
            async with AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none") as client:
                model = (await client.models.list()).data[0].id
                trajectory = await gather_trajectory(
                    listen(client, kwargs["raw_prompt"], model=model, **_options(sampling_params)),
                    raise_errors=False,
                    group_id=kwargs["uid"],
                    sample_index=kwargs["session_id"],
                    policy_version=int(kwargs["global_steps"]),
                )
        finally:
            self.server_manager._release_server(address, request_id)
        outputs: list[AgentLoopOutput] = to_verl_outputs(
            trajectory, response_length=self.rollout_config.response_length
        )
        return outputs


def _options(sampling_params: dict[str, Any]) -> dict[str, Any]:
    """The parameters that verl gives, as those of OpenAI's client."""
    known = {name: sampling_params[name] for name in ("temperature", "top_p")}
    return {**known, "extra_body": {"top_k": sampling_params["top_k"]}}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Write the tasks of this example.")
    parser.add_argument("path")
    write_tasks(parser.parse_args().path)
