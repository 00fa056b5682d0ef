#!/usr/bin/env python3
"""Times put and get of Mooncake's store: tcp over loopback, default settings, one request in flight.

Three processes, as a deployment has them: the master, a process that stores, and this one, which
stores nothing, so that every byte travels.

    mooncake_bench.py [--runs N] [--data BYTES]   prints one JSON object per line
    mooncake_bench.py --serve                     does what kv_bench says on stdin
"""

import argparse
import ctypes
import json
import mmap
import os
import signal
import socket
import statistics
import struct
import subprocess
import sys
import tempfile
import time

SIZES = (64 << 10, 1 << 20)
READY_S = 30
SEGMENT_BYTES = 1 << 30
PREFIX_BLOCKS = 64
STAMP_BYTES = 16
LOCAL_BYTES = 256 << 20
PR_SET_PDEATHSIG = 1


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def die_with_parent():
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def open_store(master, segment_bytes):
    from mooncake.store import MooncakeDistributedStore

    store = MooncakeDistributedStore()
    code = store.setup("127.0.0.1", "P2PHANDSHAKE", segment_bytes, LOCAL_BYTES, "tcp", "", master)
    if code != 0:
        sys.exit(f"mooncake_bench: setup: {master}: {code}")
    return store


def run_storing_process(master, segment_bytes):
    """Lends its memory to the store until its stdin ends."""
    store = open_store(master, segment_bytes)
    print("ready", flush=True)
    sys.stdin.read()
    store.close()


class Deployment:
    """The master, the storing process, and this process as a client."""

    def __init__(self, data_bytes, segment_bytes=SEGMENT_BYTES):
        self.children = []
        self.segment_bytes = segment_bytes
        self.log = tempfile.TemporaryFile()
        self.bytes = data_bytes
        self.round = 0
        self.put_names = {}

    def __enter__(self):
        port = free_port()
        self.master = f"127.0.0.1:{port}"
        program = os.path.join(os.path.dirname(sys.executable), "mooncake_master")
        self.spawn([program, f"--rpc_port={port}", f"--metrics_port={free_port()}"])
        self.wait_for(port)
        storing = self.spawn([sys.executable, os.path.abspath(__file__), "--store", self.master,
                             "--segment", str(self.segment_bytes)])
        if storing.stdout.readline() != b"ready\n":
            sys.exit("mooncake_bench: the storing process did not become ready")
        self.store = open_store(self.master, 0)
        # One buffer to put from, one to get into, known to the transport.
        self.memory = mmap.mmap(-1, 2 * self.bytes)
        self.memory.write(os.urandom(1 << 20) * (self.bytes >> 20))
        self.memory.write(bytes(self.bytes))
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        if self.store.register_buffer(self.address, 2 * self.bytes) != 0:
            sys.exit("mooncake_bench: register_buffer: refused")
        return self

    def __exit__(self, *unused):
        for child in reversed(self.children):
            child.terminate()
        for child in self.children:
            try:
                child.wait(5)
            except subprocess.TimeoutExpired:
                child.kill()

    def spawn(self, argv):
        child = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                 stderr=self.log, preexec_fn=die_with_parent)
        self.children.append(child)
        return child

    @staticmethod
    def wait_for(port):
        until = time.monotonic() + READY_S
        while time.monotonic() < until:
            try:
                socket.create_connection(("127.0.0.1", port), 1).close()
                return
            except OSError:
                time.sleep(0.05)
        sys.exit("mooncake_bench: the master did not become ready")

    def remove(self, size):
        for name in self.put_names.pop(size, []):
            self.store.remove(name, True)

    def put(self, size, count):
        """Seconds for `count` new objects; those of the round before go first."""
        self.remove(size)
        self.round += 1
        names = [f"bench/{size}/{self.round}/{i}" for i in range(count)]
        self.put_names[size] = names
        begin = time.perf_counter()
        for i, name in enumerate(names):
            code = self.store.put_from(name, self.address + i * size, size)
            if code != 0:
                sys.exit(f"mooncake_bench: put: {name}: {code}")
        return time.perf_counter() - begin

    def get(self, size, count):
        """Seconds for `count` objects that the last put stored."""
        if len(self.put_names.get(size, [])) < count:
            self.put(size, count)
        names = self.put_names[size][:count]
        begin = time.perf_counter()
        for i, name in enumerate(names):
            code = self.store.get_into(name, self.address + self.bytes + i * size, size)
            if code != size:
                sys.exit(f"mooncake_bench: get: {name}: {code}")
        return time.perf_counter() - begin

    # ---- prefixes: PREFIX_BLOCKS objects at once, all from and into the same memory

    def blocks(self, size, prefix):
        names = [f"prefix/{self.round}/{prefix}/{i}" for i in range(PREFIX_BLOCKS)]
        return names, size // PREFIX_BLOCKS

    def addresses(self, begin, block):
        return [self.address + begin + i * block for i in range(PREFIX_BLOCKS)]

    def stamps(self, size, prefix):
        """Where each block of a prefix has bytes of its own, and these."""
        for i in range(PREFIX_BLOCKS):
            yield (i * (size // PREFIX_BLOCKS) + i * STAMP_BYTES,
                   struct.pack("<IIII", self.round, prefix, i, ~i & 0xffffffff))

    def prefix_put(self, size, count):
        if self.round > 0:
            self.store.remove_all(True)
        self.round += 1
        seconds = 0
        for prefix in range(count):
            names, block = self.blocks(size, prefix)
            for at, stamp in self.stamps(size, prefix):
                self.memory[at:at + STAMP_BYTES] = stamp
            begin = time.perf_counter()
            codes = self.store.batch_put_from(names, self.addresses(0, block), [block] * len(names))
            seconds += time.perf_counter() - begin
            if any(codes):
                sys.exit(f"mooncake_bench: batch_put_from: {names[0]}: {codes}")
        return seconds

    def prefix_match(self, size, count):
        seconds = 0
        for prefix in range(count):
            names, _ = self.blocks(size, prefix)
            begin = time.perf_counter()
            there = self.store.batch_is_exist(names)
            seconds += time.perf_counter() - begin
            if there != [1] * len(names):
                sys.exit(f"mooncake_bench: batch_is_exist: {names[0]}: not all")
        return seconds

    def prefix_get(self, size, count):
        self.memory[self.bytes:self.bytes + size] = bytes(size)
        seconds = 0
        for prefix in range(count):
            names, block = self.blocks(size, prefix)
            begin = time.perf_counter()
            got = self.store.batch_get_into(names, self.addresses(self.bytes, block),
                                            [block] * len(names))
            seconds += time.perf_counter() - begin
            if got != [block] * len(names):
                sys.exit(f"mooncake_bench: batch_get_into: {names[0]}: {got}")
            for at, stamp in self.stamps(size, prefix):
                if self.memory[self.bytes + at:self.bytes + at + STAMP_BYTES] != stamp:
                    sys.exit(f"mooncake_bench: {names[0]}: bytes of another prefix came back")
        if self.memory[:size] != self.memory[self.bytes:self.bytes + size]:
            sys.exit("mooncake_bench: other bytes came back than were stored")
        return seconds

    def check(self, size):
        """Right before fast."""
        self.put(size, self.bytes // size)
        self.get(size, self.bytes // size)
        if self.memory[:self.bytes] != self.memory[self.bytes:]:
            sys.exit("mooncake_bench: other bytes came back than were stored")


def version():
    from importlib import metadata

    return metadata.version("mooncake-transfer-engine-non-cuda")


def serve(deployment):
    print(json.dumps({"ready": version()}), flush=True)
    for line in sys.stdin:
        verb, size, count = line.split()
        size, count = int(size), int(count)
        is_prefix = verb in ("prefix_put", "prefix_match", "prefix_get")
        moved = size if is_prefix else size * count
        if (verb not in ("put", "get") and not is_prefix) or not 0 < moved <= deployment.bytes:
            sys.exit(f"mooncake_bench: not a job: {line.strip()}")
        seconds = getattr(deployment, verb)(size, count)
        print(json.dumps({"seconds": seconds}), flush=True)


def measure(deployment, runs):
    for size in SIZES:
        deployment.check(size)
        count = deployment.bytes // size
        for verb in ("put", "get"):
            seconds = statistics.median(
                getattr(deployment, verb)(size, count) for _ in range(runs))
            print(json.dumps({
                "name": f"mooncake.{verb}",
                "params": {"transport": "tcp", "window": 1, "bytes": size, "version": version()},
                "value": round(size * count / seconds / 1e9, 4),
                "unit": "GB/s",
                "runs": runs,
            }), flush=True)
        deployment.remove(size)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--data", type=int, default=128 << 20, help="bytes that a run moves")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--store", metavar="MASTER", help=argparse.SUPPRESS)
    parser.add_argument("--segment", type=int, default=SEGMENT_BYTES,
                        help="bytes that the storing process lends")
    arguments = parser.parse_args()

    # Errors only; and where Mooncake prints to stdout, records go to a copy of it.
    os.environ.setdefault("GLOG_minloglevel", "2")
    sys.stdout = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    signal.signal(signal.SIGTERM, lambda *unused: sys.exit(0))
    if arguments.store:
        run_storing_process(arguments.store, arguments.segment)
        return
    with Deployment(arguments.data, arguments.segment) as deployment:
        if arguments.serve:
            serve(deployment)
        else:
            measure(deployment, arguments.runs)


if __name__ == "__main__":
    main()
