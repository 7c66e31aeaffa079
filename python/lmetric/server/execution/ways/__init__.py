"""The ways of running a request, one module each: generators without I/O.

A way yields the steps that engines shall run, and gets their answers: its place in the code is the
state of the request. ``attempt, flags = yield step`` sends a step, and goes on when its answer
begins; a step with the reader "whole" goes on at the end of its answer. ``yield None`` waits for
the next event. Failures are exceptions, raised where the way waits:

- `EngineLost`: the engine failed or declined. `execution.run` sends the segment to the next engine.
- `NoTransfer`: the KV transfer of the step cannot be used. The segment runs without it.
- `OtherEngine`: a gateway has the answer from another engine, which gets the segment.
- `SwitchTo`: a migration is ready, and its target takes over.
- `TimeIsUp`: the timer of the way is over (hedge, copy).
- `Ended`: the request ends with this error.
"""
