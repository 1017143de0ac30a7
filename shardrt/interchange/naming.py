"""What parameters are called: wrappers' prefixes taken off, and names found for numbered ones."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from shardrt.errors import StateError
from shardrt.state.portable import LazyTensor

_COMPILED = "_orig_mod."
_WRAPPED = "module."
_FEW = 5

LIKE_THE_PARAMETER = {
    *("exp_avg", "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "exp_inf", "square_avg", "grad_avg", "acc_delta"),
    *("sum", "ax", "prev", "step_size"),
}
"""Keys under which torch's optimizers keep tensors of the parameter's own shape."""


def few(names: Iterable[Any]) -> str:
    """Some names for a message."""
    listed = [str(name) for name in names]
    more = f" and {len(listed) - _FEW} more" if len(listed) > _FEW else ""
    return ", ".join(listed[:_FEW]) + more


def bare_names(names: Sequence[str], *, where: str) -> dict[str, str]:
    """Each name without what DDP (``module.`` in front of all) and ``torch.compile`` (``_orig_mod.``) put into it.

    Example:
        >>> from shardrt.interchange.naming import bare_names
        >>> bare_names(["module._orig_mod.w", "module.layer._orig_mod.b"], where="a file")
        {'module._orig_mod.w': 'w', 'module.layer._orig_mod.b': 'layer.b'}
    """
    bare = {name: name.replace(_COMPILED, "") for name in names}
    while bare and all(name.startswith(_WRAPPED) for name in bare.values()):
        bare = {full: name.removeprefix(_WRAPPED) for full, name in bare.items()}
    if len(set(bare.values())) != len(bare):
        taken = [name for name in names if list(bare.values()).count(bare[name]) > 1]
        raise StateError(f"{where}: {few(taken)} are the same name once wrappers' prefixes are off")
    return bare


def names_of_numbers(
    groups: Sequence[Mapping[str, Any]],
    *,
    model: Mapping[str, LazyTensor] | None,
    names: Sequence[str] | None,
    where: str,
) -> dict[Any, str]:
    """What the parameters that groups list under ``params`` are called, by what is listed there.

    Note [Numbered parameters]: torch's optimizers number their parameters in the order in which they were handed over.
    Names are, in this order: those that were passed in; ``param_names`` of the groups, which an optimizer has that was
    given ``named_parameters()``; the listed values themselves where they are names; and those of the model, if there is
    one group and the model has as many parameters. A state dict of a model does not say which entries are buffers, so
    those that can be nothing else are left out if that makes the counts equal. Anything else is a guess that could put
    one parameter's momentum on another: refused.
    """
    listed = [key for group in groups for key in group["params"]]
    found: Sequence[str]
    if names is not None:
        if len(names) != len(listed):
            raise StateError(f"{where} has {len(listed)} parameters, but names= has {len(names)} names")
        found = list(names)
    elif all("param_names" in group for group in groups):
        found = [name for group in groups for name in group["param_names"]]
        if len(found) != len(listed):
            raise StateError(f"{where} has {len(listed)} parameters, but its param_names are {len(found)}")
    elif all(isinstance(key, str) for key in listed):
        found = listed
    else:
        found = _names_by_order(listed, groups, model=model, where=where)
    if not all(isinstance(name, str) for name in found) or len(set(found)) != len(found):
        raise StateError(f"{where}: parameter names must be different texts, got {few(found)}")
    bare = bare_names(found, where=where)
    called = {key: bare[name] for key, name in zip(listed, found, strict=True)}
    if model is not None and (unknown := [name for name in called.values() if name not in model]):
        raise StateError(
            f"{where} has parameters that the model does not have: {few(unknown)}; the model has {few(model)}. "
            "Pass names= with the model's names in the optimizer's order"
        )
    return called


def _names_by_order(
    listed: Sequence[Any], groups: Sequence[Mapping[str, Any]], *, model: Mapping[str, LazyTensor] | None, where: str
) -> list[str]:
    advice = "pass names=[name for name, _ in model.named_parameters()], in the order the optimizer was given them"
    if model is None:
        raise StateError(f"{where} numbers its parameters and does not name them, and there is no model file; {advice}")
    if len(groups) != 1:
        raise StateError(
            f"{where} numbers its parameters over {len(groups)} groups and does not name them, so their order need not "
            f"be the model's; {advice}"
        )
    seen: set[int] = set()
    once = [name for name, lazy in model.items() if id(lazy) not in seen and not seen.add(id(lazy))]  # type: ignore[func-returns-value]
    trained = [name for name in once if not _surely_buffer(name, model)]
    for candidates in (once, trained):
        if len(candidates) == len(listed):
            return candidates
    raise StateError(
        f"{where} has {len(listed)} parameters without names, and the model {len(once)} tensors, of which at most "
        f"{len(trained)} can be parameters; {advice}"
    )


def _surely_buffer(name: str, model: Mapping[str, LazyTensor]) -> bool:
    if not model[name].dtype.startswith(("float", "bfloat", "complex")):
        return True  # autograd has no gradients for it
    owner, _, last = name.rpartition(".")
    prefix = f"{owner}." if owner else ""
    return last in ("running_mean", "running_var") and f"{prefix}num_batches_tracked" in model
