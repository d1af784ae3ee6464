"""The train lane: a running rollout, its model calls as exchange spans, its trajectory."""

from otel_rollout.record import capture
from otel_rollout.record.attributes import (
    end_attributes,
    identity,
    message_of,
    present,
    reward_numbers,
)
from otel_rollout.record.boundary import contained, guarded
from otel_rollout.record.calls import noting_requests
from otel_rollout.record.carried import (
    OUTSIDE,
    Carried,
    begin_here,
    came_back,
    fields_here,
    headers_of,
    record_call,
    rollout_or_part,
    with_fields,
)
from otel_rollout.record.carrier import SECRET_VARIABLE, rollout_secret
from otel_rollout.record.content import SWITCHES, Content, of_environment, switched_off
from otel_rollout.record.current import begin, current_rollout, end, running_rollout
from otel_rollout.record.delivery import in_time, start_thread
from otel_rollout.record.encoding import decoded
from otel_rollout.record.gather import (
    TooManyExceptionsError,
    gather_group,
    gather_trajectories,
    gather_trajectory,
    run_bounded,
)
from otel_rollout.record.inside import (
    get_current_trajectory,
    get_history,
    is_drawn_around,
    no_capture,
    record_reward,
    request_token_ids,
)
from otel_rollout.record.late_rewards import late_reward
from otel_rollout.record.metrics import Score, rollout_metrics
from otel_rollout.record.names import stand_before
from otel_rollout.record.options import Options
from otel_rollout.record.others import Recent, drawn_calls
from otel_rollout.record.processes import (
    continue_environment,
    continue_rollout,
    leave_environment,
    propagate,
)
from otel_rollout.record.processor import TrajectorySpanProcessor, check_exporter
from otel_rollout.record.progress import RolloutProgress
from otel_rollout.record.provider import rollout_provider
from otel_rollout.record.recorder import ExchangeRecorder
from otel_rollout.record.rollouts import rollout
from otel_rollout.record.running import ActiveRollout, Enclosing, close
from otel_rollout.record.secrets import Secrets
from otel_rollout.record.side_calls import checked_rules
from otel_rollout.record.state import process_state
from otel_rollout.record.summary import built_summary
from otel_rollout.record.to_gateway import KEY_PREFIX, TOKEN, without_token
from otel_rollout.record.tools import tool
from otel_rollout.record.uncaptured import note_uncaptured

__all__ = [
    "KEY_PREFIX",
    "OUTSIDE",
    "SECRET_VARIABLE",
    "SWITCHES",
    "TOKEN",
    "ActiveRollout",
    "Carried",
    "Content",
    "Enclosing",
    "ExchangeRecorder",
    "Options",
    "Recent",
    "RolloutProgress",
    "Score",
    "Secrets",
    "TooManyExceptionsError",
    "TrajectorySpanProcessor",
    "begin",
    "begin_here",
    "built_summary",
    "came_back",
    "capture",
    "check_exporter",
    "checked_rules",
    "close",
    "contained",
    "continue_environment",
    "continue_rollout",
    "current_rollout",
    "decoded",
    "drawn_calls",
    "end",
    "end_attributes",
    "fields_here",
    "gather_group",
    "gather_trajectories",
    "gather_trajectory",
    "get_current_trajectory",
    "get_history",
    "guarded",
    "headers_of",
    "identity",
    "in_time",
    "is_drawn_around",
    "late_reward",
    "leave_environment",
    "message_of",
    "no_capture",
    "note_uncaptured",
    "noting_requests",
    "of_environment",
    "present",
    "process_state",
    "propagate",
    "record_call",
    "record_reward",
    "request_token_ids",
    "reward_numbers",
    "rollout",
    "rollout_metrics",
    "rollout_or_part",
    "rollout_provider",
    "rollout_secret",
    "run_bounded",
    "running_rollout",
    "stand_before",
    "start_thread",
    "switched_off",
    "tool",
    "with_fields",
    "without_token",
]
