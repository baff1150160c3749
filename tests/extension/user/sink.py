"""A user's metric sink: one line of JSON per step in a file beside the stage's metrics."""

import json


class Lines:
    """Writes what it is told to `lines.jsonl` in the stage's folder."""

    def __init__(self, stage, first_step):
        self.path = stage.path / "lines.jsonl"
        done = [json.loads(line)["step"] for line in self.path.read_text().splitlines()] if self.path.exists() else []
        self.starting_step = max(done, default=0) + 1

    def log(self, line):
        with open(self.path, "a") as file:
            file.write(json.dumps(line) + "\n")

    def close(self, exit_code):
        (self.path.parent / "lines.done").write_text(str(exit_code))
