"""Mock engines that cost almost nothing: OpenAI's answers, plain and streamed, on raw connections.

Plain answers come at once. A streamed token comes every 5 ms, or as `--token-seconds` says. It
carries the sender's monotonic clock as its text, so a reader on the same machine gets its travel
time. Token ids are sent on request, as vLLM does: those of the prompt in the first event, too. One
process serves all given ports.

    python bench/http/mock.py [--nixl] [--token-seconds 0.005] PORT...

With --nixl they transfer prompts as vLLM's NIXL connector does, as far as a router can see.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import time

import uvloop

TOKEN_SECONDS = 0.005
# Streams are spread over the time of a token, as engines' steps are: in parts of 10 ms at most.
PHASES, PHASE_SECONDS = 5, 0.01
MAX_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
PLAIN = (
    b'{"id":"chatcmpl-1","object":"chat.completion","created":1700000000,"model":"mock","choices":'
    b'[{"index":0,"message":{"role":"assistant","content":"ok"},"logprobs":null,"finish_reason":"stop"}],'
    b'"usage":{"prompt_tokens":%d,"completion_tokens":1,"total_tokens":%d,'
    b'"prompt_tokens_details":{"cached_tokens":0}}}'
)
EVENT = (
    b'data: {"id":"chatcmpl-1","object":"chat.completion.chunk","created":1700000000,"model":"mock",'
    b'"choices":[{"index":0,'
)
CHUNK = EVENT + b'"delta":{"content":"%d"},"logprobs":null,"finish_reason":null}]}\n\n'
CHUNK_WITH_ID = CHUNK.replace(b"}]}\n\n", b',"token_ids":[1465]}]}\n\n')
WANTS_IDS = re.compile(rb'"return_token_ids": ?true')
BYTES_PER_TOKEN = 4
OPENING = EVENT[:-1].replace(b'"choices":[{"index":0', b'"prompt_token_ids":[%s],"choices":[{"index":0') + (
    b',"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]}\n\n'
)
LAST = EVENT + b'"delta":{},"logprobs":null,"finish_reason":"length"}]}\n\n'
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream; charset=utf-8\r\ntransfer-encoding: chunked\r\n\r\n"
)
PARAMS = (
    b'{"do_remote_prefill":true,"do_remote_decode":false,"remote_block_ids":[[%s]],"remote_engine_id":"decd41b3",'
    b'"remote_request_id":"chatcmpl-1-0-84d3f2e2","remote_host":"127.0.0.1","remote_port":10103,"tp_size":1,'
    b'"remote_num_tokens":200,"transfer_mode":"pull"}'
) % b",".join(b"%d" % block for block in range(1000, 1064))
MODELS = (
    b'{"object":"list","data":[{"id":"mock","object":"model","created":1700000000,"owned_by":"mock",'
    b'"max_model_len":131072}]}'
)
METRICS = b"".join(
    b'# TYPE vllm:%s gauge\nvllm:%s{model_name="mock"} 0\n' % (name, name)
    for name in (b"num_requests_running", b"num_requests_waiting", b"kv_cache_usage_perc")
)
INFO = b'{"model_path":"mock","served_model_name":"mock","is_generation":true,"version":"0.0.0"}'
PAGES = {
    b"/health": (b"text/plain", b""),
    b"/health_generate": (b"text/plain", b""),
    b"/v1/models": (b"application/json", MODELS),
    b"/metrics": (b"text/plain; version=0.0.4", METRICS),
    b"/version": (b"application/json", b'{"version":"0.0.0"}'),
    b"/get_model_info": (b"application/json", INFO),
    b"/model_info": (b"application/json", INFO),
    b"/get_server_info": (b"application/json", INFO),
    b"/server_info": (b"application/json", INFO),
}


def answer(status: bytes, kind: bytes, body: bytes) -> bytes:
    """A whole HTTP answer."""
    return b"HTTP/1.1 %s\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n%s" % (
        status,
        kind,
        len(body),
        body,
    )


class Streams:
    """All streams of the process, each in a phase of the time of a token."""

    def __init__(self, loop: asyncio.AbstractEventLoop, token_seconds: float) -> None:
        self.loop = loop
        phases = max(PHASES, round(token_seconds / PHASE_SECONDS))
        self.phases: list[dict[Engine, int]] = [{} for _ in range(phases)]
        self.phase_seconds = token_seconds / phases
        self.step = 0
        self.due = loop.time()
        self.run()

    def run(self) -> None:
        """Sends a token on each stream of the due phase."""
        phase = self.phases[self.step % len(self.phases)]
        for engine, left in list(phase.items()):
            event = engine.chunk % time.monotonic_ns()
            if left > 1:
                phase[engine] = left - 1
                engine.transport.write(b"%x\r\n%s\r\n" % (len(event), event))
            else:
                del phase[engine]
                event += LAST + b"data: [DONE]\n\n"
                engine.transport.write(b"%x\r\n%s\r\n0\r\n\r\n" % (len(event), event))
        self.step += 1
        self.due += self.phase_seconds
        self.loop.call_at(self.due, self.run)


class Engine(asyncio.Protocol):
    """One connection: one request at a time, answered in order."""

    def __init__(self, streams: Streams) -> None:
        self.streams = streams
        self.buffer = b""
        self.need = 0
        self.chunk = CHUNK

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the loop."""
        self.transport: asyncio.WriteTransport = transport  # type: ignore[assignment]

    def connection_lost(self, exc: Exception | None) -> None:
        """Called by the loop: the client left, so its stream ends."""
        for phase in self.streams.phases:
            phase.pop(self, None)

    def data_received(self, data: bytes) -> None:
        """Called by the loop."""
        buffer = self.buffer + data if self.buffer else data
        while len(buffer) >= max(self.need, 1):
            end = buffer.find(b"\r\n\r\n") + 4
            if end < 4:
                break
            head = buffer[:end].lower()
            at = head.find(b"content-length:")
            length = int(head[at + 15 : head.find(b"\r", at)]) if at >= 0 else 0
            if at < 0 and b"transfer-encoding" in head:
                self.transport.write(answer(b"411 Length Required", b"text/plain", b""))
                self.transport.close()
                return
            self.need = end + length
            if len(buffer) < self.need:
                break
            self.request(buffer[: head.find(b" http/")], buffer[end : self.need])
            buffer, self.need = buffer[self.need :], 0
        self.buffer = buffer

    def request(self, line: bytes, body: bytes) -> None:
        """Answers one request, or begins its stream."""
        method, _, path = line.partition(b" ")
        if method == b"POST" and path in (b"/v1/chat/completions", b"/v1/completions"):
            if b'"stream":true' in body or b'"stream": true' in body:
                asked = MAX_TOKENS.search(body)
                self.transport.write(STREAM_HEAD)
                self.chunk = CHUNK
                if WANTS_IDS.search(body):
                    self.chunk = CHUNK_WITH_ID
                    opening = OPENING % b",".join([b"1465"] * (len(body) // BYTES_PER_TOKEN))
                    self.transport.write(b"%x\r\n%s\r\n" % (len(opening), opening))
                phase = min(self.streams.phases, key=len)
                phase[self] = int(asked[1]) if asked else 16
                return
            tokens = len(body) // 4
            self.transport.write(answer(b"200 OK", b"application/json", PLAIN % (tokens, tokens + 1)))
            return
        page = PAGES.get(path.partition(b"?")[0])
        if page is None:
            self.transport.write(
                answer(b"404 Not Found", b"application/json", b'{"error":{"message":"no such path"}}')
            )
        else:
            self.transport.write(answer(b"200 OK", *page))


async def main(ports: list[int], token_seconds: float = TOKEN_SECONDS) -> None:
    """Serves until killed."""
    loop = asyncio.get_running_loop()
    streams = Streams(loop, token_seconds)
    servers = [
        await loop.create_server(lambda: Engine(streams), "127.0.0.1", port, backlog=1024) for port in ports
    ]
    await asyncio.gather(*(server.serve_forever() for server in servers))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nixl", action="store_true")
    parser.add_argument("--token-seconds", type=float, default=TOKEN_SECONDS)
    parser.add_argument("ports", type=int, nargs="+")
    given = parser.parse_args()
    if given.nixl:
        PLAIN = PLAIN[:-1] + b',"kv_transfer_params":%s}' % PARAMS
        PAGES[b"/metrics"] = (PAGES[b"/metrics"][0], METRICS + b"vllm:nixl_num_failed_transfers_total 0\n")
    uvloop.run(main(given.ports, given.token_seconds))
