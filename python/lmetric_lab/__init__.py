"""The laboratory: simulations, studies, replays, what-if, advice and emulated engines.

It imports `lmetric`; `lmetric` never imports it, except by the names in `lmetric.__init__`, the
commands in `lmetric.cli.app`, and the processes of `serve --embedded`.
"""
