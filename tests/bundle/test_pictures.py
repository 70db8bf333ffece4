import io
import random
import struct
import subprocess
import sys
import tracemalloc
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from resource import RUSAGE_SELF, getrusage

import numpy as np
import pytest
from PIL import Image, ImageOps

from seq2seq_serve.bundle import pictures
from seq2seq_serve.bundle.pictures import PictureError, cost, read_clip, read_picture, read_shown

RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 128, 0), (0, 0, 255), (255, 255, 255)
LOSSLESS = {"PNG": {}, "GIF": {}, "WEBP": {"lossless": True}}


def encoded(image: Image.Image, kind: str = "PNG", **settings) -> bytes:
    stream = io.BytesIO()
    image.save(stream, kind, **settings)
    return stream.getvalue()


def quarters(width: int = 8, height: int = 8) -> Image.Image:
    """Red, green, blue and white, from the top left."""
    picture = Image.new("RGB", (2, 2))
    picture.putdata([RED, GREEN, BLUE, WHITE])
    return picture.resize((width, height), Image.Resampling.NEAREST)


def frames(number: int, size: int = 8) -> list[Image.Image]:
    """Pictures of one colour, each of another."""
    return [
        Image.new("RGB", (size, size), (255 * (place % 2), 80 * place % 256, 0)) for place in range(number)
    ]


def animation(images: list[Image.Image], kind: str = "PNG", **settings) -> bytes:
    return encoded(images[0], kind, save_all=True, append_images=images[1:], **settings)


def corners(pixels: np.ndarray) -> list[tuple[int, ...]]:
    return [tuple(map(int, pixels[row, column])) for row in (0, -1) for column in (0, -1)]


def chunk(kind: bytes, content: bytes = b"") -> bytes:
    return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))


def png(width: int, height: int, *chunks: bytes) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0))
    return b"\x89PNG\r\n\x1a\n" + header + b"".join(chunks) + chunk(b"IEND")


def gif(width: int, height: int, *blocks: bytes) -> bytes:
    return b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6) + b"".join(blocks) + b";"


def gif_frame(width: int, height: int) -> bytes:
    return b"," + struct.pack("<HHHHB", 0, 0, width, height, 0) + b"\x02\x02\x4c\x01\x00"


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_picture_of_the_models_size_keeps_its_pixels(kind):
    picture = quarters(56, 56)
    assert np.array_equal(read_picture(encoded(picture, kind, **LOSSLESS[kind]), 56), np.asarray(picture))


@pytest.mark.parametrize("kind", ["JPEG", "WEBP"])
def test_a_lossy_picture_is_nearly_the_same(kind):
    pixels = read_picture(encoded(quarters(64, 64), kind, quality=95), 8)
    assert pixels.shape == (8, 8, 3)
    assert pixels.dtype == np.uint8
    assert np.abs(np.subtract(corners(pixels), [RED, GREEN, BLUE, WHITE])).max() < 6


@pytest.mark.parametrize("shape", [(40, 8), (8, 40), (999, 70)])
def test_all_of_a_picture_is_seen_whatever_its_proportions(shape):
    assert corners(read_picture(encoded(quarters(*shape)), 16)) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("1", [WHITE, WHITE]),
        ("L", [(76, 76, 76), WHITE]),
        ("LA", [(76, 76, 76), WHITE]),
        ("P", [RED, WHITE]),
        ("RGBA", [RED, WHITE]),
    ],
)
def test_a_png_of_any_mode_is_rgb(mode, expected):
    picture = quarters().convert(mode, dither=Image.Dither.NONE)
    if mode == "1":
        picture = Image.new("1", (8, 8), 1)
    assert corners(read_picture(encoded(picture), 8))[::3] == expected


def test_transparent_parts_are_white():
    picture = quarters().convert("RGBA")
    picture.putalpha(Image.new("L", (8, 8), 0))
    assert corners(read_picture(encoded(picture), 8)) == [WHITE] * 4
    picture.putalpha(Image.new("L", (8, 8), 128))
    assert corners(read_picture(encoded(picture), 8))[0] == (255, 127, 127)
    palette = quarters().convert("P")
    red = palette.getpixel((0, 0))
    for kind in ("PNG", "GIF"):
        assert corners(read_picture(encoded(palette, kind, transparency=red), 8))[0] == WHITE
    assert corners(read_picture(encoded(quarters(), transparency=RED), 8))[:2] == [WHITE, GREEN]


def test_16_bits_are_scaled_and_not_cut_off():
    values = np.array([[0, 256], [32768, 65535]], np.uint16)
    pixels = read_picture(encoded(Image.fromarray(values)), 2)
    assert pixels[..., 0].tolist() == [[0, 1], [128, 255]]


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP"])
@pytest.mark.parametrize("orientation", range(1, 10))
def test_a_photo_is_turned_as_its_exif_data_says(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    stored = encoded(quarters(32, 48), kind, exif=exif)
    wanted = np.asarray(ImageOps.exif_transpose(Image.open(io.BytesIO(stored))).convert("RGB"))
    assert np.abs(np.subtract(corners(read_picture(stored, 8)), corners(wanted))).max() < 6
    shown = read_shown(stored, 24)
    assert shown.shape == ((16, 24, 3) if orientation in (5, 6, 7, 8) else (24, 16, 3))


def test_a_picture_is_shown_with_its_own_proportions_and_never_larger():
    assert read_shown(encoded(quarters(300, 100)), 60).shape == (20, 60, 3)
    assert read_shown(encoded(quarters(9, 6)), 60).shape == (6, 9, 3)
    assert read_shown(encoded(quarters(3000, 2)), 60).shape == (1, 60, 3)


@pytest.mark.parametrize("kind", LOSSLESS)
@pytest.mark.parametrize("number", [2, 5])
def test_a_clip_has_the_frames_of_its_animation(kind, number):
    images = frames(number)
    clip = read_clip(animation(images, kind, duration=50, **LOSSLESS[kind]), 8, max_frames=5)
    assert clip.shape == (number, 8, 8, 3)
    assert [corners(frame)[0] for frame in clip] == [image.getpixel((0, 0)) for image in images]


def test_the_default_image_of_an_animated_png_is_not_a_part_of_it():
    content = animation([quarters(), *frames(3)], default_image=True)
    assert [corners(frame)[0][1] for frame in read_clip(content, 8, 3)] == [0, 80, 160]
    assert corners(read_picture(content, 8)) == [RED, GREEN, BLUE, WHITE]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_picture_is_a_clip_of_one_frame_and_a_clip_shows_its_first(kind):
    assert read_clip(encoded(quarters(), kind, **LOSSLESS[kind]), 8, 9).shape == (1, 8, 8, 3)
    content = animation(frames(3), kind, **LOSSLESS[kind])
    assert corners(read_picture(content, 8)) == [(0, 0, 0)] * 4


def test_frames_that_only_change_a_part_are_whole():
    second = quarters()
    second.paste((0, 0, 0), (0, 0, 2, 2))
    for kind in LOSSLESS:
        clip = read_clip(animation([quarters(), second], kind, **LOSSLESS[kind]), 8, 2)
        assert corners(clip[1]) == [(0, 0, 0), GREEN, BLUE, WHITE]


@pytest.mark.parametrize("kind", LOSSLESS)
def test_a_clip_of_too_many_frames_or_pixels_is_refused(kind):
    content = animation(frames(6), kind, **LOSSLESS[kind])
    with pytest.raises(PictureError, match="the clip has 6 frames, and at most 5 are read"):
        read_clip(content, 8, 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pictures, "MAX_CLIP_PIXELS", 6 * 64 - 1)
        with pytest.raises(PictureError, match="6 frames of 8 x 8 pixels, and at most 383 pixels in all"):
            read_clip(content, 8, 6)
        assert read_picture(content, 8).shape == (8, 8, 3)


def webp(kind: bytes, content: bytes, rest: bytes = b"") -> bytes:
    body = b"WEBP" + kind + struct.pack("<I", len(content)) + content + rest
    return b"RIFF" + struct.pack("<I", len(body)) + body


def jpeg(width: int, height: int, marker: int = 0xC0) -> bytes:
    header = struct.pack(">BHHB", 8, height, width, 1) + b"\x01\x11\x00"
    sizes = b"\xff" + bytes([marker]) + struct.pack(">H", len(header) + 2) + header
    return b"\xff\xd8" + sizes + b"\xff\xda\x00\x08\x01\x01\x00\x00\x3f\x00\xff\xd9"


ANIMATION_CONTROL = chunk(b"acTL", struct.pack(">II", 1, 0))
CLEARED_FRAME = chunk(b"fcTL", struct.pack(">IIIIIHHBB", 0, 50_000, 50_000, 0, 0, 1, 1, 1, 0))
BOMBS = {
    "a PNG": png(50_000, 50_000, chunk(b"IDAT", zlib.compress(bytes(100_000)))),
    "an animated PNG": png(50_000, 50_000, ANIMATION_CONTROL, CLEARED_FRAME, chunk(b"IDAT")),
    "a JPEG": jpeg(50_000, 50_000),
    "a progressive JPEG": jpeg(65_535, 65_535, 0xC2),
    "a GIF": gif(50_000, 50_000, gif_frame(1, 1)),
    "a GIF with a large frame": gif(1, 1, gif_frame(50_000, 50_000)),
    "a GIF with a large second frame": gif(1, 1, gif_frame(1, 1), gif_frame(50_000, 50_000)),
    "an animated WebP": webp(b"VP8X", b"\x12\0\0\0" + (2**24 - 1).to_bytes(3, "little") * 2),
    "a lossless WebP": webp(b"VP8L", b"\x2f\xff\xff\xff\x0f" + bytes(20)),
    "a lossy WebP": webp(b"VP8 ", b"\0\0\0\x9d\x01\x2a\xff\x3f\xff\x3f" + bytes(20)),
    "no pixels": png(0, 5, chunk(b"IDAT")),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_picture_of_too_many_pixels_is_refused_before_it_takes_memory(name):
    before = getrusage(RUSAGE_SELF).ru_maxrss
    tracemalloc.start()
    try:
        for read in (lambda content: read_picture(content, 56), lambda content: read_clip(content, 56, 32)):
            with pytest.raises(
                PictureError,
                match=r"^the picture is (\d+ x \d+, \d+ pixels, and at most \d+ are read of such|"
                "0 x 5, and must have at least one pixel$)",
            ):
                read(BOMBS[name])
        assert tracemalloc.get_traced_memory()[1] < 2**20
    finally:
        tracemalloc.stop()
    assert getrusage(RUSAGE_SELF).ru_maxrss - before < 2**12  # KiB


def test_a_second_header_does_not_get_around_the_limit():
    second = chunk(b"IHDR", struct.pack(">IIBBBBB", 50_000, 50_000, 8, 2, 0, 0, 0))
    with pytest.raises(PictureError, match="declares several sizes"):
        read_picture(png(2, 2, second, chunk(b"IDAT", zlib.compress(bytes(100)))), 8)
    with pytest.raises(PictureError, match="empty extension"):
        read_picture(gif(2, 2, b"!\xf9\x00", gif_frame(50_000, 50_000)), 8)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (png(1, 1, *[chunk(b"tEXt")] * 10_000), "more than 10000 chunks"),
        (webp(b"VP8X", bytes(10), b"ANMF\0\0\0\0" * 10_001), "more than 10000 chunks"),
        (b"\xff\xd8" + b"\xff\xe1\x00\x08Exif\0\0" * 1001, "more than 1000 segments"),
        (b"\xff\xd8\xff" + bytes(2**16) + jpeg(8, 8)[2:], "does not contain a picture"),
        (jpeg(8, 8, 0xC2)[:-2] + b"\xff\xda\x00\x02" * 30, "more than 30 scans"),
        (bytes(8 * 2**20 + 1), "has 8388609 bytes, and at most 8388608 are read"),
        (gif(1, 1), "does not contain a picture"),
        (gif(1, 1, b"!\xfe\x00" * 10_000), "more than 10000 frames and extensions"),
        (gif(1, 1, gif_frame(1, 1) * 10_000), "more than 10000 frames and extensions"),
        (gif(1, 1, gif_frame(1, 1)[:-1] + b"\x01\x00" * 2**16 + b"\x00"), "more than 65536 blocks of data"),
    ],
)
def test_files_that_would_take_long_are_refused(content, message):
    with pytest.raises(PictureError, match=message):
        read_picture(content, 8)


def test_the_cost_of_a_file_is_that_of_the_frames_that_are_decoded():
    clip = gif(100, 50, gif_frame(100, 50) * 7)
    assert cost(clip).num_pixels == 5000
    assert cost(clip, max_frames=7)[:2] == (35_000, 7)
    with pytest.raises(PictureError, match="the clip has 7 frames, and at most 6 are read"):
        cost(clip, max_frames=6)
    with pytest.raises(PictureError, match="at most 67108864 pixels in all are read"):
        cost(gif(2000, 2000, gif_frame(1, 1) * 17), max_frames=64)
    assert cost(jpeg(8000, 6000)).num_pixels == 8000 * 6000 // 8
    assert cost(jpeg(4000, 3000, 0xC2)).num_pixels == 4000 * 3000


# The peak is that of `/proc`: getrusage's includes that of the process that started this one.
PHOTO = """
import sys
from pathlib import Path
from seq2seq_serve.bundle.pictures import read_picture

def peak_kib():
    return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])

content = sys.stdin.buffer.read()
read_picture(content[: int(sys.argv[1])], 56)  # what any picture takes
before = peak_kib()
read_picture(content[int(sys.argv[1]) :], 56)
print((peak_kib() - before) // 1024)
"""


@pytest.mark.parametrize(
    ("content", "most"),
    [
        (encoded(quarters(8000, 6000), "JPEG"), 16),
        (encoded(quarters(4000, 3000), "JPEG", progressive=True), 64),
        (encoded(quarters(2048, 2048).convert("RGBA"), "WEBP", lossless=True), 96),
        (encoded(quarters(3840, 2160).convert("RGBA"), compress_level=1), 96),
    ],
    ids=["a JPEG of 48 megapixels", "a progressive JPEG", "WebP", "PNG"],
)
def test_the_largest_pictures_take_little_memory(content, most):
    first = encoded(quarters(), "JPEG")
    command = [sys.executable, "-c", PHOTO, str(len(first))]
    done = subprocess.run(command, input=first + content, capture_output=True, check=True, timeout=60)
    assert int(done.stdout) < most  # MiB


def test_the_limits_of_formats_that_are_decoded_whole_are_lower():
    for content in (
        webp(b"VP8L", b"\x2f" + struct.pack("<I", 7679 | 4319 << 14) + b"\x00" * 13),
        encoded(quarters(2049, 2048), "WEBP"),
        encoded(quarters(4200, 2000)),
        jpeg(5000, 4000, 0xC2),
        jpeg(9000, 8000),
    ):
        with pytest.raises(PictureError, match=r"are read of such a \w+ file: make it smaller"):
            read_picture(content, 8)


def test_ten_thousand_frames_are_refused_by_their_number():
    for content in (
        gif(9, 9, *[gif_frame(9, 9)] * 9999),
        png(9, 9, chunk(b"acTL", struct.pack(">II", 9999, 0))),
    ):
        with pytest.raises(PictureError, match="the clip has 9999 frames, and at most 32 are read"):
            read_clip(content, 56, 32)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"a red circle",
        b"<svg xmlns='http://www.w3.org/2000/svg'/>",
        b"%!PS-Adobe-3.0 EPSF-3.0",
        encoded(quarters(), "BMP"),
        encoded(quarters(), "TIFF"),
        b"\x89PNG\r\n\x1a\n",
        b"RIFF\0\0\0\0WAVEfmt ",
    ],
)
def test_an_unsupported_file_format_is_refused_by_its_first_bytes(content):
    with pytest.raises(
        PictureError, match=r"^the file is not PNG, JPEG, WebP or GIF: it (is empty|begins with b)"
    ):
        read_picture(content, 8)


WHOLE = {
    "PNG": encoded(quarters(40, 40)),
    "APNG": animation(frames(4)),
    "JPEG": encoded(quarters(40, 40), "JPEG"),
    "progressive": encoded(quarters(40, 40), "JPEG", progressive=True),
    "GIF": animation(frames(4), "GIF"),
    "WebP": encoded(quarters(40, 40), "WEBP"),
    "animated WebP": animation(frames(4), "WEBP"),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_truncated_file_is_an_error(name):
    content = WHOLE[name]
    for length in {*range(24, len(content) - 8, 1 + len(content) // 50), len(content) - 24}:
        with pytest.raises(PictureError, match=r"truncated or damaged|does not contain a picture|0 pixels"):
            read_clip(content[:length], 8, 9)


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_file_is_read_or_an_error_and_nothing_else(name):
    chance = random.Random(name)
    for _ in range(150):
        content = bytearray(WHOLE[name])
        for _ in range(chance.randint(1, 8)):
            content[chance.randrange(len(content))] = chance.choice([0, 255, chance.randrange(256)])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # those of Pillow, about odd files
            with suppress(PictureError):
                assert read_clip(bytes(content), 8, 64).shape[1:] == (8, 8, 3)
                assert read_picture(bytes(content), 8).shape == (8, 8, 3)


def test_pictures_are_read_by_many_threads_and_pillows_settings_stay():
    limit = Image.MAX_IMAGE_PIXELS
    contents = [
        encoded(quarters(30 + place, 50), kind) for place in range(8) for kind in ("PNG", "JPEG", "WEBP")
    ]
    alone = [read_picture(content, 16) for content in contents]
    with ThreadPoolExecutor(8) as threads:
        together = list(threads.map(lambda content: read_picture(content, 16), contents * 4))
    assert all(np.array_equal(pixels, alone[place % len(alone)]) for place, pixels in enumerate(together))
    assert limit == Image.MAX_IMAGE_PIXELS


def test_a_picture_just_within_the_limit_is_read_without_a_warning():
    row = b"\0" + bytes(4096 * 3)
    content = png(4096, 2048, chunk(b"IDAT", zlib.compress(row * 2048, 1)))
    assert read_picture(content, 56).shape == (56, 56, 3)
