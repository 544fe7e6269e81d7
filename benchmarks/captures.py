"""Record what commands print in a real terminal, as the SVG files of docs/terminal: `make captures`.

tmux is the terminal, 80 and 120 columns wide. Each capture is the text and colours that tmux shows, drawn by rich, with
the colours of a light and of a dark terminal: a browser chooses those that its user prefers.
"""

import contextlib
import io
import re
import shutil
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
BAR = re.compile(r"training [^\w]*\d+/\d+.* left")
PREPARE = "recmill prepare synthetic-clicks --output data/clicks"
PREPARE_HISTORIES = "recmill prepare synthetic-histories --output data/histories"
TRAIN = {
    "dlrm": "recmill train configs/quickstart/dlrm.toml --run runs/dlrm --procs 2",
    "bert4rec": "recmill train configs/quickstart/bert4rec.toml --run runs/bert4rec",
}
AFTER = {
    "evaluate": "recmill evaluate runs/bert4rec",
    "recommend": "recmill recommend runs/bert4rec --users 7",
    "results": "recmill results runs/dlrm runs/bert4rec",
    "plot": "recmill plot runs/dlrm --output curves.svg",
    "checkpoints": "recmill checkpoint list runs/dlrm",
    "doctor": "recmill doctor",
    "error": "recmill train configs/quickstart/dlrm.toml --run runs/new --set train.num_stpes=5",
    "interrupted": "recmill train configs/quickstart/dlrm.toml --run runs/new",  # with Ctrl-C after some steps
}
EXIT_CODES = {"error": 2, "interrupted": 130}
WIDTHS = (80, 120)
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


def captures(tmux: list[str], command: str, exit_code: int = 0) -> tuple[str, str]:
    """Type a command; return the first screen with a progress bar and a validation, and the screen at the end.

    A command that is expected to exit with 130 gets Ctrl-C at the first progress bar.
    """
    subprocess.run([*tmux, "send-keys", f"clear; {command}; echo exit $?", "Enter"], check=True)
    during, deadline, is_stopped = "", time.monotonic() + MAX_SECONDS, False
    while time.monotonic() < deadline:
        shown = screen(tmux)
        if found := re.search(r"^exit (\d+)\n", shown, flags=re.M):
            assert found[1] == str(exit_code), shown
            return during, shown[: found.start()]
        plain = Text.from_ansi(shown).plain
        if not during and "  validation  " in plain and "evaluating" not in plain and BAR.search(plain):
            during = shown
        if exit_code == 130 and not is_stopped and BAR.search(plain):
            subprocess.run([*tmux, "send-keys", "C-c"], check=True)
            is_stopped = True
        time.sleep(0.1)
    raise TimeoutError(command)


def draw(text: str, width: int, title: str) -> str:
    """Return an SVG with the colours of a light terminal, and rules that replace them where dark ones are preferred."""
    light, dark = (_drawn(text, width, title, theme) for theme in (DEFAULT_TERMINAL_THEME, DIMMED_MONOKAI))
    paper = re.search(r'<rect fill="(.*?)" stroke="(.*?)"', dark)
    ink = re.search(r'class="recmill-title" fill="(.*?)"', dark)
    assert paper and ink
    rules = [f".recmill-paper {{ fill: {paper[1]}; stroke: {paper[2]} }}", f".recmill-title {{ fill: {ink[1]} }}"]
    rules += re.findall(r"\.recmill-r\d+ \{.*?\}", dark)
    media = "\n".join(["    @media (prefers-color-scheme: dark) {", *(f"    {rule}" for rule in rules), "    }"])
    light = light.replace("<rect fill=", '<rect class="recmill-paper" fill=', 1)
    return light.replace("    </style>", f"{media}\n    </style>", 1)


def _drawn(text: str, width: int, title: str, theme: TerminalTheme) -> str:
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
        subprocess.run([BIN / "recmill", *PREPARE_HISTORIES.split()[1:]], cwd=directory, check=True)

        def record(name: str, command: str, width: int, exit_code: int = 0) -> None:
            with terminal(directory, width) as tmux:
                screens = captures(tmux, command, exit_code)
            for when, text in zip(("during", "after"), screens, strict=True):
                if text and (name in TRAIN or when == "after"):
                    file = f"{name}-{width}-{when}.svg" if name in TRAIN else f"{name}-{width}.svg"
                    (output / file).write_text(draw(text, width, command))

        for width in WIDTHS:
            shutil.rmtree(directory / "data" / "clicks", ignore_errors=True)
            record("prepare", PREPARE, width)
        for model, command in TRAIN.items():
            for width in WIDTHS:
                shutil.rmtree(directory / "runs" / model, ignore_errors=True)
                record(model, command, width)
        for name, command in AFTER.items():
            for width in WIDTHS:
                shutil.rmtree(directory / "runs" / "new", ignore_errors=True)
                record(name, command, width, EXIT_CODES.get(name, 0))


if __name__ == "__main__":
    main()
