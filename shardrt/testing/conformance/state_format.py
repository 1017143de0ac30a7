"""What every state format must get right."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import pytest

from shardrt.errors import CheckpointError, StateError
from shardrt.protocols import FileLayout, StateFormat, TensorSpec
from shardrt.testing.conformance.layouts import (
    EXECUTED,
    ODD_NAMES,
    RUNS_WHEN_UNPICKLED,
    Contents,
    CountedFile,
    contents,
    misfit,
)

_CONTENTS = contents()
_each = pytest.mark.parametrize("case", list(_CONTENTS))
_SAMPLE = Contents(
    tensors={
        "encoder.weight": TensorSpec(dtype="float32", shape=(2, 3)),
        "empty": TensorSpec(dtype="int64", shape=(0,)),
        "encoder.bias": TensorSpec(dtype="bfloat16", shape=(5,)),
        "mask": TensorSpec(dtype="bool", shape=(3,)),
        "rotary": TensorSpec(dtype="complex128", shape=(2,)),
    },
    metadata={"step": "12"},
)
"""A small file of several kinds, to be damaged in every way."""
_HUGE = Contents(tensors={"w": TensorSpec(dtype="float32", shape=(2**20, 2**20))})
_ENOUGH_FOR_A_HEADER = 2**20


class StateFormatConformance:
    """Subclass it in a test module as ``class TestMine(StateFormatConformance)`` and say how to make yours.

    Example:
        >>> from shardrt import load_registry
        >>> from shardrt.testing import StateFormatConformance
        >>> class TestSafetensors(StateFormatConformance):
        ...     @classmethod
        ...     def make(cls):
        ...         return load_registry().state_formats.get("safetensors").factory()
        >>> TestSafetensors().test_a_layout_survives_being_written_and_read("thousand")
    """

    @classmethod
    def make(cls) -> StateFormat:
        """A new instance of the format under test."""
        raise NotImplementedError("a conformance class must say how to make its state format: override make()")

    def test_is_a_state_format(self) -> None:
        """It has the attributes of the protocol."""
        made = self.make()
        assert isinstance(made, StateFormat)
        assert isinstance(made.name, str) and made.name
        assert made.suffix.startswith(".") and len(made.suffix) > 1
        assert "/" not in made.suffix

    @_each
    def test_tensors_lie_in_order_and_back_to_back(self, case: str) -> None:
        """Their bytes follow the header and one another, in the order given."""
        stored = _CONTENTS[case]
        layout = self.make().layout(stored.tensors, stored.metadata)
        assert isinstance(layout, FileLayout)
        assert list(layout.tensors.items()) == list(stored.tensors.items())
        assert misfit(layout, layout.size) == ""

    @_each
    def test_a_layout_survives_being_written_and_read(self, case: str) -> None:
        """Names, order, dtypes, shapes, offsets and metadata come back as they were, from another instance."""
        stored = _CONTENTS[case]
        written = self.make().layout(stored.tensors, stored.metadata)
        read = _read(self.make(), written.header, written.size)
        assert list(read.tensors.items()) == list(stored.tensors.items())
        assert dict(read.offsets) == dict(written.offsets)
        assert dict(read.metadata) == dict(stored.metadata)
        assert (read.header, read.size) == (written.header, written.size)
        assert misfit(read, written.size) == ""

    @_each
    def test_the_same_contents_give_the_same_bytes(self, case: str) -> None:
        """Ranks and runs that store the same make the same file; what was given is left as it was."""
        stored = _CONTENTS[case]
        tensors, metadata = dict(stored.tensors), dict(stored.metadata)
        first = self.make().layout(tensors, metadata)
        assert self.make().layout(tensors, metadata) == first
        assert (tensors, metadata) == (stored.tensors, stored.metadata)

    def test_a_layout_keeps_nothing_of_the_callers(self) -> None:
        """Changing the mapping afterwards does not change a layout."""
        tensors = dict(_SAMPLE.tensors)
        layout = self.make().layout(tensors, {})
        tensors.clear()
        assert list(layout.tensors) == list(_SAMPLE.tensors)

    @pytest.mark.parametrize("name", ODD_NAMES, ids=ascii)
    def test_an_odd_name_is_kept_or_refused(self, name: str) -> None:
        """Never changed: a name that cannot be stored is an error before anything is written."""
        tensors = {"w": TensorSpec(dtype="float32", shape=(2,)), name: TensorSpec(dtype="int8", shape=(3,))}
        try:
            layout = self.make().layout(tensors, {})
        except StateError:
            return
        assert list(_read(self.make(), layout.header, layout.size).tensors.items()) == list(tensors.items())

    def test_size_costs_nothing(self) -> None:
        """A file of 4 TiB is laid out and read back without its bytes: only the header is asked for."""
        layout = self.make().layout(_HUGE.tensors, {})
        assert misfit(layout, layout.size) == ""
        file = CountedFile(layout.header, size=layout.size)
        assert dict(self.make().read_layout(file.read, file.size).tensors) == dict(_HUGE.tensors)
        assert file.bytes_read <= _ENOUGH_FOR_A_HEADER

    def test_a_file_that_was_cut_is_refused(self) -> None:
        """At every byte, inside the header and behind it."""
        made, file = self.make(), self._sample()
        for size in range(len(file)):
            _assert_refused(made, file[:size], size)

    def test_a_file_that_goes_on_is_refused(self) -> None:
        """Bytes that belong to no tensor are no part of a sound file."""
        made, file = self.make(), self._sample()
        for more in (b"\0", b" ", file):
            _assert_refused(made, file + more, len(file) + len(more))

    def test_a_flipped_bit_never_leads_out_of_the_file(self) -> None:
        """Each bit of the header: refused, or a layout that can be true. Whose bytes they are, checksums tell."""
        made, file = self.make(), self._sample()
        header = made.layout(_SAMPLE.tensors, _SAMPLE.metadata).header
        for bit in range(8 * len(header)):
            damaged = bytearray(file)
            damaged[bit // 8] ^= 1 << bit % 8
            _assert_refused_or_sound(made, bytes(damaged), f"bit {bit % 8} of byte {bit // 8}")

    @pytest.mark.parametrize("value", [0x00, 0xFF, 0x20, 0x22, 0x39])
    def test_an_overwritten_byte_never_leads_out_of_the_file(self, value: int) -> None:
        """Each byte of the header in turn becomes a zero, all ones, a space, a quote, a nine."""
        made, file = self.make(), self._sample()
        header = made.layout(_SAMPLE.tensors, _SAMPLE.metadata).header
        for index in range(len(header)):
            _assert_refused_or_sound(
                made, file[:index] + bytes([value]) + file[index + 1 :], f"byte {index} set to {value}"
            )

    def test_a_file_that_shrinks_while_it_is_read_is_refused(self) -> None:
        """``read`` may give less than was asked for: somebody cut the file."""
        made, file = self.make(), self._sample()
        for size in (0, 1, 7, 8, 9, len(file) // 3):
            cut = file[:size]
            with pytest.raises(CheckpointError):
                made.read_layout(lambda start, stop, cut=cut: cut[start:stop], len(file))  # type: ignore[misc]

    @pytest.mark.parametrize(
        "file",
        [
            b"",
            b"\0",
            bytes(4096),
            b"\xff" * 4096,
            b"{}" * 100,
            b"[" * 100_000,
            b"PK\x03\x04" + bytes(200),
            b"\x80\x02}q\x00." + bytes(200),
            RUNS_WHEN_UNPICKLED + bytes(200),
            b"import sys\n" * 50,
        ],
        ids=lambda file: f"{len(file)}-{file[:4]!r}",
    )
    def test_what_is_no_such_file_is_refused(self, file: bytes) -> None:
        """Other formats, text, zeros: an error, whatever the bytes would mean elsewhere."""
        _assert_refused(self.make(), file, len(file))

    def test_nothing_in_a_file_is_executed(self) -> None:
        """Names, metadata and whole files that are code stay data."""
        assert not hasattr(sys, EXECUTED)
        for case in ("names", "metadata"):
            stored = _CONTENTS[case]
            layout = self.make().layout(stored.tensors, stored.metadata)
            _read(self.make(), layout.header, layout.size)
        for file in (RUNS_WHEN_UNPICKLED, RUNS_WHEN_UNPICKLED + self._sample()):
            _assert_refused(self.make(), file, len(file))
        made = self.make()
        header = made.layout(_SAMPLE.tensors, _SAMPLE.metadata).header
        for start in range(0, len(header), 4):
            damaged = header[:start] + RUNS_WHEN_UNPICKLED + header[start + len(RUNS_WHEN_UNPICKLED) :]
            _assert_refused_or_sound(made, damaged + bytes(200), f"a pickle at byte {start}")
        assert not hasattr(sys, EXECUTED), "something in a file was executed"

    def _sample(self) -> bytes:
        layout = self.make().layout(_SAMPLE.tensors, _SAMPLE.metadata)
        return layout.header + bytes(layout.size - len(layout.header))


def _read(made: StateFormat, first: bytes, size: int) -> FileLayout:
    return made.read_layout(CountedFile(first, size=size).read, size)


def _assert_refused(made: StateFormat, first: bytes, size: int) -> None:
    with pytest.raises(CheckpointError) as caught:
        _read(made, first, size)
    assert str(caught.value), "an error must say what is wrong"


def _assert_refused_or_sound(made: StateFormat, file: bytes, what: str) -> None:
    try:
        layout = _read(made, file, len(file))
    except CheckpointError:
        return
    except Exception as error:
        raise AssertionError(f"{what}: {type(error).__name__} instead of CheckpointError: {error}") from error
    wrong = misfit(layout, len(file)) or _not_text(layout.metadata)
    assert not wrong, f"{what}: {wrong}"


def _not_text(metadata: Mapping[str, str]) -> str:
    wrong = [(key, value) for key, value in metadata.items() if not isinstance(key, str) or not isinstance(value, str)]
    return f"metadata are not all strings: {wrong}" if wrong else ""
