#!/usr/bin/env python3
"""topkv.lmcache over real nodes, without LMCache: what its adapter relies on, and every failure.

Machines of a test may be slow: what is checked of times is that nothing waits for a node, so every bound is
well below what waiting would take.

Environment: see support.py.
"""
import json
import logging
import os
import subprocess
import sys
import tempfile
import threading
import time
import unittest

from support import Caller, Node, content
from topkv import _core, _library, _object_worker, lmcache
from topkv._lmcache_objects import (MANIFEST_BYTES, Manifest, groups_of, Item, make_manifest, name_of,
                                    parse_manifest)

MIB = 1 << 20


def params(node, **more):
    return {"nodes": node.address, "dtype": "bfloat16", "chunk_size": 256, "log_interval_s": 0, **more}


class WithNode(unittest.TestCase):
    """A node for each class; a client closes with its test."""

    memory, disk = "512M", "none"

    @classmethod
    def setUpClass(cls):
        cls.node = Node(cls.memory, cls.disk).start()
        cls.addClassCleanup(cls.node.free)

    def caller(self, **more):
        more.setdefault("namespace", self._testMethodName[:64])
        client = lmcache.LMCacheClient(**params(self.node, **more))
        self.addCleanup(client.close)
        return Caller(client)


class Parameters(unittest.TestCase):
    good = {"nodes": "127.0.0.1:1", "dtype": "bfloat16", "chunk_size": 256}

    def test_wrong_ones_are_refused_in_words(self):
        for change, words in (
            ({"node": "x"}, "node: unknown parameter"),
            ({"nodes": None}, "nodes: None: must be text"),
            ({"nodes": ""}, "nodes: '': must be text"),
            ({"chunk_size": "256"}, "chunk_size: '256': must be a whole number from 1"),
            ({"chunk_size": True}, "chunk_size: True: must be a whole number"),
            ({"dtype": "bf 16"}, "dtype: 'bf 16': must be 1 to 32 letters"),
            ({"namespace": "a:b"}, "namespace: 'a:b': must be 1 to 64 letters"),
            ({"namespace": "x" * 65}, "must be 1 to 64 letters"),
            ({"tenant": -1}, "tenant: -1: must be a whole number from 0"),
            ({"transport": "rdma"}, "transport: 'rdma': must be one of auto, tcp, shm"),
            ({"workers": 0}, "workers: 0: must be a whole number from 1 to 16"),
            ({"deadline_ms": 1.5}, "deadline_ms: 1.5: must be a whole number"),
            ({"lookup_deadline_ms": 6000}, "lookup_deadline_ms: 6000: must be at most deadline_ms, 5000"),
            ({"ttl_s": 2592001}, "ttl_s: 2592001: must be a whole number from 0 to 2592000"),
            ({"on_conflict": "fail"}, "on_conflict: 'fail': must be one of keep, replace"),
        ):
            with self.subTest(change=change), self.assertRaises(ValueError) as raised:
                lmcache.LMCacheClient(**{**self.good, **change})
            self.assertIn(words, str(raised.exception))

    def test_needed_ones_are_named(self):
        for name in self.good:
            given = {key: value for key, value in self.good.items() if key != name}
            with self.subTest(name=name), self.assertRaisesRegex(ValueError, f"{name}: missing"):
                lmcache.LMCacheClient(**given)

    def test_a_list_of_nodes_that_is_none_is_refused(self):
        for nodes in ("nowhere", "127.0.0.1:7400,127.0.0.1:7400", "127.0.0.1:99999"):
            with self.subTest(nodes=nodes), self.assertRaisesRegex(RuntimeError, "nodes"):
                lmcache.LMCacheClient(**{**self.good, "nodes": nodes})


class Names(unittest.TestCase):
    def test_names_fit_and_differ(self):
        prefix = b"lmcache:" + b"n" * 64 + b":" + b"d" * 32 + b":1048576:"
        keys = ["", "a", "a@00000001@0@ff", "x" * 300, "x" * 301, "a\0b", "a", "\ud800", "ä" * 200]
        names = [name_of(prefix, key) for key in keys]
        self.assertEqual(len(set(names)), len(set(keys)))
        for name in names:
            self.assertLessEqual(len(name), _library.NAME_BYTES_MAX)
            self.assertNotIn(b"\0", name)
        self.assertEqual(names[2], prefix + b"k:a@00000001@0@ff")

    def test_manifests(self):
        limit = _library.OBJECT_BYTES_MAX
        for total in (limit + 1, 2 * limit, 2 * limit + 1, 10 * limit - 7):
            manifest = make_manifest(total)
            self.assertEqual(sum(manifest.sizes()), total)
            self.assertEqual(manifest.n_parts, -(-total // limit))
            self.assertTrue(all(0 < size <= limit for size in manifest.sizes()))
            self.assertEqual(parse_manifest(manifest.pack()), manifest)
            self.assertEqual(len(manifest.pack()), MANIFEST_BYTES)
            for name in manifest.names(b"lmcache:" + b"n" * 110):
                self.assertLessEqual(len(name), _library.NAME_BYTES_MAX)
        good = make_manifest(limit + 1)
        self.assertNotEqual(make_manifest(limit + 1).set_id, good.set_id)
        for bad in (good._replace(n_parts=3), good._replace(n_parts=0, total=0),
                    good._replace(part_bytes=limit + 1), good._replace(part_bytes=0),
                    Manifest(1 << 60, 1, 1 << 31, good.set_id)):
            self.assertIsNone(parse_manifest(bad.pack()))
        self.assertIsNone(parse_manifest(good.pack()[:-1]))
        self.assertIsNone(parse_manifest(b"x" * MANIFEST_BYTES))

    def test_groups_are_of_a_few_mib(self):
        sizes = [64 << 10] * 100 + [5 * MIB] * 3 + [1] * 200
        groups = groups_of([Item(i, b"", 0, size) for i, size in enumerate(sizes)])
        self.assertEqual([item.position for group in groups for item in group], list(range(len(sizes))))
        for group in groups:
            self.assertTrue(len(group) == 1 or sum(item.bytes for item in group) <= 4 * MIB)
            self.assertLessEqual(len(group), 64)
        self.assertLess(len(groups), 12)


class Interface(unittest.TestCase):
    """The check of LMCache's version and of how its adapter calls a client."""

    adapter = """
class Adapter:
    def run(self, keys, views):
        self._client_fd = int(self._client.event_fd())
        self._client.submit_batch_set(keys, views)
        self._client.submit_batch_get(keys, views)
        self._client.submit_batch_exists(keys)
        self._client.submit_batch_delete(keys)
        completions = self._client.drain_completions()
        for (number, ok, error, bools) in completions:
            pass
        self._client.close()

def make(native_client):
    required_methods = ["event_fd", "close"]
    native_client.close()
"""

    def check(self, text, version="0.5.6"):
        with tempfile.NamedTemporaryFile("w", suffix=".py") as file:
            file.write(text)
            file.flush()
            lmcache.check_lmcache(version, [file.name])

    def test_what_fits_is_accepted(self):
        self.check(self.adapter)
        self.check(self.adapter, "0.5.7.dev3+g1234")
        self.check(self.adapter, "1.0")

    def test_what_does_not_fit_is_refused_in_words(self):
        for old, new, words in (
            ("submit_batch_exists(keys)", "submit_batch_exists(keys, 3)", "it calls submit_batch_exists"),
            ("submit_batch_get(keys, views)", "submit_batch_get(keys, views, offset=1)", "offset"),
            ("submit_batch_delete(keys)", "submit_batch_touch(keys)", "submit_batch_touch"),
            ("error, bools)", "error, bools, sizes)", "a completion has 5 fields, not 4"),
            ('"event_fd", "close"', '"event_fd", "register_memory"', "it needs register_memory()"),
        ):
            self.assertIn(old, self.adapter)
            with self.subTest(new=new), self.assertRaises(RuntimeError) as raised:
                self.check(self.adapter.replace(old, new))
            self.assertIn(words, str(raised.exception))

    def test_old_and_unknown_versions_are_refused(self):
        for version in ("0.5.5", "0.4", "unknown"):
            with self.subTest(version=version), self.assertRaisesRegex(RuntimeError, "0.5.6 and newer"):
                self.check(self.adapter, version)

    def test_importing_needs_no_lmcache(self):
        self.assertNotIn("lmcache", sys.modules)


class Data(WithNode):
    sizes = [0, 1, 2, MANIFEST_BYTES, 4096, 65536, MIB, MIB + 1, 5 * MIB + 3]

    def test_what_is_stored_is_loaded(self):
        for transport in ("shm", "tcp"):
            for workers in (1, 3):
                with self.subTest(transport=transport, workers=workers):
                    caller = self.caller(transport=transport, workers=workers,
                                         namespace=f"round-{transport}-{workers}")
                    keys = [f"model/a@{i:08x}@0@{i * 77:x}" for i in range(len(self.sizes))]
                    data = [content(key, size) for key, size in zip(keys, self.sizes)]
                    self.assertEqual(caller.lookup(keys), [False] * len(keys))
                    self.assertEqual(caller.load(keys, self.sizes)[0], [False] * len(keys))
                    self.assertEqual(caller.store(keys, data), (True, "", None))
                    self.assertEqual(caller.lookup(["absent"] + keys), [False] + [True] * len(keys))
                    bools, buffers = caller.load(keys, self.sizes)
                    self.assertEqual(bools, [True] * len(keys))
                    self.assertEqual([bytes(b) for b in buffers], data)
                    self.assertEqual(caller.delete(["absent"] + keys[:2]), [False, True, True])
                    self.assertEqual(caller.lookup(keys), [False] * 2 + [True] * (len(keys) - 2))

    def test_an_empty_batch_ends(self):
        caller = self.caller()
        self.assertEqual(caller.store([], []), (True, "", None))
        self.assertEqual(caller.lookup([]), [])

    def test_many_small_keys(self):
        caller = self.caller(workers=2)
        keys = [f"k{i}" for i in range(3000)]
        data = [content(key, 100 + i % 900) for i, key in enumerate(keys)]
        self.assertTrue(caller.store(keys, data)[0])
        self.assertEqual(caller.lookup(keys), [True] * len(keys))
        bools, buffers = caller.load(keys, [len(d) for d in data])
        self.assertTrue(all(bools))
        self.assertEqual([bytes(b) for b in buffers], data)

    def test_another_length_is_a_miss_and_writes_nothing_outside(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport=transport):
                caller = self.caller(transport=transport, namespace="length-" + transport)
                size = 3 * MIB
                self.assertTrue(caller.store(["k"], [content("k", size)])[0])
                for wanted in (size - 1, size + 1, 1, 2 * size):
                    arena = bytearray(b"\x5a" * (wanted + 8192))
                    view = memoryview(arena)[4096 : 4096 + wanted]
                    ok, error, bools = caller.wait(caller.client.submit_batch_get(["k"], [view]))
                    self.assertEqual((ok, bools), (False, [False]))
                    self.assertIn("other length", error)
                    self.assertEqual(bytes(arena[:4096]), b"\x5a" * 4096)
                    self.assertEqual(bytes(arena[-4096:]), b"\x5a" * 4096)
                self.assertEqual(caller.client.stats()["loads_of_other_length"], 4)

    def test_what_a_buffer_may_be(self):
        caller = self.caller()
        self.assertTrue(caller.store(["a", "b"], [b"read only", bytearray(b"writable")])[0])
        with self.assertRaises(BufferError):
            caller.client.submit_batch_get(["a"], [memoryview(b"read only")])
        with self.assertRaisesRegex(ValueError, "2 keys and 1 buffers"):
            caller.client.submit_batch_set(["a", "b"], [b"x"])
        self.assertEqual(caller.lookup(["a", "b"]), [True, True])

    def test_a_miss_among_hits(self):
        caller = self.caller()
        self.assertTrue(caller.store(["a", "c"], [content("a", 900), content("c", 900)])[0])
        ok, error, bools = caller.wait(caller.client.submit_batch_get(
            ["a", "b", "c"], [bytearray(900) for _ in range(3)]))
        self.assertEqual(bools, [True, False, True])
        # Callers that look at `ok` alone must not take the miss for data.
        self.assertFalse(ok)
        self.assertIn("1 of 3 keys not loaded: not_found", error)

    def test_of_different_bytes_the_first_are_kept_or_replaced(self):
        for how, salt in (("keep", 1), ("replace", 2)):
            with self.subTest(how=how):
                caller = self.caller(on_conflict=how, namespace="conflict-" + how)
                self.assertTrue(caller.store(["k"], [content("k", 5000, 1)])[0])
                self.assertTrue(caller.store(["k"], [content("k", 5000, 1)])[0])
                self.assertTrue(caller.store(["k"], [content("k", 5000, 2)])[0])
                bools, buffers = caller.load(["k"], [5000])
                self.assertEqual((bools, bytes(buffers[0])), ([True], content("k", 5000, salt)))
                stats = caller.client.stats()
                self.assertEqual(stats["stores_kept"], how == "keep")
                self.assertEqual(stats["stores_replaced"], how == "replace")

    def test_another_length_replaces(self):
        caller = self.caller()
        for size in (5000, 6000, 100):
            self.assertTrue(caller.store(["k"], [content("k", size)])[0])
            bools, buffers = caller.load(["k"], [size])
            self.assertEqual((bools, bytes(buffers[0])), ([True], content("k", size)))

    def test_long_keys_and_odd_ones(self):
        caller = self.caller()
        keys = ["x" * 250, "x" * 251, "a\0b", "a", "\ud800", ""]
        data = [content(key, 1000 + i) for i, key in enumerate(keys)]
        self.assertTrue(caller.store(keys, data)[0])
        bools, buffers = caller.load(keys, [len(d) for d in data])
        self.assertTrue(all(bools))
        self.assertEqual([bytes(b) for b in buffers], data)

    def test_namespaces_and_tenants_are_apart(self):
        one = {"namespace": "n1", "tenant": 3}
        caller = self.caller(**one)
        self.assertTrue(caller.store(["k"], [b"data"])[0])
        for change in ({"namespace": "n2"}, {"tenant": 4}, {"dtype": "fp8_e4m3"}, {"chunk_size": 512}):
            with self.subTest(change=change):
                self.assertEqual(self.caller(**{**one, **change}).lookup(["k"]), [False])
        self.assertEqual(self.caller(**one).lookup(["k"]), [True])

    def test_another_process_finds_it(self):
        caller = self.caller()
        self.assertTrue(caller.store(["k"], [content("k", 3 * MIB)])[0])
        code = ("import sys, json; from support import *; from topkv.lmcache import LMCacheClient\n"
                "c = Caller(LMCacheClient(**json.loads(sys.argv[1])))\n"
                "bools, buffers = c.load(['k'], [3 << 20])\n"
                "assert bools == [True] and bytes(buffers[0]) == content('k', 3 << 20)\n"
                "c.client.close(); print('found')")
        given = json.dumps(params(self.node, namespace=self._testMethodName))
        done = subprocess.run([sys.executable, "-c", code, given], capture_output=True, text=True,
                              cwd=os.path.dirname(os.path.abspath(__file__)), timeout=120)
        self.assertEqual((done.returncode, done.stdout), (0, "found\n"), done.stderr)

    def test_time_to_live(self):
        caller = self.caller(ttl_s=1)
        self.assertTrue(caller.store(["k"], [b"data"])[0])
        until = time.monotonic() + 60
        while caller.lookup(["k"]) == [True]:
            self.assertLess(time.monotonic(), until, "it stays for longer than its time")
            time.sleep(0.1)

    def test_counters(self):
        caller = self.caller(workers=2)
        keys = [f"k{i}" for i in range(10)]
        caller.store(keys[:6], [content(key, 1000) for key in keys[:6]])
        caller.lookup(keys)
        caller.load(keys, [1000] * 10)
        caller.delete(keys[:2])
        stats = caller.client.stats()
        self.assertEqual({name: stats[name] for name in (
            "stores", "stored_bytes", "lookups_hit", "lookups_missed", "loads", "loads_missed", "loaded_bytes",
            "deletes", "stores_failed", "workers", "connected", "pending_batches", "pending_keys")}, {
            "stores": 6, "stored_bytes": 6000, "lookups_hit": 6, "lookups_missed": 4, "loads": 6,
            "loads_missed": 4, "loaded_bytes": 6000, "deletes": 2, "stores_failed": 0, "workers": 2,
            "connected": 2, "pending_batches": 0, "pending_keys": 0})


class Parts(WithNode):
    """Data larger than an object."""

    memory = "1G"
    size = _library.OBJECT_BYTES_MAX + 5 * MIB + 7

    def names(self):
        code, out, err = self.node.kvctl("--json", "objects", "--prefix", f"lmcache:{self._testMethodName}:")
        self.assertEqual(code, 0, err)
        return {json.loads(line)["name"] for line in out.splitlines() if '"name"' in line}

    def test_it_is_cut_and_put_together(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport=transport):
                caller = self.caller(transport=transport)
                data = content("big", self.size)
                self.assertTrue(caller.store(["big", "small"], [data, b"s"])[0])
                self.assertEqual(len(self.names()), 4)  # two parts, the manifest and the small one
                self.assertEqual(caller.lookup(["big", "small", "none"]), [True, True, False])
                bools, buffers = caller.load(["small", "big"], [1, self.size])
                self.assertEqual(bools, [True, True])
                self.assertEqual(bytes(buffers[1]), data)
                for other in (self.size - 1, self.size + 1, MIB, MANIFEST_BYTES):
                    self.assertEqual(caller.load(["big"], [other])[0], [False], other)
                self.assertEqual(caller.load(["small"], [self.size])[0], [False])
                self.assertEqual(caller.delete(["big", "small"]), [True, True])
                self.assertEqual(self.names(), set())

    def test_a_set_that_is_not_complete_is_a_miss_and_is_replaced(self):
        caller = self.caller()
        data = content("big", self.size)
        self.assertTrue(caller.store(["big"], [data])[0])
        part = sorted(name for name in self.names() if ":p:" in name)[0]
        self.assertEqual(self.node.kvctl("delete", part)[0], 0)
        self.assertEqual(caller.lookup(["big"]), [False])
        self.assertEqual(caller.load(["big"], [self.size])[0], [False])
        self.assertTrue(caller.store(["big"], [data])[0])
        self.assertEqual(caller.lookup(["big"]), [True])
        bools, buffers = caller.load(["big"], [self.size])
        self.assertEqual((bools, bytes(buffers[0])), ([True], data))
        self.assertEqual(len(self.names()), 3)

    def test_two_sets_are_never_mixed(self):
        one, two = self.caller(), self.caller()
        self.assertTrue(one.store(["big"], [content("big", self.size, 1)])[0])
        self.assertTrue(two.store(["big"], [content("big", self.size, 2)])[0])
        bools, buffers = one.load(["big"], [self.size])
        self.assertEqual((bools, bytes(buffers[0])), ([True], content("big", self.size, 1)))
        self.assertEqual(len(self.names()), 3)  # nothing is left of the second set
        longer = self.size + 100
        self.assertTrue(two.store(["big"], [content("big", longer, 3)])[0])
        bools, buffers = one.load(["big"], [longer])
        self.assertEqual((bools, bytes(buffers[0])), ([True], content("big", longer, 3)))
        self.assertTrue(two.store(["big"], [b"short"])[0])
        self.assertEqual(one.load(["big"], [5])[0], [True])
        self.assertEqual(len(self.names()), 1)


class Full(WithNode):
    """Memory that is short."""

    memory = "256M"

    def test_evicted_keys_are_misses(self):
        caller = self.caller()
        size, n = 8 * MIB, 60
        keys = [f"k{i}" for i in range(n)]
        for key in keys:
            ok, error, _ = caller.store([key], [content(key, size)])
            self.assertTrue(ok, error)
        found = caller.lookup(keys)
        self.assertLess(sum(found), n)
        self.assertTrue(found[-1])
        n_loaded = 0
        for key in keys:
            bools, buffers = caller.load([key], [size])
            n_loaded += bools[0]
            if bools[0]:
                self.assertEqual(bytes(buffers[0]), content(key, size))
        self.assertGreater(n_loaded, 0)
        self.assertLess(n_loaded, n)
        self.assertEqual(caller.client.stats()["stores_failed"], 0)


class FullForGood(WithNode):
    memory = "256M"

    def test_a_store_that_finds_no_room_fails_alone(self):
        with tempfile.NamedTemporaryFile() as file:
            file.write(os.urandom(40 * MIB))
            file.flush()
            n = 0
            while self.node.kvctl("put", f"other{n}", file.name)[0] == 0:
                n += 1
                self.assertLess(n, 20)
        caller = self.caller(deadline_ms=2000)
        with self.assertLogs("topkv.lmcache", logging.WARNING) as logged:
            for i in range(3):
                ok, error, bools = caller.store([f"k{i}"], [content("k", 50 * MIB)])
                self.assertEqual((ok, bools), (False, None))
                self.assertIn("1 of 1 keys not stored: no_memory", error)
        self.assertEqual(len(logged.records), 1)  # of one kind, one in a minute
        self.assertEqual(caller.lookup(["k0"]), [False])
        self.assertEqual(caller.client.stats()["status_no_memory"], 3)


class Stopped(WithNode):
    """A node that is stopped (SIGSTOP) takes connections and answers nothing."""

    def subTest(self, **of):
        self.node.thaw()
        return super().subTest(**of)

    def test_nothing_waits_for_it(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport=transport):
                caller = self.caller(transport=transport, deadline_ms=8000, lookup_deadline_ms=4000,
                                     workers=2, namespace="stopped-" + transport)
                keys = [f"k{i}" for i in range(16)]
                data = [content(key, 2 * MIB) for key in keys]
                self.assertTrue(caller.store(keys, data)[0])
                self.node.freeze()
                self.addCleanup(self.node.thaw)
                begun = time.monotonic()
                buffers = [bytearray(2 * MIB) for _ in keys]
                futures = [caller.client.submit_batch_exists(keys),
                           caller.client.submit_batch_get(keys, buffers),
                           caller.client.submit_batch_set([key + "x" for key in keys], data),
                           caller.client.submit_batch_delete(keys[:1])]
                caller.take()
                self.assertLess(time.monotonic() - begun, 2.0)
                took = []  # however slow the machine is, one of them had a core
                for _ in range(20):
                    since = time.monotonic()
                    futures.append(caller.client.submit_batch_exists(keys))
                    took.append(time.monotonic() - since)
                self.assertLess(min(took), 0.02)
                for future in futures:
                    _, _, bools = caller.wait(future, 30.0)
                    self.assertFalse(any(bools or [False]))
                self.assertLess(time.monotonic() - begun, 8.0 + 4.0)
                # The next ones know.
                begun = time.monotonic()
                for _ in range(5):
                    self.assertEqual(caller.lookup(keys), [False] * 16)
                self.assertLess(time.monotonic() - begun, 4 * 4.0)
                copies = [bytes(buffer) for buffer in buffers]
                self.node.thaw()
                until = time.monotonic() + 120
                bools = [False]
                while not all(bools):  # each worker finds the node again for itself
                    self.assertLess(time.monotonic(), until, "it does not find the node again")
                    time.sleep(0.05)
                    bools, loaded = caller.load(keys[1:], [2 * MIB] * 15)
                # Nobody writes to buffers of futures that have ended.
                self.assertEqual(copies, [bytes(buffer) for buffer in buffers])
                self.assertEqual([bytes(b) for b in loaded], data[1:])

    def test_close_does_not_wait_for_it(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport=transport):
                caller = self.caller(transport=transport, deadline_ms=60000, lookup_deadline_ms=60000,
                                     namespace="close-" + transport)
                keys = [f"k{i}" for i in range(8)]
                data = [content(key, 4 * MIB) for key in keys]
                self.assertTrue(caller.store(keys, data)[0])
                self.node.freeze()
                self.addCleanup(self.node.thaw)
                arena = bytearray(8 * 4 * MIB)
                views = [memoryview(arena)[i * 4 * MIB : (i + 1) * 4 * MIB] for i in range(8)]
                load = caller.client.submit_batch_get(keys, views)
                store = caller.client.submit_batch_set([key + "x" for key in keys], data)
                time.sleep(0.2)
                begun = time.monotonic()
                caller.client.close()
                self.assertLess(time.monotonic() - begun, 20.0)
                copy = bytes(arena)
                self.node.thaw()
                time.sleep(0.5)
                self.assertEqual(copy, bytes(arena))
                caller.take()
                self.assertEqual(caller.ended[load][2], [False] * 8)
                self.assertFalse(caller.ended[store][0])


class Restarted(unittest.TestCase):
    def run_killed(self, disk, restores):
        node = Node("512M", disk).start()
        self.addCleanup(node.free)
        client = lmcache.LMCacheClient(**params(node, deadline_ms=3000, workers=2))
        self.addCleanup(client.close)
        caller = Caller(client)
        keys = [f"k{i}" for i in range(12)]
        data = [content(key, MIB + i) for i, key in enumerate(keys)]
        sizes = [len(d) for d in data]
        self.assertTrue(caller.store(keys, data)[0])
        if disk != "none":
            time.sleep(3)  # it is saved a second after it was put
        node.kill()
        for _ in range(3):
            self.assertEqual(caller.lookup(keys), [False] * 12)
            self.assertEqual(caller.load(keys, sizes)[0], [False] * 12)
            self.assertFalse(caller.store(keys, data)[0])
        node.start()
        until = time.monotonic() + 60
        while True:
            self.assertLess(time.monotonic(), until, "no hits again")
            if restores:
                caller.store(keys, data)
            bools, buffers = caller.load(keys, sizes)
            for ok, buffer, wanted in zip(bools, buffers, data):
                self.assertTrue(not ok or bytes(buffer) == wanted, "wrong bytes")
            if all(bools):
                break
            time.sleep(0.1)
        self.assertEqual(caller.lookup(keys), [True] * 12)

    def test_killed_and_started_again(self):
        self.run_killed("none", True)

    def test_with_a_disk_it_finds_them_again(self):
        self.run_killed("1G", False)

    def test_a_node_that_starts_later(self):
        node = Node().start()
        self.addCleanup(node.free)
        node.kill()
        with self.assertLogs("topkv.lmcache", logging.WARNING) as logged:
            client = lmcache.LMCacheClient(**params(node, workers=2))
            self.addCleanup(client.close)
            caller = Caller(client)
            begun = time.monotonic()
            self.assertEqual(caller.lookup(["k"]), [False])
            self.assertFalse(caller.store(["k"], [b"data"])[0])
            self.assertLess(time.monotonic() - begun, 4.0)
        self.assertIn("not connected", logged.output[0])
        self.assertEqual(client.stats()["connected"], 0)
        node.start()
        until = time.monotonic() + 60
        while not caller.store(["k"], [b"data"])[0] or client.stats()["connected"] < 2:
            self.assertLess(time.monotonic(), until, "it does not find the node")
            time.sleep(0.05)
        self.assertEqual(caller.lookup(["k"]), [True])


class Life(WithNode):
    def test_a_forked_process_is_refused_in_words(self):
        caller = self.caller()
        self.assertTrue(caller.store(["k"], [b"data"])[0])
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = ""
            try:
                caller.client.submit_batch_exists(["k"])
            except RuntimeError as error:
                said = str(error)
            try:
                caller.client.stats()
            except RuntimeError as error:
                said += str(error) + "."
            caller.client.drain_completions()
            caller.client.close()
            os.write(write, said.encode())
            os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            said = file.read()
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(said.count(f"was forked from {os.getpid()}"), 2)
        self.assertEqual(caller.lookup(["k"]), [True])  # the parent's is as it was

    def make_one_in_a_fork(self):
        """Returns what the child says."""
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            said = "nothing"
            try:
                own = Caller(lmcache.LMCacheClient(**params(self.node, namespace=self._testMethodName)))
                said = repr(own.lookup(["k"]))
                own.client.close()
            except RuntimeError as error:
                said = str(error)
            finally:
                os.write(write, said.encode())
                os._exit(0)
        os.close(write)
        with os.fdopen(read) as file:
            said = file.read()
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        return said

    def test_a_forked_process_makes_none_of_its_own(self):
        caller = self.caller()
        self.assertTrue(caller.store(["k"], [b"data"])[0])
        self.assertIn(f"is a fork of process {os.getpid()}, which had a client open", self.make_one_in_a_fork())

    def test_a_forked_process_makes_one_if_none_was_open(self):
        caller = self.caller()
        self.assertTrue(caller.store(["k"], [b"data"])[0])
        caller.client.close()
        until = time.monotonic() + 60
        while _core.process.open:  # a worker that was still connecting closes that by itself
            self.assertLess(time.monotonic(), until, "clients stay open")
            time.sleep(0.01)
        self.assertEqual(self.make_one_in_a_fork(), "[True]")

    def test_close_ends_what_is_under_way(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport=transport):
                caller = self.caller(transport=transport, workers=2, namespace="under-way-" + transport)
                keys = [f"k{i}" for i in range(16)]
                data = [content(key, 4 * MIB) for key in keys]
                self.assertTrue(caller.store(keys, data)[0])
                arena = bytearray(16 * 4 * MIB)
                views = [memoryview(arena)[i * 4 * MIB : (i + 1) * 4 * MIB] for i in range(16)]
                load = caller.client.submit_batch_get(keys, views)
                caller.client.close()
                copy = bytes(arena)
                time.sleep(0.3)
                self.assertEqual(copy, bytes(arena))
                caller.take()
                bools = caller.ended[load][2]
                for ok, view, wanted in zip(bools, views, data):
                    self.assertTrue(not ok or bytes(view) == wanted)
                with self.assertRaisesRegex(RuntimeError, "is closed"):
                    caller.client.submit_batch_exists(["k"])
                caller.client.close()

    def test_who_closes_second_waits_for_the_first(self):
        caller = self.caller()
        stop = caller.client._workers[0].stop

        def stop_late():
            time.sleep(0.3)
            stop()

        caller.client._workers[0].stop = stop_late
        first = threading.Thread(target=caller.client.close)
        first.start()
        while not caller.client._is_closed:
            time.sleep(0.001)
        caller.client.close()
        self.assertFalse(any(worker.is_alive() for worker in caller.client._workers))
        first.join()

    def test_every_future_ends_though_another_thread_closes(self):
        for _ in range(20):
            client = lmcache.LMCacheClient(**params(self.node, workers=2))
            futures = []

            def submit():
                try:
                    while True:
                        futures.append(client.submit_batch_exists(["k"]))
                except RuntimeError:
                    pass

            thread = threading.Thread(target=submit)
            thread.start()
            while len(futures) < 5:
                time.sleep(0.0005)
            client.close()
            thread.join()
            self.assertEqual([done[0] for done in sorted(client.drain_completions())], futures)

    def test_descriptors_and_threads_go_with_it(self):
        def open_ones():
            return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

        for _ in range(2):  # what the first one leaves is the library's, once
            self.caller(workers=2).client.close()
        before = open_ones()
        for _ in range(5):
            caller = self.caller(workers=2)
            caller.store(["k"], [content("k", MIB)])
            caller.client.close()
        until = time.monotonic() + 30
        while open_ones() > before and time.monotonic() < until:
            time.sleep(0.05)
        self.assertLessEqual(open_ones(), before)

    def test_a_client_that_is_not_closed_lets_the_process_end(self):
        code = ("import sys, json; from support import *; from topkv.lmcache import LMCacheClient\n"
                "c = Caller(LMCacheClient(**json.loads(sys.argv[1]))); c.store(['k'], [b'x'])\n"
                "c.client.submit_batch_get(['k'] * 9, [bytearray(1) for _ in range(9)])")
        done = subprocess.run([sys.executable, "-c", code, json.dumps(params(self.node))],
                              cwd=os.path.dirname(os.path.abspath(__file__)), capture_output=True, timeout=60)
        self.assertEqual((done.returncode, done.stderr), (0, b""))


class Load(WithNode):
    """More than a client may have under way, or than fits in_flight_mb, waits in order."""

    def test_many_lookups_are_begun_once_each(self):
        class Waits:
            n_begun = 0

            def __getattr__(self, name):
                function = getattr(real, name)
                if name != "kv_objects_begin":
                    return function

                def counted(*arguments):
                    Waits.n_begun += 1
                    return function(*arguments)

                return counted

        caller = self.caller(workers=1, lookup_deadline_ms=600000, deadline_ms=600000)
        real = _object_worker.waits
        _object_worker.waits = Waits()
        try:
            futures = [caller.client.submit_batch_exists([f"k{i}"]) for i in range(6000)]
            for future in futures:
                self.assertEqual(caller.wait(future), (True, "", [False]))
        finally:
            _object_worker.waits = real
        self.assertLess(Waits.n_begun, 3 * len(futures))

    def test_no_more_bytes_are_under_way_than_allowed(self):
        for transport in ("shm", "tcp"):
            with self.subTest(transport=transport):
                caller = self.caller(transport=transport, workers=1, in_flight_mb=8, namespace="load-" + transport)
                worker = caller.client._workers[0]
                start, most = worker._start, []

                def watched(call, left_s):
                    begun = start(call, left_s)
                    most.append(worker._in_flight)
                    return begun

                worker._start = watched
                keys = [f"k{i}" for i in range(12)]
                data = [content(key, 3 * MIB) for key in keys]
                self.assertTrue(caller.store(keys, data)[0])
                self.assertEqual(caller.load(keys, [3 * MIB] * 12)[1], data)
                self.assertEqual(max(most), 6 * MIB)

    def test_what_waits_ends_by_its_deadline(self):
        caller = self.caller(workers=1, in_flight_mb=1, lookup_deadline_ms=300, deadline_ms=1000)
        self.node.freeze()
        self.addCleanup(self.node.thaw)
        begun = time.monotonic()
        futures = [caller.client.submit_batch_set([f"k{i}"], [content("k", MIB)]) for i in range(50)]
        for future in futures:
            self.assertFalse(caller.wait(future)[0])
        self.assertLess(time.monotonic() - begun, 30)
        self.node.thaw()
        self.assertGreater(caller.client.stats()["expired"] + caller.client.stats()["skipped"], 0)


class Mistakes(WithNode):
    """An exception where none is expected leaves no future open."""

    def test_in_a_flow(self):
        caller = self.caller(workers=1)
        self.assertTrue(caller.store(["k"], [b"data"])[0])

        def wrong(items, deadline, tell):
            tell([(0, True)], "")
            yield []
            raise KeyError("mistake")

        caller.client._objects[0].lookup = wrong
        with self.assertLogs("topkv.lmcache", logging.WARNING) as logged:
            self.assertEqual(caller.lookup(["a", "b"]), [True, False])
        self.assertIn("internal error: KeyError('mistake')", logged.output[0])
        self.assertEqual(caller.load(["k"], [4])[0], [True])

    def test_in_the_worker(self):
        caller = self.caller(workers=1)
        self.assertTrue(caller.store(["k"], [b"data"])[0])
        worker, judge = caller.client._workers[0], caller.client._workers[0]._judge

        def wrong(call):
            worker._judge = judge
            raise KeyError("mistake")

        worker._judge = wrong
        caller.client.submit_batch_exists(["k"])
        until = time.monotonic() + 60
        while caller.lookup(["k"]) != [True]:
            self.assertLess(time.monotonic(), until)
            time.sleep(0.05)
        self.assertEqual(caller.client.stats()["internal_errors"], 1)
        self.assertEqual(caller.client.stats()["pending_batches"], 0)


class SeveralNodes(unittest.TestCase):
    def test_a_node_that_is_down_costs_only_its_keys(self):
        nodes = [Node("256M").start() for _ in range(2)]
        for node in nodes:
            self.addCleanup(node.free)
        both = ",".join(node.address for node in nodes)
        client = lmcache.LMCacheClient(**{**params(nodes[0]), "nodes": both})
        self.addCleanup(client.close)
        caller = Caller(client)
        keys = [f"k{i}" for i in range(64)]
        data = [content(key, 10000) for key in keys]
        self.assertTrue(caller.store(keys, data)[0])
        nodes[1].kill()
        for _ in range(3):
            found = caller.lookup(keys)
            self.assertGreater(sum(found), 0)
            self.assertLess(sum(found), 64)
            bools, buffers = caller.load(keys, [10000] * 64)
            self.assertEqual(bools, found)
            for ok, buffer, wanted in zip(bools, buffers, data):
                self.assertTrue(not ok or bytes(buffer) == wanted)


if __name__ == "__main__":
    unittest.main()
