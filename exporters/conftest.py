"""What the tests of the library have, for those of the exporters: a recording, a server, replay."""

import os

from tests.conftest import (
    clean_environment,
    clients,
    frozen_imports,
    pytest_runtest_call,
    recording,
)

__all__ = ["clean_environment", "clients", "frozen_imports", "pytest_runtest_call", "recording"]

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network
