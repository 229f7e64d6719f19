"""Contexts that grow, fork, part, come back and go, each row of which is compared."""

import asyncio

import torch

from tests.llm.families import VOCAB
from tests.tree_integrity import check_integrity


def tokens(generator, count):
    return generator.choices(range(3, VOCAB), k=count)


def check_tree(lm):
    tree = lm._evaluator.scheduler.tree
    lm._batcher.call(lambda: check_integrity(tree))
    assert tree.states.num_used <= tree.states.num_states


class History:
    """A history of contexts.

    ``row`` is the row that a context has, given it as a tuple and its adapter; ``share`` is how
    often all contexts go on by one token.
    """

    def __init__(self, lm, generator, row, atol=2e-4, adapters=(None,), share=0.5):
        self.lm, self.generator, self.row = lm, generator, row
        self.atol, self.adapters, self.share = atol, adapters, share
        prompt = tokens(generator, 14)
        self.contexts = [lm.context(prompt[:size]) for size in (14, 14, 14, 9, 1)]
        self.old = list(self.contexts)

    def changed(self):
        """The next contexts: one token on, resampled; or several; or parts; or parting; or new."""
        generator, contexts = self.generator, self.contexts
        picked = generator.choices(contexts, k=generator.randint(2, 6))
        if generator.random() < self.share:
            return [context + tokens(generator, 1) for context in picked]
        kind = generator.random()
        if kind < 0.4:
            return [c + tokens(generator, generator.choice([0, 1, 2, 20])) for c in picked]
        if kind < 0.6:  # and themselves
            return contexts + [c[: generator.randint(1, len(c))] for c in picked]
        if kind < 0.8:  # in the midst of what has been computed at once
            cuts = [[*c[: generator.randint(1, len(c))]] for c in picked]
            return [self.lm.context([*c, *tokens(generator, 3)]) for c in cuts]
        return [
            *contexts,
            *generator.choices(self.old, k=2),
            self.lm.context(tokens(generator, 25)),
        ]

    async def steps(self, count):
        for _ in range(count):
            contexts = self.changed()
            self.contexts = [c if len(c) < 90 else c[:10] for c in contexts][:9]
            is_scored = self.generator.random() < 2 * (1 - self.share)
            await self.ask(self.contexts, self.generator.choices(self.old, k=int(is_scored)))
            self.old += self.contexts[:1]

    async def ask(self, contexts, texts=()):
        """Rows, some of them twice and as lists; and scores from any token on."""
        generator, lm = self.generator, self.lm
        share = max(self.share, 0.8)
        asked = [
            (c if generator.random() < share else list(c), self.any_adapter()) for c in contexts
        ]
        asked += asked[:1]
        scored = [(c, generator.randint(1, len(c) - 1)) for c in texts if len(c) > 1]
        waits = [lm.next_token_logprobs(*one) for one in asked]
        scores = [lm.batch_score([c[:start]], [c[start:]]) for c, start in scored]
        *rows, of_texts = await asyncio.gather(*waits, asyncio.gather(*scores))
        for row, (context, adapter) in zip(rows, asked, strict=True):
            self.check(row, self.row(tuple(context), adapter))
        for (found,), (text, start) in zip(of_texts, scored, strict=True):
            ends = range(start, len(text))
            self.check(found, torch.stack([self.row(tuple(text[:e]), None)[text[e]] for e in ends]))
        check_tree(lm)

    def check(self, found, wanted):
        torch.testing.assert_close(found, wanted, rtol=0, atol=self.atol)

    def any_adapter(self):
        return self.generator.choice(self.adapters)
