"""Engine: vLLM's engine in this process, as sessions whose rows can be asked for."""

# pyright: reportMissingImports=false, reportAttributeAccessIssue=false
from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from typing import Any

import torch
from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

from genlm_backend.errors import EvaluationError, UnsupportedModelError
from genlm_backend.llm.vllm import capture, fork
from genlm_backend.llm.vllm.sessions import Step


class Engine:
    """Starts, extends and gives up sessions, and steps vLLM until their rows are there.

    Not to be used by two threads at once.

    Args:
        llm: A ``vllm.LLM`` that ``load`` has made.
        tokenizer: In place of the model's own.
    """

    def __init__(self, llm: LLM, tokenizer: Any = None) -> None:
        self._llm = llm
        self._core = capture.engine_core(llm)
        config = llm.llm_engine.vllm_config
        self.tokenizer: Any = llm.get_tokenizer() if tokenizer is None else tokenizer
        self.vocab_size: int = config.model_config.get_vocab_size()
        self.max_length: int = config.model_config.max_model_len - 1
        self.max_sessions: int = config.scheduler_config.max_num_seqs
        self.block_size: int = config.cache_config.block_size
        self.num_blocks: int = capture.num_blocks(self._core)
        self.num_steps = 0

    @classmethod
    def load(cls, path: str, options: dict[str, Any], tokenizer: Any = None) -> Engine:
        """Load a model with vLLM, in this process and on one device.

        Sets ``VLLM_ENABLE_V1_MULTIPROCESSING=0``, and ``VLLM_LOGGING_LEVEL=WARNING`` where it
        is not set, while it loads.

        Args:
            path: A directory or a repository.
            options: For ``vllm.LLM``.
            tokenizer: In place of the model's own.
        """
        capture.check_version()
        for name in ("tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size"):
            if options.get(name, 1) != 1:
                raise UnsupportedModelError(
                    f"{name}={options[name]}: this release runs vLLM on one device only"
                )
        processors = [*options.get("logits_processors", ()), capture.RowCapture]
        made = {
            "enable_prefix_caching": True,
            "disable_log_stats": True,
            "gpu_memory_utilization": 0.9,
            **options,
            "async_scheduling": False,
            "logits_processors": processors,
            "kv_transfer_config": KVTransferConfig(
                kv_connector="ForkConnector",
                kv_role="kv_both",
                kv_connector_module_path=fork.__name__,
            ),
        }
        variables = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}
        if "VLLM_LOGGING_LEVEL" not in os.environ:
            variables["VLLM_LOGGING_LEVEL"] = "WARNING"
        with _environment(**variables):
            return cls(LLM(path, **made), tokenizer)

    def num_free_blocks(self) -> int:
        """Return how many blocks of keys and values nobody holds."""
        return capture.num_free_blocks(self._core)

    def add(self, step: Step) -> None:
        """Start or extend the session of ``step``; computed at the next ``run``."""
        extra: dict[str, Any] = {capture.TAG: step.session}
        if step.source is not None:
            extra["kv_transfer_params"] = {
                fork.SOURCE: step.source,
                fork.NUM_SHARED: step.num_shared,
            }
        params = SamplingParams(
            max_tokens=1, temperature=0.0, detokenize=False, ignore_eos=True, extra_args=extra
        )
        tokens = list(step.new_tokens)
        self._core.add_request(
            capture.core_request(step.session, tokens, params, lora_request=None)
        )

    def run(self, session_ids: list[str]) -> list[torch.Tensor]:
        """Step the engine until each of these sessions has a row; return them in order."""
        waiting, rows = set(session_ids), {}
        idle_steps = 0
        while waiting:
            outputs = self._core.get_output().outputs
            self.num_steps += 1
            idle_steps = 0 if outputs else idle_steps + 1
            if idle_steps > 1000:
                raise EvaluationError(f"vLLM does not schedule {len(waiting)} of its requests")
            for output in outputs:
                if output.request_id in waiting and output.new_token_ids:
                    waiting.discard(output.request_id)
                    rows[output.request_id] = capture.take_row(output.request_id)
        return [rows[session_id] for session_id in session_ids]

    def release(self, session_ids: list[str]) -> None:
        """Give sessions up; their blocks are free at once."""
        self._core.abort_requests(session_ids)
        capture.forget_rows(session_ids)

    def reset(self) -> None:
        """Forget the blocks of sessions that were given up, so that nothing is reused."""
        self._core.get_output()  # lets the scheduler see who has gone
        self._llm.reset_prefix_cache()

    def close(self) -> None:
        """End the engine and free what it holds."""
        self._core.shutdown()
        del self._core, self._llm
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


@contextlib.contextmanager
def _environment(**variables: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
