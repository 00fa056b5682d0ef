#!/usr/bin/env python3
"""LMCache's bench of second levels over the plugin and others, interleaved; bench.sh runs it.

Each round stores, looks up and loads at every level once, one level after the other, beginning with another one
each time: they share whatever else the machine does.  Ratios are of one round, and their medians are shown.
"""
import argparse
import json
import os
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.metadata import version

from support import Node, die_with_parent

KEYS, IN_FLIGHT, KB = 16, 2, 4096
LOOKUP_KEYS, LOOKUPS = 32, 20
WARMUPS = 2  # rounds


def start_redis(folder):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(["redis-server", "--port", str(port), "--save", "", "--appendonly", "no",
                                "--dir", folder], stdout=subprocess.DEVNULL, preexec_fn=die_with_parent)
    until = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            return process, port
        except OSError:
            if process.poll() is not None or time.monotonic() > until:
                raise SystemExit("bench: redis-server does not start") from None
            time.sleep(0.05)


class Level:
    """An adapter of LMCache's, and what was measured of it."""

    def __init__(self, name, spec):
        from lmcache.cli.commands.bench.l2_adapter_bench import data
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        self.name, self.data = name, data
        size = KB * 1024
        self.buffer = data.make_aligned_tensor(2 * IN_FLIGHT * KEYS * size, 4096)
        self.stored = self.objects(0, 3)
        self.into = self.objects(IN_FLIGHT * KEYS * size, 4)
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(spec)]))
        self.adapter = create_l2_adapter(config.adapters[0],
                                         l1_memory_desc=data.create_l1_memory_desc(self.buffer, 4096))
        self.store, self.load, self.lookup = [], [], []

    def objects(self, offset, fill):
        size = KB * 1024
        return [self.data.make_memory_objects(self.buffer, KEYS, size, offset + i * KEYS * size,
                                              fill_offset=fill + i * KEYS) for i in range(IN_FLIGHT)]

    def one_round(self, number, is_measured):
        from lmcache.cli.commands.bench.l2_adapter_bench import runner

        keys = [self.data.make_object_keys(KEYS, key_offset=(number * IN_FLIGHT + i) * KEYS)
                for i in range(IN_FLIGHT)]
        some = [(keys[0] + keys[1])[:LOOKUP_KEYS]]
        quiet = lambda text: None  # noqa: E731
        size = KB * 1024
        results = [
            runner.bench_store(self.adapter, IN_FLIGHT, KEYS, size, 1, lambda _: keys, lambda _: self.stored,
                               quiet),
            runner.bench_lookup(self.adapter, 1, LOOKUP_KEYS, LOOKUPS, lambda _: some, quiet),
            runner.bench_load(self.adapter, IN_FLIGHT, KEYS, size, 1, lambda _: keys, lambda _: self.into, quiet),
        ]
        for what, result in zip(("stored", "found", "loaded"), results):
            n = sum(result.success_counts)
            if result.timed_out_rounds or n != result.total_keys:
                raise SystemExit(f"bench: {self.name}: {n} of {result.total_keys} keys {what}")
        flat = [[obj for objs in batches for obj in objs] for batches in (self.stored, self.into)]
        if not self.data.verify_round_trip([key for some in keys for key in some], *flat, print):
            raise SystemExit(f"bench: {self.name}: round {number}: wrong bytes")
        # Memory that is used again: what is asked of a cache that has been full once.
        for some in keys:
            self.adapter.delete(some)
        if is_measured:
            mb = IN_FLIGHT * KEYS * size / 1e6
            self.store.append(mb / results[0].round_durations[0])
            self.lookup.append(statistics.median(results[1].round_durations) * 1000)
            self.load.append(mb / results[2].round_durations[0])


def ratios(level, other):
    """How many times as fast as another level, in the median of the rounds."""
    return {"store": statistics.median(a / b for a, b in zip(level.store, other.store)),
            "load": statistics.median(a / b for a, b in zip(level.load, other.load)),
            "lookup": statistics.median(b / a for a, b in zip(level.lookup, other.lookup))}


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", choices=("yes", "no"), default="no")
    parser.add_argument("--json", default="")
    parser.add_argument("--workers", type=int, default=0)
    given = parser.parse_args()
    rounds = 3 if given.quick == "yes" else 9
    own = {"workers": given.workers} if given.workers else {}
    others = given.workers or 2
    folder = tempfile.mkdtemp(prefix="topkv-bench-")
    shared = tempfile.mkdtemp(prefix="topkv-bench-", dir="/dev/shm")
    node, redis = Node("2G").start(), None
    levels = []
    try:
        redis, port = start_redis(folder)
        for transport in ("shm", "tcp"):
            levels.append(Level(f"topkv {transport}", {
                "type": "native_plugin", "module_path": "topkv.lmcache", "class_name": "LMCacheClient",
                "adapter_params": {"nodes": node.address, "dtype": "uint8", "chunk_size": 256,
                                   "transport": transport, "namespace": transport,
                                   "lookup_deadline_ms": 5000, **own}}))
        levels.append(Level("redis", {"type": "resp", "host": "127.0.0.1", "port": port,
                                      "num_workers": others}))
        levels.append(Level("fs_native", {"type": "fs_native", "base_path": shared, "num_workers": others}))
        levels.append(Level("mock", {"type": "mock", "max_size_gb": 4, "mock_bandwidth_gb": 1000}))
        for number in range(WARMUPS + rounds):
            for i in range(len(levels)):
                level = levels[(number + i) % len(levels)]
                level.one_round(number, number >= WARMUPS)
    finally:
        for level in levels:
            level.adapter.close()
        if redis is not None:
            redis.kill()
            redis.wait()
        node.free()
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(shared, ignore_errors=True)

    by_name = {level.name: level for level in levels}
    print(f"LMCache {version('lmcache')}, {IN_FLIGHT} x {KEYS} keys of {KB >> 10} MiB in flight, all verified;"
          f" medians of {rounds} rounds (least to most)")
    print(f"{'level':<12}{'store MB/s':>26}{'load MB/s':>26}{f'lookup of {LOOKUP_KEYS}, ms':>24}")
    rows = []
    for level in levels:
        cells = {}
        for what in ("store", "load", "lookup"):
            values = getattr(level, what)
            cells[what] = [statistics.median(values), min(values), max(values)]
        rows.append({"level": level.name, **cells,
                     "ratios": {name: ratios(level, by_name[name]) for name in ("redis", "fs_native")}})
        text = [f"{a:,.0f} ({b:,.0f} to {c:,.0f})" for a, b, c in (cells["store"], cells["load"])]
        a, b, c = cells["lookup"]
        print(f"{level.name:<12}{text[0]:>26}{text[1]:>26}{f'{a:.2f} ({b:.2f} to {c:.2f})':>24}")
    for row in rows[:2]:
        for name in ("redis", "fs_native"):
            ratio = row["ratios"][name]
            print(f"{row['level']} is {ratio['store']:.2f} times as fast as {name} at stores,"
                  f" {ratio['load']:.2f} at loads, {ratio['lookup']:.2f} at lookups")
    if given.json:
        with open(given.json, "w") as file:
            json.dump({"lmcache": version("lmcache"), "keys": KEYS, "in_flight": IN_FLIGHT, "kb": KB,
                       "rounds": rounds, "workers": given.workers, "levels": rows}, file, indent=1)
            file.write("\n")


if __name__ == "__main__":
    sys.exit(main())
