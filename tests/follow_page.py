"""Does what a page of the documentation says, word by word: `python3 tests/follow_page.py docs/tutorial.md`.

It stops at the first that fails, and says how long the whole took.
"""

from __future__ import annotations

import shlex
import subprocess
import sys
import time

from pages import blocks_of, read_page


def script_of(page: str) -> str:
    """The page as a script for bash: its Python in one process, after the commands."""
    lines, python = ["set -euo pipefail"], []
    for block in blocks_of(read_page(page)):
        if block.title is not None:
            lines.append(f"cat >> {shlex.quote(block.title)} <<'END OF FILE'\n{block.text}END OF FILE")
        elif block.language == "bash":
            lines += [f"printf '%s\\n' {shlex.quote('$ ' + command)}\n{command}" for command in block.commands]
        elif block.language == "python":
            python.append(block.text)
    return "\n".join([*lines, "python - <<'END OF FILE'", *python, "END OF FILE", ""])


def main() -> None:
    began = time.monotonic()
    done = subprocess.run(["bash", "-s"], input=script_of(sys.argv[1]), text=True, check=False)
    print(f"{sys.argv[1]}: {'followed' if done.returncode == 0 else 'failed'} in {time.monotonic() - began:.0f} s")
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
