"""What Prefect's server learns of the flows: `prefect.yaml` and the form of parameters."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from prefect.cli.deploy._schedules import _schedule_config_to_deployment_schedule
from prefect.client.schemas.actions import DeploymentScheduleCreate
from prefect.client.schemas.schedules import CronSchedule
from prefect.flows import Flow
from prefect.utilities.callables import parameter_schema

from cosmos_core.config.compose import load_pipeline
from cosmos_core.errors import ConfigError
from cosmos_core.registry import import_object
from cosmos_core.run.directory import create_run
from flows.post_train import open_run_to_execute, post_train
from flows.retrain import retrain
from flows.stage import stage
from tasks.kinds import all_kinds
from tasks.stage import run_stage
from tests.conftest import PROGRAMS

ROOT = Path(__file__).parents[2]
CHAIN = f"""
[pipeline]
name = "chain"
output_dir = "OUTPUTS"

[[pipeline.stages]]
name = "first"
kind = "custom"
entry = "{PROGRAMS}/counting.py:count"
arguments = {{ steps = 2 }}

[[pipeline.stages]]
name = "second"
kind = "custom"
entry = "{PROGRAMS}/counting.py:count"
after = "first"
arguments = {{ steps = 3 }}
"""


def deployments() -> list[dict[str, Any]]:
    return yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]


def test_every_deployment_names_a_flow_and_gives_parameters_that_it_has() -> None:
    flows = {}
    for deployment in deployments():
        flow = import_object(f"{ROOT}/{deployment['entrypoint']}")
        assert isinstance(flow, Flow)
        assert set(deployment.get("parameters", {})) <= set(parameter_schema(flow).properties)
        assert deployment["enforce_parameter_schema"] is True
        flows[f"{flow.name}/{deployment['name']}"] = deployment["work_pool"]["name"]
    pools = ("stage/local", "stage/cpu", "stage/gpu", "reward-service/cpu", "reward-service/gpu")
    wanted = ("post-train/local", "retrain/local", *pools)
    assert flows == {name: name.partition("/")[2] for name in wanted}, "a deployment is named after its pool"


def test_the_default_config_of_the_pipeline_is_a_file_of_the_repository() -> None:
    [config] = [d["parameters"]["config"] for d in deployments() if d["entrypoint"].endswith(":post_train")]
    assert (ROOT / config).is_file()


def test_every_schedule_names_its_own_config_also_that_which_the_documentation_adds() -> None:
    [written] = [d["schedules"] for d in deployments() if "schedules" in d]
    [added] = re.findall(
        r"```yaml\n( +- slug: .*?)```", (ROOT / "docs" / "how-to" / "operate.md").read_text(), re.DOTALL
    )
    text = (ROOT / "prefect.yaml").read_text()
    [old] = re.findall(r"^    schedules:\n", text, re.MULTILINE)
    [both] = [d["schedules"] for d in yaml.safe_load(text.replace(old, old + added))["deployments"] if "schedules" in d]
    assert len(both) == 2 and written == both[1:], "it fits in as it stands"
    for entry in both:
        schedule = DeploymentScheduleCreate(**_schedule_config_to_deployment_schedule(entry))
        flow = parameter_schema(retrain)
        assert set(flow.required) <= set(schedule.parameters) <= set(flow.properties)
        assert schedule.active is (entry["slug"] != "demo")
        assert schedule.slug == entry["slug"] and schedule.schedule == CronSchedule(cron="0 3 * * *", timezone="UTC")


def test_prefect_yaml_works_from_any_clone() -> None:
    assert not re.search(r"[\s\"'=]/\w", (ROOT / "prefect.yaml").read_text()), "an absolute path"


def test_the_form_in_the_ui_has_a_type_a_default_and_a_description_for_every_parameter() -> None:
    form = parameter_schema(post_train)
    types = {name: (entry["type"], entry.get("default")) for name, entry in form.properties.items()}
    assert types == {
        "config": ("string", None), "overrides": ("array", []), "run_id": ("string", ""), "from_stage": ("string", ""),
        "verify": ("boolean", False),
    }  # fmt: skip
    assert form.required == ["config"]
    assert parameter_schema(stage).required == ["run", "name"]
    assert parameter_schema(retrain).properties["start"]["enum"] == ["published", "base"]
    for flow in (post_train, retrain, stage):
        assert all(len(entry["description"]) > 20 for entry in parameter_schema(flow).properties.values())


def test_a_stage_whose_input_is_not_done_or_was_altered_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "chain.toml"
    file.write_text(CHAIN.replace("OUTPUTS", str(tmp_path / "outputs")))
    run = create_run(load_pipeline(file, (), all_kinds()))
    with pytest.raises(ConfigError, match=r"^.*: stage 'second' starts from 'first', but it is not done; run .*$"):
        stage.fn(str(run.path), "second")
    run_stage(run, "first")
    (run.stage_path("first") / "out.txt").write_text("x")
    with pytest.raises(ConfigError, match=r"starts from 'first', but out.txt has 1 bytes instead of 64; run stage"):
        stage.fn(str(run.path), "second")
    with pytest.raises(ConfigError, match=r"no stage 'secnd' .*second"):
        stage.fn(str(run.path), "secnd")


def test_an_output_folder_of_an_unknown_user_is_one_line(tmp_path: Path) -> None:
    file = tmp_path / "chain.toml"
    file.write_text(CHAIN.replace("OUTPUTS", "~nobody-here/outputs"))
    with pytest.raises(ConfigError, match=r"pipeline\.output_dir = '~nobody-here/outputs' cannot be written"):
        open_run_to_execute(str(file), [], "", "flow-run")


def test_a_run_of_a_flow_in_python_is_continued_by_its_flow_alone(tmp_path: Path) -> None:
    file = tmp_path / "chain.toml"
    file.write_text(CHAIN.replace("OUTPUTS", str(tmp_path / "outputs")))
    run = create_run(load_pipeline(file, (), all_kinds()), run_id="r", entrypoint="/f.py:search")
    with pytest.raises(ConfigError, match=r"is a run of the flow /f\.py:search, .*: cosmos resume /.*/r$"):
        open_run_to_execute(str(run.path), [], "")
