"""A user's stage: a random model and prompts for it, from the project's own toy task."""

import json

from cosmos_core.registry import import_object
from cosmos_core.types import Outcome


def make(stage, toy_task: str, num_prompts: int) -> Outcome:
    """Write `model/` and `data/train.jsonl` below the stage. `toy_task` is the path of the module with the model."""
    make_tokenizer, make_model = import_object(f"{toy_task}:make_tokenizer"), import_object(f"{toy_task}:make_model")
    tokenizer = make_tokenizer()
    tokenizer.save_pretrained(stage.path / "model")
    make_model(tokenizer, 32, 2, 0).save_pretrained(stage.path / "model")
    (stage.path / "data").mkdir(exist_ok=True)
    rows = [{"prompt": f"{i}+{i}=", "answer": str(2 * i)} for i in range(num_prompts)]
    (stage.path / "data/train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Outcome(("model", "data"), {"prompts": float(num_prompts)}, {"model": "model", "data": "data"})
