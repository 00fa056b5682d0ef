#!/usr/bin/env python3
"""A loop of small calls leaks nothing: neither memory, nor descriptors, nor handles.

    test_leaks.py [--calls N]

Runs N calls (default 100,000; 10 million take about half an hour), of which a tenth warms up, and compares
the memory of the process, its descriptors and the objects of the garbage collector then and at the end.
"""
import argparse
import asyncio
import gc
import os
import pathlib
import sys

import support
import topkv

support.needs_node()

# What may come on top: fragmentation, and a KiB or so for each client that was opened and closed again, of which
# there is one in 6,000 calls.
SLACK_KIB = 1024


def memory_kib():
    for line in pathlib.Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon:"):
            return int(line.split()[1])
    raise AssertionError("no RssAnon in /proc/self/status")


def state():
    gc.collect()
    return memory_kib(), len(os.listdir("/proc/self/fd")), len(gc.get_objects())


def fails(call, kind):
    try:
        call()
    except kind:
        return
    raise AssertionError(f"no {kind.__name__}")


class Loop:
    """Rounds of different calls, errors and drops among them."""

    def __init__(self, node):
        self.node = node
        self.client = support.client_of(node)
        self.model = topkv.Model.uniform("leaks", "leaks", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)
        self.session = self.client.open_session(self.model)
        self.session.put(bytes(32) * 128, 0)
        self.query = topkv.Query([[[1.0] * 8]], 4, layer=0, ranges=[(0, 128)], answer=topkv.Answer.ROWS)
        self.out = bytearray(1000)

    def objects(self):
        client, out = self.client, self.out
        client.put("leak", b"x" * 1000)
        client.get_into("leak", out)
        client.get("leak")
        client.exists("leak")
        fails(lambda: client.put("leak", b"other"), topkv.ExistsError)
        fails(lambda: client.get_into("leak", bytearray(10)), topkv.TooLargeError)
        fails(lambda: client.get("none"), topkv.NotFoundError)
        fails(lambda: client.put("leak", "text"), topkv.InvalidError)
        client.get_many(["leak", "none"])
        client.begin_get_into("leak", bytearray(1000))  # dropped
        client.delete("leak")
        return 11

    def rows(self):
        session = self.session
        session.read(0, 4)
        session.fetch([[1, 2]], layer=0)
        session.query(self.query)
        session.length()
        fails(lambda: session.put(bytes(32), 200), topkv.NotReadyError)
        fork = session.fork(128)
        fork.append(bytes(32), 128)
        fork.close()
        return 8

    def rest(self):
        buffer = self.client.allocate(4096)
        memoryview(buffer).cast("B")[0] = 1
        self.client.table("status")
        self.client.nodes()
        self.client.open_session(self.model)  # dropped
        return 4

    def tasks(self):
        async def main():
            async with topkv.AsyncClient(self.node.address, deadline=support.DEADLINE) as client:
                async def task(number):
                    for _ in range(20):
                        await client.put(f"task {number}", b"x")
                        await client.get(f"task {number}")
                        await client.delete(f"task {number}")

                await asyncio.gather(*(task(number) for number in range(8)))

        asyncio.run(main())
        return 480

    def run(self, n_calls):
        done = 0
        turn = 0
        while done < n_calls:
            done += self.objects()
            if turn % 4 == 0:
                done += self.rows()
            if turn % 16 == 0:
                done += self.rest()
            if turn % 400 == 0:
                done += self.tasks()
            turn += 1


def main():
    parser = argparse.ArgumentParser(description="a loop of small calls leaks nothing")
    parser.add_argument("--calls", type=int, default=100000)
    options = parser.parse_args()
    if "MALLOC_ARENA_MAX" not in os.environ:  # arenas of threads come and go by chance
        os.execve(sys.executable, [sys.executable, *sys.argv], {**os.environ, "MALLOC_ARENA_MAX": "1"})
    with topkv.Node(memory="128M", threads=1) as node:
        loop = Loop(node)
        for _ in range(4):
            loop.tasks()
        loop.run(options.calls // 10)
        before = state()
        loop.run(options.calls - options.calls // 10)
        after = state()
        core = loop.client._core
        left = (len(core.under_way), len(core.quarantine), len(core.blocks) - sum(map(len, core.pool.values())))
        loop.client.close()
    print(f"{options.calls} calls: KiB, descriptors, objects: {before} before, {after} after; "
          f"operations, quarantine, buffers left: {left}")
    grown = after[0] - before[0] > SLACK_KIB + options.calls // 3000
    if grown or after[1] > before[1] or after[2] > before[2] + 200 or left[0] or left[2]:
        sys.exit("test_leaks: something is not let go of")


if __name__ == "__main__":
    main()
