"""A URL with credentials is refused before they are written into a manifest, a log or a message."""

from __future__ import annotations

import pytest
from pydantic import ValidationError
from typer.testing import CliRunner

from rlhf_core.cli import app
from rlhf_core.config.data import CollectConfig, ValidateConfig
from rlhf_core.errors import DataError
from rlhf_core.storage.remote_files import carries_credentials, expand_url, local_copy

SECRET = "hunter2"
WITH_SECRET = (
    f"https://user:{SECRET}@localhost:1/x.jsonl",
    f"https://{SECRET}@localhost:1/x.jsonl",
    f"https://localhost:1/x.jsonl?v=1&access_token={SECRET}",
    f"https://localhost:1/x.jsonl?X-Amz-Credential=a&X-Amz-Signature={SECRET}",
    f"https://localhost:1/x.jsonl?sp=r&sig={SECRET}",
    f"s3://key:{SECRET}@bucket/x.jsonl",
)


@pytest.mark.parametrize("url", WITH_SECRET)
def test_credentials_are_refused_and_not_repeated(url: str) -> None:
    errors: list[str] = []
    for call in (lambda: expand_url(url, ""), lambda: local_copy(url).__enter__()):
        with pytest.raises(DataError) as refused:
            call()
        errors.append(str(refused.value))
    for config in (
        lambda: CollectConfig(source="files", files={"preferences": [url]}),  # type: ignore[arg-type]
        lambda: ValidateConfig(evaluation_files=({"path": url},)),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValidationError) as wrong:
            config()
        errors.append(wrong.value.errors()[0]["msg"])
    assert all("carries credentials" in error and SECRET not in error for error in errors)


@pytest.mark.parametrize("command", ["inspect", "validate", "convert"])
def test_commands_refuse_them(command: str) -> None:
    more = ["--to", "x.jsonl"] if command == "convert" else []
    result = CliRunner().invoke(app, ["data", command, WITH_SECRET[0], *more])
    assert isinstance(result.exception, DataError) and SECRET not in f"{result.exception}{result.output}"


@pytest.mark.parametrize(
    "url",
    [
        "hf://datasets/owner/name@main/x.jsonl",
        "abfs://container@account.dfs.core.windows.net/x.jsonl",
        "github://owner:repository@main/x.jsonl",
        "sftp://reader@host/x.jsonl",
        "https://host/x.jsonl?author=me&version=2",
        "https://[broken/x.jsonl",
    ],
)
def test_other_names_are_no_credentials(url: str) -> None:
    assert not carries_credentials(url)
