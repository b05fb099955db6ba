"""Files and folders that are whole or not there: kills, errors, permissions, links."""

import json
import os
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from langchain_rcr.basics import files
from langchain_rcr.basics.files import atomic_directory, write_json, write_text
from langchain_rcr.errors import InputError

CRASHES = """
import os, signal, sys
from pathlib import Path
from langchain_rcr.basics import files

TOUCHES = {"open", "os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.chmod", "os.listdir", "os.scandir"}
root, exchange = Path(sys.argv[1]), sys.argv[2] == "exchange"
if not exchange:
    files._exchange = lambda one, other: False

def write(target):
    files.write_text(target / "file", "new" * 50_000)
    with files.atomic_directory(target / "folder") as path:
        (path / "a").write_text("new")
        (path / "sub").mkdir()
        (path / "sub" / "b").write_text("new")

def content(folder):
    return {str(p.relative_to(folder)): p.read_text() for p in folder.rglob("*") if p.is_file()}

OLD, NEW = {"a": "old", "c": "old"}, {"a": "new", "sub/b": "new"}
seen_folders = set()
for at in range(1, 300):
    target = root / str(at)
    (target / "folder").mkdir(parents=True)
    (target / "file").write_text("old")
    for name, text in OLD.items():
        (target / "folder" / name).write_text(text)
    child = os.fork()
    if child == 0:
        seen = 0
        def hook(event, arguments):
            global seen
            if event in TOUCHES and str(root) in str(arguments[0]):
                seen += 1
                if seen == at:
                    os.kill(os.getpid(), signal.SIGKILL)
        sys.addaudithook(hook)
        write(target)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    assert (target / "file").read_text() in ("old", "new" * 50_000)
    folder = target / "folder"
    if not exchange and not folder.exists():
        hidden = [content(path) for path in target.glob(".folder.*")]
        assert OLD in hidden and NEW in hidden, hidden
        seen_folders.add("hidden")
    else:
        assert content(folder) in (OLD, NEW), content(folder)
        seen_folders.add("old" if content(folder) == OLD else "new")
    if not os.WIFSIGNALED(status):
        assert os.WEXITSTATUS(status) == 0
        assert sorted(p.name for p in target.iterdir()) == ["file", "folder"]
        break
    files.write_text(target / "file", "after")
    with files.atomic_directory(folder) as path:
        (path / "after").touch()
    assert [p.name for p in folder.iterdir()] == ["after"]
    assert sorted(p.name for p in target.iterdir()) == ["file", "folder"]
print(at, *sorted(seen_folders))
"""


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize(("how", "seen"), [("exchange", {"old", "new"}), ("renames", {"old", "hidden", "new"})])
def test_killed_at_any_file_operation_the_old_or_the_new_is_there(tmp_path, how, seen):
    if how == "exchange" and not _can_exchange(tmp_path):
        pytest.skip("this system can't swap two folders")
    result = subprocess.run(
        [sys.executable, "-c", CRASHES, str(tmp_path), how], capture_output=True, text=True, timeout=60, check=False
    )
    assert result.returncode == 0, result.stderr
    operations, *folders = result.stdout.split()
    assert int(operations) > 12
    assert set(folders) == seen


def _can_exchange(folder):
    (folder / "one").mkdir()
    (folder / "two").mkdir()
    return files._exchange(folder / "one", folder / "two")


def test_json_keeps_a_name_in_latin_1(tmp_path):
    name = os.fsdecode(b"gr\xf6\xdfe") + "河"
    write_json(tmp_path / "file", {"argv": [name]})
    assert json.loads((tmp_path / "file").read_text(encoding="utf-8")) == {"argv": [name]}


def test_an_error_leaves_everything_as_it_was(tmp_path):
    with atomic_directory(tmp_path / "folder") as path:
        (path / "a").write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_directory(tmp_path / "folder") as path:
        (path / "a").write_text("new" * (1 // len(list(path.iterdir()))))
    write_text(tmp_path / "file", "old")
    with pytest.raises(UnicodeEncodeError):
        write_text(tmp_path / "file", "new\ud800")
    assert (tmp_path / "folder" / "a").read_text() == "old"
    assert (tmp_path / "file").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_a_folder_that_can_not_take_its_place_leaves_the_old_one(tmp_path, monkeypatch):
    with atomic_directory(tmp_path / "folder") as path:
        (path / "a").write_text("old")
    real = Path.replace

    def replace(self, target):
        if (self / "b").exists():
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(files, "_exchange", lambda one, other: False)
    monkeypatch.setattr(Path, "replace", replace)
    with (
        pytest.raises(InputError, match=r"folder can't be written: No space left"),
        atomic_directory(tmp_path / "folder") as path,
    ):
        (path / "b").write_text("new")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
    assert (tmp_path / "folder" / "a").read_text() == "old"


@pytest.mark.parametrize(("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o027, 0o640, 0o750), (0, 0o666, 0o777)])
def test_permissions_follow_the_umask(tmp_path, umask, file, folder):
    before = os.umask(umask)
    try:
        write_text(tmp_path / "text", "x")
        with atomic_directory(tmp_path / "folder") as path:
            (path / "sub").mkdir()
            save_file({"x": torch.zeros(2)}, path / "sub" / "model.safetensors")
            write_json(path / "x.json", {})
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"text": file, "model.safetensors": file, "x.json": file, "folder": folder, "sub": folder}


def test_a_write_removes_what_killed_ones_left_and_nothing_else(tmp_path):
    for name in (".folder.0123abcd", "..folder.0123abcd.89abcdef", ".folder.x", ".folder.0123abcde", ".other.0123abcd"):
        (tmp_path / name / "sub").mkdir(parents=True)
    # The second is what a folder that was written into the first left.
    (tmp_path / ".folder.89abcdef").write_text("of a file")
    (tmp_path / ".folder.00000000").symlink_to(tmp_path / ".other.0123abcd")
    with atomic_directory(tmp_path / "folder") as one:
        (one / "a").touch()
        with atomic_directory(tmp_path / "folder") as two:  # as another process would, in the meantime
            (two / "b").touch()
        assert (one / "a").exists()
    assert [path.name for path in (tmp_path / "folder").iterdir()] == ["a"]
    kept = [".folder.00000000", ".folder.0123abcde", ".folder.x", ".other.0123abcd", "folder"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_what_the_file_system_refuses_is_one_line_that_names_the_place(tmp_path):
    write_text(tmp_path / "file", "x")
    for path in (tmp_path / "file" / "below", tmp_path / "file" / "far" / "below"):
        with pytest.raises(InputError, match=r"below can't be written: ") as error:
            write_text(path, "x")
        assert "\n" not in str(error.value)
        with pytest.raises(InputError, match=r"below can't be written: "), atomic_directory(path):
            pass
    with pytest.raises(InputError, match=r"file is a file"), atomic_directory(tmp_path / "file"):
        pass
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match=r"folder can't be written: Is a directory"):
        write_text(tmp_path / "folder", "x")
    new = tmp_path / "new"
    with pytest.raises(InputError) as error, atomic_directory(new) as path, atomic_directory(path / "inner") as inner:
        write_text(inner, "x")
    assert str(error.value) == f"{new}/inner can't be written: Is a directory"
    assert (tmp_path / "file").read_text() == "x"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


@pytest.mark.skipif(not hasattr(os, "geteuid"), reason="needs POSIX permissions")
def test_a_read_only_folder():
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        folder.chmod(0o555)
        root = os.geteuid() == 0
        try:
            if root:
                os.seteuid(65534)  # root may write anywhere
            with pytest.raises(InputError, match="x can't be written: Permission denied"):
                write_text(folder / "x", "x")
            with (
                pytest.raises(InputError, match="x can't be written: Permission denied"),
                atomic_directory(folder / "x"),
            ):
                pass
        finally:
            if root:
                os.seteuid(0)
            folder.chmod(0o755)
        assert not list(folder.iterdir())


def test_links_are_followed(tmp_path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with atomic_directory(tmp_path / "link") as path:
        (path / "a").write_text("x")
    write_text(tmp_path / "link" / "b", "old")
    (tmp_path / "b").symlink_to(tmp_path / "real" / "b")
    write_text(tmp_path / "b", "new")
    assert (tmp_path / "link").is_symlink()
    assert {path.name: path.read_text() for path in (tmp_path / "real").iterdir()} == {"a": "x", "b": "new"}


def test_missing_parents_are_made_and_empty_folders_filled(tmp_path):
    write_text(tmp_path / "a" / "b" / "text", "ä\r\n")
    assert (tmp_path / "a" / "b" / "text").read_bytes() == "ä\r\n".encode()
    (tmp_path / "c").mkdir()
    with atomic_directory(tmp_path / "c") as path:
        assert path.parent == tmp_path
        (path / "x").touch()
    assert [path.name for path in (tmp_path / "c").iterdir()] == ["x"]


def test_json_keeps_order_and_knows_no_nan(tmp_path):
    value = {"b": 1, "a": ["ü", None, 0.1]}
    write_json(tmp_path / "x.json", value)
    text = (tmp_path / "x.json").read_text(encoding="utf-8")
    assert list(json.loads(text)) == ["b", "a"]
    assert json.loads(text) == value
    assert "ü" in text
    with pytest.raises(ValueError, match="nan"):
        write_json(tmp_path / "x.json", {"x": float("nan")})
    assert json.loads((tmp_path / "x.json").read_text(encoding="utf-8")) == value
