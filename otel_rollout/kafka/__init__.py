"""Trajectories by way of Kafka: spans to trajectories, and these to trainers in whole groups."""

from otel_rollout.kafka.groups import KafkaGroup as KafkaGroup
from otel_rollout.kafka.groups import KafkaGroups as KafkaGroups
from otel_rollout.kafka.rebuilder import Rebuilder as Rebuilder
from otel_rollout.kafka.spans import audit_topic as audit_topic
