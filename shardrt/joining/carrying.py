"""Objects beside the optimizers whose state depends on how many batches a rank had: schedulers, a GradScaler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from shardrt.errors import ConfigError
from shardrt.joining.values import pack, unpack
from shardrt.protocols import Communicator


@runtime_checkable
class Stateful(Protocol):
    """What has a state that can be taken and given."""

    def state_dict(self) -> Any:
        """Its state."""
        ...

    def load_state_dict(self, state_dict: Any) -> Any:
        """Take over a state."""
        ...


class Carried:
    """What all ranks take over, when a block ends, from a rank that has trained to its end."""

    def __init__(self, objects: Sequence[object], communicator: Communicator) -> None:
        if isinstance(objects, Stateful):
            raise ConfigError(f"carry is a list, got a {type(objects).__name__}; pass carry=[it]")
        for one in objects:
            if not isinstance(one, Stateful):
                raise ConfigError(
                    f"carry takes objects with state_dict and load_state_dict (schedulers, a GradScaler), got a "
                    f"{type(one).__name__}"
                )
        self._objects: list[Stateful] = [one for one in objects if isinstance(one, Stateful)]
        self._communicator = communicator

    def check(self) -> None:
        """Raise if the state of an object is of a kind that cannot be sent: better before training than after."""
        for one in self._objects:
            self._packed(one)

    def kinds(self) -> list[str]:
        """Classes of the objects, which ranks compare."""
        return [type(one).__qualname__ for one in self._objects]

    def share(self, source: int) -> None:
        """Everyone takes over the states of one rank."""
        if not self._objects:
            return
        here = self._communicator.rank == source
        states = [self._packed(one) for one in self._objects] if here else None
        sent = self._communicator.exchange("states carried out of join", states)[source]
        if not here:
            for one, state in zip(self._objects, sent, strict=True):
                one.load_state_dict(unpack(state))

    def _packed(self, one: Stateful) -> Any:
        try:
            return pack(one.state_dict())
        except TypeError as error:
            raise ConfigError(
                f"the state of the {type(one).__name__} in carry has {error} in it, which cannot be sent to other "
                "ranks; leave it out of carry and step it alike on all ranks, once per epoch for instance"
            ) from None
