"""One rollout in several processes: named by a carrier, continued by a part of each process."""

from otel_rollout.record.processes.carrier import Carrier as Carrier
