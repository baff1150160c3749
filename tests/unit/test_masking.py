# ruff: noqa: E501
"""Secrets that no variable has are masked in every text, log record and file; names, digests and paths are not."""

from __future__ import annotations

import base64
import io
import json
import logging
import random
import string
import uuid
from pathlib import Path

import pytest

from cosmos_core import environment
from cosmos_core.environment import (
    environment_for_user_code,
    find_secrets,
    mask_error_message,
    mask_file,
    mask_log_records,
    mask_named_secrets,
    mask_settings,
    mask_text,
)
from cosmos_core.errors import StageFailed
from cosmos_core.masking import mask_secret_spans
from cosmos_core.run.state import record_event

KNOWN = [
    "hf_AbCdEfGhIjKlMnOpQrStUvWxYzAbCdEfGh", "ghp_0123456789abcdefABCDEF0123456789abcd", "glpat-abcdefgh12345678wxyz",
    "sk-proj-abc123def456ghi789jkl012", "sk-ant-api03-aa11bb22cc33dd44ee55", "AKIAIOSFODNN7EXAMPLE",
    "AIzaSyA1234567890abcdefghijklmnopqrstuv", "xoxb-123456789012-abcdefGHIJKL", "npm_aBcDeFgHiJkLmNoPqRsTuVwXyZ0123456789",
    "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.dozjgNryP4J3jVmNHl0w5N_XgL0n3I9PlFUP0THsR8U", "nvapi-0a1b2c3d4e5f6g7h8i9j0k",
    "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", "-----BEGIN RSA PRIVATE KEY-----\nMIIEpAIBAAKC\n-----END RSA PRIVATE KEY-----",
]  # fmt: skip
NAMED = [
    "password=correcthorse", "PASSWORD: 'correct horse'", '{"api_key": "abcdefgh"}', "secret_access_key = abcdef",
    "Authorization: Bearer 0123456789abcdef0123456789abcdef01234567", "token is a1b2c3d4e5f6a7b8", "x-api-key: q1w2e3r4",
    "postgresql://user:s3cret-pw@host/db", "https://h/x?X-Amz-Signature=0123456789abcdef0123456789abcdef",
    "MY_TOKEN=0123456789abcdef0123456789abcdef01234567", "wandb login 0123456789abcdef0123456789abcdef01234567",
]  # fmt: skip
FORMS = [
    "curl -u admin:{}", "pwd: {}", "redis://:{}@host:6379/0", "postgresql://u:a/{}@h/db", "https://h/x?token={}",
    "https://h/x?v=1&access_token={}", "https://h/c?sv=2022&sig={}%3D", "https://hooks.slack.com/services/T0/B1/{}",
    "https://discord.com/api/webhooks/12345678/{}", "Authorization: Basic {}", "{{'Authorization': 'Bearer {}'}}",
    "[(b'authorization', b'Bearer {}')]", "{{b'password': b'{}'}}", "('api_key', '{}')", "cmd --password {}",
    "<password>{}</password>", r'"{{\"password\": \"{}\"}}"', "passphrase: \"a {} b\"", "client_secret={}&x=1",
    "Config(api_key='{}', n=3)", "the password is {}", "user u with password {}", "password=\n'{}'",
]  # fmt: skip
PLAIN = [
    "sha256 9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08 does not match", "commit 0dc3f4f0e1d2c3b4a5968778695a4b3c2d1e0f00",
    "run 20261126085532 in /tmp/pytest-of-root/pytest-0/test_a_run_that_is_long0/outputs/20261126085532-1/stages/grpo",
    "model.layers.31.block_sparse_moe.experts.127.down_proj.weight_scale_inv", "Qwen3-30B-A3B-Instruct-2507-FP8-GPTQ-Int4",
    "CosmosTransformer3DModel and Qwen2_5_VLForConditionalGeneration, Phi4MultimodalForCausalLM",
    "token 151643 of 2097152 tokens, pad_token = '<|endoftext|>', eos_token_id=151645", "step 12/100  loss 0.1234567890123456",
    "key transformer_blocks.0.attn1.to_q.weight is missing", "set AWS_SECRET_ACCESS_KEY, REMOTE_REWARD_TOKEN or HF_TOKEN",
    str(uuid.UUID(int=2**127 + 12345)), "s3://bucket/contents/9f86d081884c7d659a2feaa0c55ad015/model-00001-of-00002.safetensors",
    "the reward 'pickscore' needs options.processor_path; password: ask the owner", "https://host:4200/api/flow_runs/filter",
    "laion/CLIP-ViT-H-14-laion2B-s32B-b79K", "the secret values in a text, the password of the user, password authentication",
    "git+https://host:443/x@main", "allowed keys: 'api_key', 'base_url'", "pwd: /home/ada/clone", "Basic authentication is",
    "/root/.cache/torchinductor/cab7gkw3pq5z2mx4t6y3r2w5k7j3h2g5f7d3s2a5.py:12", "test_that_is_named_in_a_long_sentence_2_3_4",
]  # fmt: skip


@pytest.mark.parametrize("secret", KNOWN)
def test_a_known_form_is_masked_wherever_it_stands(secret: str) -> None:
    for text in (secret, f"refused {secret}.", f"'{secret}'", f"k={secret},", f"a\n{secret}\nb"):
        assert not any(part in mask_text(text) for part in secret.split("\n")), mask_text(text)


@pytest.mark.parametrize("text", NAMED)
def test_what_a_word_names_as_secret_is_masked(text: str) -> None:
    assert "***" in mask_text(text), mask_text(text)
    assert mask_text(mask_text(text)) == mask_text(text)


@pytest.mark.parametrize("form", FORMS)
def test_a_weak_secret_is_masked_where_something_says_that_it_is_one(form: str) -> None:
    rng = random.Random(1)
    for _ in range(20):
        secret = "".join(rng.choices(string.ascii_letters, k=5)) + "".join(rng.choices(string.digits, k=4))
        assert secret not in mask_text(form.format(secret)), mask_text(form.format(secret))


@pytest.mark.parametrize("text", PLAIN)
def test_names_digests_numbers_and_paths_stay(text: str) -> None:
    assert mask_text(text) == text


def test_drawn_strings_are_masked_and_classes_are_not() -> None:
    rng = random.Random(0)
    letters = string.ascii_letters + string.digits
    drawn = [base64.urlsafe_b64encode(rng.randbytes(32)).decode() for _ in range(300)]
    drawn += [base64.b64encode(rng.randbytes(36)).decode() for _ in range(300)]
    drawn += ["".join(rng.choices(letters, k=k)) for k in (24, 32, 40, 64) for _ in range(150)]
    drawn += ["-".join("".join(rng.choices(letters, k=8)) for _ in range(4)) for _ in range(50)]
    drawn += [rng.randbytes(k).hex() for k in (16, 24, 48) for _ in range(50)]
    kept = [each for each in drawn if each in mask_secret_spans(f"refused: {each}")]
    assert len(kept) / len(drawn) < 0.03, kept
    words = {word for file in Path("cosmos_core").rglob("*.py") for word in file.read_text().split()}
    some = sorted(words)[::3]
    assert [word for word in some if mask_secret_spans(word) != word and not set(word) & set("=:*")] == []


def test_every_handler_gets_records_and_tracebacks_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_additional_secret_values", {"told by settings"})
    factory, stream = logging.getLogRecordFactory(), io.StringIO()
    log, handler = logging.getLogger("of a library"), logging.StreamHandler(stream)
    log.addHandler(handler)
    try:
        mask_log_records()
        mask_log_records()
        try:
            raise ValueError("password=correcthorse") from OSError(KNOWN[0])
        except ValueError:
            log.exception("with %s, %s", {"token": KNOWN[1]}, "told by settings")
    finally:
        logging.setLogRecordFactory(factory)
        log.removeHandler(handler)
    text = stream.getvalue()
    assert "Traceback" in text and text.startswith("with {'token': '***'}, ***\n")
    assert not any(secret in text for secret in ("correcthorse", KNOWN[0], KNOWN[1]))


def test_an_error_and_settings_are_known_by_their_own() -> None:
    error = StageFailed(f"refused: {KNOWN[0]}")
    mask_error_message(error)
    assert str(error) == "refused: ***"
    response = RuntimeError({"password": "correcthorse"}, 3, b"token=" + KNOWN[0].encode())
    response.add_note(f"sent {KNOWN[1]}")
    mask_error_message(response)
    assert response.args == ("{'password': '***'}", 3, "b'token=***'") and response.__notes__ == ["sent ***"]
    settings = {"steps": 3, "api_key": "abc", "deep": [{"password": ["x", "y"], "name": "n"}], "secrets": {"a": "z"}}
    assert sorted(find_secrets(settings)) == ["abc", "x", "y", "z"]
    columns = {"text_key": "instruction", "pad_token": "<|endoftext|>", "key_env": "JUDGE_KEY", "hub_token": "a1b2c3d4"}
    columns |= {
        "answer_key": "prompt_v2",
        "image_key": "image1",
        "image_token": "<IMG_CONTEXT_1>",
        "unk_token": "[UNK]",
    }
    columns |= {"eos_token": "<|extra_0|>", "token_file": "/home/ada/.token2", "label_key": "extra_info.answer"}
    columns |= {
        "passage_key": "passage_text",
        "author_key": "author_name",
        "design_key": "design",
        "capital_key": "name",
    }
    columns |= {"bos_token": "<｜begin▁of▁sentence｜>", "special_tokens": ["[INST] x", "<｜end▁of▁sentence｜>"]}
    assert list(find_secrets(columns)) == ["a1b2c3d4"], "no log calls the column of an instruction ***"
    letters = {
        "bot_token": "abcdefgh",
        "signing_key": "ijklmnop",
        "encryption_key": "qrstuvwx",
        "bearer_token": "yz_ab",
        "accessKey": "cdefghij",
        "apikey": "klmnopqr",
        "db_password": "stuvwxyz",
        **{name: f"{name}_letters" for name in ("oauth_token", "authorization_token", "signature_key", "userpass_key")},
    }
    assert list(find_secrets(letters)) == list(letters.values())


def test_parameters_of_a_flow_are_kept_unless_their_name_or_value_is_a_secret() -> None:
    """A run whose parameter is not kept cannot be resumed: sort orders, columns and stop tokens are kept."""
    kept = {"sort_key": "score:desc", "keys": "question,answer", "text_key": "messages[0].content", "hf_token": ""}
    kept |= {
        "split_key": "train[:100]",
        "stop_tokens": ["</s>", "\n\n"],
        "stop_token": "\n\n",
        "url": "http://s:9000/b",
    }
    kept |= {
        "max_new_tokens": "512",
        "passage_key": "passage_text",
        "tokens": {"user": "<|user 1|>"},
        "o": {"keys": "a,b", "key": "x:1"},
    }
    assert mask_named_secrets(kept) == kept
    secrets = {"api_key": "correct horse", "accessKey": "a1", "hf_token": "a1b2", "password": "x", "secret": "a 1"}
    secrets |= {"keys": KNOWN[0], "wandb_key": "0123456789abcdef" * 2, "url": "http://ada:correct-horse@store:9000/b"}
    secrets |= {"openai_key": "my plain key 1", "license_key": "ABCD-1234-EFGH-5678", "db_key": "S3cr!tV@lue"}
    assert mask_named_secrets({"of": secrets}) == {"of": dict.fromkeys(secrets, "***")}
    nested = {"api": {"key": "k1-22"}, "tokens": {"github": "abc-123-def"}}
    assert mask_named_secrets(nested) == {"api": {"key": "***"}, "tokens": {"github": "***"}}
    paths = {"api_keys": {"openai_path": "/run/secrets/openai 1"}}
    assert mask_named_secrets(paths) == paths
    nested = {"password": {"of": ["abc"]}, "keys": {"of": ["a:b"], "db_password": "correcthorse"}}
    masked = {"password": {"of": ["***"]}, "keys": {"of": ["a:b"], "db_password": "***"}}
    assert mask_named_secrets(nested) == masked


def test_an_event_quotes_an_error_without_secrets(tmp_path: Path) -> None:
    record_event(tmp_path, "not sent", "Could not connect to http://ada:correct-horse@store:9000/bucket")
    assert json.loads((tmp_path / "events.jsonl").read_text())["detail"].endswith("http://ada:***@store:9000/bucket")


def test_settings_are_shown_without_what_users_name_a_secret() -> None:
    custom = {"judge": {"password": "abc", "steps": 3}, "of": [{"accessToken": "d"}, "e"], "url": f"h?k={KNOWN[0]}"}
    shown = mask_settings({"custom": custom, "train": {"score_key": "f", "seed": None}})
    masked = {"judge": {"password": "***", "steps": 3}, "of": [{"accessToken": "***"}, "e"], "url": "h?k=***"}
    assert shown == {"custom": masked, "train": {"score_key": "f", "seed": None}}
    columns = {"api": {"text_key": "question"}, "signal": {"label_key": "text"}}
    assert mask_settings({"custom": columns}) == {"custom": columns}
    nested = {"tokens": {"openai_password": "correcthorse"}, "text_key": {"password": "batterystaple"}}
    masked = {"tokens": {"openai_password": "***"}, "text_key": {"password": "***"}}
    assert mask_settings({"custom": nested}) == {"custom": masked}
    assert list(find_secrets(nested)) == ["correcthorse", "batterystaple"]
    assert mask_settings({"custom": {"credentials": {"of": "abc"}}}) == {"custom": {"credentials": {"of": "***"}}}
    assert mask_settings("abc", "entry.arguments.api_key") == "***" and mask_settings("abc", "judge.key_env") == "abc"


@pytest.mark.parametrize(
    ("name", "value"),
    [("PGPASSWORD", "correct horse"), ("MYSQL_PWD", "correct horse"), ("SMTP_PASS", "correct horse"),
     ("REDISCLI_AUTH", "correct horse"), ("http_proxy", "ada:correct-horse@proxy:3128")],
)  # fmt: skip
def test_variables_of_common_programs_are_secret(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    assert mask_text(f"refused {value}").count("horse") == 0 and name not in environment_for_user_code(())


def test_a_log_that_others_wrote_has_no_such_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "_READ_BLOCK_BYTES", 64)
    log = tmp_path / "log"
    log.write_bytes("password=хорошо-сегодня-à-demain\n".encode())  # has the bytes 0x85 and 0xa0
    mask_file(log)
    assert set(log.read_bytes().removeprefix(b"password=")) == set(b"*\n")
    log.write_bytes(b"".join(b"\xff" + b"." * gap + KNOWN[0].encode() + b"\n" for gap in range(70)))
    size = log.stat().st_size
    mask_file(log)
    assert b"hf_" not in log.read_bytes() and log.stat().st_size == size


PIECES = ("x", "-eyJ", "a://", "token=", "aB3", "sk-", "a-", "key ")


@pytest.mark.parametrize("piece", [pytest.param(p, marks=[pytest.mark.full] * (p in PIECES[4:])) for p in PIECES])
def test_a_long_text_of_one_piece_is_looked_at_in_linear_time(piece: str) -> None:
    """Quadratic in its length, one such text would take more than half an hour, which no test has."""
    text = mask_text(piece * ((3 << 17) // len(piece)) + "\npassword=correcthorse")
    assert text.endswith("\npassword=***")
