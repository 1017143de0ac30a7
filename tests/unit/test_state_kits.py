"""The kits for state formats and places find what is wrong: each fault here breaks the check that is about it."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import attrs
import pytest
import shardrt_files
from shardrt_safetensors.format import SafetensorsFormat

from shardrt.errors import CheckpointError
from shardrt.protocols import FileLayout, Place, PlaceFile, StateFormat, TensorSpec
from shardrt.testing import PlaceConformance, StateFormatConformance
from shardrt.testing.conformance.layouts import EXECUTED

Read = Callable[[int, int], bytes]


class Trusting:
    """A format that believes what the header says."""

    name = "trusting"
    suffix = ".json"

    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        begin, document = 0, []
        for name, spec in tensors.items():
            document.append([name, spec.dtype, spec.shape, begin])
            begin += spec.nbytes
        text = json.dumps([document, dict(metadata)]).encode()
        header = len(text).to_bytes(8, "little") + text
        offsets = {name: len(header) + start for name, _, _, start in document}
        return FileLayout(
            header=header, tensors=dict(tensors), offsets=offsets, size=len(header) + begin, metadata=dict(metadata)
        )

    def read_layout(self, read: Read, size: int) -> FileLayout:
        try:
            length = int.from_bytes(read(0, 8), "little")
            header = read(0, 8 + length)
            document, metadata = json.loads(header[8:])
            tensors = {name: TensorSpec(dtype=dtype, shape=tuple(shape)) for name, dtype, shape, _ in document}
            offsets = {name: len(header) + start for name, _, _, start in document}
        except (ValueError, TypeError) as error:
            raise CheckpointError(str(error)) from error
        return FileLayout(header=header, tensors=tensors, offsets=offsets, size=size, metadata=metadata)


class Sorted(SafetensorsFormat):
    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        return super().layout(dict(sorted(tensors.items())), metadata)


class Padded(SafetensorsFormat):
    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        layout = super().layout(tensors, metadata)
        offsets = {name: offset + 8 * index for index, (name, offset) in enumerate(layout.offsets.items())}
        return attrs.evolve(layout, offsets=offsets, size=layout.size + 8 * len(offsets))


class Whole(SafetensorsFormat):
    def read_layout(self, read: Read, size: int) -> FileLayout:
        for start in range(0, min(size, 2**23), 2**20):
            read(start, min(start + 2**20, size))
        return super().read_layout(read, size)


class Forgetful(SafetensorsFormat):
    def read_layout(self, read: Read, size: int) -> FileLayout:
        return attrs.evolve(super().read_layout(read, size), metadata={})


class Lossy(SafetensorsFormat):
    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        half = {name: attrs.evolve(spec, dtype="float32") for name, spec in tensors.items()}
        return attrs.evolve(super().layout(half, metadata), tensors=dict(tensors))


class Executing(SafetensorsFormat):
    def read_layout(self, read: Read, size: int) -> FileLayout:
        layout = super().read_layout(read, size)
        for name in layout.tensors:
            if name.startswith("__import__"):
                eval(name)
        return layout


class Renaming(SafetensorsFormat):
    def layout(self, tensors: Mapping[str, TensorSpec], metadata: Mapping[str, str]) -> FileLayout:
        return super().layout({name.strip("_\ud800"): spec for name, spec in tensors.items()}, metadata)


class Lenient(SafetensorsFormat):
    def read_layout(self, read: Read, size: int) -> FileLayout:
        length = int.from_bytes(read(0, 8), "little") if size >= 8 else 0
        try:
            return super().read_layout(read, size)
        except CheckpointError:
            if length < 100:
                raise
            return FileLayout(header=b"", tensors={}, offsets={}, size=size)


def check(kit: type[Any], made: Callable[..., Any], check: str, *arguments: Any) -> None:
    class Kit(kit):  # type: ignore[misc]
        @classmethod
        def make(cls, *inputs: Any) -> Any:
            return made(*inputs)

    getattr(Kit(), check)(*arguments)


FAULTY_FORMATS: list[tuple[type[StateFormat], str, tuple[Any, ...]]] = [
    (Trusting, "test_a_file_that_was_cut_is_refused", ()),
    (Trusting, "test_a_file_that_goes_on_is_refused", ()),
    (Trusting, "test_a_flipped_bit_never_leads_out_of_the_file", ()),
    (Trusting, "test_an_overwritten_byte_never_leads_out_of_the_file", (0x39,)),
    (Trusting, "test_what_is_no_such_file_is_refused", (b"\xff" * 4096,)),
    (Sorted, "test_tensors_lie_in_order_and_back_to_back", ("names",)),
    (Padded, "test_tensors_lie_in_order_and_back_to_back", ("all_dtypes",)),
    (Whole, "test_size_costs_nothing", ()),
    (Forgetful, "test_a_layout_survives_being_written_and_read", ("metadata",)),
    (Lossy, "test_a_layout_survives_being_written_and_read", ("dtype_int8",)),
    (Executing, "test_nothing_in_a_file_is_executed", ()),
    (Renaming, "test_an_odd_name_is_kept_or_refused", ("__metadata__",)),
    (Renaming, "test_an_odd_name_is_kept_or_refused", ("\ud800",)),
    (Lenient, "test_a_file_that_was_cut_is_refused", ()),
    (Lenient, "test_a_file_that_shrinks_while_it_is_read_is_refused", ()),
]
"""A fault, and a check that must find it."""


def by_name(value: object) -> str:
    return getattr(value, "__name__", "")


@pytest.mark.parametrize(("made", "name", "arguments"), FAULTY_FORMATS, ids=by_name)
def test_the_kit_finds_the_fault_of_a_format(made: type[StateFormat], name: str, arguments: tuple[Any, ...]) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(StateFormatConformance, made, name, *arguments)
    if hasattr(sys, EXECUTED):
        delattr(sys, EXECUTED)


@attrs.define
class Wrapped:
    """A sound place, whose methods the faulty ones replace."""

    inner: Place
    directory: Path

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


class Torn(Wrapped):
    """Publishes under the final name, and is not done before somebody has read the first half."""

    was_read = threading.Event()

    def publish(self, path: str, data: bytes) -> None:
        target = self.directory / path
        replaces = target.exists()
        with target.open("wb", buffering=0) as file:
            file.write(data[: len(data) // 2])
            self.was_read.clear()
            assert not replaces or self.was_read.wait(timeout=30)
            file.write(data[len(data) // 2 :])

    def read(self, path: str) -> bytes:
        data = self.inner.read(path)
        self.was_read.set()
        return data


class Leftover(Wrapped):
    def publish(self, path: str, data: bytes) -> None:
        self.inner.publish(path, data)
        self.inner.publish(f"{path}.bak", data)


class Escaping(Wrapped):
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return (self.directory / path).read_bytes()[start:stop]


class Unsorted(Wrapped):
    def list(self, path: str = "") -> list[str]:
        return self.inner.list(path)[::-1]


class Prefix(Wrapped):
    """Removes what begins with the same letters, as a store does that knows no directories."""

    def remove(self, path: str) -> None:
        above, _, name = path.rpartition("/")
        for other in self.inner.list(above):
            if other.startswith(name):
                self.inner.remove(f"{above}/{other}".strip("/"))


class Strict(Wrapped):
    def remove(self, path: str) -> None:
        if path not in self.inner.list():
            raise CheckpointError(f"{path} is not there")


class Overlong(Wrapped):
    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self.inner.read(path, start, stop).ljust((stop or 0) - start, b"\0")


class Short(Wrapped):
    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        return self.inner.read_into(path, start, buffer[: 16 * 2**20])


class Finishing(Wrapped):
    """A file that is finished when it is abandoned, as one of a careless ``with`` is."""

    def create(self, path: str) -> PlaceFile:
        file = self.inner.create(path)
        commit = file.commit

        def abandon() -> None:
            with suppress(CheckpointError):  # it is already
                commit()

        file.abandon = abandon  # type: ignore[method-assign]
        return file


class Early(Wrapped):
    """Everything written is there at once."""

    def create(self, path: str) -> Any:
        target = self.directory / path
        target.parent.mkdir(parents=True, exist_ok=True)
        return EarlyFile(target)


class EarlyFile:
    def __init__(self, path: Path) -> None:
        self.file = path.open("wb", buffering=0)
        self.write = self.file.write
        self.commit = self.abandon = self.file.close


class Counting(Wrapped):
    """Takes the length of a buffer for its bytes."""

    def create(self, path: str) -> Any:
        file = self.inner.create(path)
        write = file.write
        file.write = lambda data: write(memoryview(data).cast("B")[: len(data)])  # type: ignore[method-assign]
        return file


FAULTY_PLACES: list[tuple[type[Wrapped], str, tuple[Any, ...]]] = [
    (Torn, "test_publishing_is_whole_or_nothing", ()),
    (Leftover, "test_publishing_replaces", ()),
    (Escaping, "test_a_path_that_leads_out_is_refused", ("../outside", "read")),
    (Unsorted, "test_a_directory_is_listed_in_order", ()),
    (Prefix, "test_removing", ()),
    (Strict, "test_removing_what_is_not_there", ()),
    (Overlong, "test_ranges_are_cut_where_the_file_ends", ()),
    (Short, "test_a_large_file_is_read_in_pieces", ()),
    (Finishing, "test_an_abandoned_file_is_not_there", ()),
    (Early, "test_a_file_is_not_complete_before_commit", ()),
    (Early, "test_a_forgotten_file_is_not_complete", ()),
    (Counting, "test_a_file_is_written_in_pieces", ()),
]


@pytest.mark.filterwarnings("ignore::ResourceWarning")
@pytest.mark.parametrize(("made", "name", "arguments"), FAULTY_PLACES, ids=by_name)
def test_the_kit_finds_the_fault_of_a_place(
    tmp_path: Path, made: type[Wrapped], name: str, arguments: tuple[Any, ...]
) -> None:
    def make(directory: Path) -> Any:
        return made(shardrt_files.make(directory), directory)

    with pytest.raises((AssertionError, CheckpointError, pytest.fail.Exception)):
        check(PlaceConformance, make, name, tmp_path, *arguments)


@pytest.mark.parametrize("kit", [StateFormatConformance, PlaceConformance])
def test_a_kit_without_a_factory_says_what_is_missing(kit: type[Any], tmp_path: Path) -> None:
    with pytest.raises(NotImplementedError, match="override make"):
        kit.make(*[tmp_path] * (kit is PlaceConformance))
