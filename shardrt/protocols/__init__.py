"""The plain objects that run once hooks have registered them: partitioner, communicator, schedule and so on.

Plugins implement these by shape: no base class is needed. Nothing here imports torch at run time, so that a plugin
module can be listed without loading it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import attrs

from shardrt.plan.params import ParamSpec
from shardrt.plan.partition import Partition
from shardrt.protocols.storage import FileLayout as FileLayout
from shardrt.protocols.storage import Place as Place
from shardrt.protocols.storage import PlaceFile as PlaceFile
from shardrt.protocols.storage import StateFormat as StateFormat
from shardrt.protocols.storage import TensorSpec as TensorSpec

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from shardrt.comm.capabilities import Capabilities
    from shardrt.comm.traffic import Traffic
    from shardrt.flight import FlightRecorder
    from shardrt.timeline import Timeline

ReduceOp = Literal["sum", "max", "min"]


@attrs.frozen(kw_only=True)
class PartitionRequest:
    """Everything a partitioner may look at. New fields get defaults, so that older partitioners keep working.

    Example:
        >>> from shardrt import ParamSpec, PartitionRequest
        >>> params = (ParamSpec(name="w", shape=(4, 2), dtype="float32"),)
        >>> PartitionRequest(params=params, world_size=2).whole_parameters
        False
    """

    params: tuple[ParamSpec, ...]
    world_size: int
    whole_parameters: bool = False
    """The optimizer's update looks at more than one element: parameters must not be cut."""
    bucket_bytes: int | None = None
    """The size of the buckets that will travel; ``None`` is one bucket per dtype."""
    load: tuple[int, ...] = ()
    """Bytes each rank owns already (a parameter group added later); empty means none."""


@runtime_checkable
class Partitioner(Protocol):
    """Decides who owns what. Pure and deterministic: the same request gives the same partition on every rank."""

    name: str
    cuts_parameters: bool
    """Whether it may give slices of one parameter to several ranks."""

    def partition(self, request: PartitionRequest) -> Partition:
        """Cover every element of every parameter of the request exactly once."""
        ...


@runtime_checkable
class Work(Protocol):
    """An operation under way.

    One that knows may also say whether it has ended, in an attribute ``arrived``: see
    :func:`shardrt.comm.waiting.has_arrived`.
    """

    def wait(self) -> None:
        """Block until done; raise :class:`~shardrt.errors.CommunicationError` on failure or after the timeout.

        Waiting again on a finished operation returns at once.
        """
        ...


@runtime_checkable
class Communicator(Protocol):
    """Moves bytes between the ranks of one group. Ranks here are group ranks, 0 to ``world_size - 1``.

    Every method is called in the same order on all ranks. Buffers are flat, contiguous and changed in place; they
    must not be touched between the call and the end of ``wait``. ``splits`` are the elements of each rank's run, in
    rank order; they may be uneven and may be zero, and their sum is the size of the buffer.
    """

    rank: int
    world_size: int
    capabilities: Capabilities
    traffic: Traffic

    def reduce_scatter(
        self, buffer: Tensor, splits: Sequence[int], *, output: Tensor | None = None, average: bool = False
    ) -> Work:
        """Afterwards ``output`` holds the sum (or average) over all ranks of this rank's run.

        With an ``output`` (flat, of this rank's run's size) the buffer is left as it was; without one the own run
        of the buffer is the output, and the other runs are undefined afterwards.
        """
        ...

    def all_gather(self, buffer: Tensor, splits: Sequence[int]) -> Work:
        """Afterwards every run holds what its owner had in it."""
        ...

    def all_reduce(self, buffer: Tensor, *, op: ReduceOp = "sum", average: bool = False) -> Work:
        """Afterwards the whole buffer holds the reduction over all ranks, the same bits everywhere."""
        ...

    def all_to_all(self, received: Sequence[Tensor], sent: Sequence[Tensor]) -> Work:
        """Send ``sent[r]`` to each rank ``r`` and fill ``received[r]`` from it; sizes match pairwise."""
        ...

    def broadcast(self, buffer: Tensor, source: int) -> Work:
        """Afterwards the buffer holds what the source rank had in it."""
        ...

    def barrier(self) -> None:
        """Return once every rank has called it."""
        ...

    def exchange(self, topic: str, value: Any) -> list[Any]:
        """Every rank's small JSON-able value, in rank order. ``topic`` must be the same everywhere."""
        ...

    def close(self) -> None:
        """Give back threads and handles; the process group belongs to whoever made it."""
        ...


class PieceMover(Protocol):
    """Moves buffers that are not in one place. See Note [In pieces] in :mod:`shardrt.comm.pieces`."""

    def reduce_scatter_pieces(
        self, pieces: Sequence[Tensor], splits: Sequence[int], *, output: Tensor, average: bool = False
    ) -> Work:
        """As ``reduce_scatter`` of the pieces laid side by side, which are left as they were.

        Pieces are flat and contiguous, and may be empty. No piece belongs to two runs, and their sizes are the same on
        all ranks. They must not be touched before the end of ``wait``; nobody holds them after it.
        """
        ...

    def all_gather_from(self, own: Tensor, runs: Sequence[Tensor]) -> Work:
        """As ``all_gather``, into one flat run for each rank, wherever those are; what this rank gives is ``own``.

        Afterwards its own run holds that too. ``own`` may be that run itself, and shares no memory with the others.
        """
        ...


@runtime_checkable
class PieceCommunicator(Communicator, PieceMover, Protocol):
    """A communicator that need not have a buffer in one place. The core does without where a backend does not."""


@runtime_checkable
class SharedAllocator(Protocol):
    """What a communicator may offer besides: memory that its peers read where it is, without copying it first."""

    def allocate(self, numel: int, dtype: torch.dtype) -> Tensor | None:
        """A flat tensor on the CPU, all zero; None where this communicator has no such memory, or no room for it.

        Operations on it, or on views of it, are faster, with the same results. Ranks need not allocate alike: one may
        get such memory where another gets None. It goes back to the system with the last tensor that holds it.
        """
        ...


class RunView(Protocol):
    """The runs of all ranks as one buffer, each where its owner keeps it."""

    @property
    def whole(self) -> Tensor:
        """All runs, one behind the other. What is written to it stays on this rank, until ``renew``."""
        ...

    def complete(self) -> None:
        """Fetch the few bytes that cannot be shown where they are; owners must have written what they are to hold."""
        ...

    def renew(self) -> None:
        """Show what owners have again, in place of whatever was written to ``whole`` here."""
        ...


@runtime_checkable
class RunViewer(Protocol):
    """What a communicator with shared memory may offer besides: gathering without moving anything."""

    def view_runs(self, asked: Sequence[tuple[Tensor, Sequence[int]]]) -> list[RunView | None]:
        """For each of these, this rank's run and the sizes of all, a view of everybody's; every rank calls it alike.

        A run comes from :func:`shardrt.comm.viewed.allocate_run`; from elsewhere it cannot be shown.

        None, on all ranks, where there can be none. Views show what owners have at any moment: whoever reads one makes
        sure, by other operations, that owners are done with writing before, and do not write again until it is done.
        """
        ...


class StepEngine(Protocol):
    """What a schedule drives: the buckets of one sharded optimizer and the three things to do with each."""

    @property
    def bucket_count(self) -> int:
        """Buckets are numbered from 0, in the order in which backward fills them."""
        ...

    def reduce(self, bucket: int) -> Work:
        """Start reducing a bucket's gradients onto their owners. A bucket that is already reduced costs nothing."""
        ...

    def update(self, buckets: Sequence[int] | None = None) -> None:
        """Step the local optimizer over this rank's shards of these buckets, or of all; they must be reduced."""
        ...

    def gather(self, bucket: int) -> Work:
        """Start spreading a bucket's new parameters from their owners to everyone."""
        ...

    @property
    def gathers_apart(self) -> bool:
        """Whether gathers go over a communicator of their own. If not, the schedule keeps reductions and gathers in
        one order, the same on all ranks."""
        ...

    def gather_for_readers(self, bucket: int, started: Work | None = None) -> None:
        """Start a gather that nobody need wait for: whoever reads a parameter of the bucket does so by itself.

        ``started``: what :meth:`gather` returned, if it was started already.
        """
        ...

    def reading_order(self) -> Sequence[int]:
        """The buckets in the order in which the next forward is going to read them, the same on all ranks. Asked once
        per step."""
        ...


@runtime_checkable
class Schedule(Protocol):
    """Decides when buckets are reduced, stepped and gathered."""

    name: str
    bucket_mb: float | None
    """The bucket size it works best with; ``None`` is one bucket per dtype. ``Runtime(bucket_mb=...)`` overrides it."""

    def step(self, engine: StepEngine) -> None:
        """One complete update: when this returns, whoever reads a parameter gets the same on all ranks."""
        ...


@runtime_checkable
class OverlappingSchedule(Schedule, Protocol):
    """A schedule that works during backward too. One instance serves all optimizers of a runtime: what it remembers
    between ``bucket_ready`` and ``step`` it must keep by engine.
    """

    gathers_apart: bool
    """Whether its gathers had better have a communicator of their own, since they are issued beside reductions. A
    backend may have only one: see :attr:`StepEngine.gathers_apart`."""
    updates_early: bool
    """Whether parameters are updated before ``step``, so that nothing can be done to the reduced gradients."""

    def bucket_ready(self, engine: StepEngine, bucket: int) -> None:
        """Inside backward: a bucket's gradients are there. Called for every bucket, in their order, on every rank."""
        ...


@runtime_checkable
class JoinPolicy(Protocol):
    """What ranks do when some of them have run out of inputs."""

    name: str

    def goes_on(self, active: int, world_size: int) -> bool:
        """Whether the ranks that still have inputs train on. Asked before each update while somebody has inputs."""
        ...

    def divisor(self, active: int, world_size: int) -> int:
        """What the sum of the gradients of the ``active`` ranks is divided by where gradients are averaged."""
        ...


@attrs.frozen(kw_only=True)
class Availability:
    """Whether a backend can run here and, if not, why and what would help.

    Example:
        >>> from shardrt.protocols import Availability
        >>> Availability.no("torch was built without NCCL", fix="install a CUDA build of torch").ok
        False
    """

    ok: bool
    reason: str = ""
    fix: str = ""

    @classmethod
    def yes(cls, reason: str = "") -> Availability:
        """It can run."""
        return cls(ok=True, reason=reason)

    @classmethod
    def no(cls, reason: str, *, fix: str) -> Availability:
        """It cannot, and this is what would make it."""
        return cls(ok=False, reason=reason, fix=fix)


class ControlChannel(Protocol):
    """Small JSON-able values between ranks, before and beside the communicator; knows who is missing."""

    rank: int
    world_size: int
    number: int
    """Tells the channels of one store apart: the same on all ranks."""
    failed: bool
    """Whether this rank or another has failed: nobody counts on this one, nor this one on the others, any more."""

    def exchange(self, topic: str, value: Any, *, timeout: float | None = None, to_all: bool = True) -> list[Any]:
        """Every rank's value, in rank order; an error naming the ranks that did not arrive in time.

        With ``to_all=False`` only the first rank gets the values, and the others None for each. Equal values may be
        one object: nobody changes what is returned.
        """
        ...

    def another(self) -> ControlChannel:
        """A channel for a conversation of its own, beside this one. Every rank opens it at the same point."""
        ...

    def among(self, groups: Sequence[Sequence[int]]) -> ControlChannel:
        """A channel for some of the ranks: the group that this one is in. Every rank opens it at the same point."""
        ...

    def on_failure(self, callback: Callable[[int, str], None]) -> None:
        """Call back with rank and error before a peer's failure is raised here."""
        ...

    def peer_failed(self, rank: int, error: str) -> None:
        """Note that a peer failed: calls back whoever asked for it."""
        ...

    def report_failure(self, error: str) -> None:
        """Tell the others, who may be waiting for this rank, that it will not come."""
        ...

    def raise_if_peer_failed(self) -> None:
        """Raise :class:`~shardrt.errors.PeerError` if another rank has reported a failure."""
        ...


class OpenAmong(Protocol):
    """Opens a communicator of another backend, for a backend that is made of others."""

    def __call__(
        self, groups: Sequence[Sequence[int]], backend: str | Mapping[str, Any], *, recorded: bool = False
    ) -> Communicator:
        """The communicator of the group that this rank is in. Every rank calls this at the same point.

        ``groups`` are lists of this group's ranks, in which each of them is once; ranks of the new communicator are
        places in its list. ``backend`` is a name, or a mapping of a name and options. Whoever opens it closes it.
        Unless it is to be ``recorded``, its operations are left out of timeline and flight recorder: those of the
        communicator that is made of it are there already.
        """
        ...


@attrs.frozen(kw_only=True)
class Group:
    """The ranks a communicator serves, as handed to a backend's factory.

    Example:
        >>> from shardrt import Group, load_registry
        >>> from shardrt.comm.control import LocalControl
        >>> alone = Group(rank=0, world_size=1, device_type="cpu", timeout=30.0, control=LocalControl())
        >>> load_registry().backends.get("cpu", "null").factory(alone).exchange("hello", 1)
        [1]
    """

    rank: int
    world_size: int
    device_type: str
    timeout: float
    """Seconds that any wait may take."""
    control: ControlChannel
    process_group: Any = None
    """A torch process group, or None for a single process."""
    number: int = 0
    """Tells the communicators of one process group apart: the same on all ranks, different for each of them."""
    timeline: Timeline | None = None
    """Where operations and waits are recorded; None while nobody wants to see them."""
    flight: FlightRecorder | None = None
    """Where the last operations are kept for when a wait fails; None on a single rank."""
    open_among: OpenAmong | None = None
    """Opens communicators of other backends, among some of these ranks or all; None where nobody offers it."""
