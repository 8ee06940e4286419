"""One request's part at an endpoint, as the ledger follows it."""

from ciuicflow.flowcontrol.cost import Cost


class Flight:
    """What is known of it. A plain class: one is made and written to for every request."""

    alone = False
    """Nothing was in line when it came."""
    front_s: float | None = None
    """Since when nothing stands before it."""
    serving = False
    last_s = 0.0
    """When its last token came."""
    step = 0
    """The engine's, when its last token came."""
    tokens = 0
    """Put out so far."""

    def __init__(
        self,
        cost: Cost,
        itl_target_s: float,
        placed_s: float,
        share: float,
        *,
        streams: bool,
        lines_up: bool,
        expected_tokens: int,
    ) -> None:
        """Take `share`, the part of the limits that it might fill, and the tokens expected of it.

        `streams`: its tokens will be seen; `lines_up`: it stands in line until the first.
        """
        self.cost = cost
        self.itl_target_s = itl_target_s
        self.placed_s = placed_s
        self.share = share
        self.streams = streams
        self.lines_up = lines_up
        self.expected_tokens = expected_tokens
