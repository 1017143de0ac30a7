"""The sharded side of torch's GradScaler: unscaling what was reduced. See Note [Wrapping GradScaler] in ``amp``."""

from __future__ import annotations

import torch

from shardrt.errors import OptimizerError
from shardrt.optim.uneven import UnevenOptimizer


class ScalingOptimizer(UnevenOptimizer):
    """An optimizer that reduces its gradients, and whose peers decide together whether a step is skipped."""

    _tensors: list[torch.Tensor]
    _leaves_gradients: bool

    def unscale(self, inverse_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool) -> bool:
        """See :class:`shardrt.optim.amp.ScaledOptimizer`."""
        self._refuse_when_updated_early("GradScaler cannot decide afterwards to skip the update")
        if self.gradients == "reduced":
            return False
        with self._runtime.telling_peers(), torch.no_grad():
            if self.announcer is not None:
                arguments = {"inverse_scale": inverse_scale.item(), "allow_fp16": allow_fp16}
                self.announcer.announce("unscale", self, anew=self.begins_anew(), **arguments)
            self._notice_changes()
            engine = self.engine
            self._unscale_shards(engine.reduced_gradients(), inverse_scale, found_inf, allow_fp16)
            if found_inf.item():
                engine.forget_reduction()  # the scaler is going to skip this step
            elif inverse_scale.item() != 1.0:
                engine.scale_local_gradients(inverse_scale)
                local = [t.grad for t in self._tensors if t.grad is not None] if self._leaves_gradients else []
                if local:
                    torch._foreach_mul_(local, inverse_scale)
                self._left = None if self._left is None else self._gradient_versions()
        return True

    def _unscale_shards(
        self, shards: list[torch.Tensor], inverse_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> None:
        by_kind: dict[tuple[torch.dtype, torch.device], list[torch.Tensor]] = {}
        for shard in shards:
            by_kind.setdefault((shard.dtype, shard.device), []).append(shard)
        if not allow_fp16 and any(param.dtype == torch.float16 for param in self._tensors):
            raise OptimizerError(
                "GradScaler cannot unscale float16 gradients: it needs parameters in float32, cast by autocast"
            )
        for same in by_kind.values():
            torch._amp_foreach_non_finite_check_and_unscale_(same, found_inf, inverse_scale)
        anywhere = found_inf.reshape(1)
        self.wires.everybody.all_reduce(anywhere, op="max").wait()

    def _refuse_when_updated_early(self, what: str) -> None:
        raise NotImplementedError

    def _notice_changes(self) -> None:
        raise NotImplementedError

    def _gradient_versions(self) -> list[tuple[int, int]]:
        return [(id(t.grad), -1 if t.grad is None else t.grad._version) for t in self._tensors]
