"""A recipe with `upload_s3` and `upload_hf` from the command line: the model arrives in both, no secret stays here."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest

from tests import hub, store
from tests.conftest import DEMOS, Workspace

RECIPE = """
[pipeline]
name = "sums"
threads = 1

[policy]
model_max_length = 64
model_gradient_checkpointing = false

[train]
param_dtype = "float32"
compile = false
epoch = 1000
max_num_steps = 8
train_batch_per_replica = 16
train_policy = { type = "sft", mini_batch = 16, conversation_column_name = "messages" }

[train.ckpt]
enable_checkpoint = true
save_freq = 4
upload_s3 = "all"
s3_bucket = "models"
s3_prefix = "of/us"
upload_hf = true
hf_repo_name = "sums"

[[pipeline.stages]]
name = "task"
kind = "custom"
entry = "DEMOS/arithmetic.py:make"
arguments = { train_rows = 200, heldout_rows = 20, hidden_size = 32 }

[[pipeline.stages]]
name = "sft"
kind = "sft"
after = "task"
model = "stage:task"
data = "stage:task"

[[pipeline.stages]]
name = "export"
kind = "export"
after = "sft"
model = "stage:sft"
""".replace("DEMOS", str(DEMOS))


@pytest.mark.full
def test_a_recipe_publishes_its_model_and_checkpoints_and_keeps_no_secret(
    workspace: Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    workspace.write("sums.toml", RECIPE)
    with store.store() as proxy, hub.hub() as server:
        store.use(proxy.url, monkeypatch)
        hub.use(server.url, monkeypatch)
        mine = ("AWS_", "HF_", "NO_PROXY")
        import os

        workspace.environment |= {name: value for name, value in os.environ.items() if name.startswith(mine)}
        refused = workspace.cosmos("run", "sums.toml", "--set", "train.ckpt.s3_bucket=nowhere", code=64)
        assert "s3://nowhere: there is no such bucket; make it, or name another" in refused.stderr
        proxy.once("503", lambda request: request.key.endswith("model.safetensors") and request.method == "PUT")
        workspace.cosmos("run", "sums.toml")
        [export] = (workspace.stage("export") / "safetensors").iterdir()
        weights = (export / "model.safetensors").read_bytes()
        written = {request.key for request in proxy.requests if request.method == "PUT"}
        pointer = next(r for r in reversed(proxy.requests) if r.key == "of/us/sums/export/latest.json" and r.body)
        version = json.loads(pointer.body)["version"]
        assert version.startswith(workspace.run.name)
        assert f"of/us/sums/export/{version}/model.safetensors" in written
        for step in (4, 8):
            assert f"of/us/sums/sft/saves/{workspace.run.name}/step_{step}/policy/manifest.json" in written
        files = server.repositories["me/sums"].files("main")
        assert files is not None and files["model.safetensors"] == weights
        assert json.loads(files["published.json"])["files"]["model.safetensors"] == hashlib.sha256(weights).hexdigest()
        # The same again: every stage is reused, and what is published already stays as it is.
        proxy.reset()
        workspace.cosmos("run", "sums.toml")
        assert not [request for request in proxy.requests if request.method == "PUT"]
        assert len(server.repositories["me/sums"].commits) == 2
    secrets = [text.encode() for text in (store.KEY, store.SECRET, hub.TOKEN)]
    files_here = [file for file in Path(workspace.path).rglob("*") if file.is_file()]
    assert len(files_here) > 30
    for file in files_here:
        content = file.read_bytes()
        assert not any(secret in content for secret in secrets), file
    workspace.expect_quiet()
