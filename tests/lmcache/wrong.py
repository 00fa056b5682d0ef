"""Plugins that are wrong, so that the checks can show that they would find it."""
import itertools

from topkv.lmcache import LMCacheClient


class LosesEveryFifth(LMCacheClient):
    """Stores four keys of five, and says that it has stored all."""

    def __init__(self, **given):
        super().__init__(**given)
        self.number = itertools.count(1)

    def submit_batch_set(self, keys, buffers):
        kept = [pair for pair in zip(keys, buffers) if next(self.number) % 5]
        return super().submit_batch_set([key for key, _ in kept], [buffer for _, buffer in kept])


class FlipsAByte(LMCacheClient):
    """Changes a byte of whatever is loaded."""

    def __init__(self, **given):
        super().__init__(**given)
        self.loading = {}

    def submit_batch_get(self, keys, buffers):
        future = super().submit_batch_get(keys, buffers)
        self.loading[future] = buffers
        return future

    def drain_completions(self):
        done = super().drain_completions()
        for future, _, _, bools in done:
            for ok, buffer in zip(bools or [], self.loading.pop(future, [])):
                if ok:
                    view = memoryview(buffer).cast("B")
                    view[len(view) // 2] ^= 0x40
        return done
