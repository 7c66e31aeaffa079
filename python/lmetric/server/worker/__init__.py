"""This process as one of several workers: shared memory, and the channel to the supervisor."""
