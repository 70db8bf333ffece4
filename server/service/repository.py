"""The service `seq2seq.v1.Repository`: which versions are served."""

from __future__ import annotations

from protos import seq2seq_v1_pb2 as pb
from protos import seq2seq_v1_pb2_grpc as pb_grpc
from server.errors import InvalidRequest, UnknownModel
from server.repository import Repository
from server.service.answers import model_message
from server.service.calls import Calls, Context


class RepositoryService(pb_grpc.RepositoryServicer):
    """Holds nothing of its own. Who may call it is asked before (`server.service.access`)."""

    def __init__(self, repository: Repository, calls: Calls) -> None:
        self._repository = repository
        self._calls = calls

    async def ListVersions(  # noqa: N802 (the names are the contract's)
        self, message: pb.ListVersionsRequest, context: Context
    ) -> pb.ListVersionsResponse:
        """Answer with every version that there is, and what became of it."""
        async with self._calls.open("ListVersions", context):
            index = await self._repository.index()
            names = {one.model_name for one, _, _ in index}
            if message.model and message.model not in names:
                text = f"there is no bundle of a model named {message.model[:100]!r}"
                raise UnknownModel(text, name=message.model)
            return pb.ListVersionsResponse(
                versions=[
                    pb.Version(
                        model=one.model_name,
                        version=one.version,
                        state=f"VERSION_STATE_{state}",
                        reason=reason,
                    )
                    for one, state, reason in index
                    if message.model in ("", one.model_name)
                ]
            )

    async def LoadModel(  # noqa: N802
        self, message: pb.LoadModelRequest, context: Context
    ) -> pb.LoadModelResponse:
        """Serve a model's newest version, or another, and answer when it is served."""
        async with self._calls.open("LoadModel", context):
            model = await self._repository.load(_named(message.model), message.version)
            return pb.LoadModelResponse(model=model_message(model))

    async def UnloadModel(  # noqa: N802
        self, message: pb.UnloadModelRequest, context: Context
    ) -> pb.UnloadModelResponse:
        """Serve a model no more."""
        async with self._calls.open("UnloadModel", context):
            await self._repository.unload(_named(message.model))
            return pb.UnloadModelResponse()


def _named(name: str) -> str:
    if not name:
        raise InvalidRequest("no model is named", field="model")
    return name
