#!/usr/bin/env python3
"""Objects, batches, memory, and arguments that are wrong."""
import array
import ctypes
import gc
import mmap
import threading
import time
import unittest
import unittest.mock

import support
import topkv

support.needs_node()


class Objects(support.NodeCase):
    def test_put_get_delete(self):
        client = self.client
        self.assertFalse(client.exists("a"))
        self.assertIsNone(client.size("a"))
        client.put("a", b"hello")
        client.put("a", b"hello")  # the same bytes
        self.assertTrue(client.exists("a"))
        self.assertEqual(client.size("a"), 5)
        self.assertEqual(client.get("a"), b"hello")
        with self.assertRaises(topkv.ExistsError) as caught:
            client.put("a", b"other")
        self.assertIn(self.node.address, str(caught.exception))
        self.assertIs(caught.exception.status, topkv.Status.EXISTS)
        self.assertTrue(client.delete("a"))
        self.assertFalse(client.delete("a"))
        with self.assertRaises(topkv.NotFoundError) as caught:
            client.get("a")
        self.assertIsInstance(caught.exception, LookupError)
        self.assertIn("object a", caught.exception.detail)

    def test_sizes(self):
        for size in (0, 1, 65535, 65536, 1 << 20, (3 << 20) + 17, 9 << 20):
            data = bytes(range(256)) * (size // 256) + b"x" * (size % 256)
            self.client.put(f"size {size}", data)
            for _ in range(2):
                self.assertEqual(self.client.get(f"size {size}"), data)
            self.assertLessEqual(self.client._core.object_bytes, 4 << 20)
            out = bytearray(size)
            self.assertEqual(self.client.get_into(f"size {size}", out), size)
            self.assertEqual(out, data)
        self.client.delete_prefix("size")

    def test_anything_with_the_buffer_protocol(self):
        whole = bytes(range(200))
        numbers = array.array("I", range(50))
        with mmap.mmap(-1, 200) as pages:
            pages[:] = whole
            for at, data in enumerate([whole, bytearray(whole), memoryview(whole), numbers, pages,
                                       memoryview(whole)[50:150], (ctypes.c_char * 200)(*whole)]):
                self.client.put(f"protocol {at}", data)
                self.assertEqual(self.client.get(f"protocol {at}"), bytes(memoryview(data).cast("B")))
                self.client.delete(f"protocol {at}")
        for wrong in ("text", 7, None, memoryview(whole)[::2], [1, 2]):
            with self.assertRaises(topkv.InvalidError) as caught:
                self.client.put("wrong", wrong)
            self.assertIn("data", str(caught.exception))
        self.client.put("read only", whole)
        with self.assertRaises(topkv.InvalidError) as caught:
            self.client.get_into("read only", whole)
        self.assertIn("writable", str(caught.exception))

    def test_memory_is_let_go(self):
        data = bytearray(1000)
        self.client.put("let go", data)
        support.wait_until(lambda: not self.client.is_busy(data), "the memory is free")
        data += b"grows"  # BufferError while somebody shows it
        with self.assertRaises(topkv.ExistsError):
            self.client.put("let go", data)
        data += b"after an error, too"

    def test_too_large(self):
        self.client.put("large", bytes(1000))
        out = bytearray(b"-" * 999)
        with self.assertRaises(topkv.TooLargeError) as caught:
            self.client.get_into("large", out)
        self.assertEqual(caught.exception.nbytes, 1000)
        self.assertEqual(out, b"-" * 999)
        with self.assertRaises(topkv.TooLargeError):
            self.client.put("larger", bytes(topkv.OBJECT_BYTES_MAX + 1))

    def test_batches(self):
        items = [(f"batch {i}", bytes([i]) * (i * 1000)) for i in range(20)]
        results = self.client.put_many(items)
        self.assertEqual([result.name for result in results], [name for name, _ in items])
        self.assertTrue(all(result.ok for result in results))
        results = self.client.put_many([("batch 1", b"other"), ("batch 20", b"new")])
        self.assertEqual([result.status for result in results], [topkv.Status.EXISTS, topkv.Status.OK])
        with self.assertRaises(topkv.ExistsError):
            results[0].check()
        names = ["batch 3", "none", "batch 0", "batch 19"]
        results = self.client.get_many(names)
        self.assertEqual([result.data for result in results], [items[3][1], None, b"", items[19][1]])
        self.assertEqual(results[1].status, topkv.Status.NOT_FOUND)
        results = self.client.exists_many(names)
        self.assertEqual([(result.ok, result.nbytes) for result in results],
                         [(True, 3000), (False, 0), (True, 0), (True, 19000)])
        outs = [bytearray(3000), bytearray(10), bytearray(18999)]
        results = self.client.get_many_into([("batch 3", outs[0]), ("none", outs[1]), ("batch 19", outs[2])])
        self.assertEqual([result.status.name for result in results], ["OK", "NOT_FOUND", "TOO_LARGE"])
        self.assertEqual(outs[0], items[3][1])
        self.assertEqual(results[2].nbytes, 19000)
        self.assertEqual([result.ok for result in self.client.delete_many(["batch 1", "none"])], [True, False])
        self.assertEqual(self.client.put_many([]), [])
        self.assertEqual(self.client.get_many([]), [])
        infos = self.client.list_objects("batch ")
        self.assertEqual(len(infos), 20)
        self.assertEqual(len(self.client.list_objects("batch ", limit=7)), 7)
        self.assertEqual({info.name: info.nbytes for info in infos}["batch 19"], 19000)
        self.assertEqual(self.client.delete_prefix("batch "), (20, sum(info.nbytes for info in infos)))
        self.assertEqual(self.client.list_objects("batch "), [])

    def test_times(self):
        self.client.put("short", b"x", ttl=0.2)
        self.client.put("evictable", b"x", evictable=True, ttl=float("inf"))
        infos = {info.name: info for info in self.client.list_objects()}
        self.assertTrue(infos["evictable"].evictable)
        self.assertIsNone(infos["evictable"].ttl_left)
        support.wait_until(lambda: not self.client.exists("short"), "its time is over")

    def test_names(self):
        for name in ("", "x" * 256, "a\0b", b"a\0b", "\u20ac" * 100):
            with self.assertRaises(topkv.InvalidError):
                self.client.put(name, b"")
            with self.assertRaises(topkv.InvalidError):
                self.client.exists_many(["fine", name])
        for name in ("x" * 255, "\u20ac", b"\xff\xfe"):
            self.client.put(name, b"n")
            self.assertEqual(self.client.get(name), b"n")
            shown = [info.name for info in self.client.list_objects(name)]
            self.assertEqual(len(shown), 1)
            self.assertEqual(self.client.get(shown[0]), b"n")
            self.client.delete(name)

    def test_wrong_arguments(self):
        client = self.client
        for call, words in (
            (lambda: client.put("a", b"", ttl=0), "ttl"),
            (lambda: client.put("a", b"", ttl=-1), "ttl"),
            (lambda: client.put("a", b"", ttl=1e9), "ttl"),
            (lambda: client.put("a", b"", deadline=0), "deadline"),
            (lambda: client.get("a", deadline=-2), "deadline"),
            (lambda: client.allocate(0), "nbytes"),
            (lambda: client.allocate(1.5), "nbytes"),
            (lambda: client.table("nonsense"), "nonsense"),
            (lambda: client.ping(1), "node"),
            (lambda: client.list_objects(node=1), "node"),
            (lambda: client.delete_prefix("a", node=-1), "node"),
        ):
            with self.assertRaises(topkv.TopKVError) as caught:
                call()
            self.assertIn(words, str(caught.exception))

    def test_refused_begins_keep_nothing(self):
        core, client, data = self.client._core, self.client, bytearray(1000)
        calls = (
            lambda: client.put("a", data, deadline=0),
            lambda: client.put("a", data, ttl=0),
            lambda: client.get_into("a", data, deadline=-1),
            lambda: client.get("a", deadline=0),
            lambda: client.put_many([("a", data), ("", data)]),
            lambda: client.put_many([("a", data)], deadline=0),
            lambda: client.get_many_into([("a", data)], deadline=0),
            lambda: client.put("a", b"", deadline=0),
        )
        client.put("a", b"")  # the pool has a block
        counts = {"kv_buffer_map": 0, "kv_buffer_free": 0}
        patches = [
            unittest.mock.patch.object(topkv._core.waits, name, support.counting(name, counts))
            for name in counts
        ]
        with patches[0], patches[1]:
            for call in calls:
                with self.assertRaises(topkv.InvalidError):
                    call()
        self.assertEqual(counts["kv_buffer_map"], counts["kv_buffer_free"])
        self.assertEqual((len(core.blocks), core.staged_bytes), (1, 0))
        data += b"grows"
        client.delete("a")

    def test_nodes_and_tables(self):
        info = self.client.nodes()[0]
        self.assertEqual((info.address, info.state), (self.node.address, topkv.NodeState.CONNECTED))
        self.assertGreater(info.memory_bytes, 1 << 26)
        status = {line["name"]: line["value"] for line in self.client.table("status")}
        self.assertEqual(status["state"], "serving")
        self.assertGreater(self.client.ping(), 0)

    def test_begun_operations(self):
        begun = [self.client.begin_put(f"begun {i}", b"x" * 100000) for i in range(50)]
        for operation in begun:
            self.assertIsNone(operation.result())
            self.assertTrue(operation.done())
        outs = [bytearray(100000) for _ in range(50)]
        begun = [self.client.begin_get_into(f"begun {i}", out) for i, out in enumerate(outs)]
        support.wait_until(lambda: all([operation.done() for operation in begun]), "all have ended")
        self.assertEqual([operation.result() for operation in begun], [100000] * 50)
        self.assertTrue(all(out == b"x" * 100000 for out in outs))
        operation = self.client.begin_get_into("begun 1", outs[0])
        operation.cancel()
        with self.assertRaises(topkv.CancelledError):
            operation.result()
        for i in range(20):  # dropped: cancelled, and their memory kept for so long
            self.client.begin_get_into(f"begun {i}", bytearray(100000))
        self.assertEqual(self.client.get("begun 3"), b"x" * 100000)
        self.client.delete_prefix("begun")

    def test_too_many_operations(self):
        with support.client_of(self.node, ops_max=4) as client:
            begun = [client.begin_size("x") for _ in range(4)]
            with self.assertRaises(topkv.BusyError):
                client.begin_size("x")
            for operation in begun:
                operation.result()
            self.assertIsNone(client.size("x"))


class Shared(Objects):
    """The same over shared memory."""

    transport = "shm"


class Buffers(support.NodeCase):
    def test_in_place(self):
        buffer = self.client.allocate(1 << 20)
        view = memoryview(buffer).cast("B")
        self.assertEqual((len(view), len(buffer), buffer.nbytes), (1 << 20, 1 << 20, 1 << 20))
        view[:5] = b"hello"
        self.client.put("whole", buffer)
        self.client.put("part", view[1:4])
        self.assertEqual(self.client.get("part"), b"ell")
        self.assertEqual(self.client.get_into("part", view[100:200]), 3)
        self.assertEqual(bytes(view[100:103]), b"ell")
        self.assertFalse(self.client._core.quarantine)
        self.client.delete_many(["whole", "part"])

    def test_numpy(self):
        try:
            import numpy
        except ImportError:
            self.skipTest("no numpy")
        buffer = self.client.allocate(4096)
        numbers = numpy.frombuffer(buffer, numpy.float32)
        numbers[:] = numpy.arange(1024)
        self.client.put("numbers", numbers[256:512])
        self.assertEqual(self.client.get("numbers"), numpy.arange(256, 512, dtype=numpy.float32).tobytes())
        with self.assertRaises(topkv.InvalidError):
            self.client.put("numbers", numbers[::2])
        frozen = numpy.arange(10)
        frozen.flags.writeable = False
        self.client.put("frozen", frozen)
        with self.assertRaises(topkv.InvalidError):
            self.client.get_into("frozen", frozen)

    def test_freed_with_its_last_view(self):
        core = self.client._core
        buffer = self.client.allocate(1 << 16)
        view = memoryview(buffer)[10:20]
        del buffer
        gc.collect()
        self.client.poll()
        self.assertEqual(len(core.blocks), 1)
        self.assertEqual(len(view), 10)
        del view
        gc.collect()
        self.client.poll()
        self.assertEqual(len(core.blocks), 0)

    def test_outlives_the_client(self):
        client = support.client_of(self.node)
        buffer = client.allocate(1 << 16)
        view = memoryview(buffer).cast("B")
        client.close()
        view[:] = b"y" * (1 << 16)  # no fault
        self.assertEqual(view[77], ord("y"))
        with self.assertRaises(topkv.ClosedError):
            client.put("x", buffer)
        core = client._core
        self.assertIsNotNone(core.handle)
        del buffer, view
        gc.collect()
        self.assertIsNone(core.handle)

    def test_not_made_by_hand(self):
        with self.assertRaises(topkv.InvalidError):
            topkv.Buffer()


class Clients(support.NodeCase):
    def test_closed(self):
        client = support.client_of(self.node)
        client.close()
        client.close()
        for call in (lambda: client.get("a"), client.nodes, client.poll, lambda: client.allocate(1)):
            with self.assertRaises(topkv.ClosedError):
                call()

    def test_closed_with_operations_under_way(self):
        for _ in range(20):
            client = support.client_of(self.node)
            outs = [bytearray(1 << 20) for _ in range(8)]
            begun = [client.begin_put(f"under way {i}", out) for i, out in enumerate(outs)]
            begun += [client.begin_get_into(f"under way {i}", out) for i, out in enumerate(outs)]
            client.close()
            for operation in begun:
                try:
                    operation.result()
                except topkv.TopKVError:
                    pass
            outs[0] += b"free again"
        self.client.delete_prefix("under way")

    def test_options(self):
        for options, words in (
            ({"nodes": ""}, "nodes"),
            ({"nodes": "a:1,a:1"}, "twice"),
            ({"nodes": "127.0.0.1:1\0"}, "nodes"),
            ({"transport": "carrier pigeon"}, "transport"),
            ({"poll": "never"}, "poll"),
            ({"deadline": 0}, "deadline"),
            ({"tenant": -1}, "tenant"),
            ({"tenant": 1 << 32}, "tenant"),
            ({"ops_max": 1.5}, "ops_max"),
        ):
            with self.assertRaises(topkv.InvalidError) as caught:
                topkv.Client(**{"nodes": self.node.address, **options})
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(topkv.UnreachableError) as caught:
            topkv.Client("127.0.0.1:9", deadline=5)
        self.assertIn("127.0.0.1:9", str(caught.exception))

    def test_tenants(self):
        with support.client_of(self.node, tenant=7) as other:
            self.client.put("mine", b"1")
            self.assertFalse(other.exists("mine"))

    def test_closed_by_another_thread(self):
        """It ends a wait of a minute."""
        model = topkv.Model.uniform("closer", "closer", n_layers=1, n_kv_heads=1, d_k=16, d_v=16)
        client = support.client_of(self.node)
        session = client.open_session(model)
        begun = time.monotonic()
        thread = threading.Timer(0.2, client.close)
        thread.start()
        with self.assertRaises(topkv.ClosedError):
            session.read(0, 1)
        thread.join()
        self.assertLess(time.monotonic() - begun, 30)
        self.assertEqual((client._core.handle, client._core.under_way), (None, {}))

    def test_threads(self):
        """Several threads may use a client: one at a time."""
        errors = []

        def work(number):
            try:
                for i in range(50):
                    data = bytes([number]) * (1000 * number)
                    self.client.put(f"thread {number} {i}", data)
                    if self.client.get(f"thread {number} {i}") != data:
                        errors.append("other bytes")
            except Exception as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(errors, [])
        self.client.delete_prefix("thread")

    def test_gil_is_released(self):
        """Other threads run while one waits for rows that never come."""
        model = topkv.Model.uniform("gil", "gil", n_layers=1, n_kv_heads=1, d_k=16, d_v=16)
        session = self.client.open_session(model)

        def ticks_during(call):
            """How often a second another thread gets to run."""
            ticks, is_over = [], threading.Event()

            def tick():
                while not is_over.is_set():
                    ticks.append(None)
                    time.sleep(0.001)

            thread = threading.Thread(target=tick)
            begun = time.monotonic()
            thread.start()
            call()
            seconds = time.monotonic() - begun
            is_over.set()
            thread.join()
            return len(ticks) / seconds

        def wait():
            with self.assertRaises(topkv.TopKVError):
                session.read(0, 1, deadline=1.0)

        alone = ticks_during(lambda: time.sleep(0.5))
        beside = ticks_during(wait)
        alone = min(alone, ticks_during(lambda: time.sleep(0.5)))  # the machine may be busy with other tests
        # A wait sleeps for a tenth of a second at a time: with the GIL kept there were some ten.
        self.assertGreater(alone, 40)
        self.assertGreater(beside, alone / 4)
        session.close()


if __name__ == "__main__":
    unittest.main()
