import torch

from training.batches import pad_rows
from training.commands import alignment
from training.config import BOS_ID, EOS_ID
from training.run import TrainedModel
from training.tokenizer import train_tokenizer
from training.transformer import Transformer


def test_the_attention_shown_is_that_of_the_layer_that_is_exported(model: Transformer) -> None:
    run = TrainedModel(model, train_tokenizer([], 260), model.config, {}, [], 0.0)
    source_ids, target_ids = [7, 8, 9, EOS_ID], [10, 11]
    with torch.inference_mode():
        source = pad_rows([source_ids])
        mask = torch.ones_like(source, dtype=torch.bool)
        memory = model.encode(source, mask)
        _, weights = model.decode_with_attention(pad_rows([[BOS_ID, *target_ids]]), memory, mask)
    assert len(weights) == 2
    torch.testing.assert_close(alignment(run, source_ids, target_ids), weights[0][0].mean(dim=0))
