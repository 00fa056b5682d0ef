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
    centroids = get("centroids").astype(np.float64)
    keys, queries = get("keys").astype(np.float64), get("queries").astype(np.float64)
    m, width, n_centroids = centroids.shape
    n = len(keys)
    squares = np.sum(centroids**2, axis=1)
    near(f"{case}.half_squares", get("half_squares"), squares / 2, (width + 1) * EPS * squares)
    parts = keys.reshape(n, m, width)
    distances = np.stack([((parts[:, j, :, None] - centroids[j][None]) ** 2).sum(axis=1)
                          for j in range(m)])  # (m, n, n_centroids)
    size = (np.sum(parts**2, axis=2).T[:, :, None] + squares[:, None, :]).max(axis=2)
    for tier in tiers("codes"):
        codes = get(f"codes.{tier}")
        expect(f"{case}.codes.{tier}: range", codes < n_centroids)
        of_codes = np.take_along_axis(distances, codes[:, :, None].astype(int), axis=2)[:, :, 0]
        near(f"{case}.codes.{tier}", of_codes, distances.min(axis=2), 4 * (width + 1) * EPS * size)
        # Random numbers are not this near each other, so that all but very few are the same.
        same = np.mean(codes == distances.argmin(axis=2))
        expect(f"{case}.codes.{tier}: argmin", same > 0.998, f"{same}")

        updated = centroids.copy()
        counts = np.stack([np.bincount(codes[j], minlength=n_centroids) for j in range(m)])
        for j in range(m):
            for c in np.unique(codes[j]):
                updated[j, :, c] = parts[codes[j] == c, j].mean(axis=0)
        expect(f"{case}.counts.{tier}", get(f"counts.{tier}") == counts)
        near(f"{case}.updated.{tier}", get(f"updated.{tier}"), updated,
             (counts.max() + 2) * EPS * np.abs(keys).max())
        near(f"{case}.moved.{tier}", get(f"moved.{tier}"), np.sum((updated - centroids) ** 2),
             1e-4)

        named = np.concatenate([centroids[j][:, codes[j]] for j in range(m)])  # (d, n)
        near(f"{case}.scores.{tier}", get(f"scores.{tier}"), queries @ named,
             (width + m) * EPS * (np.abs(queries) @ np.abs(named)))


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


def check_select(case, get, tiers):
    scores = get("scores")
    scale, lse = get("scale_lse").astype(np.float64)
    k = int(get("k")[0])
    wide = scores.astype(np.float64)
    # Stable, descending, NaN below all.
    order = np.lexsort((-np.where(np.isnan(scores), -np.inf, wide), np.isnan(scores)))
    chosen = np.sort(order[:k])
    most = np.where(np.isnan(scores), -np.inf, scores).max()

    def exp(x):
        x = np.where(np.isnan(x), -np.inf, np.minimum(x, 88))
        return np.exp(np.where(x < -87, -np.inf, x))

    for tier in tiers("max"):
        expect(f"{case}.max.{tier}", get(f"max.{tier}")[0] == most)
        with np.errstate(invalid="ignore", over="ignore"):
            # The product with the largest is rounded by itself, and may be infinite.
            shift = np.float32(-most * np.float32(scale)).astype(np.float64)
            x = wide * scale + shift
            weights = exp(x)
            error = 3e-7 + EPS * np.where(np.isfinite(x), np.abs(x), 0).clip(max=100)
        bound = np.sum(weights * error)
        near(f"{case}.exp_sum.{tier}", get(f"exp_sum.{tier}"), np.sum(weights),
             bound + 12 * EPS * np.sum(weights))
        with np.errstate(invalid="ignore", over="ignore"):
            x = wide * scale - lse
            weights = exp(x)
            # An argument is rounded once; the very large ones are cut at 88.
            error = 3e-7 + EPS * np.where(np.isfinite(x), np.abs(x), 0).clip(max=100)
        near(f"{case}.weights.{tier}", get(f"weights.{tier}"), weights, weights * error)
        larger = np.fmax(scores, scores[::-1])
        expect(f"{case}.larger.{tier}", (get(f"larger.{tier}") == larger) | np.isnan(larger)
               & np.isnan(get(f"larger.{tier}")))
        result = get(f"chosen.{tier}")
        expect(f"{case}.chosen.{tier}", len(result) == len(chosen) and
               np.array_equal(result, chosen))


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
    checks = {"pq": check_pq, "keys": check_keys, "select": check_select}
    for case in dict.fromkeys(name.split(".")[0] for name in arrays):
        def get(name, case=case):
            return arrays[f"{case}.{name}"]

        def tiers_of(name, case=case):
            found = [key.split(".")[2] for key in arrays if key.startswith(f"{case}.{name}.")]
            tiers.update(found)
            return found

        family = next(prefix for prefix in checks if case.startswith(prefix))
        checks[family](case, get, tiers_of)
    print(f"{n_checks} checks of {len(arrays)} arrays, {', '.join(sorted(tiers))}: "
          f"{len(failures)} failed")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
