# SPDX-License-Identifier: Apache-2.0
"""What makes a checkpoint complete: one header for all ranks, one manifest per rank, in the tag's folder.

A save first writes the header, with an id of its own, so that whatever older manifests the folder holds stop
counting. Each rank adds a manifest of its files once they are on disk. A checkpoint is complete when every rank's
manifest carries the header's id, and intact when the files have the sizes and CRC-32 that stand there.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from deepspeed.muon.errors import CheckpointError
from deepspeed.muon.zero.checkpoint.file_writer import WrittenFile

HEADER = "muon_save.json"
FORMAT = 1
#: Bytes read at once for a checksum.
CHUNK = 4 * 2**20


def manifest_name(rank: int) -> str:
    """The file in which a rank lists what it wrote."""
    return f"muon_save.{rank:05d}.json"


def begin(folder: Path, facts: dict[str, Any]) -> None:
    """Write the header, which makes an older checkpoint in this folder incomplete.

    Args:
        facts: ``save_id``, ``world_size``, and whatever a reader may want to know before it loads.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_atomically(folder / HEADER, json.dumps({"format": FORMAT, **facts}))


def finish(folder: Path, rank: int, save_id: str, files: Iterable[WrittenFile]) -> None:
    """List this rank's files, which are on disk and lie below the folder."""
    listed = {file.path.relative_to(folder).as_posix(): {"bytes": file.length, "crc32": file.crc32} for file in files}
    write_atomically(folder / manifest_name(rank), json.dumps({"save_id": save_id, "rank": rank, "files": listed}))


def on_disk(file: Path) -> WrittenFile:
    """A file that something else has written, once its contents are on disk."""
    with file.open("rb+") as written:
        os.fsync(written.fileno())
    return WrittenFile(file, file.stat().st_size, checksum(file))


def forget(folder: Path, save_id: str, files: Iterable[Path], names: Iterable[str]) -> bool:
    """Remove what is left of a save that failed.

    Args:
        files: of checkpoints, that this rank has begun to write.
        names: of this rank's manifest, and of the header where this rank writes it; removed if they are that save's.

    Returns:
        Whether the header was that save's. Then the folder holds no complete checkpoint any more.
    """
    for file in files:
        with suppress(OSError):
            file.unlink(missing_ok=True)
    removed = []
    for name in names:
        with suppress(OSError, ValueError, KeyError, TypeError):
            if json.loads((folder / name).read_text())["save_id"] == save_id:
                (folder / name).unlink()
                removed.append(name)
    with suppress(OSError):
        folder.rmdir()  # only where nothing else is in it
    return HEADER in removed


def read_header(folder: Path) -> dict[str, Any] | None:
    """The header of a folder; ``None`` where there is none.

    Raises:
        CheckpointError: it is there, but cannot be read.
    """
    file = folder / HEADER
    if not file.exists():
        return None
    try:
        header = json.loads(file.read_text())
        if header["format"] == FORMAT:
            return header
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{HEADER} cannot be read: {error}") from error
    raise CheckpointError(f"{HEADER} was written by a newer deepspeed-muon; install that version")


def damages(folder: Path, save_id: str, rank: int, contents: bool = True) -> list[str]:
    """Messages about what is wrong with the files of one rank of a save.

    Args:
        rank: the rank that wrote them.
        contents: whether to read the files and compare checksums, or to look at their sizes only.
    """
    name = manifest_name(rank)
    try:
        manifest = json.loads((folder / name).read_text())
        if manifest["save_id"] != save_id:
            return [f"{name} is of another save: the last save of this tag was not finished, or two were mixed"]
        listed = [(file, facts["bytes"], facts["crc32"]) for file, facts in manifest["files"].items()]
    except FileNotFoundError:
        return [f"{name} is missing: rank {rank} did not finish this save"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return [f"{name} cannot be read: {error}"]
    found = (_damage(folder / file, file, size, crc, contents) for file, size, crc in listed)
    return [damage for damage in found if damage]


def _damage(path: Path, name: str, size: int, crc: int, contents: bool) -> str | None:
    try:
        if (there := path.stat().st_size) != size:
            return f"{name} has {there} bytes, and {size} were saved"
        if contents and checksum(path) != crc:
            return f"{name} has other contents than were saved (CRC-32)"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        return f"{name} cannot be read: {error}"
    return None


def complete_tags(folder: Path) -> list[str]:
    """The tags below a folder whose files are all there in full size, the newest first."""
    headers = sorted(folder.glob(f"*/{HEADER}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent.name for file in headers if _is_complete(file.parent)]


def _is_complete(folder: Path) -> bool:
    try:
        header = read_header(folder)
    except CheckpointError:
        return False
    return header is not None and not any(
        damages(folder, header["save_id"], rank, contents=False) for rank in range(header["world_size"])
    )


def checksum(file: Path) -> int:
    """CRC-32 of a file."""
    value, buffer = 0, memoryview(bytearray(CHUNK))
    with file.open("rb", buffering=0) as source:
        while count := source.readinto(buffer):
            value = zlib.crc32(buffer[:count], value)
    return value


def write_atomically(file: Path, text: str) -> None:
    """Replace a small file: after a crash it holds the old text or the new, never a part."""
    temporary = file.with_name(f"{file.name}.tmp")
    try:
        with temporary.open("w") as target:
            target.write(text)
            target.flush()
            os.fsync(target.fileno())
        temporary.replace(file)
    except BaseException:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    folder = os.open(file.parent, os.O_RDONLY)
    try:
        with suppress(OSError):  # not every file system can do it for a folder
            os.fsync(folder)
    finally:
        os.close(folder)
