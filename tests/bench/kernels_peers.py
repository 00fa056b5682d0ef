#!/usr/bin/env python3
"""kernels_peers.py KV_BENCH [--rounds N] [--json] - one query by code, ours beside its peers.

A query vector of 128 elements against n rows of 2 bytes, the k largest inner products; one thread.

  IndexPQ     faiss: m = 2, b = 6, float tables, the same codes as ours
  FastScan    faiss: m = 4, b = 4, as many bytes; quantised tables in registers; its fastest
              implementation of those that it offers
  NumPy       two look-ups of codes of a byte each, argpartition
  NumPy wide  the tables added to one of 4,096, looked up by indices of 64 bits: four times the
              bytes, but what NumPy does fastest
  ours        `kv_bench kernels query.hot`: tables, scores, exactly k rows, ascending; with 4 query
              heads also their softmax weights and the sum of these

Data is hot, for all of them: one index is asked again and again, each time with another query. A
round measures ours, then the peers, and so on; a figure is the best round's, in time of the thread.  What a call from
Python into faiss costs by itself is taken off faiss's times.  Four query heads are compared with
four searches, which merge nothing.  Ratios are the peer's time over ours.
"""
import argparse
import json
import subprocess
import sys
import time

import faiss
import numpy as np

D = 128
SIZES = [32 << 10, 128 << 10, 1 << 20]
QUERIES = 64
MEASURE_S = 0.02
# By peer: at k = 256, at k = n / 10; None: no aim.
AIMS = {"IndexPQ": (10, 10), "FastScan": (3, 10), "NumPy": (None, 10),
        "NumPy wide": (None, 10)}


def timed(ask):
    """Seconds of ask(i), the mean over many, after one that warms up."""
    ask(0)
    begin, n = time.thread_time(), 0
    while n < 3 or time.thread_time() - begin < MEASURE_S:
        for _ in range(4):
            n += 1
            ask(n % QUERIES)
    return (time.thread_time() - begin) / n


def searcher(index, queries, k):
    """ask(i) without Python's wrapper: arrays are made and checked once."""
    distances, labels = np.empty((1, k), np.float32), np.empty((1, k), np.int64)
    pointers = [faiss.swig_ptr(queries[i:i + 1]) for i in range(len(queries))]
    to = faiss.swig_ptr(distances), faiss.swig_ptr(labels)

    def ask(i, kept=(distances, labels, queries)):
        index.search_c(1, pointers[i], k, *to)
    return ask


def fastest_scan(index, queries, k):
    """The number of its implementation that this machine runs best."""
    took = {}
    for number in (0, 12, 13, 14, 15):
        index.implem = number
        took[number] = min(timed(searcher(index, queries, k)) for _ in range(3))
    return min(took, key=took.get)


class Numpy:
    def __init__(self, n, rng):
        self.codes = rng.integers(0, 64, (2, n), dtype=np.uint8)
        self.cells = self.codes[0].astype(np.int64) * 64 + self.codes[1]
        self.scores, self.second = np.empty(n, np.float32), np.empty(n, np.float32)
        self.centroids = rng.standard_normal((2, 64, D // 2), dtype=np.float32)
        self.queries = rng.standard_normal((QUERIES, 2, D // 2), dtype=np.float32)

    def tables(self, i):
        return [self.centroids[part] @ self.queries[i, part] for part in range(2)]

    def chosen(self, k):
        return np.argpartition(self.scores, len(self.scores) - k)[len(self.scores) - k:]

    def searcher(self, k):
        def ask(i):
            first, second = self.tables(i)
            np.take(first, self.codes[0], out=self.scores, mode="clip")
            np.take(second, self.codes[1], out=self.second, mode="clip")
            np.add(self.scores, self.second, out=self.scores)
            return self.chosen(k)
        return ask

    def wide_searcher(self, k):
        def ask(i):
            first, second = self.tables(i)
            np.take((first[:, None] + second).ravel(), self.cells, out=self.scores, mode="clip")
            return self.chosen(k)
        return ask


def peers(n, rng, queries):
    keys = rng.standard_normal((min(n, 1 << 15), D), dtype=np.float32)
    exact = faiss.IndexPQ(D, 2, 6, faiss.METRIC_INNER_PRODUCT)
    scan = faiss.IndexPQFastScan(D, 4, 4, faiss.METRIC_INNER_PRODUCT)
    for index in (exact, scan):
        index.train(keys[:16384])
    for begin in range(0, n, len(keys)):
        if begin > 0:
            rng.standard_normal(out=keys, dtype=np.float32)
        exact.add(keys)
        scan.add(keys)
    fastest = {k: fastest_scan(scan, queries, k) for k in (256, n // 10)}
    print(f"kernels_peers: n = {n}: FastScan: implementation by k: {fastest}", file=sys.stderr)

    def scanner(k):
        scan.implem = fastest[k]
        return searcher(scan, queries, k)
    plain = Numpy(n, rng)
    return {"IndexPQ": lambda k: searcher(exact, queries, k),
            "FastScan": scanner, "NumPy": plain.searcher,
            "NumPy wide": plain.wide_searcher}


def empty_call():
    index = faiss.IndexFlatIP(1)
    index.add(np.ones((1, 1), np.float32))
    return min(timed(searcher(index, np.ones((QUERIES, 1), np.float32), 1)) for _ in range(5))


def ours(kv_bench):
    """Microseconds by (n, k, query heads), of the fastest form that selects by fp32 scores."""
    out = subprocess.run([kv_bench, "kernels", "query.hot", "--json", "--runs", "3",
                          "--data", "32M"], check=True, stdout=subprocess.PIPE, text=True).stdout
    found = {}
    for line in out.splitlines():
        record = json.loads(line)
        params = record["params"]
        if params["form"] == "bytes":
            continue
        key = params["n"], params["k"], params["queries"]
        found[key] = min(found.get(key, record["value"]), record["value"])
        ours.isa = params["isa"]
    return found


def instructions():
    """What faiss was built for, and which of it this process loaded."""
    modules = sorted(name for name in sys.modules if name.startswith("faiss._swigfaiss"))
    level = ""
    config = getattr(faiss, "SIMDConfig", None)
    if hasattr(config, "get_level_name"):
        level = f", runs {config.get_level_name()}"
    return f"{faiss.get_compile_options().strip()}{level}, modules {' '.join(modules)}"


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kv_bench")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", action="store_true", help="an object for each comparison")
    options = parser.parse_args()

    faiss.omp_set_num_threads(1)
    rng = np.random.default_rng(0)
    queries = rng.standard_normal((QUERIES, D), dtype=np.float32)
    asked = {n: peers(n, rng, queries) for n in SIZES}
    best, call = {}, empty_call()
    for i in range(options.rounds):
        if sys.stderr.isatty():
            print(f"\rround {i + 1} of {options.rounds}\033[K", end="", file=sys.stderr, flush=True)
        took = {("ours",) + key: us for key, us in ours(options.kv_bench).items()}
        call = min(call, empty_call())
        for n, of_size in asked.items():
            for k in (256, n // 10):
                for name, make in of_size.items():
                    took[name, n, k, 1] = 1e6 * timed(make(k))
        for key, us in took.items():
            best[key] = min(best.get(key, us), us)
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr)

    if not options.json:
        print(f"faiss {faiss.__version__}: {instructions()}; a call of it {1e6 * call:.2f} us, "
              f"taken off; NumPy {np.__version__}; ours: {ours.isa}; one thread, hot, best of "
              f"{options.rounds} rounds, us\n")
        print(f"{'n':>8} {'k':>7} {'heads':>5} {'ours':>9} {'peer':10} {'its time':>9} "
              f"{'ratio':>7} {'aim':>4}")
    for n in SIZES:
        for k in (256, n // 10):
            for heads in (1, 4):
                for name, aims in AIMS.items():
                    mine = best["ours", n, k, heads]
                    theirs = best[name, n, k, 1] - (0 if name.startswith("NumPy") else 1e6 * call)
                    ratio, aim = heads * theirs / mine, aims[k != 256]
                    if options.json:
                        print(json.dumps({
                            "name": "kernels.peers", "value": mine, "unit": "us",
                            "params": {"n": n, "k": k, "queries": heads, "data": "hot",
                                       "isa": ours.isa},
                            "limit": heads * theirs, "limit_name": name, "ratio": ratio,
                            "aim": aim, "runs": options.rounds}), flush=True)
                    else:
                        print(f"{n:8} {k:7} {heads:5} {mine:9.1f} {name:10} {heads * theirs:9.1f} "
                              f"{ratio:7.2f} {aim or '-':>4} "
                              f"{'' if aim is None else 'ok' if ratio >= aim else 'below'}")


if __name__ == "__main__":
    main()
