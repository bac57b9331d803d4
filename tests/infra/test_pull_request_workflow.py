"""The workflow for pull requests: its commands do what the page says, on a production that they only read."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.recovery.small import Bank
from tests.tools.servers import needs
from weir.settings.configuration import PROJECT

HUB = """#!/bin/sh
case "$*" in
  "api --paginate repos/somebody/shop/issues/7/comments --jq "*) exec jq -r "$5" "$LISTED" ;;
esac
echo "$@" >> "$HANDED_OVER"
"""
WORKFLOW = PROJECT / "infra" / "github" / "weir-ci.yml"
PAGE = PROJECT / "docs" / "how-to" / "pull-requests.md"


@pytest.fixture(scope="module")
def workflow() -> dict:
    return yaml.safe_load(WORKFLOW.read_text())


@pytest.fixture
def bank(tmp_path) -> Bank:
    bank = Bank.at(tmp_path / "site", WEIR_CHECKPOINTS__NUM_RETAINED="3", WEIR_SPARK__PARALLELISM="2")
    bank.epochs(1, 2, 3)
    return bank


def steps(workflow: dict) -> dict[str, dict]:
    return {step["name"]: step for job in workflow["jobs"].values() for step in job["steps"] if "run" in step}


def ended(step: dict, env: dict[str, str]) -> subprocess.CompletedProcess:
    """A step as the runner has it: `bash -e` in the project's folder."""
    shell = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    return subprocess.run(shell, cwd=PROJECT, env={**os.environ, **env}, capture_output=True, text=True, timeout=300)


def test_its_commands_write_the_comment_and_hand_it_over(workflow, bank, tmp_path):
    needs("jq", "jq")  # which the hub's own program has in it
    job = workflow["jobs"]["try"]
    programs = tmp_path / "programs"
    programs.mkdir()
    hub = programs / "gh"  # the hub itself is not here: what it would get is noted
    hub.write_text(HUB)
    hub.chmod(0o755)
    comment, summary = tmp_path / "comments" / "small.md", tmp_path / "summary.md"
    comment.parent.mkdir()
    comment.write_text("**weir ci small: nothing differs**, says the repository")
    env = {
        **bank.site.env,
        "WEIR_ENV": job["env"]["WEIR_ENV"],
        "PATH": f"{programs}:{os.environ['PATH']}",
        "PIPELINE": "small",
        "OPTIONS": "--epochs 2 --in-process",
        "COMMENT": str(comment),
        "NUMBER": "7",
        "RUNNER_TEMP": str(tmp_path),
        "GITHUB_STEP_SUMMARY": str(summary),
        "HANDED_OVER": str(tmp_path / "handed-over"),
        "COMMENTS": str(comment.parent),
        "LISTED": str(tmp_path / "comments.json"),
        "GH_REPO": "somebody/shop",
    }
    assert job["env"]["OPTIONS"] == "--epochs 2 --samples 0"
    refused = ended(steps(workflow)["Try"], {**env, "PIPELINE": "nosuch"})
    assert refused.returncode == 2 and not comment.exists(), "what was committed is nobody's comment"
    tried = ended(steps(workflow)["Try"], env)
    assert tried.returncode == 0, tried.stderr
    assert comment.read_text().startswith("**weir ci small: nothing differs**")
    others = [
        {"id": 1, "user": {"type": "Bot"}, "body": "**weir ci smaller: nothing differs**"},
        {"id": 2, "user": {"type": "User"}, "body": "**weir ci small: I think not**"},
    ]
    before = {"id": 3, "user": {"type": "Bot"}, "body": "**weir ci small: 2 rows differ**\n..."}
    for comments in (others, [*others, before]):
        (tmp_path / "comments.json").write_text(json.dumps(comments))
        done = ended(steps(workflow)["Comment"], env)
        assert done.returncode == 0, done.stderr
    assert summary.read_text() == comment.read_text() * 2
    handed_over = (tmp_path / "handed-over").read_text().splitlines()
    assert handed_over == [
        f"pr comment 7 --body-file {comment}",
        f"api --method PATCH repos/somebody/shop/issues/comments/3 -F body=@{comment}",
    ]


def test_a_pull_request_that_a_gate_would_hold_fails_and_is_commented_all_the_same(workflow):
    comment = steps(workflow)["Comment"]
    assert comment["run"] and workflow["jobs"]["comment"]["if"] == "always()"
    assert not any("continue-on-error" in step for job in workflow["jobs"].values() for step in job["steps"])


def test_what_it_installs_with_is_a_target_of_the_makefile(workflow):
    install = steps(workflow)["Install"]["run"].split()
    assert install[0] == "make"
    planned = subprocess.run(["make", "-n", *install[1:]], cwd=PROJECT, capture_output=True, text=True, timeout=60)
    assert planned.returncode == 0, planned.stderr
    assert sys.version_info >= (3, 11)


def test_it_may_write_nothing_but_the_comment(workflow):
    assert workflow["permissions"] == {}
    tries, comments = (workflow["jobs"][name] for name in ("try", "comment"))
    assert tries["permissions"] == {"contents": "read", "id-token": "write"}
    assert comments["permissions"] == {"pull-requests": "write"}
    assert "token" not in json.dumps(tries["env"]).lower() and "run: make" not in json.dumps(comments)
    used = [step["uses"] for job in (tries, comments) for step in job["steps"] if "uses" in step]
    assert used and all(re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action) for action in used)
    assert tries["steps"][0]["with"] == {"persist-credentials": False}
    assert workflow[True] == {"pull_request": None}, "not pull_request_target, which has secrets for code of strangers"


def test_the_page_shows_the_workflow_that_is_there():
    assert f"]({os.path.relpath(WORKFLOW, PAGE.parent)})" in PAGE.read_text()
    assert Path(WORKFLOW).is_file()
