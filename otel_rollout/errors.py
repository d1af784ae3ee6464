"""The exceptions that this library raises, as one tree.

    RolloutError
     +- ConfigurationError        start-up: a wrong argument, provider or limit  (ValueError)
     +- NoActiveRolloutError      asked for a trajectory outside of a rollout    (LookupError)
     +- UnknownCompletionError    an id of a completion that there is not        (LookupError)
     +- NotARolloutError          not a function, or coroutine, of a rollout     (TypeError)
     +- NotRecordedError          a rollout ran, but nothing records it
     +- TrajectorySealedError     a change to a trajectory whose rollout ended
     +- SpanFormatError           a span or file that cannot be read             (ValueError)
     +- ExportError               what a trainer's format cannot carry           (ValueError)
     +- TooManyExceptionsError    more rollouts failed than were allowed to

Only what the user calls raises. Capture and the span processor never raise into the user's
code: what they could not keep is a sentence in `trajectory.warnings`.
"""


class RolloutError(Exception):
    """Base of every exception that this library raises."""


class ConfigurationError(RolloutError, ValueError):
    """A wrong argument, provider or limit at start-up."""


class NoActiveRolloutError(RolloutError, LookupError):
    """There is no rollout in the current context."""


class UnknownCompletionError(RolloutError, LookupError):
    """A completion id that this trajectory does not have; the message lists the ids there are."""


class NotARolloutError(RolloutError, TypeError):
    """Not a function, or not the coroutine of a function, that can run as a rollout."""


class NotRecordedError(RolloutError):
    """A rollout ran, but no `TrajectorySpanProcessor` records it."""


class TrajectorySealedError(RolloutError):
    """The rollout has ended: only a reward may still arrive."""


class SpanFormatError(RolloutError, ValueError):
    """A span, file or answer of a backend that is not what it should be."""


class ExportError(RolloutError, ValueError):
    """A trajectory holds what the format cannot carry; the message says what, and what to do."""
