"""How much work a trie makes of a call."""

import numpy as np
import torch

from genlm_backend import ParallelTokenCharacterTrie, TokenCharacterTrie
from genlm_backend.trie import sequential


def test_small_work_takes_one_thread(monkeypatch):
    asked = []
    in_threads = sequential.in_threads

    def noted(run, count, num_threads):
        asked.append(num_threads)
        in_threads(run, count, num_threads)

    monkeypatch.setattr(sequential, "in_threads", noted)
    trie = TokenCharacterTrie([b"a", b"ab", b"b"], num_threads=4)
    for per_thread, expected in ((trie.num_nodes * 3, 3), (10**6, 1), (1, 4)):
        monkeypatch.setattr(sequential, "NODES_PER_THREAD", per_thread)
        trie.batch_weight_sum(np.ones((9, 3), np.float32))
        assert asked.pop() == expected


def test_the_matrix_of_a_dtype_is_made_once(monkeypatch):
    made = []
    make = torch.sparse_csr_tensor
    monkeypatch.setattr(torch, "sparse_csr_tensor", lambda *a, **k: made.append(1) or make(*a, **k))
    trie = ParallelTokenCharacterTrie([b"a", b"ab", b"b"], device="cpu")
    for _ in range(3):
        trie.batch_weight_sum(np.ones((2, 3), np.float32))
    assert len(made) == 1
