# SPDX-License-Identifier: Apache-2.0
"""Writes a checkpoint's file so that a failure is an ordinary error, and its length and checksum are known."""

from __future__ import annotations

import os
import zlib
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple


class WrittenFile(NamedTuple):
    """A file on disk: its length in bytes and the CRC-32 of its contents."""

    path: Path
    length: int
    crc32: int


class FileWriter:
    """A file to write to that never raises before :meth:`finish`.

    ``torch.save`` writes from C++, where a second failure, in closing the archive after a failed write, ends the
    process. So after the first error everything is accepted and thrown away.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._error: OSError | None = None
        self._file: BinaryIO | None = None
        self._length = self._crc32 = 0
        try:
            self._file = path.open("wb")
        except OSError as error:
            self._error = error

    def write(self, data: Any) -> int:
        """Write bytes or a buffer; returns its length, as if all of it had been written."""
        view = memoryview(data).cast("B")
        if self._file is not None and self._error is None:
            try:
                self._file.write(view)
            except OSError as error:
                self._error = error
            self._crc32 = zlib.crc32(view, self._crc32)
            self._length += len(view)
        return len(view)

    def flush(self) -> None:
        """Nothing: :meth:`finish` brings everything to disk."""

    def finish(self) -> WrittenFile:
        """Close the file once its contents are on disk.

        Raises:
            OSError: what went wrong first, with the path. The file is incomplete.
        """
        if self._file is not None:
            try:
                if self._error is None:
                    self._file.flush()
                    os.fsync(self._file.fileno())
            except OSError as error:
                self._error = error
            try:
                self._file.close()
            except OSError as error:
                self._error = self._error or error
        if self._error is not None:
            raise OSError(self._error.errno, self._error.strerror or str(self._error), str(self.path))
        return WrittenFile(self.path, self._length, self._crc32)
