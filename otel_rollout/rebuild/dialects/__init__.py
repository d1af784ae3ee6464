"""Model calls from the spans of other instrumentations: one module for each way of writing them.

Nobody else keeps all of a call. So what is read here is never taken for what was on the wire: each
exchange names its dialect (`source`) and what that loses (`lost`); what a single span should hold
and does not is its `damage`, and a damaged call is not trained on. Roles, rewards and the order of
calls are never inferred from names.

To add a dialect: a module with a `DIALECT`, its entry in `DIALECTS`, and a recording of the real
instrumentation in `tests/dialects` (README there), which shows what it keeps.
"""

from otel_rollout.rebuild.dialects.call import Call, Dialect, Fact
from otel_rollout.rebuild.dialects.reader import DIALECTS, dialect_of, error_of, read_trace

__all__ = ["DIALECTS", "Call", "Dialect", "Fact", "dialect_of", "error_of", "read_trace"]
