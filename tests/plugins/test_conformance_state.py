"""The built-in state format and places pass the same kits as anyone's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import fsspec
import pytest

from shardrt import load_registry
from shardrt.protocols import Place, StateFormat
from shardrt.testing import PlaceConformance, StateFormatConformance

REGISTRY = load_registry()  # looked up once: the kits make some hundred formats and places
FILES = REGISTRY.places.get("files")


class TestSafetensors(StateFormatConformance):
    @classmethod
    def make(cls) -> StateFormat:
        return REGISTRY.state_formats.get("safetensors").factory()


class TestLocalFiles(PlaceConformance):
    @classmethod
    def make(cls, directory: Path) -> Place:
        return FILES.factory(directory)


class TestFilesInMemory(PlaceConformance):
    @pytest.fixture(autouse=True)
    def forget(self, tmp_path: Path) -> Iterator[None]:
        """What is in fsspec's memory stays until the process ends."""
        yield
        with suppress(FileNotFoundError):
            fsspec.filesystem("memory").rm(str(tmp_path), recursive=True)

    @classmethod
    def make(cls, directory: Path) -> Place:
        return FILES.factory(f"memory://{directory}")
