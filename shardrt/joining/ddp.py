"""What a DistributedDataParallel module that was attached still communicates, on ranks without inputs.

DDP's forward broadcasts buffers and says whether its backward is going to be synchronised; its buckets are laid out
anew after the first backward; with ``find_unused_parameters`` it tells in backward which parameters were used.
Gradients are not among it: see :meth:`shardrt.Runtime.attach`.

Note [DDP blocks]: these are torch's own collectives, which know nothing of our reports of failure. A rank without
inputs makes them in a thread, and looks for failures meanwhile. Ranks with inputs make them inside DDP, where the
timeout of the process group is the limit.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.algorithms.join import _JoinConfig
from torch.nn.parallel import DistributedDataParallel

from shardrt.errors import CommunicationError, UnsupportedError
from shardrt.optim.hooked import Patience

_LOOK_FOR_FAILURES_SECONDS = 0.5


class DdpFollower:
    """One DDP module during a block of uneven inputs."""

    def __init__(self, ddp: DistributedDataParallel, patience: Patience, *, world_size: int) -> None:
        group = ddp.process_group
        if (group.rank(), group.size()) != (patience.rank, world_size):
            raise UnsupportedError(
                f"the DistributedDataParallel module works on another process group (rank {group.rank()} of "
                f"{group.size()}) than the runtime (rank {patience.rank} of {world_size}), so that ranks cannot stand "
                "in for one another; give both the same process group"
            )
        if hasattr(ddp, "buffer_hook"):
            raise UnsupportedError(
                "the DistributedDataParallel module has a communication hook for its buffers, which a rank without "
                "inputs cannot follow; remove it, or give every rank the same number of inputs"
            )
        self.ddp: Any = ddp
        self._patience = patience
        self._handles: list[torch.utils.hooks.RemovableHandle] = []
        self._used: object = None

    def begin(self, announce: Callable[[bool], None]) -> None:
        """``announce(trains)`` is called before each forward, which then goes by the rules of torch's ``Join``."""

        def before_forward(_: torch.nn.Module, __: tuple[object, ...]) -> None:
            announce(torch.is_grad_enabled())

        self._handles.append(self.ddp.register_forward_pre_hook(before_forward))
        # Not the first of its context: its roll calls are ours.
        self.ddp._join_config = _JoinConfig(enable=True, throw_on_early_termination=False, is_first_joinable=False)

    def end(self) -> None:
        """DDP is as it was."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.ddp._join_config = _JoinConfig(enable=False, throw_on_early_termination=False, is_first_joinable=False)

    def follow_forward(self, *, trains: bool) -> None:
        """Take part in a forward of the ranks that have inputs."""
        self._patiently(lambda: self._forward(trains), "a forward of DistributedDataParallel")

    def follow_backward(self) -> None:
        """Take part in a synchronised backward of the ranks that have inputs: nothing was used here."""
        if self.ddp.find_unused_parameters and not self.ddp.static_graph:
            # Not waited for: ranks with inputs get there at the end of their backward, and announce more before that.
            nothing = torch.zeros_like(self.ddp.reducer._get_local_used_map())
            self._used = self.ddp.process_group.allreduce([nothing])
        self.ddp.reducer._push_all_rebuilt_params()

    def share_buffers(self, source: int) -> None:
        """Everyone gets the buffers of one rank, if DDP keeps them the same at all."""
        ddp = self.ddp
        if ddp.forward_sync_buffers and ddp.modules_buffers:
            size = ddp.broadcast_bucket_size
            self._patiently(
                lambda: ddp._distributed_broadcast_coalesced(ddp.modules_buffers, size, source),
                "the broadcast of buffers",
            )

    def _forward(self, trains: bool) -> None:
        ddp = self.ddp
        if trains:
            ddp.reducer._rebuild_buckets()
        ddp._check_and_sync_module_buffers()
        synchronised = ddp._check_global_requires_backward_grad_sync(is_joined_rank=True)
        ddp.require_forward_param_sync = bool(trains and synchronised)

    def _patiently(self, run: Callable[[], None], what: str) -> None:
        done = threading.Event()
        failures: list[Exception] = []

        def attempt() -> None:
            try:
                with torch.no_grad():
                    run()
            except Exception as error:
                failures.append(error)
            finally:
                done.set()

        threading.Thread(target=attempt, name="shardrt-join-ddp", daemon=True).start()
        deadline = time.monotonic() + self._patience.timeout
        while not done.wait(_LOOK_FOR_FAILURES_SECONDS):
            self._patience.raise_if_peer_failed()
            if time.monotonic() > deadline:
                raise CommunicationError(
                    f"rank {self._patience.rank}: {what} did not come within {self._patience.timeout:g} s; a peer is "
                    "stuck or gone, or raise Runtime(timeout=...)"
                )
        if failures:
            self._patience.raise_if_peer_failed()
            raise CommunicationError(
                f"rank {self._patience.rank}: {what} failed: {failures[0]}; the first rank to fail has the cause"
            ) from failures[0]
