"""No secret reaches a message, a log line or a traceback, whichever library wrote it."""

from __future__ import annotations

import logging
import shutil
import sys
from urllib.parse import quote

import pytest

from flows import cli
from rlhf_core.data.text import TerminalFormatter
from rlhf_core.errors import ConfigError, first_line, is_full_disk, named_line
from rlhf_core.redaction import redacted

SECRET = "hunter2-and-more"
SHORT_NAMES = (
    "t", "k", "s", "p", "h", "st", "tk", "ak", "sk", "tok", "pw", "pin", "otp", "sid", "session", "ticket",
    "hmac", "hash", "sign", "nonce", "sas", "assertion", "SAMLResponse", "user.pw",
)  # fmt: skip
WITH_SECRET = (
    f"http://user:{SECRET}@localhost:5000",
    f"Max retries: HTTPConnection(host='http://user:{SECRET}@localhost:5000/api', port=80)",
    f"postgresql+psycopg2://rlhf:{SECRET}@db:5432/mlflow?sslmode=off",
    f"redis://:{SECRET}@localhost",
    f"http://user:{SECRET}@more@localhost/x",
    f"http://user:{SECRET}/more@localhost/x",
    f"https://{SECRET}@github.com/a/b.git",
    f"git+https://x-access-token:{SECRET}@github.com/a/b.git",
    f"next=http%3A%2F%2Fuser%3A{SECRET}%40localhost%3A5000",
    f"GET https://store/x?X-Amz-Credential=a&X-Amz-Signature={SECRET}&v=1",
    f"https://store/x?sp=r&sig={SECRET}",
    f"https://store/x?access_token={SECRET}",
    f"headers: {{'Authorization': 'Bearer {SECRET}'}}",
    f"authorization: Basic {SECRET}==",
    f"Authorization: token {SECRET}",
    f"https://store/x?pwd={SECRET}",
    f"https://store/callback#access_token={SECRET}",
    f"next=https%3A%2F%2Fstore%2F%3Ftoken%3D{SECRET}",
    f"machine store login me password {SECRET}",
    f"connection to 'host=db user=me password={SECRET} dbname=x' failed",
    f"host=db password='{SECRET}'",
    f"Driver=x;Server=db;UID=me;PWD={SECRET};",
    f"DefaultEndpointsProtocol=https;AccountName=a;AccountKey={SECRET}==;EndpointSuffix=x",
    f'{{"password": "{SECRET}", "user": "me"}}',
    f"{{'api_key': '{SECRET}'}}",
    f"MLFLOW_TRACKING_PASSWORD={SECRET} python x.py",
    f"export AWS_SECRET_ACCESS_KEY='{SECRET}'",
    f"command: mysql --password {SECRET} -h db",
    f"X-Api-Key: {SECRET}",
    f"PRIVATE-TOKEN: {SECRET}",
    f"Set-Cookie: session={SECRET}; Path=/",
    f"https://store/x?user=me&pass={SECRET}",
    f"https://store/x?db_pass={SECRET}&v=1",
    f"https://store/x?passphrase={SECRET}",
    f"https://store/x?jwt={SECRET}",
    f"command: curl -u me:{SECRET} https://store/x",
    f"curl -U 'me:{SECRET}' x",
    f"curl --user me:{SECRET} x",
    f'curl --proxy-user="me:{SECRET}" x',
    f"POST https://hooks.slack.com/services/T0/B0/{SECRET}",
    f"POST https://hooks.slack.com/workflows/T0/A0/1/{SECRET}",
    f"https://discordapp.com/api/webhooks/123/{SECRET}",
    f"https://outlook.office.com/webhook/a@b/IncomingWebhook/{SECRET}",
    f"https://open.feishu.cn/open-apis/bot/v2/hook/{SECRET}",
    f"https://hooks.zapier.com/hooks/catch/1/{SECRET}/",
    f"https://chat.example.com/hooks/{SECRET}",
    f"https://maker.ifttt.com/trigger/x/with/key/{SECRET}",
    f"https://api.telegram.org/bot123456:{SECRET}/sendMessage",
    f"https://events.pagerduty.com/integration/{SECRET}/enqueue",
    f"https://store/callback?code={SECRET}",
    f"cannot connect to me:{SECRET}@db.example.com:5432",
    f"Authorization: {SECRET}",
    f"Authorization: ApiKey {SECRET}",
    f"Proxy-Authorization: Negotiate {SECRET}",
    f'Authorization: Digest username="me", response="{SECRET}"',
    f"Authorization: AWS4-HMAC-SHA256 Credential=a/20260101/s3, Signature={SECRET}",
    f"{{'Authorization': 'Key {SECRET}'}}",
    f'{{"authorization": "{SECRET}"}}',
    f"Cookie: theme=dark; session={SECRET}",
    f"X-Vault-Token: {SECRET}",
    f"x-amz-security-token: {SECRET}",
    f"Ocp-Apim-Subscription-Key: {SECRET}",
    f"password: {SECRET}",
    f'password = "{SECRET}"',
    f"aws_secret_access_key = {SECRET}",
    f"api_key: {SECRET}",
    f"HF_TOKEN={SECRET} python train.py",
    f"WANDB_API_KEY: {SECRET}",
    f"environ({{'PREFECT_DEPLOY_TOKEN': '{SECRET}'}})",
    f"login(token='{SECRET}')",
    f"token: {SECRET}",
    f"command: hf auth login --token {SECRET}",
    *(f"https://store/x?a=1&{name}={SECRET}&v=1" for name in SHORT_NAMES),
    f"next=https%3A%2F%2Fstore%2F%3Fpw%3D{SECRET}",
    f"mysql -u root -p{SECRET} db",
    f"mysqldump -h db -p'{SECRET}' x",
    f"mariadb --user=me -p{SECRET}",
    f"mongosh -u me -p {SECRET}",
    f"redis-cli -h db -a {SECRET}",
    f"redis-cli --pass {SECRET}",
    f"REDISCLI_AUTH={SECRET} redis-cli",
    f"sshpass -p {SECRET} ssh host",
    f"7z x -p{SECRET} a.7z",
    f"unzip -P {SECRET} a.zip",
    f"docker login -u me -p {SECRET} registry.example.com",
    f"podman login -p={SECRET}",
    f"docker login --password={SECRET}",
    f"az login --service-principal -u app -p {SECRET} --tenant t",
    f"wandb login --relogin {'a1' * 20}{SECRET}",
    f"vault login {'aB3' * 5}{SECRET}",
    f"prefect cloud login -k {'aB3' * 5}{SECRET}",
    f"wandb api key: {SECRET}",
    f"http --auth me:{SECRET} x",
    f"wget --http-password={SECRET} x",
    f"ldapsearch -D cn=me -w {SECRET}",
    f"openssl rsa -passin pass:{SECRET}",
    f"openssl enc -k {SECRET}",
    f"smbclient -U me%{SECRET} //h/d",
    f"lftp -u me,{SECRET} h",
    f"sqlcmd -U me -P {SECRET}",
    f"twine upload -u me -p {SECRET} dist/*",
    f"rclone --sftp-pass {SECRET}",
    f"doctl auth init -t {'aB3' * 5}{SECRET}",
    f"jupyter lab --NotebookApp.token={SECRET}",
    f"dvc remote modify --local r password {SECRET}",
    f"aws configure set aws_secret_access_key {SECRET}",
    f"curl -x http://p -u me:{SECRET} x; curl -u me:{SECRET} -U p:{SECRET} x",
    f"--password={SECRET}",
    f"//packages.example/:_authToken={SECRET}",
    f"_auth={SECRET}",
)
TOKENS = (
    "hf_" + "aB3" * 10, "ghp_" + "aB3" * 12, "github_pat_" + "aB3_" * 10, "sk-proj-" + "aB3-" * 8, "AKIA" + "ABCD" * 4,
    "xoxb-" + "123-" * 6, "pnu_" + "aB3" * 12, "eyJhbGciOiJI.eyJzdWIiOiIx.c2lnbmF0dXJl", "glpat-" + "aB3" * 8,
    "AIza" + "aB3" * 12, "npm_" + "aB3" * 12, "pypi-AgEI" + "aB3_" * 12, "sk_live_" + "aB3" * 8, "ya29." + "aB3-" * 9,
    "gsk_" + "aB3" * 14, "r8_" + "aB3" * 12, "nvapi-" + "aB3-" * 12, "glrt-" + "aB3" * 8, "dop_v1_" + "ab3" * 20,
    "SG." + "aB3_" * 5 + "." + "aB3-" * 10, "eyJhbGciOi.eyJzdWIiOi.c2ln", "hf_oauth_" + "aB3" * 9,
    "api_org_" + "aB3" * 11, "ABIA" + "ABCD" * 4, "xapp-1-A0-1-" + "ab3" * 20, "gldt-" + "aB3_" * 5,
    "glsa_" + "aB3" * 10 + "_ab12cd34", "hvs." + "aB3_" * 8, "ATATT3x" + "aB3_" * 12, "lin_api_" + "aB3" * 13,
    "ntn_" + "aB3" * 15, "shpat_" + "ab3f" * 8, "wandb_v1_" + "aB3" * 20, "tgp_v1_" + "aB3" * 12, "pplx-" + "aB3" * 16,
    "xai-" + "aB3" * 20, "AC" + "ab3f" * 8 + ":" + "0ab3" * 8, "SK" + "ab3f" * 8, "key-" + "ab3f" * 8,
    "ab3f" * 8 + "-0ab3ab3f-0ab3ab3f", "fw_" + "aB3" * 8, "co_" + "aB3" * 13, "1//0" + "aB3_" * 15,
    "GOCSPX-" + "aB3-" * 7, "EAA" + "aB3" * 40, "v1.0-" + "ab3f" * 6 + "-" + "ab3" * 48, "dp.st." + "aB3" * 14,
    "dp.st.prd." + "aB3" * 14, "dp.pt." + "aB3" * 14, "sntrys_" + "aB3" * 20, "dapi" + "ab3f" * 8 + "-2",
    "ops_eyJ" + "aB3" * 60, "jina_" + "aB3" * 20, "pa-" + "aB3" * 14, "tvly-dev-" + "aB3" * 11, "pcsk_" + "aB3" * 20,
    "lsv2_pt_" + "ab3f" * 8 + "_" + "0ab3f" * 2, "ls__" + "ab3f" * 8, "whsec_" + "aB3" * 11,
    "pscale_tkn_" + "aB3_" * 10, "sbp_" + "ab3f" * 10, "nfp_" + "aB3" * 12, "fo1_" + "aB3" * 14, "rnd_" + "aB3" * 11,
    "xkeysib-" + "ab3f" * 16 + "-" + "aB3x" * 4, "ab3f" * 8 + "-us12", "123456789:AA" + "aB3" * 11, "NRAK-" + "AB3" * 9,
    "glc_" + "aB3" * 20, "phx_" + "aB3" * 14, "pat" + "aB3x" * 3 + "aB." + "ab3f" * 16, "ATCTT3x" + "aB3" * 30,
    "ATBB" + "aB3" * 11, "aB3x" * 21 + "aB==", "aB38Q~" + "aB3x" * 8 + "aB", "AKCp" + "aB3" * 23,
    "aB3x" * 3 + "aB.atlasv1." + "aB3" * 20, "oy2" + "ab3" * 14 + "a", "pul-" + "ab3f" * 10,
    "tskey-auth-" + "aB3" * 4 + "-" + "aB3" * 10, "dt0c01." + "AB3" * 8 + "." + "AB3X" * 16,
    "shippo_live_" + "ab3f" * 10, "lin_oauth_" + "ab3f" * 16, "bkua_" + "ab3f" * 10,
    "CCIPAT_" + "aB3" * 7 + "_" + "ab3f" * 10, "API-" + "AB3" * 8 + "AB", "rpa_" + "AB3X" * 10, "ak-" + "aB3" * 7,
    "sk_" + "ab3f" * 12, "FwoGZXIvYXdzE" + "aB3" * 30, "LTAI" + "aB3" * 7, "sqp_" + "ab3f" * 10, "sgp_" + "ab3f" * 10,
    "dckr_oat_" + "aB3" * 11, "ab3f0123-0ab3-0ab3-0ab3-" + "0ab3" * 3 + ":" + "ab3f" * 8, "v1." + "ab3f" * 10,
    "re_" + "aB3x" * 2 + "_" + "aB3" * 8, "HRKU-" + "aB3" * 12, "fc-" + "ab3f" * 8, "apify_api_" + "aB3" * 12,
    "ab3f" * 8 + "." + "aB3x" * 4, "flp_" + "aB3" * 15, "A3-AB3XY9-AB3XY9AB3XY-AB3XY-AB3XY-AB3XY",
    "secret_" + "aB3" * 7 + "_" + "ab3f" * 8 + "." + "aB3" * 10, "Xk9vQ2mZ7rT4wL8nB3cY6hJ1",
    "nstZrZNe58keOA/lo+eKKO1O4IUAAoBEHM5ptArf", "dckr_pat_" + "aB3_" * 7, "PMAK-" + "ab3f" * 14, "figd_" + "aB3_" * 10,
    "AGE-SECRET-KEY-1" + "QPZRY9X8" * 7,
)  # fmt: skip
ORDINARY = (
    "cannot listen on 127.0.0.1 port 5000",
    "http://localhost:5000/#/models/rlhf-policy@champion",
    "hub:owner/name@revision, abfs://container@account/x, github://owner:repository@ref",
    "the token budget=512 of sk-learn; max_tokens=3, author=someone",
    "s3://bucket/key.jsonl: 3 rows; mail someone@example.com",
    "{'eos_token': '<|im_end|>', \"pad_token\": \"</s>\"}; eos_token=</s-of-text>, key='messages'",
    "RLHF_SIGNING_KEY_PASSWORD: cannot decrypt the private key; set api_key to a name; password required",
    "GET https://store/x?bypass=true&encode=utf8&compat=v1 of user: me; sort -u a:b.txt --user me;",
    "docker run -u 1000:1000",
    "send it as Authorization: Bearer TOKEN; the header authorization is missing; cookie policy: none",
    "MLFLOW_TRACKING_TOKEN: 1 of 2 is unset; RLHF_SIGNING_KEY: /keys/k1.pem has the mode 666;",
    "RLHF_SIGNING_KEY=keys/k1.pem",
    "pad_token: '<|pad_1|>', token: 5 of 12, token='<|im_end|>', bos_token='<s1>'; tokens: 123456789012",
    "image:1.2@sha256:0123456789abcdef, owner/name:tag@ref, http://host:5000/hooks, https://host/docs/webhooks.md",
    "password: required; secret = the one of the registry; api_key: set it; ?code=404",
    "sk-learn, r8_short, npm_config_cache, SG.x, a login page password field, --password",
    "docker run -p 8080:80 -p 5000 image; ssh -p 2222 host; mkdir -p data/raw; psql -p 5432;",
    "cp -p a b; rlhf serve -p 8080",
    "mysql -P 3306 -h db --protocol tcp; docker login --password-stdin; wandb login;",
    "the login of run ab3f0123ab3f0123ab3f0123ab3f0123",
    "commit 8a5466cc1d2f4b6a8c0e2f4a6b8d0c2e4f6a8b0d, sha256:"
    + "ab3f" * 16
    + ", sha256-"
    + "Ab3x" * 10
    + "AbC=, md5 "
    + "0ab3" * 8,
    "runs:/"
    + "ab3f" * 8
    + "/model, models:/m-"
    + "ab3f" * 8
    + ", run 3f2504e0-4f89-41d3-9a0c-0305e82c3301, run-"
    + "ab3f" * 8,
    "files/md5/ab/"
    + "3f0a" * 7
    + "3f.dir, snapshots/"
    + "ab3f" * 10
    + "/model-00001-of-00002.safetensors, sha256-"
    + "ab3f" * 16,
    "meta-llama/Llama-3.1-8B-Instruct-GPTQ-INT4, Qwen/Qwen2.5-Coder-32B-Instruct-AWQ,",
    "DeepSeek-R1-Distill-Qwen-1.5B-Q4_K_M.gguf",
    "Qwen3MoeForSequenceClassification, XLMRobertaXLForCausalLM, DeepseekV3ForTokenClassification2,",
    "CLIPTextModelWithProjection",
    "undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE",
    "reward/kl_coef_0.05, eval/win_rate@champion, train.policy_loss=1.25e-05, p99_latency_ms,",
    "logprobs/ref-2024-11-30T03:52:35Z",
    "https://store/x?t=1700000000&s=20&p=2&h=720&st=2024-01-01T00:00:00Z&session=5&k=ab,",
    "?hash=none, page?design=modern2024",
    "req_011CTaBcDe4FgHi5JkLm6NoP, chatcmpl-9XbC2dEf4GhI6jKl8MnOp, request id: msg_01XFDUDYJgAACzvnptvVoYEL",
    "sm80_xmma_gemm_f32f32_f32f32_f32_tn_n_tilesize128x128x8_stage3,",
    "GPU-8932f937-d72c-4106-c12f-20bd9faed9f6, tmpx8kz_1a9",
    "pa-per, co_occurrence, key-value, fw_bw, 1//0, v1.0-rc1, ops_per_second, EAA, AC/DC, dapi,",
    "re_run_all_of_it, ls__, ak-47",
    "/home/me/Projects/MyModel2/V3Final/Run4B/Checkpoint9X/Best1A/Data,",
    "C:\\Users\\Me\\AppData\\Local\\Temp\\pip-build-2x8kz",
    "curl -sSL -o a.txt https://host/x; wget -P folder x; http GET host/x; openssl req -x509 -newkey rsa:2048; zip -P",
    "ValueError: 12345678901234567890123456789012 is no id, 0x7f3a5c2d1e4b9a80, 1e-05, 2,147,483,648 bytes",
    "rlhf-policy-smoke-2024-11-30-03h52m35s-seed12, checkpoint-1000-of-20000, step=200-val_loss=0.1234.ckpt",
)


@pytest.mark.parametrize("text", WITH_SECRET)
def test_secrets_in_addresses_and_headers_are_masked(text: str) -> None:
    for shown in (
        redacted(text),
        str(ConfigError(text)),
        first_line(OSError(text)),
        named_line(OSError(text)),
    ):
        assert SECRET not in shown and "***" in shown


@pytest.mark.parametrize(
    "text",
    [
        f"machine store\n  login me\n  password {SECRET}\n",
        "-----BEGIN EC PRIVATE KEY-----\nMHcCAQ\nEEIB==\n-----END EC PRIVATE KEY-----\n",
        "-----BEGIN ENCRYPTED PRIVATE KEY-----\nProc-Type: 4\n\nMHcCAQ\n-----END ENCRYPTED PRIVATE KEY-----",
        "-----BEGIN PGP PRIVATE KEY BLOCK-----\n\nMHcCAQ\n-----END PGP PRIVATE KEY BLOCK-----",
        "PuTTY-User-Key-File-3: on this machine\nPrivate-Lines: 1\nMHcCAQ\nPrivate-MAC: ab",
        '{"key": "-----BEGIN PRIVATE KEY-----\\nMHcCAQ\\n-----END PRIVATE KEY-----"}',
    ],
)
def test_secrets_of_files_are_masked(text: str) -> None:
    assert SECRET not in redacted(text) and "MHcCAQ" not in redacted(text)
    assert "machine" in redacted(text) or "-----END" in redacted(text)
    assert "***" in redacted(text)


@pytest.mark.parametrize("token", TOKENS)
def test_tokens_of_known_shapes_are_masked(token: str) -> None:
    assert token not in redacted(f"401 for {token}, try again")


@pytest.mark.parametrize("text", ORDINARY[:2] + ORDINARY[3:])
def test_ordinary_texts_stay(text: str) -> None:
    assert redacted(text) == text


def test_secrets_of_the_environment_are_masked_wherever_a_library_writes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://user:pa%20ss#word@localhost:1")
    monkeypatch.setenv("MLFLOW_TRACKING_PASSWORD", "correct horse")
    monkeypatch.setenv("PREFECT_API_AUTH_STRING", "admin:battery staple")
    text = redacted(
        "Port 'pa%20ss#word' and 'pa ss#word'; correct horse; admin:battery staple; 'battery staple'"
    )
    assert text == "Port '***' and '***'; ***; ***; '***'"


@pytest.mark.parametrize(
    "address",
    [
        "http://me:{}@host:5000", "http://{}@host:5000", "https://{}@host/base", "http://host:5000/?token={}",
        "https://host/base?v=1&access_token={}", "https://host?apikey={}&v=1", "https://host/#token={}",
        "https://host/?access={}", "postgresql://me@host/db?password={}", "mysql://host/db?user=me&pw={}",
    ],
)  # fmt: skip
@pytest.mark.parametrize("secret", [SECRET, "hunter2 and/more", "hunter2%and?more"])
def test_a_secret_of_a_servers_own_address_is_masked_apart_from_it(
    address: str, secret: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    quoted = quote(secret, safe="")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address.format(quoted))
    text = redacted(f"no login as {secret!r}, sent {quoted} to {address.format(quoted)}")
    assert secret not in text and quoted not in text and "no login as '***', sent *** to" in text


@pytest.mark.parametrize(
    "address",
    ["http://host:5000/experiments?page=champion", "ssh://trainer@host/prompts", "s3://prompts/key=champion/a?v=release"],
)  # fmt: skip
def test_words_of_an_address_stay(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", address)
    text = "champion, release, trainer, prompts, experiments, host:5000"
    assert redacted(text) == text


@pytest.mark.parametrize(
    ("name", "value", "is_secret"),
    [("SORT_KEY", "created_at", False), ("PRIMARY_KEY", "prompt", False), ("GROUP_KEY", "messages.content", False),
     ("KEY", "prompt", False), ("sortkey", "messages", False), ("HotKey", "preferences", False),
     ("apikey", "letmein", True),
     ("SORT_KEY", "aB3xQ9", True), ("DEPLOY_KEY", "abcdefghijklmnopqrstuvwxyz", True),
     ("OPENAI_API_KEY", "localkey", True), ("AWS_SECRET_ACCESS_KEY", "letmein", True), ("APIKEY", "letmein", True),
     ("MLFLOW_TRACKING_PASSWORD", "prompt", True), ("MYSQL_PWD", "prompt", True), ("DB_PASS", "prompt", True),
     ("GITHUB_PAT", "aB3xQ9", True), ("CI_JOB_JWT", "aB3xQ9", True), ("SMTP_PASSPHRASE", "prompt", True),
     ("AZURE_STORAGE_CONNECTION_STRING", "UseDevelopmentStorage", True), ("SLACK_WEBHOOK_URL", "aB3xQ9", True),
     ("HF_TOKENS", "aB3xQ9", True), ("KUBE_TOKEN_1", "aB3xQ9", True), ("CREDENTIALS_JSON", "aB3xQ9", True),
     ("COMPASS", "prompt", False), ("BYPASS", "prompt", False), ("FORMAT", "prompt", False),
     ("SORT_PATH", "prompt", False)],
)  # fmt: skip
def test_a_word_in_a_variable_of_another_kind_of_key_is_no_secret(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, is_secret: bool
) -> None:
    monkeypatch.setenv(name, value)
    assert (
        redacted(f"the rows have no {value}") == f"the rows have no {'***' if is_secret else value}"
    )


@pytest.mark.parametrize(
    "path",
    [
        "signing.pem",
        "my keys/release.pem",
        "/gone/ci.key",
        "/gone/id_ecdsa",
        "release-key",
        "~/keys/ci",
        "../k e y",
    ],
)
def test_the_file_of_a_key_is_named(monkeypatch: pytest.MonkeyPatch, path: str) -> None:
    monkeypatch.setenv("RLHF_SIGNING_KEY", path)
    assert redacted(f"there is no file {path}") == f"there is no file {path}"


@pytest.mark.parametrize(
    "key", ["-----BEGIN EC PRIVATE KEY-----\nMHc", "MHcCAQEEIB" * 5, "a1" * 32]
)
def test_a_key_in_place_of_its_file_is_masked(monkeypatch: pytest.MonkeyPatch, key: str) -> None:
    monkeypatch.setenv("RLHF_SIGNING_KEY", key)
    assert redacted(f"there is no file {key}") == "there is no file ***"


def test_logs_and_tracebacks_are_redacted(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def crash(**_: object) -> None:
        raise ValueError(f"no answer from http://user:{SECRET}@localhost")

    try:
        crash()
    except ValueError:
        record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), sys.exc_info())
    assert SECRET not in TerminalFormatter("%(message)s").format(record)
    monkeypatch.setattr(cli, "app", crash)
    for arguments in (["rlhf"], ["rlhf", "--debug"]):
        monkeypatch.setattr(sys, "argv", arguments)
        with pytest.raises(SystemExit) as ended:
            cli.main()
        shown = capsys.readouterr().err
        assert ended.value.code == 1 and "user" not in shown and "***@localhost" in shown
        assert ("Traceback" in shown) == ("--debug" in arguments)


@pytest.mark.parametrize("redirection", [">&-", "> /dev/full", ">&- 2>&1"])
def test_output_that_cannot_be_written_is_an_error_of_the_user(redirection: str) -> None:
    import subprocess

    shell = f"{sys.executable} -m flows.cli --version {redirection}"
    ran = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=False)
    assert ran.returncode == 2 and ran.stderr.count("\n") <= 1 and "Traceback" not in ran.stderr


def test_a_full_disk_is_known_by_its_number_and_in_a_copied_folder() -> None:
    assert not is_full_disk(ConfigError("No space left on device")), (
        "its message says already what to do"
    )
    of_a_folder = shutil.Error(
        [("a", "b", "[Errno 28] No space left on device: 'b'"), ("c", "d", "the same")]
    )
    assert (
        is_full_disk(of_a_folder)
        and first_line(of_a_folder) == "[Errno 28] No space left on device: 'b'"
    )
