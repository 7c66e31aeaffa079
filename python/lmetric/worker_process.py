"""``python -m lmetric.worker_process DESCRIPTOR VERSION``: a worker process of ``serve``."""

from lmetric.lean_imports import import_structlog, uncollected

if __name__ == "__main__":
    with uncollected():
        import_structlog()
        from lmetric.server.process import main

    main()
