"""The forms of a model's sources, and the command that asks a model of these forms."""

from __future__ import annotations

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.sync import Client
from seq2seq_serve.protos.seq2seq_v1_pb2 import Model

# As in `Model.sources` of the wire contract
TEXT, SENTENCES, PICTURE, CLIP, FEATURES = "text", "sentences", "picture", "clip", "features"

_NUMPY = b"\x93NUMPY"  # how a .npy file begins

_COMMANDS = {
    frozenset({TEXT}): "translate",
    frozenset({SENTENCES, TEXT}): "answer",
    frozenset({PICTURE}): "caption",
    frozenset({CLIP}): "caption",
    frozenset({FEATURES}): "caption",
}


def command_of(model: Model) -> str:
    """Returns the name of the command that asks the model; empty if there is none."""
    return _COMMANDS.get(frozenset(model.sources.values()), "")


def source_of(model: Model, form: str) -> str:
    """Returns the name of the model's source of a form that it has."""
    return next(name for name, its_form in model.sources.items() if its_form == form)


def check_command(model: Model, command: str) -> None:
    """Refuses a model of another command.

    Raises:
        ClientError: The message names the right command.
    """
    right = command_of(model)
    if right != command:
        forms = " and ".join(sorted(set(model.sources.values())))
        hint = f": use the command {right}" if right else ""
        raise ClientError("INVALID_ARGUMENT", f"{model.name} takes {forms or 'unknown sources'}{hint}")


def find_captioner(client: Client, name: str, content: bytes) -> Model:
    """Returns the model of that name, or the server's only model for such a file if the name is empty.

    Raises:
        ClientError: The server does not have such a model, or has several for the file.
    """
    models = [] if name else [model for model in client.models() if command_of(model) == "caption"]
    forms = {FEATURES} if content.startswith(_NUMPY) else {PICTURE, CLIP}
    fitting = [model for model in models if forms.issuperset(model.sources.values())]
    if len(fitting) > 1:
        names = ", ".join(f"{model.name} ({', '.join(model.sources.values())})" for model in fitting)
        raise ClientError(
            "INVALID_ARGUMENT", f"several models take such a file: name one by --model: {names}"
        )
    return fitting[0] if fitting else find_model(client, name, "caption")


def find_model(client: Client, name: str, command: str) -> Model:
    """Returns the model of that name, or the server's first model for the command if the name is empty.

    Raises:
        ClientError: The server does not have such a model, or it is for another command.
    """
    models = [] if name else client.models()
    found = next((model for model in models if command_of(model) == command), None)
    if found is None:
        found = client.model(name)
        check_command(found, command)
    return found
