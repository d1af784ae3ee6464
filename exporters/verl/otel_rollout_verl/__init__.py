"""Trajectories for verl: what its agent loops return, and the parquet files that it reads.

to_verl_outputs             `AgentLoopOutput`s of a trajectory: one per token sequence
output_fields               their fields, without verl
to_verl_sft                 conversations of which every reply trains
to_verl_prompts             the prompts of tasks, to run them again
VerlRows                    the exporter `verl`: `format=rl` (prompts) or `format=sft`, as parquet
otel_rollout_verl.dataset   reads the files of `columns=json`, which hold what Arrow cannot

What verl would learn wrongly is an ExportError that says what to do.
"""

from otel_rollout_verl.files import VerlRows
from otel_rollout_verl.messages import to_verl_prompts, to_verl_sft
from otel_rollout_verl.outputs import output_fields, to_verl_outputs

__all__ = ["VerlRows", "output_fields", "to_verl_outputs", "to_verl_prompts", "to_verl_sft"]
