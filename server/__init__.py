"""The decoding engine and its services: ONNX Runtime, grpcio, prometheus-client and numpy; never torch.

Code calls the records of one request, from the caller's message to the tokens, by these words:

    item      sources in a message, for one answer: the only ones, or one of several (`pb.BatchItem`)
    decoding  how the message is answered: its options with the model's defaults, read once for all items
              (`service.read.options.Decoding`)
    reading   what one target is decoded from: a whole item, or a sentence or piece of it, with what its
              answer needs (`service.read.sources.Reading`)
    request   what the engine gets of a reading: arrays, constraints and limits, frozen, so that it may be
              sent to another process (`engine.request.Request`)
    search    a request in the scheduler: its rows and ended hypotheses, changed at each turn, in the engine's
              process (`engine.state.Search`)
    sequence  one hypothesis of a search, with the row (slot) in which it is decoded
              (`engine.state.Sequence`)

No two are one: a decoding has many readings, a request crosses processes without the texts of its reading,
and a search is what changes.
"""

import os

from seq2seq_serve.clone import share_module

# Libraries read these when they are imported: ONNX Runtime reports every session to Microsoft otherwise, and
# the threads of the tokenizers would compete with the engines'.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

share_module(__name__)
