"""Multiple choice of lm-evaluation-harness, on this library and on the harness's own model."""

from __future__ import annotations

import time
from typing import Any

from genlm_backend.backends.bundled import bundled_directory

NUM_QUESTIONS = 8
BATCH_SIZES = (1, 4, 16)
KINDS = {"words": "several tokens", "letters": "one token"}
PLACES = {
    "France": "Paris, where the river is called the Seine",
    "Italy": "Rome, where the river is called the Tiber",
    "Japan": "Tokyo, where the river is called the Sumida",
    "Egypt": "Cairo, where the river is called the Nile",
    "Peru": "Lima, where the river is called the Rimac",
    "Norway": "Oslo, where the river is called the Aker",
    "England": "London, where the river is called the Thames",
    "Spain": "Madrid, where the river is called the Manzanares",
    "Austria": "Vienna, where the river is called the Danube",
    "Portugal": "Lisbon, where the river is called the Tagus",
    "Poland": "Warsaw, where the river is called the Vistula",
    "Germany": "Berlin, where the river is called the Spree",
}
QUESTION = "Question: What is the capital of {}, and what is the name of the river there?\nAnswer:"


def requests(kind: str) -> list[Any]:
    """Return four continuations of each of several questions behind the same examples.

    Args:
        kind: ``"words"`` for continuations of several tokens, ``"letters"`` for single ones.
    """
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]

    shots = "\n\n".join(f"{QUESTION.format(place)} {own}." for place, own in PLACES.items())
    answers, found = [*PLACES.values()], []
    for number in range(NUM_QUESTIONS):
        place = [*PLACES][number]
        context = f"{shots}\n\nThis is question {number}. {QUESTION.format(place)}"
        for choice in range(4):
            letter = "ABCD"[choice]
            text = letter if kind == "letters" else answers[(number + choice) % len(answers)]
            found.append(Instance("loglikelihood", {}, (context, f" {text}"), len(found)))
    return found


def seconds(model: Any, kind: str, repeats: int) -> dict[str, list[float]]:
    """Return the seconds, and those of processors, that all requests take, each time anew."""
    asked = requests(kind)
    numbers: dict[str, list[float]] = {"s": [], "cpu_s": []}
    model.loglikelihood(asked[:1], disable_tqdm=True)
    for _ in range(repeats):
        if hasattr(model, "lm"):
            model.lm.clear_cache()
        start, cpu_start = time.perf_counter(), time.process_time()
        model.loglikelihood(asked, disable_tqdm=True)
        numbers["s"].append(time.perf_counter() - start)
        numbers["cpu_s"].append(time.process_time() - cpu_start)
    return numbers


def harness(variant: str, repeats: int) -> dict[str, Any]:
    """Return seconds of multiple choice on ``"genlm"``, or on ``"hf, batches of 4"``."""
    folder = str(bundled_directory("smollm2"))
    if variant == "genlm":
        from genlm_backend.integrations.lm_evaluation import HarnessLM

        model: Any = HarnessLM(folder, "hf", dtype="float32")
    else:
        from lm_eval.models.huggingface import HFLM  # pyright: ignore[reportMissingImports]

        size = int(variant.split()[-1])
        model = HFLM(pretrained=folder, device="cpu", dtype="float32", batch_size=size)
    numbers: dict[str, Any] = {
        "num_requests": 4 * NUM_QUESTIONS,
        "context_tokens": len(model.tok_encode(requests("words")[0].args[0])),
    }
    for kind in KINDS:
        for name, values in seconds(model, kind, repeats).items():
            numbers[f"{kind}_{name}"] = values
    return numbers
