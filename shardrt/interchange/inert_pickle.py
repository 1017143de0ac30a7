"""Pickles as inert data: their opcodes are read, and nothing in them is imported, called or built.

Note [Inert pickles]: a pickle is a program for a small stack machine, and what makes it dangerous is two of its
powers: to import any name, and to call it. ``torch.distributed.checkpoint`` keeps its metadata as one, and torch keeps
the shape of every tensor in one. The reader here runs the same machine without those powers. A global is a
:class:`Name`, which holds two texts. A call, a new object and its state are a :class:`Record`, which holds what would
have been called and with what. So a hostile pickle yields odd records, which whoever takes them apart refuses by
comparing names, and it never runs. Dicts become :class:`Pairs`, since putting a key into a dict hashes it, and a few
hundred bytes can describe a tuple whose hash takes for ever. For the same reason nothing here compares or prints what
it reads by walking through it.
"""

from __future__ import annotations

import pickletools
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from shardrt.errors import CheckpointError


@attrs.frozen
class Name:
    """What a pickle calls a global: never looked up."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}.{self.name}"


@attrs.frozen(eq=False, repr=False)
class Pairs:
    """A dict, as its pairs in order."""

    pairs: list[tuple[Any, Any]] = attrs.field(factory=list)


@attrs.frozen(eq=False, repr=False)
class Reference:
    """A persistent id: what torch puts in place of a tensor's bytes."""

    id: Any


@attrs.define(eq=False, repr=False)
class Record:
    """An object that a pickle would have made: by calling what, with which arguments, and given which state."""

    made_by: Any
    args: tuple[Any, ...]
    state: Any = None
    items: Pairs = attrs.field(factory=Pairs)

    def is_a(self, *names: str) -> bool:
        """Whether it would have been made by one of these ``module.name``."""
        return isinstance(self.made_by, Name) and str(self.made_by) in names


def read_inert(data: bytes, *, where: str) -> Any:
    """What a pickle describes, as plain values, lists, tuples, :class:`Pairs`, :class:`Name` and :class:`Record`.

    Example:
        >>> import pickle, os
        >>> from shardrt.interchange.inert_pickle import read_inert
        >>> class Evil:
        ...     def __reduce__(self):
        ...         return os.system, ("rm -rf /",)
        >>> record = read_inert(pickle.dumps(Evil()), where="a file")
        >>> str(record.made_by), record.args
        ('posix.system', ('rm -rf /',))
    """
    machine = _Machine(where=where)
    try:
        for opcode, argument, _ in pickletools.genops(data):
            if opcode.name == "STOP":
                return machine.result()
            machine.run(opcode.name, argument)
    except CheckpointError:
        raise
    except Exception as error:
        # pickletools raises whatever comes to its mind on bytes that are no pickle.
        raise CheckpointError(f"{where} is not a pickle that can be read: {error or type(error).__name__}") from None
    raise CheckpointError(f"{where} is cut off: the pickle in it has no end")


def told(value: Any) -> str:
    """What an inert value is, for messages: short, however large or deep it is.

    Example:
        >>> from shardrt.interchange.inert_pickle import Name, Record, told
        >>> told(Record(Name("os", "system"), ("ls",))), told([1, 2])
        ("an object made by 'os.system'", 'a list')
    """
    if isinstance(value, Name):
        return f"the name {str(value)[:100]!r}"
    if isinstance(value, Record):
        return f"an object made by {str(value.made_by)[:100]!r}" if isinstance(value.made_by, Name) else "an object"
    if isinstance(value, int) and value.bit_length() > 64:
        return f"a number of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    if isinstance(value, (str, bytes)):
        return repr(value[:100])
    return "a dict" if isinstance(value, Pairs) else f"a {type(value).__name__}"


_MARK = object()


@attrs.define
class _Machine:
    """The stack machine of a pickle without the power to import or call. See Note [Inert pickles]."""

    where: str
    stack: list[Any] = attrs.field(factory=list)
    memo: dict[int, Any] = attrs.field(factory=dict)

    def run(self, opcode: str, argument: Any) -> None:
        if opcode in _CONSTANTS:
            self.stack.append(_CONSTANTS[opcode])
        elif opcode in _LITERALS:
            self.stack.append(argument)
        elif opcode in _ACTIONS:
            _ACTIONS[opcode](self, argument)
        elif opcode not in ("PROTO", "FRAME"):
            raise CheckpointError(f"{self.where} has a pickle with the opcode {opcode}, which is not read from there")

    def result(self) -> Any:
        value = self.pop()
        if self.stack:
            raise CheckpointError(f"{self.where} has a pickle that leaves values behind")
        return value

    def pop(self) -> Any:
        value = self.stack.pop()
        if value is _MARK:
            raise CheckpointError(f"{self.where} has a pickle with a mark in place of a value")
        return value

    def top(self) -> Any:
        value = self.pop()
        self.stack.append(value)
        return value

    def pop_to_mark(self) -> list[Any]:
        at = len(self.stack) - 1
        while self.stack[at] is not _MARK:
            at -= 1
            if at < 0:
                raise CheckpointError(f"{self.where} has a pickle that lacks a mark")
        values = self.stack[at + 1 :]
        del self.stack[at:]
        return values

    def pop_some(self, count: int) -> list[Any]:
        return [self.pop() for _ in range(count)][::-1]

    def memoize(self, argument: int | None) -> None:
        self.memo[len(self.memo) if argument is None else argument] = self.top()

    def recall(self, argument: int) -> None:
        self.stack.append(self.memo[argument])

    def name(self, argument: str) -> None:
        module, _, name = argument.partition(" ")
        self.stack.append(Name(module, name))

    def name_from_stack(self, _: None) -> None:
        module, name = self.pop_some(2)
        if not (isinstance(module, str) and isinstance(name, str)):
            raise CheckpointError(f"{self.where} has a pickle that names a global by {told(module)} and {told(name)}")
        self.stack.append(Name(module, name))

    def record(self, _: None) -> None:
        made_by, args = self.pop_some(2)
        if not isinstance(args, tuple):
            raise CheckpointError(f"{self.where} has a pickle that calls {told(made_by)} with {told(args)}")
        self.stack.append(Record(made_by, args))

    def build(self, _: None) -> None:
        target, state = self.pop_some(2)
        if not isinstance(target, Record) or target.state is not None:
            raise CheckpointError(f"{self.where} has a pickle that gives a state to {told(target)}")
        target.state = state
        self.stack.append(target)

    def extend(self, values: list[Any]) -> None:
        target = self.top()
        if not isinstance(target, list):
            raise CheckpointError(f"{self.where} has a pickle that appends to {told(target)}")
        target.extend(values)

    def set_items(self, flat: list[Any]) -> None:
        target = self.top()
        pairs = target.items if isinstance(target, Record) else target
        if not isinstance(pairs, Pairs) or len(flat) % 2:
            raise CheckpointError(f"{self.where} has a pickle that sets items of {told(target)}")
        pairs.pairs.extend(zip(flat[::2], flat[1::2], strict=True))


_CONSTANTS: Mapping[str, Any] = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": (), "MARK": _MARK}
_LITERALS = {
    *("BININT", "BININT1", "BININT2", "LONG1", "LONG4", "BINFLOAT"),
    *("SHORT_BINUNICODE", "BINUNICODE", "BINUNICODE8", "SHORT_BINBYTES", "BINBYTES", "BINBYTES8"),
}
_ACTIONS: Mapping[str, Callable[[_Machine, Any], None]] = {
    "EMPTY_DICT": lambda machine, _: machine.stack.append(Pairs()),
    "EMPTY_LIST": lambda machine, _: machine.stack.append([]),
    "TUPLE": lambda machine, _: machine.stack.append(tuple(machine.pop_to_mark())),
    "TUPLE1": lambda machine, _: machine.stack.append(tuple(machine.pop_some(1))),
    "TUPLE2": lambda machine, _: machine.stack.append(tuple(machine.pop_some(2))),
    "TUPLE3": lambda machine, _: machine.stack.append(tuple(machine.pop_some(3))),
    "APPEND": lambda machine, _: machine.extend([machine.pop()]),
    "APPENDS": lambda machine, _: machine.extend(machine.pop_to_mark()),
    "SETITEM": lambda machine, _: machine.set_items(machine.pop_some(2)),
    "SETITEMS": lambda machine, _: machine.set_items(machine.pop_to_mark()),
    "MEMOIZE": _Machine.memoize,
    "BINPUT": _Machine.memoize,
    "LONG_BINPUT": _Machine.memoize,
    "BINGET": _Machine.recall,
    "LONG_BINGET": _Machine.recall,
    "GLOBAL": _Machine.name,
    "STACK_GLOBAL": _Machine.name_from_stack,
    "REDUCE": _Machine.record,
    "NEWOBJ": _Machine.record,
    "BUILD": _Machine.build,
    "BINPERSID": lambda machine, _: machine.stack.append(Reference(machine.pop())),
}
