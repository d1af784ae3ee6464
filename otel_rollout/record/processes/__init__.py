"""One rollout in several processes: named by a carrier, continued by a part of each process."""

from otel_rollout.record.processes.child_reports import heard as heard
from otel_rollout.record.processes.child_reports import tell as tell
