"""The services of `seq2seq.v1`: from messages to requests of the engine, and back."""
