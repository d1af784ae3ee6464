"""Every span name and attribute name, spelled once.

`gen_ai.*` names come from the OpenTelemetry GenAI semantic conventions; `rollout.*` are ours.
Nothing else in the package spells an attribute.
"""

from typing import Final

from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_AGENT_NAME as GEN_AI_AGENT_NAME,
)
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_OPERATION_NAME as GEN_AI_OPERATION_NAME,
)
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_RESPONSE_ID as GEN_AI_RESPONSE_ID,
)
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_TOOL_CALL_ID as GEN_AI_TOOL_CALL_ID,
)
from opentelemetry.semconv._incubating.attributes.gen_ai_attributes import (
    GEN_AI_TOOL_NAME as GEN_AI_TOOL_NAME,
)
from opentelemetry.semconv.attributes.error_attributes import ERROR_TYPE as ERROR_TYPE

# The oldest conventions package that we support lacks these; the names are the conventions'.
GEN_AI_PROVIDER_NAME: Final = "gen_ai.provider.name"
GEN_AI_CONVERSATION_ID: Final = "gen_ai.conversation.id"
GEN_AI_TOOL_TYPE: Final = "gen_ai.tool.type"
GEN_AI_TOOL_CALL_ARGUMENTS: Final = "gen_ai.tool.call.arguments"
GEN_AI_TOOL_CALL_RESULT: Final = "gen_ai.tool.call.result"
GEN_AI_EVALUATION_RESULT: Final = "gen_ai.evaluation.result"
GEN_AI_EVALUATION_NAME: Final = "gen_ai.evaluation.name"
UNNAMED_REWARD: Final = "reward"
"""Value of `GEN_AI_EVALUATION_NAME` for a reward that has no name."""
GEN_AI_EVALUATION_SCORE_VALUE: Final = "gen_ai.evaluation.score.value"
GEN_AI_EVALUATION_SCORE_LABEL: Final = "gen_ai.evaluation.score.label"
GEN_AI_EVALUATION_EXPLANATION: Final = "gen_ai.evaluation.explanation"

# Attributes of other instrumentations, by the present conventions and by former ones. Names outside
# of `gen_ai.*` that only one instrumentation uses are in its module of `rebuild.dialects`.
GEN_AI: Final = "gen_ai."
"""Prefix of the conventions' names."""
GEN_AI_INPUT_MESSAGES: Final = "gen_ai.input.messages"
GEN_AI_OUTPUT_MESSAGES: Final = "gen_ai.output.messages"
GEN_AI_SYSTEM_INSTRUCTIONS: Final = "gen_ai.system_instructions"
GEN_AI_TOOL_DEFINITIONS: Final = "gen_ai.tool.definitions"
GEN_AI_REQUEST_MODEL: Final = "gen_ai.request.model"
RL_MODEL_NAME: Final = "rl.model.name"
"""Of the resource, as proposed in open-telemetry/semantic-conventions-genai#88."""
GEN_AI_REQUEST_TEMPERATURE: Final = "gen_ai.request.temperature"
GEN_AI_REQUEST_TOP_P: Final = "gen_ai.request.top_p"
GEN_AI_REQUEST_TOP_K: Final = "gen_ai.request.top_k"
GEN_AI_REQUEST_MAX_TOKENS: Final = "gen_ai.request.max_tokens"
GEN_AI_REQUEST_FREQUENCY_PENALTY: Final = "gen_ai.request.frequency_penalty"
GEN_AI_REQUEST_PRESENCE_PENALTY: Final = "gen_ai.request.presence_penalty"
GEN_AI_REQUEST_SEED: Final = "gen_ai.request.seed"
GEN_AI_REQUEST_CHOICE_COUNT: Final = "gen_ai.request.choice.count"
GEN_AI_REQUEST_STOP_SEQUENCES: Final = "gen_ai.request.stop_sequences"
GEN_AI_REQUEST_STREAM: Final = "gen_ai.request.stream"
GEN_AI_SYSTEM: Final = "gen_ai.system"
GEN_AI_IS_STREAMING: Final = "gen_ai.is_streaming"
GEN_AI_RESPONSE_MODEL: Final = "gen_ai.response.model"
GEN_AI_RESPONSE_FINISH_REASONS: Final = "gen_ai.response.finish_reasons"
GEN_AI_USAGE_INPUT_TOKENS: Final = "gen_ai.usage.input_tokens"
GEN_AI_USAGE_OUTPUT_TOKENS: Final = "gen_ai.usage.output_tokens"
GEN_AI_USAGE_CACHE_READ: Final = (
    "gen_ai.usage.cache_read.input_tokens",
    "gen_ai.usage.cache_read_input_tokens",
)
GEN_AI_USAGE_CACHE_WRITE: Final = (
    "gen_ai.usage.cache_write.input_tokens",
    "gen_ai.usage.cache_creation.input_tokens",
    "gen_ai.usage.cache_creation_input_tokens",
)
GEN_AI_USAGE_REASONING: Final = (
    "gen_ai.usage.reasoning.output_tokens",
    "gen_ai.usage.reasoning_tokens",
    "gen_ai.usage.reasoning_output_tokens",
)
"""Present and former names of one number each."""
GEN_AI_USAGE_RAW: Final = "gen_ai.usage.raw"
GEN_AI_PROMPT: Final = "gen_ai.prompt."
GEN_AI_COMPLETION: Final = "gen_ai.completion."
"""`GEN_AI_PROMPT` and `GEN_AI_COMPLETION` are prefixes: a message number and a field follow."""
OPENINFERENCE_KIND: Final = "openinference.span.kind"
OPENINFERENCE_CHAIN: Final = "CHAIN"
"""Its value for a workflow; that of an agent follows from `GEN_AI_OPERATION_NAME`."""
INPUT_VALUE: Final = "input.value"
OUTPUT_VALUE: Final = "output.value"
METADATA: Final = "metadata"
"""OpenInference's names for what came in and went out; Phoenix lists them."""
OPENINFERENCE_TOOL_NAME: Final = "tool.name"
OPENINFERENCE_TOOL_ID: Final = "tool.id"
LLM_REQUEST_TYPE: Final = "llm.request.type"
LLM_REQUEST_TYPES: Final = ("chat", "completion", "embedding")
ERROR_OTHER: Final = "_OTHER"
"""Value of `ERROR_TYPE` for an error whose type is not known."""
OPENAI_API_TYPE: Final = "openai.api.type"
EXCEPTION_TYPE: Final = "exception.type"
EXCEPTION_MESSAGE: Final = "exception.message"
EXCEPTION_STACKTRACE: Final = "exception.stacktrace"
EVENT_EXCEPTION: Final = "exception"
OPERATION_CHAT: Final = "chat"
OPERATION_EMBEDDINGS: Final = "embeddings"
OPERATION_TEXT_COMPLETION: Final = "text_completion"
MODEL_OPERATIONS: Final = (
    OPERATION_CHAT,
    OPERATION_TEXT_COMPLETION,
    "generate_content",
    OPERATION_EMBEDDINGS,
)

SCOPE: Final = "otel_rollout"
"""Instrumentation scope of every span that this library opens."""

SCHEMA_URL: Final = "https://opentelemetry.io/schemas/gen-ai/0.1.0"
"""Schema of the conventions' names on our spans: the first release of the GenAI ones alone."""

SCHEMA_VERSION: Final = 1
"""Version of the `rollout.*` attributes; a reader refuses a newer one."""

OPERATION_INVOKE_AGENT: Final = "invoke_agent"
OPERATION_EXECUTE_TOOL: Final = "execute_tool"
OPERATION_EVALUATE: Final = "evaluate"
OPERATION_EXCHANGE: Final = "recording"
OPERATION_INVOKE_WORKFLOW: Final = "invoke_workflow"

PREFIX: Final = "rollout"
"""Prefix of the names of our own attributes; a dot follows."""
LENGTHS: Final = "rollout.lengths"
"""Length of each of our attributes when the span ended: shows which were truncated or dropped."""
CHECKSUMS: Final = "rollout.checksums"
"""CRC-32 of each text that decides what trains: shows one that became another as long."""

# Rollout span. Values that are not scalars are JSON strings.
ROLLOUT_ID: Final = "rollout.id"
ROLLOUT_SCHEMA_VERSION: Final = "rollout.schema_version"
ROLLOUT_PARENT_ID: Final = "rollout.parent_id"
ROLLOUT_TASK_ID: Final = "rollout.task_id"
ROLLOUT_GROUP_ID: Final = "rollout.group_id"
ROLLOUT_GROUP_RUN: Final = "rollout.group_run"
"""Which of several runs of this group it is; both together are the group, if it is set."""
ROLLOUT_SAMPLE_INDEX: Final = "rollout.sample_index"
ROLLOUT_GROUP_SIZE: Final = "rollout.group_size"
"""Number of samples that the group is to have."""
ROLLOUT_OUTER_GROUP_ID: Final = "rollout.outer_group_id"
"""The group that a rollout is sent with, if that is not its `rollout.group_id` alone: that and its
run; of one inside another one, unless it was given its own or is in a workflow, that one's."""
ROLLOUT_POLICY_VERSION: Final = "rollout.policy_version"
ROLLOUT_TRAINABLE: Final = "rollout.trainable"
ROLLOUT_REWARD: Final = "rollout.reward"
ROLLOUT_REWARDS: Final = "rollout.rewards"
ROLLOUT_METRICS: Final = "rollout.metrics"
ROLLOUT_METADATA: Final = "rollout.metadata"
ROLLOUT_LOGS: Final = "rollout.logs"
ROLLOUT_APPENDED: Final = "rollout.appended"
ROLLOUT_MAIN: Final = "rollout.main"
"""A call of the main conversation, as it was named: span id and choice. Not set: none was."""
ROLLOUT_STEPS: Final = "rollout.steps"
"""The steps of a trajectory that was built by hand."""
ROLLOUT_CLAIMS: Final = "rollout.claims"
"""Span ids of those exchanges of the enclosing rollout that belong to this trajectory."""
ROLLOUT_EPISODE: Final = "rollout.episode"
"""The episode of a workflow's run, without the trajectories themselves."""
ROLLOUT_STATUS: Final = "rollout.status"
ROLLOUT_TERMINATION_REASON: Final = "rollout.termination_reason"
ROLLOUT_ERROR: Final = "rollout.error"
ROLLOUT_OUTPUT: Final = "rollout.output"
ROLLOUT_EXCHANGE_COUNT: Final = "rollout.exchange_count"
"""Number of exchanges that began in the rollout's process."""
ROLLOUT_OPEN_COUNT: Final = "rollout.open_count"
"""Number of exchanges that had not ended when the rollout ended."""
ROLLOUT_CALL_COUNT: Final = "rollout.call_count"
"""Number of calls of models to generate, those of rollouts inside it included."""
ROLLOUT_USAGE_COUNT: Final = "rollout.usage_count"
"""Number of these calls whose replies count their tokens: the sums are of them."""
FOR_PEOPLE: Final = (ROLLOUT_CALL_COUNT, ROLLOUT_USAGE_COUNT, f"{ROLLOUT_REWARDS}.")
"""Beginnings of the names of which nothing is read back."""
ROLLOUT_NESTED_COUNT: Final = "rollout.nested_count"
"""Number of rollouts that began inside it in its process: their calls are their own."""
ROLLOUT_PROCESS: Final = "rollout.process"
"""Id of the process of these counts; each exchange has the id of its own process."""
ROLLOUT_PROPAGATED: Final = "rollout.propagated"
"""True if the rollout was propagated: other processes may have continued it."""
ROLLOUT_GATEWAY_COUNT: Final = "rollout.gateway_count"
"""Model calls made in it that a gateway records, in whichever rollout they name to it."""
ROLLOUT_UNCAPTURED: Final = "rollout.uncaptured"
"""Requests at model paths that were not captured: JSON rows of library, path and count."""
ROLLOUT_OUTSIDE: Final = "rollout.outside"
"""Model calls made outside any rollout while it ran: JSON rows of a place and a count."""
ROLLOUT_PROGRAMS: Final = "rollout.programs"
"""Programs that it started and whose calls are not captured: JSON rows of a name, `GIVEN` or "",
and a count."""
GIVEN: Final = "given"
"""Of a program that was started with the address or the key of a model server."""
ROLLOUT_SIDE_CALLS: Final = "rollout.side_calls"
"""What rules of the user's own said of its calls: a JSON object of reasons by span id; a call that
is not in it is no side call."""
ROLLOUT_CONTENT: Final = "rollout.content"
"""`none` if model calls and texts were kept off the spans; else not set."""
ROLLOUT_PROOF: Final = "rollout.proof"
"""Baggage only: the HMAC by which a process knows that a carrier comes from another of ours."""
ROLLOUT_PART: Final = "rollout.part"
"""True on the span of another process that continued the rollout."""

# Span of the start (`rollout started`), sent while the rollout runs; no trajectory is read from it.
ROLLOUT_STARTED: Final = "rollout.started"
"""The id of the rollout that started. Not `ROLLOUT_ID`, which names the spans of a trajectory."""
HOST_NAME: Final = "host.name"
PROCESS_PID: Final = "process.pid"

# LLM span.
ELIDED_MESSAGES: Final = "rollout.elided_messages"
"""Number of messages of its call that earlier LLM spans show, and it does not."""
ELIDED_TOOLS: Final = "rollout.elided_tools"
"""Number of tool definitions of its call that an earlier LLM span shows, and it does not."""
TURN: Final = "rollout.turn"
"""Number of its call in its conversation, from 1 on."""
HAS_EXCHANGE: Final = "rollout.has_exchange"
"""True on the span of a model call if an exchange span below it has that call, whole: it is for
eyes, and rebuilding does not read it."""

# Tool span.
TOOL_INFERRED: Final = "rollout.tool.inferred"
"""True on the span of a tool that was drawn from the calls around it: its times are theirs."""

# Metrics, and attributes of theirs alone. In Prometheus their names have `_` for each dot, then the
# unit, then `_total` where they only grow.
METRIC_ROLLOUTS: Final = "rollout.rollouts"
METRIC_ROLLOUTS_RUNNING: Final = "rollout.rollouts.running"
METRIC_ROLLOUT_DURATION: Final = "rollout.rollouts.duration"
METRIC_REWARD: Final = "rollout.rollouts.reward"
METRIC_CALLS: Final = "rollout.calls"
METRIC_CALLS_RUNNING: Final = "rollout.calls.running"
METRIC_TOKENS: Final = "rollout.tokens"
METRIC_EXPORT_LAG: Final = "rollout.export.lag"
METRIC_EXPORT_WAITING: Final = "rollout.export.waiting"
METRIC_EXPORT_DROPPED: Final = "rollout.export.dropped"
EXPORTER: Final = "rollout.export.exporter"
"""Name of the class of an exporter."""
EXPORT_SIGNAL: Final = "rollout.export.signal"
"""What was dropped: `trajectory` or `span`."""
ROLLOUT_TOKEN_TYPE: Final = "rollout.token_type"  # noqa: S105 - no password
"""`input` or `output`."""

# Reward span (`evaluate rollout: reward {name}`): a reward that came after its rollout had ended.
REWARD: Final = "rollout.evaluation"
REWARD_NUMBER: Final = "rollout.evaluation.number"
"""Sequence number among the late rewards of a rollout."""

# Exchange span (`recording {path}`).
EXCHANGE_VERSION: Final = "rollout.exchange.version"
EXCHANGE_PROCESS: Final = "rollout.exchange.process"
EXCHANGE_STARTED: Final = "rollout.exchange.started"
EXCHANGE_ENDED: Final = "rollout.exchange.ended"
EXCHANGE_STATUS: Final = "rollout.exchange.status"
EXCHANGE_ERROR: Final = "rollout.exchange.error"
EXCHANGE_ATTEMPTS: Final = "rollout.exchange.attempts"
EXCHANGE_POLICY_VERSION: Final = "rollout.exchange.policy_version"
EXCHANGE_LAST_POLICY_VERSION: Final = "rollout.exchange.last_policy_version"
"""The policy version when the reply had come, where it is another one than at the call."""
EXCHANGE_REFUSED: Final = "rollout.exchange.refused_fields"
EXCHANGE_RETRIED: Final = "rollout.exchange.retried"
"""The replies after which the client itself asked once more: JSON rows of a status, a form and a
body, which is null where the client did not read it."""
EXCHANGE_SESSION: Final = "rollout.exchange.session"
"""The session of its client, as a header of the request named it."""
EXCHANGE_POLICY_MODEL: Final = "rollout.exchange.policy_model"
"""The model that is trained, if the user said which: calls of other ones are side calls."""
EXCHANGE_LOGPROBS_MODE: Final = "rollout.exchange.logprobs_mode"
"""`raw` or `processed`, if the user said which the server's log-probabilities are."""
EXCHANGE_JUDGED: Final = "rollout.exchange.judged"
"""True on an exchange of which `ROLLOUT_SIDE_CALLS` says whether it is a side call."""
EXCHANGE_LATE: Final = "rollout.exchange.late"
"""True on an exchange that began or ended after its rollout had ended."""
EXCHANGE_REDACTED: Final = "rollout.exchange.redacted"
"""True on an exchange whose request or response was redacted before it was written."""
REQUEST_PATH: Final = "rollout.exchange.request.path"
REQUEST_KEY: Final = "rollout.exchange.request.key"
REQUEST_MESSAGES: Final = "rollout.exchange.request.messages"
REQUEST_REPEATED: Final = "rollout.exchange.request.repeated"
"""Index and digest of each null in `REQUEST_MESSAGES`: other spans have these messages."""
REQUEST_DIGEST: Final = "rollout.exchange.request.digest"
REQUEST_BASE_DIGEST: Final = "rollout.exchange.request.base_digest"
REQUEST_BASE_COUNT: Final = "rollout.exchange.request.base_count"
REQUEST_PARAMS: Final = "rollout.exchange.request.params"
REQUEST_SHARED: Final = "rollout.exchange.request.shared"
REQUEST_SHARED_VALUES: Final = "rollout.exchange.request.shared_values"
REQUEST_RAW: Final = "rollout.exchange.request.raw"
REQUEST_SUPPLIED: Final = "rollout.exchange.request.supplied"
"""Token ids that the model server was asked with in the place of the request's messages."""
REQUEST_ADDED: Final = "rollout.exchange.request.added"
"""Members that were added to the request, which its client did not write: a JSON object, with a
list of the value that the client wrote in the place of each, or an empty one."""
RESPONSE_STATUS_CODE: Final = "rollout.exchange.response.status_code"
RESPONSE_ID: Final = "rollout.exchange.response.id"
RESPONSE_STREAM: Final = "rollout.exchange.response.stream"
RESPONSE_BODY: Final = "rollout.exchange.response.body"
RESPONSE_EVENTS: Final = "rollout.exchange.response.events"
RESPONSE_FORM: Final = "rollout.exchange.response.form"
"""What of the reply was not as usual, so that its bytes can be made again: a JSON object, members
of which are in `spans.reply_form.Form`. Not set where all was as usual."""
RESPONSE_PROMPT_IDS: Final = "rollout.exchange.response.prompt_token_ids"
BLOB: Final = "rollout.blob"
"""In the place of a JSON value that is beside its span: its digest, bytes, type and uri."""
BLOBS: Final = "rollout.blobs"
"""Names of the attributes that have references to blobs, with commas."""
EVENT_RETRY: Final = "retry"
