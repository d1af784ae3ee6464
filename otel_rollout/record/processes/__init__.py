"""One rollout in several processes: named by a carrier, continued by a part of each process."""

from otel_rollout.record.processes.child_reports import read_reports as read_reports
from otel_rollout.record.processes.child_reports import report as report
