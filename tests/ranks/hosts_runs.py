"""What ranks do in the tests of two levels: hosts are emulated, a number of ranks each, by ``SHARDRT_HOST``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from shardrt_hosts.communicator import HostsCommunicator
from shardrt_hosts.layout import HostLayout

import shardrt
from shardrt import Group, load_registry
from shardrt.comm.control import StoreControl
from shardrt.opening import Subgroups, with_opening
from shardrt.protocols import Communicator
from tests.ranks.shm_runs import bits, noise
from tests.ranks.twins import Odd, batch

HALVES = (torch.float16, torch.bfloat16)


def on_host(names: Sequence[str]) -> None:
    """Put this rank on the host of the name in its place."""
    os.environ["SHARDRT_HOST"] = names[int(os.environ["RANK"])]


@contextmanager
def levels(names: Sequence[str], timeout: float = 30.0) -> Iterator[tuple[HostsCommunicator, Communicator]]:
    """A communicator of two levels over all ranks, and a flat one over gloo."""
    on_host(names)
    world = dist.group.WORLD
    assert world is not None
    rank, world_size = world.rank(), world.size()
    about = Group(
        rank=rank,
        world_size=world_size,
        device_type="cpu",
        timeout=timeout,
        control=StoreControl(world.get_group_store(), rank=rank, world_size=world_size, timeout=timeout),
        process_group=world,
        number=1,
    )
    group = with_opening(about, load_registry(), Subgroups())
    assert group.open_among is not None
    flat = group.open_among([range(world_size)], "gloo")
    made = HostsCommunicator(group, HostLayout.of(names, rank=rank), inside="shm", across="gloo")
    try:
        yield made, flat
    finally:
        made.close()
        flat.close()


def against_flat(names: list[str], dtype_name: str) -> list[str]:
    """Every operation beside the flat one, twice: what is farther from it than rounding, or not the same again."""
    dtype: torch.dtype = getattr(torch, dtype_name)
    wrong: list[str] = []
    exact = not (dtype.is_floating_point or dtype.is_complex)
    with levels(names) as (hosts, flat):
        rank, world_size = hosts.rank, hosts.world_size
        splits = [5_000 + 1_009 * one if one != 1 else 0 for one in range(world_size)]
        start = sum(splits[:rank])
        mine = noise(sum(splits), dtype, seed=rank)
        largest = torch.stack([noise(sum(splits), dtype, seed=one).abs().double() for one in range(world_size)]).sum(0)
        step = 0.0 if exact else torch.finfo(dtype).eps

        def check(what: str, found: list[torch.Tensor], expected: torch.Tensor, size: torch.Tensor) -> None:
            if bits(found[0]) != bits(found[1]):
                wrong.append(f"{what} of {dtype_name} differs from run to run on rank {rank}")
            wide = torch.complex128 if dtype.is_complex else torch.float64
            far = (found[0].to(wide) - expected.to(wide)).abs() > 4 * step * size
            if far.any():
                wrong.append(f"{what} of {dtype_name} is wrong in {int(far.sum())} elements on rank {rank}")

        own = slice(start, start + splits[rank])
        for average in (False,) if exact else (False, True):
            kinds: dict[str, Any] = {"reduce_scatter": [], "in place": [], "pieces": [], "all_reduce": []}
            for comm in (hosts, hosts, flat):
                output = torch.empty(splits[rank], dtype=dtype)
                buffer = mine.clone()
                comm.reduce_scatter(buffer, splits, output=output, average=average).wait()
                kinds["reduce_scatter"].append(output)
                if bits(buffer) != bits(mine):
                    wrong.append(f"reduce_scatter into an output changed the buffer on rank {rank}")
                comm.reduce_scatter(buffer, splits, average=average).wait()
                kinds["in place"].append(buffer[own].clone())
                cuts = [size for split in splits for size in (split // 3, split - split // 3)]
                apart = torch.empty(splits[rank], dtype=dtype)
                pieces = [piece.clone() for piece in torch.split(mine, cuts)]
                comm.reduce_scatter_pieces(pieces, splits, output=apart, average=average).wait()  # type: ignore[attr-defined]
                kinds["pieces"].append(apart)
                whole = mine.clone()
                comm.all_reduce(whole, average=average).wait()
                kinds["all_reduce"].append(whole)
            for kind, found in kinds.items():
                check(kind, found, found[2], largest if kind == "all_reduce" else largest[own])
            everywhere = hosts.exchange("bits", hash(tuple(bits(kinds["all_reduce"][0]))))
            if len(set(everywhere)) > 1:
                wrong.append(f"all_reduce of {dtype_name} has other bits on other ranks")
        moved = []
        for comm in (hosts, flat):
            buffer = mine.clone()
            comm.all_gather(buffer, splits).wait()
            again = torch.zeros_like(mine)
            comm.all_gather_from(mine[own].clone(), torch.split(again, splits)).wait()  # type: ignore[attr-defined]
            told = mine.clone()
            comm.broadcast(told, source=world_size - 2).wait()
            moved.append(torch.cat([buffer, again, told]))
        if bits(moved[0]) != bits(moved[1]):
            wrong.append(f"moves of {dtype_name} differ on rank {rank}")
    return wrong


def bytes_across(names: list[str], numel: int) -> dict[str, Any]:
    """What this rank sends to other hosts for a reduce_scatter and an all_gather, in two levels and flat."""
    with levels(names) as (hosts, flat):
        splits = [numel // hosts.world_size] * hosts.world_size
        counted = {}
        for operation in ("reduce_scatter", "all_gather"):
            before = hosts.traffic_by_level
            total = hosts.traffic.copy()
            getattr(hosts, operation)(torch.ones(numel), splits).wait()
            after = hosts.traffic_by_level
            sent = {level: after[level].sent - before[level].sent for level in after}
            flat_before = flat.traffic.sent
            getattr(flat, operation)(torch.ones(numel), splits).wait()
            whole = (hosts.traffic - total).sent
            counted[operation] = {**sent, "whole": whole, "gloo": flat.traffic.sent - flat_before}
        return {**counted, "operations": sorted(hosts.traffic.operations)}


def chosen(names: list[str], backend: Any = "auto") -> list[str]:
    """The backend that a runtime takes, and why."""
    on_host(names)
    with shardrt.Runtime(backend=backend, timeout=30) as rt:
        return [rt.backend, rt.backend_reason]


def trained(names: list[str], how: str, schedule: str) -> dict[str, Any]:
    """The largest difference of parameters after some steps in two levels and flat, and which backend was taken."""
    on_host(names)
    ended, taken = [], ""
    for backend in ("auto", "gloo"):
        torch.manual_seed(1)
        model: Any = Odd()
        with shardrt.Runtime(backend=backend, schedule=schedule, bucket_mb=0.001, timeout=30) as rt:
            if backend == "auto":
                taken = rt.backend
            if how == "optimizer":
                opt: Any = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=0.01)
            else:
                model, opt = rt.shard(model, torch.optim.AdamW, lr=0.01, strategy=how)
            for step in range(5):
                model(batch(step, rt.rank)).pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            state = rt.full_state_dict(model) if how != "optimizer" else model.state_dict()
            ended.append({name: tensor.detach().clone() for name, tensor in state.items()})
    apart = max(float((ended[0][name] - tensor).abs().max()) for name, tensor in ended[1].items() if tensor.numel())
    return {"backend": taken, "difference": apart}


def killed(names: list[str], victim: int) -> str:
    """Train until a rank is killed; what the others were told."""
    on_host(names)
    torch.manual_seed(1)
    model = Odd()
    with shardrt.Runtime(timeout=15, bucket_mb=0.001) as rt:
        assert rt.backend == "hosts"
        opt = rt.optimizer(model.named_parameters(), torch.optim.SGD, lr=0.1)
        for step in range(6):
            if step == 2 and rt.rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            try:
                model(batch(step, rt.rank)).pow(2).mean().backward()
                opt.step()
                opt.zero_grad()
            except shardrt.ShardrtError as error:
                rt.report_failure(error)
                return str(error)
    return ""
