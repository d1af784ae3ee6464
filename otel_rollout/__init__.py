"""Train a language-model agent on what it really did, without rewriting it.

    import otel_rollout
    from otel_rollout import InMemoryTrajectoryExporter, gather_trajectory, rollout

    exporter = InMemoryTrajectoryExporter()
    otel_rollout.configure(service_name="math-agent", exporters=[exporter])   # once, at start-up

    @rollout                                     # the agent stays as it is
    async def agent(client, task): ...

    answer = await agent(client, task)                                        # in production
    trajectory = await gather_trajectory(agent(client, task))                 # in training

The run is an OpenTelemetry trace, and a `Trajectory`: its histories, rewards and token ids.
"""

from otel_rollout.first_use import load_on_first_use, loaded_on_first_call
from otel_rollout.looking import show_with

__all__, __getattr__, __dir__ = load_on_first_use(__name__, __file__)
show_with(
    cell_of=loaded_on_first_call("otel_rollout.view", "notebook_cell"),
    text_of=loaded_on_first_call("otel_rollout.view", "format_trajectory"),
    drift_of=loaded_on_first_call("otel_rollout.view", "drift_of"),
)
