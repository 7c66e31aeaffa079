"""The table of all pages, in the order of the OpenAPI document."""

from lmetric.server.api.own_pages import Pages
from lmetric.server.http.pages import administration, debug, health, peers, sessions

_PARTS = (health, debug, administration, sessions, peers)
PAGES = Pages({path: page for part in _PARTS for path, page in part.PAGES.items()})
