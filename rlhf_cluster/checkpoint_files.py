"""Every change a checkpoint makes on disk, as one small object that tests replace to fill, slow or kill the disk."""

from __future__ import annotations

import contextlib
import hashlib
import os
import shutil
from pathlib import Path


class Files:
    """File operations that are durable when they return, except ``make_folder`` and ``rename``: sync their parent.

    Every method raises OSError.
    """

    def make_folder(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)

    def write(self, path: Path, text: str) -> None:
        """Write ``text`` and fsync the file."""
        with path.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())

    def digest_and_sync(self, path: Path) -> str:
        """SHA-256 of a file that another process wrote, which is on disk afterwards."""
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
            # fsync flushes the file's pages whoever dirtied them; a descriptor for reading is enough.
            os.fsync(file.fileno())
        return digest

    def sync_folder(self, folder: Path) -> None:
        """Make the names in ``folder`` durable."""
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def rename(self, source: Path, target: Path) -> None:
        """Atomic; ``target`` must not exist or be an empty folder."""
        os.rename(source, target)

    def remove(self, folder: Path) -> None:
        """Delete a folder and what is in it; of a link, the link alone."""
        with contextlib.suppress(FileNotFoundError):
            if folder.is_symlink() or folder.is_file():
                folder.unlink()
            else:
                shutil.rmtree(folder)

    def free_bytes(self, folder: Path) -> int:
        """Bytes that this user may still write on the file system of ``folder``."""
        return shutil.disk_usage(folder).free


def disk_error(error: BaseException | None) -> OSError | None:
    """The error of the operating system about a file behind ``error``, or None when it is about something else.

    A deadline or a broken connection is an OSError in Python, but says nothing about the disk. Ray keeps what a remote
    process raised in ``cause``.
    """
    while error is not None:
        about_disk = not isinstance(error, TimeoutError | ConnectionError)
        if isinstance(error, OSError) and error.errno is not None and about_disk:
            return error
        error = getattr(error, "cause", None) or error.__cause__
    return None
