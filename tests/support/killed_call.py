"""A call that changes the registry or files, killed with SIGKILL before one of its changes."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from typing import Any

CHANGING = (
    "set_registered_model_alias",
    "delete_registered_model_alias",
    "set_registered_model_tag",
    "delete_registered_model_tag",
    "set_model_version_tag",
    "delete_model_version_tag",
    "log_artifact",
    "log_param",
)


FILE_CHANGES = ("rename", "replace", "unlink", "rmdir")


def killed_before(step: int, action: Callable[[], Any]) -> bool:
    """Run ``action`` in a process of its own that kills itself before its ``step``-th change;
    whether it did.
    """
    child = os.fork()
    if child == 0:
        from mlflow import MlflowClient

        left = [step]
        for name in CHANGING:

            def change(
                *args: Any, original: Any = getattr(MlflowClient, name), **options: Any
            ) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **options)

            setattr(MlflowClient, name, change)
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):
        return True
    assert os.waitstatus_to_exitcode(status) == 0, "the action failed"
    return False


def killed_before_file_change(number: int, action: Callable[[], object]) -> bool:
    """Run ``action`` in a process that kills itself before its ``number``-th change of a folder;
    whether it did.
    """
    child = os.fork()
    if child == 0:
        left = [number]
        for name in FILE_CHANGES:

            def change(*args: Any, original: Any = getattr(os, name), **options: Any) -> Any:
                left[0] -= 1
                if left[0] == 0:
                    os.kill(os.getpid(), signal.SIGKILL)
                return original(*args, **options)

            setattr(os, name, change)
        try:
            action()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])
