"""A wheel in an empty environment, outside of the source tree: it trains, reports, predicts, exports and serves.

    python3.12 tests/wheel_check.py dist/cclnet-*.whl

The packages are downloaded, so this is not one of the tests; `make wheel-check` runs it.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import venv
from pathlib import Path

TRAIN = "synthetic:images=150 --backbone test_resnet --epochs 2 --short-side 40 --set augment.crop=32 --out run --quiet"
PORT = "8731"


def main(wheel: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        began = time.monotonic()
        venv.create(work / "env", with_pip=True)
        python = work / "env" / "bin" / "python"
        run([python, "-m", "pip", "install", "--quiet", f"{wheel.resolve()}[serve]"], work)
        installed = time.monotonic() - began
        cclnet = [python.with_name("cclnet")]
        run([*cclnet, "train", *TRAIN.split()], work)
        for name in ("report.html", "report.md", "scores.json", "model.safetensors", "soft_labels.csv"):
            assert (work / "run" / name).stat().st_size > 100, name
        run([*cclnet, "evaluate", "run", "--draws", "20"], work)
        code = "import numpy, PIL.Image as I; I.fromarray(numpy.full((50, 60, 3), 90, 'uint8')).save('a.png')"
        run([python, "-c", code], work)
        run([*cclnet, "predict", "run", "a.png", "--out", "predicted.csv"], work)
        assert "a.png" in (work / "predicted.csv").read_text()
        run([*cclnet, "export", "run", "--format", "timm", "--out", "shipped"], work)
        run([python, "-c", "import timm; timm.create_model('local-dir:shipped', pretrained=True)"], work)
        run([*cclnet, "compare", "run", "run/predictions.csv", "--out", "compared"], work)
        run([*cclnet, "presets", "list"], work)
        run([*cclnet, "methods", "ccl"], work)
        run([*cclnet, "reproduce", "--help"], work)
        answer = serve(cclnet, work)
        version = next(part for part in run([*cclnet, "--version"], work).split(", ") if part.startswith("cclnet"))
        seconds = time.monotonic() - began
        print(f"Python {sys.version.split()[0]}, {version}: installed in {installed:.0f} s, all in {seconds:.0f} s; "
              f"served: {answer['label']}")  # fmt: skip


def run(command: list[object], work: Path) -> str:
    """Run a command in the folder, with nothing of the caller's Python; its output in the error if it fails."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    done = subprocess.run([*map(str, command)], cwd=work, env=clean, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout


def serve(cclnet: list[Path], work: Path) -> dict[str, str]:
    """The page and an answer of the server."""
    server = subprocess.Popen([*map(str, cclnet), "serve", "run", "--port", PORT], cwd=work, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{PORT}"
        for _ in range(600):  # five minutes: the machine may be busy
            try:
                page = urllib.request.urlopen(address, timeout=5).read().decode()
                break
            except OSError:
                time.sleep(0.5)
        else:
            raise SystemExit("cclnet serve does not answer")
        assert "Drop an image here" in page
        for name in ("page.css", "page.js", "show.js", "heat.js", "format.js"):
            assert urllib.request.urlopen(f"{address}/static/{name}", timeout=5).read()
        head = {"Content-Type": "image/png"}
        request = urllib.request.Request(f"{address}/predict", (work / "a.png").read_bytes(), head)
        return json.loads(urllib.request.urlopen(request, timeout=60).read())
    finally:
        server.terminate()
        server.wait(timeout=20)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
