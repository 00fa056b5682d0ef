"""Exceptions: one class per status, each with the node's or the library's own words.

The first group means that the request is wrong and nothing changed; the second (Busy, NotReady, NoMemory,
Draining) that the same request may succeed later; the third that the outcome is unknown or that
something failed.  Any operation may be repeated after any of them.
"""

from typing import Dict, Optional, Type

from ._library import Status, status_name

__all__ = [
    "BusyError",
    "CancelledError",
    "ClosedError",
    "ConflictError",
    "CorruptError",
    "DeadlineError",
    "DeniedError",
    "DrainingError",
    "ExistsError",
    "ForkedError",
    "IoError",
    "InvalidError",
    "MovedError",
    "NoMemoryError",
    "NodeError",
    "NotFoundError",
    "NotReadyError",
    "StaleError",
    "TooLargeError",
    "TopKVError",
    "UnreachableError",
    "UnsupportedError",
    "VersionError",
]


class TopKVError(Exception):
    """Base of all exceptions of this package.

    `status` is the Status; `detail` the words: which node, which operation, what, after how long.
    """

    status: Status = Status.INVALID

    def __init__(self, detail: str) -> None:
        super().__init__(detail)
        self.detail = detail


class InvalidError(TopKVError, ValueError):
    """Status.INVALID: an argument is out of bounds or contradicts another.  Correct the call."""

    status = Status.INVALID


class NotFoundError(TopKVError, LookupError):
    """Status.NOT_FOUND: no such session, model or object; a lease may have ended."""

    status = Status.NOT_FOUND


class ExistsError(TopKVError):
    """Status.EXISTS: the object's name holds other bytes.  Use another name, or delete it first."""

    status = Status.EXISTS


class ConflictError(TopKVError):
    """Status.CONFLICT: other rows are committed there, or an object was replaced while it was read."""

    status = Status.CONFLICT


class StaleError(TopKVError):
    """Status.STALE: another client truncated the session (or forked it, on nodes that speak no version 9 of
    the protocol).  Resume it, then repeat."""

    status = Status.STALE


class MovedError(TopKVError):
    """Status.MOVED: another node owns that unit: this client's list of nodes is another one."""

    status = Status.MOVED


class UnsupportedError(TopKVError):
    """Status.UNSUPPORTED: valid, but not in this build, or not on a node of that version."""

    status = Status.UNSUPPORTED


class VersionError(TopKVError):
    """Status.VERSION: a node speaks no version of the protocol that this library speaks."""

    status = Status.VERSION


class DeniedError(TopKVError):
    """Status.DENIED: the ticket is not the session's, or it belongs to another tenant."""

    status = Status.DENIED


class TooLargeError(TopKVError):
    """Status.TOO_LARGE: more than a limit, or an object that does not fit the caller's memory.

    `nbytes`: that object's size, after get_into(); else None.
    """

    status = Status.TOO_LARGE
    nbytes: Optional[int] = None


class BusyError(TopKVError):
    """Status.BUSY: too many operations exist.  Wait for some of them, then repeat."""

    status = Status.BUSY


class NotReadyError(TopKVError):
    """Status.NOT_READY: rows that the request needs are not committed."""

    status = Status.NOT_READY


class NoMemoryError(TopKVError, MemoryError):
    """Status.NO_MEMORY: the store is full, or this process is out of memory."""

    status = Status.NO_MEMORY


class DrainingError(TopKVError):
    """Status.DRAINING: the node is about to stop and accepts nothing new."""

    status = Status.DRAINING


class DeadlineError(TopKVError, TimeoutError):
    """Status.DEADLINE: no reply before the deadline.  Memory that the operation was to fill may still
    be written; see Client.is_busy()."""

    status = Status.DEADLINE


class CancelledError(TopKVError):
    """Status.CANCELLED: cancelled before the reply arrived."""

    status = Status.CANCELLED


class UnreachableError(TopKVError, ConnectionError):
    """Status.UNREACHABLE: a node is down or was lost, or none has this address."""

    status = Status.UNREACHABLE


class CorruptError(TopKVError):
    """Status.CORRUPT: bytes failed their checksum; they were not delivered.  Put them again."""

    status = Status.CORRUPT


class IoError(TopKVError, OSError):
    """Status.IO: a system call or a disk failed."""

    status = Status.IO


class ClosedError(InvalidError):
    """The client, or the session, was closed before."""


class ForkedError(TopKVError, RuntimeError):
    """The client was opened in another process, of which this one is a fork; or that one had clients open
    when it forked, and this one is about to open its own."""

    status = Status.UNSUPPORTED


class NodeError(TopKVError, RuntimeError):
    """topkv.Node: kvserver did not start, or ended by itself; the words are kvserver's own."""

    status = Status.IO


_OF_STATUS: Dict[int, Type[TopKVError]] = {
    error.status: error
    for error in (
        InvalidError,
        NotFoundError,
        ExistsError,
        ConflictError,
        StaleError,
        MovedError,
        UnsupportedError,
        VersionError,
        DeniedError,
        TooLargeError,
        BusyError,
        NotReadyError,
        NoMemoryError,
        DrainingError,
        DeadlineError,
        CancelledError,
        UnreachableError,
        CorruptError,
        IoError,
    )
}


def error_of(status: int, detail: str) -> TopKVError:
    """Makes the exception of a status; `detail` empty: the status's name."""
    kind = _OF_STATUS.get(status)
    if kind is None:
        return TopKVError(f"status {status}: {detail}")
    return kind(detail or status_name(status))
