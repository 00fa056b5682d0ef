#!/usr/bin/env python3
"""What a Node leaves behind and what it refuses; what the doctor says of folders, addresses and deadlines."""
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import unittest

import support
import topkv

support.needs_node()

START = """
import os, signal, sys, topkv
node = topkv.Node(memory="64M", threads=1)
with topkv.Client(node.address, deadline=60, peer_timeout=60) as client:
    client.put("a", b"x")
print(node.pid, node.log(), sep="|", flush=True)
os.kill(os.getpid(), int(sys.argv[1]))
"""


class Files(unittest.TestCase):
    def test_none_are_left(self):
        """Neither the directory of a node that saves nothing nor its log, however its process ends."""
        for ending in (signal.SIGKILL, signal.SIGTERM, 0):
            with tempfile.TemporaryDirectory() as folder:
                out = support.run_python(START, str(int(ending)), env={**os.environ, "TMPDIR": folder})
                self.assertEqual(out.returncode, -ending, out.stderr)
                pid, log = out.stdout.split("|")
                self.assertIn("kvserver: ", log)
                support.wait_until(lambda: not support.is_alive(int(pid)), "the node has ended")
                self.assertEqual(os.listdir(folder), [], ending)

    def test_none_after_a_failure(self):
        before, tempfile.tempdir = tempfile.tempdir, None
        with tempfile.TemporaryDirectory() as folder:
            tempfile.tempdir = folder
            try:
                with self.assertRaises(topkv.NodeError):
                    topkv.Node(memory="64M", threads=1, transport="pigeon")
                with self.assertRaises(topkv.NodeError):
                    topkv.Node(memory="64M", threads=1, timeout=0.001)
                self.assertEqual(os.listdir(folder), [])
            finally:
                tempfile.tempdir = before

    def test_data_dir_stays(self):
        with tempfile.TemporaryDirectory() as folder:
            with topkv.Node(memory="64M", threads=1, data_dir=folder, disk="256M") as node, \
                    support.client_of(node) as client:
                client.put("a", b"kept")
            with topkv.Node(memory="64M", threads=1, data_dir=folder, disk="256M") as node, \
                    support.client_of(node) as client:
                self.assertEqual(client.get("a"), b"kept")


class Arguments(unittest.TestCase):
    def test_refused(self):
        for options, words in (({"memory": 0}, "memory: 0: not above 0"), ({"memory": "0G"}, "memory: '0G'"),
                               ({"memory": -5}, "memory: -5"), ({"memory": 1.5}, "memory: 1.5"),
                               ({"memory": None}, "memory: None"), ({"disk": "1G"}, "disk: '1G': without data_dir"),
                               ({"data_dir": 5}, "data_dir: 5"), ({"threads": "2"}, "threads: '2'"),
                               ({"options": {"lease_ms": 1}}, "'lease_ms': not small letters and dashes"),
                               ({"options": {"memory": "1G"}}, "'memory': is the argument memory"),
                               ({"options": {"dir": "/tmp"}}, "'dir': is the argument data_dir"),
                               ({"options": ["lease-ms"]}, "options: ['lease-ms']"), ({"timeout": "x"}, "timeout: 'x'"),
                               ({"timeout": 0}, "timeout: 0")):
            with self.assertRaises(topkv.InvalidError) as caught:
                topkv.Node(**{"memory": "64M", **options})
            self.assertIn(words, str(caught.exception))
        with topkv.Node(memory=64 << 20, threads=1, disk="none", options={"lease-ms": 5000}) as node:
            self.assertTrue(node.is_running)


class Doctor(unittest.TestCase):
    def run_doctor(self, *arguments, **variables):
        return subprocess.run([sys.executable, "-m", "topkv", "doctor", *arguments], capture_output=True, text=True,
                              timeout=120, env={**os.environ, **variables})

    def test_folder_with_a_space(self):
        """UCX's libraries in such a folder, as in a virtual environment there."""
        maps = support.run_python("import topkv\nprint(open('/proc/self/maps').read())").stdout
        paths = {pathlib.Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if "/libuc" in line}
        parents = {path.parent for path in paths if path.name.startswith("libucs.")}
        if not parents:
            self.skipTest("no UCX")
        with tempfile.TemporaryDirectory() as top:
            folder = pathlib.Path(top, "a folder")
            folder.mkdir()
            for path in paths:
                if path.parent in parents:
                    shutil.copy(path, folder / re.sub(r"(\.so\.\d+).*", r"\1", path.name))  # as others name it
            for parent in parents:
                if (parent / "ucx").is_dir():
                    shutil.copytree(parent / "ucx", folder / "ucx")
            code = "import topkv.doctor\nprint(*topkv.doctor.check_ucx(), sep='|')\n"
            out = support.run_python(code, env={**os.environ, "LD_LIBRARY_PATH": str(folder)})
            self.assertIn(f"|{folder}/libucs.so", out.stdout, out.stderr)
            self.assertNotIn("modules: none", out.stdout)

    def test_server(self):
        out = self.run_doctor("--server", "")
        self.assertEqual(out.returncode, 1)
        self.assertNotIn("own node", out.stdout)
        self.assertIn("fail nodes: ", out.stdout)
        with topkv.Node(memory="64M", threads=1) as node:
            out = self.run_doctor("--server", node.metrics)
        self.assertEqual(out.returncode, 1)
        self.assertIn("that is not a control port", out.stdout)

    def test_deadline(self):
        for text in ("0", "-1", "nan", "inf", "x"):
            out = self.run_doctor(f"--deadline={text}")
            self.assertEqual((out.returncode, out.stdout), (2, ""))
            self.assertIn(f"--deadline: {text!r}: not seconds above 0", out.stderr)


class Import(unittest.TestCase):
    def test_error_under_another_module(self):
        """`python -m other`, whose __init__ imports topkv, sees why the library was not loaded."""
        with tempfile.TemporaryDirectory() as folder:
            other = pathlib.Path(folder, "other")
            other.mkdir()
            (other / "__init__.py").write_text("import topkv\n")
            (other / "__main__.py").write_text("topkv = __import__('topkv')\nprint(topkv.Client)\n")
            path = os.pathsep.join([folder, *filter(None, [os.environ.get("PYTHONPATH")])])
            for library, status in (("/nowhere/libkvclient.so", 1), (os.environ.get("TOPKV_LIBRARY", ""), 0)):
                out = subprocess.run([sys.executable, "-m", "other"], capture_output=True, text=True, timeout=60,
                                     env={**os.environ, "PYTHONPATH": path, "TOPKV_LIBRARY": library})
                self.assertEqual(out.returncode, status, out.stderr)
                if status:
                    self.assertIn("ImportError: topkv: ", out.stderr)
                    self.assertIn("/nowhere/libkvclient.so", out.stderr)


if __name__ == "__main__":
    unittest.main()
