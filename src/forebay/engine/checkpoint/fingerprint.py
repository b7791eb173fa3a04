"""A model's fingerprint: what pages on disk are salted with, so that another model's can never be used.

It covers every byte of every weight file. Reading them all takes a while, so the result is remembered in the cache
folder under each file's path, size, inode and modification time; a second start pays nothing.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import msgspec
import xxhash

from forebay.paths import cache_dir

__all__ = ["weights_fingerprint"]

_CHUNK = 8 * 2**20


def weights_fingerprint(folder: Path, dtype: str) -> str:
    """A hex digest of ``folder``'s config, all its weights and the dtype they are computed in."""
    digest = hashlib.blake2b(dtype.encode(), digest_size=16)
    digest.update((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {_file_digest(path)}\n".encode())
    return digest.hexdigest()


def _file_digest(path: Path) -> str:
    """The file's content hash, from memory where the file is unchanged."""
    stat = path.stat()
    identity = f"{path.resolve()} {stat.st_size} {stat.st_ino} {stat.st_mtime_ns}"
    note = cache_dir() / "fingerprints" / hashlib.blake2b(identity.encode(), digest_size=16).hexdigest()
    try:
        known = msgspec.json.decode(note.read_bytes(), type=dict[str, str])
        if known.get("file") == identity:
            return known["xxh3_128"]
    except (OSError, msgspec.MsgspecError, KeyError):
        pass  # never hashed, or an unreadable note: hash now
    hasher = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            hasher.update(chunk)
    found: str = hasher.hexdigest()
    note.parent.mkdir(parents=True, exist_ok=True)
    scratch = note.with_suffix(f".{os.getpid()}")
    scratch.write_bytes(msgspec.json.encode({"file": identity, "xxh3_128": found}))
    scratch.replace(note)
    return found
