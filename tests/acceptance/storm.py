"""Random small pipelines under random disturbances: `python -m tests.acceptance.storm --minutes 60`, or `make storm`.

Every storm is drawn from a seed of its own, which is printed with it; `--seed N --storms 1` draws exactly that one
again, when the seed of a failure is given. A storm runs a pipeline, disturbs it, goes on with it, and ends when a
command says that it is complete; then its results are those of an undisturbed run, and nothing is left behind.
"""

from __future__ import annotations

import argparse
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from threading import Lock

from cosmos_core.errors import EXIT_OK, EXIT_USAGE
from cosmos_core.observe.logs import configure_logging
from tests.acceptance import page
from tests.acceptance.storms import faults, pipelines, remains
from tests.acceptance.storms.commands import Commands, Stuck
from tests.acceptance.storms.faults import Scene
from tests.acceptance.storms.pipelines import StormPipeline
from tests.acceptance.storms.remains import Digests
from tests.acceptance.storms.shim import Shim, remove_library
from tests.conftest import Workspace

logger = logging.getLogger(__name__)

PAGE = Path(__file__).parents[2] / "docs" / "acceptance.md"
_MOST_ROUNDS = 3
_MOST_ENDINGS = 4
_EXPECTED_SECONDS = 18.0


@dataclass
class Storm:
    """What was drawn, what happened, and what did not hold."""

    seed: int
    trunk: str
    happened: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    seconds: float = 0.0

    def __str__(self) -> str:
        return f"seed {self.seed}, {self.trunk}: {'; '.join(self.happened)}"


class Storms:
    """Storms in folders below one, with the undisturbed results of the pipelines that were drawn so far."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.world = pipelines.make_world(folder / "world")
        self._expected: dict[str, Digests] = {}
        self._count = 0
        self._lock = Lock()
        signal.signal(signal.SIGINT, signal.default_int_handler)  # a background job's commands would ignore it

    def weather(self, seed: int, trunk: str = "") -> Storm:
        """One storm; its folder is kept when something does not hold."""
        random = Random(seed)
        pipeline = pipelines.draw(random, trunk)
        with self._lock:
            expected = self._undisturbed(pipeline)
            self._count += 1
            name = f"{self._count}s"  # short, for the sockets of Ray are below it; and the beginning of no other
            shim = Shim(self.folder / f"{name}-control", self.folder / name)
        storm = Storm(seed, pipeline.trunk)
        workspace = Workspace(self.folder / name)
        pipeline.write(workspace, self.world)
        temporary, outputs = workspace.path / "t", self.folder / f"{name}-said"
        temporary.mkdir()
        outputs.mkdir()
        commands = Commands(workspace, outputs, shim.environment | {"TMPDIR": str(temporary)})
        scene = Scene(workspace, commands, shim, random, {})
        began = time.monotonic()
        try:
            self._disturb(storm, scene)
            self._finish(storm, scene)
            for name in {*commands.run_name, "other"}:
                run = workspace.path / "outputs" / name
                if name != "other" or _is_complete(run, pipeline):
                    storm.problems += remains.other_results(pipeline, run, expected)
            storm.problems += remains.leftovers(workspace, temporary)
        except Stuck as stuck:
            storm.problems.append(str(stuck))
        finally:
            storm.problems += remains.tracebacks(commands)
            remains.end_all(workspace)
        storm.seconds = time.monotonic() - began
        if not storm.problems:
            shutil.rmtree(workspace.path)
            shutil.rmtree(outputs)
        return storm

    def _disturb(self, storm: Storm, scene: Scene) -> None:
        """Commands that are disturbed at moments drawn, and files that are damaged between them."""
        for number in range(scene.random.randint(1, _MOST_ROUNDS)):
            if number and scene.random.random() < 0.5:
                storm.happened.append(faults.drawn(scene.random, faults.RESTING)(scene))
            began, command = time.monotonic(), scene.commands.next()
            for _ in range(scene.random.choice([1, 1, 2, 3])):
                moment = began + scene.random.uniform(0.0, _EXPECTED_SECONDS)
                fault = faults.drawn(scene.random, faults.LIVE)
                while time.monotonic() < moment and command.process.poll() is None:
                    scene.wait(0.05)
                if command.process.poll() is None:
                    at = time.monotonic() - began
                    storm.happened.append(f"{fault(scene)} after {at:.1f} s")
            code = scene.commands.follow(command)
            storm.happened.append(f"exit {code}")

    def _finish(self, storm: Storm, scene: Scene) -> None:
        """Go on until the run is complete: at once, or after what a command named as damaged is as it was."""
        scene.shim.calm()
        for path in [path for path in scene.kept if path.name == "pipeline.toml"]:
            path.write_bytes(scene.kept.pop(path))  # what is still valid there is an edit, which is followed
        for _ in range(_MOST_ENDINGS):
            command = scene.commands.next()
            code = scene.commands.follow(command)
            if code == EXIT_OK:
                return
            named = [path for path in scene.kept if str(path) in command.said or path.name in command.said]
            if code != EXIT_USAGE or not named:
                storm.problems.append(f"cosmos {' '.join(command.words)} exited with {code} in calm weather")
                return
            for path in named:
                path.write_bytes(scene.kept.pop(path))
                storm.happened.append(f"mended {path.name}, which was named")
        storm.problems.append("never complete")

    def _undisturbed(self, pipeline: StormPipeline) -> Digests:
        if pipeline.trunk not in self._expected:
            workspace = Workspace(self.folder / f"undisturbed {len(self._expected)}")
            pipeline.write(workspace, self.world, is_whole=False)
            workspace.cosmos("run", "p.toml", "--run-id", "storm")
            self._expected[pipeline.trunk] = remains.weights(workspace.path / "outputs" / "storm")
            assert self._expected[pipeline.trunk], "there are weights to compare"
            shutil.rmtree(workspace.path)
        return self._expected[pipeline.trunk]


def _is_complete(run: Path, pipeline: StormPipeline) -> bool:
    return all((run / "stages" / name / "result.json").is_file() for name in (*pipeline.trained, *pipeline.ways))


def rage(storms: Storms, seed: int, may_begin: Callable[[int], bool], trunk: str = "", at_once: int = 1) -> list[Storm]:
    """Storms with the seeds `seed`, `seed + 1` and so on, some of them at the same time, while another may begin."""
    begun, lock, done = 0, Lock(), list[Storm]()

    def one_after_the_other() -> None:
        nonlocal begun
        while True:
            with lock:
                if not may_begin(begun):
                    return
                number, begun = begun, begun + 1
            storm = storms.weather(seed + number, trunk)
            done.append(storm)
            held = "FAILED" if storm.problems else "held"
            logger.info("storm %d (%.0f s) %s: %s", len(done), storm.seconds, held, storm)
            for problem in storm.problems:
                logger.error("seed %d: %s", storm.seed, problem)

    with ThreadPoolExecutor(at_once) as pool:
        for each in [pool.submit(one_after_the_other) for _ in range(at_once)]:
            each.result()
    return done


def proof(done: list[Storm], seed: int, seconds: float, at_once: int) -> page.Proof:
    """The section of `docs/acceptance.md`."""
    failed = [storm for storm in done if storm.problems]
    what = Counter(words for storm in done for words in map(_kind, storm.happened) if words)
    problems = Counter(problem.split()[0] for storm in failed for problem in storm.problems)
    trunks = Counter(storm.trunk for storm in done)
    rows = [
        ["storms", len(done)],
        ["results other than the undisturbed run's", sum("differs" in str(storm.problems) for storm in done)],
        ["stuck", sum("nothing was gained" in str(storm.problems) for storm in done)],
        ["with a process, lock or temporary file left",
         sum(any(p.startswith(("process", "lock", "temporary")) for p in storm.problems) for storm in done)],
        ["with a traceback shown", sum("traceback" in str(storm.problems) for storm in done)],
        ["seconds per storm, the median and the longest", _median_and_longest([storm.seconds for storm in done])],
    ]  # fmt: skip
    body = page.table(["", ""], rows)
    body += f"\n\nPipelines: {_listed(trunks)}.\n\nWhat happened to them: {_listed(what)}."
    if failed:
        body += f"\n\nFailed: {_listed(problems)}; seeds {', '.join(str(storm.seed) for storm in failed)}."
    return page.Proof(
        title="Storms",
        is_met=not failed and len(done) >= 60 and seconds >= 3500,
        claim=(
            "An hour of random pipelines under random disturbances, at least 60 storms on two cores: the safetensors "
            "of every stage have the sha256 of an undisturbed run's, no process, lock or temporary file is left, no "
            "command shows a traceback, and none gains nothing for two minutes."
        ),
        commands=[f"python -m tests.acceptance.storm --seed {seed} --minutes {seconds / 60:.0f} --at-once {at_once}"],
        body=body,
        seconds=seconds,
    )


def _kind(text: str) -> str:
    """What happened without its numbers and names."""
    kinds = {
        "killed server": "server killed", "killed": "SIGKILL", "SIGTERM": "SIGTERM", "SIGINT": "SIGINT",
        "stopped": "SIGSTOP and SIGCONT", "disk full": "disk full", "read-only": "read-only", "clock": "clock set",
        "a second command": "second command", "another run": "second run, the first killed",
        "flipped": "bytes flipped", "removed": "file removed", "cut": "file truncated", "delete": "checkpoint deleted",
        "link": "checkpoint swapped for a link",
    }  # fmt: skip
    return next((kind for words, kind in kinds.items() if text.startswith(words)), "")


def _listed(counts: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counts.most_common() if name)


def _median_and_longest(seconds: list[float]) -> str:
    return f"{sorted(seconds)[len(seconds) // 2]:.0f}, {max(seconds):.0f}" if seconds else "none"


def main() -> int:
    """Run storms for some minutes, or some number of them; exit code 1 when one did not hold."""
    parser = argparse.ArgumentParser(prog="python -m tests.acceptance.storm", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="no storm begins later")
    parser.add_argument("--storms", type=int, default=sys.maxsize, help="at most so many")
    parser.add_argument("--seed", type=int, default=None, help="of the first storm; none: drawn and printed")
    parser.add_argument("--trunk", choices=sorted(pipelines.TRUNKS), default="", help="pipelines of this kind alone")
    parser.add_argument("--at-once", type=int, default=2, help="storms at the same time, each on pipelines of its own")
    parser.add_argument("--write", action="store_true", help="write docs/acceptance.md")
    arguments = parser.parse_args()
    configure_logging()
    logging.getLogger("tests").setLevel(logging.INFO)
    logging.getLogger(__name__).setLevel(logging.INFO)
    seed = Random().randrange(10**6) if arguments.seed is None else arguments.seed
    logger.info("seed %d", seed)
    folder, began = Path(tempfile.gettempdir()) / f"s{os.getpid()}", time.monotonic()
    folder.mkdir()
    try:
        done = rage(
            Storms(folder), seed,
            lambda count: count < arguments.storms and time.monotonic() - began < 60 * arguments.minutes,
            arguments.trunk, arguments.at_once,
        )  # fmt: skip
    finally:
        remove_library()
    if arguments.write:
        page.put(PAGE, proof(done, seed, time.monotonic() - began, arguments.at_once))
    failed = [storm for storm in done if storm.problems]
    logger.info("%d storms, %d failed", len(done), len(failed))
    for storm in failed:
        logger.error("replay: python -m tests.acceptance.storm --storms 1 --seed %d  (%s)", storm.seed, folder)
    if not failed:
        shutil.rmtree(folder)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
