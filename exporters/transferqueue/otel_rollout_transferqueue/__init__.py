"""Trajectories in TransferQueue: exactly the rows that verl's trainer V1 and NeMo RL read there.

to_verl_rows           the rows of a group, and the one of its prompt
to_nemo_rl_rows        the same in NeMo RL's mapping
put, put_later         put rows into the queue; `put_later` is awaited
to_batches             what they put: keys, tags, and fields as tensors
TransferQueueRows      the exporter `transferqueue`: rows as JSON lines, to be put later

What the rows of a trainer cannot carry is an ExportError; a reward that is not known is never 0.
"""

from otel_rollout_transferqueue.queue import QueueBatch, put, put_later, to_batches
from otel_rollout_transferqueue.rows import TransferQueueRows, to_nemo_rl_rows, to_verl_rows

__all__ = [
    "QueueBatch",
    "TransferQueueRows",
    "put",
    "put_later",
    "to_batches",
    "to_nemo_rl_rows",
    "to_verl_rows",
]
