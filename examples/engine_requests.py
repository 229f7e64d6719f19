"""Many requests for one model from an ordinary script: streamed, awaited, stopped, measured."""

import argparse

from genlm_backend.generation import Engine, GenerationConfig, RuntimeConfig

PROMPTS = [
    "The capital of France is",
    "Water boils at a temperature of",
    "Three primary colours are",
    "The opposite of hot is",
    "Once upon a time there was",
    "The largest planet is",
]


def main() -> None:
    parser = argparse.ArgumentParser(description="Requests for one model, batched together.")
    parser.add_argument("--tokens", type=int, default=12, help="of each text, at most")
    parser.add_argument("--max-batch", type=int, default=4, help="texts under way at once")
    options = parser.parse_args()

    greedy = GenerationConfig(max_new_tokens=options.tokens, stop="\n")
    runtime = RuntimeConfig(max_batch=options.max_batch, max_length=256)
    with Engine() as engine:
        engine.install_model("lm", "smollm2", runtime)
        engine.start_model("lm")

        # Handles come back at once; what is generated gathers in each one's queue.
        endless = engine.start_request_text("lm", "1, 2, 3, 4,", max_new_tokens=200)
        requests = engine.start_request_text("lm", PROMPTS, greedy)

        print(PROMPTS[0], end="", flush=True)
        for piece in requests[0].queue:
            print(piece.text, end="", flush=True)
        print()
        for prompt, request in zip(PROMPTS[1:], requests[1:], strict=True):
            print(prompt + request.result()[0].text)

        engine.stop_request(endless)
        print(f"stopped: {endless.result()[0].text[:40]} …  ({endless.status().value})")

        for country in ("Italy", "Spain"):  # the second finds most of its prompt cached
            chat = [{"role": "user", "content": f"What is the capital of {country}?"}]
            request = engine.start_request_text("lm", chat, greedy)
            engine.sync_request(request)
            times = request.statistics()
            print(request.result()[0].text)
            print(
                f"  {times.num_cached_tokens} of {times.num_prompt_tokens} prompt tokens cached, "
                f"first token after {1000 * (times.time_to_first_token or 0):.0f} ms, "
                f"then {1000 * (times.time_per_token or 0):.0f} ms each"
            )
        engine.stop_model("lm")
        engine.release_model("lm")


if __name__ == "__main__":
    main()
