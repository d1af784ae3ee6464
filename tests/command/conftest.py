"""The recording of groups, which is exported."""

from tests.kit.groups import recorded

__all__ = ["recorded"]
