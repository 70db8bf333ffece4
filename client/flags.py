"""The flags of every command, and the checks of flags that depend on each other."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from seq2seq_serve.client.attention import DATA, IMAGE
from seq2seq_serve.client.files.documents import document_suffix
from seq2seq_serve.client.files.formats import check_kind, format_of
from seq2seq_serve.client.files.glossary import problem_of_terms
from seq2seq_serve.client.files.lines import STANDARD, is_compressed
from seq2seq_serve.client.files.plan import DOCUMENT, PARQUET, TEXT, JobError
from seq2seq_serve.client.many import DEFAULT_GIVE_UP_SECONDS, DEFAULT_IN_FLIGHT
from seq2seq_serve.client.speech.sounds import DEFAULT_RATE, SoundForm, form_of_type
from seq2seq_serve.client.translate import Translation, parts_folder
from seq2seq_serve.client.wire import DEFAULT_ADDRESS, DEFAULT_TIMEOUT_SECONDS
from seq2seq_serve.commands import Parser, add_version, install_command, port_number, program
from seq2seq_serve.documents.kinds import DOCUMENTS, SOFTWARE
from seq2seq_serve.documents.segments import COMPRESSED
from seq2seq_serve.protos.options import OPTIONS, Option
from seq2seq_serve.protos.seq2seq_v1_pb2 import (
    LONG_SOURCE_SPLIT,
    LONG_SOURCE_SPLIT_ALWAYS,
    GenerateOptions,
)
from seq2seq_serve.protos.subtitles import FORMATS

_NAMES_OF_ADDRESS = ("--server", "--host", "--port", "--url")  # in other clients
_TEXT_SECONDS = 10.0  # a person waits for the answer to a TEXT: long enough to connect again, and no longer
# The flag of each generation option. `--attention` is not here, because its value is a file.
_FLAGS = {name: option.flag for name, option in OPTIONS.items() if name != "attention"}
_ONLY_IN_JSON = ("log_probabilities", "num_alternatives", "word_alignment")
_FOR_WORDS = ("word_alignment", "terms", "keep_placeholders")  # of a text
_ONLY_FOR_TEXTS = ("long_source", "source_language", *_FOR_WORDS)
_ONLY_FOR_SOUNDS = (
    "timestamps",
    "word_timestamps",
    "voice_activity",
    "prompt",
    "condition_on_previous",
    "compression_ratio_threshold",
    "log_probability_threshold",
    "no_speech_threshold",
)
_FOR_TRANSLATION = [name for name in _FLAGS if name not in _ONLY_FOR_SOUNDS]
# Those that change the target of a text, and add nothing to it.
TARGET_OPTIONS = [name for name in _FOR_TRANSLATION if name not in (*_ONLY_IN_JSON, "priority")]


class _Once(argparse.Action):
    """Stores the value of a flag, and refuses a second one, which would replace the first."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        assert isinstance(parser, _Parser)
        if option_string is not None and self.dest in parser.given:
            parser.error(f"{option_string} is given twice: leave one out")
        parser.given.add(self.dest)
        setattr(namespace, self.dest, values)


class _Parser(Parser):
    """Takes each flag once.

    Attributes:
        given: The names of the values that the arguments have so far.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.given: set[str] = set()
        self.register("action", None, _Once)
        self.register("action", "store", _Once)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        self.given = set()
        return super().parse_known_args(args, namespace)

    def similar_flag(self, unknown: Sequence[str]) -> str:
        is_address = unknown[0].partition("=")[0] in _NAMES_OF_ADDRESS
        if is_address and "--address" in self.flags():
            return " (meant: --address HOST:PORT?)"
        return super().similar_flag(unknown)


def make_parser() -> argparse.ArgumentParser:
    """Returns the parser of all commands. Parsed options have their command's own parser as `parser`."""
    common = _Parser(add_help=False)
    common.add_argument(
        "--address",
        type=_address,
        default=DEFAULT_ADDRESS,
        metavar="HOST:PORT",
        help="address of the server, a name that resolves to several, or several as ipv4:HOST:PORT,HOST:PORT "
        "(default: %(default)s)",
    )
    common.add_argument(
        "--timeout-seconds",
        type=_seconds,
        default=DEFAULT_TIMEOUT_SECONDS,
        metavar="SECONDS",
        help="deadline of each call to the server, but for a sound that comes live (default: %(default)g)",
    )
    add = common.add_argument
    add("--tls", action="store_true", help="encrypt the connection; every other --tls flag implies it")
    add(
        "--tls-ca",
        type=Path,
        metavar="FILE",
        help="PEM file with the CA that signed the server's certificate",
    )
    add(
        "--tls-certificate",
        type=Path,
        metavar="FILE",
        help="PEM file with the certificate of this client, for mTLS",
    )
    add("--tls-key", type=Path, metavar="FILE", help="PEM file with the private key of that certificate")
    add("--token-file", type=Path, metavar="FILE", help="file with the token that identifies this client")
    parser = _Parser(
        prog=program("client"),
        description="Call a seq2seq server.",
        epilog='example: %(prog)s translate "오늘은 금요일 입니다" --attention attention.png',
    )
    add_version(parser)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def command(name: str, text: str, *, description: str = "", epilog: str = "") -> argparse.ArgumentParser:
        description = description or f"{text[0].upper()}{text[1:]}."
        # Abbreviations are off: otherwise `--target HOST` would mean `--target-prefix HOST`.
        return commands.add_parser(
            name, parents=[common], allow_abbrev=False, help=text, description=description, epilog=epilog
        )

    _add_translate(command)
    _add_caption(command)
    _add_transcribe(command)
    _add_answer(command)
    score = command(
        "score",
        "score a given translation of a text",
        description="Print the log-probability of every target token, of the end, and their sum, by a "
        "translation model. A program can score the targets of other models with Client.score.",
        epilog='example: %(prog)s "나는 학생이다" "I am a student."',
    )
    score.add_argument("source", metavar="SOURCE", help="the source text")
    score.add_argument("target", metavar="TARGET", help="the target text")
    _add_common_flags(score, "first translation model")
    for name, text in (
        ("source_language", "the language of the source"),
        ("target_language", "the language of the target"),
        ("task", "the task of the model"),
    ):
        score.add_argument(_FLAGS[name], default="", metavar="NAME", help=f"{text} (default: the model's)")
    models = command("models", "list the models that the server serves")
    versions = command(
        "versions",
        "list the versions of models on the server's disk, and their states (needs the role admin)",
    )
    versions.add_argument(
        "model", nargs="?", default="", metavar="MODEL", help="name of the model (default: all models)"
    )
    load = command(
        "load",
        "load a version of a model and start to serve it (needs the role admin)",
        epilog="example: %(prog)s demo --version 2 --timeout-seconds 300",
    )
    load.add_argument("model", metavar="MODEL", help="name of the model")
    load.add_argument(
        "--version", default="", metavar="NAME", help="name of the version's folder (default: the newest)"
    )
    unload = command("unload", "stop serving a model (needs the role admin)")
    unload.add_argument("model", metavar="MODEL", help="name of the model")
    for listing in (models, versions, load):
        listing.add_argument("--json", action="store_true", help="print each entry as one line of JSON")
    health = command("health", "print whether the server is ready; the exit code is 0 if it is, otherwise 1")
    health.add_argument(
        "--metrics-url",
        metavar="URL",
        help="call the metrics port instead, for example http://localhost:9464",
    )
    health.add_argument(
        "service",
        nargs="?",
        default="",
        metavar="NAME",
        help="name of a service or model (default: the whole server)",
    )
    _add_web(command)
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="describe this machine and installation, for a bug report",
        description="Print versions, CPU instructions, memory, the compiled operators, and whether and why "
        "CUDA is used; with a BUNDLE also what it needs. The command calls no server. The exit code is 1 if "
        "the bundle cannot be served here.",
        epilog="example: %(prog)s bundles/demo",
    )
    doctor.add_argument(
        "bundle", nargs="?", type=Path, metavar="BUNDLE", help="a folder written by `python -m export`"
    )
    for each in commands.choices.values():
        each.set_defaults(parser=each)  # an error shows its usage
    return parser


def _add_translate(command: Callable[..., argparse.ArgumentParser]) -> None:
    translation = command(
        "translate",
        "translate texts, or the lines of a file",
        description="Translate texts, or the lines of a file or of standard input. The output has one line "
        "for each text, or N lines with --num-hypotheses N, in the order of the texts. The line of a blank "
        "text is blank. If a text fails, its line is blank, stderr has the error, the client continues with "
        "the other texts, and the exit code is 1. The answer to a single TEXT keeps its line breaks; if it "
        "fails, stdout stays empty. The client waits for a server that restarts or is overloaded.",
        epilog="examples: %(prog)s 오늘은 --stream; %(prog)s --input corpus.ko --output corpus.en --resume",
    )
    add = translation.add_argument
    add("texts", nargs="*", metavar="TEXT", help="a text to translate (default: the lines of --input)")
    add(
        "--input",
        dest="inputs",
        nargs="+",
        type=Path,
        default=[STANDARD],
        metavar="FILE",
        help="file of texts, one on each line; .gz is decompressed (default: -, standard input). JSON lines "
        f"(.jsonl) get the target as a new field; a document ({', '.join(DOCUMENTS)}) keeps its times and "
        "formatting. Several files need --to",
    )
    add(
        "--output",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="file for the answers, which appears when it is complete; if it exists, --resume or --overwrite "
        "is needed (default: -, standard output)",
    )
    add(
        "--to",
        type=Path,
        metavar="FOLDER",
        help="folder for the answers to several files, in place of --output: each has the name of its input, "
        "also with the folders below the one that all inputs share",
    )
    existing = translation.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume",
        action="store_true",
        help="continue an interrupted run of the same command",
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing --output file")
    add_record_flags(translation)
    add(
        "--in-flight",
        type=_count,
        default=DEFAULT_IN_FLIGHT,
        metavar="N",
        help="maximum number of texts in flight; fewer while the server is overloaded (default: %(default)s)",
    )
    add(
        "--give-up-seconds",
        type=_seconds,
        metavar="SECONDS",
        help="stop if the server does not answer any call for this time (default: "
        f"{DEFAULT_GIVE_UP_SECONDS:g}; with a TEXT: {_TEXT_SECONDS:g})",
    )
    add("--model", default="", help="name of the model (default: the server's first translation model)")
    add("--stream", action="store_true", help="print each piece of an answer as soon as it is decoded")
    add(
        "--json",
        action="store_true",
        help="print whole answers, each as a line of JSON; with --stream, every piece, too",
    )
    add_terms_flags(translation)
    _add_attention(translation, "the alignment of a TEXT")
    add_generation_flags(translation, _FOR_TRANSLATION)


def _add_answer(command: Callable[..., argparse.ArgumentParser]) -> None:
    question = command(
        "answer",
        "answer a question about a story",
        description="Print the answer to a question about a story, from a memory network. The server splits "
        "the story into sentences.",
        epilog='example: %(prog)s --story story.txt --question "Where is the apple?" --top 3',
    )
    add = question.add_argument
    add("--story", type=Path, required=True, metavar="FILE", help="file of the story; -: standard input")
    add("--question", required=True, metavar="TEXT", help="the question")
    _, most = OPTIONS["num_alternatives"].bounds or (0, math.inf)
    add(
        "--top",
        type=partial(_count, most=most),
        metavar="N",
        help=f"also print the N most probable answers with their probabilities (at most {most:g})",
    )
    _add_common_flags(question, "first that answers questions")
    _add_attention(question, "the weights of the sentences, by hop,")


def _add_caption(command: Callable[..., argparse.ArgumentParser]) -> None:
    picture = command(
        "caption",
        "describe or read a picture, or describe a clip",
        description="Print the caption or the text of a picture (PNG, JPEG, WebP, GIF), the caption of a "
        "clip (animated PNG, WebP or GIF), or of features (a NumPy array, .npy), depending on the model.",
        epilog="example: %(prog)s picture.png --attention attention.png",
    )
    picture.add_argument("file", type=Path, metavar="FILE", help="the file; -: standard input")
    _add_common_flags(
        picture, "only one for such a file: for features, for clips if it is animated, otherwise for pictures"
    )
    _add_attention(picture, "the picture or clip once for each word, with the attention laid over it,")
    not_for_pictures = (*_ONLY_FOR_TEXTS, *_ONLY_FOR_SOUNDS)
    add_generation_flags(picture, [name for name in _FLAGS if name not in not_for_pictures])


def _add_transcribe(command: Callable[..., argparse.ArgumentParser]) -> None:
    sound = command(
        "transcribe",
        "transcribe a sound",
        description="Print the transcript of a sound file (WAV, AIFF, FLAC, OGG, MP3; with the server's "
        "extra speech also AAC, AMR, WMA, MP4, WebM): with --task translate in English, with --timestamps or "
        "--word-timestamps one line for each segment or word with its times, with --format as subtitles. "
        "The server reads a sound that is too long for the model in windows, unless --long-source selects "
        "another way. It refuses such a sound with --num-hypotheses, --stop-sequences or --target-prefix, "
        "which are for a whole target. A file of more than 4 MiB, or longer than the model reads in "
        "windows, is sent in parts while it is read, and each segment is printed when it is complete.",
        epilog="examples: %(prog)s speech.wav --source-language ko --format srt > speech.srt; "
        "%(prog)s --live; %(prog)s meeting.flac --format vtt --output meeting.vtt --resume",
    )
    add = sound.add_argument
    add(
        "file",
        nargs="?",
        type=Path,
        metavar="FILE",
        help="the file; -: standard input; with --live and no FILE: the microphone",
    )
    add(
        "--live",
        action="store_true",
        help="write what is said while it is said; a file is sent as fast as it is played. Ctrl-C ends "
        "the sound",
    )
    add(
        "--then",
        default="",
        metavar="MODEL",
        help="with --live: translate each segment by this model, whose --target-language applies; on a "
        "terminal the translation is under the segment, otherwise in its place",
    )
    add(
        "--then-source-language",
        default="",
        metavar="NAME",
        help="the language of the segments, by the name that the model of --then has for it",
    )
    add(
        "--output",
        type=Path,
        default=STANDARD,
        metavar="FILE",
        help="file for the transcript, which is written while the sound is sent in parts; if it exists, "
        "--resume or --overwrite is needed (default: -, standard output)",
    )
    existing = sound.add_mutually_exclusive_group()
    existing.add_argument(
        "--resume", action="store_true", help="continue an interrupted run of the same command"
    )
    existing.add_argument("--overwrite", action="store_true", help="replace an existing --output file")
    add(
        "--file-type",
        default="",
        metavar="TYPE",
        help="the type of samples without a header, such as 'audio/pcm; rate=16000; channels=2' (16 bits, "
        "little-endian), 'audio/L16; rate=16000' (big-endian), audio/pcmu (mu-law) or audio/pcma (A-law)",
    )
    add(
        "--rate",
        type=_count,
        metavar="N",
        help="samples a second of little-endian 16-bit samples without a header; with --live, standard input "
        f"without a header has such samples (default: {DEFAULT_RATE})",
    )
    add("--channels", type=_count, metavar="N", help="channels of such samples (default: 1)")
    add(
        "--no-turn-detection",
        action="store_true",
        help="do not look for speech where a sound is sent with --live or in parts: cut it where it is quiet",
    )
    _add_common_flags(sound, "first that reads sounds")
    add("--format", choices=FORMATS, help="print subtitles: SubRip or WebVTT")
    sound.set_defaults(attention=None)
    add_generation_flags(sound, [name for name in _FLAGS if name not in _FOR_WORDS])


def _add_web(command: Callable[..., argparse.ArgumentParser]) -> None:
    web = command(
        "web",
        "serve a page for trying the server in a browser",
        description="Serve a page for trying the server in a browser on this machine: translations as they "
        "are decoded, with alignments, alternatives and times; captions, answers, the server's latencies. "
        "Ctrl-C ends it.",
        epilog="example: %(prog)s --address localhost:50051 --port 8080",
    )
    web.add_argument(
        "--host",
        default="127.0.0.1",
        help="address that the page listens on; everyone who reaches it uses this command's token (default: "
        "%(default)s)",
    )
    web.add_argument(
        "--port",
        type=port_number,
        default=8080,
        help="port of the page; 0 takes any free port (default: %(default)s)",
    )
    web.add_argument(
        "--metrics-url",
        default="http://localhost:9464",
        metavar="URL",
        help="metrics port of the server (default: %(default)s)",
    )


def _add_common_flags(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("--model", default="", help=f"name of the model (default: the server's {what})")
    parser.add_argument("--json", action="store_true", help="print the whole answer as a JSON object")


def _add_attention(parser: argparse.ArgumentParser, shown: str) -> None:
    parser.add_argument(
        "--attention",
        type=_attention_file,
        metavar="FILE",
        help=f"also write {shown} to FILE, as a drawing ({IMAGE}) or as numbers ({DATA})",
    )


def add_record_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of inputs: what they are, and the fields of records."""
    parser.add_argument(
        "--as",
        dest="kind",
        choices=(TEXT,),
        help="what an input of an unknown kind is: a text on each line (a name without a suffix, in .txt, or "
        "with that of a language such as .ko is text anyway)",
    )
    parser.add_argument(
        "--field",
        default="text",
        metavar="NAME",
        help="field or column with the text of a record (default: %(default)s)",
    )
    parser.add_argument(
        "--target-field",
        default="target",
        metavar="NAME",
        help="new field or column for the target; NAME_score has its score, and NAME_hypotheses all "
        "hypotheses if there are several (default: %(default)s)",
    )


def add_terms_flags(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of translation memories, glossaries and placeholders."""
    parser.add_argument(
        "--memory",
        type=Path,
        action="append",
        default=[],
        metavar="FILE",
        help="translation memory (TMX): a text that it has exactly is not translated again; may be given "
        "several times",
    )
    parser.add_argument(
        "--glossary",
        type=Path,
        metavar="FILE",
        help="glossary: a term, a tab and its translation on each line, a table (.csv), or TBX (.tbx); "
        "a target has the translations of the terms in its source, as with --terms",
    )
    parser.add_argument(
        "--no-keep-placeholders",
        dest="keeps_placeholders",
        action="store_false",
        help=f"in documents of programs ({', '.join(sorted(SOFTWARE))}), do not keep placeholders, which are "
        "kept there without --keep-placeholders",
    )


def add_generation_flags(parser: argparse.ArgumentParser, names: Iterable[str]) -> None:
    """Adds the flags of generation options, by the options' names."""
    for name in names:
        option, flag = OPTIONS[name], _FLAGS[name]
        text = re.sub(r"`(\w+)`", lambda match: _FLAGS[match[1]], option.help).replace("%", "%%")
        text += " (needs --json)" * (name in _ONLY_IN_JSON)
        if option.is_switch:
            parser.add_argument(flag, action="store_const", const=option.read(True), help=text)
            continue
        is_list = option.max_items is not None
        parser.add_argument(
            flag,
            type=partial(_given, option),
            action="append" if is_list else "store",
            metavar=option.form.metavar,
            help=text + "; may be given several times" * is_list,
        )


def _given(option: Option, text: str) -> GenerateOptions:
    try:
        return option.read(text, is_text=True)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"it is {text!r}, and {error}") from error


def _attention_file(text: str) -> Path:
    path = Path(text)
    if path.suffix not in (IMAGE, DATA):
        raise argparse.ArgumentTypeError(f"{path}: the name must end in {IMAGE} or {DATA}")
    if not path.parent.is_dir():
        raise argparse.ArgumentTypeError(f"{path}: there is no folder {path.parent}")
    if path.suffix == IMAGE and find_spec("matplotlib") is None:
        raise argparse.ArgumentTypeError(
            f"a drawing needs more packages: {install_command('drawing')}; {DATA} files do not need them"
        )
    return path


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds above 0")
    return seconds


def _address(text: str) -> str:
    for one in text.split(","):
        _, colon, port = one.rpartition(":")
        if colon and port.isdigit():
            port_number(port)
    return text


def _count(text: str, most: float = math.inf) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= most:
        wanted = "above 0" if most == math.inf else f"from 1 to {most:g}"
        raise argparse.ArgumentTypeError(f"{text!r} is not a number {wanted}")
    return int(text)


def translations(options: argparse.Namespace) -> list[Translation]:
    """Returns the settings of the command `translate`, by input; wrong usage ends the program."""
    parser: argparse.ArgumentParser = options.parser
    inputs: list[Path] = options.inputs
    if options.to is None:
        if len(inputs) > 1:
            parser.error(f"{len(inputs)} files are given as --input: give --to FOLDER for the answers")
        return [_translation(argparse.Namespace(**vars(options), input=inputs[0]))]
    if options.texts or STANDARD in inputs or options.output != STANDARD:
        parser.error("--to FOLDER is for the files of --input: leave out --output and TEXT")
    if options.to.exists() and not options.to.is_dir():
        parser.error(f"--to {options.to} is not a folder, and must be one: give another name")
    names = _names_of_outputs(inputs, ".jsonl" if options.json else "")
    for name, number in Counter(names).items():
        if number > 1:
            parser.error(f"{number} inputs would have the output {options.to / name}: rename all but one")
    return [
        _translation(argparse.Namespace(**(vars(options) | {"input": input_, "output": options.to / name})))
        for input_, name in zip(inputs, names, strict=True)
    ]


def _names_of_outputs(inputs: Sequence[Path], suffix: str) -> list[Path]:
    """Returns the name of each input below the folder that all share, decompressed, and with another end."""
    paths = [Path(os.path.abspath(path)) for path in inputs]  # noqa: PTH100  # the name of a link is its kind
    root = os.path.commonpath([path.parent for path in paths])
    names = [path.relative_to(root) for path in paths]
    plain = [name.with_suffix("") if is_compressed(name) else name for name in names]
    return [name.with_name(name.name.removesuffix(suffix) + suffix) for name in plain]


def _translation(options: argparse.Namespace) -> Translation:
    """Returns the settings of the command for one input."""
    parser: argparse.ArgumentParser = options.parser
    problem = _check_files(options)
    generate_options = generation(options)
    if options.attention is not None:
        if len(options.texts) != 1:
            parser.error(f"--attention needs exactly one TEXT: {len(options.texts)} were given")
        if options.stream and options.json:
            parser.error("--attention works with --stream or with --json, not with both")
        if options.memory:
            parser.error("--attention needs a text that is decoded: leave out --memory")
        if _is_split(generate_options):
            parser.error("--attention cannot show a text that --long-source splits")
    return Translation(
        texts=tuple(options.texts),
        input=options.input,
        output=options.output,
        folder=options.to,
        field=options.field,
        target_field=options.target_field,
        resume=options.resume,
        overwrite=options.overwrite,
        in_flight=options.in_flight,
        give_up_seconds=options.give_up_seconds
        or (_TEXT_SECONDS if options.texts else DEFAULT_GIVE_UP_SECONDS),
        model=options.model,
        options=generate_options,
        stream=options.stream,
        as_json=options.json,
        attention_file=options.attention,
        is_one_of_many=len(options.inputs) > 1,
        problem=problem,
        memory=tuple(options.memory),
        glossary=options.glossary,
        keeps_placeholders=options.keeps_placeholders,
    )


def generation(options: argparse.Namespace) -> GenerateOptions:
    """Returns the generation options of a command's flags; wrong usage ends the program."""
    generate_options = given_options(options)
    if problem := problem_of_terms(generate_options):
        options.parser.error(f"{_FLAGS['terms']}: {problem}")
    generate_options.attention = options.attention is not None
    for name in _ONLY_IN_JSON:
        if getattr(generate_options, name) and not options.json:
            options.parser.error(f"{_FLAGS[name]} needs --json: the text output does not show its result")
    if _is_split(generate_options) and generate_options.num_hypotheses > 1 and not options.json:
        options.parser.error(
            "--num-hypotheses needs --json where --long-source splits: it lists them by part"
        )
    return generate_options


def transcription(options: argparse.Namespace) -> GenerateOptions:
    """Returns the generation options of the command `transcribe`; wrong usage ends the program.

    The options get `form`, the form of the sound's bytes, and the `file_type` of --rate and --channels.
    """
    parser: argparse.ArgumentParser = options.parser
    generate_options = generation(options)
    if options.format and options.json:
        parser.error("--format and --json are both given: give one of them")
    if options.file is None and not options.live:
        parser.error("there is no FILE: give one, or --live for the microphone")
    if (options.then or options.then_source_language) and not (options.live and options.then):
        parser.error("--then MODEL needs --live, and --then-source-language needs --then")
    if options.live and options.output != STANDARD:
        parser.error("--live writes to standard output: leave out --output")
    if (options.rate or options.channels) and options.file_type:
        parser.error("--file-type has the rate and the channels: leave out --rate and --channels")
    if options.file == STANDARD and sys.stdin is None:
        parser.error("standard input is closed: give a FILE")
    if options.rate or options.channels:
        options.file_type = (
            f"audio/pcm; rate={options.rate or DEFAULT_RATE}; channels={options.channels or 1}"
        )
    try:
        options.form = form_of_type(options.file_type)
    except ValueError as error:
        parser.error(str(error))
    if options.live and options.file == STANDARD and not options.file_type:
        options.form = SoundForm("pcm_s16")
    if options.output == STANDARD:
        if options.resume or options.overwrite:
            parser.error("--resume and --overwrite need --output FILE")
        return generate_options
    if options.resume and options.file == STANDARD:
        parser.error("--resume needs a FILE, because standard input cannot be read again")
    _check_output(options, options.file, has_folder=False)
    return generate_options


def _is_split(options: GenerateOptions) -> bool:
    return options.long_source in (LONG_SOURCE_SPLIT, LONG_SOURCE_SPLIT_ALWAYS)


def given_options(options: argparse.Namespace) -> GenerateOptions:
    """Returns the options that flags of `add_generation_flags` gave."""
    generate_options = GenerateOptions()
    for name in _FLAGS:
        given = getattr(options, name, None) or ()
        for one in given if isinstance(given, list | tuple) else [given]:
            generate_options.MergeFrom(one)
    return generate_options


def _problem_of_input(options: argparse.Namespace) -> str:
    """Returns why an input of another kind than lines does not fit the other flags; empty if it fits."""
    path, output = options.input, options.output
    try:
        check_kind(path, is_text=options.kind == TEXT)
        kind = format_of(path)
    except JobError as error:
        return str(error)
    several = (options.num_hypotheses or GenerateOptions()).num_hypotheses > 1
    if kind == DOCUMENT:
        if options.json or several:
            options.parser.error("--json and --num-hypotheses are for lines, not for documents")
        suffix = document_suffix(path)
        if output.suffix.lower() != suffix:
            return (
                f"{path} is a document: give --output a name in {suffix}, such as translated{suffix}; "
                "to translate its lines without its structure, send them through standard input"
            )
        if path.exists() and not path.is_file():
            return f"{path} is not a file: a document is read from one"
    elif kind == PARQUET:
        return f"{path} is a table: {program('bulk')} translates it"
    elif path.is_dir():
        return f"{path}: Is a directory: give its files, such as --input {path}/* --to FOLDER"
    elif kind != TEXT and output == STANDARD:
        return f"{path} has records: give --output, or standard input its lines"
    return ""


def _check_files(options: argparse.Namespace) -> str:
    """Refuses files that do not fit the other flags; returns the problem of one of several inputs."""
    parser, input_, output = options.parser, options.input, options.output
    if options.texts and input_ != STANDARD:
        parser.error("TEXT and --input are both given: give one of them")
    if not options.texts and input_ == STANDARD and sys.stdin is None:
        parser.error("there is no TEXT, and standard input is closed: give a TEXT or --input")
    problem = "" if options.texts else _problem_of_input(options)
    if problem and len(options.inputs) == 1:
        parser.error(problem)
    if output == STANDARD:
        if options.resume or options.overwrite:
            parser.error("--resume and --overwrite need --output FILE")
        return problem
    if options.texts:
        parser.error("--output is for the lines of a file: give the file as --input, and no TEXT")
    if options.stream:
        parser.error("--output is a file of whole answers: leave out --stream")
    _check_output(options, input_, has_folder=options.to is not None)
    if document_suffix(input_) and output.exists() and not output.is_file():
        parser.error(f"--output {output} is a pipe or a device: a document is written to a file")
    return problem


def _check_output(options: argparse.Namespace, input_: Path, *, has_folder: bool) -> None:
    """Refuses an --output that cannot be written, or that exists without --resume or --overwrite.

    The folder of a command that `has_folder` for its outputs is made later.
    """
    parser, output = options.parser, options.output
    if is_compressed(output):
        parser.error(f"--output {output}: the client does not compress its output: leave out {COMPRESSED}")
    for path in (output, parts_folder(output)):
        try:
            path.stat()
        except (FileNotFoundError, NotADirectoryError):
            continue
        except OSError as error:  # such as a loop of symbolic links
            parser.error(f"--output {path}: {error.strerror}: give another name")
    if output.is_dir():
        parser.error(f"--output {output} is a folder: give the name of a file in it")
    if output.exists() and input_.exists() and output.samefile(input_):
        parser.error("--input and --output are the same file")
    if not has_folder and not output.parent.is_dir():
        parser.error(f"--output {output}: there is no folder {output.parent}")
    kept = output, parts_folder(output.resolve())  # a pipe or a device keeps nothing
    exists = next((path for path in kept if path.is_file() or path.is_dir()), None)
    if exists and not (options.resume or options.overwrite):
        parser.error(f"{exists} exists: continue it with --resume, or replace it with --overwrite")
