"""Draw the pictures of docs/observing.md from a real run: `make pictures`. It trains as in the README, for seconds."""

import subprocess
import sys
import tempfile
from pathlib import Path

from tests.chromium import browser

REPO = Path(__file__).parent.parent
PROGRAM = Path(sys.executable).with_name("recmill")
COMMANDS = (
    "prepare synthetic-clicks --output data/clicks",
    "train quickstart/dlrm --run runs/dlrm --procs 2 --set eval.every_steps=40 --set train.log_every_steps=10",
    "report runs/dlrm",
)
WIDTH = 1240
# By file: the scheme of colours, and the ids of the headings from which and before which it shows the page.
PICTURES = {
    "report": ("light", "", "where-the-time-went"),
    "time": ("dark", "where-the-time-went", "machine"),
    "timeline": ("light", "timeline", "tables"),
}


def main() -> None:
    """Write docs/pictures/NAME.png for each of PICTURES."""
    target = REPO / "docs" / "pictures"
    target.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            subprocess.run([str(PROGRAM), *command.split()], cwd=folder, check=True)
        page = Path(folder) / "runs/dlrm/report.html"
        page.write_text(page.read_text(encoding="utf-8").replace(f"{folder}/", ""), encoding="utf-8")
        with browser(Path(folder)) as tab:
            for name, (scheme, first, last) in PICTURES.items():
                tab.open(page, WIDTH, scheme)
                top, bottom = (
                    tab.value(f"document.getElementById('{heading}')?.getBoundingClientRect().top ?? 0")
                    for heading in (first, last)
                )
                tab.screenshot(target / f"{name}.png", top, bottom - top - 24)


if __name__ == "__main__":
    main()
