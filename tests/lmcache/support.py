"""Nodes of a test, and a caller of the plugin that does what LMCache's adapter does with it.

Environment: TOPKV_KVSERVER and TOPKV_KVCTL, the programs; TOPKV_LIBRARY, the library.
"""
import ctypes
import os
import random
import select
import shutil
import signal
import socket
import subprocess
import tempfile
import time

START_S = 120.0  # that a node may take to start, on a machine with other work
PR_SET_PDEATHSIG = 1
libc = ctypes.CDLL(None)


def die_with_parent():
    """In a child: no node outlives its test."""
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def program(variable):
    path = os.environ.get(variable)
    if not path or not os.path.isfile(path):
        raise SystemExit(f"{variable}: names no program: {path!r}")
    return path


def free_address():
    """Below the ports that the system gives to connections: otherwise a client's own connection could take
    the port of a node that is being started again."""
    while True:
        port = random.randrange(20000, 32768)
        with socket.socket() as probe:
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return f"127.0.0.1:{port}"


class Node:
    """A kvserver of the test's own, on a port of its own, which it keeps when it is started again."""

    def __init__(self, memory="512M", disk="none", threads=2):
        self.folder = tempfile.mkdtemp(prefix="topkv-lmcache-")
        self.options = ["--memory", memory, "--disk", disk, "--threads", str(threads),
                        "--dir", os.path.join(self.folder, "data")]
        self.address = free_address()
        self.process = None

    def start(self):
        ready = os.path.join(self.folder, "ready")
        with open(ready, "w") as out, open(os.path.join(self.folder, "log"), "a") as log:
            self.process = subprocess.Popen(
                [program("TOPKV_KVSERVER"), "--listen", self.address, "--metrics", "127.0.0.1:0",
                 *self.options], stdin=subprocess.DEVNULL, stdout=out, stderr=log, preexec_fn=die_with_parent)
        until = time.monotonic() + START_S
        while True:
            with open(ready) as lines:
                words = [line.split() for line in lines if line.startswith("ready ") and line.endswith("\n")]
            if words:
                facts = dict(word.split("=", 1) for word in words[0][1:])
                self.address = facts["control"]
                return self
            if self.process.poll() is not None or time.monotonic() > until:
                with open(os.path.join(self.folder, "log")) as log:
                    raise RuntimeError("kvserver does not start: " + log.read())
            time.sleep(0.02)

    def send(self, number):
        self.process.send_signal(number)

    def freeze(self):
        """Stops all threads, and returns when they have stopped."""
        self.send(signal.SIGSTOP)
        tasks = f"/proc/{self.process.pid}/task"
        for task in os.listdir(tasks):
            while True:
                with open(f"{tasks}/{task}/stat") as file:
                    if file.read().rpartition(")")[2].split()[0] == "T":
                        break
                time.sleep(0.001)

    def thaw(self):
        self.send(signal.SIGCONT)

    def kill(self):
        """kill -9, and waits for the end."""
        if self.process is not None and self.process.poll() is None:
            self.send(signal.SIGKILL)
            self.process.wait()

    def free(self):
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def kvctl(self, *words, stdin=None):
        done = subprocess.run([program("TOPKV_KVCTL"), "--server", self.address, *words], input=stdin,
                              capture_output=True, timeout=120)
        return done.returncode, done.stdout.decode(errors="replace"), done.stderr.decode(errors="replace")


class Caller:
    """Drives a plugin's client as LMCache's adapter does: polls its descriptor, then drains."""

    def __init__(self, client):
        self.client = client
        self.poller = select.poll()
        self.poller.register(client.event_fd(), select.POLLIN)
        self.ended = {}

    def wait(self, future, timeout_s=60.0):
        """Returns (ok, error, bools).  AssertionError if the future does not end."""
        until = time.monotonic() + timeout_s
        while future not in self.ended:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise AssertionError(f"future {future}: has not ended after {timeout_s} s")
            self.poller.poll(int(min(left_s, 0.5) * 1000) + 1)
            self.take()
        return self.ended.pop(future)

    def take(self):
        for number, ok, error, bools in self.client.drain_completions():
            if number in self.ended:
                raise AssertionError(f"future {number}: ended twice")
            self.ended[number] = (ok, error, bools)

    def store(self, keys, data):
        return self.wait(self.client.submit_batch_set(keys, [memoryview(d) for d in data]))

    def load(self, keys, sizes):
        """Returns the bools and the buffers."""
        buffers = [bytearray(b"\xa5" * size) for size in sizes]
        _, _, bools = self.wait(self.client.submit_batch_get(keys, [memoryview(b) for b in buffers]))
        return bools, buffers

    def lookup(self, keys):
        ok, _, bools = self.wait(self.client.submit_batch_exists(keys))
        assert ok and len(bools) == len(keys)
        return bools

    def delete(self, keys):
        ok, _, bools = self.wait(self.client.submit_batch_delete(keys))
        assert ok and len(bools) == len(keys)
        return bools


def content(key, size, salt=0):
    """Bytes that no other key has."""
    seed = f"{key}/{salt}/".encode("utf-8", "surrogatepass")
    return (seed * (size // len(seed) + 1))[:size]
