"""The engine of bulk work and its options."""

from types import SimpleNamespace

from seq2seq_serve.bulk.engine import Engine
from seq2seq_serve.documents.segments import FormattedText, software_text
from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.config import RunnerConfig
from seq2seq_serve.server.library import AsyncModel
from seq2seq_serve.server.service.read.terms import Glossary


def test_a_glossary_is_read_once_for_each_way_with_placeholders(bundle_path, monkeypatch):
    """It was read four times, for each kind of texts."""
    read, init = [], Glossary.__init__

    def count(self, options, *others):
        read.append(options.keep_placeholders)
        init(self, options, *others)

    monkeypatch.setattr(Glossary, "__init__", count)
    model = AsyncModel(bundle_path, RunnerConfig(num_threads=1, shares_threads=False))
    options = pb.GenerateOptions(terms=[pb.Term(source="하나", target="one")])
    engine = Engine(model, options, keeps_placeholders=True)
    assert read == [False, True]
    decodings = engine._decodings.values()
    assert [each.options.keep_placeholders for each in decodings] == [False, True] * 2
    assert all(each.glossary._keeps == each.options.keep_placeholders for each in decodings)


def test_a_text_has_its_tags_where_no_alignment_places_them():
    text = software_text(FormattedText("a b"), "<b>a</b> b")

    def sent(*, has_attention):
        def read(options, glossary):
            return SimpleNamespace(options=options, glossary=glossary)

        description = SimpleNamespace(has_attention=has_attention)
        model = SimpleNamespace(description=description, num_slots=1, read_options=read)
        [source], decoding = Engine(model, pb.GenerateOptions(), keeps_placeholders=True).prepare(text)
        return source.text, decoding.options.word_alignment

    assert sent(has_attention=True) == ("a b", True)
    assert sent(has_attention=False) == ("<b>a</b> b", False)
