"""Requests of schemathesis name the served model, and want few answers, so that engines answer."""

import os

import schemathesis


@schemathesis.hook
def before_call(context, case, kwargs):
    body = case.body
    if not isinstance(body, dict):
        return
    if isinstance(body.get("model"), str):
        body["model"] = os.environ["CONFORMANCE_MODEL"]
    if type(body.get("n")) is int and body["n"] > 2:
        body["n"] = 2
