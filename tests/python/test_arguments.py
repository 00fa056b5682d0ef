#!/usr/bin/env python3
"""Wrong arguments: each is an InvalidError that names the argument and the value, before anything is sent.

Rows of another type, byte order or shape, a model of another schema, wrong types of arguments; what a query returns
that was not asked for.
"""
import ctypes
import unittest

import support
import topkv
from topkv import _arrays

try:
    import numpy
except ImportError:
    numpy = None

support.needs_node()

LAYERS, HEADS, TOKENS, DIM = 2, 4, 64, 32
SHAPE = {"n_layers": LAYERS, "n_kv_heads": HEADS, "d_k": DIM, "d_v": DIM}


def model(**changed):
    return topkv.Model.uniform("arguments", "arguments", **{**SHAPE, **changed})


class ArgumentCase(support.NodeCase):
    def refused(self, call, *words):
        with self.assertRaises(topkv.InvalidError) as caught:
            call()
        for word in words:
            self.assertIn(word, str(caught.exception))
        self.assertIsInstance(caught.exception, ValueError)


class Resume(ArgumentCase):
    def test_other_schema(self):
        """The fingerprint is the same, the layers are not: nothing is read by the wrong sizes."""
        with self.client.open_session(model()) as session, support.client_of(self.node) as other:
            session.put(bytes(model().token_bytes * 16), 0)
            ticket = session.ticket()
            for changed, words in (({"dtype": "fp32"}, "fp32"), ({"dtype": "bf16"}, "bf16"), ({"d_k": 8}, "d_k 8,"),
                                   ({"d_v": 0}, "d_v 0,"), ({"n_kv_heads": 2}, "2 kv heads"),
                                   ({"n_layers": 3}, "3 layers; the session has 2")):
                self.refused(lambda: other.resume(ticket, model(**changed)), "'arguments'", words, "the session has")
            resumed = other.resume(ticket, model())
            self.assertEqual(resumed.length().tokens, 16)
            self.refused(lambda: resumed.append(bytes(model().token_bytes), 16, crcs=[0] * (LAYERS * HEADS - 1)),
                         "crcs: 7, for 8 rows")
            self.refused(lambda: other.resume(ticket.to_bytes(), model()), "ticket: a bytes: not a topkv.Ticket")
            self.refused(lambda: other.resume(ticket, "arguments"), "model: 'arguments': not a topkv.Model")
            self.refused(lambda: topkv.Ticket.from_bytes("x" * 40), "ticket")


class Rows(ArgumentCase):
    def setUp(self):
        super().setUp()
        self.session = self.client.open_session(model())

    @unittest.skipUnless(numpy, "no numpy")
    def test_type_and_order(self):
        rows = numpy.arange(LAYERS * HEADS * TOKENS * 2 * DIM).reshape(LAYERS, HEADS, TOKENS, 2 * DIM)
        rows = (rows % 1000).astype(numpy.float16)
        put = self.session.put
        for wrong, words in ((rows.astype(">f2"), "'>e'"), (rows.view(numpy.int16), "'h'"), (rows > 3, "'?'"),
                             (rows.astype(numpy.float32), "'f'"),
                             (numpy.zeros(rows.size // 4, "M8[s]"), "datetime64")):
            self.refused(lambda: put(wrong, 0), "rows: elements of", words, "fp16")
        for axes in ((0, 2, 1, 3), (1, 0, 2, 3)):
            swapped = numpy.ascontiguousarray(rows.transpose(axes))
            self.refused(lambda: put(swapped, 0), "rows: shape", str(swapped.shape), str(rows.shape))
        tokens_first = numpy.ascontiguousarray(rows[1].transpose(1, 0, 2))
        self.refused(lambda: put(tokens_first, 0, layer=1, n_layers=1), "rows: shape (64, 4, 64)")
        self.refused(lambda: put(rows.reshape(LAYERS * HEADS, TOKENS, 2 * DIM), 0), "rows: shape (8, 64, 64)")
        self.assertEqual(self.session.length().tokens, 0)
        for right in (rows, rows.view(numpy.uint16), rows.ravel(), rows.tobytes(), memoryview(rows),
                      rows.view(numpy.uint8)):
            put(right, 0)  # the same: else ConflictError
        for layer in range(LAYERS):
            put(rows[layer], 0, layer=layer, n_layers=1)
        self.assertTrue((self.session.read(0, TOKENS) == rows).all())

    @unittest.skipUnless(numpy, "no numpy")
    def test_out(self):
        shape = (LAYERS, HEADS, TOKENS, 2 * DIM)
        rows = numpy.random.default_rng(2).standard_normal(shape).astype(numpy.float16)
        self.session.put(rows, 0)
        for wrong in (numpy.zeros((LAYERS, HEADS, TOKENS, DIM), numpy.float32), numpy.zeros(shape, ">f2"),
                      numpy.zeros((HEADS, LAYERS, TOKENS, 2 * DIM), numpy.float16), numpy.zeros(shape, numpy.int16)):
            self.refused(lambda: self.session.read(0, TOKENS, out=wrong), "out: ")
            self.assertFalse(wrong.any())
        for right in (numpy.zeros(shape, numpy.float16), numpy.zeros(rows.size, numpy.uint16), bytearray(rows.nbytes)):
            self.assertEqual(bytes(self.session.read(0, TOKENS, out=right)), rows.tobytes())
        ids = [[1, 2]] * HEADS
        self.refused(lambda: self.session.fetch(ids, layer=0, out=numpy.zeros((2 * HEADS, DIM), "f4")), "out: ")
        self.refused(lambda: self.session.fetch(ids, layer=0, out=numpy.zeros((HEADS, 2, 2 * DIM), "f2")), "out: ")
        out = numpy.zeros((2 * HEADS, 2 * DIM), "f2")
        self.session.fetch(ids, layer=0, out=out)
        self.assertTrue((out.reshape(HEADS, 2, -1) == rows[0, :, 1:3]).all())

    def test_types_without_a_format(self):
        """bf16 in arrays that memoryview does not know: by the name of their type."""
        class Unknown:
            shape = (3,)

            def __init__(self, dtype):
                self.dtype = dtype

        _arrays.check_rows("rows", Unknown("bfloat16"), topkv.DType.BF16, None)
        self.refused(lambda: _arrays.check_rows("rows", Unknown("bfloat16"), topkv.DType.FP16, None), "bfloat16")
        self.refused(lambda: _arrays.check_rows("rows", Unknown("float8_e5m2"), topkv.DType.BF16, None), "float8")

    def test_numbers(self):
        session = self.session
        self.refused(lambda: session.read(0, 0), "n_tokens: 0: not in 1..")
        self.refused(lambda: session.read(0, 1, kv_head=9), "all kv heads from 9 on")
        self.refused(lambda: session.renew("5"), "lease: '5': not a number")
        self.refused(lambda: session.renew(-1), "lease: -1: ")
        self.refused(lambda: session.fetch(3, layer=0), "ids: 3: ")
        self.refused(lambda: session.fetch("ab", layer=0), "ids: 'ab': ")
        self.refused(lambda: session.row_crc(b"", layer="x", kv_head=0, token=0), "layer: 'x'")
        self.refused(lambda: session.query("abc"), "query: 'abc': not a topkv.Query")

    def test_without_numpy(self):
        """The shape that the docstring promises, in a process without numpy."""
        out = support.run_python(
            "import sys; sys.modules['numpy'] = None\n"
            "import topkv\n"
            "m = topkv.Model.uniform('bare', 'bare', n_layers=2, n_kv_heads=2, d_k=4, d_v=4)\n"
            "with topkv.Client(sys.argv[1]) as client, client.open_session(m) as session:\n"
            "    rows = bytes(range(256)) * 2\n"
            "    session.put(rows, 0)\n"
            "    got = session.read(0, 8)\n"
            "    print(got.shape, got.format in 'eH', got.tobytes() == rows, session.fetch([[1]], layer=0)[0].shape)\n",
            self.node.address)
        self.assertEqual(out.stdout, "(2, 2, 8, 8) True True (1, 8)\n", out.stderr)


class Objects(ArgumentCase):
    def test_python_objects(self):
        pointers = (ctypes.py_object * 4)(1, 2, 3, 4)
        kinds = [pointers, memoryview(pointers)]
        if numpy:
            kinds += [numpy.array([object()] * 4), memoryview(numpy.array([object()] * 4)),
                      numpy.zeros(4, [("a", "f4"), ("b", "O")])]
            fields = numpy.zeros(4, [("Ordinary", "f4"), ("Other", "i2")])
            self.client.put("fields", fields)
            self.client.put("fields", memoryview(fields))
        for kind in kinds:
            self.refused(lambda: self.client.put("pointers", kind), "data: ", "Python objects")
            self.refused(lambda: self.client.get_into("pointers", kind), "out: ", "Python objects")

    def test_types(self):
        client = self.client
        for ttl in ("60", b"60", [1]):
            self.refused(lambda: client.put("a", b"", ttl=ttl), f"ttl: {ttl!r}")
            self.refused(lambda: client.put_many([("a", b"")], ttl=ttl), f"ttl: {ttl!r}")
        for deadline in ("5", 0, float("nan"), [1]):
            self.refused(lambda: client.get("a", deadline=deadline), f"deadline: {deadline!r}")
        for call in (client.get_many, client.exists_many, client.delete_many):
            for names in ("abc", b"abc", 5):
                self.refused(lambda: call(names), f"names: {names!r}: not a list of names")
        for call in (client.put_many, client.get_many_into):
            self.refused(lambda: call({"k1": b"1"}), "objects: a dict: ", "items()")
            self.refused(lambda: call(["k1"]), "objects: 0: 'k1': not a (name, ")
        self.refused(lambda: client.table(5), "table: 5")
        self.refused(lambda: client.list_objects(limit="x"), "limit: 'x'")

    def test_opening(self):
        for changed, words in (({"salt": "x"}, "salt: a str"), ({"deadline": "5"}, "deadline: '5'"),
                               ({"peer_timeout": 0}, "peer_timeout: 0: ")):
            for kind in (topkv.Client, topkv.AsyncClient):
                self.refused(lambda: kind(self.node.address, **changed), words)


class Sessions(ArgumentCase):
    def test_models(self):
        for dtype in ("float16", 99, float, topkv.Answer.ROWS):
            self.refused(lambda: model(dtype=dtype), f"dtype: {dtype!r}: not one of")
        self.refused(lambda: topkv.Model(5, "w", [topkv.Layer(1, 8, 8)]), "model: name: 5")
        self.refused(lambda: topkv.Model("m", "w", [(1, 8, 8, "fp16")]), "model: layers: 0: ")
        self.refused(lambda: self.client.open_session("m"), "model: 'm': not a topkv.Model")
        self.refused(lambda: self.client.open_session(model(), lease="9"), "lease: '9'")
        self.refused(lambda: self.client.open_session(model(), names="ab"), "names: 'ab'")
        self.refused(lambda: self.client.prefix(topkv.Answer.IDS), "verb: ", "PrefixVerb.PIN")

    def test_prompt_names(self):
        tokens = list(range(256))
        self.assertEqual(len(self.client.prompt_names(model(), tokens)), 2)
        two = memoryview(bytes(4 * 256)).cast("I", [2, 128])
        for batch in [two] + ([numpy.ones((2, 128), "i8")] if numpy else []):
            self.refused(lambda: self.client.prompt_names(model(), batch), "tokens: an array of shape (2, 128)")
        self.refused(lambda: self.client.prompt_names(model(), [tokens, tokens]), "tokens: ")
        self.refused(lambda: self.client.prompt_names(model(), "abc"), "tokens: a str")
        self.refused(lambda: self.client.prompt_names(model(), tokens, extra_keys=[b"x"]), "extra_keys: b'x'")

    def test_batches(self):
        with self.client.open_session(model()) as session:
            rows = bytes(model().token_bytes)
            self.refused(lambda: self.client.append_many([(session, rows, 0)]), "entries: ", "topkv.AppendEntry")
            self.refused(lambda: self.client.append_many([topkv.AppendEntry("s", rows, 0)]), "session: 's'")
            self.refused(lambda: self.client.query_many([(session, None)]), "entries: ", "topkv.QueryEntry")
            self.refused(lambda: self.client.query_many([topkv.QueryEntry(session, None)]), "query: None")
            self.assertEqual(session.length().tokens, 0)


class Queries(ArgumentCase):
    def query(self, queries=None, **changed):
        if queries is None:
            queries = [[[0.5] * DIM] * 2] * HEADS
        return topkv.Query(queries, 4, **{"layer": 0, "ranges": [(0, 16)], "answer": topkv.Answer.ATTEND, **changed})

    def test_types(self):
        for changed, words in (({"scale": "x"}, "scale: 'x'"), ({"scale": float("nan")}, "scale: nan"),
                               ({"fraction": "x"}, "fraction: 'x'"), ({"ranges": (0, 64)}, "ranges: 0: 0: not a"),
                               ({"ranges": 5}, "ranges: 5"), ({"merge": topkv.Answer.ATTEND}, "merge: ", ),
                               ({"answer": "attend"}, "answer: 'attend': not one of Answer.IDS"),
                               ({"answer": 99}, "answer: 99"), ({"selection": topkv.Merge.MAX}, "selection: "),
                               ({"first_cut": 7}, "first_cut: 7"), ({"cached": [(1, 2)] * HEADS}, "cached: 0: 1")):
            self.refused(lambda: self.query(**changed), words)
        for answer in (topkv.Answer.IDS, topkv.Answer.ROWS):
            self.refused(lambda: self.query(answer=answer, want_ids=True), "want_ids: ", "Answer.ATTEND")
        self.query(merge=3, answer=2)  # the numbers will do

    @unittest.skipUnless(numpy, "no numpy")
    def test_numbers(self):
        for kind in ("c8", "U3", "M8[s]"):
            self.refused(lambda: self.query(numpy.zeros((HEADS, 2, DIM), kind)), "queries: not numbers")
        self.refused(lambda: self.query([[["1"] * DIM]] * HEADS), "queries: not numbers")
        for kind in ("f2", "f8", "i4"):
            self.query(numpy.zeros((HEADS, 2, DIM), kind))

    def test_not_asked_for(self):
        with self.client.open_session(model()) as session:
            session.put(bytes(model().token_bytes * 16), 0)
            for asks, has_ids in (({}, False), ({"want_ids": True}, True), ({"answer": topkv.Answer.IDS}, True),
                                  ({"answer": topkv.Answer.ROWS}, True)):
                for head in session.query(self.query(**asks)).heads:
                    self.assertEqual(head.ids is not None, has_ids, asks)
                    self.assertEqual(head.ids is None or len(head.ids) == 4, True)
                    self.assertIsNone(head.weights)
                    self.assertEqual(head.rows is None, asks.get("answer") is not topkv.Answer.ROWS)
                    if not has_ids:
                        self.assertIsNone(head.row_index)
                    self.assertEqual(head.n_selected, 4)


if __name__ == "__main__":
    unittest.main()
