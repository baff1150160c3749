"""Rewards that hang, crash, lie or talk hurt only their own completion, and no process outlives the runner."""

import os
import signal
import subprocess
import sys
import threading

import psutil
import pytest

from cosmos_core.errors import RewardError, StageFailed
from cosmos_core.machine_properties import count_usable_cores
from cosmos_core.rewards.base import invalid_scores_error, metric_names
from cosmos_core.rewards.runner import RewardRunner
from cosmos_core.types import Completion, Group, Prompt, Score, Segment
from tests.conftest import wait_until

BEHAVIOURS = '''
import asyncio, os, resource, subprocess, sys, time

def act(to_be_evaluated, reference):
    """Does what the answer says."""
    if to_be_evaluated == "spin":
        reference and open(reference, "w").close()
        while True: pass
    if to_be_evaluated == "hang":
        time.sleep(1000)
    if to_be_evaluated == "raise":
        raise KeyError("no such\\nthing")
    if to_be_evaluated == "exit":
        os._exit(3)
    if to_be_evaluated == "sys.exit":
        sys.exit("enough")
    if to_be_evaluated == "cancelled":
        raise asyncio.CancelledError("by its own client")
    if to_be_evaluated == "eat":
        return float(len(bytearray(2 * os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))))
    if to_be_evaluated == "who ends first":
        most = resource.getrlimit(resource.RLIMIT_DATA)[0]  # without it the kernel may let a process reserve more
        assert most == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), most
        return float(open("/proc/self/oom_score_adj").read())
    if to_be_evaluated == "kill":
        os.kill(os.getpid(), 9)
    if to_be_evaluated == "print":
        print("[1.0, {}, \\"\\"]")
        os.write(1, b"[1.0, {}, \\"\\"]\\n")
        subprocess.run(["echo", "[1.0]"])
        return float(sys.stdin.read() == "")
    if to_be_evaluated == "nan":
        return float("nan")
    if to_be_evaluated == "text":
        return "1.0"
    if to_be_evaluated == "sleep":
        for is_apart in (False, True):
            sleeper = subprocess.Popen(["sleep", "1000"], start_new_session=is_apart)
            with open(reference, "a") as file:
                file.write(f"{sleeper.pid}\\n")
        time.sleep(1000)
    if to_be_evaluated == "once":
        if not os.path.exists(reference):
            open(reference, "w").close()
            os._exit(1)
        return 0.25
    return float(to_be_evaluated)

def secrets(to_be_evaluated, reference):
    """Return whether the words of the answer are in the environment, as it is now and as the process began."""
    if to_be_evaluated == "tell":
        print("the key is", os.environ["SERVICE_KEY"], flush=True)
        raise ValueError(os.environ["SERVICE_KEY"])
    began = open("/proc/self/environ", "rb").read().decode()
    return float(sum(word in began or word in str(os.environ) for word in to_be_evaluated.split()))

def setting(to_be_evaluated, reference, custom):
    raise ValueError(custom["judge"]["password"])

def nothing(to_be_evaluated, reference):
    pass

def length(to_be_evaluated, reference):
    return len(to_be_evaluated), {"double": 2 * len(to_be_evaluated)}

def terminated(to_be_evaluated, reference):
    os.kill(os.getpid(), 15)
    return subprocess.run(["sh", "-c", "kill -TERM $$"]).returncode
'''


@pytest.fixture
def act(tmp_path):
    file = tmp_path / "behaviours.py"
    file.write_text(BEHAVIOURS)
    return f"{file}:act"


def requests(*answers, reference=""):
    return [{"to_be_evaluated": answer, "reference": reference} for answer in answers]


def scored(weights, *answers, reference="", **settings):
    with RewardRunner(weights, **{"timeout_seconds": 5, "num_workers": 1, **settings}) as runner:
        return runner.score(requests(*answers, reference=reference))


OTHERS = set()


@pytest.fixture(autouse=True)
def others():
    """Children that this process has from earlier tests."""
    OTHERS.clear()
    OTHERS.update(psutil.Process().children(recursive=True))


def children(pid=None):
    """All but the resource tracker of multiprocessing, which ends with its process."""
    found = [child for child in psutil.Process(pid).children(recursive=True) if child not in OTHERS]
    return [child for child in found if is_running(child.pid) and "resource_tracker" not in command_of(child)]


def command_of(process):
    """The command line; empty if the process has ended."""
    try:
        return " ".join(process.cmdline())
    except psutil.NoSuchProcess:
        return ""


def test_bad_rewards_invalidate_their_own_completion_and_no_other(act):
    answers = ["0.5", "spin", "1", "raise", "2", "exit", "3", "print", "nan", "4", "text", "sys.exit", "kill", "5"]
    with RewardRunner({act: 1.0}, timeout_seconds=1, num_workers=2, retries=0) as runner:
        scores = runner.score(requests(*answers))
        again = runner.score(requests("6", "7"))
    assert [s.value for s in scores] == [0.5, None, 1, None, 2, None, 3, 1, None, 4, None, None, None, 5]
    assert [s.value for s in again] == [6, 7]
    file = act.rpartition(":")[0]
    reasons = {a: s.error.removeprefix("act: ") for a, s in zip(answers, scores, strict=True) if s.error}
    assert reasons == {
        "spin": "not done in 1 s",
        "raise": f"KeyError: 'no such\\nthing' ({file}:12)",
        "exit": "its process exited with code 3",
        "nan": f"ValueError: returned nan; the rule is a finite number ({file}:4)",
        "text": f"ValueError: returned a str; the rule is a number, or (number, dict of numbers) ({file}:4)",
        "sys.exit": f"SystemExit: enough ({file}:16)",
        "kill": "its process was killed by signal 9",
    }


def test_a_reward_that_eats_memory_or_is_cancelled_is_invalid_and_the_first_that_the_kernel_would_end(act):
    eaten, cancelled, least, last = scored({act: 1.0}, "eat", "cancelled", "who ends first", "1", retries=0)
    assert eaten.value is cancelled.value is None
    assert eaten.error.startswith("act: MemoryError") and cancelled.error.startswith("act: CancelledError: by its own")
    assert (least.value, last.value) == (1000, 1)


def test_a_reward_that_hangs_on_every_completion_is_given_up_and_another_one_is_not(act, tmp_path):
    file = act.rpartition(":")[0]
    with RewardRunner({act: 1.0, f"{file}:length": 0.0}, timeout_seconds=0.5, num_workers=1, retries=1) as runner:
        scores = runner.score(requests(*["hang"] * 12))
        (again,) = runner.score(requests("3"))
    assert [score.value for score in scores] == [None] * 12 and again.value == 3
    reasons = [score.error for score in scores]
    assert reasons.count("act: not done in 0.5 s") in range(4, 10), "four for each process, and what had begun"
    given_up = "act: given up, because the 4 calls before were not done in 0.5 s"
    assert set(reasons) == {"act: not done in 0.5 s", given_up}
    assert all(score.metrics["length"] == 4 for score in scores)


def test_what_a_reward_raises_is_told_with_its_line_and_once_with_its_traceback(act, capfd):
    file = act.rpartition(":")[0]
    scores = scored({f"{file}:nothing": 1.0, act: 1.0}, "raise", "raise", "raise")
    assert {score.error for score in scores} == {
        f"nothing: ValueError: returned nothing; the rule is a number, or (number, dict of numbers) ({file}:60); "
        f"act: KeyError: 'no such\\nthing' ({file}:12)"
    }
    said = capfd.readouterr().err
    assert said.count('raise KeyError("no such\\nthing")') == 1
    with pytest.raises(RewardError, match=r"all 3 are invalid; the first: nothing: ValueError"):
        raise invalid_scores_error("all 3 are invalid", scores)
    with pytest.raises(StageFailed, match=r"all are invalid; the first: act: not done in 1 s"):
        raise invalid_scores_error("all are invalid", [Score(None, error="act: not done in 1 s")])


def test_a_child_sees_no_secret_but_those_that_are_named_and_shows_none(act, capfd, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_unnamed_secret")
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "AKIA_unnamed_secret")
    monkeypatch.setenv("ALL_PROXY", "http://me:login_secret@proxy:1")
    monkeypatch.setenv("HTTPS_PROXY", "http://me:login_secret@proxy:1")
    monkeypatch.setenv("SOMETHING", "something of the user's")
    monkeypatch.setenv("SERVICE_KEY", "named_secret")
    secrets = f"{act.rpartition(':')[0]}:secrets"
    words = ["unnamed_secret", "login_secret", "something", "named_secret", "PATH= HOME="]
    scores = scored({secrets: 1.0}, *words, "tell", env_variable_names=("SERVICE_KEY",))
    assert [score.value for score in scores] == [0, 0, 0, 1, 2, None]
    assert scores[-1].error.startswith("secrets: ValueError: *** (")
    said = capfd.readouterr().err
    assert "the key is ***" in said and "named_secret" not in said
    setting, custom = f"{act.rpartition(':')[0]}:setting", {"judge": {"password": "battery staple"}}
    [score] = scored({setting: 1.0}, "1", request_constants={"custom": custom})
    assert score.error.startswith("setting: ValueError: *** (") and "staple" not in capfd.readouterr().err


def test_a_completion_that_cost_a_child_is_tried_again(act, tmp_path):
    scores = scored({act: 1.0}, "once", "1", reference=str(tmp_path / "seen"), retries=1)
    assert [s.value for s in scores] == [0.25, 1]


def test_retries_are_bounded(act, caplog):
    (score,) = scored({act: 1.0}, "hang", timeout_seconds=0.2, retries=2)
    assert score.value is None
    assert [record.args[2:] for record in caplog.records] == [(1, 3), (2, 3), (3, 3)]


def test_the_total_is_the_weighted_sum_and_metrics_are_unweighted(act):
    length = act.replace(":act", ":length")
    good, bad = scored({act: 2.0, length: -0.5}, "1.25", "raise")
    assert good.value == 2.0 * 1.25 - 0.5 * 4
    assert good.metrics == {"act": 1.25, "length": 4, "length/double": 8}
    assert bad.value is None
    assert bad.metrics == {"length": 5, "length/double": 10}


def test_order_is_kept_over_hundreds_of_requests_one_of_which_is_larger_than_every_pipe_buffer():
    texts = [f"{'x' * (7 * i)} #### {i}" for i in range(200)]
    texts[0] = "word \ud800 é " * 100_000 + texts[0]
    with RewardRunner({"gsm8k": 1.0}, timeout_seconds=10, num_workers=2) as runner:
        scores = runner.score([{"to_be_evaluated": t, "reference": f"#### {i - i % 2}"} for i, t in enumerate(texts)])
        assert runner.score([]) == []
    assert [s.value for s in scores] == [1.0, 0.0] * 100


def test_groups_come_back_with_one_score_a_completion_and_rewards_see_the_groups_facts(tmp_path):
    file = tmp_path / "facts.py"
    file.write_text(
        "def facts(completion, reference, prompt, num_tokens, finish_reason, custom):\n"
        "    return num_tokens + 10 * (finish_reason == 'length') + 100 * (prompt == 'ask' + reference)"
        " + 1000 * custom['bonus']\n"
    )
    groups = [
        Group(Prompt(0, (1,), "aska", "a"), (completion(2, "stop"), completion(3, "length")), 0),
        Group(Prompt(1, (1,), "other", "b"), (completion(1, "stop"),), 0),
    ]
    constants = {"custom": {"bonus": 1}}
    with RewardRunner({f"{file}:facts": 1.0}, timeout_seconds=5, num_workers=1, request_constants=constants) as runner:
        found = runner.score_groups(groups)
    assert [each.group for each in found] == groups
    assert [[score.value for score in each.scores] for each in found] == [[1102, 1113], [1001]]


def completion(num_tokens, finish_reason):
    return Completion((Segment((7,) * num_tokens, True, (-1.0,) * num_tokens, 0),), finish_reason, "text")


def test_a_child_that_died_between_two_calls_is_replaced_without_blame(act):
    with RewardRunner({act: 1.0}, timeout_seconds=5, num_workers=1, retries=0) as runner:
        runner.score(requests("1"))
        (child,) = children()
        child.kill()
        child.wait()
        assert [s.value for s in runner.score(requests("2"))] == [2]


def test_children_of_a_thread_that_ended_are_replaced(act):
    runner = RewardRunner({act: 1.0}, timeout_seconds=5, num_workers=2, retries=0)
    thread = threading.Thread(target=runner.__enter__)
    thread.start()
    thread.join()
    assert [s.value for s in runner.score(requests("1", "2"))] == [1, 2]
    runner.close()


def test_a_reward_that_cannot_be_loaded_is_told_on_entering(act, tmp_path):
    with pytest.raises(RewardError, match="did you mean 'gsm8k'"), RewardRunner({"gsm8": 1.0}, timeout_seconds=5):
        pass
    file = tmp_path / "dies.py"
    file.write_text("import os\nos._exit(9)\n")
    with (
        pytest.raises(RewardError, match=r"loading the rewards .*dies.py:f failed: a process ended while it loaded"),
        RewardRunner({f"{file}:f": 1.0}, timeout_seconds=5, num_workers=1),
    ):
        pass
    assert children() == []


def test_close_leaves_no_process_not_even_what_a_hanging_reward_started(act, tmp_path):
    pids = tmp_path / "pids"
    with RewardRunner({act: 1.0}, timeout_seconds=3, num_workers=2, retries=0) as runner:
        scores = runner.score(requests("sleep", "sleep", "1", reference=str(pids)))
        assert [s.value for s in scores] == [None, None, 1]
        wait_until(lambda: len(children()) == 2, 10, "both were replaced")
    assert children() == []
    started = [int(pid) for pid in pids.read_text().split()]
    assert len(started) == 4
    assert not any(is_running(pid) for pid in started)


def is_running(pid):
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE  # an orphan's corpse is for init to collect
    except psutil.NoSuchProcess:
        return False


@pytest.mark.usefixtures("executed")
def test_children_die_with_a_parent_that_is_killed_while_a_reward_hangs(act, tmp_path):
    program = (
        "import sys\nfrom cosmos_core.rewards.runner import RewardRunner\n"
        "with RewardRunner({sys.argv[1]: 1.0}, timeout_seconds=1000, num_workers=2) as runner:\n"
        "    print('ready', flush=True)\n"
        "    runner.score([{'to_be_evaluated': 'spin', 'reference': sys.argv[2]}])\n"
    )
    hangs = tmp_path / "hangs"
    parent = subprocess.Popen([sys.executable, "-c", program, act, str(hangs)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout.readline() == "ready\n"
    found = children(parent.pid)
    assert len(found) == 2
    wait_until(hangs.exists, 20, "one of them is inside the endless loop")
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_until(lambda: not any(is_running(child.pid) for child in found), 5, "they end")


def test_slow_rewards_run_beside_each_other(tmp_path):
    file, begun = tmp_path / "slow.py", tmp_path / "begun"
    begun.mkdir()
    file.write_text(
        "import os, time\ndef slow(completion, reference):\n    open(f'{reference}/{completion}', 'w').close()\n"
        "    while len(os.listdir(reference)) < 8:\n        time.sleep(0.01)\n    return 1.0\n"
    )  # each waits for the others
    scores = scored({f"{file}:slow": 1.0}, *"12345678", reference=str(begun), timeout_seconds=7200, num_workers=8)
    assert [score.value for score in scores] == [1.0] * 8


def test_there_is_a_process_for_every_core(act):
    with RewardRunner({act: 1.0}, timeout_seconds=5):
        assert len(children()) == count_usable_cores()


def test_a_stop_while_requests_are_waiting_ends_all_processes_at_once(act, monkeypatch):
    monkeypatch.setattr("cosmos_core.rewards.process._FUTURES_POLL_SECONDS", 0.1)

    class Stop(Exception):
        pass

    stop = []

    def beat():
        if stop:
            raise Stop

    with RewardRunner({act: 1.0}, timeout_seconds=7200, num_workers=2, on_wait=beat) as runner:
        stop.append(True)
        with pytest.raises(Stop):
            runner.score(requests(*["hang"] * 2, *["1" * 1000] * 500))
        assert children() == []
        stop.clear()
        assert [score.value for score in runner.score(requests("1", "2"))] == [1, 2]


def test_no_crash_is_lost_however_fast_it_follows_the_request(act):
    scores = scored({act: 1.0}, *["1", "exit", "2", "kill"] * 3, timeout_seconds=7200, num_workers=2, retries=0)
    assert [score.value for score in scores] == [1, None, 2, None] * 3


def test_a_signal_to_all_processes_of_a_job_changes_no_reward(act):
    """The stage that gets it too saves a checkpoint, which may come after rewards that are computed now."""
    (score,) = scored({f"{act.rpartition(':')[0]}:terminated": 1.0}, "1", retries=0)
    assert score.value == -15, "what a reward starts and ends with SIGTERM ends"


def test_metrics_are_named_by_the_function_and_by_the_file_too_where_two_share_it(act, tmp_path):
    (tmp_path / "other").mkdir()
    for name in ("mine", "other/mine"):
        (tmp_path / f"{name}.py").write_text("def act(completion, reference):\n    return 3.0, {'x': 1.0}\n")
    mine, other = f"{tmp_path}/mine.py:act", f"{tmp_path}/other/mine.py:act"
    (score,) = scored({mine: 1.0, "exact_match": 1.0}, "3", reference="3")
    assert score.metrics == {"act": 3.0, "act/x": 1.0, "exact_match": 1.0}
    assert metric_names([mine, act, "act"]) == {mine: "mine.act", act: "behaviours.act", "act": "act"}
    assert metric_names([mine, other]) == {mine: f"{tmp_path.name}.mine.act", other: "other.mine.act"}
    assert metric_names(["pack.one:f", "pack.two:f", "g"]) == {"pack.one:f": "one.f", "pack.two:f": "two.f", "g": "g"}


@pytest.mark.usefixtures("executed")
def test_a_child_imports_neither_torch_nor_pydantic(tmp_path):
    file = tmp_path / "light.py"
    file.write_text("import sys\ndef light(completion): return len({'torch', 'pydantic'} & set(sys.modules))\n")
    (score,) = scored({f"{file}:light": 1.0, "boxed_math": 0.0}, "1", reference="1")
    assert score.value == 0
