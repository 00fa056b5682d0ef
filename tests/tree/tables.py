#!/usr/bin/env python3
"""Do the READMEs' tables list what the programs have, all of it and nothing else?

    python3 tests/tree/tables.py ROOT
    python3 tests/tree/tables.py --self-test

Each row of TABLES is a table of a README, told by how its title row begins, and where the code
has what it lists: files, and a pattern that finds the names in them, or no pattern if the files
themselves are listed.  A name that only one of the two has is an error.  A README's names are
those in the first column, without dashes, values and operands.  Exit status: 1 if there is an
error, 2 if the call is wrong or there is no such table.
"""
import collections
import pathlib
import re
import sys
import tempfile

# renamed: names that the README has otherwise, or (None) need not have.
Table = collections.namedtuple("Table", "readme title files pattern renamed")

OPTION = r'\{\.name = "([a-z-]+)"'
COMMAND = r'^    \{"([a-z-]+)",'
TABLES = [
    Table("kvserver/README.md", "option |", "kvserver/main.c",
          rf'{OPTION}|^ +"  --([a-z-]+) ', {}),
    Table("kvserver/README.md", "counters |", "kvserver/store/shard/stats.h",
          r"^    X\((\w+),", {"index_us": "index_seconds"}),
    Table("kvserver/README.md", "gauges |", "kvserver/store/control/metrics.c",
          r'^    (?:\{|gauge\(out, )"(\w+)",', {}),
    Table("client/README.md", "status |", "proto/kv_status.h",
          r"^    (KV_\w+) = ", {"KV_IN_PROGRESS": None}),
    Table("client/README.md", "command |", "client/kvctl/main.c", COMMAND, {}),
    Table("client/README.md", "file |", "client/*.c", None, {}),
    Table("gpu-worker/README.md", "command |", "gpu-worker/main.c", COMMAND, {}),
    Table("gpu-worker/README.md", "method |", "gpu-worker/attention/*.c",
          r'^    \.name = "([\w+]+)"', {}),
    Table("gpu-worker/README.md", "option |", "gpu-worker/attention/options.c", OPTION, {}),
    Table("kernels/README.md", "header |", "kernels/*.h", None, dict.fromkeys([
        # Of the folder itself, or of no family.
        "dispatch.h", "exp.h", "fp16.h", "gather_common.h", "isa.h", "key_copies_common.h",
        "lanes.h", "pq_cells_prefix.h", "select_passes.h", "summary_common.h"])),
]


def fail(text):
    print(f"tables: {text}", file=sys.stderr)
    sys.exit(2)


def told(text, title):
    """The names in the first column of the table whose title row begins so."""
    begin = text.find(f"\n| {title}")
    if begin < 0:
        return
    for row in text[begin + 1:].split("\n")[2:]:
        if not row.startswith("|"):
            return
        cell = re.split(r"(?<!\\)\|", row)[1].replace("`", "")
        for name in cell.split(","):
            yield name.split()[0].lstrip("-")


def had(root, table):
    files = sorted(root.glob(table.files))
    if table.pattern is None:
        names = [file.name for file in files]
    else:
        names = [next(filter(None, found.groups())) for file in files
                 for found in re.finditer(table.pattern, file.read_text(), re.MULTILINE)]
    return {table.renamed.get(name, name) for name in names} - {None}


def errors_of(root, table):
    in_code = had(root, table)
    in_readme = set(told((root / table.readme).read_text(), table.title))
    if table.pattern is None:  # other files may be listed
        in_readme = {name for name in in_readme if pathlib.PurePath(name).match(
            pathlib.PurePath(table.files).name) and "/" not in name}
    if not in_readme or not in_code:
        fail(f"{table.readme}: {table.title}: no such table, or nothing in {table.files}")
    for name in sorted(in_code ^ in_readme):
        missing = "the table lacks it" if name in in_code else f"not in {table.files}"
        yield f"{table.readme}: {table.title.rstrip(' |')}: {name}: {missing}"


SELF_TEST = [
    Table("README.md", "option |", "main.c", rf'{OPTION}|^ +"  --([a-z-]+) ', {"rest": "summaries"}),
    Table("README.md", "file | what", "*.c", None, {"hidden.c": None}),
]
SELF_TEST_FILES = {
    "README.md": "# X\n| options | are other |\n|---|---|\n| `--none` | |\n\n| option | value |\n"
                 "|---|---|\n| `--port N`, `--help` | |\n| `--mode a\\|b` | |\n| `--late` | |\n\n"
                 "| file | what |\n|---|---|\n| `main.c`, `main.h`, `lib/a.c` | |\n| `gone.c` | |\n",
    "main.c": '    {.name = "port",\n     .default = 1},\n    {.name = "mode"}, {.name = "rest"},\n'
              '           "  --help  prints\\n"\n',
    "new.c": "", "hidden.c": "",
}
SELF_TEST_FINDS = [
    "README.md: file | what: gone.c: not in *.c", "README.md: file | what: new.c: the table lacks it",
    "README.md: option: late: not in main.c", "README.md: option: summaries: the table lacks it",
]


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for file, text in SELF_TEST_FILES.items():
            (root / file).write_text(text)
        found = sorted(error for table in SELF_TEST for error in errors_of(root, table))
    if found != SELF_TEST_FINDS:
        print("\n".join(["found:", *found, "not:", *SELF_TEST_FINDS]))
        sys.exit(1)
    print("what is planted is found, and nothing else")


def check(root):
    errors = [error for table in TABLES for error in errors_of(root, table)]
    print("\n".join([*errors, f"{len(TABLES)} tables, {len(errors)} errors"]))
    sys.exit(1 if errors else 0)


if len(sys.argv) != 2:
    fail("usage: tables.py ROOT | --self-test")
if sys.argv[1] == "--self-test":
    self_test()
else:
    check(pathlib.Path(sys.argv[1]))
