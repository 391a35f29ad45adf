"""A folder whose files may be executed: nobody but the user could have written them."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from blockadapt.kernels.cpu.private_folder import PrivateFolder

NOBODY = 65534
needs_owners = pytest.mark.skipif(not hasattr(os, "getuid"), reason="there are no user ids here")
needs_root = pytest.mark.skipif(
    not hasattr(os, "getuid") or os.getuid() != 0, reason="only root can give a file to another user"
)
pytestmark = needs_owners


def mode(path: Path) -> int:
    return stat.S_IMODE(path.lstat().st_mode)


def made(path: Path) -> Path:
    """A private folder with one file."""
    with PrivateFolder(path) as folder:
        folder.write("file", b"content")
    return path


def refused(path: Path, reason: str) -> None:
    """It is refused with this reason, and nothing is read or written."""
    with pytest.raises(PermissionError) as caught, PrivateFolder(path) as folder:
        folder.read("file")
    assert str(caught.value) == reason


def test_what_is_written_is_read_and_nothing_else_is_left(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path / "folder") as folder:
        assert folder.read("file") is None
        folder.write("file", b"first")
        folder.write("file", b"second")
        assert folder.read("file") == b"second"
    assert os.listdir(tmp_path / "folder") == ["file"]


def test_a_file_that_cannot_be_put_in_its_place_leaves_nothing_behind(tmp_path: Path) -> None:
    with PrivateFolder(tmp_path / "folder") as folder:
        (folder.path / "file").mkdir()
        with pytest.raises(OSError, match="file"):
            folder.write("file", b"content")
    assert os.listdir(tmp_path / "folder") == ["file"]


@pytest.mark.parametrize("umask", [0o000, 0o002, 0o277])
def test_folders_and_files_are_the_users_alone_whatever_the_umask(tmp_path: Path, umask: int) -> None:
    (tmp_path / "b").mkdir()
    before = os.umask(umask & 0o077)  # folders that their owner could not enter would prove nothing
    try:
        with PrivateFolder(tmp_path / "b" / "c" / "d") as folder:
            os.umask(umask)
            folder.write("file", b"content")
    finally:
        os.umask(before)
    assert [mode(tmp_path / "b" / name) for name in ("c", "c/d", "c/d/file")] == [0o700, 0o700, 0o600]


@pytest.mark.parametrize("permissions", [0o770, 0o707, 0o1777])
def test_a_folder_that_others_may_write_is_refused_even_with_the_sticky_bit(tmp_path: Path, permissions: int) -> None:
    folder = made(tmp_path / "folder")
    folder.chmod(permissions)
    refused(folder, f"other users may write {folder}")


@pytest.mark.parametrize("permissions", [0o660, 0o606])
def test_a_file_that_others_may_write_is_refused(tmp_path: Path, permissions: int) -> None:
    file = made(tmp_path / "folder") / "file"
    file.chmod(permissions)
    refused(file.parent, f"other users may write {file}")


@pytest.mark.parametrize("above", ["a", "a/b"])
def test_a_folder_above_that_others_may_write_is_refused_unless_its_sticky_bit_is_set(
    tmp_path: Path, above: str
) -> None:
    folder = made(tmp_path / "a" / "b" / "folder")
    (tmp_path / above).chmod(0o777)
    refused(folder, f"other users may write {tmp_path / above}")
    (tmp_path / above).chmod(0o1777)
    with PrivateFolder(folder) as opened:
        assert opened.read("file") == b"content"


def test_what_others_may_read_is_not_refused(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    folder.chmod(0o755)
    (folder / "file").chmod(0o644)
    with PrivateFolder(folder) as opened:
        assert opened.read("file") == b"content"


@needs_root
@pytest.mark.parametrize("stranger", ["folder/file", "folder", "."])
def test_what_belongs_to_another_user_is_refused(tmp_path: Path, stranger: str) -> None:
    folder = made(tmp_path / "above" / "folder")
    path = tmp_path / "above" / stranger
    os.chown(path, NOBODY, NOBODY)
    refused(folder, f"{path} belongs to another user")


@needs_root
def test_a_sticky_folder_above_is_refused_if_it_belongs_to_another_user(tmp_path: Path) -> None:
    """Its owner may move what lies in it all the same."""
    folder = made(tmp_path / "above" / "folder")
    os.chown(folder.parent, NOBODY, NOBODY)
    folder.parent.chmod(0o1777)
    refused(folder, f"{folder.parent} belongs to another user")


def test_a_link_in_the_folders_place_is_refused_even_if_it_leads_to_a_private_one(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(made(tmp_path / "folder"))
    refused(link, f"{link} is a link or a file")


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    folder = made(tmp_path / "folder")
    (folder / "link").symlink_to(folder / "file")
    with PrivateFolder(folder) as opened, pytest.raises(OSError, match="symbolic links"):
        opened.read("link")


def test_links_above_are_resolved_and_the_folders_that_they_lead_to_are_checked(tmp_path: Path) -> None:
    folder = made(tmp_path / "real" / "folder")
    (tmp_path / "link").symlink_to(folder.parent)
    with PrivateFolder(tmp_path / "link" / "folder") as opened:
        assert opened.path == folder
        assert opened.read("file") == b"content"
    folder.parent.chmod(0o777)
    refused(tmp_path / "link" / "folder", f"other users may write {folder.parent}")


def test_a_folder_that_is_swapped_after_the_check_is_still_the_one_that_was_checked(tmp_path: Path) -> None:
    checked = made(tmp_path / "folder")
    with PrivateFolder(checked) as folder:
        checked.rename(tmp_path / "elsewhere")
        checked.mkdir()
        (checked / "file").write_bytes(b"planted")
        assert folder.read("file") == b"content"
        folder.write("another", b"mine")
    assert os.listdir(checked) == ["file"]
    assert (tmp_path / "elsewhere" / "another").read_bytes() == b"mine"


def test_no_descriptor_stays_open(tmp_path: Path) -> None:
    folder = made(tmp_path / "a" / "folder")
    before = len(os.listdir("/dev/fd"))
    for _ in range(3):
        made(folder)
    folder.chmod(0o777)
    refused(folder, f"other users may write {folder}")
    assert len(os.listdir("/dev/fd")) == before
