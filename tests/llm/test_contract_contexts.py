"""What every backend owes those who ask a ``Context`` in place of a list."""

import asyncio
import pickle
import random

import pytest
import torch

from genlm_backend import generate
from tests.llm.families import VOCAB


async def test_every_query_method_accepts_a_context(lm, backend, close):
    context = lm.context([3, 4]).extend(5)
    assert tuple(context) == (3, 4, 5)
    expected = backend.expected([3, 4, 5])
    close(await lm.next_token_logprobs(context), expected)
    close((await lm.next_token_logits(context)).log_softmax(-1), expected)
    close(lm.next_token_logprobs_sync(context), expected)
    both = torch.stack([expected, backend.expected([3, 4])])
    close(await lm.batch_next_token_logprobs([context, [3, 4]]), both)
    close(lm.batch_next_token_logprobs_sync([context, context[:2]]), both)
    assert await lm.num_cached_tokens(context) == await lm.num_cached_tokens([3, 4, 5])
    wanted = {"max_tokens": 5, "eos_token_ids": [0], "seed": 7}
    assert await lm.sample(context, **wanted) == await lm.sample([3, 4, 5], **wanted)
    prompts = [[3, 4, 5], [3, 4]]
    sampled = await lm.batch_sample([context, context[:2]], **wanted)
    assert sampled == await lm.batch_sample(prompts, **wanted)
    (text,) = await generate(lm, context, max_new_tokens=3, do_sample=False)
    (other,) = await generate(lm, [3, 4, 5], max_new_tokens=3, do_sample=False)
    assert text.token_ids == other.token_ids


async def test_every_scoring_method_accepts_a_context(lm, backend, close):
    prompt, more = lm.context([3, 4]), lm.context([5, 6])
    ends = [backend.expected([3, 4, 5][:end])[end + 3] for end in (2, 3)]
    expected = torch.stack(ends)
    longer = prompt.extend(5)
    await lm.next_token_logprobs(longer)  # where it is cached is remembered with it
    for text in ((prompt, more), (prompt, [5, 6]), ([3, 4], more), (longer[:2], [5, 6])):
        close(await lm.score(*text), expected)
        close(lm.score_sync(*text), expected)
    close((await lm.batch_score([prompt, prompt], [more, more[:1]]))[1], expected[:1])
    close(lm.batch_score_sync([prompt, prompt[:1]], [more, [4]])[0], expected)
    with backend.make() as other:
        for text in ((other.context([3]), [4]), ([3], other.context([4]))):
            with pytest.raises(ValueError, match="another model"):
                await lm.score(*text)
        close(await lm.score(pickle.loads(pickle.dumps(other.context([3, 4]))), more), expected)


async def test_prefix_of_a_context_extended_otherwise_has_its_fresh_row(lm, backend, close):
    context, more = lm.context([1, 2, 3, 4, 5, 6]), [7, 8, 9]
    await lm.next_token_logprobs(context)
    for start in (0, 3, 5):
        other = context[:start] + more
        close(await lm.next_token_logprobs(other), backend.expected(list(other)))


async def test_a_list_and_a_context_with_the_same_ids_are_one_query(lm):
    before = lm.statistics()
    context = lm.context(range(1, 5))
    asked = [1, 2, 3, 4], context, context[:3].extend(4)
    await asyncio.gather(*map(lm.next_token_logprobs, asked))
    after = lm.statistics()
    assert after.num_joined - before.num_joined == 2
    assert after.num_batches - before.num_batches == 1


async def test_empty_foreign_and_overlong_contexts_are_refused(lm, backend):
    empty = lm.context()
    assert len(empty) == 0
    with backend.make() as other:
        for wrong, message in ((empty, "empty"), (other.context([1]), "another model")):
            with pytest.raises(ValueError, match=message):
                await lm.next_token_logprobs(wrong)
            with pytest.raises(ValueError, match=message):
                lm.batch_next_token_logprobs_sync([[1], wrong])
        moved = pickle.loads(pickle.dumps(other.context([1, 2])))
        row = lm.next_token_logprobs_sync(moved)
        assert torch.equal(row, lm.next_token_logprobs_sync([1, 2]))
    with pytest.raises(ValueError, match=f"token id {VOCAB}"):
        lm.context([1]).extend(VOCAB)
    with backend.make(max_length=3) as short, pytest.raises(ValueError, match="maximum of 3"):
        short.next_token_logprobs_sync(short.context([1, 2, 3, 4]))


async def test_rows_of_branching_and_cancelled_particles_are_fresh(lm, backend, close):
    """A history of particles: copies grow apart, the caches are cleared."""
    generator = random.Random(0)
    particles = [lm.context([7, 8, 9])] * 6
    for step in range(14):
        rows = await asyncio.gather(*map(lm.next_token_logprobs, particles))
        chosen = generator.randrange(len(particles))
        close(rows[chosen], backend.expected(list(particles[chosen])))
        if step == 6:
            lm.clear_cache()
        if step % 4 == 3:
            task = asyncio.ensure_future(lm.next_token_logprobs(particles[0] + range(2)))
            await asyncio.sleep(0)
            task.cancel()
        particles = [generator.choice(particles).extend(generator.randrange(3)) for _ in particles]
