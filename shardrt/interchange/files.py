"""Files that others wrote: mapped for reading, and named by texts that are not believed."""

from __future__ import annotations

import mmap
from pathlib import Path, PurePosixPath

from shardrt.errors import CheckpointError


class MappedFile:
    """A file mapped for reading when it is first wanted."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self.size = path.stat().st_size
        except OSError as error:
            raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
        self._map: mmap.mmap | None = None

    def map(self) -> mmap.mmap:
        """The bytes of the file. It must not shrink while it is mapped."""
        if self._map is None:
            try:
                with self.path.open("rb") as file:
                    self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise CheckpointError(f"{self.path} cannot be mapped: {error}") from error
        return self._map


def inside(directory: Path, name: str, *, where: str) -> Path:
    """The file of this relative name in a directory; one that would lead out of it is refused.

    Example:
        >>> import pathlib
        >>> from shardrt.interchange.files import inside
        >>> inside(pathlib.Path("run"), "__0_0.distcp", where="metadata").name
        '__0_0.distcp'
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts or str(pure) == ".":
        raise CheckpointError(f"{where} names the file {name[:200]!r}, which is not inside of {directory}; refused")
    return directory / pure
