"""Tasks of lm-evaluation-harness come out on this library as on the harness's own model ``hf``."""

import json
import logging
import os
import random
import subprocess
import sys

import pytest

os.environ["HF_HUB_OFFLINE"] = os.environ["HF_DATASETS_OFFLINE"] = "1"

lm_eval = pytest.importorskip("lm_eval")

from hub import save_cut_model  # noqa: E402
from lm_eval.api.instance import Instance  # noqa: E402 # pyright: ignore[reportMissingImports]
from lm_eval.models.huggingface import HFLM  # noqa: E402 # pyright: ignore[reportMissingImports]
from lm_eval.tasks import TaskManager  # noqa: E402 # pyright: ignore[reportMissingImports]

from genlm_backend import MockAsyncLM, load_model_by_name  # noqa: E402
from genlm_backend.errors import (  # noqa: E402
    ContextError,
    GenerationConfigError,
    OptionError,
    OptionTypeError,
)
from genlm_backend.integrations.lm_evaluation import HarnessLM  # noqa: E402

PLACES = ["France", "Italy", "Japan", "Egypt", "Peru", "Norway", "Kenya", "Spain"]
CITIES = ["Paris", "Rome", "Tokyo", "Cairo", "Lima", "Oslo", "Nairobi", "Madrid"]

TASK = """
task: {name}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/{name}.jsonl}}}}
test_split: test
output_type: {kind}
{rest}
"""

SHOTS = "\\n".join(
    f"Question: What is the capital of {place}, and why would anybody go there?\\n"
    f"Answer: {city}, since a river runs through it and the bread is good."
    for place, city in zip(PLACES, CITIES, strict=True)
)

KINDS = {
    "capitals": (
        "multiple_choice",
        f'description: "{SHOTS}\\n"\n'
        'doc_to_text: "Question: What is the capital of {{place}}?\\nAnswer:"\n'
        'doc_to_target: "{{answer}}"\ndoc_to_choice: "{{choices}}"\n'
        "metric_list: [{metric: acc}, {metric: acc_norm}]",
    ),
    "letters": (
        "multiple_choice",
        f'description: "{SHOTS}\\n"\n'
        'doc_to_text: "The capital of {{place}}? A. {{choices[0]}} B. {{choices[1]}} '
        'C. {{choices[2]}} D. {{choices[3]}}\\nAnswer:"\n'
        'doc_to_target: "{{answer}}"\ndoc_to_choice: ["A", "B", "C", "D"]\n'
        "metric_list: [{metric: acc}]",
    ),
    "rolling": (
        "loglikelihood_rolling",
        'doc_to_text: ""\ndoc_to_target: "{{text}}"\n'
        "metric_list: [{metric: word_perplexity}, {metric: bits_per_byte}]",
    ),
    "written": (
        "generate_until",
        f'description: "{SHOTS}\\n"\n'
        'doc_to_text: "Question: Where is {{city}}?\\nAnswer:"\n'
        'doc_to_target: "{{place}}"\n'
        'generation_kwargs: {until: ["\\n", "."], max_gen_toks: 12, do_sample: false}\n'
        "metric_list: [{metric: exact_match}]",
    ),
}


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """Four layers of the bundled model, whose tokenizer and embeddings are whole."""
    folder = tmp_path_factory.mktemp("models") / "cut"
    save_cut_model(folder)
    return str(folder)


@pytest.fixture(scope="session")
def tasks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tasks")
    drawn = random.Random(0)
    questions = []
    for place, city in zip(PLACES, CITIES, strict=True):
        choices = [city, *drawn.sample([other for other in CITIES if other != city], 3)]
        drawn.shuffle(choices)
        questions.append(
            {"place": place, "city": city, "choices": choices, "answer": choices.index(city)}
        )
    texts = [
        {"text": f"{place} is a land of {city}, as is known. " * 3}
        for place, city in zip(PLACES, CITIES, strict=True)
    ]
    for name, (kind, rest) in KINDS.items():
        documents = texts if name == "rolling" else questions
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, documents)))
        text = TASK.format(name=name, folder=folder, kind=kind, rest=rest)
        (folder / f"{name}.yaml").write_text(text)
    return folder


@pytest.fixture(scope="session")
def hf(model):
    return HFLM(pretrained=model, device="cpu", dtype="float32", batch_size=4)


@pytest.fixture(scope="session")
def ours(model):
    own = HarnessLM(pretrained=model, backend="hf", device="cpu", dtype="float32")
    yield own
    own.lm.close()


def evaluated(model, folder, **options):
    return lm_eval.simple_evaluate(
        model,
        tasks=[*KINDS],
        task_manager=TaskManager(include_path=str(folder), include_defaults=False),
        bootstrap_iters=0,
        **options,
    )


def instances(*arguments, kind="loglikelihood"):
    return [Instance(kind, {}, own, i) for i, own in enumerate(arguments)]


def test_results_are_those_of_the_harness_s_own_model(hf, ours, tasks):
    expected, found = evaluated(hf, tasks), evaluated(ours, tasks)
    for name in KINDS:
        for metric, value in expected["results"][name].items():
            if isinstance(value, float):
                assert found["results"][name][metric] == pytest.approx(value, rel=1e-4), metric
        pairs = zip(expected["samples"][name], found["samples"][name], strict=True)
        for one, other in pairs:
            assert one["doc_id"] == other["doc_id"]
            if name == "written":
                assert one["resps"] == other["resps"]
            elif name == "rolling":
                assert other["resps"][0][0] == pytest.approx(one["resps"][0][0], abs=1e-3)
            else:
                for (was,), (is_now,) in zip(one["resps"], other["resps"], strict=True):
                    assert float(is_now[0]) == pytest.approx(float(was[0]), abs=1e-3)
                    assert is_now[1] == was[1]


def test_what_requests_have_in_common_is_computed_once(ours):
    ours.lm.clear_cache()
    before = ours.lm.statistics().tokens_computed
    context = "The cat sat on the mat, and the dog on the log. " * 20
    requests = [(context + f"Number {i}", f" choice {j}") for i in range(5) for j in range(4)]
    ours.loglikelihood(instances(*requests), disable_tqdm=True)
    shared = len(ours.tok_encode(context))
    assert shared > 200
    assert ours.lm.statistics().tokens_computed - before < shared + 20 * 8


def test_greedy_continuations_are_told(hf, ours):
    contexts = [f"{SHOTS} The capital of {place} is" for place in PLACES]
    asked = [(context, {"until": [], "max_gen_toks": 1}) for context in contexts]
    texts = ours.generate_until(instances(*asked, kind="generate_until"))
    pairs = [
        (context, end)
        for context, text in zip(contexts, texts, strict=True)
        for end in (text or " a", " xylophone", f"{text} and")
    ]
    expected = hf.loglikelihood(instances(*pairs), disable_tqdm=True)
    found = ours.loglikelihood(instances(*pairs), disable_tqdm=True)
    assert [own[1] for own in found] == [own[1] for own in expected]
    assert {own[1] for own in found} == {True, False}


def test_contexts_are_cut_from_the_left_and_texts_divided_as_there(model):
    theirs = HFLM(pretrained=model, device="cpu", dtype="float32", max_length=24)
    own = HarnessLM(pretrained=model, device="cpu", dtype="float32", max_length=24)
    long = "One word, another word, and then some more of these words, until it ends. "
    pairs = [(long * 3, " end"), ("", "Once upon a time"), (long, long), ("a b  ", "c")]
    with own.lm:
        assert own.max_length == theirs.max_length == 24
        expected = theirs.loglikelihood(instances(*pairs), disable_tqdm=True)
        found = own.loglikelihood(instances(*pairs), disable_tqdm=True)
        assert [pytest.approx(value, abs=1e-3) for value, _ in expected] == [v for v, _ in found]
        rolled = instances((long * 4,), (long,), ("a",), kind="loglikelihood_rolling")
        expected = theirs.loglikelihood_rolling(rolled, disable_tqdm=True)
        assert own.loglikelihood_rolling(rolled, disable_tqdm=True) == pytest.approx(
            expected, abs=1e-3
        )
        asked = instances((long * 4, {"until": ["\n"], "max_gen_toks": 6}), kind="generate_until")
        assert own.generate_until(asked) == theirs.generate_until(asked)
        with pytest.raises(ContextError, match="1 to 24 tokens"):
            own.loglikelihood(instances(("a", long * 3)), disable_tqdm=True)
        with pytest.raises(OptionError, match="leave room for a context"):
            own.generate_until(instances(("a", {"max_gen_toks": 24}), kind="generate_until"))


@pytest.mark.parametrize(
    "arguments",
    [
        {"until": ["\n"], "max_gen_toks": 10},
        {"until": "e", "max_new_tokens": 10, "temperature": 0.0, "top_p": 0.9},
        {"until": ["<|im_end|>", "<|endoftext|>"], "max_gen_toks": 10, "do_sample": False},
        {"until": ["\n"], "max_gen_toks": 10, "repetition_penalty": 1.3},
        {"until": [], "max_gen_toks": 8, "num_beams": 3},
    ],
    ids=str,
)
def test_greedy_texts_are_those_of_the_harness_s_own_model(hf, ours, arguments):
    contexts = ["The capital of France is", "Once upon a time", "", "<|im_start|>user\nHello"]
    # One at a time: padding changes the last bits of rows.
    asked = [instances((c, arguments), kind="generate_until") for c in contexts if c]
    found = ours.generate_until([each for own in asked for each in own])
    assert found == [hf.generate_until(own, disable_tqdm=True)[0] for own in asked]
    more = {**arguments, "until": ["", *arguments["until"]]}  # an empty end ends nothing
    more = instances(*[(c, more) for c in contexts if c], kind="generate_until")
    assert ours.generate_until(more) == found


def test_sampled_texts_follow_the_harness_s_seed(ours):
    import torch

    arguments = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 0.9}
    asked = instances(*[("Once upon a time", arguments)] * 3, kind="generate_until")
    torch.manual_seed(5)
    first = ours.generate_until(asked)
    torch.manual_seed(5)
    assert ours.generate_until(asked) == first
    assert len(set(first)) == 3


def test_an_argument_that_nobody_knows_is_named(ours):
    asked = instances(("a", {"until": [], "no_such_penalty": 2}), kind="generate_until")
    with pytest.raises(GenerationConfigError, match="no_such_penalty"):
        ours.generate_until(asked)


def test_what_stands_behind_a_thought_counts(model, ours):
    end = ours.generate_until(
        instances(("One, two,", {"until": [], "max_gen_toks": 8}), kind="generate_until")
    )[0]
    part = end[len(end) // 2]
    own = HarnessLM(ours.lm, think_end_token=part)
    asked = instances(("One, two,", {"until": [], "max_gen_toks": 8}), kind="generate_until")
    assert own.generate_until(asked) == [end.split(part)[-1].lstrip()]


def test_chats_are_put_together_as_there(hf, ours):
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    answered = [*chat, {"role": "assistant", "content": "Well,"}]
    assert ours.apply_chat_template(chat) == hf.apply_chat_template(chat)
    assert ours.apply_chat_template(answered, add_generation_prompt=False) == (
        hf.apply_chat_template(answered, add_generation_prompt=False)
    )
    assert ours.tokenizer_name == hf.tokenizer_name
    assert ours.chat_template(True) == hf.chat_template(True)


def test_a_system_that_a_template_refuses_is_left_out(ours, monkeypatch, caplog):
    template = (
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no') }}{% endif %}"
        "{{ m.content }}{{ thinks }}{% endfor %}"
    )
    own = HarnessLM(ours.lm, chat_template_args={"thinks": "!"})
    monkeypatch.setattr(own.tokenizer, "chat_template", template)
    chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hello"}]
    with caplog.at_level(logging.WARNING, "genlm_backend"):
        assert own.apply_chat_template(chat) == "Hello!"
    assert "rejects a chat: trying it without system messages" in caplog.text


def test_with_chats_results_agree_too(hf, ours, tasks):
    options = {"apply_chat_template": True, "limit": 2}
    expected, found = evaluated(hf, tasks, **options), evaluated(ours, tasks, **options)
    for one, other in zip(
        expected["samples"]["capitals"], found["samples"]["capitals"], strict=True
    ):
        assert other["arguments"] == one["arguments"]
        for (was,), (is_now,) in zip(one["resps"], other["resps"], strict=True):
            assert float(is_now[0]) == pytest.approx(float(was[0]), abs=1e-3)


def test_special_tokens_are_added_or_not_as_there(model, ours):
    theirs = HFLM(pretrained=model, device="cpu", add_bos_token=True, prefix_token_id=5)
    own = HarnessLM(ours.lm, add_bos_token=True, prefix_token_id=5)
    assert own.prefix_token_id == 5
    prefix = own.tokenizer.decode(5)
    for string in ("Hello there", prefix + "Hello", "<|im_start|>user", ""):
        for is_added in (None, True, False):
            assert own.tok_encode(string, is_added) == theirs.tok_encode(string, is_added)


def test_arguments_are_parsed_and_find_their_place(model):
    text = f"pretrained={model},backend=hf,dtype=float64,kv_cache_bytes=100000000,max_length=99"
    own = HarnessLM.create_from_arg_string(text, {"batch_size": "7", "device": "cuda:0"})
    with own.lm as lm:
        assert (lm.batch_size, lm.max_length) == (7, 99)
        assert str(lm.model.dtype) == "torch.float64"
    arguments = {"pretrained": model, "hf_opts": {"dtype": "float32"}, "device": "cpu"}
    own = HarnessLM.create_from_arg_obj(arguments, {"batch_size": 1, "max_batch_size": None})
    with own.lm as lm:
        assert (lm.batch_size, str(lm.model.device)) == (20, "cpu")
    for wrong, error in (
        ("no_such_option=3", OptionTypeError),
        ("max_gen_toks=0", OptionError),
        ("max_gen_toks=many", OptionTypeError),
        ("prefix_token_id=-1", OptionError),
        ("enable_thinking=3", OptionTypeError),
    ):
        with pytest.raises(error, match=wrong.split("=")[0]):
            HarnessLM.create_from_arg_string(f"pretrained={model},backend=mock,{wrong}")


def test_options_of_loading_are_refused_for_a_loaded_model(ours):
    for make in (
        lambda lm: HarnessLM(lm, "hf"),
        lambda lm: HarnessLM(lm, dtype="float32"),
        lambda lm: HarnessLM(lm, no_such_option=3),
    ):
        with pytest.raises(OptionTypeError, match="loaded by name"):
            make(ours.lm)


def test_a_tokenizer_must_be_one_of_transformers():
    from tokenizers import Tokenizer, models

    tokenizer = Tokenizer(models.WordLevel({"a": 0, "b": 1}, "a"))
    with MockAsyncLM(tokenizer) as lm, pytest.raises(OptionError, match="transformers tokenizer"):
        HarnessLM(lm)


def test_an_adapter_is_read_with(model, hf, tmp_path):
    peft = pytest.importorskip("peft")
    import torch
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    config = peft.LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(AutoModelForCausalLM.from_pretrained(model), config)
    adapted.save_pretrained(str(tmp_path))
    theirs = HFLM(pretrained=model, peft=str(tmp_path), device="cpu", dtype="float32")
    own = HarnessLM(model, "hf", peft=str(tmp_path), dtype="float32")
    pairs = instances(("The capital of France is", " Paris"))
    with own.lm:
        ((found, _),) = own.loglikelihood(pairs, disable_tqdm=True)
    ((expected, _),) = theirs.loglikelihood(pairs, disable_tqdm=True)
    ((plain, _),) = hf.loglikelihood(pairs, disable_tqdm=True)
    assert found == pytest.approx(expected, abs=1e-3)
    assert abs(found - plain) > 1e-2


def command(*arguments, **options):
    return subprocess.run(
        [sys.executable, "-m", "genlm_backend", "lm-eval", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=280,
        **options,
    )


def test_the_command_evaluates_by_name(model, tasks, tmp_path, ours):
    options = ["--model", "genlm", "--model_args", f"pretrained={model},dtype=float32"]
    options += ["--tasks", "capitals,written", "--include_path", tasks, "--limit", 3]
    done = command(*options, "--output_path", tmp_path / "out", "--log_samples")
    assert done.returncode == 0, done.stderr
    assert "|capitals|" in done.stdout
    (path,) = (tmp_path / "out").rglob("samples_written_*.jsonl")
    texts = [json.loads(line)["resps"][0][0] for line in path.read_text().splitlines()]
    expected = evaluated(ours, tasks, limit=3)["samples"]["written"]
    assert texts == [own["resps"][0][0] for own in expected]


def test_the_command_says_in_a_line_what_is_wrong(tasks):
    options = ["--tasks", "capitals", "--include_path", tasks, "--model", "genlm"]
    done = command(*options, "--model_args", "pretrained=smollm2,no_such_option=3")
    assert done.returncode == 1
    assert "no_such_option is not an option" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_answers_are_kept_by_the_harness(ours, tasks, tmp_path):
    first = evaluated(ours, tasks, use_cache=str(tmp_path / "kept"), limit=2)
    before = ours.lm.statistics().num_awaits
    again = evaluated(ours, tasks, use_cache=str(tmp_path / "kept"), limit=2)
    assert ours.lm.statistics().num_awaits == before
    assert again["results"]["capitals"] == first["results"]["capitals"]


def test_a_model_that_is_loaded_serves_as_well(model):
    with load_model_by_name(model, backend="hf") as lm:
        own = HarnessLM(lm)
        assert own.lm is lm
        ((found, _),) = own.loglikelihood(instances(("One, two,", " three")), disable_tqdm=True)
        before, behind = own.tok_encode("One, two,"), own.tok_encode(" three")
        assert found == pytest.approx(float(lm.score_sync(before, behind).sum()), abs=1e-5)
