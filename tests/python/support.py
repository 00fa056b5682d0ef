"""What the tests of the Python package share: a node, a client, and a generous deadline.

Environment: TOPKV_LIBRARY, TOPKV_KVSERVER: of the build; PYTHONPATH: client/python.
"""
import os
import pathlib
import signal
import subprocess
import sys
import time
import unittest

import topkv

ROOT = pathlib.Path(__file__).resolve().parents[2]
DEADLINE = 60.0  # seconds: the machine may be busy with other tests


def needs_node():
    """Skips a whole file where the build has no kvserver."""
    if not os.environ.get("TOPKV_KVSERVER"):
        print("this build has no kvserver")
        sys.exit(77)


def client_of(node, **options):
    options.setdefault("deadline", DEADLINE)
    options.setdefault("peer_timeout", DEADLINE)
    return topkv.Client(node.address, **options)


def run_python(code, *arguments, **options):
    """Runs a program in another process; returns what subprocess.run() does."""
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True,
                          timeout=120, **options)


def wait_until(is_true, what, seconds=60.0):
    until = time.monotonic() + seconds
    while not is_true():
        if time.monotonic() > until:
            raise AssertionError(f"not within {seconds} s: {what}")
        time.sleep(0.02)


def counting(name, counts):
    """A function of the library, by its name, that counts its calls."""
    function = getattr(topkv._core.waits, name)

    def count(*arguments):
        counts[name] += 1
        return function(*arguments)

    return count


def state_of(stat):
    """The letter of /proc/PID/stat, or of a thread's, for what it does."""
    return stat.read_text().rpartition(")")[2].split()[0]


def is_alive(pid):
    """Whether a process runs, a zombie excepted."""
    try:
        return state_of(pathlib.Path(f"/proc/{pid}/stat")) != "Z"
    except FileNotFoundError:
        return False


def freeze(pid):
    """Stops a process, and returns when all its threads have stopped: some run on for a moment."""
    os.kill(pid, signal.SIGSTOP)
    threads = list(pathlib.Path(f"/proc/{pid}/task").glob("*/stat"))
    wait_until(lambda: all(state_of(thread) == "T" for thread in threads), f"process {pid} stops")


class NodeCase(unittest.TestCase):
    """A node for all tests of a class, and a client for each."""

    memory = "256M"
    transport = None

    @classmethod
    def setUpClass(cls):
        cls.node = topkv.Node(memory=cls.memory, threads=1)

    @classmethod
    def tearDownClass(cls):
        cls.node.close()

    def setUp(self):
        self.client = client_of(self.node, transport=self.transport)

    def tearDown(self):
        self.client.close()
