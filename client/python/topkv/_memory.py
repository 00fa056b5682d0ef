"""Memory of the caller's, by the buffer protocol: its address, and that it stays where it is."""

import ctypes
import re
from typing import TYPE_CHECKING, Any

from .errors import InvalidError

if TYPE_CHECKING:
    from typing_extensions import Buffer as BufferProtocol  # a checker has it without its being installed
else:
    BufferProtocol = Any

__all__ = ["BufferProtocol", "View"]

_WRITABLE = 1  # a flag of the C interface; without flags it asks for bytes in one piece


class _PyBuffer(ctypes.Structure):
    """How the buffer protocol of C describes memory, in the stable interface of CPython."""

    _fields_ = [
        ("buf", ctypes.c_void_p),
        ("obj", ctypes.py_object),
        ("len", ctypes.c_ssize_t),
        ("itemsize", ctypes.c_ssize_t),
        ("readonly", ctypes.c_int),
        ("ndim", ctypes.c_int),
        ("format", ctypes.c_char_p),
        ("shape", ctypes.c_void_p),
        ("strides", ctypes.c_void_p),
        ("suboffsets", ctypes.c_void_p),
        ("internal", ctypes.c_void_p),
    ]


_get = ctypes.pythonapi.PyObject_GetBuffer
_get.argtypes = [ctypes.py_object, ctypes.c_void_p, ctypes.c_int]
_get.restype = ctypes.c_int
_release = ctypes.pythonapi.PyBuffer_Release
_release.argtypes = [ctypes.c_void_p]
_release.restype = None

_PY_BUFFER_BYTES = ctypes.sizeof(_PyBuffer)
_create = ctypes.create_string_buffer
_address_of = ctypes.addressof
_buf_of = ctypes.c_void_p.from_address
_len_of = ctypes.c_ssize_t.from_address


_PLAIN = (bytes, bytearray)


def _has_objects(memory: Any) -> bool:
    """Whether its elements are references to Python objects, which must be neither sent nor overwritten."""
    dtype = getattr(memory, "dtype", None)
    if dtype is not None:
        return bool(getattr(dtype, "hasobject", False))
    try:
        with memoryview(memory) as view:
            form = view.format or "B"
    except (TypeError, ValueError, BufferError):
        return False
    return "O" in form and "O" in re.sub(":[^:]*:", "", form)  # between colons are names of fields


class View:
    """A hold on the memory of an object: until release(), it is neither freed nor moved nor resized."""

    __slots__ = ("_raw", "_at", "address", "nbytes")

    def __init__(self, memory: "BufferProtocol", writable: bool, what: str) -> None:
        self._at = 0
        if type(memory) not in _PLAIN and _has_objects(memory):
            raise InvalidError(f"{what}: {type(memory).__name__} of Python objects: their addresses, not their values")
        raw = _create(_PY_BUFFER_BYTES)
        at = _address_of(raw)
        try:
            _get(memory, at, _WRITABLE if writable else 0)
        except (TypeError, BufferError, ValueError) as error:
            need = "writable memory in one piece" if writable else "memory in one piece"
            raise InvalidError(
                f"{what}: {type(memory).__name__}: needs {need} (buffer protocol): {error}"
            ) from None
        self._raw = raw
        self._at = at
        self.address: int = _buf_of(at).value or 0
        self.nbytes: int = _len_of(at + 16).value

    def release(self) -> None:
        """Lets go of the memory.  May be called twice."""
        at, self._at = self._at, 0
        if at:
            _release(at)

    def __del__(self) -> None:
        if getattr(self, "_at", 0):  # a signal handler may have raised before there was one
            self.release()


assert _PyBuffer.buf.offset == 0 and _PyBuffer.len.offset == 16
