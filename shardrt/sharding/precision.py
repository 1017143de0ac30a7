"""Mixed precision: which dtype is computed with, reduced in and handed on, ours or torch's way to say it.

Note [What is cast]: floating-point parameters are gathered in ``param_dtype``, from shards that are kept and stepped in
their own dtype. Inputs of the root (and of every unit, if asked for) are cast to it. Modules of ignored classes compute
in the dtype they have: their inputs are cast to that, and their outputs back. Buffers are cast once, when the module is
sharded, and back to what they were wherever state is read.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import attrs
import torch

from shardrt.errors import ConfigError
from shardrt.optim.kept import note_stored_dtype
from shardrt.optim.residence import OWN_PRECISION, Precision, PrecisionOf
from shardrt.sharding.tensors import map_tensors
from shardrt.sharding.units import Unit

_BATCH_NORM = (torch.nn.modules.batchnorm._BatchNorm,)


@attrs.frozen(kw_only=True)
class MixedPrecision:
    """What is computed, reduced and kept in which dtype; None leaves a dtype as it is.

    Example:
        >>> import torch
        >>> from shardrt import MixedPrecision
        >>> MixedPrecision(param_dtype=torch.bfloat16).cast_root_forward_inputs
        True
    """

    param_dtype: torch.dtype | None = None
    reduce_dtype: torch.dtype | None = None
    """Gradients are reduced in it; None is ``param_dtype``."""
    buffer_dtype: torch.dtype | None = None
    keep_low_precision_grads: bool = False
    """Whether reduced gradients stay in ``reduce_dtype`` until they are stepped with."""
    cast_forward_inputs: bool = False
    """Whether every unit casts its inputs to ``param_dtype``, and not the root alone."""
    cast_root_forward_inputs: bool = True
    output_dtype: torch.dtype | None = None
    """What the root's outputs are cast to."""
    module_classes_to_ignore: tuple[type[torch.nn.Module], ...] = _BATCH_NORM
    """Modules that compute in full precision."""

    @property
    def of_params(self) -> Precision:
        """What it means for parameters that are not ignored."""
        return Precision(
            params=self.param_dtype, reduce=self.reduce_dtype, keeps_low_gradients=self.keep_low_precision_grads
        )


def mixed_precision_from(given: Any) -> MixedPrecision | None:
    """Ours, torch's ``MixedPrecision`` or ``MixedPrecisionPolicy``, a dtype for parameters, or None.

    Example:
        >>> import torch
        >>> from torch.distributed.fsdp import MixedPrecision
        >>> from shardrt.sharding.precision import mixed_precision_from
        >>> mixed_precision_from(MixedPrecision(param_dtype=torch.bfloat16, cast_forward_inputs=True))
        MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=None, buffer_dtype=None, \
keep_low_precision_grads=False, cast_forward_inputs=True, cast_root_forward_inputs=True, output_dtype=None, \
module_classes_to_ignore=(<class 'torch.nn.modules.batchnorm._BatchNorm'>,))
    """
    if given is None:
        return None
    kind = f"{type(given).__module__}.{type(given).__name__}"
    if isinstance(given, torch.dtype):
        given = MixedPrecision(param_dtype=given)
    elif kind.startswith("torch.distributed.fsdp") and kind.endswith(".MixedPrecision"):
        given = MixedPrecision(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype,
            buffer_dtype=given.buffer_dtype,
            keep_low_precision_grads=given.keep_low_precision_grads,
            cast_forward_inputs=given.cast_forward_inputs,
            cast_root_forward_inputs=given.cast_root_forward_inputs,
            module_classes_to_ignore=tuple(given._module_classes_to_ignore),
        )
    elif kind.startswith("torch.distributed.fsdp") and kind.endswith(".MixedPrecisionPolicy"):
        given = MixedPrecision(
            param_dtype=given.param_dtype,
            reduce_dtype=given.reduce_dtype,
            output_dtype=given.output_dtype,
            cast_forward_inputs=given.cast_forward_inputs,
            cast_root_forward_inputs=given.cast_forward_inputs,
            module_classes_to_ignore=(),
        )
    if not isinstance(given, MixedPrecision):
        raise ConfigError(
            f"mixed_precision={given!r} is not possible; give shardrt.MixedPrecision(...), torch's MixedPrecision or "
            "MixedPrecisionPolicy, or a dtype"
        )
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype", "output_dtype"):
        dtype = getattr(given, name)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise ConfigError(f"{name}={dtype!r} is not possible; give a floating-point dtype, or None")
    return given


def precision_by_name(root: torch.nn.Module, mixed: MixedPrecision) -> PrecisionOf:
    """The precision of each parameter: that of modules of ignored classes is their own."""
    ignored = {
        param
        for module in root.modules()
        if isinstance(module, mixed.module_classes_to_ignore)
        for param in module.parameters(recurse=False)
    }
    own = {name for name, param in root.named_parameters() if param in ignored}
    low = mixed.of_params
    return lambda name: OWN_PRECISION if name in own else low


def cast_buffers(root: torch.nn.Module, mixed: MixedPrecision, left_out: Collection[torch.nn.Module]) -> None:
    """Give floating-point buffers their dtype, except those of ignored modules."""
    if mixed.buffer_dtype is None:
        return
    for module in root.modules():
        if module in left_out or isinstance(module, mixed.module_classes_to_ignore):
            continue
        for name, buffer in module.named_buffers(recurse=False):
            if buffer.is_floating_point():
                note_stored_dtype(module, name, buffer.dtype)
                setattr(module, name, buffer.to(mixed.buffer_dtype))


def cast_inputs_of(units: Sequence[Unit], mixed: MixedPrecision) -> list[torch.utils.hooks.RemovableHandle]:
    """Hooks that cast what units take and return. See Note [What is cast]."""
    handles = []
    for number, unit in enumerate(units):
        wanted = mixed.cast_root_forward_inputs if number == 0 else mixed.cast_forward_inputs
        if wanted and mixed.param_dtype is not None:
            hook = _casting(mixed.param_dtype)
            handles.append(unit.module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True))
        if number == 0 and mixed.output_dtype is not None:
            handles.append(unit.module.register_forward_hook(casting_output(mixed.output_dtype)))
    if mixed.param_dtype is not None:
        for module in units[0].module.modules():
            if isinstance(module, mixed.module_classes_to_ignore):
                own = next((p.dtype for p in module.parameters() if p.is_floating_point()), torch.float32)
                handles.append(module.register_forward_pre_hook(_casting(own), prepend=True, with_kwargs=True))
                handles.append(module.register_forward_hook(casting_output(mixed.param_dtype)))
    return handles


def _casting(dtype: torch.dtype) -> Callable[..., tuple[Any, Any]]:
    def hook(_: torch.nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        return cast(args, dtype), cast(kwargs, dtype)

    return hook


def casting_output(dtype: torch.dtype) -> Callable[..., Any]:
    """A forward hook that casts what a module returns."""

    def hook(_: torch.nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        del args
        return cast(output, dtype)

    return hook


def cast(values: Any, dtype: torch.dtype) -> Any:
    """Floating-point tensors in this dtype; whatever else is there stays.

    Example:
        >>> import torch
        >>> from shardrt.sharding.precision import cast
        >>> cast({"x": torch.ones(1), "n": torch.ones(1, dtype=torch.int64)}, torch.bfloat16)
        {'x': tensor([1.], dtype=torch.bfloat16), 'n': tensor([1])}
    """

    def one(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() and tensor.dtype != dtype else tensor

    return map_tensors(one, values)
