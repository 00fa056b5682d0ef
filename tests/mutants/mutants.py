#!/usr/bin/env python3
"""Do the tests notice when the product is broken on purpose?

    python3 tests/mutants/mutants.py BUILD [NAME...]     e.g. build-mutants; NAMEs from mutants.tsv
    python3 tests/mutants/mutants.py --check             only whether each row's text is there once

Each row of mutants.tsv is one small change of a product file, and the tests that must fail with
it.  The changes are made in a copy of HEAD under BUILD, one at a time; the checkout is not touched.
A change that no test notices survives, and the exit status is 1; one whose text is not in the
file once, that does not compile, or whose tests fail without it, is an error of the table: 2.

Columns, tab-separated: name, file, what is there, what takes its place (\\n: a new line), the
programs to build, and the tests as ctest's -R has them, or a command line that begins with the
path of a test program in the build, which may run one test of many.

It takes what cmake takes from the environment: CMAKE_C_COMPILER_LAUNCHER=ccache
LDFLAGS=-fuse-ld=lld saves most of the time.
"""
import pathlib
import subprocess
import sys
import time

HERE = pathlib.Path(__file__).resolve().parent
TOP = HERE.parent.parent
TIMEOUT_S = 300


def run(command, log, **options):
    with open(log, "ab") as out:
        return subprocess.run(command, stdout=out, stderr=out, **options).returncode


def read_table():
    rows = []
    for number, line in enumerate((HERE / "mutants.tsv").read_text().splitlines(), 1):
        if not line or line.startswith("#"):
            continue
        cells = [cell.replace("\\n", "\n") for cell in line.split("\t")]
        if len(cells) != 6:
            sys.exit(f"mutants: mutants.tsv: line {number}: {len(cells)} columns, not 6")
        rows.append(cells)
    return rows


def build(objects, programs, log):
    return run(["ninja", "-C", objects, *programs.split()], log) == 0


def passes(objects, tests, log):
    if not tests.startswith("tests/"):
        return run(["ctest", "--test-dir", objects, "--timeout", str(TIMEOUT_S),
                    "--no-tests=error", "-R", tests], log) == 0
    program, *arguments = tests.split()
    try:
        return run([objects / program, *arguments], log, timeout=TIMEOUT_S) == 0
    except subprocess.TimeoutExpired:
        return False


def copy_head(tree):
    """A work tree of HEAD, fresh or brought up to date."""
    if tree.exists():
        head = subprocess.check_output(["git", "-C", TOP, "rev-parse", "HEAD"], text=True).strip()
        subprocess.check_call(["git", "-C", tree, "checkout", "--quiet", "--force", head])
    else:
        subprocess.check_call(["git", "-C", TOP, "worktree", "prune"])
        subprocess.check_call(
            ["git", "-C", TOP, "worktree", "add", "--quiet", "--detach", "--force", tree])


def check():
    """A row goes stale when its file changes; this takes no build."""
    stale = 0
    for name, file, there, *_ in read_table():
        path = TOP / file
        n = path.read_text().count(there) if path.exists() else 0
        if n != 1:
            print(f"mutants.tsv: {name}: {file}: the text is there {n} times, not once")
            stale += 1
    return 1 if stale else 0


def main():
    if sys.argv[1:] == ["--check"]:
        return check()
    if len(sys.argv) < 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 2
    folder = pathlib.Path(sys.argv[1]).resolve()
    wanted = set(sys.argv[2:])
    rows = read_table()
    for name in wanted - {row[0] for row in rows}:
        sys.exit(f"mutants: {name}: no such row in mutants.tsv")
    tree, objects, log = folder / "tree", folder / "objects", folder / "log"
    folder.mkdir(parents=True, exist_ok=True)
    copy_head(tree)
    if run(["cmake", "-S", tree, "-B", objects, "-G", "Ninja", "-DKV_WERROR=OFF"], log):
        sys.exit(f"mutants: cmake failed: {log}")
    survived, broken, killed = [], [], 0
    sound = {}  # tests: whether they pass as things are
    for name, file, there, instead, programs, tests in rows:
        if wanted and name not in wanted:
            continue
        begun = time.time()
        path = tree / file
        text = path.read_text()
        if text.count(there) != 1:
            print(f"{name}: {file}: the text is there {text.count(there)} times", flush=True)
            broken.append(name)
            continue
        if tests not in sound:
            sound[tests] = build(objects, programs, log) and passes(objects, tests, log)
        if not sound[tests]:
            print(f"{name}: {tests}: fails without the change", flush=True)
            broken.append(name)
            continue
        path.write_text(text.replace(there, instead))
        try:
            if not build(objects, programs, log):
                outcome = "does not compile"
                broken.append(name)
            elif not passes(objects, tests, log):
                outcome = "killed"
                killed += 1
            else:
                outcome = "SURVIVED"
                survived.append(name)
        finally:
            path.write_text(text)
        print(f"{name}: {outcome} ({tests}, {time.time() - begun:.0f} s)", flush=True)
    print(f"{killed} killed, {len(survived)} survived, {len(broken)} broken")
    return 2 if broken else 1 if survived else 0


if __name__ == "__main__":
    sys.exit(main())
