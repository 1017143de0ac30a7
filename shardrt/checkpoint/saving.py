"""Saving: every rank writes its file, the first one commits; now, or behind the training.

Note [One channel per save]: ranks talk about a save on a channel of its own. So a save that fails (a full disk) fails
on every rank and leaves training as it was, and one that runs in the background does not get between the calls of the
training loop.
"""

from __future__ import annotations

import atexit
import threading
import uuid
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import attrs
import torch

from shardrt.checkpoint.blocks import BLOCK_BYTES
from shardrt.checkpoint.manifest import file_from_json, file_json
from shardrt.checkpoint.merging import merge
from shardrt.checkpoint.parts import RankPart, file_name
from shardrt.checkpoint.progress import progress_bar
from shardrt.checkpoint.series import SaveName, Series
from shardrt.checkpoint.writing import Staging, write_file
from shardrt.errors import CheckpointError, CommunicationError, PeerError, ShardrtError
from shardrt.handshake import Field, agreement
from shardrt.protocols import ControlChannel, Place, StateFormat

Committed = Callable[[str, int], None]
"""Called on every rank with the path and the step of a checkpoint that exists now."""


@attrs.frozen(kw_only=True)
class SaveRequest:
    """Everything about one save that does not depend on the state."""

    place: Place
    state_format: StateFormat
    keep_last: int | None
    software: Mapping[str, Any]
    runtime: Mapping[str, Any]
    show: bool | None = None


_FAREWELL_SECONDS = 5.0


class Saving:
    """A save that runs behind the training.

    Example:
        >>> import tempfile, shardrt, torch
        >>> model = torch.nn.Linear(2, 2)
        >>> with tempfile.TemporaryDirectory() as folder, shardrt.Runtime() as rt:
        ...     saving = rt.save(folder, model=model, asynchronous=True)
        ...     saving.wait()
        ...     saving.done
        True
    """

    def __init__(self, path: str) -> None:
        self.path = path
        """Where the checkpoint is going to be."""
        self._error: BaseException | None = None
        self.thread: threading.Thread | None = None
        """Where it runs, if not in the caller's."""
        self._ended = threading.Event()
        self._told = False

    @property
    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end; raises :class:`~shardrt.errors.CheckpointError` if it failed, on every rank."""
        if not self._ended.wait(timeout):
            raise CheckpointError(
                f"saving {self.path!r} did not end within {timeout:g} s; wait longer, or look at the disk"
            )
        if self.thread is not None:
            self.thread.join(
                _FAREWELL_SECONDS
            )  # a thread that is about to end must not meet the end of the interpreter
        self._told = True
        if self._error is not None:
            raise self._error

    def run(self, work: Callable[[], None]) -> None:
        """Do the work and note how it ended."""
        try:
            work()
        except BaseException as error:
            self._error = error
        finally:
            self._ended.set()

    @property
    def unreported(self) -> bool:
        """Whether it failed and nobody has been told."""
        return self.done and self._error is not None and not self._told


class Saver:
    """Saves one checkpoint at a time."""

    def __init__(
        self, control: ControlChannel, timeout: float, committed: Committed, warn: Callable[..., None]
    ) -> None:
        self._control = control
        self._timeout = timeout
        self._committed = committed
        self._warn = warn
        self._staging = Staging()
        self._pending: Saving | None = None
        self._waits_at_exit = False

    def save(
        self, prepare: Callable[[], tuple[SaveRequest, RankPart]], fields: Mapping[str, Any], *, asynchronous: bool
    ) -> Saving:
        """Save what ``prepare`` gives; ``fields`` must be the same on all ranks. See Note [One channel per save]."""
        self.finish()
        channel = self._control.another()
        with _as_checkpoint_error(channel.rank):
            with agreement(channel, "save") as compared:
                request, part = prepare()
                compared.update(
                    {
                        name: Field(value=value, fix="call rt.save alike on every rank")
                        for name, value in {**fields, "step": part.step}.items()
                    }
                )
            series = Series(request.place)
            name, id = _begin(channel, series, part.step)
            saving = Saving(f"{request.place.root}/{name}")
            tensors: Mapping[str, torch.Tensor] = part.table.tensors
            if asynchronous:
                with agreement(channel, "copying"):
                    tensors = self._staging.copy(tensors)
        work = _Write(channel, request, series, name, id, tensors, part, self._committed, quiet=asynchronous)
        if not asynchronous:
            saving.run(work)
            saving.wait()
            return saving
        self._pending = saving
        if not self._waits_at_exit:
            self._waits_at_exit = True
            # Before the threads of communicators leave, which were registered earlier.
            atexit.register(_finish_at_exit, weakref.ref(self))
        saving.thread = threading.Thread(target=saving.run, args=(work,), name="shardrt-saving", daemon=True)
        saving.thread.start()
        return saving

    def finish(self, patience: float | None = None) -> None:
        """Wait for a save under way; raises if it failed and nobody has been told yet."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if not pending.done:
            try:
                pending.wait(patience)
            except ShardrtError:
                if not pending.done:
                    self._pending = pending
                raise
        elif pending.unreported:
            pending.wait()
        elif pending.thread is not None:
            pending.thread.join(_FAREWELL_SECONDS)

    def close(self, patience: float) -> None:
        """End: let a save under way finish, and log if it failed or could not be waited for."""
        pending = self._pending
        if pending is not None and not patience and not pending.done:
            self._pending = None
            self._warn("checkpoint.unfinished", path=pending.path, reason="the run failed while it was being written")
            return
        try:
            self.finish(patience)
        except ShardrtError as error:
            self._warn("checkpoint.failed", error=str(error))

    def finish_at_exit(self) -> None:
        """A script that ends without closing its runtime does not lose its last save."""
        self.close(0.0 if self._control.failed else self._timeout)


def _finish_at_exit(saver: weakref.ref[Saver]) -> None:
    alive = saver()
    if alive is not None:
        alive.finish_at_exit()


def _begin(channel: ControlChannel, series: Series, step: int) -> tuple[SaveName, str]:
    started: list[Any] | None = None
    with agreement(channel, "beginning a checkpoint"):
        if channel.rank == 0:
            id = uuid.uuid4().hex
            name = series.begin(step, id)
            started = [name.number, name.step, id]
    number, at_step, id = channel.exchange("name of the checkpoint", started)[0]
    return SaveName(number, at_step), id


class _Write:
    """The part that may run in the background: this rank's file, and the commit."""

    def __init__(
        self,
        channel: ControlChannel,
        request: SaveRequest,
        series: Series,
        name: SaveName,
        id: str,
        tensors: Mapping[str, torch.Tensor],
        part: RankPart,
        committed: Committed,
        *,
        quiet: bool,
    ) -> None:
        self._channel = channel
        self._request = request
        self._series = series
        self._name = name
        self._id = id
        self._tensors = tensors
        self._part = part
        self._committed = committed
        self._quiet = quiet

    def __call__(self) -> None:
        channel, series, name = self._channel, self._series, self._name
        try:
            with _as_checkpoint_error(channel.rank):
                with agreement(channel, "writing a checkpoint's files"):
                    told = self._write()
                collected = channel.exchange("what was written", told, to_all=False)
                with agreement(channel, "committing a checkpoint"):
                    if channel.rank == 0:
                        self._commit(collected)
                with agreement(channel, "after a checkpoint"):
                    if channel.rank == 0:
                        series.point_to(name)
                        if self._request.keep_last is not None:
                            series.keep_last(self._request.keep_last)
        except Exception:
            if channel.rank == 0:
                with suppress(CheckpointError, OSError):  # the error itself is what counts
                    series.abandon(name, self._id)
            raise
        self._committed(f"{self._request.place.root}/{name}", self._part.step)

    def _write(self) -> dict[str, Any]:
        channel, request = self._channel, self._request
        total = sum(tensor.nbytes for tensor in self._tensors.values())
        show = False if self._quiet else request.show
        with progress_bar(f"saving {self._name}", total, show=show, rank=channel.rank) as advance:
            stored = write_file(
                request.place,
                f"{self._name}/{file_name(channel.rank, channel.world_size, request.state_format)}",
                self._tensors,
                request.state_format,
                {"format": "shardrt", "id": self._id, "rank": str(channel.rank)},
                block_bytes=BLOCK_BYTES,
                advance=advance,
            )
        return {"file": file_json(stored), "pieces": self._part.pieces, "random": self._part.random}

    def _commit(self, collected: list[Any]) -> None:
        assert self._part.common is not None
        for rank, told in enumerate(collected):
            self._check_seen(rank, told["file"])
        self._series.commit(
            self._name,
            merge(
                id=self._id,
                step=self._part.step,
                files=[file_from_json(rank["file"], BLOCK_BYTES) for rank in collected],
                pieces=[rank["pieces"] for rank in collected],
                random=[rank["random"] for rank in collected],
                common=self._part.common,
                state_format=self._request.state_format.name,
                block_bytes=BLOCK_BYTES,
                software=self._request.software,
                runtime=self._request.runtime,
            ),
        )

    def _check_seen(self, rank: int, file: Mapping[str, Any]) -> None:
        """A directory of the same name on another host's own disk would make a checkpoint that nobody can load."""
        place = self._request.place
        try:
            size = place.size(f"{self._name}/{file['name']}")
        except FileNotFoundError:
            size = None
        if size != file["size"]:
            found = "does not see it" if size is None else f"sees {size} bytes"
            raise CheckpointError(
                f"rank {rank} has written {file['name']!r} ({file['size']} bytes) under {place.root!r}, and rank 0 "
                f"{found} there: ranks do not share this directory; save to a file system that all of them see"
            )


@contextmanager
def _as_checkpoint_error(rank: int) -> Iterator[None]:
    """Another rank's failure to save is this rank's too."""
    try:
        yield
    except PeerError as error:
        raise CheckpointError(str(error)) from error
    except CommunicationError as error:
        raise CheckpointError(f"the checkpoint was not completed: {error}") from error
    except CheckpointError as error:
        raise type(error)(f"rank {rank} could not save: {error}") from error
    except OSError as error:
        raise CheckpointError(
            f"rank {rank} could not save: {error}; see whether the place can be written to"
        ) from error
