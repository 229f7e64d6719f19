"""Decode steps as they are captured on a device: here, replays run the same functions again."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from genlm_backend.attention import cascade_plan as sharing
from genlm_backend.backends.hf import cuda_graph_run, cuda_graph_runner, decode_ops, decode_tables
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.errors import ModelStateError
from genlm_backend.queries.query import RowQuery
from tests.llm import families
from tests.llm.hf.strict_recorder import StrictRecorder, as_operator
from tests.naive import naive_row


def in_extents(query, keys, values, bounds, starts, sizes, most_queries, scale):
    """Attend as an operator of extents does; what nobody is to read is NaN."""
    found, sums = torch.full_like(query, torch.nan), query.new_full(query.shape[:2], torch.nan)
    for number, size in enumerate(sizes.tolist()):
        first, stop, start = int(bounds[number]), int(bounds[number + 1]), int(starts[number])
        assert stop - first <= most_queries
        if first == stop:
            continue
        assert size
        scores = torch.einsum("mhd,nhd->mhn", query[first:stop], keys[start : start + size]) * scale
        sums[first:stop] = scores.logsumexp(-1)
        means = torch.einsum("mhn,nhd->mhd", scores.softmax(-1), values[start : start + size])
        found[first:stop] = means
    return found, sums.T


def in_slots(query, codes, slots, starts, counts, of_parts, splits, sinks, scale, num_key_heads):
    """Attend as an operator of slots does."""
    found, group_size = torch.empty_like(query), query.shape[1] // num_key_heads
    for row, (start, count) in enumerate(zip(starts.tolist(), counts.tolist(), strict=True)):
        assert count
        own = codes[slots[start : start + count]]
        keys, values = (part.unflatten(1, (num_key_heads, -1)) for part in own.chunk(2, 1))
        queries = query[row].unflatten(0, (num_key_heads, group_size))
        scores = torch.einsum("hgd,nhd->hgn", queries, keys) * scale
        sums, means = (
            [scores.logsumexp(-1)],
            [torch.einsum("hgn,nhd->hgd", scores.softmax(-1), values)],
        )
        for split in splits[row].tolist() if of_parts is not None else ():
            if split >= 0:
                where = slice(split * group_size, (split + 1) * group_size)
                sums.append(of_parts[1][:, where])
                means.append(of_parts[0][where].transpose(0, 1))
        if sinks is not None:
            sums.append(sinks.to(query.dtype).view(num_key_heads, group_size))
            means.append(torch.zeros_like(means[0]))
        shares = torch.stack(sums).softmax(0)
        found[row] = (shares[..., None] * torch.stack(means)).sum(0).flatten(0, 1)
    return found


def grouped(query, readers, num_key_heads):
    """Gather the queries of readers; the heads of a group become queries of their own."""
    found = query.index_select(0, readers).unflatten(1, (num_key_heads, -1)).transpose(1, 2)
    return found.reshape(-1, num_key_heads, query.shape[2])


def write(keys, values, slots, codes):
    """Write keys and values into slots of a table."""
    codes.index_copy_(0, slots, torch.cat([keys, values], 1).flatten(1))


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """Have the processor capture decode steps; what is returned has an element for each replay."""
    replayed = []
    ops = decode_ops.DecodeOps(as_operator(in_extents), as_operator(in_slots), grouped, write)
    monkeypatch.setitem(decode_ops.DECODE_OPS, "cpu", lambda: ops)
    monkeypatch.setattr(
        cuda_graph_runner, "CudaGraphCapturer", lambda device: StrictRecorder(replayed)
    )
    decode_ops.decode_ops_for.cache_clear()
    yield replayed
    decode_ops.decode_ops_for.cache_clear()


def rows_of(evaluator, contexts):
    found = evaluator.evaluate([RowQuery(context) for context in contexts])
    return torch.stack([row.logprobs for row in found])


def check_history(model, histories, **options):
    """Compare the rows of a history of batches with the model's own."""
    evaluator = HFEvaluator(model, kv_cache_bytes=1 << 22, **options)
    evaluator.open()
    for contexts in histories:
        expected = torch.stack([naive_row(model, context) for context in contexts])
        torch.testing.assert_close(rows_of(evaluator, contexts), expected, rtol=0, atol=2e-4)
    return evaluator


def particles(count, length, num_steps, seed=0, num_words=23):
    """Return batches of contexts that go on by a token each, resampled now and then."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, num_words, length).tolist()
    contexts, history = [prompt] * count, [[prompt]]
    for step in range(num_steps):
        if step % 3 == 2:
            contexts = [contexts[i] for i in random.integers(0, count, count)]
        contexts = [[*context, int(random.integers(num_words))] for context in contexts]
        history.append([list(one) for one in {tuple(context) for context in contexts}])
    return history


RUN_EAGERLY = {
    "deepseek-v3",  # values are of another size than keys
    "llama4-tuned",  # counts columns
    "bloom",
    "falcon-alibi",
    "falcon-rotary",
    "mpt",
    "gpt-neo-local",
    "gemma4-shared",  # later layers attend to the keys of earlier ones
    *([] if families.looks_up_its_attention("gptj") else ["gptj"]),
    # The function that it names by itself caps the scores, from 5.24 on.
    *(["gemma2"] if families.make("gemma2").config._attn_implementation == "eager" else []),
}


@pytest.mark.parametrize("name", families.PER_TOKEN)
@pytest.mark.parametrize(
    ("few_tokens", "length", "many_read"), [(8, 40, 0), (384, 40, 0), (8, 2, 0), (8, 40, 1 << 14)]
)
def test_captured_steps_match_model(name, few_tokens, length, many_read, monkeypatch, captured):
    monkeypatch.setattr(sharing, "FEW_TOKENS", few_tokens)
    monkeypatch.setattr(decode_tables, "SHORTEST_SPLIT", 4)
    monkeypatch.setattr(decode_tables, "MANY_READ", many_read)
    check_history(families.make(name), particles(7, length, 14))
    assert (len(captured) > 5) == (name not in RUN_EAGERLY)


@settings(max_examples=25, deadline=None)
@given(
    st.sampled_from(["llama", "gemma3", "gpt-oss"]),
    st.integers(1, 40),
    st.integers(0, 30),
    st.integers(1, 12),
    st.integers(0, 5),
    st.sampled_from([4, 30, 384]),
    st.sampled_from([1, 3, 16]),
    st.sampled_from([1, 2, 64]),
    st.sampled_from([0, 60, 1 << 14]),
)
def test_steps_of_random_particles_match_bare_model(
    name, count, length, num_steps, seed, few_tokens, max_runs, few_slots, many_read
):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sharing, "FEW_TOKENS", few_tokens)
        patch.setattr(decode_tables, "SHORTEST_SPLIT", 4)
        patch.setattr(decode_tables, "MAX_RUNS", max_runs)
        patch.setattr(decode_tables, "FEW_SLOTS", few_slots)
        patch.setattr(decode_tables, "MANY_READ", many_read)
        check_history(families.make(name), particles(count, length + 1, num_steps, seed))


def test_contexts_without_common_prefix_match_bare_model(captured):
    random = np.random.default_rng(0)
    contexts = [random.integers(0, 23, length).tolist() for length in (1, 30, 31, 44, 60)]
    history = [contexts]
    for _ in range(6):
        contexts = [[*context, int(random.integers(23))] for context in contexts]
        history.append(contexts)
    check_history(families.make("llama"), history)
    assert captured


def test_nan_stays_in_its_own_row(captured):
    model = families.make("llama")
    with torch.no_grad():
        model.get_input_embeddings().weight[95] = torch.nan
    evaluator = HFEvaluator(model, kv_cache_bytes=1 << 22)
    evaluator.open()
    histories = particles(5, 20, 8)
    for number, contexts in enumerate(histories):
        spoilt = [*contexts, [*histories[0][0], *[3] * number, 95]]
        found = rows_of(evaluator, spoilt if number % 3 == 2 else contexts)
        expected = torch.stack([naive_row(model, context) for context in contexts])
        torch.testing.assert_close(found[: len(contexts)], expected, rtol=0, atol=2e-4)
        assert found[len(contexts) :].isnan().all()
    assert captured


def test_weights_moved_in_memory_are_recaptured(captured):
    model = families.make("llama")
    evaluator = check_history(model, [[[1, *c] for c in one] for one in particles(4, 20, 6)])
    num_replayed = len(captured)
    weight = model.model.layers[0].mlp.up_proj.weight
    with torch.no_grad():
        weight.data = weight.data * 1.5
    # Contexts of which nothing is kept, so that what is kept need not be cleared.
    for contexts in particles(4, 21, 6, seed=1):
        contexts = [[2, *context] for context in contexts]
        expected = torch.stack([naive_row(model, context) for context in contexts])
        torch.testing.assert_close(rows_of(evaluator, contexts), expected, rtol=0, atol=2e-4)
    assert len(captured) > num_replayed > 0


@pytest.mark.parametrize("name", ["llama", "gemma3", "gpt-oss"])
@pytest.mark.parametrize("many_read", [0, 100])
def test_prompts_in_several_groups_match_bare_model(name, many_read, monkeypatch, captured):
    """Extents that some rows read and others do not, and rows that windows hold whole."""
    monkeypatch.setattr(sharing, "FEW_TOKENS", 8)
    monkeypatch.setattr(decode_tables, "SHORTEST_SPLIT", 4)
    monkeypatch.setattr(decode_tables, "MANY_READ", many_read)
    random = np.random.default_rng(0)
    first = random.integers(0, 23, 20).tolist()
    prompts = [[*first, *random.integers(0, 23, 12).tolist()] for _ in range(3)]
    contexts = [prompts[number % 3] for number in range(9)] + [[3], [4, 5, 6], first]
    history = [[*prompts, [3], [4, 5, 6], first]]
    for _ in range(7):
        order = random.permutation(len(contexts))
        contexts = [[*contexts[i], int(random.integers(23))] for i in order]
        history.append([list(one) for one in {tuple(context) for context in contexts}])
    seen = []
    of = decode_tables.DecodeTables.of.__func__

    def noted(cls, *given):
        seen.append(of(cls, *given))
        return seen[-1]

    monkeypatch.setattr(decode_tables.DecodeTables, "of", classmethod(noted))
    check_history(families.make(name), history)
    assert captured
    num_splits = 1 if many_read else 2  # the smaller ones are read slot by slot
    assert any(tables.shared.splits.shape[1] >= num_splits for tables in seen)
    assert many_read or any((tables.shared.splits == -1).any() for tables in seen)


def test_hooks_run_at_every_step(captured):
    model, calls = families.make("llama"), []
    model.model.layers[1].register_forward_hook(lambda *_: calls.append(1))
    evaluator = HFEvaluator(model, kv_cache_bytes=1 << 22)
    evaluator.open()
    for contexts in particles(4, 20, 6):
        before = len(calls)
        rows_of(evaluator, contexts)
        assert len(calls) > before
    assert not captured


def check_rows(evaluator, model, history):
    for contexts in history:
        expected = torch.stack([naive_row(model, context) for context in contexts])
        torch.testing.assert_close(rows_of(evaluator, contexts), expected, rtol=0, atol=2e-4)


class Scaled(torch.nn.Module):
    """An activation with a number that no one can see change."""

    def __init__(self):
        super().__init__()
        self.scale = [1.0]

    def forward(self, x):
        return self.scale[0] * torch.nn.functional.silu(x)


def scaled_in_place(model):
    model.model.layers[0].mlp.act_fn.scale[0] = 0.5


def another_layout(model):
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data = weight.data.t()


@pytest.mark.parametrize("change", [scaled_in_place, another_layout])
def test_changes_of_model_take_effect_after_clear(change, captured):
    model = families.make("llama")
    model.model.layers[0].mlp.act_fn = Scaled()
    evaluator = check_history(model, particles(4, 20, 6))
    num_replayed = len(captured)
    change(model)
    evaluator.clear()
    check_rows(evaluator, model, particles(4, 21, 6, seed=1))
    assert len(captured) > num_replayed > 0


def another_weight(model):
    norm = model.model.layers[1].post_attention_layernorm
    norm.weight = torch.nn.Parameter(norm.weight * 1.5, requires_grad=False)


def a_hook(model):
    model.model.norm.register_forward_hook(lambda module, given, found: 0.5 * found)


@pytest.mark.parametrize("change", [another_weight, a_hook])
def test_change_between_steps_is_applied_or_refused_at_next_step(change, captured):
    """Whose pass has been captured, and is launched before the model is looked at."""
    model, random = families.make("llama"), np.random.default_rng(0)
    contexts = [[token, token] for token in range(6)]
    evaluator = HFEvaluator(model, kv_cache_bytes=1 << 22)
    evaluator.open()
    for _ in range(6):
        contexts = [[*context, int(random.integers(23))] for context in contexts]
        expected = torch.stack([naive_row(model, context) for context in contexts])
        torch.testing.assert_close(rows_of(evaluator, contexts), expected, rtol=0, atol=2e-4)
    assert captured  # a replay is what comes next
    change(model)
    contexts = [[*context, int(random.integers(23))] for context in contexts]
    if change is not a_hook:
        found = evaluator.evaluate([RowQuery(context) for context in contexts])
        assert all(isinstance(answer, ModelStateError) for answer in found)
        return
    # What is kept of the tokens before is of the model as it was.
    cache, ids = DynamicCache(), torch.tensor(contexts, dtype=torch.int64)
    with torch.no_grad():
        families.make("llama")(ids[:, :-1], **{families.CACHE: cache})
        logits = model(ids[:, -1:], **{families.CACHE: cache}).logits[:, -1]
    rows = rows_of(evaluator, contexts)
    torch.testing.assert_close(rows, logits.log_softmax(-1), rtol=0, atol=2e-4)
    evaluator.clear()
    check_rows(evaluator, model, [contexts])


def test_training_mode_is_refused_at_next_step(captured):
    model = families.make("llama")
    evaluator = check_history(model, particles(4, 20, 6))
    assert captured
    history = particles(4, 20, 7)
    model.train()
    found = evaluator.evaluate([RowQuery(context) for context in history[-1]])
    assert all(isinstance(answer, ModelStateError) for answer in found)
    model.eval()
    check_rows(evaluator, model, history[-1:])


def test_global_module_hooks_run_at_every_step(captured):
    model = families.make("llama")
    evaluator = check_history(model, particles(4, 20, 6))
    num_replayed, calls = len(captured), []
    hook = torch.nn.modules.module.register_module_forward_hook(lambda *_: calls.append(1))
    try:
        for contexts in particles(4, 21, 4, seed=1):
            before = len(calls)
            rows_of(evaluator, contexts)
            assert len(calls) > before
    finally:
        hook.remove()
    assert len(captured) == num_replayed


class Failing:
    """A recorder of which something fails."""

    def __init__(self, replay=None, error=None):
        self.replay, self.error = replay, error

    def forget(self):
        pass

    def record(self, run):
        found = run()
        if self.replay is None:
            raise self.error
        return lambda: self.replay(found), found


def raising(error):
    def replay(found):
        raise error

    return replay


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory")


@pytest.mark.parametrize(
    "failing",
    [
        Failing(lambda found: found.normal_()),  # other numbers
        Failing(lambda found: found[0].fill_(torch.nan)),
        Failing(error=RuntimeError("operation not permitted when stream is capturing")),
        Failing(error=OUT_OF_MEMORY),
        Failing(raising(OUT_OF_MEMORY)),
        Failing(raising(RuntimeError("CUDA error"))),
    ],
)
def test_steps_run_eagerly_if_capture_or_replay_fails(failing, monkeypatch):
    monkeypatch.setattr(cuda_graph_runner, "CudaGraphCapturer", lambda device: failing)
    check_history(families.make("llama"), particles(4, 20, 8))


def test_a_replay_that_fails_later_is_run_eagerly(monkeypatch, captured):
    evaluator = check_history(families.make("llama"), particles(4, 20, 4))
    assert captured

    def fails(*_):
        raise OUT_OF_MEMORY

    monkeypatch.setattr(cuda_graph_runner.CapturedGraph, "replay", fails)
    check_rows(evaluator, families.make("llama"), particles(4, 21, 4, seed=1))
    monkeypatch.undo()


def test_rows_stay_right_with_more_shapes_than_max_graphs(monkeypatch, captured):
    monkeypatch.setattr(cuda_graph_runner, "MAX_GRAPHS", 2)
    evaluator = HFEvaluator(families.make("llama"), kv_cache_bytes=1 << 22)
    evaluator.open()
    for seed in range(3):
        for count in (2, 5, 9, 20):
            check_rows(evaluator, families.make("llama"), particles(count, 20, 4, seed))
    assert captured


def test_wrong_decode_operators_are_not_used(monkeypatch, captured):
    def wrong(*given):
        return in_slots(*given) * 1.1

    ops = decode_ops.DecodeOps(in_extents, wrong, grouped, write)
    monkeypatch.setitem(decode_ops.DECODE_OPS, "cpu", lambda: ops)
    decode_ops.decode_ops_for.cache_clear()
    check_history(families.make("llama"), particles(4, 20, 6))
    assert not captured


def test_refused_captured_step_leaves_no_keys(monkeypatch, captured):
    of = decode_tables.DecodeTables.of.__func__

    def lossy(cls, *given):  # of each row, all keys but that of the new token
        tables = of(cls, *given)
        last = tables.slots[tables.counts.cumsum() - 1]
        return tables._replace(slots=last, counts=tables.counts * 0 + 1)

    monkeypatch.setattr(decode_tables.DecodeTables, "of", classmethod(lossy))
    evaluator = check_history(families.make("llama"), particles(5, 20, 6))
    assert captured  # and compared
    assert evaluator.counts().num_captured_steps == 0


def test_three_errors_end_capture_until_clear(monkeypatch, captured, caplog):
    def fails(recorder, run):
        raise OUT_OF_MEMORY

    model = families.make("llama")
    evaluator = HFEvaluator(model, kv_cache_bytes=1 << 22)
    evaluator.open()
    with monkeypatch.context() as patched:
        patched.setattr(StrictRecorder, "record", fails)
        for count in (2, 5, 9, 20):
            check_rows(evaluator, model, particles(count, 20, 4))
    check_rows(evaluator, model, particles(5, 20, 4, seed=1))
    (said,) = [one.getMessage() for one in caplog.records if one.levelname == "WARNING"]
    assert "after 3 failed captures" in said
    assert "clear_cache()" in said
    assert evaluator.counts().num_captured_steps == 0
    evaluator.clear()
    check_rows(evaluator, model, particles(5, 20, 6, seed=1))
    assert 0 < evaluator.counts().num_captured_steps < len(captured)


def test_copy_events_are_recorded_on_stream_of_device(monkeypatch, captured):
    noted, made = [], cuda_graph_run.DecodeArrays.__init__

    class Event:
        def synchronize(self):
            pass

        def record(self, stream=None):
            noted.append(stream)

    def made_with_event(arrays, shape, device):
        made(arrays, shape, device)
        arrays._copied = Event()

    monkeypatch.setattr(cuda_graph_run.DecodeArrays, "__init__", made_with_event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: ("stream of", device))
    check_history(families.make("llama"), particles(4, 20, 4))
    assert set(noted) == {("stream of", torch.device("cpu"))}
