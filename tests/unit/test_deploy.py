"""What lies in `deploy/` beside Kubernetes: the Slurm script and the image, and what they run exists."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
import typer
import yaml
from prefect.settings import Settings
from prefect.settings.legacy import _get_settings_fields

from cosmos_core.cli import app
from cosmos_core.launch.bootstrap import DEFAULT_POOLS

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"


SBATCH = {  # options that the script may set, with the values that sbatch takes
    "job-name": r"[\w.-]+", "ntasks-per-node": r"[1-9]\d*", "exclusive": None, "requeue": None,
    "signal": r"([RB]{1,2}:)?(TERM|USR1|USR2|INT|\d+)(@\d+)?", "output": r"[\w./-]*(%[jxAaNn][\w./-]*)*",
    "nodes": r"\d+(-\d+)?", "gpus-per-node": r"([a-z]\w*:)?\d+", "time": r"(\d+-)?\d+(:\d\d){0,2}",
}  # fmt: skip


def test_the_options_of_the_slurm_script_are_those_of_sbatch_and_stand_before_its_first_command() -> None:
    lines = (DEPLOY / "slurm" / "worker.sbatch").read_text().splitlines()
    assert lines[0].startswith("#!")
    first = next(i for i, line in enumerate(lines) if line and not line.startswith("#"))
    options = [line for line in lines if line.startswith("#SBATCH")]
    assert options and options == [line for line in lines[:first] if line.startswith("#SBATCH")]
    given = [re.fullmatch(r"#SBATCH --([a-z-]+)(?:=(\S+))?", line) for line in options]
    assert all(given), options
    for name, value in (match.groups() for match in given if match):
        form = SBATCH[name]
        assert value is None if form is None else re.fullmatch(form, value or ""), (name, value)
    example = next(line for line in lines if line.startswith("#   sbatch "))
    for name, value in re.findall(r"--([a-z-]+)=(\S+)", example):
        assert name == "export" or re.fullmatch(SBATCH[name] or "", value), (name, value)


SRUN = '#!/usr/bin/env bash\necho "srun $*" >> "$CALLS"; sleep 30 & trap "kill $!" TERM; wait\n'
# The worker stays until every node has been asked for, however slowly the machine starts what is in the background.
COSMOS = """#!/usr/bin/env bash
echo "cosmos $* ray=${RAY_ADDRESS:-}" >> "$CALLS"
(( 16#$(awk '/SigIgn/ {print $2}' /proc/self/status) & 2 )) && echo "SIGINT is ignored" >> "$CALLS"
[ "$SLURM_JOB_NUM_NODES" = 1 ] || until [ "$(grep -c ^srun "$CALLS")" = 2 ]; do /bin/sleep 0.1; done
"""


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_slurm_script_starts_a_worker_and_over_several_nodes_a_ray_cluster(nodes: int, tmp_path: Path) -> None:
    script = DEPLOY / "slurm" / "worker.sbatch"
    programs = {"srun": SRUN, "cosmos": COSMOS, "scontrol": "#!/usr/bin/env bash\nprintf 'n1\\nn2\\n'\n",
                "sleep": '#!/usr/bin/env bash\n[ "$1" = 10 ] || exec /bin/sleep "$1"\n'}  # fmt: skip
    for name, text in programs.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    calls = tmp_path / "calls"
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "CALLS": str(calls), "PREFECT_API_URL": "http://x/api",
                   "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_JOB_NODELIST": "n[1-2]"}  # fmt: skip
    subprocess.run(["bash", str(script)], env=environment, check=True, timeout=120)
    lines = sorted(calls.read_text().splitlines())
    address = "n1:6379" if nodes > 1 else ""
    assert lines[0] == f"cosmos worker --pool gpu --limit 1 ray={address}"
    assert len(lines) == (3 if nodes > 1 else 1)
    if nodes > 1:
        assert any("--nodelist=n1 ray start --head --port=6379" in line for line in lines)
        assert any("--exclude=n1 ray start --address=n1:6379" in line for line in lines)
    del environment["PREFECT_API_URL"]
    refused = subprocess.run(["bash", str(script)], env=environment, capture_output=True, text=True, timeout=120)
    assert refused.returncode != 0 and "set PREFECT_API_URL" in refused.stderr


def test_the_image_copies_what_is_there_and_has_no_secret() -> None:
    text = (DEPLOY / "Containerfile").read_text()
    for line in re.findall(r"^COPY (.+) \S+$", text, re.M):
        assert all((ROOT / name).exists() for name in line.split()), line
    assert not re.search(r"(TOKEN|SECRET|PASSWORD|ACCESS_KEY)\s*=", text)
    assert "USER cosmos" in text


COMPOSE = yaml.safe_load((DEPLOY / "compose" / "compose.yaml").read_text())


def test_the_services_of_the_compose_file_refer_to_what_is_there() -> None:
    text = (DEPLOY / "compose" / "compose.yaml").read_text()
    written = text[: text.index("\nname:")]
    services = COMPOSE["services"]
    for name, service in services.items():
        assert service["image"] in {"postgres:17", "${COSMOS_IMAGE:-cosmos-posttrain}"}, name
        for other, needs in service.get("depends_on", {}).items():
            ended = needs["condition"] == "service_completed_successfully"
            assert services[other]["restart"] == "on-failure" if ended else "healthcheck" in services[other]
        for volume in service.get("volumes", []):
            assert volume.partition(":")[0] in COMPOSE["volumes"], name
        values = list(service.get("environment", {}).values()) + service.get("ports", [])
        needed = {match for value in values for match in re.findall(r"\$\{(\w+):\?", str(value))}
        assert all(f"{variable}=" in written for variable in needed), "the header says how it is made"
        settings = {key for key in service.get("environment", {}) if key.startswith("PREFECT_")}
        assert settings <= set(_get_settings_fields(Settings)) | {"PREFECT_HOME"}, name
    url = services["server"]["environment"]["PREFECT_SERVER_DATABASE_CONNECTION_URL"]
    database = services["postgres"]["environment"]
    assert url.startswith(f"postgresql+asyncpg://{database['POSTGRES_USER']}:") and "@postgres:5432/" in url
    assert url.endswith(f"/{database['POSTGRES_DB']}") and services["server"]["ports"][0].endswith(":4200:4200")


def test_the_commands_of_the_compose_file_are_those_of_the_image() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, service in COMPOSE["services"].items():
        words = service.get("command", [])
        script = words[2].split(" && ") if words[:2] == ["sh", "-c"] else [" ".join(words)]
        for line in filter(None, script):
            program, command, *options = line.split()
            assert program in {"cosmos", "prefect"}, name
            if program == "cosmos":
                commands[command].make_context(command, options)
    pools = {words[words.index("--pool") + 1] for words in (s.get("command", []) for s in COMPOSE["services"].values())
             if "--pool" in words}  # fmt: skip
    assert pools <= set(DEFAULT_POOLS)
