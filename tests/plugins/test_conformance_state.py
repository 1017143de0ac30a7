"""The built-in state format and places pass the same kits as anyone's."""

from __future__ import annotations

import doctest
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import fsspec
import pytest

from shardrt import load_registry
from shardrt.protocols import Place, StateFormat
from shardrt.testing import PlaceConformance, StateFormatConformance
from tests.doubles import stores

REGISTRY = load_registry()  # looked up once: the kits make some hundred formats and places
FILES = REGISTRY.places.get("files")

PAGE = Path(__file__).parents[2] / "docs" / "writing-a-plugin.md"
NAMESPACE: dict[str, Any] = {}
for example in doctest.DocTestParser().get_examples(PAGE.read_text(encoding="utf-8").partition("## 7. ")[2]):
    if example.source.startswith(("import json", "from shardrt", "class LineFormat")):
        exec(example.source, NAMESPACE)


class TestSafetensors(StateFormatConformance):
    @classmethod
    def make(cls) -> StateFormat:
        return REGISTRY.state_formats.get("safetensors").factory()


class TestTheFormatOfTheTutorial(StateFormatConformance):
    """What the page shows passes all of the kit, and not only what it runs there."""

    @classmethod
    def make(cls) -> StateFormat:
        made: StateFormat = NAMESPACE["LineFormat"]()
        return made


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
