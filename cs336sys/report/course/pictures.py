"""Pictures of the write-up as small PNG files."""

import io
import tempfile
from pathlib import Path

from cs336sys.report.course.document import Picture

# Lines, bars and text on white: more colours are not told apart, and cost half of the bytes again.
_COLOURS = 64


def drawn(picture: Picture) -> bytes:
    """The PNG file of a picture.

    Raises:
        ImportError: matplotlib is missing.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "picture.png")
        picture.draw(path)
        return _compact(path.read_bytes())


def _compact(content: bytes) -> bytes:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as image:
        flat = Image.new("RGB", image.size, "white")
        flat.paste(image, mask=image.getchannel("A") if image.mode == "RGBA" else None)
    small = io.BytesIO()
    flat.quantize(_COLOURS, dither=Image.Dither.NONE).save(small, "png", optimize=True)
    return min(content, small.getvalue(), key=len)
