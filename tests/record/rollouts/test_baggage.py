"""The rollout in the OpenTelemetry baggage, where `configure(baggage=True)` asks for it."""

from __future__ import annotations

import pydantic
import pytest
from opentelemetry import baggage, propagate
from opentelemetry import context as otel_context

import otel_rollout
from otel_rollout import (
    ConfigurationError,
    continue_rollout,
    get_current_trajectory,
    no_capture,
    rollout,
)
from tests.kit.recording import Clients, Recording


def test_it_is_off_by_default(recording: Recording):
    """Baggage goes to every server that an instrumented client calls: nobody gets it unasked."""
    with rollout("agent"):
        assert baggage.get_all() == {}


def test_it_names_the_innermost_rollout(recording: Recording):
    """It is there while the code of the rollout runs, and the user's own stays."""
    otel_rollout.configure(baggage=True)
    token = otel_context.attach(baggage.set_baggage("tenant", "a"))
    with rollout("outer", policy_version=7, trainable=False) as outer:
        assert baggage.get_all() == {
            "tenant": "a",
            "rollout.id": outer.id,
            "rollout.policy_version": "7",
            "rollout.trainable": "false",
        }
        with rollout("inner") as inner:
            named = {"rollout.id": inner.id, "rollout.policy_version": "7"}
            assert baggage.get_all() == {"tenant": "a", **named}
        with no_capture():
            assert baggage.get_all() == {"tenant": "a"}
    assert baggage.get_all() == {"tenant": "a"}
    otel_context.detach(token)


async def test_also_in_a_coroutine_that_was_made_before(recording: Recording):
    """A plain function that returns a coroutine: its rollout is named while that runs."""
    otel_rollout.configure(baggage=True)

    async def work() -> object:
        return baggage.get_baggage("rollout.id") == get_current_trajectory().id

    @rollout
    def agent() -> object:
        return work()

    coroutine = agent()
    assert baggage.get_all() == {}
    assert await coroutine  # type: ignore[misc]
    assert baggage.get_all() == {}


def test_a_version_that_changes_is_not_named(recording: Recording):
    """A policy version that is a function is asked for each call; the baggage is written once."""
    otel_rollout.configure(baggage=True)
    with rollout("agent", policy_version=lambda: 1) as trajectory:
        assert baggage.get_all() == {"rollout.id": trajectory.id}


def test_what_is_injected_is_continued(recording: Recording, clients: Clients):
    """OpenTelemetry's own `inject` makes a carrier, with its proof where there is a secret."""
    otel_rollout.configure(baggage=True, rollout_secret="s")
    client = clients.sync(clients.serve("hello"))
    carrier: dict[str, str] = {}
    with rollout("agent"):
        propagate.inject(carrier)
        token = otel_context.attach(otel_context.Context())  # another thread, say
        with continue_rollout(carrier):
            client.chat.completions.create(
                model="m", messages=[{"role": "user", "content": "there"}]
            )
        otel_context.detach(token)
    assert "rollout.proof" in carrier["baggage"]
    assert len(recording.trajectory.completions) == 1
    assert recording.trajectory.warnings == []


def test_it_ends_with_shutdown(recording: Recording):
    """A later `configure` begins anew."""
    otel_rollout.configure(baggage=True)
    otel_rollout.shutdown()
    otel_rollout.configure()
    with rollout("agent"):
        assert baggage.get_all() == {}
    otel_rollout.shutdown()


class Meta(pydantic.BaseModel):
    """What MCP gives as the `_meta` of a request, in its older versions."""

    model_config = pydantic.ConfigDict(extra="allow")
    progressToken: int | None = None  # noqa: N815


def test_a_carrier_may_be_a_model_of_pydantic(recording: Recording):
    """Its extra fields are the headers."""
    with rollout("agent") as trajectory:
        meta = Meta.model_validate(otel_rollout.propagate())
        token = otel_context.attach(otel_context.Context())
        with continue_rollout(meta):
            assert get_current_trajectory() is trajectory
        otel_context.detach(token)
        with continue_rollout(Meta()):
            pass


def test_a_model_that_drops_what_it_does_not_know_is_no_carrier(recording: Recording):
    """It would continue nothing, in silence."""

    class Strict(pydantic.BaseModel):
        pass

    with pytest.raises(ConfigurationError, match=r"as a mapping, got Strict\(\)"):
        continue_rollout(Strict())
