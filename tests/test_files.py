"""A replaced file has its old or its new contents, and no temporary file is left."""

import os

import pytest
from support.folders import contents

from fastlin._files import replacing


def test_replacing_is_all_or_nothing(tmp_path):
    path = tmp_path / "file.json"
    with replacing(path) as temporary:
        temporary.write_text("new")
        assert not path.exists()
        assert temporary.parent == tmp_path
        # A temporary file of a killed run is hidden, and not mistaken for a file of the user.
        assert temporary.name.startswith(".")
    assert path.read_text() == "new"
    with replacing(path) as temporary:
        temporary.write_text("newer")
        assert path.read_text() == "new"
    assert path.read_text() == "newer"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt(), SystemExit(143)])
@pytest.mark.parametrize("there", [False, True])
def test_replacing_leaves_nothing_after_an_error(tmp_path, error, there):
    path = tmp_path / "file"
    if there:
        path.write_text("old")

    def write():
        with replacing(path) as temporary:
            temporary.write_text("half")
            raise error

    with pytest.raises(type(error)):
        write()
    assert contents(tmp_path) == ({path.relative_to(tmp_path): b"old"} if there else {})


@pytest.mark.parametrize("name", ["fsync", "replace"])
def test_replacing_when_the_disk_fails(tmp_path, monkeypatch, name):
    def fail(*_):
        raise OSError(5, "Input/output error")

    path = tmp_path / "file"
    path.write_text("old")
    monkeypatch.setattr(os, name, fail)
    with pytest.raises(OSError, match="Input/output error"), replacing(path) as temporary:
        temporary.write_text("new")
    monkeypatch.undo()
    assert contents(tmp_path) == {path.relative_to(tmp_path): b"old"}


def test_replacing_reaches_the_disk_before_the_name(tmp_path, monkeypatch):
    """Contents first: after a power cut the name has either the old contents or the new."""
    done, fsync, replace = [], os.fsync, os.replace

    def note_fsync(file):
        done.append(("fsync", os.readlink(f"/proc/self/fd/{file}")))
        fsync(file)

    def note_replace(source, target):
        done.append(("replace", str(source)))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", note_fsync)
    monkeypatch.setattr(os, "replace", note_replace)
    with replacing(tmp_path / "file") as temporary:
        temporary.write_text("new")
    assert done[:2] == [("fsync", str(temporary)), ("replace", str(temporary))]
