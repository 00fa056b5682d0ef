#!/usr/bin/env python3
"""Does every function of kvclient.h lock the client?

    python3 tests/tree/enter.py ROOT
    python3 tests/tree/enter.py --self-test

A thread of the library's own may be at work on a client (client/enter.h), so a function that
touches one has KVC_ENTER or KVC_LOOK before it uses what it was given, except to see whether that
is NULL or empty.  OPEN lists the functions that need neither, and why; one that has one
nevertheless, or is not there, is an error.  Exit status: 1 if there is an error, 2 if the call is
wrong or nothing was found.
"""
import pathlib
import re
import sys
import tempfile

HEADERS = "client/include/*.h"
SOURCES = ["client/*.c", "client/ops/*.c"]
OPEN = {
    "kv_client_open": "there is no thread yet",
    "kv_client_close": "ends the thread first",
    "kv_client_version": "no client",
    "kv_client_n_nodes": "never changes",
    "kv_client_now_us": "never changes where the clock is",
    "kv_prompt_names": "reads the salt, which never changes",
    "kv_buffer_data": "never changes",
    "kv_buffer_bytes": "never changes",
    "kv_rows_bytes": "no client",
    "kv_query_rows_bytes_max": "no client",
    "kv_block_fingerprint": "no client",
}

COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
DECLARED = re.compile(r"^KV_API\b[^;(]*?\b(kv_\w+)\(", re.MULTILINE)
DEFINED = re.compile(r"^(?!static\b)[a-z][\w *\n]*?\b(kv_\w+)\([^;{}]*?\)\n\{\n(.*?)^\}", re.DOTALL | re.MULTILINE)
LOCKS = re.compile(r"\s*(?:if \((?:\w+ == NULL|n_\w+ == 0)\)\s*return[^;]*;\s*)?KVC_(?:ENTER|LOOK)\(")
ANYWHERE = re.compile(r"\bKVC_(?:ENTER|LOOK)\(")


def errors_of(root, unlocked):
    declared = {name for file in sorted(root.glob(HEADERS))
                for name in DECLARED.findall(COMMENT.sub("", file.read_text()))}
    bodies = {name: body for pattern in SOURCES for file in sorted(root.glob(pattern))
              for name, body in DEFINED.findall(COMMENT.sub("", file.read_text()))}
    if not declared:
        print(f"enter: {HEADERS}: no functions", file=sys.stderr)
        sys.exit(2)
    for name in sorted(declared | unlocked.keys()):
        if name not in declared:
            yield f"{name}: exempt, and not in {HEADERS}"
        elif name not in bodies:
            yield f"{name}: not in {' '.join(SOURCES)}"
        elif name in unlocked and ANYWHERE.search(bodies[name]):
            yield f"{name}: exempt, since \"{unlocked[name]}\", and locks"
        elif name not in unlocked and not LOCKS.match(bodies[name]):
            yield f"{name}: does not begin with KVC_ENTER or KVC_LOOK"


SELF_TEST_FILES = {
    "client/include/a.h": "/* KV_API void kv_none(void); */\nKV_API void kv_good(struct kv_op *op);\n"
                          "KV_API const char *\nkv_late(const struct kv_op *op,\n             int x);\n"
                          "KV_API int kv_free(struct kv_op *op);\nKV_API int kv_bare(int x);\n"
                          "KV_API int kv_both(int x);\nKV_API int kv_gone(int x);\n",
    "client/ops/a.c": "void kv_good(struct kv_op *op)\n{\n    /* why */\n    KVC_LOOK(op->client);\n}\n\n"
                      "const char *\nkv_late(const struct kv_op *op,\n        int x)\n{\n    int y = op->y;\n\n"
                      "    KVC_ENTER(op->client);\n}\n",
    "client/b.c": "int kv_free(struct kv_op *op)\n{\n    if (op == NULL)\n        return 0;\n"
                  "    KVC_ENTER(op->client);\n    return 1;\n}\n\nint kv_bare(int x)\n{\n    return x;\n}\n\n"
                  "int kv_both(int x)\n{\n    KVC_ENTER(x);\n}\n\nstatic int kv_gone(int x)\n{\n    return x;\n}\n",
}
SELF_TEST_OPEN = {"kv_bare": "why", "kv_both": "why", "kv_old": "why"}
SELF_TEST_FINDS = [
    'kv_both: exempt, since "why", and locks',
    "kv_gone: not in client/*.c client/ops/*.c",
    "kv_late: does not begin with KVC_ENTER or KVC_LOOK",
    "kv_old: exempt, and not in client/include/*.h",
]


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for file, text in SELF_TEST_FILES.items():
            (root / file).parent.mkdir(parents=True, exist_ok=True)
            (root / file).write_text(text)
        found = list(errors_of(root, SELF_TEST_OPEN))
    if found != SELF_TEST_FINDS:
        print("\n".join(["found:", *found, "not:", *SELF_TEST_FINDS]))
        sys.exit(1)
    print("what is planted is found, and nothing else")


def check(root):
    errors = list(errors_of(root, OPEN))
    print("\n".join([*errors, f"{len(errors)} errors"]))
    sys.exit(1 if errors else 0)


if len(sys.argv) != 2:
    print("enter: usage: enter.py ROOT | --self-test", file=sys.stderr)
    sys.exit(2)
if sys.argv[1] == "--self-test":
    self_test()
else:
    check(pathlib.Path(sys.argv[1]))
