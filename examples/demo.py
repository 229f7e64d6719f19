"""The demo: sequential Monte Carlo continues a prompt in short words only.

The same draws without weights come first, for contrast. Bars show the effective sample size after
each step of the first run.
"""

import argparse

import numpy as np

from genlm_backend import load_model_by_name, smc_sync


def main() -> None:
    parser = argparse.ArgumentParser(description="SMC over a language model, in short words only.")
    parser.add_argument("--model", default="smollm2", help="a name, or a local directory")
    parser.add_argument("--prompt", default="The sea is")
    parser.add_argument("--particles", type=int, default=30)
    parser.add_argument("--tokens", type=int, default=20, help="of each particle, at most")
    parser.add_argument("--bytes", type=int, default=4, help="of a token, at most")
    parser.add_argument("--repeats", type=int, default=3, help="runs, for the error of log Z")
    options = parser.parse_args()
    count, repeats = options.particles, options.repeats
    print(f"Loading {options.model} …", flush=True)
    with load_model_by_name(options.model, llm_opts={"batch_size": count * repeats}) as lm:
        short = [len(t.strip()) <= options.bytes and t.isascii() for t in lm.byte_vocab]
        allowed = np.array(short)
        allowed[list(lm.special_ids)], allowed[list(lm.eos_token_ids)] = False, True
        print(f"Sampling {count} texts, {1 + repeats} times …", flush=True)
        given = {"max_tokens": options.tokens, "allowed": allowed, "seed": 0}
        unweighted = smc_sync(lm, options.prompt, count, **given, threshold=0)
        texts = smc_sync(lm, options.prompt, count, **given, repeats=repeats, progress=True)
        counts = lm.statistics()

    print(f"Question: how does the model continue {options.prompt!r}, given that each of its next")
    print(f"{options.tokens} tokens has at most {options.bytes} ASCII characters, blanks aside?")
    print(f"\nWithout weights: {count} texts of allowed tokens, never weighted or resampled,")
    print(f"are worth {unweighted.ess[-1, 0]:.1f} draws from the answer. Some of them:")
    for text in unweighted.texts[:5]:
        print(f"  {1 / count:.3f}  {options.prompt + text!r}")
    bars = "".join("▁▂▃▄▅▆▇█"[int(7.99 * size / count)] for size in texts.ess[:, 0])
    print(f"\nSequential Monte Carlo: {count} texts, weighted and resampled, {repeats} times")
    print(f"Effective sample size  {bars}  of {count}\nPosterior, heaviest first")
    for text, weight in texts.most_common(10):
        print(f"  {weight:.3f}  {options.prompt + text!r}")
    spread = f" ± {texts.log_z_error:.3f}" if repeats > 1 else ""
    print(f"log Z {texts.log_z:.3f}{spread}: one in {np.exp(-texts.log_z):.0f} ", end="")
    print("of the model's texts is such")
    print(f"{counts.num_forwards} forward passes; {counts.tokens_computed} tokens ", end="")
    print(f"computed, {counts.tokens_reused} reused")


if __name__ == "__main__":
    main()
