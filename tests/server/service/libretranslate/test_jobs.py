from seq2seq_serve.protos.seq2seq_v1_pb2 import GenerateResponse, Hypothesis, Sentence
from seq2seq_serve.server.service.libretranslate.jobs import alternatives


def sentence(*texts: str) -> Sentence:
    return Sentence(hypotheses=[Hypothesis(text=text) for text in texts])


def test_alternatives_of_several_sentences_keep_what_is_between_them():
    answer = GenerateResponse(
        hypotheses=[Hypothesis(text="One.\n\n Two. Two.")],
        sentences=[sentence("One.", "A.", "B."), sentence("Two.", "C."), sentence("Two.", "Two.", "D.")],
    )
    assert alternatives(answer) == ["A.\n\n C. Two.", "B.\n\n C. D."]


def test_alternatives_are_different_texts():
    texts = ("One", "A", "One", "A", "", " ", "B")
    assert alternatives(GenerateResponse(hypotheses=[Hypothesis(text=text) for text in texts])) == ["A", "B"]
    assert alternatives(GenerateResponse(hypotheses=[Hypothesis(text="One")])) == []
