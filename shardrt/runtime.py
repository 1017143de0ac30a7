"""The runtime: plugins chosen, ranks agreed, optimizers made. It never owns the loop, the model or a given group."""

from __future__ import annotations

import os
import platform
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

import shardrt
from shardrt.checkpoint.saving import Saver
from shardrt.choosing import Chosen, choose
from shardrt.comm.membership import default_device_type, end_group, find_membership, start_group
from shardrt.comm.traffic import Traffic
from shardrt.comm.watching import watched
from shardrt.config import RuntimeConfig
from shardrt.errors import CommunicationError, ConfigError, PeerError, ShardrtError
from shardrt.flight.report import reports_directory
from shardrt.flight.telling import WHAT_RANKS_DID
from shardrt.handshake import Field, agreement, digest
from shardrt.keeping import KeepingCalls
from shardrt.log import rank_logger
from shardrt.loop import LoopCalls
from shardrt.opening import Subgroups
from shardrt.optim.build import build_optimizer
from shardrt.optim.engine import Gradients
from shardrt.optim.managed import ManagedOptimizer
from shardrt.plan import Plan
from shardrt.protocols import Communicator
from shardrt.registry import load_registry
from shardrt.sharding.running import UnitRunner
from shardrt.sharding_calls import ShardingCalls
from shardrt.state.kinds import StateKind
from shardrt.state_calls import StateCalls
from shardrt.timeline.recording import Recording, timeline_directory
from shardrt.wiring import WiringCalls

if TYPE_CHECKING:
    from typing_extensions import Self


class Runtime(WiringCalls, LoopCalls, StateCalls, KeepingCalls, ShardingCalls):
    """Chooses plugins, agrees with the other ranks and makes sharded optimizers.

    ``partitioner``, ``backend`` and ``schedule`` are names, mappings of a name and options, or instances.
    ``process_group`` is a torch process group to work on; without one the default group is used, or one is started
    from torchrun's variables, or this process works alone. ``device`` is where parameters live (by default the
    accelerator, else the CPU), ``bucket_mb`` how many megabytes travel together (by default what the schedule works
    best with), ``state_format`` and ``place`` how and where checkpoints are kept, ``timeout`` the seconds that any wait
    for another rank may take, and ``plugins`` objects with hook implementations for this runtime alone. ``timeline``
    is a directory to which each rank writes what it did when (``shardrt trace`` reads it); where it is None, the
    variable ``SHARDRT_TIMELINE`` may name one. ``hang_reports`` is a directory to which each rank writes what it did
    last when a wait fails (``shardrt doctor --hang`` explains it); where it is None, the variable ``SHARDRT_HANG_DIR``
    may name one.

    Example:
        >>> import shardrt, torch
        >>> model = torch.nn.Linear(8, 8)
        >>> with shardrt.Runtime(partitioner={"name": "greedy", "cost": "bytes"}, backend="auto") as rt:
        ...     opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=1e-3)
        ...     model(torch.randn(2, 8)).sum().backward()
        ...     opt.step()
        ...     print(rt.backend, rt.world_size)
        null 1
    """

    def __init__(
        self,
        *,
        partitioner: Any = "greedy",
        backend: Any = "auto",
        schedule: Any = "sync",
        state_format: Any = "safetensors",
        place: Any = "files",
        process_group: Any = None,
        device: str | torch.device | None = None,
        bucket_mb: float | None = None,
        timeout: float = 300.0,
        plugins: Sequence[object] = (),
        timeline: str | os.PathLike[str] | None = None,
        hang_reports: str | os.PathLike[str] | None = None,
    ) -> None:
        self._closed = False
        self._owns_group = False
        self._optimizers: list[weakref.ref[ManagedOptimizer]] = []
        self._plans: list[Plan] = []
        # By module; the module's hooks keep its runner alive.
        self._runners: weakref.WeakKeyDictionary[torch.nn.Module, weakref.ref[UnitRunner]] = weakref.WeakKeyDictionary()
        self._kinds: weakref.WeakKeyDictionary[Any, StateKind] = weakref.WeakKeyDictionary()
        self._answering: weakref.WeakKeyDictionary[torch.nn.Module, Any] = weakref.WeakKeyDictionary()
        self._saver: Saver | None = None
        self._versions = {"shardrt": shardrt.__version__, "torch": str(torch.__version__)}
        self._membership = find_membership(process_group, timeout=_seconds(timeout))
        self.rank = self._membership.rank
        self.world_size = self._membership.world_size
        self._control = self._membership.control
        self._control.on_failure(self._rank_failed)
        self.log = rank_logger(self.rank, self.world_size)
        self.flight, self._watch = watched(self._control, self.log)
        with self.agreeing("Runtime") as fields:
            self.device_type = default_device_type(None if device is None else str(device))
            if isinstance(plugins, str) or not isinstance(plugins, Sequence):
                raise ConfigError(f"plugins must be a list of objects with hook implementations, got {plugins!r}")
            self.registry = load_registry(plugins)
            self._chosen: Chosen = choose(
                self.registry,
                self._membership,
                partitioner=partitioner,
                backend=backend,
                schedule=schedule,
                state_format=state_format,
                place=place,
                device_type=self.device_type,
            )
            limits = RuntimeConfig(bucket_mb=bucket_mb, timeout=timeout, timeline=timeline, hang_reports=hang_reports)
            self._report_to(reports_directory(limits.hang_reports))
            record_to = timeline_directory(limits.timeline)
            fields.update(self._fields(limits, recording=record_to is not None))
        self._chosen = self._chosen.settled(self._control)
        self._report_to(reports_directory(limits.hang_reports))
        self._recording = None if record_to is None else self._record(record_to)
        self.timeline = None if self._recording is None else self._recording.timeline
        self.backend = self._chosen.backend.name
        self.backend_reason = self._chosen.reason
        self.bucket_bytes = _bytes(limits.bucket_mb, self._chosen.schedule.bucket_mb)
        self.timeout = limits.timeout
        self._negotiated: dict[tuple[str, ...], Communicator] = {}
        self._opened: list[Communicator] = []
        self._subgroups = Subgroups()
        with self.agreeing("communicator"):
            self._process_group = self._join_group()
            self._communicator = self._make_communicator()
        self.log.debug("runtime.built", backend=self.backend, reason=self.backend_reason)

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | str | Path, **extra: Any) -> Self:
        """A runtime from a plain mapping, or from a TOML file (its ``[shardrt]`` or ``[tool.shardrt]`` table).

        ``extra`` takes what no configuration can hold (``process_group``, ``plugins``) and overrides what it does.

        Example:
            >>> import shardrt
            >>> with shardrt.Runtime.from_config({"partitioner": "flat", "timeout": 60}) as rt:
            ...     print(rt.partitioner.name)
            flat
        """
        if isinstance(config, Mapping):
            parsed = RuntimeConfig.from_mapping(config)
        elif isinstance(config, (str, Path)):
            parsed = RuntimeConfig.from_toml(config)
        else:
            raise ConfigError(f"from_config takes a mapping or the path of a TOML file, got a {type(config).__name__}")
        settings: dict[str, Any] = {
            "partitioner": parsed.partitioner,
            "backend": parsed.backend,
            "schedule": parsed.schedule,
            "state_format": parsed.state_format,
            "place": parsed.place,
            "device": parsed.device,
            "bucket_mb": parsed.bucket_mb,
            "timeout": parsed.timeout,
            "timeline": parsed.timeline,
            "hang_reports": parsed.hang_reports,
        }
        return cls(**{**settings, **extra})

    def optimizer(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *,
        gradients: Gradients = "average",
        elementwise: bool | None = None,
        initial: Literal["broadcast", "check"] = "broadcast",
        uses: Sequence[str] = (),
        **defaults: Any,
    ) -> ManagedOptimizer:
        """A sharded optimizer (ZeRO-1) of any class, used like that class; every rank must call this alike.

        ``params`` is what torch's optimizers take: parameters, named parameters, dicts of either. ``gradients`` says
        what ``p.grad`` will hold: each rank's own gradient, which the optimizer is to ``"average"`` or to ``"sum"``,
        or a gradient that is ``"reduced"`` already, as under DistributedDataParallel (checked at the first step).
        ``"average"`` is right under DDP too, only slower. ``elementwise=True`` vouches that the update of an element
        looks at that element alone, so that parameters may be cut. ``initial`` says what happens when ranks start
        from different values: ``"broadcast"`` takes rank 0's, ``"check"`` raises. ``uses`` says what the loop is going
        to do (``"clipping"``, ``"scaling"`` by a GradScaler, ``"accumulation"`` outside ``no_sync``), to be refused
        here, and not in the first step, if the schedule cannot.

        Example:
            >>> import shardrt, torch
            >>> model = torch.nn.Linear(4, 4)
            >>> rt = shardrt.Runtime()
            >>> opt = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=3e-4)
            >>> scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=10)
            >>> isinstance(opt, torch.optim.Optimizer)
            True
        """
        self._check_open()
        made = build_optimizer(
            self,
            params,
            optimizer_class,
            gradients=gradients,
            elementwise=elementwise,
            initial=initial,
            uses=uses,
            defaults=defaults,
        )
        self._optimizers.append(weakref.ref(made))
        return made

    @property
    def partitioner(self) -> Any:
        """The partitioner in use."""
        return self._chosen.partitioner

    @property
    def schedule(self) -> Any:
        """The schedule in use."""
        return self._chosen.schedule

    @property
    def plan(self) -> Plan | None:
        """The plan agreed on last; None before the first optimizer. An optimizer's own is ``opt.plan``."""
        return self._plans[-1] if self._plans else None

    @property
    def plans(self) -> tuple[Plan, ...]:
        """Every plan agreed on so far, in order."""
        return tuple(self._plans)

    @property
    def traffic(self) -> Traffic:
        """Bytes this rank has sent and received through its communicator."""
        total = Traffic()
        for communicator in self._opened:
            total = total + communicator.traffic
        return total

    def close(self) -> None:
        """Give back what the runtime opened: its communicator's threads, and the process group if it started it."""
        if self._closed:
            return
        self._closed = True
        self.finish_saving(0.0 if self._control.failed else self.timeout)
        try:
            for optimizer in () if self._control.failed else self.living_optimizers():
                optimizer.finish()
        except ShardrtError:  # it reaches whoever reads what could not be gathered
            self._control.failed = True  # one timeout is enough: nothing else is waited for
        for communicator in self._opened:
            communicator.close()
        problem = None if self._recording is None else self._recording.close()
        if problem is not None:
            self.log.warning("timeline.unwritten", reason=problem)
        if self._watch is not None:
            self._watch.close()
        if not self._control.failed:
            self._end_subgroups()
        if self._owns_group and dist.is_initialized():
            end_group(rank=self.rank, log=self.log)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        leaves_well = isinstance(error, SystemExit) and error.code in (None, 0)
        if error is not None and not leaves_well:
            self.report_failure(error)
        self.close()
        if isinstance(error, RuntimeError) and not isinstance(error, ShardrtError) and self.world_size > 1:
            # torch's own collectives (DDP's) know that a connection broke; the rank that broke it has said why.
            self._control.raise_if_peer_failed()

    def agreeing(self, topic: str) -> AbstractContextManager[dict[str, Field]]:
        """A block in which this rank prepares something that all ranks must do alike; see :mod:`shardrt.handshake`."""
        return agreement(self._control, topic)

    def differs(self, topic: str, value: Any) -> bool:
        """Whether ranks hold different values of something that may differ; every rank gets the same answer."""
        return len(set(self._control.exchange(topic, digest(value)))) > 1

    def told(self, topic: str, value: Any) -> list[Any]:
        """Every rank's small JSON-able value, in rank order."""
        return self._control.exchange(topic, value)

    @contextmanager
    def telling_peers(self) -> Iterator[None]:
        """A block whose failure on this rank ends the others' waiting."""
        try:
            yield
        except Exception as error:
            self.report_failure(error)
            raise

    def raise_if_peer_failed(self) -> None:
        """Raise :class:`~shardrt.errors.PeerError` if another rank has reported a failure."""
        self._control.raise_if_peer_failed()

    def report_failure(self, error: BaseException) -> None:
        """Let ranks that wait for this one know that it failed, unless it only passes on another's failure."""
        if self.world_size == 1 or isinstance(error, PeerError):
            return
        # The others have their own view of what each rank did last, which fills the lines after the first.
        line = f"{type(error).__name__}: {error}".partition(WHAT_RANKS_DID)[0]
        self._rank_failed(self.rank, line)
        if self._watch is not None:
            self._watch.failed(error)
        try:
            self._control.report_failure(line)
        except CommunicationError as lost:  # the store is gone with its host: the others know already
            self.log.debug("failure.unreported", error=line, reason=str(lost))

    def plan_built(self, plan: Plan) -> None:
        """Note a plan that all ranks agreed on and tell the observers."""
        self._plans.append(plan)
        self.log.debug("plan.built", partitioner=plan.partitioner, fingerprint=plan.fingerprint)
        self.registry.hook.shardrt_plan_built(runtime=self, plan=plan)

    def _rank_failed(self, rank: int, error: str) -> None:
        if hasattr(self, "registry"):
            self.registry.hook.shardrt_rank_failed(runtime=self, rank=rank, error=error)

    def _fields(self, limits: RuntimeConfig, *, recording: bool) -> dict[str, Field]:
        same_install = "install the same versions in every rank's environment"
        same_call = "pass the same arguments to Runtime on every rank"
        values: dict[str, tuple[Any, str]] = {
            "shardrt version": (shardrt.__version__, same_install),
            "torch version": (torch.__version__, same_install),
            "partitioner": (self._chosen.described["partitioner"], same_call),
            "backend": (self._chosen.described["backend"], same_call),
            "schedule": (self._chosen.described["schedule"], same_call),
            "state format": (self._chosen.described["state_format"], same_call),
            "place": (self._chosen.described["place"], same_call),
            "device type": (self.device_type, same_call),
            "bucket_mb": (limits.bucket_mb, same_call),
            "timeout": (limits.timeout, same_call),
            "timeline": (recording, "switch the timeline on for every rank or for none, by argument or variable"),
            "plugins": (self.registry.versions(), same_install),
        }
        return {name: Field(value=value, fix=fix) for name, (value, fix) in values.items()}

    def _record(self, directory: Path) -> Recording:
        return Recording(directory, rank=self.rank, world_size=self.world_size, about=self._about())

    def _report_to(self, directory: Path | None) -> None:
        if self._watch is not None:
            versions = {"shardrt": shardrt.__version__, "torch": torch.__version__, "python": platform.python_version()}
            self._watch.directory = directory
            self._watch.about.update(self._about(), timeout=self._membership.control.timeout, versions=versions)

    def _about(self) -> dict[str, Any]:
        chosen = self._chosen.described
        return {
            "schedule": chosen["schedule"],
            "backend": {**chosen["backend"], "name": self._chosen.backend.name},
            "partitioner": chosen["partitioner"],
        }

    def _join_group(self) -> Any:
        record = self._chosen.backend_record
        if self._membership.process_group is not None or self._membership.store is None or record is None:
            return self._membership.process_group
        started = start_group(self._membership, record, timeout=self.timeout)
        self._owns_group = started is not None
        return started

    def _check_open(self) -> None:
        if self._closed:
            raise ConfigError("this runtime is closed; make a new one")


def _seconds(timeout: float) -> float:
    return RuntimeConfig(timeout=timeout).timeout


def _bytes(*megabytes: float | None) -> int | None:
    chosen = next((value for value in megabytes if value is not None), None)
    return None if chosen is None else int(chosen * 2**20)
