"""The wire contract: `.proto` sources and the stubs generated from them (`make stubs`)."""

from seq2seq_serve.clone import share_module

share_module(__name__)
