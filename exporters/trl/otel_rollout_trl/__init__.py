"""Trajectories for the trainers of TRL: pure functions from rollouts to the rows they train on.

to_trl_rollout              what a `rollout_func` of GRPOTrainer returns: one row per trajectory
to_trl_async_samples        `RolloutSample`s for AsyncGRPOTrainer: one per token sequence
to_trl_sft                  messages and tools for SFTTrainer, which renders and tokenises them
to_trl_sft_tokens           exact ids and labels for SFTTrainer, which only pads them
to_trl_preferences          prompt, chosen and rejected for DPOTrainer and RewardTrainer
to_trl_kto                  prompt, completion and label for KTOTrainer

What a trainer would learn wrongly is an ExportError that says what to do; nothing is padded,
rendered or invented on the way.
"""

from otel_rollout_trl.grpo import rollout_reward, to_trl_async_samples, to_trl_rollout
from otel_rollout_trl.messages import to_trl_kto, to_trl_preferences, to_trl_sft
from otel_rollout_trl.rows import TrlRows, to_trl_sft_tokens

__all__ = [
    "TrlRows",
    "rollout_reward",
    "to_trl_async_samples",
    "to_trl_kto",
    "to_trl_preferences",
    "to_trl_rollout",
    "to_trl_sft",
    "to_trl_sft_tokens",
]
