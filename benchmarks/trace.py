"""How much of this library one awaited row goes through: functions, files, classes, calls."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

import genlm_backend
from benchmarks.workload import Numbers
from genlm_backend.backends.hf.forward_names import given_cache

PACKAGE = str(Path(genlm_backend.__file__).parent)
NUM_ROWS = 20


class Trace:
    """Calls of this library's functions, on all threads that have begun since it was made.

    Attributes:
        is_on: Whether calls are counted.
        calls: Number of calls by code.
        kinds: Classes whose methods were called on one of their objects.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.calls: dict[CodeType, int] = {}
        self.kinds: set[type] = set()
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def _note(self, frame: FrameType, event: str, argument: Any) -> None:
        if not self.is_on or event != "call" or not frame.f_code.co_filename.startswith(PACKAGE):
            return
        code = frame.f_code
        self.calls[code] = self.calls.get(code, 0) + 1
        if code.co_varnames[:1] == ("self",):
            kind = type(frame.f_locals["self"])
            if kind.__module__.startswith("genlm_backend"):
                self.kinds.add(kind)

    def end(self) -> None:
        """Note nothing any more."""
        threading.setprofile(None)
        sys.setprofile(None)

    def named(self) -> Iterator[CodeType]:
        """Return the code of functions that have a name, comprehensions and lambdas left out."""
        return (code for code in self.calls if not code.co_name.startswith("<"))


class _Operators(TorchDispatchMode):
    """Counts the operators that torch is asked for on this thread."""

    num_operators = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_operators += 1
        return func(*args, **(kwargs or {}))


_OWN = [[*divmod(i, 10), 5] for i in range(NUM_ROWS)]
"""The last tokens of each context, behind what all of them share."""


def _model(num_layers: int, **options: Any) -> Any:
    """An AsyncTransformer of a tiny Llama, and as many contexts as it is asked at once."""
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM

    from genlm_backend import AsyncTransformer

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000,
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=num_layers,
        num_attention_heads=1,
    )
    tokenizer = Tokenizer(models.WordLevel({f"<{i}>": i for i in range(1000)}, unk_token="<0>"))
    return AsyncTransformer(
        LlamaForCausalLM(config), tokenizer, kv_cache_bytes=1 << 24, row_cache_bytes=0, **options
    )


async def _step(lm: Any, contexts: list[Any], token_id: int) -> list[Any]:
    contexts = [context.extend(token_id) for context in contexts]
    await asyncio.gather(*map(lm.next_token_logprobs, contexts))
    return contexts


def trace(num_rows: int = NUM_ROWS) -> Numbers:
    """Counts of a warm step of contexts of ``lm.context``, an await each, with one layer."""
    traced = Trace()
    try:
        with _model(1) as lm:

            async def steps() -> None:
                behind = lm.context([(31 * i) % 1000 for i in range(500)])
                contexts = [behind + own for own in _OWN[:num_rows]]
                for token_id in (1, 2, 3):
                    contexts = await _step(lm, contexts, token_id)
                traced.is_on = True
                await _step(lm, contexts, 4)
                traced.is_on = False

            asyncio.run(steps())
    finally:
        traced.end()
    files = {code.co_filename for code in traced.named()}
    return {
        "rows": num_rows,
        "functions": len(set(traced.named())),
        "files": len(files),
        "lines": sum(len(Path(file).read_text().splitlines()) for file in files),
        "classes": len(traced.kinds),
        "calls_per_row": sum(traced.calls.values()) / num_rows,
        "operators_per_layer": _operators(num_rows, 3) - _operators(num_rows, 2),
        "their_operators_per_layer": _their_operators(num_rows, 3) - _their_operators(num_rows, 2),
    }


def _operators(num_rows: int, num_layers: int) -> int:
    """Return how many operators of torch a warm step takes, on the thread of the passes."""
    with _model(num_layers) as lm:
        mode = _Operators()
        behind = lm.context([(31 * i) % 1000 for i in range(500)])
        contexts = [behind + own for own in _OWN[:num_rows]]

        async def steps() -> None:
            nonlocal contexts
            for token_id in (1, 2, 3):
                contexts = await _step(lm, contexts, token_id)
            forward = lm._hf.scheduler.runner.forward

            def counted(*args: Any) -> torch.Tensor:
                with mode:
                    return forward(*args)

            lm._hf.scheduler.runner.forward = counted
            await _step(lm, contexts, 4)

        asyncio.run(steps())
        return mode.num_operators


@torch.inference_mode()
def _their_operators(num_rows: int, num_layers: int) -> int:
    """Return how many operators a step of the same model takes with transformers' own cache."""
    from transformers import DynamicCache

    with _model(num_layers) as lm:
        model, mode, cache = lm.model, _Operators(), DynamicCache()
        kept = given_cache(model, cache)
        model(input_ids=torch.zeros(num_rows, 500, dtype=torch.int64), **kept)
        with mode:
            model(input_ids=torch.zeros(num_rows, 1, dtype=torch.int64), **kept)
        return mode.num_operators
