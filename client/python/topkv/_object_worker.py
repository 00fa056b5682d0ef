"""A thread that owns a client and moves objects for others, who never wait for it.

Work comes as flows: generators that yield lists of calls and are resumed when all of these have ended.
A call is one kv_objects_begin(); its results are in the call.

    def flow(worker):
        call = Call(ObjectVerb.EXISTS, [b"a", b"b"], deadline=time.monotonic() + 1.0)
        yield [call]
        for status, size in call.results: ...

Threads: start(), submit(), stop() and counts may be used from any thread, the rest belongs to the worker's.
Memory: a call's memory is the caller's.  It is not read or written any more once the call has ended, whatever
its results are: data for a node on the same host is copied to a buffer that the node reads; what comes from a
node is written in place, and a call whose memory the transport may still write to does not end before that is
over, or before the client is closed.
"""

import collections
import ctypes
import itertools
import os
import select
import threading
import time
from typing import Any, Callable, Deque, Dict, Generator, List, NamedTuple, Optional, Set, Tuple

from . import _library
from ._core import process
from ._library import CClientOptions, CNodeInfo, CObject, NodeState, ObjectVerb, Status, quick, waits

Flow = Generator[List["Call"], None, None]  # must not raise; may be closed instead of resumed
Log = Callable[[str, str], None]

_ALIGN = 64  # bytes, of objects that share a buffer
_SLOT_MIN = 64 << 10
_OPEN_MS = 2000  # that one try to connect may take
_RETRY_MIN_S, _RETRY_MAX_S = 0.1, 2.0
_SLICE_S = 0.001  # between two looks at memory that the transport may still use
_LOOK_S = 5.0  # between two looks at how nodes are connected
_EXPIRE_S = 0.01  # between two looks at the deadlines of calls that wait
_PATIENCE_MIN_S = 0.02
_EXPIRED = "not begun before its deadline"
_ENDS = {Status.DEADLINE, Status.UNREACHABLE, Status.CANCELLED}
_ANSWERS = {Status.OK, Status.NOT_FOUND, Status.EXISTS, Status.TOO_LARGE}
_REFUSALS = {Status.INVALID, Status.VERSION, Status.UNSUPPORTED, Status.DENIED}


class Settings(NamedTuple):
    """What a worker needs to know."""

    nodes: str
    transport: str
    net_devices: Optional[str]
    tenant: int
    name: str  # of the client, in `kvctl clients`
    deadline_s: float  # of stores, loads and deletes
    lookup_s: float  # of lookups
    in_flight_bytes: int  # of this worker, under way or copied for a node
    ttl_ms: int  # of objects; 0: the node's default


class Call:
    """One verb on objects.  `results` has a (status, bytes) for each when the call has ended.

    addresses, sizes: of PUT and GET, memory of the caller's that stays as it is until then; GET: `sizes`
    are capacities, and `bytes` is the object's size.
    """

    __slots__ = (
        "verb", "names", "addresses", "sizes", "deadline", "results", "detail",
        "flow", "bytes", "objects", "buffers", "slot",
    )  # fmt: skip

    def __init__(
        self,
        verb: ObjectVerb,
        names: List[bytes],
        deadline: float,
        addresses: Optional[List[int]] = None,
        sizes: Optional[List[int]] = None,
    ) -> None:
        self.verb = verb
        self.names = names
        self.addresses = addresses or []
        self.sizes = sizes or []
        self.deadline = deadline
        self.results: List[Tuple[int, int]] = []
        self.detail = ""
        self.bytes = sum(self.sizes)
        self.flow: Optional[_Running] = None
        self.objects: Any = None
        self.buffers: List[int] = []
        self.slot: Optional[_Slot] = None


class _Running:
    """A flow and how many of its calls have not ended."""

    __slots__ = ("generator", "left")

    def __init__(self, generator: Flow) -> None:
        self.generator = generator
        self.left = 0


class _Slot:
    """A buffer that a node on the same host reads directly."""

    __slots__ = ("buffer", "address", "bytes", "since")

    def __init__(self, buffer: int, address: int, size: int) -> None:
        self.buffer = buffer
        self.address = address
        self.bytes = size
        self.since = 0.0


class _Pool:
    """Buffers of kv_buffer_alloc(), used again, at most `limit` bytes or one buffer in all."""

    def __init__(self, client: int, limit: int) -> None:
        self.client = client
        self.limit = limit
        self.bytes = 0
        self.idle: Dict[int, List[_Slot]] = {}
        self.busy: List[_Slot] = []  # given back while the transport may still read them

    @staticmethod
    def _rounded(size: int) -> int:
        if size > 1 << 20:
            return (size + (2 << 20) - 1) // (2 << 20) * (2 << 20)
        return max(_SLOT_MIN, 1 << (size - 1).bit_length())

    def take(self, size: int) -> "Tuple[int, Optional[_Slot]]":
        """Returns a slot; None: there is no room now (BUSY), or the library has refused it (its status)."""
        size = self._rounded(size)
        idle = self.idle.get(size)
        if idle:
            return Status.OK, idle.pop()
        if self.bytes > 0 and self.bytes + size > self.limit:
            self._drop_idle()
            if self.bytes > 0 and self.bytes + size > self.limit:
                return Status.BUSY, None
        buffer = ctypes.c_void_p()
        status: int = waits.kv_buffer_alloc(self.client, size, ctypes.byref(buffer))
        if status != Status.OK or buffer.value is None:
            return status, None
        self.bytes += size
        return Status.OK, _Slot(buffer.value, quick.kv_buffer_data(buffer), size)

    def give(self, slot: _Slot, now: float) -> None:
        if quick.kv_buffer_busy(slot.buffer):
            slot.since = now
            self.busy.append(slot)
        else:
            self.idle.setdefault(slot.bytes, []).append(slot)

    def look(self) -> None:
        """Takes back the slots that the transport does not read any more."""
        if self.busy:
            busy, self.busy = self.busy, []
            for slot in busy:
                self.give(slot, slot.since)

    def _drop_idle(self) -> None:
        for slots in self.idle.values():
            for slot in slots:
                waits.kv_buffer_free(slot.buffer)
                self.bytes -= slot.bytes
        self.idle.clear()


_numbers = itertools.count(1)
_opens: Dict[int, int] = {}  # clients, and as what the process knows them


def close_client(client: Optional[int]) -> None:
    """Closes a client; None is allowed."""
    if client is not None:
        waits.kv_client_close(client)
        process.open.discard(_opens.pop(client))


def open_client(settings: Settings) -> "Tuple[Optional[int], int, str]":
    """Opens a client and waits for it, two seconds or so at most.  Returns it, or None, a status and why.

    Raises ForkedError in a process that was forked from one that had clients open.
    """
    process.check()
    number = -next(_numbers)  # those of others are positive
    process.open.add(number)
    options = CClientOptions(
        nodes=settings.nodes.encode(),
        transport=settings.transport.encode(),
        net_devices=settings.net_devices.encode() if settings.net_devices else None,
        name=settings.name.encode(),
        deadline_ms=_OPEN_MS,
        tenant=settings.tenant,
    )
    client = ctypes.c_void_p()
    detail = ctypes.create_string_buffer(1024)
    status: int = waits.kv_client_open(
        ctypes.byref(options), ctypes.byref(client), detail, len(detail)
    )
    if client.value is None:
        process.open.discard(number)
    else:
        _opens[client.value] = number
    return client.value, status, detail.value.decode(errors="replace")


def is_refusal(status: int) -> bool:
    """Whether an open failed for good: the options are wrong, or the node is another program's."""
    return status in _REFUSALS


class Worker(threading.Thread):
    """The thread.  `client` is one that is open already, or None: then the worker opens one."""

    def __init__(self, settings: Settings, client: Optional[int], log: Log) -> None:
        super().__init__(name=settings.name, daemon=True)
        self.counts: "collections.Counter[str]" = collections.Counter()
        self.is_connected = client is not None
        self._settings = settings
        self.log = log
        self._inbox: Deque[Flow] = collections.deque()
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._stopping = False
        self._has_ended = False
        self._handover = threading.Lock()  # of _inbox and _opened, and of whether anybody takes them
        self._opened: "Optional[Tuple[Optional[int], int, str]]" = None
        self._opening = False
        self._has_tried = client is not None
        self._retry_at = 0.0
        self._retry_s = _RETRY_MIN_S
        self._skip_until = 0.0
        self._skip_s = _RETRY_MIN_S
        self._patience_s = settings.lookup_s
        self._looked_at = 0.0
        self._client: Optional[int] = None
        self._pool: Optional[_Pool] = None
        self._is_shared = False
        self._poller = select.poll()
        self._poller.register(self._wake_fd, select.POLLIN)
        self._client_fd = -1
        self._timeout_us = ctypes.c_uint64()
        self._in_flight = 0  # bytes
        self._calls: Dict[int, Call] = {}  # begun, by the number that their operations have
        self._ops: Dict[int, int] = {}
        self._n_calls = 0
        # For room, in their order: those without data, and those with some.
        self._waiting: Tuple[Deque[Call], Deque[Call]] = (collections.deque(), collections.deque())
        self._expired_at = 0.0
        self._held: List[Call] = []  # ended, but for their memory
        self._ready: Deque[_Running] = collections.deque()
        self._flows: Set[_Running] = set()  # all that have not ended
        if client is not None:
            self._adopt(client)

    # ---- from any thread -----------------------------------------------------------------------

    def submit(self, flow: Flow) -> bool:
        """Has the worker run a flow.  Returns at once; false: the worker has ended and takes none."""
        with self._handover:
            if self._has_ended:
                return False
            self._inbox.append(flow)
            os.eventfd_write(self._wake_fd, 1)
        return True

    def stop(self) -> None:
        """Has the worker end what it does, and itself.  Calls under way end with CANCELLED."""
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)

    def free(self) -> None:
        """Closes the descriptor.  After the thread has ended."""
        os.close(self._wake_fd)

    # ---- the loop ------------------------------------------------------------------------------

    def run(self) -> None:
        while not self._stopping:
            try:
                self._step()
            except Exception as error:
                # A mistake, which must not leave futures open.
                self.counts["internal_errors"] += 1
                self.log("internal", f"internal error: {error!r}")
                self._abandon()
        self._shut()

    def _abandon(self) -> None:
        """Closes the client, and all flows with it."""
        if self._client is not None:
            self._reset("an internal error")
        flows, self._flows = self._flows, set()
        self._ready.clear()
        for queue in self._waiting:
            queue.clear()
        for running in flows:
            running.generator.close()

    def _step(self) -> None:
        while self._inbox:
            self._start_flow(self._inbox.popleft())
        if self._client is None:
            self._connect()
        else:
            self._move()
        self._begin_waiting()
        if not self._inbox and not self._stopping:
            self._sleep()

    def _sleep(self) -> None:
        now = time.monotonic()
        until = now + 1.0
        if self._client is not None:
            if not quick.kv_client_arm(self._client, ctypes.byref(self._timeout_us)):
                return
            until = min(until, now + self._timeout_us.value / 1e6)
            if self._held or (self._pool is not None and self._pool.busy):
                until = min(until, now + _SLICE_S)
        elif not self._opening:
            until = min(until, self._retry_at)
        if any(self._waiting):
            until = min(until, now + _EXPIRE_S)
        for fd, _ in self._poller.poll(max(0, int((until - now) * 1000) + 1)):
            if fd == self._wake_fd:
                os.eventfd_read(self._wake_fd)

    def _move(self) -> None:
        client = self._client
        waits.kv_poll(client)
        while True:
            op = quick.kv_client_next_ended(client)
            if op is None:
                break
            self._op_ended(op)
        now = time.monotonic()
        if now - self._looked_at > _LOOK_S:
            self._look(now)
        held, self._held = self._held, []
        for call in held:
            self._settle(call)
        pool = self._pool
        assert pool is not None
        pool.look()
        if any(now >= call.deadline for call in self._held):
            self._reset("the transport holds memory of an operation that has ended")
        elif any(now - slot.since > self._settings.deadline_s for slot in pool.busy):
            self._reset("the transport holds memory of a store that has ended")

    def _start_flow(self, flow: Flow) -> None:
        running = _Running(flow)
        self._flows.add(running)
        self._resume(running)

    def _resume(self, running: _Running) -> None:
        """Moves a flow to its next calls and begins them."""
        try:
            calls = next(running.generator)
        except StopIteration:
            self._flows.discard(running)
            return
        running.left = len(calls)
        if not calls:
            self._ready.append(running)
        for call in calls:
            call.flow = running
            queue = self._waiting[call.bytes > 0]
            if queue or not self._try(call):
                queue.append(call)

    def _end(self, call: Call) -> None:
        call.objects = None
        running = call.flow
        assert running is not None
        running.left -= 1
        if running.left == 0:
            self._ready.append(running)

    def _fail(self, call: Call, status: int, detail: str, count: Optional[str] = None) -> None:
        """Ends a call that was not begun."""
        call.results = [(status, 0)] * len(call.names)
        call.detail = detail
        if count is not None:
            self.counts[count] += len(call.names)
        self._end(call)

    # ---- calls ---------------------------------------------------------------------------------

    def _begin_waiting(self) -> None:
        while self._ready:
            self._resume(self._ready.popleft())
        self._expire()
        # Where the first has no room the others wait, too: a large one would never find it otherwise, and
        # there may be many thousands.
        for queue in self._waiting:
            while queue and self._try(queue[0]):
                queue.popleft()
        while self._ready:
            self._resume(self._ready.popleft())

    def _expire(self) -> None:
        """Ends calls that have waited until their deadlines, wherever they are in their queues."""
        now = time.monotonic()
        if now < self._expired_at + _EXPIRE_S or not any(self._waiting):
            return
        self._expired_at = now
        for queue in self._waiting:
            if any(now >= call.deadline for call in queue):
                calls = list(queue)
                queue.clear()
                for call in calls:
                    if now < call.deadline:
                        queue.append(call)
                    else:
                        self._fail(call, Status.DEADLINE, _EXPIRED, "expired")

    def _try(self, call: Call) -> bool:
        """Begins a call, or ends it if that cannot be.  Returns false if it has to wait."""
        now = time.monotonic()
        left_s = call.deadline - now
        if self._stopping:
            self._fail(call, Status.CANCELLED, "the plugin is being closed")
        elif left_s <= 0:
            self._fail(call, Status.DEADLINE, _EXPIRED, "expired")
        elif self._client is None and not self._has_tried:
            return False
        elif self._client is None or now < self._skip_until:
            self._fail(call, Status.UNREACHABLE, "no node responds", "skipped")
        elif call.bytes and self._in_flight and self._in_flight + call.bytes > self._settings.in_flight_bytes:
            return False
        else:
            return self._start(call, left_s)
        return True

    def _start(self, call: Call, left_s: float) -> bool:
        client = self._client
        objects = (CObject * len(call.names))()
        has_data = call.verb in (ObjectVerb.PUT, ObjectVerb.GET)
        status: int = Status.OK
        if has_data and call.verb == ObjectVerb.PUT and self._is_shared and call.bytes:
            status = self._copy(call, objects)
        elif has_data:
            status = self._map(call, objects)
        for entry, name in zip(objects, call.names):
            entry.name = name
        if call.verb == ObjectVerb.PUT:
            for entry in objects:
                entry.ttl_ms = self._settings.ttl_ms
                entry.evictable = True
        op = ctypes.c_void_p()
        if status == Status.OK:
            # Some of the time is left for a transport that holds memory longer than the operation.
            limit_s = left_s - min(0.25, left_s / 4)
            if call.verb == ObjectVerb.EXISTS:
                limit_s = min(limit_s, self._patience_s)
            status = waits.kv_objects_begin(
                client, call.verb, objects, len(objects), max(1, int(limit_s * 1000)), ctypes.byref(op)
            )
        if status != Status.OK or op.value is None:
            detail = quick.kv_client_detail(client).decode(errors="replace")
            self._release(call)
            if status == Status.BUSY:
                return False
            self._fail(call, status, detail, "status_" + _library.status_name(status))
            self.log(_library.status_name(status), f"{call.verb.name.lower()}: {detail}")
            return True
        self._n_calls += 1
        self._calls[self._n_calls] = call
        self._ops[self._n_calls] = op.value
        quick.kv_op_set_user(op, self._n_calls)
        call.objects = objects
        self._in_flight += call.bytes
        return True

    def _copy(self, call: Call, objects: Any) -> int:
        """Copies the data to where a node on the same host reads it."""
        pool = self._pool
        assert pool is not None
        offsets, total = [], 0
        for size in call.sizes:
            offsets.append(total)
            total += (size + _ALIGN - 1) // _ALIGN * _ALIGN
        status, slot = pool.take(total)
        if slot is None:
            return status
        call.slot = slot
        for entry, offset, address, size in zip(objects, offsets, call.addresses, call.sizes):
            ctypes.memmove(slot.address + offset, address, size)
            entry.buffer, entry.offset, entry.bytes = slot.buffer, offset, size
        return Status.OK

    def _map(self, call: Call, objects: Any) -> int:
        buffer = ctypes.c_void_p()
        for entry, address, size in zip(objects, call.addresses, call.sizes):
            status: int = waits.kv_buffer_map(
                self._client, address, max(size, 1), _library.MemoryType.HOST, ctypes.byref(buffer)
            )
            if status != Status.OK or buffer.value is None:
                return status
            call.buffers.append(buffer.value)
            entry.buffer, entry.bytes = buffer.value, size
        return Status.OK

    def _release(self, call: Call) -> bool:
        """Gives back the memory of a call.  Returns false if the transport may still use the caller's."""
        if call.slot is not None and self._pool is not None:
            self._pool.give(call.slot, time.monotonic())
        call.slot = None
        call.buffers = [
            buffer for buffer in call.buffers if waits.kv_buffer_free(buffer) != Status.OK
        ]
        return not call.buffers

    def _op_ended(self, op: int) -> None:
        number = quick.kv_op_user(op)
        call = self._calls.pop(number)
        del self._ops[number]
        status: int = quick.kv_op_status(op)
        if status not in (Status.OK, Status.NOT_FOUND, Status.EXISTS):
            call.detail = quick.kv_op_detail(op).decode(errors="replace")
        call.results = [(entry.status, entry.bytes) for entry in call.objects]
        quick.kv_op_free(op)
        self._judge(call)
        self._settle(call)

    def _settle(self, call: Call) -> None:
        """Ends a call whose operation has ended, as soon as its memory is the caller's alone."""
        if self._release(call):
            self._in_flight -= call.bytes
            self._end(call)
        else:
            self._held.append(call)

    def _judge(self, call: Call) -> None:
        """Draws conclusions from what became of a call, so that the next one does not wait in vain."""
        for status, _ in call.results:
            if status not in _ANSWERS:
                name = _library.status_name(status)
                self.counts["status_" + name] += 1
                self.log(name, f"{call.verb.name.lower()}: {call.detail}")
        n_ended = sum(status in _ENDS for status, _ in call.results)
        if n_ended == 0:
            self._skip_s = _RETRY_MIN_S
            if call.verb == ObjectVerb.EXISTS:
                self._patience_s = self._settings.lookup_s
        elif call.verb == ObjectVerb.EXISTS and any(s == Status.DEADLINE for s, _ in call.results):
            self._patience_s = max(_PATIENCE_MIN_S, self._settings.lookup_s / 5)
        if n_ended == len(call.results) and not self._any_node():
            self._skip_until = time.monotonic() + self._skip_s
            self._skip_s = min(2 * self._skip_s, _RETRY_MAX_S)
            self.is_connected = False
            self.log("unreachable", f"no node responds: {call.detail}")
        elif n_ended < len(call.results):
            self.is_connected = True

    # ---- the client ----------------------------------------------------------------------------

    def _adopt(self, client: int) -> None:
        self._client = client
        self._pool = _Pool(client, self._settings.in_flight_bytes)
        self._client_fd = quick.kv_client_fd(client)
        if self._client_fd >= 0:
            self._poller.register(self._client_fd, select.POLLIN)
        self._retry_s = self._skip_s = _RETRY_MIN_S
        self._skip_until = 0.0
        self.is_connected = True
        self._look(time.monotonic())

    def _nodes(self) -> List[CNodeInfo]:
        nodes = []
        for i in range(quick.kv_client_n_nodes(self._client)):
            node = CNodeInfo()
            quick.kv_client_node(self._client, i, ctypes.byref(node))
            nodes.append(node)
        return nodes

    def _any_node(self) -> bool:
        return any(node.state == NodeState.CONNECTED for node in self._nodes())

    def _look(self, now: float) -> None:
        """Data for a node on this host is best copied to memory that it reads."""
        self._looked_at = now
        nodes = self._nodes()
        self._is_shared = any(b"memory" in (node.transport or b"") for node in nodes)
        self.counts["reconnects"] = sum(node.reconnects for node in nodes)

    def _connect(self) -> None:
        with self._handover:
            opened, self._opened = self._opened, None
        if opened is not None:
            self._opening = False
            self._has_tried = True
            client, status, detail = opened
            if client is not None:
                self._adopt(client)
                return
            self._retry_at = time.monotonic() + self._retry_s
            self._retry_s = min(2 * self._retry_s, _RETRY_MAX_S)
            self.log("unreachable", f"not connected: {_library.status_name(status)}: {detail}")
        if not self._opening and time.monotonic() >= self._retry_at:
            self._opening = True
            threading.Thread(target=self._open, name=self.name + "/open", daemon=True).start()

    def _open(self) -> None:
        """Opens a client in a thread of its own, since that waits, and this one has deadlines to keep."""
        opened = open_client(self._settings)
        with self._handover:
            if not self._stopping:
                self._opened = opened
                os.eventfd_write(self._wake_fd, 1)
                return
        close_client(opened[0])

    def _drop_client(self) -> None:
        """Closes the client: no transfer touches anybody's memory after that."""
        client, self._client, self._pool = self._client, None, None
        if self._client_fd >= 0:
            self._poller.unregister(self._client_fd)
            self._client_fd = -1
        self.is_connected = False
        for op in self._ops.values():
            quick.kv_cancel(op)
        self._ops.clear()
        close_client(client)
        calls = list(self._calls.values())
        self._calls.clear()
        held, self._held = self._held, []
        self._in_flight = 0
        for call in calls:
            call.results = [
                (entry.status if entry.status != Status.IN_PROGRESS else Status.CANCELLED, entry.bytes)
                for entry in call.objects
            ]
            call.detail = "its client was closed"
        for call in calls + held:
            call.buffers = []
            call.slot = None
            self._end(call)

    def _reset(self, why: str) -> None:
        self.counts["client_resets"] += 1
        self.log("reset", f"the client is closed and opened again: {why}")
        self._drop_client()
        self._retry_at = time.monotonic() + self._retry_s

    def _shut(self) -> None:
        with self._handover:
            opened, self._opened = self._opened, None
        if opened is not None:
            close_client(opened[0])
        if self._client is not None:
            self._drop_client()
        for queue in self._waiting:
            while queue:
                self._fail(queue.popleft(), Status.CANCELLED, "the plugin is being closed")
        while not self._has_ended:
            while self._ready:
                self._resume(self._ready.popleft())
            with self._handover:
                flow = self._inbox.popleft() if self._inbox else None
                self._has_ended = flow is None
            if flow is not None:
                self._start_flow(flow)
