from otel_rollout.rebuild.dialects.reader import error_of as error_of
from otel_rollout.rebuild.dialects.reader import read_trace as read_trace
