"""Numbers in and out: numpy's arrays where numpy is installed, else Python's own."""

import array
import ctypes
import functools
import sys
from typing import TYPE_CHECKING, Any, Optional, Sequence, Tuple

from ._library import DType
from .errors import InvalidError

if TYPE_CHECKING:
    from ._memory import BufferProtocol

# An array: numpy.ndarray, or memoryview without numpy.
Array = Any

# Type: bytes, numpy's name, memoryview's format.  Python has no bf16: its bits are shown.
_TYPES = {
    DType.FP32: (4, "float32", "f"),
    DType.FP16: (2, "float16", "e"),
    DType.BF16: (2, "uint16", "H"),
    DType.INT8: (1, "int8", "b"),
}
_U8 = (1, "uint8", "B")
_U32 = (4, "uint32", "I")
_F32 = (4, "float32", "f")


@functools.lru_cache(maxsize=None)
def numpy() -> Any:
    """Returns the module, None where it is not installed."""
    try:
        import numpy as module
    except ImportError:
        return None
    return module


def shaped(memory: "BufferProtocol", kind: Tuple[int, str, str], shape: Sequence[int]) -> Array:
    """Shows memory as an array of that shape, in place."""
    module = numpy()
    if module is not None:
        return module.frombuffer(memory, kind[1]).reshape(shape)
    view: Any = memoryview(memory).cast("B")
    if 0 in shape:  # cannot be cast to
        return view.cast("H" if kind[2] == "e" else kind[2])
    try:
        return view.cast(kind[2], list(shape))
    except ValueError:  # Python cannot cast to "e", fp16: its bits
        return view.cast("H", list(shape))


def elements(memory: "BufferProtocol", dtype: DType, shape: Sequence[int]) -> Array:
    """Shows memory as elements of rows."""
    return shaped(memory, _TYPES[dtype], shape)


def raw(memory: "BufferProtocol") -> Array:
    """Shows memory as bytes."""
    return shaped(memory, _U8, (-1,) if numpy() is not None else (len(memoryview(memory)),))


def u32_at(address: Optional[int], shape: Sequence[int]) -> Optional[Array]:
    """Copies uint32 from C; None for NULL."""
    return None if address is None else shaped(_copy(address, shape), _U32, shape)


def f32_at(address: Optional[int], shape: Sequence[int]) -> Optional[Array]:
    """Copies float32 from C; None for NULL."""
    return None if address is None else shaped(_copy(address, shape), _F32, shape)


def _copy(address: int, shape: Sequence[int]) -> bytearray:
    count = 1
    for n in shape:
        count *= n
    return bytearray(ctypes.string_at(address, 4 * count))


def u32_of(what: str, values: Any, n_dims: Optional[int] = None) -> "ctypes.Array[ctypes.c_uint32]":
    """Makes a C array of whole numbers: of a sequence, or of an array of any whole type, of `n_dims` dimensions."""
    have = getattr(values, "ndim", None)
    if n_dims is not None and isinstance(have, int) and have != n_dims:
        raise InvalidError(f"{what}: an array of shape {tuple(values.shape)}: not of {n_dims} dimension(s)")
    if isinstance(values, (str, bytes)):  # array.array() takes them for its own format
        raise InvalidError(f"{what}: a {type(values).__name__}: not whole numbers")
    if isinstance(values, memoryview):
        values = values.tolist()
    module = numpy()
    if module is not None and isinstance(values, module.ndarray):
        if values.dtype.kind not in "iu":
            raise InvalidError(f"{what}: {values.dtype}: not whole numbers")
        if values.size and not 0 <= int(values.min()) <= int(values.max()) <= 0xFFFFFFFF:
            raise InvalidError(f"{what}: {values.min()}..{values.max()}: not in 0..{0xFFFFFFFF}")
        text = module.ascontiguousarray(values, module.uint32).tobytes()
        made: "ctypes.Array[ctypes.c_uint32]" = (ctypes.c_uint32 * values.size).from_buffer_copy(text)
        return made
    try:
        packed = array.array("I", values)
    except (TypeError, OverflowError, ValueError) as error:
        raise InvalidError(f"{what}: not whole numbers in 0..{0xFFFFFFFF}: {error}") from None
    return (ctypes.c_uint32 * len(packed)).from_buffer_copy(packed)


def f32_of(what: str, values: Any) -> Tuple["ctypes.Array[ctypes.c_float]", Tuple[int, ...]]:
    """Makes a C array of float32, and returns the shape that the values had."""
    module = numpy()
    if module is not None:
        try:
            given = module.asarray(values)
            if given.dtype.kind in "cSUMm":
                raise TypeError(f"{given.dtype}")
            made = module.ascontiguousarray(given, module.float32)
        except (TypeError, ValueError) as error:
            raise InvalidError(f"{what}: not numbers: {error}") from None
        packed = (ctypes.c_float * made.size)
        return packed.from_buffer_copy(made.tobytes()), made.shape
    if isinstance(values, memoryview):
        if values.format != "f" or not values.c_contiguous:
            raise InvalidError(f"{what}: format {values.format!r}: not float32 in one piece")
        shape = tuple(values.shape or (len(values),))
        return (ctypes.c_float * (values.nbytes // 4)).from_buffer_copy(values.cast("B")), shape
    flat, shape = _flatten(what, values)
    return (ctypes.c_float * len(flat))(*flat), shape


def _flatten(what: str, values: Any) -> Tuple[Sequence[float], Tuple[int, ...]]:
    if isinstance(values, array.array):
        return values.tolist(), (len(values),)
    if not isinstance(values, (list, tuple)):
        raise InvalidError(f"{what}: {type(values).__name__}: not numbers")
    if not values or not isinstance(values[0], (list, tuple, array.array)):
        try:
            return [float(value) for value in values], (len(values),)
        except (TypeError, ValueError) as error:
            raise InvalidError(f"{what}: not numbers: {error}") from None
    parts = [_flatten(what, value) for value in values]
    if len({shape for _, shape in parts}) != 1:
        raise InvalidError(f"{what}: rows of different lengths")
    return [number for part, _ in parts for number in part], (len(values), *parts[0][1])


# What memory of rows may say that it has, beside the type itself: the bits of a 2-byte type, bytes.
_BITS = {DType.FP32: "", DType.FP16: "H", DType.BF16: "H", DType.INT8: ""}
_BYTES = ("B", "b", "c")


def check_rows(what: str, memory: "BufferProtocol", dtype: DType, shape: Optional[Sequence[int]]) -> None:
    """Refuses arrays whose type, byte order or shape says that they are not these rows.

    Taken as they are: bytes; one-dimensional arrays of the type, or of uint16 for the bits of fp16 and bf16; arrays of
    these in `shape` (None: not checked), of which dimensions of 1 in front may be missing.  bf16 also in a
    type of that name, bfloat16, which packages add to numpy.
    """
    bytes_each, name, own = _TYPES[dtype]
    try:
        with memoryview(memory) as view:
            itemsize, form, have = view.itemsize, view.format or "B", view.shape or (view.nbytes,)
    except (TypeError, ValueError, BufferError):  # memoryview does not know the type
        kind = str(getattr(memory, "dtype", type(memory).__name__))
        if dtype is not DType.BF16 or kind != "bfloat16":
            raise InvalidError(f"{what}: elements of {kind}; the model has {name} ({dtype.name.lower()})") from None
        itemsize, form, have = 2, "H", tuple(memory.shape)  # type: ignore[attr-defined]
    plain = form[1:] if len(form) == 2 and form[0] in _NATIVE else form
    if not (plain in _BYTES and itemsize == 1) and not (
        itemsize == bytes_each and plain and plain in own + _BITS[dtype]
    ):
        raise InvalidError(
            f"{what}: elements of format {form!r}, {itemsize} bytes; the model has {name} "
            f"({dtype.name.lower()}), {bytes_each} bytes, of this machine's byte order"
        )
    if shape is None or itemsize != bytes_each or len(have) == 1:
        return
    wanted = tuple(shape)
    while len(wanted) > len(have) and wanted[0] == 1:
        wanted = wanted[1:]
    if have != wanted:
        raise InvalidError(f"{what}: shape {have}: not {tuple(shape)}, {_AXES[len(shape)]}")


_NATIVE = "@=" + ("<" if sys.byteorder == "little" else ">")
_AXES = {4: "which is (n_layers, n_kv_heads, n_tokens, d_k + d_v)", 2: "which is (n_ids, d_k + d_v)"}
