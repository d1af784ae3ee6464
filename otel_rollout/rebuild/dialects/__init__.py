"""Model calls from the spans of other instrumentations: one module for each dialect.

No other instrumentation keeps a whole call. So an exchange that is read here never counts as the
bytes on the wire: it names its dialect (`source`) and the facts that the dialect loses (`lost`).
Anything that a single span should have and lacks is its `damage`; a damaged call is not trained.
Roles, rewards and the order of calls are never inferred from names.

To add a dialect: a module with a `DIALECT`, its entry in `dialects` or an entry point
`otel_rollout_dialect` (`formats/`), and a recording of the real instrumentation in `tests/dialects`
(README there), which shows what it keeps. A product whose exports are to be read has a `dump`.
They are imported for the first foreign span.
"""

from otel_rollout.first_use import load_on_first_use

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
