"""The same weights in transformers give the same tokens."""

import pytest
import torch

from benchmarks.peers.work import Search
from seq2seq_serve.training.config import BOS_ID
from seq2seq_serve.training.evaluation.search import greedy_search

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("ignore")  # of transformers' own code


@pytest.mark.parametrize("is_static", [False, True])
def test_generate_gives_the_oracles_tokens(is_static, random_trained):
    from benchmarks.peers.marian import as_marian
    from benchmarks.peers.transformers_peer import TransformersPeer

    model = random_trained.model
    sources = [[5, 6, 7, 2], [9, 2], [30, 31, 32, 33, 34, 35, 2]]
    peer = TransformersPeer(as_marian(model, torch.device("cpu"), torch.float32), is_static=is_static)
    oracle = greedy_search(model, sources, bos_id=BOS_ID, eos_id=-1, max_new_tokens=9)
    assert peer.translate(sources, Search(1, max_new_tokens=9, min_new_tokens=9)) == oracle
