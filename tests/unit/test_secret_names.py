"""Keys in names of files, in addresses and in settings reach no log, parameter, record or DVC file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from flows.commands.init import create
from flows.dvc_repo.inputs import with_sources
from rlhf_core.config.loading import check_params
from rlhf_core.data.collection.sources import source_files
from rlhf_core.errors import ConfigError, DataError, RlhfError
from rlhf_core.redaction import holds_key
from rlhf_core.storage.data_files import expand, require_no_credentials
from rlhf_core.tracking.delivery import address
from rlhf_core.tracking.journal import Journal, RunHeader
from rlhf_core.tracking.stage_run import JournalTracker

KEYS = ("hf_" + "aB3" * 12, "ghp_" + "aB3" * 13, "AKIA" + "ABCD" * 4, "sk-proj-" + "aB3" * 8,
        "gsk_" + "aB3" * 17, "AGE-SECRET-KEY-1" + "QPZRY9X8" * 7, "dapi" + "ab3f" * 8, "dp.st." + "aB3" * 15,
        "nvapi-" + "aB3-" * 16, "dop_v1_" + "ab3f" * 16)  # fmt: skip
DVC_YAML = "stages:\n  collect: {cmd: x, deps: [.fingerprints/collect.txt], outs: [data/raw]}\n"


def refused(call: object, error: type[RlhfError], *arguments: object) -> str:
    with pytest.raises(error) as raised:
        call(*arguments)  # type: ignore[operator]
    assert "\n" not in str(raised.value)
    return str(raised.value)


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("source", ["data/{}.jsonl", "data/{}/a.jsonl", "{}/a.jsonl"])
def test_a_file_whose_name_holds_a_key_is_refused_however_it_is_named(
    key: str, source: str, tmp_path: Path
) -> None:
    file = tmp_path / source.format(key)
    file.parent.mkdir(parents=True)
    file.write_text("{}\n")
    for spec in (
        str(file.relative_to(tmp_path)),
        "**/*.jsonl",
        source.partition("/")[0].format(key),
    ):
        for read in (expand, lambda spec, base: source_files([spec], base)):
            said = refused(read, DataError, spec, tmp_path)
            assert key not in said and "***" in said and "rename it" in said


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize("folder", ["{}", "{}/toy", "of {}"])
def test_a_workspace_whose_path_holds_a_key_is_refused(
    key: str, folder: str, tmp_path: Path
) -> None:
    said = refused(create, DataError, tmp_path / folder.format(key))
    assert key not in said and not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", KEYS)
def test_dvc_yaml_never_names_such_a_file(key: str, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"{key}.jsonl").write_text("{}\n")
    files = {"source": "files", "files": {"preferences": ["data/*.jsonl"]}}
    params = check_params({"collect": files})
    assert key not in with_sources(DVC_YAML, params, tmp_path)  # the stage refuses it


@pytest.mark.parametrize("key", KEYS)
@pytest.mark.parametrize(
    "document",
    [
        {"collect": {"source": "files", "files": {"preferences": ["https://host/KEY/a.jsonl"]}}},
        {"collect": {"source": "files", "files": {"preferences": ["data/KEY.jsonl"]}}},
        {"base": {"source": "models/KEY"}},
        {"tracking": {"experiment": "KEY"}},
    ],
    ids=["address", "file", "model", "experiment"],
)
def test_settings_that_hold_a_key_are_refused(key: str, document: dict[str, object]) -> None:
    filled = json.loads(json.dumps(document).replace("KEY", key))
    said = refused(check_params, ConfigError, filled)
    assert key not in said and "key" in said


@pytest.mark.parametrize("key", KEYS)
def test_an_address_whose_path_holds_a_key_is_refused(key: str) -> None:
    said = refused(require_no_credentials, DataError, f"https://host/download/{key}/a.jsonl")
    assert key not in said


@pytest.mark.parametrize("name", ["t", "k", "s", "pw", "sid", "hmac", "user.otp", "sig", "token"])
def test_an_address_with_a_secret_in_a_short_parameter_is_refused(name: str) -> None:
    said = refused(
        require_no_credentials, DataError, f"https://host/a.jsonl?v=1&{name}=hunter2-and-more"
    )
    assert "hunter2" not in said
    require_no_credentials(
        "https://host/a.jsonl?t=1700000000&s=20&p=2&k=ab&session=5&design=modern2024"
    )


@pytest.mark.parametrize(
    "name",
    ["data/sk-translations-2024.jsonl", "hf_dataset.jsonl", "keys/token.csv", "models/asia-7b-sft",
     "hub:owner/name@0123456789abcdef0123456789abcdef01234567", "eyJ.jsonl",
     "gsk_bench.jsonl", "npm_packages_of_all_of_the_registries.jsonl", "xai-explanations-of-all-the-classifiers/a.jsonl",
     "nvapi.csv", "pypi-classifiers-and-descriptions-of-2024.jsonl", "pplx-of-models.csv", "SG.jsonl", "r8_a.jsonl"],
)  # fmt: skip
def test_ordinary_names_stay(name: str) -> None:
    assert not holds_key(name)


def test_what_waits_for_mlflow_holds_no_secret(tmp_path: Path) -> None:
    secret = "hunter2-and-more"
    uris = (
        f"http://user:{secret}@host:5000", f"https://host/?token={secret}",
        f"postgresql://user:{secret}@host/db?password={secret}", "sqlite:////srv/mlflow.db",
    )  # fmt: skip
    for uri in uris:
        assert secret not in address(uri)
    assert address(uris[-1]) == uris[-1]
    header = RunHeader(address(uris[1]), None, "rlhf", {"workspace": "a"}, 1, True)
    tracker = JournalTracker(Journal.new(tmp_path, header))
    tracker.set_tags({"workspace": KEYS[0]})
    tracker.log_params({"path": f"https://host/a?sig={secret}"})
    tracker.log_datasets({"rows": {"digest": "1", "uri": f"file:///home/{KEYS[1]}/data"}})
    tracker.journal.release()
    written = "".join(path.read_text() for path in tmp_path.rglob("*") if path.is_file())
    assert "***" in written
    for each in (secret, *KEYS):
        assert each not in written
