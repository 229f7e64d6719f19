"""What has threads lives in one process, and says so when it is to be sent to another."""

import copy
import pickle

import pytest

from genlm_backend import AsyncGLM, AsyncTokenCharacterTrie, AsyncTransformer, Engine, MockAsyncLM
from genlm_backend.batching import BatcherStatistics
from genlm_backend.errors import NotPicklableError, OptionTypeError, TokenizerDecodeError
from tests.llm import families
from tests.llm.conftest import word_tokenizer

MAKE = {
    "mock": lambda: MockAsyncLM(word_tokenizer()),
    "hf": lambda: AsyncTransformer(families.make("llama"), word_tokenizer()),
    "glm": lambda: AsyncGLM(MockAsyncLM(word_tokenizer())),
    "engine": Engine,
    "trie": lambda: AsyncTokenCharacterTrie.from_vocab([b"a", b"b"]),
}


@pytest.mark.parametrize("kind", MAKE)
@pytest.mark.parametrize("send", [pickle.dumps, copy.copy, copy.deepcopy])
def test_objects_with_threads_cannot_be_pickled_or_copied(kind, send):
    made = MAKE[kind]()
    with pytest.raises(NotPicklableError, match=r"worker_init_fn") as raised:
        send(made)
    assert isinstance(raised.value, TypeError)
    assert str(raised.value).startswith(type(made).__name__)
    (made.shutdown if kind in ("glm", "trie") else made.close)()


async def test_token_given_for_its_id_raises_option_type_error():
    async with MockAsyncLM(word_tokenizer()) as lm:
        token = lm.byte_vocab[5]
        with pytest.raises(OptionTypeError, match="pass the token_id of each"):
            await lm.draw_next_token([1], allowed=[token])


def test_statistics_and_errors_survive_pickling():
    with MockAsyncLM(word_tokenizer()) as lm:
        lm.next_token_logprobs_sync([1])
        found = lm.statistics()
    error = TokenizerDecodeError("Own", "no reason", 3, "x")
    for value in (found, BatcherStatistics()):
        assert pickle.loads(pickle.dumps(value)) == value == copy.deepcopy(value)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), vars(again)) == (str(error), vars(error))
