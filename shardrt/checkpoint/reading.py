"""Ranges of stored tensors, each block verified before anybody sees it."""

from __future__ import annotations

from collections.abc import Callable

import torch

from shardrt.checkpoint.blocks import checksum
from shardrt.checkpoint.manifest import Manifest, Spread, StoredFile, StoredTensor
from shardrt.checkpoint.writing import memory_of
from shardrt.errors import CheckpointError, DamagedCheckpointError
from shardrt.plan.params import ITEM_SIZES
from shardrt.protocols import Place, StateFormat
from shardrt.state.portable import LazyTensor, dtype_called

Advance = Callable[[int], None]


class CheckedFiles:
    """The files of one checkpoint. Each is looked at as a whole (size, header) before any of its bytes is used."""

    def __init__(self, place: Place, directory: str, manifest: Manifest, state_format: StateFormat) -> None:
        self.place = place
        self.manifest = manifest
        self._directory = directory
        self.state_format = state_format
        self._checked: set[int] = set()
        self._kept: tuple[str, int, bytes] | None = None

    def path(self, file: StoredFile) -> str:
        """Where a file is, under the place's root."""
        return f"{self._directory}/{file.name}" if self._directory else file.name

    def check(self, number: int) -> StoredFile:
        """A file's size and header must be those that were written."""
        file = self.manifest.files[number]
        if number in self._checked:
            return file
        path = self.path(file)
        try:
            size = self.place.size(path)
            if size != file.size:  # before anything is read by numbers of the manifest
                raise DamagedCheckpointError(
                    f"{self._shown(file)} has {size} bytes and was written with {file.size}"
                    f"{self._first_lost(file, size)}; copy it again, or load another checkpoint"
                )
            self._check_header(file, self.place.read(path, 0, file.header_bytes), size)
        except FileNotFoundError:
            raise self._missing(file) from None
        self._checked.add(number)
        return file

    def is_there(self, number: int) -> bool:
        """Whether a file exists at all."""
        try:
            self.place.size(self.path(self.manifest.files[number]))
        except FileNotFoundError:
            return False
        return True

    def go_on_with(self, number: int) -> None:
        """Read a file although its size or header is wrong: for finding out which of its tensors are damaged too."""
        self._checked.add(number)

    def _check_header(self, file: StoredFile, header: bytes, size: int) -> None:
        path = self.path(file)
        try:
            layout = self.state_format.read_layout(lambda start, stop: self.place.read(path, start, stop), size)
        except CheckpointError as error:
            if checksum(header) == file.header:
                raise CheckpointError(
                    f"{self._shown(file)}, with tensor {_first(file)!r}, is refused: {error}"
                ) from error
            layout = None
        if layout is not None and layout.metadata.get("id") not in (None, self.manifest.id):
            raise DamagedCheckpointError(
                f"{self._shown(file)} belongs to another save ({layout.metadata['id']}) than the manifest "
                f"({self.manifest.id}): files of two checkpoints were mixed, tensor {_first(file)!r} is not this one's"
            )
        if layout is None or checksum(header) != file.header:
            raise DamagedCheckpointError(
                f"the header of {self._shown(file)}, which says where tensor {_first(file)!r} and the others are, is "
                f"damaged: checksum {checksum(header)}, written with {file.header}"
            )
        for name, tensor in file.tensors.items():
            if layout.tensors.get(name) != tensor.spec or layout.offsets.get(name) != tensor.offset:
                raise CheckpointError(f"the header of {self._shown(file)} and the manifest disagree on tensor {name!r}")

    def read(self, file: int, name: str, start: int, stop: int, into: torch.Tensor, advance: Advance) -> None:
        """Elements ``[start, stop)`` of a stored tensor, verified, into a flat tensor on the CPU."""
        stored_file = self.check(file)
        stored = stored_file.tensors[name]
        item = ITEM_SIZES[stored.spec.dtype]
        target = memory_of(into)
        first, last = start * item, stop * item
        size = self.manifest.block_bytes
        for number in range(first // size, -(-last // size)):
            begin, end = number * size, min((number + 1) * size, stored.spec.nbytes)
            lo, hi = max(begin, first), min(end, last)
            here = target[lo - first : hi - first]
            if (lo, hi) == (begin, end):
                self._read_block(stored_file, name, stored, number, begin, here)
            else:
                block = self._whole_block(stored_file, name, stored, number, begin, end)
                here[:] = block[lo - begin : hi - begin]
            advance(hi - lo)

    def whole(self, file: int, name: str, advance: Advance = lambda _: None) -> torch.Tensor:
        """A stored tensor, all of it, in its shape."""
        spec = self._stored(self.check(file), name).spec
        into = torch.empty(spec.shape, dtype=dtype_called(spec.dtype))
        self.read(file, name, 0, into.numel(), into.view(-1), advance)
        return into

    def verify(self, file: int, name: str, advance: Advance = lambda _: None) -> None:
        """Read a tensor block by block for its checksums alone."""
        stored_file = self.check(file)
        stored = self._stored(stored_file, name)
        buffer = bytearray(min(self.manifest.block_bytes, stored.spec.nbytes))
        for number in range(len(stored.blocks)):
            begin = number * self.manifest.block_bytes
            size = min(self.manifest.block_bytes, stored.spec.nbytes - begin)
            self._read_block(stored_file, name, stored, number, begin, memoryview(buffer)[:size])
            advance(size)

    def lazy(self, spread: Spread) -> LazyTensor:
        """A whole tensor from its pieces, read when it is wanted."""

        def read(start: int, stop: int) -> torch.Tensor:
            into = torch.empty(stop - start, dtype=dtype_called(spread.spec.dtype))
            self.read_spread(spread, start, stop, into)
            return into

        return LazyTensor(dtype=spread.spec.dtype, shape=spread.spec.shape, read=read)

    def read_spread(
        self, spread: Spread, start: int, stop: int, into: torch.Tensor, advance: Advance = lambda _: None
    ) -> None:
        """Elements ``[start, stop)`` of a whole tensor, from as many pieces as they are in."""
        for piece in spread.pieces:
            lo, hi = max(piece.start, start), min(piece.stop, stop)
            if lo < hi:
                here = into[lo - start : hi - start]
                self.read(piece.file, piece.name, lo - piece.start, hi - piece.start, here, advance)

    def _stored(self, file: StoredFile, name: str) -> StoredTensor:
        found = file.tensors.get(name)
        if found is None:
            raise CheckpointError(f"{self._shown(file)} has no tensor {name!r}, which the manifest refers to")
        return found

    def _whole_block(
        self, file: StoredFile, name: str, stored: StoredTensor, number: int, begin: int, end: int
    ) -> bytes:
        """A block of which only a part is wanted; the last one is kept, since the next range begins in it."""
        key = f"{file.name}\0{name}"
        if self._kept is not None and self._kept[:2] == (key, number):
            return self._kept[2]
        buffer = bytearray(end - begin)
        self._read_block(file, name, stored, number, begin, memoryview(buffer))
        self._kept = (key, number, bytes(buffer))
        return self._kept[2]

    def _read_block(
        self, file: StoredFile, name: str, stored: StoredTensor, number: int, begin: int, into: memoryview
    ) -> None:
        try:
            got = self.place.read_into(self.path(file), stored.offset + begin, into)
        except FileNotFoundError:
            raise self._missing(file) from None
        if got != len(into) or checksum(into) != stored.blocks[number]:
            found = f"only {got} could be read" if got != len(into) else f"their checksum is {checksum(into)}"
            raise DamagedCheckpointError(
                f"{self._shown(file)} is damaged in tensor {name!r}, bytes {begin} to {begin + len(into)} of it: "
                f"{found}, and they were written with {stored.blocks[number]}; copy the file again, or load another "
                "checkpoint"
            )

    def _missing(self, file: StoredFile) -> DamagedCheckpointError:
        return DamagedCheckpointError(
            f"{self._shown(file)} is missing, and with it {len(file.tensors)} tensors, {_first(file)!r} among them; "
            "put it back, or load another checkpoint"
        )

    def _first_lost(self, file: StoredFile, size: int) -> str:
        for name, tensor in file.tensors.items():
            if tensor.offset + tensor.spec.nbytes > size:
                return f"; tensor {name!r} is cut"
        return f"; after tensor {list(file.tensors)[-1]!r} something was added" if file.tensors else ""

    def _shown(self, file: StoredFile) -> str:
        return f"file {self.path(file)!r} of {self.place.root!r}"


def _first(file: StoredFile) -> str:
    return next(iter(file.tensors), "")
