"""Paths and bodies of the pages for other routers."""

PATH = "/replicas"
KEYS_PAGE, STORED_PAGE = "/keys", "/stored"  # below `PATH`
KEYS_PATH, STORED_PATH = PATH + KEYS_PAGE, PATH + STORED_PAGE
CONTENT_TYPE = "application/octet-stream"
# Limit on the body of a message: 16,384 instances with long names and many numbers, and 10,000
# budgets.
MOST_MESSAGE_BYTES = 16 << 20
ID_DIGITS = 16  # of a router; the ID of a worker begins with that of its router
