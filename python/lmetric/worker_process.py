"""``python -m lmetric.worker_process DESCRIPTOR VERSION``: a worker process of ``serve``."""

from lmetric.lean_imports import own_process

if __name__ == "__main__":
    with own_process():
        from lmetric.server.process import main

    main()
