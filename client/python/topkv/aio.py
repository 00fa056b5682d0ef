"""AsyncClient and AsyncSession: Client and Session for asyncio, driven by the client's descriptor.

No thread is involved: the event loop watches kv_client_fd(), polls when it is readable or when something
is due, and hands every ended operation to whoever awaits it.
"""

import asyncio
from ctypes import byref, c_uint64
from threading import get_ident
from typing import (
    TYPE_CHECKING,
    Any,
    Dict,
    Iterable,
    List,
    Optional,
    Sequence,
    Tuple,
    TypeVar,
    Union,
)

from ._checks import client_arguments
from ._core import Core, Operation, process
from ._library import PrefixVerb, quick, waits
from .client import ALL_NODES, AppendEntry, ClientBase, QueryEntry, Steps
from .errors import ClosedError, ForkedError, InvalidError, TopKVError
from .model import Model, Ticket
from .results import IndexResult, Length, Match, ObjectInfo, ObjectResult, QueryResult
from .session import Query, SessionBase

if TYPE_CHECKING:
    from ._memory import BufferProtocol

T = TypeVar("T")

__all__ = ["AsyncClient", "AsyncSession"]


class Driver:
    """Moves one client on inside one event loop."""

    def __init__(self, core: Core, loop: asyncio.AbstractEventLoop) -> None:
        self.core = core
        self.loop = loop
        self.thread = get_ident()
        # By handle, for as long as the operation has it: see on_freed().  Several tasks may await one.
        self.waiting: "Dict[int, Tuple[Operation[Any], List[asyncio.Future[None]]]]" = {}
        self.is_stopped = False
        self.is_scheduled = False
        self.timer: Optional[asyncio.TimerHandle] = None
        self.due_us = c_uint64()
        with core.lock:
            client = core.use()
            self.fd: int = quick.kv_client_fd(client)
            core.told = self.on_freed
        if self.fd >= 0:
            loop.add_reader(self.fd, self.drive)
        self.schedule()

    def schedule(self) -> None:
        """Has the client polled, and armed anew, in this turn of the loop."""
        if not self.is_scheduled:
            self.is_scheduled = True
            self.loop.call_soon(self.drive_scheduled)

    def drive_scheduled(self) -> None:
        self.is_scheduled = False
        self.drive()

    def on_timer(self) -> None:
        self.timer = None
        self.drive()

    def drive(self) -> None:
        """Polls, hands out what has ended, and arms the descriptor and the timer."""
        if self.is_stopped:
            return
        try:
            with self.core.lock:
                client = self.core.use()
                waits.kv_poll(client)
                while True:
                    ended = quick.kv_client_next_ended(client)
                    if ended is None:
                        break
                    entry = self.waiting.get(ended)
                    if entry is not None:
                        entry[0]._end()
                may_sleep = quick.kv_client_arm(client, byref(self.due_us))
        except (ClosedError, ForkedError):
            self.stop()
            return
        if self.is_stopped:
            return
        if not may_sleep:
            self.schedule()
            return
        due = self.loop.time() + self.due_us.value / 1e6
        if self.timer is not None:
            if self.timer.when() <= due:
                return  # it comes earlier, and sets the next one
            self.timer.cancel()
        self.timer = self.loop.call_at(due, self.on_timer)

    def stop(self) -> None:
        """Leaves the loop; what is awaited ends with ClosedError."""
        self.is_stopped = True
        if self.fd >= 0 and self.core.pid == process.pid:
            if not self.loop.is_closed():
                self.loop.remove_reader(self.fd)
            self.fd = -1
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None
        waiting, self.waiting = self.waiting, {}
        for _, futures in waiting.values():
            self.wake(futures)

    def on_freed(self, handle: int) -> None:
        """Wakes the tasks that await an operation, whoever ended it.  Another one may have the handle next."""
        entry = self.waiting.pop(handle, None)
        if entry is None or self.loop.is_closed():
            return
        if get_ident() == self.thread:
            for future in entry[1]:
                if not future.done():
                    future.set_result(None)
        else:
            self.loop.call_soon_threadsafe(self.wake, entry[1])

    def wake(self, futures: "List[asyncio.Future[None]]") -> None:
        if not self.loop.is_closed():
            for future in futures:
                if not future.done():
                    future.set_result(None)

    async def wait(self, operation: Operation[T]) -> T:
        """Waits until an operation has ended.  A task that is cancelled cancels it, unless another one awaits it."""
        if operation._handle != 0:
            future = self.loop.create_future()
            core = self.core
            if operation._core is not core:
                raise InvalidError("operation: of another client")
            with core.lock:
                core.use()
                handle = operation._handle
                entry = self.waiting.get(handle)
                if handle == 0:  # it ended meanwhile, in another thread
                    future.set_result(None)
                elif entry is not None:
                    entry[1].append(future)
                else:
                    self.waiting[handle] = (operation, [future])
                    quick.kv_op_set_user(handle, handle)
            if not self.is_scheduled:
                self.schedule()
            try:
                await future
            except BaseException:
                entry = self.waiting.get(operation._handle)
                if entry is not None and entry[0] is operation:
                    entry[1].remove(future)
                    if not entry[1] and not core.is_closed:
                        operation.cancel()
                raise
            if operation._handle != 0:  # another thread is about to end it, or the client is closed
                with core.lock:
                    pass
        return operation._take()


class AsyncSession(SessionBase):
    """A Session whose methods are coroutines.  Made by AsyncClient.open_session(), resume() and fork().

    Arguments, results and errors are those of Session.  `async with` closes it at the end.
    """

    def __init__(self, driver: Driver, handle: int, model: Model, tokens: int) -> None:
        super().__init__(driver.core, handle, model, tokens)
        self._driver = driver

    async def put(
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
        """As Session.put()."""
        await self._driver.wait(
            self.begin_put(
                data,
                token,
                layer=layer,
                n_layers=n_layers,
                kv_head=kv_head,
                n_kv_heads=n_kv_heads,
                crcs=crcs,
                deadline=deadline,
            )
        )

    async def append(
        self, data: "BufferProtocol", token: int, *, crcs: Any = None, deadline: Optional[float] = None
    ) -> None:
        """As Session.append()."""
        await self._driver.wait(self.begin_append(data, token, crcs=crcs, deadline=deadline))

    async def read(
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
        """As Session.read()."""
        return await self._driver.wait(
            self.begin_read(
                token,
                n_tokens,
                layer=layer,
                n_layers=n_layers,
                kv_head=kv_head,
                n_kv_heads=n_kv_heads,
                out=out,
                deadline=deadline,
            )
        )

    async def fetch(
        self,
        ids: Sequence[Any],
        *,
        layer: int,
        kv_head: int = 0,
        snapshot: int = 0,
        out: "Optional[BufferProtocol]" = None,
        deadline: Optional[float] = None,
    ) -> Any:
        """As Session.fetch()."""
        return await self._driver.wait(
            self.begin_fetch(ids, layer=layer, kv_head=kv_head, snapshot=snapshot, out=out, deadline=deadline)
        )

    async def index(
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
        """As Session.index()."""
        return await self._driver.wait(
            self.begin_index(
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
            )
        )

    async def query(self, query: Query, *, deadline: Optional[float] = None) -> QueryResult:
        """As Session.query()."""
        return await self._driver.wait(self.begin_query(query, deadline=deadline))

    async def length(self, *, deadline: Optional[float] = None) -> Length:
        """As Session.length()."""
        return await self._driver.wait(self.begin_length(deadline=deadline))

    async def fork(self, tokens: int, *, deadline: Optional[float] = None) -> "AsyncSession":
        """As Session.fork()."""
        return await self._driver.wait(self.begin_fork(tokens, deadline=deadline))

    def begin_fork(self, tokens: int, *, deadline: Optional[float] = None) -> "Operation[AsyncSession]":
        """Begins fork(tokens, deadline).  Raises InvalidError, ClosedError or BusyError at once."""
        driver = self._driver
        return self._begin_fork(tokens, deadline, lambda *made: AsyncSession(driver, *made))

    async def truncate(self, tokens: int, *, deadline: Optional[float] = None) -> None:
        """As Session.truncate()."""
        await self._driver.wait(self.begin_truncate(tokens, deadline=deadline))

    async def publish(
        self,
        names: Sequence[bytes],
        *,
        first_block: int = 0,
        tokens: Any = None,
        deadline: Optional[float] = None,
    ) -> int:
        """As Session.publish()."""
        return await self._driver.wait(
            self.begin_publish(names, first_block=first_block, tokens=tokens, deadline=deadline)
        )

    async def save(self, *, deadline: Optional[float] = None) -> int:
        """As Session.save()."""
        return await self._driver.wait(self.begin_save(deadline=deadline))

    async def renew(self, lease: float = 0.0, *, deadline: Optional[float] = None) -> None:
        """As Session.renew()."""
        await self._driver.wait(self.begin_renew(lease, deadline=deadline))

    async def close(self, *, deadline: Optional[float] = None) -> None:
        """As Session.close()."""
        if self._handle and not self._core.is_closed:
            await self._driver.wait(self.begin_close(deadline=deadline))

    async def __aenter__(self) -> "AsyncSession":
        return self

    async def __aexit__(self, kind: object, *_: object) -> None:
        try:
            await self.close()
        except TopKVError:
            if kind is None:
                raise


class AsyncClient(ClientBase[AsyncSession]):
    """A Client whose methods are coroutines, for one event loop.

        async with topkv.AsyncClient("127.0.0.1:7400") as client:
            await asyncio.gather(*(client.put(f"object {i}", data) for i in range(24)))

    Arguments (`nodes`, `transport`, `net_devices`, `name`, `deadline`, `peer_timeout`, `tenant`, `salt`,
    `ops_max`, `poll`), results and errors are those of Client.  It is used in the loop in which it was
    opened, by `async with` or open().  A task that is cancelled cancels its operation, unless another
    task awaits that too.  Any Operation of a begin_*() may be awaited by wait().
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
    ) -> None:
        client_arguments(deadline, peer_timeout, salt)
        self._options: Dict[str, Any] = {
            "transport": transport,
            "net_devices": net_devices,
            "name": name,
            "deadline": deadline,
            "peer_timeout": peer_timeout,
            "tenant": tenant,
            "salt": salt,
            "ops_max": ops_max,
            "poll": poll,
            "progress_thread": False,
        }
        self._nodes = nodes
        self._driver: Optional[Driver] = None
        self._is_opening = False
        self._is_closed = False

    async def open(self) -> "AsyncClient":
        """Connects to the nodes, without blocking the loop; returns itself.

        Raises InvalidError, UnreachableError or VersionError, as Client does; InvalidError if it is open, or is
        being opened; ClosedError if it is closed meanwhile.
        """
        if self._driver is not None or self._is_opening:
            raise InvalidError("client: open already")
        loop = asyncio.get_running_loop()
        self._is_opening, self._is_closed = True, False
        try:
            opening = loop.run_in_executor(None, lambda: Core(self._nodes, **self._options))
            try:
                core = await asyncio.shield(opening)
            except asyncio.CancelledError:
                opening.add_done_callback(lambda made: None if made.exception() else made.result().close())
                raise
            if self._is_closed:
                core.close()
                raise ClosedError("client: closed while it was opened")
            self._core = core
            self._driver = Driver(core, loop)
        finally:
            self._is_opening = False
        return self

    async def __aenter__(self) -> "AsyncClient":
        return await self.open()

    async def __aexit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        if name == "_core":
            raise ClosedError("client: not open: use `async with`, or await open()")
        raise AttributeError(f"{type(self).__name__} has no {name}")

    def _here(self) -> Driver:
        driver = self._driver
        if driver is None:
            raise ClosedError("client: not open: use `async with`, or await open()")
        if asyncio.get_running_loop() is not driver.loop:
            raise InvalidError("client: opened in another event loop: open one here")
        return driver

    def _session(self, handle: int, model: Model, tokens: int) -> AsyncSession:
        assert self._driver is not None
        return AsyncSession(self._driver, handle, model, tokens)

    async def _run(self, steps: "Steps[T]") -> T:
        driver = self._here()
        try:
            operation = next(steps)
            while True:
                operation = steps.send(await driver.wait(operation))
        except StopIteration as end:
            value: T = end.value
            return value

    def close(self) -> None:
        """Cancels outstanding operations, whose tasks get ClosedError, and closes the client; as Client.close()."""
        self._is_closed = True
        if self._driver is not None:
            self._driver.stop()
            self._core.close()

    async def wait(self, operation: Operation[T]) -> T:
        """Awaits an `operation` of any begin_*() of this client or its sessions; returns its result.

        Several tasks may await one.  Raises the exception of its status, as Operation.result(); InvalidError if
        it is another client's.
        """
        return await self._here().wait(operation)

    async def put(
        self,
        name: Union[str, bytes],
        data: "BufferProtocol",
        *,
        ttl: Optional[float] = None,
        evictable: bool = False,
        deadline: Optional[float] = None,
    ) -> None:
        """As Client.put()."""
        driver = self._here()
        await driver.wait(self.begin_put(name, data, ttl=ttl, evictable=evictable, deadline=deadline))

    async def get(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> bytes:
        """As Client.get()."""
        return await self._run(self._get_steps(name, deadline))

    async def get_into(
        self, name: Union[str, bytes], out: "BufferProtocol", *, deadline: Optional[float] = None
    ) -> int:
        """As Client.get_into()."""
        driver = self._here()
        return await driver.wait(self.begin_get_into(name, out, deadline=deadline))

    async def exists(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> bool:
        """As Client.exists()."""
        return await self._here().wait(self.begin_exists(name, deadline=deadline))

    async def size(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> Optional[int]:
        """As Client.size()."""
        return await self._here().wait(self.begin_size(name, deadline=deadline))

    async def delete(self, name: Union[str, bytes], *, deadline: Optional[float] = None) -> bool:
        """As Client.delete()."""
        return await self._here().wait(self.begin_delete(name, deadline=deadline))

    async def put_many(
        self,
        objects: "Iterable[Tuple[Union[str, bytes], BufferProtocol]]",
        *,
        ttl: Optional[float] = None,
        evictable: bool = False,
        deadline: Optional[float] = None,
    ) -> List[ObjectResult]:
        """As Client.put_many()."""
        return await self._here().wait(
            self.begin_put_many(objects, ttl=ttl, evictable=evictable, deadline=deadline)
        )

    async def get_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """As Client.get_many()."""
        return await self._run(self._get_many_steps(names, deadline))

    async def get_many_into(
        self, objects: "Iterable[Tuple[Union[str, bytes], BufferProtocol]]", *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """As Client.get_many_into()."""
        return await self._here().wait(self.begin_get_many_into(objects, deadline=deadline))

    async def exists_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """As Client.exists_many()."""
        return await self._here().wait(self.begin_exists_many(names, deadline=deadline))

    async def delete_many(
        self, names: Iterable[Union[str, bytes]], *, deadline: Optional[float] = None
    ) -> List[ObjectResult]:
        """As Client.delete_many()."""
        return await self._here().wait(self.begin_delete_many(names, deadline=deadline))

    async def list_objects(
        self,
        prefix: Union[str, bytes] = "",
        *,
        node: Optional[int] = None,
        limit: Optional[int] = None,
        deadline: Optional[float] = None,
    ) -> List[ObjectInfo]:
        """As Client.list_objects()."""
        return await self._run(self._list_steps(prefix, node, limit, deadline))

    async def delete_prefix(
        self, prefix: Union[str, bytes], *, node: Optional[int] = None, deadline: Optional[float] = None
    ) -> Tuple[int, int]:
        """As Client.delete_prefix()."""
        return await self._run(self._delete_prefix_steps(prefix, node, deadline))

    async def table(
        self, name: str, *, node: int = 0, deadline: Optional[float] = None
    ) -> List[Dict[str, Union[str, float]]]:
        """As Client.table()."""
        return await self._here().wait(self.begin_table(name, node=node, deadline=deadline))

    async def ping(
        self,
        node: int = 0,
        *,
        thread: int = 0,
        bytes_out: int = 0,
        bytes_back: int = 0,
        deadline: Optional[float] = None,
    ) -> float:
        """As Client.ping()."""
        return await self._here().wait(
            self.begin_ping(node, thread=thread, bytes_out=bytes_out, bytes_back=bytes_back, deadline=deadline)
        )

    async def open_session(
        self,
        model: Model,
        *,
        names: Optional[Sequence[bytes]] = None,
        lease: float = 0.0,
        tokens_max: int = 0,
        match_blocks_max: int = 0,
        fresh: bool = False,
        deadline: Optional[float] = None,
    ) -> AsyncSession:
        """As Client.open_session()."""
        return await self._here().wait(
            self.begin_open_session(
                model,
                names=names,
                lease=lease,
                tokens_max=tokens_max,
                match_blocks_max=match_blocks_max,
                fresh=fresh,
                deadline=deadline,
            )
        )

    async def resume(
        self, ticket: Ticket, model: Model, *, deadline: Optional[float] = None
    ) -> AsyncSession:
        """As Client.resume()."""
        return await self._here().wait(self.begin_resume(ticket, model, deadline=deadline))

    async def match(self, names: Sequence[bytes], *, deadline: Optional[float] = None) -> Match:
        """As Client.match()."""
        return await self._here().wait(self.begin_match(names, deadline=deadline))

    async def prefix(
        self,
        verb: PrefixVerb,
        *,
        name: Optional[bytes] = None,
        session_id: Optional[bytes] = None,
        node: int = ALL_NODES,
        seconds: float = 0.0,
        deadline: Optional[float] = None,
    ) -> int:
        """As Client.prefix()."""
        return await self._here().wait(
            self.begin_prefix(
                verb, name=name, session_id=session_id, node=node, seconds=seconds, deadline=deadline
            )
        )

    async def append_many(
        self, entries: Sequence[AppendEntry], *, deadline: Optional[float] = None
    ) -> List[Optional[TopKVError]]:
        """As Client.append_many()."""
        outcomes = await self._outcomes(self.begin_append_many(entries, deadline=deadline))
        return [outcome if isinstance(outcome, TopKVError) else None for outcome in outcomes]

    async def query_many(
        self, entries: Sequence[QueryEntry], *, deadline: Optional[float] = None
    ) -> List[Union[QueryResult, TopKVError]]:
        """As Client.query_many()."""
        return await self._outcomes(self.begin_query_many(entries, deadline=deadline))

    async def _outcomes(
        self, begun: "Sequence[Union[Operation[T], TopKVError]]"
    ) -> List[Union[T, TopKVError]]:
        made: List[Union[T, TopKVError]] = []
        for one in begun:
            try:
                if isinstance(one, TopKVError):
                    raise one
                result: T = await self.wait(one)
                made.append(result)
            except TopKVError as error:
                made.append(error)
        return made
