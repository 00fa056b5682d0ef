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
                os.kill(node.pid, signal.SIGSTOP)
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
