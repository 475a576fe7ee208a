"""Secrets taken out of texts that people read: passwords in URLs, tokens of known shapes, secrets
of the environment.

Libraries quote addresses and headers in their errors, and those hold passwords. Every message of
this program goes through :func:`redacted` before it is shown, logged or sent.
"""

from __future__ import annotations

import os
import re
from urllib.parse import unquote

from rlhf_core.secret_commands import COMMANDS, NO_WORD, SECRET_SETTING

MASK = "***"
# The ends of names: X-Amz-Signature, access_token, sig, db_pass, but not author and bypass.
SECRET_NAME = (
    r"(?:key|token|secret|passw(?:or)?d|passphrase|signature|sig|auth|authorization|credentials?"
    r"|(?<![a-z])(?:pass|pwd|pat|jwt))"
)
# Names that also stand for a page, a time or a size: their values are secret if they look so.
_OTHER_SECRET_NAME = (
    r"(?:pw|pin|otp|tok|tkn?|sid|session(?:_?id)?|ticket|hmac|hash|sas|sign|nonce|access|assertion"
    r"|samlresponse|[ashk]k|st|[tkshp])"
)
_VALUE_LIKE_A_SECRET = r"(?![\d.,:%TZ+-]+(?:[&;#\s'\"]|$))(?=[^\s&;#'\"]{0,60}\d)[^\s&;#'\"]{8,}"
SECRET_PARAMETER = re.compile(
    rf"{SECRET_NAME}=|(?<![a-z]){_OTHER_SECRET_NAME}=(?={_VALUE_LIKE_A_SECRET})", re.IGNORECASE
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
_USER_OF_A_SERVER = re.compile(r"^\s*https?://([^\s/@:]+)@", re.IGNORECASE)
_SECRET_OF_AN_ADDRESS = re.compile(
    rf"[?&;#](?:[\w.-]{{0,60}}{SECRET_NAME}|(?:[\w.-]{{0,60}}[_.-])?{_OTHER_SECRET_NAME}(?=={_VALUE_LIKE_A_SECRET}))"
    r"=([^\s&;#'\"]+)",
    re.IGNORECASE,
)
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
    r"(?:dapi|dose)[0-9a-f]{32}(?:-\d)?",
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
    r"(?:AC|SK)[0-9a-f]{32}(?::[0-9a-f]{32})?",
    r"(?:key|fc)-[0-9a-f]{32}",
    r"[0-9a-f]{32}-(?:us\d{1,2}|[0-9a-f]{8}-[0-9a-f]{8})",
    r"(?:[0-9a-f]{8}-(?:[0-9a-f]{4}-){3}[0-9a-f]{12}):[0-9a-f]{32}",
    r"(?:[0-9a-f]{32})\.(?=[a-z0-9]{0,15}[A-Z])(?=[A-Za-z]{0,15}\d)[A-Za-z0-9]{16}(?![\w.])",
    r"(?:fw|fo1|pb|up|re)[_-](?:[A-Za-z0-9]{8}_)?[A-Za-z0-9]{20,}",
    r"(?:fm\d\w?|nfp|rnd|rpa|flp|tfp|vcp|phx|rdme|jina|co|esecret|isat|pcsk|pckey|glc|whsec|cfut)_[A-Za-z0-9]{24,}",
    r"(?:vercel_blob_rw|duffel_(?:test|live)|apify_api|sb_secret|pscale_(?:tkn|pw|oauth))_[\w-]{20,}",
    r"(?:tvly(?:-dev)?|HRKU|pa|as|ak|argilla\.apikey|tskey-[a-z]{2,12}|tk-us)-(?=[A-Za-z-]{0,60}\d)[A-Za-z0-9-]{20,}",
    r"(?:GOCSPX|xkeysib|xsmtpsib)-[\w-]{20,}",
    r"1//0[\w-]{20,}",
    r"EAA[A-Za-z0-9]{50,}",
    r"v1\.0-[0-9a-f]{24}-[0-9a-f]{40,}",
    r"v1\.[0-9a-f]{40}",
    r"(?:dp\.(?:st|pt|ct|sa|scim|audit)\.|st\.[0-9a-f]{24}\.)[\w.-]{30,}",
    r"ops_[\w+/=-]{60,}",
    r"ls(?:__|v2_(?:pt|sk)_)[0-9a-f]{32}(?:_[0-9a-f]{10})?",
    r"(?:s[bg]p|sq[apu]|bkua|shippo_(?:live|test)|lin_oauth|phx|live|sk)_[0-9a-f]{32,}",
    r"(?:CCIPAT_\w{20}|CLOJARS_)[\w-]{30,}",
    r"pul-[0-9a-f]{40}",
    r"NRAK-[A-Z0-9]{27}",
    r"NRJS-[0-9a-f]{19}",
    r"API-(?=[A-Z]{0,25}\d)[A-Z0-9]{26}",
    r"A3-[A-Z0-9]{6}-[A-Z0-9]{11}(?:-[A-Z0-9]{5}){3}",
    r"SCW[A-Z0-9]{17}",
    r"dt0c01\.[A-Z0-9]{24}\.[A-Z0-9]{64}",
    r"pat[A-Za-z0-9]{14}\.[0-9a-f]{64}",
    r"(?:ATCTT3x|ATBB|AKCp|LTAI|AKID|AKLT|AQVN)[\w=-]{20,}",
    r"[A-Za-z0-9]{3}\dQ~[\w.~-]{31,}",
    r"oy2[a-z0-9]{43}",
    r"\d{8,10}:AA[\w-]{33}",
    r"[A-Za-z0-9]{14}\.atlasv1\.[\w-]{40,}",
    r"secret_[A-Za-z0-9]{16,}_[0-9a-f]{32}(?:\.[A-Za-z0-9]{20,})?",
    r"xox[cd]-[\w%+/=-]{10,}",
    r"[sp]k\.eyJ[\w-]{20,}\.[\w-]{20,}",
    r"shp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
    r"sq0(?:atp|csp|idp)-[\w-]{20,}",
    r"(?:wandb|tgp)_v1_\w{20,}",
    r"(?:pplx|xai|csk|PMAK|CFPAT)-[\w-]{30,}",
    r"(?:dckr_[op]at|figd)_[\w-]{20,}",
    r"sntry[sux]_[\w+/=-]{20,}",
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
        r"\b(?:gsk|r8|npm|sntrys|pcsk|whsec|jina|[sr]k_(?:live|test)|lin_api|wandb_v1|tgp_v1)_[A-Za-z0-9]{30,}",
        r"\b(?:xai|pplx|tvly)-[A-Za-z0-9]{28,}",
        r"\b(?:nvapi-|pypi-AgE|GOCSPX-|PMAK-|xkeysib-)[A-Za-z0-9_-]{28,}",
        r"\bAGE-SECRET-KEY-1[0-9A-Z]{50,}",
        r"\bdapi[0-9a-f]{32}\b",
        r"\bdo[opr]_v1_[0-9a-f]{64}",
        r"\bshp(?:at|ca|pa|ss)_[0-9a-fA-F]{32}",
        r"\bdckr_[op]at_[A-Za-z0-9_-]{20,}",
        r"\b(?:hvs\.|dp\.[sp]t\.|ya29\.|ATATT3x|ATCTT3x)[A-Za-z0-9_=-]{40,}",
        r"\bSG\.[A-Za-z0-9_-]{22}\.[A-Za-z0-9_-]{43}",
        r"\beyJ[A-Za-z0-9_-]{10,1000}\.eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}",
    )
)
_ENDS_OF_VARIABLES = (
    r"(?:TOKEN|KEY|SECRET|PASSW(?:OR)?D|PASSPHRASE|PASS|PWD|PAT|JWT|AUTH|CREDENTIAL)S?"
)
# Has a digit, and is no path, variable or special token.
_OF_A_KEY = r"(?![/~.$<\[{*])[^\s&;,'\"/\d]{0,60}\d(?![^\s'\"]{0,60}\.(?:pem|key|crt)\b)"
_SCHEME = r"\b[a-z][a-z0-9+.-]{0,30}"
_NAME_OF_A_COMMAND = (
    r"(?:(?:pass(?:w(?:or)?d|phrase)?|secret|token|key)[_-]?(?:command|cmd|eval)|askpass)"
)
_SHELL = r"(?:\S{1,60}\s[-/]c\s['\"]?)"
_PRINTER = r"(?:[\w/]{1,60}/)?(?:echo|printf)[\\\s]\s?(?:-\w\s)?(?:['\"]?%\S{1,20}\s)?['\"]?"
_EOL = r"(?:\\r\\n|\r\n)"
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
    (
        re.compile(
            rf"([?&;#](?:[\w.-]{{0,60}}[_.-])?{_OTHER_SECRET_NAME}=){_VALUE_LIKE_A_SECRET}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"([?&](?:code|code_verifier)=)[\w.~-]{10,}"), rf"\1{MASK}"),
    (re.compile(rf"((?:%3F|%26){SECRET_NAME}%3D)[^\s&%'\"]+", re.IGNORECASE), rf"\1{MASK}"),
    (
        re.compile(
            rf"((?:%3F|%26){_OTHER_SECRET_NAME}%3D)(?=\d{{0,60}}[a-z])(?=\D{{0,60}}\d)[^\s&%'\"]{{8,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    # Assigned, as an option's value, in quotes, or as an HTTP header: after a colon that ends a
    # name in a message a sentence follows.
    (
        re.compile(rf"({SECRET_SETTING}['\"]?=['\"]?)[^\s&;,'\"]{{6,}}", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    # As a file of settings has it, where a sentence would go on with a word.
    (
        re.compile(
            rf"({SECRET_SETTING}\s{{0,3}}[:=]\s{{1,3}})(['\"]?)(?=\D{{0,40}}\d)[^\s&;,'\"]{{6,}}",
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
    (
        re.compile(
            rf"((?<![\w-])--?(?:[a-z0-9_]{{1,20}}[.-]){{0,3}}(?:{SECRET_SETTING}|pass) ['\"]?)[^\s$<*-]\S{{5,}}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            rf"((?<![\w-])--(?:[a-z0-9_]{{1,20}}-){{0,3}}(?:{SECRET_SETTING}|pass)=['\"]?)[^\s$<*{{'\"][^\s'\"]*",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(r"((?:\b_auth(?:Token)?|(?:App|Provider)\.token)=['\"]?)[^\s'\"]{6,}"),
        rf"\1{MASK}",
    ),
    (
        re.compile(rf"({SECRET_SETTING}['\"]?: ?(['\"]))(?:(?!\2)[^\\\n])+", re.IGNORECASE),
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
    # Options as Windows writes them.
    (
        re.compile(r"((?<!\S)['\"]?/(?:pass(?:word)?|pw|pwd):)[^\s'\"<$*]{3,}", re.IGNORECASE),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"(\b(?:oracle(?:\+\w{1,20})?://|jdbc:oracle:\w{1,10}:)[\w.-]{1,60}/)[^\s@/'\"]{1,200}(?=@)"
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\bconnect\(\s?['\"][\w.-]{1,60}/)[^\s@/'\"]{1,200}(?=@)"), rf"\1{MASK}"),
    # What a program reads from its standard input.
    (
        re.compile(
            r"(\b(?:echo|printf)\s(?:-\w\s)?['\"]?)(?![$<])[^\n|;&'\"]{1,200}"
            r"(?=['\"]?\s{0,3}\|\s{0,3}(?:[^\n|;&]{0,60}(?:stdin|-fd\s\d|with-token)|(?:sudo\s{1,3})?(?:chpasswd|kinit|cryptsetup|sudo\s-S)))"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"(\b(?:kinit|passwd|chpasswd|sudo|cryptsetup)[^\n|;&<]{0,80}<<<\s{0,3}['\"]?)(?!\$)[^\s'\"]+"
        ),
        rf"\1{MASK}",
    ),
    # A command named where a password is wanted, which prints it.
    (
        re.compile(
            rf"({_NAME_OF_A_COMMAND}['\"]?[:=, ]{{1,3}}['\"]?{_SHELL}?{_PRINTER})(?!\$)[^\n'\"|;&]{{1,200}}",
            re.IGNORECASE,
        ),
        rf"\1{MASK}",
    ),
    # The words of a login to redis as they are sent, as it tells of them, and as a program has them.
    (
        re.compile(
            rf"((?<![A-Z])AUTH2?{_EOL}(?:\$\d{{1,2}}{_EOL}[\w.@-]{{1,60}}{_EOL})?\$\d{{1,4}}{_EOL})[^\s\\'\"]+"
        ),
        rf"\1{MASK}",
    ),
    (
        re.compile(
            r"((['\"])(?:AUTH2?\2,|(?i:auth2?)\2(?= ['\"]))\s?(?:b?\2[\w.@-]{1,60}\2,?\s)?b?\2)"
            + NO_WORD
        ),
        rf"\1{MASK}",
    ),
    (re.compile(r"(\bAUTH (?:PLAIN|LOGIN) )(?=[^\s'\"]{0,60}\d)[^\s'\"]{8,}"), rf"\1{MASK}"),
    (re.compile(r"(/bot\d{5,12}:)[\w-]{10,}"), rf"\1{MASK}"),
    (re.compile(r"\b(bearer|basic)\s+[\w.~+/=-]{6,}", re.IGNORECASE), rf"\1 {MASK}"),
    (re.compile(rf"(?<![\w-])(?:{'|'.join(_TOKEN_SHAPES)})"), MASK),
)

# Characters of base64 for addresses, and those of base64.
_WORD = re.compile(r"(?<![\w-])[\w-]{20,}", re.ASCII)
_BASE64 = re.compile(r"(?<![\w+/=.-])[A-Za-z0-9][A-Za-z0-9+/]{39,}={0,2}(?![\w+/=-])")
_RUN_OF_LETTERS_AND_DIGITS = re.compile(r"[A-Za-z0-9]{20,}")
_SAME_KIND_OF_CHARACTER = re.compile(r"\d+|[a-z]+|[A-Z]+")
# A name that a linker has mangled, a hash, and what servers call a request or an answer.
_NAMED_AT_RANDOM = re.compile(
    r"_{1,2}Z|Qm[1-9A-HJ-NP-Za-km-z]{44}$|(?:sha\d{1,3}|md5|blake2b)-"
    r"|(?:req(?:uest)?|chatcmpl|cmpl|msg|resp|call|toolu|file|batch|ftjob|run|thread|asst)[_-]"
)
_HASH = re.compile(r"\b(?:sha\d{1,3}|md5|blake2b)[:=-]$", re.IGNORECASE)


def redacted(text: str) -> str:
    """``text`` with :data:`MASK` in place of everything that looks like a secret, or is one of this
    process.
    """
    for secret in environment_secrets():
        text = text.replace(secret, MASK)
    for pattern, replacement in _RULES:
        text = pattern.sub(replacement, text)
    for command, option in COMMANDS:
        text = _with_masked_options(text, command, option)
    for pattern in (_BASE64, _WORD):
        text = pattern.sub(_masked_if_random, text)
    return text


def _with_masked_options(text: str, command: re.Pattern[str], option: re.Pattern[str]) -> str:
    """Return a text with masked values of a command's options."""

    def masked(found: re.Match[str]) -> str:
        return option.sub(rf"\1{MASK}", found[0])

    return command.sub(masked, text)


def _masked_if_random(found: re.Match[str]) -> str:
    """Return :data:`MASK` for characters that seem to be drawn at random, and else the text found.

    Names change between small letters, capitals and digits where their words begin; of random ones
    every second is of another kind than the last. Hashes, and numbers of runs, are small letters
    and digits.
    """
    word = found[0]
    before = found.string[max(0, found.start() - 8) : found.start()]
    if _NAMED_AT_RANDOM.match(word) or _HASH.search(before):
        return word
    without_signs = re.sub(r"[+/=]", "", word)
    for run in _RUN_OF_LETTERS_AND_DIGITS.findall(without_signs):
        kinds = _SAME_KIND_OF_CHARACTER.findall(run)
        numbers = sum(kind.isdigit() for kind in kinds)
        has_both_cases = run.upper() != run and run.lower() != run
        if numbers >= 2 and has_both_cases and len(kinds) >= 0.4 * len(run):
            return MASK
    return word


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
        elif "://" in value:
            found = (pattern.search(value) for pattern in (_WITH_PASSWORD, _USER_OF_A_SERVER))
            parts = [match[1] for match in found if match]
            parts += _SECRET_OF_AN_ADDRESS.findall(value)
            secrets |= {*parts, *map(unquote, parts)}
    return sorted(
        (secret for secret in secrets if len(secret) >= SHORTEST_SECRET), key=len, reverse=True
    )
