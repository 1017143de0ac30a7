"""The format ``safetensors`` beside the library of that name, and headers that somebody made up."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from shardrt_safetensors.checking import MOST_DIMS
from shardrt_safetensors.dtypes import FOREIGN_WORDS, STAND_INS, TRUE_DTYPES, WORDS
from shardrt_safetensors.format import SafetensorsFormat
from shardrt_safetensors.header import MOST_HEADER_BYTES

from shardrt.errors import CheckpointError, ConfigError, StateError
from shardrt.plan import ITEM_SIZES
from shardrt.protocols import FileLayout, TensorSpec

FORMAT = SafetensorsFormat()

NAMES = st.text(st.characters(exclude_categories=["Cs"]), max_size=20).filter(lambda name: name != "__metadata__")
SHAPES = st.lists(st.integers(0, 4), max_size=4).map(tuple)


@st.composite
def files(draw: st.DrawFn, dtypes: tuple[str, ...] = tuple(ITEM_SIZES)) -> tuple[dict[str, TensorSpec], list[bytes]]:
    """Tensors by name, and the bytes of each."""
    names = draw(st.lists(NAMES, unique=True, max_size=6))
    tensors = {name: TensorSpec(dtype=draw(st.sampled_from(dtypes)), shape=draw(SHAPES)) for name in names}
    # What a bool is beyond 0 and 1 is nobody's business.
    data = [
        draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes).map(lambda raw: bytes(byte & 1 for byte in raw)))
        if spec.dtype == "bool"
        else draw(st.binary(min_size=spec.nbytes, max_size=spec.nbytes))
        for spec in tensors.values()
    ]
    return tensors, data


METADATA = st.dictionaries(NAMES.filter(lambda key: key != TRUE_DTYPES), NAMES, max_size=3)


def read(file: bytes) -> FileLayout:
    return FORMAT.read_layout(lambda start, stop: file[start:stop], len(file))


def raw_bytes(tensor: torch.Tensor) -> bytes:
    flat = tensor.contiguous().reshape(-1)
    return bytes(flat.view(torch.uint8).tolist()) if flat.numel() else b""


@given(files(), METADATA)
def test_the_library_reads_what_we_write(
    file: tuple[dict[str, TensorSpec], list[bytes]], metadata: dict[str, str]
) -> None:
    tensors, data = file
    layout = FORMAT.layout(tensors, metadata)
    assert len(layout.header) % 8 == 0
    found = safetensors.torch.load(layout.header + b"".join(data))
    assert found.keys() == tensors.keys()
    for (name, spec), raw in zip(tensors.items(), data, strict=True):
        dtype, shape = spec.dtype, spec.shape
        if spec.dtype in STAND_INS:
            dtype, shape = STAND_INS[spec.dtype].dtype, (*spec.shape, 2)
        assert found[name].dtype == getattr(torch, dtype)
        assert tuple(found[name].shape) == shape
        assert raw_bytes(found[name]) == raw


@given(files(dtypes=tuple(WORDS)), METADATA)
def test_we_read_what_the_library_writes(
    file: tuple[dict[str, TensorSpec], list[bytes]], metadata: dict[str, str]
) -> None:
    tensors, data = file
    values = {
        name: torch.tensor(list(raw), dtype=torch.uint8).view(getattr(torch, spec.dtype)).reshape(spec.shape)
        if raw
        else torch.empty(spec.shape, dtype=getattr(torch, spec.dtype))
        for (name, spec), raw in zip(tensors.items(), data, strict=True)
    }
    written = safetensors.torch.save(values, metadata or None)
    layout = read(written)
    assert dict(layout.tensors) == tensors
    assert dict(layout.metadata) == metadata
    for (name, spec), raw in zip(tensors.items(), data, strict=True):
        start, stop = layout.range_of(name, 0, math.prod(spec.shape))
        assert written[start:stop] == raw


def test_the_library_maps_a_file_whose_tensors_are_not_aligned(tmp_path: Path) -> None:
    """Its own files are sorted so that they are; ours keep the order they were given."""
    tensors = {"a": TensorSpec(dtype="int8", shape=(3,)), "b": TensorSpec(dtype="float64", shape=(5,))}
    layout = FORMAT.layout(tensors, {"step": "3"})
    values = torch.randn(5, dtype=torch.float64)
    (tmp_path / "f.safetensors").write_bytes(layout.header + b"\1\2\3" + raw_bytes(values))
    with safetensors.safe_open(tmp_path / "f.safetensors", framework="pt") as file:
        assert torch.equal(file.get_tensor("b"), values)
        assert torch.equal(file.get_slice("b")[1:4], values[1:4])
        assert file.metadata() == {"step": "3"}


def test_every_dtype_has_a_way_to_be_stored() -> None:
    assert WORDS.keys() | STAND_INS.keys() == ITEM_SIZES.keys()
    for dtype, stand_in in STAND_INS.items():
        assert 2 * ITEM_SIZES[stand_in.dtype] == ITEM_SIZES[dtype]


def test_the_words_are_those_of_the_library() -> None:
    """A word that the library does not know is an error there: so the lists of ours cannot be stale unnoticed."""
    for word, bits in {**{word: 8 * ITEM_SIZES[dtype] for dtype, word in WORDS.items()}, "U16": 16, "U64": 64}.items():
        header = json.dumps({"t": {"dtype": word, "shape": [8], "data_offsets": [0, bits]}}).encode()
        safetensors.deserialize(len(header).to_bytes(8, "little") + header + bytes(bits))
    for word in FOREIGN_WORDS | set(WORDS.values()):
        header = json.dumps({"t": {"dtype": word, "shape": [0], "data_offsets": [0, 0]}}).encode()
        safetensors.deserialize(len(header).to_bytes(8, "little") + header)
    for word in ("C32", "C128"):
        header = json.dumps({"t": {"dtype": word, "shape": [0], "data_offsets": [0, 0]}}).encode()
        with pytest.raises(safetensors.SafetensorError):
            safetensors.deserialize(len(header).to_bytes(8, "little") + header)


def test_complex_numbers_are_stored_as_pairs_that_any_tool_reads() -> None:
    value = torch.complex(torch.arange(6.0, dtype=torch.float64), -torch.arange(6.0, dtype=torch.float64)).view(2, 3)
    layout = FORMAT.layout({"c": TensorSpec(dtype="complex128", shape=(2, 3))}, {"step": "1"})
    file = layout.header + raw_bytes(value)
    assert torch.equal(torch.view_as_complex(safetensors.torch.load(file)["c"]), value)
    again = read(file)
    assert again.tensors["c"] == TensorSpec(dtype="complex128", shape=(2, 3))
    assert dict(again.metadata) == {"step": "1"}
    assert again.range_of("c", 1, 3) == (len(layout.header) + 16, len(layout.header) + 48)


def test_tensors_keep_their_order_with_empty_ones_in_between() -> None:
    names = ["z", "e1", "a", "e0", "m", "e2"]
    layout = FORMAT.layout({name: TensorSpec(dtype="int8", shape=(0 if "e" in name else 2,)) for name in names}, {})
    assert list(read(layout.header + bytes(6)).tensors) == names


@pytest.mark.parametrize(
    ("tensors", "metadata", "told"),
    [
        ({"__metadata__": TensorSpec(dtype="int8", shape=(1,))}, {}, "cannot be called '__metadata__'"),
        (
            {"w": TensorSpec(dtype="uint16", shape=(1,))},
            {},
            "'w' has dtype 'uint16'; dtypes that can be stored: bool, ",
        ),
        ({"w": TensorSpec(dtype="int8", shape=(-1,))}, {}, r"'w' has shape \(-1,\)"),
        ({"w": TensorSpec(dtype="int8", shape=(1,) * (MOST_DIMS + 1))}, {}, "at most 64 sizes"),
        ({"\ud800": TensorSpec(dtype="int8", shape=(1,))}, {}, "no valid Unicode"),
        ({}, {"a": "\udfff"}, "no valid Unicode"),
        ({}, {"a": 1}, "metadata of a safetensors file are strings, got 'a': 1"),
        ({}, {TRUE_DTYPES: "{}"}, "keeps for itself"),
        ({}, {"a": "x" * MOST_HEADER_BYTES}, "readers of safetensors accept 100,000,000"),
    ],
    ids=lambda value: ascii(value)[:30] if isinstance(value, str) else "",
)
def test_what_cannot_be_stored_is_refused(tensors: dict[str, TensorSpec], metadata: Any, told: str) -> None:
    with pytest.raises(StateError, match=told):
        FORMAT.layout(tensors, metadata)


def test_it_has_no_options() -> None:
    with pytest.raises(ConfigError, match="unknown option 'compress' of safetensors"):
        SafetensorsFormat(compress=True)


def with_header(header: str | bytes, body: int = 8) -> bytes:
    raw = header if isinstance(header, bytes) else header.encode()
    return len(raw).to_bytes(8, "little") + raw + bytes(body)


def entry(dtype: str = '"F32"', shape: str = "[2]", offsets: str = "[0,8]") -> str:
    return f'{{"dtype":{dtype},"shape":{shape},"data_offsets":{offsets}}}'


def test_the_hostile_headers_below_are_sound_but_for_what_they_are_about() -> None:
    assert read(with_header(f'{{"w":{entry()}}}')).tensors["w"] == TensorSpec(dtype="float32", shape=(2,))


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ((2**63).to_bytes(8, "little") + b"{}", "claims 9,223,372,036,854,775,808 bytes, and 2 follow"),
        ((3).to_bytes(8, "little") + b"{}", "claims 3 bytes, and 2 follow"),
        (b"\2\0\0\0", "it has 4 bytes"),
        (with_header("", 0), "begins with b''"),
        (with_header(" {}", 0), "begins with b' '"),
        (with_header("[]", 0), r"begins with b'\['"),
        (with_header("{} {}", 0), "not JSON as it should be: Extra data"),
        (with_header(b'{"\xff":1}', 0), "not UTF-8 at byte 2"),
        (with_header('{"\\ud800":' + entry() + "}"), "no character"),
        (with_header('{"a":' + "[" * 200_000 + "]" * 200_000 + "}"), "nested without end"),
        (with_header('{"a":' * 200_000 + "1" + "}" * 200_000), "nested without end"),
        (with_header(f'{{"w":{entry()},"w":{entry()}}}'), "the key 'w' stands there twice"),
        (
            with_header('{"w":{"dtype":"F32","dtype":"F32","shape":[2],"data_offsets":[0,8]}}'),
            "'dtype' stands there twice",
        ),
        (with_header('{"__metadata__":{"a":"1","a":"2"}}', 0), "'a' stands there twice"),
        (with_header('{"__metadata__":[]}', 0), "__metadata__ is a list"),
        (with_header('{"__metadata__":null}', 0), "__metadata__ is a NoneType"),
        (with_header('{"__metadata__":{"a":1}}', 0), "__metadata__ has a int under 'a'"),
        (with_header(f'{{"w":{entry(shape="[NaN]")}}}'), "the number NaN is no whole number"),
        (with_header(f'{{"w":{entry(shape="[Infinity]")}}}'), "the number Infinity is no whole number"),
        (with_header(f'{{"w":{entry(shape="[2.0]")}}}'), "the number 2.0 is no whole number"),
        (with_header(f'{{"w":{entry(shape="[2e0]")}}}'), "the number 2e0 is no whole number"),
        (with_header(f'{{"w":{entry(shape="[" + "9" * 100_000 + "]")}}}'), "999... has 100000 characters"),
        (with_header('{"w":1}'), "tensor 'w' is not described"),
        (with_header('{"w":{"dtype":"F32","shape":[2]}}'), "tensor 'w' is not described"),
        (with_header(f'{{"w":{entry()[:-1]},"more":1}}}}'), "tensor 'w' is not described"),
        (
            with_header(f'{{"w":{entry(dtype=chr(34) + "F99" + chr(34))}}}'),
            "'w' has the unknown dtype 'F99'; known are BOOL",
        ),
        (with_header(f'{{"w":{entry(dtype="32")}}}'), "'w' has the unknown dtype '32'"),
        (
            with_header(f'{{"w":{entry(dtype=chr(34) + "U32" + chr(34))}}}'),
            "'w' has the safetensors dtype U32, which shardrt",
        ),
        (with_header(f'{{"w":{entry(shape="2")}}}'), "'w' has no shape"),
        (with_header(f'{{"w":{entry(shape="[-2]")}}}'), "'w' has no shape of sizes from 0 up"),
        (with_header(f'{{"w":{entry(shape="[true,2]")}}}'), "'w' has no shape"),
        (with_header(f'{{"w":{entry(shape="[[2]]")}}}'), "'w' has no shape"),
        (with_header(f'{{"w":{entry(shape="[" + "1," * 64 + "2]")}}}'), "'w' has 65 dims"),
        (with_header(f'{{"w":{entry(shape="[4611686018427387904,4]")}}}'), "'w' has the shape .* larger than any file"),
        (with_header(f'{{"w":{entry(shape="[4611686018427387904,4,0]", offsets="[0,0]")}}}'), "larger than any file"),
        (with_header(f'{{"w":{entry(shape="[9223372036854775807]")}}}'), "larger than any file"),
        (with_header(f'{{"w":{entry(shape="[3]")}}}'), r"'w' has 8 bytes, and float32 of shape \[3\] takes 12"),
        (with_header(f'{{"w":{entry(offsets="[8,0]")}}}'), "'w' has no data_offsets"),
        (with_header(f'{{"w":{entry(offsets="[0]")}}}'), "'w' has no data_offsets"),
        (with_header(f'{{"w":{entry(offsets="[0,8,8]")}}}'), "'w' has no data_offsets"),
        (with_header(f'{{"w":{entry(offsets="[-8,0]")}}}'), "'w' has no data_offsets"),
        (with_header(f'{{"w":{entry(offsets="[8,16]")}}}'), "'w' ends at byte 16 of 8"),
        (with_header(f'{{"w":{entry(offsets="[8,16]")}}}', 16), "8 bytes between the header and tensor 'w'"),
        (with_header(f'{{"w":{entry()}}}', 9), "1 bytes after tensor 'w' are of no tensor"),
        (with_header("{}", 1), "1 bytes after the header are of no tensor"),
        (
            with_header(f'{{"w":{entry()},"v":{entry(offsets="[4,12]")}}}', 12),
            "tensor 'v' begins at byte 4, where tensor 'w'",
        ),
        (
            with_header(f'{{"w":{entry()},"v":{entry(offsets="[12,20]")}}}', 20),
            "4 bytes between tensor 'w' and tensor 'v'",
        ),
        (with_header(f'{{"w":{entry()},"v":{entry()}}}'), "tensor 'v' begins at byte 0"),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_a_hostile_header_is_refused_in_words(file: bytes, told: str) -> None:
    with pytest.raises(CheckpointError, match=told) as caught:
        read(file)
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "not JSON"),
        ("[]", "not a JSON object"),
        ("[" * 200_000, "not JSON"),
        ('{"w":"complex128","w":"complex128"}', "stands there twice"),
        ('{"w":"float64"}', "says 'float64' of tensor 'w'; it can be complex32, complex128"),
        ('{"w":1}', "says '1' of tensor 'w'"),
        ('{"v":"complex128"}', "tensor 'v', which is not there"),
        ('{"w":"complex32"}', r"'w' is complex32 by the metadata, .* pairs of F16; it is F64 of shape \[1\]"),
        ('{"w":"complex128"}', r"'w' is complex128 by the metadata, .* it is F64 of shape \[1\]"),
    ],
)
def test_true_dtypes_are_not_believed_either(text: str, told: str) -> None:
    header = {
        "__metadata__": {TRUE_DTYPES: text},
        "w": {"dtype": "F64", "shape": [1], "data_offsets": [0, 8]},
    }
    with pytest.raises(CheckpointError, match=told):
        read(with_header(json.dumps(header)))


def test_names_in_messages_are_cut() -> None:
    with pytest.raises(CheckpointError) as caught:
        read(with_header(json.dumps({"n" * 10**6: 1})))
    assert len(str(caught.value)) < 300


def test_a_header_beyond_the_cap_is_not_even_read() -> None:
    size = MOST_HEADER_BYTES + 100
    asked = []

    def give(start: int, stop: int) -> bytes:
        asked.append((start, stop))
        return (MOST_HEADER_BYTES + 1).to_bytes(8, "little")

    with pytest.raises(CheckpointError, match="100,000,000 is the most there may be"):
        FORMAT.read_layout(give, size)
    assert asked == [(0, 8)]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
CLAIMS = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*WORDS.values(), "U16", "X"]) | JSON,
        "shape": st.lists(st.integers(-1, 5) | st.integers(0, 2**64), max_size=4) | JSON,
        "data_offsets": st.lists(st.integers(-1, 30) | st.integers(0, 2**64), max_size=3) | JSON,
    }
)


@given(st.dictionaries(st.sampled_from(["a", "b", "__metadata__"]), CLAIMS | JSON, max_size=3), st.integers(0, 40))
def test_whatever_json_says_the_layout_can_be_true_or_is_refused(header: Any, body: int) -> None:
    file = with_header(json.dumps(header), body)
    try:
        layout = read(file)
    except CheckpointError:
        return
    covered = len(layout.header)
    for name, spec in layout.tensors.items():
        assert layout.offsets[name] == covered
        covered += spec.nbytes
    assert covered == len(file) == layout.size


@given(st.binary(max_size=200))
def test_whatever_bytes_say_it_is_refused(file: bytes) -> None:
    try:
        layout = read(file)
    except CheckpointError:
        return
    assert layout.size == len(file)
