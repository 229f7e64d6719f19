"""What ``test_pretend_device`` runs in a process of its own: a line of JSON for each model."""

import dataclasses
import json
import traceback
import warnings

import numpy as np
import torch

from genlm_backend import ParallelTokenCharacterTrie, TokenCharacterTrie
from genlm_backend.attention import cascade_plan as sharing
from genlm_backend.attention.torch import torch_ops
from genlm_backend.backends.hf.hf_evaluator import HFEvaluator
from genlm_backend.queries.query import RowQuery
from genlm_backend.readouts.draw_table import Pools, SamplingFilter
from genlm_backend.readouts.particle_step import ParticleStep, StepContexts, TableDraws
from genlm_backend.readouts.sample_readout import SampleReadout
from genlm_backend.readouts.score_query import ScoreQuery
from genlm_backend.readouts.token_readouts import Entropy, Masses, Top
from tests.llm import families
from tests.naive import naive_row
from tests.pretend_device import DEVICE, OnDevice, moved, pretending

_HERE = torch.device("cpu")
BASE = [(7 * i) % 23 for i in range(24)]
BATCHES = (
    [BASE[:n] for n in (1, 3, 9, 24)],  # prefills of several lengths
    [[*BASE[:20], n] for n in range(4)],  # forks of one prefix
    [[*BASE[:20], n, n + 1] for n in range(4)],  # steps behind what they share
    [[*BASE, 1, 2], [*BASE[:9], *range(12)], [5, 6], [*BASE[:20], 0, 1, 5]],
)


def of_model(name, output=DEVICE, dtype=torch.float32, **options):
    """Return how far rows on the device are from the plain model's, and the waits of a pass."""
    asked = dict.fromkeys(torch_ops.FUSED_OPERATORS["cuda"], 0)
    model, options = families.make(name).to(dtype), {"kv_cache_bytes": 1 << 20, **options}
    expected = [[naive_row(model, context) for context in batch] for batch in BATCHES]
    if "kv_cache_dtype" in options:
        expected = rows_here(model, options)
    differences, num_waits = [], []
    with pretending() as mode:
        evaluator = HFEvaluator(moved(model), output_device=output, **options)
        torch_ops.FUSED_OPERATORS[DEVICE.type] = tuple(
            counted(operator, asked) for operator in asked
        )
        torch_ops.fused_operator.cache_clear()
        num_slots = evaluator.open().num_slots
        for batch, wanted in zip(BATCHES, expected, strict=True):
            before, passes = mode.num_waits, evaluator.counts().num_forwards
            found = evaluator.evaluate([RowQuery(context) for context in batch])
            num_passes = evaluator.counts().num_forwards - passes
            num_waits.append((mode.num_waits - before) / num_passes)
            for row, own in zip(found, wanted, strict=True):
                if isinstance(row, Exception):
                    raise row
                assert row.logprobs.device == output
                differences.append(float((on_processor(row.logprobs) - own).abs().max()))
        (scores,) = evaluator.evaluate([ScoreQuery(RowQuery(BASE), 20)])
        if isinstance(scores, Exception):
            raise scores
        assert scores.shape == (4,)
        context = BATCHES[-1][0]
        query, few = RowQuery(context), np.packbits(np.arange(families.VOCAB) % 5 == 0).tobytes()
        read = [query, Entropy(query), Top(query, 3), Masses(query, (few,))]
        read += [
            Masses(RowQuery([1, 2]), (few, few)),
            SampleReadout(query, 1.0, (0.5,), few, cuts=SamplingFilter(2)),
        ]
        read.append(RowQuery([1, 2]))
        row, entropy, top, masses, others, (drawn,), other = evaluator.evaluate(read)
        expected_mass = on_processor(other.logprobs)[::5].double().logsumexp(0)
        assert float((others - expected_mass).abs().max()) < 1e-5
        assert row.logprobs.device == output, "a row beside readouts is elsewhere"
        inner = on_processor(row.logprobs)
        assert abs(entropy + float((inner.exp() * inner).sum())) < 1e-4
        assert top.token_ids.tolist() == inner.topk(3).indices.tolist()
        assert abs(float(masses[0] - inner[::5].double().logsumexp(0))) < 1e-5
        assert drawn.token_id in (5 * inner[::5].topk(2).indices).tolist()
        assert abs(drawn.log_allowed - float(inner[::5].topk(2).values.logsumexp(0))) < 1e-5
        num_moved = evaluator.counts().num_tokens_from_host
        attends = type(evaluator.scheduler.cache.attention).__name__
        evaluator.close()
    return {
        "num_slots": num_slots,
        "difference": max(differences),
        "num_waits": max(num_waits),
        "num_from_host": num_moved,
        "attends": attends,
        "ops": list(asked.values()),
    }


def counted(operator, asked):
    """Return an operator that is counted when it is asked."""

    def attend(*given):
        asked[operator] += 1
        return operator.attend(*given)

    def attend_with(*given):
        asked[operator] += 1
        return operator.attend_with(*given)

    return dataclasses.replace(operator, attend=attend, attend_with=attend_with)


def rows_here(model, options):
    """Return the rows by the operators that a device is given, on the processor."""
    own = torch_ops.fused_operator
    torch_ops.fused_operator = lambda *_: None
    try:
        evaluator = HFEvaluator(model, **options)
        evaluator.open()
        batches = [[RowQuery(context) for context in batch] for batch in BATCHES]
        return [[row.logprobs for row in evaluator.evaluate(batch)] for batch in batches]
    finally:
        torch_ops.fused_operator = own


def of_particles():
    """Return how far draws of a group on the device are from those here, and the most waits."""
    masks = np.packbits(np.arange(families.VOCAB)[None] % 2 == 0, axis=1)
    options = [{}, {}, {"temperature": 0.5}, {"masks": masks}, {"bounds": SamplingFilter(5)}]
    with pretending() as mode:
        model = moved(families.make("llama"))
        evaluator = HFEvaluator(model, output_device=_HERE, kv_cache_bytes=1 << 20)
        evaluator.open()
        evaluator.undefined_ids = (5, 6)
        found = [(here, mode.num_waits) for here in steps_of(evaluator, options)]
    num_waits = np.diff([waits for _, waits in found])
    plain = HFEvaluator(families.make("llama"), kv_cache_bytes=1 << 20)
    plain.open()
    plain.undefined_ids = (5, 6)
    pairs = zip(found, steps_of(plain, options), strict=True)
    difference = max(float(abs(own - here).max()) for (own, _), here in pairs)
    return {"difference": difference, "num_waits": int(num_waits.max())}


def steps_of(evaluator, options):
    """Yield the draws of steps of four particles, float64 ``[4, 4]``; the first is no decode."""
    contexts, hints, key = [[*BASE, n] for n in range(4)], np.zeros(4, np.int64), None
    for own in options:
        masks, bounds = own.get("masks"), own.get("bounds")
        pools = Pools(
            np.arange(4),
            np.full(4, own.get("temperature", 1.0)),
            bounds and [bounds] * 4,
            masks,
            None if masks is None else np.zeros(4, np.int64),
        )
        draws = TableDraws(pools, np.linspace(0, 0.9, 4), np.arange(4))
        lengths = np.array([*map(len, contexts)], np.int32)
        tokens = np.array([context[-1] for context in contexts], np.int32)
        made, own = [RowQuery(context).context for context in contexts], np.arange(4)
        none = np.zeros((4, 0), np.int32)
        steps = StepContexts(made, own, none, own, 0 * own, 0 * own, None)
        step = ParticleStep(hints, key, lengths, tokens, steps, draws)
        ((values, hints, key),) = evaluator.evaluate([step])
        yield values[:, :4]
        contexts = [[*c, int(drawn)] for c, drawn in zip(contexts, values[:, 0], strict=True)]


def of_trie():
    """Return how far the weights of a trie on the device are from those on the processor."""
    vocab = [b"a", b"ab", b"abc", b"b", b"ba", b"c"] + [bytes([i, 7]) for i in range(100, 200)]
    weights = torch.rand(3, len(vocab), generator=torch.Generator().manual_seed(0))
    plain, differences = TokenCharacterTrie(vocab), []
    with pretending() as mode:
        trie = ParallelTokenCharacterTrie(vocab, device=DEVICE, as_tensor=True)
        trie.has_sparse_product = False  # sparse tensors cannot pretend
        given = OnDevice(weights)
        before = mode.num_waits
        found = [trie.batch_weight_sum(given), trie.batch_weight_max(given)]
        found.append(trie.batch_log_weight_sum(OnDevice(weights.log())))
        num_waits = mode.num_waits - before
    expected = [plain.batch_weight_sum(weights), plain.batch_weight_max(weights)]
    expected.append(plain.batch_log_weight_sum(weights.log()))
    for one, own in zip(found, expected, strict=True):
        difference = (on_processor(one) - torch.as_tensor(own)).nan_to_num()
        differences.append(float(difference.abs().max()))
    return {"difference": max(differences), "num_waits": num_waits}


def on_processor(tensor):
    """Return a tensor where it is compared."""
    return tensor.inner if isinstance(tensor, OnDevice) else tensor


def main():
    """Print a line for each model, and one for the tries."""
    warnings.simplefilter("ignore")
    sharing.FEW_TOKENS = 4  # or contexts of this size would share nothing
    runs = {name: lambda name=name: of_model(name) for name in families.PER_TOKEN}
    for name in families.IN_FLOAT64 & runs.keys():
        runs[name] = lambda name=name: of_model(name, dtype=torch.float64)
    runs["rows on the processor"] = lambda: of_model("llama", torch.device("cpu"))
    for kept in ("bfloat16", "int8", "uint4"):
        runs[f"kept as {kept}"] = lambda kept=kept: of_model("llama", kv_cache_dtype=kept)
    host = {"kv_cache_bytes": 32 * 256, "host_cache_bytes": 1 << 20}
    runs["host tier"] = lambda: of_model("llama", **host)
    runs["in bfloat16"] = lambda: of_model("llama", dtype=torch.bfloat16)
    runs["particles"], runs["tries"] = of_particles, of_trie
    for name, run in runs.items():
        try:
            line = run()
        except Exception:
            line = {"error": traceback.format_exc()[-2000:]}
        print(json.dumps({"name": name, **line}), flush=True)


if __name__ == "__main__":
    main()
