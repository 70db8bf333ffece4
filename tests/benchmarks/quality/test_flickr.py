"""The corpora of Flickr8k: captions alone for a language model, and photos with their captions."""

import gzip
import io
import tarfile

from PIL import Image

from benchmarks.quality import flickr
from seq2seq_serve.training.data.corpus import load_corpus
from seq2seq_serve.training.data.sources import NOTHING, Pictures


def test_captions_without_a_photo_are_for_the_language_model_alone(tmp_path):
    data, folder = tmp_path / "data", tmp_path / "corpus"
    data.mkdir()
    folder.mkdir()
    with gzip.open(data / "Flickr8k.token.txt.gz", "wt") as stream:
        for name in ("a.jpg", "b.jpg", "c.jpg", "d.jpg"):
            stream.writelines(f"{name}#{number}\tA Dog , number {number} .\n" for number in range(5))
    for split, names in {"train": "a.jpg\nb.jpg", "dev": "c.jpg", "test": "d.jpg"}.items():
        (data / f"Flickr_8k.{split}Images.txt").write_text(names)
    with tarfile.open(data / "images_1000_thumb.tar", "w") as archive:
        for name in ("a.jpg", "c.jpg", "d.jpg"):
            content = io.BytesIO()
            Image.new("RGB", (9, 7)).save(content, "JPEG")
            member = tarfile.TarInfo(f"images/{name}")
            member.size = content.tell()
            content.seek(0)
            archive.addfile(member, content)
    captions, photos, test = flickr.write_corpora(data, folder)
    assert len(load_corpus(captions, 0, NOTHING).train) == 10
    corpus = load_corpus(photos, 0, Pictures(56))
    assert len(corpus.train) == 5
    assert {pair.target for pair in corpus.dev} == {f"a dog number {number}" for number in range(5)}
    [(file, references)] = test.items()
    assert file.is_file()
    assert len(references) == 5
