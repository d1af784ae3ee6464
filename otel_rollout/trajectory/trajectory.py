"""A trajectory: the record of one rollout, what the model saw and sampled, and its rewards.

It is *live* while its rollout runs: reward, metrics and metadata can be set. It is *sealed* once
the rollout has ended: only a reward may still arrive. What was exchanged comes from one `Source`;
completions, histories, steps and token sequences are views of it. None is unknown, never zero.
Its fields, and how they are recorded, are in `record.py`; the views of them are here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from otel_rollout.errors import (
    ExportError,
    SpanFormatError,
    TrajectorySealedError,
    UnknownCompletionError,
)
from otel_rollout.looking import Printed, ShownInNotebooks, drift_of
from otel_rollout.trajectory.as_json import (
    dict_of,
    line_of,
    parameters_of,
    parameters_of_line,
    wrong_in,
)
from otel_rollout.trajectory.completion import Completion
from otel_rollout.trajectory.conversations import Conversations
from otel_rollout.trajectory.drift import Drift
from otel_rollout.trajectory.gate import Cause
from otel_rollout.trajectory.histories import Appended
from otel_rollout.trajectory.history import History
from otel_rollout.trajectory.record import RolloutRecord
from otel_rollout.trajectory.reward import Reward, RewardKey, Rewards, texts_of
from otel_rollout.trajectory.sampling import UNREADABLE
from otel_rollout.trajectory.side_calls import Rule, known_side_call, reasons_by
from otel_rollout.trajectory.steps import CallKey, call_key
from otel_rollout.trajectory.tokens import Dropped, TokenSequences, token_sequences
from otel_rollout.wire import Json, loads


class Trajectory(RolloutRecord, ShownInNotebooks, Printed):
    """The record of one rollout."""

    __slots__ = ()

    # --- what the model saw and sampled

    @property
    def why_empty(self) -> str | None:
        """Why it has no completion; None if it has some, or no missing call was noted."""
        return None if self.completions else "; ".join(self.missing_calls) or None

    @property
    def completions(self) -> list[Completion]:
        """Every choice of every exchange with a model that generates, in order of their start.

        Failed calls are here too: `message` None and `error` set.
        """
        return self._read().conversations.completions

    @property
    def conversations(self) -> Conversations:
        """Its completions, linked: which one continues which."""
        return self._read().conversations

    @property
    def policy_versions(self) -> list[str | int]:
        """The policy versions that its completions were sampled with, in order of their start."""
        versions = (version for each in self.completions for version in each.policy_versions)
        return list(dict.fromkeys(version for version in versions if version is not None))

    @property
    def histories(self) -> list[History]:
        """The conversations: the main one, then the others in order of their first call."""
        return self._read().conversations.histories(*self._agent)

    def each_history(self) -> Iterator[History]:
        """The same, one at a time: those that share long prefixes are not in memory together."""
        return self._read().conversations.each_history(*self._agent)

    @property
    def _agent(self) -> tuple[Appended, CallKey | None, Json]:
        """What decides which of its conversations is the main one."""
        return self.appended, self.main_call, self.output

    @property
    def main_end(self) -> Completion | None:
        """The last completion of the main history. None: there is none."""
        return self._read().conversations.main(*self._agent)

    @property
    def main_start(self) -> Completion | None:
        """The first completion of the main history. None: there is none."""
        end = self.main_end
        return None if end is None else self._read().conversations.start_of(end)

    @property
    def main(self) -> History | None:
        """The conversation of the agent itself, the first of `histories`. None: there is none.

        That with the last call that trains, side calls aside (of calls at the same time the longest
        conversation); but the one whose last reply is what the rollout returned, if there is one
        such. While the rollout runs it may be set, to a history, a completion or its id: the
        conversation that this one is in, or ends in, is the main one whatever follows.
        """
        end = self.main_end
        return None if end is None else self._history_of(end)

    @main.setter
    def main(self, chosen: History | Completion | str | None) -> None:
        if self._sealed:
            raise TrajectorySealedError(
                f"trajectory.main: the rollout {self.id} has ended; name it while it runs"
            )
        last = chosen.completions[-1:] if isinstance(chosen, History) else [chosen]
        end = self._find(last[0], 0) if last and isinstance(last[0], str) else (last or [None])[0]
        if not isinstance(end, Completion | None):
            raise ValueError(
                f"trajectory.main: expected a history, a completion or its id, got {chosen!r:.100}"
            )
        self.main_call = None if end is None else call_key(end)

    def messages(self) -> list[Json]:
        """The wire messages of the main history; [] where there is none."""
        main = self.main
        return main.messages() if main else []

    def get_history(self, completion_id: str, choice: int = 0) -> History:
        """The conversation that ends in this completion, and the messages appended after it.

        UnknownCompletionError if the trajectory has no such completion.
        """
        return self._history_of(self._find(completion_id, choice))

    def _history_of(self, completion: Completion) -> History:
        """The same for one of its completions."""
        history = self._read().conversations.history(completion, self.appended)
        if not self._sealed:
            key = completion.id, completion.choice_index
            history._append = lambda message: self._append(key, message)
        return history

    def _append(self, key: tuple[str, int], message: Json) -> None:
        with self._lock:
            if self._sealed:
                raise TrajectorySealedError(
                    f"history.append: the rollout {self.id} has ended; append while it runs"
                )
            self.appended.setdefault(key, []).append(message)

    def _find(self, completion_id: str, choice: int) -> Completion:
        conversations = self._read().conversations
        completion = conversations.get(completion_id, choice)
        if completion is not None:
            return completion
        there = ", ".join(
            f"{c.id!r}" + (f" (choice {c.choice_index})" if c.choice_index else "")
            for c in conversations.completions
        )
        raise UnknownCompletionError(
            f"trajectory {self.id} has no completion {completion_id!r}"
            + (f" with choice {choice}" if choice else "")
            + (f"; it has {there}" if there else "; no call of it has ended yet")
        )

    def token_sequences(
        self,
        *,
        on_failure: Literal["drop", "keep"] = "drop",
        on_abort: Literal["drop", "keep"] = "drop",
        on_side_call: Literal["drop", "keep"] = "drop",
        on_media: Literal["drop", "keep"] = "drop",
        constrained_logprobs: Literal["keep", "nan"] = "keep",
        mask_truncated: bool = False,
        max_length: int | None = None,
        max_token_id: int | None = None,
        require_all_calls: bool = False,
    ) -> TokenSequences:
        """The trainable rows, in order of the calls that end them.

        `dropped` of what is returned lists the completions that no row trains, with the reason.

        on_failure: a rollout that failed and has no reward gives no rows, unless this is "keep".
        So does a cancelled one, which needs a reward too: without one it never trains.
        on_abort: replies that the server gave up, as it may around an update of the weights, are
        not trained; "keep" trains what had come, flagged as truncated.
        on_side_call: calls beside the agent, such as for a title (`Completion.side_call`), are not
        trained; "keep" trains them as any other.
        on_media: replies in conversations with images, sound or files, for which token ids have
        placeholders, are not trained; "keep" trains them.
        constrained_logprobs: log-probabilities of constrained decoding (a schema, a grammar, a
        forced tool call) are not the policy's; "nan" makes them unknown, "keep" hands them on.
        mask_truncated: replies that the model did not end itself stay as context and are not
        trained.
        max_length: longer rows are cut at their end, in tokens.
        max_token_id: the last id of the vocabulary: replies with a larger one do not train.
        require_all_calls: True refuses a trajectory that would train beside model calls which are
        not in it (`missing_calls`: not captured, lost, late, still open, or none at all).

        ValueError for a wrong option, ExportError for a trajectory that is refused.
        """
        _check_choices(
            on_failure=on_failure, on_abort=on_abort, on_side_call=on_side_call, on_media=on_media
        )
        _check_option("constrained_logprobs", constrained_logprobs, ("keep", "nan"))
        _check_numbers(max_length=max_length, max_token_id=max_token_id)
        self._read().tokens_first()
        why, failed = self.why_empty, self._untrained(on_failure)
        if require_all_calls and (why is not None or failed is None):
            self.check_calls()
        if why is not None:
            return TokenSequences((), [Dropped(None, why, "no_calls")])
        if failed is not None:
            return TokenSequences((), [Dropped(each, *failed) for each in self.completions])
        return token_sequences(
            self.completions,
            masked=lambda completion: mask_truncated and completion.truncated,
            max_length=max_length,
            keep_aborted=on_abort == "keep" and self.trainable,
            keep_side_calls=on_side_call == "keep",
            keep_media=on_media == "keep",
            constrained_logprobs=constrained_logprobs,
            max_token_id=self._max_token_id if max_token_id is None else max_token_id,
        )

    def _untrained(self, on_failure: str) -> tuple[str, Cause] | None:
        """Why nothing of it trains, by how it ended; None: what came does."""
        if self.status == "cancelled" and (self.reward is None or on_failure == "drop"):
            return "its rollout was cancelled", "rollout_cancelled"
        if self.status == "error" and self.reward is None and on_failure == "drop":
            return _FAILED, "rollout_failed"
        return None

    def drift(self) -> Drift:
        """The calls whose messages continue an earlier call, and whose token ids do not, with why.

        Each begins a row of its own in `token_sequences`. Worked out anew at each call.
        """
        found: Drift = drift_of(self._read().conversations)
        return found

    def check_calls(self) -> None:
        """ExportError if it is to be trained on, and model calls of its rollout are not in it."""
        if self.trainable and (missing := self.missing_calls):
            raise ExportError(
                f"trajectory {self.id!r} ({self.name!r}), require_all_calls=True: expected all "
                f"model calls of its rollout, but {'; '.join(missing)}. Have them captured, or "
                f"leave the trajectory out"
            )

    # --- how well it went

    @property
    def reward(self) -> float | None:
        """The trajectory's reward; None while unscored. May be set after the rollout too.

        While it is not set itself: the sum of its named rewards times their weights, of those
        that have one.
        """
        return self.all_rewards.total

    @reward.setter
    def reward(self, value: float | None) -> None:
        if value is None:
            self.remove_reward((None, None, 0))
        else:
            self.all_rewards.put(Reward(value, **texts_of(value)))

    @property
    def rewards(self) -> Rewards:
        """Named rewards of the trajectory; may be set after the rollout too."""
        return Rewards(self.all_rewards)

    @rewards.setter
    def rewards(self, values: Mapping[str, float]) -> None:
        view = self.rewards
        view.clear()
        for name, value in values.items():
            view[name] = value

    def add_reward(self, reward: Reward) -> None:
        """Set a reward of the trajectory or of one completion.

        UnknownCompletionError if it names a completion that the trajectory does not have.
        """
        if reward.completion_id is not None:
            self._find(reward.completion_id, reward.choice_index)
        self.all_rewards.put(reward)

    def remove_reward(self, key: RewardKey) -> None:
        """Make a reward unknown again."""
        self.all_rewards.remove(key)

    @property
    def is_copy(self) -> bool:
        """True for one that was read: nothing puts a reward that is set on it on its trace."""
        return self._sealed and self.all_rewards.on_change is None

    # --- as data

    def to_dict(self) -> dict[str, Json]:
        """Plain JSON from which `from_dict` makes an equal trajectory; size linear in content."""
        return dict_of(self.to_json())

    def to_json(self) -> str:
        """The same as JSON on one line; what was exchanged is in it as it came, and is not read."""
        return line_of(self)

    def with_side_calls(self, rules: Sequence[Rule] = (known_side_call,)) -> Trajectory:
        """A copy of it, ended, whose side calls are those that these rules find; () finds none.

        What other rules said when it was recorded does not hold in the copy.
        """
        found, data = reasons_by(rules, self.completions), self.to_dict()
        for row in data["exchanges"]:
            row["side_call"] = found.get(row["span_id"], "")
        return Trajectory.from_dict(data)

    def with_max_token_id(self, max_token_id: int) -> Trajectory:
        """A copy of it, ended, whose `token_sequences` has this `max_token_id` by default."""
        copy = Trajectory.from_json(self.to_json())
        object.__setattr__(copy, "_max_token_id", max_token_id)
        return copy

    @classmethod
    def from_dict(cls, data: Mapping[str, Json]) -> Trajectory:
        """The trajectory that `to_dict` described. SpanFormatError if it is not one."""
        try:
            return cls(**parameters_of(data), sealed=True)
        except SpanFormatError:
            raise
        except UNREADABLE as error:
            raise SpanFormatError(
                f"Trajectory.from_dict: the trajectory {data.get('id')!r:.80} is damaged: "
                f"{wrong_in(data, error)}"
            ) from error

    @classmethod
    def from_json(cls, line: str | bytes, *, reads_replies: bool = False) -> Trajectory:
        """The trajectory that `to_json` described. SpanFormatError if it is not one.

        What was exchanged is read when somebody asks for it. reads_replies: True where somebody
        will ask for the replies: they are read with the line, which costs less in all.
        """
        try:
            return cls(**parameters_of_line(line, reads_replies=reads_replies), sealed=True)
        except UNREADABLE:
            pass  # it is damaged, or a value of the user's in it is NaN
        try:
            data = loads(line)
        except (ValueError, RecursionError) as error:
            raise SpanFormatError(f"Trajectory.from_json: it is no JSON ({error})") from None
        return cls.from_dict(data)

    def __eq__(self, other: object) -> bool:
        """Equal in everything: `to_dict()` of both is the same."""
        if not isinstance(other, Trajectory):
            return NotImplemented
        return self is other or self.to_dict() == other.to_dict()

    def __hash__(self) -> int:
        return hash(self.id)

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are sealed trajectories of their own."""
        return Trajectory.from_json, (self.to_json(),)

    def __repr__(self) -> str:
        return (
            f"<Trajectory {self.name!r} {self.id} {self.status}: {len(self.completions)} "
            f"completions, {len(self.histories)} histories, reward {self.reward}>"
        )


_FAILED = "its rollout failed and has no reward (on_failure='keep' trains it all the same)"


def _check_option(name: str, value: object, expected: tuple[str, str]) -> None:
    if value not in expected:
        first, second = expected
        raise ValueError(
            f"token_sequences({name}=...): expected {first!r} or {second!r}, got {value!r}"
        )


def _check_choices(**options: object) -> None:
    for name, value in options.items():
        _check_option(name, value, ("drop", "keep"))


def _check_numbers(**options: object) -> None:
    for name, value in options.items():
        least = int(name == "max_length")
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(
                f"token_sequences({name}=...): expected a number from {least} on, got {value!r}"
            )
