"""The forms of a model's sources, and the command that asks a model of these forms."""

from __future__ import annotations

import re

from seq2seq_serve.client.errors import ClientError
from seq2seq_serve.client.sync import Client
from seq2seq_serve.protos.seq2seq_v1_pb2 import Model

# As in `Model.sources` of the wire contract
TEXT, SENTENCES, PICTURE, CLIP = "text", "sentences", "picture", "clip"
FEATURES, SOUND = "features", "sound"

_NUMPY = b"\x93NUMPY"  # how a .npy file begins
_WEBP_ANIMATION = 0x02  # a flag of the header VP8X
# The graphic control extension before a frame, to its end, so that pixels do not look like one
_GIF_FRAME = re.compile(rb"\x21\xf9\x04.{4}\x00", re.DOTALL)

# What a model of a command does
_DEEDS = {
    "translate": "translates texts",
    "score": "translates texts",
    "answer": "answers questions",
    "caption": "describes files",
    "transcribe": "reads sounds",
}
_COMMANDS = {
    frozenset({TEXT}): "translate",
    frozenset({SENTENCES, TEXT}): "answer",
    frozenset({PICTURE}): "caption",
    frozenset({CLIP}): "caption",
    frozenset({FEATURES}): "caption",
    frozenset({SOUND}): "transcribe",
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
    if _is_for(model, command):
        return
    right = command_of(model)
    forms = " and ".join(sorted(set(model.sources.values())))
    hint = f": use the command {right}" if right else ""
    if command == "score":
        hint = ": a program can score its targets with Client.score, which takes any source"
    raise ClientError("INVALID_ARGUMENT", f"{model.name} takes {forms or 'unknown sources'}{hint}")


def find_captioner(client: Client, name: str, content: bytes) -> Model:
    """Returns the model of that name, or the server's only model for such a file if the name is empty.

    Features are for models of features. An animation is for models of clips, and for those of pictures if
    there are none; for other files it is the other way round.

    Raises:
        ClientError: The server does not have such a model, or has several for the file.
    """
    models = [] if name else [model for model in client.models() if command_of(model) == "caption"]
    if not models:
        return find_model(client, name, "caption")
    forms = _forms_of(content)
    for form in forms:
        fitting = [model for model in models if form in model.sources.values()]
        if len(fitting) > 1:
            text = f"several models take such a file: name one by --model: {_with_forms(fitting)}"
            raise ClientError("INVALID_ARGUMENT", text)
        if fitting:
            return fitting[0]
    kind = "a NumPy array (.npy)" if FEATURES in forms else "a file other than a NumPy array (.npy)"
    text = f"no model takes {kind}: the server's captioners are {_with_forms(models)}"
    raise ClientError("INVALID_ARGUMENT", text)


def _forms_of(content: bytes) -> tuple[str, ...]:
    """Returns the forms of the models that take a file, the preferred one first."""
    if content.startswith(_NUMPY):
        return (FEATURES,)
    return (CLIP, PICTURE) if _is_animated(content) else (PICTURE, CLIP)


def _is_animated(content: bytes) -> bool:
    """Whether the headers of a PNG, WebP or GIF file declare an animation."""
    if content.startswith(b"\x89PNG"):
        return b"acTL" in content.partition(b"IDAT")[0]
    if content.startswith(b"RIFF"):
        return content[12:16] == b"VP8X" and bool(int.from_bytes(content[20:21]) & _WEBP_ANIMATION)
    return content.startswith(b"GIF8") and len(_GIF_FRAME.findall(content)) > 1


def _with_forms(models: list[Model]) -> str:
    return ", ".join(f"{model.name} ({', '.join(model.sources.values())})" for model in models)


def find_model(client: Client, name: str, command: str) -> Model:
    """Returns the model of that name, or the server's first model for the command if the name is empty.

    Raises:
        ClientError: The server does not have such a model, or it is for another command.
    """
    models = [] if name else client.models()
    found = next((model for model in models if _is_for(model, command)), None)
    if found is None and models:
        text = f"no model here {_DEEDS[command]}: the server has {_with_forms(models)}"
        raise ClientError("INVALID_ARGUMENT", text)
    if found is None:
        found = client.model(name)
        check_command(found, command)
    return found


def _is_for(model: Model, command: str) -> bool:
    return command_of(model) == ("translate" if command == "score" else command)
