"""A user's upload target: a shelf of folders with a list of its versions."""

import json
import shutil
from pathlib import Path


class Shelf:
    """Keeps each version in a folder of its name; the last line of `versions.jsonl` is the published one."""

    def __init__(self, place):
        self.path = Path(place)

    def published(self):
        file = self.path / "versions.jsonl"
        return json.loads(file.read_text().splitlines()[-1]) if file.exists() else None

    def publish(self, folder, version, record):
        shutil.copytree(folder, self.path / version, dirs_exist_ok=True)
        with open(self.path / "versions.jsonl", "a") as file:
            file.write(json.dumps(record) + "\n")
        return str(self.path / version)
