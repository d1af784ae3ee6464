"""The way of our spans to an exporter: what waits, in memory and on the disk, until it arrives."""

from otel_rollout.record.sending.requests import Outlet as Outlet
from otel_rollout.record.sending.sender import Sender as Sender
from otel_rollout.record.sending.sender import delay_seconds as delay_seconds
from otel_rollout.record.sending.sender import is_ours as is_ours
