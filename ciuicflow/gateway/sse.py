"""What the gateway must know of a server-sent event stream while it passes. Pure."""

import re

# A chunk of nothing but comments and blank lines, with or without its chunked framing (WHATWG
# HTML, section 9.2.5). DeepSeek sends `: keep-alive` comments while a request waits.
_COMMENTS = re.compile(rb"(?:[0-9A-Fa-f]+\r\n)?(?::[^\n]*\n|\r?\n)*")


def is_only_comments(data: bytes) -> bool:
    """Whether these bytes of a stream say no more than that the connection is alive."""
    return _COMMENTS.fullmatch(data) is not None
