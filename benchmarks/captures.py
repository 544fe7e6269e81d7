"""Record what training prints in a real terminal, as the SVG files of docs/terminal: `make captures`.

tmux is the terminal. Each capture is the text and colours that tmux shows, drawn by rich.
"""

import contextlib
import io
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.terminal_theme import DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI, TerminalTheme
from rich.text import Text

REPO = Path(__file__).parent.parent
BIN = Path(sys.executable).parent
THEMES = {"dark": DIMMED_MONOKAI, "light": DEFAULT_TERMINAL_THEME}
BAR = re.compile(r"training [^\w]*\d+/\d+.* left")
PREPARE = {"synthetic-clicks": "data/clicks", "synthetic-histories": "data/histories"}
TRAIN = {
    "dlrm": "recmill train configs/quickstart/dlrm.toml --run runs/dlrm --procs 2",
    "bert4rec": "recmill train configs/quickstart/bert4rec.toml --run runs/bert4rec",
}
RESULTS = "recmill results runs/dlrm runs/bert4rec"
MAX_SECONDS = 600.0


@contextlib.contextmanager
def terminal(directory: Path, width: int) -> Iterator[list[str]]:
    """Yield the tmux command of a new terminal of this width, whose shell prompts with "$ "."""
    tmux = ["tmux", "-L", f"recmill-captures-{width}"]
    shell = f"env PATH={BIN}:/usr/bin:/bin PS1='$ ' bash --norc --noprofile"
    subprocess.run([*tmux, "new-session", "-d", "-x", str(width), "-y", "60", "-c", str(directory), shell], check=True)
    try:
        yield tmux
    finally:
        subprocess.run([*tmux, "kill-server"], check=True)


def screen(tmux: list[str]) -> str:
    """Return the screen with its colours, without the empty lines below."""
    text = subprocess.run([*tmux, "capture-pane", "-e", "-p"], check=True, capture_output=True, text=True).stdout
    return text.rstrip() + "\n"


def captures(tmux: list[str], command: str) -> tuple[str, str]:
    """Type a command; return the first screen with a progress bar and a validation, and the screen at the end."""
    subprocess.run([*tmux, "send-keys", f"clear; {command}; echo exit $?", "Enter"], check=True)
    during, deadline = "", time.monotonic() + MAX_SECONDS
    while time.monotonic() < deadline:
        shown = screen(tmux)
        if found := re.search(r"^exit (\d+)\n", shown, flags=re.M):
            assert found[1] == "0", shown
            return during, shown[: found.start()]
        plain = Text.from_ansi(shown).plain
        if not during and "  validation  " in plain and "evaluating" not in plain and BAR.search(plain):
            during = shown
        time.sleep(0.1)
    raise TimeoutError(command)


def draw(text: str, width: int, title: str, theme: TerminalTheme) -> str:
    console = Console(record=True, width=width, file=io.StringIO(), force_terminal=True, highlight=False)
    console.print(Text.from_ansi(text.rstrip("\n")), soft_wrap=True)
    drawn = console.export_svg(title=title, theme=theme, unique_id="recmill")
    return re.sub(r"\s*@font-face \{.*?\}", "", drawn, flags=re.S)  # which would be loaded from the internet


def main() -> None:
    output = REPO / "docs" / "terminal"
    output.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder)
        (directory / "configs").symlink_to(REPO / "configs")
        for name, path in PREPARE.items():
            subprocess.run([BIN / "recmill", "prepare", name, "--output", path], cwd=directory, check=True)
        for (model, command), (width, mode) in zip(TRAIN.items(), [(80, "dark"), (120, "light")], strict=True):
            with terminal(directory, width) as tmux:
                for when, text in zip(("during", "after"), captures(tmux, command), strict=True):
                    (output / f"{model}-{width}-{when}.svg").write_text(draw(text, width, command, THEMES[mode]))
        with terminal(directory, 80) as tmux:
            _, text = captures(tmux, RESULTS)
            (output / "results-80.svg").write_text(draw(text, 80, RESULTS, THEMES["light"]))


if __name__ == "__main__":
    main()
