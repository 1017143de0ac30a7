"""Which ranks this process trains with: a group it was given, the default one, torchrun's, or itself alone."""

from __future__ import annotations

import os
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from shardrt.comm.bounded import within
from shardrt.comm.control import LocalControl, StoreControl
from shardrt.errors import CommunicationError, ConfigError
from shardrt.registry.records import BackendRecord

_GRACE_SECONDS = 5.0
"""How much longer than torch's own timeout a call of torch may take, so that torch's error is the one that is heard."""
_END_SECONDS = 10.0
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@attrs.frozen(kw_only=True)
class Membership:
    """This process's place among the ranks, before any communicator exists."""

    rank: int
    world_size: int
    origin: str
    """Where the group comes from, for messages."""
    control: StoreControl | LocalControl
    process_group: Any = None
    """The group that was found; None where there is none yet, or none is needed."""
    store: Any = None
    """Where a group of our own is to be started; None otherwise."""


def find_membership(process_group: Any, *, timeout: float, environ: Mapping[str, str] | None = None) -> Membership:
    """A given group first, then the default one, then the launcher's variables, else this process alone."""
    environ = os.environ if environ is None else environ
    if process_group is not None:
        return _from_group(process_group, "the process group it was given", timeout)
    if dist.is_available() and dist.is_initialized():
        return _from_group(dist.group.WORLD, "the default process group", timeout)
    if environ.get("RANK") and not environ.get("WORLD_SIZE"):
        raise ConfigError(
            f"RANK={environ['RANK']} is set but WORLD_SIZE is not, so this process cannot know whether it is alone; "
            "start with torchrun, or unset RANK"
        )
    if _whole_number(environ, "WORLD_SIZE", "1") > 1:
        return _from_launcher(environ, timeout)
    return Membership(rank=0, world_size=1, origin="this process alone", control=LocalControl())


def _from_group(process_group: Any, origin: str, timeout: float) -> Membership:
    if not isinstance(process_group, dist.ProcessGroup):
        raise ConfigError(
            f"process_group={process_group!r} is not a group this process belongs to; call Runtime only on the ranks "
            "that torch.distributed.new_group was given"
        )
    rank, world_size = process_group.rank(), process_group.size()
    if world_size == 1:
        return Membership(rank=0, world_size=1, origin=origin, control=LocalControl(), process_group=process_group)
    control = StoreControl(process_group.get_group_store(), rank=rank, world_size=world_size, timeout=timeout)
    return Membership(rank=rank, world_size=world_size, origin=origin, control=control, process_group=process_group)


def _from_launcher(environ: Mapping[str, str], timeout: float) -> Membership:
    missing = [name for name in _LAUNCHER_VARIABLES if not environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={environ['WORLD_SIZE']} asks for several ranks, but {', '.join(missing)} "
            f"{'is' if len(missing) == 1 else 'are'} not set; start with torchrun, or unset WORLD_SIZE"
        )
    rank, world_size = _whole_number(environ, "RANK"), _whole_number(environ, "WORLD_SIZE")
    try:
        store, rank, world_size = within(
            timeout + _GRACE_SECONDS,
            "meeting the other ranks at the launcher's address",
            lambda: next(rendezvous("env://", rank=rank, world_size=world_size, timeout=timedelta(seconds=timeout))),
            rank=rank,
        )
    except RuntimeError as error:  # torch's DistNetworkError and DistStoreError
        if "clients joined" in str(error):  # this rank hosts the store, and waited there for the others
            raise CommunicationError(
                f"rank {rank} of {world_size} has not met all other ranks within {timeout:g} s: {error}; see why they "
                "did not start, or raise Runtime(timeout=...)"
            ) from error
        raise CommunicationError(
            f"rank {rank} of {world_size} could not reach the store at {environ['MASTER_ADDR']}:"
            f"{environ['MASTER_PORT']} within {timeout:g} s: {error}; check that rank 0 runs and that the address and "
            "port can be reached"
        ) from error
    return Membership(
        rank=rank,
        world_size=world_size,
        origin="the launcher's variables",
        control=StoreControl(PrefixStore("shardrt", store), rank=rank, world_size=world_size, timeout=timeout),
        store=store,
    )


def _whole_number(environ: Mapping[str, str], name: str, default: str = "") -> int:
    value = environ.get(name) or default
    if not value.isdigit():
        raise ConfigError(f"{name}={value!r} is not a whole number; start with torchrun, or unset it")
    return int(value)


def start_group(membership: Membership, record: BackendRecord, *, timeout: float) -> Any:
    """Start the process group a backend needs, from the launcher's variables."""
    if record.process_group is None:
        return None
    if record.prepare is not None:
        record.prepare()
    device = torch.accelerator.current_device_index() if torch.accelerator.is_available() else None

    def start() -> None:
        if device is not None:
            torch.accelerator.set_device_index(device)  # which one is in use is each thread's own business
        dist.init_process_group(
            record.process_group,
            # Numbered: a second group on the launcher's store must not meet the keys that the first has left there.
            store=PrefixStore(f"shardrt_group/{membership.control.number}", membership.store),
            rank=membership.rank,
            world_size=membership.world_size,
            timeout=timedelta(seconds=timeout),
        )

    what = f"starting a {record.process_group} process group"
    try:
        within(timeout + _GRACE_SECONDS, what, start, rank=membership.rank)
    except dist.DistError as error:
        raise CommunicationError(
            f"rank {membership.rank}: {what} of {membership.world_size} ranks failed: {error}; a rank has ended, or "
            "takes longer to come; look at the other ranks, or raise Runtime(timeout=...)"
        ) from error
    return dist.group.WORLD


def end_group(group: Any = None, *, rank: int, log: Any) -> None:
    """Destroy a process group that the runtime started, by default the default one. One that waits for operations of
    lost peers is left alone: the end of the process ends it."""
    try:
        within(_END_SECONDS, "ending the process group", partial(dist.destroy_process_group, group), rank=rank)
    except CommunicationError as error:
        log.warning("process_group.left", reason=str(error))


def check_group_fits(process_group: Any, record: BackendRecord, origin: str) -> None:
    """A backend that speaks NCCL cannot work on a group that speaks Gloo."""
    if record.process_group is None or process_group is None:
        return
    spoken = str(dist.get_backend_config(process_group))
    if record.process_group not in spoken:
        raise ConfigError(
            f"backend {record.name!r} needs a process group that speaks {record.process_group}, but {origin} has "
            f"{spoken}; pass process_group=torch.distributed.new_group(backend={record.process_group!r}), or choose "
            "a backend that fits"
        )


def default_device_type(device: str | None) -> str:
    """The type of the device that was asked for, else the accelerator's, else the CPU."""
    if device is not None:
        # Not torch.device(...).type: a vendor's type ("npu") is unknown to torch until its package is imported.
        return device.partition(":")[0]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "cpu" if accelerator is None else accelerator.type
