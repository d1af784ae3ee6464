"""An agent that thinks, in TRL's AsyncGRPOTrainer: every row of every rollout trains.

    python -m examples.train_trl_vllm --plot curve.png --out trajectories.jsonl   # a CPU, minutes
    python -m examples.train_trl_vllm --model Qwen/Qwen3-0.6B --server http://localhost:8000

Needs trl, and exporters/trl. The chat template of a thinking model leaves the thoughts of earlier
replies out, so that the second prompt does not continue the first reply: a rollout is two rows, of
which `GRPOTrainer` would take one. `AsyncGRPOTrainer` takes all, and samples while it trains: the
worker below runs rollouts in a thread, each call stamped with the version of the weights.

TRL sends its weights to vLLM between GPUs; `examples/async_on_cpu.py` has what is in their place
where there are none.
"""

import argparse
import asyncio
import itertools
import queue
import tempfile
import threading
from collections.abc import Sequence
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from openai import AsyncOpenAI
from otel_rollout_trl import to_trl_async_samples
from transformers import PrinterCallback
from trl.experimental.async_grpo import AsyncGRPOConfig, AsyncGRPOTrainer

import otel_rollout
from examples.async_on_cpu import CPU, TinyTransfer, without_a_gpu
from examples.folder_transfer import FolderTransfer
from examples.tiny_model import Policy
from examples.train_trl import SAMPLES, arguments_of, listen, plot, questions, report, set_up
from otel_rollout import TrajectoryGroup, gather_group
from otel_rollout.testing import ModelServer


class Worker:
    """Rollouts for the trainer, as TRL's `RolloutWorkerProtocol` has them."""

    def __init__(self, url: str, model: str, max_tokens: int, curve: list[float]) -> None:
        self.rollout_buffer = queue.Queue[Any](maxsize=2 * SAMPLES)  # little is sampled ahead
        self.metrics_queue = queue.Queue[dict[str, float]]()
        self._url, self._model, self._max_tokens, self._curve = url, model, max_tokens, curve
        self._version = 0
        self._stopped = threading.Event()
        self._failed: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="rollouts")

    def start(self) -> None:
        """Begin; the server has the trainer's weights."""
        self._thread.start()

    def stop(self) -> None:
        """End after the rollouts that run now."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join()

    def update_model_version(self, model_version: int) -> None:
        """Take the version of the weights that the server has from now on."""
        self._version = model_version

    def check_health(self, stale_after_s: float) -> None:
        """Raise where the rollouts have failed."""
        if self._failed is not None:
            raise RuntimeError("the rollouts have ended") from self._failed

    def _run(self) -> None:
        try:
            asyncio.run(self._produce())
        except BaseException as error:
            self._failed = error

    async def _produce(self) -> None:
        prompts = questions()["prompt"]
        async with AsyncOpenAI(base_url=f"{self._url}/v1", api_key="none-needed") as client:
            for number in itertools.count():
                if self._stopped.is_set():
                    return
                seeds = itertools.count(number * SAMPLES)
                groups = await asyncio.gather(
                    *(self._group(client, prompt, next(seeds)) for prompt in prompts)
                )
                if number == 0:
                    report(trajectory for group in groups for trajectory in group)
                for place, group in enumerate(groups):
                    self._put(group, number * len(groups) + place)
                self._print(number, groups)

    async def _group(self, client: AsyncOpenAI, prompt: Any, number: int) -> TrajectoryGroup:
        return await gather_group(
            (
                listen(client, self._model, prompt, number * SAMPLES + sample, self._max_tokens)
                for sample in range(SAMPLES)
            ),
            max_exceptions=SAMPLES // 2,  # if more fail, the training ends
            policy_version=lambda: self._version,
        )

    def _put(self, group: TrajectoryGroup, group_id: int) -> None:
        for sample in to_trl_async_samples(group, group_id=group_id):
            while not self._stopped.is_set():
                try:
                    self.rollout_buffer.put(sample, timeout=0.1)
                    break
                except queue.Full:  # the trainer learns
                    continue

    def _print(self, number: int, groups: Sequence[TrajectoryGroup]) -> None:
        trajectories = [trajectory for group in groups for trajectory in group]
        self._curve.append(fmean(trajectory.reward or 0.0 for trajectory in trajectories))
        rows = sum(len(trajectory.token_sequences()) for trajectory in trajectories)
        print(
            f"round {number:2}  reward {self._curve[-1]:.3f}  {rows} rows, version {self._version}"
        )


# --- the trainer


def make_trainer(
    model: str, worker: Worker, transfer: Any, steps: int, folder: str, **settings: Any
) -> Any:
    """The real trainer."""
    trainer = AsyncGRPOTrainer(
        model=model,
        train_dataset=questions(),
        rollout_worker=worker,
        weight_transfer=transfer,  # None: TRL's own, between GPUs
        args=AsyncGRPOConfig(
            output_dir=folder,
            max_steps=steps,
            per_device_train_batch_size=4 * SAMPLES,
            gradient_accumulation_steps=1,
            num_generations=SAMPLES,
            save_strategy="no",
            report_to="none",
            logging_strategy="no",
            disable_tqdm=True,
            **settings,
        ),
    )
    trainer.remove_callback(PrinterCallback)
    return trainer


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, print a line for each round of rollouts."""
    parser = arguments_of("AsyncGRPOTrainer learns from rollouts.", steps=50)
    parser.add_argument("--max-tokens", type=int, default=8, help="of a reply, its thoughts too")
    options = parser.parse_args(arguments)
    if bool(options.model) != bool(options.server):
        parser.error("--model and --server belong together")
    set_up(options)
    curve = list[float]()
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        trainer = _trainer(options, folder, curve, stack)
        trainer.train()
    otel_rollout.shutdown()
    if options.plot:
        plot(curve, options.plot)


def _trainer(options: argparse.Namespace, folder: str, curve: list[float], stack: ExitStack) -> Any:
    """The trainer of the server that was named, or of the tiny model."""
    cpu = not torch.cuda.is_available()
    if cpu:
        stack.enter_context(without_a_gpu())
    transfer: FolderTransfer | None = None
    if options.server:
        server, model = options.server.rstrip("/"), options.model
        transfer = FolderTransfer(server, f"{folder}/weights") if cpu else None
    else:
        torch.set_num_threads(1)  # a tiny model is slower with more
        policy, model = Policy(thinking=True), f"{folder}/tiny"
        policy.save(model)
        served = stack.enter_context(ModelServer(policy.answer))
        server = served.base_url.removesuffix("/v1")
        transfer = TinyTransfer(policy)
    worker = Worker(server, model, options.max_tokens, curve)
    settings = CPU if cpu else {"vllm_server_base_url": server}
    return make_trainer(model, worker, transfer, options.steps, folder, **settings)


if __name__ == "__main__":
    main()
