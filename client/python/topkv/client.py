"""Client: objects, sessions and nodes, by blocking calls, in batches, and by operations that are begun first."""

import ctypes
from ctypes import POINTER, addressof, byref, c_uint32, c_void_p, cast
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Dict,
    Generator,
    Generic,
    Iterable,
    List,
    NamedTuple,
    Optional,
    Sequence,
    Tuple,
    Type,
    TypeVar,
    Union,
)

from . import _arrays, _library
from ._checks import (
    client_arguments,
    deadline_ms,
    instance,
    listed,
    member,
    milliseconds,
    pairs,
    shown,
    text_of,
)
from ._core import OK, Buffer, Core, Hold, Operation, Place, begin, begun, fail, number
from ._library import NodeState, ObjectVerb, PrefixVerb, Status, quick, waits
from .errors import InvalidError, TooLargeError, TopKVError
from .model import Model, Ticket, id128, set_id128
from .results import Match, NodeInfo, NodeMatch, ObjectInfo, ObjectResult, QueryResult
from .session import Query, Session, SessionBase, ids_of, none, session_of

if TYPE_CHECKING:
    from ._memory import BufferProtocol

T = TypeVar("T")
S = TypeVar("S", bound=SessionBase)
Steps = Generator[Operation[Any], Any, T]

ALL_NODES = _library.NODES_ALL
_NOT_FOUND = int(Status.NOT_FOUND)
_TOO_LARGE = int(Status.TOO_LARGE)
_CObject = _library.CObject
_OBJECT_BYTES_MAX = _library.OBJECT_BYTES_MAX
_PUT, _GET, _EXISTS, _DELETE = (int(verb) for verb in ObjectVerb)


class ExtraKey(NamedTuple):
    """What the rows of some tokens depend on beside model and tokens: an adapter, an image.

    `value`: bytes, its name or hash.  `first_token`, `n_tokens`: the tokens of the prompt that depend on it;
    `n_tokens` None: all that follow.
    """

    value: bytes
    first_token: int = 0
    n_tokens: Optional[int] = None


class AppendEntry(NamedTuple):
    """One sequence's part of Client.append_many(): a `session`, and `data` and `token` as in Session.append()."""

    session: SessionBase
    data: "BufferProtocol"
    token: int


class QueryEntry(NamedTuple):
    """One sequence's part of Client.query_many(): a `session` and a `query`, an object of class Query."""

    session: SessionBase
    query: Query


def _name(name: Union[str, bytes]) -> bytes:
    try:
        text = name if isinstance(name, bytes) else name.encode("utf-8", "surrogateescape")
    except AttributeError:
        raise InvalidError(f"object: name: {name!r}: not a text") from None
    if not 1 <= len(text) <= _library.NAME_BYTES_MAX or b"\0" in text:
        raise InvalidError(f"object: name: {name!r}: not 1..{_library.NAME_BYTES_MAX} bytes without NUL")
    return text


def _text(text: Optional[bytes]) -> str:
    return text.decode("utf-8", "surrogateescape") if text else ""


def _ttl_ms(ttl: Optional[float]) -> int:
    if ttl is None:
        return 0
    if isinstance(ttl, (str, bytes)) or not hasattr(ttl, "__float__"):
        raise InvalidError(f"ttl: {shown(ttl)}: not seconds")
    if ttl == float("inf"):
        return _library.OBJECT_TTL_NONE
    if not 0 < ttl <= _library.OBJECT_TTL_MAX_MS / 1000:
        raise InvalidError(
            f"ttl: {ttl!r}: seconds, above 0, at most {_library.OBJECT_TTL_MAX_MS // 1000}; "
            "float('inf'): never; None: the node's default"
        )
    return max(1, int(ttl * 1000))


class ClientBase(Generic[S]):
    """What Client and AsyncClient share: begin_*() of each operation, memory, and what needs no waiting.

    A begin_*() has the arguments of the method without that prefix, and returns an Operation instead of waiting.
    """

    _core: Core

    def _session(self, handle: int, model: Model, tokens: int) -> S:
        raise NotImplementedError

    # ---- memory and progress -----------------------------------------------------------------

    def allocate(self, nbytes: int) -> Buffer:
        """Allocates a Buffer of `nbytes` bytes: memory that is sent and filled without copies.

        Raises NoMemoryError, or InvalidError if `nbytes` is 0.
        """
        with self._core.lock:
            self._core.use()
            return self._core.allocate(number("allocate: nbytes", nbytes, 1, 1 << 46))

    def is_busy(self, memory: "BufferProtocol") -> bool:
        """Returns whether an operation uses `memory`, or the transport still does, after one that failed.

        Until it returns False, memory that a failed operation was to fill may still be written, and memory that
        it was to send may still be read.  Raises ClosedError.
        """
        with self._core.lock:
            client = self._core.use()
            waits.kv_poll(client)
            self._core.sweep()
            return self._core.is_busy(memory)

    def poll(self) -> None:
        """Moves operations on, and renews leases, without waiting.  Raises ClosedError.

        With `progress_thread`, which is a Client's default, there is no need for it.
        """
        with self._core.lock:
            client = self._core.use()
            waits.kv_poll(client)

    # ---- objects -----------------------------------------------------------------------------

    def begin_put(
        self,
        name: Union[str, bytes],
        data: "BufferProtocol",
        *,
        ttl: Optional[float] = None,
        evictable: bool = False,
        deadline: Optional[float] = None,
    ) -> Operation[None]:
        """Begins put(name, data, ttl, evictable, deadline).

        Raises InvalidError, TooLargeError, ClosedError or BusyError at once; `data` must not change until the end.
        """
        core = self._core
        text = _name(name)
        ttl_ms = 0 if ttl is None else _ttl_ms(ttl)
        limit_ms = 0 if deadline is None else deadline_ms(deadline)
        hold = Hold()

        def parse(handle: int, ended: int) -> None:
            if ended != OK:
                fail(core, handle, ended)

        with core.lock:
            client = core.use()
            buffer, offset, nbytes = core.place(data, False, "data", hold)
            c = _CObject(text, buffer, offset, nbytes, 0, ttl_ms, evictable)
            hold.kept.append(c)
            return begin(core, hold, parse, waits.kv_objects_begin, client, _PUT, addressof(c), 1, limit_ms)

    def begin_get_into(
        self, name: Union[str, bytes], out: "BufferProtocol", *, deadline: Optional[float] = None
    ) -> Operation[int]:
        """Begins get_into(name, out, deadline).

        Raises InvalidError, ClosedError or BusyError at once; `out` is written until the end.
        """
        core = self._core
        text = _name(name)
        limit_ms = 0 if deadline is None else deadline_ms(deadline)
        hold = Hold()
        with core.lock:
            client = core.use()
            buffer, offset, nbytes = core.place(out, True, "out", hold)
            c = _CObject(text, buffer, offset, nbytes)
            hold.kept.append(c)

            def parse(handle: int, ended: int) -> int:
                if ended == _TOO_LARGE:
                    error = TooLargeError(_text(quick.kv_op_detail(handle)) + f": {c.bytes} bytes, out has {nbytes}")
                    error.nbytes = c.bytes
                    raise error
                if ended != OK:
                    fail(core, handle, ended)
                return int(c.bytes)

            return begin(core, hold, parse, waits.kv_objects_begin, client, _GET, addressof(c), 1, limit_ms)

    def _begin_get(
        self, text: bytes, capacity: Optional[int], deadline: Optional[float]
    ) -> Operation[Union[bytes, int]]:
        """Gets into memory of the pool, `capacity` bytes or a guess: the bytes, or the size if there are more."""
        core = self._core
        limit_ms = deadline_ms(deadline)
        hold = Hold()
        with core.lock:
            client = core.use()
            block = core.staging(core.guess() if capacity is None else capacity, hold)
            c = _CObject(text, block.handle, 0, block.nbytes)
            hold.kept.append(c)

            def parse(handle: int, ended: int) -> Union[bytes, int]:
                if ended == _TOO_LARGE:
                    return int(c.bytes)
                fail(core, handle, ended)
                return ctypes.string_at(block.address, c.bytes)

            return begin(core, hold, parse, waits.kv_objects_begin, client, _GET, addressof(c), 1, limit_ms)

    def _get_steps(self, name: Union[str, bytes], deadline: Optional[float]) -> "Steps[bytes]":
        """Guesses that it is as large as others were; most are got in one round trip."""
        text = _name(name)
        core = self._core
        capacity: Optional[int] = None
        while True:
            got = yield self._begin_get(text, capacity, deadline)
            if isinstance(got, bytes):
                core.learn(len(got))
                return got
            capacity = got

    def _begin_verb(
        self, verb: int, name: Union[str, bytes], deadline: Optional[float], missing: T, found: Callable[[int], T]
    ) -> Operation[T]:
        core = self._core
        c = _CObject(_name(name))
        hold = Hold(c)
        with core.lock:
            client = core.use()

            def parse(handle: int, ended: int) -> T:
                if ended == _NOT_FOUND:
                    return missing
                fail(core, handle, ended)
                return found(c.bytes)

            return begin(
                core, hold, parse, waits.kv_objects_begin, client, verb, addressof(c), 1, deadline_ms(deadline)
            )

    def begin_exists(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> Operation[bool]:
        """Begins exists(name, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        return self._begin_verb(_EXISTS, name, deadline, False, lambda _: True)

    def begin_size(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> Operation[Optional[int]]:
        """Begins size(name, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        return self._begin_verb(_EXISTS, name, deadline, None, int)

    def begin_delete(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> Operation[bool]:
        """Begins delete(name, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        return self._begin_verb(_DELETE, name, deadline, False, lambda _: True)

    def _begin_objects(
        self,
        verb: int,
        names: Sequence[Union[str, bytes]],
        places: Sequence[Place],
        hold: Hold,
        deadline: Optional[float],
        ttl_ms: int = 0,
        evictable: bool = False,
        data: Optional[Callable[[int, int], bytes]] = None,
    ) -> Operation[List[ObjectResult]]:
        """Runs one verb on many objects.  The core is locked; `hold` has their memory."""
        core = self._core
        try:
            objects = (_CObject * max(1, len(names)))()
            for at, (c, name) in enumerate(zip(objects, names)):
                c.name = _name(name)
                c.ttl_ms, c.evictable = ttl_ms, evictable
                if places:
                    c.buffer, c.offset, c.bytes = places[at]
            hold.kept.append(objects)
            limit_ms = deadline_ms(deadline)
        except BaseException:
            hold.release(core)
            raise

        def parse(handle: int, ended: int) -> List[ObjectResult]:
            words = "" if ended == OK else _text(quick.kv_op_detail(handle))
            made = []
            for at, (name, c) in enumerate(zip(names, objects)):
                outcome = Status(c.status if c.status != Status.IN_PROGRESS else ended)
                content = data(at, c.bytes) if data is not None and outcome is Status.OK else None
                shown = name if isinstance(name, str) else _text(name)
                made.append(ObjectResult(shown, outcome, c.bytes, content, "" if outcome is Status.OK else words))
            return made

        return begin(
            core, hold, parse, waits.kv_objects_begin, core.handle, verb, addressof(objects), len(names), limit_ms
        )

    def begin_put_many(
        self,
        objects: "Iterable[Tuple[Union[str, bytes], BufferProtocol]]",
        *,
        ttl: Optional[float] = None,
        evictable: bool = False,
        deadline: Optional[float] = None,
    ) -> Operation[List[ObjectResult]]:
        """Begins put_many(objects, ttl, evictable, deadline).

        Raises InvalidError, TooLargeError, ClosedError or BusyError at once; data must not change until the end.
        """
        items = pairs("objects", objects, "(name, data)")
        ttl_ms = _ttl_ms(ttl)
        with self._core.lock:
            self._core.use()
            hold, places = self._places([data for _, data in items], False, "data")
            return self._begin_objects(
                _PUT, [name for name, _ in items], places, hold, deadline, ttl_ms, evictable
            )

    def begin_get_many_into(
        self, objects: "Iterable[Tuple[Union[str, bytes], BufferProtocol]]", *, deadline: Optional[float] = None
    ) -> Operation[List[ObjectResult]]:
        """Begins get_many_into(objects, deadline).

        Raises InvalidError, ClosedError or BusyError at once; the memory is written until the end.
        """
        items = pairs("objects", objects, "(name, memory)")
        with self._core.lock:
            self._core.use()
            hold, places = self._places([out for _, out in items], True, "out")
            return self._begin_objects(_GET, [name for name, _ in items], places, hold, deadline)

    def _places(
        self, memories: "Sequence[BufferProtocol]", writable: bool, what: str
    ) -> Tuple[Hold, List[Place]]:
        hold = Hold()
        try:
            return hold, [self._core.place(memory, writable, what, hold) for memory in memories]
        except BaseException:
            hold.release(self._core)
            raise

    def begin_exists_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> Operation[List[ObjectResult]]:
        """Begins exists_many(names, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        with self._core.lock:
            self._core.use()
            return self._begin_objects(_EXISTS, listed("names", names, "names"), [], Hold(), deadline)

    def begin_delete_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> Operation[List[ObjectResult]]:
        """Begins delete_many(names, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        with self._core.lock:
            self._core.use()
            return self._begin_objects(_DELETE, listed("names", names, "names"), [], Hold(), deadline)

    def _get_many_steps(
        self, names: Iterable[Union[str, bytes]], deadline: Optional[float]
    ) -> "Steps[List[ObjectResult]]":
        """Asks for the sizes, then gets up to 64 MiB at a time, or one larger object."""
        asked: List[ObjectResult] = yield self.begin_exists_many(names, deadline=deadline)
        results = list(asked)
        at = 0
        while at < len(asked):
            part: List[int] = []
            nbytes = 0
            while at < len(asked) and (not part or nbytes + asked[at].nbytes <= _OBJECT_BYTES_MAX):
                if asked[at].ok:
                    part.append(at)
                    nbytes += asked[at].nbytes
                at += 1
            if part:
                got = yield self._begin_get_part([asked[item] for item in part], nbytes, deadline)
                for item, result in zip(part, got):
                    results[item] = result
        return results

    def _begin_get_part(
        self, asked: List[ObjectResult], nbytes: int, deadline: Optional[float]
    ) -> Operation[List[ObjectResult]]:
        with self._core.lock:
            self._core.use()
            hold = Hold()
            block = self._core.staging(max(1, nbytes), hold)
            places, at = [], 0
            for one in asked:
                places.append(Place(block.handle, at, one.nbytes))
                at += one.nbytes

            def data(item: int, size: int) -> bytes:
                return ctypes.string_at(block.address + places[item].offset, size)

            return self._begin_objects(_GET, [one.name for one in asked], places, hold, deadline, data=data)

    def _begin_list(
        self, node: int, prefix: bytes, limit: int, deletes: bool, cursor: Any, deadline: Optional[float]
    ) -> Operation[Any]:
        core = self._core
        options = _library.CObjectListOptions(prefix=prefix or None, limit=limit, deletes=deletes)
        if cursor is not None:
            options.from_ = cursor

        def parse(handle: int, ended: int) -> Any:
            fail(core, handle, ended)
            c = quick.kv_op_object_list(handle).contents
            infos = [
                ObjectInfo(
                    _text(info.name),
                    info.bytes,
                    info.age_ms / 1000,
                    None if info.ttl_left_ms == 0xFFFFFFFFFFFFFFFF else info.ttl_left_ms / 1000,
                    info.evictable,
                    info.pinned,
                    info.bad_pieces,
                    node,
                )
                for info in c.objects[: c.n_objects]
            ]
            after = _library.CObjectCursor(c.next.thread, c.next.after, c.next.until)
            return infos, c.n_deleted, c.bytes_deleted, c.is_last, after

        with core.lock:
            client = core.use()
            return begin(
                core,
                Hold(),
                parse,
                waits.kv_object_list_begin,
                client,
                node,
                byref(options),
                deadline_ms(deadline),
            )

    def _list_steps(
        self, prefix: Union[str, bytes], node: Optional[int], limit: Optional[int], deadline: Optional[float]
    ) -> "Steps[List[ObjectInfo]]":
        text = _name(prefix) if prefix else b""
        limit = None if limit is None else number("limit", limit)
        made: List[ObjectInfo] = []
        for place in self._positions(node):
            cursor, is_last = None, False
            while not is_last and (limit is None or len(made) < limit):
                most = 0 if limit is None else min(1000, limit - len(made))
                infos, _, _, is_last, cursor = yield self._begin_list(place, text, most, False, cursor, deadline)
                made += infos
        return made

    def _delete_prefix_steps(
        self, prefix: Union[str, bytes], node: Optional[int], deadline: Optional[float]
    ) -> "Steps[Tuple[int, int]]":
        text = _name(prefix)
        n_objects = nbytes = 0
        for place in self._positions(node):
            cursor, is_last = None, False
            while not is_last:
                _, n, size, is_last, cursor = yield self._begin_list(place, text, 0, True, cursor, deadline)
                n_objects += n
                nbytes += size
        return n_objects, nbytes

    # ---- nodes -------------------------------------------------------------------------------

    def _positions(self, node: Optional[int]) -> Sequence[int]:
        with self._core.lock:
            client = self._core.use()
            n_nodes = int(quick.kv_client_n_nodes(client))
        if node is None:
            return range(n_nodes)
        return [number("node", node, 0, n_nodes - 1)]

    def nodes(self) -> List[NodeInfo]:
        """Returns a NodeInfo for each node of the list, connected or not.  Raises ClosedError."""
        made = []
        with self._core.lock:
            client = self._core.use()
            for at in range(quick.kv_client_n_nodes(client)):
                c = _library.CNodeInfo()
                quick.kv_client_node(client, at, byref(c))
                made.append(
                    NodeInfo(
                        _text(c.address),
                        _text(c.name),
                        NodeState(c.state),
                        _text(c.transport),
                        _text(c.transports),
                        _text(c.detail),
                        c.n_threads,
                        c.memory_bytes,
                        c.requests,
                        c.rows_in,
                        c.rows_out,
                        c.reconnects,
                    )
                )
        return made

    def begin_table(
        self, name: str, *, node: int = 0, deadline: Optional[float] = None
    ) -> Operation[List[Dict[str, Union[str, float]]]]:
        """Begins table(name, node, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        core = self._core
        text = text_of("table", name)

        def parse(handle: int, ended: int) -> List[Dict[str, Union[str, float]]]:
            fail(core, handle, ended)
            c = quick.kv_op_table(handle).contents
            columns = [_text(column) for column in c.columns[: c.n_columns]]
            cells = [
                cell.number if cell.text is None else _text(cell.text) for cell in c.cells[: c.n_rows * c.n_columns]
            ]
            return [
                dict(zip(columns, cells[row * c.n_columns : (row + 1) * c.n_columns])) for row in range(c.n_rows)
            ]

        with core.lock:
            client = core.use()
            return begin(
                core,
                Hold(),
                parse,
                waits.kv_table_begin,
                client,
                number("node", node),
                text,
                deadline_ms(deadline),
            )

    def begin_ping(
        self,
        node: int = 0,
        *,
        thread: int = 0,
        bytes_out: int = 0,
        bytes_back: int = 0,
        deadline: Optional[float] = None,
    ) -> Operation[float]:
        """Begins ping(node, thread, bytes_out, bytes_back, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        core = self._core

        def parse(handle: int, ended: int) -> float:
            fail(core, handle, ended)
            return float(quick.kv_op_elapsed_us(handle)) / 1e6

        with core.lock:
            client = core.use()
            return begin(
                core,
                Hold(),
                parse,
                waits.kv_ping_begin,
                client,
                number("node", node),
                number("thread", thread),
                number("bytes_out", bytes_out),
                number("bytes_back", bytes_back),
                deadline_ms(deadline),
            )

    # ---- sessions ----------------------------------------------------------------------------

    def prompt_names(self, model: Model, tokens: Any, *, extra_keys: Sequence[ExtraKey] = ()) -> List[bytes]:
        """Names the full blocks of a prompt, 128 tokens each: equal names mean equal keys and values.

        `tokens`: (n_tokens) uint32, of `model`; `extra_keys`: ExtraKey of adapters and images.  Returns
        n_tokens // 128 names of 16 bytes.  Names depend on the client's salt.  Raises InvalidError.
        """
        instance("model", model, Model)
        values = _arrays.u32_of("tokens", tokens, 1)
        n_names = len(values) // _library.BLOCK_TOKENS
        ids = (_library.CId128 * max(1, n_names))()
        extra_keys = listed("extra_keys", extra_keys, "ExtraKey")
        keys = (_library.CExtraKey * max(1, len(extra_keys)))()
        kept = []
        for to, key in zip(keys, extra_keys):
            if not isinstance(instance("extra_keys", key, ExtraKey).value, (bytes, bytearray, memoryview)):
                raise InvalidError(f"extra key: value: {shown(key.value)}: not bytes")
            text = ctypes.create_string_buffer(bytes(key.value), max(1, len(key.value)))
            kept.append(text)
            to.first_token = number("extra key: first_token", key.first_token)
            to.n_tokens = 0xFFFFFFFF if key.n_tokens is None else number("extra key: n_tokens", key.n_tokens)
            to.bytes, to.n_bytes = addressof(text), len(key.value)
        with self._core.lock:
            client = self._core.use()
            waits.kv_prompt_names(
                client, byref(model._c), addressof(values), len(values), keys, len(extra_keys), ids
            )
        return [bytes(ids[at].bytes) for at in range(n_names)]

    def begin_open_session(
        self,
        model: Model,
        *,
        names: Optional[Sequence[bytes]] = None,
        lease: float = 0.0,
        tokens_max: int = 0,
        match_blocks_max: int = 0,
        fresh: bool = False,
        deadline: Optional[float] = None,
    ) -> Operation[S]:
        """Begins open_session(model, names, lease, tokens_max, match_blocks_max, fresh, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        core = self._core
        instance("model", model, Model)
        options = _library.CSessionOptions(
            lease_ms=milliseconds("lease", lease),
            tokens_max=number("tokens_max", tokens_max),
            match_blocks_max=number("match_blocks_max", match_blocks_max),
            is_fresh=fresh,
        )
        names = None if names is None else listed("names", names, "16 bytes")
        if names:
            options.block_names = cast(ids_of(names), POINTER(_library.CId128))
            options.n_block_names = len(names)
        with core.lock:
            client = core.use()
            return begin(
                core,
                Hold(),
                session_of(core, model, self._session),
                waits.kv_open_begin,
                client,
                byref(model._c),
                byref(options),
                deadline_ms(deadline),
            )

    def begin_resume(self, ticket: Ticket, model: Model, *, deadline: Optional[float] = None) -> Operation[S]:
        """Begins resume(ticket, model, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        core = self._core
        instance("model", model, Model)
        if not isinstance(ticket, Ticket):  # a secret: not its value
            raise InvalidError(f"ticket: a {type(ticket).__name__}: not a topkv.Ticket; Ticket.from_bytes() makes one")
        c = _library.CTicket(root=number("ticket: root", ticket.root, 0, (1 << 64) - 1))
        set_id128(c.session_id, id128("ticket: session_id", ticket.session_id))
        set_id128(c.token, id128("ticket: token", ticket.token))

        def make(handle: int, of: Model, tokens: int) -> S:
            have = _library.CId128()
            quick.kv_session_fingerprint(handle, byref(have))
            if bytes(have.bytes) != of.fingerprint:
                quick.kv_session_free(handle)
                raise InvalidError(
                    f"resume: the session's model has fingerprint {bytes(have.bytes).hex()}, "
                    f"{of.name!r} has {of.fingerprint.hex()}"
                )
            return self._session(handle, of, tokens)

        with core.lock:
            client = core.use()
            return begin(
                core,
                Hold(),
                session_of(core, model, make),
                waits.kv_resume_begin,
                client,
                byref(c),
                deadline_ms(deadline),
            )

    def begin_match(self, names: Sequence[bytes], *, deadline: Optional[float] = None) -> Operation[Match]:
        """Begins match(names, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        core = self._core
        ids = ids_of(names)

        def parse(handle: int, ended: int) -> Match:
            fail(core, handle, ended)
            n = c_uint32()
            found = quick.kv_op_matches(handle, byref(n))
            return Match(
                int(quick.kv_op_tokens(handle)),
                [NodeMatch(one.node, one.tokens, one.tokens_in_memory) for one in found[: n.value]],
            )

        with core.lock:
            client = core.use()
            return begin(core, Hold(), parse, waits.kv_match_begin, client, ids, len(names), deadline_ms(deadline))

    def begin_prefix(
        self,
        verb: PrefixVerb,
        *,
        name: Optional[bytes] = None,
        session_id: Optional[bytes] = None,
        node: int = ALL_NODES,
        seconds: float = 0.0,
        deadline: Optional[float] = None,
    ) -> Operation[int]:
        """Begins prefix(verb, name, session_id, node, seconds, deadline).

        Raises InvalidError, ClosedError or BusyError at once.
        """
        core = self._core
        c = _library.CPrefix(verb=member("verb", verb, PrefixVerb), for_ms=milliseconds("seconds", seconds))
        if name is not None:
            c.name = cast(ids_of([name]), POINTER(_library.CId128))
        if session_id is not None:
            c.session_id = cast(ids_of([session_id]), POINTER(_library.CId128))

        def parse(handle: int, ended: int) -> int:
            fail(core, handle, ended)
            return int(quick.kv_op_blocks(handle))

        with core.lock:
            client = core.use()
            return begin(
                core,
                Hold(),
                parse,
                waits.kv_prefix_begin,
                client,
                number("node", node),
                byref(c),
                deadline_ms(deadline),
            )

    # ---- batches of sessions -----------------------------------------------------------------

    def begin_append_many(
        self, entries: Sequence[AppendEntry], *, deadline: Optional[float] = None
    ) -> "List[Union[Operation[None], TopKVError]]":
        """Begins append_many(entries, deadline): an Operation for each entry, or why it did not begin.

        Raises InvalidError or ClosedError at once, if an entry cannot be understood; then none has begun.
        """
        return self._begin_batch(
            AppendEntry, entries, _library.CAppendEntry, self._append_entry, waits.kv_append_begin_batch, deadline
        )

    def begin_query_many(
        self, entries: Sequence[QueryEntry], *, deadline: Optional[float] = None
    ) -> "List[Union[Operation[QueryResult], TopKVError]]":
        """Begins query_many(entries, deadline): an Operation for each entry, or why it did not begin.

        Raises InvalidError or ClosedError at once, if an entry cannot be understood; then none has begun.
        """
        return self._begin_batch(
            QueryEntry, entries, _library.CQueryEntry, self._query_entry, waits.kv_query_begin_batch, deadline
        )

    def _begin_batch(
        self,
        kind: Type[Any],
        entries: Sequence[Any],
        c_type: Any,
        fill: Callable[[Any, Any, SessionBase, Hold], Callable[[int, int], T]],
        function: Callable[..., Any],
        deadline: Optional[float],
    ) -> "List[Union[Operation[T], TopKVError]]":
        """`fill` writes an entry for the library, and returns how the result of its operation is read."""
        core = self._core
        limit_ms = deadline_ms(deadline)
        with core.lock:
            core.use()
            holds: List[Hold] = []
            parses: List[Callable[[int, int], T]] = []
            items = [instance("entries", entry, kind) for entry in listed("entries", entries, kind.__name__)]
            array = (c_type * max(1, len(items)))()
            try:
                for c, entry in zip(array, items):
                    session = self._own(entry.session)
                    holds.append(Hold(session))
                    parses.append(fill(c, entry, session, holds[-1]))
                    c.session = session._open_handle()
            except BaseException:
                for hold in holds:
                    hold.release(core)
                raise
            function(array, len(items), limit_ms)
            operations = [self._begun(c, hold, parse) for c, hold, parse in zip(array, holds, parses)]
            del core.loose[:]
            return operations

    def _append_entry(
        self, c: Any, entry: AppendEntry, session: SessionBase, hold: Hold
    ) -> Callable[[int, int], None]:
        rows = session._range(entry.token, 1, 0, None, 0, 0)
        one = session._bytes_of(rows)
        place = self._core.place(entry.data, False, "rows", hold)
        rows.n_tokens, rest = divmod(place.nbytes, one)
        if rest or not rows.n_tokens:
            raise InvalidError(f"rows: {place.nbytes} bytes: not a multiple of {one}, of one token")
        session._check_rows(entry.data, rows)
        io = session._io(place, rows, None, hold)
        hold.kept += [rows, io]
        c.rows, c.io = ctypes.pointer(rows), ctypes.pointer(io)
        return none(self._core)

    def _query_entry(
        self, c: Any, entry: QueryEntry, session: SessionBase, hold: Hold
    ) -> Callable[[int, int], QueryResult]:
        io, memory = session._query_io(entry.query, hold)
        hold.kept += [entry.query, io]
        c.query = ctypes.pointer(entry.query._c)
        if io is not None:
            c.io = ctypes.pointer(io)
        return session._query_result(entry.query, memory)

    def _own(self, session: SessionBase) -> SessionBase:
        if not isinstance(session, SessionBase):
            raise InvalidError(f"session: {shown(session)}: not a session")
        if session._core is not self._core:
            raise InvalidError("session: of another client")
        session._open_handle()
        return session

    def _begun(
        self, entry: Any, hold: Hold, parse: Callable[[int, int], T]
    ) -> Union[Operation[T], TopKVError]:
        try:
            return begun(self._core, entry.status, entry.op, hold, parse)
        except TopKVError as error:
            hold.release(self._core)
            return error


class Client(ClientBase[Session]):
    """A client of a store, with blocking calls.

    `nodes`: "HOST:PORT,NAME=HOST:PORT,...", all nodes of the store, in any order; every client must be
    given the same ones.  `transport`: "auto" (shared memory on the same host, else tcp), "tcp",
    "shm".  `net_devices`: for data, "lo,eth0"; None: those that reach the nodes.  `name`: shown in the
    nodes' tables; None: the program's name and process id.  `deadline`: seconds for operations
    that name none, at most 600.  `peer_timeout`: seconds after which a node that leaves requests
    unanswered and is silent is lost.  `tenant`: whose objects and sessions it uses.  `salt`: bytes, a secret
    that block names depend on and that never leaves the client.  `ops_max`: operations that may exist
    at once.  `poll`: how waits look for answers before they sleep: None or "adaptive", "busy", "sleep".
    `progress_thread`: a thread of the library's own renews leases and moves operations on between
    calls; then begin the puts of a session in token order.

    A client is used by one thread at a time: a second one waits until the first one's call has
    returned, up to that call's deadline, and its own deadline starts only then.  close() ends such a call.
    Open one client for each thread that is to work in parallel; pass sessions by ticket.

    A fork of the process cannot use its parent's clients: ForkedError.  It opens its own if none was open in
    its parent at the time of the fork: fork first, or start processes by spawn.

    Memory: anything with the buffer protocol, in one piece.  It is used in place, without copies, and
    must not change before the operation has ended.  After DeadlineError, UnreachableError or a
    cancel, the transport may use it a little longer: is_busy().  The client keeps it alive for so long.

    Every method raises the exception of its status (topkv.errors): DeadlineError, UnreachableError,
    CorruptError, ClosedError, InvalidError, and what it names itself.

    Opening raises InvalidError if an argument is wrong, UnreachableError if no node responds, VersionError
    if a node speaks another version of the protocol.  `with` closes the client at the end.
    """

    def __init__(
        self,
        nodes: str = "127.0.0.1:7400",
        *,
        transport: Optional[str] = None,
        net_devices: Optional[str] = None,
        name: Optional[str] = None,
        deadline: float = 5.0,
        peer_timeout: float = 2.0,
        tenant: int = 0,
        salt: Optional[bytes] = None,
        ops_max: int = 1024,
        poll: Optional[str] = None,
        progress_thread: bool = True,
    ) -> None:
        client_arguments(deadline, peer_timeout, salt)
        self._core = Core(
            nodes,
            transport=transport,
            net_devices=net_devices,
            name=name,
            deadline=deadline,
            peer_timeout=peer_timeout,
            tenant=tenant,
            salt=salt,
            ops_max=ops_max,
            poll=poll,
            progress_thread=progress_thread,
        )

    def _session(self, handle: int, model: Model, tokens: int) -> Session:
        return Session(self._core, handle, model, tokens)

    def _run(self, steps: "Steps[T]") -> T:
        try:
            operation = next(steps)
            while True:
                operation = steps.send(operation.result())
        except StopIteration as end:
            value: T = end.value
            return value

    def close(self) -> None:
        """Cancels outstanding operations and closes the client.  May be called twice.

        A call that waits, in another thread or interrupted by a signal handler which closes, raises ClosedError.
        Sessions stay in the nodes until their leases expire.  While a Buffer of the client's exists, or an
        array that shows one, its memory stays, and so does the connection.
        """
        self._core.close()

    def __enter__(self) -> "Client":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- objects -----------------------------------------------------------------------------

    def put(
        self,
        name: Union[str, bytes],
        data: "BufferProtocol",
        *,
        ttl: Optional[float] = None,
        evictable: bool = False,
        deadline: Optional[float] = None,
    ) -> None:
        """Stores an object: immutable bytes under a name.

        `name`: 1..255 bytes; `data`: bytes, numpy array, anything with the buffer protocol, at most 64 MiB.
        `ttl`: seconds until the node removes it, at most 30 days; float("inf"): never; None: the node's
        default.  `evictable`: the node may remove it when memory is short.  `deadline`: seconds.
        Putting the same bytes again succeeds, and renews the time.

        Raises ExistsError if the name has other bytes, NoMemoryError if the store is full, TooLargeError.
        """
        self.begin_put(name, data, ttl=ttl, evictable=evictable, deadline=deadline).result()

    def get(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> bytes:
        """Returns the bytes of the object `name`.  `deadline`: seconds.

        Raises NotFoundError; ConflictError if it was replaced while it was read.
        """
        return self._run(self._get_steps(name, deadline))

    def get_into(
        self, name: Union[str, bytes], out: "BufferProtocol", *, deadline: Optional[float] = None
    ) -> int:
        """Gets the object `name` into `out`, writable memory, in place.  Returns its size in bytes.

        Raises NotFoundError; TooLargeError, whose `nbytes` is the size, if it does not fit: then nothing was
        written; ConflictError if it was replaced while it was read.
        """
        return self.begin_get_into(name, out, deadline=deadline).result()

    def exists(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> bool:
        """Returns whether the object `name` exists.  `deadline`: seconds."""
        return self.begin_exists(name, deadline=deadline).result()

    def size(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> Optional[int]:
        """Returns the size of the object `name` in bytes, None if there is none.  `deadline`: seconds."""
        return self.begin_size(name, deadline=deadline).result()

    def delete(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> bool:
        """Deletes the object `name`; returns whether there was one.  One that is put meanwhile stays."""
        return self.begin_delete(name, deadline=deadline).result()

    def put_many(
        self,
        objects: "Iterable[Tuple[Union[str, bytes], BufferProtocol]]",
        *,
        ttl: Optional[float] = None,
        evictable: bool = False,
        deadline: Optional[float] = None,
    ) -> List[ObjectResult]:
        """Stores many objects in one operation: `objects`, (name, data) pairs; the rest as in put().

        Returns an ObjectResult for each, in their order: each has its own status, and none is raised.
        """
        return self.begin_put_many(objects, ttl=ttl, evictable=evictable, deadline=deadline).result()

    def get_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """Gets many objects: asks for their sizes, then for up to 64 MiB in one operation.

        Returns an ObjectResult with `data` for each of `names`: each has its own status, and none is raised.
        `deadline`: seconds, of each operation.
        """
        return self._run(self._get_many_steps(names, deadline))

    def get_many_into(
        self, objects: "Iterable[Tuple[Union[str, bytes], BufferProtocol]]", *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """Gets many objects in one operation, in place: `objects`, (name, writable memory) pairs.

        Returns an ObjectResult for each, as put_many(); one that does not fit has Status.TOO_LARGE, its
        size, and nothing written.
        """
        return self.begin_get_many_into(objects, deadline=deadline).result()

    def exists_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """Asks for many objects in one operation: `names`.  Returns an ObjectResult for each, as put_many()."""
        return self.begin_exists_many(names, deadline=deadline).result()

    def delete_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """Deletes many objects in one operation: `names`.  Returns an ObjectResult for each, as put_many()."""
        return self.begin_delete_many(names, deadline=deadline).result()

    def list_objects(
        self,
        prefix: Union[str, bytes] = "",
        *,
        node: Optional[int] = None,
        limit: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> List[ObjectInfo]:
        """Lists the tenant's objects whose names begin with `prefix`, at most `limit`, on one `node` or on all (None).

        `deadline`: seconds, for each 1,000 objects.
        """
        return self._run(self._list_steps(prefix, node, limit, deadline))

    def delete_prefix(
        self, prefix: Union[str, bytes], *, node: Optional[int] = None, deadline: Optional[float] = None
    ) -> Tuple[int, int]:
        """Deletes the tenant's objects whose names begin with `prefix`, not empty; returns (objects, bytes).

        `node`, `deadline` as in list_objects().
        """
        return self._run(self._delete_prefix_steps(prefix, node, deadline))

    # ---- nodes -------------------------------------------------------------------------------

    def table(
        self, name: str, *, node: int = 0, deadline: Optional[float] = None
    ) -> List[Dict[str, Union[str, float]]]:
        """Asks a `node`, a position in the list, for a table: one dict, column to value, for each line.

        `name`: "status", "sessions", "clients", "models", "ops", "stats", "scrub", "scrub-disk", "threads",
        "prefixes", "tenants", "reuse" or "tiers".  Raises NotFoundError if there is no such table.
        """
        return self.begin_table(name, node=node, deadline=deadline).result()

    def ping(
        self,
        node: int = 0,
        *,
        thread: int = 0,
        bytes_out: int = 0,
        bytes_back: int = 0,
        deadline: Optional[float] = None,
    ) -> float:
        """Makes a round trip to data thread `thread` of a `node`; returns its time in seconds.

        `bytes_out`, `bytes_back`: size of request and reply, at most 128 KiB each.
        """
        return self.begin_ping(
            node, thread=thread, bytes_out=bytes_out, bytes_back=bytes_back, deadline=deadline
        ).result()

    # ---- sessions ----------------------------------------------------------------------------

    def open_session(
        self,
        model: Model,
        *,
        names: Optional[Sequence[bytes]] = None,
        lease: float = 0.0,
        tokens_max: int = 0,
        match_blocks_max: int = 0,
        fresh: bool = False,
        deadline: Optional[float] = None,
    ) -> Session:
        """Creates a session for a `model`.

        `names`: of the prompt's full blocks, by prompt_names(); the session starts with the rows of the
        longest prefix that its nodes keep, Session.reused_tokens, of at most `match_blocks_max` blocks
        (0: all), or without any if `fresh`.  `lease`: seconds, 0: the nodes' maximum; `tokens_max`: 0, 16 Mi.

        Raises UnreachableError if one of its nodes is down.
        """
        return self.begin_open_session(
            model,
            names=names,
            lease=lease,
            tokens_max=tokens_max,
            match_blocks_max=match_blocks_max,
            fresh=fresh,
            deadline=deadline,
        ).result()

    def resume(self, ticket: Ticket, model: Model, *, deadline: Optional[float] = None) -> Session:
        """Opens an existing session by its `ticket`, whichever client created it; `model`: the one it was opened for.

        Raises NotFoundError if there is no such session, DeniedError if it is another tenant's, StaleError
        if a node missed too much, InvalidError if the model has another fingerprint or other layers.
        """
        return self.begin_resume(ticket, model, deadline=deadline).result()

    def match(self, names: Sequence[bytes], *, deadline: Optional[float] = None) -> Match:
        """Asks how much of a prompt is kept, without opening a session; `names`: of its full blocks."""
        return self.begin_match(names, deadline=deadline).result()

    def prefix(
        self,
        verb: PrefixVerb,
        *,
        name: Optional[bytes] = None,
        session_id: Optional[bytes] = None,
        node: int = ALL_NODES,
        seconds: float = 0.0,
        deadline: Optional[float] = None,
    ) -> int:
        """Pins, unpins or evicts a prefix, or announces its use (`verb`); returns how many blocks were found.

        `name`: of its last block, 16 bytes; None: the deepest one of the session `session_id`, 16 bytes.
        `node`: a position in the list; ALL_NODES: all of them.  `seconds`: how long to pin (0: until
        it is unpinned), or until it is used.

        Raises UnsupportedError at nodes that keep no prefixes.
        """
        return self.begin_prefix(
            verb, name=name, session_id=session_id, node=node, seconds=seconds, deadline=deadline
        ).result()

    def append_many(
        self, entries: Sequence[AppendEntry], *, deadline: Optional[float] = None
    ) -> List[Optional[TopKVError]]:
        """Appends to many sessions at once, the decode step of a batch: `entries`, AppendEntry of each.

        Returns None or the error for each, in their order.  Raises InvalidError if an entry cannot be understood.
        """
        outcomes: List[Optional[TopKVError]] = []
        for begun in self.begin_append_many(entries, deadline=deadline):
            try:
                if isinstance(begun, TopKVError):
                    raise begun
                begun.result()
                outcomes.append(None)
            except TopKVError as error:
                outcomes.append(error)
        return outcomes

    def query_many(
        self, entries: Sequence[QueryEntry], *, deadline: Optional[float] = None
    ) -> List[Union[QueryResult, TopKVError]]:
        """Queries many sessions at once, one layer of a batch: `entries`, QueryEntry of each.

        Returns the result or the error for each, in their order.  Raises InvalidError if an entry cannot be
        understood.
        """
        outcomes: List[Union[QueryResult, TopKVError]] = []
        for begun in self.begin_query_many(entries, deadline=deadline):
            try:
                if isinstance(begun, TopKVError):
                    raise begun
                outcomes.append(begun.result())
            except TopKVError as error:
                outcomes.append(error)
        return outcomes
