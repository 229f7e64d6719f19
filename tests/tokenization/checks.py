"""What holds for every vocabulary, whatever the tokenizer."""


def check_strings(vocabulary):
    """No text is empty; one that stands for "no bytes" says so, and no token is spelt like it."""
    size = len(vocabulary.byte_vocab)
    for vocab in (vocabulary, vocabulary.resized(size + 3), vocabulary.resized(size // 2)):
        byte_vocab, str_vocab = vocab
        assert len(byte_vocab) == len(str_vocab)
        assert all(str_vocab)
        assert all(not byte_vocab[i] for i in vocab.undefined_ids)
        without = {i for i, token in enumerate(byte_vocab) if not token}
        assert vocab.undefined_ids <= without
        expected = {
            i: f"<|undefined_{i}|>" if i in vocab.undefined_ids else f"<|empty_{i}|>"
            for i in without
        }
        assert {i: str_vocab[i] for i in without} == expected
        texts = {text for i, text in enumerate(str_vocab) if i not in without}
        assert texts.isdisjoint(expected.values())
