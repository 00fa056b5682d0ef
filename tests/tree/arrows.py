#!/usr/bin/env python3
"""Does every folder of the product include only what it may?

    python3 tests/tree/arrows.py ROOT
    python3 tests/tree/arrows.py --self-test

arrows.tsv beside this file says which folder may include what.  An #include that it does not
allow is an error, and so are: folders that may include each other in a circle; a header that is
not named by its path from ROOT; a library's header outside the files that wrap that library; an
exception that no #include needs any more.  Exit status: 1 if there is one, 2 if the table or
the call is wrong.

The product is the folders proto, kernels, kvserver, client and gpu-worker.  A folder may always
include itself; it may not include its subfolders, unless the table says so.  Where the table has
an order of a folder's modules, a header and its .c being one, a module includes only those before
it.
"""
import collections
import fnmatch
import pathlib
import re
import sys
import tempfile

PRODUCT = ["proto", "kernels", "kvserver", "client", "gpu-worker"]
SOURCES = {".c", ".h", ".inc", ".cc", ".cpp", ".cu", ".cuh", ".hpp"}
TABLE = pathlib.Path(__file__).resolve().parent / "arrows.tsv"

# Comments go, strings stay.
TOKEN = re.compile(r"""/\*.*?\*/|//[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""", re.DOTALL)
DIRECTIVE = re.compile(r"^[ \t]*#[ \t]*(?:include\w*|import)\b[ \t]*(.*)$", re.MULTILINE)
NAMED = re.compile(r"""(["<])([^">]+)[">]\s*$""")

Include = collections.namedtuple("Include", "file line quote header")
Row = collections.namedtuple("Row", "line kind source targets why")


def folder_of(path):
    return path.rpartition("/")[0]


def module_of(path):
    return path.rpartition("/")[2].rpartition(".")[0]


def without_comment(token):
    text = token.group()
    return " " + "\n" * text.count("\n") if text.startswith("/") else text


def includes_of(root, file):
    text = TOKEN.sub(without_comment, (root / file).read_text(errors="replace"))
    for found in DIRECTIVE.finditer(text):
        line = text.count("\n", 0, found.start()) + 1
        named = NAMED.match(found[1])
        yield Include(file, line, *(named.groups() if named else ("", found[1])))


class Table:
    def __init__(self, root, path):
        self.root = root
        self.errors = []
        self.rows = []
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if line and not line.startswith("#"):
                self.add(number, line.split("\t"))

    def add(self, line, cells):
        kinds = {"allow": 3, "except": 4, "library": 3, "system": 3, "order": 3}
        if len(cells) != kinds.get(cells[0]):
            self.errors.append(f"{TABLE.name}:{line}: not a row: {' '.join(cells)}")
            return
        kind, source, targets = cells[0], cells[1], cells[2].split()
        row = Row(line, kind, source, targets, cells[3] if len(cells) > 3 else "")
        if any(kind == other.kind != "except" and source == other.source for other in self.rows):
            self.errors.append(f"{TABLE.name}:{line}: {source}: a second row")
        paths = {"allow": [source, *targets], "except": [source, *targets],
                 "library": targets, "system": [], "order": [source]}[kind]
        for path in paths:
            if path != "-" and not (self.root / path).exists():
                self.errors.append(f"{TABLE.name}:{line}: {path}: there is no such path")
        if kind == "order":
            found = {module_of(file.name) for file in (self.root / source).glob("*")
                     if file.suffix in SOURCES}
            for module in sorted(found ^ set(targets)):
                self.errors.append(f"{TABLE.name}:{line}: {source}/{module}: " + (
                    "not in the order" if module in found else "there is no such module"))
        self.rows.append(row)

    def of_kind(self, kind):
        return [row for row in self.rows if row.kind == kind]

    def rows_for(self, kind, file):
        return [row for row in self.of_kind(kind) if row.source in (file, folder_of(file))]

    def allowed(self, file):
        rows = self.rows_for("allow", file)
        return [target for row in rows for target in row.targets if target != "-"]

    def has_folder(self, folder):
        return any(row.source == folder for row in self.of_kind("allow"))


class Check:
    def __init__(self, root, table):
        self.root = root
        self.table = table
        self.errors = []
        self.used = set()  # exceptions
        self.arrows = collections.defaultdict(set)  # folder -> folders
        for row in table.of_kind("allow"):
            for target in row.targets:
                if target != "-":
                    self.arrow(self.as_folder(row.source), self.as_folder(target))

    def as_folder(self, path):
        return path if (self.root / path).is_dir() else folder_of(path)

    def arrow(self, source, target):
        if source != target and target.split("/")[0] in PRODUCT:
            self.arrows[source].add(target)

    def error(self, include, text):
        self.errors.append(f"{include.file}:{include.line}: {include.header}: {text}")

    def check(self, include):
        if include.quote == "":
            self.error(include, "not the name of a header")
        elif include.quote == "<":
            self.check_outside(include)
        elif self.is_from_root(include.header):
            self.check_arrow(include)
        else:
            self.error(include, "not a path from the repository's root")

    def is_from_root(self, header):
        if any(part in ("", ".", "..") for part in header.split("/")) or "/" not in header:
            return False
        if header.endswith(".pb-c.h"):  # made by the build
            header = header[:-len(".pb-c.h")] + ".proto"
        return (self.root / header).is_file()

    def check_outside(self, include):
        for row in self.table.of_kind("library"):
            if fnmatch.fnmatchcase(include.header, row.source):
                if not {include.file, folder_of(include.file)} & set(row.targets):
                    self.error(include, f"only {' '.join(row.targets)} may include it")
                return
        for row in self.table.of_kind("system"):
            if any(fnmatch.fnmatchcase(include.header, name) for name in row.targets):
                return
        if (self.root / include.header).is_file():
            self.error(include, "a header of the product in angle brackets")
        else:
            self.error(include, f"a library that {TABLE.name} does not know")

    def check_arrow(self, include):
        source, target = folder_of(include.file), folder_of(include.header)
        allowed = self.table.allowed(include.file)
        if source == target:
            self.check_order(include)
        if source == target or target in allowed or include.header in allowed:
            return
        for row in self.table.rows_for("except", include.file):
            if include.header in row.targets:
                self.used.add((row.line, include.header))
                return
        self.arrow(source, target)
        if self.table.has_folder(source):
            self.error(include, f"{source} -> {target} is not allowed; "
                                f"{source} may include: {' '.join(allowed) or 'itself only'}")
        else:
            self.error(include, f"{source} has no row in {TABLE.name}")

    def check_order(self, include):
        source, target = module_of(include.file), module_of(include.header)
        for row in self.table.rows_for("order", include.file):
            if row.targets.index(source) < row.targets.index(target):
                self.error(include, f"{target} is above {source} in the order of {row.source}")

    def check_exceptions(self):
        for row in self.table.of_kind("except"):
            for target in row.targets:
                if (row.line, target) not in self.used:
                    self.errors.append(f"{TABLE.name}:{row.line}: {row.source} -> {target}: "
                                       "nothing needs this exception any more: remove it")

    def circle_at(self, start):
        """The shortest way from start back to it, as a list of folders, or None."""
        ways = collections.deque([[start]])
        seen = set()
        while ways:
            way = ways.popleft()
            for folder in sorted(self.arrows[way[-1]]):
                if folder == start:
                    return way + [start]
                if folder not in seen:
                    seen.add(folder)
                    ways.append(way + [folder])
        return None

    def check_circles(self):
        circles = [self.circle_at(folder) for folder in sorted(self.arrows)]
        told = set()
        for circle in sorted(filter(None, circles), key=len):
            if told.isdisjoint(circle):
                self.errors.append("folders in a circle: " + " -> ".join(circle))
                told.update(circle)


def fail(text):
    print(f"arrows: {text}", file=sys.stderr)
    sys.exit(2)


def product_files(root):
    for top in PRODUCT:
        files = [path for path in (root / top).rglob("*") if path.suffix in SOURCES]
        if not files:
            fail(f"{root / top}: no sources")
        yield from sorted(path.relative_to(root).as_posix() for path in files)


def check_tree(root, table_path):
    """What is wrong with the table; else with the tree, and how much there is of it."""
    files = list(product_files(root))
    table = Table(root, table_path)
    if table.errors:
        return table.errors, [], ""
    check = Check(root, table)
    n_includes = 0
    for file in files:
        for include in includes_of(root, file):
            n_includes += 1
            check.check(include)
    check.check_exceptions()
    check.check_circles()
    return [], check.errors, (f"{n_includes} includes in {len(files)} files, "
                              f"{len(check.used)} exceptions, {len(check.errors)} errors")


SELF_TEST_TABLE = """
allow	proto	-
allow	kernels	proto
allow	kvserver	client/c.h kernels proto
allow	client	kvserver/node.h proto
allow	gpu-worker	client
except	kernels/b.h	kvserver/node.h	an exception that is needed
except	kernels/b.h	client/c.h	and one that is not
library	pthread.h	kvserver/node.c
system	C11	stdio.h
order	kvserver	base node
"""
SELF_TEST = {
    "proto/a.h": "",
    "kernels/b.h": '#include "kvserver/node.h"\n',
    "kvserver/node.h": '#include "kernels/b.h"\n#include <stdio.h>\n',
    "kvserver/node.c": '#include <pthread.h>\n/* #include "client/c.h" */\n#include "node.h"\n',
    "kvserver/base.c": '#include "kvserver/node.h"\n#include "kvserver/base.h"\n',
    "kvserver/base.h": "",
    "client/c.h": '#include "kvserver/node.h"\n#include "kernels/b.h"\n#include <pthread.h>\n',
    "gpu-worker/d.c": '#include "client/c.h"\n#include HEADER\n#include <ucx.h>\n'
                      '#include <proto/a.h>\n#include "proto/a.h"\n',
}
SELF_TEST_FINDS = [
    "arrows.tsv:8: kernels/b.h -> client/c.h: nothing needs this exception any more: remove it",
    "client/c.h:2: kernels/b.h: client -> kernels is not allowed; client may include: "
    "kvserver/node.h proto",
    "client/c.h:3: pthread.h: only kvserver/node.c may include it",
    "folders in a circle: client -> kvserver -> client",
    "gpu-worker/d.c:2: HEADER: not the name of a header",
    "gpu-worker/d.c:3: ucx.h: a library that arrows.tsv does not know",
    "gpu-worker/d.c:4: proto/a.h: a header of the product in angle brackets",
    "gpu-worker/d.c:5: proto/a.h: gpu-worker -> proto is not allowed; gpu-worker may include: "
    "client",
    "kvserver/base.c:1: kvserver/node.h: node is above base in the order of kvserver",
    "kvserver/node.c:3: node.h: not a path from the repository's root",
]


def self_test():
    with tempfile.TemporaryDirectory() as folder:
        root = pathlib.Path(folder)
        for file, text in SELF_TEST.items():
            (root / file).parent.mkdir(exist_ok=True)
            (root / file).write_text(text)
        table = root / "table.tsv"
        table.write_text(SELF_TEST_TABLE)
        wrong, found, _ = check_tree(root, table)
        table.write_text("allow	proto	nowhere\nallow	kernels\norder	proto	a b\norder	client	-\n")
        wrong += [f"found: {error}" for error in set(found) ^ set(SELF_TEST_FINDS)]
        bad_rows, _, _ = check_tree(root, table)
        if wrong or len(found) != len(SELF_TEST_FINDS) or len(bad_rows) != 5:
            print("\n".join([*wrong, *bad_rows]))
            sys.exit(1)
    print("what is planted is found, and nothing else")


def main():
    if len(sys.argv) != 2:
        fail("usage: arrows.py ROOT | --self-test")
    if sys.argv[1] == "--self-test":
        return self_test()
    bad_rows, errors, summary = check_tree(pathlib.Path(sys.argv[1]), TABLE)
    if bad_rows:
        print("\n".join(bad_rows), file=sys.stderr)
        sys.exit(2)
    print("\n".join(errors + [summary]))
    sys.exit(1 if errors else 0)


main()
