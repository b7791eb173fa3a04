"""Content addresses: a hash chain over token pages. It starts from the cache namespace: all that shapes a page's bytes.

BLAKE2b with 128 bits: two prefixes with one address would be needed to serve a wrong page, and the record on disk also
holds its own page's tokens. The number of ranks is not in the namespace: pages on disk do not depend on it.
"""

from __future__ import annotations

from hashlib import blake2b

from forebay.kv.spec import KVSpec

__all__ = ["DIGEST_BYTES", "chain_digest", "namespace_digest"]

DIGEST_BYTES = 16
_FORMAT = 1


def namespace_digest(fingerprint: str, spec: KVSpec) -> bytes:
    """The cache namespace, which is the address of the empty prefix: the model's weights and dtype,
    and the shape of a page.
    """
    return blake2b(f"forebay page {_FORMAT}\n{fingerprint}\n{spec!r}".encode(), digest_size=DIGEST_BYTES).digest()


def chain_digest(parent: bytes, page_tokens: bytes) -> bytes:
    """The address of the page ``page_tokens`` after the prefix whose address is ``parent``."""
    return blake2b(parent + page_tokens, digest_size=DIGEST_BYTES).digest()
