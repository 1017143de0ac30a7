"""Arguments of collectives, checked before any byte moves: a mistake on one rank must not become a hang on another.

Every backend may call these; all raise :class:`~shardrt.errors.ConfigError` and touch nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from shardrt.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor


def check_flat(operation: str, buffer: Tensor, rank: int, *, what: str = "buffer") -> None:
    """The buffer has one dimension and no holes.

    Example:
        >>> import torch
        >>> from shardrt.comm.checks import check_flat
        >>> check_flat("broadcast", torch.zeros(2, 2), rank=0)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: broadcast on rank 0: buffer must be flat, got shape (2, 2); pass tensor.view(-1)
    """
    if buffer.dim() != 1:
        raise ConfigError(
            f"{operation} on rank {rank}: {what} must be flat, got shape {tuple(buffer.shape)}; pass tensor.view(-1)"
        )
    if not buffer.is_contiguous():
        raise ConfigError(
            f"{operation} on rank {rank}: {what} must be contiguous, got stride {buffer.stride()}; "
            f"results are written in place, so copy into a contiguous tensor first"
        )


def check_runs(
    operation: str,
    buffer: Tensor,
    splits: Sequence[int],
    world_size: int,
    rank: int,
    *,
    output: Tensor | None = None,
) -> None:
    """The buffer is flat, the splits are one run per rank that fill it, and an output has the size of the own run.

    Example:
        >>> import torch
        >>> from shardrt.comm.checks import check_runs
        >>> check_runs("all_gather", torch.zeros(5), [2, 3], world_size=2, rank=0)
        >>> check_runs("all_gather", torch.zeros(5), [2, 2], world_size=2, rank=0)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: all_gather on rank 0: splits [2, 2] add up to 4, the buffer has 5 elements
        >>> gradients = torch.zeros(4)
        >>> check_runs("reduce_scatter", gradients, [2, 2], world_size=2, rank=0, output=gradients[:2])
        Traceback (most recent call last):
        shardrt.errors.ConfigError: reduce_scatter on rank 0: the output lies in the buffer, which must stay ...
    """
    check_flat(operation, buffer, rank)
    found = list(splits)
    if len(found) != world_size:
        raise ConfigError(
            f"{operation} on rank {rank}: splits must have one entry per rank, got {len(found)} for {world_size} ranks"
        )
    if any(size < 0 for size in found):
        raise ConfigError(f"{operation} on rank {rank}: splits must not be negative, got {found}")
    if sum(found) != buffer.numel():
        raise ConfigError(
            f"{operation} on rank {rank}: splits {found} add up to {sum(found)}, "
            f"the buffer has {buffer.numel()} elements"
        )
    if output is None:
        return
    check_flat(operation, output, rank, what="output")
    if (output.numel(), output.dtype) != (found[rank], buffer.dtype):
        raise ConfigError(
            f"{operation} on rank {rank}: output has {output.numel()} elements of {output.dtype}, "
            f"the own run has {found[rank]} of {buffer.dtype}"
        )
    if world_size > 1 and output.numel() and _overlap(output, buffer):
        raise ConfigError(
            f"{operation} on rank {rank}: the output lies in the buffer, which must stay as it is; leave output out to "
            "reduce in place"
        )


def check_pieces(
    operation: str,
    pieces: Sequence[Tensor],
    splits: Sequence[int],
    world_size: int,
    rank: int,
    *,
    output: Tensor,
) -> list[list[Tensor]]:
    """The pieces fill the runs, of which none shares a piece with another; returns those of each run.

    Example:
        >>> import torch
        >>> from shardrt.comm.checks import check_pieces
        >>> pieces = [torch.zeros(2), torch.zeros(1), torch.zeros(3)]
        >>> runs = check_pieces("reduce_scatter", pieces, [3, 3], world_size=2, rank=0, output=torch.zeros(3))
        >>> [[piece.numel() for piece in run] for run in runs]
        [[2, 1], [3]]
        >>> check_pieces("reduce_scatter", pieces, [4, 2], world_size=2, rank=0, output=torch.zeros(4))
        Traceback (most recent call last):
        shardrt.errors.ConfigError: reduce_scatter on rank 0: a piece of 3 elements reaches from the run of rank 0, ...
    """
    check_flat(operation, output, rank, what="output")
    found = list(splits)
    if len(found) != world_size or any(size < 0 for size in found) or found[rank] != output.numel():
        raise ConfigError(
            f"{operation} on rank {rank}: splits {found} must be one size from 0 up for each of {world_size} ranks, "
            f"and this rank's that of the output, which has {output.numel()} elements"
        )
    runs: list[list[Tensor]] = []
    remaining = iter(pieces)
    for owner, size in enumerate(found):
        run: list[Tensor] = []
        missing = size
        while missing > 0:
            piece = next(remaining, None)
            if piece is None:
                raise ConfigError(f"{operation} on rank {rank}: the pieces end {missing} elements early, see {found}")
            check_flat(operation, piece, rank, what="piece")
            if piece.dtype != output.dtype:
                raise ConfigError(
                    f"{operation} on rank {rank}: a piece is {piece.dtype}, the output is {output.dtype}; make them one"
                )
            if piece.numel() > missing:
                raise ConfigError(
                    f"{operation} on rank {rank}: a piece of {piece.numel()} elements reaches from the run of rank "
                    f"{owner}, which lacks {missing}, into the next; cut it there"
                )
            if piece.numel():
                run.append(piece)
                missing -= piece.numel()
        runs.append(run)
    left = sum(piece.numel() for piece in remaining)
    if left:
        raise ConfigError(f"{operation} on rank {rank}: {left} elements of pieces are left over, splits are {found}")
    return runs


def check_gather(operation: str, own: Tensor, runs: Sequence[Tensor], world_size: int, rank: int) -> None:
    """There is one flat run for each rank, of one dtype, and what this rank gives fills its own.

    Example:
        >>> import torch
        >>> from shardrt.comm.checks import check_gather
        >>> runs = [torch.zeros(2), torch.zeros(3)]
        >>> check_gather("all_gather", torch.zeros(2), runs, world_size=2, rank=0)
        >>> check_gather("all_gather", torch.zeros(2), runs, world_size=2, rank=1)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: all_gather on rank 1: gives 2 elements of torch.float32, its own run has 3 of ...
    """
    if len(runs) != world_size:
        raise ConfigError(f"{operation} on rank {rank}: needs one run per rank, got {len(runs)} for {world_size} ranks")
    check_flat(operation, own, rank, what="own run")
    for owner, run in enumerate(runs):
        check_flat(operation, run, rank, what=f"runs[{owner}]")
        if run.dtype != own.dtype or (owner == rank and run.numel() != own.numel()):
            whose = "its own run" if owner == rank else f"the run of rank {owner}"
            raise ConfigError(
                f"{operation} on rank {rank}: gives {own.numel()} elements of {own.dtype}, "
                f"{whose} has {run.numel()} of {run.dtype}"
            )
        if (
            own.numel()
            and run.numel()
            and _overlap(own, run)
            and not (owner == rank and own.data_ptr() == run.data_ptr())
        ):
            raise ConfigError(
                f"{operation} on rank {rank}: what it gives lies in the run of rank {owner}, which is written meanwhile"
            )


def _overlap(one: Tensor, other: Tensor) -> bool:
    starts_before_end = one.data_ptr() < other.data_ptr() + other.nbytes
    return starts_before_end and other.data_ptr() < one.data_ptr() + one.nbytes and one.device == other.device


def check_source(operation: str, source: int, world_size: int, rank: int) -> None:
    """The source is a rank of the group.

    Example:
        >>> from shardrt.comm.checks import check_source
        >>> check_source("broadcast", 2, world_size=2, rank=0)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: broadcast on rank 0: source 2 is no rank of this group, whose ranks are 0 to 1
    """
    if not 0 <= source < world_size:
        raise ConfigError(
            f"{operation} on rank {rank}: source {source} is no rank of this group, "
            f"whose ranks are 0 to {world_size - 1}"
        )


def check_reduction(operation: str, buffer: Tensor, op: str, average: bool, rank: int) -> None:
    """The reduction is one there is, and has an answer in the buffer's dtype.

    Example:
        >>> import torch
        >>> from shardrt.comm.checks import check_reduction
        >>> check_reduction("all_reduce", torch.zeros(2), "max", average=True, rank=0)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: all_reduce on rank 0: only a sum can be averaged, got op='max' with average=True
    """
    if op not in ("sum", "max", "min"):
        raise ConfigError(f"{operation} on rank {rank}: unknown op {op!r}; there are 'sum', 'max' and 'min'")
    if average and op != "sum":
        raise ConfigError(f"{operation} on rank {rank}: only a sum can be averaged, got op={op!r} with average=True")
    if average and not (buffer.is_floating_point() or buffer.is_complex()):
        raise ConfigError(
            f"{operation} on rank {rank}: an average of {buffer.dtype} has no exact answer; "
            f"sum and divide as you mean it, or use a floating point dtype"
        )
    if op != "sum" and buffer.is_complex():
        raise ConfigError(f"{operation} on rank {rank}: complex numbers have no {op}, got {buffer.dtype}")


def check_all_to_all(received: Sequence[Tensor], sent: Sequence[Tensor], world_size: int, rank: int) -> None:
    """One flat tensor per rank both ways, of one dtype, and what a rank sends itself fits.

    Example:
        >>> import torch
        >>> from shardrt.comm.checks import check_all_to_all
        >>> check_all_to_all([torch.zeros(1)], [torch.zeros(1)], world_size=2, rank=1)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: all_to_all on rank 1: got 1 tensors to receive and 1 to send; needs one per rank: 2
    """
    if len(received) != world_size or len(sent) != world_size:
        raise ConfigError(
            f"all_to_all on rank {rank}: got {len(received)} tensors to receive and {len(sent)} to send; "
            f"needs one per rank: {world_size}"
        )
    for peer in range(world_size):
        check_flat("all_to_all", received[peer], rank, what=f"received[{peer}]")
        check_flat("all_to_all", sent[peer], rank, what=f"sent[{peer}]")
    dtypes = {str(tensor.dtype) for tensor in (*received, *sent)}
    if len(dtypes) > 1:
        raise ConfigError(f"all_to_all on rank {rank}: all tensors must share one dtype, got {sorted(dtypes)}")
    if received[rank].numel() != sent[rank].numel():
        raise ConfigError(
            f"all_to_all on rank {rank}: sends itself {sent[rank].numel()} elements, "
            f"but has room for {received[rank].numel()}"
        )
