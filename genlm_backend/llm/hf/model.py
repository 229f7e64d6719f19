"""AsyncTransformer: awaited log-probabilities of a Hugging Face model."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Self

import torch

from genlm_backend.cache.pool import KVPool
from genlm_backend.checks import Check, byte_count, checked, integer, optional, thread_count
from genlm_backend.errors import (
    AdapterError,
    CacheError,
    OptionError,
    QueryDroppedError,
    UnknownAdapterError,
)
from genlm_backend.llm.base import ADAPTER_CHECKS, TokenIds, check_adapter_name
from genlm_backend.llm.batched import DEFAULT_ROW_CACHE_BYTES, BatchedLM
from genlm_backend.llm.hf.evaluator import Evaluator
from genlm_backend.llm.hf.lora import Adapters
from genlm_backend.llm.hf.memory import default_kv_budget, is_out_of_memory, release_cached_memory
from genlm_backend.llm.hf.options import loading_options
from genlm_backend.llm.hf.runner import Runner
from genlm_backend.llm.hf.schedule import CostModel
from genlm_backend.llm.hf.support import (
    check_model,
    examine,
    longest_context,
    rotary_limit,
    vocab_width,
)
from genlm_backend.llm.hf.threads import (
    frequent_switches,
    release_idle_threads,
    use_num_threads,
)
from genlm_backend.llm.loading import check_holds_model, explained, hub_options, resolve_name
from genlm_backend.llm.query import Query, check_context
from genlm_backend.llm.rows import rows_of_logits, separate_rows
from genlm_backend.llm.statistics import BackendCounts

logger = logging.getLogger(__name__)


class AsyncTransformer(BatchedLM):
    """A causal language model of transformers, batched and cached.

    All concurrent awaits become padded batched forward passes on one worker thread; the keys and
    values of every prefix seen are kept, within a budget, and reused token by token. Families
    whose state cannot be kept token by token (state-space models, linear attention) answer just
    as well, by running every context whole; ``kv_reuse`` tells.

    Several of these may use one model, and take turns. Between batches the model is as its owner
    left it: adapters of the owner may be loaded, activated and deleted then, and no row changes.
    Its weights may not be changed, nor adapters merged into them.

    Args:
        hf_model: A causal language model, on whatever device; it is put into evaluation mode.
        hf_tokenizer: Its tokenizer.
        batch_size: Distinct contexts in one forward pass, at most.
        timeout: Seconds that the first query of a batch may wait for company, at most.
        kv_cache_bytes: Bytes of keys and values to keep; 0 keeps none. Default: half of a CUDA
            device's free memory, or a quarter of the machine's, 4 GiB at most.
        row_cache_bytes: Bytes of log-probability rows to keep; 0 keeps none.
        output_device: Where rows are returned: "cpu", "cuda:0", …
        num_threads: Threads of a forward pass on the CPU. Default: torch's own number.
        max_length: The longest context to accept. Default: what the model's config says.
        self_check: Compare a few probe texts with the bytes of their tokens.

    The model is not to be converted or moved afterwards (``model.half()``, ``model.to(…)``):
    queries are a ``ModelStateError`` then, until it is as it was.

    Raises:
        OptionTypeError: (``TypeError``) If an option is of a wrong type.
        OptionError: (``ValueError``) If one is out of its bounds, or does not fit into memory.
        DeviceError: (``ValueError``) If ``output_device`` is not there.
        UnsupportedModelError: (``ValueError``) For encoder-decoder models.
        TokenizerDecodeError: (``ValueError``) If the bytes of some token cannot be known.

    Attributes:
        model: The model as given.
        device: Where it takes its token ids.
        kv_reuse: Whether keys and values are reused.
    """

    option_checks: ClassVar[Mapping[str, Check[Any]]] = {
        **BatchedLM.option_checks,
        "kv_cache_bytes": optional(byte_count),
        "num_threads": optional(thread_count),
    }

    def __init__(
        self,
        hf_model: Any,
        hf_tokenizer: Any,
        batch_size: int = 20,
        timeout: float = 0.02,
        *,
        kv_cache_bytes: int | None = None,
        row_cache_bytes: int = DEFAULT_ROW_CACHE_BYTES,
        output_device: str | torch.device = "cpu",
        num_threads: int | None = None,
        max_length: int | None = None,
        self_check: bool = True,
    ) -> None:
        options = {
            "kv_cache_bytes": kv_cache_bytes,
            "num_threads": num_threads,
            "max_length": max_length,
        }
        given = checked(self.option_checks, options)
        check_model(hf_model)
        super().__init__(
            hf_tokenizer,
            vocab_size=vocab_width(hf_model),
            max_length=longest_context(hf_model) if max_length is None else max_length,
            batch_size=batch_size,
            timeout=timeout,
            row_cache_bytes=row_cache_bytes,
            output_device=output_device,
            self_check=self_check,
        )
        hf_model.eval()
        self.model = hf_model
        self._adapters = Adapters(hf_model)
        runner = Runner(hf_model)
        self.device = runner.device
        self._is_on_cpu = self.device.type == "cpu"
        self._undefined = torch.tensor(sorted(self.undefined_ids), dtype=torch.int64)
        try:
            if num_threads is not None:
                self._batcher.call(lambda: use_num_threads(given["num_threads"]))
            pool = self._batcher.call(lambda: self._make_pool(runner, given["kv_cache_bytes"]))
        except BaseException:
            self._batcher.close()  # or its thread would stay as long as the traceback
            raise
        self._evaluator = Evaluator(
            runner,
            pool,
            CostModel.on(self.device.type),
            self._finish,
            rotary_limit(hf_model),
            self.check_wanted,
        )
        runner.num_forwards = runner.tokens_computed = 0  # the examination is not the user's

    @classmethod
    def from_name(
        cls,
        model_id: str,
        bitsandbytes_opts: dict[str, Any] | None = None,
        hf_opts: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> Self:
        """Load a model and its tokenizer.

        Args:
            model_id: A repository on the hub, a local directory, or ``"smollm2"``.
            bitsandbytes_opts: For ``BitsAndBytesConfig``, such as ``{"load_in_8bit": True}`` or
                ``{"load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}`` (extra ``bitsandbytes``).
            hf_opts: For ``AutoModelForCausalLM.from_pretrained``. Defaults:
                ``device_map="auto"``, ``dtype="auto"`` (``torch_dtype`` means the same).
                ``revision``, ``token``, ``cache_dir`` and ``trust_remote_code``, which stays off
                unless it is asked for, go to the tokenizer too.
            **kwargs: For the constructor.

        Raises:
            OptionTypeError: (``TypeError``) If an option is unknown or of a wrong type; as with
                the next two, nothing is loaded then.
            OptionError: (``ValueError``) If one is out of its bounds.
            DeviceError: (``ValueError``) If a device is not there.
            ModelNotFoundError: (``OSError``) If there is no such model.
            MissingExtraError: (``ImportError``) If an extra is needed and absent.
        """
        from transformers import AutoModelForCausalLM, AutoTokenizer

        cls.check_options(kwargs)
        options = loading_options(bitsandbytes_opts, hf_opts)
        shared = ("revision", "token", "cache_dir", "trust_remote_code", "local_files_only")
        path = resolve_name(model_id)
        options = {**hub_options(path), **options}
        with explained(model_id):
            check_holds_model(path)
            tokenizer = AutoTokenizer.from_pretrained(
                path, **{name: options[name] for name in shared if name in options}
            )
            model = AutoModelForCausalLM.from_pretrained(path, **options)
        return cls(model, tokenizer, **kwargs)

    # ---------------------------------------------------------------- rows

    def evaluate(self, queries: list[Query]) -> Sequence[torch.Tensor | Exception]:
        """Return one row for each query, from as few tokens through the model as possible."""
        with frequent_switches():
            rows: dict[Query, torch.Tensor | Exception] = {}
            for namespace in dict.fromkeys(query.namespace for query in queries):
                own = [query for query in queries if query.namespace == namespace]
                try:
                    with self._adapters.in_place(own[0]):
                        rows.update(zip(own, self._evaluator.evaluate(own), strict=True))
                except QueryDroppedError:  # nobody waits for any of them
                    raise
                except Exception as error:  # raised for their callers, and no others
                    rows.update(dict.fromkeys(own, error))
            return [rows[query] for query in queries]

    def next_token_logprobs_uncached(
        self, token_ids: TokenIds, lora_name: str | None = None
    ) -> torch.Tensor:
        """Return the row of a context run whole and alone, past every cache: float32 ``[vocab]``.

        For checking the cache's answers, or timing a plain forward pass. Blocks the thread.
        """
        query = self._query(token_ids, lora_name)
        self.before_wait()

        def whole() -> list[torch.Tensor]:
            with self._adapters.in_place(query):
                return self._evaluator.whole([query])

        return self._own(self._batcher.call(whole)[0])

    def before_wait(self) -> None:
        """Release the calling thread's idle OpenMP threads where the model runs on the CPU."""
        if self._is_on_cpu:
            release_idle_threads()

    def _finish(self, logits: torch.Tensor) -> list[torch.Tensor]:
        """From logits ``[n, model_vocab]`` to rows on the output device, float32 ``[vocab + 1]``.

        The last number of a row is the logarithm that its logits were normalised by. Each row
        owns its memory, so that a row that is kept does not keep its batch.
        """
        if len(self._undefined):
            logits = logits.index_fill(1, self._undefined.to(logits.device), -torch.inf)
        if logits.device == self.output_device:
            return separate_rows(logits)
        rows = rows_of_logits(logits).to(self.output_device)
        return [row.clone() for row in rows]

    # ---------------------------------------------------------------- adapters

    def add_new_lora(self, lora_path: str, lora_name: str = "lora_1") -> None:
        """Load a LoRA adapter, to be named in queries; blocks until it is there (extra ``lora``).

        A batch takes a forward pass for each adapter in it. Keys and values are cached for each.
        Any kind of PEFT's that replaces layers will do; it is tried by a few tiny passes.

        Args:
            lora_path: A directory in PEFT's format, or a repository on the hub.
            lora_name: A name that no other adapter of the model has.

        Raises:
            MissingExtraError: (``ImportError``) Without PEFT.
            AdapterError: (``ValueError``) If the name is taken, or nothing can be loaded, or the
                adapter does more than to replace layers; the model stays as it was.
        """
        given = {"lora_path": lora_path, "lora_name": lora_name}
        checked(ADAPTER_CHECKS, given, AdapterError)
        self._batcher.call(lambda: self._adapters.load(str(lora_path), lora_name, self.kv_reuse))

    def remove_lora(self, lora_name: str) -> None:
        """Remove an adapter, and clear the cache.

        Queries with it that have not begun get an ``UnknownAdapterError``, and no others.

        Raises:
            UnknownAdapterError: (``ValueError``) If there is none of that name.
        """

        check_adapter_name(lora_name)

        def remove() -> None:
            self._adapters.remove(lora_name)
            self.clear_cache()  # before anybody can load another one under the name

        self._batcher.call(remove)

    def check_adapter(self, lora_name: str | None) -> None:
        """Raise an ``UnknownAdapterError`` unless ``lora_name`` is loaded or ``None``."""
        self.adapter_id(lora_name)

    def adapter_id(self, lora_name: str | None) -> int | None:
        """Return the number of an adapter's load, or ``None`` for the base model."""
        return self._adapters.names.number(lora_name)

    # ---------------------------------------------------------------- caches

    def _make_pool(self, runner: Runner, kv_cache_bytes: int | None) -> KVPool | None:
        with self._adapters.in_place():
            support = examine(runner, len(self.byte_vocab), self.max_length)
        if kv_cache_bytes == 0:
            return None
        if support.layout is None:
            logger.info(
                "%s runs every context whole: %s", type(self.model).__name__, support.reason
            )
            return None
        budget = default_kv_budget(support.layout) if kv_cache_bytes is None else kv_cache_bytes
        try:
            return KVPool(support.layout, budget)
        except (RuntimeError, MemoryError) as error:
            if kv_cache_bytes is None or not is_out_of_memory(error):
                raise
            raise OptionError(f"kv_cache_bytes={budget} do not fit into memory") from error

    @property
    def kv_reuse(self) -> bool:
        """Whether keys and values are reused; where not, every context is run whole."""
        return self._evaluator.pool is not None

    @property
    def kv_capacity(self) -> int | None:
        """Tokens that ``kv_cache_bytes`` hold; ``None`` where every context is run whole."""
        return self._evaluator.prefixes.num_slots if self.kv_reuse else None

    async def num_cached_tokens(self, token_ids: TokenIds, lora_name: str | None = None) -> int:
        """Return how many of a context's tokens have their keys and values cached."""
        query = self._query(token_ids, lora_name)
        if self._evaluator.is_apart(query):
            return 0
        # The last token always goes through the model: its logits are the answer.
        return self._evaluator.prefixes.peek(query.token_ids[:-1], query.namespace)

    can_forget = True

    async def forget(
        self, token_ids: TokenIds, lora_name: str | None = None, keep: int = 0
    ) -> None:
        """Free the keys and values of a context beyond its first ``keep`` tokens."""
        ids = check_context(token_ids, len(self.byte_vocab), max_length=None)
        keep = integer(0)("keep", keep)
        if lora_name is not None:
            check_adapter_name(lora_name)
        try:
            namespace = Query(ids, lora_name, self.adapter_id(lora_name)).namespace
        except UnknownAdapterError:  # what was computed with it has gone with it
            return
        done = self._batcher.call_soon(
            lambda: self._evaluator.prefixes.forget(ids, namespace, keep)
        )
        await asyncio.wrap_future(done)

    def cache_kv(self, prompt_tokens: TokenIds, lora_name: str | None = None) -> None:
        """Compute a prompt now and keep its keys and values until a cache is cleared.

        Caching is automatic, so nobody has to call this: it only keeps the prompt from being
        evicted. Blocks the thread. Does nothing for models that run every context whole.

        Raises:
            CacheError: If the prompt does not fit into ``kv_cache_bytes``.
        """
        query = self._query(prompt_tokens, lora_name)
        self.before_wait()

        def pin() -> bool:
            with self._adapters.in_place(query):
                return self._evaluator.pin(query)

        if not self._batcher.call(pin) and self.kv_reuse:
            raise CacheError(
                f"a prompt of {len(query.token_ids)} tokens does not fit into the "
                f"{self._evaluator.prefixes.num_slots} tokens of kv_cache_bytes that are not pinned"
            )

    def clear_kv_cache(self) -> None:
        """Forget every cached key and value, pinned ones too. No answer changes by it."""
        self._evaluator.prefixes.clear()

    def clear_cache(self) -> None:
        """Forget every cached row, key and value, pinned ones too. No answer changes by it."""
        super().clear_cache()
        self.clear_kv_cache()

    def backend_counts(self) -> BackendCounts:
        """Return what the runner and the prefix cache have counted."""
        evaluator, pool = self._evaluator, self._evaluator.pool
        return BackendCounts(
            num_forwards=evaluator.runner.num_forwards,
            tokens_computed=evaluator.runner.tokens_computed,
            tokens_reused=evaluator.tokens_reused,
            kv_bytes_used=pool.bytes_used if pool is not None else 0,
            kv_bytes_budget=pool.budget if pool is not None else 0,
            num_evicted_tokens=evaluator.prefixes.num_evicted,
        )

    def release(self) -> None:
        """Let go of the model and of the slots."""
        self._evaluator.close()
        self.model = None
        self._adapters.close()
        release_cached_memory()
