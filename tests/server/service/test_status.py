import asyncio

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2
from grpc import aio

from seq2seq_serve.server import errors
from seq2seq_serve.server.service.status import BUG_TEXT, abort, status_of, trailers_of

CASES = [
    (errors.InvalidRequest("m", field="f"), grpc.StatusCode.INVALID_ARGUMENT),
    (errors.UnknownModel("m", name="demo", version="2"), grpc.StatusCode.NOT_FOUND),
    (errors.Unauthenticated("m"), grpc.StatusCode.UNAUTHENTICATED),
    (errors.Forbidden("m"), grpc.StatusCode.PERMISSION_DENIED),
    (errors.UnknownPage("m"), grpc.StatusCode.NOT_FOUND),
    (errors.LoadFailed("m"), grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Overloaded("m", retry_after_seconds=1.5), grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable("m"), grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded("m"), grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Cancelled("m"), grpc.StatusCode.CANCELLED),
    (errors.EngineFailed("m"), grpc.StatusCode.INTERNAL),
]


def test_every_error_of_the_tree_has_a_status():
    assert {type(error) for error, _ in CASES} == set(errors.ServerError.__subclasses__())


@pytest.mark.parametrize(("error", "code"), CASES)
def test_an_error_of_ours_is_told_with_its_text(error, code):
    assert status_of(error)[:2] == (code, "m")
    trailers = dict(trailers_of(error, "r1"))
    assert trailers["x-request-id"] == "r1"
    assert "grpc-status-details-bin" in trailers
    assert ("grpc-retry-pushback-ms" in trailers) == isinstance(error, errors.Overloaded)


def test_an_unknown_model_is_told_by_its_name():
    status = status_pb2.Status()
    error = errors.UnknownModel("m", name="demo", version="2")
    status.ParseFromString(dict(trailers_of(error, "r1"))["grpc-status-details-bin"])
    info = error_details_pb2.ResourceInfo()
    assert status.details[-1].Unpack(info)
    assert (info.resource_type, info.resource_name, info.description) == ("model", "demo/2", "m")


def test_any_other_exception_is_a_bug_whose_text_stays_here():
    assert status_of(KeyError("secret")) == (grpc.StatusCode.INTERNAL, BUG_TEXT, "INTERNAL", None)
    assert b"secret" not in dict(trailers_of(KeyError("secret"), "r1"))["grpc-status-details-bin"]


class GoneContext:
    """Of a call whose caller has just left."""

    async def abort(self, *status: object) -> None:
        raise aio.InternalError('Failed "execute_batch"')


def test_a_refusal_of_a_caller_who_has_just_left_ends_like_a_cancelled_call():
    """It left a traceback in the log: gRPC fails the sending of the status before it cancels the handler."""
    with pytest.raises(asyncio.CancelledError):
        asyncio.run(abort(GoneContext(), errors.InvalidRequest("m", field="f"), "r1"))
