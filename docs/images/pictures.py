"""The pictures of README, from real runs: `python docs/images/pictures.py RUN_OF_ARITHMETIC RUN_OF_DIGITS`.

`report.png` is the top of the first run's `report.html`, with its gate and the curves of its stage `grpo` moved up and
without the times of the command, as Chromium shows it; `digits.png` has the drawings that both stages `*-judged` of the
second run left.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

HERE = Path(__file__).parent
DIGITS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
COLUMNS, PIXELS, GAP = 6, 40, 4


def report(run: Path) -> None:
    """Take the picture of the report, two sections and one stage of it."""
    page = (run / "report.html").read_text(encoding="utf-8")
    head, body = page.split("<section>", 1)
    sections = {found[0]: found[1] for found in re.findall(r"<h2>(.*?)</h2>(.*?)</section>", body, re.DOTALL)}
    stages = re.findall(r"<details open>(.*?)</details>", sections["Stages"], re.DOTALL)
    curves = next(re.search(r'<div class="curves">.*?</svg></div>', s, re.DOTALL) for s in stages if "<b>grpo</b>" in s)
    shown = {"Pipeline": sections["Pipeline"], "Gates": sections["Gates"], "Curves of grpo": curves.group()}
    head = re.sub(r"<div><dt>(wall time|inside stage workers|overhead)</dt>.*?</div>", "", head)
    style = ".dag { min-width: 0 !important } "
    style += ".curve:nth-child(n+9) { display: none } .curves { grid-template-columns: repeat(4, 1fr) }"
    head = head.replace("</style>", f"{style}</style>")
    text = head + "".join(f"<section><h2>{name}</h2>{part}</section>" for name, part in shown.items())
    browser = next(filter(None, map(shutil.which, ("chromium", "google-chrome", "chrome"))))
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "page.html"
        file.write_text(text + "</main></body></html>", encoding="utf-8")
        taken = Path(folder) / "page.png"
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        options += ["--force-device-scale-factor=1.5", "--window-size=1120,1400", f"--screenshot={taken}"]
        subprocess.run([browser, *options, file.as_uri()], check=True, stderr=subprocess.DEVNULL)
        with Image.open(taken) as image:
            _save(_trimmed(image.convert("RGB")), "report.png")


def digits(run: Path) -> None:
    """Draw a row of images for each digit, before and after."""
    font = ImageFont.load_default(15)
    wide, step = COLUMNS * (PIXELS + GAP), PIXELS + GAP
    picture = Image.new("RGB", (70 + 2 * wide + 40, 30 + 10 * step), "white")
    draw = ImageDraw.Draw(picture)
    for index, (stage, title) in enumerate((("sft-judged", "after SFT"), ("nft-judged", "after DiffusionNFT"))):
        left = 70 + index * (wide + 30)
        draw.text((left, 6), title, fill="black", font=font)
        [folder] = (run / "stages" / stage / "visual_output").iterdir()
        for digit, name in enumerate(DIGITS):
            draw.text((8, 30 + digit * step + 12), name, fill="black", font=font)
            for column in range(COLUMNS):
                with Image.open(folder / f"{digit}-{column}.png") as image:
                    large = image.convert("RGB").resize((PIXELS, PIXELS), Image.Resampling.NEAREST)
                picture.paste(large, (left + column * step, 30 + digit * step))
    _save(picture, "digits.png")


def _trimmed(image: Image.Image) -> Image.Image:
    """Cut the empty rows below off."""
    row = image.crop((0, image.height - 1, image.width, image.height))
    height = image.height
    while height > 1 and image.crop((0, height - 1, image.width, height)).tobytes() == row.tobytes():
        height -= 1
    return image.crop((0, 0, image.width, min(image.height, height + 24)))


def _save(image: Image.Image, name: str) -> None:
    image.quantize(128).save(HERE / name, optimize=True)
    sys.stdout.write(f"{name}: {image.width} x {image.height}, {(HERE / name).stat().st_size / 1000:.0f} kB\n")


if __name__ == "__main__":
    report(Path(sys.argv[1]))
    digits(Path(sys.argv[2]))
