"""Fixtures and the replay check, for the tests of every exporter."""

import os

from exporters.kit.cluster import cluster
from exporters.kit.recording import clean_environment, clients, frozen_imports, recording
from exporters.kit.replay import pytest_runtest_call

__all__ = [
    "clean_environment",
    "clients",
    "cluster",
    "frozen_imports",
    "pytest_runtest_call",
    "recording",
]

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # else its import asks the network
