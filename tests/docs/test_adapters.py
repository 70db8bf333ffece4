"""The tutorial of docs/adapters.md: each of its commands, on a checkpoint of random weights."""

import re
import subprocess

import pytest

from benchmarks.serving import free_ports, wait_until_ready
from tests.export.huggingface.checkpoints import SHALLOW, make_checkpoint
from tests.test_readme import ROOT, environment, run

PAGE = (ROOT / "docs" / "adapters.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_every_command_of_the_tutorial_does_what_it_says(tmp_path):
    [block, *_] = re.findall(r"```\n(.*?)```", PAGE, flags=re.DOTALL)
    commands = block.strip().splitlines()
    assert len(commands) == 10
    make_checkpoint("marian", tmp_path / "opus-mt-ko-en", SHALLOW)
    for name, (source, target) in {"legal": ("하나", "one"), "medical": ("둘", "two")}.items():
        lines = [f"{source} {number}\t{target} {number}\n" for number in range(40)]
        (tmp_path / f"{name}.tsv").write_text("".join(lines), encoding="utf-8")
    port, metrics_port = free_ports(2)
    server, answers = None, list[str]()
    try:
        for command in commands:
            if command.startswith("python -m training"):
                # Random weights have more to learn than published ones.
                flags = "--set learning_rate_scale=0.5 warmup_steps=5 source_language=ko target_language=en"
                run(command.replace("200", "20") + f" {flags} --threads 2", tmp_path, timeout=300)
            elif command.startswith("python -m server"):
                ports = f"--port {port} --metrics-port {metrics_port}"
                server = subprocess.Popen(
                    ["bash", "-c", f"exec {command} {ports}"], cwd=tmp_path, env=environment()
                )
                wait_until_ready(server, f"http://127.0.0.1:{metrics_port}/readyz")
            elif command.startswith("python -m client"):
                answers.append(run(f"{command} --address localhost:{port}", tmp_path, timeout=60).stdout)
            else:
                run(command, tmp_path, timeout=300)
        legal, medical, loaded = answers
        assert legal != medical
        again = run(commands[6] + f" --address localhost:{port}", tmp_path, timeout=60).stdout
        assert again == medical, "legal has the other adapter now"
        models = run(f"python -m client models --address localhost:{port}", tmp_path, timeout=60).stdout
        assert "ko-en/legal" in models
        assert loaded
    finally:
        if server is not None:
            server.terminate()
            assert server.wait(60) == 0
