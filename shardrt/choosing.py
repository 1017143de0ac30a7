"""From names, mappings and instances to the plugins in use."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import attrs
import torch

from shardrt.comm.asking import Answers, ask_ranks
from shardrt.comm.availability import backends_to_ask, choose_backend, require_available
from shardrt.comm.membership import Membership, check_group_fits
from shardrt.config import Choice
from shardrt.errors import ConfigError, PluginError
from shardrt.protocols import (
    Availability,
    Communicator,
    ControlChannel,
    Group,
    JoinPolicy,
    Partitioner,
    Place,
    Schedule,
    StateFormat,
)
from shardrt.registry import BackendRecord, Registry


@attrs.frozen(kw_only=True)
class ChosenBackend:
    """A backend by its record, or a communicator that the user made."""

    name: str
    record: BackendRecord | None
    make: Callable[[Group], Communicator]
    reason: str
    to_ask: tuple[BackendRecord, ...] = ()
    """Backends of which all ranks must tell whether they suit them. Until then this one is only supposed."""
    settle: Callable[[Answers], ChosenBackend] | None = None
    """The backend that is taken, once they have."""


@attrs.frozen(kw_only=True)
class Chosen:
    """The three plugins of a runtime, and how each was chosen, in a form that ranks can compare."""

    partitioner: Partitioner
    schedule: Schedule
    backend: ChosenBackend
    state_format: StateFormat
    make_place: Callable[[str], Place]
    """A place for checkpoints at a path or an address."""
    described: Mapping[str, Any]

    @property
    def backend_record(self) -> BackendRecord | None:
        """The backend's record; None for a communicator that the user made."""
        return self.backend.record

    @property
    def reason(self) -> str:
        """Why this backend."""
        return self.backend.reason

    def settled(self, control: ControlChannel) -> Chosen:
        """The same with the backend that suits all ranks. Every rank calls this at the same point."""
        if not self.backend.to_ask or self.backend.settle is None:
            return self
        backend = self.backend.settle(ask_ranks(self.backend.to_ask, control))
        described = {**self.described, "backend": {**self.described["backend"], "chosen": backend.name}}
        return attrs.evolve(self, backend=backend, described=described)

    def make_communicator(self, group: Group) -> Communicator:
        """The communicator of the chosen backend."""
        return self.backend.make(group)


def choose(
    registry: Registry,
    membership: Membership,
    *,
    partitioner: Any,
    backend: Any,
    schedule: Any,
    state_format: Any,
    place: Any,
    device_type: str,
) -> Chosen:
    """Look everything up, and refuse what cannot run here."""
    _check_device_type(registry, device_type)
    chosen = _choose_backend(registry, membership, backend, device_type)
    return Chosen(
        partitioner=choose_partitioner(registry, partitioner),
        schedule=_make("schedule", schedule, registry.schedules.get, Schedule),
        backend=chosen,
        state_format=choose_state_format(registry, state_format),
        make_place=choose_place(registry, place),
        described={
            "partitioner": described(partitioner),
            "schedule": described(schedule),
            "backend": {**described(backend), "chosen": chosen.name},
            "state_format": described(state_format),
            "place": described(place),
        },
    )


def choose_join_policy(registry: Registry, given: Any) -> JoinPolicy:
    """The policy of a name, of a mapping of a name and options, or given as it is."""
    made: JoinPolicy = _make("join policy", given, registry.join_policies.get, JoinPolicy)
    return made


def _check_device_type(registry: Registry, device_type: str) -> None:
    offered = {entry.record.device_type for entry in registry.backends} - {"*"}
    if device_type in offered:
        return
    try:
        torch.device(device_type)
    except RuntimeError:
        raise ConfigError(
            f"device type {device_type!r} is unknown to torch and to every installed backend; "
            f"backends are installed for: {', '.join(sorted(offered))}"
        ) from None


def _make(kind: str, given: Any, find: Callable[[str], Any], protocol: type) -> Any:
    if not isinstance(given, (str, Mapping, Choice)):
        if not isinstance(given, protocol) or isinstance(given, type):
            raise ConfigError(
                f"{kind}={given!r} is neither a name nor a {kind}; a {kind} has {_members(protocol)}: "
                "see shardrt.protocols"
            )
        return given
    choice = Choice.parse(kind, given)
    made = call_factory(kind, choice, find(choice.name).factory)
    if not isinstance(made, protocol):
        raise PluginError(
            f"the factory of {kind} {choice.name!r} made a {type(made).__name__}, which is no {kind}: that has "
            f"{_members(protocol)}; upgrade or report the plugin"
        )
    return made


def choose_partitioner(registry: Registry, given: Any) -> Partitioner:
    """A partitioner by name, by name with options, or as it is.

    Example:
        >>> import shardrt
        >>> from shardrt.choosing import choose_partitioner
        >>> choose_partitioner(shardrt.load_registry(), {"name": "flat", "align": 1}).cuts_parameters
        True
    """
    made: Partitioner = _make("partitioner", given, registry.partitioners.get, Partitioner)
    return made


def choose_state_format(registry: Registry, given: Any) -> StateFormat:
    """A state format by name, by name with options, or as it is.

    Example:
        >>> import shardrt
        >>> from shardrt.choosing import choose_state_format
        >>> choose_state_format(shardrt.load_registry(), "safetensors").suffix
        '.safetensors'
    """
    made: StateFormat = _make("state_format", given, registry.state_formats.get, StateFormat)
    return made


def choose_place(registry: Registry, given: Any = "files") -> Callable[[str], Place]:
    """What makes places of the chosen kind: by name, by name with options, or a function of the path.

    Example:
        >>> import shardrt
        >>> from shardrt.choosing import choose_place
        >>> choose_place(shardrt.load_registry())("memory://checkpoints").list()
        []
    """
    if callable(given):
        make: Callable[[str], Place] = given
        return make
    if not isinstance(given, (str, Mapping, Choice)):
        raise ConfigError(f"place={given!r} is neither a name nor a function that makes a place from a path")
    choice = Choice.parse("place", given)
    record = registry.places.get(choice.name)
    return lambda root: call_factory("place", choice, record.factory, root)


def call_factory(kind: str, choice: Choice, factory: Callable[..., Any], *arguments: Any) -> Any:
    """Call a plugin's factory with the user's options; an option it does not take is a clear error."""
    try:
        inspect.signature(factory).bind(*arguments, **choice.options)
    except TypeError as error:
        taken = list(inspect.signature(factory).parameters)[len(arguments) :]
        raise ConfigError(
            f"{kind} {choice.name!r} does not take these options: {error}; "
            + (f"it takes: {', '.join(taken)}" if taken else "it takes none")
        ) from error
    return factory(*arguments, **choice.options)


def _choose_backend(registry: Registry, membership: Membership, given: Any, device_type: str) -> ChosenBackend:
    if isinstance(given, BackendRecord):
        return _named(given, Choice(name=given.name), membership, "the record it was given")
    if not isinstance(given, (str, Mapping, Choice)):
        return _from_instance(given, membership)
    choice = Choice.parse("backend", given)
    if choice.name == "auto":
        return _automatic([entry.record for entry in registry.backends], choice, membership, device_type)
    record = registry.backends.get(device_type, choice.name)
    require_available(record)
    return _named(record, choice, membership, f"{choice.name} was asked for by name")


def _automatic(records: list[BackendRecord], choice: Choice, membership: Membership, device_type: str) -> ChosenBackend:
    def settle(answers: Answers) -> ChosenBackend:
        record, reason = choose_backend(records, device_type, membership.world_size, answers)
        return _from_record(record, attrs.evolve(choice, name=record.name), membership, reason)

    to_ask = [_asking(one, choice) for one in backends_to_ask(records, device_type, membership.world_size)]
    supposed = settle({record.key: Availability.no("not asked yet", fix="wait") for record in to_ask})
    return attrs.evolve(supposed, to_ask=tuple(to_ask), settle=settle)


def _named(record: BackendRecord, choice: Choice, membership: Membership, reason: str) -> ChosenBackend:
    made = _from_record(record, choice, membership, reason)
    if record.suits is None or membership.world_size == 1:
        return made

    def settle(answers: Answers) -> ChosenBackend:
        require_available(record, answers[record.key])
        return made

    return attrs.evolve(made, to_ask=(_asking(record, choice),), settle=settle)


def _asking(record: BackendRecord, choice: Choice) -> BackendRecord:
    """The record whose questions know the user's options, as far as they want to."""
    assert record.introduce is not None and record.suits is not None
    return attrs.evolve(
        record, introduce=_with_options(record.introduce, choice), suits=_with_options(record.suits, choice)
    )


def _with_options(function: Callable[..., Any], choice: Choice) -> Callable[..., Any]:
    try:
        taken = inspect.signature(function).parameters
    except ValueError:  # written in C, without a signature
        return function
    return partial(function, **{name: value for name, value in choice.options.items() if name in taken})


def _from_record(record: BackendRecord, choice: Choice, membership: Membership, reason: str) -> ChosenBackend:
    smallest, largest = record.world_sizes
    if membership.world_size < smallest or (largest is not None and membership.world_size > largest):
        limits = f"at least {smallest}" if largest is None else f"{smallest} to {largest}"
        raise ConfigError(
            f"backend {record.name!r} takes {limits} ranks, but there are {membership.world_size} "
            f"({membership.origin}); choose another, or backend='auto'"
        )
    check_group_fits(membership.process_group, record, membership.origin)
    if membership.world_size > 1 and record.process_group is None and membership.process_group is None:
        reason += "; it brings its own connections"
    return ChosenBackend(
        name=record.name,
        record=record,
        make=lambda group: call_factory("backend", choice, record.factory, group),
        reason=reason,
    )


def _from_instance(given: Any, membership: Membership) -> ChosenBackend:
    if isinstance(given, type) or not isinstance(given, Communicator):
        raise ConfigError(
            f"backend={given!r} is neither a name, a BackendRecord nor a communicator; a communicator has "
            f"{_members(Communicator)}: see shardrt.protocols"
        )
    if (given.rank, given.world_size) != (membership.rank, membership.world_size):
        raise ConfigError(
            f"the communicator is rank {given.rank} of {given.world_size}, but this process is rank "
            f"{membership.rank} of {membership.world_size} ({membership.origin}); make it for the same group"
        )
    name = str(getattr(given, "name", type(given).__name__))
    return ChosenBackend(name=name, record=None, make=lambda _: given, reason=f"the {name} it was given")


def described(given: Any) -> dict[str, Any]:
    """How a plugin was chosen, in a form that ranks can compare."""
    if isinstance(given, (str, Mapping, Choice)):
        return Choice.parse("plugin", given).to_json()
    kind = type(given)
    return {"name": str(getattr(given, "name", "")), "class": f"{kind.__module__}.{kind.__qualname__}"}


def _members(protocol: type) -> str:
    names = [name for name in (*vars(protocol).get("__annotations__", {}), *vars(protocol)) if not name.startswith("_")]
    return ", ".join(dict.fromkeys(names))
