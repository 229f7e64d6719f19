"""A prompt in another form than is taken is told what is taken, and nothing is queued."""

import numpy as np
import pytest
import torch

from genlm_backend import AsyncGLM, generate, stream
from genlm_backend.errors import ContextError, ContextTypeError, OptionTypeError

CHAT = [{"role": "user", "content": "x"}]
SEVERAL = "call once for each prompt"


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ("hello", "got 'hello': encode a text or a chat with the model's tokenizer first"),
        (["a", "b"], r"got \['a', 'b'\]: encode a text or a chat"),
        (CHAT, "encode a text or a chat"),
        ({"input_ids": "hello"}, "got 'hello': encode a text or a chat"),
        ({"input_ids": [["a"]]}, "encode a text or a chat"),
        ([[1, 2], [3]], "pad the rows to one length, and pass an attention_mask"),
        (None, "got None$"),
        ([None], r"got \[None\]$"),
    ],
    ids=str,
)
def test_task_input_that_is_no_token_ids_raises_context_error(lm, inputs, message):
    glm = AsyncGLM(lm)  # not started: whatever were queued would stay in the queue
    wanted = rf"input_ids must be integers of shape \[length\] or \[batch, length\], {message}"
    with pytest.raises(ContextError, match=wanted if message[0] == "g" else message):
        glm.submit(inputs)
    assert glm.queue_size() == 0
    glm.shutdown(wait=False)


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        (["a", "b"], rf"got \['a', 'b'\]: {SEVERAL}"),
        (("a",), SEVERAL),
        ([CHAT, CHAT], SEVERAL),
        ([[1, 2], [3]], SEVERAL),
        ([[1, 2]], r"pass prompt\[0\], the only row"),
        (CHAT[0], "pass a chat as a list of messages"),
        (5, "got 5$"),
        (None, "got None$"),
    ],
    ids=str,
)
async def test_prompt_of_wrong_type_raises_context_type_error(lm, engine, prompt, message):
    engine.install_model("m", lm, warm_up=False)
    engine.start_model("m")
    is_list_of_prompts = message == SEVERAL or isinstance(prompt, list | tuple)
    message = f"a prompt must be a text, a chat's messages or token ids, .*{message}"
    if not is_list_of_prompts:  # which generate takes
        with pytest.raises(ContextTypeError, match=message):
            await generate(lm, prompt, max_new_tokens=1)
    with pytest.raises(ContextTypeError, match=message):
        await anext(stream(lm, prompt, max_new_tokens=1))
    with pytest.raises(ContextTypeError, match=message):
        await engine.generate("m", prompt, max_new_tokens=1)
    assert lm.statistics().num_awaits == 0


@pytest.mark.parametrize(
    "text",
    [[1, 2], np.array([1, 2]), torch.tensor([1, 2]), 5, None, b"x", CHAT[0], ["a", 1], [None]],
    ids=str,
)
def test_start_request_text_of_wrong_type_raises_option_type_error(lm, engine, text):
    engine.install_model("m", lm, warm_up=False)
    engine.start_model("m")
    message = (
        r"text must be a text, a chat's messages, or a list of either \(for token ids, use "
        r"start_request_ids\), got "
    )
    with pytest.raises(OptionTypeError, match=message):
        engine.start_request_text("m", text, max_new_tokens=1)
    assert lm.statistics().num_awaits == 0
