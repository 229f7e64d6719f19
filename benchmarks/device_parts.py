"""What is measured on a device: steps behind shared prompts, and tries; line by line.

No weights are needed: models are made on the device from their configs, with random ones, which
take the same time.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from genlm_backend.attention.softmax_attention import SoftmaxAttention
from genlm_backend.attention.torch.torch_ops import TORCH, fused_operator

Line = dict[str, Any]

MODELS: dict[str, dict[str, Any]] = {
    "SmolLM2-135M": {
        "model_type": "llama",
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "max_position_embeddings": 65536,
        "tie_word_embeddings": True,
    },
    "Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": True,
    },
    "Qwen3-8B": {
        "model_type": "qwen3",
        "vocab_size": 151936,
        "hidden_size": 4096,
        "intermediate_size": 12288,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
        "tie_word_embeddings": False,
    },
}
"""Shapes of models, by name."""

PROMPTS = (512, 4096, 32768)
PARTICLES = (1, 20, 64, 256, 1024)
NUM_STEPS = 8


def wait(device: str) -> None:
    """Wait until the device has done what it was told."""
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


def seconds(call: Callable[[], Any], device: str) -> float:
    """Return how long a call takes, until the device is done with it."""
    wait(device)
    start = time.perf_counter()
    call()
    wait(device)
    return time.perf_counter() - start


def bandwidth(device: str) -> float:
    """Return how many bytes a second the device's memory reads and writes in a copy."""
    size = 1 << (30 if torch.device(device).type == "cuda" else 27)
    source = torch.ones(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    taken = np.median([seconds(lambda: target.copy_(source), device) for _ in range(7)])
    return 2 * size / float(taken)


def model_of(name: str, device: str, dtype: torch.dtype) -> Any:
    """Make a model with random weights on the device."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config_of(name), dtype=dtype).eval()


def config_of(name: str) -> Any:
    """Return a config of transformers."""
    from transformers import AutoConfig

    given = dict(MODELS[name])
    return AutoConfig.for_model(given.pop("model_type"), **given)


def tokenizer_of(vocab_size: int) -> Any:
    """Return a tokenizer with as many tokens as a model has."""
    from tokenizers import Tokenizer, models

    return Tokenizer(models.WordLevel({f"<{i}>": i for i in range(vocab_size)}, unk_token="<0>"))


def bytes_of_weights(model: Any) -> int:
    """Return the bytes of weights that a step reads: all but a table of which it takes few rows."""
    table = model.get_input_embeddings().weight
    is_tied = model.get_output_embeddings().weight is table
    whole = sum(parameter.nbytes for parameter in model.parameters())
    return whole if is_tied else whole - table.nbytes


def steps(name: str, device: str, deadline: float) -> Iterator[Line]:
    """Yield what a step of particles behind a shared prompt costs, beside the limit.

    The limit is the time in which the memory hands over the weights, and each distinct key and
    value. ``host_ms`` is what a step takes beside the passes of the model, and ``eager_ms`` what
    one takes whose passes are not captured. ``smc_ms`` is a step before which particles have been
    drawn anew, and ``draws_ms`` one that draws each particle's next token where the model is.

    Args:
        name: Name of the model.
        device: The device.
        deadline: When to begin nothing more, as ``time.monotonic()`` tells it.
    """
    from genlm_backend import AsyncTransformer

    speed = bandwidth(device)
    yield {"model": name, "bandwidth_GB_per_s": speed / 1e9}
    model = model_of(name, device, torch.bfloat16)
    vocab_size, weights = model.config.vocab_size, bytes_of_weights(model)
    options = {"batch_size": max(PARTICLES), "row_cache_bytes": 0, "output_device": device}
    with AsyncTransformer(model, tokenizer_of(vocab_size), self_check=False, **options) as lm:
        evaluator: Any = lm._hf
        passes, per_token = evaluator.scheduler, evaluator.scheduler.cache.layout.bytes_per_slot
        for length, count in itertools.product(PROMPTS, PARTICLES):
            capacity = lm.statistics().kv_bytes_budget // per_token
            line: Line = {"model": name, "shared_tokens": length, "particles": count}
            num_own = count * 5 * NUM_STEPS
            if length + num_own > min(capacity, model.config.max_position_embeddings + num_own):
                yield {**line, "skipped": f"there is room for {capacity} tokens"}
                continue
            if time.monotonic() > deadline:
                yield {**line, "skipped": "no time was left"}
                continue
            walk = Walk(lm, vocab_size, length, count, device)
            walk.steps(NUM_STEPS // 2)  # in which the pass is captured
            step_seconds = float(np.median(walk.steps(NUM_STEPS)))
            distinct = length + count * NUM_STEPS
            limit = (weights + distinct * per_token) / speed
            with _timed(passes.runner, device) as in_passes:
                outside = sum(walk.steps(NUM_STEPS // 2)) - sum(in_passes)
            resampled = float(np.median(walk.steps(NUM_STEPS // 2, resamples=True)))
            drawn = float(np.median(walk.draws(NUM_STEPS // 2)))
            graphs, passes.runner.graphs = passes.runner.graphs, None
            eager = float(np.median(walk.steps(3)))
            passes.runner.graphs = graphs
            yield {
                **line,
                "step_ms": 1e3 * step_seconds,
                "smc_ms": 1e3 * resampled,
                "draws_ms": 1e3 * drawn,
                "limit_ms": 1e3 * limit,
                "over_limit": step_seconds / limit,
                "host_ms": 1e3 * outside / (NUM_STEPS // 2),
                "eager_ms": 1e3 * eager,
                "prefill_ms": 1e3 * walk.prefill,
                "tokens_per_s": count / step_seconds,
            }
            lm.clear_cache()
    yield from _to_host(name, model, device, deadline)


def _to_host(name: str, model: Any, device: str, deadline: float) -> Iterator[Line]:
    """Yield what a step costs whose rows go to the processor, as they do by default."""
    from genlm_backend import AsyncTransformer

    vocab_size, length = model.config.vocab_size, PROMPTS[0]
    options: dict[str, Any] = {"batch_size": max(PARTICLES), "row_cache_bytes": 0}
    options["kv_cache_bytes"] = 4 << 30
    with AsyncTransformer(model, tokenizer_of(vocab_size), self_check=False, **options) as lm:
        for count in PARTICLES:
            if time.monotonic() > deadline:
                return
            walk = Walk(lm, vocab_size, length, count, device)
            walk.steps(NUM_STEPS // 2)
            taken = float(np.median(walk.steps(NUM_STEPS)))
            line: Line = {"model": name, "shared_tokens": length, "particles": count}
            yield {**line, "to_host_ms": 1e3 * taken}
            lm.clear_cache()


class Walk:
    """Particles after a prompt, or after one each, that go on by a token each.

    Args:
        lm: What is asked.
        vocab_size: Number of tokens.
        length: Number of tokens of the prompt.
        count: Number of particles.
        device: Where the model is.
        distinct: Whether each particle has a prompt of its own.

    Attributes:
        prefill: Seconds that the prompt took.
    """

    def __init__(
        self,
        lm: Any,
        vocab_size: int,
        length: int,
        count: int,
        device: str,
        distinct: bool = False,
    ) -> None:
        self._ask, self._device = lm.batch_next_token_logprobs_sync, device
        self._draw = lm.batch_draw_next_token_sync
        self._random, self._vocab_size = np.random.default_rng(length), vocab_size
        prompts = [
            lm.context(self._random.integers(1, vocab_size, length).tolist())
            for _ in range(count if distinct else 1)
        ]
        self.prefill = seconds(lambda: self._ask(prompts), device)
        self._contexts = prompts if distinct else prompts * count

    def steps(self, number: int, resamples: bool = False) -> list[float]:
        """Take steps, each of particles drawn anew or not; return the seconds that each took."""
        return [self._step(resamples) for _ in range(number)]

    def draws(self, number: int) -> list[float]:
        """Take steps by drawing the next token of each particle; return the seconds of each."""
        return [self._drawn() for _ in range(number)]

    def _drawn(self) -> float:
        start = time.perf_counter()
        found = self._draw(self._contexts, generator=self._random)
        taken = time.perf_counter() - start
        pairs = zip(self._contexts, found, strict=True)
        self._contexts = [context.extend(drawn.token_id) for context, drawn in pairs]
        return taken

    def _step(self, resamples: bool) -> float:
        if resamples:
            chosen = self._random.integers(0, len(self._contexts), len(self._contexts))
            self._contexts = [self._contexts[i] for i in chosen]
        tokens = self._random.permutation(self._vocab_size - 1)[: len(self._contexts)] + 1
        pairs = zip(self._contexts, tokens, strict=True)
        self._contexts = [context.extend(int(token)) for context, token in pairs]
        return seconds(lambda: self._ask(self._contexts), self._device)


@contextlib.contextmanager
def _timed(runner: Any, device: str) -> Iterator[list[float]]:
    """Wait for the device behind each pass; yield a list that gets the seconds of each."""
    found, forward = list[float](), runner.forward

    def timed(*given: Any) -> torch.Tensor:
        start, logits = time.perf_counter(), forward(*given)
        wait(device)
        found.append(time.perf_counter() - start)
        return logits

    runner.forward = timed
    yield found
    del runner.forward


def plain(name: str, device: str, deadline: float) -> Iterator[Line]:
    """Yield what ``generate`` of transformers costs a step, with its static cache.

    Every row has its own copy of the prompt's keys and values there.
    """
    model = model_of(name, device, torch.bfloat16)
    config = model.config
    heads = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    per_token = 4 * config.num_hidden_layers * config.num_key_value_heads * heads
    for length in PROMPTS[:2]:
        for count in PARTICLES[:3]:
            line: Line = {"model": name, "shared_tokens": length, "particles": count}
            free = torch.cuda.mem_get_info()[0] if torch.device(device).type == "cuda" else 4 << 30
            if count * length * per_token > free / 3:
                yield {**line, "skipped": "its copies of the prompt do not fit"}
                continue
            if time.monotonic() > deadline:
                yield {**line, "skipped": "no time was left"}
                continue
            ids = torch.randint(1, config.vocab_size, (1, length), device=device)
            ids = ids.expand(count, -1).contiguous()

            def generate(num_tokens: int, ids: torch.Tensor = ids) -> None:
                model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    min_new_tokens=num_tokens,
                    max_new_tokens=num_tokens,
                    do_sample=True,
                    cache_implementation="static",
                    pad_token_id=0,
                )

            try:
                generate(34)  # compiles
                short, long = (seconds(lambda n=n, run=generate: run(n), device) for n in (2, 34))
            except Exception as error:  # third-party code on a device that nobody has tried
                yield {**line, "failed": f"{type(error).__name__}: {error}"[:300]}
                continue
            yield {**line, "step_ms": 1e3 * (long - short) / 32}
            gc.collect()


def by_vllm(name: str, device: str, deadline: float) -> Iterator[Line]:
    """Yield what a step of vLLM's ``LLM.generate`` costs, behind one prompt that all rows share."""
    import os
    import tempfile

    os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    with tempfile.TemporaryDirectory() as folder:
        config_of(name).save_pretrained(folder)
        llm = LLM(
            folder,
            load_format="dummy",
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=max(PROMPTS[:2]) + 64,
            max_num_seqs=256,
            kv_cache_memory_bytes=16 << 30,
            compilation_config={"cudagraph_capture_sizes": [1, 2, 4, 8, 16, 24, 32, 64, 128, 256]},
        )
    for length in PROMPTS[:2]:
        prompt = np.random.default_rng(length).integers(1, MODELS[name]["vocab_size"], length)
        for count in PARTICLES[:4]:
            line: Line = {"model": name, "shared_tokens": length, "particles": count}
            if time.monotonic() > deadline:
                yield {**line, "skipped": "no time was left"}
                continue
            given: Any = [{"prompt_token_ids": prompt.tolist()}] * count

            def generate(num_tokens: int, given: Any = given) -> None:
                params = SamplingParams(
                    max_tokens=num_tokens, ignore_eos=True, temperature=1.0, detokenize=False
                )
                llm.generate(given, params, use_tqdm=False)

            generate(2)
            short, long = (seconds(lambda n=n, run=generate: run(n), device) for n in (2, 34))
            taken = (long - short) / 32
            yield {**line, "step_ms": 1e3 * taken, "tokens_per_s": count / taken}


def tries(device: str, deadline: float) -> Iterator[Line]:
    """Yield what the sums of 100 rows over a trie of 131,000 tokens cost, beside their bytes."""
    from genlm_backend import ParallelTokenCharacterTrie

    speed, random = bandwidth(device), np.random.default_rng(0)
    lengths = random.integers(1, 12, 131_000)
    words = {bytes(random.integers(97, 113, length).tolist()) for length in lengths}
    while len(words) < 131_000:
        words.add(bytes(random.integers(97, 113, 10).tolist()))
    vocab = sorted(words)
    trie = ParallelTokenCharacterTrie(vocab, device=device, as_tensor=True)
    rows = torch.rand(100, len(vocab), device=device).log_softmax(-1)
    weights = rows.exp()
    for name, call in (
        ("weight_sum", lambda: trie.batch_weight_sum(weights)),
        ("weight_max", lambda: trie.batch_weight_max(weights)),
        ("log_weight_sum", lambda: trie.batch_log_weight_sum(rows)),
    ):
        if time.monotonic() > deadline:
            yield {"what": name, "skipped": "no time was left"}
            continue
        found = call()
        taken = float(np.median([seconds(call, device) for _ in range(15)]))
        limit = (weights.nbytes + found.nbytes) / speed
        yield {
            "what": name,
            "rows": len(rows),
            "tokens": len(vocab),
            "ms": 1e3 * taken,
            "limit_ms": 1e3 * limit,
            "over_limit": taken / limit,
        }


def division(device: str, deadline: float) -> Iterator[Line]:
    """Yield what a layer's attention of a step costs by the ways to read what all rows share.

    ``slots_ms`` is slot by slot, ``in_1_ms`` and so on in so many extents; ``extents``
    says which of these a step takes. Queries are as those of ``attention``, in bfloat16. Each is
    captured ten times as one CUDA graph, which is launched seven times.
    """
    rows_and_lengths = itertools.product(PARTICLES, (32, 128, 512, 2048, *PROMPTS[1:]))
    for rows, length in rows_and_lengths:
        if time.monotonic() > deadline:
            yield {"rows": rows, "shared_tokens": length, "skipped": "no time was left"}
            return
        yield _divided(rows, length, device)


def _divided(rows: int, length: int, device: str) -> Line:
    """Return what the ways to read cost some rows."""
    from genlm_backend.backends.hf.cuda_graph_runner import CudaGraphCapturer
    from genlm_backend.backends.hf.decode_ops import decode_ops_for
    from genlm_backend.backends.hf.decode_tables import QUERIES_OF_BLOCK, num_extents

    ops = decode_ops_for(torch.device(device), torch.bfloat16, 64, 4)
    if ops is None:
        return {"skipped": "there are no operators for steps"}
    query = torch.randn(rows, 32, 64, device=device).to(torch.bfloat16)
    codes = torch.randn(length + rows, 2 * 8 * 64, device=device).to(torch.bfloat16)
    taken = num_extents(length, rows, 8 * -(-rows * 4 // QUERIES_OF_BLOCK))
    line: Line = {"rows": rows, "shared_tokens": length, "extents": taken}
    recorder, first = CudaGraphCapturer(torch.device(device)), None
    line["distance"] = 0.0  # of what the ways find
    for number in (0, *NUM_STRETCHES):
        if number > max(1, length // 32) or (not number and rows * length > 1 << 21):
            continue
        attend = _attending(ops, query, codes, length, number)

        def ten(attend: Callable[[], torch.Tensor] = attend) -> torch.Tensor:
            return [attend() for _ in range(10)][-1]

        replay, found = recorder.record(ten)
        replay()
        first = found.float() if first is None else first
        line["distance"] = max(line["distance"], float((found - first).abs().max()))
        cost = float(np.median([seconds(replay, device) for _ in range(7)])) / 10
        line[f"in_{number}_ms" if number else "slots_ms"] = 1e3 * cost
    return line


NUM_STRETCHES = (1, 2, 4, 8, 16)


def _attending(
    ops: Any, query: torch.Tensor, codes: torch.Tensor, length: int, number: int
) -> Callable[[], torch.Tensor]:
    """Return what attends to shared tokens in a number of extents, or slot by slot for none."""
    rows, device = len(query), query.device

    def table(numbers: Any, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.as_tensor(np.asarray(numbers), dtype=dtype).to(device)

    own, every = np.arange(length, length + rows)[:, None], np.arange(length)
    columns = own if number else np.concatenate([np.tile(every, (rows, 1)), own], 1)
    slots, counts = table(columns.ravel()), np.full(rows, columns.shape[1])
    firsts, sizes = table(counts.cumsum() - counts), table(counts)
    ends = np.linspace(0, length, number + 1).astype(np.int64) if number else np.zeros(1, np.int64)
    starts, spans = table(ends), table(np.diff(ends))
    bounds = table(np.arange(number + 1) * rows * 4)
    readers = table(np.tile(np.arange(rows), number), torch.int64)
    splits = table(np.arange(number) * rows + np.arange(rows)[:, None])
    keys, values = (part.unflatten(1, (8, 64)) for part in codes.chunk(2, 1))

    def attend() -> torch.Tensor:
        of_parts = None
        if number:
            grouped = query.index_select(0, readers).unflatten(1, (8, 4)).transpose(1, 2)
            queries = grouped.reshape(-1, 8, 64)
            of_parts = ops.in_extents(queries, keys, values, bounds, starts, spans, rows * 4, 0.125)
        found: torch.Tensor = ops.in_slots(
            query, codes, slots, firsts, sizes, of_parts, splits, None, 0.125, 8
        )
        return found

    return attend


def attention(device: str, deadline: float) -> Iterator[Line]:
    """Yield which operator attends to a shared extent, and what it and the formula cost.

    Queries are those of 64 and 1,024 rows of 4 heads to a head of keys, as of the shape of a
    billion parameters; the limit is the time of plan the keys and values once.
    """
    speed = bandwidth(device)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        name = str(dtype).removeprefix("torch.")
        fused = fused_operator(torch.device(device), dtype, 64)
        line: Line = {"dtype": name, "operator": fused and fused.attend.__name__.strip("_")}
        yield {**line, "takes_masks": fused is not None and fused.attend_with is not None}
        for length, count in itertools.product(PROMPTS, (64, 1024)):
            kept = torch.randn(1, length, 2 * 8 * 64, device=device).to(dtype)
            keys, values = (
                part.unflatten(2, (8, 64)).transpose(1, 2) for part in kept.chunk(2, -1)
            )
            query = torch.randn(1, 8, 4 * count, 64, device=device).to(dtype)
            one: Line = {**line, "keys": length, "particles": count}
            block = SoftmaxAttention(TORCH, 64**-0.5)
            for label, call in (
                ("fused_ms", lambda q=query, k=keys, v=values, b=block: b.attend(q, k, v, None)),
                (
                    "formula_ms",
                    lambda q=query, k=keys, v=values, b=block: b.attend_if_any(q, k, v, None),
                ),
            ):
                if time.monotonic() > deadline:
                    yield {**one, "skipped": "no time was left"}
                    break
                call()
                one[label] = 1e3 * float(np.median([seconds(call, device) for _ in range(5)]))
            else:
                yield {**one, "limit_ms": 1e3 * kept.nbytes / speed}
