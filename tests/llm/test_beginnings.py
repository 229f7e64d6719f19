"""Lists that resemble those before them are read as if nothing had been asked before."""

from decimal import Decimal

import numpy as np
import pytest
import torch

from genlm_backend.errors import ContextError, ContextTypeError
from genlm_backend.queries.context import ContextFactory


class Indexed:
    """What is an integer for whoever asks for its index, and for nobody else."""

    def __init__(self, value):
        self.value = value

    def __index__(self):
        return self.value


STRANGE = {
    "uint8": torch.tensor(44, dtype=torch.uint8),
    "int8": torch.tensor(44, dtype=torch.int8),
    "negative int8": torch.tensor(-56, dtype=torch.int8),
    "int64 tensor": torch.tensor(300),
    "two": torch.tensor([1, 2]),
    "none": torch.tensor([], dtype=torch.int64),
    "meta": torch.tensor(300, device="meta"),
    "np.int64": np.int64(300),
    "np.uint8": np.uint8(44),
    "array": np.array([1, 2]),
    "empty array": np.array([], int),
    "float": 300.0,
    "bool": True,
    "Decimal": Decimal(300),
    "str": "300",
    "None": None,
    "huge": 1 << 100,
    "negative": -1,
    "beyond": 1000,
    "indexed": Indexed(300),
    "indexed beyond": Indexed(1000),
    "indexed negative": Indexed(-1),
}


def outcome(contexts, ids):
    try:
        return tuple(contexts.of(ids))
    except (ContextTypeError, ContextError) as error:
        return type(error), str(error)


@pytest.mark.parametrize("name", STRANGE)
def test_what_was_asked_before_makes_no_difference(name):
    for place in (0, 600):
        for known in (300, 200, 1):
            plain = [7, 8, 9, 11] + [5] * 700
            plain[place] = known
            strange = list(plain)
            strange[place] = STRANGE[name]
            expected = outcome(ContextFactory(1000), strange)
            asked = ContextFactory(1000)
            for _ in range(2):
                asked.of(plain)
            assert outcome(asked, strange) == expected
            assert tuple(asked.of(plain)) == tuple(plain)


@pytest.mark.parametrize("element", [torch.tensor(5), np.int64(5), Indexed(5)])
def test_a_list_of_no_plain_integers_changes_no_error_of_the_next(element):
    for first in (1 << 100, Decimal(5), "5", -1):
        asked = ContextFactory(1000)
        asked.of([element] * 600)
        ids = [first] + [5] * 599
        assert outcome(asked, ids) == outcome(ContextFactory(1000), ids)
