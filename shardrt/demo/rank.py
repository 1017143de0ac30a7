"""A rank's end of the connection to whoever launched it. See Note [Launch protocol] in :mod:`shardrt.launch`."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from typing import Any

from shardrt.errors import ConfigError, ShardrtError
from shardrt.hearing import PASSING_ON
from shardrt.launch import SOCKET_VARIABLE

_LINGER_SECONDS = 2.0

Report = Callable[[Any], None]
Work = Callable[[Mapping[str, Any], Report], Any]


def run_rank(work: Work) -> None:
    """Call ``work(settings, report)`` and send its result, or its error, to the parent.

    ``report(event)`` sends any JSON value on the way. The work imports torch itself, after the parent knows us.

    Example:
        >>> from shardrt.demo.rank import run_rank
        >>> run_rank(lambda settings, report: None)
        Traceback (most recent call last):
        shardrt.errors.ConfigError: SHARDRT_LAUNCH_SOCKET is not set: this module is started by shardrt.launch
    """
    path = os.environ.get(SOCKET_VARIABLE)
    if path is None:
        raise ConfigError(f"{SOCKET_VARIABLE} is not set: this module is started by shardrt.launch")
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    connection.connect(path)

    def send(message: dict[str, Any]) -> None:
        connection.sendall(json.dumps(message).encode() + b"\n")

    send({"hello": int(os.environ["RANK"]), "pid": os.getpid()})
    threading.Thread(target=_end_with_parent, args=(connection,), daemon=True, name="parent-watch").start()
    try:
        result = work(json.loads(sys.argv[-1]), lambda event: send({"event": event}))
        send({"result": result})
    except BaseException as error:
        send({"error": _in_words(error), "type": type(error).__name__})
        if type(error).__name__ in PASSING_ON:
            # When this rank ends, torchrun ends the others: let the one that knows the cause speak first.
            time.sleep(_LINGER_SECONDS)
        raise
    finally:
        connection.close()


def _end_with_parent(connection: socket.socket) -> None:
    while connection.recv(1):
        pass
    os._exit(1)  # nobody wants the result any more, and the main thread may be stuck


def _in_words(error: BaseException) -> str:
    told = f"{type(error).__name__}: {error}"
    # Our own errors say what to do. Anything else is unexpected, and where it happened is half the answer.
    return told if isinstance(error, ShardrtError) else f"{told}\n{''.join(traceback.format_exception(error)).rstrip()}"
