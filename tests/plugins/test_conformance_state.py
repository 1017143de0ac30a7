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
from tests.doubles import stores

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


class TestFilesInAnObjectStore(PlaceConformance):
    @classmethod
    def make(cls, directory: Path) -> Place:
        stores.register()
        return FILES.factory(f"objects://{directory}")

    @pytest.fixture(autouse=True)
    def forget(self) -> Iterator[None]:
        """No upload is left under way, whatever was checked: stores charge for them."""
        yield
        left = set(stores.ObjectStore.uploads)
        stores.ObjectStore.objects.clear()
        stores.ObjectStore.uploads.clear()
        assert left == set()


class TestFilesOnADiskThatRenames(PlaceConformance):
    @classmethod
    def make(cls, directory: Path) -> Place:
        stores.register()
        return FILES.factory(f"renaming://{directory}")
