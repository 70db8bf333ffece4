"""Writes what a machine with a GPU needs: bundles, exported here, and an archive of packages that it lacks.

The bundle `base` travels without its weights. They are random, so `restore` computes them there: the names of
a graph's weights are those of the torch module that was exported, which is built from numpy's numbers.
"""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

import onnx
import torch

from benchmarks.gpu_check.place import BASE, Place, Scale
from benchmarks.random_models import random_trained
from seq2seq_serve.bundle.manifest import file_spec
from seq2seq_serve.bundle.names import CHECKSUM_FILE, MANIFEST_FILE, Precision
from seq2seq_serve.export.convert import WEIGHTS_FILE
from seq2seq_serve.export.exporter import export_bundle, make_graphs
from seq2seq_serve.training.config import TransformerConfig
from seq2seq_serve.training.models.recurrent import RecurrentConfig
from seq2seq_serve.training.run import TrainedModel

BUNDLES, PACKAGES = "bundles", "site.tar.xz"
_PYTHON_VERSION = "3.12"  # of the machine with the GPU, an x86-64 Linux
_RECURRENT = RecurrentConfig(
    vocab_size=300,
    d_model=32,
    d_hidden=48,
    num_encoder_layers=1,
    num_decoder_layers=2,
    cell="lstm",
    attention="additive",
    max_source_length=48,
    max_target_length=48,
)
_ROOT = Path(__file__).parents[2]
# Packages of the server that machines set up for torch seldom have; and gRPC's, which must not be older than
# the generator of our stubs.
_PACKAGES = (
    *("annotated-types", "cffi", "googleapis-common-protos", "grpcio", "grpcio-health-checking"),
    *("grpcio-reflection", "grpcio-status", "protobuf", "pycparser", "pydantic", "pydantic-core"),
    *("python-multipart", "sentencex", "soundfile", "soxr", "starlette", "typing-inspection", "uvicorn"),
)


def prepare(folder: Path, scale: Scale) -> None:
    """Export the bundles into a folder, and remove the weights of `base`."""
    # These import transformers, which the machine with the GPU may lack.
    from benchmarks.peers.checkpoints import make_checkpoint
    from benchmarks.peers.work import Checkpoint
    from seq2seq_serve.export.huggingface.exporter import export_checkpoint

    def report(line: str) -> None:
        print(line, file=sys.stderr)

    bundles, precisions = folder / BUNDLES, precisions_of(scale)
    shutil.rmtree(bundles, ignore_errors=True)
    for name, config in ((BASE, scale.model), ("recurrent", _RECURRENT)):
        export_bundle(random_trained(config), bundles / name, precisions, proves=False, report=report)
    for precision in precisions:
        (bundles / BASE / precision / WEIGHTS_FILE).unlink()
    # Small checkpoints with heads as wide as those of published ones; bf16 is proved on a device only.
    proved = [precision for precision in precisions if precision is not Precision.BF16]
    for name, vocab_size in (("marian", 800), ("whisper", 2000)):
        sizes = TransformerConfig(vocab_size, 64, 128, 1, 1, 1, max_source_length=1500, max_target_length=64)
        with tempfile.TemporaryDirectory() as checkpoint:
            make_checkpoint(Checkpoint(name, sizes, eos_id=0), Path(checkpoint) / name)
            export_checkpoint(Path(checkpoint) / name, bundles / name, proved, report=report)


def precisions_of(scale: Scale) -> tuple[Precision, ...]:
    """Returns the precisions of every bundle: float32 is the reference on the CPU."""
    return tuple(dict.fromkeys((Precision.FP32, *scale.precisions)))


def restore(prepared: Path, place: Place) -> bool:
    """Copy the bundles into the folder of a place, and write the weights of `base`.

    Returns:
        Whether the weights are those of the machine that exported it, bit for bit. If they are not, its
        version of numpy or torch computes other numbers, and the manifest is written anew.
    """
    shutil.copytree(prepared / BUNDLES, place.folder, dirs_exist_ok=True)
    bundle = place.folder / BASE
    manifest = json.loads((bundle / MANIFEST_FILE).read_text())
    before = json.dumps(manifest)
    for precision in precisions_of(place.scale):
        _write_weights(place.trained, precision, bundle / precision)
        spec = file_spec(bundle, f"{precision}/{WEIGHTS_FILE}")
        manifest["variants"][precision]["weights"] |= {"sha256": spec.sha256, "size_bytes": spec.size_bytes}
    is_same = json.dumps(manifest) == before
    if not is_same:
        raw = json.dumps(manifest, indent=2).encode()
        (bundle / MANIFEST_FILE).write_bytes(raw)
        (bundle / CHECKSUM_FILE).write_text(f"{hashlib.sha256(raw).hexdigest()}  {MANIFEST_FILE}\n")
    return is_same


def _write_weights(trained: TrainedModel, precision: Precision, folder: Path) -> None:
    with (folder / WEIGHTS_FILE).open("wb") as stream:
        for verb, module in make_graphs(trained, precision).items():
            state = module.state_dict()
            graph = onnx.load(folder / f"{verb}.onnx", load_external_data=False).graph
            for tensor in graph.initializer:
                place = {entry.key: entry.value for entry in tensor.external_data}
                if place:
                    # As bytes, because numpy does not have bfloat16.
                    raw = state[tensor.name].detach().contiguous().view(torch.uint8).numpy().tobytes()
                    assert len(raw) == int(place["length"]), tensor.name
                    stream.seek(int(place["offset"]))
                    stream.write(raw)


def pack_packages(folder: Path) -> None:
    """Write an archive of packages, in the versions of the server's container image.

    Raises:
        subprocess.CalledProcessError: pip failed.
    """
    locked = (_ROOT / "deploy" / "requirements-gpu.txt").read_text()
    versions = dict(re.findall(r"^([\w-]+)==([^\s;\\]+)", locked, re.MULTILINE))
    platforms = [f"--platform=manylinux{tag}_x86_64" for tag in ("_2_28", "_2_27", "_2_17", "2014", "1")]
    with tempfile.TemporaryDirectory() as site:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--only-binary=:all:", "--implementation=cp", f"--python-version={_PYTHON_VERSION}"]
        command += [*platforms, "--target", site, *(f"{name}=={versions[name]}" for name in _PACKAGES)]
        subprocess.run(command, check=True)
        with tarfile.open(folder / PACKAGES, "w:xz") as archive:
            archive.add(site, ".")
