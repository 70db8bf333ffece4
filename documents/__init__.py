"""Reads documents, and writes them anew with translated texts: those of offices, programs and films.

A `Document` has segments, the texts that are translated by themselves: a subtitle, the text of a paragraph, a
message. A segment has pieces, one for each part of it with a formatting of its own, such as a link or bold
words. Everything else in the file stays as it is. This package does not know how texts are translated.
"""

from seq2seq_serve.clone import share_module

share_module(__name__)
