"""What operations return."""

from typing import Any, List, NamedTuple, Optional

from ._library import NodeState, Status
from .errors import error_of

__all__ = [
    "HeadResult",
    "IndexResult",
    "Length",
    "Match",
    "NodeInfo",
    "NodeMatch",
    "ObjectInfo",
    "ObjectResult",
    "QueryReads",
    "QueryResult",
]


class ObjectResult(NamedTuple):
    """What became of one object of a batch.

    `name`; `status`, its own; `nbytes`, its size (of a get whose memory was too small, too); `data`, its bytes
    (get_many() only, else None); `detail`, the words of the operation's first failure, "" if
    there was none.
    """

    name: str
    status: Status
    nbytes: int
    data: Optional[bytes] = None
    detail: str = ""

    @property
    def ok(self) -> bool:
        """Whether the status is Status.OK."""
        return self.status is Status.OK

    def check(self) -> "ObjectResult":
        """Returns itself, or raises the exception of its status (topkv.errors)."""
        if self.status is not Status.OK:
            raise error_of(self.status, f"{self.name}: {self.detail}")
        return self


class ObjectInfo(NamedTuple):
    """An object in a list.

    `name`; `nbytes`, its size; `age`, seconds since its first put; `ttl_left`, seconds until it is
    removed, None: it is not; `evictable`; `pinned`, in use by a transfer; `bad_pieces`, damaged
    ones: it is not served until it is put again; `node`, a position in the list of nodes.
    """

    name: str
    nbytes: int
    age: float
    ttl_left: Optional[float]
    evictable: bool
    pinned: bool
    bad_pieces: int
    node: int


class NodeInfo(NamedTuple):
    """A node as the client sees it.

    `address` as in the list; `name`, its own; `state`, a NodeState; `transport` in use for data, and
    those that it offers, `transports`; `detail`, how the last connection failed, ""; `n_threads`, data
    threads; `memory_bytes`, for rows, objects and the work of queries; `requests` sent to it, and
    `rows_in`, `rows_out`: rows stored and returned, for this client; `reconnects`.
    """

    address: str
    name: str
    state: NodeState
    transport: str
    transports: str
    detail: str
    n_threads: int
    memory_bytes: int
    requests: int
    rows_in: int
    rows_out: int
    reconnects: int


class NodeMatch(NamedTuple):
    """How much of a prompt one node keeps.

    `node`, a position in the list of nodes; `tokens` of the longest prefix of which it keeps its whole part, and
    `tokens_in_memory` of them.
    """

    node: int
    tokens: int
    tokens_in_memory: int


class Match(NamedTuple):
    """How much of a prompt is kept: `tokens` that an open would start with, and `nodes`, NodeMatch of each."""

    tokens: int
    nodes: List[NodeMatch]


class Length(NamedTuple):
    """Committed tokens of a session: `tokens`, the least of all layers, and `layers`, of each."""

    tokens: int
    layers: List[int]


class IndexResult(NamedTuple):
    """What an index operation did.

    `rows`, (token, kv head, layer), requested, and `rows_coded` of them; codebooks that existed before
    (`n_found`), that were trained (`n_trained`), that are not built yet (`n_pending`); `iterations` of
    k-means; `train_time`, seconds of the nodes' threads, and `busiest_time`, of the slowest message.
    """

    rows: int
    rows_coded: int
    n_found: int
    n_trained: int
    n_pending: int
    iterations: int
    train_time: float
    busiest_time: float


class HeadResult(NamedTuple):
    """The result of a query for one kv head.  Arrays are numpy's, or memoryviews without numpy; None: not asked for.

    `ids`: (n_ids) uint32, tokens, ascending; with Answer.ATTEND all of them if `want_ids`, else the
    cached ones, None without `cached`.  `row_index`: (n_ids) uint32, the row in `rows`, or ROW_CACHED;
    None with Answer.IDS.  `rows`: (n_rows, d_k + d_v) elements, ascending by token (Answer.ROWS); bf16 as
    uint16 (without numpy fp16 too, before Python 3.12).  `crcs`: (n_rows) uint32.  `weights`: (n_ids)
    float32, merged.  `query_mask`: (n_ids) uint32 (Merge.NONE): bit i is set if query vector i selected
    the row.  `outputs`: (n_queries, d_v) float32, attention over the selected rows, and `lses`:
    (n_queries) float32, natural log-sum-exps (Answer.ATTEND).  Counts of rows: `n_selected`,
    `n_estimated`, `n_scored_by_code`, `n_scored_by_key`, `n_reranked`; of codebooks: `n_chapters`.
    `recall` of exact top-k as the node estimates it, NaN: unknown.  `node`: a position in the list.
    `queue_us`, `service_us`: microseconds in the node before work began, and from there to the reply.
    """

    ids: Any
    row_index: Any
    rows: Any
    crcs: Any
    weights: Any
    query_mask: Any
    outputs: Any
    lses: Any
    n_selected: int
    n_estimated: int
    n_scored_by_code: int
    n_scored_by_key: int
    n_reranked: int
    n_chapters: int
    recall: float
    node: int
    queue_us: int
    service_us: int


class QueryReads(NamedTuple):
    """Bytes of its memory that nodes read for a query: `books`, `codes`, `copies`, `keys`, `rows`, `summaries`."""

    books: int
    codes: int
    copies: int
    keys: int
    rows: int
    summaries: int


class QueryResult(NamedTuple):
    """The result of a query: `heads`, a HeadResult for each kv head, from the query's first one on.

    `reads`: QueryReads, zeros unless asked for.  `elapsed_us`: microseconds from its begin to its end.
    """

    heads: List[HeadResult]
    reads: QueryReads
    elapsed_us: int
