"""Secrets taken out of texts that people read: passwords in URLs, tokens of known shapes, secrets
of the environment.

Libraries quote addresses and headers in their errors, and those hold passwords. Every message of
this program goes through :func:`redacted` before it is shown, logged or sent.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

MASK = "***"
# The ends of names: X-Amz-Signature, access_token, sig, db_pass, but not author and bypass.
SECRET_NAME = (
    r"(?:key|token|secret|passw(?:or)?d|passphrase|signature|sig|auth|authorization|credentials?"
    r"|(?<![a-z])(?:pass|pwd|pat|jwt))"
)
# Shorter values of the environment are words that occur in ordinary texts.
SHORTEST_SECRET = 6
_SECRET_VARIABLE = re.compile(
    r"(?:KEY|TOKEN|SECRET|PASSW(?:OR)?D|_PWD|PASSPHRASE|(?:^|_)(?:PASS|PAT|JWT)|AUTH_STRING|CREDENTIAL"
    r"|CONNECTION_STRING|WEBHOOK(?:_URL)?)S?(?:_JSON)?(?:_\d)?$",
    re.IGNORECASE,
)
# Any other name that ends in KEY may be that of a column or a sort, whose value messages have to
# say.
_SECRET_KEY = re.compile(
    r"(?:API|ACCESS|ACCOUNT|ENCRYPTION|PRIVATE|SECRET|SIGNING)_?KEY$", re.IGNORECASE
)
_KEY = re.compile(r"KEY$", re.IGNORECASE)
_WORDS = re.compile(r"(?=.{0,24}$)[a-z]+(?:[_.-][a-z]+)*")
# The path of a key, no key: a message has to name it.
_KEY_FILE = re.compile(r"[~.]{0,2}(?:/[\w.-]+)+\.\w{1,8}|.+\.(?:pem|key|crt)")
# Names a file whatever that is called; somebody may put the key itself there.
_NAMES_A_FILE = "RLHF_SIGNING_KEY"
_KEY_ITSELF = re.compile(r"\n|PRIVATE KEY|^[A-Za-z0-9+][\w+/=-]{39,}$")
_WITH_PASSWORD = re.compile(r"://[^\s/@:]*:(.+)@[^\s@]*$")
_TOKEN_SHAPES = (
    r"hf_(?:oauth_)?[A-Za-z0-9]{16,}",
    r"api_org_[A-Za-z0-9]{16,}",
    r"gh[oprsu]_[A-Za-z0-9]{16,}",
    r"github_pat_\w{16,}",
    r"glpat-[\w-]{16,}",
    r"sk-[\w-]{16,}",
    r"A(?:KI|SI|BI|CC)A[0-9A-Z]{16}",
    r"AIza[\w-]{30,}",
    r"(?:xox[abeoprs]|xapp)-[\w-]{10,}",
    r"pn[bu]_[A-Za-z0-9]{16,}",
    r"dapi[0-9a-f]{32}",
    r"eyJ[\w-]{6,}\.[\w-]{8,}\.[\w-]*",
    r"npm_[A-Za-z0-9]{30,}",
    r"pypi-[\w-]{30,}",
    r"[sr]k_(?:live|test)_[A-Za-z0-9]{16,}",
    r"ya29\.[\w-]{20,}",
    r"gsk_[A-Za-z0-9]{30,}",
    r"r8_[A-Za-z0-9]{30,}",
    r"nvapi-[\w-]{30,}",
    r"gl(?:rt|dt|cbt|ptt|ft|soat|imt|agent)-[\w-]{16,}",
    r"glsa_\w{30,}",
    r"hv[sb]\.[\w-]{20,}",
    r"ATATT3x[\w=-]{20,}",
    r"(?:lin_api|ntn|secret|phc|rubygems)_[A-Za-z0-9]{30,}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    r"sq0(?:atp|csp|idp)-[\w-]{20,}",
    r"(?:wandb|tgp)_v1_\w{20,}",
    r"(?:pplx|xai|csk|PMAK|CFPAT)-[\w-]{30,}",
    r"(?:dckr_pat|figd)_[\w-]{20,}",
    r"sntry[su]_[\w+/=-]{20,}",
    r"AGE-SECRET-KEY-1[0-9A-Z]{30,}",
    r"do[opr]_v1_[0-9a-f]{40,}",
    r"SG\.[\w-]{16,}\.[\w-]{16,}",
)
# Counts are bounded where a key may begin within what looks like another: time would grow with the
# square of the text. RE2, with which Arrow looks for these, allows a bound of at most 1000.
SECRETS = "|".join(
    (
        r"-----BEGIN (?:[A-Z0-9]+ )*PRIVATE KEY(?: BLOCK)?-----",
        r"\b(?:AKIA|ASIA)[0-9A-Z]{16}\b",
        r"\bsk-(?:[A-Za-z0-9_]{1,100}-){0,8}[A-Za-z0-9]{20,}",
        r"\bgh[pousr]_[A-Za-z0-9]{36,}",
        r"\bgithub_pat_[A-Za-z0-9_]{50,}",
        r"\bglpat-[A-Za-z0-9_-]{20,}",
        r"\bhf_[A-Za-z0-9]{30,}",
        r"\bxox[abprs]-[A-Za-z0-9-]{10,}",
        r"\bAIza[0-9A-Za-z_-]{35}",
        r"\beyJ[A-Za-z0-9_-]{10,1000}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    )
)
# Names of settings and headers whose values are secret wherever they stand. ``token`` and ``key``
# alone also name ordinary things.
_SECRET_SETTING = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|secret[_-]?(?:access[_-]?)?key|(?:api|access|account|private)[_-]?key"
    r"|(?:access|auth|bearer|private|refresh|security|session)[_-]?token)"
)
_ENDS_OF_VARIABLES = r"(?:TOKEN|KEY|SECRET|PASSW(?:OR)?D|PASSPHRASE|PAT|JWT)S?"
# Has a digit, and is no path, variable or special token.
_OF_A_KEY = r"(?![/~.$<\[{*])[^\s&;,'\"/\d]{0,60}\d(?![^\s'\"]{0,60}\.(?:pem|key|crt)\b)"
_SCHEME = r"\b[a-z][a-z0-9+.-]{0,30}"
# Counts are bounded here, too, wherever the same text may be looked through from many places.
_RULES = (
    (
        re.compile(
            r"(-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----)(?:(?!-----END)[^\"'])+"
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\bPrivate-Lines: \d{1,4}\s)[^:\"']+"), rf"\1{MASK}"),
    # What a header of a login holds is of many forms, to the end of its line or quotes.
    (
        re.compile(r"(\bauthorization['\"]?: ?(['\"]))(?:(?!\2)[^\n])+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (
        re.compile(r"(\bauthorization: ?)(?!['\"\s]|Bearer (?:TOKEN|…))[^\n]+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    # A password ends at the last @ before the path; one that holds a slash ends at the first @ that
    # follows, unless what looks like it is a port.
    (
        re.compile(rf"({_SCHEME}://)[^\s/@:'\"]{{0,200}}:[^\s/'\"]{{0,2000}}@", re.IGNORECASE),
        rf"\1{MASK}@",
    ),
    (
        re.compile(
            rf"({_SCHEME}://)[^\s/@:'\"]{{0,200}}:(?!\d{{1,6}}[/?#\s])[^\s@'\"]{{0,2000}}@",
            re.IGNORECASE,
        ),
        rf"\1{MASK}@",
    ),
    (
        re.compile(r"(\b[\w.-]{1,60}:)[^\s/@:'\"]{6,200}(@[\w.-]{1,200}:\d{2,5}\b)", re.ASCII),
        rf"\1{MASK}\2",
    ),
    # The user of a web server is a token, as a rule; other stores write names there.
    (
        re.compile(r"(\b(?:https?|ftps?)://)[^\s/@:'\"]{1,2000}@", re.IGNORECASE),
        rf"\1{MASK}@",
    ),
    (
        re.compile(
            r"(%3A%2F%2F)(?:(?!%2F|%40)[^\s&]){0,200}?%3A(?:(?!%40)[^\s&]){0,2000}%40",
            re.IGNORECASE,
        ),
        rf"\1{MASK}%40",
    ),
    (re.compile(rf"([?&;#][\w.-]{{0,60}}{SECRET_NAME}=)[^\s&;#'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (re.compile(r"([?&](?:code|code_verifier)=)[\w.~-]{10,}"), rf"\1{MASK}"),
    (re.compile(rf"((?:%3F|%26){SECRET_NAME}%3D)[^\s&%'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    # Assigned, as an option's value, in quotes, or as an HTTP header: after a colon that ends a
    # name in a message a sentence follows.
    (
        re.compile(rf"({_SECRET_SETTING}['\"]?=['\"]?)[^\s&;,'\"]{{6,}}", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    # As a file of settings has it, where a sentence would go on with a word.
    (
        re.compile(
            rf"({_SECRET_SETTING}\s{{0,3}}[:=]\s{{1,3}})(['\"]?)(?=\D{{0,40}}\d)[^\s&;,'\"]{{6,}}",
            re.IGNORECASE,
        ),
        rf"\1\2{MASK}",
    ),
    (
        re.compile(
            rf"(\b[A-Z][A-Z0-9_]{{0,60}}_{_ENDS_OF_VARIABLES}['\"]?(?:=|: ?)['\"]?)(?={_OF_A_KEY})[^\s&;,'\"]{{8,}}"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            rf"((?<![\w-])(?:--)?token['\"]?(?:=|: ?| (?<=--token ))['\"]?)(?={_OF_A_KEY})[^\s&;,'\"]{{12,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(rf"(--{_SECRET_SETTING} )\S{{6,}}", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(
            r"(\bcurl\b[^\n]{0,400}?(?:\s-[uU] ?|--(?:proxy-)?user[ =])['\"]?[^\s:'\"]{0,200}:)[^\s'\"]+"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(rf"({_SECRET_SETTING}['\"]?: ?(['\"]))(?:(?!\2)[^\\\n])+", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"((?<![\w-])(?:(?:x-)?(?:api-key|private-token|auth-token)|x-[\w-]{1,40}-(?:token|key|secret)"
            r"|[\w-]{0,40}subscription-key): ?)[^\s'\"]{6,}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\bcookie: ?)[^\n'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(r"(\bmachine\s\S{1,99}\s{1,9}login\s{1,9}\S{1,99}\s{1,9}password\s{1,9})\S+"),
        rf"\1{MASK}",
    ),
    # The address of a webhook is its password.
    (
        re.compile(
            r"(\bhttps?://[^\s/'\"]{1,200}/(?:[^\s/'\"]{1,60}/){0,6}?(?:(?:web)?hooks?|webhookb2|with/key)/)[^\s'\"]{8,}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"(\b(?:hooks\.slack\.com/\w{1,20}|events\.pagerduty\.com/integration)/)[^\s'\"]+"
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(/bot\d{5,12}:)[\w-]{10,}"), rf"\1{MASK}"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(rf"(?<![\w-])(?:{'|'.join(_TOKEN_SHAPES)})"), MASK),
)


def redacted(text: str) -> str:
    """``text`` with :data:`MASK` in place of everything that looks like a secret, or is one of this
    process.
    """
    for secret in environment_secrets():
        text = text.replace(secret, MASK)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    return text


def holds_key(text: str) -> bool:
    """Whether a text, such as the name of a file, holds what is a key for certain.

    :func:`redacted` masks more, since a message that is masked needlessly does no harm.
    """
    return re.search(SECRETS, text) is not None


def environment_secrets() -> list[str]:
    """Values of environment variables named as secrets, and passwords of URLs in others; the
    longest first.
    """
    secrets = set()
    for name, value in os.environ.items():
        if _KEY.search(name) and not _SECRET_KEY.search(name) and _WORDS.fullmatch(value):
            continue
        if name == _NAMES_A_FILE and not _KEY_ITSELF.search(value.strip()):
            continue
        if (
            _SECRET_VARIABLE.search(name)
            and not _KEY_FILE.fullmatch(value)
            and not os.path.exists(value)
        ):
            secrets |= {value, *value.split(":", 1)[1:]}  # user:password, as Prefect's is
        elif "://" in value and (match := _WITH_PASSWORD.search(value)):
            secrets |= {match[1], unquote(match[1])}
    return sorted(
        (secret for secret in secrets if len(secret) >= SHORTEST_SECRET), key=len, reverse=True
    )
