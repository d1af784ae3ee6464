"""Whether rollouts and groups are whole, from the attributes of their spans alone. Pure."""

from otel_rollout.evidence.audit import Audit as Audit
from otel_rollout.evidence.audit import Report as Report
from otel_rollout.evidence.open_rollouts import OpenRollouts as OpenRollouts
from otel_rollout.evidence.open_rollouts import Verdict as Verdict
from otel_rollout.evidence.rollout import Evidence as Evidence
from otel_rollout.evidence.rollout import Head as Head
from otel_rollout.evidence.rollout import Late as Late
from otel_rollout.evidence.rollout import rollout_of as rollout_of
from otel_rollout.evidence.rollout import unit_of as unit_of
from otel_rollout.evidence.units import Unit as Unit
