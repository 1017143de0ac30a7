"""A rank: reads calls as JSON lines from one pipe, runs them, and answers on another. See Note [Worker protocol].

Note [Worker protocol]
======================
The pool starts ``python -m shardrt.testing.worker COMMANDS ANSWERS STACKS`` with three inherited file descriptors.

1. The worker imports torch and says ``{"ready": pid}``.
2. The pool sends ``{"call": number, "function": ..., "kwargs": ..., "environment": ..., ...}``.
3. The worker runs the function and answers ``{"call": number, "value": ...}`` or ``{..., "error_type": ...}``, but
   keeps its process group: a rank that closes its sockets while a peer still reads would turn the peer's right result
   into an error.
4. When all ranks have answered (or a peer failed and patience is over) the pool sends ``{"release": number}``; the
   worker destroys the group, restores what the call changed, and answers ``{"released": number}``.

A thread watches the command pipe, so that a worker ends when its parent is gone even while a call is stuck.
"""

from __future__ import annotations

import faulthandler
import json
import os
import queue
import signal
import sys
import threading
import time
import traceback
from contextlib import ExitStack
from datetime import timedelta
from typing import IO, Any

from shardrt.errors import ConfigError
from shardrt.testing.functions import resolve
from shardrt.testing.isolation import isolated
from shardrt.testing.rendezvous import rank_store

STACK_SIGNAL = signal.SIGUSR1


def main(arguments: list[str]) -> None:
    """Serve calls until the parent closes the pipe."""
    commands_fd, answers_fd, stacks_fd = (int(argument) for argument in arguments)
    for descriptor in (commands_fd, answers_fd, stacks_fd):
        os.set_inheritable(descriptor, False)  # a grandchild that outlives us must not keep the pipes open
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it ends us
    faulthandler.register(STACK_SIGNAL, file=stacks_fd, all_threads=True)
    faulthandler.enable()

    import torch
    import torch.distributed

    torch.set_num_threads(1)
    commands: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_listen, args=(commands_fd, commands), daemon=True, name="parent-watch").start()
    with os.fdopen(answers_fd, "w", encoding="utf-8") as answers:
        _say(answers, {"ready": os.getpid()})
        while True:
            _serve(commands.get(), commands, answers)


def _listen(descriptor: int, commands: queue.Queue[dict[str, Any]]) -> None:
    with os.fdopen(descriptor, "r", encoding="utf-8") as lines:
        for line in lines:
            commands.put(json.loads(line))
    os._exit(0)  # the parent is gone: nobody wants the result, and the main thread may be stuck


def _serve(call: dict[str, Any], commands: queue.Queue[dict[str, Any]], answers: IO[str]) -> None:
    with ExitStack() as cleanup:
        cleanup.enter_context(isolated(seed=call["seed"], warning_filters=call["warning_filters"]))
        cleanup.callback(_destroy_group)
        answer = _run(call)
        sys.stdout.flush()
        sys.stderr.flush()
        _say(answers, {"call": call["call"], **answer})
        release = commands.get()
        assert release == {"release": call["call"]}, f"expected the release of call {call['call']}, got {release}"
    _say(answers, {"released": call["call"]})


def _run(call: dict[str, Any]) -> dict[str, Any]:
    started = time.monotonic()
    try:
        sys.path[:] = call["import_paths"]
        for name, value in call["environment"].items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if call["init"] is not None:
            _start_group(call["init"], call["group_timeout"])
        value = resolve(call["function"])(**call["kwargs"])
        _check_result(value)
        return {"value": value, "seconds": time.monotonic() - started}
    except BaseException as error:  # SystemExit included: it is an answer too
        return {
            "error_type": type(error).__name__,
            "error_message": str(error),
            "error_bases": [base.__name__ for base in type(error).__mro__],
            "traceback": "".join(traceback.format_exception(error)),
            "seconds": time.monotonic() - started,
        }


def _check_result(value: Any) -> None:
    try:
        json.dumps(value)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"a rank's result travels as JSON, and {type(value).__name__} does not ({error}); "
            f"return numbers, strings, lists and mappings, for instance tensor.tolist()"
        ) from None


def _start_group(backend: str, timeout: float) -> None:
    import torch.distributed as dist

    dist.init_process_group(
        backend,
        store=rank_store(timeout),
        rank=int(os.environ["RANK"]),
        world_size=int(os.environ["WORLD_SIZE"]),
        timeout=timedelta(seconds=timeout),
    )


def _destroy_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _say(answers: IO[str], message: dict[str, Any]) -> None:
    answers.write(json.dumps(message) + "\n")
    answers.flush()


if __name__ == "__main__":
    main(sys.argv[1:])
