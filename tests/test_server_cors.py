"""Cross-origin requests: the web pages that may call the API from a browser."""

from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from lmetric.config import ServerConfig
from server_world import SSE, STREAM_TAIL, FakeEngine, World, chunk, plain, says, token, usage, world

PAGE = "https://chat.example.com"
ENGINES_OWN = b"access-control-allow-origin: *\r\nAccess-Control-Allow-Credentials: true\r\n"
ANSWER = {"choices": [{"index": 0, "text": "x", "finish_reason": "length"}], "usage": usage()}
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\n%stransfer-encoding: chunked\r\n\r\n" % (
    SSE,
    ENGINES_OWN,
)


def with_own_fields() -> FakeEngine:
    """An engine that allows every origin, as vLLM does by default."""
    return FakeEngine(behave=says(plain(200, ANSWER, ENGINES_OWN), then="keep"))


async def options(it: World, path: str, **headers: str) -> tuple[int, dict[str, str]]:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    async with it.client.options(it.url + path, headers=named) as response:
        assert await response.read() == b"" or response.status != 204
        return response.status, {name.lower(): value for name, value in response.headers.items()}


ASKS = {
    "access_control_request_method": "POST",
    "access_control_request_headers": "authorization,content-type",
}


async def test_preflights_of_listed_origins_are_answered() -> None:
    """UX, section 3, CORS: OPTIONS got a 405, which broke browser apps for vLLM."""
    async with world(1, cors={"origins": [PAGE]}) as it:
        for path, method in (
            ("/v1/chat/completions", "POST"),
            ("/v1/completions", "POST"),
            ("/v1/models", "GET"),
            ("/v1/models/tiny", "GET"),
        ):
            status, headers = await options(it, path, origin=PAGE, **ASKS)
            assert (status, headers["access-control-allow-origin"]) == (204, PAGE)
            assert headers["access-control-allow-methods"] == method
            assert headers["access-control-allow-headers"] == "authorization,content-type"
            assert int(headers["access-control-max-age"]) > 0
            assert headers["vary"] == "Origin"
        # Web pages may not use the router's own pages, nor may other origins use the API.
        for path in ("/metrics", "/debug/engines", "/admin/engines", "/v1/nothing"):
            status, headers = await options(it, path, origin=PAGE, **ASKS)
            assert status >= 400
            assert not any(name.startswith("access-control-") for name in headers)
        for origin in ("https://evil.example", f"{PAGE}.evil.example", "http://chat.example.com", "null"):
            status, headers = await options(it, "/v1/completions", origin=origin, **ASKS)
            assert (status, headers["allow"]) == (405, "POST")
            assert "access-control-allow-origin" not in headers
        # Requests that are not preflights are unchanged.
        assert (await options(it, "/v1/completions", origin=PAGE))[0] == 405
        assert (await options(it, "/v1/completions"))[0] == 405
        status, headers = await options(
            it, "/v1/completions", origin=PAGE, **ASKS | {"access_control_request_headers": 'a"b'}
        )
        assert (status, "access-control-allow-headers" in headers) == (204, False)


async def test_preflights_need_no_key(tmp_path: Any) -> None:
    """UX, section 3, CORS: browsers send preflights without credentials."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("secret: team")
    async with world(1, cors={"origins": [PAGE]}, auth={"keys_file": keys}) as it:
        assert (await options(it, "/v1/completions", origin=PAGE, **ASKS))[0] == 204
        status, headers, _ = await it.post(headers={"origin": PAGE})
        assert (status, headers["access-control-allow-origin"]) == (401, PAGE)


async def test_answers_name_the_listed_origin() -> None:
    """UX, section 3, CORS: plain answers, streams, errors of engines and of the router."""
    async with world([with_own_fields()], cors={"origins": [PAGE, "http://localhost:3000"]}) as it:
        engine = it.engines[0]
        seen = []

        async def asked(body: Any = None, **how: Any) -> dict[str, str]:
            status, headers, got = await it.post(body, **how)
            seen.append(status)
            assert headers["access-control-allow-origin"] == how["headers"]["origin"]
            assert "x-lmetric-decision" in headers["access-control-expose-headers"]
            assert "access-control-allow-credentials" not in headers
            assert headers["vary"] == "Origin"
            assert got
            return headers

        listed = {"headers": {"origin": PAGE}}
        await asked(**listed)
        await asked(headers={"Origin": "http://localhost:3000"} | {"origin": "http://localhost:3000"})
        engine.behave = says(STREAM_HEAD, chunk(token("a", "length")) + STREAM_TAIL, then="keep")
        headers = await asked({"model": "tiny", "prompt": "x", "stream": True}, **listed)
        assert headers["transfer-encoding"] == "chunked"
        engine.behave = says(plain(400, {"error": {"message": "too long"}}, ENGINES_OWN), then="keep")
        await asked(**listed)
        await asked(b"{", **listed)
        await asked({"model": "no", "prompt": "x"}, **listed)
        engine.behave = says(plain(503, {"error": {"message": "busy"}}, ENGINES_OWN), then="keep")
        await asked(**listed)
        assert seen == [200, 200, 200, 400, 400, 404, 503]
        for path in ("/v1/models", "/v1/completions", "/v1/models/none"):
            async with it.client.get(it.url + path, **listed) as response:
                assert response.headers["access-control-allow-origin"] == PAGE
                assert response.headers["vary"] == "Origin"


async def test_other_origins_get_no_permission() -> None:
    """UX, section 3, CORS: the router's list replaces engines' own CORS fields."""
    async with world([with_own_fields()], cors={"origins": [PAGE]}) as it:
        for headers in ({"origin": "https://evil.example"}, {"origin": ""}, {}):
            status, got, _ = await it.post(headers=headers)
            assert (status, got["vary"]) == (200, "Origin")
            assert not any(name.startswith("access-control-") for name in got)
        async with it.client.get(it.url + "/v1/models", headers={"origin": "null"}) as response:
            assert "access-control-allow-origin" not in response.headers


async def test_every_origin_if_that_is_written() -> None:
    """UX, section 3, CORS: `*` must be written explicitly."""
    async with world(1, cors={"origins": ["*"]}) as it:
        assert (await options(it, "/v1/completions", origin=PAGE, **ASKS))[1][
            "access-control-allow-origin"
        ] == "*"
        _, headers, _ = await it.post(headers={"origin": PAGE})
        assert headers["access-control-allow-origin"] == "*"


async def test_cors_is_off_by_default() -> None:
    """UX, section 3, CORS: without the setting, engines' fields pass, and preflights get 405."""
    async with world([with_own_fields()]) as it:
        _, headers, _ = await it.post(headers={"origin": PAGE})
        assert headers["access-control-allow-origin"] == "*"
        assert "vary" not in headers
        status, headers = await options(it, "/v1/completions", origin=PAGE, **ASKS)
        assert (status, "access-control-allow-origin" in headers) == (405, False)


async def test_a_request_that_aiohttp_reads_is_allowed_alike() -> None:
    """UX, section 3, CORS: chunked bodies take another path through the router."""

    async def parts() -> Any:
        yield orjson.dumps({"model": "tiny", "prompt": "x"})

    async with (
        world([with_own_fields()], cors={"origins": [PAGE]}) as it,
        it.client.post(it.url + "/v1/completions", data=parts(), headers={"origin": PAGE}) as response,
    ):
        assert response.status == 200
        assert response.headers.getall("access-control-allow-origin") == [PAGE]


@pytest.mark.parametrize("origin", ["chat.example.com", "https://a/", "https://a/path", "https://u@a", ""])
def test_an_origin_is_a_scheme_and_a_host(origin: str) -> None:
    """UX, section 3, CORS: values that browsers never send as an origin are refused at start."""
    with pytest.raises(ValidationError, match="an origin looks like https://host"):
        ServerConfig.model_validate({"cors": {"origins": [origin]}})
