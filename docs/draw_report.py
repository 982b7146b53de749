"""Draws docs/predict.svg, the picture in the README: what `oomph predict` prints in a terminal."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

from rich.console import Console
from rich.text import Text

from oomph.cli.targets import open_target
from oomph.prediction import predict
from oomph.report.terminal import report_text


def main() -> None:
    with open_target("examples/gpt2.py:workload") as target:
        prediction = predict(target, gpu="rtx3090")
    terminal = Console(file=io.StringIO(), force_terminal=True, color_system="truecolor", width=112)
    paper = Console(record=True, width=112, file=io.StringIO(), force_terminal=True)
    paper.print(Text.from_ansi(report_text(prediction, terminal)))
    svg = paper.export_svg(title="oomph predict examples/gpt2.py:workload --gpu rtx3090")
    # Rich names a web font; any monospaced one will do, and a picture should fetch nothing.
    svg = re.sub(r"@font-face\s*{.*?}", "", svg, flags=re.DOTALL).replace("Fira Code", "DejaVu Sans Mono")
    Path(sys.argv[1] if len(sys.argv) > 1 else "docs/predict.svg").write_text(svg)


if __name__ == "__main__":
    main()
