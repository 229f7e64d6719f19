"""Where prefixes are written to: nothing but whole files, where files can be."""

import os
import stat

import pytest

from genlm_backend.backends.hf import prefix_file
from genlm_backend.errors import ContextError, OptionError, OptionTypeError, PrefixFileError
from tests.llm import families
from tests.llm.hf.test_prefix_file import PROMPT, model_of, over


def test_pipes_devices_and_directories_are_not_overwritten(tmp_path):
    pipe, link, folder = tmp_path / "pipe", tmp_path / "link", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    link.symlink_to(folder / "file")
    with over(model_of()) as lm:
        for wrong in (pipe, "/dev/null", folder):
            with pytest.raises(OSError, match=str(wrong)):
                lm.save_prefix(PROMPT, wrong)
        assert lm.statistics().tokens_computed == 0
        for wrong in (pipe, "/dev/null"):
            with pytest.raises(PrefixFileError, match="device or a pipe"):
                lm.load_prefix(wrong)
        lm.save_prefix(PROMPT, link)  # goes where it points to
        assert link.is_symlink()
        assert list(lm.load_prefix(folder / "file")) == PROMPT
        name = "n" * 250
        lm.save_prefix(PROMPT, folder / name)
        assert sorted(os.listdir(folder)) == ["file", name]


def test_home_directory_in_path_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    with over(model_of()) as lm:
        lm.save_prefix(PROMPT, "~/prompt")
        assert (tmp_path / "prompt").is_file()
        assert list(lm.load_prefix("~/prompt")) == PROMPT


def test_invalid_paths_raise_and_saving_replaces_the_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with over(model_of()) as lm:
        with pytest.raises(FileNotFoundError, match="no such directory"):
            lm.save_prefix(PROMPT, tmp_path / "none" / "prompt")
        with pytest.raises(FileNotFoundError):
            lm.load_prefix(tmp_path / "none")
        with pytest.raises(IsADirectoryError):
            lm.load_prefix(tmp_path)
        with pytest.raises(OSError, match="Is a directory"):
            lm.save_prefix(PROMPT, tmp_path / ".." / tmp_path.name)
        for wrong, error in ((3, OptionTypeError), (None, OptionTypeError), ("", OptionError)):
            with pytest.raises(error, match="path"):
                lm.load_prefix(wrong)
        for wrong in ([], [families.VOCAB]):
            with pytest.raises(ContextError):
                lm.save_prefix(wrong, "prompt")
        assert os.listdir(tmp_path) == []
        lm.save_prefix(PROMPT, "prompt")
        lm.save_prefix(PROMPT[:5], "prompt")  # takes its place
        assert list(lm.load_prefix("prompt")) == PROMPT[:5]
        assert os.listdir(tmp_path) == ["prompt"]
        umask = os.umask(0)
        os.umask(umask)
        assert stat.S_IMODE(os.stat("prompt").st_mode) == 0o666 & ~umask


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_leaves_no_half_file(tmp_path, monkeypatch):
    path = tmp_path / "prompt"

    def full(tensors, name, said):
        with open(name, "wb") as file:
            file.write(b"half")
        with open("/dev/full", "wb") as file:
            file.write(b"the rest")

    with over(model_of()) as lm:
        lm.save_prefix(PROMPT[:9], path)
        monkeypatch.setattr(prefix_file, "save_file", full)
        with pytest.raises(OSError, match="No space left"):
            lm.save_prefix(PROMPT, path)
        assert os.listdir(tmp_path) == ["prompt"]
        assert list(lm.load_prefix(path)) == PROMPT[:9]
