"""What ranks compare about an optimizer before they build it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import HandshakeError
from shardrt.handshake import Field
from shardrt.optim.digest import bit_digests
from shardrt.optim.params import NamedGroup
from shardrt.plan import ParamSpec, Plan

if TYPE_CHECKING:
    from shardrt.runtime import Runtime

_SAME_MODEL = "build the same model, in the same order, on every rank"


def optimizer_fields(
    plan: Plan,
    optimizer_class: type[torch.optim.Optimizer],
    defaults: Mapping[str, Any],
    groups: Sequence[NamedGroup],
    gradients: str,
) -> dict[str, Field]:
    """Everything that must be the same on all ranks, from the most telling field to the least."""
    return {
        "optimizer class": Field(
            value=f"{optimizer_class.__module__}.{optimizer_class.__qualname__}",
            fix="pass the same optimizer class on every rank",
        ),
        "gradients": Field(value=gradients, fix="pass the same gradients=... on every rank"),
        **parameter_fields(plan.params),
        "optimizer defaults": Field(value=comparable(defaults), fix="pass the same defaults on every rank"),
        "group options": Field(
            value=[comparable(group.options) for group in groups], fix="give the groups the same options on every rank"
        ),
        "plan": Field(
            value=plan.fingerprint,
            fix="the partitioner gave different plans for equal parameters; it must be deterministic",
        ),
    }


def parameter_fields(params: Sequence[ParamSpec]) -> dict[str, Field]:
    """Names, order, shapes, dtypes, groups and what is trained; by name, so that one difference is reported once."""
    return {
        "parameter names": Field(value=sorted(spec.name for spec in params), fix=_SAME_MODEL),
        "parameter order": Field(
            value=[spec.name for spec in params],
            fix="list the parameters in the same order on every rank; do not take them from a set",
        ),
        "parameter shapes": Field(value={spec.name: list(spec.shape) for spec in params}, fix=_SAME_MODEL),
        "parameter dtypes": Field(
            value={spec.name: spec.dtype for spec in params}, fix="convert the model alike on every rank"
        ),
        "parameter groups": Field(
            value={spec.name: spec.group for spec in params},
            fix="put each parameter into the same group on every rank",
        ),
        "trained parameters": Field(
            value={spec.name: spec.trainable for spec in params},
            fix="set requires_grad alike on every rank",
        ),
    }


def comparable(value: Any) -> Any:
    """A JSON value that is equal on two ranks when the original is: no addresses, no devices' indices."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, torch.Tensor):
        small = value.numel() <= 16
        return {"dtype": str(value.dtype), "shape": list(value.shape), "values": value.tolist() if small else "..."}
    if isinstance(value, Mapping):
        return {str(key): comparable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [comparable(item) for item in value]
    if isinstance(value, (torch.dtype, torch.device)):
        return str(value)
    kind = value if isinstance(value, type) else type(value)
    name = getattr(value, "__qualname__", kind.__qualname__)
    return f"{getattr(value, '__module__', kind.__module__)}.{name}"


def agree_on_values(runtime: Runtime, what: str, tensors: Mapping[str, torch.Tensor | None], *, fix: str) -> None:
    """Raise on every rank, naming rank and parameter, unless all ranks hold the same bits."""
    with runtime.agreeing(what) as fields:
        digests = dict(zip(tensors, bit_digests(tensors.values()), strict=True))
        fields[f"digest of {what}"] = Field(value=digests, fix=fix)


def explain_different_settings(runtime: Runtime, settings: Mapping[str, Any]) -> None:
    """Raise on every rank, naming the setting and both values; called when some are known to differ."""
    with runtime.agreeing("settings of a step") as fields:
        for name, value in settings.items():
            fields[name] = Field(
                value=value,
                fix="let every rank step as often as the others, with the same options and the same parameters "
                "frozen; feed schedulers with values that all ranks share, such as an average of the losses",
            )
    raise HandshakeError("ranks stepped with different settings, which are equal again")
