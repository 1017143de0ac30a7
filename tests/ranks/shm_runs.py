"""What ranks do in the tests of shared memory: the same operations over shm and over gloo, bit by bit."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from shardrt_gloo.communicator import GlooCommunicator
from shardrt_gloo.opening import open_communicator
from shardrt_shm import joining
from shardrt_shm.arena import process_arena
from shardrt_shm.communicator import ShmCommunicator
from shardrt_shm.steps import Steps

import shardrt
from shardrt import Group
from shardrt.comm.control import StoreControl
from shardrt.comm.thread import ThreadedWork


@contextmanager
def both(*, chunk_mb: float = 0.01, timeout: float = 30.0) -> Iterator[tuple[ShmCommunicator, GlooCommunicator]]:
    """A communicator of each kind over all ranks."""
    world = dist.group.WORLD
    assert world is not None
    rank, world_size = world.rank(), world.size()
    control = StoreControl(world.get_group_store(), rank=rank, world_size=world_size, timeout=timeout)

    def group(number: int) -> Group:
        return Group(
            rank=rank,
            world_size=world_size,
            device_type="cpu",
            timeout=timeout,
            control=control,
            process_group=world,
            number=number,
        )

    shm, gloo = ShmCommunicator(group(1), chunk_mb=chunk_mb), open_communicator(group(2))
    try:
        yield shm, gloo
    finally:
        shm.close()
        gloo.close()


def noise(numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Numbers whose sums round differently in every order."""
    generator = torch.Generator().manual_seed(seed)
    if not dtype.is_floating_point and not dtype.is_complex:
        return torch.randint(0, 2 if dtype == torch.bool else 100, (numel,), generator=generator).to(dtype)
    scale = torch.logspace(-3, 3, numel, dtype=torch.float64)
    drawn = torch.randn(numel, generator=generator, dtype=torch.float64) * scale
    return (torch.complex(drawn, drawn.flip(0)) if dtype.is_complex else drawn).to(dtype)


def bits(tensor: torch.Tensor) -> list[int]:
    """What a tensor holds, so that NaN equals NaN and 0 differs from -0."""
    found: list[int] = tensor.contiguous().view(torch.uint8).tolist()
    return found


def same_bits(dtype_name: str, shared: bool) -> list[str]:
    """Every operation over both backends, on buffers in shared memory on some ranks or on none; what differs."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    differing = []
    with both() as (shm, gloo):
        rank, world_size = shm.rank, shm.world_size
        splits = [40_000 + 7919 * one if one != 1 else 0 for one in range(world_size)]
        numel = sum(splits)
        start = sum(splits[:rank])
        mine = noise(numel, dtype, seed=rank)
        is_float = dtype.is_floating_point or dtype.is_complex

        def put(values: torch.Tensor) -> torch.Tensor:
            # Not on rank 1: each rank may have such memory or not.
            place = shm.allocate(values.numel(), dtype) if shared and rank != 1 else None
            return values.clone() if place is None else place.copy_(values)

        def compare(what: str, one: torch.Tensor, other: torch.Tensor) -> None:
            if bits(one) != bits(other):
                differing.append(f"{what} of {dtype_name} on rank {rank}")

        for average in (False, True) if is_float else (False,):
            results = []
            for comm in (shm, gloo):
                buffer, output = put(mine), torch.empty(splits[rank], dtype=dtype)
                comm.reduce_scatter(buffer, splits, output=output, average=average).wait()
                compare("a buffer that must stay", buffer, mine)
                in_place = put(mine)
                comm.reduce_scatter(in_place, splits, average=average).wait()
                compare("reduce_scatter in place", in_place[start : start + splits[rank]], output)
                cuts = [size for split in splits for size in (split // 3, split - split // 3)]
                pieces = list(torch.split(put(mine), cuts))
                apart = torch.empty(splits[rank], dtype=dtype)
                if rank == 0:
                    pieces = [piece.clone() for piece in pieces]
                comm.reduce_scatter_pieces(pieces, splits, output=apart, average=average).wait()
                compare("reduce_scatter in pieces", apart, output)
                whole = put(mine)
                comm.all_reduce(whole, average=average).wait()
                results.append(torch.cat([output, whole]))
            compare("reductions", *results)
        gathered = []
        for comm in (shm, gloo):
            buffer = put(mine)
            comm.all_gather(buffer, splits).wait()
            own = put(mine[start : start + splits[rank]])
            again = put(torch.zeros_like(mine))
            comm.all_gather_from(own, torch.split(again, splits)).wait()
            compare("all_gather_from", again, buffer)
            told = put(mine)
            comm.broadcast(told, source=world_size - 1).wait()
            gathered.append(torch.cat([buffer, told]))
        compare("moves", *gathered)
    return differing


def memory_goes_back() -> dict[str, Any]:
    """Bytes of shared memory that this process holds, before, with and after tensors and communicators."""
    gc.collect()  # what other tests have left goes now, and not in between
    before = process_arena().taken
    with both() as (shm, _):
        with_areas = process_arena().taken
        tensor = shm.allocate(2**20, torch.float32)
        assert tensor is not None and not tensor.any()
        view = tensor[7:9].view(2, 1)
        with_tensor = process_arena().taken
        del tensor
        with_view = process_arena().taken
        del view
        after_tensor = process_arena().taken
        small = shm.allocate(10, torch.float32)
        huge = shm.allocate(2**50, torch.float32)
        shm.barrier()
    dist.barrier()  # everybody has closed: the next communicator gives back what was kept for peers
    with both():
        shared_again = process_arena().taken
    return {
        "areas": with_areas - before,
        "tensor": with_tensor - with_areas,
        "view": with_view - with_areas,
        "after": after_tensor - with_areas,
        "refused": small is None and huge is None,
        "again": shared_again - with_areas,
    }


def different_calls() -> str:
    """What a rank is told when the last one makes another call than the others."""
    with both() as (shm, _):
        buffer = torch.zeros(12)
        try:
            if shm.rank == shm.world_size - 1:
                shm.broadcast(buffer, 0).wait()
            else:
                shm.all_gather(buffer, [4] * shm.world_size).wait()
        except shardrt.ShardrtError as error:
            return f"{type(error).__name__}: {error}"
    return "nothing"


def begun_by_callers() -> dict[str, int]:
    """How many steps of an operation peers may read when it is queued."""
    found: dict[str, int] = {}
    with both() as (shm, _):
        queue = shm._thread.submit
        name = ""

        def submit(*args: Any, **details: Any) -> ThreadedWork:
            found[name] = shm._joined.own.ready.value - shm._joined.steps._past
            return queue(*args, **details)

        shm._thread.submit = submit  # type: ignore[method-assign]
        slot = shm._joined.layout.slot_bytes // 4
        name = "all_reduce"
        shm.all_reduce(torch.ones(8)).wait()
        name = "in place"
        kept = shm.allocate(15 * slot, torch.float32)
        assert kept is not None
        shm.all_gather(kept, [5 * slot] * 3).wait()
        name = "barrier"
        shm.barrier()
        name = "many slots"
        first = shm.all_gather(torch.ones(15 * slot), [5 * slot] * 3)
        name = "behind another"
        first.wait()
        shm._ended -= 1  # as if that one had not ended
        shm.all_reduce(torch.ones(8)).wait()
    return found


def close_before_a_late_reader() -> dict[str, Any]:
    """The first rank closes its runtime while the second still reads what it sent: what is left of it meanwhile."""
    rt = shardrt.Runtime(backend="shm", timeout=30)
    communicator = rt.open_communicator({"float32"})
    assert communicator is not None
    sent = torch.full((4,), float(rt.rank))
    count = Steps._count

    def count_late(steps: Steps, word: Any, value: int) -> None:
        if word is steps._own.done:
            time.sleep(2.0)
        count(steps, word, value)

    with mock.patch.object(Steps, "_count", count_late if rt.rank else count):
        communicator.broadcast(sent, source=0).wait()
    rank, gone = rt.rank, weakref.ref(rt)
    rt.close()
    waits = len(joining._parted)
    del communicator, rt
    gc.collect()
    return {"rank": rank, "waits": waits > 0, "kept": gone() is not None, "read": sent.tolist()}
