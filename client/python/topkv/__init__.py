"""TopKV's client for Python: objects, sessions, rows, indexes and queries of a store of KV caches.

    import topkv

    with topkv.Node(memory="1G") as node, topkv.Client(node.address) as client:
        client.put("greeting", b"hello")
        print(client.get("greeting"))

Client blocks; AsyncClient is for asyncio; Node starts a kvserver of one's own.  `python -m topkv
doctor` checks an installation.  Errors are exceptions by status: topkv.errors.  The README of the
package has an example with sessions and queries.

The library is loaded on import, which raises ImportError if it is missing or of another version.
"""

import sys

from ._version import __version__


def _is_run() -> bool:
    """Whether `python -m topkv` imports this: the interpreter's runpy, and not another module that it runs."""
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith(("importlib.", "topkv")):
        frame = frame.f_back
    return bool(frame.f_globals.get("__name__") == "runpy")


try:
    from . import _library
except ImportError:
    # `python -m topkv doctor` says itself what is wrong with the library.
    if not _is_run():
        raise
else:
    from . import errors
    from ._core import Buffer, Operation
    from ._library import (
        BLOCK_TOKENS,
        OBJECT_BYTES_MAX,
        ROW_CACHED,
        Answer,
        DType,
        FirstCut,
        Merge,
        NodeState,
        PrefixVerb,
        Selection,
        Status,
    )
    from .aio import AsyncClient, AsyncSession
    from .client import ALL_NODES, AppendEntry, Client, ExtraKey, QueryEntry
    from .errors import *  # noqa: F403
    from .model import Layer, Model, Ticket
    from .node import Node
    from .results import *  # noqa: F403
    from .session import Query, Session

    __all__ = [
        "ALL_NODES",
        "Answer",
        "AppendEntry",
        "AsyncClient",
        "AsyncSession",
        "BLOCK_TOKENS",
        "Buffer",
        "Client",
        "DType",
        "ExtraKey",
        "FirstCut",
        "Layer",
        "Merge",
        "Model",
        "Node",
        "NodeState",
        "OBJECT_BYTES_MAX",
        "Operation",
        "PrefixVerb",
        "Query",
        "QueryEntry",
        "ROW_CACHED",
        "Selection",
        "Session",
        "Status",
        "Ticket",
        "__version__",
    ]
    __all__ += errors.__all__
    __all__ += results.__all__  # type: ignore[name-defined] # noqa: F405
