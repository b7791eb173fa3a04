"""The bytes of a segment file. All numbers are little-endian; every checksum is XXH3 with 64 bits.

    segment  = header (64 bytes), records, and when it is sealed: index entries, trailer
    record   = header, payload (one canonical page of one layer group)
    record's header = magic, group, layers, bytes of tokens, bytes of payload, address (16), tokens, checksum of the
               payload, checksum of the header so far; padded with zeros to a multiple of 64

A record is good when its header's checksum is right and the payload is within the file; a payload is good when its own
checksum is right. So a file that is cut anywhere loses the record at the cut and those after it.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

import xxhash

from forebay.engine.cache.radix.page_hash import DIGEST_BYTES

__all__ = [
    "SEGMENT_HEADER_BYTES",
    "TRAILER_BYTES",
    "RecordShape",
    "pack_index",
    "pack_segment_header",
    "unpack_index",
    "unpack_segment_header",
    "unpack_trailer",
]

_SEGMENT = struct.Struct("<16s16sQQ")
_SEGMENT_MAGIC = b"forebay-kv-1\r\n\x1a\x00"
SEGMENT_HEADER_BYTES = 64
_RECORD = struct.Struct("<4sHHII16s")
_RECORD_MAGIC = b"FBR1"
_ENTRY = struct.Struct("<16sQH6x")
_TRAILER = struct.Struct("<8sQQQ")
_TRAILER_MAGIC = b"FBINDEX1"
TRAILER_BYTES = _TRAILER.size


def pack_segment_header(namespace: bytes, number: int) -> bytes:
    """The first 64 bytes of segment ``number``, whose pages belong to ``namespace`` (a model and a page shape)."""
    body = _SEGMENT.pack(_SEGMENT_MAGIC, namespace, number, 0)[:-8]
    return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(SEGMENT_HEADER_BYTES, b"\0")


def unpack_segment_header(data: bytes) -> tuple[bytes, int] | None:
    """(namespace, number), or None if this is no segment."""
    if len(data) < _SEGMENT.size:
        return None
    magic, namespace, number, checksum = _SEGMENT.unpack_from(data)
    if magic != _SEGMENT_MAGIC or checksum != xxhash.xxh3_64_intdigest(data[: _SEGMENT.size - 8]):
        return None
    return namespace, number


@dataclass(frozen=True, slots=True)
class RecordShape:
    """The sizes that all records of one layer group have in common."""

    group: int
    layers: int
    layer_bytes: int
    token_bytes: int

    @property
    def payload_bytes(self) -> int:
        return self.layers * self.layer_bytes

    @property
    def header_bytes(self) -> int:
        return -(-(_RECORD.size + self.token_bytes + 8 + 8) // 64) * 64

    @property
    def record_bytes(self) -> int:
        return self.header_bytes + self.payload_bytes

    def pack(self, address: bytes, tokens: bytes, payload: memoryview) -> bytes:
        """The header for ``payload``."""
        fixed = _RECORD.pack(_RECORD_MAGIC, self.group, self.layers, self.token_bytes, self.payload_bytes, address)
        body = fixed + tokens + struct.pack("<Q", xxhash.xxh3_64_intdigest(payload))
        return (body + struct.pack("<Q", xxhash.xxh3_64_intdigest(body))).ljust(self.header_bytes, b"\0")

    def unpack(self, header: bytes) -> tuple[bytes, bytes, int] | None:
        """(address, tokens, checksum of the payload), or None if the header is not whole or of another shape."""
        body_bytes = _RECORD.size + self.token_bytes + 8
        if len(header) < self.header_bytes:
            return None
        magic, group, layers, token_bytes, payload_bytes, address = _RECORD.unpack_from(header)
        shape = (group, layers, token_bytes, payload_bytes)
        if magic != _RECORD_MAGIC or shape != (self.group, self.layers, self.token_bytes, self.payload_bytes):
            return None
        (checksum,) = struct.unpack_from("<Q", header, body_bytes)
        if checksum != xxhash.xxh3_64_intdigest(header[:body_bytes]):
            return None
        tokens = header[_RECORD.size : _RECORD.size + self.token_bytes]
        (payload_sum,) = struct.unpack_from("<Q", header, _RECORD.size + self.token_bytes)
        return address, tokens, payload_sum

    @staticmethod
    def group_of(header: bytes) -> int | None:
        """The group in a record's header, before any of it is verified."""
        if len(header) < _RECORD.size:
            return None
        magic, group, *_ = _RECORD.unpack_from(header)
        return int(group) if magic == _RECORD_MAGIC else None


def pack_index(entries: Sequence[tuple[int, bytes, int]], offset: int) -> bytes:
    """The index of a sealed segment, (group, address, offset) for each record, to be written at ``offset``."""
    body = b"".join(_ENTRY.pack(address, where, group) for group, address, where in entries)
    checksum = xxhash.xxh3_64_intdigest(body + struct.pack("<QQ", len(entries), offset))
    return body + _TRAILER.pack(_TRAILER_MAGIC, len(entries), offset, checksum)


def unpack_trailer(data: bytes, file_bytes: int) -> tuple[int, int] | None:
    """(entries, offset of the index) from a file's last bytes, or None: not sealed."""
    if len(data) != TRAILER_BYTES:
        return None
    magic, count, offset, _ = _TRAILER.unpack(data)
    if magic != _TRAILER_MAGIC or offset + count * _ENTRY.size + TRAILER_BYTES != file_bytes:
        return None
    return count, offset


def unpack_index(data: bytes) -> list[tuple[int, bytes, int]] | None:
    """(group, address, offset) for each record from index and trailer, or None if they are damaged."""
    body, trailer = data[:-TRAILER_BYTES], data[-TRAILER_BYTES:]
    _, count, offset, checksum = _TRAILER.unpack(trailer)
    if checksum != xxhash.xxh3_64_intdigest(body + struct.pack("<QQ", count, offset)):
        return None
    assert len(body) == count * _ENTRY.size, "an index with another length than its trailer says"
    return [(group, address, where) for address, where, group in _ENTRY.iter_unpack(body)]


assert DIGEST_BYTES == 16, "the record and index formats hold 16-byte addresses"
