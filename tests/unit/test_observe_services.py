"""What the report page says of the reward services of a stage."""

from __future__ import annotations

from pathlib import Path

from cosmos_core.observe import report
from tests.unit.observed_runs import HOSTILE, Page, finished_run, write


def test_the_page_says_how_the_reward_service_of_a_stage_was(tmp_path: Path) -> None:
    run = finished_run(tmp_path)
    rewards = {"ocr": {"items": 320.0, "errors": 2.0, "ready": 1.0, "restarts": 3.0, "retried": 4.0, "seconds": 61.5}}
    services = [
        {"url": "http://rewards:8080", "status": "degraded", "rewards": rewards, "refused": {"429": 7.0}},
        {"url": "http://theirs:8080", "status": "tells nothing"},
    ]
    write(run / "stages" / "grpo" / "reward_service.json", {"services": services, "restarts": 2})
    text = Page(report.build_report(run)).text
    assert "http://rewards:8080 degraded ocr 320 2 1 3 4 61.5 429: 7" in text
    assert "http://theirs:8080 tells nothing" in text
    assert "The service was started again 2 times." in text
    for damaged in ({"services": [HOSTILE, 7]}, {"services": 7}, {"services": [], "restarts": "many"}):
        write(run / "stages" / "grpo" / "reward_service.json", damaged)
        assert "<script" not in report.build_report(run)
