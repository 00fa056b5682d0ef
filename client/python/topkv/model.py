"""What a model's cache looks like, and what a session's ticket is."""

import hashlib
from ctypes import byref, create_string_buffer, memmove, sizeof, addressof
from typing import NamedTuple, Sequence, Tuple, Union

from . import _library
from ._checks import listed, member, shown, text_of
from ._core import number
from ._library import DType, LayerKind, quick
from .errors import InvalidError, error_of

_DTYPES = {"fp32": DType.FP32, "fp16": DType.FP16, "bf16": DType.BF16, "int8": DType.INT8}


def dtype_of(dtype: Union[str, DType]) -> DType:
    """Finds a DType by its name, "fp32", "fp16", "bf16" or "int8"."""
    if isinstance(dtype, str):
        found = _DTYPES.get(dtype)
        if found is None:
            raise InvalidError(f"dtype: {dtype!r}: not one of {', '.join(_DTYPES)}")
        return found
    return member("dtype", dtype, DType)


class Layer(NamedTuple):
    """What one layer stores per token and kv head: a row, the key and then the value.

    `n_kv_heads` heads; `d_k` and `d_v` elements of a key and of a value of type `dtype` ("fp32", "fp16",
    "bf16", "int8", or a DType).  `d_v` 0: keys only.
    """

    n_kv_heads: int
    d_k: int
    d_v: int
    dtype: Union[str, DType] = "fp16"


def check_schema(model: "Model", have: "_library.CSchema") -> None:
    """Refuses a model whose layers are not those that a session has."""
    own = model._c.schema
    if have.n_layers != own.n_layers:
        raise InvalidError(f"model {model.name!r}: {own.n_layers} layers; the session has {have.n_layers}")
    for layer in range(own.n_layers):
        a, b = own.layers[layer], have.layers[layer]
        if bytes(a) != bytes(b):
            raise InvalidError(
                f"model {model.name!r}: layer {layer}: {_layer_words(a)}; the session has {_layer_words(b)}"
            )


def _layer_words(c: "_library.CLayerSchema") -> str:
    names = {int(value): name for name, value in _DTYPES.items()}
    return f"{c.n_kv_heads} kv heads, d_k {c.d_k}, d_v {c.d_v}, {names.get(c.dtype, c.dtype)}"


def id128(what: str, value: Union[bytes, bytearray, memoryview]) -> bytes:
    """Checks 16 bytes."""
    if not isinstance(value, (bytes, bytearray, memoryview)) or len(bytes(value)) != 16:
        raise InvalidError(f"{what}: {shown(value)}: not 16 bytes")
    return bytes(value)


def set_id128(to: "_library.CId128", value: bytes) -> None:
    """Copies 16 bytes into a structure."""
    memmove(addressof(to), value, 16)


class Model:
    """A model: a name, a fingerprint, and the shape of each layer.

    `name`: 1..255 bytes.  `fingerprint`: everything that makes keys and values comparable (weights and their
    quantization, geometry, RoPE): 16 bytes, or a text of which SHA-256, cut to 16 bytes, is
    taken.  Sessions of different fingerprints share nothing.  `layers`: one Layer for each.
    `token_bytes`: bytes of one token in all layers together.

    Raises InvalidError if a field is out of bounds.
    """

    def __init__(self, name: str, fingerprint: Union[bytes, str], layers: Sequence[Layer]) -> None:
        text = text_of("model: name", name)
        if not 1 <= len(text) <= _library.NAME_BYTES_MAX:
            raise InvalidError(f"model: name: {shown(name)}: not 1..{_library.NAME_BYTES_MAX} bytes")
        if isinstance(fingerprint, str):
            fingerprint = hashlib.sha256(fingerprint.encode()).digest()[:16]
        for at, layer in enumerate(listed("model: layers", layers, "Layer")):
            if not isinstance(layer, Layer):
                raise InvalidError(f"model: layers: {at}: {shown(layer)}: not a topkv.Layer")
        if not 1 <= len(layers) <= _library.LAYERS_MAX:
            raise InvalidError(f"model: {len(layers)} layers: not 1..{_library.LAYERS_MAX}")
        self.name = name
        self.fingerprint = id128("model: fingerprint", fingerprint)
        self._c = _library.CModelInfo()
        self._c.name = text
        set_id128(self._c.fingerprint, self.fingerprint)
        self._c.schema.n_layers = len(layers)
        for to, layer in zip(self._c.schema.layers, layers):
            to.kind = LayerKind.KV if layer.d_v else LayerKind.KEYS
            to.dtype = dtype_of(layer.dtype)
            to.n_kv_heads = number("n_kv_heads", layer.n_kv_heads, 1, _library.HEADS_MAX)
            to.d_k = number("d_k", layer.d_k, 1, _library.DIM_MAX)
            to.d_v = number("d_v", layer.d_v, 0, _library.DIM_MAX)
        detail = create_string_buffer(512)
        status = quick.kv_schema_finish(byref(self._c.schema), detail, sizeof(detail))
        if status != 0:
            raise error_of(status, f"model: {detail.value.decode(errors='replace')}")
        self.layers: Tuple[Layer, ...] = tuple(
            Layer(layer.n_kv_heads, layer.d_k, layer.d_v, dtype_of(layer.dtype)) for layer in layers
        )
        self.token_bytes: int = quick.kv_schema_token_bytes(byref(self._c.schema))

    @classmethod
    def uniform(
        cls,
        name: str,
        fingerprint: Union[bytes, str],
        *,
        n_layers: int,
        n_kv_heads: int,
        d_k: int,
        d_v: int,
        dtype: Union[str, DType] = "fp16",
    ) -> "Model":
        """Makes a model of equal layers.

        `name` and `fingerprint`: as in Model; `n_layers` layers, each with `n_kv_heads`, `d_k`,
        `d_v` and `dtype` as in Layer.  Raises InvalidError if a field is out of bounds.
        """
        n = number("n_layers", n_layers, 1, _library.LAYERS_MAX)
        return cls(name, fingerprint, [Layer(n_kv_heads, d_k, d_v, dtype)] * n)

    def __repr__(self) -> str:
        return f"<topkv.Model {self.name!r}, {len(self.layers)} layers, {self.token_bytes} bytes a token>"


class Ticket(NamedTuple):
    """What another client of the same tenant needs to continue a session: Client.resume().

    `session_id` and `token`, 16 bytes each; `root`, with the list of nodes, says where the session is.  The
    token is a secret: who has it can read and write the session.
    """

    session_id: bytes
    token: bytes
    root: int

    def to_bytes(self) -> bytes:
        """Returns the ticket as 40 bytes, for Ticket.from_bytes() in another process."""
        return self.session_id + self.token + self.root.to_bytes(8, "little")

    @classmethod
    def from_bytes(cls, text: bytes) -> "Ticket":
        """Makes the ticket of `text`, the 40 bytes of to_bytes().  Raises InvalidError if it is not 40 bytes."""
        if not isinstance(text, (bytes, bytearray, memoryview)) or len(bytes(text)) != 40:
            raise InvalidError(f"ticket: a {type(text).__name__}: not the 40 bytes of to_bytes()")  # a secret
        text = bytes(text)
        return cls(text[:16], text[16:32], int.from_bytes(text[32:], "little"))
