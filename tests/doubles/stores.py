"""File systems of fsspec that behave like those no test machine can reach, and fail when they are told to.

``objects://`` is an object store as S3 is one: no directories, objects that appear when their upload is finished, a
move that copies, an error for a range behind the end, and no error for deleting what is not there. ``renaming://`` is a
disk as SFTP shows one: files grow under their names, and can be renamed; with ``replaces=False`` it refuses to rename
onto a file that exists, as SMB does.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileSystem
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


class Upload(AbstractBufferedFile):  # type: ignore[misc]
    """An object on its way into the store."""

    def _initiate_upload(self) -> None:
        self.fs.fail_if_told("start")
        self.parts: list[bytes] = []
        self.fs.uploads.add(self.path)

    def _upload_chunk(self, final: bool = False) -> bool:
        self.fs.fail_if_told("finish" if final else "upload")
        self.parts.append(self.buffer.getvalue())
        if final:
            self.fs.objects[self.path] = b"".join(self.parts)
            self.fs.uploads.discard(self.path)
        return True

    def discard(self) -> None:
        self.fs.uploads.discard(self.path)


class ObjectStore(AbstractFileSystem):  # type: ignore[misc]
    """Objects by key, in this process."""

    protocol = "objects"
    cachable = False
    objects: dict[str, bytes] = {}  # noqa: RUF012 (one store for all instances, as all ranks see one)
    uploads: set[str] = set()  # noqa: RUF012
    """Uploads that were begun and neither finished nor given up: they cost money in a real store."""
    block_size = 50_000

    def __init__(self, fails_at: str = "", error: Exception | None = None, **options: Any) -> None:
        super().__init__(**options)
        self.fails_at = fails_at
        self.error = error or OSError("503 Slow Down")

    def fail_if_told(self, at: str) -> None:
        if self.fails_at == at:
            raise self.error

    def _open(self, path: str, mode: str = "rb", **options: Any) -> Any:
        self.fail_if_told("open")
        return Upload(self, path, mode, **{**options, "block_size": self.block_size})

    def info(self, path: str, **_: Any) -> dict[str, Any]:
        self.fail_if_told("info")
        key = self._strip_protocol(path)
        if key in self.objects:
            return {"name": key, "size": len(self.objects[key]), "type": "file"}
        if any(other.startswith(f"{key}/") for other in self.objects):
            return {"name": key, "size": 0, "type": "directory"}
        raise FileNotFoundError(path)

    def ls(self, path: str, detail: bool = True, **_: Any) -> list[Any]:
        self.fail_if_told("ls")
        prefix = self._strip_protocol(path).rstrip("/") + "/"
        found = {
            prefix + key.removeprefix(prefix).partition("/")[0] for key in list(self.objects) if key.startswith(prefix)
        }
        if not found:
            return [self.info(path)] if detail else [path]
        return [self.info(name) if detail else name for name in sorted(found)]

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **_: Any) -> bytes:
        self.fail_if_told("read")
        data = self.objects.get(self._strip_protocol(path))
        if data is None:
            raise FileNotFoundError(path)
        if start is not None and start >= len(data) > 0:
            raise OSError("416 The requested range is not satisfiable")
        return data[start:end]

    def rm_file(self, path: str) -> None:
        self.fail_if_told("delete")
        self.objects.pop(self._strip_protocol(path), None)

    def cp_file(self, path1: str, path2: str, **_: Any) -> None:
        raise AssertionError("a store's objects are not to be moved: that would copy them")


class RenamingDisk(LocalFileSystem):  # type: ignore[misc]
    """Files of this machine, below a directory."""

    protocol = "renaming"
    cachable = False

    @classmethod
    def _strip_protocol(cls, path: Any) -> str:
        return "/" + os.fspath(path).removeprefix("renaming://").strip("/")

    def __init__(self, replaces: bool = True, **options: Any) -> None:
        super().__init__(**options)
        self.replaces = replaces

    def mv(self, path1: str, path2: str, **_: Any) -> None:
        if not self.replaces and Path(path2).exists():
            raise FileExistsError(path2)
        Path(path1).replace(path2)


def register() -> None:
    """Make both known to fsspec."""
    fsspec.register_implementation("objects", ObjectStore, clobber=True)
    fsspec.register_implementation("renaming", RenamingDisk, clobber=True)
