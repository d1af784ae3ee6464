"""What may not be recorded, or not be on spans that leave the process: content, and secrets."""

from otel_rollout.record.privacy.content import Content as Content
