"""The service `seq2seq.v1.Repository`: lists, loads and unloads versions."""

from __future__ import annotations

from seq2seq_serve.protos import seq2seq_v1_pb2 as pb
from seq2seq_serve.server.errors import InvalidRequest, UnknownModel
from seq2seq_serve.server.models.repository import Repository
from seq2seq_serve.server.models.served import check_right
from seq2seq_serve.server.service.calls import RemoteCall
from seq2seq_serve.server.service.write.responses import model_message


class RepositoryService:
    """Without state of its own. `server.service.access` checks the callers' rights before."""

    def __init__(self, repository: Repository) -> None:
        self._repository = repository

    async def ListVersions(
        self, message: pb.ListVersionsRequest, call: RemoteCall
    ) -> pb.ListVersionsResponse:
        """Answers with every version on disk, its state, and why it is not served."""
        if message.model:
            check_right(call.caller, message.model)
        index = [one for one in await self._repository.index() if call.caller.may_use(one[0].model_name)]
        names = {one.model_name for one, _, _ in index}
        if message.model and message.model not in names:
            text = f"there is no bundle of a model named {message.model[:100]!r}"
            raise UnknownModel(text, name=message.model)
        return pb.ListVersionsResponse(
            versions=[
                pb.Version(
                    model=one.model_name, version=one.version, state=f"VERSION_STATE_{state}", reason=reason
                )
                for one, state, reason in index
                if message.model in ("", one.model_name)
            ]
        )

    async def LoadModel(self, message: pb.LoadModelRequest, call: RemoteCall) -> pb.LoadModelResponse:
        """Serves the given version of a model, or the newest, and answers when it is served."""
        model = await self._repository.load(_named(message.model, call), message.version)
        return pb.LoadModelResponse(model=model_message(model))

    async def UnloadModel(self, message: pb.UnloadModelRequest, call: RemoteCall) -> pb.UnloadModelResponse:
        """Stops serving a model."""
        await self._repository.unload(_named(message.model, call))
        return pb.UnloadModelResponse()


def _named(name: str, call: RemoteCall) -> str:
    if not name:
        raise InvalidRequest("the model's name is missing", field="model")
    check_right(call.caller, name)
    return name
