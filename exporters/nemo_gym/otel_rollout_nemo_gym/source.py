"""A `TokenSource` of NeMo Gym over trajectories: what a trainer freezes, reads and retires."""

from __future__ import annotations

import asyncio
import threading
import uuid
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

from otel_rollout import ConfigurationError, InMemoryTrajectoryExporter, Trajectory
from otel_rollout_nemo_gym.entries import to_token_entries

if TYPE_CHECKING:
    from nemo_gym.token_id_capture import TokenCaptureSnapshot


class TrajectoryTokens:
    """A `TokenSource` over the trajectories of an exporter in memory, or over any others.

        exporter = InMemoryTrajectoryExporter()
        configure(exporters=[exporter])
        install_token_source(TrajectoryTokens(exporter))
        TrajectoryTokens(JsonlTrajectoryExporter.read("runs.jsonl"))

    metadata_id: name of the metadata that has Gym's id of the rollout. None: the trajectory's id.

    A rollout that has not ended, or is not known, is frozen as incomplete and without entries. The
    trajectories themselves stay where they are: their owner removes them, such as by `take`.
    ConfigurationError without a nemo-gym that has token capture.
    """

    def __init__(
        self,
        trajectories: InMemoryTrajectoryExporter | Iterable[Trajectory],
        *,
        metadata_id: str | None = None,
    ) -> None:
        try:
            import nemo_gym.token_id_capture as _  # noqa: F401
        except ImportError as error:
            raise ConfigurationError(
                f"TrajectoryTokens: expected a nemo-gym that has token_id_capture ({error}): "
                f"install one after 0.4, from its repository if need be"
            ) from None
        self._metadata_id = metadata_id
        self._held: Callable[[], Iterable[Trajectory]]
        if isinstance(trajectories, InMemoryTrajectoryExporter):
            self._held = trajectories.get_finished_trajectories
        else:
            known = list(trajectories)
            self._held = lambda: known
        self._lock = threading.Lock()
        self._frozen: dict[str, TokenCaptureSnapshot] = {}
        self._retired: set[str] = set()

    async def freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        """The entries of a rollout, the same each time. RuntimeError once they were dropped."""
        return await asyncio.to_thread(self._freeze, rollout_id)

    def _freeze(self, rollout_id: str) -> TokenCaptureSnapshot:
        with self._lock:
            if rollout_id in self._retired:
                raise RuntimeError(f"token capture of the rollout {rollout_id!r} is retired")
            if rollout_id not in self._frozen:
                self._frozen[rollout_id] = self._snapshot(rollout_id)
            return self._frozen[rollout_id]

    def _snapshot(self, rollout_id: str) -> TokenCaptureSnapshot:
        from nemo_gym.token_id_capture import TokenCaptureSnapshot, TokenEntry

        found = [each for each in self._held() if self._id_of(each) == rollout_id]
        made = [to_token_entries(each, metadata_id=self._metadata_id) for each in found[-1:]]
        return TokenCaptureSnapshot(
            rollout_id=rollout_id,
            entries=tuple(TokenEntry.model_validate(row) for each in made for row in each.entries),
            incomplete=not made or made[0].incomplete,
            snapshot_id=uuid.uuid4().hex,
            version=1,
        )

    def _id_of(self, trajectory: Trajectory) -> object:
        name = self._metadata_id
        return trajectory.id if name is None else trajectory.metadata.get(name)

    async def drop(self, rollout_id: str, *, snapshot_id: str, version: int) -> bool:
        """Retire the snapshot that was consumed; False if the rollout has another."""
        with self._lock:
            frozen = self._frozen.get(rollout_id)
            if frozen is None or (frozen.snapshot_id, frozen.version) != (snapshot_id, version):
                return False
            del self._frozen[rollout_id]
            self._retired.add(rollout_id)
            return True

    async def close(self) -> None:
        """Forget what was frozen."""
        with self._lock:
            self._frozen.clear()
