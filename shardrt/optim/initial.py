"""Ranks that start from different values: all take those of one, or all hear of it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import torch

from shardrt.handshake import Field
from shardrt.optim.digest import bit_digests
from shardrt.optim.params import NamedParam
from shardrt.protocols import Communicator

if TYPE_CHECKING:
    from shardrt.runtime import Runtime

_WINDOW_BYTES = 16 * 2**20
"""What is sent at once, unless one tensor alone is larger."""


def settle_initial_values(
    runtime: Runtime, communicator: Communicator, params: Sequence[NamedParam], initial: str
) -> None:
    """Let all ranks start from the values of rank 0, or raise if they differ."""
    digests = dict(zip((param.name for param in params), bit_digests(param.tensor for param in params), strict=True))
    if initial == "check":
        with runtime.agreeing("initial parameters") as fields:
            fields["digest of initial parameters"] = Field(
                value=digests, fix="seed every rank alike or load the same checkpoint, or pass initial='broadcast'"
            )
        return
    if runtime.differs("initial parameters", digests):
        runtime.log.info("parameters.broadcast", source=0, reason="ranks start from different values")
        broadcast_values([param.tensor for param in params], communicator, source=0)


def sync_buffers(runtime: Runtime, buffers: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Let all ranks have the buffers of rank 0, if they differ."""
    digests = dict(zip((name for name, _ in buffers), bit_digests(buffer for _, buffer in buffers), strict=True))
    if runtime.differs("buffers of a module", digests):
        broadcast_values([buffer for _, buffer in buffers], runtime.negotiate(()), source=0)


@torch.no_grad()
def broadcast_values(tensors: Iterable[torch.Tensor], communicator: Communicator, *, source: int) -> None:
    """Give every rank the values that one has, in windows of several tensors."""
    changed = []
    for window in _windows(tensors):
        packed = torch.cat([tensor.detach().reshape(-1) for tensor in window])
        communicator.broadcast(packed, source).wait()
        for tensor, values in zip(window, torch.split(packed, [tensor.numel() for tensor in window]), strict=True):
            tensor.detach().copy_(values.view(tensor.shape))
        changed += window
    torch.autograd.graph.increment_version(changed)


def _windows(tensors: Iterable[torch.Tensor]) -> Iterator[list[torch.Tensor]]:
    by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel():
            by_kind.setdefault((tensor.dtype, tensor.device), []).append(tensor)
    for same in by_kind.values():
        window: list[torch.Tensor] = []
        size = 0
        for tensor in same:
            if window and size + tensor.nbytes > _WINDOW_BYTES:
                yield window
                window, size = [], 0
            window.append(tensor)
            size += tensor.nbytes
        yield window
