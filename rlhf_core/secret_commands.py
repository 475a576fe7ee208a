"""Command lines that hold passwords: by which option or at which place each program takes one.

What an option means differs between programs, and so does what stands third: none of these patterns
says anything about another program's command line.
"""

from __future__ import annotations

import re

# Names of settings and headers whose values are secret wherever they stand. ``token`` and ``key``
# alone also name ordinary things.
SECRET_SETTING = (
    r"(?:passw(?:or)?d|passphrase|pwd|secret|secret[_-]?(?:access[_-]?)?key|(?:api|access|account|private)[ _-]?key"
    r"|(?:access|auth|bearer|private|refresh|security|session)[_-]?token)"
)
# Up to the end of a command.
_ARGUMENTS = r"(?:[^\n|;&]|&(?!&))*+"
# No port, no ports of a container and its host, no variable or gap.
_ARGUMENT = r"(?![$<*{…])(?!\d{1,5}(?::\d{1,5})?(?![^\s'\"]))[^\s'\"]+"
# Neither an option nor a word of a sentence: it has a digit, or a sign that words have not.
NO_WORD = r"(?![-$<*{…/\\])(?=[^\s'\"]{0,60}[\d!@#%^&+=~_])[^\s'\"]{4,}"
_NO_OPTION = r"(?![-/])" + _ARGUMENT
_WORD = r"['\"]?[^\s'\"]{1,200}['\"]?\s{1,4}"
# One whose value is the word behind it, and one without a value.
_OPTIONS = r"(?:-[\w-]{1,30}\s{1,4}(?:\d[\w.]{0,20}\s{1,4})?){0,6}"
_SHARE = rf"\s['\"]?//{_WORD}"
_OPTIONS_OF_SHARE = r"(?:-[\w-]{1,30}\s{1,4}[\w.\\]{1,60}\s{1,4}){0,6}"
_ORACLE_USER = r"['\"]?(?!and/or\b)[A-Za-z][\w$#.-]{0,60}/"
_ORACLE_PASSWORD = r"(?!/)[^\s@'\"/]{1,200}"

# Programs, what comes before the secret, and the secret.
_PROGRAMS = (
    (r"mysql\w{0,20}|mariadb[\w-]{0,20}|sshpass", r"\s-p", _ARGUMENT),
    (r"7z\w?|(?:un)?rar", r"\s-h?p", _ARGUMENT),
    (r"mongo\w{0,20}|twine", r"\s-p[ =]?", _ARGUMENT),
    (r"sshpass", r"\s-p[ =]", _ARGUMENT),
    (
        r"(?:docker|podman|nerdctl|buildah|skopeo|helm|oras|crane|regctl|az|oc|cf|ibmcloud|argocd)\s[^\n|;&]{0,80}?\blogin",
        r"\s-p[ =]?",
        _ARGUMENT,
    ),
    (
        r"psexec(?:64)?|smbmap|cqlsh|beeline|cypher-shell|ncftp\w{0,10}|rdesktop|evil-winrm|crackmapexec|netexec"
        r"|rabbitmqadmin|poetry\spublish|useradd|usermod",
        r"\s-p[ =]",
        _NO_OPTION,
    ),
    (r"(?:plink|pscp|psftp|putty|kitty|nzsql|nzload)", r"\s-pw ", _NO_OPTION),
    (
        r"curl|https?|xh",
        r"\s(?:-[A-Za-z]{0,8}[uU] ?|-a ?|--(?:proxy-)?user[ =]|--auth[ =])['\"]?[^\s:'\"]{0,200}:",
        r"[^\s'\"]+",
    ),
    (r"lynx", r"\s-p?auth=[^\s:'\"]{0,200}:", r"[^\s'\"]+"),
    (r"(?:redis|valkey)-cli", r"\s-a ", _ARGUMENT),
    (r"ldap\w{1,20}|vsql|kadmin|ds(?:conf|idm)", r"\s-w ?", _ARGUMENT),
    (r"ldappasswd", r"\s-[as] ", _ARGUMENT),
    (r"openssl", r"\s(?:-k ['\"]?|-pass(?:in|out)? pass:)", _ARGUMENT),
    (
        r"(?:key|jar|apk)(?:tool|signer)",
        r"\s-(?:src|dest|new)?(?:store|key)?pass ",
        _NO_OPTION,
    ),
    (r"ssh-keygen", r"\s-[NP] ?", _NO_OPTION),
    (r"pdf\w{1,20}|qpdf", r"\s(?:-[uo]pw|(?:user|owner|input)_pw) ", _NO_OPTION),
    (r"smbclient|rpcclient", r"\s-U ['\"]?[^\s%'\"]{0,60}%", _ARGUMENT),
    (r"smbclient", rf"{_SHARE}{_OPTIONS_OF_SHARE}", NO_WORD),
    (r"smbclient", _SHARE, r"(?![-\d])[^\s'\"]+(?=['\"]?\s{1,4}-)"),
    (r"lftp", r"\s-u ['\"]?[^\s,'\"]{0,60},", _ARGUMENT),
    (
        r"sqlcmd|bcp|[io]sql|tsql|ipmitool|mosquitto_(?:pub|sub|rr)|(?:un)?zip",
        r"\s-P ?",
        _ARGUMENT,
    ),
    (r"snmp\w{1,20}", r"\s-[AXc] ", _NO_OPTION),
    (
        r"(?i:sqlplus|sqlcl|expdp|impdp|sqlldr)",
        rf"^\w{{1,10}}\s{{1,4}}{_OPTIONS}{_ORACLE_USER}",
        _ORACLE_PASSWORD,
    ),
    (
        r"(?i:sql|exp|imp|conn(?:ect)?)",
        rf"^\w{{3,7}}\s{{1,4}}{_OPTIONS}{_ORACLE_USER}",
        _ORACLE_PASSWORD + r"(?=@)",
    ),
    (
        r"(?i:rman|exp(?:dp)?|imp(?:dp)?|sqlldr)",
        rf"(?i:\s(?:target|catalog|auxiliary|userid=))[ =]?{_ORACLE_USER}",
        _ORACLE_PASSWORD,
    ),
    (r"(?i:\.logon)", r"\s(?:[\w.-]{1,60}/)?[\w.-]{1,60},", r"[^\s;'\"]+"),
    (r"db2", r"(?i:\suser)\s\S{1,60}(?i:\susing)\s", _ARGUMENT),
    # net use DEVICE \\HOST\SHARE PASSWORD /user:NAME, in any order
    (
        r"(?i:net(?:\.exe)?\suse)",
        r"\s['\"]?\\{2,8}[^\s'\"]{1,200}['\"]?\s{1,4}(?:/(?i:user):\S{1,100}\s{1,4})?",
        r"(?![/*])[^\s'\"]+(?=[^\n]{0,200}\s/(?i:user):)",
    ),
    (
        r"(?i:net(?:\.exe)?\suse)",
        r"\s\\{2,8}[^\s'\"]{1,200}\s{1,4}",
        NO_WORD,
    ),
    (r"(?i:net(?:\.exe)?\suse)", r"\s/(?i:user):[^\s'\"]{1,100}\s{1,4}", _NO_OPTION),
    (
        r"(?i:net(?:\.exe)?\suser)",
        r"(?i:^net(?:\.exe)?\suser)\s\S{1,60}\s{1,4}",
        rf"(?:(?![/*])[^\s'\"]+(?=['\"]?\s{{1,4}}/)|{NO_WORD})",
    ),
    (
        r"(?i:cmdkey|[xw]freerdp\d?|wmic|schtasks|tasklist|taskkill|systeminfo|psexec)",
        r"\s['\"]?/(?i:r?p|pass(?:word)?)[: ]",
        _NO_OPTION,
    ),
    (
        r"mount(?:\.\w{1,10})?|sshfs",
        r"[\s,](?:pass(?:word)?\d?=|user(?:name)?=[^\s,%]{1,60}%)",
        r"[^\s,'\"]+",
    ),
    (
        r"rclone",
        rf"[\s,](?:[a-z_]{{0,30}}pass(?:word)?\d?|[a-z_]{{0,30}}{SECRET_SETTING}|token|key)[ =]",
        r"(?!-)[^\s,:'\"]{6,}",
    ),
    (r"iwconfig", r"\skey\ss:", _NO_OPTION),
    # DOMAIN/USER:PASSWORD@HOST
    (
        r"(?:impacket-)?(?:psexec|secretsdump|(?:wmi|smb|at|dcom)exec|mssqlclient|lookupsid|Get\w{2,10}Users)(?:\.py)?",
        r"\s['\"]?(?:[\w.-]{1,60}/)?[\w.-]{1,60}:",
        r"[^\s'\"]+(?=@)",
    ),
    (
        r"(?i:(?:create|alter)\s(?:user|role|login)|grant\s\w{1,20}|set\spassword)",
        r"(?i:\sidentified\s(?:with\s\S{1,60}\s)?by\s|\spassword\s{0,2}(?:=\s{0,2})?(?=['\"])|=\s{0,2}(?=['\"])|password\((?=['\"]))",
        r"[^\s'\")]+",
    ),
    (
        r"(?:wandb|comet|vault|hf|huggingface-cli|prefect|gh|glab|heroku|fly(?:ctl)?|doctl|dagshub|neptune|clearml"
        r"|modal|replicate|runpodctl|snyk|netlify|vercel|argilla|label-studio|together)"
        r"\s(?:[\w-]{1,20}\s){0,2}?(?:login|auth(?::token)?)",
        r"\s(?:['\"]|\w{1,20}=)?",
        r"(?!-)(?=[A-Za-z_-]{0,60}\d)[\w-]{16,}(?![^\s'\"])",
    ),
    (
        r"dvc remote modify|(?:aws|kaggle|git|npm|prefect|gcloud|conda|pip)\sconfig(?:ure)?",
        rf"\s[\w./:-]{{0,60}}(?i:{SECRET_SETTING})[ =]",
        _ARGUMENT,
    ),
)
# Programs that take a secret by its place: what comes before, and how many words follow that.
_BY_PLACE = (
    (r"rclone", r"\sobscure\s", 0, _NO_OPTION),
    (r"htpasswd", r"\s-(?=\w{0,9}b)(?=\w{0,9}n)\w{1,9}\s", 1, _NO_OPTION),
    (r"htpasswd|mosquitto_passwd", r"\s-(?=\w{0,9}b)(?!\w{0,9}n)\w{1,9}\s", 2, _NO_OPTION),
    (r"rabbitmqctl", r"\s(?:add_user|change_password|authenticate_user)\s", 1, _NO_OPTION),
    (r"nmcli|mysqladmin", r"\spassword\s", 0, NO_WORD),
    (r"wpa_passphrase", r"^wpa_passphrase\s", 1, NO_WORD),
    (r"mc\s(?:alias\sset|config\shost\sadd)", r"(?:set|add)\s", 3, _NO_OPTION),
    (r"iu?sql", rf"^iu?sql\s{{1,4}}{_OPTIONS}", 2, NO_WORD),
    (r"poetry\sconfig", r"\shttp-basic\.\S{1,60}\s", 1, _NO_OPTION),
    (r"(?i:(?:--)?(?:requirepass|masterauth))", r"^[\w-]{1,20}\s", 0, NO_WORD),
    (r"(?i:sentinel)", r"(?i:\sauth-pass)\s", 0, NO_WORD),
    (r"(?i:sentinel)", r"(?i:\sauth-pass)\s", 1, NO_WORD),
    (r"(?i:acl\ssetuser|user)\s\S{1,60}", r"\s>", 0, r"[^\s'\"]{4,}"),
)
# What a client sends to redis, or to a server of mail or news: whole lines, or quoted.
_USER = r"['\"]?[\w.@-]{1,60}['\"]?\s{1,4}"
_NO_METHOD = r"(?!(?:CRAM|SCRAM|DIGEST|NTLM|X?OAUTH|XOAUTH|GSSAPI|GS2)[A-Z0-9-]*(?:[\s'\"\\]|$))"
_END = r"(?=['\"\\]|\s{0,3}$|\s(?:SETNAME|KEYS)\b)"
_LOGINS = (
    (r"AUTH2?|(?<=> )auth", rf"^\w{{4,5}}\s(?:{_USER})?{_NO_METHOD}"),
    (r"(?i:HELLO)", rf"(?i:^HELLO\s\d\sAUTH)\s{_USER}"),
    (r"(?:redis|valkey)-cli", rf"(?i:\sAUTH)\s(?:{_USER})?"),
    (r"USER", rf"^USER\s{_USER}PASS\s"),
    (r"(?<=['\"])PASS|(?<=> )PASS|AUTHINFO\sPASS|NickServ\sIDENTIFY", r"(?:PASS|IDENTIFY)\s"),
    (r"(?<=['\"])LOGIN|(?<=\d )LOGIN|(?<=['\"])APOP|OPER", rf"^[A-Z]{{4,5}}\s{_USER}"),
)
COMMANDS = tuple(
    (
        re.compile(rf"(?<![\w-])(?:{programs})\s{_ARGUMENTS}"),
        re.compile(rf"({before}['\"]?){value}"),
    )
    for programs, before, value in (
        *_PROGRAMS,
        *((program, before + words * _WORD, value) for program, before, words, value in _BY_PLACE),
        *((program, before, NO_WORD + _END) for program, before in _LOGINS),
    )
)
