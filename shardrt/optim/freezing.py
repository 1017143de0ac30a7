"""Parameters that are frozen or thawed while they are trained: owners stay, the buckets change."""

from __future__ import annotations

from shardrt.comm.waiting import start_and_wait
from shardrt.optim.agreement import optimizer_fields
from shardrt.optim.params import NamedParam
from shardrt.optim.scaling import ScalingOptimizer


class FreezingOptimizer(ScalingOptimizer):
    """An optimizer that follows what ``requires_grad`` says of its parameters."""

    _params: dict[str, NamedParam]
    _trained: list[bool]
    _frozen: list[str] = []  # noqa: RUF012 - replaced, never changed

    def _build_engine(self) -> None:
        raise NotImplementedError

    def _note_frozen(self) -> None:
        self._frozen = [name for name, param in self._params.items() if not param.tensor.requires_grad]

    def follow_freezing(self) -> bool:
        """Lay out buckets anew if parameters were frozen or thawed; says whether. Every rank calls it."""
        # torch's optimizers still step a parameter that was frozen while it had a gradient: so it is here, until no
        # rank has one any more, which all ranks know from the last step.
        if self.gradients == "reduced":
            trained = [tensor.requires_grad or tensor.grad is not None for tensor in self._tensors]
        else:
            idle = self.engine.idle()
            trained = [
                tensor.requires_grad or (was and tensor not in idle)
                for tensor, was in zip(self._tensors, self._trained, strict=True)
            ]
        if trained == self._trained:
            return False
        # Parameters were frozen or thawed: owners stay, the buckets change.
        with self._runtime.agreeing("parameters frozen or thawed") as fields:
            specs = [param.spec(trainable=flag) for param, flag in zip(self._params.values(), trained, strict=True)]
            plan = self._planner.relaid(self.plan, specs)
            fields.update(optimizer_fields(plan, self._planner.optimizer_class, {}, [], self.gradients))
        self.plan = plan
        self._build_engine()
        return True

    def _step_thawed(self) -> None:
        """Where buckets are updated inside backward, parameters thawed since the last step were in none of them."""
        if not self.updates_early:
            return
        stepped = {tensor for tensor, was in zip(self._tensors, self._trained, strict=True) if was}
        if self.follow_freezing():
            engine = self.engine
            engine.skip(stepped)
            start_and_wait(engine.reduce, range(engine.bucket_count))
            engine.update()
            start_and_wait(engine.gather, range(engine.bucket_count))
            engine.skip(())
