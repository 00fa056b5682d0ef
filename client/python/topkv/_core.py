"""One kv_client: its lock, its memory and its operations.  Everything else is built on this.

Threads: a client is used by one thread at a time.  `with core.lock:` and then core.use(); a thread that comes
while another one waits, waits for it.  Finalizers, which may run anywhere, never call the library:
they append what is to be freed to `dead`, and whoever has the lock next frees it.

Signals: a handler may raise (Ctrl-C) or close the client between any two calls.  The lock is taken and released in C,
by the `with` of threading.RLock: no exception comes between.  close() within a call ends
nothing that the call uses; whoever uses the client next does that.  What is taken from a list and given
to another place changes hands between two calls, where no handler runs.

Memory: an operation holds the memory that it uses.  After a deadline, a cancel or a failure
the transport may still access it; it is then kept in `quarantine` until kv_buffer_busy() is false, or
until the client is closed.
"""

import atexit
import bisect
import collections
import ctypes
import os
import threading
import weakref
from ctypes import byref, c_void_p
from typing import (
    TYPE_CHECKING,
    Any,
    Callable,
    Deque,
    Dict,
    Generic,
    List,
    NamedTuple,
    Optional,
    Set,
    Tuple,
    TypeVar,
)

from . import _library
from ._checks import deadline_ms
from ._library import Status, quick, waits
from ._memory import View
from .errors import BusyError, ClosedError, ForkedError, InvalidError, error_of

if TYPE_CHECKING:
    from ._memory import BufferProtocol

T = TypeVar("T")
OK = int(Status.OK)
IN_PROGRESS = int(Status.IN_PROGRESS)
BUSY = int(Status.BUSY)

# How long one call into the library may sleep: Python sees signals, Ctrl-C too, only between calls.
SLICE_US = 100000

_MIB = 1 << 20
STAGING_LEAST = 1 << 16
STAGING_KEPT = 64 * _MIB
GUESS_MOST = 4 * _MIB


class _Process:
    """This process.  A fork has another id: what its parent opened is not used here.

    A fork of a process that had clients open cannot open any: gRPC, which carries the control operations, has
    state in such a process that refers to threads and descriptors of the parent's, and
    aborts.  `open` has the clients that are open, or about to be.
    """

    def __init__(self) -> None:
        self.pid = os.getpid()
        self.open: Set[int] = set()
        self.parent = 0

    def renew(self) -> None:
        if self.open:
            self.parent = self.pid
        self.open = set()
        self.pid = os.getpid()
        for core in _cores:  # a thread that the fork lacks may have had it
            core.lock = threading.RLock()

    def check(self) -> None:
        if self.parent:
            raise ForkedError(
                f"client: process {self.pid} is a fork of process {self.parent}, which had a client open: fork "
                "before the first one is opened, or after the last one is closed, or start processes "
                "by spawn"
            )


process = _Process()
os.register_at_fork(after_in_child=process.renew)

_cores: "weakref.WeakSet[Core]" = weakref.WeakSet()


def number(what: str, value: int, least: int = 0, most: int = 0xFFFFFFFF) -> int:
    """Checks a number for a C field: ctypes would cut it silently."""
    try:
        whole = value.__index__()
    except AttributeError:
        raise InvalidError(f"{what}: {value!r}: not a whole number") from None
    if not least <= whole <= most:
        raise InvalidError(f"{what}: {whole}: not in {least}..{most}")
    return whole


class Place(NamedTuple):
    """Where memory is for the library: a kv_buffer, a byte offset in it, a size."""

    buffer: int
    offset: int
    nbytes: int


class _Block:
    """Memory of kv_buffer_alloc().  `n_views` counts the Buffers that show it."""

    __slots__ = ("handle", "address", "nbytes", "__weakref__")

    def __init__(self, handle: int, address: int, nbytes: int) -> None:
        self.handle = handle
        self.address = address
        self.nbytes = nbytes


class Buffer:
    """Memory of the client's, registered with its transports: bytes, in place, without copies.

    Made by Client.allocate().  It has the buffer protocol: numpy.frombuffer(buffer, dtype),
    memoryview(buffer).cast("B"), buffer[:5] = b"hello".  A node on the same host reads it directly.  Arrays
    and views of it may be given to any method that takes memory, and are used in place.

    It is freed when nothing refers to it any more, arrays and views included.  A client that is
    closed before keeps its connection until then.  `nbytes` is the size in bytes.
    """

    _core: "Core"
    _block: _Block
    nbytes: int

    if TYPE_CHECKING:

        def __buffer__(self, flags: int) -> memoryview:
            """Shows the memory: (nbytes,) bytes."""
            raise NotImplementedError

        def __len__(self) -> int:
            """Returns the size in bytes."""
            raise NotImplementedError

    def __init__(self) -> None:
        raise InvalidError("Buffer: made by Client.allocate()")

    def __repr__(self) -> str:
        return f"<topkv.Buffer of {self.nbytes} bytes>"

    def __del__(self) -> None:
        core = self.__dict__.get("_core")
        if core is not None:
            core.bury(core.free_block, self._block)


_buffer_classes: "weakref.WeakValueDictionary[int, Any]" = weakref.WeakValueDictionary()


def _buffer_class(nbytes: int) -> Any:
    """Only a ctypes array has the buffer protocol in every version of Python: a class per size."""
    made = _buffer_classes.get(nbytes)
    if made is None:
        made = type("Buffer", (Buffer, ctypes.c_ubyte * nbytes), {})
        _buffer_classes[nbytes] = made
    return made


class Core:
    """A kv_client and what belongs to it."""

    def __init__(
        self,
        nodes: str,
        *,
        transport: Optional[str],
        net_devices: Optional[str],
        name: Optional[str],
        deadline: float,
        peer_timeout: float,
        tenant: int,
        ops_max: int,
        salt: Optional[bytes],
        poll: Optional[str],
        progress_thread: bool,
    ) -> None:
        self.handle: Optional[int] = None
        self.pid = process.pid
        self.nodes = nodes
        self.lock = threading.RLock()
        # Called with the handle of each operation that is freed: asyncio's.
        self.told: Optional[Callable[[int], None]] = None
        self.is_closed = False
        self.dead: Deque[Tuple[Callable[[Any], None], Any]] = collections.deque()
        # (kv_buffer, what to do when the transport has let go of it, with what)
        self.quarantine: List[Tuple[int, Callable[[Any], None], Any]] = []
        self.under_way: Dict[int, Hold] = {}
        # Of the begin that is running; left over, of one that a signal handler ended.
        self.loose: List[Hold] = []
        self.sessions: "Dict[int, None]" = {}
        self.blocks: Dict[int, _Block] = {}
        self.block_starts: List[int] = []
        self.pool: Dict[int, List[_Block]] = {}
        self.pool_bytes = 0
        self.staged_bytes = 0
        self.object_bytes = STAGING_LEAST
        texts = {"nodes": nodes, "transport": transport, "net_devices": net_devices, "name": name, "poll": poll}
        for what, text in texts.items():
            if text is not None and (not isinstance(text, str) or "\0" in text):
                raise InvalidError(f"{what}: {text!r}: not a text")
        secret = ctypes.create_string_buffer(bytes(salt), len(salt)) if salt else None
        options = _library.CClientOptions(
            deadline_ms=deadline_ms(deadline),
            peer_timeout_ms=deadline_ms(peer_timeout, "peer_timeout"),
            tenant=number("tenant", tenant),
            ops_max=number("ops_max", ops_max),
            salt=ctypes.cast(secret, c_void_p) if secret is not None else None,
            salt_bytes=len(salt) if salt else 0,
            progress_thread=progress_thread,
            **{what: None if text is None else text.encode() for what, text in texts.items()},
        )
        client = c_void_p()
        detail = ctypes.create_string_buffer(4096)
        process.check()
        process.open.add(id(self))
        status = waits.kv_client_open(byref(options), byref(client), detail, len(detail))
        if status != OK:
            process.open.discard(id(self))
            raise error_of(status, detail.value.decode(errors="replace"))
        self.handle = client.value
        _cores.add(self)

    # ---- one thread at a time ----------------------------------------------------------------

    def check_process(self) -> None:
        if self.pid != process.pid:
            raise ForkedError(
                f"client: opened in process {self.pid}, and this is process {process.pid}, its fork"
            )

    def use(self) -> int:
        """Returns the kv_client, of a client that is open; the caller has the lock."""
        if self.pid != process.pid:
            self.check_process()
        handle = self.handle
        if self.is_closed or handle is None:
            self.finish()
            raise ClosedError("client: closed")
        if (self.dead or self.quarantine or self.loose) and self.is_outermost():
            self.sweep()
        return handle

    def is_outermost(self) -> bool:
        """Has the caller, who has the lock, taken it once?  A signal handler within a call has it twice.

        The lock alone knows: a count beside it would be wrong after an exception between the two.
        """
        return " count=1 " in repr(self.lock)  # not known otherwise; _check_lock() holds Python to it

    def bury(self, free: Callable[[Any], None], what: Any) -> None:
        """For finalizers: has `free(what)` called under the lock, later."""
        if self.pid != process.pid:
            return
        self.dead.append((free, what))
        if self.is_closed and self.lock.acquire(blocking=False):
            try:
                self.finish()
            finally:
                self.lock.release()

    def sweep(self) -> None:
        """Frees what finalizers and failed begins left, and memory whose quarantine is over."""
        while self.loose:
            hold = self.loose[-1]
            if hold not in self.under_way.values():
                hold.release(self)
            del self.loose[-1]
        while self.dead:
            free, what = self.dead[0]
            free(what)  # nothing happens the second time, if a signal handler raises here
            del self.dead[0]
        if self.quarantine:
            waits.kv_poll(self.handle)
            at = 0
            while at < len(self.quarantine):
                handle, free, what = self.quarantine[at]
                if quick.kv_buffer_busy(handle):
                    at += 1
                else:
                    del self.quarantine[at]
                    free(what)

    def detail(self) -> str:
        text: Optional[bytes] = quick.kv_client_detail(self.handle)
        return text.decode(errors="replace") if text else ""

    def check(self, status: int) -> None:
        """Raises the exception of a begin that failed, with the library's words."""
        if status != OK:
            raise error_of(status, self.detail())

    # ---- memory ------------------------------------------------------------------------------

    def new_block(self, nbytes: int) -> _Block:
        handle = c_void_p()
        self.check(waits.kv_buffer_alloc(self.handle, nbytes, byref(handle)))
        address = quick.kv_buffer_data(handle)
        block = _Block(handle.value or 0, address, nbytes)
        self.blocks[address] = block
        bisect.insort(self.block_starts, address)
        return block

    def free_block(self, block: _Block) -> None:
        """Frees a block, unless it is freed already, or when the transport has let go of it."""
        if self.blocks.get(block.address) is not block:
            return
        if quick.kv_buffer_busy(block.handle):
            self.quarantine += [(block.handle, self.free_block, block)]
            return
        at = bisect.bisect_left(self.block_starts, block.address)
        del self.block_starts[at]
        del self.blocks[block.address]
        waits.kv_buffer_free(block.handle)

    def allocate(self, nbytes: int) -> Buffer:
        block = self.new_block(nbytes)
        buffer = _buffer_class(nbytes).from_address(block.address)
        buffer._core = self
        buffer._block = block
        buffer.nbytes = nbytes
        assert isinstance(buffer, Buffer)
        return buffer

    def staging(self, nbytes: int, hold: "Hold") -> _Block:
        """Memory from the pool, for at least so many bytes, until `hold` lets go of it."""
        size = max(STAGING_LEAST, 1 << (nbytes - 1).bit_length())
        self.loose += [hold]
        free = self.pool.setdefault(size, [])
        if free:
            block = free[-1]
            del free[-1]
            self.pool_bytes -= size
        else:
            block = self.new_block(size)
        self.staged_bytes += size
        hold.staged += [block]
        return block

    def unstage(self, block: _Block, hold: "Optional[Hold]" = None) -> None:
        """Gives a block back to the pool, when the transport has let go of it: `hold`'s last one, if given."""
        if quick.kv_buffer_busy(block.handle):
            entry = (block.handle, self.unstage, block)
            if hold is not None:
                del hold.staged[-1]
            self.quarantine += [entry]
            return
        free = self.pool[block.nbytes]
        if hold is not None:
            del hold.staged[-1]
        self.staged_bytes -= block.nbytes
        self.pool_bytes += block.nbytes
        free += [block]
        if self.pool_bytes > STAGING_KEPT:
            del free[-1]
            self.pool_bytes -= block.nbytes
            self.free_block(block)

    def guess(self) -> int:
        """How much memory a get of an object of unknown size takes: as others were, while that is not too much."""
        nbytes = self.object_bytes
        return nbytes if self.staged_bytes + nbytes <= STAGING_KEPT else STAGING_LEAST

    def learn(self, nbytes: int) -> None:
        """An object of so many bytes was got.  A large one raises the guess, some thirty small ones lower it."""
        guess = self.object_bytes
        if nbytes > guess or guess > STAGING_LEAST:
            self.object_bytes = min(max(nbytes, guess - (guess >> 3), STAGING_LEAST), GUESS_MOST)

    def place(self, memory: "BufferProtocol", writable: bool, what: str, hold: "Hold") -> Place:
        """Makes the caller's memory known to the transports, in place, for as long as `hold` has it."""
        self.loose += [hold]
        if isinstance(memory, Buffer) and memory._core is self:
            hold.kept.append(memory)
            return Place(memory._block.handle, 0, memory.nbytes)
        view = View(memory, writable, what)
        if view.nbytes == 0:
            view.release()
            block = self.staging(1, hold)
            return Place(block.handle, 0, 0)
        at = bisect.bisect_right(self.block_starts, view.address) - 1
        if at >= 0:
            block = self.blocks[self.block_starts[at]]
            if view.address + view.nbytes <= block.address + block.nbytes:
                hold.shown.append(view)  # which keeps the Buffer
                return Place(block.handle, view.address - block.address, view.nbytes)
        mapped = c_void_p()
        status = waits.kv_buffer_map(self.handle, view.address, view.nbytes, 0, byref(mapped))
        if status != OK:
            view.release()
            self.check(status)
        hold.mapped.append((mapped.value or 0, view))
        return Place(mapped.value or 0, 0, view.nbytes)

    def is_busy(self, memory: "BufferProtocol") -> bool:
        """Does an operation, or the transport after a failure, still use some of this memory?"""
        view = View(memory, False, "memory")
        begin, end = view.address, view.address + view.nbytes
        view.release()
        if isinstance(memory, Buffer) and memory._core is self:
            return bool(quick.kv_buffer_busy(memory._block.handle))
        at = bisect.bisect_right(self.block_starts, begin) - 1
        if at >= 0:
            block = self.blocks[self.block_starts[at]]
            if begin < block.address + block.nbytes:
                return bool(quick.kv_buffer_busy(block.handle))
        views = [held for _, _, held in self.quarantine if isinstance(held, View)]
        for hold in self.under_way.values():
            views += [held for _, held in hold.mapped]
        return any(held.address < end and begin < held.address + held.nbytes for held in views)

    # ---- the end -----------------------------------------------------------------------------

    def close(self) -> None:
        """Ends operations and sessions, and the call of another thread.  The connection ends with the last Buffer."""
        self.is_closed = True
        if self.pid == process.pid:  # else it is the parent's
            with self.lock:
                self.finish()

    def finish(self) -> None:
        """Ends what a closed client has, as far as it can.  In a signal handler within a call, which uses
        it still, it does nothing: whoever uses the client next comes here, and that call before it returns."""
        if not self.is_outermost():
            return
        for handle, hold in list(self.under_way.items()):
            self.drop_operation((handle, hold))
        for session in list(self.sessions):
            self.free_session(session)
        if self.handle is None:
            return
        self.sweep()
        for blocks in self.pool.values():
            while blocks:
                block = blocks[-1]
                del blocks[-1]
                self.free_block(block)
        self.pool_bytes = 0
        in_quarantine = {id(what) for _, _, what in self.quarantine if isinstance(what, _Block)}
        if len(self.blocks) == len(in_quarantine):
            self.close_handle()

    def close_handle(self) -> None:
        handle, self.handle = self.handle, None
        waits.kv_client_close(handle)
        process.open.discard(id(self))
        for _, _, what in self.quarantine:
            if isinstance(what, View):
                what.release()
        self.quarantine = []
        self.blocks = {}
        self.block_starts = []

    def close_at_exit(self) -> None:
        """Leaves closing to the C library's exit(), after Python's end: until then arrays may show Buffers."""
        handle, self.handle = self.handle, None
        register = ctypes.CDLL(None)["__cxa_atexit"]
        register.argtypes = [c_void_p, c_void_p, c_void_p]
        if register(ctypes.cast(waits.kv_client_close, c_void_p), handle, None) != 0:
            waits.kv_client_close(handle)

    def drop_operation(self, operation: "Tuple[int, Hold]") -> None:
        """Frees an operation, which cancels it unless it has ended; nothing if it is freed already."""
        handle, hold = operation
        if self.under_way.get(handle) is not hold:
            return
        if self.told is not None:
            self.told(handle)  # before another operation can have this handle
        del self.under_way[handle]
        try:
            quick.kv_op_free(handle)
            hold.release(self)
        except BaseException:  # of a signal handler
            self.loose += [hold]
            raise

    def free_session(self, handle: int) -> None:
        if handle in self.sessions:
            del self.sessions[handle]
            quick.kv_session_free(handle)

    def __del__(self) -> None:
        if getattr(self, "handle", None) is not None:
            self.close()


def _close_all() -> None:
    """At exit: threads of the library's own must not run into the end of the process."""
    for core in list(_cores):
        if core.pid != process.pid:
            continue
        if core.lock.acquire(timeout=1):
            try:
                core.is_closed = True
                core.finish()
                if core.handle is not None:  # there are Buffers
                    core.close_at_exit()
            finally:
                core.lock.release()


atexit.register(_close_all)


def _check_lock() -> None:
    """A Python whose locks show their count otherwise would let nothing be freed, without a word."""
    lock = threading.RLock()
    with lock:
        once = " count=1 " in repr(lock)
        with lock:
            twice = " count=2 " in repr(lock)
    if not (once and twice):
        raise ImportError(f"topkv: this Python's threading.RLock does not show how often it is taken: {lock!r}")


_check_lock()


class _Mapped:
    """Memory of the caller's in quarantine."""

    __slots__ = ("_core", "_handle")

    def __init__(self, core: Core, handle: int) -> None:
        self._core = core
        self._handle = handle

    def free(self, view: View) -> None:
        waits.kv_buffer_free(self._handle)
        view.release()


class Hold:
    """The memory of one operation."""

    __slots__ = ("mapped", "staged", "shown", "kept")

    def __init__(self, *kept: Any) -> None:
        self.mapped: List[Tuple[int, View]] = []
        self.staged: List[_Block] = []
        # Of Buffers.  A Buffer that the transport still uses is not freed: see free_block().
        self.shown: List[View] = []
        # Buffers, arrays that the operation fills, its session.
        self.kept: List[Any] = list(kept)

    def release(self, core: Core) -> None:
        """Gives back the memory; what the transport still uses, when it does not any more.  May be called twice."""
        while self.mapped:
            handle, view = self.mapped[-1]
            if quick.kv_buffer_busy(handle):
                free = _Mapped(core, handle).free
                core.quarantine += [(handle, free, view)]
                del self.mapped[-1]
            else:
                del self.mapped[-1]
                waits.kv_buffer_free(handle)
                view.release()
        while self.staged:
            core.unstage(self.staged[-1], self)
        while self.shown:
            self.shown[-1].release()
            del self.shown[-1]
        self.kept = []


class Operation(Generic[T]):
    """An operation that has begun: result() waits for it, done() does not.

    Every operation ends by its deadline, whatever the nodes do.  One that is dropped is cancelled.  Memory
    that it was given is used in place until it has ended: change, or read, it only after that.
    """

    __slots__ = ("_core", "_handle", "_parse", "_hold", "_outcome", "_error", "__weakref__")

    def __init__(
        self,
        core: Core,
        handle: int,
        parse: Callable[[int, int], T],
        hold: Hold,
    ) -> None:
        self._core = core
        self._handle = handle
        self._parse = parse
        self._hold = hold
        self._outcome: Optional[T] = None
        self._error: Optional[BaseException] = None
        core.under_way[handle] = hold

    def __del__(self) -> None:
        try:
            handle, core = self._handle, self._core
        except AttributeError:  # a signal handler raised before it had them
            return
        if handle != 0 and not core.is_closed:
            core.dead.append((core.drop_operation, (handle, self._hold)))  # as bury() does, in fewer calls

    def _end(self) -> None:
        """Takes the result of the operation, which has ended, and frees it."""
        core, handle, hold = self._core, self._handle, self._hold
        if handle == 0 or core.under_way.get(handle) is not hold:
            return
        if self._outcome is None and self._error is None:  # else a signal handler raised after this
            try:
                self._outcome = self._parse(handle, quick.kv_op_status(handle))
            except BaseException as error:
                self._error = error
        if core.told is not None:
            core.told(handle)
        self._handle = 0  # from here on as drop_operation(), in fewer calls
        del core.under_way[handle]
        try:
            quick.kv_op_free(handle)
            hold.release(core)
        except BaseException:
            core.loose += [hold]
            raise

    def _cancel(self) -> None:
        handle = self._handle
        if handle != 0 and self._core.under_way.get(handle) is self._hold:
            quick.kv_cancel(handle)
            self._end()

    def _take(self) -> T:
        if self._handle != 0:
            raise ClosedError("client: closed before the operation ended")
        if self._error is not None:
            try:
                raise self._error
            finally:
                del self  # an error names its frames, and they would name it
        return self._outcome  # type: ignore[return-value]

    def done(self) -> bool:
        """Moves operations on without waiting; returns whether this one has ended.

        Raises ClosedError if the client was closed before it ended.
        """
        if self._handle == 0:
            return True
        core = self._core
        with core.lock:
            waits.kv_poll(core.use())
            if self._handle != 0 and quick.kv_op_status(self._handle) != IN_PROGRESS:
                self._end()
        return self._handle == 0

    def result(self) -> T:
        """Waits until the operation has ended, and returns its result.

        Raises the exception of its status (topkv.errors), with the node's words; ClosedError if the client was
        closed before it ended.
        """
        if self._handle != 0:
            core = self._core
            with core.lock:
                client = core.use()
                try:
                    while self._handle != 0 and quick.kv_op_status(self._handle) == IN_PROGRESS:
                        waits.kv_client_wait(client, SLICE_US)
                        if core.is_closed:  # by a signal handler
                            core.use()
                except BaseException:  # Ctrl-C
                    self._cancel()
                    raise
                self._end()
                if core.is_closed:
                    core.finish()
        return self._take()

    def cancel(self) -> None:
        """Ends the operation now, with CancelledError, unless it has ended.

        What nodes have already done remains done.  Raises ClosedError as done() does.
        """
        if self._handle != 0:
            with self._core.lock:
                self._core.use()
                self._cancel()


def begin(
    core: Core, hold: Hold, parse: Callable[[int, int], T], function: Callable[..., int], *arguments: Any
) -> Operation[T]:
    """Begins an operation by a function of the library, or raises its failure.  Its memory is let go if it fails."""
    op = c_void_p()
    try:
        status = function(*arguments, byref(op))
        if status != OK:
            core.check(status)
        operation = Operation(core, op.value or 0, parse, hold)
        del core.loose[:]
        return operation
    except BaseException:
        abandon(core, op.value, hold)
        del core.loose[:]
        raise


def begun(core: Core, status: int, handle: Optional[int], hold: Hold, parse: Callable[[int, int], T]) -> Operation[T]:
    """Makes the operation of a begin, or raises its failure."""
    core.check(status)
    return Operation(core, handle or 0, parse, hold)


def abandon(core: Core, handle: Optional[int], hold: Hold) -> None:
    """After an exception during a begin: frees the operation, if there is one, and lets go of its memory."""
    if handle:
        core.under_way[handle] = hold
        core.drop_operation((handle, hold))
    hold.release(core)


def fail(core: Core, handle: int, status: int) -> None:
    """Raises the exception of an operation that failed."""
    if status != OK:
        text: Optional[bytes] = quick.kv_op_detail(handle)
        raise error_of(status, text.decode(errors="replace") if text else "")
