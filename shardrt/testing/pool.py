"""Worker ranks that live as long as a test session, so that a test on several ranks costs milliseconds."""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Any, Literal

from shardrt.errors import ConfigError
from shardrt.testing.call import Call
from shardrt.testing.functions import import_path
from shardrt.testing.outcome import Outcome, RankFailure
from shardrt.testing.process import LAUNCHER_VARIABLES, WorkerProcess
from shardrt.testing.rendezvous import CALL_VARIABLE, forget_keys, host_store

_START_SECONDS = 180.0


class RankPool:
    """Up to ``size`` worker processes, started when first needed and replaced when they end.

    A function runs on the first ``ranks`` of them at once. It is found by its import path, so it must stand at the
    top of a module; its arguments and its result travel as JSON. Whatever it changes in the process (environment,
    default dtype, process group, ...) is put back afterwards.

    Example:
        >>> from shardrt.testing import RankPool
        >>> with RankPool(2) as pool:
        ...     pool.run("os:getenv", ranks=2, key="RANK")
        ['0', '1']
    """

    def __init__(self, size: int, *, warning_filters: Sequence[str] = ()) -> None:
        if size < 1:
            raise ConfigError(f"a pool needs at least one rank, got size={size}")
        self.size = size
        self._warning_filters = list(warning_filters)
        self._workers: list[WorkerProcess | None] = [None] * size
        self._calls = 0
        self._store: Any = None
        self._closed = False

    def run(self, function: Callable[..., Any] | str, /, **options: Any) -> list[Any]:
        """What the function returned, in rank order; :class:`RankFailure` unless all ranks returned.

        Takes what :meth:`outcomes` takes.

        Example:
            >>> from shardrt.testing import RankPool
            >>> with RankPool(1) as pool:
            ...     pool.run("torch.distributed:get_world_size", ranks=1)
            [1]
        """
        outcomes = self.outcomes(function, **options)
        if not all(outcome.ok for outcome in outcomes):
            raise RankFailure(import_path(function), outcomes)
        return [outcome.value for outcome in outcomes]

    def outcomes(
        self,
        function: Callable[..., Any] | str,
        /,
        *,
        ranks: int = 2,
        timeout: float = 60.0,
        init: Literal["gloo"] | None = "gloo",
        group_timeout: float | None = None,
        grace: float = 10.0,
        env: Mapping[str, str] | None = None,
        launcher: bool = True,
        seed: int = 0,
        **kwargs: Any,
    ) -> list[Outcome]:
        """Each rank's value or error, for tests of what goes wrong. A rank that hangs is a failure here too.

        Args:
            function: what to call on every rank, as itself or as ``"module:qualname"``.
            ranks: how many ranks.
            timeout: seconds after which ranks that have not answered are asked for their stacks and ended.
            init: start a process group of this kind first, or None to leave that to the function.
            group_timeout: the timeout of that group; by default a little less than ``timeout``.
            grace: seconds that the others get after a rank's process has ended.
            env: more environment variables.
            launcher: set what torchrun would set (``RANK``, ``WORLD_SIZE``, ``MASTER_PORT``, ...).
            seed: for torch's and Python's generators, the same on all ranks.
            **kwargs: the function's arguments, JSON-able.

        Example:
            >>> from shardrt.testing import RankPool
            >>> with RankPool(1) as pool:
            ...     [outcome] = pool.outcomes("os:_exit", ranks=1, init=None, status=3)
            >>> outcome.describe()
            'WorkerDied: exited with status 3'
        """
        path = import_path(function)
        self._check(ranks, init, launcher, kwargs)
        self._calls += 1
        message = {
            "function": path,
            "kwargs": kwargs,
            "init": init,
            "group_timeout": group_timeout or max(1.0, 0.8 * timeout),
            "seed": seed,
            "warning_filters": self._warning_filters,
            "import_paths": sys.path,
        }
        try:
            workers = self._start(ranks)
            store = self._hosted_store() if launcher else None
            messages = [
                {**message, "environment": {**_variables(rank, ranks, self._calls, store), **(env or {})}}
                for rank in range(ranks)
            ]
            call = Call(self._calls, workers, timeout=timeout, grace=grace)
            outcomes = call.run(messages)
            if store is not None:
                forget_keys(store)
        except BaseException:  # an interrupt, say: what the workers are doing is unknown, so none of them is kept
            self._end(patience=0)
            self._store = None
            raise
        if call.timed_out:
            self._end(patience=0)
            raise RankFailure(path, outcomes)
        return outcomes

    def close(self) -> None:
        """End the workers. A closed pool cannot be used again."""
        self._closed = True
        self._end(patience=2.0)
        self._store = None

    def __enter__(self) -> RankPool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _check(self, ranks: int, init: str | None, launcher: bool, kwargs: Mapping[str, Any]) -> None:
        if self._closed:
            raise ConfigError("this pool is closed; make another RankPool")
        if not 1 <= ranks <= self.size:
            raise ConfigError(f"ranks={ranks} of a pool of {self.size}; ask for 1 to {self.size} or make a larger pool")
        if init not in (None, "gloo"):
            raise ConfigError(f"init={init!r}; use 'gloo', or None and start the process group in the function")
        if init is not None and not launcher:
            raise ConfigError("launcher=False sets no rank, so no process group can start; add init=None")
        try:
            json.dumps(kwargs)
        except (TypeError, ValueError) as error:
            raise ConfigError(f"arguments for other ranks travel as JSON: {error}; got {kwargs!r}") from None

    def _hosted_store(self) -> Any:
        if self._store is None:
            self._store = host_store()
        return self._store

    def _start(self, ranks: int) -> list[WorkerProcess]:
        fresh = []
        workers = []
        for rank in range(ranks):
            worker = self._workers[rank]
            if worker is None or worker.ended:
                if worker is not None:
                    worker.close()
                worker = self._workers[rank] = WorkerProcess()
                fresh.append(worker)
            workers.append(worker)
        deadline = time.monotonic() + _START_SECONDS
        for worker in fresh:
            _await_ready(worker, deadline)
        return workers

    def _end(self, *, patience: float) -> None:
        for worker in self._workers:
            if worker is not None:
                worker.close(patience)
        self._workers = [None] * self.size


def _await_ready(worker: WorkerProcess, deadline: float) -> None:
    while time.monotonic() < deadline:
        readable, _, _ = select.select([worker], [], [], 1.0)
        if not readable:
            continue
        received = worker.receive()
        if received is None:
            raise RankFailure(
                "starting a worker",
                [Outcome(rank=0, error_type="WorkerDied", error_message=worker.exit_text(), output=worker.output())],
            )
        if any("ready" in message for message in received):
            return
    raise RankFailure(
        "starting a worker",
        [Outcome(rank=0, error_type="WorkerStuck", error_message="not ready in time", output=worker.output())],
    )


def _variables(rank: int, ranks: int, call: int, store: Any) -> dict[str, str | None]:
    if store is None:
        return dict.fromkeys(LAUNCHER_VARIABLES)
    return {
        CALL_VARIABLE: str(call),
        "RANK": str(rank),
        "WORLD_SIZE": str(ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(ranks),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",  # every rank connects, none binds, as under torchrun
    }
