"""Keeps files that will be executed in a folder that only the user can write.

Every folder from the root down is opened inside the one before it, without following links. Owner and permissions are
read from what was opened, and files are opened inside the last one. So nothing is looked up again by a path that
someone could have changed since the check:

    folders above    belong to the user or to root; others may write only with the sticky bit, as in `/tmp`
    the folder       belongs to the user, nobody else may write it, and it is no link
    each file read   likewise

Where there are no user ids (Windows) nothing is checked. The folder lies in the user's profile there, which Windows
keeps closed to others.
"""

from __future__ import annotations

import contextlib
import os
import stat
import uuid
from pathlib import Path

_HAS_OWNERS = hasattr(os, "getuid")
_NO_LINK = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = _NO_LINK | getattr(os, "O_DIRECTORY", 0) | getattr(os, "O_PATH", os.O_RDONLY)
"""`O_PATH` opens a folder that the user may pass through but not list."""


class PrivateFolder:
    """Opens a folder that must be the user's own; it is made if it is not there.

    Attributes:
        path: Where it lies, with the links above it resolved.

    Raises:
        PermissionError: Someone else could have put a file there, or cannot be ruled out.
        OSError: It cannot be made or opened.
    """

    def __init__(self, path: Path) -> None:
        self.path = Path(os.path.realpath(path.parent), path.name)
        self._descriptor: int | None = None
        if _HAS_OWNERS:
            self._descriptor = _opened(self.path)
        else:
            self.path.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> PrivateFolder:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)

    def read(self, name: str) -> bytes | None:
        """Read what a file holds; None if there is no such file.

        Raises:
            PermissionError: Someone else owns the file or could write it.
        """
        try:
            descriptor = os.open(self._at(name), os.O_RDONLY | _NO_LINK, dir_fd=self._descriptor)
        except FileNotFoundError:
            return None
        with open(descriptor, "rb") as file:
            if _HAS_OWNERS:
                _require_private(self.path / name, os.fstat(descriptor))
            return file.read()

    def write(self, name: str, content: bytes) -> None:
        """Put a file there, whole or not at all, that only the user can read and write."""
        draft = f"{name}.{uuid.uuid4().hex}"
        descriptor = os.open(
            self._at(draft), os.O_WRONLY | os.O_CREAT | os.O_EXCL | _NO_LINK, 0o600, dir_fd=self._descriptor
        )
        try:
            with open(descriptor, "wb") as file:
                if _HAS_OWNERS:
                    os.fchmod(descriptor, 0o600)  # whatever the umask has taken away
                file.write(content)
            os.replace(self._at(draft), self._at(name), src_dir_fd=self._descriptor, dst_dir_fd=self._descriptor)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(self._at(draft), dir_fd=self._descriptor)
            raise

    def _at(self, name: str) -> str:
        """Give `name` to the system as it wants it: within the descriptor, or by its path where there is none."""
        return str(self.path / name) if self._descriptor is None else name


def _opened(path: Path) -> int:
    """Open the folder and give its descriptor; those above it are checked, and made if they are missing."""
    here = Path(path.anchor)
    descriptor = os.open(here, _FOLDER)
    try:
        for name in path.parts[1:]:
            _require_not_swappable(here, os.fstat(descriptor))
            here /= name
            inner = _entered(descriptor, here)
            os.close(descriptor)
            descriptor = inner
        _require_private(here, os.fstat(descriptor))
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _entered(above: int, path: Path) -> int:
    """Open a folder inside another one, made if it is missing, and give its descriptor.

    Raises:
        PermissionError: It is a link or a file.
    """
    with contextlib.suppress(FileExistsError):
        try:
            os.stat(path.name, dir_fd=above, follow_symlinks=False)
        except FileNotFoundError:
            os.mkdir(path.name, 0o700, dir_fd=above)
    try:
        return os.open(path.name, _FOLDER, dir_fd=above)
    except NotADirectoryError:
        raise PermissionError(f"{path} is a link or a file") from None


def _require_private(path: Path, status: os.stat_result) -> None:
    if status.st_uid != os.getuid():
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(f"other users may write {path}")


def _require_not_swappable(path: Path, status: os.stat_result) -> None:
    """Refuse a folder in which someone else could put another one in the place of one inside it.

    Whoever may write a folder may do so, unless the sticky bit forbids it.

    Raises:
        PermissionError: It belongs to someone else than the user and root, or others may write it.
    """
    if status.st_uid not in (0, os.getuid()):
        raise PermissionError(f"{path} belongs to another user")
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not status.st_mode & stat.S_ISVTX:
        raise PermissionError(f"other users may write {path}")
