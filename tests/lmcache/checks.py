#!/usr/bin/env python3
"""LMCache's own checks over the plugin and real nodes; check.sh runs it.

LMCache's programs exit with 0 even if all data is corrupt.  So their output is read, and plugins that are wrong
(wrong.py) show that reading it finds that.
"""
import argparse
import json
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
import urllib.request
from importlib.metadata import version

from support import Node, die_with_parent

ROWS = ("LOOKUP (absent)", "STORE", "LOOKUP (exist)", "LOAD")
TRANSPORTS = ("shm", "tcp")


class Wrong(Exception):
    """What a check has found."""


def spec(node, namespace, transport, module="topkv.lmcache", name="LMCacheClient", **more):
    return {"type": "native_plugin", "module_path": module, "class_name": name,
            "adapter_params": {"nodes": node.address, "dtype": "bfloat16", "chunk_size": 256,
                               "namespace": namespace, "transport": transport, "lookup_deadline_ms": 2000, **more}}


def run(*words, timeout=600):
    """Runs a program of LMCache's.  Returns exit status and output."""
    done = subprocess.run([sys.executable, *words], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=timeout)
    return done.returncode, done.stdout.decode(errors="replace")


def tail(text):
    lines = [line for line in text.splitlines() if line.strip()]
    return "\n    ".join(lines[-12:])


def basic_check(adapter, n_keys):
    """Four rows of n/n.  Raises Wrong."""
    status, out = run("-m", "lmcache.v1.basic_check", "--mode", "test_l2_adapter", "--num-keys", str(n_keys),
                      "--obj-size", "262144", "--kv-dtype", "bfloat16", "--l2-adapter", json.dumps(adapter))
    rows = {}
    for line in out.splitlines():
        cells = [cell.strip() for cell in line.split("|")]
        if len(cells) > 5 and cells[1] in ROWS:
            rows[cells[1]] = cells[5]
    wanted = {row: f"{n_keys}/{n_keys}" for row in ROWS}
    if status != 0 or rows != wanted:
        raise Wrong(f"exit status {status}, rows {rows}, wanted {wanted}\n    {tail(out)}")
    return "four rows of " + wanted["STORE"]


def bench(adapter, n_keys, in_flight, kb, rounds, *more, verifies=True):
    """Returns the results by operation.  Raises Wrong unless everything was verified and found."""
    with tempfile.NamedTemporaryFile(suffix=".json") as file:
        status, out = run(
            "-m", "lmcache.cli.main", "bench", "l2", "--l2-adapter", json.dumps(adapter), "--num-keys",
            str(n_keys), "--in-flight", str(in_flight), "--data-size-kb", str(kb), "--rounds", str(rounds),
            "--lookup-max-hit-rate", "1.0", "--no-skip-verify", "--l1-align-bytes", "4096", "--format", "json",
            "--output", file.name, *more)
        text = open(file.name).read()
    if status != 0 or not text:
        raise Wrong(f"exit status {status}\n    {tail(out)}")
    metrics = json.loads(text)["metrics"]
    ops = {op["operation"]: op for name, op in metrics.items() if name.startswith("op_")}
    if verifies and f"All {n_keys * in_flight} keys data verified OK" not in out:
        raise Wrong(f"not verified\n    {tail(out)}")
    return ops


def all_found(ops, wanted=("Store", "Lookup", "Load")):
    if sorted(ops) != sorted(wanted):
        raise Wrong(f"operations {sorted(ops)}, wanted {sorted(wanted)}")
    for name, op in ops.items():
        if op["rounds_timed_out"] or op["total_success"] != op["total_keys"] or op["total_keys"] == 0:
            raise Wrong(f"{name}: {op['total_success']} of {op['total_keys']} keys,"
                        f" {op['rounds_timed_out']} rounds timed out")
    return ", ".join(f"{name.lower()} {op['total_success']} of {op['total_keys']}" for name, op in ops.items())


def check_bench(adapter, n_keys, kb, rounds):
    ops = bench(adapter, n_keys, 2, kb, rounds)
    speeds = ", ".join(f"{name.lower()} {ops[name]['throughput_avg_mbps']:.0f} MB/s" for name in ("Store", "Load"))
    return f"{all_found(ops)}; verified; {speeds}"


def two_processes(adapter, n_keys, kb, rounds):
    all_found(bench(adapter, n_keys, 2, kb, rounds, "--only", "store", verifies=False), ("Store",))
    return all_found(bench(adapter, n_keys, 2, kb, rounds, "--only", "load", verifies=False), ("Load",))


def fault_injector(adapter, n_keys, rounds):
    """Over the plugin as many keys are loaded as over LMCache's own mock."""
    loaded = []
    for inner in (adapter, {"type": "mock", "max_size_gb": 1, "mock_bandwidth_gb": 1000}):
        outer = {"type": "fault_inject", "rate": 0.25, "seed": 1, "inner": inner}
        # The keys that it drops are not verified: their bench fails by that, and says so.
        try:
            ops = bench(outer, n_keys, 2, 64, rounds, "--skip-verify", verifies=False)
        except Wrong as wrong:
            raise Wrong(f"over {inner['type']}: {wrong}") from None
        loaded.append((ops["Load"]["total_success"], ops["Load"]["total_keys"], ops["Store"]["total_success"]))
    if loaded[0] != loaded[1] or not 0 < loaded[0][0] < loaded[0][1]:
        raise Wrong(f"loaded, of, stored: {loaded[0]}; over mock: {loaded[1]}")
    return f"{loaded[0][0]} of {loaded[0][1]} loaded, as over mock"


def must_find(what, check, *arguments):
    """A negative control: the check must not pass."""
    try:
        passed = check(*arguments)
    except Wrong as wrong:
        return f"{what}: found: {str(wrong).splitlines()[0][:100]}"
    raise Wrong(f"{what}: not found: {passed}")


# ---- LMCache's adapter in this process --------------------------------------------------------------


class Adapter:
    """LMCache's adapter over the plugin, with buffers for one round."""

    def __init__(self, adapter_spec, n_keys, size):
        import torch
        from lmcache.v1.check import check_mode_test_l2_adapter as check
        from lmcache.v1.distributed.l2_adapters import create_l2_adapter
        from lmcache.v1.distributed.l2_adapters.config import parse_args_to_l2_adapters_config

        self.check, self.torch = check, torch
        self.n_keys, self.size = n_keys, size
        self.arena = torch.zeros(2 * n_keys * size, dtype=torch.uint8)
        config = parse_args_to_l2_adapters_config(argparse.Namespace(l2_adapter=[json.dumps(adapter_spec)]))
        self.adapter = create_l2_adapter(config.adapters[0],
                                         l1_memory_desc=check._create_l1_memory_desc(self.arena))

    def keys(self, round_number):
        return [self.check._create_object_key("model", f"{round_number}.{i}") for i in range(self.n_keys)]

    def objects(self, half, value):
        first = half * self.n_keys * self.size
        return [self.check._create_memory_obj(self.arena[first + i * self.size : first + (i + 1) * self.size],
                                              float((value + i) % 251), self.size, self.torch.uint8)
                for i in range(self.n_keys)]

    def store(self, number):
        return self.check._run_store_phase(self.adapter, self.keys(number), self.objects(0, number))[1]

    def load(self, number):
        """Returns how many keys were loaded, and how many of these with wrong bytes."""
        keys, into = self.keys(number), self.objects(1, number + 100)
        bitmap = self.check._run_load_phase(self.adapter, keys, into)[1]
        wanted = self.objects(0, number)
        loaded = [i for i in range(self.n_keys) if bitmap.test(i)]
        return len(loaded), sum(not self.torch.equal(into[i].tensor, wanted[i].tensor) for i in loaded)

    def lookup(self, number):
        bitmap = self.check._run_lookup_phase(self.adapter, self.keys(number))[1]
        self.adapter.submit_unlock(self.keys(number))
        return bitmap.popcount()


def killed_under_way(transport, disk, n_rounds):
    """A node is killed in the middle of a run and started again: misses, no error, no wrong byte, hits."""
    node = Node("1G", disk).start()
    try:
        over = Adapter(spec(node, "killed", transport, workers=2, deadline_ms=3000), 16, 256 << 10)
        counts = {"hits": 0, "misses": 0, "stores": 0, "failed stores": 0}

        def one_round(number):
            stored = over.store(number)
            counts["stores" if stored else "failed stores"] += 1
            over.lookup(number)
            n_loaded, n_wrong = over.load(number)
            if n_wrong:
                raise Wrong(f"round {number}: {n_wrong} keys have wrong bytes")
            counts["hits"] += n_loaded
            counts["misses"] += 16 - n_loaded
            return n_loaded

        for number in range(n_rounds):
            if one_round(number) != 16:
                raise Wrong(f"round {number}: misses before the node was killed")
        if disk != "none":
            time.sleep(5)  # what was put is saved a second later
        # In the middle of a load and of a store.
        load = over.adapter.submit_load_task(over.keys(0), over.objects(1, 7))
        store = over.adapter.submit_store_task(over.keys(n_rounds), over.objects(0, n_rounds))
        node.kill()
        for fd, take in ((over.adapter.get_load_event_fd(), lambda: over.adapter.query_load_result(load)),
                         (over.adapter.get_store_event_fd(),
                          lambda: over.adapter.pop_completed_store_tasks().get(store))):
            if not over.check._wait_event_fd(fd, 60000) or take() is None:
                raise Wrong("a task that was under way does not end")
        for number in range(n_rounds + 1, 2 * n_rounds):
            if one_round(number) != 0:
                raise Wrong(f"round {number}: hits while the node is down")
        n_down = counts["misses"]
        node.start()
        begun = time.monotonic()
        number = 2 * n_rounds
        while one_round(number) != 16:
            number += 1
            if time.monotonic() - begun > 120:
                raise Wrong("no hits after the restart")
        back_s = time.monotonic() - begun
        for number in range(number + 1, number + n_rounds):
            if one_round(number) != 16:
                raise Wrong(f"round {number}: misses after it was back")
        said = f"{counts}, {n_down} of the misses while it was down; hits {back_s:.1f} s after it was back"
        if disk != "none":
            before = [over.load(number) for number in range(n_rounds)]
            if before != [(16, 0)] * n_rounds:
                raise Wrong(f"of the keys saved before the restart are found, with wrong bytes: {before}")
            said += "; all keys that were saved are found"
        over.adapter.close()
        return said
    finally:
        node.free()


def stopped(transport, n_tries):
    """With the node stopped, LMCache's calls return at once, futures end, and so does the adapter."""
    node = Node("1G").start()
    try:
        over = Adapter(spec(node, "stopped", transport, deadline_ms=4000, lookup_deadline_ms=500), 16, 1 << 20)
        if not over.store(0) or over.load(0) != (16, 0):
            raise Wrong("it does not work before")
        node.freeze()
        adapter, keys, objects, new = over.adapter, over.keys(0), over.objects(1, 0), over.keys(1)
        calls = {"lookup": lambda: adapter.submit_lookup_and_lock_task(keys, {}),
                 "load": lambda: adapter.submit_load_task(keys, objects),
                 "store": lambda: adapter.submit_store_task(new, objects)}
        times = {name: [] for name in calls}
        waiting = []
        for _ in range(n_tries):
            for name, call in calls.items():
                begun = time.perf_counter()
                task = call()
                times[name].append(time.perf_counter() - begun)
                waiting.append((name, task, begun))
            time.sleep(0.02)
        ends = dict.fromkeys(calls, 0.0)
        stores = {}
        while waiting:
            left = []
            stores.update(adapter.pop_completed_store_tasks())
            for name, task, begun in waiting:
                if name == "store":
                    done = stores.get(task)
                    n_ok = done is not None and done.is_successful()
                else:
                    query = adapter.query_load_result if name == "load" else adapter.query_lookup_and_lock_result
                    done = query(task)
                    n_ok = done is not None and done.popcount()
                if n_ok:
                    raise Wrong(f"{name}: succeeds although the node is stopped")
                if done is None:
                    left.append((name, task, begun))
                else:
                    ends[name] = max(ends[name], time.perf_counter() - begun)
                if done is None and time.perf_counter() - begun > 60:
                    raise Wrong(f"{name}: does not end")
            waiting = left
            time.sleep(0.01)
        begun = time.perf_counter()
        adapter.close()
        close_s = time.perf_counter() - begun
        node.thaw()
        worst = {name: max(values) * 1000 for name, values in times.items()}
        usual = {name: statistics.median(values) * 1000 for name, values in times.items()}
        said = "submit " + ", ".join(f"{name} {usual[name]:.2f} (at most {worst[name]:.2f})" for name in times)
        said += f" ms; close {close_s:.2f} s; " + ", ".join(f"{name} ended in {t:.2f} s" for name, t in ends.items())
        if max(usual.values()) > 1.0:
            raise Wrong(f"more than 1 ms: {said}")
        if close_s > 5.5 or max(ends.values()) > 4.5:  # the adapter waits 0.5 s for its own thread
            raise Wrong(f"it waits for the node: {said}")
        return said
    finally:
        node.thaw()
        node.free()


class Server:
    """`lmcache server` with the plugin as its second level, and its own bench of it on the CPU."""

    shape = "(2,256,16,3,64):bfloat16:30"  # of a small model: 5.9 MB for 256 tokens

    def __init__(self, adapter_spec):
        self.ports = []
        for _ in range(2):
            with socket.socket() as probe:
                probe.bind(("127.0.0.1", 0))
                self.ports.append(probe.getsockname()[1])
        self.log = tempfile.NamedTemporaryFile(suffix=".log")
        self.process = subprocess.Popen(
            [sys.executable, "-m", "lmcache.cli.main", "server", "--port", str(self.ports[0]), "--http-port",
             str(self.ports[1]), "--l1-size-gb", "0.25", "--eviction-policy", "LRU", "--chunk-size", "256",
             "--supported-transfer-mode", "engine_driven", "--max-workers", "1", "--l2-adapter",
             json.dumps(adapter_spec)], stdin=subprocess.DEVNULL, stdout=self.log, stderr=self.log,
            preexec_fn=die_with_parent)
        until = time.monotonic() + 300
        while True:
            try:
                self.get("/healthcheck")
                return
            except OSError:
                if self.process.poll() is not None or time.monotonic() > until:
                    raise Wrong(f"lmcache server does not start\n    {tail(open(self.log.name).read())}") from None
                time.sleep(0.2)

    def get(self, path):
        with urllib.request.urlopen(f"http://127.0.0.1:{self.ports[1]}{path}", timeout=30) as answer:
            return answer.read().decode()

    def metric(self, name):
        return sum(float(line.split()[-1]) for line in self.get("/metrics").splitlines()
                   if line.startswith(name + "{") or line.startswith(name + " "))

    def clear(self):
        """Empties L1, so that the next hit is the plugin's."""
        status, out = run("-m", "lmcache.cli.main", "kvcache", "-q", "clear", "--url",
                          f"http://127.0.0.1:{self.ports[1]}")
        if status != 0:
            raise Wrong(f"kvcache clear: exit status {status}\n    {tail(out)}")

    def bench(self, n):
        """Returns (chunks hit at first, checksum) of each of n prompts of two chunks."""
        status, out = run("-m", "lmcache.cli.main", "bench", "server", "--mode", "cpu", "--rpc-url",
                          f"tcp://localhost:{self.ports[0]}", "--url", f"http://127.0.0.1:{self.ports[1]}",
                          "--num-tokens", "512", "--start", "0", "--end", str(n), "--kvcache-shape-spec", self.shape)
        hits = [int(text) for text in re.findall(r"/cold\] LOOKUP: (\d)/2 chunks hit", out)]
        sums = re.findall(r"/warm\] CHECKSUM: ([0-9a-f]+)", out)
        failed = re.search(r"Checksum FAIL: +0\b", out) is None or self.process.poll() is not None
        if status != 0 or failed or len(hits) != n or len(sums) != n:
            raise Wrong(f"bench server: exit status {status}, hits {hits}, checksums {sums}\n    {tail(out)}")
        return hits, sums

    def close(self):
        self.process.terminate()
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
            raise Wrong("lmcache server does not end") from None


def server(transport):
    """LMCache's server stores at the plugin, finds it there after L1 was emptied, and outlives the node."""
    node = Node("1G").start()
    over = None
    try:
        over = Server(spec(node, "server", transport))
        loads = "lmcache_mp_l2_load_completed_requests_total"
        first = over.bench(3)
        until = time.monotonic() + 60
        while over.metric("lmcache_mp_l2_store_completed_requests_total") < 3:
            if time.monotonic() > until:
                raise Wrong("the server has not stored at its second level")
            time.sleep(0.1)
        over.clear()
        before = over.metric(loads)
        second = over.bench(3)
        n_loads = over.metric(loads) - before
        if first[0] != [0] * 3 or second[0] != [2] * 3 or n_loads < 3 or second[1] != first[1]:
            raise Wrong(f"{first}, with L1 emptied {second}, {n_loads} loads")
        node.kill()
        over.clear()
        down = over.bench(3)
        if down[0] != [0] * 3:
            raise Wrong(f"hits while the node is down: {down[0]}")
        node.start()
        time.sleep(2.5)  # what the plugin waits at most before it tries again
        over.clear()
        again = over.bench(3)
        time.sleep(1)
        over.clear()
        last = over.bench(3)
        if again[0] != [0] * 3 or last[0] != [2] * 3 or last[1] != again[1]:
            raise Wrong(f"after the restart {again}, with L1 emptied {last}")
        text = open(over.log.name).read()
        if "Traceback" in text:
            raise Wrong("the server's log has an exception:\n    " + tail(text[: text.index("Traceback") + 2000]))
        over.close()
        over = None
        return (f"3 prompts: stored; {n_loads:.0f} loads with L1 emptied, checksums as stored; node killed: misses;"
                " started again: hits; no exception in the log")
    finally:
        if over is not None:
            over.process.kill()
            over.process.wait()
        node.free()


def refused_versions():
    """The check of the interface passes on what is installed, and finds a change of it."""
    import lmcache.v1.distributed.l2_adapters.native_connector_l2_adapter as connector
    import lmcache.v1.distributed.l2_adapters.native_plugin_l2_adapter as factory
    from topkv.lmcache import LMCacheClient, _calls_of_client, check_lmcache
    import ast

    sources = [connector.__file__, factory.__file__]
    try:
        check_lmcache(version("lmcache"), sources)
    except RuntimeError as error:
        raise Wrong(str(error)) from None
    called = {call[0] for path in sources for call in _calls_of_client(ast.parse(open(path).read()))}
    known = {"event_fd", "submit_batch_set", "submit_batch_get", "submit_batch_exists", "submit_batch_delete",
             "drain_completions", "close"}
    if called != known:
        raise Wrong(f"LMCache calls {sorted(called)}, the plugin was made for {sorted(known)}")

    class Less(LMCacheClient):
        submit_batch_exists = None

    try:
        check_lmcache(version("lmcache"), sources, Less)
    except RuntimeError as error:
        return f"LMCache {version('lmcache')} fits; without a method: {str(error)[-60:]}"
    raise Wrong("a plugin without submit_batch_exists passes")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--quick", choices=("yes", "no"), default="no")
    parser.add_argument("--only", default="", help="checks whose names have this")
    given = parser.parse_args()
    quick = given.quick == "yes"
    n_keys, rounds = (16, 2) if quick else (64, 5)
    failed = 0

    def step(name, check, *arguments):
        nonlocal failed
        if given.only not in name:
            return
        begun = time.monotonic()
        try:
            said, passed = check(*arguments), True
        except Wrong as wrong:
            said, passed = str(wrong), False
        except subprocess.TimeoutExpired as error:
            said, passed = f"does not end in {error.timeout} s", False
        except Exception:
            said, passed = traceback.format_exc(), False
        failed += not passed
        print(f"{'ok    ' if passed else 'FAILED'} {name}: {said} ({time.monotonic() - begun:.1f} s)", flush=True)

    step("interface", refused_versions)
    for transport in TRANSPORTS:
        node = Node("4G").start()
        try:
            def ours(namespace, module="topkv.lmcache", name="LMCacheClient"):
                return spec(node, namespace, transport, module, name)

            step(f"{transport}: basic_check", basic_check, ours("basic"), n_keys)
            step(f"{transport}: bench l2, 64 KB", check_bench, ours("small"), 32, 64, rounds)
            step(f"{transport}: bench l2, 4 MB", check_bench, ours("large"), 16, 4096, rounds)
            step(f"{transport}: store and load in two processes", two_processes, ours("two"), 16, 1024, rounds)
            step(f"{transport}: fault injector", fault_injector, ours("fault"), 32, rounds)
            for kind in ("LosesEveryFifth", "FlipsAByte"):
                step(f"{transport}: control", must_find, f"basic_check over {kind}", basic_check,
                     ours("wrong1" + kind, "wrong", kind), 16)
                step(f"{transport}: control", must_find, f"bench l2 over {kind}", check_bench,
                     ours("wrong2" + kind, "wrong", kind), 16, 64, 2)
        finally:
            node.free()
        step(f"{transport}: node killed under a run", killed_under_way, transport, "none", 5)
        step(f"{transport}: node with a disk killed under a run", killed_under_way, transport, "2G", 5)
        step(f"{transport}: lmcache server", server, transport)
        step(f"{transport}: node stopped", stopped, transport, 5 if quick else 20)
    print(f"check: {failed} failed" if failed else "check: all passed")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
