"""A receiver of spans: OTLP in, whole trajectories out. It needs the extra `receive`."""

from otel_rollout.receive.heads import HandedOver as HandedOver
from otel_rollout.receive.heads import HeadFile as HeadFile
from otel_rollout.receive.heads import is_journal as is_journal
from otel_rollout.receive.intake import Limits as Limits
from otel_rollout.receive.intake import audit_journal as audit_journal
from otel_rollout.receive.receiver import TrajectoryReceiver as TrajectoryReceiver
