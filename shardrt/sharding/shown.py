"""What a module's attributes are outside forward and backward, where any optimizer is to step them: this rank's parts.

Note [Two faces]: forward and backward need whole parameters as attributes of the modules; an optimizer that knows
nothing of sharding needs this rank's parts, as parameters with gradients. So attributes change with the time: whole
parameters from the beginning of forward to its end, and again from the beginning of backward to its end; parts at all
other times. Parts are views of the shards in the buckets, their gradients views of what was reduced, so nothing is
copied either way. A part whose gradient somebody has set to None counts as zeroed when the next backward comes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager

import torch

from shardrt.errors import UnsupportedError
from shardrt.optim.engine import BucketEngine
from shardrt.optim.gradients import OwnedShard
from shardrt.optim.sharded import ShardedOptimizer
from shardrt.sharding.shard_tensors import Peers, ShardGradient, ShardParameter, marked


class ShownShards:
    """See Note [Two faces]."""

    def __init__(self, module: torch.nn.Module, optimizer: ShardedOptimizer) -> None:
        self.optimizer = optimizer
        wires = optimizer.wires
        self._peers = Peers(everybody=wires.everybody, shared=wires.shared, replica_count=optimizer.replica_count)
        self._wholes = optimizer.named()
        self._owned: dict[str, OwnedShard] = {}
        self.shards: dict[str, ShardParameter] = {}
        """By the names of the parameters."""
        self._shows_whole = True
        self._version = -1
        self.follow(optimizer.engine)
        names = {whole: name for name, whole in self._wholes.items()}
        self._places = [
            (inner._parameters, key, whole, self.shards[names[whole]])
            for inner in module.modules()
            for key, whole in inner._parameters.items()
            if whole is not None and whole in names
        ]
        optimizer.followers.reducing = self._before_reduction
        optimizer.followers.reduced = self._hand_out_gradients
        optimizer.followers.steps_elsewhere = True

    def follow(self, engine: BucketEngine) -> None:
        """Buckets were laid out anew: parts are other views now."""
        self._owned = {}
        for shard, owned in engine.owned.items():
            if shard.param in self._owned:
                raise UnsupportedError(
                    f"parameter {shard.param!r} has several parts on one rank, which no optimizer of torch's can step "
                    "as one; use partitioner='flat' or 'greedy'"
                )
            self._owned[shard.param] = owned
        for name, whole in self._wholes.items():
            data = self._part(name)
            part = self.shards.get(name)
            if part is None:
                part = self.shards[name] = ShardParameter(data, requires_grad=whole.requires_grad)
                # Marks that users and libraries put on parameters are for the optimizer to see.
                vars(part).update({key: value for key, value in vars(whole).items() if not key.startswith("_shardrt")})
                part._whole = lambda name=name: self._gathered(name)  # type: ignore[misc]
            else:
                part.data = data
        self.changed()
        self._hand_out_old_gradients()

    def _part(self, name: str) -> torch.Tensor:
        whole, owned = self._wholes[name], self._owned.get(name)
        if owned is None:
            dtype = next((one.stepped.dtype for one in self._owned.values()), whole.dtype)
            kept = vars(whole).get("_shardrt_kept_dtype", dtype if whole.is_floating_point() else whole.dtype)
            return torch.empty((1,) * (whole.ndim - 1) + (0,), dtype=kept, device=whole.device)
        return _in_as_many_dims(owned.stepped.detach(), whole)

    def changed(self) -> bool:
        """Whether somebody has written to a part since this was asked last."""
        before, self._version = self._version, sum(part._version for part in self.shards.values())
        return before != self._version

    @contextmanager
    def whole(self) -> Iterator[None]:
        """A block in which attributes are the whole parameters."""
        was = self._shows_whole
        self.show_whole()
        try:
            yield
        finally:
            if not was:
                self.show_shards()

    def show_whole(self) -> None:
        """Attributes become the whole parameters."""
        if self._shows_whole:
            return
        self._shows_whole = True
        moved = False
        for params, key, whole, part in self._places:
            params[key] = whole
            if whole.requires_grad != part.requires_grad:
                whole.requires_grad_(part.requires_grad)
                moved = True
        if moved:
            self.optimizer.follow_freezing()

    def show_shards(self) -> None:
        """Attributes become this rank's parts."""
        if self._shows_whole:
            self._shows_whole = False
            for params, key, _, part in self._places:
                params[key] = part

    def _before_reduction(self) -> None:
        """What was reduced before and set to None since is gone; what was replaced is what counts."""
        engine = self.optimizer.engine
        zeroed = {name for name, part in self.shards.items() if part.grad is None}
        if len(zeroed) == len(self.shards):
            engine.forget_gradients()
            return
        engine.forget_some(zeroed)
        for name, owned in self._owned.items():
            gradient = self.shards[name].grad
            if gradient is not None and owned.gradient is not None and gradient.data_ptr() != owned.gradient.data_ptr():
                owned.gradient.copy_(gradient.view(owned.gradient.shape))

    def _hand_out_gradients(self) -> None:
        engine = self.optimizer.engine
        engine.reduced_gradients()
        missing = engine.idle()
        for name, part in self.shards.items():
            owned = self._owned.get(name)
            if owned is None:
                there = part.requires_grad and self._wholes[name] not in missing
                part.grad = self._gradient(torch.empty_like(part)) if there else None
                continue
            gradient = owned.stepped.grad
            part.grad = None if gradient is None else self._gradient(gradient.detach().view(part.shape))

    def _hand_out_old_gradients(self) -> None:
        for name, part in self.shards.items():
            owned = self._owned.get(name)
            if part.grad is not None and owned is not None and owned.gradient is not None:
                part.grad = self._gradient(owned.gradient.detach().view(part.shape).to(part.dtype))

    def _gradient(self, values: torch.Tensor) -> ShardGradient:
        made: ShardGradient = marked(values.detach(), ShardGradient, self._peers)
        return made

    def drop_gradients(self) -> None:
        """The optimizer has dropped what was accumulated or reduced: parts show it no more."""
        for part in self.shards.values():
            part.grad = None

    @contextmanager
    def whole_gradients(self, wanted: Collection[torch.Tensor], *, writeback: bool) -> Iterator[None]:
        """A block in which whole parameters have whole gradients, gathered on all ranks; attributes must be whole."""
        names = [name for name, whole in self._wholes.items() if whole in wanted and self.shards[name].grad is not None]
        before = {name: self._wholes[name].grad for name in names}
        for name in names:
            gradient = self.shards[name].grad
            assert gradient is not None
            self._wholes[name].grad = self._gathered(name, gradient.as_subclass(torch.Tensor))
        try:
            yield
        finally:
            for name in names:
                whole, owned = self._wholes[name], self._owned.get(name)
                gradient = self.shards[name].grad
                if writeback and owned is not None and whole.grad is not None and gradient is not None:
                    start = owned.shard.start
                    flat = whole.grad.reshape(-1)[start : start + gradient.numel()]
                    gradient.as_subclass(torch.Tensor).copy_(flat.view(gradient.shape))
                whole.grad = before[name]

    def _gathered(self, name: str, part: torch.Tensor | None = None) -> torch.Tensor:
        """The whole parameter, from its parts on all ranks; or whatever else is divided as it is."""
        whole = self._wholes[name]
        if part is None:
            part = self.shards[name]
        made = torch.empty(whole.shape, dtype=part.dtype, device=part.device)
        splits = [0] * self._peers.shared.world_size
        for shard in self.optimizer.plan.partition.by_param[name]:
            splits[shard.rank] = shard.numel
        rank = self._peers.shared.rank
        start = sum(splits[:rank])
        flat = made.view(-1)
        flat[start : start + splits[rank]].copy_(part.detach().reshape(-1))
        self._peers.shared.all_gather(flat, splits).wait()
        return made


def _in_as_many_dims(part: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Code that sorts parameters by their number of dims (for weight decay, say) must not take a part for a bias."""
    if part.ndim == whole.ndim:
        return part
    return part.view((1,) * (whole.ndim - 1) + (-1,))
