"""A store that counts what is asked of it: operations, and the bytes of values that travel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


class CountingStore:
    """A store of torch's behind counters. Values count where they are sent to the store and where they are fetched.

    Example:
        >>> from torch.distributed import HashStore
        >>> from shardrt.bench.growth_counting import CountingStore
        >>> store = CountingStore(HashStore())
        >>> store.set("a", "123")
        >>> store.get("a"), store.operations, store.nbytes
        (b'123', 2, 6)
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self.operations = 0
        self.nbytes = 0
        self.looks = 0
        """Operations that only ask whether something is there: a rank that waits asks again and again."""

    def set(self, key: str, value: str) -> None:
        """Write a key."""
        self._count(len(value))
        self.inner.set(key, value)

    def get(self, key: str) -> bytes:
        """Read a key."""
        found: bytes = self.inner.get(key)
        self._count(len(found))
        return found

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Read several keys at once."""
        found: list[bytes] = self.inner.multi_get(keys)
        self._count(sum(len(one) for one in found))
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Whether all keys are there."""
        self.looks += 1
        found: bool = self.inner.check(keys)
        return found

    def add(self, key: str, amount: int) -> int:
        """Add to a counter."""
        self._count(8)
        found: int = self.inner.add(key, amount)
        return found

    def delete_key(self, key: str) -> bool:
        """Remove a key."""
        self._count(0)
        found: bool = self.inner.delete_key(key)
        return found

    def compare_set(self, key: str, expected: str, wanted: str) -> bytes:
        """Write a key if it holds what is expected."""
        self._count(len(wanted))
        found: bytes = self.inner.compare_set(key, expected, wanted)
        return found

    def has_extended_api(self) -> bool:
        """Whether several keys can be read at once."""
        found: bool = self.inner.has_extended_api()
        return found

    def _count(self, nbytes: int) -> None:
        self.operations += 1
        self.nbytes += nbytes
