import pickle

import pytest

from seq2seq_serve.server import errors


@pytest.mark.parametrize(
    "error",
    [
        errors.InvalidRequest("too long", field="sources"),
        errors.UnknownModel("there is none", name="a", version="2"),
        errors.Overloaded("the queue is full", retry_after_seconds=1.5),
        errors.EngineFailed("a step raised"),
    ],
)
def test_an_error_comes_whole_from_another_process(error):
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert (str(copy), vars(copy)) == (str(error), vars(error))
