"""Large units are divided into parts, which come and go by themselves.

Note [Parts]: a unit is what a user has chosen, and often a whole block of a model. While it computes its parameters are
all there, and with the next one ahead those of two, though at any moment only one layer of it is at work. So a unit
with more parameters than travel together is divided at the modules inside it: those that are large enough are parts,
which are brought and put away around their own forward and backward as units are, and what is left (norms, biases,
small layers) comes and goes with the unit. The root is not divided, nor is a unit that stays between its forward and
its backward: it would be whole all the same.

Note [Parts that follow]: a module may be used without being called: ``nn.MultiheadAttention`` reads the weight of the
layer inside it. What is read so while a module around it computes would have to stay until all of backward has ended
(see Note [Lent parameters]). A part follows that module from then on: it is brought with it and put away with it.
Whoever wants a unit to stay wants its parts to, and a read of what stays is not heard of: there they follow too. In
evaluation units are brought whole, since torch's fast paths for it look at all parameters of a layer beforehand.

Note [Parts and compilers]: hooks end graphs (see Note [Hooks are not compiled]), and one per layer would leave little
to compile. A unit that is compiled, or is called from something that is, gives its parts up: their hooks go, and they
follow it.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Sequence
from types import FrameType

import attrs
import torch

from shardrt.sharding.units import Unit, units_among

_SMALLEST = 6
"""Parts have at least the sixth part of what travels together: each costs messages of its own."""
_COMPILER = ("_dynamo/eval_frame.py", "_dynamo\\eval_frame.py")


def divide(root: torch.nn.Module, units: Sequence[Unit], most: int) -> list[Unit]:
    """The units and the parts of those that have more than so many bytes. See Note [Parts].

    Example:
        >>> import torch
        >>> from shardrt.sharding.dividing import divide
        >>> from shardrt.sharding.units import find_units
        >>> block = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 8))
        >>> model = torch.nn.Sequential(block)
        >>> [(unit.name, unit.within, len(unit.params)) for unit in divide(model, find_units(model, [block]), 400)]
        [('', None, 0), ('0', None, 2), ('0.0', '0', 2), ('0.2', '0', 2)]
    """
    named = dict(root.named_parameters())
    chosen = {unit.module for unit in units}
    parts: dict[torch.nn.Module, str] = {}
    for unit in units[1:]:
        own = {named[name] for name in unit.params}
        if sum(param.nbytes for param in own) > most and not _is_compiled(unit.module):
            parts |= dict.fromkeys(_parts_of(unit.module, own, chosen, max(1, most // _SMALLEST)), unit.name)
    if not parts:
        return list(units)
    kept = {named[name] for unit in units for name in unit.params}
    left_out = [param for param in root.parameters() if param not in kept]
    found = {one.name: one for one in units_among(root, {*chosen, *parts} - {root}, set(left_out))}
    for unit in units:  # also where all that it had is in parts
        found.setdefault(unit.name, attrs.evolve(unit, params=()))
    names = [name for name, _ in root.named_modules() if name in found]
    return [attrs.evolve(found[name], within=parts.get(found[name].module)) for name in names]


def _parts_of(
    unit: torch.nn.Module, own: Collection[torch.Tensor], units: Collection[torch.nn.Module], least: int
) -> list[torch.nn.Module]:
    """Innermost first: a module is a part once what is left in it is large enough."""
    holders: dict[torch.Tensor, int] = {}
    for module in unit.modules():
        for param in module.parameters(recurse=False):
            holders[param] = holders.get(param, 0) + 1
    found: list[torch.nn.Module] = []
    seen: set[torch.nn.Module] = set()

    def left_in(module: torch.nn.Module) -> int:
        if module in seen or (module in units and module is not unit):
            return 0
        seen.add(module)
        # What several modules share is with the unit, or further out.
        size = sum(param.nbytes for param in module.parameters(recurse=False) if param in own and holders[param] == 1)
        size += sum(left_in(child) for child in module.children())
        if size < least or module is unit or isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
            return size
        found.append(module)
        return 0

    left_in(unit)
    return found


def _is_compiled(unit: torch.nn.Module) -> bool:
    """Whether the module or anything in it was given to torch.compile before it was sharded."""
    return any(
        getattr(module, "_compiled_call_impl", None) is not None
        or "_orig_mod" in module._modules
        or hasattr(module.forward, "_torchdynamo_orig_callable")
        for module in unit.modules()
    )


def called_by_compiled() -> bool:
    """Whether whoever calls this was called from something that torch.compile has compiled.

    Example:
        >>> from shardrt.sharding.dividing import called_by_compiled
        >>> called_by_compiled()
        False
    """
    if "torch._dynamo.eval_frame" not in sys.modules:
        return False
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code.co_filename.endswith(_COMPILER):
            # Else it is where the compiler is told to stay out, as torch's own checkpointing does.
            return frame.f_code.co_name == "compile_wrapper"
        frame = frame.f_back
    return False


class Parts:
    """Which of the units, by their numbers, are parts of which, and which follow. See Note [Parts that follow]."""

    def __init__(self, units: Sequence[Unit]) -> None:
        numbers = {unit.name: number for number, unit in enumerate(units)}
        self._whose = [number if unit.within is None else numbers[unit.within] for number, unit in enumerate(units)]
        self._around = [
            {n for n, other in enumerate(units) if other.name and unit.name.startswith(f"{other.name}.")}
            for unit in units
        ]
        self._leaders: dict[int, int] = {}

    def unit_of(self, number: int) -> int:
        """What the user calls the unit of a part; a unit is its own."""
        return self._whose[number]

    def of(self, number: int) -> list[int]:
        """The parts of a unit, in the order of its modules."""
        return [part for part, unit in enumerate(self._whose) if unit == number and part != number]

    def is_inside(self, number: int, other: int) -> bool:
        """Whether a unit or part is inside another one, not counting the root."""
        return other in self._around[number]

    def follow(self, number: int, running: Sequence[int]) -> bool:
        """A part was read outside its own forward: it follows the innermost that runs around it, if one of its unit
        does."""
        unit = self._whose[number]
        for other in reversed(running):
            if unit != number and self._whose[other] == unit and other in self._around[number]:
                self._leaders[number] = other
                return True
        return False

    def follow_all(self, number: int) -> None:
        """All parts of a unit follow it for good."""
        self._leaders.update(dict.fromkeys(self.of(number), number))

    def all_follow(self, number: int) -> bool:
        """Whether all parts of a unit follow it, or others of them."""
        return all(part in self._leaders for part in self.of(number))

    def follows(self, number: int) -> bool:
        """Whether somebody else says when it comes and goes."""
        return number in self._leaders

    def followed_by(self, number: int) -> list[int]:
        """Those that come and go with this one, itself first."""
        found = [number]
        if self._leaders:
            for one in found:
                found += [part for part, leader in self._leaders.items() if leader == one]
        return found
