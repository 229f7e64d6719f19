"""HFEvaluator: answers of a Hugging Face model, adapter by adapter."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, final

import torch

from genlm_backend.backends.hf.architecture import check_predicts
from genlm_backend.backends.hf.cascade_attention import UncachedAttention
from genlm_backend.backends.hf.cuda_graph_runner import CudaGraphRunner
from genlm_backend.backends.hf.hf_cache import hf_prefix_cache, layout_of
from genlm_backend.backends.hf.hf_runner import HFRunner
from genlm_backend.backends.hf.model_picture_rules import examine_pictures, image_token_id
from genlm_backend.backends.hf.options import hf_options
from genlm_backend.backends.hf.prefix_file import PrefixFiles
from genlm_backend.backends.hf.support import (
    check_hf_model,
    hf_probe,
    longest_context,
    rotary_limit,
    tried,
    vocab_width,
)
from genlm_backend.multimodal.pictures import PictureRules
from genlm_backend.queries.evaluator import EvaluatorCounts, EvaluatorInfo
from genlm_backend.queries.query import Adapter, RowQuery
from genlm_backend.readouts.sampling import ends_of_model
from genlm_backend.runtime.threads import use_num_threads
from genlm_backend.scheduling.local_evaluator import LocalEvaluator


@final
class HFEvaluator(LocalEvaluator):
    """Answers queries by a causal language model of transformers, without a cache if need be."""

    def __init__(
        self, model: Any, *, output_device: torch.device | None = None, **options: Any
    ) -> None:
        """Take the options of ``HFOptions``."""
        self._options = hf_options(options)
        check_hf_model(model)
        model.eval()
        self._runner = runner = HFRunner(model)
        runner.check_cancelled = lambda: self.check_cancelled()
        runner.merges = self._options.get("packs_weights", False)
        super().__init__(runner, runner.device.type, UncachedAttention(), output_device)
        has_bytes = self._options.get("kv_cache_bytes") != 0
        self._files = PrefixFiles(self.scheduler, runner, has_bytes=has_bytes)
        self.scheduler.max_cacheable_len = rotary_limit(model)
        max_length = self._options.get("max_length")
        self._max_length = longest_context(model) if max_length is None else max_length

    # ---------------------------------------------------------------- getting ready

    def open(self) -> EvaluatorInfo:
        """Find out what the model can do by a few tiny passes, and make room for its cache."""
        runner = self._runner
        width = vocab_width(runner.model)
        if num_threads := self._options.get("num_threads"):
            use_num_threads(num_threads)
        if self._options.get("packs_weights", False):
            runner.packed.pack(runner.model)
        with tried(runner):
            tokens = [[i % width for i in (5, 6, 7)]]
            ids = torch.tensor(tokens, dtype=torch.int64, device=runner.device)
            runner.try_views(ids)
        self._in_place(None)
        check_predicts(runner, width)
        support = hf_probe(runner, width, self._max_length)
        longest = min(longest_context(runner.model) or math.inf, self.scheduler.max_cacheable_len)
        layout = layout_of(runner, support, self._options.get("kv_cache_dtype"), width, longest)
        if support.spread_alone:
            warnings.warn(
                f"rows of this {type(runner.model).__name__} depend on what they are computed "
                f"beside, beyond rounding: alone, one has a root mean square difference of "
                f"{support.spread_alone:.2g} to the same row among others; its quantised weights "
                "have kernels of several precisions on this processor",
                stacklevel=2,
            )
        self.scheduler.pads = support.pads
        self.scheduler.needs_equal_lengths = support.needs_equal_lengths
        self.scheduler.takes_several_tokens = support.takes_several_tokens
        self.scheduler.uncached_attention, self.scheduler.cache.layout = (
            UncachedAttention(layout),
            layout,
        )
        self._attention = support.attention
        cache = hf_prefix_cache(runner, support, layout, self._options)
        if cache is not None:
            self.scheduler.use_cache(cache)
            given = runner.model, runner.parameters, cache.attention, cache.pool
            if not support.needs_equal_lengths and CudaGraphRunner.can_be(*given):
                runner.graphs = CudaGraphRunner(cache.pool)
        runner.num_forwards = runner.tokens_computed = 0  # the examination is not the user's
        return EvaluatorInfo(
            vocab_size=width,
            max_length=self._max_length,
            num_slots=self.scheduler.tree.num_slots if self.scheduler.cache.keeps else None,
            num_states=self.scheduler.cache.state_pool.num_states or None,
            num_host_slots=self.scheduler.tree.host_slots.num_slots or None,
            kv_cache_dtype=self._options.get("kv_cache_dtype"),
            device=str(runner.device),
            takes_adapters=True,
            uses_openmp=runner.device.type == "cpu",
            scores=not support.reason,  # which tells that what follows a token is not seen
            omits_undefined=True,
            reads_out=True,
            image_token_id=image_token_id(runner.model),
            eos_token_ids=ends_of_model(runner.model),
        )

    # ---------------------------------------------------------------- rows and scores

    def _in_place(self, adapter: Adapter | None) -> AbstractContextManager[object]:
        self._runner.activate(adapter)  # and it stays there
        return nullcontext()

    def picture_rules(
        self, token_ids: Sequence[int], inputs: Mapping[str, torch.Tensor]
    ) -> PictureRules:
        """Find out by a few passes where text goes on after the pictures of a context."""
        passes, placeholder = self.scheduler, image_token_id(self.scheduler.runner.model)
        if placeholder is None:
            return super().picture_rules(token_ids, inputs)
        before = passes.runner.num_forwards, passes.runner.tokens_computed
        self._runner.view = self._runner.view_with(None)
        rules = examine_pictures(
            self._runner, passes.cache.layout, self._attention, token_ids, inputs, placeholder
        )
        passes.runner.num_forwards, passes.runner.tokens_computed = before
        return rules

    # ---------------------------------------------------------------- files of prefixes

    def save_prefix(self, query: RowQuery, path: str) -> None:
        """Compute a context and write its keys and values into a file."""
        self._files.check_can_keep(len(query.context))
        with self._in_place(query.adapter):
            self._files.save(self.scheduler.computed(query), query, Path(path))

    def load_prefix(self, path: str, adapter: Adapter | None) -> Sequence[int]:
        return self._files.load(path, adapter, self._max_length)

    def clear(self) -> None:
        """Free all slots, pinned ones too, and look whether weights are others now."""
        self.scheduler.tree.clear()
        self._runner.look_again()
        self._files.look_again()

    # ---------------------------------------------------------------- adapters

    def add_adapter(self, adapter: Adapter, path: str) -> None:
        """Load an adapter, and try it by a few tiny passes."""
        self._runner.load(adapter, path, self.scheduler.cache.keeps)

    def remove_adapter(self, adapter: Adapter) -> None:
        """Let go of an adapter, and free all slots."""
        self._runner.remove(adapter)
        self.clear()

    # ---------------------------------------------------------------- keeping house

    def counts(self) -> EvaluatorCounts:
        """Return the counts of the runner and the tree, and the bytes of packed weights."""
        return replace(
            super().counts(),
            packed_weight_bytes=self._runner.packed.nbytes,
            num_captured_steps=self._runner.num_captured_steps,
        )

    def close(self) -> None:
        self._runner.close()
        self._let_go()
