"""Chat with the bundled model, the answer shown as it comes."""

import argparse
import asyncio

from genlm_backend import AsyncLM, GenerationConfig, load_model_by_name, stream


async def answer(lm: AsyncLM, messages: list[dict[str, str]], config: GenerationConfig) -> str:
    text = ""
    async for token in stream(lm, messages, config):
        print(token.text, end="", flush=True)
        text += token.text
    print()
    return text


async def chat(questions: list[str], config: GenerationConfig) -> None:
    messages: list[dict[str, str]] = []
    async with load_model_by_name("smollm2") as lm:
        while questions or not messages:
            question = questions.pop(0) if questions else await asyncio.to_thread(input, "> ")
            messages.append({"role": "user", "content": question})
            messages.append({"role": "assistant", "content": await answer(lm, messages, config)})


def main() -> None:
    parser = argparse.ArgumentParser(description="Chat with the bundled model.")
    parser.add_argument("questions", nargs="*", help="one by one; asked for if there is none")
    parser.add_argument("--tokens", type=int, default=120, help="of an answer, at most")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    sampling = {"do_sample": True, "temperature": 0.3, "top_p": 0.95, "seed": options.seed}
    config = GenerationConfig(max_new_tokens=options.tokens, **sampling)
    asyncio.run(chat(list(options.questions), config))


if __name__ == "__main__":
    main()
