"""Checks of arguments: what has a wrong type or value is an InvalidError that names the argument and the value."""

import enum
import math
from typing import Any, Iterable, List, Type, TypeVar

from .errors import InvalidError

DEADLINE_MS_MAX = 600000  # of an operation: the library's

E = TypeVar("E", bound=enum.IntEnum)
T = TypeVar("T")


def shown(value: object) -> str:
    """The value for a message, cut if it is long."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def real(what: str, value: Any) -> float:
    """A number, whole or not, NaN and infinity excepted."""
    if isinstance(value, (str, bytes, bytearray)):  # float() reads texts
        raise InvalidError(f"{what}: {shown(value)}: not a number")
    try:
        made = float(value)
    except (TypeError, ValueError, OverflowError):
        raise InvalidError(f"{what}: {shown(value)}: not a number") from None
    if not math.isfinite(made):
        raise InvalidError(f"{what}: {shown(value)}: not a finite number")
    return made


def milliseconds(what: str, seconds: Any) -> int:
    """A time of 0 or more seconds, for a C field of milliseconds."""
    value = real(what, seconds)
    if not 0 <= value <= 0xFFFFFFFF / 1000:
        raise InvalidError(f"{what}: {shown(seconds)}: seconds, not in 0..{0xFFFFFFFF // 1000}")
    return int(value * 1000)


def deadline_ms(seconds: Any, what: str = "deadline") -> int:
    """An operation's deadline in milliseconds, 0 for the client's default."""
    if seconds is None:
        return 0
    try:
        if seconds > 0:
            return max(1, int(min(seconds * 1000, DEADLINE_MS_MAX)))
    except (TypeError, ValueError):
        pass
    or_none = ", or None for the client's" if what == "deadline" else ""
    raise InvalidError(f"{what}: {shown(seconds)}: not seconds above 0{or_none}")


def client_arguments(deadline: Any, peer_timeout: Any, salt: Any) -> None:
    """Checks what opening a client would take for something else."""
    deadline_ms(deadline)
    deadline_ms(peer_timeout, "peer_timeout")
    if salt is not None and not isinstance(salt, (bytes, bytearray, memoryview)):
        raise InvalidError(f"salt: a {type(salt).__name__}: not bytes")  # a secret: not its value


def member(what: str, value: Any, kind: Type[E]) -> E:
    """A member of an enumeration, or its number; not one of another enumeration."""
    if isinstance(value, kind):
        return value
    if type(value) is int:
        try:
            return kind(value)
        except ValueError:
            pass
    names = ", ".join(f"{kind.__name__}.{one.name}" for one in kind)
    raise InvalidError(f"{what}: {shown(value)}: not one of {names}")


def instance(what: str, value: Any, kind: Type[T]) -> T:
    """An object of a class."""
    if not isinstance(value, kind):
        raise InvalidError(f"{what}: {shown(value)}: not a topkv.{kind.__name__}")
    return value


def listed(what: str, values: Any, of: str) -> List[Any]:
    """A list of what can be iterated over; a text, whose characters that would be, is refused."""
    if isinstance(values, (str, bytes, bytearray)) or not isinstance(values, Iterable):
        raise InvalidError(f"{what}: {shown(values)}: not a list of {of}")
    return list(values)


def pairs(what: str, values: Any, of: str) -> List[Any]:
    """A list of pairs.  Of a dict, whose keys alone it would be, the items are meant."""
    if isinstance(values, dict):
        raise InvalidError(f"{what}: a dict: not a list of {of} pairs; pass its items()")
    made = listed(what, values, f"{of} pairs")
    for at, pair in enumerate(made):
        if not isinstance(pair, (tuple, list)) or len(pair) != 2:
            raise InvalidError(f"{what}: {at}: {shown(pair)}: not a {of} pair")
    return made


def text_of(what: str, value: Any) -> bytes:
    """A text, for C: without NUL."""
    if not isinstance(value, str) or "\0" in value:
        raise InvalidError(f"{what}: {shown(value)}: not a text without NUL")
    try:
        return value.encode()
    except UnicodeEncodeError as error:
        raise InvalidError(f"{what}: {shown(value)}: {error.reason}") from None
