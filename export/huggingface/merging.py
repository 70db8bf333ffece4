"""Merges an adapter, as the library `peft` saves it, into the checkpoint that it was trained for."""

from __future__ import annotations

import shutil
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from seq2seq_serve.bundle.errors import first_line
from seq2seq_serve.export.huggingface.reference import (
    adapter_settings,
    random_batches,
    read_theirs,
    their_log_probabilities,
    with_adapter,
)
from seq2seq_serve.training.huggingface.checkpoint import (
    CheckpointError,
    open_checkpoint,
)
from seq2seq_serve.training.huggingface.dialect import Limits
from seq2seq_serve.training.huggingface.families import config_of, family_of

_MOST_ROUNDING = 1e-2  # of a log-probability in float32; a part that is lost changes some by more
_WEIGHTS = "*.safetensors", "*.bin", "*.index.json", "*.h5", "*.msgpack", "*.pt"
_TOKENIZER = "*token*", "*.spm", "vocab.*", "merges.txt"


@contextmanager
def merged_checkpoint(folder: Path, adapter: Path) -> Iterator[Path]:
    """Yields a temporary folder with the merged checkpoint, whose weights are in float32.

    Whatever peft can merge is merged: LoRA and its kin, IA3, trained modules and tokens. If the adapter's
    folder has a tokenizer, as after new tokens, it takes the place of the checkpoint's.

    Args:
        folder: The checkpoint.
        adapter: As `save_pretrained` of peft writes it.

    Raises:
        CheckpointError: Either folder cannot be read, or the adapter is not for this checkpoint, or cannot be
            merged.
    """
    kind = adapter_settings(adapter).get("peft_type")
    checkpoint = open_checkpoint(folder)
    config = config_of(family_of(checkpoint), checkpoint, Limits())
    _, batch, *_ = random_batches(config, checkpoint.config.get("pad_token_id") or 0)
    model = read_theirs(folder, config.media)
    _add_tokens(model, adapter)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", category=FutureWarning)  # of transformers, that peft causes
            import peft

            changed = with_adapter(model, adapter)
            known = {*peft.get_peft_model_state_dict(changed), *changed.state_dict()}
            if unread := sorted(peft.load_peft_weights(str(adapter), device="cpu").keys() - known):
                raise CheckpointError(f"the checkpoint lacks what {unread[0]} changes")
            expected = their_log_probabilities(changed, config.media, batch)
            merged = changed.merge_and_unload(safe_merge=True)
    except Exception as error:  # peft's errors do not have a common class
        raise CheckpointError(
            f"{adapter}, an adapter of the kind {kind}, cannot be merged into {folder}: {first_line(error)}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="merged-") as temporary:
        path = Path(temporary) / folder.resolve().name
        merged.save_pretrained(path)
        del model, changed, merged
        found = their_log_probabilities(read_theirs(path, config.media), config.media, batch)
        worst = (found - expected).abs().max()
        if not worst < _MOST_ROUNDING:
            raise CheckpointError(
                f"{adapter} cannot be merged into {folder}: what peft saves differs from the model with the "
                f"adapter by {worst:.1e} in a log-probability"
            )
        written = {file.name for file in path.iterdir()}
        for file in folder.iterdir():
            if file.is_file() and file.name not in written and not any(map(file.match, _WEIGHTS)):
                shutil.copyfile(file, path / file.name)
        for file in adapter.iterdir():
            if file.is_file() and any(map(file.match, _TOKENIZER)):
                shutil.copyfile(file, path / file.name)
        yield path


def _add_tokens(model: Any, adapter: Path) -> None:
    """Give a model rows for the tokens of the adapter's tokenizer, if it has one."""
    import transformers

    if not (adapter / "tokenizer_config.json").is_file():
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        adapter, local_files_only=True, trust_remote_code=False
    )
    if len(tokenizer) > model.get_input_embeddings().num_embeddings:
        model.resize_token_embeddings(len(tokenizer))
