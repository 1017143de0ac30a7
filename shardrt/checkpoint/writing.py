"""Writing one file: header first, then each tensor block by block, each block's checksum taken on the way."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from shardrt.checkpoint.blocks import blocks, checksum
from shardrt.checkpoint.manifest import StoredFile, StoredTensor
from shardrt.plan.params import ITEM_SIZES
from shardrt.protocols import Place, StateFormat
from shardrt.state.optimizers import spec_of
from shardrt.state.portable import LazyTensor
from shardrt.state.streams import as_bytes

Advance = Callable[[int], None]
"""Told how many bytes more are done."""
Source = torch.Tensor | LazyTensor
"""A tensor in memory, or one that is read block by block while it is written."""


def write_file(
    place: Place,
    path: str,
    tensors: Mapping[str, Source],
    format_: StateFormat,
    metadata: Mapping[str, str],
    *,
    block_bytes: int,
    advance: Advance,
) -> StoredFile:
    """Write a file durably; returns what the manifest says of it. What was begun is removed where it fails.

    Of a tensor that is not in memory, one block is held at a time.
    """
    specs = {
        name: source.spec if isinstance(source, LazyTensor) else spec_of(source) for name, source in tensors.items()
    }
    layout = format_.layout(specs, metadata)
    stored: dict[str, StoredTensor] = {}
    file = place.create(path)
    try:
        file.write(layout.header)
        for name, spec in layout.tensors.items():
            sums = []
            for block in source_blocks(tensors[name], block_bytes):
                sums.append(checksum(block))
                file.write(block)
                advance(len(block))
            stored[name] = StoredTensor(spec=spec, offset=layout.offsets[name], blocks=tuple(sums))
        file.commit()
    finally:
        file.abandon()
    return StoredFile(
        name=path.rpartition("/")[2],
        size=layout.size,
        header=checksum(layout.header),
        header_bytes=len(layout.header),
        tensors=stored,
    )


def source_blocks(source: Source, block_bytes: int) -> Iterator[memoryview]:
    """The bytes of a tensor in row-major order, block by block.

    Example:
        >>> import torch
        >>> from shardrt.checkpoint.writing import source_blocks
        >>> from shardrt.state.portable import LazyTensor
        >>> lazy = LazyTensor.of(torch.arange(5, dtype=torch.int16))
        >>> [bytes(block) for block in source_blocks(lazy, 4)]
        [b'\\x00\\x00\\x01\\x00', b'\\x02\\x00\\x03\\x00', b'\\x04\\x00']
    """
    if not isinstance(source, LazyTensor):
        yield from blocks(memory_of(source), block_bytes)
        return
    item = ITEM_SIZES[source.dtype]
    assert block_bytes % item == 0, "a block holds whole elements"
    step = block_bytes // item
    for start in range(0, source.numel, step):
        yield memory_of(source.read(start, min(start + step, source.numel)))


def memory_of(tensor: torch.Tensor) -> memoryview:
    """A tensor's bytes in row-major order: its own memory where they lie so on the CPU, else a copy.

    Example:
        >>> import torch
        >>> from shardrt.checkpoint.writing import memory_of
        >>> bytes(memory_of(torch.tensor([[1, 2], [3, 4]], dtype=torch.uint8).t()))
        b'\\x01\\x03\\x02\\x04'
    """
    return memoryview(as_bytes(tensor.cpu()).numpy()).cast("B")  # type: ignore[arg-type]


class Staging:
    """Copies of tensors that training goes on changing, in memory that is kept for the next time."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def copy(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copies on the CPU; those of the call before are overwritten."""
        made: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            kept = self._kept.get(name)
            if kept is None or spec_of(kept) != spec_of(tensor):
                kept = torch.empty(tensor.shape, dtype=tensor.dtype)
            kept.copy_(tensor.detach())
            made[name] = kept
        self._kept = made
        return made
