"""The data of a page, as it is embedded there."""

import base64
import gzip
import json
import re
from typing import Any


def embedded(html: str) -> Any:
    """What the page knows of its steps. In place of a column of numbers is where it is found."""
    found = re.search(r'<script type="text/plain" id="data">([A-Za-z0-9+/=]*)</script>', html)
    assert found
    packed = gzip.decompress(base64.b64decode(found[1]))
    return json.loads(packed[4 : 4 + int.from_bytes(packed[:4], "little")])
