# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint's file so that a failure is an ordinary error."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO


class FileWriter:
    """A file to write to that never raises before :meth:`finish`.

    ``torch.save`` writes from C++, where a second failure, in closing the archive after a failed write, ends the
    process. So after the first error everything is accepted and thrown away.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: OSError | None = None
        with self._kept():
            self._file: BinaryIO = path.open("wb")

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self._error = self._error or error

    def write(self, data: Any) -> int:
        """Write bytes or a buffer; returns its length, as if all of it had been written."""
        view = memoryview(data).cast("B")
        if self._error is None:
            with self._kept():
                self._file.write(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: :meth:`finish` writes what is left."""

    def finish(self) -> None:
        """Close the file.

        Raises:
            OSError: what went wrong first, with the path. The file is incomplete.
        """
        if hasattr(self, "_file"):
            with self._kept():
                self._file.close()
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror or str(self._error), str(self.path))
