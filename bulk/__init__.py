"""Translates files of any size without a server, in shards (`client.files`), each exactly once."""

from seq2seq_serve.clone import share_module

share_module(__name__)
