"""The contestants of ``shardrt bench shard`` and ``bench all``: how each is built, and how whole parameters are read
from it.

Peers are used as they come, without tuning; FSDP's units are the model's blocks and the root, which are also what
``rt.shard`` chooses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import attrs
import torch

import shardrt
from shardrt.bench.contest import PEERS, ContestSettings
from shardrt.bench.contest_rank import LR, Trainer, make_peer
from shardrt.bench.models import UNITS
from shardrt.bench.shard import DEEPSPEED, FSDP1, FSDP2
from shardrt.bench.ways import ZERO1

Values = dict[str, torch.Tensor]


@attrs.frozen(kw_only=True, eq=False)
class ShardTrainer:
    """What a contestant makes of a model, and how to look at all of it."""

    trainer: Trainer
    whole: Callable[[], Values]
    """Every parameter, on every rank; all ranks call it."""
    schedule: str = ""


@attrs.frozen(kw_only=True)
class OurWay:
    """How a contestant of ours trains."""

    strategy: str
    """One of ``rt.shard``, or :data:`~shardrt.bench.ways.ZERO1`: ``rt.optimizer``."""
    schedule: str | None = None
    """None is the runtime's default."""
    # Gloo by name: a faster backend of ours for one machine would not be a comparison of sharding.
    backend: str = "gloo"
    bucket_mb: float | None = None
    shard_size: int | None = None
    """Of hybrid strategies, where it is not the ranks of a host."""


def make_ours(way: OurWay, model: torch.nn.Module, cleanup: ExitStack) -> ShardTrainer:
    """A contestant of ours; what is put on the stack is closed when it is done."""
    chosen: dict[str, Any] = {} if way.schedule is None else {"schedule": way.schedule}
    if way.strategy == ZERO1:
        # Splits every bucket evenly: only then do both directions of a link carry each of them.
        chosen["partitioner"] = "bucket"
    rt = cleanup.enter_context(shardrt.Runtime(**chosen, backend=way.backend, bucket_mb=way.bucket_mb, device="cpu"))
    if way.strategy == ZERO1:
        ours = rt.optimizer(model.named_parameters(), torch.optim.AdamW, lr=LR)
        return ShardTrainer(
            trainer=Trainer(model=model, optimizer=ours, state_bytes=ours.state_bytes, settle=ours.finish),
            whole=lambda: _copies(model.named_parameters()),
            schedule=rt.schedule.name,
        )
    more: dict[str, Any] = {} if way.shard_size is None else {"shard_size": way.shard_size}
    sharded, optimizer = rt.shard(model, torch.optim.AdamW, lr=LR, strategy=way.strategy, **more)

    def whole() -> Values:
        with rt.summon_full_params(sharded, writeback=False):
            return _copies(sharded.named_parameters())

    trainer = Trainer(model=sharded, optimizer=optimizer, state_bytes=optimizer.state_bytes, settle=optimizer.finish)
    return ShardTrainer(trainer=trainer, whole=whole, schedule=rt.schedule.name)


def make_peer_trainer(
    name: str,
    model: torch.nn.Module,
    settings: ContestSettings,
    cleanup: ExitStack,
    *,
    bucket_mb: float | None = None,
) -> ShardTrainer:
    """A peer by its name; ``bucket_mb`` is for DDP, which alone has buckets to choose."""
    if name in PEERS:
        trainer = make_peer(name, model, bucket_mb=bucket_mb)
        return ShardTrainer(trainer=trainer, whole=lambda: _copies(model.named_parameters()))
    if name in FSDP2:
        return _fsdp2(name, model, settings)
    if name in FSDP1:
        return _fsdp1(name, model)
    assert name in DEEPSPEED
    return _deepspeed(int(name[-1]), model, settings, cleanup)


def _fsdp2(name: str, model: torch.nn.Module, settings: ContestSettings) -> ShardTrainer:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (settings.ranks,))
    # None lets it decide for the root, whose parameters it then keeps.
    blocks, root = (True, None) if name == "fsdp2_reshard" else (False, False)
    for module in model.modules():
        if isinstance(module, UNITS):
            fully_shard(module, mesh=mesh, reshard_after_forward=blocks)
    fully_shard(model, mesh=mesh, reshard_after_forward=root)
    return _plain(model)


def _fsdp1(name: str, model: torch.nn.Module) -> ShardTrainer:
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    strategy = ShardingStrategy.FULL_SHARD if name == "fsdp1_full_shard" else ShardingStrategy.SHARD_GRAD_OP
    return _plain(
        FullyShardedDataParallel(
            model,
            sharding_strategy=strategy,
            auto_wrap_policy=ModuleWrapPolicy(set(UNITS)),
            device_id=torch.device("cpu"),  # else it refuses to run without an accelerator
            use_orig_params=True,
        )
    )


def _plain(model: torch.nn.Module) -> ShardTrainer:
    """The optimizer is torch's own; whole parameters come from the full state dict."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def whole() -> Values:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

        state: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        return _copies(state.items())

    trainer = Trainer(model=model, optimizer=optimizer, state_bytes=lambda: _local_bytes(optimizer.state))
    return ShardTrainer(trainer=trainer, whole=whole)


def _deepspeed(stage: int, model: torch.nn.Module, settings: ContestSettings, cleanup: ExitStack) -> ShardTrainer:
    import deepspeed  # type: ignore[import-not-found,import-untyped,unused-ignore]

    # Stage 3 puts another function in its place, for everybody.
    cleanup.callback(setattr, torch.nn.functional, "linear", torch.nn.functional.linear)
    engine, _, _, _ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.AdamW(model.parameters(), lr=LR),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": settings.shape.batch,
            "zero_optimization": {"stage": stage},
            "zero_force_ds_cpu_optimizer": False,
            "gradient_clipping": 0.0,  # nobody else clips either; its default is 1
        },
    )
    cleanup.callback(engine.destroy)

    def whole() -> Values:
        params = list(engine.module.parameters())
        with deepspeed.zero.GatheredParameters(params, enabled=stage == 3):
            return _copies(engine.module.named_parameters())

    trainer = Trainer(
        model=engine,
        optimizer=_EngineSteps(engine),
        backward=engine.backward,
        state_bytes=lambda: _local_bytes(engine.optimizer.optimizer.state),
    )
    return ShardTrainer(trainer=trainer, whole=whole)


@attrs.frozen(eq=False)
class _EngineSteps:
    """An engine of DeepSpeed's as the loop wants it."""

    engine: Any

    def step(self) -> Any:
        return self.engine.step()

    def zero_grad(self) -> None:
        """The engine's step has done it."""


def _copies(named: Iterable[tuple[str, torch.Tensor]]) -> Values:
    return {name: value.detach().clone() for name, value in named}


def _local_bytes(state: Any) -> int:
    """What this rank has of an optimizer's state, whose tensors may know of the other ranks'."""
    values = (value for entry in state.values() for value in entry.values() if isinstance(value, torch.Tensor))
    return sum(getattr(value, "_local_tensor", value).nbytes for value in values)
