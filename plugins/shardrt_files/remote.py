"""Whatever fsspec reaches, as a place.

How long a call may take is the driver's to decide: drivers have timeouts and retries of their own, as
``storage_options``.
"""

from __future__ import annotations

import builtins
import errno
import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from shardrt_files.connecting import connect, without_password
from shardrt_files.driver_faults import told_by_driver
from shardrt_files.paths import parts_of
from shardrt_files.remote_file import RemoteFile
from shardrt_files.temporary import is_temporary
from shardrt_files.writing import writing_on

PIECE_BYTES = 16 * 2**20
"""Read at a time: drivers return new bytes, which are copied to where they are wanted."""
_SMALL = 2**20
_MOST_TRIES = 10


class FsspecPlace:
    """Files below an address such as ``s3://bucket/runs``.

    Example:
        >>> from shardrt_files.remote import FsspecPlace
        >>> place = FsspecPlace("memory://example", {})
        >>> file = place.create("step-1/rank0.bin")
        >>> file.write(b"0123456789")
        >>> file.commit()
        >>> place.list(), place.list("step-1"), place.read("step-1/rank0.bin", 8)
        (['step-1/'], ['rank0.bin'], b'89')
        >>> place.remove("step-1")
        >>> place.list()
        []
    """

    name = "files"

    def __init__(self, address: str, storage_options: Mapping[str, Any]) -> None:
        self._fs, self._base = connect(address, storage_options)
        self.root = without_password(address).rstrip("/")

    def create(self, path: str) -> RemoteFile:
        """Begin a file; it has its name, or all its bytes, once it is committed."""
        return RemoteFile(writing_on(self._fs, self._where(path)), path, self.root)

    def publish(self, path: str, data: bytes) -> None:
        """One upload, or a file aside that is moved: see Note [Whole files elsewhere]."""
        file = self.create(path)
        try:
            file.write(data)
            file.commit()
        finally:
            file.abandon()

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes ``[start, stop)``, cut where the file ends."""
        where = self._where(path)
        with told_by_driver("read", path, self.root, missing_passes=True):
            if stop is not None and stop - start not in range(1, _SMALL):
                # Some drivers allocate what they are asked for, however large, and take -1 for the end.
                stop = min(stop, self._size(where))
                if stop <= start:
                    return b""
            try:
                return bytes(self._fs.cat_file(where, start=start, end=stop))
            except FileNotFoundError:
                raise
            except Exception:
                # Stores refuse a range that begins behind the end.
                if start < self._size(where):
                    raise
                return b""

    def read_into(self, path: str, start: int, buffer: memoryview) -> int:
        """Fill the caller's memory, one piece after the other."""
        where = self._where(path)
        done = 0
        with told_by_driver("read", path, self.root, missing_passes=True):
            view = buffer.cast("B") if buffer.nbytes else memoryview(b"")
            wanted = min(view.nbytes, self._size(where) - start)
            while done < wanted:
                stop = min(done + PIECE_BYTES, wanted)
                piece = self._fs.cat_file(where, start=start + done, end=start + stop)
                if not piece:
                    break  # it was cut while it was read
                view[done : done + len(piece)] = piece
                done += len(piece)
        return done

    def size(self, path: str) -> int:
        """Bytes of a file."""
        where = self._where(path)
        with told_by_driver("read", path, self.root, missing_passes=True):
            return self._size(where)

    def list(self, path: str = "") -> builtins.list[str]:
        """Names in a directory, sorted; files that were never committed are not there."""
        where = self._where(path) if path else self._base
        with told_by_driver("list", path, self.root):
            self._fs.invalidate_cache()
            try:
                found = self._fs.ls(where, detail=True)
            except FileNotFoundError:
                return []
            names = set()
            for entry in found:
                name, is_directory = entry["name"], entry["type"] == "directory"
                if name.strip("/") == where.strip("/"):
                    if not is_directory and not name.endswith("/"):
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
                    continue  # a store's marker of the directory itself
                last = name.rstrip("/").rpartition("/")[2]
                if not is_temporary(last):
                    names.add(last + "/" * is_directory)
            return sorted(names)

    def remove(self, path: str) -> None:
        """Remove a file, or a directory with all that is in it."""
        where = self._where(path)
        with told_by_driver("remove", path, self.root), suppress(FileNotFoundError):
            if self._info(where)["type"] != "directory":
                self._fs.rm_file(where)
                return
            for _ in range(_MOST_TRIES):
                with suppress(FileNotFoundError):  # another rank may be removing the same: look again
                    self._remove_tree(where)
                self._info(where)
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY))

    def _remove_tree(self, where: str) -> None:
        if not set("*?[]") & set(where):
            self._fs.rm(where, recursive=True)  # many stores delete by the thousand
            return
        # rm would take such names for patterns.
        found = self._fs.find(where, withdirs=True, detail=True)
        for name in sorted(found, key=lambda name: name.count("/"), reverse=True):
            if found[name]["type"] == "directory":
                self._fs.rmdir(name)
            else:
                self._fs.rm_file(name)
        with suppress(FileNotFoundError):
            self._fs.rmdir(where)

    def _where(self, path: str) -> str:
        return "/".join((self._base.rstrip("/"), *parts_of(path, self.root)))

    def _size(self, where: str) -> int:
        info = self._info(where)
        if info["type"] == "directory":
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        return int(info["size"])

    def _info(self, where: str) -> Mapping[str, Any]:
        self._fs.invalidate_cache()  # other ranks write here too
        info: Mapping[str, Any] = self._fs.info(where)
        return info
