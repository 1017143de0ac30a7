"""Checksums of blocks of bytes: small enough that a range of a tensor is verified without reading all of it.

The checksum finds damage, not forgery: whoever can write the files can write the checksums. What a forged file may
claim is checked by its reader instead, and nothing in it is ever executed.
"""

from __future__ import annotations

from collections.abc import Iterator

import xxhash

BLOCK_BYTES = 4 * 2**20
"""What is verified at once."""
DIGITS = 16


def checksum(data: bytes | memoryview) -> str:
    """A checksum as text.

    Example:
        >>> from shardrt.checkpoint.blocks import checksum
        >>> checksum(b"shardrt") == checksum(memoryview(b"shardrt")), len(checksum(b""))
        (True, 16)
    """
    return xxhash.xxh3_64_hexdigest(data)


def block_count(nbytes: int, block_bytes: int = BLOCK_BYTES) -> int:
    """How many blocks a tensor has.

    Example:
        >>> from shardrt.checkpoint.blocks import block_count
        >>> block_count(0), block_count(9, 4)
        (0, 3)
    """
    return -(-nbytes // block_bytes)


def blocks(data: memoryview, block_bytes: int = BLOCK_BYTES) -> Iterator[memoryview]:
    """The blocks of some bytes, in order.

    Example:
        >>> from shardrt.checkpoint.blocks import blocks
        >>> [bytes(block) for block in blocks(memoryview(b"abcde"), 2)]
        [b'ab', b'cd', b'e']
    """
    for start in range(0, len(data), block_bytes):
        yield data[start : start + block_bytes]
