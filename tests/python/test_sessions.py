#!/usr/bin/env python3
"""Sessions, rows, indexes and queries.  Results of queries are compared with numpy's, where it is installed."""
import ctypes
import math
import struct
import unittest
import unittest.mock

import support
import topkv

try:
    import numpy
except ImportError:
    numpy = None

support.needs_node()

LAYERS, HEADS, D_K, D_V = 2, 2, 32, 16
ROW = (D_K + D_V) * 2
BLOCK = topkv.BLOCK_TOKENS


def model_of(name="test", **options):
    return topkv.Model.uniform(name, name, **{"n_layers": LAYERS, "n_kv_heads": HEADS, "d_k": D_K, "d_v": D_V,
                                              **options})


def rows_of(n_tokens, seed=0):
    """(LAYERS, HEADS, n_tokens, D_K + D_V) small fp16 numbers, as bytes."""
    state = seed * 7919 + 1
    out = []
    for _ in range(LAYERS * HEADS * n_tokens * (D_K + D_V)):
        state = (state * 1103515245 + 12345) & 0x7FFFFFFF
        out.append((state >> 16) / 16384 - 1)
    return struct.pack(f"<{len(out)}e", *out)


class Sessions(support.NodeCase):
    def setUp(self):
        super().setUp()
        self.model = model_of()
        self.session = self.client.open_session(self.model)

    def test_put_read_append(self):
        session, data = self.session, rows_of(20)
        session.put(data, 0)
        self.assertEqual(session.length(), topkv.Length(20, [20, 20]))
        self.assertEqual(memoryview(session.read(0, 20)).tobytes(), data)
        session.append(rows_of(1, 1), 20)
        self.assertEqual(memoryview(session.read(20, 1)).tobytes(), rows_of(1, 1))
        out = bytearray(5 * ROW)
        self.assertIs(session.read(3, 5, layer=1, n_layers=1, kv_head=1, n_kv_heads=1, out=out), out)
        begin = ((1 * HEADS + 1) * 20 + 3) * ROW
        self.assertEqual(out, data[begin : begin + 5 * ROW])
        got = session.fetch([[4, 2], [19]], layer=1, out=(whole := bytearray(3 * ROW)))
        self.assertIs(got, whole)
        places = [(1 * HEADS + 0) * 20 + 4, (1 * HEADS + 0) * 20 + 2, (1 * HEADS + 1) * 20 + 19]
        self.assertEqual(whole, b"".join(data[at * ROW : (at + 1) * ROW] for at in places))
        parts = session.fetch([[4, 2], [19]], layer=1)
        self.assertEqual(b"".join(memoryview(part).tobytes() for part in parts), whole)

    def test_one_layer_at_a_time(self):
        data = rows_of(8)
        half = len(data) // 2
        begun = [self.session.begin_put(data[:half], 0, n_layers=1), self.session.begin_put(data[half:], 0, layer=1)]
        for operation in begun:
            operation.result()
        self.assertEqual(memoryview(self.session.read(0, 8)).tobytes(), data)

    def test_crcs(self):
        data = rows_of(2)
        crcs = [self.session.row_crc(data[(((layer * HEADS) + head) * 2 + token) * ROW:][:ROW],
                                     layer=layer, kv_head=head, token=token)
                for layer in range(LAYERS) for head in range(HEADS) for token in range(2)]
        self.session.put(data, 0, crcs=crcs)
        with self.assertRaises(topkv.CorruptError):
            self.session.append(data, 2, crcs=crcs)  # of another place
        with self.assertRaises(topkv.InvalidError):
            self.session.append(data, 2, crcs=crcs[1:])
        with self.assertRaises(topkv.InvalidError):
            self.session.row_crc(data, layer=0, kv_head=0, token=0)
        with self.assertRaises(topkv.InvalidError):
            self.session.row_crc(data[:ROW], layer=0, kv_head=HEADS, token=0)

    def test_statuses(self):
        session = self.session
        session.put(rows_of(4), 0)
        session.put(rows_of(4), 0)
        with self.assertRaises(topkv.ConflictError):
            session.put(rows_of(4, 1), 0)
        with self.assertRaises(topkv.NotReadyError):
            session.put(rows_of(1), 9)
        with self.assertRaises(topkv.NotReadyError):
            session.read(0, 5, deadline=0.2)
        with self.assertRaises(topkv.InvalidError):
            session.fork(5)
        with self.assertRaises(topkv.UnsupportedError):
            session.publish([bytes(16)])
        with self.assertRaises(topkv.UnsupportedError):
            session.save()  # this node has no disk

    def test_wrong_arguments(self):
        session = self.session
        for call, words in (
            (lambda: session.put(rows_of(2)[1:], 0), "not a multiple"),
            (lambda: session.put(b"", 0), "not a multiple"),
            (lambda: session.put(rows_of(1), -1), "token"),
            (lambda: session.put(rows_of(1), 0.5), "token"),
            (lambda: session.put(rows_of(1), 0, layer=2), "layer"),
            (lambda: session.put(rows_of(1), 0, n_layers=3), "layers"),
            (lambda: session.put(rows_of(1), 0, kv_head=2), "kv heads"),
            (lambda: session.put(rows_of(1), 1 << 32), "token"),
            (lambda: session.read(0, 0), "n_tokens"),
            (lambda: session.read(0, 2, out=bytearray(3)), "out"),
            (lambda: session.read(0, 2, out=bytes(2 * ROW * LAYERS * HEADS)), "writable"),
            (lambda: session.fetch([[], []], layer=0), "none"),
            (lambda: session.fetch([[1], ["x"]], layer=0), "ids"),
            (lambda: session.fetch([[-1]], layer=0), "ids"),
            (lambda: session.fetch([[0]], layer=7), "layer"),
            (lambda: session.index(0, m=5, bits=6), "m"),
            (lambda: session.truncate(-1), "tokens"),
            (lambda: topkv.Query([[1.0]], 1, layer=0, ranges=[(0, 1)]), "shape"),
            (lambda: topkv.Query([[["x"]]], 1, layer=0, ranges=[(0, 1)]), "queries"),
            (lambda: session.query(topkv.Query([[[1.0] * 5]], 1, layer=0, ranges=[(0, 1)])), "d_k"),
            (lambda: session.query(topkv.Query([[[1.0] * D_K]], 1, layer=9, ranges=[(0, 1)])), "layer"),
            (lambda: session.query(topkv.Query([[[1.0] * D_K]], 0, layer=0, ranges=[(0, 1)])), "k"),
            (lambda: session.query(topkv.Query([[[1.0] * D_K]], 1, layer=0, ranges=[])), "range"),
            (lambda: session.query(topkv.Query([[[1.0] * D_K]], 1, layer=0, ranges=[(3, 1)])), "range"),
        ):
            with self.assertRaises(topkv.InvalidError) as caught:
                call()
            self.assertIn(words, str(caught.exception))

    def test_models(self):
        for options, words in (({"n_layers": 0}, "n_layers"), ({"n_kv_heads": 0}, "n_kv_heads"),
                               ({"d_k": 4097}, "d_k"), ({"dtype": "fp64"}, "fp64"), ({"d_v": -1}, "d_v")):
            with self.assertRaises(topkv.InvalidError) as caught:
                model_of(**options)
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(topkv.InvalidError):
            topkv.Model("", b"x" * 16, [topkv.Layer(1, 1, 1)])
        with self.assertRaises(topkv.InvalidError):
            topkv.Model("m", b"x" * 15, [topkv.Layer(1, 1, 1)])
        mixed = topkv.Model("mixed", "mixed", [topkv.Layer(2, 8, 8, "fp32"), topkv.Layer(1, 4, 0, "int8")])
        self.assertEqual(mixed.token_bytes, 2 * 16 * 4 + 4)
        with self.client.open_session(mixed) as session:
            data = bytes(range(mixed.token_bytes))
            session.put(data, 0)
            self.assertEqual(memoryview(session.read(0, 1)).tobytes(), data)  # layers differ: bytes
            self.assertEqual(memoryview(session.read(0, 1, layer=1)).tobytes(), data[-4:])

    def test_fork_truncate_resume(self):
        session = self.session
        session.put(rows_of(30), 0)
        fork = session.fork(10)
        self.assertEqual(fork.length().tokens, 10)
        fork.append(rows_of(1, 5), 10)
        self.assertEqual(session.length().tokens, 30)
        ticket = topkv.Ticket.from_bytes(session.ticket().to_bytes())
        self.assertEqual(ticket, session.ticket())
        with support.client_of(self.node) as other:
            resumed = other.resume(ticket, self.model)
            self.assertEqual(resumed.reused_tokens, 30)
            self.assertEqual(memoryview(resumed.read(0, 30)).tobytes(), rows_of(30))
            before = session.generation
            resumed.truncate(5)
            with self.assertRaises(topkv.StaleError):
                session.append(rows_of(1), 30)
            again = self.client.resume(ticket, self.model)
            self.assertGreater(again.generation, before)
            self.assertEqual(again.length().tokens, 5)
            with self.assertRaises(topkv.InvalidError) as caught:
                other.resume(ticket, model_of("another"))
            self.assertIn("fingerprint", str(caught.exception))
            with self.assertRaises(topkv.TopKVError):
                other.resume(ticket._replace(token=bytes(16)), self.model)
            with self.assertRaises(topkv.NotFoundError):
                other.resume(ticket._replace(session_id=b"y" * 16), self.model)
        with self.assertRaises(topkv.InvalidError):
            topkv.Ticket.from_bytes(b"short")

    def test_close_and_detach(self):
        ticket = self.session.ticket()
        self.session.put(rows_of(1), 0)
        self.session.detach()
        self.session.detach()
        with self.assertRaises(topkv.ClosedError):
            self.session.length()
        with self.client.resume(ticket, self.model) as session:
            self.assertEqual(session.length().tokens, 1)
            session.renew(lease=1.5)
            self.assertEqual(session.lease, 1.5)
        with self.assertRaises(topkv.ClosedError):
            session.length()
        with self.assertRaises(topkv.NotFoundError):
            self.client.resume(ticket, self.model)
        for _ in range(50):  # a session that is dropped is let go of, with its operations
            dropped = self.client.open_session(self.model)
            dropped.begin_put(rows_of(1), 0)
        del dropped
        self.client.poll()
        self.assertLess(len(self.client._core.sessions), 5)

    def test_prompts(self):
        model = model_of("prompts")
        tokens = [at * 7 % 1000 for at in range(2 * BLOCK + 50)]
        names = self.client.prompt_names(model, tokens)
        self.assertEqual([len(name) for name in names], [16, 16])
        self.assertEqual(self.client.prompt_names(model, tokens[:BLOCK]), names[:1])
        with_key = self.client.prompt_names(model, tokens, extra_keys=[topkv.ExtraKey(b"adapter", BLOCK)])
        self.assertEqual(with_key[0], names[0])
        self.assertNotEqual(with_key[1], names[1])
        with support.client_of(self.node, salt=b"secret") as salted:
            self.assertNotEqual(salted.prompt_names(model, tokens), names)
        data = rows_of(2 * BLOCK, 3)
        with self.client.open_session(model, names=names) as session:
            self.assertEqual(session.reused_tokens, 0)
            session.put(data, 0)
            self.assertEqual(session.publish(names, tokens=tokens[: 2 * BLOCK]), 2 * BLOCK)
        match = self.client.match(names)
        self.assertEqual(match.tokens, 2 * BLOCK)
        self.assertEqual(match.nodes[0], topkv.NodeMatch(0, 2 * BLOCK, 2 * BLOCK))
        with self.client.open_session(model, names=names, match_blocks_max=1) as session:
            self.assertEqual(session.reused_tokens, BLOCK)
        with self.client.open_session(model, names=names, fresh=True) as session:
            self.assertEqual(session.reused_tokens, 0)
        with self.client.open_session(model, names=names) as session:
            self.assertEqual(session.reused_tokens, 2 * BLOCK)
            self.assertEqual(memoryview(session.read(0, 2 * BLOCK)).tobytes(), data)
        verb = topkv.PrefixVerb
        self.assertGreater(self.client.prefix(verb.PIN, name=names[1], seconds=5), 0)
        self.assertGreater(self.client.prefix(verb.UNPIN, name=names[1], node=0), 0)
        self.assertEqual(self.client.prefix(verb.EVICT, name=names[1]), 1)
        self.assertEqual(self.client.match(names).tokens, BLOCK)
        for wrong in (b"short", "text", bytes(17)):
            with self.assertRaises(topkv.InvalidError):
                self.client.match([wrong])
        with self.assertRaises(topkv.InvalidError):
            self.client.prompt_names(model, [-1] * BLOCK)

    def test_batches(self):
        sessions = [self.client.open_session(self.model) for _ in range(8)]
        entries = [topkv.AppendEntry(session, rows_of(1, at), 0) for at, session in enumerate(sessions)]
        self.assertEqual(self.client.append_many(entries), [None] * 8)
        entries[3] = topkv.AppendEntry(sessions[3], rows_of(1), 5)
        outcomes = self.client.append_many(entries)
        self.assertIsInstance(outcomes[3], topkv.NotReadyError)
        self.assertEqual([outcome for outcome in outcomes if outcome is None], [None] * 7)
        query = topkv.Query([[[0.5] * D_K]] * HEADS, 1, layer=1, ranges=[(0, 1)], answer=topkv.Answer.ROWS)
        counts = {"kv_buffer_map": 0, "kv_buffer_free": 0}
        patches = [
            unittest.mock.patch.object(topkv._core.waits, name, support.counting(name, counts))
            for name in counts
        ]
        with patches[0], patches[1]:
            for refused in (
                lambda: sessions[0].query(query, deadline=0),
                lambda: sessions[0].append(rows_of(1), 1, deadline=0),
                lambda: sessions[0].read(0, 1, deadline=0),
                lambda: sessions[0].fetch([[0]], layer=1, deadline=0),
                lambda: self.client.append_many(entries, deadline=0),
                lambda: self.client.query_many([topkv.QueryEntry(sessions[0], query)], deadline=0),
            ):
                with self.assertRaises(topkv.InvalidError):
                    refused()
        self.assertEqual(counts["kv_buffer_map"], counts["kv_buffer_free"])
        results = self.client.query_many([topkv.QueryEntry(session, query) for session in sessions])
        for at, result in enumerate(results):
            first = rows_of(1, at)[HEADS * ROW :][:ROW]
            self.assertEqual(memoryview(result.heads[0].rows).tobytes(), first)
        with support.client_of(self.node) as other:
            with self.assertRaises(topkv.InvalidError):
                other.append_many(entries)
        entries[0] = topkv.AppendEntry(sessions[0], b"odd", 1)
        with self.assertRaises(topkv.InvalidError):
            self.client.append_many(entries)
        self.assertEqual(self.client.append_many([]), [])
        self.assertEqual(self.client.query_many([]), [])


def softmax_of(scores):
    weights = numpy.exp(scores - scores.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


@unittest.skipUnless(numpy, "no numpy")
class Oracle(support.NodeCase):
    """Queries that score every row by its key, against numpy on the same rows."""

    TOKENS = 1500

    def setUp(self):
        super().setUp()
        random = numpy.random.default_rng(11)
        self.rows = random.standard_normal((LAYERS, HEADS, self.TOKENS, D_K + D_V)).astype(numpy.float16)
        self.queries = random.standard_normal((HEADS, 3, D_K)).astype(numpy.float32)
        self.session = self.client.open_session(model_of("oracle"))
        self.session.put(self.rows, 0)

    def scores(self, head, layer=1):
        keys = self.rows[layer, head, :, :D_K].astype(numpy.float64)
        return self.queries[head].astype(numpy.float64) @ keys.T / math.sqrt(D_K)

    def query(self, k=24, **options):
        options.setdefault("rerank", 1)
        return self.session.query(topkv.Query(self.queries, k, **{"layer": 1, "ranges": [(0, self.TOKENS)], **options}))

    def test_rows(self):
        got = self.session.read(0, self.TOKENS)
        self.assertEqual((got.dtype, got.shape), (numpy.float16, self.rows.shape))
        self.assertTrue((got == self.rows).all())
        parts = self.session.fetch([numpy.array([5, 1]), []], layer=0)
        self.assertTrue((parts[0] == self.rows[0, 0, [5, 1]]).all())
        self.assertEqual(parts[1].shape, (0, D_K + D_V))
        out = numpy.empty_like(self.rows)
        self.session.read(0, self.TOKENS, out=out)
        self.assertTrue((out == self.rows).all())

    def test_wrong_arrays(self):
        for wrong, words in ((self.rows.astype(numpy.float32), "format"), (self.rows.swapaxes(1, 2).copy(), "shape"),
                             (self.rows[:, :, ::2], "one piece")):
            with self.assertRaises(topkv.InvalidError) as caught:
                self.session.put(wrong, 0)
            self.assertIn(words, str(caught.exception))
        self.session.put(self.rows.view(numpy.uint16), 0)

    def test_top_k(self):
        for merge, combine in ((topkv.Merge.SUM, numpy.sum), (topkv.Merge.MAX, numpy.max)):
            result = self.query(merge=merge, answer=topkv.Answer.ROWS, want_weights=True)
            for head, answer in enumerate(result.heads):
                weights = combine(softmax_of(self.scores(head)), axis=0)
                best = numpy.sort(numpy.argsort(-weights)[:24])
                self.assertEqual(answer.ids.tolist(), best.tolist())
                numpy.testing.assert_allclose(answer.weights, weights[best], rtol=1e-4)
                self.assertTrue((answer.rows == self.rows[1, head, best]).all())
                self.assertEqual(answer.row_index.tolist(), list(range(24)))
                crc = self.session.row_crc(answer.rows[3], layer=1, kv_head=head, token=int(best[3]))
                self.assertEqual(crc, answer.crcs[3])

    def test_attention(self):
        ranges = [(0, 100), (400, 1000)]
        eligible = numpy.r_[0:100, 400:1000]
        result = self.query(k=700, ranges=ranges, answer=topkv.Answer.ATTEND, want_ids=True)
        for head, answer in enumerate(result.heads):
            self.assertEqual(answer.ids.tolist(), eligible.tolist())
            scores = self.scores(head)[:, eligible]
            values = self.rows[1, head, eligible, D_K:].astype(numpy.float64)
            numpy.testing.assert_allclose(answer.outputs, softmax_of(scores) @ values, atol=1e-4)
            numpy.testing.assert_allclose(answer.lses, numpy.log(numpy.exp(scores).sum(axis=1)), rtol=1e-5)

    def test_union_and_none(self):
        for merge in (topkv.Merge.UNION, topkv.Merge.NONE):
            result = self.query(k=8, merge=merge)
            for head, answer in enumerate(result.heads):
                each = [set(numpy.argsort(-scores)[:8].tolist()) for scores in self.scores(head)]
                self.assertEqual(set(answer.ids.tolist()), set().union(*each))
                if merge == topkv.Merge.NONE:
                    for token, mask in zip(answer.ids.tolist(), answer.query_mask.tolist()):
                        self.assertEqual(mask, sum(1 << at for at in range(3) if token in each[at]))

    def test_fraction(self):
        result = self.query(k=600, selection=topkv.Selection.MASS, fraction=0.5)
        for head, answer in enumerate(result.heads):
            weights = numpy.sort(softmax_of(self.scores(head)).sum(axis=0))[::-1]
            wanted = int(numpy.searchsorted(numpy.cumsum(weights), 0.5 * weights.sum())) + 1
            self.assertLessEqual(abs(answer.n_selected - wanted), 1)

    def test_by_code(self):
        indexed = self.session.index(self.TOKENS, m=8, bits=6, chapter_blocks=0, copies=True)
        self.assertEqual((indexed.rows, indexed.n_pending), (LAYERS * HEADS * self.TOKENS, 0))
        self.assertGreater(indexed.rows_coded, 0)
        by_code = self.query(rerank=4, want_reads=True)
        self.assertGreater(by_code.reads.codes, 0)
        self.assertGreater(by_code.elapsed_us, 0)
        cut = self.query(rerank=2, first_cut=topkv.FirstCut.INT4, candidates=8)
        for head in range(HEADS):
            weights = softmax_of(self.scores(head)).sum(axis=0)
            best = set(numpy.argsort(-weights)[:24].tolist())
            for answer in (by_code.heads[head], cut.heads[head]):
                self.assertGreater(answer.n_scored_by_code, 0)
                self.assertGreaterEqual(len(best & set(answer.ids.tolist())), 12)

    def test_cached_blocks(self):
        result = self.query(answer=topkv.Answer.ROWS)
        crcs = [self.session.row_crc(self.rows[1, 0, token], layer=1, kv_head=0, token=token) for token in range(BLOCK)]
        fingerprint = topkv._library.quick.kv_block_fingerprint((ctypes.c_uint32 * BLOCK)(*crcs))
        cached = self.query(answer=topkv.Answer.ROWS, cached=[[(0, fingerprint)], []])
        before, after = result.heads[0], cached.heads[0]
        self.assertEqual(before.ids.tolist(), after.ids.tolist())
        n_own = int((before.ids < BLOCK).sum())
        self.assertGreater(n_own, 0)
        self.assertEqual(int((after.row_index == topkv.ROW_CACHED).sum()), n_own)
        self.assertEqual(len(after.rows), 24 - n_own)


WITHOUT_NUMPY = """
import sys
sys.modules["numpy"] = None
import array, struct, topkv
node, = sys.argv[1:]
with topkv.Client(node, deadline=60, peer_timeout=60) as client:
    model = topkv.Model.uniform("plain", "plain", n_layers=1, n_kv_heads=2, d_k=4, d_v=4, dtype="fp32")
    numbers = array.array("f", [at % 13 for at in range(2 * 16 * 8)])
    with client.open_session(model) as session:
        session.put(numbers, 0)
        got = session.read(0, 16)
        assert type(got) is memoryview and got.shape == (1, 2, 16, 8) and got[0, 1, 3, 2] == (16 * 8 + 26) % 13, got
        ones, = session.fetch([[2, 5]], layer=0)
        assert ones.shape == (2, 8) and ones[1, 7] == 47 % 13
        query = topkv.Query([[[1.0, 0, 0, 0]], [[0, 1.0, 0, 0]]], 3, layer=0, ranges=[(0, 16)],
                            answer=topkv.Answer.ATTEND, want_ids=True, want_weights=True)
        head = session.query(query).heads[0]
        best = sorted(range(16), key=lambda token: (-numbers[token * 8], token))[:3]
        assert head.ids.tolist() == sorted(best), (head.ids.tolist(), best)
        assert head.outputs.shape == (1, 4) and len(head.weights) == 3
        flat = memoryview(array.array("f", [1, 0, 0, 0] * 2)).cast("B").cast("f", [2, 1, 4])
        assert session.query(topkv.Query(flat, 3, layer=0, ranges=[(0, 16)])).heads[0].ids.tolist() == sorted(best)
        try:
            topkv.Query([[[1.0], [1.0, 2.0]]], 1, layer=0, ranges=[(0, 1)])
        except topkv.InvalidError as error:
            assert "lengths" in str(error)
        else:
            raise AssertionError("ragged queries")
    half = topkv.Model.uniform("half", "half", n_layers=1, n_kv_heads=1, d_k=2, d_v=0)
    with client.open_session(half) as session:
        session.put(struct.pack("<4e", 1, 2, 3, 4), 0)
        assert bytes(session.read(0, 2)) == struct.pack("<4e", 1, 2, 3, 4)
print("fine")
"""


class Plain(support.NodeCase):
    def test_without_numpy(self):
        out = support.run_python(WITHOUT_NUMPY, self.node.address)
        self.assertEqual(out.stdout, "fine\n", out.stderr)


if __name__ == "__main__":
    unittest.main()
