"""A server that answers as the Hugging Face hub does for one data set of a few small files."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler

from scripted_server import serving

NAME = "owner/name"


@dataclass
class HubStandIn:
    """The data set ``owner/name``: its files by commit, what its revisions are, and the paths that
    were asked for.
    """

    commits: Mapping[str, Mapping[str, bytes]]
    revisions: Mapping[str, str]
    asked: list[str] = field(default_factory=list)
    address: str = ""

    def commit(self, revision: str) -> str | None:
        """Return the commit that a revision is."""
        return revision if revision in self.commits else self.revisions.get(revision)


def _entry(path: str, content: bytes) -> dict[str, object]:
    return {
        "type": "file",
        "path": path,
        "size": len(content),
        "oid": hashlib.sha1(content).hexdigest(),
    }


def _handler(hub: HubStandIn) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def reply(self, status: int, content: bytes = b"", **headers: str) -> None:
            self.send_response(status)
            headers = {
                "Content-Length": str(len(content)),
                **{k.replace("_", "-"): v for k, v in headers.items()},
            }
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content)

        def json(self, value: object, commit: str) -> None:
            self.reply(
                200,
                json.dumps(value).encode(),
                Content_Type="application/json",
                X_Repo_Commit=commit,
            )

        def do_GET(self) -> None:
            path = self.path.partition("?")[0].replace("%2F", "/")
            hub.asked.append(f"{self.command} {path}")
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            file = re.fullmatch(rf"/datasets/{NAME}/resolve/([^/]+)/(.+)", path)
            about = re.fullmatch(
                rf"/api/datasets/{NAME}(?:/(revision|tree|paths-info)/([^/]+)(?:/(.*))?)?", path
            )
            if file is None and about is None:
                return self.reply(404 if path.startswith(("/api", "/datasets")) else 200)
            revision = (file[1] if file else about[2] if about else None) or "main"
            commit = hub.commit(revision)
            if commit is None:
                return self.reply(404, X_Error_Code="RevisionNotFound")
            files = hub.commits[commit]
            if file is not None:
                return self.file(files, file[2], commit)
            assert about is not None
            entries = [_entry(name, content) for name, content in files.items()]
            if about[1] == "tree":
                return self.json(entries, commit)
            if about[1] == "paths-info":
                wanted = json.loads(body)["paths"]
                return self.json([entry for entry in entries if entry["path"] in wanted], commit)
            siblings = [{"rfilename": name} for name in files]
            return self.json(
                {"_id": "1", "id": NAME, "sha": commit, "siblings": siblings, "tags": []}, commit
            )

        do_HEAD = do_POST = do_GET

        def file(self, files: Mapping[str, bytes], name: str, commit: str) -> None:
            if name not in files:
                return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=commit)
            content, status = files[name], 200
            tag = hashlib.sha1(content).hexdigest()
            span = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range") or "")
            extra = {}
            if span:
                last = min(int(span[2] or len(content)), len(content) - 1)
                extra = {"Content_Range": f"bytes {span[1]}-{last}/{len(content)}"}
                content, status = content[int(span[1]) : last + 1], 206
            self.reply(
                status,
                content,
                ETag=f'"{tag}"',
                X_Repo_Commit=commit,
                Accept_Ranges="bytes",
                **extra,
            )

    return Handler


@contextmanager
def hub_stand_in(
    commits: Mapping[str, Mapping[str, bytes]], revisions: Mapping[str, str]
) -> Iterator[HubStandIn]:
    """Serve a data set until the block ends."""
    hub = HubStandIn(commits, revisions)
    with serving(_handler(hub)) as hub.address:
        yield hub
