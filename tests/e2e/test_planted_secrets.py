"""A whole run with secrets planted in the environment, in addresses, parameters and names: a search
through everything that it wrote and printed finds none of them.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import ROOT, run

from rlhf_core.errors import EXIT_USER_ERROR

pytestmark = [pytest.mark.services, pytest.mark.slow, pytest.mark.timeout(3600)]
PLACES = (
    "hub", "store", "model", "mail", "database", "proxy", "git", "remote", "parameter", "name",
)  # fmt: skip
# Each is another, so that one that is found says where it came from.
SECRETS = {place: f"hf_{place}" + "aB3x" * 8 for place in PLACES}
ENVIRONMENT = {
    "HF_TOKEN": SECRETS["hub"],
    "AWS_SECRET_ACCESS_KEY": SECRETS["store"],
    "OPENAI_API_KEY": SECRETS["model"],
    "SMTP_PASSWORD": SECRETS["mail"],
    "BACKUP_URL": f"postgresql://backup:{SECRETS['database']}@127.0.0.1:9/rlhf",
    "HTTPS_PROXY": f"http://user:{SECRETS['proxy']}@127.0.0.1:9",
    "NO_PROXY": "127.0.0.1,localhost",
}


def files_of(folder: Path) -> Iterator[Path]:
    for path in folder.rglob("*"):
        if path.is_file() and not path.is_symlink():
            yield path


def leaks(folder: Path, planted_in: set[Path]) -> list[str]:
    """Where a secret stands in a file or its name, but for the files that were given it."""
    found = []
    for path in files_of(folder):
        content = b"" if path in planted_in else path.read_bytes()
        for place, secret in SECRETS.items():
            if secret.encode() in content or secret in str(path.relative_to(folder)):
                found.append(f"{place} in {path.relative_to(folder)}")
    return found


def test_a_search_through_everything_that_a_run_wrote_finds_no_secret(tmp_path: Path) -> None:
    workspace, home, scratch = (tmp_path / name for name in ("workspace", "home", "scratch"))
    home.mkdir()
    scratch.mkdir()
    env = ENVIRONMENT | {"HOME": str(home), "TMPDIR": str(scratch)}

    def rlhf(*words: str | Path, timeout: float = 300) -> subprocess.CompletedProcess[str]:
        return run("rlhf", *words, cwd=ROOT, timeout=timeout, **env)

    named = rlhf("init", tmp_path / SECRETS["name"], "--profile", "smoke")
    assert named.returncode == EXIT_USER_ERROR, "its path would stand in every record"
    made = rlhf("init", workspace, "--profile", "smoke")
    assert made.returncode == 0, made.stderr
    for command in (
        ["git", "init", "-q"],
        ["git", "remote", "add", "origin", f"https://user:{SECRETS['git']}@example.com/a.git"],
        ["dvc", "remote", "add", "--local", "mirror", f"https://u:{SECRETS['remote']}@example.com"],
    ):
        done = run(*command, cwd=workspace, **env)
        assert done.returncode == 0, done.stderr
    params = workspace / "params.yaml"
    plain = params.read_text()
    params.write_text(plain.replace("rlhf-policy-smoke", SECRETS["parameter"]))
    refused = rlhf("run", "--workspace", workspace)
    assert refused.returncode == EXIT_USER_ERROR, refused.stdout + refused.stderr
    params.write_text(plain)
    trained = rlhf("run", "--workspace", workspace, timeout=3000)
    assert trained.returncode == 0, trained.stdout[-3000:] + trained.stderr[-3000:]
    printed = [rlhf(*words, "--workspace", workspace) for words in (["status"], ["doctor"])]
    said = "".join(done.stdout + done.stderr for done in (named, made, refused, trained, *printed))
    assert not [place for place, secret in SECRETS.items() if secret in said]
    own = {workspace / ".git/config", workspace / ".dvc/config.local"}
    assert len(list(files_of(workspace))) > 100 and (workspace / "mlflow.db").exists()
    assert not leaks(tmp_path, own)
    # The search finds what is there: both files were given an address with its password.
    assert len(leaks(workspace, set())) == len(own)
