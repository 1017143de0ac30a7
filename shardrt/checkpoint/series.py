"""The checkpoints of a run under one root: which are complete, which is the latest, what may be removed.

Note [Commit]: a checkpoint is a directory of files. Ranks write theirs and make them durable; then the first rank
publishes the manifest, which is one atomic step on every place: with it the checkpoint exists, and without it the
directory is a leftover that nobody reads. After that the pointer is moved to it, and only then are older ones removed,
the manifest first, so that a checkpoint half removed is a leftover too. Whenever a rank is lost, the pointer leads to
a complete checkpoint: the one before, or the new one.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from typing import Any

import attrs

from shardrt.checkpoint.manifest import Manifest, seal, unseal
from shardrt.errors import CheckpointError, NoCheckpointError
from shardrt.protocols import Place

MANIFEST = "manifest.json"
POINTER = "latest.json"
_WRITER = "writing.json"
_NAME = re.compile(r"save-([0-9]{6,18})-step-([0-9]{6,18})\Z")
_SMALL_BYTES = 2**16
"""More than the small files of a series ever have: what is longer is none of them."""
_ABANDONED_SECONDS = 3600.0
"""After this long, a leftover whose writer cannot be asked (it is on another host) is nobody's any more."""


@attrs.frozen(order=True)
class SaveName:
    """A checkpoint's directory: the how many-th of its root, and the updates made by then.

    Example:
        >>> from shardrt.checkpoint.series import SaveName
        >>> str(SaveName(2, 150)), SaveName.parse("save-000002-step-000150/"), SaveName.parse("other")
        ('save-000002-step-000150', SaveName(number=2, step=150), None)
    """

    number: int
    step: int

    def __str__(self) -> str:
        return f"save-{self.number:06d}-step-{self.step:06d}"

    @classmethod
    def parse(cls, text: str) -> SaveName | None:
        """The name, or None for a directory of another kind."""
        found = _NAME.match(text.removesuffix("/"))
        name = None if found is None else cls(int(found[1]), int(found[2]))
        return name if name is not None and str(name) == text.removesuffix("/") else None


_WRITING_HERE: set[tuple[str, SaveName]] = set()
"""What this process itself is writing, perhaps from two runtimes: never a leftover."""


class Series:
    """The checkpoints under the root of a place."""

    def __init__(self, place: Place) -> None:
        self.place = place

    def names(self) -> list[SaveName]:
        """All directories of checkpoints, complete or not, in the order in which they were saved."""
        found = [SaveName.parse(name) for name in self.place.list() if name.endswith("/")]
        return sorted(name for name in found if name is not None)

    def is_complete(self, name: SaveName) -> bool:
        """Whether a checkpoint was committed."""
        return MANIFEST in self.place.list(str(name))

    def committed(self) -> list[SaveName]:
        """The complete ones, in order."""
        return [name for name in self.names() if self.is_complete(name)]

    def begin(self, step: int, id: str = "") -> SaveName:
        """A name for a new checkpoint, after removing what interrupted saves have left.

        ``id`` tells this save from another that gets the same name once this one is given up.
        """
        if MANIFEST in self.place.list():
            raise CheckpointError(
                f"{self.place.root!r} is itself a checkpoint, and one saved into it would spoil it; save to the "
                "directory above it, or to another one"
            )
        names = self.names()
        for name in names:
            if not self.is_complete(name) and self._is_abandoned(name):
                self.place.remove(str(name))
        name = SaveName(max((name.number for name in names), default=0) + 1, step)
        _WRITING_HERE.add((self.place.root, name))
        writer = {"host": socket.gethostname(), "pid": os.getpid(), "time": time.time(), "id": id}
        self.place.publish(f"{name}/{_WRITER}", json.dumps(writer).encode())
        return name

    def commit(self, name: SaveName, manifest: Manifest) -> None:
        """Let a checkpoint exist; see Note [Commit]."""
        self.place.publish(f"{name}/{MANIFEST}", manifest.to_bytes())

    def point_to(self, name: SaveName) -> None:
        """Make it the latest."""
        self.place.publish(POINTER, seal({"latest": str(name)}))
        _WRITING_HERE.discard((self.place.root, name))
        self.place.remove(f"{name}/{_WRITER}")

    def abandon(self, name: SaveName, id: str = "") -> None:
        """Remove one that could not be completed, unless another save has got its name since."""
        _WRITING_HERE.discard((self.place.root, name))
        writer = self._writer(name)
        if not self.is_complete(name) and (writer is None or writer.get("id") == id):
            self.place.remove(str(name))

    def keep_last(self, count: int) -> list[SaveName]:
        """Remove all complete ones but the last ``count``; the latest always stays. Returns what was removed."""
        latest = self.latest()
        removed = [name for name in self.committed()[:-count] if name != latest]
        for name in removed:
            self.place.remove(f"{name}/{MANIFEST}")
            self.place.remove(str(name))
        return removed

    def latest(self) -> SaveName:
        """The one the pointer leads to; the newest complete one where the pointer is missing or damaged."""
        pointed = self._pointed()
        if pointed is not None and self.is_complete(pointed):
            return pointed
        committed = self.committed()
        if not committed:
            raise NoCheckpointError(
                f"there is no complete checkpoint in {self.place.root!r}; it has {self._shown()}; check the path, or "
                "pass missing_ok=True to start anew"
            )
        return committed[-1]

    def pointer_problem(self) -> str | None:
        """What is wrong with the pointer, if there is one."""
        where = f"{POINTER!r} of {self.place.root!r}"
        try:
            document = unseal(self.place.read(POINTER), where=where)
        except FileNotFoundError:
            return None
        except CheckpointError as error:
            return f"{error}; the newest complete checkpoint counts as the latest"
        name = SaveName.parse(str(document.get("latest")))
        if name is not None and self.is_complete(name):
            return None
        return f"{where} leads to {document.get('latest')!r}, which is no complete checkpoint; the newest one counts"

    def is_leftover(self, name: SaveName) -> bool:
        """Whether it is not complete, and nobody is going to complete it any more."""
        return not self.is_complete(name) and self._is_abandoned(name)

    def at_step(self, step: int) -> SaveName:
        """The newest complete one of a step."""
        found = [name for name in self.committed() if name.step == step]
        if not found:
            steps = ", ".join(str(name.step) for name in self.committed()) or "none"
            raise NoCheckpointError(
                f"no complete checkpoint of step {step} in {self.place.root!r}; complete ones: {steps}"
            )
        return found[-1]

    def _pointed(self) -> SaveName | None:
        try:
            document = unseal(self.place.read(POINTER, 0, _SMALL_BYTES), where=POINTER)
        except (FileNotFoundError, CheckpointError):
            return None
        latest = document.get("latest")
        return SaveName.parse(latest) if isinstance(latest, str) else None

    def _is_abandoned(self, name: SaveName) -> bool:
        if (self.place.root, name) in _WRITING_HERE:
            return False
        try:
            writer = self._writer(name)
        except CheckpointError:  # nobody can say whose it is: then it stays, and does not keep anyone from saving
            return False
        if writer is None:
            return True
        host, pid, began = writer.get("host"), writer.get("pid"), writer.get("time")
        if type(host) is not str or type(pid) is not int or type(began) is not float:
            return True
        if host != socket.gethostname():
            return time.time() - began > _ABANDONED_SECONDS
        return pid == os.getpid() or not _is_alive(pid)

    def _writer(self, name: SaveName) -> dict[str, Any] | None:
        """Who writes a checkpoint, if that can be read: the note is a help for tidying up, and no more."""
        try:
            found = json.loads(self.place.read(f"{name}/{_WRITER}", 0, _SMALL_BYTES))
        except (FileNotFoundError, ValueError, RecursionError):
            return None
        return found if isinstance(found, dict) else None

    def _shown(self) -> str:
        names = self.place.list()
        return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "") if names else "nothing"


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True
