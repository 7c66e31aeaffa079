"""Codes of the router's own errors, with their statuses and meanings.

Documents need them, and messages about refused requests.
"""

from __future__ import annotations

from collections.abc import Mapping

# Codes of the router's own errors: statuses, and the meaning.
ERRORS: Mapping[str, tuple[str, str]] = {
    "invalid_api_key": ("401", "The API key is unknown, expired or revoked."),
    "invalid_token": ("401", "The JSON Web Token is not valid. The message has the reason."),
    "no_admin_token": ("403", "The page is closed: `admin.token` is not set."),
    "not_admin": ("403", "An API key does not open this page. Send the admin token."),
    "not_isolated": (
        "403",
        "The tenant is isolated, and the path does not accept `cache_salt`, or the body names media.",
    ),
    "engine_not_allowed": ("403", "`admin.allowed_engines` excludes the address of the added engine."),
    "model_not_found": ("404", "No engine serves the model, or the tenant may not use it."),
    "response_not_found": ("404", "The stored response is unknown, or another tenant made it."),
    "unknown_path": ("404", "The path does not exist. The message may name a similar path."),
    "endpoint_picker": ("404", "This router picks engines for a gateway. Send the request to the gateway."),
    "no_api_keys": ("409", "`/admin/keys`: requests need no key. Set `auth.keys_file`."),
    "no_state_folder": ("409", "`/admin/keys` stores keys in `state_folder`, which is not set."),
    "key_of_file": ("409", "`auth.keys_file` has the key. Remove it there."),
    "too_many_keys": ("409", "10,000 API keys have not expired."),
    "no_model": ("409", "The engine's model is not known yet."),
    "unfit": ("409", "The engine cannot have this role."),
    "engine_asleep": ("409", "The engine is asleep. Announce its weights after it wakes up."),
    "discovered": ("409", "A discovery source lists the engine and would add it again."),
    "other_version": ("409", "The other router runs another version, with another format of load messages."),
    "body_too_large": ("413", "The body exceeds `limits.max_body_bytes`."),
    "unsupported_content_encoding": ("415", "Send gzip, deflate or no content-encoding."),
    "websocket": ("426", "The router does not relay WebSocket. Send the request over HTTP."),
    "head_too_large": (
        "431",
        "The request line and header fields exceed 64 KiB, or there are more than 256 "
        "fields. The message names a field.",
    ),
    "gateway_configuration": ("500", "The gateway's `ext_proc` filter has a setting that does not work."),
    "router_broken": ("500", "The core failed. Restart the router."),
    "not_implemented": (
        "501",
        "The router does not support this: a transfer-encoding, `/v1/realtime` (WebSocket), audio with "
        "prefill/decode disaggregation, or Parquet without pyarrow.",
    ),
    "refused": ("502", "The last tried engine refused the connection."),
    "dns": ("502", "The last tried engine's host name does not resolve."),
    "tls": ("502", "The TLS connection to the last tried engine failed."),
    "unreachable": ("502", "The last tried engine is not reachable."),
    "reset": ("502", "The last tried engine closed the connection, or its answer was malformed."),
    "engine_error": ("502", "The last tried engine failed, or broke off its answer."),
    "answer_too_large": ("502", "After a KV transfer, the answer exceeds 64 MiB, or 16 MiB if it is parsed."),
    "workers": ("502", "A change under `/admin` is not made in all worker processes. Send it again."),
    "not_ready": ("503", "No engine can accept requests, or the router shuts down."),
    "no_engine": ("503", "No engine of the model is usable. The message has the reasons."),
    "status": (
        "503",
        "The engines refused the request, and no error answer of theirs can pass: the answer was an event, "
        "longer than 256 KiB, or incomplete.",
    ),
    "retry_budget": ("503", "An engine failed, and the model's retry budget allows no further retry now."),
    "failed_twice": ("502", "Two engines failed the request in the same way. It may be the cause."),
    "resources": ("503", "The router cannot open a connection to an engine."),
    "shutting_down": ("503", "The router shuts down."),
    "too_many": (
        "409, 503",
        "`limits.max_concurrent_requests` is reached, or the share of it of one client address or tenant "
        "(`max_client_share`), or too many routers exchange load.",
    ),
    "deadline": ("429", "The first token would come after its deadline (`admission`)."),
    "queue_full": ("429", "Too many requests wait, of the tenant or of all (`max_waiting`)."),
    "rate_limit_exceeded": ("429", "A budget of the tenant has no room (`tenants.NAME.budgets`)."),
    "unknown_slo_class": ("400", "The model has no class of the name in `x-slo-class`."),
    "caches_full": ("429", "The running agent programs fill the KV caches; retry after `retry-after`."),
    "too_many_bytes": ("503", "A limit on the bytes of request bodies is reached."),
    "too_many_invalid_tokens": ("429", "The client address sent too many tokens with invalid signatures."),
    "issuer_unreachable": ("503", "The key of a token is unknown, and its issuer's keys cannot be read now."),
    "replicas_unreachable": ("503", "Another router may know the stored response and cannot be asked now."),
    "too_many_searches": ("503", "64 requests, or 16 of the tenant, search other routers for responses."),
    "too_many_viewers": ("503", "16 viewers watch `/debug/live`. Close one."),
    "too_many_connections": ("503", "A limit on client connections is reached."),
    "timeout": ("504", "A time limit passed without an answer."),
    "http_version_not_supported": ("505", "Send HTTP/1.1."),
    "bad_configuration": ("400", "`POST /admin/reload`: the configuration is invalid. The old one stays."),
    "no_reload": ("409", "`POST /admin/reload`: the router has no configuration to read again."),
    "bad_policy": ("400", "The policy or a parameter is invalid."),
    "canary_state": ("409", "`/admin/canary`: the command is not possible in the state of the canary."),
}
