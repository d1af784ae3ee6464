"""A rollout inside another one has its task and its policy version, and no group."""

from __future__ import annotations

from typing import Any

import pytest

from otel_rollout import continue_rollout, propagate, reconstruct, rollout
from tests.kit.conversations import user
from tests.kit.recording import Clients, Recording


@pytest.mark.parametrize("streamed", [False, True])
def test_task_and_version(recording: Recording, clients: Clients, streamed: bool):
    """At any depth; of each call too, as the version changes; what is given wins."""
    client, version = clients.sync(clients.serve()), [7]

    def call() -> None:
        messages = [user("hi")]
        reply = client.chat.completions.create(model="m", messages=messages, stream=streamed)
        list(reply if streamed else ())

    options: Any = {"task_id": 3, "group_id": "g", "group_size": 1}
    with rollout("parent", policy_version=lambda: version[0], **options):
        with rollout("child"), rollout("inner"):
            call()
            version[0] = 8
            call()
        with rollout("other", task_id="own", policy_version="mine"), rollout("its"):
            call()
    found = {t.name: t for t in recording.trajectories}
    assert found["parent"].policy_version == 7
    assert [found[n].policy_version for n in ("child", "inner")] == [7, 7]
    assert found["inner"].policy_versions == [7, 8]
    assert [found[n].task_id for n in ("parent", "child", "inner")] == ["3"] * 3
    assert [found[n].group_id for n in ("child", "inner", "other")] == [None] * 3
    for name in ("other", "its"):
        assert (found[name].task_id, found[name].policy_version) == ("own", "mine")
    assert found["its"].policy_versions == ["mine"]
    rebuilt = {t.name: t for t in reconstruct(recording.spans)}
    assert rebuilt == found


@pytest.mark.not_replayed("the rollout is continued as in another process")
def test_over_a_carrier(recording: Recording, monkeypatch: pytest.MonkeyPatch):
    """A rollout inside a part of one has them too."""
    with rollout("parent", task_id="t", policy_version=5, group_id="g", group_run="r"):
        carrier = propagate()
        monkeypatch.setattr("otel_rollout.record.processes.continued.came_back", lambda _: None)
        with continue_rollout(carrier), rollout("child") as child:
            pass
    assert (child.task_id, child.policy_version, child.group_id) == ("t", 5, None)
