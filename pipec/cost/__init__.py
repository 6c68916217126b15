"""What nodes take and hold: symbolic sizes, FLOPs, bytes moved and seconds, and measured profiles.

Read ``symbols``, then ``formulas`` with its ``tables``. ``profile`` holds measured times, and ``fingerprint``
tells which graph they are of.
"""
