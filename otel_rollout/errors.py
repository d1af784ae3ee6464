"""The exceptions that this library raises, as one tree.

    RolloutError
     +- ConfigurationError        start-up: a wrong argument, provider or limit  (ValueError)
     +- NoActiveRolloutError      asked for a trajectory outside of a rollout    (LookupError)
     +- UnknownCompletionError    a completion id that the trajectory lacks      (LookupError)
     +- NotARolloutError          not a function, or coroutine, of a rollout     (TypeError)
     +- NotRecordedError          a rollout ran, but nothing records it
     +- TrajectorySealedError     a change to a trajectory whose rollout ended
     +- SpanFormatError           a span or file that cannot be read             (ValueError)
     +- ExportError               data that a trainer's format cannot carry      (ValueError)
     +- TooManyExceptionsError    more rollouts failed than were allowed to

Only functions that the user calls raise. Capture and the span processor never raise into the
user's code: they add a sentence to `trajectory.warnings` for anything that they could not keep.
"""


class RolloutError(Exception):
    """Base of every exception that this library raises."""


class ConfigurationError(RolloutError, ValueError):
    """A wrong argument, provider or limit at start-up."""


class NoActiveRolloutError(RolloutError, LookupError):
    """There is no rollout in the current context."""


class UnknownCompletionError(RolloutError, LookupError):
    """A completion id that this trajectory does not have; the message lists the known ids."""


class NotARolloutError(RolloutError, TypeError):
    """Not a function, or not the coroutine of a function, that can run as a rollout."""


class NotRecordedError(RolloutError):
    """A rollout ran, but no `TrajectorySpanProcessor` records it."""


class TrajectorySealedError(RolloutError):
    """The rollout has ended: only a reward may still arrive."""


class SpanFormatError(RolloutError, ValueError):
    """A span, a file or a backend's answer has an unexpected format."""


class ExportError(RolloutError, ValueError):
    """A trajectory has data that the format cannot carry; the message says what to do."""
