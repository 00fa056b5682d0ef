#!/usr/bin/env python3
"""check_kernels.py DUMP_KERNELS [SEED] - kernels of arithmetic against NumPy.

dump_kernels (dump_kernels.c) writes seeded inputs and what every implementation makes of them;
here the same is computed in double.  Codes and choices must be equal, numbers near.  Exit status
1: something is not right.
"""
import os
import random
import subprocess
import sys
import tempfile

import numpy as np

EPS = 2.0**-24  # half of the distance of two numbers of fp32 near 1
failures = []
n_checks = 0


def expect(name, passed, detail=""):
    global n_checks
    n_checks += 1
    if not np.all(passed):
        failures.append(name)
        print(f"{name}: FAILED {detail}", flush=True)


def near(name, value, exact, bound):
    difference = np.abs(value.astype(np.float64) - exact)
    expect(name, difference <= bound, f"worst: {np.max(difference - bound)} over the bound")


def check_pq(case, get, tiers):
    centroids, queries = (get(name).astype(np.float64) for name in ("centroids", "queries"))
    codes = get("codes")
    m, width, n_centroids = centroids.shape
    expect(f"{case}.codes: range", codes < n_centroids)
    named = np.concatenate([centroids[j][:, codes[j]] for j in range(m)])  # (d, n)
    for tier in tiers("scores"):  # of tables, and of tiles
        near(f"{case}.scores.{tier}", get(f"scores.{tier}"), queries @ named,
             (width + m) * EPS * (np.abs(queries) @ np.abs(named)))


def check_kmeans(case, get, tiers):
    keys = get("keys").astype(np.float64)
    n, d = keys.shape
    for tier in tiers("codes"):
        centroids = get(f"centroids.{tier}").astype(np.float64)
        m, width, n_centroids = centroids.shape
        parts = keys.reshape(n, m, width)
        lengths = np.sum(parts**2, axis=2)  # (n, m)
        lifted = tiers("lifts") != []
        if lifted:
            longest = get(f"longest.{tier}").astype(np.float64)
            near(f"{case}.longest.{tier}", get(f"longest.{tier}"), lengths.max(axis=0),
                 (width + 1) * EPS * longest)
            # One more element; it is near 0 of the longest rows, where its rounding is the root
            # of that of the squares.
            lifts = np.sqrt(np.maximum(longest[None] - lengths, 0))
            first = lifts[np.arange(n_centroids) % n].T
            near(f"{case}.lifts.{tier}", get(f"lifts.{tier}"), first,
                 4 * np.sqrt((width + 1) * EPS * longest)[:, None])
            centroids = np.concatenate([centroids, get(f"lifts.{tier}")[:, None, :]], axis=1)
            parts = np.concatenate([parts, lifts[:, :, None]], axis=2)
        squares = np.sum(centroids**2, axis=1)
        near(f"{case}.half_squares.{tier}", get(f"half_squares.{tier}"), squares / 2,
             (width + 2) * EPS * squares)
        distances = np.stack([((parts[:, j, :, None] - centroids[j][None]) ** 2).sum(axis=1)
                              for j in range(m)])  # (m, n, n_centroids)
        size = (np.sum(parts**2, axis=2).T[:, :, None] + squares[:, None, :]).max(axis=2)
        codes = get(f"codes.{tier}")
        expect(f"{case}.codes.{tier}: range", codes < n_centroids)
        of_codes = np.take_along_axis(distances, codes[:, :, None].astype(int), axis=2)[:, :, 0]
        near(f"{case}.codes.{tier}", of_codes, distances.min(axis=2),
             (4 * (width + 2) * EPS + (2e-3 if lifted else 0)) * size)
        # Random numbers are not this near each other, so that all but very few are the same.
        same = np.mean(codes == distances.argmin(axis=2))
        expect(f"{case}.codes.{tier}: argmin", same > 0.995, f"{same}")

        counts = np.stack([np.bincount(codes[j], minlength=n_centroids) for j in range(m)])
        expect(f"{case}.counts.{tier}", get(f"counts.{tier}") == counts)
        updated, moved = centroids.copy(), 0
        for j in range(m):
            for c in np.unique(codes[j]):
                updated[j, :, c] = parts[codes[j] == c, j].mean(axis=0)
            moved += np.sum((updated - centroids)[j, :width] ** 2)
            left = counts[j].copy()
            for c in np.flatnonzero(counts[j] == 0):
                largest = left.argmax()
                by = np.where(np.arange(width) % 2 == 0, 2.0**-8, -2.0**-8)
                updated[j, :, c] = updated[j, :, largest]
                updated[j, :width, c] *= 1 + by
                left[c] = left[largest] // 2
                left[largest] -= left[c]
        bound = (counts.max() + 2) * EPS * np.abs(keys).max()
        near(f"{case}.updated.{tier}", get(f"updated.{tier}"), updated[:, :width], bound)
        if lifted:
            near(f"{case}.updated_lifts.{tier}", get(f"updated_lifts.{tier}"),
                 updated[:, width], bound + 4 * np.sqrt((width + 1) * EPS * longest)[:, None])
        near(f"{case}.moved.{tier}", get(f"moved.{tier}"), moved, 1e-5 * moved + 1e-6)


def check_keys(case, get, tiers):
    keys, queries = get("keys"), get("queries").astype(np.float64)
    if keys.dtype == np.uint16:
        keys = (keys.astype(np.uint32) << 16).view(np.float32)
    values = keys.astype(np.float64)
    n, d = values.shape
    exact = queries @ values.T
    bound = (d // 16 + 6) * EPS * (np.abs(queries) @ np.abs(values.T)) + 1e-37
    for tier in tiers("values"):
        expect(f"{case}.values.{tier}", get(f"values.{tier}").view(np.uint32)
               == keys.astype(np.float32).view(np.uint32))
        near(f"{case}.scores.{tier}", get(f"scores.{tier}"), exact, bound)
        near(f"{case}.list_scores.{tier}", get(f"list_scores.{tier}"), exact[:, ::-1],
             bound[:, ::-1])


def check_copies(case, get, tiers):
    means, keys, queries = (get(name).astype(np.float64) for name in ("means", "keys", "queries"))
    rows = get("rows")
    n_blocks, n, d = keys.shape
    h = -(-d // 32) * 16
    # In fp32, as there, so that halves are rounded the same way.
    step = np.abs(get("queries")).max(axis=1) / np.float32(127)
    rounded = np.rint(get("queries") / step[:, None])
    step = step.astype(np.float64)
    for tier in tiers("scores"):
        groups = get(f"copies.{tier}").reshape(n_blocks, n // 32, 32 * (h + 2))
        nibbles = groups[:, :, :32 * h].reshape(n_blocks, n, h)
        codes = np.concatenate([nibbles & 15, nibbles >> 4], axis=2)
        scales = np.ascontiguousarray(groups[:, :, 32 * h:]).view("<f2").reshape(n_blocks, n)
        scales = scales.astype(np.float64)
        expect(f"{case}.padding.{tier}", codes[:, :, d:] == 8)
        y = keys - means[:, None, :]
        near(f"{case}.scales.{tier}", scales, np.abs(y).max(axis=2) / 15, 2.0**-11 * scales)
        values = (2.0 * codes[:, :, :d] - 15) * scales[:, :, None]
        near(f"{case}.copies.{tier}", values, y, 1.001 * scales[:, :, None])
        scores = get(f"scores.{tier}")
        for block in range(n_blocks):
            of = scales[block, rows]
            dots = queries @ means[block]
            by_definition = dots[:, None] + step[:, None] * (rounded @ values[block, rows].T)
            of_mean = (d // 16 + 8) * EPS * (np.abs(queries) @ np.abs(means[block]))[:, None]
            sums = np.abs(queries).sum(axis=1)[:, None]
            near(f"{case}.scores{block}.{tier}", scores[block], by_definition,
                 of_mean + 4 * EPS * 16 * of * sums)
            near(f"{case}.error{block}.{tier}", scores[block], queries @ keys[block, rows].T,
                 of_mean + (1.001 * of + 2.0**-21) * sums + 7.51 * d * of * step[:, None])


def check_select(case, get, tiers):
    scores = get("scores")
    scale, factor = get("scale_factor").astype(np.float64)
    k = int(get("k")[0])
    wide = scores.astype(np.float64)
    # Stable, descending, NaN below all.
    order = np.lexsort((-np.where(np.isnan(scores), -np.inf, wide), np.isnan(scores)))
    chosen = np.sort(order[:k])
    most = np.where(np.isnan(scores), -np.inf, scores).max()
    least = np.float32(-24 * np.log(2))

    def exp(x):
        x = np.where(np.isnan(x), -np.inf, np.minimum(x, 0))
        return np.exp(np.where(x.astype(np.float32) < least, -np.inf, x))

    for tier in tiers("max"):
        expect(f"{case}.max.{tier}", get(f"max.{tier}")[0] == most)
        with np.errstate(invalid="ignore", over="ignore"):
            # The product with the largest is rounded by itself, and may be infinite.
            shift = np.float32(-most * np.float32(scale)).astype(np.float64)
            x = wide * scale + shift
            weights = exp(x)
            error = 3e-7 + EPS * np.where(np.isfinite(x), np.abs(x), 0).clip(max=100)
        exps = get(f"exps.{tier}")
        near(f"{case}.exps.{tier}", exps, weights, weights * error)
        # Each is rounded to a unit.
        near(f"{case}.exp_sum.{tier}", get(f"exp_sum.{tier}"), np.sum(exps.astype(np.float64)),
             len(exps) * 2.0**-31)
        before = np.arange(len(exps), dtype=np.float32) / np.float32(len(exps))
        sums = exps.astype(np.float64) * factor + before
        near(f"{case}.sums.{tier}", get(f"sums.{tier}"), sums, EPS * np.abs(sums) + 1e-45)
        larger = np.fmax(exps * np.float32(factor), exps[::-1])
        expect(f"{case}.larger.{tier}", get(f"larger.{tier}") == larger)
        result = get(f"chosen.{tier}")
        expect(f"{case}.chosen.{tier}", len(result) == len(chosen) and
               np.array_equal(result, chosen))


def check_attend(case, get, tiers):
    rows, queries, among = get("rows"), get("queries").astype(np.float64), get("among")
    if rows.dtype == np.uint16:
        rows = (rows.astype(np.uint32) << 16).view(np.float32)
    rows = rows.astype(np.float64)
    scale = float(get("scale")[0])
    n_queries, d_k = queries.shape
    keys, values = rows[:, :d_k], rows[:, d_k:]
    scores = scale * (queries @ keys.T)
    counts = (among[None, :] >> np.arange(n_queries)[:, None] & 1) != 0
    most = np.where(counts, scores, -np.inf).max(axis=1, keepdims=True)
    weights = np.where(counts, np.exp(scores - most), 0)
    total = weights.sum(axis=1, keepdims=True)
    lse = (most + np.log(total))[:, 0]
    output = weights @ values / total
    # Of a score, as a part of its weight; and of the sums.
    error = (d_k // 16 + 6) * EPS * scale * (np.abs(queries) @ np.abs(keys.T)).max(axis=1)
    error += 4e-7 + 2 * EPS * np.abs(scores).max(axis=1) + (64 + len(rows) / 64) * EPS
    bound = 2 * error[:, None] * (weights @ np.abs(values) / total) + 1e-30
    for tier in tiers("output"):
        near(f"{case}.output.{tier}", get(f"output.{tier}"), output, bound)
        near(f"{case}.lse.{tier}", get(f"lse.{tier}"), lse, error + EPS * np.abs(lse))
        near(f"{case}.merged.{tier}", get(f"merged.{tier}"), output, bound)
        near(f"{case}.merged_lse.{tier}", get(f"merged_lse.{tier}"), lse,
             error + 2 * EPS * np.abs(lse))


def check_rope(case, get, tiers):
    base, is_halves, linear, factor, low, high, context = get("parameters")
    x, positions = get("x").astype(np.float64), get("positions").astype(np.float64)
    frequencies = get("frequencies")
    half = len(frequencies)
    expected = base ** (-np.arange(half) / half) / (linear if linear != 0 else 1)
    if factor != 0:
        wave = 2 * np.pi / expected
        kept = ((context / wave - low) / (high - low)).clip(0, 1)
        expected = (1 - kept) * expected / factor + kept * expected
    near(f"{case}.frequencies", frequencies, expected, 1e-13 * expected)
    angle = (positions[:, None] * frequencies)[:, None, :]
    if is_halves:
        first, second = slice(0, half), slice(half, 2 * half)
    else:
        first, second = slice(0, 2 * half, 2), slice(1, 2 * half, 2)
    a, b = x[..., first], x[..., second]
    turned, bound = x.copy(), np.zeros_like(x)
    turned[..., first] = a * np.cos(angle) - b * np.sin(angle)
    turned[..., second] = a * np.sin(angle) + b * np.cos(angle)
    bound[..., first] = bound[..., second] = EPS * np.hypot(a, b)
    for tier in tiers("turned"):
        near(f"{case}.turned.{tier}", get(f"turned.{tier}"), turned, 3 * bound)
        near(f"{case}.back.{tier}", get(f"back.{tier}"), x, 10 * bound)


def rest_seeds(n, n_summaries, seed):
    """The rows that are the first centroids: one of each part of the rows, as SplitMix64 says."""
    seeds = []
    for c in range(n_summaries):
        x = (seed + (c + 1) * 0x9E3779B97F4A7C15) % 2**64
        x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9 % 2**64
        x = (x ^ x >> 27) * 0x94D049BB133111EB % 2**64
        begin, end = c * n // n_summaries, (c + 1) * n // n_summaries
        seeds.append(begin + (x ^ x >> 31) % (end - begin))
    return seeds


def rest_numbers(rows, d_k, n_summaries, seed):
    """Three iterations in double: the summaries' numbers."""
    variance = rows.var(axis=0)
    vectors = rows.copy()
    vectors[:, d_k:] *= np.sqrt(variance[:d_k].sum() / variance[d_k:].sum())
    centroids = vectors[rest_seeds(len(rows), n_summaries, seed)]
    by = np.where(np.arange(rows.shape[1]) % 2 == 0, 1 + 2.0**-8, 1 - 2.0**-8)
    for iteration in range(3):
        distances = (centroids**2).sum(axis=1) / 2 - vectors @ centroids.T
        numbers = distances.argmin(axis=1)
        if iteration == 2:
            return numbers, vectors
        counts = np.bincount(numbers, minlength=n_summaries)
        for c in np.unique(numbers):
            centroids[c] = vectors[numbers == c].mean(axis=0)
        for c in np.flatnonzero(counts == 0):
            largest = counts.argmax()
            centroids[c] = centroids[largest] * by
            counts[c] = counts[largest] // 2
            counts[largest] -= counts[c]


def check_rest(case, get, tiers):
    rows, queries = get("rows").astype(np.float64), get("queries").astype(np.float64)
    d_k, d_v, bits, rows_of_group, seed = (int(x) for x in get("shape"))
    n, n_summaries = len(rows), 2**bits
    group = get("group").tobytes()
    at = 16

    def take(kind, *shape):
        nonlocal at
        array = np.frombuffer(group, kind, int(np.prod(shape)), at).reshape(shape)
        at += array.nbytes
        return array

    counts = take("<u2", n_summaries)
    scales = take("<f4", 2, n_summaries).astype(np.float64)
    up_k, up_v = -(-d_k // 16) * 16, -(-d_v // 16) * 16
    keys = take("i1", n_summaries // 16, up_k // 2, 16, 2)
    keys = keys.transpose(0, 2, 1, 3).reshape(n_summaries, up_k)
    values = take("i1", n_summaries // 2, up_v, 2)
    values = values.transpose(0, 2, 1).reshape(n_summaries, up_v)
    numbers = take("u1", rows_of_group)
    expect(f"{case}: bytes", at == len(group))
    expect(f"{case}: padding", np.all(keys[:, d_k:] == 0) and np.all(values[:, d_v:] == 0)
           and np.all(numbers[n:] == 255))
    integers = values[:, :d_v].astype(np.float64)
    keys, values = keys[:, :d_k] * scales[0][:, None], values[:, :d_v] * scales[1][:, None]
    numbers = numbers[:n]
    expect(f"{case}: counts", np.bincount(numbers, minlength=n_summaries) == counts)

    # Rows between two centroids may go either way, and means follow them.
    exact, vectors = rest_numbers(rows, d_k, n_summaries, seed)
    expect(f"{case}: numbers", np.mean(exact == numbers) > 0.97, f"{np.mean(exact == numbers)}")

    def spread(chosen):
        return sum(((vectors[chosen == c] - vectors[chosen == c].mean(axis=0)) ** 2).sum()
                   for c in np.unique(chosen))

    expect(f"{case}: spread", spread(numbers) < 1.01 * spread(exact))
    variance = 0
    for c in np.unique(numbers):
        mean = rows[numbers == c].mean(axis=0)
        variance += ((rows[numbers == c, :d_k] - mean[:d_k]) ** 2).sum() / (n * d_k)
        for name, stored, part in (("key", keys, mean[:d_k]), ("value", values, mean[d_k:])):
            near(f"{case}.{name}{c}", stored[c], part, np.abs(part).max() / 127 * 0.501
                 + (counts[c] + 4) * EPS * np.abs(rows).max())
    stored = np.frombuffer(group, "<f4", 1, 12)
    near(f"{case}.variance", stored, variance, 1e-4 * variance)

    scale = 0.25
    step = np.abs(queries).max(axis=1, keepdims=True) / 16383
    rounded = np.rint(queries / step) * step
    # What fp32 has for an element is off by up to two roundings: one that is so near the middle of
    # two steps may go either way, and with it scores, which may all go the same way.
    middle = np.abs(np.abs(queries / step) % 1 - 0.5) < 2 * EPS * 16383
    either = scale * (step * middle) @ np.abs(keys).max(axis=0)
    corr = np.minimum(1, 0.15 * (scale**2) * (queries**2).sum(axis=1) * float(stored[0]))
    for part in range(2):
        token = np.arange(n)
        left = np.ones(n, bool) if part == 0 else (token % 5 != 0) & (token % 3 != 0)
        over = np.zeros(n, bool) if part == 0 else (token % 5 != 0) & (token % 3 == 0)
        expect(f"{case}.counts{part}", get(f"counts{part}")
               == np.bincount(numbers[left], minlength=n_summaries))
        expect(f"{case}.numbers{part}", np.array_equal(
            get(f"numbers{part}"), np.where(over, numbers, 255)[token % 3 == 0] if part else []))
        of_rows = np.exp(scale * queries @ rows[over, :d_k].T)
        weights = get(f"counts{part}") * np.exp(scale * rounded @ keys.T + corr[:, None])
        for c in range(n_summaries):
            weights[:, c] += of_rows[:, numbers[over] == c].sum(axis=1)
        total = weights.sum(axis=1)
        # Half a step of the rounded weights, of all integers of an element.
        steps = (weights * scales[1]).max(axis=1, keepdims=True) / 32767
        rounding = steps / 2 * np.abs(integers).sum(axis=0)
        for tier in tiers(f"output{part}"):
            near(f"{case}.lse{part}.{tier}", get(f"lse{part}.{tier}"), np.log(total), 2e-5 + either)
            near(f"{case}.output{part}.{tier}", get(f"output{part}.{tier}"),
                 weights @ values / total[:, None],
                 (5e-5 + 2 * either[:, None]) * np.abs(values).max()
                 + rounding / total[:, None])


def check_bytes(case, get, tiers):
    values, k = get("values"), int(get("k")[0])
    bins = np.bincount(values, minlength=256)
    chosen = np.sort(np.argsort(-values.astype(int), kind="stable")[:k])
    expect(f"{case}.bins", get("bins") == bins)
    for tier in tiers("counts"):
        expect(f"{case}.counts.{tier}", get(f"counts.{tier}") == bins[::-1].cumsum()[::-1])
        result = get(f"chosen.{tier}")
        expect(f"{case}.chosen.{tier}", len(result) == k and np.array_equal(result, chosen))


def check_scan(case, get, tiers):
    tables, scales, offsets = get("tables"), get("scales"), get("offsets")
    codes = get("codes")
    n_queries, m, n_centroids = tables.shape
    base, inv_step = scales[:-1, None], scales[-1]
    least, most = tables.min(axis=2), tables.max(axis=2)
    ranges = np.zeros((n_queries, 2), np.float32)
    for j in range(m):  # in fp32, left to right
        ranges += np.stack([least[:, j], most[:, j]], axis=1)
    above = tables - least[:, :, None]
    above[:, 0] += ranges[:, :1] - base
    rounded = (np.clip(above * inv_step, 0, 255) + np.float32(0.5)).astype(np.uint8)
    exact = sum(tables[:, j].astype(np.float64)[:, codes[j]] for j in range(m))
    exact = (exact - base) * inv_step
    sums = np.minimum(sum(rounded[:, j][:, codes[j]].astype(int) for j in range(m)), 255)
    expect(f"{case}.sums: near", np.abs(sums - np.minimum(exact, 255))[exact < 250]
           <= m / 2 + 0.01)
    largest = np.clip(sums + offsets[:, None], 0, 255).max(axis=0)
    for tier in tiers("sums"):
        expect(f"{case}.ranges.{tier}", get(f"ranges.{tier}") == ranges)
        result = get(f"rounded.{tier}")
        expect(f"{case}.rounded.{tier}", result[:, :, :n_centroids] == rounded)
        expect(f"{case}.rounded.{tier}: end", result[:, :, n_centroids:] == 0)
        expect(f"{case}.sums.{tier}", get(f"sums.{tier}") == sums)
        expect(f"{case}.most.{tier}", get(f"most.{tier}") == largest)


def main():
    if len(sys.argv) not in (2, 3):
        print("usage: check_kernels.py DUMP_KERNELS [SEED]", file=sys.stderr)
        return 2
    seed = sys.argv[2] if len(sys.argv) == 3 else str(random.SystemRandom().randrange(2**32))
    print(f"seed {seed}", flush=True)
    arrays = {}
    with tempfile.TemporaryDirectory() as folder:
        lines = subprocess.run([sys.argv[1], folder, seed], check=True, capture_output=True,
                               text=True).stdout.splitlines()
        for line in lines:
            name, kind, *shape = line.split()
            array = np.fromfile(os.path.join(folder, name), dtype=kind)
            arrays[name] = array.reshape([int(n) for n in shape])
    tiers = set()
    checks = {"attend": check_attend, "bytes": check_bytes, "copies": check_copies,
              "keys": check_keys, "kmeans": check_kmeans, "pq": check_pq, "rest": check_rest,
              "rope": check_rope, "scan": check_scan,
              "select": check_select}
    for case in dict.fromkeys(name.split(".")[0] for name in arrays):
        def get(name, case=case):
            return arrays[f"{case}.{name}"]

        def tiers_of(name, case=case):
            start = f"{case}.{name}."
            found = [key[len(start):] for key in arrays if key.startswith(start)]
            tiers.update(found)
            return found

        family = next(prefix for prefix in checks if case.startswith(prefix))
        checks[family](case, get, tiers_of)
    print(f"{n_checks} checks of {len(arrays)} arrays, {', '.join(sorted(tiers))}: "
          f"{len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
