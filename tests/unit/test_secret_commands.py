"""Passwords of command lines are masked whichever way a program takes them; other words stay."""

from __future__ import annotations

import pytest

from rlhf_core.redaction import redacted

SECRET = "hunter2-and-more"
AT = "\\\\host\\share"
COMMANDS = (
    "sqlplus me/{}@db", "sqlplus -S me/{}@//host:1521/svc", 'sqlplus -L -s "me/{}@db as sysdba"', "SQLPLUS me/{} <<EOF",
    "conn me/{}@db", "CONNECT me/{}@db", "exp me/{}@db file=x.dmp", "imp me/{}@db", "impdp me/{}@db directory=d",
    "expdp system/{} full=y", "exp userid=me/{}@db", "impdp userid=me/{} x=y", "sqlldr me/{}@db control=x",
    "sqlldr userid=me/{} control=x", "rman target me/{}@db", "rman target=me/{} catalog=rc/{}@cat",
    'rman TARGET "sys/{}@db"', "sqlcl me/{}@db", "sql me/{}@db", "cx_Oracle.connect('me/{}@db')", "oracle://me/{}@db",
    "jdbc:oracle:thin:me/{}@host:1521:x", ".LOGON tdp/me,{};", "bteq <<< '.logon me,{}'",
    "db2 connect to db user me using {}",
    f"net use {AT} {{}} /user:me", f"net use Z: {AT} {{}} /user:dom\\me", f"net use Z: {AT} /user:me {{}}",
    f"NET USE * {AT} /USER:me {{}} /PERSISTENT:NO", f"net use {AT} {{}}", f"['net use {AT * 2} {{}} /user:me']",
    "net user me {} /add", "net user me {}", "cmdkey /add:host /user:me /pass:{}", "cmdkey /generic:host /pass {}",
    "wmic /node:h /user:me /password:{} os", "schtasks /create /ru me /rp {}", "schtasks /create /s h /u me /p {}",
    "xfreerdp /u:me /p:{} /v:h", "xfreerdp3 /u:me '/p:{}' /v:h", f"psexec {AT} -u me -p {{}} cmd",
    "smbclient //h/s {} -U me", "smbclient -U me //h/s {}", "smbclient //h/s -U me {}", "smbclient //h/s -U me%{}",
    "smbmap -u me -p {} -H h", "mount -t cifs //h/s /mnt -o user=me,pass={},vers=3", "mount.cifs //h/s -o user=me%{}",
    "curl -su me:{} https://store/x", "curl -sSLu 'me:{}' x", "http -a me:{} x", "lynx -auth=me:{} x",
    "rclone config create r sftp user me pass {}", "rclone config create r s3 secret_access_key {}",
    "rclone config update r pass={}", "rclone copy :sftp,host=h,user=u,pass={}:p x", "rclone obscure {}",
    "rclone rcd --rc-user u --rc-pass {}",
    "isql dsn me {}", "isql -v dsn me {}", "iusql dsn me '{}'", "tsql -S h -U me -P {}", "osql -U me -P {}",
    "sqlcmd -S h -U me -P{}", "bcp t out f -U me -P{}", "vsql -U me -w {}", "nzsql -u me -pw {}", "plink -l me -pw {} h",
    "cqlsh -u me -p {}", "influx -username me -password '{}'", "beeline -u jdbc:hive2://h -n me -p {}",
    "mongodump -u me -p{}", "cypher-shell -u neo4j -p {}", "arangosh --server.password {}", "ncftpput -u me -p {} h d f",
    "rdesktop -u me -p {} h", "ipmitool -H h -U me -P {} power", "snmpget -v3 -u me -A {} -X {} h", "snmpwalk -c {} h",
    "htpasswd -b f me {}", "htpasswd -nbB me {}", "htpasswd -c -b f me {}", "mosquitto_passwd -b f me {}",
    "mosquitto_pub -u me -P {} -t x", "keytool -list -storepass {} -keypass {}", "ssh-keygen -N {} -f k",
    "ssh-keygen -p -P {} -N '{}' -f k", "nmcli dev wifi connect S password {}", "wpa_passphrase ssid {}",
    "iwconfig wlan0 key s:{}", "kinit me <<< {}", "kadmin -p me -w {}", "ldappasswd -s {} -w {}",
    "mc alias set s3 http://h access {}", "mc config host add s3 http://h access {}", "cf login -u me -p {}",
    "ibmcloud login -u me -p {}", "npm config set //r/:_authToken {}", "poetry config http-basic.r me {}",
    "poetry publish -u me -p {}", "twine upload -u me -p{} d", "rabbitmqctl add_user me {}",
    "rabbitmqctl -n a change_password me {}", "rabbitmqadmin -u me -p {} list", "secretsdump.py dom/me:{}@10.0.0.1",
    "evil-winrm -i h -u me -p {}", "mysqladmin -u root password '{}'", "CREATE USER me IDENTIFIED BY {}",
    'ALTER USER me IDENTIFIED BY "{}"', "CREATE USER me WITH PASSWORD '{}'", "alter role me password '{}'",
    "SET PASSWORD FOR me = '{}'", "CREATE LOGIN me WITH PASSWORD = '{}'", "echo me:{} | chpasswd",
    "echo '{}' | passwd --stdin me", "echo {} | docker login -u me --password-stdin", "printf {} | sudo -S id",
    "useradd -p {} me", "unrar x -hp{} a", "pdftk a user_pw {}", "pdftotext -upw {} a", "AUTH PLAIN {}=="
)  # fmt: skip
# Commands that print a password, named to a program by an option, a setting or a variable.
PRINTERS = (
    "echo {}", "printf {}", "printf '%s' {}", "echo -n {}", "/bin/echo {}", "sh -c 'echo {}'", "cmd /c echo {}",
    "printf '%s\\n' {}",
)  # fmt: skip
NAMES_OF_PRINTERS = (
    'restic --password-command "{}" snapshots', 'restic --password-command="{}" snapshots',
    'RESTIC_PASSWORD_COMMAND="{}" restic backup d', 'export BORG_PASSCOMMAND="{}"', 'rclone --password-command "{}" ls r:',
    'GIT_ASKPASS="{}" git fetch', 'SSH_ASKPASS: "{}"', 'SUDO_ASKPASS="{}"', 'msmtp --passwordeval="{}"',
    'passwordeval "{}"', 'PassCmd "{}"', 'PassCommand = "{}"', 'password_command: "{}"', 'pass-cmd="{}"',
    'ansible --vault-password-command "{}" x', "DVC_PASSPHRASE_COMMAND={}", "RCLONE_PASSWORD_COMMAND={}",
    "passwordeval {}", "--token-command '{}'", '{{"secret_command": "{}"}}', "['restic', '--password-command', \"{}\"]",
)  # fmt: skip
# What a client of redis, of mail or of news sends, and settings of their servers.
SENT = (
    "AUTH {}", "AUTH default {}", "auth> AUTH me {}", "127.0.0.1:6379> AUTH {}", "127.0.0.1:6379> auth {}",
    "redis-cli -h h AUTH {}", "redis-cli -h h auth me {}", "HELLO 3 AUTH me {}", "HELLO 3 AUTH me {} SETNAME x",
    "hello 2 auth default {}", "MIGRATE h 6379 k 0 9 AUTH {}", "MIGRATE h 6379 k 0 9 AUTH2 me {} KEYS a b",
    "b'AUTH {}'", "b'AUTH me {}\\r\\n'", "b'*2\\r\\n$4\\r\\nAUTH\\r\\n$16\\r\\n{}\\r\\n'",
    "b'*3\\r\\n$4\\r\\nAUTH\\r\\n$2\\r\\nme\\r\\n$16\\r\\n{}\\r\\n'", "('AUTH', '{}')", "['AUTH', 'me', '{}']",
    '1339518083.1 [0 127.0.0.1:60866] "auth" "{}"', '1339518083.1 [0 lua] "AUTH" "me" "{}"', "[b'AUTH', b'{}']",
    "CONFIG SET requirepass {}", "config set masterauth '{}'", "requirepass {}", "masterauth {}",
    "redis-server --requirepass {}",
    "sentinel auth-pass mymaster {}", "SENTINEL SET mymaster auth-pass {}", "ACL SETUSER me on >{} ~* +@all",
    "acl setuser me >{}", "user default on >{} ~* &* +@all",
    "'PASS {}'", "b'PASS {}\\r\\n'", "USER me PASS {}", "*cmd* 'PASS {}'", "> PASS {}", "'APOP me {}'", "AUTHINFO PASS {}",
    "a1 LOGIN me {}", 'A001 LOGIN "me" "{}"', "b'LOGIN me {}'", "/msg NickServ IDENTIFY {}", "OPER me {}",
)  # fmt: skip
ORDINARY = (
    "sqlplus and/or psql is needed; sqlplus /nolog; sqlplus -s /@db; exp 1/2, imp a/b, sql queries/joins of a table",
    "cannot connect to me/you@once; connect owner/name to main; cannot connect hub:owner/name@revision",
    f"net use Z: {AT} /user:me * failed; net use Z: {AT} failed with error code five; net use Z: {AT} * /user:me",
    f"net use {AT} /delete; net user; net user name /active:no; the net use of memory; the net user count was 12",
    "isql is an interactive tool; isql -v dsn; isql dsn failed: no driver; smbclient //h/s failed; smbclient -L //h",
    "rclone copy a: b: pass over it; rclone sync a b --progress; rclone config create r sftp user me",
    "mount: bypass=1; mount -o loop,ro a b; curl -s -o a.txt https://h/x; curl -sSLO http://h:80/a; curl -sup x",
    "ssh-keygen -t ed25519 -f k; ssh-keygen -N '' -f k; keytool -list -keystore k; htpasswd f me; htpasswd -c f me",
    "snmpget -v 2 h; ipmitool -H h power; ldapsearch -s sub -b dc=x; poetry run x -p 3; poetry config a.b true",
    "create a file identified by name; columns identified by 'prompt'; set password policies; the role password file",
    "echo done | tee log; echo $TOKEN | docker login --password-stdin; echo a:b; printf '%s' x | sort",
    "useradd -m me; usermod -aG docker me; unrar x a.rar; pdftotext -layout a; mc ls s3/bucket; mc alias set s3 http://h",
    "the password /pass: none; see docs/pass:1 of it; C:/pass/word; rman target /; rman target sys",
    "db2 connect to db; connect to it as user me using TLS; AUTH failed; SMTP AUTH PLAIN is off; .logon; kinit me",
    "mysqladmin: password is needed; nmcli asks for the password again; plink -ssh h; rabbitmqctl add_user me",
    "-password and -token are options; the --password is missing; secretsdump.py has no host; psexec -s cmd",
    "restic --password-command 'pass show restic' backup d; BORG_PASSCOMMAND='cat /run/secrets/key_1'; echo a1b2c3",
    'RESTIC_PASSWORD_COMMAND="echo $PASSWORD_1"; --password-command needs a command; GIT_ASKPASS=/bin/echo; PassCmd "x y1"',
    "the password command: echo what was asked; SSH_ASKPASS: the printf of it failed; passwordeval is empty",
    "AUTH failed; AUTH required; AUTH error 401: no such user; the server takes AUTH CRAM-MD5; 250-AUTH SCRAM-SHA-256",
    "250 AUTH LOGIN PLAIN XOAUTH2; NOAUTH Authentication required; AUTH step 1 of 2; auth v2 is on; ['auth', 'model_1']",
    "PASS tests/a_1.py; PASS 3/4; ok LOGIN of user_1; LOGIN page_1; requirepass is not set; HELLO 3; HELLO world_1",
    "ACL SETUSER me on; ACL LIST; user default on nopass; sentinel auth-pass mymaster; IDENTIFY them; an OPER of it",
    "('AUTH', 'failed'); \"auth\" \"none\"; a AUTH\r\nheader; masterauth: off; AUTH2 me; 'PASS'; users > PASS",
)  # fmt: skip


@pytest.mark.parametrize("command", [*COMMANDS, *SENT])
@pytest.mark.parametrize(
    "around", ["{}", "Command '{}' returned 1", "ran: {}; then more", "{}\nnext line"]
)
def test_the_password_of_a_command_is_masked(command: str, around: str) -> None:
    shown = redacted(around.format(command.format(*[SECRET] * 2)))
    assert "hunter2" not in shown and "and-more" not in shown and "***" in shown
    before, after = around.split("{}")
    assert shown.startswith(before) and shown.endswith(after[3:])


@pytest.mark.parametrize("printer", PRINTERS)
@pytest.mark.parametrize("name", NAMES_OF_PRINTERS)
def test_a_password_that_a_named_command_prints_is_masked(name: str, printer: str) -> None:
    shown = redacted(f"ran: {name.format(printer.format(SECRET))}; then more")
    assert "hunter2" not in shown and "and-more" not in shown and "***" in shown
    assert shown.startswith("ran: ") and shown.endswith("; then more")


@pytest.mark.parametrize("text", ORDINARY)
def test_what_is_no_password_stays(text: str) -> None:
    assert redacted(text) == text
