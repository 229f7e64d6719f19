"""HFEvaluator: answers of a Hugging Face model, adapter by adapter."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast, final

import torch

from genlm_backend.attention.torch import WholeAttend
from genlm_backend.backends.hf.architecture import check_predicts
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.lora import Adapters
from genlm_backend.backends.hf.model_picture_rules import examine_pictures, image_token_id
from genlm_backend.backends.hf.prefix_file import PrefixFiles
from genlm_backend.backends.hf.support import (
    KVSupport,
    check_model,
    examine,
    longest_context,
    mean_keys,
    rotary_limit,
    tried,
    vocab_width,
)
from genlm_backend.errors import CacheError, OptionError
from genlm_backend.model.ends import ends_of_model
from genlm_backend.model.evaluator import EvaluatorCounts, EvaluatorInfo
from genlm_backend.model.query import Adapter, Query
from genlm_backend.model.row import Row
from genlm_backend.model.scoring import Scoring
from genlm_backend.passes.job import Asked, Found
from genlm_backend.passes.pass_evaluator import PassEvaluator
from genlm_backend.passes.prefill_plan import CostModel
from genlm_backend.passes.prefix_cache import PrefixCache
from genlm_backend.prefix import KVCacheDtype, KVLayout, KVStore, StateStore
from genlm_backend.prefix.budgets import (
    check_budgets,
    default_kv_budget,
    most_rows,
    state_budget,
)
from genlm_backend.prefix.codecs import needs_mean
from genlm_backend.runtime.memory import is_out_of_memory, release_cached_memory
from genlm_backend.runtime.threads import use_num_threads
from genlm_backend.vision.picture_rules import PictureRules

logger = logging.getLogger(__name__)


@final
class HFEvaluator(PassEvaluator):
    """Answers queries by a causal language model of transformers.

    A model of which nothing can be kept runs every context whole.

    Args:
        model: The model, on whatever device; it is put into evaluation mode.
        max_length: Longest context to accept; ``None`` for what its config says.
        kv_cache_bytes: Bytes of keys and values to keep; ``None`` for a part of what is free.
        host_cache_bytes: Bytes of keys, values and states to keep on the host when they have to
            leave the device.
        state_cache_bytes: Bytes of running states to keep, of those of ``kv_cache_bytes``; ``None``
            for half of them, or all where no layer attends.
        num_threads: Number of threads of a forward pass on the CPU; ``None`` for torch's own.
        kv_cache_dtype: Number format of the keys and values that are kept; ``None`` for the type
            that the model computes in.
        output_device: Where rows are returned.
        packs_weights: Whether weights are packed where that is faster (``PackedWeights``).

    Raises:
        UnsupportedModelError: If it is no causal language model.
    """

    def __init__(
        self,
        model: Any,
        *,
        max_length: int | None = None,
        kv_cache_bytes: int | None = None,
        kv_cache_dtype: KVCacheDtype | None = None,
        host_cache_bytes: int = 0,
        state_cache_bytes: int | None = None,
        num_threads: int | None = None,
        output_device: torch.device | None = None,
        packs_weights: bool = False,
    ) -> None:
        check_model(model)
        check_budgets(kv_cache_bytes, host_cache_bytes, state_cache_bytes)
        model.eval()
        self._runner = runner = HFRunner(model)
        super().__init__(runner, CostModel.on(runner.device.type), WholeAttend(), output_device)
        self._adapters = Adapters(model)
        self._files = PrefixFiles(self.passes, self._adapters)
        self._max_length = longest_context(model) if max_length is None else max_length
        self._wanted_bytes = kv_cache_bytes
        self._kept_as: KVCacheDtype | None = kv_cache_dtype
        self._wanted_host_bytes, self._wanted_state_bytes = host_cache_bytes, state_cache_bytes
        self._num_threads = num_threads
        self._packs_weights = packs_weights
        limit = rotary_limit(model)
        self._rotary_limit = math.inf if limit is None else limit

    # ---------------------------------------------------------------- getting ready

    def open(self) -> EvaluatorInfo:
        """Find out what the model can do by a few tiny passes, and make room for what is kept."""
        runner = self._runner
        width = vocab_width(runner.model)
        if self._num_threads is not None:
            use_num_threads(self._num_threads)
        if self._packs_weights:
            self._adapters.packed.pack(runner.model)
        with tried(runner):
            tokens = [[i % width for i in (5, 6, 7)]]
            ids = torch.tensor(tokens, dtype=torch.int64, device=runner.device)
            self._adapters.try_twins(ids, **runner.caching(False))
        self._use(None)
        check_predicts(runner, width)
        support = examine(runner, width, self._max_length)
        layout = self._layout(support, width)
        if support.spread_alone:
            warnings.warn(
                f"rows of this {type(runner.model).__name__} depend on what they are computed "
                f"beside, beyond rounding: alone, one has a root mean square difference of "
                f"{support.spread_alone:.2g} to the same row among others; its quantised weights "
                "have kernels of several precisions on this processor",
                stacklevel=2,
            )
        self.passes.pads, self.passes.aligns = support.pads, support.aligns
        self.passes.going_on = support.going_on
        self.passes.attend_whole, self.passes.cache.layout = WholeAttend(layout), layout
        self._attend = support.attend
        if self._wanted_bytes != 0:
            self._make_room(support, layout)
        runner.num_forwards = runner.tokens_computed = 0  # the examination is not the user's
        return EvaluatorInfo(
            vocab_size=width,
            max_length=self._max_length,
            num_slots=self.passes.tree.num_slots if self.passes.cache.keeps else None,
            num_host_slots=self.passes.tree.host_slots.num_slots or None,
            kv_cache_dtype=self._kept_as,
            device=str(runner.device),
            can_forget=True,
            takes_adapters=True,
            uses_openmp=runner.device.type == "cpu",
            scores=not support.reason,  # which tells that what follows a token is not seen
            omits_undefined=True,
            image_token_id=image_token_id(runner.model),
            eos_token_ids=ends_of_model(runner.model),
        )

    def _layout(self, support: KVSupport, vocab_size: int) -> KVLayout:
        """Return the shapes of keys and values, and how they are kept."""
        kept, runner = self._kept_as, self._runner
        if kept is None:
            return support.layout
        if support.reason:
            raise OptionError(
                f"kv_cache_dtype={kept!r} is for models whose keys and values are kept, and "
                f"{type(runner.model).__name__} runs every context whole: {support.reason}"
            )
        if not support.layout.layers:
            raise OptionError(
                f"kv_cache_dtype={kept!r} is for models whose keys and values are kept, and "
                f"{type(runner.model).__name__} has running states alone, which stay as they are"
            )
        longest = min(longest_context(runner.model) or math.inf, self._rotary_limit)
        means = mean_keys(runner, support.layout, vocab_size, longest) if needs_mean(kept) else None
        return support.layout.kept_as(kept, means)

    def _make_room(self, support: KVSupport, layout: KVLayout) -> None:
        wanted = self._wanted_bytes
        if support.reason:
            name = type(self.passes.runner.model).__name__
            if self._wanted_host_bytes:
                raise OptionError(
                    f"host_cache_bytes={self._wanted_host_bytes} is for models whose keys and "
                    f"values are kept, and {name} runs every context whole: {support.reason}"
                )
            if self._wanted_state_bytes is not None:
                raise OptionError(
                    f"state_cache_bytes={self._wanted_state_bytes} is for models with running "
                    f"states that are kept, and {name} runs every context whole: {support.reason}"
                )
            logger.info("%s runs every context whole: %s", name, support.reason)
            return
        budget = default_kv_budget(layout) if wanted is None else wanted
        states = self._state_store(layout, budget, type(self.passes.runner.model).__name__)
        num_slots = layout.num_slots(budget - self._state_budget)
        if states is not None and not num_slots:
            raise OptionError(
                f"state_cache_bytes={self._state_budget} leaves no room for keys and values of "
                f"kv_cache_bytes={budget}: a token takes {layout.bytes_per_slot} bytes"
            )
        with _fits("kv_cache_bytes", wanted):
            store = KVStore(layout, num_slots)
        host_states = self._host_states(layout, budget)
        host_store, host = None, self._wanted_host_bytes
        if host and layout.devices == {"cpu"}:
            warnings.warn(
                "host_cache_bytes gains nothing here, since all that is kept is in the "
                "processor's memory anyway: give the bytes to kv_cache_bytes",
                stacklevel=2,
            )
        of_states = host_states.num_states * layout.states.bytes_per_state if host_states else 0
        num_host_slots = layout.num_slots(host - of_states) if layout.layers else 0
        if num_host_slots:
            with _fits("host_cache_bytes", host):
                host_store = KVStore(
                    layout.on_host(), num_host_slots, pins="cuda" in layout.devices
                )
        attend = support.attend(store)
        self.passes.keep(
            PrefixCache(
                self._runner,
                attend,
                store,
                num_slots,
                host_store,
                num_host_slots,
                states,
                host_states,
            )
        )
        self._budget, self._host_budget = budget, host

    def _state_store(self, layout: KVLayout, budget: int, name: str) -> StateStore | None:
        """Return room for running states, if the model has such, and note how much it takes."""
        size = layout.states.bytes_per_state
        self._state_budget = state_budget(
            self._wanted_state_bytes, budget, size, name, attends=bool(layout.layers)
        )
        if not layout.states:
            return None
        num_states = self._state_budget // size
        self.passes.cost = dataclasses.replace(self.passes.cost, max_rows=most_rows(num_states))
        with _fits("state_cache_bytes", self._state_budget):
            return StateStore(layout.states, num_states)

    def _host_states(self, layout: KVLayout, budget: int) -> StateStore | None:
        """Return room on the host for running states, in proportion to what they have here.

        Raises:
            OptionError: (``ValueError``) If it is too little for one.
        """
        host, size = self._wanted_host_bytes, layout.states.bytes_per_state
        if not host or not size:
            return None
        num_bytes = host * self._state_budget // budget
        if num_bytes < size:
            name = type(self.passes.runner.model).__name__
            raise OptionError(
                f"the running state of {name} behind one token takes {size} bytes, and of "
                f"host_cache_bytes={host} there are {num_bytes} for such: give more to it"
            )
        with _fits("host_cache_bytes", host):
            return StateStore(
                layout.states.on_host(), num_bytes // size, pins="cuda" in layout.devices
            )

    # ---------------------------------------------------------------- rows and scores

    def _use(self, adapter: Adapter | None) -> None:
        """Run what computes with an adapter, or as the model came, from now on."""
        self._runner.twin = self._adapters.twin(adapter)

    def evaluate_whole(self, query: Query) -> Row:
        """Return the row of a context run whole and alone, past whatever is kept."""
        self._use(query.adapter)
        if len(query.context) > self._rotary_limit:
            return self._row_apart(query)
        return self._whole(query)

    def _answers(self, questions: list[Asked]) -> list[Found]:
        """Return the answers to questions of one adapter."""
        self._use(questions[0].adapter)
        # Where the model computes other rotary frequencies for long contexts, no key of a shorter
        # one is theirs: they share no keys, values or pass with others.
        limit = self._rotary_limit
        apart = [q for q in questions if len(q.context) > limit] if limit < math.inf else []
        if not apart:
            return self.passes.evaluate(questions)
        answers = {question: self._apart(question) for question in apart}
        others = [question for question in questions if question not in answers]
        if others:
            answers.update(zip(others, self.passes.evaluate(others), strict=True))
        return [answers[question] for question in questions]

    def _apart(self, question: Asked) -> Found:
        """Return the answer to a question about contexts that are longer than the limit."""
        if isinstance(question, Query):
            return self._row_apart(question)
        text, limit = question.text, int(self._rotary_limit)
        scores: list[torch.Tensor] = []
        if question.start <= limit:
            up_to_limit = Scoring(text.prefix(limit + 1), question.start)
            scores.extend(cast(list[torch.Tensor], self.passes.evaluate([up_to_limit])))
        for end in range(max(question.start, limit + 1), len(text.token_ids)):
            row = self._row_apart(text.prefix(end)).logprobs  # a model of its own for each length
            scores.append(row[text.token_ids[end]].cpu().unsqueeze(0))
        return torch.cat(scores)

    def _row_apart(self, query: Query) -> Row:
        """Return the row of a context that is longer than the limit, whatever was run before.

        A model whose frequencies grow with its contexts keeps those of the longest until a short
        one comes.
        """
        self.passes.whole([Query([0], query.adapter)])
        return self._whole(query)

    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        """Find out where text goes on behind the pictures of a context, by a few passes."""
        passes, placeholder = self.passes, image_token_id(self.passes.runner.model)
        if placeholder is None:
            return super().picture_rules(token_ids, inputs)
        before = passes.runner.num_forwards, passes.runner.tokens_computed
        self._use(None)
        rules = examine_pictures(
            self._runner, passes.cache.layout, self._attend, token_ids, inputs, placeholder
        )
        passes.runner.num_forwards, passes.runner.tokens_computed = before
        return rules

    # ---------------------------------------------------------------- files of prefixes

    def save_prefix(self, query: Query, path: str) -> None:
        """Compute a context and write its keys and values into a file."""
        self._check_can_keep(len(query.context))
        node = self.passes.computed(query, self._answers)
        if node is None:
            raise CacheError(
                f"a prompt of {len(query.context)} tokens does not fit into the "
                f"{self.passes.tree.num_slots} of kv_cache_bytes, as far as none are pinned, or "
                "has keys and values that are not finite in this format"
            )
        self._files.save(node, query, Path(path))

    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        """Keep the keys and values of a file."""
        self._check_can_keep()
        prefix = self._files.load(Path(path), adapter)
        num_tokens = len(prefix.token_ids)
        self._check_can_keep(num_tokens)
        if self._max_length is not None and num_tokens > self._max_length:
            raise CacheError(
                f"the {num_tokens} tokens of {path} are more than max_length={self._max_length}"
            )
        if not self.passes.cache.fill(
            prefix.token_ids, prefix.codes, prefix.states, prefix.num_resumed, adapter
        ):
            raise CacheError(
                f"the {num_tokens} tokens of {path} do not fit into the "
                f"{self.passes.tree.num_slots} of kv_cache_bytes, or their running state into "
                f"state_cache_bytes={self._state_budget}, as far as none are pinned"
                if self._state_budget
                else f"the {num_tokens} tokens of {path} do not fit into the "
                f"{self.passes.tree.num_slots} of kv_cache_bytes, as far as none are pinned"
            )
        return prefix.token_ids

    def _check_can_keep(self, num_tokens: int = 0) -> None:
        if not self.passes.cache.keeps:
            why = "kv_cache_bytes is 0" if self._wanted_bytes == 0 else "it runs contexts whole"
            raise CacheError(f"the model keeps no keys and values to save or to load: {why}")
        if num_tokens > self._rotary_limit:
            raise CacheError(
                f"contexts of more than {self._rotary_limit} tokens are run whole, and nothing is "
                "kept of them"
            )

    def clear(self) -> None:
        """Free all slots, pinned ones too, and look whether weights are others now."""
        self.passes.tree.clear()
        self._adapters.packed.look_again()
        self._files.look_again()

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter, and try it by a few tiny passes."""
        self._adapters.load(adapter, path, self.passes.cache.keeps)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Let go of an adapter, and free all slots."""
        self._adapters.remove(adapter)
        self.clear()

    # ---------------------------------------------------------------- keeping house

    def counts(self) -> EvaluatorCounts:
        """Return what the runner and the tree have counted, and what packed weights take."""
        return self._counted(self._adapters.packed.nbytes)

    def close(self) -> None:
        """Let go of the model and of the slots."""
        self._let_go()
        self._runner.twin = None
        self._adapters.close()
        release_cached_memory()


@contextlib.contextmanager
def _fits(name: str, num_bytes: int | None) -> Iterator[None]:
    """Say which option asks for more memory than there is."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if num_bytes is None or not is_out_of_memory(error):
            raise
        raise OptionError(f"{name}={num_bytes} do not fit into memory") from error
