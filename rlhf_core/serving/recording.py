"""Requests and replies in a file, where the operator asked for that: they are what users wrote."""

from __future__ import annotations

import json
import logging
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlhf_core.errors import RlhfError

logger = logging.getLogger(__name__)


class RequestRecorder:
    """Appends a JSON line per reply to a file that only its owner may read.

    A line that cannot be written is lost, with a warning in the log; requests are answered all the same.

    Raises:
        RlhfError: The file cannot be opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
        except OSError as error:
            raise RlhfError(f"cannot record into {path} ({error.strerror}); name another file with --record") from error
        self._file = os.fdopen(descriptor, "w", encoding="utf-8")

    def record(self, row: Mapping[str, Any]) -> None:
        """Append ``row`` at once."""
        try:
            with self._lock:
                self._file.write(json.dumps(row, ensure_ascii=False) + "\n")
                self._file.flush()
        except (OSError, ValueError) as error:
            logger.warning("a reply was not recorded in %s: %s", self.path, error)

    def close(self) -> None:
        """Close the file; what comes later is not recorded."""
        with self._lock:
            self._file.close()
