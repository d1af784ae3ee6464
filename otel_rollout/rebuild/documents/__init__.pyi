from otel_rollout.rebuild.documents.reader import CaptureState as CaptureState
from otel_rollout.rebuild.documents.reader import Documents as Documents
from otel_rollout.rebuild.documents.reader import documents_in as documents_in
from otel_rollout.rebuild.documents.reader import may_be_document as may_be_document
