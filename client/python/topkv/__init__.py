"""TopKV's client for Python: objects, sessions, rows, indexes and queries of a store of KV caches."""

from ._version import __version__

__all__ = ["__version__"]
