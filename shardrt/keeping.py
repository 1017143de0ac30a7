"""What a trainer calls on a runtime to save checkpoints and to go on from them."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardrt.checkpoint.loading import apply_model, apply_optimizer, read_model, read_optimizer
from shardrt.checkpoint.opened import OpenCheckpoint, find_directory, instead_of, open_checkpoint
from shardrt.checkpoint.parts import check_random_states, rank_part, set_random_states
from shardrt.checkpoint.progress import progress_bar
from shardrt.checkpoint.saving import Saver, SaveRequest, Saving
from shardrt.choosing import Chosen
from shardrt.errors import (
    CheckpointError,
    CommunicationError,
    ConfigError,
    DamagedCheckpointError,
    NoCheckpointError,
    PeerError,
    StateError,
)
from shardrt.handshake import Field, agreement
from shardrt.optim.managed import ManagedOptimizer
from shardrt.optim.settings import options_of
from shardrt.protocols import Communicator, ControlChannel
from shardrt.registry import Registry
from shardrt.state.tree import tensor_names

Path = str | os.PathLike[str]
Models = torch.nn.Module | Mapping[str, torch.nn.Module] | None
Optimizers = torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer] | None


class KeepingCalls:
    """The part of :class:`shardrt.Runtime` that saves and loads checkpoints."""

    rank: int
    world_size: int
    device_type: str
    timeout: float
    log: Any
    registry: Registry
    _control: ControlChannel
    _chosen: Chosen
    _saver: Saver | None
    _versions: Mapping[str, str]
    _joining: Any

    def negotiate(self, dtypes: Iterable[str]) -> Communicator:
        """See :meth:`shardrt.Runtime.negotiate`."""
        raise NotImplementedError

    def living_optimizers(self) -> list[ManagedOptimizer]:
        """See :meth:`shardrt.loop.LoopCalls.living_optimizers`."""
        raise NotImplementedError

    def _check_open(self) -> None:
        raise NotImplementedError

    def save(
        self,
        path: Path,
        *,
        model: Models = None,
        optimizer: Optimizers = None,
        extra: Any = None,
        asynchronous: bool = False,
        keep_last: int | None = None,
        progress: bool | None = None,
    ) -> Saving:
        """Save a checkpoint under ``path``, from which any number of ranks can go on. Every rank calls it.

        ``path`` is a directory, or an address that fsspec knows, in which each save gets a directory of its own. A
        checkpoint exists wholly or not at all. ``model`` and ``optimizer`` may be mappings of several by name.
        ``extra`` is what else the trainer needs to go on (numbers, text, tensors, lists and mappings of them); the
        first rank's is stored. Random states of every rank are stored too. With ``asynchronous`` the state is copied
        and written behind the training, one save at a time; a failure is raised on all ranks by the next save, by
        ``wait()`` of what is returned, or logged by ``close``. ``keep_last`` removes all but so many of the newest.
        ``progress`` shows a bar; by default where somebody is looking.

        Example:
            >>> import tempfile, shardrt, torch
            >>> model = torch.nn.Linear(2, 1)
            >>> with tempfile.TemporaryDirectory() as folder, shardrt.Runtime() as rt:
            ...     opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.1)
            ...     _ = rt.save(folder, model=model, optimizer=opt, extra={"epoch": 3})
            ...     rt.load(folder, model=model, optimizer=opt)
            {'epoch': 3}
        """
        self._check_open()
        self._check_outside_join("save")
        path = _expanded(path)
        if self._saver is None:
            self._saver = Saver(self._control, self.timeout, self._checkpoint_committed, self.log.warning)

        def prepare() -> tuple[SaveRequest, Any]:
            if keep_last is not None and (type(keep_last) is not int or keep_last < 1):
                raise ConfigError(
                    f"keep_last={keep_last!r} is not possible; give a number from 1 up, or None to keep all"
                )
            for living in self.living_optimizers():
                living.finish()
            models, optimizers = named_models(model), named_optimizers(optimizer)
            if not models and not optimizers and extra is None:
                raise ConfigError("there is nothing to save; pass model=, optimizer= or extra=")
            part = rank_part(
                models, optimizers, {} if extra is None else extra, rank=self.rank, world_size=self.world_size
            )
            request = SaveRequest(
                place=self._chosen.make_place(os.fspath(path)),
                state_format=self._chosen.state_format,
                keep_last=keep_last,
                software={**self._versions, "plugins": self.registry.versions()},
                runtime=dict(self._chosen.described),
                show=progress,
            )
            return request, part

        fields = {
            "group options": self._options_of(optimizer),
            "path": os.fspath(path),
            "models": sorted(named_models(model)) if _is_fine(named_models, model) else None,
            "optimizers": sorted(named_optimizers(optimizer)) if _is_fine(named_optimizers, optimizer) else None,
            "asynchronous": asynchronous,
            "keep_last": keep_last if isinstance(keep_last, int) else None,
        }
        return self._saver.save(prepare, fields, asynchronous=asynchronous)

    def _options_of(self, optimizer: Optimizers) -> Any:
        """What ranks compare: the first rank's options are stored, and must be everybody's."""
        if not _is_fine(named_optimizers, optimizer):
            return None
        return {name: options_of(one.param_groups) for name, one in named_optimizers(optimizer).items()}

    def load(
        self,
        path: Path,
        *,
        model: Models = None,
        optimizer: Optimizers = None,
        step: int | None = None,
        strict: bool = True,
        random: bool = True,
        missing_ok: bool = False,
        progress: bool | None = None,
    ) -> Any:
        """Go on from a checkpoint, whatever world size, partitioner or schedule it was saved with; returns its extra.

        ``path`` is what was given to :meth:`save`, of which the latest complete checkpoint is taken or, with ``step``,
        the newest of that step; or the directory of one checkpoint. Every rank calls it. Each reads only what it
        needs, and verifies it; nothing is changed on any rank unless all of it is right on all of them.
        ``strict=False`` takes what fits. ``random`` restores the random states where there are as many ranks as there
        were. With ``missing_ok`` None is returned where there is no checkpoint yet.

        Example:
            >>> import tempfile, shardrt, torch
            >>> with tempfile.TemporaryDirectory() as folder, shardrt.Runtime() as rt:
            ...     print(rt.load(folder, model=torch.nn.Linear(2, 1), missing_ok=True))
            None
        """
        self._check_open()
        self._check_outside_join("load")
        path = _expanded(path)
        if self._saver is not None:
            self._saver.finish()
        channel = self._control.another()
        with _as_load_error(self.rank), torch.no_grad():
            with agreement(channel, "load") as fields:
                for living in self.living_optimizers():
                    living.finish()
                models, optimizers = named_models(model), named_optimizers(optimizer)
                place = self._chosen.make_place(os.fspath(path))
                for name, value in {"path": os.fspath(path), "step": step, "strict": strict}.items():
                    fields[name] = Field(value=value, fix="call rt.load alike on every rank")
                fields["models"] = Field(value=sorted(models), fix="load the same models on every rank")
                fields["optimizers"] = Field(value=sorted(optimizers), fix="load the same optimizers on every rank")
            found = None
            if self.rank == 0:
                found = _found(place, step)
            answer = channel.exchange("checkpoint to load", found)[0]
            if "missing" in answer:
                if missing_ok:
                    return None
                raise NoCheckpointError(answer["missing"])
            if "error" in answer:
                raise CheckpointError(answer["error"])
            with agreement(channel, "reading a checkpoint") as fields:
                checkpoint = open_checkpoint(place, self.registry, answer["directory"])
                fields["checkpoint"] = Field(
                    value=checkpoint.manifest.id, fix="let every rank see the same files, on a file system they share"
                )
                read_models, read_optimizers, extra, states = self._read(
                    checkpoint, models, optimizers, strict, random, progress
                )
            communicator, device = self.negotiate(()), torch.device(self.device_type)
            for read in read_models:
                apply_model(read, communicator, device)
            for living in self.living_optimizers():
                living.spread_parameters()
            for read_one in read_optimizers:
                apply_optimizer(read_one)
            if states is not None:
                set_random_states(states)
        self.log.info("checkpoint.loaded", path=checkpoint.where, step=checkpoint.manifest.step)
        return extra

    def _check_outside_join(self, what: str) -> None:
        if self._joining is not None:
            raise ConfigError(
                f"rt.{what} inside a block of rt.join: ranks that have run out of inputs would not take part; {what} "
                "before the block or after it"
            )

    def _read(
        self,
        checkpoint: OpenCheckpoint,
        models: Mapping[str, torch.nn.Module],
        optimizers: Mapping[str, ManagedOptimizer],
        strict: bool,
        random: bool,
        progress: bool | None,
    ) -> tuple[list[Any], list[Any], Any, Any]:
        manifest = checkpoint.manifest
        _check_there("model", models, manifest.models, checkpoint)
        _check_there("optimizer", optimizers, manifest.optimizers, checkpoint)
        try:
            if self.rank == 0:
                checkpoint.check_directory()
            for number in range(self.rank, len(manifest.files), self.world_size):
                checkpoint.files.check(number)
            total = checkpoint.total_bytes() // self.world_size
            with progress_bar(f"loading {checkpoint.directory}", total, show=progress, rank=self.rank) as advance:
                read_models = [
                    read_model(
                        checkpoint,
                        name,
                        module,
                        optimizers,
                        rank=self.rank,
                        world_size=self.world_size,
                        strict=strict,
                        advance=advance,
                    )
                    for name, module in models.items()
                ]
                read_optimizers = [
                    read_optimizer(checkpoint, name, one, models, strict=strict, advance=advance)
                    for name, one in optimizers.items()
                ]
            extra = checkpoint.tree(manifest.extra, 0, what="extra")
            return read_models, read_optimizers, extra, self._random_states(checkpoint, random)
        except DamagedCheckpointError as error:
            raise instead_of(checkpoint, error) from error

    def _random_states(self, checkpoint: OpenCheckpoint, wanted: bool) -> Any:
        """This rank's; where there are fewer or more ranks than there were, they are verified and left."""
        trees = checkpoint.manifest.random
        if wanted and len(trees) == self.world_size:
            states = checkpoint.mapping(trees[self.rank], self.rank, what="random states")
            try:
                check_random_states(states)
            except StateError as error:
                raise StateError(f"{checkpoint.where!r}: {error}") from error
            return states
        for number in range(self.rank, len(trees), self.world_size):
            for name in tensor_names(trees[number]):
                checkpoint.files.verify(number, name)
        if wanted and trees:
            self.log.info("random.unchanged", saved_by=len(trees), ranks=self.world_size)
        return None

    def _checkpoint_committed(self, path: str, step: int) -> None:
        self.log.info("checkpoint.committed", path=path, step=step)
        for observe in self.registry.lifecycle("shardrt_checkpoint_committed"):
            observe(runtime=self, path=path, step=step)

    def finish_saving(self, patience: float) -> None:
        """Let a save that runs behind the training end, and log if it failed."""
        if self._saver is not None:
            self._saver.close(patience)


def named_models(given: Models) -> dict[str, torch.nn.Module]:
    """One module, several by name, or none.

    Example:
        >>> import torch
        >>> from shardrt.keeping import named_models
        >>> list(named_models(torch.nn.Linear(1, 1)))
        ['model']
    """
    found = {"model": given} if not isinstance(given, Mapping) else dict(given)
    if given is None:
        return {}
    for name, module in found.items():
        if not isinstance(module, torch.nn.Module):
            raise ConfigError(f"model {name!r} must be a torch.nn.Module, got a {type(module).__name__}")
        _check_name(name)
    return found  # type: ignore[return-value]


def named_optimizers(given: Optimizers) -> dict[str, ManagedOptimizer]:
    """One optimizer of a runtime, several by name, or none.

    Example:
        >>> from shardrt.keeping import named_optimizers
        >>> named_optimizers(None)
        {}
    """
    if given is None:
        return {}
    found: dict[str, ManagedOptimizer] = {}
    for name, one in (given if isinstance(given, Mapping) else {"optimizer": given}).items():
        _check_name(name)
        managed = one if isinstance(one, ManagedOptimizer) else getattr(one, "sharded", None)
        if not isinstance(managed, ManagedOptimizer):
            raise ConfigError(
                f"optimizer {name!r} must be made by rt.optimizer, got a {type(one).__name__}; state of other "
                "optimizers goes into extra=, as their state_dict()"
            )
        found[name] = managed
    return found


def _expanded(path: Path) -> str:
    """``~`` is the user's home, as in a shell; an address is left as it is."""
    if not isinstance(path, (str, os.PathLike)):
        raise ConfigError(f"a checkpoint needs a path, got {path!r}")
    text = os.fspath(path)
    return str(pathlib.Path(text).expanduser()) if text.startswith("~") else text


def _check_name(name: object) -> None:
    if not isinstance(name, str) or not name or "/" in name:
        raise ConfigError(f"{name!r} cannot name a model or an optimizer; use a word without slashes")


def _is_fine(read: Any, given: Any) -> bool:
    try:
        read(given)
    except ConfigError:  # raised where all ranks hear of it
        return False
    return True


def _check_there(kind: str, wanted: Mapping[str, Any], stored: Mapping[str, Any], checkpoint: OpenCheckpoint) -> None:
    for name in wanted:
        if name not in stored:
            there = ", ".join(map(repr, stored)) or "none"
            raise CheckpointError(f"{checkpoint.where!r} has no {kind} {name!r}; {kind}s in it: {there}")


def _found(place: Any, step: int | None) -> dict[str, str]:
    try:
        return {"directory": find_directory(place, step)}
    except NoCheckpointError as error:
        return {"missing": str(error)}
    except Exception as error:  # of whatever place: the others wait for an answer
        return {"error": f"rank 0 could not look for a checkpoint: {error}"}


@contextmanager
def _as_load_error(rank: int) -> Iterator[None]:
    try:
        yield
    except PeerError as error:
        raise CheckpointError(str(error)) from error
    except CommunicationError as error:
        raise CheckpointError(f"the checkpoint was not loaded: {error}") from error
    except OSError as error:
        raise CheckpointError(f"rank {rank} could not load: {error}; see whether the place can be read from") from error
