"""Draws what training and the client both show."""

from seq2seq_serve.clone import share_module

share_module(__name__)
