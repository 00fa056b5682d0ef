#!/usr/bin/env python3
"""Calls that LMCache made of the plugin (calls.jsonl, by record.py), made again over a real node.

Every future must end as it did then, and every key that is loaded must have its bytes.

Environment: see support.py.
"""
import json
import os
import unittest

from support import Caller, Node, content
from topkv.lmcache import LMCacheClient

CALLS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "calls.jsonl")


def runs():
    """Returns the recorded runs: (name, calls)."""
    found = []
    with open(CALLS) as file:
        for line in file:
            record = json.loads(line)
            if "run" in record:
                found.append((record["run"], []))
            elif "call" in record:
                found[-1][1].append(record)
    return found


class Replay(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.node = Node().start()
        cls.addClassCleanup(cls.node.free)

    def replay(self, calls, namespace, transport, workers):
        client = LMCacheClient(nodes=self.node.address, dtype="bfloat16", chunk_size=256, transport=transport,
                               workers=workers, namespace=namespace, deadline_ms=60000,
                               lookup_deadline_ms=60000)
        self.addCleanup(client.close)
        caller = Caller(client)
        under_way, n_loaded = {}, 0
        for call in calls:
            what = call["call"]
            if what == "close":
                client.close()
            elif what == "end":
                future, keys, sizes, buffers = under_way.pop(call["future"])
                ok, error, bools = caller.wait(future)
                self.assertEqual(bools, call["bools"])
                self.assertEqual(ok, call["ok"], error)
                for key, size, buffer, loaded in zip(keys, sizes, buffers, bools or []):
                    if loaded:
                        self.assertEqual(bytes(buffer), content(key, size))
                        n_loaded += 1
            else:
                keys, sizes = call["keys"], call.get("bytes", [])
                buffers = []
                if what == "set":
                    data = [memoryview(content(key, size)) for key, size in zip(keys, sizes)]
                    future = client.submit_batch_set(keys, data)
                elif what == "get":
                    buffers = [bytearray(size) for size in sizes]
                    future = client.submit_batch_get(keys, [memoryview(buffer) for buffer in buffers])
                elif what == "exists":
                    future = client.submit_batch_exists(keys)
                else:
                    self.assertEqual(what, "delete")
                    future = client.submit_batch_delete(keys)
                under_way[call["future"]] = (future, keys, sizes, buffers)
        self.assertEqual(under_way, {})
        return n_loaded

    def test_every_future_ends_as_it_did(self):
        recorded = runs()
        self.assertEqual([name for name, _ in recorded], ["basic_check", "bench", "drive"])
        for name, calls in recorded:
            for transport, workers in (("shm", 1), ("tcp", 2)):
                with self.subTest(run=name, transport=transport):
                    namespace = f"{name}-{transport}"
                    self.assertGreater(self.replay(calls, namespace, transport, workers), 0)

    def test_the_record_has_every_call(self):
        calls = {call["call"] for _, all_calls in runs() for call in all_calls}
        self.assertEqual(calls, {"set", "get", "exists", "delete", "end", "close"})
        ends = [call for _, all_calls in runs() for call in all_calls if call["call"] == "end"]
        self.assertTrue(any(call["bools"] and not all(call["bools"]) for call in ends))


if __name__ == "__main__":
    unittest.main()
