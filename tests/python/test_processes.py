#!/usr/bin/env python3
"""Forks, nodes that are killed, the life of topkv.Node, the doctor, and the library's version."""
import gc
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import unittest
import unittest.mock

import support
import topkv

support.needs_node()

FORK = """
import os, sys, topkv
client = topkv.Client(sys.argv[1], deadline=60, peer_timeout=60)
model = topkv.Model.uniform("fork", "fork", n_layers=1, n_kv_heads=1, d_k=8, d_v=8)
session = client.open_session(model)
buffer = client.allocate(1 << 16)
client.put("before", b"before")
begun = client.begin_get_into("before", bytearray(10))
read, write = os.pipe()
child = os.fork()
if child == 0:
    words = []
    for call in (lambda: client.get("before"), lambda: session.length(), begun.done, client.nodes,
                 lambda: client.allocate(1), session.close, lambda: session.put(bytes(32), 0)):
        try:
            call()
            words.append("no error")
        except topkv.ForkedError as error:
            words.append(str(error))
    memoryview(buffer).cast("B")[:5] = b"child"
    try:
        topkv.Client(sys.argv[1])
        words.append("no error")
    except topkv.ForkedError as error:
        words.append(str(error))
    client.close()
    del session, buffer, begun
    os.write(write, "|".join(words).encode())
    os.close(write)
    if sys.argv[2] == "exit":
        sys.exit(0)  # with all finalizers, and UCX's
    os._exit(0)
os.close(write)
text = b""
while True:
    part = os.read(read, 65536)
    if not part:
        break
    text += part
pid, status = os.waitpid(child, 0)
assert status == 0, status
assert begun.result() == 6
client.put("after", b"after")
assert client.get("after") == b"after" and client.delete("after") and client.delete("before")
session.put(bytes(32), 0)
assert session.length().tokens == 1
client.close()
print(os.getpid(), text.decode(), sep="|")
"""


class Forks(support.NodeCase):
    def test_refused_in_words(self):
        for how in ("exit", "_exit"):
            out = support.run_python(FORK, self.node.address, how)
            self.assertEqual(out.returncode, 0, out.stderr)
            pid, *words = out.stdout.strip().split("|")
            self.assertEqual(len(words), 8)
            for word in words[:-1]:
                self.assertIn(f"opened in process {pid}", word)
                self.assertIn("its fork", word)
            self.assertIn(f"a fork of process {pid}, which had a client open", words[-1])

    def test_multiprocessing(self):
        """Workers open their own clients: none is open when they are forked."""
        code = """
import multiprocessing, sys, topkv
with topkv.Client(sys.argv[1], deadline=60, peer_timeout=60) as client:
    client.put("worker", b"")
def work(number):
    with topkv.Client(sys.argv[1], deadline=60, peer_timeout=60) as own:
        own.put(f"worker {number}", bytes(1000))
    return number
with multiprocessing.get_context("fork").Pool(3) as pool:
    assert pool.map(work, range(6)) == list(range(6))
with topkv.Client(sys.argv[1], deadline=60, peer_timeout=60) as client:
    assert client.delete_prefix("worker") == (7, 6000)
print("fine")
"""
        out = support.run_python(code, self.node.address)
        self.assertEqual(out.stdout, "fine\n", out.stderr)

    def test_open_at_exit(self):
        """Nothing is closed, and a thread of the library's runs: the process ends cleanly."""
        code = """
import sys, topkv
client = topkv.Client(sys.argv[1], deadline=60, peer_timeout=60)
buffer = client.allocate(1 << 20)
view = memoryview(buffer)
begun = [client.begin_put(f"exit {i}", buffer) for i in range(10)]
print("fine")
"""
        for _ in range(5):
            out = support.run_python(code, self.node.address)
            self.assertEqual((out.returncode, out.stdout, out.stderr), (0, "fine\n", ""))

    def test_buffers_at_exit(self):
        """Arrays of finalizers and of threads show them until the interpreter has ended."""
        code = """
import sys, threading, topkv
client = topkv.Client(sys.argv[1], deadline=60, peer_timeout=60)
view = memoryview(client.allocate(8 << 20)).cast("B")
view[-1] = 7
class Late:
    def __init__(self):
        self.view = view
    def __del__(self):
        print("late reads", self.view[-1])
late = Late()
late.itself = late
def read():
    while True:
        view.tobytes()
if sys.argv[2] == "thread":
    threading.Thread(target=read, daemon=True).start()
"""
        for how in ("finalizer", "thread"):
            out = support.run_python(code, self.node.address, how)
            self.assertEqual((out.returncode, out.stdout, out.stderr), (0, out.stdout, ""), how)
            if how == "finalizer":
                self.assertEqual(out.stdout, "late reads 7\n")


class Interrupted(support.NodeCase):
    def test_ctrl_c_ends_a_wait(self):
        """A wait of a minute ends at once, and the client is as good as before."""
        code = """
import sys, topkv
client = topkv.Client(sys.argv[1], deadline=60, peer_timeout=60)
session = client.open_session(topkv.Model.uniform("wait", "wait", n_layers=1, n_kv_heads=1, d_k=8, d_v=8))
out = bytearray(32)
try:
    print("waiting", flush=True)
    session.read(0, 1, out=out)
except KeyboardInterrupt:
    session.put(bytes(32), 0)
    session.read(0, 1, out=out)
    while client.is_busy(out):
        pass
    print("interrupted", len(client._core.under_way))
"""
        begun = time.monotonic()
        process = subprocess.Popen([sys.executable, "-c", code, self.node.address], stdout=subprocess.PIPE, text=True)
        with process:
            self.assertEqual(process.stdout.readline(), "waiting\n")
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            self.assertEqual(process.stdout.read(), "interrupted 0\n")
        self.assertLess(time.monotonic() - begun, 50)

    def test_handler_that_closes(self):
        """It interrupts a wait of a minute, which ends with ClosedError and uses nothing that was freed."""
        code = """
import signal, sys, topkv
from topkv import _core
freed = set()
def spy(name):
    function = getattr(_core.quick, name)
    def call(*arguments):
        assert arguments[0] not in freed, name
        if name == "kv_op_free":
            freed.add(arguments[0])
        return function(*arguments)
    setattr(_core.quick, name, call)
client = topkv.Client(sys.argv[1], deadline=60, peer_timeout=60)
session = client.open_session(topkv.Model.uniform("closes", "closes", n_layers=1, n_kv_heads=1, d_k=8, d_v=8))
out = bytearray(32)
for name in ("kv_op_status", "kv_op_detail", "kv_cancel", "kv_op_free"):
    spy(name)
signal.signal(signal.SIGALRM, lambda *_: client.close())
signal.setitimer(signal.ITIMER_REAL, 0.3)
try:
    session.read(0, 1, out=out)
except topkv.ClosedError:
    print("closed", client._core.handle, client._core.under_way)
out += b"free again"
"""
        out = support.run_python(code, self.node.address)
        self.assertEqual(out.stdout, "closed None {}\n", out.stderr)

    def test_handler_that_raises_anywhere(self):
        """A handler may raise where a function begins or where a call has returned: at each such place in turn.

        A profile function raises there.  After that the lock is free, no operation is left, and the client works.
        """
        core, client = self.client._core, self.client
        client.put("a", b"hello")
        package = os.path.dirname(topkv.__file__)
        left = 0

        def work():
            out = bytearray(5)
            client.get_into("a", out)
            client.begin_exists("a")  # dropped
            client.put("b", out)
            client.delete("b")
            client.get("a")

        def raise_later(frame, event, _):
            nonlocal left
            if event in ("call", "c_return") and frame.f_code.co_filename.startswith(package):
                left -= 1
                if left == 0:
                    raise KeyboardInterrupt

        work()
        n_blocks = len(core.blocks)
        ignored = []
        with unittest.mock.patch.object(sys, "unraisablehook", ignored.append):
            for place in range(1, 2000):
                left = place
                sys.setprofile(raise_later)
                try:
                    work()
                except KeyboardInterrupt:
                    pass
                finally:
                    sys.setprofile(None)
                self.assertFalse(core.lock._is_owned(), place)
                gc.collect(0)
                self.assertTrue(client.exists("a"))
                if left > 0:
                    break  # there is no such place
        self.assertGreater(left, 0)
        self.assertGreater(place, 100)
        # Python drops an exception in a finalizer, and with it the rest of that: there is one place in Operation's.
        self.assertTrue(all(value.exc_type is KeyboardInterrupt for value in ignored), ignored)
        lost = [value for value in ignored if "Operation" in value.object.__qualname__]
        self.assertLessEqual(len(core.under_way), len(lost))
        self.assertLessEqual(len(lost), 6)
        support.wait_until(lambda: client.poll() or client.exists("a") and not core.quarantine, "it is free")
        self.assertEqual((len(core.blocks), core.staged_bytes), (n_blocks, 0))


class Killed(unittest.TestCase):
    def test_in_mid_run(self):
        with tempfile.TemporaryDirectory() as folder:
            node = topkv.Node(memory="64M", threads=1, data_dir=folder, disk="256M")
            with topkv.Client(node.address, deadline=3, peer_timeout=1) as client:
                client.put("a", b"hello")
                node.kill()
                begun = time.monotonic()
                with self.assertRaises((topkv.UnreachableError, topkv.DeadlineError)) as caught:
                    while True:
                        client.get("a")
                self.assertIn(node.address, str(caught.exception))
                self.assertLess(time.monotonic() - begun, 60)
                results = client.put_many([("b", b"1"), ("c", b"2")])
                self.assertFalse(any(result.ok for result in results))
                self.assertIn(node.address, results[0].detail)
                self.assertFalse(node.is_running)
                with self.assertRaises(topkv.NodeError) as killed:
                    node.check()
                self.assertIn("-9", str(killed.exception))
                with topkv.Node(memory="64M", threads=1, data_dir=folder, disk="256M", listen=node.address):
                    client.put("d", b"again", deadline=60)
                    self.assertEqual(client.get("d", deadline=60), b"again")
            node.close()


class Nodes(unittest.TestCase):
    def test_ends_with_the_object(self):
        node = topkv.Node(memory="64M", threads=1)
        pid = node.pid
        self.assertTrue(node.is_running)
        node.check()
        self.assertIn("kvserver", node.log())
        del node
        gc.collect()
        support.wait_until(lambda: not support.is_alive(pid), "the node has ended")
        with topkv.Node(memory="64M", threads=1) as node:
            pid = node.pid
        self.assertFalse(support.is_alive(pid))
        node.close()
        with self.assertRaises(topkv.NodeError):
            node.log()

    def start(self, ending):
        code = f"""
import os, signal, sys, threading, topkv
nodes = []
def start():
    nodes.append(topkv.Node(memory="64M", threads=1))
thread = threading.Thread(target=start)  # which ends, and the node does not
thread.start()
thread.join()
with topkv.Client(nodes[0].address, deadline=60, peer_timeout=60) as client:
    client.put("a", b"x")
print(nodes[0].pid, flush=True)
{ending}
"""
        return code

    def test_ends_with_the_process(self):
        for ending, status in (("", 0), ("raise SystemExit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", -9)):
            out = support.run_python(self.start(ending))
            self.assertEqual(out.returncode, status, out.stderr)
            pid = int(out.stdout)
            support.wait_until(lambda: not support.is_alive(pid), f"the node has ended: {ending}")

    def test_not_with_a_fork(self):
        ending = """
child = os.fork()
if child == 0:
    del nodes
    sys.exit(0)
os.waitpid(child, 0)
with topkv.Client(nodes[0].address, deadline=60, peer_timeout=60) as client:
    assert client.get("a") == b"x" and nodes[0].is_running
"""
        out = support.run_python(self.start(ending))
        self.assertEqual(out.returncode, 0, out.stderr)

    def test_not_with_an_interrupt(self):
        """Ctrl-C goes to all processes of a terminal: the node is in a session of its own."""
        with topkv.Node(memory="64M", threads=1) as node:
            self.assertNotEqual(os.getsid(node.pid), os.getsid(0))

    def test_words(self):
        for options, words in (({"memory": "lots"}, "memory"), ({"options": {"nonsense": 1}}, "nonsense"),
                               ({"listen": "203.0.113.1:1"}, "203.0.113.1"), ({"transport": "pigeon"}, "transport"),
                               ({"data_dir": "/dev/null/x"}, "/dev/null")):
            with self.assertRaises(topkv.NodeError) as caught:
                topkv.Node(**{"memory": "64M", "threads": 1, **options})
            self.assertIn(words, str(caught.exception))
        with self.assertRaises(topkv.InvalidError):
            topkv.Node(options={"--memory": 1})
        before = os.environ["TOPKV_KVSERVER"]
        try:
            os.environ["TOPKV_KVSERVER"] = "/nowhere/kvserver"
            with self.assertRaises(topkv.NodeError) as caught:
                topkv.Node()
            self.assertIn("/nowhere/kvserver", str(caught.exception))
        finally:
            os.environ["TOPKV_KVSERVER"] = before


class Doctor(unittest.TestCase):
    def run_doctor(self, *arguments, **variables):
        return subprocess.run([sys.executable, "-m", "topkv", *arguments], capture_output=True, text=True,
                              timeout=120, env={**os.environ, **variables})

    def test_fine(self):
        out = self.run_doctor("doctor", "--deadline", "60")
        self.assertEqual(out.returncode, 0, out.stdout + out.stderr)
        for words in ("ok   library: ", "ok   glibc: ", "own node: started", "put, got and deleted"):
            self.assertIn(words, out.stdout)

    def test_json(self):
        with topkv.Node(memory="64M", threads=1) as node:
            out = self.run_doctor("doctor", "--json", "--server", node.address, "--deadline", "60")
            report = json.loads(out.stdout)
            self.assertTrue(report["ok"])
            self.assertIn(f"node {node.address}", [check["name"] for check in report["checks"]])

    def test_failures(self):
        out = self.run_doctor("doctor", "--server", "127.0.0.1:9", "--json")
        self.assertEqual(out.returncode, 1)
        self.assertIn("127.0.0.1:9", json.loads(out.stdout)["checks"][-1]["found"])
        out = self.run_doctor("doctor", TOPKV_LIBRARY="/nowhere/libkvclient.so")
        self.assertEqual(out.returncode, 1)
        self.assertIn("fail library: ", out.stdout)
        self.assertIn("/nowhere/libkvclient.so", out.stdout)
        self.assertEqual(self.run_doctor("doctor", "--nonsense").returncode, 2)
        self.assertEqual(self.run_doctor("nonsense").returncode, 2)
        self.assertEqual(self.run_doctor().returncode, 2)
        self.assertIn(topkv.__version__, self.run_doctor("--version").stdout)

    def test_versions(self):
        """A package and a library of different versions are refused on import, in words."""
        with tempfile.TemporaryDirectory() as folder:
            shutil.copytree(pathlib.Path(topkv.__file__).parent, f"{folder}/topkv",
                            ignore=shutil.ignore_patterns("__pycache__"))
            pathlib.Path(folder, "topkv/_version.py").write_text('__version__ = "9.9.9"\n')
            environment = {**os.environ, "PYTHONPATH": folder}
            out = support.run_python("import topkv", env=environment)
            self.assertEqual(out.returncode, 1)
            self.assertIn(f"version {topkv.__version__}, but the package is 9.9.9", out.stderr)
        out = support.run_python("import topkv", env={**os.environ, "TOPKV_LIBRARY": topkv.__file__})
        self.assertIn("ImportError: topkv: libkvclient: ", out.stderr)

    def test_signals(self):
        """UCX leaves the signals of faults to Python, and the environment is as it was."""
        code = """
import os, topkv
line, = (line for line in open("/proc/self/status") if line.startswith("SigCgt"))
print(int(line.split()[1], 16) >> 10 & 1, os.environ.get("UCX_ERROR_SIGNALS"))
"""
        environment = {name: value for name, value in os.environ.items() if name != "UCX_ERROR_SIGNALS"}
        self.assertEqual(support.run_python(code, env=environment).stdout, "0 None\n")


if __name__ == "__main__":
    unittest.main()
