"""Every option of every public callable, given values of every kind.

Each is accepted, or refused by an error of the library whose message names the option; nothing else
comes out, and nothing is left behind. Options are found by their signatures, so that a new one is
covered without being listed.
"""

import asyncio
import inspect
import re
import threading

import pytest
import torch

import genlm_backend
from genlm_backend import AsyncGLM, Engine
from genlm_backend.errors import GenlmBackendError
from tests.arguments.subjects import BACKENDS, LM, SHARED, SUBJECTS
from tests.arguments.values import VALUES, WORDS
from tests.llm import families


@pytest.fixture(scope="module", autouse=True)
def shared():
    with Engine() as engine:
        engine.install_model("m", LM, warm_up=False)
        engine.start_model("m")
        request = engine.start_request_ids("m", [1], max_new_tokens=1)
        request.result()
        glm = AsyncGLM(LM, max_queue_size=100_000)
        SHARED.update(engine=engine, request=request, glm=glm)
        yield
        glm.shutdown(wait=False)
    SHARED.clear()
    for lm in BACKENDS.values():
        lm.close()


CASES = [(name, option) for name, subject in SUBJECTS.items() for option in subject.options()]


async def outcome(subject, arguments):
    """Call it, await what is to be awaited, and close what has been made."""
    found = subject.call(**arguments)
    if inspect.isasyncgen(found):
        found = [element async for element in found]
    if inspect.isawaitable(found):
        found = await asyncio.wait_for(found, 60)
    for made in found if isinstance(found, list) else [found]:
        if type(made).__name__ == "GenerationRequest":
            SHARED["engine"].stop_request(made)
        for end in ("close", "shutdown"):
            if hasattr(made, end):
                getattr(made, end)()


def is_at_the_call(error):
    """Whether Python itself refused the arguments, before the callable began."""
    words = r"unexpected keyword|required (positional|keyword)|multiple values"
    return re.search(words, str(error))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*(eos|ids).*:UserWarning")
@pytest.mark.filterwarnings("ignore:host_cache_bytes gains nothing")
@pytest.mark.parametrize(("name", "option"), CASES, ids=lambda value: str(value))
async def test_every_value_is_accepted_or_refused_by_its_options_name(name, option):
    subject = SUBJECTS[name]
    words = f"{WORDS.get(option, re.escape(option))}|no_such_name"
    wrong = []
    for label, value in VALUES.items():
        before = set(threading.enumerate())
        arguments = {**subject.given, option: value}
        if name.startswith("set "):
            arguments = {"value": value}
        try:
            await outcome(subject, arguments)
        except subject.accepting:
            pass
        except GenlmBackendError as error:
            if not re.search(words, str(error), re.IGNORECASE):
                wrong.append(f"{label}: does not name it: {error!r}")
            left = {thread for thread in threading.enumerate() if thread.is_alive()} - before
            if left and "Engine()" not in inspect.getsource(subject.call):
                wrong.append(f"{label}: leaves {left}")
        except BaseException as error:
            if not (isinstance(error, TypeError) and is_at_the_call(error)):
                wrong.append(
                    f"{label}: {type(error).__name__}: {' '.join(str(error).split())[:150]}"
                )
    assert not wrong, "\n".join(wrong)


NOT_HERE = {
    "AsyncLM": "abstract; its options are those of MockAsyncLM",
    "AsyncLlamaCppLM": "where llama.cpp is, its options are those of AsyncTransformer; else none",
    "AsyncMlxLM": "where MLX is, its options are those of AsyncTransformer; else it says so",
    "Batched": "made by batched",
    "Context": "made by a model",
    "Continuation": "made by the library",
    "Continuations": "made by the library",
    "LMStatistics": "made by the library",
    "PrefixLogprob": "made by the library",
    "Surprisal": "made by the library",
    "Surprisals": "made by the library",
    "SurprisalsOfTexts": "made by the library",
    "WeightedTexts": "made by the library",
}


def test_every_public_callable_has_its_options_tested():
    """A new public class or function is given values of every kind too, or says why not."""
    calls = {re.split(r"[. ]", name)[0] for name in SUBJECTS}
    missing = [
        name
        for name in genlm_backend.__all__
        if callable(getattr(genlm_backend, name)) and name not in calls
    ]
    assert sorted(missing) == sorted(NOT_HERE)


async def test_invalid_requests_leave_concurrent_valid_ones_intact(shared):
    """Others ask for rows meanwhile, and none of them notices."""
    expected = LM.next_token_logprobs_sync([1])
    wrong = [5, None, "x", [], [None], [families.VOCAB], VALUES["meta tensor"], [{}], b"x"]
    asked = [LM.next_token_logprobs(value) for value in wrong]
    asked += [LM.next_token_logprobs([1], lora_name=value) for value in (5, [], "none")]
    good = [LM.next_token_logprobs([1]) for _ in range(5)]
    found = await asyncio.gather(*asked, *good, return_exceptions=True)
    assert all(isinstance(error, GenlmBackendError) for error in found[: len(asked)])
    assert all(torch.equal(row, expected) for row in found[len(asked) :])
