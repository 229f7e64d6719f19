"""A process of a tiny model that tests share: closing a model of it only clears it."""

from dataclasses import replace
from functools import cache, partial

import torch

from genlm_backend.llm import ProcessEvaluator
from tests.llm.elsewhere import over_there
from tests.tree_integrity import check_integrity


def make_fresh(folder, kv_cache_bytes):
    """Over there: an evaluator that can be made as if it were new."""
    from transformers import AutoModelForCausalLM

    from genlm_backend.backends.hf.hf_evaluator import HFEvaluator

    model = AutoModelForCausalLM.from_pretrained(folder)
    cpu = torch.device("cpu")
    evaluator = HFEvaluator(model, kv_cache_bytes=kv_cache_bytes, num_threads=1, output_device=cpu)

    def renew():
        evaluator.clear()
        passes = evaluator.scheduler
        passes.runner.num_forwards = passes.runner.tokens_computed = passes.tokens_reused = 0
        passes.tree.num_evicted = 0

    def check():
        check_integrity(evaluator.scheduler.tree)

    evaluator.renew, evaluator.check = renew, check
    return evaluator


@cache
def opened():
    folder = over_there.saved("llama")
    evaluator = ProcessEvaluator(partial(make_fresh, folder, 1 << 20))
    return evaluator, evaluator.open()


def shared_evaluator(max_length=None):
    """An evaluator in the process of the tiny Llama that all of them use, one at a time."""
    owner, info = opened()
    evaluator = ProcessEvaluator(partial(make_fresh, "", 0))
    evaluator._child = owner._child
    evaluator.info = replace(info, max_length=max_length or info.max_length)
    evaluator.ask("renew")

    def close():
        evaluator.ask("check")
        for adapter in list(evaluator.adapters):
            evaluator.remove_adapter(adapter)
        evaluator._child = None

    evaluator.close = close
    return evaluator
