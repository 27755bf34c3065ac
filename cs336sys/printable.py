"""Text of strangers without the characters that command a terminal instead of being seen. Plain text, no torch."""

import re

# C0 but for tab and newline, DEL, C1; marks, overrides and isolates that turn the direction of what follows; separators
# that some programs take for newlines; tags, which nothing shows; halves of surrogate pairs, which no file can hold.
_UNSEEN = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ufeff\ud800-\udfff\U000e0000-\U000e007f]"
)


def printable(text: str) -> str:
    """The text with control characters spelled out: ESC becomes ``\\x1b``. Tabs and newlines stay."""
    if text.isascii() and text.isprintable():
        return text
    return _UNSEEN.sub(_spelled, text.replace("\r\n", "\n"))


def _spelled(found: re.Match[str]) -> str:
    code = ord(found[0])
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
