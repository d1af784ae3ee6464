"""What a conversation holds that is no text: token ids do not carry it, and exporters ask."""

from __future__ import annotations

from typing import Any

import pytest

from otel_rollout import rollout
from otel_rollout.wire import media_of
from tests.kit.recording import Clients, Recording

PICTURE = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}
TEXT = {"type": "text", "text": "an image_url, and a file"}


async def test_pictures_are_seen_in_all_that_follows(recording: Recording, clients: Clients):
    """A picture belongs to each completion of its conversation, and to no other."""
    client = clients.asynchronous(clients.serve("a dot"))

    @rollout
    async def agent() -> None:
        shown: Any = {"role": "user", "content": [PICTURE, TEXT]}
        asked: Any = {"role": "user", "content": "image_url?"}
        first = await client.chat.completions.create(model="m", messages=[shown])
        reply: Any = first.choices[0].message.model_dump(exclude_none=True)
        await client.chat.completions.create(model="m", messages=[shown, reply, asked])
        await client.chat.completions.create(model="m", messages=[asked])

    await agent()
    assert [c.media for c in recording.trajectory.completions] == [
        ["image_url"],
        ["image_url"],
        [],
    ]


@pytest.mark.parametrize(
    ("message", "media"),
    [
        ("text", []),
        ({"role": "user", "content": None}, []),
        ({"role": "user", "content": "image_url"}, []),
        ({"role": "user", "content": [TEXT, PICTURE, PICTURE]}, ["image_url"]),
        (
            {"role": "user", "content": [{"type": "input_audio"}, PICTURE]},
            ["input_audio", "image_url"],
        ),
        (
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "content": [{"type": "image", "source": {}}, TEXT]}
                ],
            },
            ["image"],
        ),
        ({"type": "function_call_output", "output": [{"type": "input_file"}]}, ["input_file"]),
        ({"type": "file_search_call", "status": "completed"}, []),
        ({"type": ["odd"], "content": {"type": 3}}, []),
    ],
)
def test_parts_of_every_api(message: Any, media: list[str]):
    """Parts of messages, of results of tools, and items of the Responses API."""
    assert media_of(message) == media
