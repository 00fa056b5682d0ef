"""Query, and Session: one sequence's rows."""

import ctypes
from ctypes import POINTER, addressof, byref, c_uint32, cast
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    List,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
)

from . import _arrays, _library
from ._checks import deadline_ms, instance, listed, member, milliseconds, real, shown
from ._core import OK, Core, Hold, Operation, Place, begin, fail, number
from ._library import Answer, FirstCut, Merge, Selection, quick, waits
from ._memory import View
from .errors import ClosedError, InvalidError, TopKVError
from .model import Model, Ticket, check_schema, dtype_of, id128, set_id128
from .results import HeadResult, IndexResult, Length, QueryReads, QueryResult

if TYPE_CHECKING:
    from ._memory import BufferProtocol

T = TypeVar("T")
S = TypeVar("S", bound="SessionBase")


def ids_of(names: Sequence[bytes]) -> Any:
    """Makes a C array of names, 16 bytes each."""
    names = listed("names", names, "16 bytes")
    ids = (_library.CId128 * max(1, len(names)))()
    for to, name in zip(ids, names):
        set_id128(to, id128("block name", name))
    return ids


def none(core: Core) -> Callable[[int, int], None]:
    """The end of an operation that returns nothing."""

    def parse(op: int, status: int) -> None:
        fail(core, op, status)

    return parse


def tokens_reported(core: Core) -> Callable[[int, int], int]:
    """The end of an operation that reports tokens."""

    def parse(op: int, status: int) -> int:
        fail(core, op, status)
        return int(quick.kv_op_tokens(op))

    return parse


def _pairs_of(what: str, values: Any, of: str) -> List[Any]:
    """A list of pairs; a pair may be anything of length 2, a line of a numpy array too."""
    made = listed(what, values, f"{of} pairs")
    for at, pair in enumerate(made):
        if isinstance(pair, (str, bytes)) or not hasattr(pair, "__getitem__") or len(pair) != 2:
            raise InvalidError(f"{what}: {at}: {shown(pair)}: not a {of} pair")
    return made


class Query:
    """What to select from one layer of a session, and what to return: Session.query().

    `queries`: (n_kv_heads, n_queries, d_k) numbers, copied as float32, for the kv heads from `kv_head`
    on; `layer`; `k`: rows to select; `ranges`: eligible tokens as (begin, end) pairs, ascending,
    disjoint; `scale`: of scores, None: 1 / sqrt(d_k).

    `merge`: how the vectors of one kv head select together (Merge); `answer`: what is returned
    (Answer); `selection` and `fraction`: fewer than k rows (Selection); `rerank`: rows scored by key per
    selected row; `first_cut`, `candidates` and `candidates_each`, (n_kv_heads): a first cut by 4-bit
    copies (FirstCut); `want_weights`, `want_ids`, `want_reads`: also return these; `summaries` and
    `summary_rows`: of the index, for an estimate of the rows that are not selected; `snapshot`: tokens
    that must be committed, 0: those of the ranges; `cached`: for each kv head, (block, fingerprint)
    pairs of blocks that the caller has, which are not sent again.

    Raises InvalidError if an argument has the wrong type or shape.  The library checks the rest when
    the query begins.
    """

    def __init__(
        self,
        queries: Any,
        k: int,
        *,
        layer: int,
        ranges: Sequence[Tuple[int, int]],
        kv_head: int = 0,
        scale: Optional[float] = None,
        merge: Merge = Merge.SUM,
        answer: Answer = Answer.IDS,
        selection: Selection = Selection.TOP,
        fraction: float = 0.0,
        rerank: int = 4,
        first_cut: FirstCut = FirstCut.NONE,
        candidates: int = 0,
        candidates_each: Optional[Sequence[int]] = None,
        want_weights: bool = False,
        want_ids: bool = False,
        want_reads: bool = False,
        summaries: int = 0,
        summary_rows: int = 0,
        snapshot: int = 0,
        cached: Optional[Sequence[Sequence[Tuple[int, int]]]] = None,
    ) -> None:
        values, shape = _arrays.f32_of("queries", queries)
        if len(shape) != 3 or 0 in shape:
            raise InvalidError(f"queries: shape {shape}: not (n_kv_heads, n_queries, d_k)")
        self.shape = shape
        c = self._c = _library.CQuery()
        answer = member("answer", answer, Answer)
        if want_ids and answer is not Answer.ATTEND:
            raise InvalidError(f"want_ids: Answer.{answer.name}: only with Answer.ATTEND; others return ids anyway")
        c.layer = number("layer", layer)
        c.kv_head_begin = number("kv_head", kv_head)
        c.n_kv_heads, c.n_queries = shape[0], shape[1]
        c.queries = addressof(values)
        c.scale = shape[2] ** -0.5 if scale is None else real("scale", scale)
        c.merge = member("merge", merge, Merge)
        c.answer = answer
        c.k = number("k", k)
        c.selection = member("selection", selection, Selection)
        c.fraction = real("fraction", fraction)
        c.rerank = number("rerank", rerank)
        c.first_cut = member("first_cut", first_cut, FirstCut)
        c.candidates = number("candidates", candidates)
        c.want_weights, c.want_ids, c.want_reads = want_weights, want_ids, want_reads
        c.summaries = number("summaries", summaries)
        c.summary_rows = number("summary_rows", summary_rows)
        c.snapshot = number("snapshot", snapshot)
        ranges = _pairs_of("ranges", ranges, "(begin, end)")
        c.n_ranges = len(ranges)
        spans = (_library.CRange * max(1, len(ranges)))()
        for span, pair in zip(spans, ranges):
            span.begin, span.end = number("range: begin", pair[0]), number("range: end", pair[1])
        c.ranges = cast(spans, POINTER(_library.CRange))
        self._kept: List[Any] = [values, spans]
        if candidates_each is not None:
            each = self._of_heads("candidates_each", _arrays.u32_of("candidates_each", candidates_each))
            c.candidates_each = cast(each, POINTER(c_uint32))
        if cached is not None:
            of_heads = [
                _pairs_of("cached", blocks, "(block, fingerprint)") for blocks in listed("cached", cached, "lists")
            ]
            n_cached = self._of_heads("cached", _arrays.u32_of("cached", [len(blocks) for blocks in of_heads]))
            pairs = [pair for blocks in of_heads for pair in blocks]
            blocks_c = (_library.CCachedBlock * max(1, len(pairs)))()
            for to, (block, fingerprint) in zip(blocks_c, pairs):
                to.block = number("cached: block", block)
                to.fingerprint = number("cached: fingerprint", fingerprint)
            self._kept.append(blocks_c)
            c.n_cached = cast(n_cached, POINTER(c_uint32))
            c.cached = cast(blocks_c, POINTER(_library.CCachedBlock))

    def _of_heads(self, what: str, values: Any) -> Any:
        if len(values) != self.shape[0]:
            raise InvalidError(f"{what}: {len(values)} entries, for {self.shape[0]} kv heads")
        self._kept.append(values)
        return values


class SessionBase:
    """What Session and AsyncSession share: begin_*() of each operation, and properties.

    A begin_*() has the arguments of the method without that prefix, and returns an Operation instead of waiting.
    """

    def __init__(self, core: Core, handle: int, model: Model, tokens: int) -> None:
        self._core = core
        self._handle = handle
        self._model = model
        self._start = tokens
        core.sessions[handle] = None

    def __del__(self) -> None:
        handle = getattr(self, "_handle", 0)
        if handle:
            self._core.bury(self._core.free_session, handle)

    def _open_handle(self) -> int:
        if self._handle == 0:
            raise ClosedError("session: closed")
        return self._handle

    @property
    def model(self) -> Model:
        """The Model that it was opened for."""
        return self._model

    @property
    def reused_tokens(self) -> int:
        """Tokens that it started with: of a prefix that the nodes kept, of a fork, of a resume."""
        return self._start

    @property
    def generation(self) -> int:
        """Incremented by each truncate; as of the last reply.  Raises ClosedError."""
        with self._core.lock:
            self._core.use()
            return int(quick.kv_session_generation(self._open_handle()))

    @property
    def lease(self) -> float:
        """Seconds after which nodes end the session if the client does not renew it.  Raises ClosedError."""
        with self._core.lock:
            self._core.use()
            return float(quick.kv_session_lease_ms(self._open_handle())) / 1000

    def ticket(self) -> Ticket:
        """Returns what another client of the tenant needs for Client.resume().  Raises ClosedError."""
        c = _library.CTicket()
        with self._core.lock:
            self._core.use()
            quick.kv_session_ticket(self._open_handle(), byref(c))
        return Ticket(bytes(c.session_id.bytes), bytes(c.token.bytes), c.root)

    def detach(self) -> None:
        """Lets go of the session.  It stays in the nodes until its lease expires: others may resume it.

        Outstanding operations are cancelled.  May be called twice.
        """
        handle, self._handle = self._handle, 0
        if handle and not self._core.is_closed:
            with self._core.lock:
                self._core.use()
                self._core.free_session(handle)

    def row_crc(self, row: "BufferProtocol", *, layer: int, kv_head: int, token: int) -> int:
        """Returns the CRC32C of one row at its place in this session: for `crcs` of put().

        `row`: (row_bytes) bytes, of that `layer`, `kv_head` and `token`.  Raises InvalidError if the row
        has another size, or the place is not the model's.
        """
        layer, kv_head = number("layer", layer), number("kv_head", kv_head)
        if not 0 <= layer < len(self._model.layers) or not 0 <= kv_head < self._model.layers[layer].n_kv_heads:
            raise InvalidError(f"row: layer {layer}, kv head {kv_head}: not the model's")
        row_bytes = self._model._c.schema.layers[layer].row_bytes
        view = View(row, False, "row")
        try:
            if view.nbytes != row_bytes:
                raise InvalidError(f"row: {view.nbytes} bytes, not {row_bytes}")
            with self._core.lock:
                self._core.use()
                return int(
                    quick.kv_row_crc(
                        self._open_handle(), view.address, row_bytes, layer, kv_head, number("token", token)
                    )
                )
        finally:
            view.release()

    # ---- rows --------------------------------------------------------------------------------

    def _range(
        self, token: int, n_tokens: int, layer: int, n_layers: Optional[int], kv_head: int, n_kv_heads: int
    ) -> "_library.CRows":
        layers = self._model.layers
        if n_layers is None:
            n_layers = len(layers) - number("layer", layer, 0, len(layers) - 1)
        return _library.CRows(
            number("layer", layer),
            number("n_layers", n_layers),
            number("kv_head", kv_head),
            number("n_kv_heads", n_kv_heads),
            number("token", token),
            n_tokens,
        )

    def _bytes_of(self, rows: "_library.CRows") -> int:
        nbytes = int(quick.kv_rows_bytes(byref(self._model._c.schema), byref(rows)))
        if nbytes == 0:
            raise InvalidError(
                f"rows: {rows.n_layers} layers from {rows.layer_begin} on, {rows.n_kv_heads or 'all'} kv heads from "
                f"{rows.kv_head_begin} on, {rows.n_tokens} tokens from {rows.token_begin} on: not in the model, or none"
            )
        return nbytes

    def _shape_of(self, rows: "_library.CRows") -> Optional[Tuple[int, ...]]:
        """The shape of rows as elements, None if its layers are not alike."""
        layers = self._model.layers[rows.layer_begin : rows.layer_begin + rows.n_layers]
        if len(set(layers)) != 1:
            return None
        heads = rows.n_kv_heads or layers[0].n_kv_heads - rows.kv_head_begin
        return (rows.n_layers, heads, rows.n_tokens, layers[0].d_k + layers[0].d_v)

    def _begin_store(
        self,
        function: Any,
        data: "BufferProtocol",
        token: int,
        layer: int,
        n_layers: Optional[int],
        kv_head: int,
        n_kv_heads: int,
        crcs: Any,
        deadline: Optional[float],
    ) -> Operation[None]:
        core = self._core
        rows = self._range(token, 1, layer, n_layers, kv_head, n_kv_heads)
        one = self._bytes_of(rows)
        limit_ms = deadline_ms(deadline)
        hold = Hold(self)
        with core.lock:
            core.use()
            session = self._open_handle()
            place = core.place(data, False, "rows", hold)
            try:
                rows.n_tokens, rest = divmod(place.nbytes, one)
                if rest or not rows.n_tokens:
                    raise InvalidError(f"rows: {place.nbytes} bytes: not a multiple of {one}, of one token")
                self._check_rows(data, rows)
                io = self._io(place, rows, crcs, hold)
            except BaseException:
                hold.release(core)
                raise
            return begin(core, hold, none(core), function, session, byref(rows), byref(io), limit_ms)

    def _check_rows(self, data: "BufferProtocol", rows: "_library.CRows", what: str = "rows") -> None:
        layers = self._model.layers[rows.layer_begin : rows.layer_begin + rows.n_layers]
        if len({layer.dtype for layer in layers}) == 1:
            _arrays.check_rows(what, data, dtype_of(layers[0].dtype), self._shape_of(rows))

    def _io(self, place: Place, rows: "_library.CRows", crcs: Any, hold: Hold) -> "_library.CRowsIo":
        io = _library.CRowsIo(place.buffer, place.offset, None)
        if crcs is not None:
            values = _arrays.u32_of("crcs", crcs)
            units = sum(
                rows.n_kv_heads or layer.n_kv_heads - rows.kv_head_begin
                for layer in self._model.layers[rows.layer_begin : rows.layer_begin + rows.n_layers]
            )
            if len(values) != units * rows.n_tokens:
                raise InvalidError(f"crcs: {len(values)}, for {units * rows.n_tokens} rows")
            hold.kept.append(values)
            io.crcs = cast(values, POINTER(c_uint32))
        return io

    def begin_put(
        self,
        data: "BufferProtocol",
        token: int,
        *,
        layer: int = 0,
        n_layers: Optional[int] = None,
        kv_head: int = 0,
        n_kv_heads: int = 0,
        crcs: Any = None,
        deadline: Optional[float] = None,
    ) -> Operation[None]:
        """Begins put(data, token, layer, n_layers, kv_head, n_kv_heads, crcs, deadline).

        Raises InvalidError, ClosedError or BusyError at once; `data` must not change until the end.
        """
        return self._begin_store(
            waits.kv_put_begin, data, token, layer, n_layers, kv_head, n_kv_heads, crcs, deadline
        )

    def begin_append(
        self, data: "BufferProtocol", token: int, *, crcs: Any = None, deadline: Optional[float] = None
    ) -> Operation[None]:
        """Begins append(data, token, crcs, deadline).  Raises as begin_put()."""
        return self._begin_store(waits.kv_append_begin, data, token, 0, None, 0, 0, crcs, deadline)

    def begin_read(
        self,
        token: int,
        n_tokens: int,
        *,
        layer: int = 0,
        n_layers: Optional[int] = None,
        kv_head: int = 0,
        n_kv_heads: int = 0,
        out: "Optional[BufferProtocol]" = None,
        deadline: Optional[float] = None,
    ) -> Operation[Any]:
        """Begins read(token, n_tokens, layer, n_layers, kv_head, n_kv_heads, out, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        core = self._core
        rows = self._range(token, number("n_tokens", n_tokens, 1), layer, n_layers, kv_head, n_kv_heads)
        nbytes = self._bytes_of(rows)
        shape = self._shape_of(rows)
        dtype = dtype_of(self._model.layers[rows.layer_begin].dtype)
        memory: Any = bytearray(nbytes) if out is None else out
        limit_ms = deadline_ms(deadline)
        hold = Hold(self)
        with core.lock:
            core.use()
            session = self._open_handle()
            place = core.place(memory, True, "out", hold)
            try:
                self._check_out(place, nbytes)
                if out is not None:
                    self._check_rows(out, rows, "out")
            except BaseException:
                hold.release(core)
                raise
            io = _library.CRowsIo(place.buffer, place.offset, None)

            def parse(handle: int, ended: int) -> Any:
                fail(core, handle, ended)
                if out is not None:
                    return out
                return _arrays.raw(memory) if shape is None else _arrays.elements(memory, dtype, shape)

            return begin(core, hold, parse, waits.kv_read_begin, session, byref(rows), byref(io), limit_ms)

    @staticmethod
    def _check_out(place: Place, nbytes: int) -> None:
        if place.nbytes != nbytes:
            raise InvalidError(f"out: {place.nbytes} bytes, for rows of {nbytes}")

    def begin_fetch(
        self,
        ids: Sequence[Any],
        *,
        layer: int,
        kv_head: int = 0,
        snapshot: int = 0,
        out: "Optional[BufferProtocol]" = None,
        deadline: Optional[float] = None,
    ) -> Operation[Any]:
        """Begins fetch(ids, layer, kv_head, snapshot, out, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        core = self._core
        layers = self._model.layers
        shape = layers[number("layer", layer, 0, len(layers) - 1)]
        dtype = dtype_of(shape.dtype)
        heads = [_arrays.u32_of("ids", of_head, 1) for of_head in listed("ids", ids, "tokens for each kv head")]
        n_ids = _arrays.u32_of("ids", [len(of_head) for of_head in heads])
        tokens = (c_uint32 * max(1, sum(n_ids)))()
        at = 0
        for of_head in heads:
            ctypes.memmove(addressof(tokens) + 4 * at, of_head, 4 * len(of_head))
            at += len(of_head)
        if not at:
            raise InvalidError("fetch: ids: none")
        row_bytes = self._model._c.schema.layers[layer].row_bytes
        memory: Any = bytearray(at * row_bytes) if out is None else out
        fetch = _library.CFetch(
            layer,
            number("kv_head", kv_head),
            len(heads),
            cast(n_ids, POINTER(c_uint32)),
            cast(tokens, POINTER(c_uint32)),
            number("snapshot", snapshot),
        )
        limit_ms = deadline_ms(deadline)
        hold = Hold(self)
        with core.lock:
            core.use()
            session = self._open_handle()
            place = core.place(memory, True, "out", hold)
            try:
                self._check_out(place, at * row_bytes)
                if out is not None:
                    _arrays.check_rows("out", out, dtype, (at, shape.d_k + shape.d_v))
            except BaseException:
                hold.release(core)
                raise
            io = _library.CRowsIo(place.buffer, place.offset, None)

            def parse(handle: int, ended: int) -> Any:
                fail(core, handle, ended)
                if out is not None:
                    return out
                made, begin_at = [], 0
                for of_head in heads:
                    part = memoryview(memory)[begin_at : begin_at + len(of_head) * row_bytes]
                    begin_at += len(part)
                    made.append(_arrays.elements(part, dtype, (len(of_head), shape.d_k + shape.d_v)))
                return made

            return begin(core, hold, parse, waits.kv_fetch_begin, session, byref(fetch), byref(io), limit_ms)

    # ---- retrieval ---------------------------------------------------------------------------

    def begin_index(
        self,
        tokens: int,
        *,
        m: int,
        bits: int,
        layer: int = 0,
        n_layers: int = 0,
        chapter_blocks: int = 128,
        rotates: bool = False,
        copies: bool = False,
        iterations: int = 10,
        budget_us: int = 0,
        seed: int = 0,
        summaries: int = 0,
        summary_rows: int = 0,
        wait: bool = True,
        deadline: Optional[float] = None,
    ) -> Operation[IndexResult]:
        """Begins index(tokens, m, bits, layer, n_layers, chapter_blocks, rotates, copies, iterations, budget_us,
        seed, summaries, summary_rows, wait, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        core = self._core
        options = _library.CIndexOptions(
            layer_begin=number("layer", layer),
            n_layers=number("n_layers", n_layers),
            tokens=number("tokens", tokens),
            chapter_blocks=number("chapter_blocks", chapter_blocks),
            m=number("m", m),
            bits=number("bits", bits),
            rotates=rotates,
            copies=copies,
            iterations=number("iterations", iterations),
            budget_us=number("budget_us", budget_us),
            seed=number("seed", seed, 0, (1 << 64) - 1),
            summaries=number("summaries", summaries),
            summary_rows=number("summary_rows", summary_rows),
            wait=wait,
        )

        def parse(handle: int, ended: int) -> IndexResult:
            fail(core, handle, ended)
            c = _library.CIndexResult()
            quick.kv_op_index_result(handle, byref(c))
            return IndexResult(
                c.rows,
                c.rows_coded,
                c.n_found,
                c.n_trained,
                c.n_pending,
                c.iterations,
                c.train_us / 1e6,
                c.busiest_us / 1e6,
            )

        with core.lock:
            core.use()
            return begin(
                core,
                Hold(self),
                parse,
                waits.kv_index_begin,
                self._open_handle(),
                byref(options),
                deadline_ms(deadline),
            )

    def _query_io(self, query: Query, hold: Hold) -> Tuple[Optional["_library.CRowsIo"], Any]:
        """Memory for the rows that a query returns, if it returns rows."""
        instance("query", query, Query)
        layers = self._model.layers
        if query._c.layer >= len(layers):
            raise InvalidError(f"query: layer {query._c.layer}: the model has {len(layers)}")
        if query.shape[2] != layers[query._c.layer].d_k:
            raise InvalidError(f"query: queries of {query.shape[2]} elements; d_k is {layers[query._c.layer].d_k}")
        if query._c.answer != Answer.ROWS:
            return None, None
        nbytes = quick.kv_query_rows_bytes_max(byref(self._model._c.schema), byref(query._c))
        if nbytes == 0:
            return None, None  # the begin says what is wrong
        memory = bytearray(nbytes)
        place = self._core.place(memory, True, "rows", hold)
        return _library.CRowsIo(place.buffer, place.offset, None), memory

    def _query_result(self, query: Query, memory: Any) -> Callable[[int, int], QueryResult]:
        core, model = self._core, self._model

        def parse(handle: int, ended: int) -> QueryResult:
            fail(core, handle, ended)
            layer = model.layers[query._c.layer]
            base = addressof(ctypes.c_char.from_buffer(memory)) if memory is not None else 0
            heads = [_head_result(handle, head, query, layer, memory, base) for head in range(query.shape[0])]
            reads = _library.CQueryReads()
            quick.kv_op_query_reads(handle, byref(reads))
            return QueryResult(
                heads,
                QueryReads(reads.books, reads.codes, reads.copies, reads.keys, reads.rows, reads.summaries),
                quick.kv_op_elapsed_us(handle),
            )

        return parse

    def begin_query(self, query: Query, *, deadline: Optional[float] = None) -> Operation[QueryResult]:
        """Begins a `query`, an object of class Query; `deadline` as in query().

        Raises InvalidError, ClosedError or BusyError at once.  Begun early, it is a prefetch.
        """
        core = self._core
        limit_ms = deadline_ms(deadline)
        hold = Hold(self)
        with core.lock:
            core.use()
            session = self._open_handle()
            io, memory = self._query_io(query, hold)
            rows = None if io is None else byref(io)
            result = self._query_result(query, memory)
            return begin(core, hold, result, waits.kv_query_begin, session, byref(query._c), rows, limit_ms)

    # ---- the session itself ------------------------------------------------------------------

    def begin_length(self, *, deadline: Optional[float] = None) -> Operation[Length]:
        """Begins length(deadline).  Raises ClosedError or BusyError at once."""
        core, n_layers = self._core, len(self._model.layers)

        def parse(handle: int, ended: int) -> Length:
            fail(core, handle, ended)
            layers = [int(quick.kv_op_layer_tokens(handle, layer)) for layer in range(n_layers)]
            return Length(int(quick.kv_op_tokens(handle)), layers)

        with core.lock:
            core.use()
            return begin(core, Hold(self), parse, waits.kv_length_begin, self._open_handle(), deadline_ms(deadline))

    def begin_truncate(self, tokens: int, *, deadline: Optional[float] = None) -> Operation[None]:
        """Begins truncate(tokens, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        with self._core.lock:
            self._core.use()
            return begin(
                self._core,
                Hold(self),
                none(self._core),
                waits.kv_truncate_begin,
                self._open_handle(),
                number("tokens", tokens),
                deadline_ms(deadline),
            )

    def begin_renew(self, lease: float = 0.0, *, deadline: Optional[float] = None) -> Operation[None]:
        """Begins renew(lease, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        with self._core.lock:
            self._core.use()
            lease_ms = milliseconds("lease", lease)
            return begin(
                self._core,
                Hold(self),
                none(self._core),
                waits.kv_renew_begin,
                self._open_handle(),
                lease_ms,
                deadline_ms(deadline),
            )

    def begin_save(self, *, deadline: Optional[float] = None) -> Operation[int]:
        """Begins save(deadline).  Raises ClosedError or BusyError at once."""
        core = self._core
        parse = tokens_reported(core)
        with core.lock:
            core.use()
            return begin(core, Hold(self), parse, waits.kv_save_begin, self._open_handle(), deadline_ms(deadline))

    def begin_publish(
        self,
        names: Sequence[bytes],
        *,
        first_block: int = 0,
        tokens: Any = None,
        deadline: Optional[float] = None,
    ) -> Operation[int]:
        """Begins publish(names, first_block, tokens, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        ids = ids_of(names)
        publish = _library.CPublish(first_block=number("first_block", first_block), n_names=len(names))
        publish.names = cast(ids, POINTER(_library.CId128))
        if tokens is not None:
            values = _arrays.u32_of("tokens", tokens)
            if len(values) != len(names) * _library.BLOCK_TOKENS:
                raise InvalidError(f"tokens: {len(values)}, for {len(names)} blocks of {_library.BLOCK_TOKENS}")
            publish.tokens = cast(values, POINTER(c_uint32))
        with self._core.lock:
            self._core.use()
            return begin(
                self._core,
                Hold(self),
                tokens_reported(self._core),
                waits.kv_publish_begin,
                self._open_handle(),
                byref(publish),
                deadline_ms(deadline),
            )

    def begin_close(self, *, deadline: Optional[float] = None) -> Operation[None]:
        """Begins close(deadline).  Raises ClosedError or BusyError at once."""
        core = self._core
        with core.lock:
            core.use()
            handle = self._open_handle()

            def parse(op: int, ended: int) -> None:
                self._handle = 0
                try:
                    fail(core, op, ended)
                finally:
                    core.dead.append((core.free_session, handle))

            return begin(core, Hold(self), parse, waits.kv_close_begin, handle, deadline_ms(deadline))

    def _begin_fork(
        self, tokens: int, deadline: Optional[float], make: Callable[[int, Model, int], S]
    ) -> Operation[S]:
        core = self._core
        with core.lock:
            core.use()
            return begin(
                core,
                Hold(self),
                session_of(core, self._model, make),
                waits.kv_fork_begin,
                self._open_handle(),
                number("tokens", tokens),
                deadline_ms(deadline),
            )


def session_of(core: Core, model: Model, make: Callable[[int, Model, int], S]) -> Callable[[int, int], S]:
    """The end of an operation that makes a session."""

    def parse(op: int, status: int) -> S:
        fail(core, op, status)
        handle = quick.kv_op_session(op)
        try:  # all that counts rows and bytes here goes by the model's schema
            check_schema(model, quick.kv_session_schema(handle).contents)
        except InvalidError:
            quick.kv_session_free(handle)
            raise
        return make(handle, model, int(quick.kv_op_tokens(op)))

    return parse


def _head_result(handle: int, head: int, query: Query, layer: Any, memory: Any, base: int) -> HeadResult:
    c = _library.CQueryResult()
    fail_status = quick.kv_op_query_result(handle, head, byref(c))
    if fail_status != OK:
        raise InvalidError(f"query: head {head}: no result")
    rows = None
    if c.rows is not None and memory is not None:
        row_bytes = (layer.d_k + layer.d_v) * quick.kv_dtype_bytes(layer.dtype)
        at = c.rows - base
        part = memoryview(memory)[at : at + c.n_rows * row_bytes]
        rows = _arrays.elements(part, dtype_of(layer.dtype), (c.n_rows, layer.d_k + layer.d_v))
    n_queries = query.shape[1]
    has_ids = query._c.answer != Answer.ATTEND or query._c.want_ids or bool(query._c.cached)
    return HeadResult(
        _arrays.u32_at(c.ids, (c.n_ids,)) if has_ids else None,
        _arrays.u32_at(c.row_index, (c.n_ids,)) if has_ids else None,
        rows,
        _arrays.u32_at(c.crcs, (c.n_rows,)),
        _arrays.f32_at(c.weights, (c.n_ids,)),
        _arrays.u32_at(c.query_mask, (c.n_ids,)),
        _arrays.f32_at(c.outputs, (n_queries, layer.d_v)),
        _arrays.f32_at(c.lses, (n_queries,)),
        c.n_selected,
        c.n_estimated,
        c.n_scored_by_code,
        c.n_scored_by_key,
        c.n_reranked,
        c.n_chapters,
        c.recall,
        c.node,
        c.queue_us,
        c.service_us,
    )


class Session(SessionBase):
    """A session: one sequence's rows, on the nodes.  Made by Client.open_session(), resume() and fork().

    A row is one token's key and value in one layer and kv head.  Rows are elements of the model's type,
    dense, as (n_layers, n_kv_heads, n_tokens, d_k + d_v), the key first; bf16 is uint16 in numpy.  Memory that is
    given may be such an array (without leading dimensions of 1), a one-dimensional one, or bytes; uint16 for
    the bits of fp16 and bf16, an extension's bfloat16 for bf16.  Another type, byte order or shape is an InvalidError.
    Times are in seconds; `deadline` None is the client's.  Every method raises the exception of its
    status (topkv.errors): NotFoundError if the session's lease has expired, StaleError if another client
    truncated it, DeadlineError, UnreachableError, CorruptError, ClosedError, and what it names itself.

    `with` closes it at the end.
    """

    def put(
        self,
        data: "BufferProtocol",
        token: int,
        *,
        layer: int = 0,
        n_layers: Optional[int] = None,
        kv_head: int = 0,
        n_kv_heads: int = 0,
        crcs: Any = None,
        deadline: Optional[float] = None,
    ) -> None:
        """Stores rows, from `token` on, as many tokens as `data` has.

        `data`: (n_layers, n_kv_heads, n_tokens, d_k + d_v), used in place.  `layer`, `n_layers`: None, all from
        `layer` on; `kv_head`, `n_kv_heads`: 0, all.  `crcs`: (n_layers, n_kv_heads, n_tokens)
        uint32, of row_crc(); None: computed here.  Rows are committed in token order.

        Raises NotReadyError if rows before `token` are missing, ConflictError if others are committed there,
        TooLargeError beyond the session's tokens_max, NoMemoryError if the store is full.
        """
        self.begin_put(
            data,
            token,
            layer=layer,
            n_layers=n_layers,
            kv_head=kv_head,
            n_kv_heads=n_kv_heads,
            crcs=crcs,
            deadline=deadline,
        ).result()

    def append(
        self, data: "BufferProtocol", token: int, *, crcs: Any = None, deadline: Optional[float] = None
    ) -> None:
        """Stores the new rows of a decode step: as put(), of few tokens and all layers, at a higher priority.

        `data`: (n_layers, n_kv_heads, n_tokens, d_k + d_v), from `token` on; `crcs` as in put().
        Raises as put().
        """
        self.begin_append(data, token, crcs=crcs, deadline=deadline).result()

    def read(
        self,
        token: int,
        n_tokens: int,
        *,
        layer: int = 0,
        n_layers: Optional[int] = None,
        kv_head: int = 0,
        n_kv_heads: int = 0,
        out: "Optional[BufferProtocol]" = None,
        deadline: Optional[float] = None,
    ) -> Any:
        """Reads `n_tokens` tokens from `token` on, of `layer`, `n_layers`, `kv_head`, `n_kv_heads` as in put().

        Returns an array (n_layers, n_kv_heads, n_tokens, d_k + d_v), bytes if the layers differ; or
        `out`, writable memory of that size, filled in place.  Waits until the rows are committed.  Without numpy the
        array is a memoryview; of fp16, its bits as uint16 where Python cannot make one of "e" (before 3.12).

        Raises NotReadyError if they are not by the deadline.
        """
        return self.begin_read(
            token,
            n_tokens,
            layer=layer,
            n_layers=n_layers,
            kv_head=kv_head,
            n_kv_heads=n_kv_heads,
            out=out,
            deadline=deadline,
        ).result()

    def fetch(
        self,
        ids: Sequence[Any],
        *,
        layer: int,
        kv_head: int = 0,
        snapshot: int = 0,
        out: "Optional[BufferProtocol]" = None,
        deadline: Optional[float] = None,
    ) -> Any:
        """Reads rows of one `layer` by token.

        `ids`: for each kv head, from `kv_head` on, its tokens.  Returns a list of arrays
        (n_ids, d_k + d_v), one for each head, in the order of `ids`; or `out`, writable memory for all
        of them, dense.  `snapshot`: tokens that must be committed first; 0: up to the greatest id.

        Raises NotReadyError if they are not by the deadline.
        """
        return self.begin_fetch(
            ids, layer=layer, kv_head=kv_head, snapshot=snapshot, out=out, deadline=deadline
        ).result()

    def index(
        self,
        tokens: int,
        *,
        m: int,
        bits: int,
        layer: int = 0,
        n_layers: int = 0,
        chapter_blocks: int = 128,
        rotates: bool = False,
        copies: bool = False,
        iterations: int = 10,
        budget_us: int = 0,
        seed: int = 0,
        summaries: int = 0,
        summary_rows: int = 0,
        wait: bool = True,
        deadline: Optional[float] = None,
    ) -> IndexResult:
        """Builds product-quantized codes of the keys before token `tokens`, which must be committed.

        `m` subspaces (d_k is a multiple) of `bits` bits, for `n_layers` layers (0: all) from `layer` on.
        `chapter_blocks`: blocks of 128 tokens that share a codebook, at least 8, or 0: all; an
        incomplete chapter at the end has no codes.  `rotates`: codes of rotated keys; `copies`: also
        keys in 4 bits, for FirstCut.INT4.  k-means: `iterations` at most, `budget_us` microseconds
        for each codebook (0: no limit), `seed`.  `summaries`: 0, 16 or 64 per `summary_rows` (0: 1,024;
        3,072) rows.  `wait`: until the codes exist, or the deadline.

        Raises InvalidError if a number is out of bounds.
        """
        return self.begin_index(
            tokens,
            m=m,
            bits=bits,
            layer=layer,
            n_layers=n_layers,
            chapter_blocks=chapter_blocks,
            rotates=rotates,
            copies=copies,
            iterations=iterations,
            budget_us=budget_us,
            seed=seed,
            summaries=summaries,
            summary_rows=summary_rows,
            wait=wait,
            deadline=deadline,
        ).result()

    def query(self, query: Query, *, deadline: Optional[float] = None) -> QueryResult:
        """Runs a `query`, an object of class Query, which may be used again.

        Raises TooLargeError if the rows of one head may take more than 1 MiB (use Answer.IDS and fetch()),
        NotReadyError if `snapshot` tokens are not committed by the deadline, InvalidError.
        """
        return self.begin_query(query, deadline=deadline).result()

    def length(self, *, deadline: Optional[float] = None) -> Length:
        """Asks for the committed length, in tokens, of the session and of each layer."""
        return self.begin_length(deadline=deadline).result()

    def fork(self, tokens: int, *, deadline: Optional[float] = None) -> "Session":
        """Makes a session that shares the first `tokens` tokens; no rows are copied.

        Raises InvalidError if fewer are committed, TooLargeError if the rows have too many writers.
        """
        return self.begin_fork(tokens, deadline=deadline).result()

    def begin_fork(self, tokens: int, *, deadline: Optional[float] = None) -> "Operation[Session]":
        """Begins fork(tokens, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        core = self._core
        return self._begin_fork(tokens, deadline, lambda *made: Session(core, *made))

    def truncate(self, tokens: int, *, deadline: Optional[float] = None) -> None:
        """Discards all tokens from `tokens` on.  Other clients of the session get StaleError until they resume.

        Raises InvalidError if fewer are committed.
        """
        self.begin_truncate(tokens, deadline=deadline).result()

    def publish(
        self,
        names: Sequence[bytes],
        *,
        first_block: int = 0,
        tokens: Any = None,
        deadline: Optional[float] = None,
    ) -> int:
        """Has the nodes keep blocks under their names, also after the session has ended.

        `names`: of complete blocks, as Client.prompt_names() makes them, from block `first_block` on;
        `tokens`: (n_names, 128) the blocks' tokens, for readers of the nodes' events, or None.
        Returns how many of the session's first tokens all its nodes keep.

        Raises UnsupportedError if the session was opened without its prompt's names, ConflictError if a
        block has another name, InvalidError if names before `first_block` are missing.
        """
        return self.begin_publish(names, first_block=first_block, tokens=tokens, deadline=deadline).result()

    def save(self, *, deadline: Optional[float] = None) -> int:
        """Has the nodes save on disk what the session shares by name; returns how many tokens all have saved.

        Raises UnsupportedError at a node without a disk, NoMemoryError without room there, IoError if it fails.
        """
        return self.begin_save(deadline=deadline).result()

    def renew(self, lease: float = 0.0, *, deadline: Optional[float] = None) -> None:
        """Starts the lease again, with `lease` seconds; 0: as it was.  The client renews leases by itself."""
        self.begin_renew(lease, deadline=deadline).result()

    def close(self, *, deadline: Optional[float] = None) -> None:
        """Closes the session and frees its memory on its nodes, after its outstanding operations.

        May be called twice.  To leave it to others, use detach().
        """
        if self._handle and not self._core.is_closed:
            self.begin_close(deadline=deadline).result()

    def __enter__(self) -> "Session":
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        try:
            self.close()
        except TopKVError:
            if kind is None:
                raise
