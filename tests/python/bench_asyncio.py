#!/usr/bin/env python3
"""How many bytes a second 24 asyncio tasks put and get in one process, beside kv_bench in the same run.

    python3 tests/python/bench_asyncio.py KV_BENCH [--transport tcp] [--tasks 24] [--bytes 1048576]
        [--seconds 2] [--runs 5] [--floor 0.8]

Rounds alternate: kv_bench's load of objects of 1 MB (one operation in flight, from C, over tcp), then puts
and gets of this package over --transport (shm is not what kv_bench uses).  Every object has its own bytes, and each
get is checked by the first and the last of them, the last one of a task and round by all.  The first round of
a run is not counted; there are two at least.  Prints the medians and their ratio.  Exit
status 1: a ratio is below the floor.

Environment: TOPKV_LIBRARY, TOPKV_KVSERVER.
"""
import argparse
import asyncio
import re
import statistics
import struct
import subprocess
import sys
import time

import topkv


class Wrong(Exception):
    """Other bytes came back than were put."""


def kv_bench(program, verb_rates):
    out = subprocess.run([program, "objects.1M"], check=True, capture_output=True, text=True).stdout
    for verb in ("put", "get"):
        rate = re.search(rf"^object\.{verb}\.1M +([0-9.]+) GB/s", out, re.MULTILINE)
        verb_rates[verb].append(float(rate[1]))


async def run_tasks(n_tasks, n_each, work):
    async def task(number):
        for i in range(n_each):
            await work(number, i)

    begun = time.perf_counter()
    await asyncio.gather(*(task(number) for number in range(n_tasks)))
    return time.perf_counter() - begun


async def measure(address, options, rates):
    async with topkv.AsyncClient(address, transport=options.transport) as client:
        sources = [memoryview(client.allocate(options.bytes)).cast("B") for _ in range(options.tasks)]
        places = [memoryview(client.allocate(options.bytes)).cast("B") for _ in range(options.tasks)]
        n_each = max(2, 512 * (1 << 20) // options.bytes // options.tasks)
        nbytes = n_each * options.tasks * options.bytes

        def stamp(number, i):
            return struct.pack("<HHI", number, i, n_rounds)

        async def put(number, i):
            sources[number][:8] = sources[number][-8:] = stamp(number, i)
            await client.put(f"bench/{number}/{i}", sources[number])

        async def get(number, i):
            await client.get_into(f"bench/{number}/{i}", places[number])
            if not places[number][:8] == places[number][-8:] == stamp(number, i):
                raise Wrong(f"round {n_rounds}: bench/{number}/{i}: other bytes than were put")

        async def delete(number, i):
            await client.delete(f"bench/{number}/{i}")

        until = time.monotonic() + options.seconds
        n_rounds = 0
        while time.monotonic() < until or n_rounds < 2:
            for number, (source, place) in enumerate(zip(sources, places)):
                source[:] = bytes([(number + n_rounds) % 251 + 1]) * options.bytes
                place[:] = bytes(options.bytes)
            put_s = await run_tasks(options.tasks, n_each, put)
            get_s = await run_tasks(options.tasks, n_each, get)
            await run_tasks(options.tasks, n_each, delete)
            if n_rounds > 0:  # the node's memory is new to it
                rates["put"].append(nbytes / put_s / 1e9)
                rates["get"].append(nbytes / get_s / 1e9)
            for number, (source, place) in enumerate(zip(sources, places)):
                if source != place:
                    raise Wrong(f"round {n_rounds}: bench/{number}: other bytes than were put")
            n_rounds += 1


def main():
    parser = argparse.ArgumentParser(description="asyncio beside kv_bench")
    parser.add_argument("kv_bench")
    parser.add_argument("--transport", default="tcp", choices=["auto", "tcp", "shm"])
    parser.add_argument("--tasks", type=int, default=24)
    parser.add_argument("--bytes", type=int, default=1 << 20)
    parser.add_argument("--seconds", type=float, default=2)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--floor", type=float, default=0.8)
    options = parser.parse_args()
    if options.bytes < 16 or not 1 <= options.tasks < 1 << 16:
        parser.error("--bytes: 16 at least; --tasks: 1..65535")
    c_rates, python_rates = {"put": [], "get": []}, {"put": [], "get": []}
    for _ in range(options.runs):
        kv_bench(options.kv_bench, c_rates)
        with topkv.Node(memory="2G", threads=1) as node:
            try:
                asyncio.run(measure(node.address, options, python_rates))
            except Wrong as error:
                sys.exit(f"bench_asyncio: {error}")
    bad = False
    print(f"objects of {options.bytes} bytes, {options.tasks} tasks, {options.transport}; "
          f"medians of {options.runs} runs, GB/s")
    for verb in ("put", "get"):
        ours, theirs = statistics.median(python_rates[verb]), statistics.median(c_rates[verb])
        bad |= ours < options.floor * theirs
        print(f"{verb}: asyncio {ours:.3f}, kv_bench {theirs:.3f}, ratio {ours / theirs:.3f}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
