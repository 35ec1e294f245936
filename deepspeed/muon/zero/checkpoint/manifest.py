# SPDX-License-Identifier: Apache-2.0
"""What makes a checkpoint complete: one header for all ranks, one manifest per rank, in the tag's folder.

A save writes the header before any file gets its final name; the header's new id invalidates older manifests in the
folder. Each rank adds a manifest of its files once they are on disk. A checkpoint is complete when every rank's
manifest has the header's id, and intact when the files have the sizes and CRC-32 of the manifests. ``torch.save``
writes archives with a CRC-32 of each record: of these the manifest has only the CRC-32 of the archive's directory.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.zero.checkpoint.durable import write_atomically

HEADER = "muon_save.json"
MANIFESTS = "muon_save.*.json"
#: Format 1, which is still read, has the CRC-32 of the contents of every file, also of archives.
FORMAT = 2
#: Bytes that a checksum reads at once.
CHUNK = 4 * 2**20


def manifest_name(rank: int) -> str:
    """Return the file name of the manifest in which ``rank`` lists the files that it saved."""
    return f"muon_save.{rank:05d}.json"


def begin(folder: Path, facts: dict[str, Any]) -> None:
    """Write the header (``muon_save.json``) of a new save to ``folder``. Older manifests there become invalid.

    ``facts``: the contents of the header: ``save_id``, ``world_size``, ``ranks`` (those that write to this folder;
    default: all) and other values that a load compares.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / HEADER, json.dumps({"format": FORMAT, **facts}))


def finish(folder: Path, rank: int, save_id: str, files: Iterable[Path]) -> None:
    """Write the manifest of ``rank``: sizes and checksums of ``files``, which are on disk in ``folder`` or below."""
    listed = {file.relative_to(folder).as_posix(): _facts(file) for file in files}
    write_atomically(folder / manifest_name(rank), json.dumps({"save_id": save_id, "rank": rank, "files": listed}))


def _facts(file: Path) -> dict[str, int | None]:
    """Return {"bytes": size} and a checksum: "records" for archives of ``torch.save``, "crc32" for other files."""
    size = file.stat().st_size
    # torch has computed the CRC-32 of an archive's records; another of the whole file would double a save's CPU time.
    with suppress(zipfile.BadZipFile, ValueError), zipfile.ZipFile(file) as archive:
        return {"bytes": size, "records": _records(archive)}
    is_wanted = getattr(torch.serialization, "get_crc32_options", lambda: True)()  # torch 2.5 has no such option
    return {"bytes": size, "crc32": checksum(file) if is_wanted else None}


def _records(archive: zipfile.ZipFile) -> int:
    """Return a CRC-32 over the directory of a zip archive: the name, offset, size and CRC-32 of each record."""
    assert archive.fp is not None
    archive.fp.seek(archive.start_dir)
    return zlib.crc32(archive.fp.read())


def belongs_to_save(file: Path, save_id: str) -> bool:
    """Return whether a file that :func:`begin` or :func:`finish` wrote is of save ``save_id``; False if unreadable."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        return json.loads(file.read_text())["save_id"] == save_id
    return False


def forget(file: Path, save_id: str) -> bool:
    """Remove a header or manifest if it is of save ``save_id``; return whether it was removed."""
    with suppress(OSError):
        if belongs_to_save(file, save_id):
            file.unlink()
            return True
    return False


def read_header(folder: Path) -> dict[str, Any] | None:
    """Return the contents of the header (``muon_save.json``) in ``folder``; ``None`` if there is no header.

    Raises:
        CheckpointError: the header is unreadable, or a newer version wrote it.
    """
    file = folder / HEADER
    try:
        header = json.loads(file.read_text()) if file.exists() else None
        if header is None or header["format"] <= FORMAT:
            return header
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{HEADER} cannot be read: {error}") from error
    raise CheckpointError(f"{HEADER} was written by a newer deepspeed-muon; upgrade deepspeed-muon")


def damages(folder: Path, save_id: str, rank: int, contents: bool = True) -> list[str]:
    """Return a message for each missing or damaged file that ``rank`` wrote in the save ``save_id``; [] without damage.

    ``contents``: whether to read the files and compare checksums; otherwise only sizes are compared.
    """
    name = manifest_name(rank)
    try:
        manifest = json.loads((folder / name).read_text())
        if manifest["save_id"] != save_id:
            return [f"{name} belongs to another save: the last save of this tag was not finished, or two were mixed"]
        with ThreadPoolExecutor() as threads:  # zlib computes a CRC-32 without the interpreter's lock
            checks = [
                threads.submit(_damage, folder, file, facts, contents) for file, facts in manifest["files"].items()
            ]
            return [damage for check in checks if (damage := check.result())]
    except FileNotFoundError:
        return [f"{name} is missing: rank {rank} did not finish this save"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{name} cannot be read: {error}"]


def _damage(folder: Path, name: str, facts: dict[str, int | None], contents: bool) -> str | None:
    size = facts.pop("bytes")
    key, value = facts.popitem()
    try:
        if (current := (folder / name).stat().st_size) != size:
            return f"{name} has {current} bytes, but {size} were saved"
        is_intact = not contents or _is_intact(folder / name, key, value)
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    except Exception:  # a damaged archive can raise anything
        is_intact = False
    return None if is_intact else f"{name} has changed since it was saved (its CRC-32 differs)"


def _is_intact(file: Path, key: str, value: int | None) -> bool:
    """Return whether ``file`` has the checksum ``value``, which is of the kind ``key``: "crc32" or "records"."""
    if key == "crc32":
        return value is None or checksum(file) == value
    with zipfile.ZipFile(file) as archive:
        has_crc32 = any(record.CRC for record in archive.infolist())  # torch writes 0 if it computes none
        return key == "records" and _records(archive) == value and not (has_crc32 and archive.testzip())


def complete_tags(folder: Path) -> list[str]:
    """Return the tags in ``folder`` whose checkpoints are complete (all files exist in full size), newest first."""
    headers = sorted(folder.glob(f"*/{HEADER}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.name for file in headers if _is_complete(file.parent)]


def _is_complete(folder: Path) -> bool:
    with suppress(CheckpointError):
        if header := read_header(folder):
            ranks = header.get("ranks") or range(header["world_size"])
            return not any(damages(folder, header["save_id"], rank, contents=False) for rank in ranks)
    return False


def checksum(file: Path) -> int:
    """Return the CRC-32 of a file."""
    value, buffer = 0, memoryview(bytearray(CHUNK))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value
