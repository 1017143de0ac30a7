"""ZeRO-1 as an ordinary ``torch.optim.Optimizer``: each rank keeps the state of its own shards only."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

import torch

from shardrt.errors import OptimizerError, UnsupportedError
from shardrt.optim.agreement import agree_on_values, explain_different_settings, optimizer_fields
from shardrt.optim.amp import teach_grad_scaler
from shardrt.optim.attendance import Attendance
from shardrt.optim.backward import BackwardWatch
from shardrt.optim.engine import BucketEngine, Gradients
from shardrt.optim.followers import Followers, call_if_alive, remove_hooks
from shardrt.optim.freezing import FreezingOptimizer
from shardrt.optim.gradients import OwnedShard
from shardrt.optim.hooked import HookResults
from shardrt.optim.local import LocalOptimizer
from shardrt.optim.params import NamedGroup, check_no_aliases, read_groups
from shardrt.optim.placing import owned_shards
from shardrt.optim.planner import Planner
from shardrt.optim.reach import may_be_joined
from shardrt.optim.residence import RESIDENT, PrecisionOf, Residence, own_precision
from shardrt.optim.settings import Settings, options_of
from shardrt.optim.spans import TrainerSpans
from shardrt.optim.wires import Wires
from shardrt.plan import Plan, Shard
from shardrt.protocols import OverlappingSchedule, Schedule

if TYPE_CHECKING:
    from shardrt.runtime import Runtime


class ShardedOptimizer(FreezingOptimizer):
    """What :meth:`shardrt.Runtime.optimizer` returns on several ranks.

    ``param_groups`` are the user's, with the whole parameters: schedulers, hooks and ``zero_grad`` see what they
    always see. ``state`` has this rank's part: whole parameters by themselves, slices by their shard.
    """

    def __init__(
        self,
        runtime: Runtime,
        planner: Planner,
        plan: Plan,
        groups: Sequence[NamedGroup],
        defaults: Mapping[str, Any],
        *,
        wires: Wires,
        schedule: Schedule,
        gradients: Gradients,
        residence: Residence = RESIDENT,
        precision: PrecisionOf = own_precision,
        shards: Mapping[Shard, torch.Tensor] | None = None,
    ) -> None:
        self._prepare(runtime, planner, plan)
        self.residence = residence
        """Which whole buffers stay in memory between their uses."""
        self._precision = precision
        self._initial_shards = shards or {}
        self.followers = Followers()
        self.wires, self.mesh = wires, wires.mesh
        teach_grad_scaler()
        self._leaves_gradients = self._retired = False
        self._taken: list[dict[str, Any]] | None = None
        self._spans = None if runtime.timeline is None else TrainerSpans(runtime.timeline)
        self._hooked: HookResults | None = None
        self.attendance = Attendance()
        self._left = self.announcer = self.attached_to = self.watch = None
        # Looked at once: asking an object whether it follows a protocol takes longer than the rest of a bucket's hooks.
        self._overlapping = schedule if isinstance(schedule, OverlappingSchedule) else None
        early = self._overlapping is not None or not residence.gradients
        if early and gradients != "reduced":
            # Weak: the hooks that hold the watch live as long as the parameters, and must not keep us alive.
            bucket_ready, afterwards = weakref.WeakMethod(self._bucket_ready), weakref.WeakMethod(self._after_backward)
            self.watch = BackwardWatch(lambda bucket: call_if_alive(bucket_ready, bucket))
            self.watch.afterwards = lambda: call_if_alive(afterwards)
            again = weakref.WeakMethod(self.agree_on_late)
            self.watch.again = lambda late: call_if_alive(again, late) or ()
        self.gradients = gradients
        self._schedule = schedule
        self._params = {param.name: param for group in groups for param in group.params}
        self._owned: dict[Shard, OwnedShard] = {}
        self._checked_gradients = False
        self._local = LocalOptimizer(
            planner.optimizer_class,
            [(group.options, self._own_shards_of(group)) for group in groups],
            defaults,
            joins=may_be_joined(planner.optimizer_class, planner.reach),
        )
        self._hooks: list[torch.utils.hooks.RemovableHandle] = []
        weakref.finalize(self, remove_hooks, self._hooks)
        self._engine: BucketEngine | None = None
        super().__init__([group.as_torch() for group in groups], dict(self._local.inner.defaults))
        for index, group in enumerate(self.param_groups):
            group.update(self._local.options(index))

    def make_buckets(self) -> None:
        """Let parameters live in buckets: when all ranks have come this far, since whole ones may go with it."""
        self._build_engine()
        self._initial_shards = {}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Reduce the gradients, update this rank's shards, gather the parameters.

        A closure is called once, before anything else, as torch's own optimizers do.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        started = time.perf_counter()
        with self._runtime.telling_peers(), torch.no_grad():
            if self.announcer is not None:
                self.announcer.announce("step", self, anew=self.begins_anew())
            self._check_ready()
            self._notice_changes()
            if self._steps == 0 and self.updates_early:  # see Note [The first step is late]
                for bucket in range(self.engine.bucket_count):
                    self.engine.reduce(bucket)
            self.followers.updating()
            self._schedule.step(self.engine)
            self._step_thawed()
            self.engine.step_done()
            # Not bucket by bucket: each starts from the options as they were, so that a count which the optimizer
            # keeps in its groups goes up once per step.
            self._local.give_options(self.param_groups)
            if self.watch is not None:
                self.watch.rounds = 0
            self._taken = None
            self.followers.renewed()
        if self._spans is not None:
            self._spans.step(started, self._steps)
        self._finished(started)
        return loss

    def _check_ready(self) -> None:
        if self._retired:
            raise OptimizerError(
                "another optimizer has been made for parameters of this one, and has taken over listening to backward; "
                "step that one, or use schedule='sync', under which several may share parameters"
            )
        if self.watch is not None:
            self.watch.check_complete()
        if self.updates_early:
            self.engine.check_gradients()
            if self._taken is not None and options_of(self._taken) != options_of(self.param_groups):
                raise OptimizerError(
                    f"options of a parameter group (the learning rate, say) were changed between backward and step(), "
                    f"but schedule {self._schedule.name!r} updates during backward; change them before backward or "
                    "after step(), or use schedule='bucket' or 'priority'"
                )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients, and a reduction of them that clipping has made."""
        if self.announcer is not None and not self.residence.gradients:
            self.announcer.announce("zero", self, set_to_none=set_to_none)
        super().zero_grad(set_to_none=set_to_none)
        self._left = None
        if self.watch is not None and not self.updates_early and self.watch.drop_round():
            # Had it raised on some ranks only, the others would be waiting elsewhere.
            with self._runtime.agreeing("zero_grad after a backward that raised"):
                pass
        self.engine.forget_reduction()
        self.engine.forget_gradients(keep_zeros=not set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take more parameters to train; owners of the earlier ones do not change. Every rank must call it."""
        if self._engine is None:  # the base class sets itself up
            super().add_param_group(param_group)
            return
        self._refuse_inside_a_step("add_param_group")
        with self._runtime.agreeing("add_param_group") as fields:
            self._planner.check_extensible()
            [group] = read_groups([param_group], first_group=len(self.param_groups), taken=self._params.values())
            check_no_aliases([*self._params.values(), *group.params])
            plan = self._planner.extended(self.plan, [param.spec() for param in group.params])
            fields.update(optimizer_fields(plan, self._planner.optimizer_class, {}, [group], self.gradients))
        self.plan = plan
        self._params |= {param.name: param for param in group.params}
        self._local.add_group(group.options, self._own_shards_of(group))
        super().add_param_group(group.as_torch())
        self.param_groups[-1].update(self._local.options(-1))
        self._build_engine()

    def reduced_gradients(self, wanted: set[torch.Tensor] | None) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Reduce, if nothing has yet; this rank's shards make up its part of the norm.

        Gradients that came reduced are whole on every rank, and so are all scaled on every rank.
        """
        self._refuse_when_updated_early("gradients cannot be clipped by what is known only afterwards")
        with self._runtime.telling_peers():
            self._notice_changes()
            shards = self.engine.reduced_gradients(wanted)
        if self.gradients != "reduced":
            return shards, shards
        tensors = (param.tensor for param in self._params.values())
        return shards, [t.grad for t in tensors if t.grad is not None and (wanted is None or t in wanted)]

    @property
    def updates_early(self) -> bool:
        """Whether parameters are updated inside backward, before anything can be done to the gradients."""
        return self._overlapping is not None and self._overlapping.updates_early and self.watch is not None

    @property
    def has_hook(self) -> bool:
        """Whether a communication hook of the user's reduces its gradients."""
        return self._hooked is not None

    def _refuse_when_updated_early(self, what: str) -> None:
        if self.updates_early:
            raise UnsupportedError(
                f"schedule {self._schedule.name!r} updates parameters during backward, so {what}; "
                "use schedule='bucket' or 'priority'"
            )

    def leave_gradients_to(
        self, ddp: torch.nn.parallel.DistributedDataParallel, hooked: HookResults | None = None
    ) -> None:
        """DDP keeps gradients in buckets of its own and writes to them after backward: they are copied, not moved.

        With ``hooked``, a communication hook reduces them. Where nothing is updated before ``step`` they are then
        simply found in ``p.grad``, where users may still change them.
        """
        self._refuse_inside_a_step("attach")
        self._leaves_gradients = True
        # Weak: DDP holds the hooks that hold us, in memory that Python's collector cannot see into.
        self.attached_to = module = weakref.ref(ddp)
        if self.watch is not None:
            self.watch.synchronised = lambda: bool(getattr(module(), "require_backward_grad_sync", False))
        if hooked is not None and not self.updates_early:
            self.gradients, self.watch = "reduced", None
        elif hooked is not None:
            self._hooked = hooked
        self._build_engine()

    def take_gradients_of_one_rank(self, does: bool) -> None:
        """Gradients come reduced, but not to ranks that have run out of inputs: owners get them from one that has.

        Those whose ``attendance`` is absent contribute nothing, and the sum of one rank's gradients is its own.
        """
        if (self.gradients == "sum") != does:
            self.gradients, self._leaves_gradients = ("sum" if does else "reduced"), does
            self._build_engine()

    def _refuse_inside_a_step(self, what: str) -> None:
        if self.watch is not None and self.watch.rounds:
            raise OptimizerError(
                f"{what} between backward and step(): the buckets of this step are under way; call it after step()"
            )

    def retire(self) -> None:
        """Stop listening to backward: another optimizer has been made for these parameters."""
        self.engine.remove_hooks()
        self.engine.settle()
        self._retired = True

    def telling_peers(self) -> AbstractContextManager[None]:
        """A block whose failure on this rank ends the others' waiting."""
        return self._runtime.telling_peers()

    def finish(self) -> None:
        """Wait for gathers that were left to whoever reads the parameters."""
        self.engine.finish_reads()

    def named(self) -> dict[str, torch.Tensor]:
        """The whole parameters by their names, in order."""
        return {name: param.tensor for name, param in self._params.items()}

    def owned(self) -> list[tuple[Shard, torch.Tensor]]:
        """This rank's shards, each with the tensor that the user's class steps."""
        return [(shard, owned.stepped) for shard, owned in self._owned.items()]

    def replace_state(self, state: dict[torch.Tensor, dict[str, Any]]) -> None:
        """Let the user's class go on from this state."""
        super().replace_state(state)
        self.state.clear()
        self._show_state()

    def check_between_steps(self, what: str) -> None:
        """Raise if an update is under way, whose state nobody could tell."""
        if not self.followers.steps_elsewhere:
            self._refuse_inside_a_step(what)

    def spread_parameters(self) -> None:
        """The shards have new values: where whole parameters stay and are apart from them, these follow."""
        with self._runtime.telling_peers(), torch.no_grad():
            self.engine.spread_parameters()
            self.followers.renewed()

    def _local_optimizer(self) -> torch.optim.Optimizer:
        return self._local.inner

    @property
    def engine(self) -> BucketEngine:
        """The buckets as they are laid out now."""
        assert self._engine is not None
        return self._engine

    def _own_shards_of(self, group: NamedGroup) -> list[torch.nn.Parameter]:
        found = owned_shards(
            group.params,
            self.plan.partition,
            self.wires.shared.rank,
            residence=self.residence,
            precision=self._precision,
            values=self._initial_shards,
        )
        mine = {owned.shard: owned for owned in found}
        self._owned |= mine
        return [owned.stepped for owned in mine.values()]

    def _build_engine(self) -> None:
        carried = None
        if self._engine is not None:
            self._engine.remove_hooks()
            self._engine.settle()
            if not self.updates_early:  # else it has been stepped with
                carried = self._engine.carried()
            self.followers.rebuilding()
        self._local.laid_out_anew()
        self._engine = BucketEngine(
            self.plan,
            self._params,
            self.wires.shared,
            gradients=self.gradients,
            owned=self._owned,
            update=self._update_shards,
            read_failed=self._runtime.report_failure,
            gather_communicator=self.wires.gathers,
            replicas=self.wires.replicas,
            everybody=self.wires.everybody,
            watch=self.watch,
            hooked=self._hooked,
            adopts_gradients=not self._leaves_gradients,
            residence=self.residence,
            precision=self._precision,
            timeline=self._runtime.timeline,
            settings=Settings(self._settings, lambda: explain_different_settings(self._runtime, self._settings())),
            attendance=self.attendance,
        )
        if carried is not None:
            self._engine.carry_on(carried)
        if self.watch is not None:
            self.watch.start_over(self._engine.gradient_counts())
        self._hooks[:] = self._engine.hooks
        self._tensors = [param.tensor for param in self._params.values()]
        self._trained = [spec.trainable for spec in self.plan.params]
        self.followers.rebuilt(self._engine)
        self._runtime.plan_built(self.plan)

    def _settings(self) -> dict[str, Any]:
        return {
            "steps taken": self._steps,
            "group options": options_of(self.param_groups),
            "parameters that are frozen": self._frozen,
        }

    def _bucket_ready(self, bucket: int) -> None:
        assert self.watch is not None
        if self.updates_early and self.watch.rounds:
            raise OptimizerError(
                f"a second backward before step(): schedule {self._schedule.name!r} has updated the parameters with "
                "the first already; accumulate inside rt.no_sync(opt), checkpoint with use_reentrant=False, or use "
                "schedule='bucket' or 'priority'"
            )
        with self._runtime.telling_peers(), torch.no_grad():
            if bucket == 0:
                if self.updates_early:
                    self._taken = [{key: group[key] for key in group if key != "params"} for group in self.param_groups]
                self._note_frozen()
                self.engine.finish_reads()
                self.engine.follow_moved_parameters()
                self.followers.reducing()
            self.engine.renew(bucket)
            if self._overlapping is not None and not (self._steps == 0 and self.updates_early):
                self._overlapping.bucket_ready(self.engine, bucket)
            else:  # see Note [The first step is late]; or gradients that do not stay until the step
                self.engine.reduce(bucket)

    def _after_backward(self) -> None:
        if self._spans is not None and self.watch is not None:
            self._spans.backward(self.watch.began)
        if self._leaves_gradients:
            self._left = self._gradient_versions()
        with self._runtime.telling_peers():
            self.followers.reduced()
        if self.step_after_backward:
            self.step()

    def _update_shards(self, owned: Sequence[OwnedShard] | None) -> None:
        started = time.perf_counter()
        # Inside backward: the options that backward began with, for every bucket alike.
        self._local.take_options(self.param_groups if self._taken is None else self._taken)
        self._local.step(None if owned is None else [one.stepped for one in owned])
        if self._spans is not None:
            self._spans.update(started)
        if len(self.state) != len(self._local.inner.state):
            self._show_state()

    def _show_state(self) -> None:
        users: dict[torch.Tensor, torch.Tensor] = {
            owned.stepped: self._params[owned.shard.param].tensor for owned in self._owned.values()
        }
        for stepped, state in self._local.inner.state.items():
            whole = users.get(stepped)
            self.state[whole if whole is not None and whole.shape == stepped.shape else stepped] = state

    def _notice_changes(self) -> None:
        self._note_frozen()
        self.engine.finish_reads()
        if self._left is not None and self._left != self._gradient_versions():
            raise OptimizerError(
                "gradients were changed after DDP's backward, when their reduction had started; clip with "
                "rt.clip_grad_norm_ or rt.clip_grad_value_, or use schedule='sync'"
            )
        if not self.updates_early and not self.engine.given_out:  # what was clipped would be reduced anew
            self.follow_freezing()
        self.engine.follow_moved_parameters()
        if self.gradients == "reduced" and not self._checked_gradients:
            agree_on_values(
                self._runtime,
                "gradients said to be reduced",
                {name: param.tensor.grad for name, param in self._params.items()},
                fix="gradients='reduced' says that DDP or the trainer has made them equal on all ranks; if nothing "
                "has, pass gradients='average'",
            )
            self._checked_gradients = True


# Note [The first step is late]: whether a loop clips, scales its loss or accumulates without no_sync is seen only when
# it does so, after its first backward. A schedule that updates inside backward would have changed parameters by then.
# So in the first iteration it only reduces there, and a loop it cannot serve is refused with nothing changed.
