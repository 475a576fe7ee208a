"""Chat templates run in a process of their own, under limits of time and memory.

A third-party template may loop, compute 9 ** 9 ** 9 or fill the memory, perhaps for one dialogue of
a million. Nothing within Python ends what runs in C; the system ends a process.
"""

from __future__ import annotations

import json
import math
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection, Pipe
from typing import Any

from jinja2 import TemplateError

from rlhf_core.runtime.limited_call import GIB, lower_limit
from rlhf_core.runtime.machine import data_size

# What a template may take and add for one dialogue, a thousand times what it needs.
SECONDS = 10
MEMORY = 2 * GIB
MOST_ADDED = 2**20
# What code in a template may raise: its own refusals, and Python's errors of what it does with the
# turns.
TEMPLATE_ERRORS = (
    TemplateError,
    TypeError,
    ValueError,
    ArithmeticError,
    LookupError,
    AttributeError,
    RecursionError,
)


class EndlessTemplate(Exception):
    """A template took, or wrote, more than it may."""


class TemplateProcess:
    """Writes dialogues, one at a time, in a child process that starts with the first."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = threading.Lock()

    def write(self, template: str, turns: Sequence[Mapping[str, Any]], **arguments: Any) -> str:
        """The dialogue as ``template`` writes it.

        Args:
            arguments: Those of ``transformers.utils.chat_template_utils.render_jinja_template``,
                special tokens too.

        Raises:
            TemplateError: The template refuses the dialogue.
            EndlessTemplate: It reached a limit.
        """
        limits = {"seconds": SECONDS, "memory": MEMORY}
        request = json.dumps(
            {"limits": limits, "template": template, "turns": turns, "arguments": arguments}
        )
        with self._lock:
            if self._process is None or self._process.poll() is not None:
                self._start()
            assert self._connection is not None and self._process is not None
            try:
                self._connection.send_bytes(request.encode())
                answer = json.loads(self._connection.recv_bytes())
            except (EOFError, ConnectionError):
                code = self._process.wait()
                self.forget()
                ended = (
                    f"takes more than {SECONDS} s"
                    if code == -signal.SIGXCPU
                    else f"ended its process ({code})"
                )
                raise EndlessTemplate(ended) from None
            except BaseException:  # such as Ctrl-C: the answer would be taken for the next one's
                self._process.kill()
                self._process.wait()
                self.forget()
                raise
        if "refused" in answer:
            raise TemplateError(answer["refused"])
        if "endless" in answer:
            raise EndlessTemplate(answer["endless"])
        return str(answer["written"])

    def _start(self) -> None:
        self.forget()
        self._connection, theirs = Pipe()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", __name__],
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=os.environ
                | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "OMP_NUM_THREADS": "1"},
            )

    def forget(self) -> None:
        """Let the next dialogue start a process anew: in a fork, the running one is the parent's."""
        if self._connection is not None:
            self._connection.close()
        self._connection = self._process = None


def main() -> None:
    """Answer requests on the standard input until it is closed."""
    from transformers.utils.chat_template_utils import render_jinja_template

    for number in (
        signal.SIGINT,
        signal.SIGTERM,
        signal.SIGHUP,
    ):  # whoever asks may finish its work on them
        signal.signal(number, signal.SIG_IGN)
    held = data_size()
    lower_limit(resource.RLIMIT_CORE, 0)
    connection = Connection(0)
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except (EOFError, ConnectionError):
            return
        turns = request["turns"]
        arguments = request["arguments"]
        limits = request["limits"]
        lower_limit(resource.RLIMIT_CPU, math.ceil(time.process_time()) + limits["seconds"])
        if held is not None:
            lower_limit(resource.RLIMIT_DATA, held + limits["memory"])
        try:
            rendered: Any = render_jinja_template(
                [turns], chat_template=request["template"], **arguments
            )
            written = rendered[0][0]
            given = sum(len(str(turn.get("content"))) for turn in turns)
            long = len(written) > MOST_ADDED + 2 * given
            answer = (
                {"endless": f"writes {len(written)} characters"} if long else {"written": written}
            )
        except MemoryError:
            answer = {"endless": f"takes more than {limits['memory'] / GIB:g} GiB of memory"}
        except TEMPLATE_ERRORS as error:
            answer = {"refused": str(error)[:MOST_ADDED] or type(error).__name__}
        connection.send_bytes(json.dumps(answer).encode())


templates = TemplateProcess()


def _begin_anew() -> None:
    templates.forget()
    templates._lock = threading.Lock()  # another thread may have held it


os.register_at_fork(after_in_child=_begin_anew)

if __name__ == "__main__":
    main()
