"""What the tests of the library have, for those of the exporters: a recording, a server, replay."""

from tests.conftest import (
    clean_environment,
    clients,
    frozen_imports,
    pytest_runtest_call,
    recording,
)

__all__ = ["clean_environment", "clients", "frozen_imports", "pytest_runtest_call", "recording"]
