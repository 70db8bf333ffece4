"""Reads pictures and animations into arrays of a fixed size, for training and for the server alike.

Files are PNG, JPEG, WebP, GIF or animated PNG. The whole picture is scaled to a square, and nothing is cut
off: a caption may be about each part of it, and a map of attention covers all of it. Transparent parts are
white, and a photo is turned upright if its EXIF data says so.

Files may be hostile. The functions that start with `_measure` read a file's own headers, so that sizes are
compared with the limits before Pillow opens the file: it allocates some buffers as it does.
"""

from __future__ import annotations

import io
import math
import re
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import ExifTags, Image
from PIL.GifImagePlugin import GifImageFile
from PIL.ImageFile import ImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

Pixels = NDArray[np.uint8]
Resampling = Literal["nearest", "lanczos", "bilinear", "bicubic"]
"""How a picture is scaled: Pillow's filter of that name."""
_USUAL: Resampling = "bicubic"

MAX_FILE_BYTES = 8 * 2**20
# Pixels of a picture, or of a frame. The limits bound the memory of decoding to about 100 MB.
MAX_PIXELS = 2**23  # 3840 x 2160 fit
_MAX_WEBP_PIXELS = 2**22  # Pillow decodes them with the interpreter's lock: other threads wait
_MAX_JPEG_PIXELS = 2**26  # 64 megapixels; they are decoded at up to an eighth of the size, a line at a time
_MAX_STAGED_JPEG_PIXELS = 2**24  # if a pixel's bits are in several scans, all scans are decoded into memory
_MAX_SCALED_PIXELS = 2**24  # of a JPEG as it is decoded
MAX_CLIP_PIXELS = 2**26  # of all frames together: 32 of 1920 x 1080 fit
_MAX_PARTS = 10_000  # chunks of a PNG or WebP file, blocks of a GIF: each takes microseconds, however small
_MAX_GIF_DATA_BLOCKS = 2**16  # 8 MiB need half of them
_MAX_SEGMENTS, _MAX_SCANS = 1000, 30  # of a JPEG; each scan may visit all pixels, and usual files have ten
_MAX_STRAY_BYTES = 2**16  # between the segments of a JPEG
_JPEG_SAVING = 8  # how many times cheaper a pixel is if it is decoded at a smaller scale
_BYTES_PER_PIXEL = 16  # of memory, at most about, while a frame is decoded and scaled
_BACKGROUND = "white"

# Markers of JPEG segments; others are stuffed bytes, fillers and restart markers.
_JPEG_MARKER = re.compile(rb"\xff([\x02-\xcf\xd9-\xfe])")
_JPEG_SCAN = b"\xff\xda"
_GIF_COMMENT = 0xFE
_JPEG_SIZES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}  # the markers of headers with a size
_JPEG_SEQUENTIAL = (0xC0, 0xC1)

_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


class PictureError(ValueError):
    """A file is not a picture that can be read, or it exceeds a limit."""


def read_picture(content: bytes, size: int, resampling: Resampling = _USUAL) -> Pixels:
    """Returns a picture, or the first frame of an animation, as uint8 [size, size, 3], RGB.

    Raises:
        PictureError: The bytes are not a whole picture, or exceed a limit.
    """
    with _opened(content) as (image, measures):
        return _pixels(image, measures, (size, size), resampling)


def read_clip(content: bytes, size: int, max_frames: int) -> Pixels:
    """Returns the frames of an animation, or one of a picture, as uint8 [frames, size, size, 3], RGB.

    Raises:
        PictureError: As `read_frames`.
    """
    return np.stack(list(read_frames(content, size, max_frames)))


def read_frames(content: bytes, size: int, max_frames: int) -> Iterator[Pixels]:
    """Returns the frames of an animation, or one of a picture, each as uint8 [size, size, 3], RGB.

    Raises:
        PictureError: As `read_picture`; or there are more than `max_frames` frames, or too many pixels.
    """
    return _frames(content, max_frames, lambda _: (size, size))


def count_frames(content: bytes) -> int:
    """Returns the number of frames of an animation, 1 of a picture, by the file's headers.

    Raises:
        PictureError: The bytes are not a picture, or exceed a limit.
    """
    return _measured(content)[1].num_frames


class PictureCost(NamedTuple):
    """The cost of decoding a file.

    Attributes:
        num_pixels: The number of pixels that take as long to decode.
        num_frames: How many frames are decoded.
        num_bytes: The memory that decoding takes.
    """

    num_pixels: int
    num_frames: int
    num_bytes: int


def cost(content: bytes, max_frames: int | None = None) -> PictureCost:
    """Returns what it costs to decode a file, by its headers.

    Args:
        content: The file.
        max_frames: As for `read_clip`; None for `read_picture`, which decodes one frame.

    Raises:
        PictureError: The file exceeds a limit.
    """
    _, measures = _measured(content)
    num_frames = 1
    if max_frames is not None:
        _check_clip(measures, max_frames)
        num_frames = measures.num_frames
    return PictureCost(measures.cost * num_frames, num_frames, measures.cost * _BYTES_PER_PIXEL)


def read_shown(content: bytes, max_side: int) -> Pixels:
    """Returns a picture with its own proportions, scaled down if it is too large: uint8 [height, width, 3].

    Raises:
        PictureError: As `read_picture`.
    """
    with _opened(content) as (image, measures):
        return _pixels(image, measures, measures.shown_size(max_side), _USUAL)


def read_shown_frames(content: bytes, max_side: int, max_frames: int) -> Iterator[Pixels]:
    """Returns the frames of an animation, or one of a picture, each as from `read_shown`.

    Raises:
        PictureError: As `read_frames`.
    """
    return _frames(content, max_frames, lambda measures: measures.shown_size(max_side))


@dataclass(frozen=True)
class _Measures:
    """The sizes in a file's headers, and their limits.

    Attributes:
        max_pixels: The limit for a picture or frame of its kind.
        is_scalable: Whether it can be decoded at a smaller scale.
    """

    width: int
    height: int
    num_frames: int = 1
    max_pixels: int = MAX_PIXELS
    is_scalable: bool = False

    @property
    def num_pixels(self) -> int:
        return self.width * self.height

    @property
    def cost(self) -> int:
        """The number of pixels that take as long to decode as a frame."""
        return self.num_pixels // _JPEG_SAVING if self.is_scalable else self.num_pixels

    def shown_size(self, max_side: int) -> tuple[int, int]:
        """Returns the width and height of a picture with the same proportions and no longer side."""
        scale = min(1.0, max_side / max(self.width, self.height))
        return math.ceil(self.width * scale), math.ceil(self.height * scale)


@dataclass(frozen=True)
class _Kind:
    """A kind of files: its name, how they begin, and the two steps of reading them."""

    name: str
    beginning: re.Pattern[bytes]
    measure: Callable[[bytes], _Measures]
    open: Callable[[io.BytesIO], ImageFile]


def _measured(content: bytes) -> tuple[_Kind, _Measures]:
    """Returns a file's kind and measures, by its own headers, if they are within the limits."""
    if len(content) > MAX_FILE_BYTES:
        raise PictureError(f"the file has {len(content)} bytes, and at most {MAX_FILE_BYTES} are read")
    kind = next((kind for kind in _KINDS if kind.beginning.match(content)), None)
    if kind is None:
        given = f"begins with {content[:8]!r}" if content else "is empty"
        raise PictureError(f"the file is not PNG, JPEG, WebP or GIF: it {given}")
    with _reporting_damage(kind):
        measures = kind.measure(content)
        size = f"the picture is {measures.width} x {measures.height}"
        if not measures.num_pixels:
            raise PictureError(f"{size}, and must have at least one pixel")
        if measures.num_pixels > measures.max_pixels:
            raise PictureError(
                f"{size}, {measures.num_pixels} pixels, and at most {measures.max_pixels} are read of such a "
                f"{kind.name} file: make it smaller"
            )
        return kind, measures


def _check_clip(measures: _Measures, max_frames: int) -> None:
    if measures.num_frames > max_frames:
        raise PictureError(f"the clip has {measures.num_frames} frames, and at most {max_frames} are read")
    if measures.num_pixels * measures.num_frames > MAX_CLIP_PIXELS:
        raise PictureError(
            f"the clip has {measures.num_frames} frames of {measures.width} x {measures.height} pixels, "
            f"and at most {MAX_CLIP_PIXELS} pixels in all are read: make it smaller or shorter"
        )


@contextmanager
def _opened(content: bytes) -> Iterator[tuple[ImageFile, _Measures]]:
    """Opens a file within the limits, without decoding its pixels; errors become `PictureError`."""
    kind, measures = _measured(content)
    with _reporting_damage(kind), kind.open(io.BytesIO(content)) as image:
        yield image, measures


def _frames(
    content: bytes, max_frames: int, size: Callable[[_Measures], tuple[int, int]]
) -> Iterator[Pixels]:
    """Yields the frames of a file, scaled to a size, width and height."""
    with _opened(content) as (image, measures):
        _check_clip(measures, max_frames)
        first = int(getattr(image, "default_image", False))  # of an animated PNG; not a part of the animation
        for number in range(first, first + measures.num_frames):
            image.seek(number)
            yield _pixels(image, measures, size(measures), _USUAL)


@contextmanager
def _reporting_damage(kind: _Kind) -> Iterator[None]:
    """Turns the errors of reading a file into `PictureError`."""
    try:
        yield
    except (PictureError, MemoryError):
        raise
    except Exception as error:  # Pillow raises errors of a dozen classes for damaged files
        raise PictureError(f"the {kind.name} file is truncated or damaged") from error


def _pixels(image: ImageFile, measures: _Measures, size: tuple[int, int], resampling: Resampling) -> Pixels:
    """Decodes the current frame, scales it to `size`, width and height, and turns it upright."""
    if math.prod(image.size) > measures.num_pixels:
        raise PictureError("the file is damaged: it declares several sizes")
    image.draft(None, (2 * size[0], 2 * size[1]))  # skips detail of a JPEG that is far larger than needed
    if math.prod(image.size) > _MAX_SCALED_PIXELS:
        raise PictureError(f"the picture is {measures.width} x {measures.height}: make it smaller")
    image.load()
    scaled = _rgb(image, size, Image.Resampling[resampling.upper()])
    turn = _TURNS.get(image.getexif().get(ExifTags.Base.Orientation, 1))
    return np.asarray(scaled if turn is None else scaled.transpose(turn))


def _rgb(image: Image.Image, size: tuple[int, int], resampling: Image.Resampling) -> Image.Image:
    """Returns the picture in RGB, scaled. Large copies are avoided: they would decide the peak of memory."""
    if image.mode.startswith("I"):  # 16 bits; Pillow would cut off values above 255
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    mode = "RGBA" if image.has_transparency_data else "RGB"
    whole = image if image.mode == mode else image.convert(mode)
    scaled = whole.resize(size, resampling)
    if mode == "RGB":
        return scaled
    picture = Image.new("RGB", size, _BACKGROUND)
    picture.paste(scaled, mask=scaled)
    return picture


def _measure_png(content: bytes) -> _Measures:
    num_frames, position = 1, 8
    for _ in range(_MAX_PARTS):
        length, kind = struct.unpack_from(">I4s", content, position)
        if kind == b"IEND":
            width, height = struct.unpack_from(">II", content, 16)
            return _Measures(width, height, num_frames)
        if kind == b"acTL":
            num_frames = max(1, *struct.unpack_from(">I", content, position + 8))
        position += 12 + length
    raise PictureError(f"the PNG file has more than {_MAX_PARTS} chunks")


def _measure_webp(content: bytes) -> _Measures:
    if content[12:16] == b"VP8X":
        width, height = (1 + int.from_bytes(content[start : start + 3], "little") for start in (24, 27))
    elif content[12:16] == b"VP8L":
        (bits,) = struct.unpack_from("<I", content, 21)
        width, height = 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    else:
        width, height = (side & 0x3FFF for side in struct.unpack_from("<HH", content, 26))
    num_frames, position = 0, 12
    for _ in range(_MAX_PARTS):
        if position + 8 > len(content):
            return _Measures(width, height, max(1, num_frames), _MAX_WEBP_PIXELS)
        num_frames += content[position : position + 4] == b"ANMF"
        (length,) = struct.unpack_from("<I", content, position + 4)
        position += 8 + length + length % 2
    raise PictureError(f"the WebP file has more than {_MAX_PARTS} chunks")


def _measure_gif(content: bytes) -> _Measures:
    # A frame may be larger than the screen that the header declares.
    width, height, flags = struct.unpack_from("<HHB", content, 6)
    num_frames, num_data_blocks, position = 0, 0, 13 + _gif_palette_bytes(flags)
    for _ in range(_MAX_PARTS):
        block = content[position : position + 1]
        if block == b",":
            left, top, across, down, flags = struct.unpack_from("<HHHHB", content, position + 1)
            width, height, num_frames = max(width, left + across), max(height, top + down), num_frames + 1
            position += 11 + _gif_palette_bytes(flags)
        elif block != b"!":
            if not num_frames:
                raise PictureError("the GIF file does not contain a picture")
            return _Measures(width, height, num_frames)
        elif content[position + 1] != _GIF_COMMENT and not content[position + 2]:
            raise PictureError("the GIF file has an empty extension")  # Pillow would skip what comes after it
        else:
            position += 2
        while length := content[position]:
            position += 1 + length
            num_data_blocks += 1
            if num_data_blocks > _MAX_GIF_DATA_BLOCKS:
                raise PictureError(f"the GIF file has more than {_MAX_GIF_DATA_BLOCKS} blocks of data")
        position += 1
    raise PictureError(f"the GIF file has more than {_MAX_PARTS} frames and extensions")


def _gif_palette_bytes(flags: int) -> int:
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _measure_jpeg(content: bytes) -> _Measures:
    # Pillow and libjpeg take the size from the headers before the first scan, and refuse a second size.
    width = height = num_components = kind = 0
    position, num_left = 2, _MAX_STRAY_BYTES
    for _ in range(_MAX_SEGMENTS):
        found = _JPEG_MARKER.search(content, position, position + num_left)
        if found is None:
            raise PictureError("the JPEG file is truncated or damaged: it does not contain a picture")
        num_left -= found.start() - position
        (length,) = struct.unpack_from(">H", content, found.end())
        if found[0] == _JPEG_SCAN:
            # As in libjpeg: the first scan has all components of the picture, or there are more of them.
            if kind in _JPEG_SEQUENTIAL and content[found.end() + 2] == num_components:
                return _Measures(width, height, max_pixels=_MAX_JPEG_PIXELS, is_scalable=True)
            if content.count(_JPEG_SCAN, found.start()) > _MAX_SCANS:
                raise PictureError(f"the JPEG file has more than {_MAX_SCANS} scans")
            return _Measures(width, height, max_pixels=_MAX_STAGED_JPEG_PIXELS)
        if found[1][0] in _JPEG_SIZES:
            kind = found[1][0]
            height, width, num_components = struct.unpack_from(">HHB", content, found.end() + 3)
        position = found.end() + length
    raise PictureError(f"the JPEG file has more than {_MAX_SEGMENTS} segments")


_KINDS = (
    _Kind("PNG", re.compile(rb"\x89PNG\r\n\x1a\n.{4}IHDR", re.DOTALL), _measure_png, PngImageFile),
    _Kind("JPEG", re.compile(rb"\xff\xd8\xff"), _measure_jpeg, JpegImageFile),
    _Kind("WebP", re.compile(rb"RIFF.{4}WEBPVP8[ LX]", re.DOTALL), _measure_webp, WebPImageFile),
    _Kind("GIF", re.compile(rb"GIF8[79]a"), _measure_gif, GifImageFile),
)
