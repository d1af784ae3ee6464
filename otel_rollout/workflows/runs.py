"""Many runs of a workflow at once: taken as there is room, retried, each ending accounted for."""

from __future__ import annotations

import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from typing import Any

from otel_rollout.errors import ConfigurationError
from otel_rollout.record import RolloutProgress, run_bounded
from otel_rollout.trajectory import Episode, TerminationReason
from otel_rollout.workflows.workflow import Workflow


async def run_workflows(
    workflow: type[Workflow] | Callable[[], Workflow],
    tasks: Iterable[Any],
    *,
    n_parallel: int = 128,
    n_samples: int = 1,
    retry_limit: int = 1,
    timeout: float | None = None,
    max_exceptions: int | None = None,
    progress: bool | str = False,
    on_episode: Callable[[Episode], object] | None = None,
    keep_episodes: bool = True,
    workflow_args: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> list[Episode]:
    """Run a workflow on many tasks; the episodes in the order of the tasks.

        episodes = await run_workflows(lambda: Solve(client), tasks, n_samples=8)

    workflow: the class, called with `workflow_args`, or a function that returns an instance.
    n_parallel: at most so many instances exist; each runs one task at a time and is reset before.
    tasks: the next task is taken when an instance is free. A task that is a mapping may have an
    `id`; else its number is its id. Tasks with the same id are samples of one task.
    n_samples: runs of each task, with the uid `{id}:{sample}`, in one group; those of another call
    are in another one.
    retry_limit: attempts of a run whose reason is ERROR; failed attempts stay on the trace.
    timeout: seconds for each attempt. None: the workflow's own `timeout`.
    max_exceptions: so many runs may end with ERROR; one more cancels the rest and raises
    TooManyExceptionsError. None: any number.
    progress: True, or a label, shows on stderr the rate, what runs, the mean reward, how runs
    ended, tokens per second and what runs longest: a bar on a terminal, elsewhere a line every half
    minute.
    on_episode: called with each episode as it ends.
    keep_episodes: False: episodes are not kept, and the list that is returned is empty.
    kwargs: passed to `run`.
    """
    for name, value in (
        ("n_parallel", n_parallel),
        ("n_samples", n_samples),
        ("retry_limit", retry_limit),
    ):
        if not isinstance(value, int) or value < 1:
            raise ConfigurationError(
                f"run_workflows({name}=...): expected a number from 1 on, got {value!r}"
            )
    idle: list[Workflow] = []
    group_run = uuid.uuid4().hex[:12]
    if timeout is not None:
        kwargs["timeout"] = timeout

    async def run(_: int, item: tuple[Any, str, int]) -> Episode:
        task, task_id, sample = item
        made = idle.pop() if idle else workflow(**(workflow_args or {}))
        uid = f"{task_id}:{sample}"
        try:
            options = {"task_id": task_id, "group_id": task_id, "sample_index": sample}
            options |= {"group_run": group_run}
            for attempt in range(1, retry_limit + 1):
                made._is_due = True  # within the run: a reset that fails is an ending like another
                with bar.running(uid):
                    episode = await made.run_with_termination_handling(
                        task, uid, options={**options, "metadata": {"attempt": attempt}}, **kwargs
                    )
                if episode.termination_reason is not TerminationReason.ERROR:
                    break
            return episode
        finally:
            idle.append(made)

    def failure(episode: Episode) -> object:
        if episode.termination_reason is not TerminationReason.ERROR:
            return None
        return episode.info.get("error", {}).get("error_message") or "an error"

    total = len(tasks) * n_samples if isinstance(tasks, Sized) else None
    with RolloutProgress(progress, total, "episodes") as bar:

        def ended(episode: Episode) -> None:
            reason = episode.termination_reason
            bar.add(episode.reward, getattr(reason, "value", reason))
            if on_episode is not None:
                on_episode(episode)

        return await run_bounded(
            _samples(tasks, n_samples),
            run,
            ended,
            failure,
            max_concurrency=n_parallel,
            max_exceptions=max_exceptions,
            keep=keep_episodes,
        )


def _samples(tasks: Iterable[Any], count: int) -> Iterator[tuple[Any, str, int]]:
    seen: Counter[str] = Counter()
    for number, task in enumerate(tasks):
        named = task.get("id") if isinstance(task, Mapping) else None
        task_id = str(number if named is None else named)
        for sample in range(seen[task_id], seen[task_id] + count):
            yield task, task_id, sample
        if named is not None:
            seen[task_id] += count
