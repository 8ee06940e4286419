"""How long an engine takes to a first token when nothing stands before it, learnt online. Pure."""

from typing import Final

_WINDOW: Final = 24
_QUANTILE: Final = 5  # index into the sorted window: the fastest fifth
_DOWN: Final = 0.3  # part of an error that one sample below the prediction corrects
_UP: Final = 0.05  # the same above it, of an error that is taken for at most
_UP_MOST: Final = 0.1  # this part of the prediction: what waited must not pull much
_UNUSED: Final = 3  # the first samples teach and do not judge


class PrefillModel:
    """seconds = base + per_token x uncached prompt tokens, at the fast end of what is seen.

    Waiting in the engine only ever adds time, so samples below the prediction are believed at
    once and those above it little. Only when even the fastest fifth of a window was slower, the
    engine is slower and not merely busy, and the prediction follows.
    """

    def __init__(self) -> None:
        self.base_s = 0.0
        self.per_token_s = 0.0
        self._samples = 0
        self._usual_tokens = 500.0  # scale of the regression
        self._window: list[tuple[float, int, float]] = []  # ratio to the prediction, tokens, s

    @property
    def known(self) -> bool:
        """Whether enough was seen to judge by."""
        return self._samples >= _UNUSED

    @property
    def usual_tokens(self) -> float:
        """Uncached tokens of a usual prompt."""
        return self._usual_tokens

    def predict_s(self, tokens: int) -> float:
        """Return seconds for an uncached prompt of so many tokens."""
        return self.base_s + self.per_token_s * tokens

    def learn(self, tokens: int, seconds: float, *, alone: bool) -> None:
        """Take in one sample; `alone`: no other prompt was in work, so it had no head start."""
        seconds = max(seconds, 1e-5)
        self._usual_tokens += 0.05 * (tokens - self._usual_tokens)
        if not self._samples:
            self.per_token_s = 0.9 * seconds / max(tokens, 1)
            self.base_s = 0.1 * seconds
        self._samples += 1
        if not alone:
            return
        expected_s = self.predict_s(tokens)
        error_s = seconds - expected_s
        if error_s < 0:
            self._correct(tokens, _DOWN * error_s)
        else:
            self._correct(tokens, _UP * min(error_s, _UP_MOST * expected_s))
        self._window.append((seconds / self.predict_s(tokens), tokens, seconds))
        if len(self._window) >= _WINDOW:
            ratio, tokens, seconds = sorted(self._window)[_QUANTILE]
            self._window.clear()
            if ratio > 1:
                self._correct(tokens, seconds - self.predict_s(tokens))

    def _correct(self, tokens: int, error_s: float) -> None:
        """Take a normalised least-squares step of this size; neither term goes below 0."""
        relative = tokens / self._usual_tokens
        step = error_s / (1 + relative * relative)
        self.base_s = max(0.0, self.base_s + step)
        slope = self.per_token_s + step * relative / self._usual_tokens
        self.per_token_s = max(1e-9, slope)
