"""LMCache's keys as objects of the store: their names, objects in parts, and the flows over them.

A key whose data fits one object is one object.  Larger data is cut into parts, which are objects of random
names, and the key's own object is a manifest that names them: it is put after the last part, so that a set
of parts that is not complete is never found, and parts of two sets are never put together.

    NAMESPACE:k:KEY         the data of a key, or its manifest
    NAMESPACE:h:SHA-256     the same, of a key whose name would be too long
    NAMESPACE:p:SET.NUMBER  a part; SET are 128 random bits

Flows (see _object_worker.py) tell the results of each key to a batch, and never raise.
"""

import ctypes
import hashlib
import os
import struct
from typing import Callable, Generator, List, NamedTuple, Optional, Sequence, Tuple

from ._library import NAME_BYTES_MAX, OBJECT_BYTES_MAX, ObjectVerb, Status, status_name
from ._object_worker import Call, Worker

_MAGIC = b"topkv.lmcache.1\0"
_MANIFEST = struct.Struct("<16sQQI16s9x")
# An odd number: no keys and values take so many bytes.
MANIFEST_BYTES = _MANIFEST.size
assert MANIFEST_BYTES % 2 == 1
_IN_PARTS = (Status.OK, MANIFEST_BYTES)  # what an object_exists says of a manifest
_FOUND = (Status.OK, Status.TOO_LARGE)  # of a get: there is an object
_PART_UNIT = 1 << 20
_PARTS_MAX = 1024
_GROUP_BYTES = 4 << 20  # of small objects in one call
_GROUP_KEYS = 64
_LOOKUP_KEYS = 1024  # in one call

Steps = Generator[List[Call], None, None]
# Of some keys of a batch, each told once: (position, whether it succeeded), and why the first did not.
Tell = Callable[[Sequence[Tuple[int, bool]], str], None]


class Item(NamedTuple):
    """A key of a batch."""

    position: int
    name: bytes
    address: int = 0
    bytes: int = 0


class Manifest(NamedTuple):
    """What the object of a key says whose data is in parts."""

    total: int
    part_bytes: int
    n_parts: int
    set_id: bytes

    def pack(self) -> bytes:
        return _MANIFEST.pack(_MAGIC, self.total, self.part_bytes, self.n_parts, self.set_id)

    def sizes(self) -> List[int]:
        sizes = [self.part_bytes] * self.n_parts
        sizes[-1] = self.total - self.part_bytes * (self.n_parts - 1)
        return sizes

    def names(self, prefix: bytes) -> List[bytes]:
        return [b"%sp:%s.%d" % (prefix, self.set_id.hex().encode(), i) for i in range(self.n_parts)]


def make_manifest(total: int) -> Manifest:
    """Cuts data into as few parts as objects may have, of like sizes."""
    n_parts = -(-total // OBJECT_BYTES_MAX)
    part_bytes = -(-total // n_parts)
    part_bytes = -(-part_bytes // _PART_UNIT) * _PART_UNIT
    return Manifest(total, part_bytes, -(-total // part_bytes), os.urandom(16))


def parse_manifest(data: bytes) -> Optional[Manifest]:
    """Returns what a manifest says; None if it is none, or does not add up."""
    if len(data) != MANIFEST_BYTES:
        return None
    magic, total, part_bytes, n_parts, set_id = _MANIFEST.unpack(data)
    if magic != _MAGIC or not 0 < part_bytes <= OBJECT_BYTES_MAX:
        return None
    if n_parts > _PARTS_MAX or n_parts != -(-total // part_bytes) or n_parts == 0:
        return None
    return Manifest(total, part_bytes, n_parts, set_id)


def name_of(prefix: bytes, key: str) -> bytes:
    """Returns the name of a key's object."""
    text = key.encode("utf-8", "surrogatepass")
    name = b"%sk:%s" % (prefix, text)
    if len(name) > NAME_BYTES_MAX or b"\0" in name:
        return b"%sh:%s" % (prefix, hashlib.sha256(text).hexdigest().encode())
    return name


def groups_of(items: List[Item]) -> List[List[Item]]:
    """Cuts a batch into groups that are one call each: of a few MiB, or one key."""
    groups: List[List[Item]] = []
    size = 0
    for item in items:
        if not groups or size + item.bytes > _GROUP_BYTES or len(groups[-1]) >= _GROUP_KEYS:
            groups.append([])
            size = 0
        groups[-1].append(item)
        size += item.bytes
    return groups


class Objects:
    """Flows over the objects of one namespace, on one worker.

    prefix: of all names, with the colon at its end.  replaces: of a key that has other bytes of the same
    length, the new ones are kept; else the old ones.
    """

    def __init__(self, worker: Worker, prefix: bytes, replaces: bool) -> None:
        self._worker = worker
        self._counts = worker.counts
        self._prefix = prefix
        self._replaces = replaces

    # ---- store ---------------------------------------------------------------------------------

    def store(self, items: List[Item], deadline: float, tell: Tell) -> Steps:
        """Stores a group of keys."""
        small = [item for item in items if item.bytes <= OBJECT_BYTES_MAX]
        if small:
            call = self._data_call(ObjectVerb.PUT, small, deadline)
            yield [call]
            conflicts: List[Item] = []
            for item, (status, _) in zip(small, call.results):
                if status == Status.EXISTS:
                    conflicts.append(item)
                else:
                    self._stored(item, status, call.detail, tell)
            for item in conflicts:
                yield from self._resolve(item, deadline, tell)
        for item in items:
            if item.bytes > OBJECT_BYTES_MAX:
                yield from self._store_parts(item, deadline, tell)

    def _stored(self, item: Item, status: int, detail: str, tell: Tell) -> None:
        if status == Status.OK:
            self._counts["stores"] += 1
            self._counts["stored_bytes"] += item.bytes
            tell([(item.position, True)], "")
        else:
            self._counts["stores_failed"] += 1
            tell([(item.position, False)], f"{status_name(status)}: {detail}")

    def _resolve(self, item: Item, deadline: float, tell: Tell) -> Steps:
        """The key has an object with other bytes."""
        for is_last in (False, True):
            found = Call(ObjectVerb.EXISTS, [item.name], deadline)
            yield [found]
            status, size = found.results[0]
            if status == Status.OK and size == item.bytes and not (self._replaces and not is_last):
                self._counts["stores_kept"] += 1
                tell([(item.position, True)], "")
                return
            if is_last:
                break
            if status == Status.OK:
                yield from self._delete_whole(item.name, size, deadline)
            put = self._data_call(ObjectVerb.PUT, [item], deadline)
            yield [put]
            status = put.results[0][0]
            if status != Status.EXISTS:
                self._counts["stores_replaced"] += status == Status.OK
                self._stored(item, status, put.detail, tell)
                return
        self._stored(item, Status.EXISTS, "the key has other bytes of another length", tell)

    def _store_parts(self, item: Item, deadline: float, tell: Tell) -> Steps:
        manifest = make_manifest(item.bytes)
        names = manifest.names(self._prefix)
        calls = self._part_calls(ObjectVerb.PUT, manifest, names, item.address, deadline)
        yield calls
        status, detail = Status.OK.value, ""
        replaces = False
        for call in calls:
            if status == Status.OK:
                status, detail = call.results[0][0], call.detail
        for is_last in (False, True):
            if status != Status.OK:
                break
            text = ctypes.create_string_buffer(manifest.pack(), MANIFEST_BYTES)
            put = Call(
                ObjectVerb.PUT, [item.name], deadline, [ctypes.addressof(text)], [MANIFEST_BYTES]
            )
            yield [put]
            status, detail = put.results[0][0], put.detail
            if status != Status.EXISTS or is_last:
                break
            # Somebody else's set of parts, or an object of a length that no load wants.
            kept: List[int] = []
            yield from self._whole_sizes([item.name], deadline, kept)
            if kept[0] == item.bytes and not self._replaces:
                self._counts["stores_kept"] += 1
                yield [Call(ObjectVerb.DELETE, names, deadline)]
                tell([(item.position, True)], "")
                return
            yield from self._delete_whole(item.name, MANIFEST_BYTES, deadline)
            replaces = True
            status = Status.OK.value
        if status != Status.OK:
            yield [Call(ObjectVerb.DELETE, names, deadline)]
        elif replaces:
            self._counts["stores_replaced"] += 1
        self._stored(item, status, detail, tell)

    # ---- load ----------------------------------------------------------------------------------

    def load(self, items: List[Item], deadline: float, tell: Tell) -> Steps:
        """Loads a group of keys into their memory."""
        small = [item for item in items if item.bytes <= OBJECT_BYTES_MAX]
        if small:
            call = self._data_call(ObjectVerb.GET, small, deadline)
            yield [call]
            for item, (status, size) in zip(small, call.results):
                is_whole = status == Status.OK and size == item.bytes
                if is_whole and size == MANIFEST_BYTES:
                    is_whole = parse_manifest(ctypes.string_at(item.address, size)) is None
                if not is_whole and status in _FOUND:
                    self._other_length(item, size)
                self._loaded(item, is_whole, status, tell)
        for item in items:
            if item.bytes > OBJECT_BYTES_MAX:
                yield from self._load_parts(item, deadline, tell)

    def _loaded(self, item: Item, is_whole: bool, status: int, tell: Tell) -> None:
        if is_whole:
            self._counts["loads"] += 1
            self._counts["loaded_bytes"] += item.bytes
            tell([(item.position, True)], "")
        else:
            self._counts["loads_missed"] += 1
            why = "other length" if status in _FOUND else status_name(status)
            tell([(item.position, False)], why)

    def _other_length(self, item: Item, size: int) -> None:
        self._counts["loads_of_other_length"] += 1
        is_of = f"{size} bytes" if size >= 0 else "another length"
        self._worker.log(
            "length",
            f"load: {item.bytes} bytes wanted, the store has {is_of}: a namespace is for one model,"
            f" dtype and chunk size: {item.name.decode(errors='replace')}",
        )

    def _load_parts(self, item: Item, deadline: float, tell: Tell) -> Steps:
        manifests: List[Optional[Manifest]] = []
        statuses: List[int] = []
        yield from self._manifests([item.name], deadline, manifests, statuses)
        manifest = manifests[0]
        if manifest is None or manifest.total != item.bytes:
            if statuses[0] in _FOUND:
                self._other_length(item, manifest.total if manifest is not None else -1)
            self._loaded(item, False, statuses[0], tell)
            return
        names = manifest.names(self._prefix)
        calls = self._part_calls(ObjectVerb.GET, manifest, names, item.address, deadline)
        yield calls
        status = Status.OK.value
        for call, size in zip(calls, manifest.sizes()):
            if status == Status.OK:
                status, found = call.results[0]
                if status == Status.OK and found != size:
                    status = Status.CONFLICT.value
        self._loaded(item, status == Status.OK, status, tell)

    # ---- lookup, delete ------------------------------------------------------------------------

    def lookup(self, items: List[Item], deadline: float, tell: Tell) -> Steps:
        """Tells which keys could be loaded."""
        for begin in range(0, len(items), _LOOKUP_KEYS):
            some = items[begin : begin + _LOOKUP_KEYS]
            call = Call(ObjectVerb.EXISTS, [item.name for item in some], deadline)
            yield [call]
            found = [status == Status.OK for status, _ in call.results]
            in_parts = [i for i, result in enumerate(call.results) if result == _IN_PARTS]
            if in_parts:
                sizes: List[int] = []
                yield from self._whole_sizes([some[i].name for i in in_parts], deadline, sizes)
                for i, size in zip(in_parts, sizes):
                    found[i] = size >= 0
            n_found = sum(found)
            self._counts["lookups_hit"] += n_found
            self._counts["lookups_missed"] += len(found) - n_found
            tell([(item.position, ok) for item, ok in zip(some, found)], "")

    def delete(self, items: List[Item], deadline: float, tell: Tell) -> Steps:
        """Deletes keys with all their parts, and tells which of them were there."""
        for begin in range(0, len(items), _LOOKUP_KEYS):
            some = items[begin : begin + _LOOKUP_KEYS]
            names = [item.name for item in some]
            found = Call(ObjectVerb.EXISTS, names, deadline)
            yield [found]
            in_parts = [name for name, result in zip(names, found.results) if result == _IN_PARTS]
            yield from self._delete_parts(in_parts, deadline)
            call = Call(ObjectVerb.DELETE, names, deadline)
            yield [call]
            for item, (status, _) in zip(some, call.results):
                self._counts["deletes" if status == Status.OK else "deletes_missed"] += 1
                tell([(item.position, status == Status.OK)], "")

    # ---- steps ---------------------------------------------------------------------------------

    @staticmethod
    def _data_call(verb: ObjectVerb, items: List[Item], deadline: float) -> Call:
        return Call(
            verb,
            [item.name for item in items],
            deadline,
            [item.address for item in items],
            [item.bytes for item in items],
        )

    @staticmethod
    def _part_calls(
        verb: ObjectVerb, manifest: Manifest, names: List[bytes], address: int, deadline: float
    ) -> List[Call]:
        calls = []
        for name, size in zip(names, manifest.sizes()):
            calls.append(Call(verb, [name], deadline, [address], [size]))
            address += size
        return calls

    def _manifests(
        self,
        names: List[bytes],
        deadline: float,
        ret_manifests: List[Optional[Manifest]],
        ret_statuses: List[int],
    ) -> Steps:
        """Reads the manifests of keys; None: the key has none, whatever it has."""
        texts = [ctypes.create_string_buffer(MANIFEST_BYTES) for _ in names]
        addresses = [ctypes.addressof(text) for text in texts]
        call = Call(ObjectVerb.GET, names, deadline, addresses, [MANIFEST_BYTES] * len(names))
        yield [call]
        for text, (status, size) in zip(texts, call.results):
            is_read = status == Status.OK and size == MANIFEST_BYTES
            ret_manifests.append(parse_manifest(text.raw) if is_read else None)
            ret_statuses.append(status)

    def _whole_sizes(self, names: List[bytes], deadline: float, ret_sizes: List[int]) -> Steps:
        """Returns of keys with an object of a manifest's size how long their data is; -1: it is not complete."""
        manifests: List[Optional[Manifest]] = []
        statuses: List[int] = []
        yield from self._manifests(names, deadline, manifests, statuses)
        parts: List[Tuple[int, bytes, int]] = []
        for i, (manifest, status) in enumerate(zip(manifests, statuses)):
            if manifest is None:
                ret_sizes.append(MANIFEST_BYTES if status == Status.OK else -1)
                continue
            ret_sizes.append(manifest.total)
            parts += [
                (i, name, size)
                for name, size in zip(manifest.names(self._prefix), manifest.sizes())
            ]
        if not parts:
            return
        call = Call(ObjectVerb.EXISTS, [name for _, name, _ in parts], deadline)
        yield [call]
        for (i, _, size), result in zip(parts, call.results):
            if result != (Status.OK, size):
                ret_sizes[i] = -1

    def _delete_parts(self, names: List[bytes], deadline: float) -> Steps:
        """Deletes the parts of keys with an object of a manifest's size, but not that."""
        if not names:
            return
        manifests: List[Optional[Manifest]] = []
        yield from self._manifests(names, deadline, manifests, [])
        parts = [
            part
            for manifest in manifests
            if manifest is not None
            for part in manifest.names(self._prefix)
        ]
        if parts:
            yield [Call(ObjectVerb.DELETE, parts, deadline)]

    def _delete_whole(self, name: bytes, size: int, deadline: float) -> Steps:
        if size == MANIFEST_BYTES:
            yield from self._delete_parts([name], deadline)
        yield [Call(ObjectVerb.DELETE, [name], deadline)]
