"""A tiny vocabulary whose texts have many tokenisations, and rows of it by hand."""

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from genlm_backend import MockAsyncLM

# "Ġ" is a blank; "Ã" and "©" are the two bytes of "é".
LETTERS = ["<s>", "</s>", "a", "b", "ab", "Ġ", "Ġa", "Ġab", "aĠb", "Ã", "©", "bÃ"]


def many_ways(tokens=LETTERS, **options):
    """Return a tokenizer whose tokens are bytes in the letters that GPT-2 has for them."""
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    options = {"bos_token": "<s>", "eos_token": "</s>", **options}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **options)


def mock(**options):
    return MockAsyncLM(many_ways(), **options)


class Rows:
    """The probabilities of the tokens that make up texts, by their bytes, behind any context."""

    def __init__(self, lm):
        self._lm, self._known = lm, {}

    def behind(self, ids):
        """Return pairs of a token and its probability, and the probability that the text ends."""
        ids = tuple(ids)
        if ids not in self._known:
            row = self._lm.next_token_logprobs_sync(list(ids)).double().exp().tolist()
            ends = {*self._lm.special_ids, *self._lm.eos_token_ids}
            own = [(i, p) for i, p in enumerate(row) if i not in ends]
            self._known[ids] = own, sum(row[i] for i in ends)
        return self._known[ids]

    def spelling(self, token_id):
        return bytes(self._lm.byte_vocab[token_id])

    def prefix(self, ids, data):
        """Return the probability that a text begins with some bytes, by all its tokens."""
        if not data:
            return 1.0
        total = 0.0
        for token_id, own in self.behind(ids)[0]:
            spelt = self.spelling(token_id)
            if spelt.startswith(data):
                total += own
            elif data.startswith(spelt):
                total += own * self.prefix((*ids, token_id), data[len(spelt) :])
        return total

    def ended(self, ids, data):
        """Return the probability that a text is some bytes and ends."""
        total = 0.0 if data else self.behind(ids)[1]
        for token_id, own in self.behind(ids)[0]:
            spelt = self.spelling(token_id)
            if data.startswith(spelt):
                total += own * self.ended((*ids, token_id), data[len(spelt) :])
        return total
