"""From files of text to batches: readers, filters, tokenizers, encoded corpora."""
