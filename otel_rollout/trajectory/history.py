"""One linear conversation: what a history holds, item by item."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from otel_rollout.errors import TrajectorySealedError
from otel_rollout.trajectory.completion import Completion
from otel_rollout.wire import Json, checked_json, copy_json


@dataclass(frozen=True, slots=True, eq=False)
class HistoryItem:
    """One message of a history."""

    message: Json
    """Wire form, as the next request replayed it where one did."""
    completion: Completion | None
    """The completion that sampled it; None for a message that the model did not sample."""
    trainable: bool
    """True in exactly one history for each trainable completion, False elsewhere."""
    is_break: bool = False
    """The client replayed this sampled message without its reasoning, or with a name that token ids
    do not show to be nothing to the model: what follows did not see the tokens that were sampled
    here, or may not have, so at token level a new sequence begins, or may begin."""


@dataclass(slots=True, eq=False)
class History:
    """One linear conversation: from the first message to the last."""

    items: list[HistoryItem]
    tools: list[Json] | None = None
    """Tool definitions that the conversation ran with."""
    _append: Callable[[Json], None] | None = field(default=None, repr=False)

    def messages(self) -> list[Json]:
        """The wire messages, ready to send as the next request; the caller's own copy."""
        return [copy_json(item.message) for item in self.items]

    @property
    def completions(self) -> list[Completion]:
        """The completions in it, first to last."""
        found: list[Completion] = []
        for item in self.items:
            if item.completion is not None and item.completion not in found[-1:]:
                found.append(item.completion)
        return found

    @property
    def completion_ids(self) -> list[str]:
        return [completion.id for completion in self.completions]

    @property
    def side_call(self) -> str | None:
        """Why it is a side call, if all its completions are; None elsewhere."""
        reasons = [completion.side_call for completion in self.completions]
        return reasons[0] if reasons and None not in reasons else None

    def append(self, message: Json) -> None:
        """Add a message that is not a model's, such as a tool's result, to a live conversation.

        It is in `messages()` from now on, and in the trajectory even if no call follows.
        TrajectorySealedError if the rollout has ended, ValueError if it is not JSON.
        """
        if self._append is None:
            raise TrajectorySealedError(
                "history.append: the rollout of this history has ended (or it is not one that "
                "trajectory.get_history gave): append while the rollout runs"
            )
        message = checked_json(message, "history.append")
        self._append(message)
        self.items.append(HistoryItem(message, None, trainable=False))

    def to_list(self) -> list[dict[str, Json]]:
        """The items as JSON: `message`, `completion` as [id, choice index], flags where true."""
        return [
            {
                "message": copy_json(item.message),
                "completion": [item.completion.id, item.completion.choice_index]
                if item.completion
                else None,
                **({"trainable": True} if item.trainable else {}),
                **({"is_break": True} if item.is_break else {}),
            }
            for item in self.items
        ]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, History):
            return NotImplemented
        return self.tools == other.tools and self.to_list() == other.to_list()

    __hash__ = None  # type: ignore[assignment]
