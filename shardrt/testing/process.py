"""One worker process as the pool sees it: two pipes, two files and an exit status."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from typing import IO, Any

from shardrt.testing.worker import STACK_SIGNAL

LAUNCHER_VARIABLES = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_USE_AGENT_STORE",
)
"""What a launcher such as torchrun sets, and what a worker must not inherit from one."""

_STACK_DUMP_SECONDS = 2.0


class WorkerProcess:
    """A worker that is running or has ended; never restarted, the pool makes a new one instead."""

    def __init__(self) -> None:
        commands_read, commands_write = os.pipe()
        answers_read, answers_write = os.pipe()
        self._output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        self._stacks: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        descriptors = (commands_read, answers_write, self._stacks.fileno())
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "shardrt.testing.worker", *map(str, descriptors)],
                pass_fds=descriptors,
                stdin=subprocess.DEVNULL,
                stdout=self._output,
                stderr=self._output,
                env=_environment(),
            )
        finally:
            os.close(commands_read)
            os.close(answers_write)
        self._commands = commands_write
        self._answers = answers_read
        self._unread = b""
        self._output_mark = 0
        self._closed = False

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def fileno(self) -> int:
        """The pipe that becomes readable when the worker answers or ends."""
        return self._answers

    def send(self, message: dict[str, Any]) -> None:
        """Hand over one message; a worker that is gone is noticed when its answer is read."""
        data = (json.dumps(message) + "\n").encode()
        try:
            while data:
                data = data[os.write(self._commands, data) :]
        except BrokenPipeError:
            pass

    def receive(self) -> list[dict[str, Any]] | None:
        """The messages that have arrived, perhaps none yet; None once the worker has ended. Call when readable."""
        chunk = os.read(self._answers, 1 << 20)
        if not chunk:
            return None
        *lines, self._unread = (self._unread + chunk).split(b"\n")
        return [json.loads(line) for line in lines]

    @property
    def ended(self) -> bool:
        """Whether the process is gone."""
        return self._process.poll() is not None

    def exit_text(self) -> str:
        """How it ended, in words."""
        status = self._process.wait()
        return f"ended by {signal.Signals(-status).name}" if status < 0 else f"exited with status {status}"

    def mark_output(self) -> None:
        """What is written from now on belongs to the next :meth:`output`."""
        self._output_mark = os.fstat(self._output.fileno()).st_size

    def output(self, limit: int = 16_000) -> str:
        """What was written to stdout and stderr since the mark, or the end of it."""
        size = os.fstat(self._output.fileno()).st_size
        start = max(self._output_mark, size - limit)
        return os.pread(self._output.fileno(), size - start, start).decode(errors="replace")

    def ask_for_stacks(self) -> None:
        """Make it write the Python stacks of all its threads; works even while it holds the interpreter lock."""
        if not self.ended:
            self._process.send_signal(STACK_SIGNAL)

    def stacks(self) -> str:
        """The stacks asked for, once they are complete."""
        deadline = time.monotonic() + _STACK_DUMP_SECONDS
        size = -1
        while time.monotonic() < deadline and not self.ended:
            now = os.fstat(self._stacks.fileno()).st_size
            if now == size > 0:
                break
            size = now
            time.sleep(0.05)
        return os.pread(self._stacks.fileno(), 64_000, 0).decode(errors="replace")

    def close(self, patience: float = 0.0) -> None:
        """End it: closing the pipe asks, and after ``patience`` seconds SIGKILL insists. Safe to call again."""
        if self._closed:
            return
        self._closed = True
        os.close(self._commands)
        try:
            self._process.wait(timeout=patience)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._answers)
        self._output.close()
        self._stacks.close()


def _environment() -> dict[str, str]:
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    environment["OMP_NUM_THREADS"] = environment["MKL_NUM_THREADS"] = "1"
    environment["PYTHONUNBUFFERED"] = "1"
    environment.setdefault("RES_OPTIONS", "timeout:1 attempts:1")  # see Note [One store for all calls]
    interfaces = {name for _, name in socket.if_nameindex()}
    if "lo" in interfaces:
        # Gloo otherwise looks up the host's name, which containers often cannot resolve.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo")
    return environment
