"""Ordinary threads that each want a text: their tasks are batched together by an engine."""

import argparse
import time
from concurrent.futures import ThreadPoolExecutor

import torch

from genlm_backend import AsyncGLM, load_model_by_name

COUNTRIES = ["France", "Italy", "Spain", "Japan", "Egypt", "Peru", "Norway", "Kenya"]


def main() -> None:
    parser = argparse.ArgumentParser(description="Texts for many threads at once.")
    parser.add_argument("--threads", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=12, help="of each text, at most")
    options = parser.parse_args()
    with load_model_by_name("smollm2") as lm:
        kwargs = {"do_sample": False, "max_new_tokens": options.tokens}
        with AsyncGLM(lm, max_queue_size=4, generation_kwargs=kwargs) as glm:

            def ask(country: str) -> str:
                prompt = torch.tensor(lm.tokenizer.encode(f"The capital of {country} is"))
                task = glm.submit(prompt)  # waits where four tasks are waiting already
                return lm.tokenizer.decode(glm.get_result(task)[0], skip_special_tokens=True)

            start = time.perf_counter()
            with ThreadPoolExecutor(options.threads) as pool:
                for text in pool.map(ask, COUNTRIES[: options.threads]):
                    print(text.split("\n")[0])
        statistics = lm.statistics()
        print(
            f"{statistics.num_awaits} tokens in {statistics.num_forwards} forward passes, "
            f"{time.perf_counter() - start:.1f} s"
        )


if __name__ == "__main__":
    main()
