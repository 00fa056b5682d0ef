"""TopKV as the second level (L2) of LMCache: a client for its `native_plugin` adapter.

    {"type": "native_plugin", "module_path": "topkv.lmcache", "class_name": "LMCacheClient",
     "adapter_params": {"nodes": "127.0.0.1:7400", "dtype": "bfloat16", "chunk_size": 256}}

client/python/LMCACHE.md is the page for operators.  Keys become objects of the store, which any other process
with the same namespace finds; a node may evict them when its memory is short.

Whatever the nodes do: a submit returns at once, since it only queues; every future ends by its deadline; what
cannot be had is a miss and never an exception.  Data is verified by its CRC32C on both sides.

Supported: LMCache 0.5.6 and newer, as long as its adapter calls what LMCacheClient has.  That is checked when a
client is made inside LMCache, and refused in words.  The module needs no LMCache to be imported.
"""

import ast
import atexit
import collections
import ctypes
import inspect
import itertools
import logging
import os
import re
import sys
import threading
import time
import weakref
from typing import Any, Callable, Dict, List, NamedTuple, Optional, Sequence, Tuple

from ._library import OBJECT_TTL_MAX_MS
from ._lmcache_objects import Item, Objects, Steps, Tell, groups_of, name_of
from ._memory import View
from ._object_worker import Settings, Worker, is_refusal, open_client
from .errors import ForkedError, InvalidError

__all__ = ["LMCACHE_MIN", "LMCacheClient", "check_lmcache"]

LMCACHE_MIN = (0, 5, 6)
"""The oldest LMCache that is supported."""

_ADAPTER = "lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter"
_FACTORY = "lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter"
_REPEAT_S = 60.0  # between two messages of one kind
_CLOSE_S = 10.0  # that close() waits for a worker; it needs less than one

# (future, ok, error, a bool for each key)
Completion = Tuple[int, bool, str, Optional[List[bool]]]


# ---- parameters --------------------------------------------------------------------------------


class _Params(NamedTuple):
    nodes: str
    dtype: str
    chunk_size: int
    namespace: str = "default"
    tenant: int = 0
    transport: str = "auto"
    net_devices: Optional[str] = None
    workers: int = 2
    deadline_ms: int = 5000
    lookup_deadline_ms: int = 1000
    in_flight_mb: int = 64
    ttl_s: int = 0
    on_conflict: str = "keep"
    log_interval_s: int = 60


_BOUNDS = {
    "chunk_size": (1, 1 << 20),
    "tenant": (0, (1 << 32) - 1),
    "workers": (1, 16),
    "deadline_ms": (10, 600000),
    "lookup_deadline_ms": (10, 600000),
    "in_flight_mb": (1, 65536),
    "ttl_s": (0, OBJECT_TTL_MAX_MS // 1000),
    "log_interval_s": (0, 86400),
}
_CHOICES = {"transport": ("auto", "tcp", "shm"), "on_conflict": ("keep", "replace")}
_WORDS = {"dtype": 32, "namespace": 64}
_WORD = re.compile(r"[A-Za-z0-9_.-]+")
_NEEDED = {
    "nodes": "the nodes of the store, HOST:PORT,HOST:PORT,...",
    "dtype": "the type of the KV cache, which LMCache's keys do not have: bfloat16, fp8_e4m3, ...",
    "chunk_size": "LMCache's chunk size in tokens, which its keys do not have: 256 by default",
}


def _refuse(name: str, value: object, why: str) -> ValueError:
    return ValueError(f"topkv.lmcache: adapter_params: {name}: {value!r}: {why}")


def _check_params(given: Dict[str, Any]) -> _Params:
    for name in given:
        if name not in _Params._fields:
            known = ", ".join(_Params._fields)
            raise ValueError(
                f"topkv.lmcache: adapter_params: {name}: unknown parameter; there are {known}"
            )
    for name, what in _NEEDED.items():
        if name not in given:
            raise ValueError(f"topkv.lmcache: adapter_params: {name}: missing: {what}")
    for name, value in given.items():
        if name in _BOUNDS:
            least, most = _BOUNDS[name]
            if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
                raise _refuse(name, value, f"must be a whole number from {least} to {most}")
        elif name == "net_devices" and value is None:
            pass
        elif not isinstance(value, str) or not value or "\0" in value:
            raise _refuse(name, value, "must be text")
        elif name in _CHOICES and value not in _CHOICES[name]:
            raise _refuse(name, value, f"must be one of {', '.join(_CHOICES[name])}")
        elif name in _WORDS and not (_WORD.fullmatch(value) and len(value) <= _WORDS[name]):
            raise _refuse(
                name, value, f"must be 1 to {_WORDS[name]} letters, digits, '_', '.' or '-'"
            )
    params = _Params(**given)
    if params.lookup_deadline_ms > params.deadline_ms:
        raise _refuse(
            "lookup_deadline_ms",
            params.lookup_deadline_ms,
            f"must be at most deadline_ms, {params.deadline_ms}",
        )
    return params


# ---- versions ----------------------------------------------------------------------------------


def _version_of(text: str) -> Tuple[int, ...]:
    found = re.match(r"\d+(\.\d+)*", text)
    return tuple(int(part) for part in found.group().split(".")) if found else ()


def _calls_of_client(tree: ast.AST) -> "List[Tuple[str, int, List[str], int]]":
    """Returns what an adapter calls on its client: (method, positional, keywords, line)."""
    calls = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Attribute):
            continue
        owner = node.func.value
        is_client = isinstance(owner, ast.Attribute) and owner.attr == "_client"
        if is_client or (isinstance(owner, ast.Name) and owner.id == "native_client"):
            keywords = [keyword.arg or "**" for keyword in node.keywords]
            calls.append((node.func.attr, len(node.args), keywords, node.lineno))
    return calls


def _check_source(path: str, client: type) -> Optional[str]:
    """Returns why an adapter's source does not fit the client; None if it does."""
    with open(path, encoding="utf-8") as file:
        tree = ast.parse(file.read(), path)
    for method, n_args, keywords, line in _calls_of_client(tree):
        function = getattr(client, method, None)
        where = f"{os.path.basename(path)}:{line}"
        if not callable(function):
            return f"{where}: it calls {method}(), which this version does not know"
        try:
            inspect.signature(function).bind(
                None, *[None] * n_args, **{keyword: None for keyword in keywords}
            )
        except TypeError as error:
            return f"{where}: it calls {method}() otherwise: {error}"
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and isinstance(node.iter, ast.Name) and isinstance(node.target, ast.Tuple):
            n = len(node.target.elts)
            if node.iter.id == "completions" and n != 4:
                return f"{os.path.basename(path)}:{node.lineno}: a completion has {n} fields, not 4"
        elif isinstance(node, ast.Assign) and isinstance(node.value, ast.List):
            if [getattr(target, "id", "") for target in node.targets] != ["required_methods"]:
                continue
            for name in [getattr(element, "value", None) for element in node.value.elts]:
                if not callable(getattr(client, str(name), None)):
                    return f"{os.path.basename(path)}:{node.lineno}: it needs {name}()"
    return None


def check_lmcache(version: str, sources: Sequence[str], client: Optional[type] = None) -> None:
    """Checks that a version of LMCache fits.

    version: "0.5.6".  sources: the paths of its adapters' modules (_ADAPTER, _FACTORY).  client: the class
    that they would use, LMCacheClient by default.

    Raises RuntimeError, which says what does not fit.
    """
    least = ".".join(map(str, LMCACHE_MIN))
    if _version_of(version) < LMCACHE_MIN:
        raise RuntimeError(f"topkv.lmcache: LMCache {version}: supported are {least} and newer")
    for path in sources:
        why = _check_source(path, client or LMCacheClient)
        if why is not None:
            raise RuntimeError(
                f"topkv.lmcache: LMCache {version}: its interface to native plugins is another one: {why}"
            )


def _check_caller() -> None:
    """Checks the LMCache that is loaded in this process, if any."""
    module = sys.modules.get("lmcache")
    if module is None:
        return
    sources = []
    for name in (_ADAPTER, _FACTORY):
        path = getattr(sys.modules.get(name), "__file__", None)
        if path is not None and path.endswith(".py") and os.path.isfile(path):
            sources.append(path)
    check_lmcache(str(getattr(module, "__version__", "unknown")), sources)


def _make_logger() -> logging.Logger:
    """LMCache's way to log if it is loaded, since it configures each logger by name."""
    init = getattr(sys.modules.get("lmcache.logging"), "init_logger", None)
    made = init(__name__) if callable(init) else logging.getLogger(__name__)
    return made if isinstance(made, logging.Logger) else logging.getLogger(__name__)


# ---- the client --------------------------------------------------------------------------------


_nothing = ctypes.create_string_buffer(1)  # where data of no bytes is
def _view_of(buffer: Any, verb: str) -> View:
    """A hold on a caller's memory.  Raises BufferError if it is not in one piece, or not writable for a load."""
    try:
        return View(buffer, verb == "load", f"{verb}: buffer")
    except InvalidError as error:
        raise BufferError(f"topkv.lmcache: {error}") from None


_FlowOf = Callable[[List[Item], float, Tell], Steps]


class _Batch:
    """A future: the keys of one submit, and what is known of them."""

    __slots__ = ("id", "verb", "oks", "left", "error", "views")

    def __init__(self, number: int, verb: str, n_keys: int, views: Any) -> None:
        self.id = number
        self.verb = verb
        self.oks = [False] * n_keys
        self.left = n_keys
        self.error = ""
        self.views = views  # keep the memory where it is


class LMCacheClient:
    """What LMCache's `native_plugin` adapter drives.

    Parameters (adapter_params; client/python/LMCACHE.md has the table): nodes, dtype and chunk_size are
    needed; namespace, tenant, transport, net_devices, workers, deadline_ms, lookup_deadline_ms,
    in_flight_mb, ttl_s, on_conflict and log_interval_s have defaults.

    Connects at once, and waits two seconds for it at most.  If no node responds, everything is a miss until
    one does.  Raises ValueError for a wrong parameter, RuntimeError if a node speaks another protocol or
    LMCache is not supported.

    Any thread may call any method.  A process that was forked from the one that made the client may not use
    it, nor make another one: both raise RuntimeError there.
    """

    def __init__(self, **adapter_params: Any) -> None:
        params = _check_params(adapter_params)
        if not hasattr(os, "eventfd"):
            version = ".".join(map(str, sys.version_info[:3]))
            raise RuntimeError(f"topkv.lmcache: Python {version}: needs 3.10 or newer")
        _check_caller()
        self._params = params
        self._logger = _make_logger()
        self._logged: Dict[str, Tuple[float, int]] = {}
        self._log_lock = threading.Lock()
        self._pid = os.getpid()
        self._prefix = f"lmcache:{params.namespace}:{params.dtype}:{params.chunk_size}:".encode()
        self._ids = itertools.count(1)
        self._lock = threading.Lock()  # of the three below, and of what batches know
        self._completions: List[Completion] = []
        self._batches: Dict[int, _Batch] = {}
        self._is_closed = False
        self._closing = threading.Lock()  # whoever closes second waits for the first
        self._turn = 0
        self._report_at = time.monotonic() + params.log_interval_s
        self._reported: Dict[str, int] = {}

        settings = [self._settings(i) for i in range(params.workers)]
        try:
            first, status, detail = open_client(settings[0])
        except ForkedError as error:
            raise RuntimeError(f"topkv.lmcache: {error}") from None
        if first is None and is_refusal(status):
            raise RuntimeError(f"topkv.lmcache: adapter_params: nodes: {params.nodes!r}: {detail}")
        if first is None:
            self._log("unreachable", f"not connected, all is a miss until then: {detail}")
        self._event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._workers = [
            Worker(settings[i], first if i == 0 else None, self._log) for i in range(params.workers)
        ]
        replaces = params.on_conflict == "replace"
        self._objects = [Objects(worker, self._prefix, replaces) for worker in self._workers]
        for worker in self._workers:
            worker.start()
        atexit.register(_close_at_exit, weakref.ref(self))

    def _settings(self, number: int) -> Settings:
        params = self._params
        return Settings(
            nodes=params.nodes,
            transport=params.transport,
            net_devices=params.net_devices,
            tenant=params.tenant,
            name=f"lmcache/{params.namespace}/{os.getpid()}.{number}",
            deadline_s=params.deadline_ms / 1000,
            lookup_s=params.lookup_deadline_ms / 1000,
            in_flight_bytes=max(1, (params.in_flight_mb << 20) // params.workers),
            ttl_ms=params.ttl_s * 1000,
        )

    # ---- LMCache's interface -------------------------------------------------------------------

    def event_fd(self) -> int:
        """Returns an eventfd that is readable when drain_completions() has something; -1 after close()."""
        return self._event_fd

    def submit_batch_set(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Begins to store buffers[i], any contiguous buffer, under keys[i].  Returns the future's number.

        The future is all or nothing: ok if every key is stored, by whomever.  The buffers stay as they are
        until it ends.
        """
        return self._submit_data("store", keys, buffers)

    def submit_batch_get(self, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        """Begins to load keys[i] into buffers[i], which is writable.  Returns the future's number.

        The future has a bool for each key: whether the buffer has the data.  Data of another length than
        the buffer's is a miss; of a miss, the buffer's content is undefined.
        """
        return self._submit_data("load", keys, buffers)

    def submit_batch_exists(self, keys: Sequence[str]) -> int:
        """Begins to look up keys.  Returns the number of a future that has a bool for each."""
        return self._submit("lookup", keys, None, self._params.lookup_deadline_ms / 1000)

    def submit_batch_delete(self, keys: Sequence[str]) -> int:
        """Begins to delete keys.  Returns the number of a future: a bool for each key, whether it was there."""
        return self._submit("delete", keys, None, self._params.deadline_ms / 1000)

    def drain_completions(self) -> List[Completion]:
        """Returns the futures that have ended since the last call: (number, ok, error, bools or None)."""
        if os.getpid() != self._pid:
            return []  # the parent's; its lock may be held for ever here
        with self._lock:
            if self._event_fd >= 0:
                try:
                    os.eventfd_read(self._event_fd)
                except BlockingIOError:
                    pass
            done, self._completions = self._completions, []
        return done

    def close(self) -> None:
        """Ends what is under way, and the threads.  After it, nobody touches the buffers.

        Futures that have not ended end as misses, and as stores that failed.  Returns within a second or
        so whatever the nodes do.  Closing twice is allowed.
        """
        if os.getpid() != self._pid:
            return  # the threads and the clients are the parent's
        with self._closing:
            with self._lock:
                if self._is_closed:
                    return
                self._is_closed = True
            self._close()

    def _close(self) -> None:
        self._report()
        for worker in self._workers:
            worker.stop()
        for worker in self._workers:
            worker.join(_CLOSE_S)
        for worker in self._workers:
            if worker.is_alive():
                self._logger.error("topkv: close: a worker did not end in %g s", _CLOSE_S)
                return
            worker.free()
        with self._lock:
            fd, self._event_fd = self._event_fd, -1
        os.close(fd)

    # ---- watching it ---------------------------------------------------------------------------

    def stats(self) -> Dict[str, int]:
        """Returns counters since the start, and gauges.

        Counters, in keys: lookups_hit, lookups_missed, loads, loads_missed, loads_of_other_length (of the
        missed), stores, stores_failed, stores_kept (the key had other bytes, which stay), stores_replaced (of stores),
        deletes, deletes_missed; expired (not begun before the deadline), skipped (no node had responded
        lately); status_NAME, objects that an operation ended for with that status.  In bytes:
        loaded_bytes, stored_bytes.  Also client_resets, reconnects, internal_errors.  Gauges: workers,
        connected (workers with a node), pending_batches, pending_keys.

        Raises RuntimeError in a process that was forked from the client's.
        """
        self._check_process()
        total: "collections.Counter[str]" = collections.Counter(dict.fromkeys(_COUNTERS, 0))
        for worker in self._workers:
            total.update(dict(worker.counts))
        with self._lock:
            batches = list(self._batches.values())
        total["workers"] = len(self._workers)
        total["connected"] = sum(worker.is_connected for worker in self._workers)
        total["pending_batches"] = len(batches)
        total["pending_keys"] = sum(batch.left for batch in batches)
        return dict(total)

    def _log(self, kind: str, text: str) -> None:
        """Logs trouble, at most once in a minute of each kind."""
        with self._log_lock:
            now = time.monotonic()
            last, n_left_out = self._logged.get(kind, (-_REPEAT_S, 0))
            if now - last < _REPEAT_S:
                self._logged[kind] = (last, n_left_out + 1)
                return
            self._logged[kind] = (now, 0)
        more = f" (and {n_left_out} like it before)" if n_left_out else ""
        self._logger.warning("topkv: %s%s", text, more)

    def _report(self) -> None:
        """Logs what has changed of the counters."""
        stats = self.stats()
        changed = [
            f"{name} +{value - self._reported.get(name, 0)}"
            for name, value in stats.items()
            if name not in _GAUGES and value != self._reported.get(name, 0)
        ]
        self._reported = stats
        if changed:
            gauges = [f"{name} {stats[name]}" for name in _GAUGES]
            self._logger.info("topkv: %s", ", ".join(changed + gauges))

    # ---- futures -------------------------------------------------------------------------------

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"topkv.lmcache: this process, {os.getpid()}, was forked from {self._pid}, which has the"
                " client: start processes by spawn, or make the client after the fork"
            )

    def _check_usable(self) -> None:
        self._check_process()
        if self._is_closed:
            raise RuntimeError("topkv.lmcache: the client is closed")

    def _submit_data(self, verb: str, keys: Sequence[str], buffers: Sequence[Any]) -> int:
        if len(keys) != len(buffers):
            raise ValueError(f"topkv.lmcache: {verb}: {len(keys)} keys and {len(buffers)} buffers")
        return self._submit(verb, keys, buffers, self._params.deadline_ms / 1000)

    def _submit(
        self, verb: str, keys: Sequence[str], buffers: Optional[Sequence[Any]], deadline_s: float
    ) -> int:
        self._check_usable()
        now = time.monotonic()
        if buffers is None:
            views = None
            items = [Item(i, name_of(self._prefix, key)) for i, key in enumerate(keys)]
        else:
            views = [_view_of(buffer, verb) for buffer in buffers]
            items = [
                Item(i, name_of(self._prefix, key), view.address or ctypes.addressof(_nothing), view.nbytes)
                for i, (key, view) in enumerate(zip(keys, views))
            ]
        batch = _Batch(next(self._ids), verb, len(items), views)
        with self._lock:
            self._batches[batch.id] = batch
            first = self._turn
            self._turn += 1
        if not items:
            self._complete(batch)
        groups = groups_of(items) if views is not None else [items]
        tell = self._teller(batch)
        for turn, group in enumerate(groups if items else [], first):
            i = turn % len(self._workers)
            flow: _FlowOf = getattr(self._objects[i], verb)
            if not self._workers[i].submit(self._guarded(flow, group, now + deadline_s, tell)):
                tell([(item.position, False) for item in group], "the client is closed")
        interval = self._params.log_interval_s
        if interval and now >= self._report_at:
            self._report_at = now + interval
            self._report()
        return batch.id

    def _guarded(self, flow: _FlowOf, group: List[Item], deadline: float, tell: Tell) -> Steps:
        """A flow that tells of every key, even if it has a mistake: no future may stay open for one."""
        left = {item.position for item in group}

        def noted(keys: Sequence[Tuple[int, bool]], error: str) -> None:
            left.difference_update(position for position, _ in keys)
            tell(keys, error)

        try:
            yield from flow(group, deadline, noted)
        except Exception as error:
            self._log("internal", f"internal error: {error!r}")
        finally:
            if left:
                tell([(position, False) for position in left], "internal error")

    def _teller(self, batch: _Batch) -> Tell:
        def tell(keys: Sequence[Tuple[int, bool]], error: str) -> None:
            with self._lock:
                for index, ok in keys:
                    batch.oks[index] = ok
                batch.error = batch.error or error
                batch.left -= len(keys)
                is_last = batch.left == 0
            if is_last:
                self._complete(batch)

        return tell

    def _complete(self, batch: _Batch) -> None:
        n_bad = batch.oks.count(False)
        done: Completion
        if batch.verb == "store":
            why = f"{n_bad} of {len(batch.oks)} keys not stored: {batch.error}" if n_bad else ""
            done = (batch.id, n_bad == 0, why, None)
        elif batch.verb == "load":
            # Not ok, since callers that want one answer for all keys must not take a miss for data.
            why = f"{n_bad} of {len(batch.oks)} keys not loaded: {batch.error}" if n_bad else ""
            done = (batch.id, n_bad == 0, why, batch.oks)
        else:
            done = (batch.id, True, "", batch.oks)
        batch.views = None
        with self._lock:
            del self._batches[batch.id]
            self._completions.append(done)
            if self._event_fd >= 0:
                os.eventfd_write(self._event_fd, 1)


_COUNTERS = (
    "lookups_hit", "lookups_missed", "loads", "loads_missed", "loads_of_other_length", "loaded_bytes",
    "stores", "stores_failed", "stores_kept", "stores_replaced", "stored_bytes", "deletes",
    "deletes_missed", "expired", "skipped", "client_resets", "reconnects",
    "internal_errors",
)  # fmt: skip
_GAUGES = ("workers", "connected", "pending_batches", "pending_keys")


def _close_at_exit(reference: "weakref.ref[LMCacheClient]") -> None:
    client = reference()
    if client is not None:
        client.close()
