"""Model APIs on the wire: JSON, messages, streams, and one module for each API. Pure.

`ModelApi` is the contract of an API. Each API has a module of its own; `wire.apis` lists them.
"""

from otel_rollout.wire.api import TAIL, ModelApi, Sampled
from otel_rollout.wire.apis import (
    api_of,
    apis_of,
    context_members,
    conversation_members,
    merge,
    retrieval_of,
    shown_calls,
    shown_part,
    tool_name,
)
from otel_rollout.wire.depth import check_depth
from otel_rollout.wire.json import (
    Choice,
    Json,
    Message,
    Params,
    Reply,
    checked_json,
    copy_json,
    dumps,
    elements,
    expect,
    is_list_of_objects,
    loads,
    members,
)
from otel_rollout.wire.messages import (
    MessagePath,
    extend,
    is_reasoning,
    media_of,
    path_messages,
    reasoning_of,
    visible_content,
    visible_key,
)
from otel_rollout.wire.params import length_limit, sampling_params
from otel_rollout.wire.servers import (
    asked_ids,
    logprobs_mode,
    prompt_ids,
    sampled_ids,
    sampled_logprobs,
    usage,
    weight_version,
)
from otel_rollout.wire.sse import (
    events_of_frames,
    expands_too_far,
    pack_events,
    unpack_events,
)

__all__ = [
    "TAIL",
    "Choice",
    "Json",
    "Message",
    "MessagePath",
    "ModelApi",
    "Params",
    "Reply",
    "Sampled",
    "api_of",
    "apis_of",
    "asked_ids",
    "check_depth",
    "checked_json",
    "context_members",
    "conversation_members",
    "copy_json",
    "dumps",
    "elements",
    "events_of_frames",
    "expands_too_far",
    "expect",
    "extend",
    "is_list_of_objects",
    "is_reasoning",
    "length_limit",
    "loads",
    "logprobs_mode",
    "media_of",
    "members",
    "merge",
    "pack_events",
    "path_messages",
    "prompt_ids",
    "reasoning_of",
    "retrieval_of",
    "sampled_ids",
    "sampled_logprobs",
    "sampling_params",
    "shown_calls",
    "shown_part",
    "tool_name",
    "unpack_events",
    "usage",
    "visible_content",
    "visible_key",
    "weight_version",
]
