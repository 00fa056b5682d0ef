"""libkvclient in ctypes: where the library is, its structures, enumerations and functions.

The classes and functions below are client/include/kvclient.h, name by name; that header is the reference for
what they do.  A structure's class names the C type in `C_NAME`; tests/python/test_layout.py compares
sizes, offsets and values with what a C compiler makes of the header.  Handles (clients, sessions,
buffers, operations) are integers, None for NULL.

Functions are called through two doors.  `waits.kv_...` releases the GIL during the call: for all that
sleeps, moves data or asks the system for memory.  `quick.kv_...` keeps it, for what returns within a
microsecond or so: a thread that releases the GIL for so little may wait for it for five milliseconds
if another one computes.  Each function is in one of them only.

Search order of the library: the file that the environment variable TOPKV_LIBRARY names; the wheel's
own, topkv/lib/libkvclient.so.0; what the dynamic linker finds under that name.
"""

import ctypes
import enum
import os
import pathlib
from ctypes import (
    POINTER,
    Structure,
    c_bool,
    c_char,
    c_char_p,
    c_double,
    c_float,
    c_int,
    c_size_t,
    c_uint,
    c_uint8,
    c_uint16,
    c_uint32,
    c_uint64,
    c_void_p,
)
from typing import Any, ClassVar

from ._version import __version__

SONAME = "libkvclient.so.0"
VARIABLE = "TOPKV_LIBRARY"

# ---- proto/kv_status.h, proto/kv_types.h ---------------------------------------------------


class Status(enum.IntEnum):
    """What became of an operation: `kv_status_t`.  The numbers are the wire's."""

    OK = 0
    IN_PROGRESS = 1
    INVALID = -1
    NOT_FOUND = -2
    EXISTS = -3
    CONFLICT = -4
    STALE = -5
    MOVED = -6
    UNSUPPORTED = -7
    VERSION = -8
    DENIED = -9
    TOO_LARGE = -10
    BUSY = -20
    NOT_READY = -21
    NO_MEMORY = -22
    DRAINING = -23
    DEADLINE = -40
    CANCELLED = -41
    UNREACHABLE = -42
    CORRUPT = -43
    IO = -44


BLOCK_TOKENS = 128
LAYERS_MAX = 256
HEADS_MAX = 256
UNITS_MAX = 16384
DIM_MAX = 4096
ROW_BYTES_MAX = 16384
ROW_SIZES_MAX = 16
TOKENS_MAX = 16 << 20
NAME_BYTES_MAX = 255
OBJECT_BYTES_MAX = 64 << 20
QUERIES_MAX = 32
RANGES_MAX = 256
SELECTED_MAX = 8192
CANDIDATES_MAX = 16384
SUBSPACES_MAX = 16
CODE_BITS_MAX = 8
KMEANS_ITERATIONS_MAX = 1000
CHAPTER_BLOCKS_MIN = 8
OBJECT_TTL_MAX_MS = 2592000000
OBJECT_TTL_NONE = 0xFFFFFFFF
PREFIX_HINT_MAX_MS = 3600000
NODES_ALL = 0xFFFFFFFF
ROW_CACHED = 0xFFFFFFFF


class DType(enum.IntEnum):
    """The type of one element of a key or a value, as stored: `enum kv_dtype`."""

    FP32 = 1
    FP16 = 2
    BF16 = 3
    INT8 = 4


class MemoryType(enum.IntEnum):
    """Where memory is: `enum kv_memory_type`."""

    HOST = 0
    CUDA = 1


class Answer(enum.IntEnum):
    """What a query returns: `enum kv_answer`."""

    IDS = 1
    ROWS = 2
    ATTEND = 3


class FirstCut(enum.IntEnum):
    """What a query scores its candidates by before it reads their keys: `enum kv_first_cut`."""

    NONE = 0
    INT4 = 1


class Selection(enum.IntEnum):
    """How many rows a query selects, at most k: `enum kv_selection`."""

    TOP = 0
    MASS = 1
    THRESHOLD = 2


class Merge(enum.IntEnum):
    """How the query vectors of one kv head select together: `enum kv_merge`."""

    SUM = 1
    MAX = 2
    UNION = 3
    NONE = 4


class LayerKind(enum.IntEnum):
    """What one layer stores per token and kv head: `enum kv_layer_kind`."""

    KV = 1
    KEYS = 2


class ObjectVerb(enum.IntEnum):
    """What a client does with objects: `enum kv_object_verb`."""

    PUT = 0
    GET = 1
    EXISTS = 2
    DELETE = 3


class PrefixVerb(enum.IntEnum):
    """What a client says of a prefix that nodes keep: `enum kv_prefix_verb`."""

    PIN = 1
    UNPIN = 2
    EVICT = 3
    HINT = 4


class NodeState(enum.IntEnum):
    """Whether a client is connected to a node: `enum kv_node_state`."""

    CONNECTED = 0
    LOST = 1
    UNREACHED = 2


class CLayerSchema(Structure):
    C_NAME: ClassVar[str] = "struct kv_layer_schema"
    _fields_ = [
        ("kind", c_uint8),
        ("dtype", c_uint8),
        ("n_kv_heads", c_uint16),
        ("d_k", c_uint16),
        ("d_v", c_uint16),
        ("row_bytes", c_uint32),
        ("unit_begin", c_uint32),
    ]


class CSchema(Structure):
    C_NAME: ClassVar[str] = "struct kv_schema"
    _fields_ = [
        ("n_layers", c_uint32),
        ("n_units", c_uint32),
        ("layers", CLayerSchema * LAYERS_MAX),
    ]


class CId128(Structure):
    C_NAME: ClassVar[str] = "struct kv_id128"
    _fields_ = [("bytes", c_uint8 * 16)]


class CModelInfo(Structure):
    C_NAME: ClassVar[str] = "struct kv_model_info"
    _fields_ = [
        ("name", c_char * (NAME_BYTES_MAX + 1)),
        ("fingerprint", CId128),
        ("schema", CSchema),
    ]


class CExtraKey(Structure):
    C_NAME: ClassVar[str] = "struct kv_extra_key"
    _fields_ = [
        ("first_token", c_uint32),
        ("n_tokens", c_uint32),
        ("bytes", c_void_p),
        ("n_bytes", c_size_t),
    ]


# ---- client ----------------------------------------------------------------------------------


class CClientOptions(Structure):
    C_NAME: ClassVar[str] = "struct kv_client_options"
    _fields_ = [
        ("nodes", c_char_p),
        ("transport", c_char_p),
        ("net_devices", c_char_p),
        ("name", c_char_p),
        ("deadline_ms", c_uint32),
        ("peer_timeout_ms", c_uint32),
        ("tenant", c_uint32),
        ("ops_max", c_uint32),
        ("salt", c_void_p),
        ("salt_bytes", c_size_t),
        ("poll", c_char_p),
        ("progress_thread", c_bool),
    ]


class CNodeInfo(Structure):
    C_NAME: ClassVar[str] = "struct kv_node_info"
    _fields_ = [
        ("address", c_char_p),
        ("name", c_char_p),
        ("transport", c_char_p),
        ("transports", c_char_p),
        ("state", c_uint),
        ("detail", c_char_p),
        ("n_threads", c_uint32),
        ("memory_bytes", c_uint64),
        ("requests", c_uint64),
        ("rows_in", c_uint64),
        ("rows_out", c_uint64),
        ("reconnects", c_uint64),
    ]


# ---- sessions --------------------------------------------------------------------------------


class CTicket(Structure):
    C_NAME: ClassVar[str] = "struct kv_ticket"
    _fields_ = [
        ("session_id", CId128),
        ("token", CId128),
        ("root", c_uint64),
    ]


class CSessionOptions(Structure):
    C_NAME: ClassVar[str] = "struct kv_session_options"
    _fields_ = [
        ("lease_ms", c_uint32),
        ("tokens_max", c_uint32),
        ("block_names", POINTER(CId128)),
        ("n_block_names", c_uint32),
        ("match_blocks_max", c_uint32),
        ("is_fresh", c_bool),
    ]


class CPublish(Structure):
    C_NAME: ClassVar[str] = "struct kv_publish"
    _fields_ = [
        ("first_block", c_uint32),
        ("n_names", c_uint32),
        ("names", POINTER(CId128)),
        ("tokens", POINTER(c_uint32)),
    ]


class CMatch(Structure):
    C_NAME: ClassVar[str] = "struct kv_match"
    _fields_ = [
        ("node", c_uint32),
        ("tokens", c_uint32),
        ("tokens_in_memory", c_uint32),
    ]


class CPrefix(Structure):
    C_NAME: ClassVar[str] = "struct kv_prefix"
    _fields_ = [
        ("verb", c_uint),
        ("name", POINTER(CId128)),
        ("session_id", POINTER(CId128)),
        ("for_ms", c_uint32),
    ]


# ---- rows ------------------------------------------------------------------------------------


class CRows(Structure):
    C_NAME: ClassVar[str] = "struct kv_rows"
    _fields_ = [
        ("layer_begin", c_uint32),
        ("n_layers", c_uint32),
        ("kv_head_begin", c_uint32),
        ("n_kv_heads", c_uint32),
        ("token_begin", c_uint32),
        ("n_tokens", c_uint32),
    ]


class CRowsIo(Structure):
    C_NAME: ClassVar[str] = "struct kv_rows_io"
    _fields_ = [
        ("buffer", c_void_p),
        ("offset", c_size_t),
        ("crcs", POINTER(c_uint32)),
    ]


class CAppendEntry(Structure):
    C_NAME: ClassVar[str] = "struct kv_append_entry"
    _fields_ = [
        ("session", c_void_p),
        ("rows", POINTER(CRows)),
        ("io", POINTER(CRowsIo)),
        ("op", c_void_p),
        ("status", c_int),
    ]


class CFetch(Structure):
    C_NAME: ClassVar[str] = "struct kv_fetch"
    _fields_ = [
        ("layer", c_uint32),
        ("kv_head_begin", c_uint32),
        ("n_kv_heads", c_uint32),
        ("n_ids", POINTER(c_uint32)),
        ("ids", POINTER(c_uint32)),
        ("snapshot", c_uint32),
    ]


# ---- retrieval -------------------------------------------------------------------------------


class CIndexOptions(Structure):
    C_NAME: ClassVar[str] = "struct kv_index_options"
    _fields_ = [
        ("layer_begin", c_uint32),
        ("n_layers", c_uint32),
        ("tokens", c_uint32),
        ("chapter_blocks", c_uint32),
        ("m", c_uint32),
        ("bits", c_uint32),
        ("rotates", c_bool),
        ("copies", c_bool),
        ("iterations", c_uint32),
        ("budget_us", c_uint32),
        ("seed", c_uint64),
        ("summaries", c_uint32),
        ("summary_rows", c_uint32),
        ("wait", c_bool),
    ]


class CIndexResult(Structure):
    C_NAME: ClassVar[str] = "struct kv_index_result"
    _fields_ = [
        ("rows", c_uint64),
        ("rows_coded", c_uint64),
        ("n_found", c_uint32),
        ("n_trained", c_uint32),
        ("n_pending", c_uint32),
        ("iterations", c_uint32),
        ("train_us", c_uint64),
        ("busiest_us", c_uint64),
    ]


class CRange(Structure):
    C_NAME: ClassVar[str] = "struct kv_range"
    _fields_ = [("begin", c_uint32), ("end", c_uint32)]


class CCachedBlock(Structure):
    C_NAME: ClassVar[str] = "struct kv_cached_block"
    _fields_ = [("block", c_uint32), ("fingerprint", c_uint32)]


class CQuery(Structure):
    C_NAME: ClassVar[str] = "struct kv_query"
    _fields_ = [
        ("layer", c_uint32),
        ("kv_head_begin", c_uint32),
        ("n_kv_heads", c_uint32),
        ("n_queries", c_uint32),
        ("queries", c_void_p),
        ("scale", c_float),
        ("merge", c_uint),
        ("answer", c_uint),
        ("k", c_uint32),
        ("selection", c_uint),
        ("fraction", c_float),
        ("rerank", c_uint32),
        ("first_cut", c_uint),
        ("candidates", c_uint32),
        ("candidates_each", POINTER(c_uint32)),
        ("want_reads", c_bool),
        ("want_weights", c_bool),
        ("want_ids", c_bool),
        ("summaries", c_uint32),
        ("summary_rows", c_uint32),
        ("snapshot", c_uint32),
        ("n_ranges", c_uint32),
        ("ranges", POINTER(CRange)),
        ("n_cached", POINTER(c_uint32)),
        ("cached", POINTER(CCachedBlock)),
    ]


class CQueryEntry(Structure):
    C_NAME: ClassVar[str] = "struct kv_query_entry"
    _fields_ = [
        ("session", c_void_p),
        ("query", POINTER(CQuery)),
        ("io", POINTER(CRowsIo)),
        ("op", c_void_p),
        ("status", c_int),
    ]


class CQueryResult(Structure):
    C_NAME: ClassVar[str] = "struct kv_query_result"
    _fields_ = [
        ("n_ids", c_uint32),
        ("ids", c_void_p),
        ("row_index", c_void_p),
        ("n_rows", c_uint32),
        ("rows", c_void_p),
        ("crcs", c_void_p),
        ("weights", c_void_p),
        ("query_mask", c_void_p),
        ("outputs", c_void_p),
        ("lses", c_void_p),
        ("n_selected", c_uint32),
        ("n_estimated", c_uint32),
        ("n_scored_by_code", c_uint32),
        ("n_scored_by_key", c_uint32),
        ("n_reranked", c_uint32),
        ("n_chapters", c_uint32),
        ("recall", c_float),
        ("node", c_uint32),
        ("queue_us", c_uint32),
        ("service_us", c_uint32),
    ]


class CQueryReads(Structure):
    C_NAME: ClassVar[str] = "struct kv_query_reads"
    _fields_ = [
        ("books", c_uint64),
        ("codes", c_uint64),
        ("copies", c_uint64),
        ("keys", c_uint64),
        ("rows", c_uint64),
        ("summaries", c_uint64),
    ]


class COpTimes(Structure):
    C_NAME: ClassVar[str] = "struct kv_op_times"
    _fields_ = [
        ("begun_us", c_uint64),
        ("sent_us", c_uint64),
        ("arrived_us", c_uint64),
        ("node_us", c_uint64),
        ("ended_us", c_uint64),
    ]


# ---- objects ---------------------------------------------------------------------------------


class CObject(Structure):
    C_NAME: ClassVar[str] = "struct kv_object"
    _fields_ = [
        ("name", c_char_p),
        ("buffer", c_void_p),
        ("offset", c_size_t),
        ("bytes", c_size_t),
        ("status", c_int),
        ("ttl_ms", c_uint32),
        ("evictable", c_bool),
    ]


class CObjectCursor(Structure):
    C_NAME: ClassVar[str] = "struct kv_object_cursor"
    _fields_ = [
        ("thread", c_uint32),
        ("after", c_uint64),
        ("until", c_uint64),
    ]


class CObjectListOptions(Structure):
    C_NAME: ClassVar[str] = "struct kv_object_list_options"
    _fields_ = [
        ("prefix", c_char_p),
        ("limit", c_uint32),
        ("deletes", c_bool),
        ("from_", CObjectCursor),  # `from` is a word of Python's
    ]


class CObjectInfo(Structure):
    C_NAME: ClassVar[str] = "struct kv_object_info"
    _fields_ = [
        ("name", c_char_p),
        ("bytes", c_uint64),
        ("age_ms", c_uint64),
        ("ttl_left_ms", c_uint64),
        ("bad_pieces", c_uint32),
        ("evictable", c_bool),
        ("pinned", c_bool),
    ]


class CObjectList(Structure):
    C_NAME: ClassVar[str] = "struct kv_object_list"
    _fields_ = [
        ("n_objects", c_uint32),
        ("objects", POINTER(CObjectInfo)),
        ("n_deleted", c_uint64),
        ("bytes_deleted", c_uint64),
        ("is_last", c_bool),
        ("next", CObjectCursor),
    ]


# ---- nodes -----------------------------------------------------------------------------------


class CCell(Structure):
    C_NAME: ClassVar[str] = "struct kv_cell"
    _fields_ = [("text", c_char_p), ("number", c_double)]


class CTable(Structure):
    C_NAME: ClassVar[str] = "struct kv_table"
    _fields_ = [
        ("n_columns", c_uint32),
        ("n_rows", c_uint32),
        ("columns", POINTER(c_char_p)),
        ("cells", POINTER(CCell)),
    ]


class CVerifyCounts(Structure):
    C_NAME: ClassVar[str] = "struct kv_verify_counts"
    _fields_ = [
        ("blocks", c_uint64),
        ("bytes", c_uint64),
        ("bad", c_uint64),
        ("mended", c_uint64),
        ("lost", c_uint64),
        ("unread", c_uint64),
        ("refused", c_uint64),
        ("all_bytes", c_uint64),
    ]


class CVerification(Structure):
    C_NAME: ClassVar[str] = "struct kv_verification"
    _fields_ = [
        ("since_us", c_uint64),
        ("is_done", c_bool),
        ("memory", CVerifyCounts),
        ("disk", CVerifyCounts),
    ]


# ---- functions -------------------------------------------------------------------------------

# An operation's handle, and where a begin writes it.
_op = c_void_p
_ret_op = POINTER(c_void_p)

# name: (result, arguments)
_WAITS: "dict[str, tuple[Any, list[Any]]]" = {
    "kv_client_open": (c_int, [POINTER(CClientOptions), POINTER(c_void_p), c_char_p, c_size_t]),
    "kv_client_close": (None, [c_void_p]),
    "kv_poll": (c_uint, [c_void_p]),
    "kv_client_wait": (c_uint, [c_void_p, c_uint64]),
    "kv_wait": (c_int, [_op]),
    "kv_finish": (c_int, [_op]),
    "kv_buffer_alloc": (c_int, [c_void_p, c_size_t, POINTER(c_void_p)]),
    "kv_buffer_map": (c_int, [c_void_p, c_void_p, c_size_t, c_uint, POINTER(c_void_p)]),
    "kv_buffer_free": (c_int, [c_void_p]),
    "kv_open_begin": (
        c_int,
        [c_void_p, POINTER(CModelInfo), POINTER(CSessionOptions), c_uint32, _ret_op],
    ),
    "kv_publish_begin": (c_int, [c_void_p, POINTER(CPublish), c_uint32, _ret_op]),
    "kv_save_begin": (c_int, [c_void_p, c_uint32, _ret_op]),
    "kv_match_begin": (c_int, [c_void_p, POINTER(CId128), c_uint32, c_uint32, _ret_op]),
    "kv_prefix_begin": (c_int, [c_void_p, c_uint32, POINTER(CPrefix), c_uint32, _ret_op]),
    "kv_resume_begin": (c_int, [c_void_p, POINTER(CTicket), c_uint32, _ret_op]),
    "kv_fork_begin": (c_int, [c_void_p, c_uint32, c_uint32, _ret_op]),
    "kv_truncate_begin": (c_int, [c_void_p, c_uint32, c_uint32, _ret_op]),
    "kv_close_begin": (c_int, [c_void_p, c_uint32, _ret_op]),
    "kv_renew_begin": (c_int, [c_void_p, c_uint32, c_uint32, _ret_op]),
    "kv_length_begin": (c_int, [c_void_p, c_uint32, _ret_op]),
    "kv_put_begin": (c_int, [c_void_p, POINTER(CRows), POINTER(CRowsIo), c_uint32, _ret_op]),
    "kv_append_begin": (c_int, [c_void_p, POINTER(CRows), POINTER(CRowsIo), c_uint32, _ret_op]),
    "kv_append_begin_batch": (c_int, [POINTER(CAppendEntry), c_size_t, c_uint32]),
    "kv_read_begin": (c_int, [c_void_p, POINTER(CRows), POINTER(CRowsIo), c_uint32, _ret_op]),
    "kv_fetch_begin": (c_int, [c_void_p, POINTER(CFetch), POINTER(CRowsIo), c_uint32, _ret_op]),
    "kv_index_begin": (c_int, [c_void_p, POINTER(CIndexOptions), c_uint32, _ret_op]),
    "kv_query_begin": (c_int, [c_void_p, POINTER(CQuery), POINTER(CRowsIo), c_uint32, _ret_op]),
    "kv_query_begin_batch": (c_int, [POINTER(CQueryEntry), c_size_t, c_uint32]),
    "kv_objects_begin": (c_int, [c_void_p, c_uint, c_void_p, c_size_t, c_uint32, _ret_op]),
    "kv_object_list_begin": (
        c_int,
        [c_void_p, c_uint32, POINTER(CObjectListOptions), c_uint32, _ret_op],
    ),
    "kv_ping_begin": (
        c_int,
        [c_void_p, c_uint32, c_uint32, c_uint32, c_uint32, c_uint32, _ret_op],
    ),
    "kv_table_begin": (c_int, [c_void_p, c_uint32, c_char_p, c_uint32, _ret_op]),
    "kv_verify_begin": (c_int, [c_void_p, c_uint32, c_uint64, c_uint32, _ret_op]),
    "kv_drain_begin": (c_int, [c_void_p, c_uint32, c_uint32, _ret_op]),
    "kv_close_id_begin": (c_int, [c_void_p, c_uint32, POINTER(CId128), c_uint32, _ret_op]),
    "kv_save_id_begin": (c_int, [c_void_p, c_uint32, POINTER(CId128), c_uint32, _ret_op]),
    "kv_prompt_names": (
        None,
        [
            c_void_p,
            POINTER(CModelInfo),
            c_void_p,
            c_uint32,
            POINTER(CExtraKey),
            c_uint32,
            POINTER(CId128),
        ],
    ),
}
_QUICK: "dict[str, tuple[Any, list[Any]]]" = {
    "kv_status_name": (c_char_p, [c_int]),
    "kv_client_version": (c_char_p, []),
    "kv_dtype_bytes": (c_uint32, [c_uint]),
    "kv_schema_finish": (c_int, [POINTER(CSchema), c_char_p, c_size_t]),
    "kv_schema_uniform": (
        c_int,
        [POINTER(CSchema), c_uint32, c_uint32, c_uint32, c_uint32, c_uint],
    ),
    "kv_schema_token_bytes": (c_uint64, [POINTER(CSchema)]),
    "kv_client_detail": (c_char_p, [c_void_p]),
    "kv_client_fd": (c_int, [c_void_p]),
    "kv_client_arm": (c_bool, [c_void_p, POINTER(c_uint64)]),
    "kv_client_now_us": (c_uint64, [c_void_p]),
    "kv_client_n_nodes": (c_uint32, [c_void_p]),
    "kv_client_node": (None, [c_void_p, c_uint32, POINTER(CNodeInfo)]),
    "kv_client_next_ended": (c_void_p, [c_void_p]),
    "kv_op_set_user": (None, [_op, c_void_p]),
    "kv_op_user": (c_void_p, [_op]),
    "kv_op_status": (c_int, [_op]),
    "kv_op_detail": (c_char_p, [_op]),
    "kv_op_elapsed_us": (c_uint64, [_op]),
    "kv_op_get_times": (None, [_op, POINTER(COpTimes)]),
    "kv_cancel": (None, [_op]),
    "kv_op_free": (None, [_op]),
    "kv_op_session": (c_void_p, [_op]),
    "kv_op_tokens": (c_uint32, [_op]),
    "kv_op_layer_tokens": (c_uint32, [_op, c_uint32]),
    "kv_op_blocks": (c_uint64, [_op]),
    "kv_op_matches": (POINTER(CMatch), [_op, POINTER(c_uint32)]),
    "kv_op_index_result": (None, [_op, POINTER(CIndexResult)]),
    "kv_op_query_result": (c_int, [_op, c_uint32, POINTER(CQueryResult)]),
    "kv_op_query_reads": (None, [_op, POINTER(CQueryReads)]),
    "kv_op_object_list": (POINTER(CObjectList), [_op]),
    "kv_op_table": (POINTER(CTable), [_op]),
    "kv_op_verification": (POINTER(CVerification), [_op]),
    "kv_buffer_data": (c_void_p, [c_void_p]),
    "kv_buffer_bytes": (c_size_t, [c_void_p]),
    "kv_buffer_busy": (c_bool, [c_void_p]),
    "kv_session_ticket": (None, [c_void_p, POINTER(CTicket)]),
    "kv_session_schema": (POINTER(CSchema), [c_void_p]),
    "kv_session_generation": (c_uint32, [c_void_p]),
    "kv_session_lease_ms": (c_uint32, [c_void_p]),
    "kv_session_fingerprint": (None, [c_void_p, POINTER(CId128)]),
    "kv_session_free": (None, [c_void_p]),
    "kv_rows_bytes": (c_size_t, [POINTER(CSchema), POINTER(CRows)]),
    "kv_query_rows_bytes_max": (c_size_t, [POINTER(CSchema), POINTER(CQuery)]),
    "kv_row_crc": (c_uint32, [c_void_p, c_void_p, c_size_t, c_uint32, c_uint32, c_uint32]),
    "kv_block_fingerprint": (c_uint32, [POINTER(c_uint32)]),
}


def library_name() -> str:
    """What is loaded: the file of TOPKV_LIBRARY, the wheel's own, or the system's by its name."""
    named = os.environ.get(VARIABLE)
    if named:
        if not os.path.isfile(named):
            raise ImportError(f"topkv: {VARIABLE}: no such file: {named}")
        return named
    own = pathlib.Path(__file__).resolve().parent / "lib" / SONAME
    return str(own) if own.is_file() else SONAME


class _Door:
    """Functions of the library as attributes.  Any: ctypes knows their types at run time."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"topkv: libkvclient: {name} is not declared here")


def _open(name: str) -> "tuple[ctypes.CDLL, ctypes.PyDLL]":
    """Loads the library, without UCX's handlers of SIGSEGV and the like: Python has its own (faulthandler)."""
    variable = "UCX_ERROR_SIGNALS"
    is_ours = variable not in os.environ
    if is_ours:
        os.environ[variable] = ""
    try:
        return ctypes.CDLL(name), ctypes.PyDLL(name)
    except OSError as error:
        raise ImportError(
            f"topkv: libkvclient: {error}; install the wheel, or name the library in {VARIABLE}"
        ) from error
    finally:
        if is_ours:
            del os.environ[variable]


def _load() -> "tuple[str, _Door, _Door]":
    name = library_name()
    libraries = _open(name)
    doors = (_Door(), _Door())
    for library, door, functions in zip(libraries, doors, (_WAITS, _QUICK)):
        for function, (result, arguments) in functions.items():
            try:
                entry = getattr(library, function)
            except AttributeError:
                raise ImportError(f"topkv: {name}: no function {function}: another version?") from None
            entry.restype = result
            entry.argtypes = arguments
            setattr(door, function, entry)
    version = getattr(doors[1], "kv_client_version")().decode(errors="replace")
    if version != __version__:
        raise ImportError(
            f"topkv: {name}: version {version}, but the package is {__version__}: install both of one version"
        )
    return name, doors[0], doors[1]


path, waits, quick = _load()


def status_name(status: int) -> str:
    """Returns a status as one lower-case word, "not_found"; "unknown" for any other number."""
    name: bytes = quick.kv_status_name(status)
    return name.decode()
