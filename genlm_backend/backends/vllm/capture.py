"""The rows of vLLM's requests, and the engine core that computes them.

vLLM's private names are used here and in ``fork``, the KV connector. vLLM loads ``RowCapture``,
which keeps the logits of tagged requests. ``RowExtension`` returns rows from workers in other
processes; ``Core`` adds requests, steps the engine and takes the rows. vLLM's processes import this
file too and scan all loaded modules, so it imports few modules.
"""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import pickle
import queue
import time
import uuid
from concurrent.futures import Future, wait
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, final
from weakref import WeakSet

import numpy as np
import torch
from vllm import SamplingParams
from vllm import envs as envs
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank
from vllm.renderers.inputs.preprocess import parse_model_prompt
from vllm.utils import func_utils
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.engine import EngineCoreRequest, EngineCoreRequestType
from vllm.v1.engine.core_client import InprocClient
from vllm.v1.engine.exceptions import EngineDeadError as EngineDeadError
from vllm.v1.sample.logits_processor import BatchUpdate, LogitsProcessor, MoveDirectionality
from vllm.v1.worker.gpu_input_batch import CachedRequestState

from genlm_backend.backends.vllm.release import let_modules_be_scanned
from genlm_backend.errors import EvaluationError
from genlm_backend.multimodal.pictures import image_token_id_of
from genlm_backend.queries.row import Row, rows_of_logits
from genlm_backend.readouts.sampling import listed_ids

if TYPE_CHECKING:
    from genlm_backend.readouts.readout import RowQueries

# This call is early enough: a vLLM process imports the main program (and perhaps Numba),
# then unpickles its arguments (which imports this file), and only then scans the modules.
let_modules_be_scanned()

TAG = "genlm_row"
"""Key in a request's ``extra_args``; its value, the tag, names the logits to keep."""

try:  # vLLM's second model runner accepts logits processors from 0.31 on
    from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor as LogitsProcessorV2
except ImportError:
    LogitsProcessorV2: Any = object

KV_CACHE_DTYPES_ON_CPU: Final = tuple(CPUAttentionBackend.supported_kv_cache_dtypes)
"""KV cache dtypes that vLLM's attention on the CPU supports."""

_PULSE: Final = 0.5
"""While another process has yet to answer a call: seconds between checks that it is alive."""


@final
class RewindableGenerator(torch.Generator):
    """A random generator on the CPU that can return to its state before the latest step."""

    # With chunked prefill vLLM samples after every chunk. It undoes each draw but the one after the
    # last chunk by ``set_offset``, which PyTorch implements for CUDA generators only.
    living: ClassVar[WeakSet[RewindableGenerator]] = WeakSet()
    """All rewindable generators of this process that still exist."""

    before: torch.Tensor
    """The state before the latest step."""

    def get_offset(self) -> int:
        """Return 4, the amount that vLLM subtracts to undo one step's draws."""
        return 4

    def set_offset(self, offset: int) -> None:
        """Undo the draws of the latest step, whatever the offset."""
        self.set_state(self.before)

    @classmethod
    def beside(cls, generator: torch.Generator) -> RewindableGenerator:
        """Return a new rewindable generator in the state of ``generator``."""
        own = cls(device="cpu")
        own.before = generator.get_state()
        own.set_state(own.before)
        cls.living.add(own)
        return own


def _let_requests_rewind() -> None:
    """Make requests of vLLM's first model runner use rewindable generators on the CPU."""
    finish = CachedRequestState.__post_init__

    def finish_with_own_generator(self: Any) -> None:
        finish(self)
        if self.generator is not None and self.generator.device.type == "cpu":
            self.generator = RewindableGenerator.beside(self.generator)

    if finish.__module__ != __name__:  # otherwise it has been replaced already
        CachedRequestState.__post_init__ = finish_with_own_generator


@final
class RowCapture(LogitsProcessor, LogitsProcessorV2):
    """A logits processor that copies the logits of tagged requests and changes none."""

    # Each of vLLM's two model runners accepts it. The first reports moves within the batch
    # (``update_state``), the second a fixed slot for each request (``add_request``).
    logits: ClassVar[dict[str, torch.Tensor]] = {}
    """Logits by request tag; on the class, because vLLM does not expose the instance."""

    def __init__(self, vllm_config: Any, *runner: Any) -> None:
        self._tags: dict[int, str] = {}
        _let_requests_rewind()

    def is_argmax_invariant(self) -> bool:
        """Return ``False``, so that vLLM calls ``apply`` for greedy requests too."""
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        """Update the tags as requests leave, join or move within the batch."""
        if batch_update is None:
            return
        tags = self._tags
        for index in batch_update.removed:
            tags.pop(index, None)
        for index, params, _, _ in batch_update.added:
            self.add_request(index, params)
        for source, target, kind in batch_update.moved:
            first, second = tags.pop(source, None), tags.pop(target, None)
            if first is not None:
                tags[target] = first
            if kind is MoveDirectionality.SWAP and second is not None:
                tags[source] = second

    def add_request(self, req_idx: int, sampling_params: Any) -> bool:
        """Record the tag, if any, of the request at this index; return whether it has a tag."""
        tag = (sampling_params.extra_args or {}).get(TAG)
        self._tags.pop(req_idx, None)
        if tag is not None:
            self._tags[req_idx] = tag
        return tag is not None

    def apply(self, logits: torch.Tensor, ctx: Any = None) -> torch.Tensor:
        """Copy tagged requests' logits, record generators' states; return ``logits`` unchanged."""
        if ctx is None:
            tagged = self._tags
        else:
            slots = enumerate(ctx.idx_mapping_np.tolist())
            tagged = {row: self._tags[slot] for row, slot in slots if slot in self._tags}
        for row, tag in tagged.items():
            self.logits[tag] = logits[row].clone()  # vLLM may overwrite its tensor
        for generator in RewindableGenerator.living:
            generator.before = generator.get_state()
        return logits

    @classmethod
    def take_rows(cls, tags: list[str]) -> list[Row]:
        """Return the rows of the requests with these tags (one or more); drop their logits."""
        # ``apply`` does not compute the rows: it runs in inference mode, whose tensors cannot be
        # modified later, and it would have to wait for the CUDA device.
        logits = torch.stack([cls.logits.pop(tag) for tag in tags])
        return rows_of_logits(logits, in_place=True)


class RowExtension:
    """Methods that vLLM adds to its workers; ``collective_rpc`` calls them by name."""

    def take_genlm_rows(self, tags: list[str]) -> tuple[bytes, list[float | None]] | None:
        """Return rows and log-sum-exps, or ``None`` on workers without rows; drop all logits."""
        kept = RowCapture.logits
        # Of the tensor-parallel workers only rank 0 returns rows; the others return ``None``.
        is_asked = get_tensor_model_parallel_rank() == 0 and kept.keys() >= set(tags)
        rows = RowCapture.take_rows(tags) if is_asked else None
        kept.clear()  # the call asks for all rows of the batch; nothing reads other logits
        if rows is None:
            return None
        logprobs = torch.stack([row.logprobs for row in rows]).cpu()
        return logprobs.numpy().tobytes(), [row.logsumexp for row in rows]

    def read_genlm_rows(self, tags: list[str], wanted: bytes) -> bytes | None:
        """Return pickled readouts of rows, or ``None`` on workers without rows; drop all logits."""
        if get_tensor_model_parallel_rank() != 0 or not RowCapture.logits.keys() >= set(tags):
            RowCapture.logits.clear()
            return None
        rows = RowCapture.take_rows(tags)
        RowCapture.logits.clear()
        return pickle.loads(wanted).packed_answers(rows)

    def forget_genlm_logits(self, tags: list[str]) -> None:
        """Drop the logits of ended requests with these tags."""
        for tag in tags:
            RowCapture.logits.pop(tag, None)


def core_request(**own: Any) -> Any:
    """Return a request for the core; a ``resumable`` request stays there and can be extended."""
    others = {"pooling_params": None, "cache_salt": None, "data_parallel_rank": None}
    return EngineCoreRequest(**own, **others, arrival_time=time.time())


@final
class Core:
    """The engine core of a ``vllm.LLM``, in this process or in a process of its own."""

    def __init__(self, llm: Any) -> None:
        self._client = llm.llm_engine.engine_core
        self._renderer = getattr(llm.llm_engine, "renderer", None)  # earlier releases lack it
        self.is_local = isinstance(self._client, InprocClient)
        config = llm.llm_engine.vllm_config
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.max_model_len: int = config.model_config.max_model_len
        named = config.model_config.try_get_generation_config()
        self.eos_token_ids = listed_ids(named.get("eos_token_id"))
        self.max_num_seqs: int = config.scheduler_config.max_num_seqs
        self.block_size: int = config.cache_config.block_size
        self.num_blocks: int = config.cache_config.num_gpu_blocks
        kept = config.cache_config.cache_dtype
        self.kv_cache_dtype: str | None = None if kept == "auto" else kept
        self.takes_adapters = config.lora_config is not None
        self.num_free_blocks = self.num_blocks - 1
        self.num_requests = self.num_running = 0
        self.is_fresh = False

    def add(self, requests: list[Any]) -> None:
        """Add requests, so that the next step can schedule all of them together."""
        # A core in another process would start on the first request before the last arrives.
        is_paused = not self.is_local and len(requests) > 1
        if is_paused:
            self._ask("pause_scheduler", "keep", False)
        try:
            for request in requests:
                self._client.add_request(request)
        finally:
            if is_paused:
                self._ask("resume_scheduler")

    def abort(self, request_ids: list[str]) -> None:
        """End requests; a local core frees their blocks at once, a remote one at its next step."""
        self._client.abort_requests(request_ids)
        if self.is_local:
            pool = self._client.engine_core.scheduler.kv_cache_manager.block_pool
            self.num_free_blocks = pool.get_num_free_blocks()

    def step(self, timeout: float) -> list[Any] | None:
        """Step a local core or await a remote step; return its outputs, or ``None`` on timeout."""
        if self.is_local:
            outputs = self._client.get_output()
        else:
            outputs = _next_output(self._client, timeout)
            if outputs is None:
                return None
        stats = outputs.scheduler_stats
        self.is_fresh = stats is not None
        if stats is not None:
            # ``kv_cache_usage`` is a share of all blocks but one, which vLLM reserves.
            usable = self.num_blocks - 1
            self.num_free_blocks = usable - round(stats.kv_cache_usage * usable)
            self.num_running = stats.num_running_reqs
            self.num_requests = (
                self.num_running + stats.num_waiting_reqs + stats.num_skipped_waiting_reqs
            )
        return outputs.outputs

    def take_rows(self, tags: list[str], wanted: RowQueries | None = None) -> list[Any]:
        """Return each request's latest row, or its answers to ``wanted``; drop the logits."""
        if self.is_local:
            rows = RowCapture.take_rows(tags)
        elif wanted is None or wanted.has_own:
            rows = self._rows_from_elsewhere(tags)
        else:
            asked = pickle.dumps(wanted)
            return pickle.loads(self._of_one_worker("read_genlm_rows", tags, asked))
        return rows if wanted is None else wanted.answers(rows)

    def _rows_from_elsewhere(self, tags: list[str]) -> list[Row]:
        logprobs, logsumexps = self._of_one_worker("take_genlm_rows", tags)
        table = np.frombuffer(logprobs, np.float32).reshape(len(tags), -1)
        return Row.of_table(torch.from_numpy(table.copy()), logsumexps)

    def _of_one_worker(self, method: str, *arguments: Any) -> Any:
        """Call a ``RowExtension`` method on all workers; return the result of the one with rows."""
        answers = self._ask("collective_rpc", method, None, arguments, None)
        found = [answer for answer in answers if answer is not None]
        if len(found) != 1:
            raise EvaluationError(f"{len(found)} of vLLM's workers returned rows, instead of one")
        return found[0]

    @staticmethod
    def logprobs_of(output: Any) -> tuple[torch.Tensor, torch.Tensor, int, int]:
        """Return logprobs and ids from token 1 on, and numbers of computed and cached tokens."""
        stats, told = output.prefill_stats, output.new_prompt_logprobs_tensors
        # vLLM leaves garbage at cached tokens, so the caller compares the ids with the prompt's.
        logprobs, ids = told.logprobs[:, 0].float(), told.logprob_token_ids[:, 0].long()
        return logprobs, ids, stats.num_computed_tokens, stats.num_cached_tokens

    def forget_logits(self, tags: list[str]) -> None:
        """Drop the logits of ended requests with these tags."""
        if self.is_local:
            RowExtension.forget_genlm_logits(None, tags)  # pyright: ignore[reportArgumentType]
        else:
            self._ask("collective_rpc", "forget_genlm_logits", None, (tags,), None)

    def add_lora(self, request: Any) -> None:
        """Load an adapter now, so that an invalid one raises here instead of in a later step."""
        self._ask("add_lora", request)

    def remove_lora(self, number: int) -> None:
        self._ask("remove_lora", number)

    def reset(self) -> None:
        """Forget all keys, values and encoded pictures; running requests are computed again."""
        self._ask("reset_prefix_cache", True, False)
        self._ask("reset_encoder_cache")

    def shutdown(self) -> None:
        """Shut down the core and the renderer's threads; clear a cache that holds tokenizers."""
        try:
            self._client.shutdown()
        finally:
            if self._renderer is not None:
                self._renderer.shutdown()
            remembered = getattr(func_utils, "_supports_kw", None)  # caches tokenizers' methods
            if remembered is not None:
                remembered.cache_clear()

    @property
    def is_dead(self) -> bool:
        """Whether the core ran in another process that has ended."""
        return not self.is_local and self._client.resources.engine_dead

    def _ask(self, method: str, *args: Any) -> Any:
        """Call a method of the core, in this process or another, and return its result."""
        client = self._client
        if self.is_local:
            return getattr(client, method)(*args)
        # vLLM's own client would wait forever for a process that dies during a call.
        number = uuid.uuid4().int >> 64
        answer: Future[Any] = Future()
        client.utility_results[number] = answer
        client._send_input(EngineCoreRequestType.UTILITY, (0, number, method, args))
        while not wait([answer], _PULSE).done:
            client.ensure_alive()
        return answer.result()


@final
class PictureProcessing:
    """vLLM's preprocessing of pictures, which runs before its core."""

    def __init__(self, llm: Any) -> None:
        self._engine = llm.llm_engine

    @property
    def image_token_id(self) -> int | None:
        """The id of the image token; ``None`` for a text-only model."""
        return image_token_id_of(self._engine.model_config.hf_config)

    @property
    def processor(self) -> Any:
        return self._engine.renderer.get_mm_processor().info.get_hf_processor()

    def read(self, prompt: str | list[int], images: list[Any]) -> tuple[list[int], list[Any]]:
        """Return the token ids of a prompt with pictures, and the pictures' features."""
        engine = self._engine
        given = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
        parsed = parse_model_prompt(
            engine.model_config, {**given, "multi_modal_data": {"image": images}}
        )
        renderer = engine.renderer
        (rendered,) = renderer.render_cmpl([parsed], renderer.default_cmpl_tok_params)
        request = engine.input_processor.process_inputs(
            "", rendered, SamplingParams(max_tokens=1), supported_tasks=("generate",)
        )
        return list(request.prompt_token_ids), list(request.mm_features or ())

    def between(self, features: list[Any], start: int, stop: int, lora_request: Any) -> list[Any]:
        """Return copies of features in ``[start, stop)``, with offsets counted from ``start``."""
        name = self._engine.input_processor._get_mm_identifier
        return [
            replace(
                feature,
                identifier=name(feature.mm_hash, lora_request),
                mm_position=replace(feature.mm_position, offset=feature.mm_position.offset - start),
            )
            for feature in features
            if start <= feature.mm_position.offset < stop
        ]


def _next_output(client: Any, timeout: float) -> Any:
    """Return the next outputs of a core in another process, or ``None`` after ``timeout``."""
    client.ensure_alive()
    try:
        outputs = client.outputs_queue.get(timeout=timeout)
    except queue.Empty:
        return None
    if isinstance(outputs, Exception):
        raise client._format_exception(outputs) from None
    return outputs
