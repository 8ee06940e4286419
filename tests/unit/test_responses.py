"""The gateway's own answers, the list of models, and what keeps a stream alive."""

import json

import pytest

from ciuicflow.gateway import models, responses
from ciuicflow.gateway.body import read_fields
from ciuicflow.gateway.headers import RequestHead
from ciuicflow.gateway.meter import is_only_comments
from ciuicflow.request import Outcome


def test_every_outcome_has_its_answer_or_none_on_purpose() -> None:
    assert set(responses.ANSWERS) == set(Outcome)


def test_an_error_has_openais_shape() -> None:
    answer = responses.ANSWERS[Outcome.UNKNOWN_MODEL]
    assert answer is not None
    error = json.loads(responses.error_body(answer, detail="`x`", param="model"))["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["param"], error["code"]) == ("model", "model_not_found")
    assert "`x`" in error["message"]


def test_retry_after_is_whole_seconds_and_never_zero() -> None:
    for given_s, sent in ((0.0, b"1"), (1.2, b"2"), (4.0, b"4")):
        assert b"\r\nRetry-After: " + sent + b"\r\n" in responses.build(
            503, b"{}", retry_after_s=given_s
        )


def test_the_answer_to_head_has_a_length_and_no_body() -> None:
    answer = responses.build(404, b"{}", head_only=True)
    assert b"Content-Length: 2\r\n" in answer
    assert answer.endswith(b"\r\n\r\n")


@pytest.mark.parametrize(
    ("target", "model"),
    [
        (b"/v1/models/deepseek-chat", "deepseek-chat"),
        (b"/models/deepseek-ai%2FDeepSeek-V3?x=1", "deepseek-ai/DeepSeek-V3"),
        (b"/v1/models/deepseek-ai/DeepSeek-V3", "deepseek-ai/DeepSeek-V3"),
        (b"/v1/models/", None),
        (b"/v1/models", None),
        (b"/v1/chat/completions", None),
    ],
)
def test_the_model_in_a_path(target: bytes, model: str | None) -> None:
    assert models.model_in_path(target) == model


@pytest.mark.parametrize(
    ("body", "model"),
    [
        (b'{"messages":[{"model":"inner"}],"model":"outer"}', "outer"),
        (b'{"messages":[]}', None),
        (b'{"model":null}', None),
        (b'{"model":5}', None),
        (b"[1]", None),
        (b"--boundary", None),
        (b"", None),
        (b'{"model":"\xff"}', None),
        (b"[" * 100_000, None),
        (b'{"x":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
        (b'{"model":' + b"[" * 100_000 + b"]" * 100_000 + b"}", None),
    ],
)
def test_the_model_in_a_body(body: bytes, model: str | None) -> None:
    assert read_fields(body).model == model


def test_lists_of_models_are_joined_by_id_with_their_unknown_fields() -> None:
    first = {"object": "list", "x": 1, "data": [{"id": "a", "own": 1}]}
    second = {"object": "list", "data": [{"id": "b"}, {"id": "a", "own": 2}]}
    assert json.loads(models.union([first, second])) == {
        "object": "list",
        "x": 1,
        "data": [{"id": "a", "own": 1}, {"id": "b"}],
    }


def test_only_a_plain_get_asks_for_the_list() -> None:
    def asks(start: bytes) -> bool:
        return models.is_model_list(RequestHead(start + b" HTTP/1.1\r\nHost: a\r\n\r\n"))

    assert asks(b"GET /v1/models")
    assert asks(b"GET /models?limit=2")
    assert not asks(b"HEAD /v1/models")
    assert not asks(b"GET /v1/models/x")


@pytest.mark.parametrize(
    ("data", "only"),
    [
        (b": keep-alive\n\n", True),
        (b"e\r\n: keep-alive\n\n\r\n", True),
        (b"\n\n", True),
        (b": a\n: b\r\n\r\n", True),
        (b"data: x\n\n", False),
        (b": a\ndata: x\n\n", False),
        (b"8\r\ndata: x\n\r\n", False),
        (b"x", False),
    ],
)
def test_comments_are_told_from_events(data: bytes, only: bool) -> None:
    assert is_only_comments(data) is only
