"""The benchmark of drafts on a small bundle."""

import json

from benchmarks import drafts


def test_the_drafted_and_the_accepted_tokens_are_printed(bundle_path, tmp_path, monkeypatch, capsys):
    (tmp_path / "texts.txt").write_text("하나 둘 하나 둘\n")
    flags = ["--threads", "1", "--pairs", "1", "--warm-up", "1"]
    monkeypatch.setattr("sys.argv", ["drafts", str(bundle_path), str(tmp_path / "texts.txt"), *flags])
    assert drafts.main() == 0
    [row] = json.loads(capsys.readouterr().out.splitlines()[-1])["rows"]
    assert 0 <= row["accepted_tokens"] <= row["drafted_tokens"]
