"""Event streams as real servers send them, down to their odd fields and spacing."""

DEEPSEEK = """\
: keep-alive

: keep-alive

data: {"id":"a1","object":"chat.completion.chunk","created":1,"model":"deepseek-reasoner",\
"system_fingerprint":"fp_1","choices":[{"index":0,"delta":{"role":"assistant","content":null,\
"reasoning_content":""},"logprobs":null,"finish_reason":null}]}

data: {"id":"a1","choices":[{"index":0,"delta":{"content":null,"reasoning_content":"让我想想 🤔"}}]}

data: {"id":"a1","choices":[{"index":0,"delta":{"content":"答案","reasoning_content":null}}]}

data: {"id":"a1","choices":[{"index":0,"delta":{"content":""},"finish_reason":"stop"}],\
"usage":{"prompt_tokens":9,"completion_tokens":2,"total_tokens":11,"prompt_cache_hit_tokens":0,\
"prompt_cache_miss_tokens":9,"completion_tokens_details":{"reasoning_tokens":1}}}

data: [DONE]

"""

VLLM = """\
data: {"id":"c-1","object":"chat.completion.chunk","choices":[{"index":0,"delta":\
{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}],"prompt_token_ids":null}

data: {"id":"c-1","choices":[{"index":0,"delta":{"content":""},"token_ids":null}]}

data: {"id":"c-1","choices":[{"index":0,"delta":{"content":"é"}}]}

data: {"id":"c-1","choices":[],"usage":{"prompt_tokens":4,"total_tokens":6,"completion_tokens":2}}

data: [DONE]

"""

SGLANG = """\
data: {"id":"s","choices":[{"index":0,"delta":{"role":"assistant","content":"",\
"reasoning_content":null,"tool_calls":null},"finish_reason":null,"matched_stop":null}],"usage":null}

data: {"id":"s","choices":[{"index":0,"delta":{"content":"x"},"matched_stop":1}]}

data: [DONE]

"""

# Allowed by the event stream's own grammar: all three line ends, no space, several data lines, a
# byte order mark, event and retry fields, and a last event that the end cuts off.
GRAMMAR = (
    "\ufeffevent: message\r\nid: 1\r\ndata: one\r\ndata: two\r\n\r\n"
    "data:no space\r\rretry: 10\n:\n\ndata\n\ndata: [DONE]\n\ndata: after the end\n\n"
    "data: cut off"
)

EVENT_STREAMS = {
    "deepseek": DEEPSEEK.encode(),
    "vllm": VLLM.encode(),
    "sglang": SGLANG.encode(),
    "grammar": GRAMMAR.encode(),
}
