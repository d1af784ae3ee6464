from otel_rollout.rebuild.dialects.call import Dialect as Dialect
from otel_rollout.rebuild.dialects.call import Fact as Fact
from otel_rollout.rebuild.dialects.call import ForeignCall as ForeignCall
from otel_rollout.rebuild.dialects.reader import DIALECTS as DIALECTS
from otel_rollout.rebuild.dialects.reader import dialect_of as dialect_of
from otel_rollout.rebuild.dialects.reader import error_of as error_of
from otel_rollout.rebuild.dialects.reader import read_trace as read_trace
