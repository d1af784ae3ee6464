"""The recording of groups, which is listed."""

from tests.kit.groups import recorded

__all__ = ["recorded"]
