#!/usr/bin/env python3
"""record.py FILE: records what LMCache calls of a native plugin, for test_replay.py.

Needs LMCache (check.sh installs it) and the variables of support.py.  FILE gets one JSON object in a line:

    {"lmcache": "0.5.6"}                                   first
    {"run": "basic_check"}                                 a client is made
    {"call": "set", "future": 1, "keys": [...], "bytes": [...]}
    {"call": "end", "future": 1, "ok": true, "bools": null}  a completion was drained
    {"call": "close"}
"""
import json
import os
import subprocess
import sys
import threading

HERE = os.path.dirname(os.path.abspath(__file__))
KEYS, BYTES = 24, 16 << 10


class RecordingClient:
    """LMCacheClient, with every call written to the file of TOPKV_RECORD."""

    def __init__(self, **given):
        from topkv.lmcache import LMCacheClient

        self.client = LMCacheClient(**given)
        self.lock = threading.Lock()
        self.file = open(os.environ["TOPKV_RECORD"], "a")

    def note(self, **what):
        print(json.dumps(what, separators=(",", ":")), file=self.file, flush=True)

    def event_fd(self):
        return self.client.event_fd()

    def submitted(self, call, keys, views, submit):
        sizes = {} if views is None else {"bytes": [len(view) for view in views]}
        with self.lock:
            future = submit(keys) if views is None else submit(keys, views)
            self.note(call=call, future=future, keys=list(keys), **sizes)
        return future

    def submit_batch_set(self, keys, views):
        return self.submitted("set", keys, views, self.client.submit_batch_set)

    def submit_batch_get(self, keys, views):
        return self.submitted("get", keys, views, self.client.submit_batch_get)

    def submit_batch_exists(self, keys):
        return self.submitted("exists", keys, None, self.client.submit_batch_exists)

    def submit_batch_delete(self, keys):
        return self.submitted("delete", keys, None, self.client.submit_batch_delete)

    def drain_completions(self):
        with self.lock:
            done = self.client.drain_completions()
            for future, ok, _, bools in done:
                self.note(call="end", future=future, ok=ok, bools=bools)
        return done

    def close(self):
        self.client.close()
        self.note(call="close")
        self.file.close()


def spec(address, namespace):
    return {"type": "native_plugin", "module_path": "record", "class_name": "RecordingClient",
            "adapter_params": {"nodes": address, "dtype": "bfloat16", "chunk_size": 256,
                               "namespace": namespace}}


def drive(adapter_spec):
    """Keys as LMCache makes them, in the order of a server: lookup, load, store, evict."""
    import argparse
    import torch
    from lmcache.v1.check import check_mode_test_l2_adapter as check
    from lmcache.v1.distributed.api import ObjectKey
    from lmcache.v1.distributed.l2_adapters import create_l2_adapter
    from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

    config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter_spec)]))
    arena = torch.zeros(2 * KEYS * BYTES, dtype=torch.uint8)
    adapter = create_l2_adapter(config.adapters[0], l1_memory_desc=check._create_l1_memory_desc(arena))
    keys = [ObjectKey(chunk_hash=bytes([i] * 32), model_name="meta-llama/Llama-3.1-8B", kv_rank=i % 4,
                      object_group_id=i % 2, cache_salt="tenant-7" if i % 3 == 0 else "")
            for i in range(KEYS)]

    def objects(first, sizes):
        place, made = first, []
        for i, size in enumerate(sizes):
            made.append(check._create_memory_obj(arena[place : place + size], float(i + 1), size, torch.uint8))
            place += BYTES
        return made

    sizes = [BYTES - 2 * i for i in range(KEYS)]
    assert check._run_lookup_phase(adapter, keys)[1].popcount() == 0
    assert check._run_store_phase(adapter, keys[:16], objects(0, sizes[:16]))[1]
    assert check._run_lookup_phase(adapter, keys)[1].popcount() == 16
    loaded = check._run_load_phase(adapter, keys, objects(KEYS * BYTES, sizes))[1]
    assert loaded.popcount() == 16
    adapter.submit_unlock(keys)
    assert check._run_store_phase(adapter, keys, objects(0, sizes))[1]
    wrong = [size - 2 for size in sizes[:4]] + sizes[4:8]
    assert check._run_load_phase(adapter, keys[:8], objects(KEYS * BYTES, wrong))[1].popcount() == 4
    adapter.delete(keys[4:12])
    assert check._run_lookup_phase(adapter, keys)[1].popcount() == 16
    adapter.close()


def main():
    if len(sys.argv) == 3 and sys.argv[1] == "--drive":
        drive(json.loads(sys.argv[2]))
        return
    if len(sys.argv) != 2:
        raise SystemExit("usage: record.py FILE")
    from importlib.metadata import version
    from support import Node

    path = os.path.abspath(sys.argv[1])
    environment = {**os.environ, "TOPKV_RECORD": path, "PYTHONHASHSEED": "1", "LMCACHE_DISABLE_BANNER": "1",
                   "PYTHONPATH": os.pathsep.join([HERE, os.environ.get("PYTHONPATH", "")])}
    with open(path, "w") as file:
        print(json.dumps({"lmcache": version("lmcache")}), file=file)
    node = Node().start()
    try:
        for name, command in (
            ("basic_check", ["-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", "8",
                             "--obj-size", "4096", "--kv-dtype", "bfloat16", "--l2-adapter"]),
            ("bench", ["-m", "lmcache.cli.main", "bench", "l2", "--num-keys", "4", "--in-flight", "3",
                       "--data-size-kb", "64", "--rounds", "2", "--lookup-max-hit-rate", "0.5",
                       "--no-skip-verify", "--l2-adapter"]),
            ("drive", [os.path.join(HERE, "record.py"), "--drive"]),
        ):
            with open(path, "a") as file:
                print(json.dumps({"run": name}), file=file)
            subprocess.run([sys.executable, *command, json.dumps(spec(node.address, name))], env=environment,
                           check=True, timeout=300, stdout=sys.stderr)
    finally:
        node.free()


if __name__ == "__main__":
    main()
