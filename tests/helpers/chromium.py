"""A headless Chromium for the tests of the interactive page. As a script it installs one, without root.

npm's package ``@sparticuz/chromium`` holds the browser itself, for Linux on x86-64, with libraries and fonts
that small containers lack. It is unpacked into the environment whose Python runs this.
"""

import os
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

PACKAGE = "@sparticuz/chromium@147.0.0"

BIN = Path(sys.prefix, "bin")
PATH = f"{BIN}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
"""Programs of the environment come first: its ``npm`` is there where the machine has none."""

CHROMIUM = shutil.which("chromium", path=PATH)

_UNPACK = """
const { createBrotliDecompress } = require("zlib"), { createReadStream, createWriteStream } = require("fs");
const [packed, unpacked] = process.argv.slice(1);
createReadStream(packed).pipe(createBrotliDecompress()).pipe(createWriteStream(unpacked));
"""

_START = """#!/bin/sh
folder={folder}
export LD_LIBRARY_PATH="${{LD_LIBRARY_PATH:+$LD_LIBRARY_PATH:}}$folder/lib"
[ -e /etc/fonts/fonts.conf ] || export FONTCONFIG_PATH="$folder"
exec "$folder/headless" "$@"
"""


def install() -> None:
    """Unpack Chromium, its libraries and fonts, and write a ``chromium`` that starts it.

    Raises CalledProcessError if npm cannot fetch it.
    """
    folder, start = BIN.parent / "chromium", BIN / "chromium"
    with tempfile.TemporaryDirectory() as fetched:
        _run("npm", "install", "--prefix", fetched, "--ignore-scripts", "--fetch-retries", "1", PACKAGE)
        folder.mkdir(exist_ok=True)
        packed = Path(fetched, "node_modules", "@sparticuz", "chromium", "bin")
        _run("node", "-e", _UNPACK, str(packed / "chromium.br"), str(folder / "headless"))
        for name in ("al2023", "fonts"):
            archive = Path(fetched, f"{name}.tar")
            _run("node", "-e", _UNPACK, str(packed / f"{name}.tar.br"), str(archive))
            shutil.unpack_archive(archive, folder)
    (folder / "headless").chmod(0o755)
    start.write_text(_START.format(folder=folder))
    start.chmod(0o755)


def _run(program: str, *arguments: str) -> None:
    found = shutil.which(program, path=PATH) or program
    subprocess.run(
        [found, *arguments], check=True, env={**os.environ, "PATH": PATH}, stdout=subprocess.DEVNULL
    )


if __name__ == "__main__" and CHROMIUM is None:
    try:
        if (sys.platform, platform.machine()) != ("linux", "x86_64"):
            raise OSError(f"none is packaged for {sys.platform} on {platform.machine()}")
        install()
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"no Chromium, which the tests of the page need: {error}; install `chromium`", file=sys.stderr)
