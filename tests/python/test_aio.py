#!/usr/bin/env python3
"""AsyncClient: many tasks, cancels, closing, a node that stops answering."""
import asyncio
import os
import signal
import time
import unittest

import support
import topkv

support.needs_node()


def opened(node, **options):
    options.setdefault("deadline", support.DEADLINE)
    options.setdefault("peer_timeout", support.DEADLINE)
    return topkv.AsyncClient(node.address, **options)


class Aio(support.NodeCase):
    def run_with(self, work, **options):
        async def main():
            async with opened(self.node, transport=self.transport, **options) as client:
                return await work(client)

        return asyncio.run(main())

    def test_objects(self):
        async def work(client):
            await client.put("a", b"hello", ttl=60)
            self.assertEqual(await client.get("a"), b"hello")
            self.assertEqual((await client.exists("a"), await client.size("a")), (True, 5))
            out = bytearray(5)
            self.assertEqual((await client.get_into("a", out), bytes(out)), (5, b"hello"))
            self.assertTrue(await client.delete("a"))
            with self.assertRaises(topkv.NotFoundError) as caught:
                await client.get("a")
            self.assertIn("object a", str(caught.exception))
            big = os.urandom(3 << 20)
            results = await client.put_many([("m1", b"1"), ("m2", big)])
            self.assertTrue(all(result.ok for result in results))
            self.assertEqual(await client.get("m2"), big)
            self.assertEqual([result.data for result in await client.get_many(["m2", "m3"])], [big, None])
            outs = [("m1", bytearray(1)), ("m2", bytearray(1))]
            statuses = [result.status for result in await client.get_many_into(outs)]
            self.assertEqual(statuses, [topkv.Status.OK, topkv.Status.TOO_LARGE])
            self.assertEqual([result.ok for result in await client.exists_many(["m1", "m3"])], [True, False])
            self.assertEqual(len(await client.list_objects("m")), 2)
            self.assertEqual([result.ok for result in await client.delete_many(["m1"])], [True])
            self.assertEqual(await client.delete_prefix("m"), (1, len(big)))
            self.assertGreater(await client.ping(), 0)
            self.assertTrue(await client.table("status"))
            self.assertEqual(await client.wait(client.begin_size("m1")), None)

        self.run_with(work)

    def test_many_tasks(self):
        async def work(client):
            async def task(number):
                for i in range(20):
                    data = bytes([number]) * (10000 + i)
                    await client.put(f"task {number} {i}", data)
                    self.assertEqual(await client.get(f"task {number} {i}"), data)
                    self.assertTrue(await client.delete(f"task {number} {i}"))

            await asyncio.gather(*(task(number) for number in range(24)))

        self.run_with(work)

    def test_sessions(self):
        model = topkv.Model.uniform("aio", "aio", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)
        row = bytes(range(32))

        async def work(client):
            names = client.prompt_names(model, range(128))
            async with await client.open_session(model, names=names) as session:
                await session.put(row * 128, 0)
                await session.append(row, 128)
                self.assertEqual((await session.length()).tokens, 129)
                self.assertEqual(memoryview(await session.read(0, 2)).tobytes(), row * 2)
                self.assertEqual(memoryview((await session.fetch([[3]], layer=0))[0]).tobytes(), row)
                query = topkv.Query([[[1.0] * 8]], 4, layer=0, ranges=[(0, 129)])
                self.assertEqual(len((await session.query(query)).heads[0].ids), 4)
                self.assertEqual((await session.index(129, m=2, bits=2, chapter_blocks=0)).n_pending, 0)
                self.assertEqual(await session.publish(names), 128)
                fork = await session.fork(128)
                await fork.truncate(100)
                resumed = await client.resume(fork.ticket(), model)
                self.assertEqual(resumed.reused_tokens, 100)
                await resumed.renew()
                self.assertEqual(await client.append_many([topkv.AppendEntry(session, row, 129)]), [None])
                results = await client.query_many([topkv.QueryEntry(session, query)])
                self.assertEqual(len(results[0].heads[0].ids), 4)
                with self.assertRaises(topkv.UnsupportedError):
                    await session.save()
            self.assertEqual((await client.match(names)).tokens, 128)
            self.assertEqual(await client.prefix(topkv.PrefixVerb.EVICT, name=names[0]), 1)
            with self.assertRaises(topkv.ClosedError):
                await session.length()

        self.run_with(work)

    def test_leases_are_renewed(self):
        """While the loop does other things."""
        model = topkv.Model.uniform("lease", "lease", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)

        async def work(client):
            session = await client.open_session(model, lease=0.6)
            await asyncio.sleep(2.5)
            self.assertEqual((await session.length()).tokens, 0)

        self.run_with(work)

    def test_cancelled_tasks(self):
        model = topkv.Model.uniform("cancel", "cancel", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)

        async def work(client):
            session = await client.open_session(model)
            waiting = [asyncio.ensure_future(session.read(0, 1)) for _ in range(10)]  # rows that nobody puts
            await asyncio.sleep(0.1)
            begun = time.monotonic()
            for task in waiting:
                task.cancel()
            outcomes = await asyncio.gather(*waiting, return_exceptions=True)
            self.assertTrue(all(isinstance(outcome, asyncio.CancelledError) for outcome in outcomes))
            self.assertLess(time.monotonic() - begun, 30)
            self.assertEqual((client._driver.waiting, client._core.under_way), ({}, {}))
            with self.assertRaises(topkv.NotReadyError):
                await session.read(0, 1, deadline=0.2)

        self.run_with(work)

    def test_closed_with_tasks_waiting(self):
        model = topkv.Model.uniform("close", "close", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)

        async def work(client):
            session = await client.open_session(model)
            waiting = [asyncio.ensure_future(session.read(0, 1)) for _ in range(5)]
            await asyncio.sleep(0.1)
            client.close()
            outcomes = await asyncio.wait_for(asyncio.gather(*waiting, return_exceptions=True), 30)
            self.assertTrue(all(isinstance(outcome, topkv.ClosedError) for outcome in outcomes), outcomes)
            with self.assertRaises(topkv.ClosedError):
                await client.get("a")

        self.run_with(work)

    def test_waited_for_after_close(self):
        async def work(client):
            operation = client.begin_exists("a")
            client.close()
            with self.assertRaises(topkv.ClosedError):
                await client.wait(operation)

        self.run_with(work)

    def test_handles_used_again(self):
        """Two end in one turn; the first task cancels the other and awaits what has the other's handle now."""
        async def work(client):
            async def first(other):
                await client.exists("a")
                other[0].cancel()
                await client.exists("next")

            for _ in range(50):
                other = [None]
                task = asyncio.ensure_future(first(other))
                other[0] = asyncio.ensure_future(client.exists("b"))
                await asyncio.wait_for(task, 20)
                await asyncio.wait(other)
            self.assertEqual((client._driver.waiting, client._core.under_way), ({}, {}))

        self.run_with(work)

    def test_ended_by_others(self):
        """Whoever awaits an operation is woken, also if it is ended by a method of its own, or in another thread."""
        model = topkv.Model.uniform("others", "others", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)

        async def work(client):
            loop = asyncio.get_running_loop()
            session = await client.open_session(model)

            async def cancel(operation):
                operation.cancel()

            async def cancel_elsewhere(operation):
                await loop.run_in_executor(None, operation.cancel)

            async def cancel_elsewhere_slowly(operation):
                told = client._core.told

                def slowly(handle):
                    told(handle)
                    time.sleep(0.1)  # the tasks are awake before the operation has ended

                client._core.told = slowly
                client._driver.is_stopped = True  # it would wait for the lock
                try:
                    await cancel_elsewhere(operation)
                finally:
                    client._core.told = told
                    client._driver.is_stopped = False
                    client._driver.schedule()

            for end in (cancel, cancel_elsewhere, cancel_elsewhere_slowly):
                operation = session.begin_read(0, 1)  # rows that nobody puts
                waiting = [asyncio.ensure_future(client.wait(operation)) for _ in range(2)]
                await asyncio.sleep(0)
                await end(operation)
                for task in waiting:
                    with self.assertRaises(topkv.CancelledError):
                        await asyncio.wait_for(task, 20)
            for end in (lambda operation: operation.result(), lambda operation: support.wait_until(operation.done, "")):
                operation = client.begin_exists("a")
                task = asyncio.ensure_future(client.wait(operation))
                await asyncio.sleep(0)
                end(operation)
                self.assertIs(await asyncio.wait_for(task, 20), False)
            self.assertEqual((client._driver.waiting, client._core.under_way), ({}, {}))

        self.run_with(work)

    def test_awaited_twice(self):
        model = topkv.Model.uniform("twice", "twice", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)

        async def work(client):
            operation = client.begin_exists("a")
            both = asyncio.gather(client.wait(operation), client.wait(operation))
            self.assertEqual(await asyncio.wait_for(both, 20), [False, False])
            session = await client.open_session(model)
            operation = session.begin_read(0, 1)
            one, other = [asyncio.ensure_future(client.wait(operation)) for _ in range(2)]
            await asyncio.sleep(0)
            one.cancel()  # the other one still wants it
            await asyncio.wait([one])
            await session.put(bytes(32), 0)
            self.assertEqual(memoryview(await asyncio.wait_for(other, 20)).tobytes(), bytes(32))
            async with opened(self.node) as another:
                with self.assertRaises(topkv.InvalidError):
                    await asyncio.wait_for(another.wait(session.begin_length()), 20)

        self.run_with(work)

    def test_memory_of_many_gets(self):
        """After a large object, many small ones do not take as much memory each, nor do they for ever."""
        async def work(client):
            await asyncio.gather(*(client.put(f"small {i}", bytes(100)) for i in range(200)))
            await client.put("large", bytes(4 << 20))
            await client.get("large")
            core = client._core
            self.assertEqual(core.object_bytes, 4 << 20)
            waiting = asyncio.gather(*(client.get(f"small {i}") for i in range(200)))
            await asyncio.sleep(0)
            self.assertLess(sum(block.nbytes for block in core.blocks.values()), 100 << 20)
            self.assertEqual(await waiting, [bytes(100)] * 200)
            self.assertEqual((core.object_bytes, core.staged_bytes), (1 << 16, 0))
            await client.delete_prefix("small")

        self.run_with(work)

    def test_opened_twice_at_once(self):
        async def main():
            client = opened(self.node)
            outcomes = await asyncio.gather(client.open(), client.open(), return_exceptions=True)
            self.assertEqual(sum(isinstance(outcome, topkv.InvalidError) for outcome in outcomes), 1)
            self.assertFalse(await client.exists("a"))
            client.close()
            closed = opened(self.node)
            opening = asyncio.ensure_future(closed.open())
            await asyncio.sleep(0)
            closed.close()
            with self.assertRaises(topkv.ClosedError):
                await opening

        before = self.clients_open()
        asyncio.run(main())
        self.assertEqual(self.clients_open(), before)
        client = topkv.AsyncClient("127.0.0.1:9", deadline=5)
        for _ in range(2):  # one that could not be opened may be opened again
            with self.assertRaises(topkv.UnreachableError):
                asyncio.run(client.open())

    @staticmethod
    def clients_open():
        return sum(core.handle is not None for core in topkv._core._cores)

    def test_not_open(self):
        client = topkv.AsyncClient(self.node.address)
        with self.assertRaises(topkv.ClosedError):
            asyncio.run(client.get("a"))
        with self.assertRaises(topkv.ClosedError):
            client.nodes()
        client.close()

        async def twice():
            async with opened(self.node) as client:
                with self.assertRaises(topkv.InvalidError):
                    await client.open()

        asyncio.run(twice())
        with self.assertRaises(topkv.UnreachableError):
            asyncio.run(topkv.AsyncClient("127.0.0.1:9", deadline=5).open())

    def test_another_loop(self):
        client = opened(self.node)
        asyncio.run(client.open())
        with self.assertRaises(topkv.InvalidError) as caught:
            asyncio.run(client.get("a"))
        self.assertIn("loop", str(caught.exception))
        client.close()


class Stopped(unittest.TestCase):
    def test_node_stopped_and_killed(self):
        """Every task ends by its deadline, with words; the loop goes on meanwhile."""
        async def main(node):
            async with topkv.AsyncClient(node.address, deadline=2.0, peer_timeout=1.0) as client:
                await client.put("a", b"hello")
                support.freeze(node.pid)
                ticks = 0
                begun = time.monotonic()
                waiting = asyncio.gather(*(client.get("a") for _ in range(24)), return_exceptions=True)
                while not waiting.done() and time.monotonic() - begun < 60:
                    await asyncio.sleep(0.02)
                    ticks += 1
                outcomes = await waiting
                kinds = (topkv.DeadlineError, topkv.UnreachableError)
                self.assertTrue(all(isinstance(outcome, kinds) for outcome in outcomes), outcomes)
                self.assertIn(node.address, str(outcomes[0]))
                self.assertGreater(ticks, 5)
                os.kill(node.pid, signal.SIGCONT)
                self.assertEqual(await client.get("a", deadline=support.DEADLINE), b"hello")
                node.kill()
                with self.assertRaises(kinds):
                    await client.get("a")

        with topkv.Node(memory="64M", threads=1) as node:
            asyncio.run(main(node))


if __name__ == "__main__":
    unittest.main()
