"""The commands of ``python -m genlm_backend`` that read texts and print lines of JSON."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import json
import os
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any, Final, TypeAlias

from genlm_backend.errors import OptionError

TextFunction: TypeAlias = Callable[[Any, str], Coroutine[Any, Any, dict[str, Any]]]
"""A coroutine function: from a model and a text, it returns the fields of the text's JSON line."""

_AT_ONCE: Final = 200
"""Largest number of texts that ``score`` and ``surprisal`` process concurrently."""


def add_commands(commands: Any) -> None:
    score = _command(commands, "score", _score, "the log-likelihood of each text, in nats")
    _add_context(score)
    words = _command(commands, "surprisal", _surprisal, "the surprisal of each word of each text")
    words.add_argument(
        "--by", choices=("word", "token", "character"), default="word", help="default: word"
    )
    words.add_argument("--unit", choices=("bits", "nats"), default="bits", help="default: bits")
    words.add_argument("--entropy", action="store_true", help="print entropies too")
    words.add_argument("--rank", action="store_true", help="print ranks too")
    _add_context(words)
    texts = _command(commands, "generate", _generate, "a continuation of each prompt")
    texts.add_argument("--max-new-tokens", type=int, default=100, metavar="N", help="default: 100")
    texts.add_argument(
        "--temperature", type=float, metavar="T", help="sampling temperature; 0 is greedy"
    )
    texts.add_argument("--top-p", type=float, metavar="P", help="probability of the nucleus")
    texts.add_argument(
        "--top-k", type=int, metavar="K", help="sample from the K most probable tokens"
    )
    texts.add_argument("--seed", type=int, help="seed of each text's random draws")
    texts.add_argument(
        "--stop", action="append", metavar="TEXT", help="end at this text; may be repeated"
    )


def _command(
    commands: Any, name: str, answers: Callable[[argparse.Namespace], TextFunction], about: str
) -> argparse.ArgumentParser:
    parser = commands.add_parser(
        name,
        help=f"{about}, as lines of JSON",
        description=f"Print {about}: one line of JSON per text, in input order, when ready.",
    )
    parser.add_argument(
        "files",
        nargs="*",
        metavar="FILE",
        help="files of one text per line; blank lines are skipped; '-' or no file: standard input",
    )
    parser.add_argument("--whole", action="store_true", help="read each file as one text")
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="default: smollm2")
    parser.add_argument("--backend", metavar="NAME", help="hf, vllm, mlx, llama-cpp or mock")
    parser.add_argument(
        "--llm-opts",
        type=_mapping,
        metavar="JSON",
        help="""the llm_opts of load_model_by_name, such as '{"num_threads": 1}'""",
    )
    parser.set_defaults(answers=answers)
    return parser


def _add_context(parser: argparse.ArgumentParser) -> None:
    either = parser.add_mutually_exclusive_group()
    either.add_argument(
        "--context",
        metavar="TEXT",
        help="the context before each text, read after the beginning-of-sequence token; "
        "default: that token alone",
    )
    either.add_argument(
        "--context-ids",
        dest="context",
        metavar="ID,…",
        type=_ids,
        help="the context as token ids; no other token is read before them",
    )


def _mapping(value: str) -> dict[str, Any]:
    try:
        found = json.loads(value)
    except json.JSONDecodeError as error:
        raise argparse.ArgumentTypeError(f"invalid JSON: {error}") from None
    if not isinstance(found, dict):
        raise argparse.ArgumentTypeError(f"options must be a JSON object, got {value!r}")
    return found


def _ids(value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"token ids must be integers, got {value!r}") from None


# -------------------------------------------------------------------- the answers


def _score(options: argparse.Namespace) -> TextFunction:
    names = ("log_likelihood", "num_tokens", "perplexity")
    return _scored(options, lambda found: {n: getattr(found, n) for n in names}, by="token")


def _surprisal(options: argparse.Namespace) -> TextFunction:
    names = ["text", "start", "end", "surprisal", "num_context"]
    names += [name for name in ("entropy", "rank") if getattr(options, name)]

    def fields(found: Any) -> dict[str, Any]:
        parts = [{name: getattr(own, name) for name in names} for own in found]
        return {"unit": found.unit, "total": found.total, f"{options.by}s": parts}

    given = {name: getattr(options, name) for name in ("by", "unit", "entropy", "rank")}
    return _scored(options, fields, **given)


def _scored(
    options: argparse.Namespace, fields: Callable[[Any], dict[str, Any]], **given: Any
) -> TextFunction:
    from genlm_backend.scoring import surprisal

    async def answer(lm: Any, text: str) -> dict[str, Any]:
        found = await surprisal(lm, text, context=options.context, **given)
        default = {"context_ids": [*found.context]} if options.context is None else {}
        return {"text": text, **default, **fields(found)}

    return answer


def _generate(options: argparse.Namespace) -> TextFunction:
    from genlm_backend.generation import GenerationConfig, generate

    names = ("max_new_tokens", "temperature", "top_p", "top_k", "seed", "stop")
    fields = {name: getattr(options, name) for name in names}
    config = GenerationConfig(**{n: value for n, value in fields.items() if value is not None})

    async def answer(lm: Any, text: str) -> dict[str, Any]:
        (found,) = await generate(lm, text, config)
        return {
            "prompt": text,
            "text": found.text,
            "num_tokens": len(found.token_ids),
            "finish_reason": found.finish_reason,
        }

    return answer


# -------------------------------------------------------------------- reading and printing


def answer_texts(options: argparse.Namespace) -> None:
    """Print a line of JSON for each text of the files in a command's options."""
    texts = _texts(options.files or ["-"], options.whole)
    answer: TextFunction = options.answers(options)
    from genlm_backend.backends.registry import load_model_by_name

    with load_model_by_name(options.model, options.backend, options.llm_opts) as lm:
        most = lm.batch_size if options.command == "generate" else _AT_ONCE
        asyncio.run(_print_answers(texts, lambda text: answer(lm, text), most))


def _texts(files: list[str], is_whole: bool) -> Iterator[str]:
    """Return the texts of files: each non-blank line or, if ``is_whole``, each non-blank file."""
    for path in files:
        if path != "-" and not os.access(path, os.R_OK):
            raise OptionError(f"the file {path!r} does not exist or cannot be read")
    return itertools.chain.from_iterable(_texts_of(path, is_whole) for path in files)


def _texts_of(path: str, is_whole: bool) -> Iterator[str]:
    is_input = path == "-"
    try:
        # Not by sys.stdin, whose lock a blocked read holds: at exit, Python would wait for it.
        with open(0 if is_input else path, encoding="utf-8", closefd=not is_input) as file:
            for text in [file.read()] if is_whole else file:
                if text.strip():
                    yield text.removesuffix("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"{path!r} cannot be read: {error}") from error


async def _print_answers(
    texts: Iterator[str], answer: Callable[[str], Coroutine[Any, Any, dict[str, Any]]], most: int
) -> None:
    """Answer texts concurrently, and print the answers in the order of the texts."""
    loop = asyncio.get_running_loop()
    tasks: asyncio.Queue[asyncio.Task[dict[str, Any]] | OptionError | None] = asyncio.Queue()
    places, is_over = threading.Semaphore(most), threading.Event()

    def begin(text: str) -> None:
        tasks.put_nowait(loop.create_task(answer(text)))

    def read() -> None:
        end: OptionError | None = None
        with contextlib.suppress(RuntimeError):  # from a closed loop, which needs no texts
            try:
                for text in texts:
                    places.acquire()
                    if is_over.is_set():
                        return
                    loop.call_soon_threadsafe(begin, text)
            except OptionError as error:
                end = error
            loop.call_soon_threadsafe(tasks.put_nowait, end)

    # A daemon, so that a thread waiting for a line of input does not keep the program running.
    threading.Thread(target=read, name="genlm-texts", daemon=True).start()
    try:
        while isinstance(task := await tasks.get(), asyncio.Task):
            print(json.dumps(await task, ensure_ascii=False), flush=True)
            places.release()
        if task is not None:
            raise task
    finally:
        is_over.set()
        places.release()
        left = [tasks.get_nowait() for _ in range(tasks.qsize())]
        rest = [task for task in left if isinstance(task, asyncio.Task)]
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)
