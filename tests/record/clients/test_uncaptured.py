"""Model calls that are in no trajectory: counted on the rollout's span, said live and rebuilt."""

from __future__ import annotations

import threading

from otel_rollout import rollout
from otel_rollout.record.current import rollout_of
from otel_rollout.record.transports.uncaptured import note_outside, note_uncaptured
from otel_rollout.trajectory.sentences import NO_CALL
from tests.kit.recording import Recording


def test_requests_that_were_not_captured_are_named(recording: Recording):
    @rollout
    def agent() -> None:
        active = rollout_of(None)
        assert active is not None
        for _ in range(3):
            note_uncaptured(active, "ollama (httpx)", "/api/chat?key=secret")
        note_uncaptured(active, "requests", "/generate")

    agent()
    trajectory = recording.trajectory
    assert trajectory.warnings == [
        "3 requests to /api/chat went through ollama (httpx) and were not captured",
        "1 request to /generate went through requests and was not captured",
    ]


def test_calls_outside_are_told_to_the_rollouts_that_run(recording: Recording):
    @rollout
    def agent() -> None:
        pass

    @rollout
    def agent_beside() -> None:
        thread = threading.Thread(target=note_outside, name="worker-1")
        thread.start()
        thread.join()

    agent()
    agent_beside()
    quiet, told = recording.trajectories
    assert quiet.warnings == [NO_CALL.words]
    assert told.warnings == [
        "1 model call was made outside any rollout while it ran, in thread 'worker-1': if they "
        "are its own, hand the rollout on to there (propagate, continue_rollout)",
        NO_CALL.words,
    ]


def test_what_is_counted_is_bounded(recording: Recording):
    @rollout
    def agent() -> None:
        active = rollout_of(None)
        assert active is not None
        for number in range(1000):
            note_uncaptured(active, "http.client", f"/{number}/generate")

    agent()
    trajectory = recording.trajectory
    assert len(trajectory.warnings) == 51
    assert (
        trajectory.warnings[-1]
        == "950 requests to other paths went through other libraries and were not captured"
    )


def test_threads_that_are_told_apart_by_a_number_are_one_place(recording: Recording):
    """A server has a thread for each request: they are not told apart."""

    @rollout
    def agent() -> None:
        for _ in range(60):
            thread = threading.Thread(target=note_outside)
            thread.start()
            thread.join()

    agent()
    warning, no_call = recording.trajectory.warnings
    assert no_call == NO_CALL.words
    assert warning.startswith(
        "60 model calls were made outside any rollout while it ran, in thread"
    )
    assert "'Thread-* (note_outside)'" in warning
